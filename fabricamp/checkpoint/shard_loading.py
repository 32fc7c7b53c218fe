"""Loads tensors of a checkpoint, full or sharded in another way, as this rank's local shards.

Apart from ``shards.py``, because every run imports this module and only sharded runs need torch's distributed checkpoint, whose
import takes a second.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabricamp.checkpoint import storage
from fabricamp.ops.shards import any_shard, is_shard
from fabricamp.optimizers.refusals import owned_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabricamp._utils.types import OptimizerFace, StateDict


class ShardLoader:
    """Collects tensors of ``checkpoint``, as read from ``path``, and reads those that are still on disk together."""

    def __init__(self, checkpoint: StateDict, path: str) -> None:
        self._checkpoint = checkpoint
        self._path = path
        self._to_read: dict[str, Tensor] = {}

    def shard(self, name: str, saved: Any, like: Any) -> Any:
        """Returns ``saved``, whose name on disk is ``name``, sharded like ``like``; :meth:`read` may have to fill in its values."""
        if not isinstance(saved, Tensor) or is_shard(saved):
            return saved
        sharded = is_shard(like) and saved.shape == like.shape
        if saved.is_meta:
            if sharded:
                target = torch.empty_like(like.detach(), dtype=saved.dtype)
            else:
                target = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
            self._to_read[name] = target
            return target
        if not sharded:
            return saved
        from torch.distributed.tensor import distribute_tensor

        # No communication: each rank has read the full tensor and keeps its own shard.
        shard = distribute_tensor(saved.detach(), like.device_mesh, like.placements, src_data_rank=None)
        return shard.to(like.device)  # with CPU offload local shards are in host memory

    def read(self) -> None:
        """Reads the values of the tensors that :meth:`shard` returned; uses no collective."""
        if self._to_read:
            from fabricamp.checkpoint.folder import read_into

            read_into(storage.normalized(self._path), self._checkpoint, self._to_read)


def sharded_weights(checkpoint: StateDict, path: str, own: Mapping[str, Any]) -> StateDict:
    """Returns ``checkpoint`` with its weights sharded like the module's ``own``; unchanged if none of ``own`` is sharded.

    Tensors that callbacks keep under weights' names (averages) are sharded the same way.
    """
    if not any_shard(own.values()):
        return checkpoint
    loader = ShardLoader(checkpoint, path)

    def sharded(value: object, prefix: str) -> Any:
        if not isinstance(value, dict):
            return value
        result = copy.copy(value)  # keeps the attributes that torch sets on a state dict
        for key, item in value.items():
            name = f"{prefix}/{key}"
            result[key] = loader.shard(name, item, own.get(key)) if isinstance(item, Tensor) else sharded(item, name)
        return result

    result = checkpoint.copy()
    for key in result.keys() & {"state_dict", "current_model_state", "callbacks"}:
        result[key] = sharded(checkpoint[key], key)
    loader.read()
    return result


def sharded_states(
    checkpoint: StateDict, path: str, optimizers: Sequence[OptimizerFace], states: Sequence[StateDict]
) -> list[StateDict]:
    """Returns the optimizers' ``states`` with the tensors of a sharded parameter sharded like that parameter."""
    loader = ShardLoader(checkpoint, path)
    result: list[StateDict] = []
    for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        parameters = owned_parameters(optimizer)
        indices = [index for group in state["param_groups"] for index in group["params"]]
        # A different number of parameters is left to load_state_dict, which raises.
        if not any_shard(parameters) or len(indices) != len(parameters):
            result.append(state)
            continue
        by_index = dict(zip(indices, parameters, strict=True))
        entries = {
            index: {
                name: loader.shard(f"optimizer_states/{number}/state/{index}/{name}", value, by_index.get(index))
                for name, value in entry.items()
            }
            for index, entry in state["state"].items()
        }
        result.append({**state, "state": entries})
    loader.read()
    return result


def sharded_gradients(checkpoint: StateDict, path: str, own: Mapping[str, Tensor]) -> StateDict:
    """Returns the gradients of a checkpoint's accumulation in progress, sharded like the parameters."""
    loader = ShardLoader(checkpoint, path)
    saved: StateDict = checkpoint["loops"]["fit"]["accumulation"]["gradients"]
    gradients = {
        name: loader.shard(f"loops/fit/accumulation/gradients/{name}", value, own.get(name))
        for name, value in saved.items()
    }
    loader.read()
    return gradients


def full_gradient(checkpoint: StateDict, path: str, name: str, saved: Tensor) -> Tensor:
    """Returns the gradient ``saved`` of a checkpoint's accumulation in progress; if it is still on disk, reads the full tensor."""
    if not saved.is_meta:
        return saved
    from fabricamp.checkpoint.folder import read_into

    gradient = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
    read_into(storage.normalized(path), checkpoint, {f"loops/fit/accumulation/gradients/{name}": gradient})
    return gradient
