"""Automatic optimization by CUDA graph replays, beside the eager :class:`~fabricamp.engine.update.Update`.

Each micro-batch goes through :meth:`GraphUpdate.run_batch` in one of five ways::

    the run has given up captures --------------------------> 1  an eager step
    there is no graph for its shape and role
        it may be captured now -----------------------------> 3  a capture, run at once as the graph's first replay
        not yet, or there is no room for it ----------------> 2  an eager step, watched for what a replay would not do
    there is a graph
        what it reads has changed: all graphs are dropped --> 2
        the accumulation has gradients of other parameters -> 2
        a check is due (check_every) -----------------------> 5  a replay, compared with an eager step
        otherwise ------------------------------------------> 4  a replay

If the capture of 3 fails, or the replay of 3 or 5 leaves other bits than an eager step, its effects are undone and the micro-batch
runs eagerly.  ``"auto"`` then gives up, and a required graph is an error.

The ``Update`` has the state of the fit's steps and runs the micro-batches of 1.  Eager steps of 2 are made of its parts.

Graphs get the *view* of a batch (:mod:`~fabricamp.engine.graph.batches`); eager steps get the whole batch.

An optimizer whose step a graph cannot hold steps after each replay (:class:`OptimizerPlace`).  The graph then ends with the
gradients for it in ``.grad``, and the comparison compares these.

An accumulation has a graph for each :class:`~fabricamp.engine.graph.batches.Role`: the first, a middle and the last micro-batch.
All of them find the gradients at the same addresses (:class:`~fabricamp.engine.graph.capture.AccumulationGradients`).

The parts of :class:`GraphUpdate`, each in a file of its own: :class:`Warmup` says which micro-batches may be captured,
:class:`StepCapture` captures them, :class:`GraphCache` has the graphs and their memory, :class:`ReplayCheck` compares a replay,
:class:`EagerFallback` gives up.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from fabricamp.engine.graph.batches import Role, copied, signature, view_of
from fabricamp.engine.graph.cache import GraphCache
from fabricamp.engine.graph.capture import StepCapture
from fabricamp.engine.graph.capture_consensus import CaptureConsensus, Stage
from fabricamp.engine.graph.capture_errors import reason_of_failure
from fabricamp.engine.graph.captured import kept_gradient
from fabricamp.engine.graph.comparison import GraphsDroppedError, ReplayCheck
from fabricamp.engine.graph.fallback import EagerFallback
from fabricamp.engine.graph.host_effects import FEWEST_EAGER_CALLS, MOST_CAPTURES_IN_A_ROW, StepWatch
from fabricamp.engine.graph.memory_budget import GraphMemoryError
from fabricamp.engine.graph.optimizer_place import OptimizerPlace
from fabricamp.engine.graph.refusals import is_fused
from fabricamp.engine.graph.seen_batches import SeenBatches
from fabricamp.engine.graph.warmup import Warmup
from fabricamp.errors import NotCapturableError
from fabricamp.ops.peer_memory import check_peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabricamp._utils.types import Batch, Output
    from fabricamp.cuda_graph import CudaGraph
    from fabricamp.engine.graph.batches import Key
    from fabricamp.engine.graph.captured import CapturedStep
    from fabricamp.engine.loop import FitParts
    from fabricamp.engine.session import Session
    from fabricamp.engine.update import Update

_LOG = logging.getLogger("fabricamp")

ONE_BACKWARD: Final = "cuda_graph does not offer: a replay is one forward and backward; leave cuda_graph out"
"""Why an optimizer that calls a closure cannot have a second forward and backward."""


class GraphUpdate:
    """Runs the first batches of each shape eagerly, by the ``eager`` update, then captures the step and replays it.

    All work of the fit runs on a :class:`~fabricamp.engine.graph.graphs.SideStream`.
    """

    def __init__(self, parts: FitParts, eager: Update, session: Session) -> None:
        options = session.settings.cuda_graph
        assert options is not None
        summary = session.run_summary
        strategy = parts.strategy
        self.eager: Update = eager
        self.options: CudaGraph = options
        self.seen = SeenBatches("training_step", options, summary.say_of_graph)
        self.graphs: GraphCache = GraphCache(
            torch.cuda.current_stream(strategy.device),
            parts.state,
            parts.optimizers[0],
            sums=eager.sums,
            say=summary.say,
        )
        self._memory_budget = session.graphs.memory_budget
        self.fallback = EagerFallback(options, strategy, self.graphs.drop)
        self.place: OptimizerPlace = OptimizerPlace(parts, self.fallback, summary.say_of_graph)
        self._parts = parts
        self._watch = StepWatch(session, "training_step")
        self._warmup = Warmup(options, strategy, self.graphs, self.seen)
        self._consensus = CaptureConsensus(strategy, options.warmup)
        self.capture = StepCapture(
            parts,
            eager,
            self.graphs,
            self.place,
            self._memory_budget,
            self._watch,
            session.run_context,
            summary.say,
        )
        self.check = ReplayCheck(
            parts, eager, self.graphs, self.capture, self._memory_budget, self._consensus, summary.say
        )
        self._captures_in_a_row = 0
        self.graphs.on_drop = self._warmup.begin_again

    @property
    def why_eager(self) -> str:
        """Why the run captures nothing and stays eager; empty while it captures or replays."""
        return self.fallback.why

    def use(self, step: Callable[..., object]) -> None:
        """Sets another step to run; it is captured again after it has run eagerly."""
        self.eager.use(step)
        self._warmup.begin()
        if self.graphs.steps:
            self.graphs.drop()

    def begin_epoch(self, batch_idx: int) -> None:
        """Prepares an epoch; drops the graphs if the number of accumulated micro-batches has changed."""
        before = self.eager.accumulate
        self.eager.begin_epoch(batch_idx)
        if self.eager.accumulate != before and self.graphs.steps:
            self.graphs.drop()

    def read(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Returns an epoch's batches for the loop."""
        return self.eager.read(batches)

    # -- a batch -----------------------------------------------------------------------------------------------------------------

    def run_batch(self, batch: Batch, batch_idx: int, last: bool) -> Output:
        """Runs a micro-batch, as a replay if there is a graph for its shape and role."""
        eager = self.eager
        eager.check_optimizer()
        # Here, not in the update of an eager step, which runs in the graphs' memory: the comparison keeps some memory for good.
        eager.take_edits()
        role = Role(eager.accumulate, eager.loss is None, eager.ends_accumulation(batch_idx, last))
        view = batch
        if self.options.hook_entries and not self.fallback.why:
            view = self.view(batch)
        key = None if self.fallback.why else self._key_of(view, role)
        step = None if key is None else self._replayable(key)
        # Both may be collectives: every rank calls them, also a rank that runs this micro-batch eagerly.
        all_ready = not self._consensus.ended and self._are_all_ready(key, step)
        is_checked = self._is_checked(step, role)
        # 1: the run has given up, now (in _key_of or _replayable) or earlier.
        if key is None or self.fallback.why:
            return eager.run_batch(batch, batch_idx, last)
        if step is None:
            # A capture, and a look at what a step changes, begin with this rank's shards.
            self._parts.strategy.sharding.settle_module(self._parts.module)
            # 3: all ranks make the first captures at the same batch, and compare them.  Later each rank captures by itself,
            # without a comparison: its eager step would exchange gradients with ranks that make none.
            if all_ready or (self._consensus.ended and self._warmup.is_over(key)):
                together = all_ready or self._consensus.alone
                return self._run_captured(key, batch, batch_idx, last, together=together)
            # 2: too few such batches so far, too many shapes, too little memory, or gradients of other parameters than captured.
            return self._run_watched(key, batch, batch_idx)
        self._captures_in_a_row = 0
        if is_checked:
            # 5: if the replay is wrong, its effects are undone and the step runs eagerly.
            run_eagerly = partial(self.capture.launch, batch, batch_idx, role, lends=True)
            difference = self.check.launch(step, view, run_eagerly, key)
            if difference is not None:
                return self._run_instead(difference, batch, batch_idx, last, key)
        else:
            # 4: nearly every batch of a run.
            step.launch(view)
        return self._after_replay(step, first=False)

    def view(self, batch: Batch) -> Batch:
        """Returns what graphs get of a batch: all but the entries that only hooks read."""
        return view_of(batch, self.options.hook_entries)

    def _key_of(self, batch: Batch, role: Role) -> Key | None:
        """Returns the key of the graph for a batch; gives up and returns None for a batch whose tensors cannot be found."""
        try:
            return signature(batch), role
        except NotCapturableError as error:
            self.fallback.give_up(str(error))
            return None

    def _replayable(self, key: Key) -> CapturedStep | None:
        """Returns the graph for ``key``; None if there is none, if it is out of date, or if it cannot continue the accumulation."""
        step = self.graphs.steps.get(key)
        if step is None:
            return None
        if not step.is_valid() and not self._is_valid_settled(step):
            self._note_stale(step)
            # One eager step adopts what has changed (another parameter, say), one is watched, and the next is captured.
            self.graphs.drop()
            self.place.look_again()
            return None
        if self.graphs.pool.is_lent and not self.graphs.reclaim(step):
            return None
        return step if step.can_continue(self.capture.gradients) else None

    def _is_valid_settled(self, step: CapturedStep) -> bool:
        """Whether the graph is valid once the parameters are this rank's shards again: a validation leaves some gathered."""
        sharding = self._parts.strategy.sharding
        if not sharding.shards:
            return False
        sharding.settle_module(self._parts.module)
        return step.is_valid()

    def _note_stale(self, step: CapturedStep) -> None:
        """Counts graphs that are out of date; after a few in a row, a value changes in every step, and no graph can hold it."""
        self._captures_in_a_row += 1
        if self._captures_in_a_row <= MOST_CAPTURES_IN_A_ROW:
            return
        optimizer = self._parts.optimizers[0]
        if step.constants.are_unchanged() and not self.place.outside and not is_fused(optimizer):
            same_numbers = step.upload()  # compares alone, for an optimizer that is not fused
            if not same_numbers:
                self._captures_in_a_row = 0
                self._take_out_numbers()
                return
        name = step.constants.changed()
        what = f"the attribute {name!r}"
        if not name:
            what = "a step hook of the optimizer, or a tensor that the step uses,"
        self.fallback.give_up(
            f"{what} is replaced in each step, and each step would be captured again; change a buffer in place"
        )

    def _take_out_numbers(self) -> None:
        """Lets an optimizer step outside of the graph whose numbers change in each step, or gives up."""
        parts = self._parts
        if parts.optimizer_steps[0].splits:
            self.place.step_outside("a schedule or hook changes betas or another number in its groups in each step")
            return
        self.fallback.give_up(
            f"a number in the groups of {type(parts.optimizers[0]).__name__} changes in each step, and "
            f"{type(parts.precision).__name__} has a step of its own, so the optimizer cannot step by itself after a replay"
        )

    def _are_all_ready(self, key: Key | None, step: CapturedStep | None) -> bool:
        """Returns whether all ranks capture now; every rank has to call it until the ranks have agreed on the first captures."""
        if step is not None:
            stage = Stage.REPLAY
        elif key is not None and self._warmup.is_over(key):
            stage = Stage.READY
        else:
            stage = Stage.EAGER
        return self._consensus.all_ready(stage, self.eager.accumulate)

    def _is_checked(self, step: CapturedStep | None, role: Role) -> bool:
        """Whether this replay is compared with an eager step; the answer is the same on all ranks."""
        every = self.options.check_every
        if not every:
            return False
        if self._consensus.alone:
            return step is not None and step.replays % every == 0
        return self._consensus.should_check(every, role, replays=step is not None)

    # -- 2: an eager step, watched -----------------------------------------------------------------------------------------------

    def _run_watched(self, key: Key, batch: Batch, batch_idx: int) -> Output:
        """Runs an eager step; the first ``warmup`` of a key are watched for what a replay would not repeat."""
        call = partial(self._run_eagerly, key[1], batch, batch_idx)
        steps = self._warmup.count(key, batch, self.view(batch))
        if not 0 < steps <= self.options.warmup:
            return call()
        looks_closely = steps == FEWEST_EAGER_CALLS
        if looks_closely:
            call = partial(self._memory_budget.measured, key, call)
        outputs, reason = self._watch.run(call, compares=steps > 1, looks_for_waits=looks_closely)
        weights = self.eager.weights
        reason = reason or self._warmup.changing_weight(key, None if weights is None else weights.number)
        if reason:
            self.fallback.give_up(reason)
        return outputs

    def _run_eagerly(self, role: Role, batch: Batch, batch_idx: int) -> Output:
        """Runs an eager step, forward and backward in the graphs' memory; the outputs, which hooks may keep, are copied then.

        After the first capture that saves the memory of a second step.  Before it, optimizer state that the first update creates
        would lie among the step's memory in torch's cache, which could then not be given to the graphs.
        """
        eager = self.eager
        with self.capture.exchanging(role), self.graphs.lent(role):
            outputs, loss = eager.forward_backward(batch, batch_idx, eager.loss)
        if self.graphs.lends_to(role):
            outputs = copied(outputs)
        if self.place.outside:
            self._watch.allow_waits()
        return eager.end_batch(batch, batch_idx, outputs, loss, ends=role.closes)

    # -- 3: a capture and its first replay ---------------------------------------------------------------------------------------

    def _run_captured(self, key: Key, batch: Batch, batch_idx: int, last: bool, *, together: bool) -> Output:
        """Captures the micro-batch and runs it as the first replay; ``together`` with all ranks, which then compare that replay."""
        view = self.view(batch)
        step: CapturedStep | None = None
        failure: Exception | None = None
        try:
            step = self.capture.capture(key, view)
            self.seen.captured = True
        except Exception as error:  # noqa: BLE001 - a step may raise anything; reported or raised by _run_instead
            failure = error
        # If one rank cannot capture, no rank replays: the comparison exchanges gradients once more, on all ranks or on none.
        if together and not self._consensus.all(failure is None):
            failure = failure or NotCapturableError("another rank cannot capture its step")
        if step is not None and failure is None:
            if together and self.options.compare:
                run_eagerly = partial(self.capture.launch, batch, batch_idx, key[1], lends=True)
                failure = self.check.launch(step, view, run_eagerly, key)
            else:
                step.launch(view)
            if failure is None:
                return self._after_replay(step, first=True)
        if step is not None:
            step.undo()
        assert failure is not None
        return self._run_instead(failure, batch, batch_idx, last, key)

    def _run_instead(self, why: Exception, batch: Batch, batch_idx: int, last: bool, key: Key) -> Output:
        """Runs a micro-batch eagerly after a failed capture or a wrong replay, whose effects the caller has undone."""
        if isinstance(why, GraphsDroppedError):
            self._parts.strategy.note_window(begun=not key[1].opens)
            return self._run_watched(key, batch, batch_idx)
        # Once the ranks capture by themselves, a graph that does not fit leaves those of other shapes alone.
        others_stay = bool(self.graphs.steps) and self._consensus.ended
        if isinstance(why, GraphMemoryError) and others_stay and not self.options.required:
            self._warmup.leave_out(key)
            _LOG.warning("cuda_graph='auto' runs steps of one shape eagerly: %s", why)
        else:
            self.fallback.give_up(reason_of_failure(why), why)
        self._parts.strategy.note_window(begun=not key[1].opens)
        return self.eager.run_batch(batch, batch_idx, last)

    # -- 3 to 5: after a replay --------------------------------------------------------------------------------------------------

    def _after_replay(self, step: CapturedStep, *, first: bool) -> Output:
        """Does the host's work after a replay and returns the outputs; the capture has done part of it for the ``first`` replay."""
        closes = step.role.closes
        if closes and self.place.outside:
            self._step_optimizer(step, first=first)
        outputs = step.after_replay(first=first)
        if not self._consensus.alone:
            check_peers()  # a layer's kernel may have given up waiting for another rank
            self._parts.strategy.note_window(begun=not closes)
        if closes:
            self.eager.note_update()
        else:
            self.eager.note_open_batch(step.launched.loss)
        return outputs

    def _step_optimizer(self, step: CapturedStep, *, first: bool) -> None:
        """Steps an optimizer outside of the graph, with the gradients of a replay."""
        optimizer = self._parts.optimizers[0]
        self.eager.finish_update(step.launched.loss)
        if first and (key := kept_gradient(optimizer, step.launched.handed)):
            name = type(optimizer).__name__
            self.fallback.give_up(
                f"{name} keeps a gradient in its state ({key!r}), and the next replay writes to the same memory; copy it there"
            )

    # -- the end -----------------------------------------------------------------------------------------------------------------

    def close(self, *, waits: bool) -> None:
        """Frees the graphs, after a wait for the device with ``waits``."""
        self.graphs.drop(waits=waits)
