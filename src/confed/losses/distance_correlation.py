r"""Distance correlation: how much two sets of vectors depend on each other, linearly or not.

Székely, Rizzo and Bakirov, "Measuring and testing dependence by correlation of distances", Annals of Statistics 2007,
definitions 4 to 6; as a penalty on what crosses the cut: Vepakomma et al., "NoPeek: information leakage reduction to
share activations in distributed deep learning", 2020.

Notation: rows x_1 ... x_B and z_1 ... z_B; a_ij = ||x_i - x_j||, and A_ij = a_ij - mean_j a_ij - mean_i a_ij + mean a
(double centring), likewise b and B for z. Then

    dCov^2(x, z) = 1/B^2 sum_ij A_ij B_ij,    dCor^2 = dCov^2(x, z) / sqrt(dCov^2(x, x) dCov^2(z, z)),

and dCor lies in [0, 1]: 1 for z a scaled and turned copy of x, 0 in the limit of many rows for independent x and z.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor


def distance_correlation(x: Shaped[Tensor, "B ..."], z: Shaped[Tensor, "B ..."]) -> Float[Tensor, ""]:
    """Distance correlation dCor of the rows of two tensors; its gradient leads to less dependence.

    For a few rows of many dimensions the value is far above 0 even where nothing depends on anything (Székely and
    Rizzo, 2013): compare it with the value after a permutation of the rows of one side, not with 0. Where one side
    does not vary, the value is 0 and has no gradient.

    Args:
        x: (B, ...), for instance inputs. Flattened; computed in float32 at least.
        z: (B, ...), for instance the activations that are sent.

    Raises:
        ValueError: fewer than two rows, or not as many in ``x`` as in ``z``.
    """
    if len(x) != len(z) or len(x) < 2:
        raise ValueError(f"distance correlation needs at least two rows, as many of x as of z, got {len(x)}, {len(z)}")
    device = x.device.type
    with torch.autocast(device, enabled=False):
        a, b = _centred(x), _centred(z.to(x.device))
        both, own_x, own_z = (a * b).mean(), a.square().mean(), b.square().mean()
        if not (own_x > 0 and own_z > 0):
            return (both * 0.0).to(both.dtype)
        # Rounding can make the covariance of independent rows a little negative; the root has no slope at 0.
        squared = both / (own_x.sqrt() * own_z.sqrt())
        return squared.clamp(min=torch.finfo(squared.dtype).eps).sqrt()


def _centred(rows: Tensor) -> Tensor:
    """Doubly centred distances, (B, B)."""
    flat = rows.flatten(1) if rows.ndim > 1 else rows[:, None]
    flat = flat if flat.dtype == torch.float64 else flat.float()
    # The product form of the distance loses small distances to cancellation.
    d = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    return d - d.mean(0, keepdim=True) - d.mean(1, keepdim=True) + d.mean()
