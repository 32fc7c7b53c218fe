"""Replaces layers in a module: every BatchNorm by a SyncBatchNorm, and back; every LayerNorm and RMSNorm by a fused one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from fabricamp.errors import ConfigError
from fabricamp.nn.norms import FusedLayerNorm, FusedRMSNorm
from fabricamp.nn.sync_batch_norm import SyncBatchNorm
from fabricamp.ops.peer_memory import timeout_of
from fabricamp.torch_private import AnyBatchNorm

Module = TypeVar("Module", bound=nn.Module)

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes of a module to move besides its tensors; the dicts themselves are moved, so the hooks' handles still remove them."""
_ORIGINAL = "_batch_norm_before"
_FORWARDS = (AnyBatchNorm.forward, nn.SyncBatchNorm.forward)
"""The forwards that SyncBatchNorm replaces exactly; with any other, a subclass's own activations and casts would be lost."""

_FUSED: Final[dict[type[nn.Module], type[nn.Module]]] = {nn.LayerNorm: FusedLayerNorm, nn.RMSNorm: FusedRMSNorm}


def convert_syncbn_model(
    module: Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> Module:
    """Returns ``module`` with every BatchNorm in it (or itself) replaced by :class:`SyncBatchNorm` over ``process_group``.

    Parameters and buffers stay the same objects, so optimizers that hold them stay valid.  ``requires_grad``, dtype, device,
    ``training``, hooks and other attributes of a layer are kept.  Layers that already are SyncBatchNorm are left alone.
    Subclasses with their own ``forward`` raise :class:`ConfigError`, because that ``forward`` would be lost.
    :func:`revert_syncbn_model` undoes the conversion.  ``channel_last``: the last dimension of the inputs is the channels; memory
    formats need no option.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"convert_syncbn_model takes one module, not a {type(module).__name__}; call it for each")

    def convert(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, AnyBatchNorm) or isinstance(layer, SyncBatchNorm):
            return layer
        return _as_synchronised(layer, process_group, channel_last=channel_last)

    return cast("Module", _replaced(module, convert, {}))


def revert_syncbn_model(module: Module, layers: Collection[nn.Module] | None = None) -> Module:
    """Returns ``module`` with every :class:`SyncBatchNorm` in it (or itself) replaced by the BatchNorm that it was made from.

    If ``layers`` is given, only these are replaced.  A layer that was created as SyncBatchNorm becomes a BatchNorm for inputs of
    any dimension.  A layer with ``fuse_relu`` or ``channel_last`` has no equal BatchNorm and raises :class:`ConfigError`.
    """

    def revert(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, SyncBatchNorm):
            return layer
        chosen = layers is None or any(layer is one for one in layers)
        return _reverted(layer) if chosen else layer

    return cast("Module", _replaced(module, revert, {}))


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Returns this rank's group among groups of ``group_size`` neighbouring ranks; None (all ranks) for 0.

    A collective: every rank calls it with the same size.  The groups have the default group's timeout.
    """
    if group_size == 0:
        return None
    ranks = dist.get_world_size()
    if group_size < 0 or ranks % group_size:
        fitting = [size for size in range(1, ranks + 1) if ranks % size == 0]
        raise ConfigError(
            f"group_size={group_size} does not divide the {ranks} ranks; it can be {', '.join(map(str, fitting))}, or 0 for all"
        )
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    # Not torch's own timeout, which may be shorter.
    timeout = timeout_of(world, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    members = [list(range(first, first + group_size)) for first in range(0, ranks, group_size)]
    groups = [dist.new_group(group_ranks, timeout=timeout) for group_ranks in members]
    return cast("dist.ProcessGroup", groups[dist.get_rank() // group_size])


def fuse(module: Module) -> Module:
    """Makes every LayerNorm and RMSNorm in ``module``, or ``module`` itself, a fused one, and returns ``module``.

    The modules stay the same objects, with their parameters, state dict, hooks, dtype, device and mode.  Subclasses of torch's
    norms are left alone, because they may have their own ``forward``.  Under autocast a fused norm returns autocast's dtype,
    torch's returns fp32.

    >>> [type(layer).__name__ for layer in fuse(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))]
    ['Linear', 'FusedLayerNorm']
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"fuse() takes a module, not {module!r}; of several modules, call it for each")
    for layer in module.modules():
        fused = _FUSED.get(type(layer))
        if fused is not None:
            layer.__class__ = fused
    return module


class _UncheckedBatchNorm(AnyBatchNorm):
    """The BatchNorm that replaces a SyncBatchNorm that was not converted from another layer."""

    def _check_input_dim(self, _input: object) -> None:
        """Accepts any number of dimensions."""


def _replaced(module: nn.Module, replace: Callable[[nn.Module], nn.Module], done: dict[int, nn.Module]) -> nn.Module:
    """Replaces ``module`` and all its submodules; a layer that is used in several places stays one shared layer."""
    if id(module) in done:
        return done[id(module)]
    new = replace(module)
    done[id(module)] = new
    done[id(new)] = new
    if new is not module:
        return new
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        replaced = _replaced(child, replace, done)
        if replaced is not child:
            module._modules[name] = replaced
    return new


def _as_synchronised(layer: AnyBatchNorm, group: dist.ProcessGroup | None, *, channel_last: bool) -> SyncBatchNorm:
    _check_convertible(layer)
    if group is None and isinstance(layer, nn.SyncBatchNorm):
        group = layer.process_group
    new = SyncBatchNorm(
        layer.num_features,
        layer.eps,
        layer.momentum,
        affine=False,
        track_running_stats=False,
        process_group=group,
        channel_last=channel_last,
    )
    _move(layer, new)
    for name, value in vars(layer).items():  # other attributes that the user has set on the layer
        if not (name.startswith("_") or hasattr(new, name)):
            setattr(new, name, value)
    # Not as a submodule: the original layer must not be part of the model.
    object.__setattr__(new, _ORIGINAL, layer)
    return new


def _check_convertible(layer: AnyBatchNorm) -> None:
    """Raises :class:`ConfigError` if a SyncBatchNorm in the layer's place would silently compute something else."""
    kind = type(layer).__name__
    if any(is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers())):
        raise ConfigError(
            f"{kind} has no number of channels yet; run one batch through the module before the conversion"
        )
    if "forward" in vars(layer) or type(layer).forward not in _FORWARDS:
        raise ConfigError(
            f"{kind} overrides forward, and a SyncBatchNorm in its place would not run it; move its other work into a separate "
            "module after a plain BatchNorm, or replace it by a subclass of fabricamp.nn.SyncBatchNorm"
        )
    if layer._modules:
        raise ConfigError(
            f"{kind} has submodules ({', '.join(layer._modules)}), which a SyncBatchNorm in its place would not have; take "
            "them out before the conversion (parametrizations: torch.nn.utils.parametrize.remove_parametrizations)"
        )


def _reverted(layer: SyncBatchNorm) -> AnyBatchNorm:
    if layer.fuse_relu or layer.channel_last:
        raise ConfigError(
            "a SyncBatchNorm with fuse_relu or channel_last has no BatchNorm that does the same; replace it by hand"
        )
    original = getattr(layer, _ORIGINAL, None)
    if original is None:
        original = _UncheckedBatchNorm(
            layer.num_features, layer.eps, layer.momentum, affine=False, track_running_stats=False
        )
    _move(layer, original)
    return cast("AnyBatchNorm", original)


def _move(source: AnyBatchNorm, target: AnyBatchNorm) -> None:
    """Moves the tensors, options and hooks of ``source`` to ``target``, as the same objects."""
    target._parameters = source._parameters
    target._buffers = source._buffers
    for name in ("eps", "momentum", "affine", "track_running_stats", "training"):
        setattr(target, name, getattr(source, name))
    for name in _HOOKS:
        setattr(target, name, getattr(source, name))
