"""Orders of an epoch's samples: drawn by torch's RandomSampler or by a user's, or from (seed, epoch) as in DistributedSampler."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple, cast

import torch
from torch import Generator, Tensor
from torch.utils.data import RandomSampler

from fabricamp._utils.say_once import say_once
from fabricamp._utils.types import StateDict
from fabricamp.errors import ConfigError
from fabricamp.rng import capture_rng, isolate_rng, restore_rng

DRAWN = "drawn"
SEEDED = "seeded"
IN_ORDER = "in order"
GIVEN = "given"
_CHUNK = 1 << 16
"""Indices converted to Python integers at a time: a list of all indices takes five times the memory of their tensor."""
_SENT = 1 << 20
"""Items of a user's sampler that one message to the other ranks holds."""
_AHEAD = 1 << 10
"""Items that are drawn ahead from a sampler without a length."""


class Draw(NamedTuple):
    """The generator's ``state`` just before an RNG draw, and the number of samples yielded by then (``at``)."""

    at: int
    state: Tensor


class SeededOrder:
    """The order of torch's ``DistributedSampler``: a permutation from seed + epoch, or the dataset's own order."""

    draws: Sequence[Draw] = ()
    together = False
    reads_to_end = True

    def __init__(self, size: int, *, shuffle: bool, seed: int) -> None:
        self.rule = SEEDED if shuffle else IN_ORDER
        self.size = size
        self.seed = seed
        self.epoch = 0

    @property
    def tag(self) -> tuple[int, ...]:
        """The numbers that, with the sample's index, seed the augmentation of the pass's samples."""
        return self.seed, self.epoch

    def all(self) -> Tensor:
        """Returns the samples of the epoch, int64."""
        if self.rule == IN_ORDER:
            return torch.arange(self.size, dtype=torch.int64, device="cpu")
        generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
        return torch.randperm(self.size, generator=generator, dtype=torch.int64, device="cpu")

    def starting_at(self, start: int) -> Iterator[int]:
        """Returns the samples of the epoch without the first ``start``."""
        return numbers(self.all()[start:])

    def enter(self, start: int, draws: Sequence[Draw]) -> None:
        """Does nothing: the order follows from the epoch alone."""

    def state_dict(self) -> StateDict:
        """Returns the state with which another process can continue in this order."""
        return {"rule": self.rule, "seed": self.seed}

    def load_state_dict(self, state: StateDict, draws: Sequence[Draw] = ()) -> None:
        """Restores the state that :meth:`state_dict` returned."""
        self.seed = int(state["seed"])


class DrawnOrder:
    """The order that torch's ``RandomSampler`` draws from the global generator, or from its own, when samples are requested.

    Records the generator's state before each draw, so that a resumed pass can repeat the draws.  ``window`` is the largest number
    of samples that are drawn, but not trained on yet.

    If several ranks share the order, ``from_first`` returns the first rank's value on every rank.  All ranks draw from the state of
    the first rank's generator.  That generator advances as in a single process; the generators of the other ranks are restored.
    :meth:`draw_apart` draws passes one after the other from a separate state that all ranks have.

    ``reads_to_end``: a pass asks torch's sampler what follows its last sample, which draws once more from its own generator, as in
    a plain loop; without it, a pass ends at its last sample.
    """

    rule = DRAWN

    def __init__(
        self,
        sampler: RandomSampler,
        *,
        window: int = 0,
        from_first: Callable[[Tensor], Tensor] | None = None,
        is_first: bool = True,
        reads_to_end: bool = True,
    ) -> None:
        self.size = len(sampler)
        self.reads_to_end = reads_to_end
        self.generator: Generator | None = sampler.generator
        self.draws: list[Draw] = []
        self.together = False
        """Whether all ranks begin the next pass; a pass that a user begins on a single rank draws from its own generator."""
        self.epoch = 0
        self._sampler = sampler
        self._window = window
        self._from_first = from_first
        self._is_first = is_first
        self._apart: Tensor | None = None
        self._entered: list[Draw] = []
        # From a generator of its own, torch's sampler draws while the samples are read, unless a pass is a single permutation.
        # From the global generator it only draws a seed, at the first sample.
        self._draws_on = self.generator is not None and (sampler.replacement or self.size > len(sampler.data_source))

    @property
    def once(self) -> bool:
        """Whether a pass has every sample exactly once."""
        return not self._sampler.replacement and self.size == len(self._sampler.data_source)

    @property
    def tag(self) -> tuple[int, ...]:
        """The number that, with the sample's index, seeds the augmentation of the pass's samples; known after the first draw."""
        digest = hashlib.sha256(self.draws[0].state.numpy().tobytes()).digest()
        return (int.from_bytes(digest[:8], "little"),)

    def draw_apart(self, state: Tensor) -> None:
        """Draws the next pass from ``state`` and each later pass from the state after the one before; restores the generator."""
        self._apart = state.cpu()

    def all(self) -> Tensor:
        """Returns the samples of a pass, int64, drawn at once and equal on all ranks."""
        generator = self._generator
        before = generator.get_state()
        after = before
        is_resumed = bool(self._entered)
        try:
            generator.set_state(self._common_state(before))
            samples = torch.tensor(self._drawn_at_once(), dtype=torch.int64, device="cpu")
            if self._apart is not None:
                self._apart = generator.get_state()
            elif self._is_first and not is_resumed:  # a resumed pass consumed its random numbers when it began
                after = generator.get_state()
        finally:
            generator.set_state(after)
        return samples

    def starting_at(self, start: int) -> Iterator[int]:
        """Returns the samples of a pass without the first ``start``."""
        if self._apart is not None or self._from_first is not None:
            return numbers(self.all()[start:])
        if not self._entered:
            samples = self._drawn_on_its_device()
            next(itertools.islice(samples, start, start), None)
            return samples
        generator = self._generator
        before = generator.get_state()
        samples = self._drawn_on_its_device()
        # The draws of the skipped samples are repeated here, without an effect on the generator.
        next(itertools.islice(samples, start, start), None)
        generator.set_state(before)
        return samples

    def enter(self, start: int, draws: Sequence[Draw]) -> None:
        """Makes the next pass repeat the recorded ``draws``."""
        self._entered = list(draws)
        if self._entered and self._apart is not None:
            self._apart = self._entered[0].state

    def state_dict(self) -> StateDict:
        """Returns the state with which another process can continue in this order."""
        return {
            "rule": self.rule,
            "reads_to_end": self.reads_to_end,
            "separate": self._apart is not None,
            "state": self._generator.get_state() if self._apart is None else self._apart,
        }

    def load_state_dict(self, state: StateDict, draws: Sequence[Draw] = ()) -> None:
        """Restores the state that :meth:`state_dict` returned in a pass with the recorded ``draws``, except for the generator.

        The run restores the generator with all others.  If a single process drew the pass and several ranks resume it, the draws
        that it would have made by the end of the pass are made here, if the generator is the sampler's own.
        """
        self.reads_to_end = bool(state.get("reads_to_end", True))  # the rule with which the run began
        self._apart = state["state"].cpu() if state["separate"] else None
        own = self.generator is not None and self.generator is not torch.default_generator
        if self._apart is None and self._from_first is not None and own and draws:
            self._entered = list(draws)
            self._drawn_at_once()

    @property
    def _generator(self) -> Generator:
        return torch.default_generator if self.generator is None else self.generator

    def _common_state(self, own: Tensor) -> Tensor:
        """Returns the generator state from which all ranks draw the next pass."""
        all_ranks_begin = self.together
        self.together = False
        if self._entered:
            return self._entered[0].state
        if self._apart is not None:
            return self._apart
        return self._from_first(own) if self._from_first is not None and all_ranks_begin else own

    def _drawn_on_its_device(self) -> Iterator[int]:
        """Yields the samples of a pass under any default device of torch: a generator only draws on its own device."""
        device = self._generator.device
        if torch.get_default_device().type == device.type:
            return self._drawn()
        return iter(self._drawn_at_once())

    def _drawn_at_once(self) -> list[int]:
        with self._generator.device:
            drawn = self._drawn()
            return list(drawn if self.reads_to_end else itertools.islice(drawn, self.size))

    def _drawn(self) -> Iterator[int]:
        to_repeat = self._entered
        self._entered = []
        generator = self._generator
        source = iter(self._sampler)
        self.draws = []
        for number in itertools.count():
            if to_repeat and to_repeat[0].at == number:
                generator.set_state(to_repeat.pop(0).state)
            before = generator.get_state()
            # Torch's sampler draws within next(), if at all: the generator's state shows whether it did.
            index = next(source, None)
            if index is None:
                return
            if number == 0 or before.numpy().tobytes() != generator.get_state().numpy().tobytes():
                # Drops draws that no resume point needs any more, but keeps the first.
                while len(self.draws) > 2 and self.draws[2].at + self._window <= number:
                    del self.draws[1]
                self.draws.append(Draw(number, before))
            yield index
            if not self._draws_on:  # no further draw to look for
                yield from source
                return


class GivenOrder:
    """The order that a user's sampler yields on the first rank: its indices, or a batch sampler's batches.

    Every rank draws a complete pass from its sampler, at once, and then takes the first rank's items instead, which
    ``from_first`` returns.  So the generators of all ranks advance, and rank 0's as in a single process.

    A sampler without a length may be endless.  Each rank draws its items in turn, from the RNG states that the first rank had at
    the beginning of the pass; no generator advances.
    """

    rule = GIVEN
    draws: Sequence[Draw] = ()
    reads_to_end = True

    def __init__(self, sampler: Iterable[Any], *, from_first: Callable[[Any], Any], is_first: bool) -> None:
        self.together = False
        """Whether all ranks begin the next pass; a pass that a user begins on a single rank has the order drawn there."""
        self._sampler = sampler
        self._from_first = from_first
        self._is_first = is_first
        self._epoch = 0
        self._is_within = False  # whether the next pass is entered after its first sample
        self._ready: Tensor | list[Any] | Iterator[Any] | None = None
        self._digest = b""  # of the last order that was drawn
        self._entered_digest = b""  # of the order that a resumed pass has to repeat

    @property
    def size(self) -> int:
        """The number of items in a pass; raises TypeError for a sampler without a length."""
        return len(cast("Sized", self._sampler))

    @property
    def has_size(self) -> bool:
        """Whether the sampler has a length."""
        try:
            return self.size >= 0
        except (TypeError, NotImplementedError):
            return False

    @property
    def epoch(self) -> int:
        """The epoch; setting it calls the sampler's ``set_epoch``, if it has one."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch
        own_set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(own_set_epoch):
            own_set_epoch(epoch)

    def all(self) -> Tensor | list[Any]:
        """Returns the items of a pass, equal on all ranks: indices as int64, anything else in a list."""
        items = self._taken()
        assert isinstance(items, Tensor | list)
        return items

    def in_turn(self) -> Iterator[Any]:
        """Yields the items of a pass of a sampler without a length."""
        items = self._taken()
        assert isinstance(items, Iterator)
        return items

    def enter(self, start: int, draws: Sequence[Draw]) -> None:
        """Makes the next pass repeat an order; its RNG states are restored when it is drawn (:meth:`draw`)."""
        self._is_within = start > 0
        self._ready = None

    def draw(self) -> None:
        """Draws the order of an entered pass now, under the RNG states of its beginning, unless opening the loader has done so."""
        if self._is_within:
            self._ready = self._drawn()

    def state_dict(self) -> StateDict:
        """Returns the rule, and a digest of the present order: a sampler with a state of its own may not repeat it."""
        return {"rule": self.rule, "digest": self._digest.hex()}

    def load_state_dict(self, state: StateDict, draws: Sequence[Draw] = ()) -> None:
        """Restores the state that :meth:`state_dict` returned."""
        self._entered_digest = bytes.fromhex(state["digest"])

    def _taken(self) -> Tensor | list[Any] | Iterator[Any]:
        ready = self._ready
        self._ready = None
        return self._drawn() if ready is None else ready

    def _drawn(self) -> Tensor | list[Any] | Iterator[Any]:
        from_first = self._from_first if self.together else _same
        self.together = False
        is_within = self._is_within
        self._is_within = False
        if not self.has_size:
            return self._drawn_in_turn(from_first(capture_rng()))
        items = self._drawn_at_once(from_first)
        if is_within and self._entered_digest not in (b"", self._digest) and self._is_first:
            say_once(
                f"{type(self._sampler).__name__} does not repeat the order in which this epoch began: some samples come twice, "
                "others not at all; let its order follow from set_epoch, or from torch's, NumPy's or Python's global generator"
            )
        return items

    def _drawn_at_once(self, from_first: Callable[[Any], Any]) -> Tensor | list[Any]:
        size = from_first(self.size)
        own = iter(self._sampler)
        digest = hashlib.sha256()
        parts: list[Tensor | list[Any]] = []
        for sent in range(0, size, _SENT):
            part = from_first(_as_tensor(list(itertools.islice(own, min(_SENT, size - sent)))))
            digest.update(part.numpy().tobytes() if isinstance(part, Tensor) else repr(part).encode())
            parts.append(part)
        self._digest = digest.digest()
        count = sum(map(len, parts))
        if count < size:
            raise ConfigError(
                f"{type(self._sampler).__name__} announced {size} by its len() but ended after {count}; make its __len__ exact"
            )
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if len(tensors) == len(parts):
            return torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.int64, device="cpu")
        return [item for part in parts for item in (part.tolist() if isinstance(part, Tensor) else part)]

    def _drawn_in_turn(self, state: StateDict) -> Iterator[Any]:
        items = iter(self._sampler)
        state = {**state, "cuda": []}  # a sampler draws in host memory
        while True:
            with isolate_rng():
                restore_rng(state)
                chunk = list(itertools.islice(items, _AHEAD))
                state = {**capture_rng(), "cuda": []}
            if not chunk:
                return
            yield from chunk


Order = SeededOrder | DrawnOrder | GivenOrder


def _same(value: Any) -> Any:
    return value


def _as_tensor(items: list[Any]) -> Tensor | list[Any]:
    """Returns indices as int64, a fifth of their memory; other items, such as batches, as they are."""
    if all(type(item) is int for item in items):
        return torch.tensor(items, dtype=torch.int64, device="cpu")
    return items


def numbers(indices: Tensor) -> Iterator[int]:
    """Yields ``indices`` as Python integers."""
    return itertools.chain.from_iterable(chunk.tolist() for chunk in torch.split(indices, _CHUNK))
