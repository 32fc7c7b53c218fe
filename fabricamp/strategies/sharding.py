"""Undoes the changes of torch's ``fully_shard`` to a module after the run."""

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
    """Remembers the classes and attributes of modules before sharding, and restores them; parameters keep their values."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [(one, type(one), set(vars(one))) for one in module.modules()]
        self._added: list[set[str]] = []
        self._also: list[Callable[[], None]] = []

    def also(self, give_back: Callable[[], None]) -> None:
        """Makes :meth:`undo` call ``give_back`` at its end."""
        self._also.append(give_back)

    def note(self) -> None:
        """Records the attributes added by sharding; call it right after sharding, so attributes added later stay."""
        self._added = [set(vars(one)) - names for one, _, names in self._before]

    def undo(self) -> None:
        """Restores the modules and removes torch's hooks; torch adds some of these only in the first forward."""
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
    """Returns whether ``fully_shard`` or activation checkpointing registered the hook."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(_TORCHS)


def replace_shards(module: nn.Module, make: Callable[[Any], Tensor]) -> None:
    """Replaces each sharded parameter by a plain one from ``make``; shared parameters stay shared."""
    made: dict[int, nn.Parameter] = {}
    held = []  # keeps the old tensors alive, so their ids stay unique
    for one in module.modules():
        for name, parameter in one._parameters.items():
            if parameter is None or not is_shard(parameter):
                continue
            if id(parameter) not in made:
                held.append(parameter)
                made[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
            one._parameters[name] = made[id(parameter)]
