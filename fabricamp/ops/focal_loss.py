"""Focal loss of sigmoid logits: one pass over the logits forward, one backward."""

from __future__ import annotations

from typing import Final, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fabricamp.errors import ConfigError
from fabricamp.ops.bridge import Kernel, c_type, kernel, runs_kernels
from fabricamp.ops.context import Context

_LOGITS: Final = (torch.float32, torch.float16, torch.bfloat16)
_IGNORED: Final = -2
_THREADS: Final = 512
_MOST_BLOCKS: Final = 1024  # the same on every card: the order of the loss's summation must not depend on the card


def focal_loss(
    cls_output: Tensor,
    cls_targets_at_level: Tensor,
    num_positives_sum: Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Returns the fp32 sum (fp64 for fp64 logits) of all focal losses, divided by ``num_positives_sum`` (one fp32 element).

    ``cls_output`` are logits, with classes last; the classes from ``num_real_classes`` on are padding.  A target is the class of
    its anchor, -1 for no class, -2 for an ignored anchor.  The loss of a positive is weighted by ``alpha * (1 - p)**gamma``, any
    other loss by ``(1 - alpha) * p**gamma``.  A second derivative is computed by torch's operations.

    >>> focal_loss(torch.zeros(1, 4), torch.tensor([2]), torch.ones(1), 4, alpha=0.25, gamma=2.0)
    tensor(0.4332)
    """
    _check(cls_output, cls_targets_at_level, num_positives_sum, num_real_classes)
    arguments = (cls_output, cls_targets_at_level, num_positives_sum, num_real_classes, alpha, gamma, label_smoothing)
    plain = type(cls_output) is Tensor and cls_output.dtype in _LOGITS
    if torch.compiler.is_compiling() or not plain or not runs_kernels(cls_output.device):
        return focal_loss_reference(*arguments)
    return cast("Tensor", _FocalLoss.apply(*arguments))  # type: ignore[no-untyped-call]


def focal_loss_reference(
    cls_output: Tensor,
    cls_targets_at_level: Tensor,
    num_positives_sum: Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Computes :func:`focal_loss` in torch's own operations."""
    logits = cls_output[..., :num_real_classes]
    if logits.dtype != torch.float64:
        logits = logits.float()
    targets = cls_targets_at_level.unsqueeze(-1)
    positive = targets == torch.arange(num_real_classes, dtype=torch.int64, device=logits.device)
    aim = torch.where(positive, 1 - label_smoothing / 2, torch.full_like(logits, label_smoothing / 2))
    weight = torch.where(positive, alpha * (-logits).sigmoid() ** gamma, (1 - alpha) * logits.sigmoid() ** gamma)
    losses = weight * ((1 - aim) * logits - F.logsigmoid(logits))
    return losses.masked_fill(targets == _IGNORED, 0).sum() / num_positives_sum.reshape(())


def _check(logits: Tensor, targets: Tensor, positives: Tensor, classes: int) -> None:
    if logits.dim() == 0 or logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"logits of shape {tuple(logits.shape)} and targets of shape {tuple(targets.shape)}: classes are the last "
            "dimension of the logits, and the targets' shape is that of the others"
        )
    if not 0 < classes <= logits.shape[-1]:
        raise ConfigError(
            f"num_real_classes={classes} of logits for {logits.shape[-1]} classes: give 1 to {logits.shape[-1]}"
        )
    if targets.dtype != torch.int64:
        raise ConfigError(f"targets of {targets.dtype}: give class indices of int64")
    if positives.numel() != 1 or positives.dtype != torch.float32:
        raise ConfigError(
            f"num_positives_sum of shape {tuple(positives.shape)} and {positives.dtype}: give a tensor of one fp32 element"
        )


_Numbers: TypeAlias = tuple[int, float, float, float]
"""The number of classes, alpha, gamma and the label smoothing, as :func:`focal_loss_reference` takes them."""


class _Context(Context, Protocol):
    numbers: _Numbers

    @property
    def saved_tensors(self) -> tuple[Tensor, Tensor, Tensor]: ...


class _FocalLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        logits: Tensor,
        targets: Tensor,
        positives: Tensor,
        classes: int,
        alpha: float,
        gamma: float,
        smoothing: float,
    ) -> Tensor:
        logits = logits.contiguous()
        targets = targets.contiguous()
        ctx.save_for_backward(logits, targets, positives)
        ctx.numbers = (classes, alpha, gamma, smoothing)
        blocks = _blocks(targets.numel())
        partials = torch.empty(blocks, dtype=torch.float64, device=logits.device)
        loss = torch.empty((), dtype=torch.float32, device=logits.device)
        run = _kernel("focal_loss_forward", logits)
        run(blocks, _THREADS, logits, targets, partials, *_sizes(logits, ctx.numbers))
        total = _kernel("focal_loss_total", logits)
        total(1, _THREADS, partials, positives, loss, blocks)
        return loss

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, positives = ctx.saved_tensors
        (gradient,) = gradients
        nothing = (None,) * (2 + len(ctx.numbers))
        if torch.is_grad_enabled():  # create_graph: in operations that torch can differentiate again
            loss = focal_loss_reference(logits, targets, positives, *ctx.numbers)
            return *torch.autograd.grad(loss, logits, gradient, create_graph=True), *nothing
        output = torch.empty_like(logits)
        run = _kernel("focal_loss_backward", logits)
        pointers = (gradient, positives, logits, targets, output)
        run(_blocks(targets.numel()), _THREADS, *pointers, *_sizes(logits, ctx.numbers))
        return output, *nothing


def _kernel(function: str, logits: Tensor) -> Kernel:
    return kernel("focal_loss", function, (), logits.device, (("LOGIT", c_type(logits.dtype)),))


def _blocks(rows: int) -> int:
    return min(_MOST_BLOCKS, -(-rows * 32 // _THREADS))


def _sizes(logits: Tensor, numbers: _Numbers) -> tuple[float, ...]:
    classes = logits.shape[-1]
    real_classes, *factors = numbers
    return logits.numel() // classes, classes, int(real_classes), *map(float, factors)
