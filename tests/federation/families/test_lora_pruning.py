"""The tail of LoRA's factors, and its gradient; the training is tested with the presets of fedlora."""

import numpy as np
import pytest
import torch

from confed.federation.families.lora import tail_product


def test_the_tail_is_a_product_of_norms() -> None:
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(3, 5, generator=rng, dtype=torch.float64, requires_grad=True)
    b = torch.randn(6, 3, generator=rng, dtype=torch.float64)
    found = tail_product(a, b, 1)
    assert float(found.detach()) == pytest.approx(
        float(np.linalg.norm(b[:, 1:].numpy()) * np.linalg.norm(a[1:].detach().numpy()))
    )
    found.backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None
    assert not a.grad[0].any()
    assert a.grad[1:].any()
    zero = torch.zeros(6, 3, dtype=torch.float64, requires_grad=True)
    tail_product(a, zero, 1).backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(zero.grad).all()  # type: ignore[arg-type]
    assert float(tail_product(a, b, 3).detach()) == 0
