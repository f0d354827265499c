"""Check that PyTorch's compiler works on a device before a run depends on it (``run.compile``)."""

import torch


def check_compiler(device: str) -> None:
    """Compilation of a small function, called once."""
    doubled = torch.compile(lambda x: 2 * x)
    try:
        doubled(torch.ones(2, device=device))
    except Exception as error:  # whatever a compiler meets
        text = " ".join(str(error).split())[:200]
        raise ValueError(
            f"run.compile = true needs a compiler that works on {device!r}; set it to false: {type(error).__name__}: "
            f"{text}"
        ) from error
