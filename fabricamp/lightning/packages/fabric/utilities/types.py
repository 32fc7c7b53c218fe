"""Types of paths, devices, groups and optimizers, for type hints and ``isinstance``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor

UntypedStorage: TypeAlias = torch.UntypedStorage

_PATH = str | Path
_DEVICE = torch.device | str | int
_MAP_LOCATION_TYPE = _DEVICE | Callable[[UntypedStorage, str], UntypedStorage | None] | dict[_DEVICE, _DEVICE] | None
_PARAMETERS = Iterator[torch.nn.Parameter]

ProcessGroup: Any = object
ReduceOp: Any = object
RedOpType: Any = object
if torch.distributed.is_available():
    from torch.distributed import ProcessGroup as ProcessGroup
    from torch.distributed import ReduceOp as ReduceOp

    RedOpType = ReduceOp.RedOpType

_DictKey = TypeVar("_DictKey")


@runtime_checkable
class _Stateful(Protocol[_DictKey]):
    """Has a state that can be saved and loaded."""

    def state_dict(self) -> dict[_DictKey, Any]: ...

    def load_state_dict(self, state_dict: dict[_DictKey, Any]) -> None: ...


@runtime_checkable
class CollectibleGroup(Protocol):
    """A group of processes."""

    def size(self) -> int:
        """Returns the number of processes."""

    def rank(self) -> int:
        """Returns this process's number."""


@runtime_checkable
class Steppable(Protocol):
    """Has ``step``, as an optimizer has."""

    def step(self, closure: Callable[[], float] | None = ...) -> float | None:
        """Makes a step."""


@runtime_checkable
class Optimizable(Steppable, Protocol):
    """Has what an optimizer has."""

    param_groups: list[dict[Any, Any]]
    defaults: dict[Any, Any]
    state: defaultdict[Tensor, Any]

    def state_dict(self) -> dict[str, dict[Any, Any]]:
        """Returns the state."""

    def load_state_dict(self, state_dict: dict[str, dict[Any, Any]]) -> None:
        """Takes the state."""
