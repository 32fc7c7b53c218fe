"""Losses as modules."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from fabricamp.errors import ConfigError
from fabricamp.ops.cross_entropy import CrossEntropyRule, check_rule, fused_cross_entropy
from fabricamp.ops.linear_cross_entropy import (
    check_accumulate,
    check_class_weight,
    check_whole,
    fused_linear_cross_entropy,
)


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
        softcap: float = 0.0,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.z_loss = z_loss
        self.softcap = softcap
        self.in_place = in_place
        check_rule(CrossEntropyRule(label_smoothing, ignore_index, reduction, z_loss, softcap))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Returns the loss: 0-dim, or with the targets' shape for ``reduction="none"``."""
        return fused_cross_entropy(
            logits,
            target,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            z_loss=self.z_loss,
            softcap=self.softcap,
            in_place=self.in_place,
        )

    def extra_repr(self) -> str:
        """Returns the options of the loss."""
        return (
            f"label_smoothing={self.label_smoothing}, ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"z_loss={self.z_loss}, softcap={self.softcap}, in_place={self.in_place}"
        )


class FusedLinearCrossEntropy(nn.Linear):
    """A linear head that returns the cross-entropy of its logits without storing them, if it is called with targets.

    ``head(hidden, target)`` returns the fp32 loss of hidden states (any leading shape, the width last) and class indices;
    ``head(hidden)`` returns logits, as ``nn.Linear`` does, whose arguments and parameters it has.  The loss is computed in its
    forward, so ``fsdp`` gathers the weight and ``O2`` and ``O5`` cast hidden states as for any layer.  ``class_weight`` is a buffer
    that checkpoints leave out.  ``options`` of a loss and errors: :func:`fabricamp.ops.fused_linear_cross_entropy`.

    >>> head = FusedLinearCrossEntropy(8, 100, bias=False)
    >>> head(torch.zeros(3, 8), torch.tensor([0, 99, -100]))
    tensor(4.6052, grad_fn=...)
    """

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        z_loss: float = 0.0,
        softcap: float = 0.0,
        class_weight: Tensor | None = None,
        accumulate: str = "weight",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.z_loss = z_loss
        self.softcap = softcap
        self.accumulate = accumulate
        check_rule(CrossEntropyRule(label_smoothing, ignore_index, reduction, z_loss, softcap))
        check_accumulate(accumulate)
        check_class_weight(class_weight, label_smoothing, out_features)
        # An option, as the others: checkpoints of the head have the keys of nn.Linear's.
        self.register_buffer("class_weight", class_weight, persistent=False)

    @classmethod
    def of(cls, head: nn.Linear, **options: Any) -> Self:
        """Returns a head with the parameters of ``head``, the same objects, so ties stay; raises ConfigError for a subclass.

        >>> model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(8, 100, bias=False)})
        >>> model["lm_head"] = FusedLinearCrossEntropy.of(model["lm_head"], z_loss=1e-4)
        """
        if type(head) is not nn.Linear:
            raise ConfigError(
                f"FusedLinearCrossEntropy.of takes an nn.Linear, and this is a {type(head).__name__}, whose own forward it would "
                "lose; call fused_linear_cross_entropy(hidden, head.weight, target) if the weight is all that it multiplies by"
            )
        made = cls(head.in_features, head.out_features, bias=False, device="meta", **options)
        made.weight = head.weight
        made.bias = head.bias
        return made.train(head.training)

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:  # noqa: A002 - nn.Linear's name
        """Returns the loss: 0-dim, or with the targets' shape for ``reduction="none"``; without ``target`` the logits."""
        check_whole("weight", self.weight)  # tensor parallelism hands on the first argument alone
        if target is None:
            return super().forward(input)
        return fused_linear_cross_entropy(
            input,
            self.weight,
            target,
            self.bias,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            z_loss=self.z_loss,
            softcap=self.softcap,
            class_weight=self.class_weight,
            accumulate=self.accumulate,
        )

    def extra_repr(self) -> str:
        """Returns the sizes of the layer and the options of the loss."""
        return (
            f"{super().extra_repr()}, label_smoothing={self.label_smoothing}, ignore_index={self.ignore_index}, "
            f"reduction={self.reduction!r}, z_loss={self.z_loss}, softcap={self.softcap}, "
            f"class_weight={'given' if self.class_weight is not None else None}, accumulate={self.accumulate!r}"
        )
