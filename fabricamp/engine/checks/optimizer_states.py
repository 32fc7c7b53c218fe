"""What an optimizer keeps that a checkpoint does not hold by itself: told before the first batch, or after the first steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from fabricamp.agenda import Entry, Position
from fabricamp.checkpoint.objects import READING
from fabricamp.checkpoint.packing import allowed_classes, loads_unasked, objects_of, pack_objects, shards_of_others
from fabricamp.checkpoint.plain import name_of, without_numpy
from fabricamp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp._utils.types import OptimizerFace
    from fabricamp.agenda import PassEnd
    from fabricamp.state import RunState

_LOOKS: Final = (1, 2, 4, 8)
"""The steps after which states are looked at: most optimizers make theirs in the first step, some only in a later one."""

_PLAIN: Final = ("torch.optim.", "fabricamp.optimizers.")
"""The modules of the optimizers whose states are known to be plain."""


def check_states(optimizers: Sequence[OptimizerFace]) -> None:
    """Raises :class:`CheckpointError` for a value in the optimizers' states or groups that a save would refuse, with the cure.

    Looks at types alone, and reads no value of a tensor.
    """
    for optimizer in optimizers:
        if not keeps_others(optimizer):
            continue
        name = type(optimizer).__name__
        state = without_numpy(optimizer.state_dict()).values
        for path, kind in shards_of_others(state, f"{name}.state_dict()"):
            raise CheckpointError(
                f"{name} keeps shards of class {kind} ({path}), which a folder of shards does not hold as they are, so no run "
                'could resume; take strategy="ddp", torch.optim.AdamW, or save no optimizers '
                "(ModelCheckpoint(save_weights_only=True))"
            )
        seen: set[type] = set()
        for path, kind, value in objects_of(state, f"{name}.state_dict()"):
            if type(value) in seen:
                continue
            seen.add(type(value))
            if not (_is_allowed(value) and _loads(value)):
                raise CheckpointError(
                    f"{name} keeps a {kind} ({path}), which checkpoints do not hold by themselves, so the run could not be saved: "
                    f"{_cure(value)}, or save no optimizers (ModelCheckpoint(save_weights_only=True))"
                )


def keeps_others(optimizer: OptimizerFace) -> bool:
    """Returns whether the optimizer is of a class that may keep any values in its state."""
    return not f"{type(optimizer).__module__}.".startswith(_PLAIN)


def _is_allowed(value: object) -> bool:
    if type(value) is tuple:
        return all(type(one) in allowed_classes() for _, _, one in objects_of(list(value), ""))
    return type(value) in allowed_classes()


def _loads(value: object) -> bool:
    try:
        return loads_unasked(pack_objects({"value": value}))
    except CheckpointError:  # it cannot be pickled
        return False


def _cure(value: object) -> str:
    if isinstance(value, tuple):
        kinds = [type(one) for _, _, one in objects_of(list(value), "")]
    else:
        kinds = [type(value)]
    listed: list[Any] = [kind for kind in kinds if kind not in allowed_classes()]
    with READING, torch.serialization.safe_globals(listed):
        if _loads(value):
            names = ", ".join(kind.__name__ for kind in listed)
            return (
                f"call torch.serialization.add_safe_globals([{names}]) at the beginning of the script ({name_of(listed[0])}), and "
                "files have it and are resumed as others"
            )
    try:
        pack_objects({"value": value})
    except CheckpointError as error:
        return f"it cannot be pickled ({error.__cause__!s:.200}), and no option saves it: take another optimizer"
    return (
        "give Trainer(checkpoint_objects=True), which pickles it, and resume with fit(..., ckpt_path=..., weights_only=False) from "
        "files that you trust"
    )


class StateLook(Entry):
    """Looks at the states that optimizers have made, after the first steps, before much is lost.

    Args:
        state: the run's.
        optimizers: those whose states are looked at.
    """

    def __init__(self, state: RunState, optimizers: Sequence[OptimizerFace]) -> None:
        self._state = state
        self._optimizers = optimizers
        self._left = [state.global_step + look for look in _LOOKS]

    def next(self) -> Position:
        """Returns the next of the first steps; never after them."""
        return Position(steps=self._left[0]) if self._left else Position()

    def act(self, *, last: bool) -> PassEnd | None:
        """Looks, if one of these steps was made since the last look."""
        left = [step for step in self._left if step > self._state.global_step]
        if len(left) < len(self._left):
            self._left = left
            check_states(self._optimizers)
        return None
