"""Brings tensors of a checkpoint, full or sharded in another way, to this rank's local shards."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabricamp.checkpoint import places
from fabricamp.ops.shards import any_shard, is_shard
from fabricamp.optimizers.parameters import owned_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer


class ShardLoader:
    """Collects tensors of ``checkpoint``, as read from ``path``, and reads them together."""

    def __init__(self, checkpoint: dict[str, Any], path: str) -> None:
        self._checkpoint = checkpoint
        self._path = path
        self._targets: dict[str, Tensor] = {}

    def place(self, name: str, saved: Any, like: Any) -> Any:
        """Returns ``saved``, whose name on disk is ``name``, sharded like ``like``; :meth:`read` may have to fill in its values."""
        if not isinstance(saved, Tensor) or is_shard(saved):
            return saved
        sharded = is_shard(like) and saved.shape == like.shape
        if saved.is_meta:
            target = (
                torch.empty_like(like.detach(), dtype=saved.dtype)
                if sharded
                else torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
            )
            self._targets[name] = target
            return target
        if not sharded:
            return saved
        from torch.distributed.tensor import distribute_tensor

        # No communication: each rank has read the full tensor and keeps its own shard.
        placed = distribute_tensor(saved.detach(), like.device_mesh, like.placements, src_data_rank=None)
        return placed.to(like.device)  # with CPU offload local shards are in host memory

    def read(self) -> None:
        """Reads the values of the tensors that :meth:`place` returned; uses no collective."""
        if self._targets:
            from fabricamp.checkpoint.folder import fill

            fill(places.normal(self._path), self._checkpoint, self._targets)


def placed_weights(checkpoint: dict[str, Any], path: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``checkpoint`` with its weights sharded like the module's ``own``; unchanged if none of ``own`` is sharded.

    Tensors that callbacks keep under weights' names (averages) are sharded the same way.
    """
    if not any_shard(own.values()):
        return checkpoint
    placing = ShardLoader(checkpoint, path)

    def placed(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            return value
        result = copy.copy(value)  # keeps the attributes that torch sets on a state dict
        for key, item in value.items():
            name = f"{place}/{key}"
            result[key] = placing.place(name, item, own.get(key)) if isinstance(item, Tensor) else placed(item, name)
        return result

    found = checkpoint.copy()
    for key in found.keys() & {"state_dict", "current_model_state", "callbacks"}:
        found[key] = placed(checkpoint[key], key)
    placing.read()
    return found


def placed_states(
    checkpoint: dict[str, Any], path: str, optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the optimizers' ``states`` with the tensors of a sharded parameter sharded like that parameter."""
    placing, placed = ShardLoader(checkpoint, path), []
    for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        parameters = owned_parameters(optimizer)
        indices = [index for group in state["param_groups"] for index in group["params"]]
        if not any_shard(parameters) or len(indices) != len(parameters):
            placed.append(state)
            continue
        like = dict(zip(indices, parameters, strict=True))
        entries = {
            index: {
                name: placing.place(f"optimizer_states/{number}/state/{index}/{name}", value, like.get(index))
                for name, value in entry.items()
            }
            for index, entry in state["state"].items()
        }
        placed.append({**state, "state": entries})
    placing.read()
    return placed


def placed_gradients(checkpoint: dict[str, Any], path: str, own: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the gradients of a checkpoint's accumulation in progress, sharded like the parameters."""
    placing = ShardLoader(checkpoint, path)
    saved: dict[str, Any] = checkpoint["loops"]["fit"]["window"]["gradients"]
    placed = {
        name: placing.place(f"loops/fit/window/gradients/{name}", value, own.get(name)) for name, value in saved.items()
    }
    placing.read()
    return placed


def read_gradient(checkpoint: dict[str, Any], path: str, name: str, saved: Tensor) -> Tensor:
    """Returns the gradient ``saved`` of a checkpoint's accumulation in progress; if it is still on disk, reads the full tensor."""
    if not saved.is_meta:
        return saved
    from fabricamp.checkpoint.folder import fill

    found = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
    fill(places.normal(path), checkpoint, {f"loops/fit/window/gradients/{name}": found})
    return found
