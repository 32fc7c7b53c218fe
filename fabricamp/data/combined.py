"""Combines several loaders into one: the combined loader, one pass over it, and the endless batches of each of its loaders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, get_args

from torch.utils.data import DataLoader, IterableDataset

from fabricamp._utils.containers import own_containers
from fabricamp._utils.keywords import NamesKeywords
from fabricamp._utils.types import Loader, StateDict
from fabricamp.arguments.checks import check_choice
from fabricamp.data.lengths import ends_by_samples, known_length, loader_length, most_batches_of
from fabricamp.data.position import (
    BEGUN,
    StreamPass,
    batches_before,
    begin,
    begin_stream,
    continues_after_limit,
    draw_order,
    end_pass,
    enter,
    generators_of,
    is_drawn_again,
    own_sampler,
    position_of,
    restore,
    states_of,
    without_first,
)
from fabricamp.errors import ConfigError
from fabricamp.rng import capture_rng

if TYPE_CHECKING:
    from fabricamp._utils.types import Batch

Mode = Literal["max_size_cycle", "max_size", "min_size", "sequential"]
_PASS = 0x9E3779B1
"""Epoch offset between rounds of a shorter loader, for their orders: odd and large, as generators use 32 bits of a seed."""
_END = object()


class CombinedLoader(NamesKeywords):
    """Yields one batch of every loader at a time, in a collection like the given one (dict, list or tuple, possibly nested).

    ``min_size``: as long as the shortest loader.
    ``max_size``: as long as the longest loader; finished loaders give None, each loader of a nested collection too.
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
        self._endings: list[StateDict] = [{} for _ in self._keys]
        """How each loader that keeps its own position ended its last pass, see :class:`_Source`."""
        members = [combine(loaders[key], mode) for key in self._keys]
        if any(member is not loaders[key] for member, key in zip(members, self._keys, strict=True)):
            self.loaders = self.collect(members)
        for key in self._keys:
            loader_length(self.loaders[key], f"CombinedLoader[{key!r}]")

    @property
    def members(self) -> list[Loader]:
        """The loaders, in order."""
        return [self.loaders[key] for key in self._keys]

    @property
    def flattened(self) -> list[Loader]:
        """The loaders, in order, with nested collections flattened."""
        loaders: list[Loader] = []
        for member in self.members:
            loaders += member.flattened if _is_nested(member, self.mode) else [member]
        return loaders

    @property
    def iterables(self) -> Any:
        """The loaders in their original, possibly nested collection."""
        return self.collect([member.iterables if _is_nested(member, self.mode) else member for member in self.members])

    def map(self, function: Callable[[Loader], Loader]) -> CombinedLoader:
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

    def __iter__(self) -> Iterator[tuple[Batch, int, int]]:
        passes = self.flattened if self.mode == "sequential" else [self.batches()]
        for number, batches in enumerate(passes):
            yield from ((batch, index, number) for index, batch in enumerate(batches))

    def batches(self) -> CombinedPass:
        """Returns a pass from the beginning that yields batches only, without indices."""
        return self.starting_at([])

    def starting_at(self, positions: Sequence[StateDict]) -> CombinedPass:
        """Returns a pass that begins at ``positions``, see :meth:`CombinedPass.positions`; empty: at the beginning."""
        return CombinedPass(self, self._sources(positions))

    def stopped(self, positions: Sequence[StateDict]) -> CombinedPass:
        """Returns a pass at ``positions`` whose end is repeated; it skips loaders that do not continue after a limited pass."""
        sources = self._sources(positions)
        if self.mode != "sequential":
            nothing = _Source((), 0, mode="max_size", entered={}, again=False, ending={})
            sources = [source if continues_after_limit(source.loader) else nothing for source in sources]
        return CombinedPass(self, sources)

    def _sources(self, positions: Sequence[StateDict]) -> list[_Source]:
        return [
            _Source(loader, self._epoch, mode=self.mode, entered=position, again=self.again, ending=ending)
            for loader, position, ending in zip(
                self.members, positions or [{}] * len(self._keys), self._endings, strict=True
            )
        ]

    def batches_before(self, positions: Sequence[StateDict]) -> int:
        """Returns the number of batches before ``positions``, also for those of a run with another batch size or world size."""
        in_first_round = []
        in_all = 0
        for loader, position in zip(self.members, positions, strict=True):
            count = batches_before(loader, position)
            ended = bool(position.get("rounds"))
            if ended and (length := exact_length(loader)) < math.inf:
                count = int(length)
            if not (ended and self.mode == "max_size_cycle"):
                in_first_round.append(count)
            in_all += count
        # A loader that started again counts from 0, so its position does not show how far the pass is.
        return in_all if self.mode == "sequential" else max(in_first_round, default=0)

    def length(self, length_of: Callable[[Loader], float] = known_length) -> int | float:
        """Returns the number of batches, from that of each loader; inf if it depends on a loader without a length."""
        lengths = [length_of(loader) for loader in self.members]
        if self.mode == "sequential":
            return sum(lengths)
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def nothing(self) -> Batch:
        """Returns what a ``max_size`` pass has in place of a batch of these loaders once all have ended: None for each."""
        return self.collect([member.nothing() if _is_nested(member, self.mode) else None for member in self.members])

    def collect(self, values: list[Any]) -> Any:
        """Returns ``values``, one per loader, in a collection of the loaders' form."""
        if isinstance(self.loaders, dict):
            return dict(zip(self._keys, values, strict=True))
        return values if isinstance(self.loaders, list) else tuple(values)


def _is_nested(member: object, mode: str) -> TypeGuard[CombinedLoader]:
    """Whether ``member`` is a nested collection of loaders combined by ``mode``."""
    return isinstance(member, CombinedLoader) and member.mode == mode


class CombinedPass:
    """One pass over a :class:`CombinedLoader`; all modes except ``sequential`` open every loader's iterator at the start."""

    def __init__(self, combined: CombinedLoader, sources: list[_Source]) -> None:
        self._combined = combined
        self._sources = sources
        self._sequential = combined.mode == "sequential"
        self._ends_early = combined.mode == "min_size"
        self._read = 0  # number of batches that were asked for
        # Before any loader is opened: entering a position within an order shortens the loader's len() until its first batch.
        self._before = combined.batches_before([source.entered for source in sources])
        self._left = most_batches(combined) - self._before
        self._lengths = [known_length(source.loader) for source in sources]
        # An end by samples is seen when it is there; a loader after the other ends by itself.
        self._looks_for_end = not self._sequential and any(ends_by_samples(source.loader) for source in sources)
        # The caller creates a resumed pass under temporary RNG states: a loader that the position is within has to be opened here,
        # and no other.
        opened = [source for source in sources if source.is_within or not (source.ended or self._sequential)]
        for source in opened:
            source.open()
        for source in opened:  # only after all are open, as an uninterrupted run opens all before it reads a batch
            source.read_past()

    def __iter__(self) -> CombinedPass:
        return self

    def __next__(self) -> Batch:
        self._read += 1
        for source in self._sources:
            source.record()
        if self._sequential:
            return self._next_in_turn()
        if self._left <= 0 or (self._looks_for_end and self._is_complete()):
            raise StopIteration
        self._left -= 1
        batches = [source.take() for source in self._sources]
        ended = [source.ended for source in self._sources]
        if all(ended) or (self._ends_early and any(ended)):
            self._left = 0
            raise StopIteration
        return self._combined.collect(batches)

    def _is_complete(self) -> bool:
        """Whether the loaders, or for ``min_size`` one of them, have given as many batches or samples as their lengths say."""
        done = self._before + self._read - 1
        complete = [
            source.is_complete if ends_by_samples(source.loader) else done >= length
            for source, length in zip(self._sources, self._lengths, strict=True)
        ]
        return any(complete) if self._ends_early else all(complete)

    def _next_in_turn(self) -> Batch:
        for source in self._sources:
            if source.ended:
                continue
            batch = source.take()
            if not source.ended:
                return batch
        raise StopIteration

    def positions(self, read: int) -> list[StateDict]:
        """Returns each loader's position after the last batch read; before it if ``read`` is one less than the batches read."""
        if read == self._read - 1:
            return [source.recorded_position() for source in self._sources]
        return [source.position() for source in self._sources]

    def close(self) -> None:
        """Releases the loaders' iterators and ends their workers."""
        for source in self._sources:
            source.close()


class _Source:
    """Endless batches of one loader: after its end it starts again (``mode="max_size_cycle"``), or gives None.

    A round is one pass over the loader.

    ``ending`` is kept from pass to pass, and changed in place: how the last round over a loader that keeps its own position ended.
    It has the loader's ``state`` before its last batch, and the number of ``reads`` since, the one that found the end included.
    Another process repeats them: the state after the end may be one from which the loader ends, or begins its next round.
    """

    def __init__(
        self, loader: Loader, epoch: int, *, mode: Mode, entered: StateDict, again: bool, ending: StateDict
    ) -> None:
        self.loader = loader
        self.entered = entered
        """The position at which the present round was entered; after the end of a loader that does not cycle, that end."""
        self.rounds = int(entered.get("rounds", 0))
        """Number of times that the loader has ended."""
        self._epoch = epoch
        self._cycles = cycles = mode == "max_size_cycle"
        # Beside other loaders a stream goes on beyond its len(), as long as the pass does.
        self._ends_by_samples = mode == "sequential"
        self._again = again
        self._read = 0  # number of batches of this round since it was entered
        self._unread = 0  # number of batches to read past before the first one
        self._batches: Iterator[Batch] | None = None
        self._has_opened = False  # in this pass
        self._first: list[Any] = []  # the first batch of a begun round, if it had to be read under restored RNG states
        self._begins_round = False  # whether the batch that was taken last is the first of its round
        # The position as it was before the last batch: rounds, entered, read, drawn.
        self._recorded: tuple[int, dict[str, Any], int, list[dict[str, Any]]]
        # The position that was returned since the last batch; it is corrected if the next batch is beyond the loader's end.
        self._returned: StateDict = {}
        self._ending = ending
        self._keeps_ending = not cycles and continues_after_limit(loader)
        self._in_work: StateDict = {}  # the ending, if this round were to end after its last batch
        # RNG states before the pass was opened, and before its first batch: a resumed run reads skipped batches from these.
        self._drawn: list[StateDict] = list(entered.get("rng_states", ()))
        if "ending" in entered:
            self._end_again(entered["ending"])
        elif self.ended and not cycles and "state" in entered:
            enter(loader, entered)

    @property
    def ended(self) -> bool:
        """Whether the loader has reached its end at least once."""
        return self.rounds > 0

    @property
    def is_complete(self) -> bool:
        """Whether the loader has given as many samples as its ``len()`` says, or has ended."""
        return self.ended or (isinstance(self._batches, StreamPass) and self._batches.complete)

    @property
    def is_within(self) -> bool:
        """Whether the position is within a round, whose order is already drawn."""
        return bool(self.entered.get("batches") or self.entered.get(BEGUN))

    def _end_again(self, ending: StateDict) -> None:
        """Repeats the end of the last round, which another process has read."""
        self._ending.update(ending)
        enter(self.loader, ending)
        batches = begin(self.loader, again=True)
        without_first(batches, ending["reads"])
        end_pass(self.loader, batches)

    def open(self) -> None:
        """Begins the pass at its position, unless it has begun or has ended for good."""
        if self._batches is not None or (self.ended and not self._cycles):
            return
        sampler = own_sampler(self.loader)
        if sampler is not None and self.rounds and not is_drawn_again(self.loader):
            sampler.set_epoch(self._epoch + self.rounds * _PASS)
        self._unread = enter(self.loader, self.entered) if self.entered else 0
        if "state" in self.entered:
            self._in_work = {"state": self.entered["state"], "reads": 0}
        self._ending.clear()
        self._has_opened = True
        self._record_draws(0)
        if isinstance(self.loader, CombinedLoader):
            self._batches = self.loader.batches()
        else:
            position = {} if self._unread else self.entered
            again = self._again or self.rounds > 0
            self._batches = begin_stream(self.loader, position, again=again, ends=self._ends_by_samples)

    def read_past(self) -> None:
        """Reads and drops the batches before the position, if the loader has no other way to it."""
        if self._unread and self._batches is not None:
            self._record_draws(1)
            without_first(self._batches, self._unread)
        if self.is_within and own_sampler(self.loader) is not None and is_drawn_again(self.loader):
            self._record_draws(1)
            draw_order(self.loader)
        if self.entered.get(BEGUN) and self._batches is not None and is_drawn_again(self.loader):
            # Reading the first batch draws the order, which the run has drawn before.
            self._record_draws(1)
            batch = next(self._batches, _END)
            self._first = [] if batch is _END else [batch]
        self._unread = 0

    def _record_draws(self, moment: int) -> None:
        """Records the RNG states, or restores them from the run that began the pass; ``moment``: 0 opening, 1 first batch."""
        if not is_drawn_again(self.loader):
            return
        generators = generators_of([self.loader])
        if not self.is_within:
            self._drawn[moment:] = [{"rng": capture_rng(), "generators": states_of(generators)}]
        elif len(self._drawn) > moment:
            restore(self._drawn[moment], generators)

    def take(self) -> Batch:
        """Returns the next batch; None after the end of a loader that does not cycle, as :meth:`CombinedLoader.nothing` has it."""
        self._begins_round = self._read == 0 and not self.entered.get("batches")
        batch = self._next()
        returned = self._returned
        self._returned = {}
        if self._in_work:
            self._in_work["reads"] += 1
        if batch is _END:
            batch = self._start_again(returned)
        elif "state" in returned:
            self._in_work = {"state": returned["state"], "reads": 1}
        self._read += 1
        return batch

    def _next(self) -> Batch:
        self.open()
        if self._first:
            return self._first.pop()
        if self._read == 0 and not self.is_within:
            self._record_draws(1)
        return _END if self._batches is None else next(self._batches, _END)

    def _start_again(self, returned: StateDict) -> Batch:
        """Starts the loader again after its end and returns its next batch; None (of each nested loader) if it does not cycle.

        Corrects ``returned`` in place, a position from before the end was known: a stream resumed there would start anew.
        """
        self.close()
        # The state of a user's own loader may not record that it has ended.
        knows = isinstance(self.loader, DataLoader) and "state" in returned
        if not self._cycles:
            if not self.ended:
                self.rounds = 1
                self.entered = {"rounds": 1, "batches": self.entered.get("batches", 0) + self._read}
                if self._ending:
                    self.entered["ending"] = dict(self._ending)
                elif knows:  # after a round of a single batch, the state before which is not known
                    self.entered["state"] = position_of(self.loader, {}, 0)["state"]
                if "state" in returned:
                    del returned["state"]
                    returned.update(self.entered)
            if isinstance(self.loader, CombinedLoader) and self.loader.mode == "max_size":
                return self.loader.nothing()
            return None
        self.rounds += 1
        if knows:
            returned.update({**position_of(self.loader, {}, 0), "rounds": self.rounds})
        self.entered = {}
        self._read = 0
        self._begins_round = True
        batch = self._next()
        if batch is _END:
            raise ConfigError(
                f"CombinedLoader: {type(self.loader).__name__} ended and cannot start again; "
                "pass an object that can be iterated more than once, or mode='min_size'"
            )
        return batch

    def record(self) -> None:
        """Records the position of the pass for :meth:`recorded_position`."""
        self._begins_round = False
        self._recorded = (self.rounds, self.entered, self._read, self._drawn)

    def recorded_position(self) -> StateDict:
        """Returns the position at the last :meth:`record`; for a loader that keeps its own position, the present one."""
        rounds, entered, read, drawn = self._recorded
        if self.ended and not self._cycles and (rounds or not continues_after_limit(self.loader)):
            return self.entered  # after the end, as reaching it may consume random numbers
        if self._keeps_ending and not self._has_opened:
            # This round has not begun: the loader is where its last one ended, or as it was made.
            return {"rounds": 0, "batches": 0, **({"ending": dict(self._ending)} if self._ending else {})}
        if self._begins_round and not continues_after_limit(self.loader):
            # The order of the round is drawn: a run that resumes before its first batch must not draw another.
            position = {"rounds": self.rounds, **position_of(self.loader, {}, 0), BEGUN: True}
            drawn = self._drawn
        else:
            position = {"rounds": rounds, **position_of(self.loader, entered, read)}
        if drawn:
            position["rng_states"] = drawn
        if isinstance(self._batches, StreamPass) and continues_after_limit(self.loader):
            position["stream_samples"] = self._batches.samples
        return position

    def position(self) -> StateDict:
        """Returns the position of the pass."""
        if self.ended and not self._cycles:
            return self.entered
        if not self._returned:
            self.record()
            self._returned = self.recorded_position()
        return self._returned

    def close(self) -> None:
        """Releases the loader's iterator and ends its workers, unless they are persistent."""
        end_pass(self.loader, self._batches)
        self._batches = None
        if self._keeps_ending and self._in_work:
            self._ending.update(self._in_work)
            self._in_work = {}


def combine(loaders: object, mode: Mode = "max_size_cycle") -> Any:
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


def _is_loader(member: object) -> bool:
    """Whether ``member`` is a loader or a collection of only loaders; arrays, tensors and batch classes are not."""
    if isinstance(member, DataLoader | CombinedLoader):
        return True
    if isinstance(member, dict | list | tuple):
        inner = member.values() if isinstance(member, dict) else member
        return len(member) > 0 and all(map(_is_loader, inner))
    # Arrays, tensors and batch classes (which have .to) are iterable too, but are batches.
    computed = isinstance(member, str | bytes | Mapping) or hasattr(member, "__array__") or hasattr(member, "to")
    return hasattr(member, "__iter__") and not computed


def leaves_of(loader: Loader) -> list[Loader]:
    """Returns the flattened loaders of a CombinedLoader; for any other loader, a list of only that loader."""
    return loader.flattened if isinstance(loader, CombinedLoader) else [loader]


def most_batches(loader: Loader) -> int | float:
    """Returns the largest number of batches of a pass: ``len(loader)``, unless samples of a stream decide; inf if it has none."""
    return loader.length(most_batches) if isinstance(loader, CombinedLoader) else most_batches_of(loader)


def exact_length(loader: Loader) -> int | float:
    """Returns the number of batches if it is exact, else inf: the len of a loader over an IterableDataset is an estimate."""
    members = loader.members if isinstance(loader, CombinedLoader) else [loader]
    if any(isinstance(member, DataLoader) and isinstance(member.dataset, IterableDataset) for member in members):
        return math.inf
    return known_length(loader)
