"""apex's cross-entropy, called like an autograd function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.ops import fused_cross_entropy

if TYPE_CHECKING:
    from torch import Tensor


class SoftmaxCrossEntropyLoss:
    """``SoftmaxCrossEntropyLoss.apply(logits, labels)`` returns one loss per row.

    >>> import torch
    >>> SoftmaxCrossEntropyLoss.apply(torch.zeros(2, 4), torch.tensor([3, 0]))
    tensor([1.3863, 0.0000])
    """

    @staticmethod
    def apply(
        logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
    ) -> Tensor:
        """Returns the losses (N) of ``logits`` (N, classes) and ``labels`` (N); 0 for the label ``padding_idx``.

        The losses are computed in fp32, and returned in fp32 with ``half_to_float``, else in the logits' dtype.
        """
        losses = fused_cross_entropy(
            logits, labels, label_smoothing=smoothing, ignore_index=padding_idx, reduction="none"
        )
        return losses if half_to_float else losses.to(logits.dtype)

    def __call__(
        self, logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
    ) -> Tensor:
        """Returns the result of :meth:`apply`."""
        return self.apply(logits, labels, smoothing, padding_idx, half_to_float)
