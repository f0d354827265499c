"""Kernels of PyTorch's attention on a GPU: those that repeat to the bit, or the fastest."""

import torch

__all__ = ["choose_attention"]


def choose_attention(*, exact: bool) -> None:
    """Choice among the kernels of ``scaled_dot_product_attention`` on GPUs, for this process.

    The backward passes of the flash, memory-efficient and cuDNN kernels add up in no fixed order, so that numbers
    differ from run to run; the kernel of plain matrix products does not. On a processor there is one kernel, which
    repeats.

    Args:
        exact: only the one that repeats.
    """
    torch.backends.cuda.enable_math_sdp(True)
    torch.backends.cuda.enable_flash_sdp(not exact)
    torch.backends.cuda.enable_mem_efficient_sdp(not exact)
    torch.backends.cuda.enable_cudnn_sdp(not exact)
