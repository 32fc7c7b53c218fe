"""CUDA graphs of several steps: :class:`~fabricamp.engine.graph.update.GraphUpdate` for ``CudaGraph(steps=...)``."""

from __future__ import annotations

import itertools
import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.callbacks.base import Callback
from fabricamp.data import ResidentLoader
from fabricamp.engine.graph.batches import BatchIndex, NotCapturableError, copied, signature
from fabricamp.engine.graph.captured import CapturedGroup, reason_of, unchanged
from fabricamp.engine.graph.host_effects import MOST_IN_A_ROW
from fabricamp.engine.graph.lr_table import LrTable
from fabricamp.engine.graph.refusals import upload_of
from fabricamp.engine.graph.update import GraphUpdate, Key, Role
from fabricamp.errors import ConfigError
from fabricamp.hooks import overrides

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from fabricamp.engine.parts import FitParts
    from fabricamp.engine.session import Session


# ~~~ from engine.graph.horizon: The number of steps that one launch may make: up to the next step after which the host has to act.


def steps_of_a_launch(most: int, distances: Iterable[float]) -> int:
    """Returns ``most`` if all boundaries are at least ``most`` steps away, else 1."""
    return most if min(distances, default=math.inf) >= most else 1


def to_next(done: int, every: float) -> float:
    """Returns the number of steps from ``done`` to the next multiple of ``every``; inf if ``every`` is 0 or inf (never)."""
    return every - done % every if 0 < every < math.inf else math.inf


class Horizon:
    """Computes the distance to the next boundary of a fit.

    ``holds``: functions from a step to the next step after which a callback's hooks have to run before another step does.
    """

    def __init__(self, parts: FitParts, most: int, holds: Sequence[Callable[[int], float]]) -> None:
        self._parts = parts
        self._state = parts.state
        self._settings = parts.limits.settings
        self._most = most
        self._holds = holds

    def steps(self, length: float, ahead: int = 0) -> int:
        """Returns the number of steps of the next launch, or of the launch ``ahead`` steps later.

        ``length``: the number of batches of the epoch; inf if unknown.
        """
        state, settings = self._state, self._settings
        left = length - state.batch_idx - ahead
        if not self._most <= left < math.inf:
            return 1
        step = state.global_step + ahead
        distances = [
            to_next(step, settings.log_every_n_steps),
            self._to_validation(ahead),
            *(hold(step) - step for hold in self._holds),
        ]
        distances += [limit - step for limit in (settings.max_steps, settings.min_steps) if limit > step]
        return steps_of_a_launch(self._most, distances)

    def _to_validation(self, ahead: int) -> float:
        """Returns the number of steps before the next validation, except those by time and at the end of an epoch.

        These are checked between launches anyway.
        """
        limits, state, every_epochs = self._parts.limits, self._state, self._settings.check_val_every_n_epoch
        if self._parts.validate is None:
            return math.inf
        if limits.validation_times is not None:
            return to_next(state.global_step + ahead, limits.validation_times.steps)
        if every_epochs is None:
            return to_next(state.batches_done + ahead, limits.validate_every)
        if (state.epoch + 1) % every_epochs:
            return math.inf
        return to_next(state.batch_idx + ahead, limits.validate_every)


# ~~~ from engine.graph.reading: Reads the batches of an epoch for launches of several steps: those of a launch together.


_END: Final = object()


class Read(NamedTuple):
    """Batches that were read together.

    ``key`` is the result of the reader's ``look`` for them.  ``last``: they are the last of the epoch.  ``failure``: the exception
    that was raised in place of the next batch.
    """

    batches: list[Any]
    key: Any
    last: bool
    failure: Exception | None


class GroupReader:
    """Yields batches to the loop one by one, and keeps those of one launch until :meth:`take`.

    ``ready`` returns whether steps can be launched together now.  ``look`` is called with the batches that were read together.
    ``draws`` returns the state of the generator that steps draw from.
    """

    def __init__(
        self,
        parts: FitParts,
        horizon: Horizon,
        *,
        ready: Callable[[], bool],
        look: Callable[[list[Any]], Any],
        draws: Callable[[], Tensor],
    ) -> None:
        self._parts = parts
        self._state = parts.state
        self._horizon = horizon
        self._ready = ready
        self._look = look
        self._draws = draws
        self._group: Read | None = None

    def take(self) -> Read | None:
        """Returns the batches of a launch if the loop is at its first one; None for a batch that is run alone."""
        group, self._group = self._group, None
        return group

    def read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields ``batches``, which come from the feed; sets the feed's ``last`` for the batch that is yielded."""
        feed = self._parts.feed
        length = feed.length
        ahead: Read | None = None
        while True:
            count = self._horizon.steps(length) if self._ready() else 1
            if count > 1 or ahead is not None:
                ahead, whole = yield from self._together(batches, count, length, ahead)
                if not whole:
                    return
                continue
            batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    def _together(
        self, batches: Iterator[Any], count: int, length: float, ahead: Read | None
    ) -> Generator[Any, None, tuple[Read | None, bool]]:
        """Yields the batches of a launch, or those that were read ``ahead`` for a launch that is not made.

        Returns the batches read ahead for the next launch, while this one runs, and whether there may be more batches.  Raises an
        error of the loader in place of its batch.
        """
        feed, state = self._parts.feed, self._state
        read = self._read(batches, count) if ahead is None else ahead
        steps, ahead = len(read.batches), None
        if count == steps and read.failure is None:
            self._group = read
            state.committed = state.batches_done + steps
        for number, batch in enumerate(read.batches, 1):
            feed.last = read.last and number == steps
            yield batch
            goes_on = number == 1 < count and feed.counts_alone and not state.should_stop
            if goes_on and self._horizon.steps(length, ahead=count - 1) == count:
                ahead = self._read(batches, count)
        if read.failure is not None:
            raise read.failure
        return ahead, steps >= count

    def _read(self, batches: Iterator[Any], count: int) -> Read:
        feed, failure = self._parts.feed, None
        found: list[Any] = []
        before = self._draws()
        try:
            found.extend(itertools.islice(batches, count))
        except Exception as error:  # noqa: BLE001 - raised by _together in place of the batch
            failure = error
        last, feed.last = feed.last, False
        if not torch.equal(before, self._draws()):
            raise ConfigError(
                "cuda_graph: reading a batch draws on the GPU (in a transform, say), and for a launch of several steps all are "
                "read before it; draw in training_step, or give CudaGraph(steps=1)"
            )
        return Read(found, self._look(found) if len(found) == count else None, last, failure)


_LOG = logging.getLogger("fabricamp")
_HOOKS = ("on_train_batch_start", "on_train_batch_end")


class GroupUpdate(GraphUpdate):
    """Launches several steps at once if :class:`~fabricamp.engine.graph.group_update.Horizon` allows it, and others one by one.

    All steps of a launch start at its first batch.  The loop then goes through the batches and does the host's work of each step at
    the step's batch.
    """

    def __init__(self, parts: FitParts, session: Session) -> None:
        self._groups: dict[Key, CapturedGroup] = {}
        self._under_way: CapturedGroup | None = None
        self._followed = 0
        self.why_single = ""
        """Why all steps are launched one by one; empty while steps are launched together."""
        self._stale = 0
        super().__init__(parts, session)
        hooked = [one for one in session.trainer.callbacks if any(overrides(one, name, Callback) for name in _HOOKS)]
        horizon = Horizon(parts, self._options.steps, [one.holds_at for one in hooked])
        generator = torch.cuda.default_generators[parts.strategy.device.index or 0]
        self._reader = GroupReader(
            parts, horizon, ready=self._is_ready_for_groups, look=self._common_key, draws=generator.get_state
        )
        self._shows_logs = any(not type(one).__module__.startswith("fabricamp.") for one in hooked)
        self._role = Role(1, opens=True, closes=True)
        if parts.precision.verdicts is not None:
            parts.precision.verdicts.resize_ring(self._options.steps)

    def begin_epoch(self, batch_idx: int) -> None:
        """Prepares an epoch; a :class:`ResidentLoader` gathers the batches of a launch at once."""
        super().begin_epoch(batch_idx)
        if isinstance(self._parts.loader, ResidentLoader):
            self._parts.loader.gather_together(self._options.steps)

    def read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches one by one, but reads those of a launch together."""
        return self._reader.read(batches)

    def _is_ready_for_groups(self) -> bool:
        return bool(self._steps) and not self.why_eager and not self.why_single

    def run_batch(self, batch: Any, batch_idx: int, last: bool) -> Any:
        """Runs a step: does the host's work if the step is launched, or launches a group, or runs the step alone."""
        if self._under_way is None:
            read = self._reader.take()
            if read is None or read.key is None or not self._launches(read.key, read.batches, batch_idx):
                return super().run_batch(batch, batch_idx, last)
        assert self._under_way is not None
        return self._follow_one(self._under_way)

    def _follow_one(self, group: CapturedGroup) -> Any:
        outputs = group.follow_one(self._followed)
        self._note_replay()
        self._followed += 1
        if self._followed == self._options.steps:
            self._under_way = None
            if group.rates is not None:
                group.rates.check()
        return outputs

    # -- a launch ----------------------------------------------------------------------------------------------------------------

    def _launches(self, key: Key, batches: list[Any], batch_idx: int) -> bool:
        """Launches the steps of ``batches`` together; returns whether that was possible."""
        group, every = self._group_for(key, batches), self._options.check_every
        if group is None:
            return False
        if group.replays == 0 or (every and group.replays % every == 0):
            difference = self._launch_checked(group, batches, partial(self._run_each, group, batches, batch_idx), key)
        else:
            difference = None
            group.launch(batches)
        if group.rates is not None:
            group.rates.leave()
        if difference is not None:
            self._launch_singly(str(difference))
            return False
        self._under_way, self._followed = group, 0
        return True

    def _group_for(self, key: Key, batches: list[Any]) -> CapturedGroup | None:
        """Returns the graph of these steps, captured now if necessary, with uploaded learning rates; None if there is none."""
        single, group = self._steps.get(key), self._groups.get(key)
        if single is None or not (group or single).fits():
            if group is not None:
                self._let_go(key)
            return None
        if group is None:
            return self._captured_now(key, batches)
        self._stale = 0
        if group.rates is not None:
            group.rates.foresee()
        return group

    def _run_each(self, group: CapturedGroup, batches: list[Any], batch_idx: int) -> None:
        _each(group.rates, len(batches), lambda number: self._launch(batches[number], batch_idx + number, self._role))

    def _common_key(self, batches: list[Any]) -> Key | None:
        """Returns the key of the graph for these batches; None if their signatures differ."""
        try:
            first = signature(batches[0])
            alike = all(signature(one) == first for one in batches[1:])
        except NotCapturableError:  # run_batch reports it at that batch
            return None
        return (first, self._role) if alike else None

    def _let_go(self, key: Key) -> None:
        """Drops an out-of-date group: these steps run one by one and adopt the change; the next group is captured again."""
        del self._groups[key]
        self._stale += 1
        if self._stale > MOST_IN_A_ROW:
            self._launch_singly("a value or tensor that the steps use changes after each launch")

    def _captured_now(self, key: Key, batches: list[Any]) -> CapturedGroup | None:
        try:
            group = self._groups[key] = self._capture_group(key, batches)
        except Exception as error:  # noqa: BLE001 - a step may raise anything; reported or raised by _launch_singly
            self._launch_singly(reason_of(error), error)
            return None
        return group

    # -- a capture ---------------------------------------------------------------------------------------------------------------

    def _capture_group(self, key: Key, batches: list[Any]) -> CapturedGroup:
        """Captures the steps of ``batches`` without running them on the device."""
        parts, optimizer = self._parts, self._optimizer
        assert optimizer is not None
        optimizer.zero_grad(set_to_none=True)
        inputs, rates = copied(batches), None
        if self.schedules.follow_steps:
            rates = LrTable(optimizer, self.schedules, self._state, parts.precision.verdicts, len(batches))
            rates.foresee()
        self._room.check(key, kept=self._kept(self._role))
        single = self._steps[key]
        group = CapturedGroup(
            parts.module, inputs, self._role, parts.metrics, single, rates=rates, shows_logs=self._shows_logs
        )
        group.upload = upload_of(optimizer) or unchanged(optimizer)
        pool = torch.cuda.graph_pool_handle()
        used = self._captured(group, lambda: self._capture_steps(group, inputs), pool)
        self._tell(batches[0], self._role, used, f" {len(batches)} at a time")
        return group

    def _capture_steps(self, group: CapturedGroup, inputs: list[Any]) -> Any:
        optimizer, verdicts = self._optimizer, self._parts.precision.verdicts
        assert optimizer is not None

        def launch(number: int) -> Any:
            outputs = self._launch(inputs[number], BatchIndex(), self._role)
            if verdicts is not None:
                verdicts.keep_statistics(optimizer)
                note = verdicts.repeated(optimizer)
                group.notes += [note] if note is not None else []
            group.keep(number, outputs)
            return outputs

        return _each(group.rates, len(inputs), launch)

    # -- giving up ---------------------------------------------------------------------------------------------------------------

    def _launch_singly(self, reason: str, error: BaseException | None = None) -> None:
        """Launches step by step from now on and logs ``reason``; raises if a graph is required."""
        if self._options.required:
            raise ConfigError(
                f"cuda_graph: CudaGraph(steps={self._options.steps}): {reason}; or give steps=1"
            ) from error
        self.why_single = reason
        self._groups.clear()
        _LOG.warning("CudaGraph(steps=%d) launches step by step: %s", self._options.steps, reason)

    def _drop(self, *, waits: bool = True) -> None:
        super()._drop(waits=waits)
        self._groups.clear()
        self._under_way = self._parts.metrics.before_look = None


def _each(rates: LrTable | None, steps: int, launch: Callable[[int], Any]) -> Any:
    """Calls ``launch`` with the number of each step, under the step's learning rates; returns the last result."""
    outputs = None
    if rates is not None:
        rates.begin()
    for number in range(steps):
        if rates is not None:
            rates.bring(number)
        outputs = launch(number)
        if rates is not None:
            rates.note(number)
    return outputs
