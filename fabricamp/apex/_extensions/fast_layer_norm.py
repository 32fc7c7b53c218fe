"""``fast_layer_norm``: separate passes of LayerNorm over the last dimension; :mod:`fabricamp.ops` needs fewer passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.apex._extensions import fused_layer_norm_cuda

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST_GAMMA = 1e-5


def ln_fwd(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output (in the dtype of ``x``), mean and inverse deviation (fp32, one per row)."""
    return fused_layer_norm_cuda.forward_affine(x, gamma.shape, gamma, beta, epsilon)


def ln_bwd(
    dz: Tensor,
    x_or_z: Tensor,
    mu: Tensor | None,
    rsigma: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of input, gamma and beta, and those of gamma and beta again as fp32 sums of one row, as in apex.

    With ``memory_efficient`` pass the output instead of the input, and ``beta``.
    """
    bias = gamma.new_zeros(gamma.shape) if beta is None else beta
    of_input, of_gamma, of_beta = fused_layer_norm_cuda.backward_affine(
        dz, mu, rsigma, x_or_z, gamma.shape, gamma, bias, _SMALLEST_GAMMA, memory_efficient
    )
    return of_input, of_gamma, of_beta, of_gamma.float()[None], of_beta.float()[None]
