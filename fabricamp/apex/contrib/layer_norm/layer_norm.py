"""``FastLayerNorm``: FusedLayerNorm over one dimension, of any width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.apex._norm_function import NormFunction
from fabricamp.nn import FusedLayerNorm
from fabricamp.ops import layer_norm

if TYPE_CHECKING:
    from torch import Tensor


def _normalise(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, memory_efficient: bool = False) -> Tensor:
    return layer_norm(x, gamma.shape, gamma, beta, epsilon, memory_efficient=memory_efficient)


class FastLayerNormFN(NormFunction):
    """The autograd function for LayerNorm of ``x`` over its last dimension, in the dtype of ``x``."""

    apply = staticmethod(_normalise)


class FastLayerNorm(FusedLayerNorm):
    """LayerNorm over the last dimension, of size ``hidden_size``.

    >>> import torch
    >>> FastLayerNorm(2, eps=0.0)(torch.tensor([[1.0, 3.0]]))
    tensor([[-1.,  1.]], grad_fn=...)
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps=eps, memory_efficient=memory_efficient)
        self.epsilon = eps
