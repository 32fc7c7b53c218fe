"""Effects of a step on the host, which a replay of its graph leaves out: detected, or guarded.

In the order in which a step meets them:

1. :class:`StepWatch` runs the first, eager calls and names effects that no replay would have: changed attributes
   (:class:`AttributeSnapshot`), random numbers from the host's generators, waits for the device, logged numbers
   (:class:`LogWatch`).
2. :class:`CapturedConstantsGuard` holds the host's values that a capture has read, and checks them before each replay.

What a captured step does on the host for ``self.log`` and torchmetrics objects is repeated after each replay
(:mod:`fabricamp.metrics.replay`).  :class:`Generators` lets a graph use the GPU's random generators.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
import random
import warnings
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fabricamp.engine.graph.refusals import refused
from fabricamp.errors import NotCapturableError
from fabricamp.metrics.replay import managed_attributes
from fabricamp.metrics.values import is_metric
from fabricamp.ops.shards import MemoryOf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from fabricamp._utils.types import Output
    from fabricamp.engine.session import Session
    from fabricamp.metrics import Metrics


FEWEST_EAGER_CALLS: Final = 2
"""The smallest number of eager calls of a kind: the first creates state, the second is checked for waits."""
MOST_CAPTURES_IN_A_ROW: Final = 3
"""The largest number of captures in a row without a replay in between."""


# -- 1. eager calls are watched ----------------------------------------------------------------------------------------------------


class StepWatch:
    """Runs and watches calls of the module's method named ``step``."""

    def __init__(self, session: Session, step: str) -> None:
        self._session = session
        self._step = step
        self._metrics = session.metrics
        options = session.settings.cuda_graph
        self._refuses_logs = options is not None and options.required
        """Whether logged values are already checked in eager steps; otherwise the capture finds bad ones."""
        self._mode_outside: int | None = None
        """Torch's mode around the call that runs now, if that is checked for waits."""

    def log_watch(self) -> Any:
        """Returns the object that replaces the metrics of the run while a step is watched or captured."""
        return LogWatch(self._metrics, self._step)

    def run(self, call: Callable[[], Output], *, compares: bool, looks_for_waits: bool) -> tuple[Output, str]:
        """Returns the result of ``call``, and why it cannot be captured, or an empty string.

        ``compares`` compares the attributes before and after; not for the first call of a shape, which may set some.
        """
        attributes = AttributeSnapshot(self._owners()) if compares else None
        generators = host_generators()
        waits = ""
        try:
            if self._refuses_logs:
                self._session.run_context.metrics = self.log_watch()
            if looks_for_waits:
                self._mode_outside = torch.cuda.get_sync_debug_mode()
                outputs, waits = _with_first_wait(call)
            else:
                outputs = call()
        except NotCapturableError as error:
            raise refused(str(error)) from None
        finally:
            self._mode_outside = None
            self._session.run_context.metrics = self._metrics
        changed = None if attributes is None else attributes.changed()
        drawn = next((name for name, state in host_generators().items() if generators[name] != state), "")
        if changed is not None:
            reason = (
                f"{self._step} changes {changed}, which a replay would not change; keep it in a buffer on the device"
            )
        elif drawn:
            reason = f"{self._step} draws from {drawn}, which a replay would not draw from; draw on the device"
        elif waits:
            reason = f"{self._step} waits for the device: {waits}; do not read device values on the host"
        else:
            reason = ""
        return outputs, reason

    def allow_waits(self) -> None:
        """Lets the rest of the watched call wait for the device, since no graph will hold it."""
        if self._mode_outside is not None:
            torch.cuda.set_sync_debug_mode(self._mode_outside)

    def _owners(self) -> Iterator[object]:
        """Yields the objects whose attributes a step may change: the submodules, and the user's callbacks."""
        yield from self._session.module.modules()
        for callback in self._session.trainer.callbacks:
            if not type(callback).__module__.startswith("fabricamp."):  # the progress bar changes in its own thread
                yield callback


def _with_first_wait(call: Callable[[], Output]) -> tuple[Output, str]:
    """Returns the result of ``call``, and the file and line of its first wait for the device, or an empty string."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            outputs = call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    first_wait = ""
    for warning in caught:
        words = str(warning.message)
        if "called a synchronizing CUDA operation" in words:
            first_wait = first_wait or f"{warning.filename}:{warning.lineno}"
        elif "Synchronization debug mode" not in words:  # torch's notice that this mode is a prototype
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return outputs, first_wait


class LogWatch:
    """Replaces the metrics of a run while a step is watched, and refuses logged values that are not on the device."""

    def __init__(self, metrics: Metrics, step: str) -> None:
        self._metrics = metrics
        self._step = step

    def keep(self, call: tuple[Any, ...], value: Any, batch_size: int | None = None) -> None:
        """Forwards a tensor on the device or a torchmetrics object to the metrics; raises for any other value."""
        if not is_metric(value) and (not isinstance(value, Tensor) or value.is_cpu):
            kind = "a tensor on the CPU" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise NotCapturableError(
                f"{self._step} calls self.log({call[0]!r}, ...) with {kind}, which a captured step would log unchanged in "
                "every replay; log a tensor on the device, or log it in the hook after the batch"
            )
        self._metrics.keep(call, value, batch_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metrics, name)


def host_generators() -> dict[str, Any]:
    """Returns the states of the host's random generators, by the name for an error message."""
    return {"torch's CPU generator": torch.get_rng_state().numpy().tobytes(), **generators_of_others()}


def generators_of_others() -> dict[str, Any]:
    """Returns the states of Python's and NumPy's random generators, by the name for an error message."""
    return {"random": random.getstate(), "numpy.random": pickle.dumps(np.random.get_state(legacy=False))}


class ChangedAttribute(NamedTuple):
    """An attribute that a step has changed, and its owner."""

    owner: object
    name: str

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.{self.name}"


class AttributeSnapshot:
    """The attributes of ``owners``: numbers by value, containers by their items, other objects by identity."""

    def __init__(self, owners: Iterable[object]) -> None:
        self._before = [
            (owner, managed_attributes(owner), {name: _copied(value, _DEPTH) for name, value in vars(owner).items()})
            for owner in owners
            if hasattr(owner, "__dict__")
        ]

    def changed(self) -> ChangedAttribute | None:
        """Returns the first attribute that has changed since the snapshot; None if none has."""
        for owner, managed, before in self._before:
            now = vars(owner)
            for name in [*before, *(name for name in now if name not in before)]:
                if name in managed:
                    continue
                if name not in before or name not in now or not _same(before[name], now[name], _DEPTH):
                    return ChangedAttribute(owner, name)
        return None


_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS: Final = (list, tuple, set, frozenset, dict)
_DEPTH: Final = 3
"""Containers that are nested deeper are compared by identity."""


def _copied(value: Any, depth: int) -> Any:
    """Returns containers as new dicts and lists, down to ``depth``; other values as they are."""
    if not depth or not isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, dict):
        return {key: _copied(item, depth - 1) for key, item in value.items()}
    return [_copied(item, depth - 1) for item in value]


def _same(before: Any, now: Any, depth: int) -> bool:
    """Whether ``now`` has not changed since ``before`` was made from it by :func:`_copied`."""
    if not depth or not isinstance(now, _CONTAINERS):
        if before is now:
            return True
        if type(before) is not type(now) or not isinstance(now, _PLAIN):
            return False
        both_nan = before != before and now != now  # noqa: PLR0124 - nan alone differs from itself
        return bool(before == now) or both_nan
    if not isinstance(before, dict if isinstance(now, dict) else list) or len(before) != len(now):
        return False
    if isinstance(now, dict):
        return all(key in before and _same(before[key], item, depth - 1) for key, item in now.items())
    return all(_same(old, new, depth - 1) for old, new in zip(before, now, strict=True))


# -- 2. constants of a capture are guarded -----------------------------------------------------------------------------------------


class CapturedConstantsGuard:
    """The host values that are constants of a captured step: plain attributes of the modules, and the tensors of their weights.

    ``hooks`` are tables of hooks around the optimizer's step: a replay repeats what those of the capture have launched.
    :meth:`are_unchanged` is called before each replay, so it works by C functions (``map``, ``operator``, ``itemgetter``) where
    possible.
    """

    def __init__(self, module: nn.Module, hparams: Mapping[str, Any], hooks: Sequence[Mapping[int, Any]] = ()) -> None:
        modules = list(module.modules())
        owners = [(vars(part), managed_attributes(part)) for part in modules]
        # Plain attributes, and hyper-parameters: for each owner its dict, the names, one getter for all of them, their values.
        self._tables: list[Mapping[str, Any]] = []
        self._names: list[list[str]] = []
        for table, managed in [*owners, (hparams, frozenset[str]())]:
            names = [name for name, value in table.items() if name not in managed and is_plain(value)]
            if names:
                self._tables.append(table)
                self._names.append(names)
        self._getters = [itemgetter(*names) for names in self._names]
        self._values = list(map(operator.call, self._getters, self._tables))
        # Plain attributes of the modules' classes: an attribute that is set on a module later hides its class's.
        of_classes = [(part, names) for part in modules if (names := _plain_of_class(part))]
        self._parts = [part for part, _ in of_classes]
        self._class_names = [names for _, names in of_classes]
        self._class_getters = [attrgetter(*names) for names in self._class_names]
        self._class_values = list(map(operator.call, self._class_getters, self._parts))
        # Submodules, parameters and buffers, and hooks.
        children = [table for one in modules for table in (one._modules, one._parameters, one._buffers) if table]
        self._parents: list[Mapping[Any, Any]] = [*children, *hooks]
        self._lengths = list(map(len, self._parents))
        self._children = [child for table in self._parents for child in table.values()]
        # Tensors that are plain attributes: not registered, so the lists above do not hold them.
        self._loose = [
            (table, name, value)
            for table, managed in owners
            for name, value in table.items()
            if name not in managed and isinstance(value, Tensor)
        ]
        self._tensors = [*module.parameters(), *module.buffers(), *(value for _, _, value in self._loose)]
        self._places = MemoryOf(self._tensors)
        self._trained = list(map(_requires_grad, self._tensors))

    def are_unchanged(self) -> bool:
        """Whether no module, tensor, attribute, ``requires_grad`` or hook has changed."""
        present = chain.from_iterable(map(_children, self._parents))
        if list(map(len, self._parents)) != self._lengths or not all(map(operator.is_, present, self._children)):
            return False
        for table, name, value in self._loose:
            if table.get(name) is not value:
                return False
        try:
            plain = list(map(operator.call, self._getters, self._tables)) == self._values
            plain = plain and list(map(operator.call, self._class_getters, self._parts)) == self._class_values
        except (KeyError, AttributeError):  # an attribute was deleted
            return False
        return plain and self._places.is_unchanged() and list(map(_requires_grad, self._tensors)) == self._trained

    def changed(self) -> str:
        """Returns the name of an attribute that has changed; an empty string if something else has."""
        for table, names, values in zip(self._tables, self._names, self._values, strict=True):
            before = values if len(names) > 1 else (values,)  # itemgetter returns no tuple for a single name
            for name, value in zip(names, before, strict=True):
                if name not in table or not _same(value, table[name], 0):
                    return name
        for part, names, values in zip(self._parts, self._class_names, self._class_values, strict=True):
            before = values if len(names) > 1 else (values,)
            for name, value in zip(names, before, strict=True):
                if not _same(value, getattr(part, name, _GONE), 0):
                    return name
        return next((name for table, name, value in self._loose if table.get(name) is not value), "")


def _plain_of_class(module: nn.Module) -> list[str]:
    """Returns the names of plain attributes that ``module`` has from classes of the program, and not by itself."""
    found: dict[str, Any] = {}
    for kind in reversed(type(module).__mro__):
        if kind.__module__.partition(".")[0] not in _CLASSES_OF_LIBRARIES:
            found.update(vars(kind))
    own = vars(module)
    return [name for name, value in found.items() if is_plain(value) and not name.startswith("__") and name not in own]


def is_plain(value: Any) -> bool:
    """Returns whether ``value`` is a number, a word or its like, or a tuple of them: it cannot change in place."""
    return all(map(is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)


_children: Final = operator.methodcaller("values")
_CLASSES_OF_LIBRARIES: Final = frozenset({"builtins", "torch", "torchmetrics", "fabricamp"})
_GONE: Final = object()
_requires_grad: Final = operator.attrgetter("requires_grad")


# -- the random generators of a graph ----------------------------------------------------------------------------------------------


class Generators:
    """Torch's default generator of the current GPU, and the GPU generators in attributes of ``module`` or its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._own = generators_of(module)
        self._all = [torch.cuda.default_generators[torch.cuda.current_device()], *self._own]

    @contextlib.contextmanager
    def registered_with(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """A context that lets ``graph`` use the generators; resets them after a failed capture, which leaves them capturing."""
        for generator in self._own:  # torch registers its default generator itself
            graph.register_generator_state(generator)
        spares = [generator.clone_state() for generator in self._all]
        try:
            yield
        except BaseException:
            for generator, spare in zip(self._all, spares, strict=True):
                generator.graphsafe_set_state(spare)
            raise

    # -- for the comparison of a replay with an eager step -----------------------------------------------------------------------

    def states(self) -> list[Tensor]:
        """Returns copies of the generators' states."""
        return [generator.get_state() for generator in self._all]

    def put_back(self, states: Sequence[Tensor]) -> None:
        """Restores the generators' states."""
        for generator, state in zip(self._all, states, strict=True):
            generator.set_state(state)

    def are(self, states: Sequence[Tensor]) -> bool:
        """Whether the generators have these states."""
        return all(map(torch.equal, self.states(), states))


def generators_of(module: nn.Module) -> list[torch.Generator]:
    """Returns the GPU generators in attributes of ``module`` or its submodules, each once."""
    found = [one for part in module.modules() for one in vars(part).values() if isinstance(one, torch.Generator)]
    return list(dict.fromkeys(one for one in found if one.device.type == "cuda"))
