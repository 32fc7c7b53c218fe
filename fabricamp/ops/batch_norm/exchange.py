"""Exchange of a SyncBatchNorm layer's statistics between ranks: by peer memory inside a kernel, by a collective, or not at all."""

from __future__ import annotations

import itertools
import os
import weakref
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fabricamp.errors import ConfigError, NotCapturableError
from fabricamp.ops.peer_memory import Workspace, WorkspaceSlot, checked_exchange, obstacle_on, workspace_of

VARIABLE: Final = "FABRICAMP_SYNCBN_EXCHANGE"

_keys = itertools.count(1)
_by_key: weakref.WeakValueDictionary[int, BatchNormExchange] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False, slots=True)
class Route:
    """The chosen exchange of one layer on one device, and the reason for the choice."""

    kind: str
    reason: str
    rank: int = 0
    ranks: int = 1
    held: weakref.ref[dist.ProcessGroup] | None = None
    workspace: Workspace | None = None
    slot: WorkspaceSlot | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that exchange statistics.

        Held by a weak reference: a layer that outlives its run must not keep the default group and its threads alive.
        """
        return None if self.held is None else self.held()


class BatchNormExchange:
    """A layer's exchange with the other ranks of ``group`` (None: all ranks), chosen at the layer's first batch.

    ``choice``: "peer" or "collective"; None: the environment variable ``FABRICAMP_SYNCBN_EXCHANGE`` decides, else the faster one
    that works.  A layer's first batch is a collective: all ranks must reach their layers in the same order.
    """

    def __init__(self, channels: int, group: dist.ProcessGroup | None = None, choice: str | None = None) -> None:
        self.channels = channels
        self.group = _checked_group(group)
        self.choice = checked_exchange(choice, "exchange")
        self.key = next(_keys)
        self.plans: dict[tuple[Any, ...], Any] = {}
        self.memories: dict[Route | None, Any] = {}
        self._routes: dict[torch.device, Route] = {}
        _by_key[self.key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchNormExchange:
        """A copied layer gets a new exchange in the same group."""
        return BatchNormExchange(self.channels, self.group, self.choice)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise ConfigError(
                "a SyncBatchNorm with a process_group cannot be pickled: the group lives in this process; save the "
                "module's state_dict() instead"
            )
        return BatchNormExchange, (self.channels, None, self.choice)

    def route(self, device: torch.device) -> Route:
        """Returns the route on ``device``; the first call is a collective, also the first after the default group was replaced."""
        route = self._routes.get(device)
        group = self.group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if route is None or route.group is not group or (group is None and route.held is not None):
            self.memories.pop(route, None)
            self.plans = {key: plan for key, plan in self.plans.items() if plan.route is not route}
            route = self._routes[device] = self._choose(group, device)
        return route

    def known_routes(self) -> dict[str, str]:
        """Returns the routes chosen so far and the reasons, by device."""
        return {str(device): f"{route.kind}: {route.reason}" for device, route in self._routes.items()}

    def _choose(self, group: dist.ProcessGroup | None, device: torch.device) -> Route:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotCapturableError(
                "a SyncBatchNorm got its first batch inside a CUDA graph's capture, where ranks cannot agree on memory; "
                "run one training step before the capture"
            )
        if group is None:
            return Route("alone", "torch.distributed is not initialised")
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return Route("alone", "its group has one rank", held=weakref.ref(group))
        rank = dist.get_rank(group)
        if rank < 0:
            raise ConfigError(
                f"rank {dist.get_rank()} is not in this SyncBatchNorm's process_group; give each rank the group it is in "
                "(create_syncbn_process_group does)"
            )
        held = weakref.ref(group)
        choice = self.choice or checked_exchange(os.environ.get(VARIABLE) or None, VARIABLE)
        if choice == "collective":
            return Route("collective", "asked for", rank, ranks, held)
        workspace, obstacle = workspace_of(group, device)
        if workspace is not None:
            slot = workspace.slot(2 * ranks * 2 * self.channels, self.channels)
            return Route("peer", "ranks write each other's memory", rank, ranks, held, workspace, slot)
        if choice == "peer":
            raise ConfigError(f"the exchange 'peer' of a SyncBatchNorm cannot work here: {obstacle}; use 'collective'")
        return Route("collective", obstacle, rank, ranks, held)


def exchange_of(key: int) -> BatchNormExchange:
    """Returns the exchange with this key."""
    return _by_key[key]


def exchange_on(device: torch.device) -> str:
    """Returns how ranks on devices like ``device`` exchange their statistics, as far as this process knows."""
    choice = checked_exchange(os.environ.get(VARIABLE) or None, VARIABLE)
    if choice is not None:
        return f"statistics cross ranks by {choice}, as {VARIABLE} asks"
    if obstacle := obstacle_on(device):
        return f"statistics cross ranks by a collective: {obstacle}"
    return f"statistics cross ranks by peer memory where they share a link, else by a collective ({VARIABLE} chooses)"


def gather(route: Route, local: Tensor, gathered: Tensor) -> None:
    """Fills row r of ``gathered`` with rank r's ``local``."""
    if route.ranks == 1:
        gathered[0].copy_(local)
    elif local.is_cuda:
        dist.all_gather_into_tensor(gathered.view(-1), local, group=route.group)
    else:
        dist.all_gather(list(gathered.unbind()), local, group=route.group)


def _checked_group(group: object) -> dist.ProcessGroup | None:
    # For a rank outside of the group torch returns a number; the layer's first batch then raises, with advice.
    if group is None or isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER:
        return cast("dist.ProcessGroup | None", group)
    raise ConfigError(
        f"process_group={group!r} is not a process group; give what create_syncbn_process_group(size) or "
        "torch.distributed.new_group(ranks) returns, or None for all ranks"
    )
