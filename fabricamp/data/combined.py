"""Combines several loaders into one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader, IterableDataset

from fabricamp._utils.containers import own_containers
from fabricamp._utils.keywords import NamesKeywords
from fabricamp.arguments.checks import check_choice
from fabricamp.data.lengths import known_length, loader_length
from fabricamp.data.position import (
    BEGUN,
    batches_behind,
    begin,
    end_workers,
    enter,
    generators_of,
    goes_on_behind_a_pass,
    is_read_past,
    own_sampler,
    place_of,
    restore,
    states_of,
)
from fabricamp.errors import ConfigError
from fabricamp.rng import capture_rng

Mode = Literal["max_size_cycle", "max_size", "min_size", "sequential"]
_PASS = 0x9E3779B1
"""Epoch offset between rounds of a shorter loader, for their orders: odd and large, as generators use 32 bits of a seed."""
_END = object()


class CombinedLoader(NamesKeywords):
    """Yields one batch of every loader at a time, in a collection like the given one (dict, list or tuple, possibly nested).

    ``min_size``: as long as the shortest loader.
    ``max_size``: as long as the longest loader; finished loaders give None.
    ``max_size_cycle``: as long as the longest loader; shorter loaders start again, in another order if they are shuffled.  ``fit``
    combines a bare collection in this mode.
    ``sequential``: one loader after the other, with unchanged batches; an evaluation keeps these loaders separate.

    Iteration by hand yields ``(batch, batch_idx, dataloader_idx)``.

    >>> list(CombinedLoader({"a": [1, 2], "b": [3]}))
    [({'a': 1, 'b': 3}, 0, 0)]
    >>> list(CombinedLoader({"a": [1, 2], "b": [3]}, "sequential"))
    [(1, 0, 0), (2, 1, 0), (3, 0, 1)]
    """

    def __init__(self, iterables: dict[str, Any] | list[Any] | tuple[Any, ...], mode: Mode = "min_size") -> None:
        loaders = own_containers(iterables)
        check_choice("CombinedLoader mode", mode, get_args(Mode))
        self._keys: list[Any] = list(loaders) if isinstance(loaders, dict) else list(range(len(loaders)))
        if not self._keys:
            raise ConfigError("CombinedLoader got an empty collection; give it at least one loader")
        self.loaders = loaders
        self.mode = mode
        self.again = False
        """Whether the run has begun an earlier pass."""
        self._epoch = 0
        inner = [combine(loaders[key], mode) for key in self._keys]
        if any(one is not loaders[key] for one, key in zip(inner, self._keys, strict=True)):
            self.loaders = self.collect(inner)
        for key in self._keys:
            loader_length(self.loaders[key], f"CombinedLoader[{key!r}]")

    @property
    def members(self) -> list[Any]:
        """The loaders, in order."""
        return [self.loaders[key] for key in self._keys]

    @property
    def flattened(self) -> list[Any]:
        """The loaders, in order, with nested collections flattened."""
        return [loader for member in self.members for loader in _leaves(member, self.mode)]

    @property
    def iterables(self) -> Any:
        """The loaders in their original, possibly nested collection."""
        return self.collect([one.iterables if _is_within(one, self.mode) else one for one in self.members])

    def map(self, function: Callable[[Any], Any]) -> CombinedLoader:
        """Returns a combined loader of the same form and mode, with ``function(loader)`` in place of each loader."""
        return CombinedLoader(self.collect([function(loader) for loader in self.members]), self.mode)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, from which the order of a restarted shorter loader is derived."""
        self._epoch = epoch

    def __len__(self) -> int:
        length = self.length()
        if length == math.inf:
            message = "a CombinedLoader has no len() where a loader in it has none"
            raise TypeError(message)
        return int(length)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        passes = self.flattened if self.mode == "sequential" else [self.batches()]
        for number, batches in enumerate(passes):
            yield from ((batch, index, number) for index, batch in enumerate(batches))

    def batches(self) -> CombinedPass:
        """Returns a pass from the beginning that yields batches only, without indices."""
        return self.behind([])

    def behind(self, places: Sequence[dict[str, Any]]) -> CombinedPass:
        """Returns a pass that begins at the positions ``places``, see :meth:`CombinedPass.places`; empty: at the beginning."""
        return CombinedPass(self, self._sources(places))

    def stopped(self, places: Sequence[dict[str, Any]]) -> CombinedPass:
        """Returns a pass at ``places`` whose end is repeated; it skips loaders that do not continue after a limited pass."""
        sources = self._sources(places)
        if self.mode != "sequential":
            nothing = _Source((), 0, cycles=False, place={}, again=False)
            sources = [one if goes_on_behind_a_pass(one.loader) else nothing for one in sources]
        return CombinedPass(self, sources)

    def _sources(self, places: Sequence[dict[str, Any]]) -> list[_Source]:
        cycles = self.mode == "max_size_cycle"
        begun = places or [{}] * len(self._keys)
        return [
            _Source(loader, self._epoch, cycles=cycles, place=place, again=self.again)
            for loader, place in zip(self.members, begun, strict=True)
        ]

    def batches_behind(self, places: Sequence[dict[str, Any]]) -> int:
        """Returns the number of batches before ``places``, also for places from a run with another batch size or world size."""
        whole = [known_length(loader) for loader in self.members]
        counts = [
            int(length) if place.get("rounds") and length < math.inf else batches_behind(loader, place)
            for loader, place, length in zip(self.members, places, whole, strict=True)
        ]
        if self.mode == "sequential":
            return sum(counts)
        # Only loaders in their first round give the count; a loader that started again counts from 0.
        return max((count for count, place in zip(counts, places, strict=True) if not place.get("rounds")), default=0)

    def length(self) -> int | float:
        """Returns the number of batches; inf if it depends on a loader without a length."""
        lengths = [known_length(loader) for loader in self.members]
        if self.mode == "sequential":
            return sum(lengths)
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def collect(self, values: list[Any]) -> Any:
        """Returns ``values``, one per loader, in a collection of the loaders' form."""
        if isinstance(self.loaders, dict):
            return dict(zip(self._keys, values, strict=True))
        return values if isinstance(self.loaders, list) else tuple(values)


class CombinedPass:
    """One pass over a :class:`CombinedLoader`; all modes except ``sequential`` open every loader's iterator at the start."""

    def __init__(self, combined: CombinedLoader, sources: list[_Source]) -> None:
        self._combined = combined
        self._sources = sources
        self._sequential = combined.mode == "sequential"
        self._ends_early = combined.mode == "min_size"
        self._given = 0
        # Before any loader is opened: entering a position within an order shortens the loader's len() until its first batch.
        self._left = combined.length() - combined.batches_behind([source.entered for source in sources])
        # The caller creates a resumed pass under temporary RNG states: a loader that the position is within has to be opened here,
        # and no other.
        opened = [one for one in sources if one.stands_within or not (one.ended or self._sequential)]
        for source in opened:
            source.open()
        for source in opened:  # only after all are open, as an uninterrupted run opens all before it reads a batch
            source.read_past()

    def __iter__(self) -> CombinedPass:
        return self

    def __next__(self) -> Any:
        self._given += 1
        for source in self._sources:
            source.note()
        if self._sequential:
            return self._next_in_turn()
        if self._left <= 0:
            raise StopIteration
        self._left -= 1
        batches = [source.take() for source in self._sources]
        ended = [source.ended for source in self._sources]
        if all(ended) or (self._ends_early and any(ended)):
            self._left = 0
            raise StopIteration
        return self._combined.collect(batches)

    def places(self, given: int) -> list[dict[str, Any]]:
        """Returns each loader's position after the last batch read; before it if ``given`` is one less than the batches read."""
        before = given == self._given - 1
        return [source.place_before() if before else source.place() for source in self._sources]

    def close(self) -> None:
        """Releases the loaders' iterators and ends their workers."""
        for source in self._sources:
            source.close()

    def _next_in_turn(self) -> Any:
        for source in self._sources:
            if source.ended:
                continue
            batch = source.take()
            if not source.ended:
                return batch
        raise StopIteration


class _Source:
    """Endless batches of one loader: after its end it starts again (``cycles``), or gives None."""

    def __init__(self, loader: Any, epoch: int, *, cycles: bool, place: dict[str, Any], again: bool) -> None:
        self.entered = place
        self.rounds = int(place.get("rounds", 0))
        self.loader = loader
        self._epoch = epoch
        self._cycles = cycles
        self._again = again
        self._given = self._unread = 0
        self._told: dict[str, Any] = {}
        self._batches: Iterator[Any] | None = None
        self._first: list[Any] = []  # the first batch of a begun round, if it had to be read under restored RNG states
        self._begins_round = False  # whether the batch that was taken last is the first of its round
        self._before: tuple[int, dict[str, Any], int, list[dict[str, Any]]]
        # RNG states before the pass was opened, and before its first batch: a resumed run reads skipped batches from these.
        self._drawn: list[dict[str, Any]] = list(place.get("drawn", ()))
        if self.ended and not cycles and "state" in place:
            enter(loader, place)

    @property
    def ended(self) -> bool:
        """Whether the loader has reached its end at least once."""
        return self.rounds > 0

    @property
    def stands_within(self) -> bool:
        """Whether the position is within a round, whose order is already drawn."""
        return bool(self.entered.get("batches") or self.entered.get(BEGUN))

    def open(self) -> None:
        """Begins the pass at its position, unless it has begun or has ended for good."""
        if self._batches is not None or (self.ended and not self._cycles):
            return
        self._choose_order()
        self._unread = enter(self.loader, self.entered) if self.entered else 0
        again = self._again or self.rounds > 0
        within = isinstance(self.loader, CombinedLoader)
        self._note_draws(0)
        self._batches = self.loader.batches() if within else begin(self.loader, again=again)

    def read_past(self) -> None:
        """Reads and drops the batches before the position, if the loader has no other way to it."""
        if self._unread and self._batches is not None:
            self._note_draws(1)
            next(itertools.islice(self._batches, self._unread, self._unread), None)
        if self.entered.get(BEGUN) and self._batches is not None and is_read_past(self.loader):
            self._note_draws(1)
            self._first = list(itertools.islice(self._batches, 1))
        self._unread = 0

    def _note_draws(self, moment: int) -> None:
        """Records the RNG states, or restores them from the run that began the pass; ``moment``: 0 opening, 1 first batch."""
        if not is_read_past(self.loader):
            return
        generators = generators_of([self.loader])
        if not self.stands_within:
            self._drawn[moment:] = [{"rng": capture_rng(), "generators": states_of(generators)}]
        elif len(self._drawn) > moment:
            restore(self._drawn[moment], generators)

    def take(self) -> Any:
        """Returns the next batch; None after the end of a loader that does not cycle."""
        self._begins_round = self._given == 0 and not self.entered.get("batches")
        batch, told = self._next(), self._told
        self._told = {}
        if batch is _END:
            batch = self._start_again(told)
        self._given += 1
        return batch

    def _next(self) -> Any:
        self.open()
        if self._first:
            return self._first.pop()
        if self._given == 0 and not self.stands_within:
            self._note_draws(1)
        return _END if self._batches is None else next(self._batches, _END)

    def _start_again(self, told: dict[str, Any]) -> Any:
        """Starts the loader again after its end and returns its next batch, or None.

        Corrects ``told`` in place, a position that was returned before the end was known: a stream resumed there would start anew.
        """
        self.close()
        # The state of a user's own loader may not record that it has ended.
        knows = isinstance(self.loader, DataLoader) and goes_on_behind_a_pass(self.loader)
        state = place_of(self.loader, {}, 0) if knows else {}
        if not self._cycles:
            if not self.ended:
                self.rounds = 1
                self.entered = {**state, "rounds": 1, "batches": self.entered.get("batches", 0) + self._given}
                told.update(self.entered if state else {})
            return None
        self.rounds += 1
        told.update({**state, "rounds": self.rounds} if state else {})
        self.entered, self._given = {}, 0
        self._begins_round = True
        batch = self._next()
        if batch is _END:
            raise ConfigError(
                f"CombinedLoader: {type(self.loader).__name__} ended and cannot start again; "
                "pass an object that can be iterated more than once, or mode='min_size'"
            )
        return batch

    def place(self) -> dict[str, Any]:
        """Returns the position of the pass."""
        if self.ended and not self._cycles:
            return self.entered
        if not self._told:
            self.note()
            self._told = self.place_before()
        return self._told

    def note(self) -> None:
        """Records the position of the pass for :meth:`place_before`."""
        self._begins_round = False
        self._before = self.rounds, self.entered, self._given, self._drawn

    def place_before(self) -> dict[str, Any]:
        """Returns the position at the last :meth:`note`; for a loader that keeps its own position, the present one."""
        rounds, entered, given, drawn = self._before
        if self.ended and not self._cycles and (rounds or not goes_on_behind_a_pass(self.loader)):
            return self.entered  # after the end, as reaching it may consume random numbers
        if self._begins_round and not goes_on_behind_a_pass(self.loader):
            # The order of the round is drawn: a run that resumes before its first batch must not draw another.
            place = {"rounds": self.rounds, **place_of(self.loader, {}, 0), BEGUN: True}
            return {**place, **({"drawn": self._drawn} if self._drawn else {})}
        return {"rounds": rounds, **place_of(self.loader, entered, given), **({"drawn": drawn} if drawn else {})}

    def close(self) -> None:
        """Releases the loader's iterator and ends its workers, unless they are persistent."""
        end_workers(self.loader, self._batches)
        self._batches = None

    def _choose_order(self) -> None:
        sampler = own_sampler(self.loader)
        if sampler is not None and self.rounds:
            sampler.set_epoch(self._epoch + self.rounds * _PASS)


def combine(loaders: Any, mode: Mode = "max_size_cycle") -> Any:
    """Returns a :class:`CombinedLoader` for a dict, list or tuple of loaders; anything else (a list of batches) unchanged."""
    loaders = own_containers(loaders)
    if not isinstance(loaders, dict | list | tuple) or not loaders:
        return loaders
    if isinstance(loaders, dict):
        return CombinedLoader(loaders, mode)
    are_loaders = [_is_loader(member) for member in loaders]
    if all(are_loaders):
        return CombinedLoader(loaders, mode)
    if any(are_loaders):
        kinds = ", ".join(type(member).__name__ for member in loaders)
        raise ConfigError(
            f"a collection of loaders holds something else too ({kinds}); pass only loaders, or only batches"
        )
    return loaders


def leaves_of(loader: Any) -> list[Any]:
    """Returns the flattened loaders of a CombinedLoader; for any other loader, a list of only that loader."""
    return loader.flattened if isinstance(loader, CombinedLoader) else [loader]


def _is_within(member: Any, mode: str) -> bool:
    """Whether ``member`` is a nested collection of loaders combined by ``mode``."""
    return isinstance(member, CombinedLoader) and member.mode == mode


def _leaves(member: Any, mode: str) -> list[Any]:
    return member.flattened if _is_within(member, mode) else [member]


def _is_loader(member: Any) -> bool:
    """Whether ``member`` is a loader or a collection of only loaders; arrays, tensors and batch classes are not."""
    if isinstance(member, DataLoader | CombinedLoader):
        return True
    if isinstance(member, dict | list | tuple):
        inner = member.values() if isinstance(member, dict) else member
        return len(member) > 0 and all(map(_is_loader, inner))
    # Arrays, tensors and batch classes (which have .to) are iterable too, but are batches.
    computed = isinstance(member, str | bytes | Mapping) or hasattr(member, "__array__") or hasattr(member, "to")
    return hasattr(member, "__iter__") and not computed


def exact_length(loader: Any) -> int | float:
    """Returns the number of batches if it is exact, else inf: the len of a loader over an IterableDataset is an estimate."""
    members = loader.members if isinstance(loader, CombinedLoader) else [loader]
    if any(isinstance(member, DataLoader) and isinstance(member.dataset, IterableDataset) for member in members):
        return math.inf
    return known_length(loader)
