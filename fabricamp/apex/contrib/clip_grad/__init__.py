"""Gradient clipping by norm in two passes over memory."""

from fabricamp.apex.contrib.clip_grad.clip_grad import clip_grad_norm_ as clip_grad_norm_
