"""Exact resume: saves and restores each rank's resume point, so that a resumed run equals an uninterrupted one.

A resume point is everything besides weights, optimizers and counters: RNG states, the position in the data, logged values that are
not published yet, and the gradients of an accumulation in progress.  These gradients are saved as they are, so a run that was cut
within an accumulation continues within it: no micro-batch runs through buffers (BatchNorm), hooks or generators twice.  Training
has no extra cost at the beginning of an accumulation, since no copy of the state has to be kept.

:class:`ResumePoint` saves and restores, :class:`LoggerSection` the loggers' positions.  :class:`CallbackStates` and
``_BeforeValidation`` are copies of a state that has to be restored later.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from typing import TYPE_CHECKING, Final, cast

import torch

from fabricamp.callbacks.base import Callback
from fabricamp.checkpoint.record import Section
from fabricamp.data import Feed, move_to_device
from fabricamp.engine.saved.accumulation_state import AccumulationState
from fabricamp.hooks import overrides
from fabricamp.metrics import Metrics
from fabricamp.metrics.saving import find_objects, load_objects, save_objects, updated
from fabricamp.metrics.values import is_metric_collection
from fabricamp.rng import capture_rng, restore_rng
from fabricamp.state import RunState, Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fabricamp._utils.types import StateDict
    from fabricamp.engine.update import Update
    from fabricamp.loggers.logger_collection import LoggerCollection
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
_BEFORE_ACCUMULATION: Final = "before_accumulation"
"""In a position: the one before the micro-batches whose gradients the checkpoint has, for a run that cannot use these."""


class ResumePoint(Section):
    """Saves this rank's resume point of a fit in a checkpoint, and restores it in a resumed run."""

    name = "position in training"
    per_rank = True

    def __init__(
        self,
        module: TrainingModule,
        state: RunState,
        metrics: Metrics,
        strategy: Strategy,
        delivery: LoggerCollection,
        callbacks: Sequence[Callback],
    ) -> None:
        self.accumulation = AccumulationState(module, state, strategy)
        self.loggers = LoggerSection(delivery, state)
        self._module = module
        self._state = state
        self._metrics = metrics
        self._strategy = strategy
        self._callbacks = callbacks
        self._feed: Feed | None = None
        self._before_validation: _BeforeValidation | None = None
        self._cut: StateDict | None = None
        self._rng: StateDict | None = None
        self._ended: tuple[StateDict, StateDict] | None = None
        self.resumed = False
        """Whether the run was resumed from a checkpoint and has not reached its first batch yet."""
        self.reloaded = 0
        """The last epoch with new loaders that have consumed their random numbers; in the first epoch, loaders are not new."""
        self.lost_values = -1
        """The number of micro-batches in another library's file that was loaded: it has none of the values logged in them."""

    # -- saving ------------------------------------------------------------------------------------------------------------------

    def begin(self, feed: Feed, update: Update) -> None:
        """Sets the feed and the update, which are created together with the loop."""
        self._feed = feed
        self.accumulation.update = update

    def use(self, feed: Feed) -> None:
        """Replaces the feed by that of another loader, between two epochs."""
        self._feed = feed

    def end(self) -> None:
        """Ends the run: gradients are gone, so a resumed run repeats an accumulation in progress."""
        self.accumulation.update = None

    def begin_validation(self) -> None:
        """Keeps the state before a validation within fit."""
        self._before_validation = _BeforeValidation(self._module, self.callback_states(*_WITHIN_VALIDATION))

    def end_validation(self, *, cut_short: bool) -> None:
        """Ends a validation within fit; undoes one that was cut short, as if it had not begun."""
        if cut_short and self._before_validation is not None:
            self._metrics.clear_evaluation()
            self._before_validation.restore(self._module)
        self._before_validation = None

    def callback_states(self, *hooks: str) -> CallbackStates:
        """Returns the states of callbacks that override one of ``hooks``, which a resumed run calls again."""
        return CallbackStates(
            [callback for callback in self._callbacks if any(overrides(callback, hook, Callback) for hook in hooks)]
        )

    def note_cut(self) -> None:
        """Keeps the present resume point, when training stops within an epoch.

        The hooks at the epoch's end, which run next, publish and clear values that a resumed run continues.
        """
        self._cut = self._present()
        self.loggers.note_cut()

    def save(self) -> StateDict:
        """Returns this rank's resume point."""
        strategy = self._strategy
        own = self._cut or self._present()
        position: StateDict = {}
        if self._feed is not None:
            position = self._position(self._feed)
        content = {
            **own,
            "data.position": position,
            "loops.fit.buffers": _differing_buffers(self._module, strategy),
            "loops.fit.metrics_at_end": {} if self._cut is None else self._metrics.published(),
            "loops.fit.tensor_parallel": strategy.tensor_parallel,
        }
        if self.reloaded:
            content["loops.fit.reloaded"] = self.reloaded
        return content if strategy.world_size == 1 else cast("StateDict", move_to_device(content, _CPU))

    def _position(self, feed: Feed) -> StateDict:
        """Returns this rank's position in the data, with that before an accumulation in progress whose gradients are saved."""
        state = self._state
        done = 0 if state.epoch_ended else state.batch_idx - self.accumulation.repeated_batches()
        within = state.batches is not None
        position = feed.state_dict(done, within=within)
        batches = 0 if state.epoch_ended else self.accumulation.saved_batches()
        # A position that was loaded, and not used yet, already has the other one.
        if batches and _BEFORE_ACCUMULATION not in position:
            position = {**position, _BEFORE_ACCUMULATION: feed.state_dict(done - batches, within=within)}
        return position

    def _present(self) -> StateDict:
        """Returns this rank's present resume point; within an unfinished validation, that before the validation."""
        unfinished = self._before_validation if self._state.user_call.scope is not Scope.NOWHERE else None
        objects = find_objects(self._module)
        return {
            "rng": self._rng or (capture_rng() if unfinished is None else unfinished.rng),
            "loops.fit.metrics": self._metrics.state_dict(objects),
            "loops.fit.torchmetrics": save_objects(
                objects, updated(objects) if unfinished is None else unfinished.updated
            ),
        }

    # -- resuming ----------------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Restores the resume point except RNG states (:meth:`restore_rng_once`); warns about what cannot be restored exactly."""
        ranks = len(checkpoint.get("rng", []))
        assert self._feed is not None
        state = self._state
        if ranks == 0:  # another library's file has only counters
            self.lost_values = state.batches_done
            return
        loop = checkpoint.get("loops", {}).get("fit", {})
        strategy = self._strategy
        tensor_parallel = loop.get("tensor_parallel", [1])[0]
        same = strategy.world_size == ranks and strategy.tensor_parallel == tensor_parallel
        chosen = _saved_ranks(strategy, ranks, tensor_parallel, same=same)
        objects = find_objects(self._module)
        load_objects(objects, [loop["torchmetrics"][rank] for rank in chosen])
        for part in self._module.modules():
            if is_metric_collection(part):  # the epoch may end before it is logged again
                self._metrics.note_collection(part)
        self._metrics.load_state_dict([loop["metrics"][rank] for rank in chosen], loop["metrics"][0], objects)
        ended = loop.get("metrics_at_end", [{}])
        if ended[0] and state.closed_at == state.batches_done:
            self._ended = ended[chosen[0] if chosen else 0], ended[0]
        self.reloaded = loop.get("reloaded", [0])[0]
        if same:
            _restore_buffers(self._module, loop["buffers"][strategy.rank])
        position = checkpoint["data"]["position"][min(strategy.rank, ranks - 1)]
        if self.accumulation.must_repeat and _BEFORE_ACCUMULATION in position:
            state.batches_done -= position["batches"] - position[_BEFORE_ACCUMULATION]["batches"]
            state.validated_at = state.batches_done  # the saved run went on from there
            position = position[_BEFORE_ACCUMULATION]
        if position:
            state.batch_idx = self._feed.load_state_dict(position)
        # With other numbers of ranks, tensor-parallel neighbours take the same RNG states.
        rng_rank = strategy.rank if same else strategy.data_rank * strategy.tensor_parallel
        self._rng = checkpoint["rng"][rng_rank] if rng_rank < ranks else None
        self.resumed = True
        if strategy.rank == 0:
            _warn_of_other_ranks(ranks, strategy.world_size)
            _warn_of_reading(self._feed, state.batch_idx)

    def restore_rng_once(self) -> bool:
        """Restores RNG states, once; returns whether the run was cut between a step and the work that follows it."""
        self.resumed = False
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None
        return self.accumulation.take_stepped()

    def begin_epoch(self) -> None:
        """Called before an epoch: drops the values published at the loaded epoch's end, as the resumed run publishes them again."""
        self._ended = None
        self.loggers.begin_epoch()

    def restore_ended(self) -> None:
        """Called after the loop: if the run had ended and nothing was left to do, the values published at its end stay."""
        if self._ended is None:
            return
        self.restore_rng_once()
        self._cut = self._present()
        self.loggers.restore_ended()
        self._metrics.take_ended(*self._ended)
        self._ended = None


class LoggerSection(Section):
    """The loggers' positions; if training was cut within an epoch, those at the cut: a resumed run logs all that follows again.

    A resumed run with nothing left to do would not log it again.  So a resumed run first continues at the end of the log, and goes
    back to the cut only when an epoch begins.
    """

    name = "loggers"

    def __init__(self, delivery: LoggerCollection, state: RunState) -> None:
        self._delivery = delivery
        self._state = state
        self._cut: list[StateDict] | None = None
        self._before_end: list[StateDict] | None = None

    def note_cut(self) -> None:
        """Keeps the loggers' present positions."""
        self._cut = self._delivery.state_dict()

    def save(self) -> StateDict:
        """Returns each logger's position; only rank 0 has loggers."""
        now = self._delivery.state_dict()
        if self._cut is None:
            return {"loggers": now, "loops.fit.loggers_at_end": []}
        return {"loggers": self._cut, "loops.fit.loggers_at_end": now}

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Restores the loggers' positions; files of earlier versions have none."""
        positions = checkpoint.get("loggers", ())
        ended = checkpoint.get("loops", {}).get("fit", {}).get("loggers_at_end")
        if ended and self._state.closed_at == self._state.batches_done:
            self._before_end = positions
            positions = ended
        self._delivery.load_state_dict(positions)

    def begin_epoch(self) -> None:
        """Called before an epoch: removes what the cut run logged at the end of this epoch."""
        if self._before_end is not None:
            self._delivery.load_state_dict(self._before_end)
            self._before_end = None

    def restore_ended(self) -> None:
        """Makes the next checkpoint hold the positions of the loaded one."""
        self._cut = self._before_end


class CallbackStates:
    """A copy of callbacks' states, to undo hooks that are called a second time."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._states = [(callback, copy.deepcopy(state)) for callback in callbacks if (state := callback.state_dict())]

    def restore(self) -> None:
        """Loads the copies into the callbacks."""
        for callback, state in self._states:
            callback.load_state_dict(state)


class _BeforeValidation:
    """The state that a validation changes, as it was before."""

    def __init__(self, module: TrainingModule, callbacks: CallbackStates) -> None:
        self.rng = capture_rng()
        self._callbacks = callbacks
        self.updated = updated(find_objects(module))
        """The names of the torchmetrics objects that had been updated before the validation."""

    def restore(self, module: TrainingModule) -> None:
        """Undoes a validation that was cut short."""
        restore_rng(self.rng)
        self._callbacks.restore()
        for name, metric in find_objects(module).items():
            if name not in self.updated:
                metric.reset()


def _saved_ranks(strategy: Strategy, ranks: int, tensor_parallel: int, *, same: bool) -> list[int]:
    """Returns the saved ranks whose logged values this rank continues: its own; with other numbers of ranks, all for rank 0.

    Of tensor-parallel ranks, which compute one batch together, only the first counts, as its values are those of all.
    """
    if same:
        return [strategy.rank]
    return list(range(0, ranks, tensor_parallel)) if strategy.rank == 0 else []


def _differing_buffers(module: TrainingModule, strategy: Strategy) -> dict[str, Tensor]:
    """Returns, in host memory, the buffers that differ from rank 0's (BatchNorm's running values until they are shared again)."""
    if strategy.world_size == 1:
        return {}
    buffers = {name: buffer.detach().cpu().contiguous() for name, buffer in module.named_buffers()}
    digests = {name: _digest(buffer) for name, buffer in buffers.items()}
    digests_of_rank_zero = strategy.broadcast(digests)
    return {name: buffer for name, buffer in buffers.items() if digests[name] != digests_of_rank_zero.get(name)}


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()


@torch.no_grad()
def _restore_buffers(module: TrainingModule, saved: dict[str, Tensor]) -> None:
    buffers = dict(module.named_buffers())
    for name, value in saved.items():
        buffers[name].copy_(value)


def _warn_of_other_ranks(before: int, now: int) -> None:
    if before != now:
        _LOG.warning(
            "the checkpoint was written by %d process%s and is resumed by %d: data continues in the same order after the "
            "same sample; on_world_change decides the samples of a step, random numbers and the rounding of sums differ",
            before, "" if before == 1 else "es", now,
        )  # fmt: skip


def _warn_of_reading(feed: Feed, batch_idx: int) -> None:
    if batch_idx and feed.read_past:
        _LOG.warning(
            "%s is read from its beginning up to batch %d, which is exact if reading draws no random numbers; torch's "
            "DataLoader with its default sampler, and loaders with state_dict and load_state_dict, begin at any batch",
            ", ".join(sorted(set(feed.read_past))), batch_idx,
        )  # fmt: skip
