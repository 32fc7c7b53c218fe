"""Collectives of background threads, one per rank, in a process group separate from training's."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch.distributed as dist

from fabricamp.strategies.base import Strategy

Value = TypeVar("Value")


class SideProcessGroup(Strategy):
    """Collectives over Gloo between background threads, one per rank; every rank has to create it at the same place."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.environment = strategy.environment
        self.group: Any = dist.new_group(backend="gloo", timeout=strategy.timeout)

    def broadcast(self, value: Value, src: int = 0) -> Value:
        """Returns rank ``src``'s ``value`` (anything that pickles) on every rank."""
        box: list[Any] = [value if self.rank == src else None]
        dist.broadcast_object_list(box, src=src, group=self.group)
        return cast("Value", box[0])

    def all_gather_object(self, value: Value) -> list[Value]:
        """Returns ``value`` (anything that pickles) of every rank, in rank order."""
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def leave(self) -> None:
        """Destroys the group."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
