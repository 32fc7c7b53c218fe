"""Losses as modules."""

from __future__ import annotations

from torch import Tensor, nn

from fabricamp.ops.cross_entropy import CrossEntropyRule, check_rule, fused_cross_entropy


class SoftmaxCrossEntropyLoss(nn.Module):
    """Cross-entropy of logits (any shape, classes last) and class indices; allocates only the memory of the logits' gradient.

    The loss is fp32 also for half logits, without an fp32 copy of the logits.  ``in_place=True`` lets backward overwrite the
    logits with their gradient.  See :func:`fabricamp.ops.fused_cross_entropy`.

    >>> loss = SoftmaxCrossEntropyLoss(label_smoothing=0.1)
    >>> loss(torch.zeros(3, 5), torch.tensor([0, 4, -100]))
    tensor(1.6094)
    """

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        z_loss: float = 0.0,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.z_loss = z_loss
        self.in_place = in_place
        check_rule(CrossEntropyRule(label_smoothing, ignore_index, reduction, z_loss))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Returns the loss: 0-dim, or with the targets' shape for ``reduction="none"``."""
        return fused_cross_entropy(
            logits,
            target,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            z_loss=self.z_loss,
            in_place=self.in_place,
        )

    def extra_repr(self) -> str:
        """Returns the options of the loss."""
        return (
            f"label_smoothing={self.label_smoothing}, ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"z_loss={self.z_loss}, in_place={self.in_place}"
        )
