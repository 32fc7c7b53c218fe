"""``clip_grad_norm_`` where apex had it."""

from __future__ import annotations

from fabricamp.ops import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
