"""Names for the values that a run passes on without knowing their type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias, TypeGuard

Batch: TypeAlias = object
"""What a loader yields and a step takes: a value of the user's, of any structure.  Tensors in it are moved to the device."""

AnyBatch: TypeAlias = Any
"""A batch in the signature of a method that users override: their class may declare the type of its own batches."""

Loader: TypeAlias = Iterable[Batch]
"""What batches are read from: a DataLoader, another library's loader, or a list.

It may have a length, a sampler, or a state.  ``fabricamp/data/lengths.py`` and ``position.py`` ask for them.
"""

Output: TypeAlias = object
"""What a step of the user's module returns: a loss, a dict with one, a prediction, or None."""

AnyOutput: TypeAlias = Any
"""The outputs of a step in the signature of a method that users override."""

Step: TypeAlias = Callable[..., Output]
"""A step of the user's module, or a function in its place: takes what the loop passes on, returns what the step returns."""


class OptimizerFace(Protocol):
    """What is asked of an optimizer that is not torch's: the names that a run, its schedules and its checkpoints use."""

    param_groups: list[ParamGroup]

    def step(self, closure: None = None) -> object:
        """Updates the parameters."""
        ...

    def zero_grad(self) -> object:
        """Clears the gradients."""
        ...

    def state_dict(self) -> StateDict:
        """Returns the state, with the groups."""
        ...

    def load_state_dict(self, state_dict: StateDict, /) -> object:
        """Continues from a state that :meth:`state_dict` has returned."""
        ...


Closure: TypeAlias = Callable[[], Any]
"""Computes the loss again and returns it, for an optimizer that asks for it within its step.

It returns a tensor, where torch's annotation of ``Optimizer.step`` says a float.
"""

StateDict: TypeAlias = dict[str, Any]
"""What ``state_dict()`` returns, or the content of a checkpoint: values by name, of the types that a checkpoint can hold."""


class Stateful(Protocol):
    """An object whose state a checkpoint holds: a loader or data set with a position of its own, a scheduler, a callback."""

    def state_dict(self) -> StateDict:
        """Returns the present state."""
        ...

    def load_state_dict(self, state_dict: StateDict, /) -> object:
        """Continues from a state that :meth:`state_dict` has returned."""
        ...


def has_state(value: object) -> TypeGuard[Stateful]:
    """Returns whether ``value`` has the two methods of :class:`Stateful`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class CheckpointFiles(Protocol):
    """What a plug-in is asked for that writes and reads the checkpoints of a run in fabricamp's place.

    ``fabricamp.plugins.io.CheckpointIO`` is its class for users; layers below that of checkpoints know a plug-in by this face.
    """

    def save_checkpoint(self, checkpoint: StateDict, path: str) -> None:
        """Writes ``checkpoint`` at ``path``; called on rank 0."""
        ...

    def load_checkpoint(self, path: str) -> StateDict:
        """Returns the checkpoint at ``path``; called on every rank, with ``map_location`` and ``weights_only`` if it takes them."""
        ...

    def remove_checkpoint(self, path: str) -> None:
        """Removes the checkpoint at ``path``; called on rank 0."""
        ...

    def teardown(self) -> None:
        """Called on rank 0 at the end of a run."""
        ...


ParamGroup: TypeAlias = dict[str, Any]
"""A group of an optimizer: its parameters under "params", and its options by their names."""
