"""Compares a replay bit by bit with an eager step from the same state.

:class:`ReplayCheck` runs a replay of training and compares it, as far as memory is free; :func:`compare` decides, over a
:class:`~fabricamp.engine.graph.compared_state.ComparedState`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from fabricamp.engine.graph.compared_state import ComparedState
from fabricamp.engine.graph.memory_pool import OwnPool
from fabricamp.engine.graph.update_slices import UpdateSlices
from fabricamp.errors import ConfigError, NotCapturableError
from fabricamp.ops.digests import digests
from fabricamp.ops.layouts import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabricamp._utils.types import Batch
    from fabricamp.engine.graph.batches import Key
    from fabricamp.engine.graph.cache import GraphCache
    from fabricamp.engine.graph.capture import StepCapture
    from fabricamp.engine.graph.capture_consensus import CaptureConsensus
    from fabricamp.engine.graph.captured import CapturedStep
    from fabricamp.engine.graph.memory_budget import GraphMemoryBudget
    from fabricamp.engine.graph.update_slices import Row
    from fabricamp.engine.loop import FitParts
    from fabricamp.engine.update import Update

_LOG = logging.getLogger("fabricamp")
_GIB: Final = 2**30

REPEATED_STEPS: Final = 8
"""The number of further eager steps that may show a kernel that is not deterministic.

Two steps with atomic sums often have the same bits: with flash attention's backward on an H200 one pair of a dozen had.
"""
_MOST_STEPS: Final = 1 + REPEATED_STEPS + 1
"""The most steps that a comparison runs beside the batch's own: eager ones, and the replay again."""
_PASSES: Final = 4 * _MOST_STEPS
"""About how often these read or write a copy of the state."""
_LONG: Final = 2.0
"""Seconds from which a comparison says before it begins how long it may take."""
_SAMPLE: Final = 2**26
"""Bytes by which the speed of copies and digests is measured."""
_LEAST: Final = 2**20
"""The fewest bytes that tell a speed."""
_MOST_SLICES: Final = 64
"""The most slices of an update, each of which takes a replay and an eager step."""
_SPARE: Final = 2**25
"""Bytes for the slices in which tensors are compared."""


class GraphsDroppedError(NotCapturableError):
    """The graphs were dropped within a comparison, and the state is as before: the step has to run eagerly."""


class ReplayCheck:
    """Runs replays of training and compares them with eager steps, on all ranks or on none; ``say`` logs a line."""

    def __init__(
        self,
        parts: FitParts,
        eager: Update,
        graphs: GraphCache,
        capture: StepCapture,
        memory_budget: GraphMemoryBudget,
        consensus: CaptureConsensus,
        say: Callable[[str], None],
    ) -> None:
        self._parts = parts
        self._eager = eager
        self._graphs = graphs
        self._capture = capture
        self._memory_budget = memory_budget
        self._consensus = consensus
        self._say = say

    def launch(
        self, step: CapturedStep, batch: Batch, run_eagerly: Callable[[], object], key: Key
    ) -> NotCapturableError | None:
        """Runs a replay and compares it to an eager step bit by bit, if the memory suffices for that.

        ``run_eagerly`` launches what the graph holds.  Returns None, or an error that names the first difference; the state is as
        before the replay then.
        """
        everywhere = self._consensus.all
        state: ComparedState | None = None
        refusal: NotCapturableError | None = None
        try:
            state = self._state_of(step)
        except NotCapturableError as error:
            refusal = error
        if not everywhere(refusal is None) or state is None:
            return refusal or NotCapturableError("a state of another rank cannot be compared")
        free = self._memory_budget.free() - self._bytes_of_step(key) - _SPARE
        plan = self._plan(step, state, free)
        if plan.why_not:
            _LOG.warning(
                "the replay is not compared with an eager step: %s; CudaGraph(compare=False) leaves that out without this line",
                plan.why_not,
            )
            step.launch(batch)
            return None
        parts = max(len(plan.slices), 1)
        self._say_if_long(state, parts * step.steps * self._memory_budget.eager_seconds(key))
        with self._memory_budget.left_out_of_peaks():
            return self._compared(step, batch, run_eagerly, state, key, plan)

    def _state_of(self, step: CapturedStep) -> ComparedState:
        """Returns what ``step`` may write."""
        return ComparedState(
            self._parts.module,
            self._parts.optimizers[0],
            self._parts.precision,
            self._graphs.stream.device,
            step.metric_states,
            step.generators,
            memory=self._eager.summing_memory(),
            weights=self._eager.weights,
            written=step.written,
            accumulates=step.role.accumulate > 1,
            handed=[parameter for parameter, _ in step.launched.handed],
        )

    def _plan(self, step: CapturedStep, state: ComparedState, free: int) -> Plan:
        """Returns how a replay of ``step`` is compared with ``free`` bytes for copies, the same way on all ranks."""
        everywhere = self._consensus.all
        needed = state.bytes
        if everywhere(2 * needed <= free):
            return Plan(copies=2)
        if everywhere(needed <= free):
            return Plan(copies=1)
        update = None
        # Other steps write no weights: those that do not end an accumulation, or whose optimizer steps after the replay.
        if step.role.closes and not step.launched.handed:
            update = UpdateSlices(self._parts.optimizers[0])
        is_free = f"a copy of the state takes {needed / _GIB:.2f} GiB, and {max(free, 0) / _GIB:.2f} GiB are free beside a step"
        if not everywhere(update is None or not update.why_not):
            return Plan(
                why_not=f"{is_free}, and {(update and update.why_not) or 'another rank cannot compare it in slices'}"
            )
        count = 1
        while count <= (1 if update is None else _MOST_SLICES):
            slices = [[]] if update is None else update.split(count)
            if everywhere(max(state.bytes_with(_tensors_of(rows)) for rows in slices) <= free):
                return Plan(copies=1, update=update, slices=slices)
            count *= 2
        return Plan(why_not=f"{is_free}, too little for its parts too")

    def _compared(
        self,
        step: CapturedStep,
        batch: Batch,
        run_eagerly: Callable[[], object],
        state: ComparedState,
        key: Key,
        plan: Plan,
    ) -> NotCapturableError | None:
        """Runs the replay and compares it as planned."""
        metrics = self._parts.metrics
        muted = metrics.muted
        bank = step.log_replay.table.bank
        step.restore_gradients()
        logged = bank.clone()
        pool = OwnPool(self._graphs.stream.device)
        replays = step.replays
        sizes: list[int] = []

        def allocate(size: int) -> torch.Tensor:
            sizes.append(size)
            return pool.empty(size)

        def replay() -> None:
            if step.replays > replays:  # not the first one: an eager step has run in the graph's memory meanwhile
                self._reclaim(step)
                bank.copy_(logged)
            step.launch(batch)

        def eager() -> None:
            metrics.muted = True
            try:
                run_eagerly()
            finally:
                metrics.muted = muted

        begun = time.perf_counter()
        failure: NotCapturableError | None = None
        found = Found("", 0, is_replayed=True)
        try:
            if plan.slices:
                found = self._compare_slices(plan, state, replay, eager, allocate)
            else:
                found = compare(state, replay, eager, self._consensus.all, allocate, copies=plan.copies)
        except GraphsDroppedError as error:
            failure = error.with_traceback(None)  # its frames would keep the copies
        pool.release()
        if found.difference:
            failure = NotCapturableError(f"a replay differs bitwise from an eager step, first in {found.difference}")
        if failure is not None:
            bank.copy_(logged)
            return failure
        if found.is_replayed:
            step.show_gradients()
        else:
            step.adopt_gradients(state.parameters)
        step.replays = replays + 1
        if not replays:
            seconds = time.perf_counter() - begun
            eagerly = "an eager step" if found.steps == 1 else f"{found.steps} eager steps"
            used = max(sizes) if plan.slices else sum(sizes)
            parts = f", {len(plan.slices)} parts of the update one by one" if len(plan.slices) > 1 else ""
            self._say(
                f"CUDA graph: the first replay{key[1].in_words} was compared with {eagerly}{parts}, in {seconds:.1f} s and with "
                f"{used / _GIB:.2f} GiB for copies of the state, which are given back"
            )
        return None

    def _reclaim(self, step: CapturedStep) -> None:
        """Ends the loan of the graphs' memory to an eager step; where that is impossible on a rank, all drop their graphs."""
        reclaimed = self._graphs.reclaim(step)
        if self._consensus.all(reclaimed):
            return
        if reclaimed:
            self._graphs.drop()
        raise GraphsDroppedError("a tensor of an eager step is kept in the graphs' memory")

    def _compare_slices(
        self,
        plan: Plan,
        state: ComparedState,
        replay: Callable[[], None],
        eager: Callable[[], None],
        allocate: Callable[[int], torch.Tensor],
    ) -> Found:
        """Compares the replay in slices of its update, each with a copy of what the slice writes; then replays the whole.

        Forward, backward and the slice's update run in full, and kernels skip all other rows.
        """
        weights = state.updated_digests()
        steps = 0
        for rows in plan.slices:
            state.leave_out(but=_tensors_of(rows))
            with contextlib.nullcontext() if plan.update is None else plan.update.only(rows):
                found = compare(state, replay, eager, self._consensus.all, allocate, copies=1, keeps=False)
            steps += found.steps
            if name := state.updated_since(weights):
                raise ConfigError(
                    f"cuda_graph: a step writes {name} otherwise than by the optimizer, and there is no memory for a copy to put "
                    "back; write it in a hook after the step, or give CudaGraph(compare=False)"
                )
            if found.difference:
                return found._replace(steps=steps)
        replay()
        return Found("", steps, is_replayed=True)

    def _bytes_of_step(self, key: Key) -> int:
        """Returns the bytes that an eager step takes."""
        role = key[1]
        # In the graphs' memory it takes no more than the gradients that the graph keeps there.
        return self._capture.kept_bytes(role) if self._graphs.lends_to(role) else self._memory_budget.eager_bytes(key)

    def _say_if_long(self, state: ComparedState, seconds_of_step: float) -> None:
        """Says that the comparison may take long, before it begins, and how to leave it out."""
        seconds = _MOST_STEPS * seconds_of_step
        sample = state.sample
        if sample is not None and sample.nbytes >= _LEAST:
            seconds += _PASSES * state.bytes / self._rate(bytes_of(sample)[:_SAMPLE])
        if seconds > _LONG:
            self._say(
                f"CUDA graph: a replay is compared with eager steps now, which may take {seconds:.0f} s; CudaGraph(compare=False) "
                "leaves that out"
            )

    def _rate(self, sample: torch.Tensor) -> float:
        """Returns the bytes a second that digests read."""
        device = sample.device
        digests([sample])  # which compiles the kernel
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        digests([sample])
        torch.cuda.synchronize(device)
        return sample.nbytes / (time.perf_counter() - begun)


class Plan(NamedTuple):
    """How a replay is compared: with how many copies of the state, in which slices of the update, or why not at all."""

    copies: int = 0
    update: UpdateSlices | None = None
    slices: Sequence[list[Row]] = ()
    """Empty: the update is not sliced.  Without an ``update``, a slice has no rows."""
    why_not: str = ""


def _tensors_of(rows: Sequence[Row]) -> list[torch.Tensor]:
    return [tensor for row in rows for tensor in row.tensors]


class Found(NamedTuple):
    """What a comparison has found: the first difference, the eager steps that it ran, and which step the state is that of."""

    difference: str
    """Empty for none; else the state is that before the replay."""
    steps: int
    is_replayed: bool
    """Whether a replay has written the state; else an eager step has, to the same bits."""


def compare(
    state: ComparedState,
    replay: Callable[[], None],
    eager: Callable[[], None],
    everywhere: Callable[[bool], bool],
    allocate: Callable[[int], torch.Tensor],
    *,
    copies: int,
    keeps: bool = True,
) -> Found:
    """Runs a ``replay`` and an ``eager`` step from the same state, and returns the first difference.

    If eager steps differ from each other, too, the step's kernels are not deterministic; then no difference is reported.
    ``everywhere`` returns whether a flag is set on all ranks, so that all ranks run the same steps.

    With two ``copies`` of the state (before, and replayed) bits are compared, and the run goes on from the replayed one.  With one
    copy digests are.  If they are equal, so are the states; else the replay is made again after the eager steps, so that weights
    belong to the loss that is logged.  Without ``keeps`` the state is that from before in any case.
    """
    before = state.copy(allocate)
    replay()
    replayed = state.copy(allocate) if copies > 1 else None
    looked = state.digests() if replayed is None else replayed
    state.put_back(before)
    eager()
    steps = 1
    difference = state.difference(looked)
    agreed = everywhere(not difference)
    if agreed and copies == 1 and keeps:
        return Found("", steps, is_replayed=False)
    if not agreed:
        first = state.digests()
        while not agreed and steps <= REPEATED_STEPS:
            state.put_back(before)
            eager()
            steps += 1
            if difference and state.difference(first):
                difference = ""
            agreed = everywhere(not difference)
    if not agreed:
        state.put_back(before)
        return Found(difference or "a value of another rank", steps, is_replayed=False)
    if replayed is not None:
        state.put_back(replayed)
        return Found("", steps, is_replayed=True)
    state.put_back(before)
    if keeps:
        replay()
    return Found("", steps, is_replayed=keeps)
