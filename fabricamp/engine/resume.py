"""What makes a resumed run equal to one that was never cut: each rank's moment between two micro-batches, saved and given back.

A moment is everything that is not weights, optimizers and counters: random numbers, the place in the data, logged values that
are not published yet, and the gradients of a window that is still open.  These gradients are saved as they are, so a run that
was cut within a window goes on within it: nothing is replayed that buffers (BatchNorm), hooks or generators have seen already,
and a window's beginning costs training nothing, since no copy of the state there has to be kept.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.callbacks.base import Callback
from fabricamp.checkpoint.record import Section
from fabricamp.data import Feed, move_to_device
from fabricamp.engine.open_window import OpenWindow
from fabricamp.hooks import overrides
from fabricamp.metrics import Metrics
from fabricamp.metrics.saving import find_objects, load_objects, save_objects
from fabricamp.rng import capture_rng, restore_rng
from fabricamp.state import RunState, Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fabricamp.engine.update import Update
    from fabricamp.loggers.delivery import Delivery
    from fabricamp.module import TrainingModule
    from fabricamp.strategies.base import Strategy

_LOG = logging.getLogger("fabricamp")
_WITHIN_VALIDATION = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
)
_CPU = torch.device("cpu")


class Moments(Section):
    """The moments of one fit on this rank: what a checkpoint takes of the present one, and how a resumed run gets back to it."""

    name = "position in training"
    per_rank = True

    def __init__(
        self,
        module: TrainingModule,
        state: RunState,
        metrics: Metrics,
        strategy: Strategy,
        delivery: Delivery,
        callbacks: Sequence[Callback],
    ) -> None:
        self.window = OpenWindow(module, state, strategy)
        self.loggers = LoggerSection(delivery, state)
        self._module = module
        self._state = state
        self._metrics = metrics
        self._strategy = strategy
        self._callbacks = callbacks
        self._feed: Feed | None = None
        self._before_validation: _BeforeValidation | None = None
        self._cut: dict[str, Any] | None = None
        self._rng: dict[str, Any] | None = None
        self._ended: tuple[dict[str, Any], dict[str, Any]] | None = None
        self.resumed = False
        """Whether the run goes on from a checkpoint and has not got to its first batch yet."""

    # -- saving ------------------------------------------------------------------------------------------------------------------

    def begin(self, feed: Feed, update: Update) -> None:
        """Takes the parts that come to be with the loop."""
        self._feed, self.window.update = feed, update

    def use(self, feed: Feed) -> None:
        """Takes the feed of another loader, between two epochs."""
        self._feed = feed

    def end(self) -> None:
        """After the run: gradients are gone, so a window that is open is repeated by whoever goes on."""
        self.window.update = None

    def begin_validation(self) -> None:
        """Before a validation within fit."""
        self._before_validation = _BeforeValidation(self._module, self.callback_states(*_WITHIN_VALIDATION))

    def end_validation(self, *, cut_short: bool) -> None:
        """After it; one that was cut short is as if it had not begun."""
        if cut_short and self._before_validation is not None:
            self._metrics.clear_evaluation()
            self._before_validation.restore(self._module)
        self._before_validation = None

    def callback_states(self, *hooks: str) -> CallbackStates:
        """What those callbacks have counted that have one of ``hooks``, which a run that goes on calls again."""
        return CallbackStates([one for one in self._callbacks if any(overrides(one, hook, Callback) for hook in hooks)])

    def note_cut(self) -> None:
        """Keeps the present moment where training stops within an epoch: the hooks at its end publish and clear what goes on."""
        self._cut = self._present()
        self.loggers.note_cut()

    def save(self) -> dict[str, Any]:
        """Returns this rank's moment."""
        own = self._cut or self._present()
        state, place = self._state, {}
        if self._feed is not None:
            done = 0 if state.epoch_ended else state.batch_idx - self.window.repeated_batches()
            place = self._feed.state_dict(done, within=state.batches is not None)
        own = {**own, "data.position": place, "loops.fit.buffers": _differing_buffers(self._module, self._strategy)}
        own["loops.fit.ended"] = {} if self._cut is None else self._metrics.published()
        own["loops.fit.tensor_parallel"] = self._strategy.tensor_parallel
        return own if self._strategy.world_size == 1 else move_to_device(own, _CPU)

    def _present(self) -> dict[str, Any]:
        """This rank's moment; within a validation that is not over, the one before it."""
        unfinished = self._before_validation if self._state.scope is not Scope.NOWHERE else None
        objects = find_objects(self._module)
        return {
            "rng": capture_rng() if unfinished is None else unfinished.rng,
            "loops.fit.metrics": self._metrics.state_dict(objects),
            "loops.fit.objects": save_objects(objects if unfinished is None else unfinished.used(objects)),
        }

    # -- going on ----------------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: dict[str, Any], path: str) -> None:
        """Brings the run to where ``checkpoint`` was written, but for the generators; says what cannot be as it was there."""
        loop, ranks = checkpoint.get("loops", {}).get("fit", {}), len(checkpoint.get("rng", []))
        assert self._feed is not None
        if ranks == 0:
            return  # another library's file: only counters
        strategy, state = self._strategy, self._state
        together = loop.get("tensor_parallel", [1])[0]
        same = (strategy.world_size, strategy.tensor_parallel) == (ranks, together)
        # Whose logged values this rank goes on with; of ranks that computed one batch together the first has those of all.
        chosen = [strategy.rank] if same else [*range(0, ranks, together)] if strategy.rank == 0 else []
        objects = find_objects(self._module)
        load_objects(objects, [loop["objects"][rank] for rank in chosen])
        self._metrics.load_state_dict([loop["metrics"][rank] for rank in chosen], loop["metrics"][0], objects)
        ended = loop.get("ended", [{}])
        if ended[0] and state.closed_at == state.batches_done:
            self._ended = ended[chosen[0] if chosen else 0], ended[0]
        if same:
            _restore_buffers(self._module, loop["buffers"][strategy.rank])
        position = checkpoint["data"]["position"][min(strategy.rank, ranks - 1)]
        if position:
            state.batch_idx = self._feed.load_state_dict(position)
        drawn_by = strategy.rank if same else strategy.data_rank * strategy.tensor_parallel  # neighbours draw alike
        self._rng = checkpoint["rng"][drawn_by] if drawn_by < ranks else None
        self.resumed = True
        if strategy.rank == 0:
            _tell_of_ranks(ranks, strategy.world_size)
            _tell_of_reading(self._feed, state.batch_idx)

    def take_up(self) -> bool:
        """Restores the generators, once; returns whether the step before the cut is still to be followed by what follows steps."""
        self.resumed = False
        rng, self._rng = self._rng, None
        if rng is not None:
            restore_rng(rng)
        return self.window.take_stepped()

    def go_on(self) -> None:
        """Before an epoch: a run that goes on in one that was ended ends it a second time."""
        self._ended = None
        self.loggers.go_on()

    def stay_ended(self) -> None:
        """Behind the loop: where the run had ended, and nothing was left to do, what it had published at its end stays."""
        if self._ended is None:
            return
        self.take_up()
        self._cut = self._present()
        self.loggers.stay_ended()
        self._metrics.take_ended(*self._ended)
        self._ended = None


class LoggerSection(Section):
    """Where the loggers stand; where training was cut within an epoch, as of then: a resumed run writes the rest again.

    Unless it has nothing left to do: so it goes on behind the rest, and takes that back where an epoch begins.
    """

    name = "loggers"

    def __init__(self, delivery: Delivery, state: RunState) -> None:
        self._delivery = delivery
        self._state = state
        self._cut: list[dict[str, Any]] | None = None
        self._before_end: list[dict[str, Any]] | None = None

    def note_cut(self) -> None:
        """Keeps where they stand now."""
        self._cut = self._delivery.state_dict()

    def save(self) -> dict[str, Any]:
        """Returns where each one stands; on rank 0, which has them."""
        now, cut = self._delivery.state_dict(), self._cut
        return {"loggers": now if cut is None else cut, "loops.fit.ended_logs": [] if cut is None else now}

    def restore(self, checkpoint: dict[str, Any], path: str) -> None:
        """Lets them go on from there; earlier files have no word of them."""
        stood, ended = checkpoint.get("loggers", ()), checkpoint.get("loops", {}).get("fit", {}).get("ended_logs")
        if ended and self._state.closed_at == self._state.batches_done:
            self._before_end, stood = stood, ended
        self._delivery.load_state_dict(stood)

    def go_on(self) -> None:
        """Before an epoch: takes back what the end of this one has logged, in the run before."""
        before, self._before_end = self._before_end, None
        if before is not None:
            self._delivery.load_state_dict(before)

    def stay_ended(self) -> None:
        """Lets the next checkpoint say what the one before did."""
        self._cut = self._before_end


class CallbackStates:
    """What callbacks would save now; hooks that are called a second time are undone with it."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._states = [(one, copy.deepcopy(state)) for one in callbacks if (state := one.state_dict())]

    def restore(self) -> None:
        """Gives it back."""
        for callback, state in self._states:
            callback.load_state_dict(state)


class _BeforeValidation:
    """What a validation changes, as it was before."""

    def __init__(self, module: TrainingModule, callbacks: CallbackStates) -> None:
        self.rng = capture_rng()
        self._callbacks = callbacks
        self._used = {name for name, metric in find_objects(module).items() if metric.update_count}

    def used(self, objects: dict[str, Any]) -> dict[str, Any]:
        """Those of the torchmetrics ``objects`` that had seen something before."""
        return {name: metric for name, metric in objects.items() if name in self._used}

    def restore(self, module: TrainingModule) -> None:
        """Undoes what was done of the validation."""
        restore_rng(self.rng)
        self._callbacks.restore()
        for name, metric in find_objects(module).items():
            if name not in self._used:
                metric.reset()


def _differing_buffers(module: TrainingModule, strategy: Strategy) -> dict[str, Tensor]:
    """Returns the buffers that are not rank 0's here (BatchNorm's running values until they are shared again), on the host."""
    if strategy.world_size == 1:
        return {}
    buffers = {name: buffer.detach().cpu().contiguous() for name, buffer in module.named_buffers()}
    own = {name: _digest(buffer) for name, buffer in buffers.items()}
    first = strategy.broadcast(own)
    return {name: buffer for name, buffer in buffers.items() if own[name] != first.get(name)}


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()


@torch.no_grad()
def _restore_buffers(module: TrainingModule, saved: dict[str, Tensor]) -> None:
    buffers = dict(module.named_buffers())
    for name, value in saved.items():
        buffers[name].copy_(value)


def _tell_of_ranks(before: int, now: int) -> None:
    if before != now:
        _LOG.warning(
            "the checkpoint was written by %d process%s and is resumed by %d: data goes on in the same order behind the "
            "same sample; a step has the samples that on_world_change says, random numbers and the rounding of sums are others",
            before, "" if before == 1 else "es", now,
        )  # fmt: skip


def _tell_of_reading(feed: Feed, batch_idx: int) -> None:
    if batch_idx and feed.read_past:
        _LOG.warning(
            "%s is read from its beginning up to batch %d, which is exact if it draws no random numbers on the way; "
            "torch's DataLoader with its default sampler begins anywhere, and so do loaders with state_dict and load_state_dict",
            ", ".join(sorted(set(feed.read_past))), batch_idx,
        )  # fmt: skip
