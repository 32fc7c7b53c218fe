"""``xentropy_cuda``: separate forward and backward passes of the cross-entropy; no label is ignored here."""

from __future__ import annotations

import torch
from torch import Tensor

from fabricamp.ops import fused_cross_entropy

_NO_LABEL = -(2**31)


@torch.no_grad()
def forward(logits: Tensor, labels: Tensor, smoothing: float, half_to_float: bool) -> tuple[Tensor, Tensor]:
    """Returns each row's loss and log-sum-exp, in fp32 with ``half_to_float``, else in the logits' dtype."""
    losses = fused_cross_entropy(logits, labels, label_smoothing=smoothing, ignore_index=_NO_LABEL, reduction="none")
    totals = torch.logsumexp(logits.float(), dim=-1)
    if half_to_float:
        return losses, totals
    return losses.to(logits.dtype), totals.to(logits.dtype)


@torch.no_grad()
def backward(grad_loss: Tensor, logits: Tensor, max_log_sum_exp: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Returns the gradient of the logits, in their dtype."""
    classes = logits.shape[-1]
    result = (logits.float() - max_log_sum_exp.float().unsqueeze(-1)).exp_().sub_(smoothing / classes)
    places = labels.long().unsqueeze(-1)
    result.scatter_add_(-1, places, result.new_full(places.shape, smoothing - 1.0))
    return result.mul_(grad_loss.float().unsqueeze(-1)).to(logits.dtype)
