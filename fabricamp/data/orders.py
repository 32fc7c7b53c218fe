"""How the samples of an epoch are ordered: drawn by torch's own sampler, or by a seed and the epoch as DistributedSampler does."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils.data import RandomSampler

DRAWN = "drawn"
SEEDED = "seeded"
IN_ORDER = "in order"
_CHUNK = 1 << 16
"""Indices turned into Python integers at a time: a list of all of them takes five times the memory of the tensor."""


class Draw(NamedTuple):
    """The generator's ``state`` from just before a draw, and how many samples had been handed out by then."""

    at: int
    state: Tensor


class SeededOrder:
    """The order of torch's ``DistributedSampler``: a permutation of (seed + epoch), or the data set's own."""

    draws: Sequence[Draw] = ()
    together = False

    def __init__(self, size: int, *, shuffle: bool, seed: int) -> None:
        self.rule = SEEDED if shuffle else IN_ORDER
        self.size = size
        self.seed = seed
        self.epoch = 0

    @property
    def tag(self) -> tuple[int, ...]:
        """What the random numbers of the pass's samples follow from, beside the sample."""
        return self.seed, self.epoch

    def all(self) -> Tensor:
        """The samples of the epoch, int64."""
        if self.rule == IN_ORDER:
            return torch.arange(self.size, dtype=torch.int64, device="cpu")
        generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
        return torch.randperm(self.size, generator=generator, dtype=torch.int64, device="cpu")

    def behind(self, start: int) -> Iterator[int]:
        """The samples of the epoch but for the first ``start``."""
        return numbers(self.all()[start:])

    def enter(self, start: int, draws: Sequence[Draw]) -> None:
        """Nothing has to be known of a pass that was begun: the epoch says it all."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what another process needs to go on by this rule."""
        return {"rule": self.rule, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any], draws: Sequence[Draw] = ()) -> None:
        """Restores the state that :meth:`state_dict` returned."""
        self.seed = int(state["seed"])


class DrawnOrder:
    """The order that torch's ``RandomSampler`` draws, from the global generator or from its own, when it is asked for samples.

    It notes the generator's state before each draw, from which a resumed pass draws the same again; ``window`` is how many samples
    may have been drawn and not been trained on yet.  Where several ranks share the order, ``from_first`` returns the first one's
    value on each of them: its generator draws as that of a single process would, and the others', who draw from its state, are
    left as they are.  :meth:`draw_apart` lets passes be drawn one after the other from a state that all have.
    """

    rule = DRAWN

    def __init__(
        self,
        sampler: RandomSampler,
        *,
        window: int = 0,
        from_first: Callable[[Tensor], Tensor] | None = None,
        is_first: bool = True,
    ) -> None:
        self.size = len(sampler)
        self.generator: Generator | None = sampler.generator
        self.draws: list[Draw] = []
        self.together = False
        """Whether the pass that begins next is one of all ranks; others, which a user begins on one, draw for themselves."""
        self.epoch = 0
        self._sampler = sampler
        self._window = window
        self._from_first = from_first
        self._is_first = is_first
        self._apart: Tensor | None = None
        self._entered: list[Draw] = []
        # All but one permutation from a generator that nobody else has come to be while the samples are read.
        self._draws_on = self.generator is not None and (sampler.replacement or self.size > len(sampler.data_source))

    @property
    def once(self) -> bool:
        """Whether a pass has every sample once."""
        return not self._sampler.replacement and self.size == len(self._sampler.data_source)

    @property
    def tag(self) -> tuple[int, ...]:
        """What the random numbers of the pass's samples follow from, beside the sample; known from the first draw on."""
        digest = hashlib.sha256(self.draws[0].state.numpy().tobytes()).digest()
        return (int.from_bytes(digest[:8], "little"),)

    def draw_apart(self, state: Tensor) -> None:
        """Lets every pass from now on be drawn behind the one before, the next from ``state``; the generator is left as it is."""
        self._apart = state.cpu()

    def all(self) -> Tensor:
        """The samples of a pass, int64, drawn at once and by all ranks alike."""
        generator, before = self._generator, self._generator.get_state()
        entered, after = bool(self._entered), before
        try:
            generator.set_state(self._common_state(before))
            samples = torch.tensor(list(self._drawn_on_its_device()), dtype=torch.int64, device="cpu")
            if self._apart is not None:
                self._apart = generator.get_state()
            elif self._is_first and not entered:  # a pass that was begun before was drawn then
                after = generator.get_state()
        finally:
            generator.set_state(after)
        return samples

    def behind(self, start: int) -> Iterator[int]:
        """The samples of a pass but for the first ``start``."""
        if self._apart is not None or self._from_first is not None:
            return numbers(self.all()[start:])
        if not self._entered:
            samples = self._drawn_on_its_device()
            next(itertools.islice(samples, start, start), None)
            return samples
        generator, before = self._generator, self._generator.get_state()
        samples = self._drawn_on_its_device()
        # The draws that lie behind are made here, and leave no trace.
        next(itertools.islice(samples, start, start), None)
        generator.set_state(before)
        return samples

    def enter(self, start: int, draws: Sequence[Draw]) -> None:
        """Lets the next pass be the one of which ``draws`` were noted."""
        self._entered = list(draws)
        if self._entered and self._apart is not None:
            self._apart = self._entered[0].state

    def state_dict(self) -> dict[str, Any]:
        """Returns what another process needs to go on by this rule."""
        return {
            "rule": self.rule,
            "apart": self._apart is not None,
            "state": self._generator.get_state() if self._apart is None else self._apart,
        }

    def load_state_dict(self, state: dict[str, Any], draws: Sequence[Draw] = ()) -> None:
        """Takes back what :meth:`state_dict` gave in a pass of which ``draws`` were noted, but for the generator.

        A run restores that with all others.  Where one process drew the pass, and several are to go on, what it would have drawn
        by the end of the pass is drawn here, if the generator is the sampler's own.
        """
        self._apart = state["state"].cpu() if state["apart"] else None
        own = self.generator is not None and self.generator is not torch.default_generator
        if self._apart is None and self._from_first is not None and own and draws:
            self._entered = list(draws)
            list(self._drawn_on_its_device())

    @property
    def _generator(self) -> Generator:
        return torch.default_generator if self.generator is None else self.generator

    def _common_state(self, own: Tensor) -> Tensor:
        """What all ranks draw the next pass from."""
        together, self.together = self.together, False
        if self._entered:
            return self._entered[0].state
        if self._apart is not None:
            return self._apart
        return self._from_first(own) if self._from_first is not None and together else own

    def _drawn_on_its_device(self) -> Iterator[int]:
        """The samples of a pass, whatever torch's default device is: a generator draws for its own device only."""
        device = self._generator.device
        if torch.get_default_device().type == device.type:
            return self._drawn()
        with device:
            return iter(list(self._drawn()))

    def _drawn(self) -> Iterator[int]:
        entered, self._entered = self._entered, []
        generator, source, self.draws = self._generator, iter(self._sampler), []
        for number in itertools.count():
            if entered and entered[0].at == number:
                generator.set_state(entered.pop(0).state)
            before = generator.get_state()
            index = next(source, None)
            if index is None:
                return
            if number == 0 or not _same(before, generator.get_state()):
                self._note(Draw(number, before))
            yield index
            if not self._draws_on:
                yield from source
                return

    def _note(self, draw: Draw) -> None:
        """Keeps the first draw, and of the others those that are still needed."""
        while len(self.draws) > 2 and self.draws[2].at + self._window <= draw.at:
            del self.draws[1]
        self.draws.append(draw)


Order = SeededOrder | DrawnOrder


def numbers(indices: Tensor) -> Iterator[int]:
    """``indices`` as Python's integers."""
    return itertools.chain.from_iterable(chunk.tolist() for chunk in torch.split(indices, _CHUNK))


def _same(before: Tensor, after: Tensor) -> bool:
    return before.numpy().tobytes() == after.numpy().tobytes()
