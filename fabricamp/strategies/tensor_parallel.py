"""Tensor parallelism with a sharding strategy: the user's ``parallelize(module, mesh)`` over neighbouring ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.arguments.checks import check_number
from fabricamp.errors import ConfigError
from fabricamp.nn.losses import FusedLinearCrossEntropy
from fabricamp.ops.shards import any_shard, is_shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

TENSOR: str = "tp"
"""The name of the mesh dimension over which layers are split, as in torch's examples."""
_PLAIN_TYPES = (bool, int, float, str, tuple, type(None))


def checked_tensor_parallel(parallelize: object, tensor_parallel: object) -> int:
    """Returns the number of ranks that layers are split over; raises :class:`ConfigError` for wrong options."""
    number = check_number("tensor_parallel", tensor_parallel, owner="FSDP", least=1)
    if parallelize is not None and not callable(parallelize):
        raise ConfigError(f"FSDP(parallelize={parallelize!r:.200}) has to be a function of the module and a mesh")
    if (parallelize is None) != (number == 1):
        raise ConfigError(
            f"FSDP(parallelize={'None' if parallelize is None else '...'}, tensor_parallel={number}): give both, the function that "
            "splits layers and over how many ranks, or neither"
        )
    return number


def split_layers(
    module: nn.Module, mesh: DeviceMesh, parallelize: Callable[[nn.Module, DeviceMesh], object]
) -> Callable[[], None]:
    """Splits layers of ``module`` over ``mesh`` by ``parallelize``; returns a function that restores changed attributes.

    The attributes are plain values, such as a number of heads.  Raises :class:`ConfigError` if nothing was split, if shards have
    different sizes, and for a split head that computes its loss.
    """
    before = {submodule: _plain_values(submodule) for submodule in module.modules()}
    parallelize(module, mesh)
    if not any_shard(module.parameters()):
        raise ConfigError(
            f"FSDP(parallelize=...) has split no parameter of {type(module).__name__}; call torch's parallelize_module(module.net, "
            'mesh, {"layer": ColwiseParallel()}) in it'
        )
    for name, parameter in module.named_parameters():
        _check_even(name, parameter, mesh)
    _check_heads(module)
    changed = [(submodule, old) for submodule, values in before.items() if (old := _changed(submodule, values))]

    def restore() -> None:
        for submodule, old in changed:
            vars(submodule).update(old)

    return restore


def _check_even(name: str, parameter: Any, mesh: DeviceMesh) -> None:
    for placement in parameter.placements if is_shard(parameter) else ():
        if placement.is_shard() and parameter.shape[placement.dim] % mesh.size():
            raise ConfigError(
                f"FSDP(parallelize=...) splits {name} {tuple(parameter.shape)} along dimension {placement.dim} over {mesh.size()} "
                "ranks, which leaves them parts of different sizes; give the layer a multiple, or leave it out of the plan"
            )


def _check_heads(module: nn.Module) -> None:
    for name, head in module.named_modules():
        if isinstance(head, FusedLinearCrossEntropy) and any_shard(head.parameters()):
            raise ConfigError(
                f"FSDP(parallelize=...) splits {name}, a FusedLinearCrossEntropy, and a vocabulary-parallel head is not offered: "
                "leave it out of the plan, or give nn.Linear, whose logits are stored, and torch's loss_parallel"
            )


def _plain_values(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN_TYPES}


def _changed(module: nn.Module, before: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of ``before`` that are different in the module now."""
    return {name: value for name, value in before.items() if vars(module).get(name) != value}
