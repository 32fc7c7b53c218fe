"""CUDA graphs of several steps, for ``CudaGraph(steps=...)``, beside a :class:`~fabricamp.engine.graph.update.GraphUpdate`.

All steps of a launch start on the device at the launch's first batch.  The loop still goes from batch to batch, and does the host's
work of each step (hooks, counters, logs) at the step's batch::

    host     read 4 | launch, work of step 1 | read 4 more | work of step 2 | of step 3 | of step 4 | launch, work of step 5 ...
    device            step 1     step 2     step 3     step 4                                         step 5     step 6 ...

In order: :class:`GroupUpdate` runs the batches.  :class:`GroupReader` reads those of a launch together.  If an entry of the agenda
(log, validate, save, stop) comes before all steps of a launch are done, they are launched one by one.
"""

from __future__ import annotations

import itertools
import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import torch
from torch import Tensor

from fabricamp.callbacks.base import Callback
from fabricamp.data import ResidentLoader
from fabricamp.engine.entries import CallbackHolds
from fabricamp.engine.graph.batches import BatchIndex, Role, copied, signature
from fabricamp.engine.graph.capture_errors import reason_of_failure
from fabricamp.engine.graph.captured import CapturedGroup, Launched, hyperparameter_upload
from fabricamp.engine.graph.comparison import GraphsDroppedError
from fabricamp.engine.graph.host_effects import MOST_CAPTURES_IN_A_ROW
from fabricamp.engine.graph.lr_table import LrTable
from fabricamp.engine.graph.refusals import BATCH_HOOKS, step_hooks
from fabricamp.errors import ConfigError, NotCapturableError
from fabricamp.hooks import overrides

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from fabricamp._utils.types import Batch, Output
    from fabricamp.engine.graph.batches import Key
    from fabricamp.engine.graph.update import GraphUpdate
    from fabricamp.engine.loop import FitParts
    from fabricamp.engine.session import Session

_LOG = logging.getLogger("fabricamp")


class GroupUpdate:
    """Launches several steps at once if the agenda allows it, and others one by one, by ``single``.

    Once a shape has a graph of a single step (a ``CapturedStep``), the steps of a launch are captured in one more graph (a
    ``CapturedGroup``), which does the host's work of each step as the single graph does.
    """

    def __init__(self, parts: FitParts, single: GraphUpdate, session: Session) -> None:
        self.why_single = ""
        """Why all steps are launched one by one; empty while steps are launched together."""
        self._single = single
        self._eager = single.eager
        self._graphs = single.graphs
        self._options = single.options
        self._parts = parts
        self._optimizer = parts.optimizers[0]
        self._launched: CapturedGroup | None = None
        """The group that was launched last, until the host has done the work of all its steps."""
        self._steps_done = 0
        """The number of steps of that group for which the host has done its work."""
        self._stale_in_a_row = 0
        callbacks = session.trainer.callbacks
        hooked = [one for one in callbacks if any(overrides(one, name, Callback) for name in BATCH_HOOKS)]
        parts.state.agenda.add(CallbackHolds(parts, [callback.holds_at for callback in hooked]))
        generator = torch.cuda.default_generators[parts.strategy.device.index or 0]
        self._reader = GroupReader(
            parts,
            self._options.steps,
            ready=self._is_ready,
            key_of=self._common_key,
            rng_state=generator.get_state,
        )
        self._shows_logs = any(not type(callback).__module__.startswith("fabricamp.") for callback in hooked)
        self._role = Role(1, opens=True, closes=True)
        if parts.precision.verdicts is not None:
            parts.precision.verdicts.resize_ring(self._options.steps)
        single.place.before_outside = self._note_outside

    def use(self, step: Callable[..., object]) -> None:
        """Sets another step to run; it is captured again after it has run eagerly."""
        self._single.use(step)

    def begin_epoch(self, batch_idx: int) -> None:
        """Prepares an epoch; a :class:`ResidentLoader` gathers the batches of a launch at once."""
        self._single.begin_epoch(batch_idx)
        if isinstance(self._parts.loader, ResidentLoader):
            self._parts.loader.gather_together(self._options.steps)

    def read(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields the batches one by one, but reads those of a launch together."""
        return self._reader.read(batches)

    def _is_ready(self) -> bool:
        return bool(self._graphs.steps) and not self._single.why_eager and not self.why_single

    def run_batch(self, batch: Batch, batch_idx: int, last: bool) -> Output:
        """Runs a step: does the host's work if the step is launched, or launches a group, or runs the step alone."""
        if self._launched is None:
            read = self._reader.take()
            if read is None or read.key is None or not self._launch_group(read.key, read.batches, batch_idx):
                return self._single.run_batch(batch, batch_idx, last)
        group = self._launched
        assert group is not None
        outputs = group.after_step(self._steps_done)
        self._eager.note_update()
        self._steps_done += 1
        if self._steps_done == self._options.steps:
            self._launched = None
            if group.lr_table is not None:
                group.lr_table.check()
        return outputs

    # -- a launch ----------------------------------------------------------------------------------------------------------------

    def _launch_group(self, key: Key, batches: list[Batch], batch_idx: int) -> bool:
        """Launches the steps of ``batches`` together; returns whether that was possible."""
        self._eager.check_optimizer()
        self._eager.take_edits()
        views = list(map(self._single.view, batches))
        group = self._group_for(key, views)
        if group is None:
            return False
        every = self._options.check_every
        difference = None
        is_first = group.replays == 0
        if (is_first and self._options.compare) or (every and group.replays % every == 0):
            run_eagerly = partial(self._run_each_eagerly, group, batches, batch_idx)
            difference = self._single.check.launch(group, views, run_eagerly, key)
        else:
            group.launch(views)
        if group.lr_table is not None:
            group.lr_table.restore()
        if isinstance(difference, GraphsDroppedError):
            return False
        if difference is not None:
            self._launch_singly(str(difference))
            return False
        self._launched = group
        self._steps_done = 0
        return True

    def _group_for(self, key: Key, batches: list[Batch]) -> CapturedGroup | None:
        """Returns the graph of these steps, captured now if necessary, with uploaded learning rates; None if there is none."""
        graphs = self._graphs
        single = graphs.steps.get(key)
        group = graphs.groups.get(key)
        if single is not None and graphs.pool.is_lent and not graphs.reclaim(group or single):
            return None
        if single is None or not (group or single).is_valid():
            if group is not None:
                # These steps run one by one and adopt the change; the next group is captured again.
                del graphs.groups[key]
                self._stale_in_a_row += 1
                if self._stale_in_a_row > MOST_CAPTURES_IN_A_ROW:
                    self._launch_singly("a value or tensor that the steps use changes after each launch")
            return None
        if group is None:
            try:
                group = self._capture(key, batches)
            except Exception as error:  # noqa: BLE001 - a step may raise anything; reported or raised by _launch_singly
                self._launch_singly(reason_of_failure(error), error)
                return None
            graphs.groups[key] = group
            return group
        self._stale_in_a_row = 0
        if group.lr_table is not None:
            group.lr_table.predict()
        return group

    def _common_key(self, batches: list[Batch]) -> Key | None:
        """Returns the key of the graph for these batches; None if their signatures differ."""
        view = self._single.view
        try:
            first = signature(view(batches[0]))
            alike = all(signature(view(batch)) == first for batch in batches[1:])
        except NotCapturableError:  # run_batch reports it at that batch
            return None
        return (first, self._role) if alike else None

    # -- a capture ---------------------------------------------------------------------------------------------------------------

    def _capture(self, key: Key, batches: list[Batch]) -> CapturedGroup:
        """Captures the steps of ``batches`` without running them on the device."""
        parts = self._parts
        optimizer = self._optimizer
        capture = self._single.capture
        schedules = self._eager.schedules
        optimizer.zero_grad(set_to_none=True)
        inputs = cast("list[Batch]", copied(batches))
        lr_table = None
        if schedules.follow_steps:
            lr_table = LrTable(optimizer, schedules, parts.state, parts.precision.verdicts, len(batches))
            lr_table.predict()
        capture.check_memory(key)
        group = CapturedGroup(
            parts.module,
            inputs,
            self._role,
            parts.metrics,
            self._graphs.steps[key],
            step_hooks(optimizer),
            lr_table=lr_table,
            shows_logs=self._shows_logs,
        )
        group.upload = hyperparameter_upload(optimizer)
        used = capture.capture_launches(group, partial(self._capture_each, group, inputs))
        capture.report(batches[0], self._role, used, f" {len(batches)} at a time")
        return group

    def _capture_each(self, group: CapturedGroup, inputs: list[Batch]) -> Launched:
        """Captures step after step, and what the host needs of each one afterwards."""
        verdicts = self._parts.precision.verdicts

        def launch(number: int) -> Launched:
            launched = self._single.capture.launch(inputs[number], BatchIndex(), self._role)
            if verdicts is not None:
                verdicts.keep_statistics(self._optimizer)
                note = verdicts.repeated(self._optimizer)
                if note is not None:
                    group.notes.append(note)
            group.keep(number, launched.outputs)
            return launched

        return _launch_each(group.lr_table, len(inputs), launch)

    def _run_each_eagerly(self, group: CapturedGroup, batches: list[Batch], batch_idx: int) -> None:
        """Runs the steps of a launch eagerly, for the comparison with its replay."""

        def launch(number: int) -> Launched:
            return self._single.capture.launch(batches[number], batch_idx + number, self._role, lends=True)

        _launch_each(group.lr_table, len(batches), launch)

    # -- giving up ---------------------------------------------------------------------------------------------------------------

    def _launch_singly(self, reason: str, error: BaseException | None = None) -> None:
        """Launches step by step from now on and logs ``reason``; raises if a graph is required."""
        if self._options.required:
            raise ConfigError(
                f"cuda_graph: CudaGraph(steps={self._options.steps}): {reason}; or give steps=1"
            ) from error
        self.why_single = reason
        self._graphs.groups.clear()
        _LOG.warning("CudaGraph(steps=%d) launches step by step: %s", self._options.steps, reason)

    def _note_outside(self, reason: str) -> None:
        """Launches step by step, since the optimizer's own step runs between two steps from now on."""
        self._launch_singly(f"{type(self._optimizer).__name__} has to step after each replay: {reason}")

    def close(self, *, waits: bool) -> None:
        """Frees the graphs, after a wait for the device with ``waits``."""
        self._launched = None
        self._parts.metrics.before_look = None
        self._single.close(waits=waits)


def _launch_each(lr_table: LrTable | None, steps: int, launch: Callable[[int], Launched]) -> Launched:
    """Calls ``launch`` with the number of each step, under the step's learning rates; returns the last result."""
    launched = Launched(None)
    if lr_table is not None:
        lr_table.begin()
    for number in range(steps):
        if lr_table is not None:
            lr_table.write(number)
        launched = launch(number)
        if lr_table is not None:
            lr_table.note_applied(number)
    return launched


# -- the batches of a launch -------------------------------------------------------------------------------------------------------


_END: Final = object()


class BatchGroup(NamedTuple):
    """Batches that were read together.

    ``key`` is the result of the reader's ``key_of`` for them.  ``last``: they are the last of the epoch.  ``failure``: the
    exception that was raised in place of the next batch.
    """

    batches: list[Batch]
    key: Key | None
    last: bool
    failure: Exception | None


class GroupReader:
    """Yields batches to the loop one by one, and keeps those of one launch until :meth:`take`.

    ``most`` is the number of steps of a full launch.  ``ready`` returns whether steps can be launched together now.  ``key_of`` is
    called with the batches that were read together.  ``rng_state`` returns the state of the generator of the steps' random numbers.
    """

    def __init__(
        self,
        parts: FitParts,
        most: int,
        *,
        ready: Callable[[], bool],
        key_of: Callable[[list[Batch]], Key | None],
        rng_state: Callable[[], Tensor],
    ) -> None:
        self._parts = parts
        self._state = parts.state
        self._most = most
        self._ready = ready
        self._key_of = key_of
        self._rng_state = rng_state
        self._group: BatchGroup | None = None

    def take(self) -> BatchGroup | None:
        """Returns the batches of a launch if the loop is at its first one; None for a batch that is run alone."""
        group = self._group
        self._group = None
        return group

    def launch_size(self, ahead: int = 0) -> int:
        """Returns the number of steps of the next launch, or of the launch ``ahead`` steps later: ``most``, or else 1."""
        state = self._state
        batches_left = self._parts.feed.length - state.batch_idx - ahead
        if not self._most <= batches_left < math.inf:
            return 1
        return self._most if state.agenda.free_steps(ahead) >= self._most else 1

    def read(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields ``batches``, which come from the feed; sets the feed's ``last`` for the batch that is yielded."""
        read_ahead: BatchGroup | None = None
        while True:
            count = self.launch_size() if self._ready() else 1
            if count > 1 or read_ahead is not None:
                read_ahead, may_go_on = yield from self._yield_group(batches, count, read_ahead)
                if not may_go_on:
                    return
                continue
            batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    def _yield_group(
        self, batches: Iterator[Batch], count: int, read_ahead: BatchGroup | None
    ) -> Generator[Batch, None, tuple[BatchGroup | None, bool]]:
        """Yields the batches of a launch, or those that were ``read_ahead`` for a launch that is not made.

        Returns the batches read ahead for the next launch, while this one runs, and whether there may be more batches.  Raises an
        error of the loader in place of its batch.
        """
        feed = self._parts.feed
        state = self._state
        group = read_ahead or self._read(batches, count)
        read_ahead = None
        steps = len(group.batches)
        if count == steps and group.failure is None:
            self._group = group
            state.agenda.committed = state.batches_done + steps
        for number, batch in enumerate(group.batches, 1):
            feed.last = group.last and number == steps
            yield batch
            # The launch has been made, at its first batch: the host reads the next batches while the device runs it.
            reads_ahead = number == 1 < count and feed.counts_alone and not state.should_stop
            if reads_ahead and self.launch_size(ahead=count - 1) == count:
                read_ahead = self._read(batches, count)
        if group.failure is not None:
            raise group.failure
        return read_ahead, steps >= count

    def _read(self, batches: Iterator[Batch], count: int) -> BatchGroup:
        """Reads up to ``count`` batches."""
        feed = self._parts.feed
        read: list[Batch] = []
        failure = None
        before = self._rng_state()
        try:
            read.extend(itertools.islice(batches, count))
        except Exception as error:  # noqa: BLE001 - raised by _yield_group in place of the batch
            failure = error
        last = feed.last
        feed.last = False  # until the loop is at the last one of these batches
        if not torch.equal(before, self._rng_state()):
            raise ConfigError(
                "cuda_graph: reading a batch draws random numbers on the GPU (in a transform, say), and a launch of several "
                "steps reads all its batches first; draw in training_step, or give CudaGraph(steps=1)"
            )
        key = self._key_of(read) if len(read) == count else None
        return BatchGroup(read, key, last, failure)
