"""apex's path to ``clip_grad_norm_``."""

from fabricamp.ops import clip_grad_norm_ as clip_grad_norm_
