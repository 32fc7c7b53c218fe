"""Finds side effects of a step in Python that a replay would not repeat, while the step runs eagerly or before a replay."""

from __future__ import annotations

import operator
import pickle
import random
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fabricamp.engine.graph.metric_states import kept_apart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS: Final = (list, tuple, set, frozenset, dict)
_DEPTH: Final = 3


class Effect(NamedTuple):
    """An attribute that a step has changed, and its owner."""

    owner: object
    name: str

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.{self.name}"


class Attributes:
    """A snapshot of the attributes of ``owners``: numbers by value, containers by their items, other objects by identity."""

    def __init__(self, owners: Iterable[object]) -> None:
        self._before = [
            (owner, kept_apart(owner), {name: _copied(value, _DEPTH) for name, value in vars(owner).items()})
            for owner in owners
            if hasattr(owner, "__dict__")
        ]

    def changed(self) -> Effect | None:
        """Returns the first attribute that has changed since the snapshot; None if none has."""
        for owner, apart, before in self._before:
            now = vars(owner)
            for name in [*before, *(name for name in now if name not in before)]:
                if name in apart:
                    continue
                if name not in before or name not in now or not _same(before[name], now[name], _DEPTH):
                    return Effect(owner, name)
        return None


def _copied(value: Any, depth: int) -> Any:
    if not depth or not isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, dict):
        return {key: _copied(item, depth - 1) for key, item in value.items()}
    return [_copied(item, depth - 1) for item in value]


def _same(before: Any, now: Any, depth: int) -> bool:
    if before is now and not isinstance(now, _CONTAINERS):
        return True
    if not depth or not isinstance(now, _CONTAINERS):
        plain = type(before) is type(now) and isinstance(now, _PLAIN)
        return before is now or (plain and (before == now or (before != before and now != now)))  # noqa: PLR0124 - nan
    if not isinstance(before, dict if isinstance(now, dict) else list) or len(before) != len(now):
        return False
    if isinstance(now, dict):
        return all(key in before and _same(before[key], item, depth - 1) for key, item in now.items())
    return all(_same(old, new, depth - 1) for old, new in zip(before, now, strict=True))


def host_generators() -> dict[str, Any]:
    """Returns the states of the host's random generators, by the name for an error message."""
    legacy = np.random.get_state(legacy=False)
    return {
        "torch's CPU generator": torch.get_rng_state().numpy().tobytes(),
        "random": random.getstate(),
        "numpy.random": pickle.dumps(legacy),
    }


class CapturedConstantsGuard:
    """The host values that are constants of a captured step: plain attributes of the modules, and the tensors of their weights.

    :meth:`hold` is called before each replay, so it works by C functions (``map``, ``operator``, ``itemgetter``) where possible.
    """

    def __init__(self, module: nn.Module, hparams: Mapping[str, Any]) -> None:
        modules = list(module.modules())
        tables = [*((vars(one), kept_apart(one)) for one in modules), (hparams, frozenset())]
        plain = [
            (table, itemgetter(*names), names)
            for table, apart in tables
            if (names := [name for name, value in table.items() if name not in apart and _is_plain(value)])
        ]
        self._tables = [table for table, _, _ in plain]
        self._getters = [getter for _, getter, _ in plain]
        self._names = [names for _, _, names in plain]
        self._values = list(map(operator.call, self._getters, self._tables))
        self._parents = [table for one in modules for table in (one._modules, one._parameters, one._buffers) if table]
        self._lengths = list(map(len, self._parents))
        self._children = [child for table in self._parents for child in table.values()]
        self._loose = [
            (table, name, value)
            for table, apart in tables[:-1]
            for name, value in table.items()
            if name not in apart and isinstance(value, Tensor)
        ]
        self._tensors = [*module.parameters(), *module.buffers(), *(value for _, _, value in self._loose)]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._trained = list(map(_requires_grad, self._tensors))

    def hold(self) -> bool:
        """Whether no module, tensor, attribute or ``requires_grad`` has changed."""
        present = chain.from_iterable(map(_children, self._parents))
        if list(map(len, self._parents)) != self._lengths or not all(map(operator.is_, present, self._children)):
            return False
        if any(table.get(name) is not value for table, name, value in self._loose):
            return False
        try:
            plain = list(map(operator.call, self._getters, self._tables)) == self._values
        except KeyError:
            return False
        return (
            plain
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
            and list(map(_requires_grad, self._tensors)) == self._trained
        )

    def changed(self) -> str:
        """Returns the name of an attribute that has changed; an empty string if something else has."""
        for table, names, values in zip(self._tables, self._names, self._values, strict=True):
            before = values if len(names) > 1 else (values,)
            for name, value in zip(names, before, strict=True):
                if name not in table or not _same(value, table[name], 0):
                    return name
        return next((name for table, name, value in self._loose if table.get(name) is not value), "")


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)


_children: Final = operator.methodcaller("values")
_requires_grad: Final = operator.attrgetter("requires_grad")
