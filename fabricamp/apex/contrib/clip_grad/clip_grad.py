"""``clip_grad_norm_`` where apex had it."""

from fabricamp.ops import clip_grad_norm_ as clip_grad_norm_
