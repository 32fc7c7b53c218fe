"""Gives modules on the meta device memory and first values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.lightning.packages.fabric.contexts import EmptyInit as _EmptyInit

if TYPE_CHECKING:
    from torch import nn

__all__ = ["_EmptyInit", "_materialize_meta_tensors"]


def _materialize_meta_tensors(module: nn.Module, device: Any) -> None:
    """Gives each part with tensors on the meta device memory on ``device``, and its first values by ``reset_parameters``."""
    part: Any
    for part in module.modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            part.to_empty(device=device, recurse=False)
            if not hasattr(part, "reset_parameters"):
                raise TypeError(
                    f"{type(part).__name__} has no reset_parameters, which gives its tensors their first values"
                )
            part.reset_parameters()
