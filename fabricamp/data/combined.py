"""Several loaders as one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader, IterableDataset

from fabricamp.arguments.checks import check_choice
from fabricamp.containers import own_containers
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
from fabricamp.keywords import NamesKeywords
from fabricamp.rng import capture_rng

Mode = Literal["max_size_cycle", "max_size", "min_size", "sequential"]
_PASS = 0x9E3779B1
"""Between the epochs that give passes over a shorter loader their order: odd and large, as generators use 32 bits of a seed."""
_END = object()


class CombinedLoader(NamesKeywords):
    """One batch of every loader at a time, in the collection they came in (dict, list or tuple; these may hold others).

    ``min_size``: as long as the shortest; ``max_size``: as long as the longest, None for those that ended;
    ``max_size_cycle``: as long as the longest, shorter ones start again (in another order where they are shuffled), which is what
    ``fit`` makes of a bare collection;
    ``sequential``: one loader after the other, its batches as they are; an evaluation keeps these loaders apart.

    Iterated by hand it gives ``(batch, batch_idx, dataloader_idx)``.

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
        """Whether the run has begun a pass before."""
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
        """The loaders, in order, those of collections within the collection in their place."""
        return [loader for member in self.members for loader in _leaves(member, self.mode)]

    @property
    def iterables(self) -> Any:
        """The loaders in the collection, or collections, that they came in."""
        return self.collect([one.iterables if _is_within(one, self.mode) else one for one in self.members])

    def map(self, function: Callable[[Any], Any]) -> CombinedLoader:
        """A combined loader like this one, of ``function(loader)`` of each."""
        return CombinedLoader(self.collect([function(loader) for loader in self.members]), self.mode)

    def set_epoch(self, epoch: int) -> None:
        """Remembers the epoch, from which a shorter loader that starts again derives its next order."""
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
        """A pass of batches alone, from the beginning."""
        return self.behind([])

    def behind(self, places: Sequence[dict[str, Any]]) -> CombinedPass:
        """A pass that begins where another one's :meth:`CombinedPass.places` were taken."""
        return CombinedPass(self, self._sources(places))

    def stopped(self, places: Sequence[dict[str, Any]]) -> CombinedPass:
        """The pass that stood at ``places``, to be ended once more: loaders that do not go on behind it are left alone."""
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
        """The number of batches that lie behind ``places``, whoever counted them."""
        whole = [known_length(loader) for loader in self.members]
        counts = [
            int(length) if place.get("rounds") and length < math.inf else batches_behind(loader, place)
            for loader, place, length in zip(self.members, places, whole, strict=True)
        ]
        if self.mode == "sequential":
            return sum(counts)
        # Those in their first round tell; a loader that starts again counts anew.
        return max((count for count, place in zip(counts, places, strict=True) if not place.get("rounds")), default=0)

    def length(self) -> int | float:
        """The number of batches, inf where a loader in it does not say."""
        lengths = [known_length(loader) for loader in self.members]
        if self.mode == "sequential":
            return sum(lengths)
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def collect(self, values: list[Any]) -> Any:
        """Returns one value of each loader, in the collection that they came in."""
        if isinstance(self.loaders, dict):
            return dict(zip(self._keys, values, strict=True))
        return values if isinstance(self.loaders, list) else tuple(values)


class CombinedPass:
    """One pass over a :class:`CombinedLoader`; all but the sequential mode have every loader's iterator from the start."""

    def __init__(self, combined: CombinedLoader, sources: list[_Source]) -> None:
        self._combined = combined
        self._sources = sources
        self._sequential = combined.mode == "sequential"
        self._ends_early = combined.mode == "min_size"
        self._given = 0
        # Before anything is opened: a pass that begins within its order makes its loader shorter until its first batch.
        self._left = combined.length() - combined.batches_behind([source.entered for source in sources])
        # A resumed pass, which the caller opens with other random numbers, has to open here what it stands in, and nothing else.
        opened = [one for one in sources if one.stands_within or not (one.ended or self._sequential)]
        for source in opened:
            source.open()
        for source in opened:  # whose first batches come when all are open
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
        """Where each loader stands behind the batch that was read last, or where ``given`` are one less, before it."""
        before = given == self._given - 1
        return [source.place_before() if before else source.place() for source in self._sources]

    def close(self) -> None:
        """Lets go of the loaders' iterators and ends their workers."""
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
    """Endless batches of one loader: behind its end comes its beginning again (``cycles``), or None."""

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
        self._first: list[Any] = []  # the batch that a begun round has to give first, where reading it draws
        self._begins_round = False  # whether the batch that was taken last is the first of its round
        self._before: tuple[int, dict[str, Any], int, list[dict[str, Any]]]
        # The generators before the pass began, and before its first batch: what is read past is drawn by them again.
        self._drawn: list[dict[str, Any]] = list(place.get("drawn", ()))
        if self.ended and not cycles and "state" in place:
            enter(loader, place)

    @property
    def ended(self) -> bool:
        """Whether the loader has come to its end before."""
        return self.rounds > 0

    @property
    def stands_within(self) -> bool:
        """Whether the place is one within a round, whose order is drawn."""
        return bool(self.entered.get("batches") or self.entered.get(BEGUN))

    def open(self) -> None:
        """Begins the pass at its place, unless it has begun, or has ended for good."""
        if self._batches is not None or (self.ended and not self._cycles):
            return
        self._choose_order()
        self._unread = enter(self.loader, self.entered) if self.entered else 0
        again = self._again or self.rounds > 0
        within = isinstance(self.loader, CombinedLoader)
        self._note_draws(0)
        self._batches = self.loader.batches() if within else begin(self.loader, again=again)

    def read_past(self) -> None:
        """Reads what lies before its place, where nothing else leads there."""
        if self._unread and self._batches is not None:
            self._note_draws(1)
            next(itertools.islice(self._batches, self._unread, self._unread), None)
        if self.entered.get(BEGUN) and self._batches is not None and is_read_past(self.loader):
            self._note_draws(1)
            self._first = list(itertools.islice(self._batches, 1))
        self._unread = 0

    def _note_draws(self, moment: int) -> None:
        """Notes the generators, or takes them from the run in which the pass began."""
        if not is_read_past(self.loader):
            return
        generators = generators_of([self.loader])
        if not self.stands_within:
            self._drawn[moment:] = [{"rng": capture_rng(), "generators": states_of(generators)}]
        elif len(self._drawn) > moment:
            restore(self._drawn[moment], generators)

    def take(self) -> Any:
        """The next batch."""
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
        """Behind the end, which was not known where the place before it was ``told``: streams would begin anew there."""
        self.close()
        # Loaders of one's own may not know in their state that they have ended.
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
        """Where the pass stands."""
        if self.ended and not self._cycles:
            return self.entered
        if not self._told:
            self.note()
            self._told = self.place_before()
        return self._told

    def note(self) -> None:
        """Notes where the pass stands."""
        self._begins_round = False
        self._before = self.rounds, self.entered, self._given, self._drawn

    def place_before(self) -> dict[str, Any]:
        """Where it stood when :meth:`note` was called; a loader that keeps its own position knows the present one alone."""
        rounds, entered, given, drawn = self._before
        if self.ended and not self._cycles and (rounds or not goes_on_behind_a_pass(self.loader)):
            return self.entered  # the end, which may draw, lies behind
        if self._begins_round and not goes_on_behind_a_pass(self.loader):
            # The order of the round is drawn: who goes on before its first batch must not draw another.
            place = {"rounds": self.rounds, **place_of(self.loader, {}, 0), BEGUN: True}
            return {**place, **({"drawn": self._drawn} if self._drawn else {})}
        return {"rounds": rounds, **place_of(self.loader, entered, given), **({"drawn": drawn} if drawn else {})}

    def close(self) -> None:
        """Lets go of the loader's iterator; its workers end, unless they are to wait for the next pass."""
        end_workers(self.loader, self._batches)
        self._batches = None

    def _choose_order(self) -> None:
        sampler = own_sampler(self.loader)
        if sampler is not None and self.rounds:
            sampler.set_epoch(self._epoch + self.rounds * _PASS)


def combine(loaders: Any, mode: Mode = "max_size_cycle") -> Any:
    """Returns a :class:`CombinedLoader` of a dict, list or tuple of loaders; anything else (a list of batches) as it is."""
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
    """The loaders within a CombinedLoader that give batches of their own; of any other loader itself."""
    return loader.flattened if isinstance(loader, CombinedLoader) else [loader]


def _is_within(member: Any, mode: str) -> bool:
    """Whether ``member`` stands for a collection within a collection of loaders that are combined by ``mode``."""
    return isinstance(member, CombinedLoader) and member.mode == mode


def _leaves(member: Any, mode: str) -> list[Any]:
    return member.flattened if _is_within(member, mode) else [member]


def _is_loader(member: Any) -> bool:
    """Whether ``member`` of a list is a loader, or a collection of nothing else; what is computed with is a batch."""
    if isinstance(member, DataLoader | CombinedLoader):
        return True
    if isinstance(member, dict | list | tuple):
        inner = member.values() if isinstance(member, dict) else member
        return len(member) > 0 and all(map(_is_loader, inner))
    # Arrays, tensors, and classes of batches (those move with .to) can be iterated too.
    computed = isinstance(member, str | bytes | Mapping) or hasattr(member, "__array__") or hasattr(member, "to")
    return hasattr(member, "__iter__") and not computed


def exact_length(loader: Any) -> int | float:
    """The number of batches where it can be relied on, else inf: an IterableDataset's len is an estimate."""
    members = loader.members if isinstance(loader, CombinedLoader) else [loader]
    if any(isinstance(member, DataLoader) and isinstance(member.dataset, IterableDataset) for member in members):
        return math.inf
    return known_length(loader)
