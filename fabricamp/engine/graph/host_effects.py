"""The GPU's random generators that a captured call may draw from: torch's default generator and those of the module."""

from __future__ import annotations

import contextlib
import operator
import pickle
import random
import warnings
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fabricamp.engine.graph.batches import NotCapturableError
from fabricamp.engine.graph.refusals import refused
from fabricamp.metrics.slots import MetricTable
from fabricamp.metrics.values import is_metric, is_metric_collection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from fabricamp.engine.session import Session
    from fabricamp.metrics import Metrics
    from fabricamp.metrics.slots import Cell


# ~~~ from engine.graph.generators: The GPU's random generators that a captured call may draw from: torch's default generator and those of the module.


class Generators:
    """Torch's default generator of the current GPU, and the GPU generators in attributes of ``module`` or its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._own = generators_of(module)
        self._all = [torch.cuda.default_generators[torch.cuda.current_device()], *self._own]

    def states(self) -> list[Tensor]:
        """Returns copies of the generators' states."""
        return [one.get_state() for one in self._all]

    def put_back(self, states: Sequence[Tensor]) -> None:
        """Restores the generators' states."""
        for one, state in zip(self._all, states, strict=True):
            one.set_state(state)

    def are(self, states: Sequence[Tensor]) -> bool:
        """Whether the generators have these states."""
        return all(map(torch.equal, self.states(), states))

    @contextlib.contextmanager
    def captured(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """A context that lets ``graph`` use the generators; resets them after a failed capture, which leaves them capturing."""
        for one in self._own:
            graph.register_generator_state(one)
        spares = [one.clone_state() for one in self._all]
        try:
            yield
        except BaseException:
            for one, spare in zip(self._all, spares, strict=True):
                one.graphsafe_set_state(spare)
            raise


def generators_of(module: nn.Module) -> list[torch.Generator]:
    """Returns the GPU generators in attributes of ``module`` or its submodules, each once."""
    found = [one for part in module.modules() for one in vars(part).values() if isinstance(one, torch.Generator)]
    return list(dict.fromkeys(one for one in found if one.device.type == "cuda"))


# ~~~ from engine.graph.metric_states: The torchmetrics objects of a replayed step: their states stay at fixed addresses, and the host keeps their counts.


COUNTS: Final = frozenset({"_update_count", "_computed", "_forward_cache", "_cache"})
"""Attributes of a torchmetrics object that hold the host's data on its updates, beside its states; they have no public names."""
_COLLECTION: Final = frozenset({"_state_is_copy"})
"""Attribute of a MetricCollection: whether its metrics have copies of shared states, as after compute; addresses stay shared."""
_NOTHING: Final[frozenset[str]] = frozenset()


def kept_apart(owner: object) -> frozenset[str]:
    """Returns the attributes of a torchmetrics object that :class:`MetricStates` manages; empty for other objects."""
    if not is_metric(owner):
        return _COLLECTION if is_metric_collection(owner) else _NOTHING
    defaults: dict[str, Any] = owner._defaults  # type: ignore[attr-defined]
    return COUNTS.union(name for name, value in defaults.items() if isinstance(value, Tensor))


class MetricCopies(NamedTuple):
    """Copies of the states, and the update counts."""

    states: list[Tensor]
    counts: list[int]


class MetricStates:
    """The tensor states of the torchmetrics objects within ``module``.

    An update and ``reset`` bind new tensors to the states' attributes; a graph always reads and writes the same tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics: list[Any] = [one for one in module.modules() if is_metric(one)]
        self._places: list[tuple[Any, str, Tensor]] = [
            (one, name, getattr(one, name))
            for one in self._metrics
            for name, default in one._defaults.items()
            if isinstance(default, Tensor)
        ]
        self._before = self._counts()
        self._updates: list[int] = []

    def _counts(self) -> list[int]:
        return [one._update_count for one in self._metrics]

    @torch.no_grad()
    def settle(self) -> None:
        """Copies states that an update has bound anew back to their fixed addresses, as part of the capture."""
        for metric, name, place in self._places:
            value = getattr(metric, name)
            if value is place:
                continue
            if value.shape != place.shape or value.dtype != place.dtype:
                raise NotCapturableError(
                    f"{type(metric).__name__} changes its state {name!r} from {place.dtype} {tuple(place.shape)} to {value.dtype} "
                    f"{tuple(value.shape)}, which a replay would not; update it in on_train_batch_end"
                )
            place.copy_(value)
            setattr(metric, name, place)

    def take(self) -> None:
        """Records how often the step updated each metric."""
        self._updates = [after - before for after, before in zip(self._counts(), self._before, strict=True)]

    def bring(self) -> bool:
        """Copies states at other addresses (after a reset, or an eager step) to the fixed ones; returns whether that succeeded."""
        for metric, name, place in self._places:
            value = getattr(metric, name)
            if value is place:
                continue
            if value.shape != place.shape or value.dtype != place.dtype or value.device != place.device:
                return False
            place.copy_(value)
            setattr(metric, name, place)
        return True

    def play(self) -> None:
        """Adds the updates of a replay to the metrics' counts."""
        for metric, updates in zip(self._metrics, self._updates, strict=True):
            if updates:
                metric._update_count += updates
                metric._computed = None

    def withdraw(self) -> None:
        """Restores counts and states from before the capture."""
        for metric, count in zip(self._metrics, self._before, strict=True):
            metric._update_count = count
        for metric, name, place in self._places:
            setattr(metric, name, place)

    def copy(self) -> MetricCopies:
        """Returns copies of the states, and the counts."""
        return MetricCopies([getattr(metric, name).clone() for metric, name, _ in self._places], self._counts())

    @torch.no_grad()
    def put_back(self, copies: MetricCopies) -> None:
        """Restores states and counts from ``copies``."""
        for (metric, name, place), values in zip(self._places, copies.states, strict=True):
            place.copy_(values)
            setattr(metric, name, place)
        for metric, count in zip(self._metrics, copies.counts, strict=True):
            metric._update_count = count

    def difference(self, copies: MetricCopies) -> str:
        """Returns the name of the first state that differs from ``copies`` in any bit; an empty string if none does."""
        for (metric, name, _), values in zip(self._places, copies.states, strict=True):
            if not same_bits(getattr(metric, name), values):
                return f"the state {name!r} of a {type(metric).__name__}"
        return ""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same bytes; waits for the device."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    left, right = (each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(left, right)


# ~~~ from engine.graph.logs: The effects of a captured step's ``self.log`` calls on the host, and their repetition for a replay.


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
                f"{self._step} calls self.log({call[0]!r}, ...) with {kind}, which a captured step would log for ever; log a "
                "tensor on the device, or log it in the hook after the batch"
            )
        self._metrics.keep(call, value, batch_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metrics, name)


class LogReplay:
    """Records the weights that a step's ``self.log`` calls give to the values of ``table``, and repeats them for a replay.

    The values themselves are copied by launches of the graph.
    """

    def __init__(self, metrics: Metrics, name: str = MetricTable.TRAINING) -> None:
        self.table = metrics.table(name)
        self._before = {cell: cell.weight for cell in self.table.cells.values()}
        for cell in self._before:
            if _is_set(cell):
                cell.weight = 0
        self._set: list[Cell] = []
        self._added: list[tuple[Cell, int]] = []
        self._bank: Tensor | None = None

    def take(self) -> None:
        """Records the weights that the step has changed since this tape was created."""
        self._bank = self.table.bank
        for cell in self.table.cells.values():
            before = self._before.get(cell, 0)
            if _is_set(cell):
                if cell.weight:
                    self._set.append(cell)
                else:
                    cell.weight = before
            elif cell.weight != before:
                self._added.append((cell, cell.weight - before))

    def undo(self) -> None:
        """Restores the weights from before the step, which did not run on the device."""
        for cell in self.table.cells.values():
            cell.weight = self._before.get(cell, 0)

    def holds(self) -> bool:
        """Whether the table still uses the tensor that the graph writes to."""
        return self.table.bank is self._bank

    @property
    def cells(self) -> list[Cell]:
        """The cells that the step has logged to."""
        return [*self._set, *(cell for cell, _ in self._added)]

    def sums(self) -> list[int]:
        """Returns the weights of the cells that accumulate."""
        return [cell.weight for cell, _ in self._added]

    def sums_behind(self) -> list[int]:
        """Returns the weights of the cells that accumulate, as :meth:`play` will leave them."""
        return [cell.weight + weight for cell, weight in self._added]

    def play(self) -> None:
        """Updates the weights on the host as ``self.log`` does in an eager step."""
        for cell in self._set:
            cell.weight = 1
        for cell, weight in self._added:
            cell.weight += weight


def _is_set(cell: Cell) -> bool:
    """Whether a call sets the weight instead of adding to it: for a per-step value, and for a torchmetrics object."""
    return cell.per_step or cell.metric is not None


# ~~~ from engine.graph.effects: Finds side effects of a step in Python that a replay would not repeat, while the step runs eagerly or before a replay.


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


# ~~~ from engine.graph.watch: Watches a step while it runs eagerly for side effects in Python that a replay would not repeat.


FEWEST_SIGHTS: Final = 2
"""The smallest number of eager calls of a kind: the first creates state, the second is checked for waits."""
MOST_IN_A_ROW: Final = 3
"""The largest number of captures in a row without a replay in between."""


class StepWatch:
    """Runs and watches calls of the module's method named ``step``."""

    def __init__(self, session: Session, step: str) -> None:
        self._session = session
        self._step = step
        self._metrics = session.metrics
        options = session.settings.cuda_graph
        self._refuses_logs = options is not None and options.required
        """Whether logged values are already checked in eager steps; otherwise the capture finds bad ones."""

    def log_watch(self) -> Any:
        """Returns the object that replaces the metrics of the run while a step is watched or captured."""
        return LogWatch(self._metrics, self._step)

    def run(self, call: Callable[[], Any], *, compares: bool, looks: bool) -> tuple[Any, str]:
        """Returns the result of ``call``, and why it cannot be captured, or an empty string.

        ``compares`` compares the attributes before and after; not for the first call of a shape, which may set some.  ``looks``
        also looks for waits for the device.
        """
        attributes = Attributes(self._owners()) if compares else None
        generators = host_generators()
        try:
            if self._refuses_logs:
                self._session.run_context.metrics = self.log_watch()
            outputs, waits = _looked_at(call) if looks else (call(), "")
        except NotCapturableError as error:
            raise refused(str(error)) from None
        finally:
            self._session.run_context.metrics = self._metrics
        effect = None if attributes is None else attributes.changed()
        if effect is not None:
            return (
                outputs,
                f"{self._step} changes {effect}, which a replay would not; keep it in a buffer on the device",
            )
        drawn = next((name for name, state in host_generators().items() if generators[name] != state), "")
        if drawn:
            return outputs, f"{self._step} draws from {drawn}, which a replay would not; draw on the device"
        return outputs, f"{self._step} waits for the device: {waits}; leave the host out of it" if waits else ""

    def _owners(self) -> Iterator[object]:
        yield from self._session.module.modules()
        for one in self._session.trainer.callbacks:
            if not type(one).__module__.startswith("fabricamp."):  # the progress bar changes in its own thread
                yield one


def _looked_at(call: Callable[[], Any]) -> tuple[Any, str]:
    """Returns the result of ``call``, and the file and line of its first wait for the device, or an empty string."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            outputs = call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits = [one for one in caught if "called a synchronizing CUDA operation" in str(one.message)]
    for one in caught:
        if one not in waits and "Synchronization debug mode" not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return outputs, f"{waits[0].filename}:{waits[0].lineno}" if waits else ""
