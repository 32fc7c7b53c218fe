"""Cross-entropy of logits in one pass, with label smoothing."""

from __future__ import annotations

from fabricamp.apex.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = ["SoftmaxCrossEntropyLoss"]
