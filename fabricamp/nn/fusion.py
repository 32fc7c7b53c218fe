"""Replaces torch's modules by fused ones."""

from __future__ import annotations

from typing import Final, TypeVar

from torch import nn

from fabricamp.errors import ConfigError
from fabricamp.nn.norms import FusedLayerNorm, FusedRMSNorm

M = TypeVar("M", bound=nn.Module)

_FUSED: Final[dict[type[nn.Module], type[nn.Module]]] = {nn.LayerNorm: FusedLayerNorm, nn.RMSNorm: FusedRMSNorm}


def fuse(module: M) -> M:
    """Makes every LayerNorm and RMSNorm in ``module``, or ``module`` itself, a fused one, and returns ``module``.

    The modules stay the same objects, with their parameters, state dict, hooks, dtype, device and mode.  Subclasses of torch's
    norms are left alone, because they may have their own ``forward``.  Under autocast a fused norm returns autocast's dtype,
    torch's returns fp32.

    >>> [type(one).__name__ for one in fuse(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))]
    ['Linear', 'FusedLayerNorm']
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"fuse() takes a module, not {module!r}; of several modules, call it for each")
    for one in module.modules():
        fused = _FUSED.get(type(one))
        if fused is not None:
            one.__class__ = fused
    return module
