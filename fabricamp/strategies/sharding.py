"""A module under torch's ``fully_shard``, and back: what it changed of the module is undone after the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch import nn

from fabricamp.ops.shards import is_shard
from fabricamp.torch_private import sharded_modules

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_TORCHS: Final = ("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.distributed.tensor.")
_HOOKS: Final = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_OPTIONS: Final = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class Undo:
    """Remembers what sharding changes: classes and attributes of modules, and whatever their parameters are by then."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [(one, type(one), set(vars(one))) for one in module.modules()]
        self._added: list[set[str]] = []
        self._also: list[Callable[[], None]] = []

    def also(self, give_back: Callable[[], None]) -> None:
        """Lets :meth:`undo` end with ``give_back``."""
        self._also.append(give_back)

    def note(self) -> None:
        """Takes note of the attributes that were added, right behind the sharding: those that others add later stay."""
        self._added = [set(vars(one)) - names for one, _, names in self._before]

    def undo(self) -> None:
        """Takes it back, with torch's hooks, some of which come with the first forward."""
        for (one, kind, _), names in zip(self._before, self._added, strict=True):
            sharded_modules().pop(one, None)
            one.__class__ = kind
            for name in names:
                vars(one).pop(name, None)
            torchs = {key for table in _HOOKS for key, hook in vars(one)[table].items() if _is_torchs(hook)}
            for table in (*_HOOKS, *_OPTIONS):
                for key in torchs:
                    vars(one)[table].pop(key, None)
        for give_back in self._also:
            give_back()


def _is_torchs(hook: Any) -> bool:
    """Whether ``fully_shard`` registered it, or what computes activations again."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(_TORCHS)


def replace_shards(module: nn.Module, make: Callable[[Any], Tensor]) -> None:
    """Puts a plain parameter in the place of each sharded one; one of several modules stays that of them all."""
    made: dict[int, nn.Parameter] = {}
    held = []  # ids are those of tensors that are still there
    for one in module.modules():
        for name, parameter in one._parameters.items():
            if parameter is None or not is_shard(parameter):
                continue
            if id(parameter) not in made:
                held.append(parameter)
                made[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
            one._parameters[name] = made[id(parameter)]
