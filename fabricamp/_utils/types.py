"""Names for the values that a run passes on without knowing their type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Batch: TypeAlias = Any
"""What a loader yields and a step takes: a value of the user's, of any structure.  Tensors in it are moved to the device."""

Loader: TypeAlias = Iterable[Batch]
"""What batches are read from: a DataLoader, another library's loader, or a list.

It may have a length, a sampler, or a state.  ``fabricamp/data/lengths.py`` and ``position.py`` ask for them.
"""

Step: TypeAlias = Callable[..., Any]
"""A step of the user's module, or a function in its place: takes what the loop passes on, returns what the step returns."""

StateDict: TypeAlias = dict[str, Any]
"""What ``state_dict()`` returns, or the content of a checkpoint: values by name, of the types that a checkpoint can hold."""

ParamGroup: TypeAlias = dict[str, Any]
"""A group of an optimizer: its parameters under "params", and its options by their names."""

Closure: TypeAlias = Callable[[], Any]
"""Computes the loss again and returns it, for an optimizer that asks for it within its step."""

Output: TypeAlias = Any
"""What a step of the user's module returns: a loss, a dict with one, a prediction, or None."""
