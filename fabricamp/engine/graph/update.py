"""Automatic optimization by CUDA graph replays; the eager counterpart is :class:`~fabricamp.engine.update.Update`.

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

Graphs get the *view* of a batch (:mod:`~fabricamp.engine.graph.batches`); eager steps get the whole batch.

An optimizer whose step a graph cannot hold steps after each replay (``steps_outside``).  The graph then ends with the gradients
for it in ``.grad``, and the comparison compares these.

An accumulation has a graph for each :class:`Role`: the first, a middle and the last micro-batch.  All of them find the gradients
at the same addresses (:class:`AccumulationGradients`).
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fabricamp.engine.graph.batches import BatchIndex, copied, signature, tensors_of, view_of
from fabricamp.engine.graph.capture_consensus import CaptureConsensus, Stage
from fabricamp.engine.graph.capture_errors import reason_of_failure
from fabricamp.engine.graph.captured import CapturedStep, hyperparameter_upload, kept_gradient, same_parameters
from fabricamp.engine.graph.comparison import ComparedState, compare
from fabricamp.engine.graph.host_effects import FEWEST_EAGER_CALLS, MOST_CAPTURES_IN_A_ROW, StepWatch
from fabricamp.engine.graph.memory_budget import GraphMemoryError, free_host_memory
from fabricamp.engine.graph.memory_pool import GraphPool
from fabricamp.engine.graph.refusals import (
    is_fused,
    reason_outside,
    refusal_of_optimizer,
    refused,
    said_of_outside,
    step_hooks,
)
from fabricamp.engine.graph.seen_batches import SeenBatches
from fabricamp.engine.update import Update
from fabricamp.errors import NotCapturableError
from fabricamp.metrics.replay import LogReplay
from fabricamp.ops.peer_memory import check_peers
from fabricamp.ops.shards import local
from fabricamp.ops.uploads import lasting_like
from fabricamp.optimizers import LARC, FusedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from fabricamp._utils.types import Batch, Output, Step
    from fabricamp.engine.loop import FitParts
    from fabricamp.engine.session import Session
    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.precision.optimizer_step import OptimizerStep

_LOG = logging.getLogger("fabricamp")
_GIB = 2**30


class Role(NamedTuple):
    """The role of a micro-batch in its accumulation of ``accumulate`` micro-batches; each role has a separate graph."""

    accumulate: int
    opens: bool
    closes: bool

    @property
    def in_words(self) -> str:
        """The role in words, to follow "batches" in a message; empty without accumulation."""
        if self.accumulate == 1:
            return ""
        if self.closes:
            does = "end"
        elif self.opens:
            does = "begin"
        else:
            does = "continue"
        return f" that {does} an accumulation of {self.accumulate}"


Key: TypeAlias = tuple[Hashable, Role]
"""The key of a graph: the signature of its batches, and their role."""


class GraphUpdate(Update):
    """Runs the first batches of each shape eagerly, then captures the step and replays it.

    All work of the fit runs on a :class:`~fabricamp.engine.graph.graphs.SideStream`.
    """

    def __init__(self, parts: FitParts, session: Session) -> None:
        # Set before super().__init__(), which calls use().
        self._steps: dict[Key, CapturedStep] = {}
        self._eager_by_shape: dict[Hashable, int] = {}
        self._eager_by_key: dict[Key, int] = {}
        self._weight_by_key: dict[Key, float | None] = {}
        self._eager_updates = 0
        self._handed: list[tuple[Tensor, Tensor | None]] = []
        self._handed_loss: Tensor | None = None
        super().__init__(parts)
        options = session.settings.cuda_graph
        assert options is not None
        self._options = options
        self._session = session
        self._attachment = session.run_context
        self._watch = StepWatch(session, "training_step")
        self.seen = SeenBatches("training_step", options, session.run_summary.say_of_graph)
        self._fixed_gradients = AccumulationGradients(parts.module)
        self._consensus = CaptureConsensus(parts.strategy, options.warmup)
        self._captures_in_a_row = 0
        self.why_eager = ""
        """Why the run captures nothing and stays eager; empty while it captures or replays."""
        device = parts.strategy.device
        self._loss_so_far = torch.zeros((), dtype=torch.float32, device=device)
        """Placeholder for the loss of an accumulation in progress during a capture."""
        self._stream = torch.cuda.current_stream(device)
        self._pool = GraphPool(self._stream)
        self._lends = True
        """Whether eager steps may use the graphs' memory: until one of them leaves a tensor there."""
        self._runs_in_pool = False
        """Whether forward and backward allocate in the graphs' memory now."""
        self._memory_budget = session.graphs.memory_budget
        self._too_large: set[Key] = set()
        """The keys whose graphs do not fit into memory."""
        self._state.runs_as = "eager"
        self.steps_outside = False
        """Whether the optimizer's own ``step`` runs after each replay, outside of the graph."""
        reason = reason_outside(parts)
        if reason:
            self._step_outside(reason)

    def use(self, step: Step) -> None:
        """Sets another step to run; it is captured again after it has run eagerly."""
        super().use(step)
        self._eager_by_shape.clear()
        self._eager_updates = 0  # the step may come with a new torch DDP wrapper, which needs some eager steps
        if self._steps:
            self._drop()

    def begin_epoch(self, batch_idx: int) -> None:
        """Prepares an epoch; drops the graphs if the number of accumulated micro-batches has changed."""
        before = self._accumulate
        super().begin_epoch(batch_idx)
        if self._accumulate != before and self._steps:
            self._drop()

    # -- a batch -----------------------------------------------------------------------------------------------------------------

    def run_batch(self, batch: Batch, batch_idx: int, last: bool) -> Output:
        """Runs a micro-batch, as a replay if there is a graph for its shape and role."""
        self._check_optimizer()
        self._take_edits()
        role = Role(self._accumulate, self.loss is None, self._ends_accumulation(batch_idx, last))
        view = batch
        if self._options.hook_entries and not self.why_eager:
            view = self._view(batch)
        key = None if self.why_eager else self._key_of(view, role)
        step = None if key is None else self._replayable(key)
        # Both may be collectives: every rank calls them, also a rank that runs this micro-batch eagerly.
        all_ready = not self._consensus.ended and self._are_all_ready(key, step)
        is_checked = self._is_checked(step, role)
        # 1: the run has given up, now (in _key_of or _replayable) or earlier.
        if key is None or self.why_eager:
            return super().run_batch(batch, batch_idx, last)
        if step is None:
            # A capture, and a look at what a step changes, begin with this rank's shards.
            self._parts.strategy.sharding.settle_module(self._parts.module)
            # 3: all ranks make the first captures at the same batch, and compare them.  Later each rank captures by itself,
            # without a comparison: its eager step would exchange gradients with ranks that make none.
            if all_ready or (self._consensus.ended and self._is_ready(key)):
                compares = all_ready or self._consensus.alone
                return self._run_captured(key, batch, batch_idx, last, compares=compares)
            # 2: too few such batches so far, too many shapes, too little memory, or gradients of other parameters than captured.
            return self._run_watched(key, batch, batch_idx, last)
        self._captures_in_a_row = 0
        if is_checked:
            # 5: if the replay is wrong, its effects are undone and the step runs eagerly.
            difference = self._launch_checked(step, view, partial(self._launch, batch, batch_idx, role), key)
            if difference is not None:
                return self._run_instead(difference, batch, batch_idx, last, key)
        else:
            # 4: nearly every batch of a run.
            step.launch(view)
        return self._after_replay(step, role)

    def _view(self, batch: Batch) -> Batch:
        """Returns what graphs get of a batch: all but the entries that only hooks read."""
        return view_of(batch, self._options.hook_entries)

    def _key_of(self, batch: Batch, role: Role) -> Key | None:
        """Returns the key of the graph for a batch; gives up and returns None for a batch whose tensors cannot be found."""
        try:
            return signature(batch), role
        except NotCapturableError as error:
            self._give_up(str(error))
            return None

    def _replayable(self, key: Key) -> CapturedStep | None:
        """Returns the graph for ``key``; None if there is none, if it is out of date, or if it cannot continue the accumulation."""
        step = self._steps.get(key)
        if step is None:
            return None
        if not step.is_valid() and not self._is_valid_settled(step):
            self._count_capture(step)
            # One eager step adopts what has changed (another parameter, say), one is watched, and the next is captured.
            self._drop()
            self._look_where_to_step()
            return None
        if self._pool.is_lent and not self._reclaim_pool(step):
            return None
        return step if step.can_continue(self._fixed_gradients) else None

    def _is_valid_settled(self, step: CapturedStep) -> bool:
        """Whether the graph is valid once the parameters are this rank's shards again: a validation leaves some gathered."""
        sharding = self._parts.strategy.sharding
        if not sharding.shards:
            return False
        sharding.settle_module(self._parts.module)
        return step.is_valid()

    def _count_capture(self, stale: CapturedStep) -> None:
        """Counts graphs that are out of date; gives up after a few in a row, since a value changes in every step then."""
        self._captures_in_a_row += 1
        if self._captures_in_a_row <= MOST_CAPTURES_IN_A_ROW:
            return
        others_changed = not stale.constants.are_unchanged()
        if not (others_changed or self.steps_outside or is_fused(self._optimizer) or stale.upload()):
            self._captures_in_a_row = 0
            precision = self._parts.precision
            if self.optimizer_step is not None and self.optimizer_step.splits:
                self._step_outside("a schedule or hook changes betas or another number in its groups in each step")
            else:
                self._give_up(
                    f"a number in the groups of {type(self._optimizer).__name__} changes in each step, and "
                    f"{type(precision).__name__} has a step of its own, so the optimizer cannot step by itself after a replay"
                )
        else:
            name = stale.constants.changed()
            what = f"the attribute {name!r}"
            if not name:
                what = "a step hook of the optimizer, or a tensor that the step uses,"
            self._give_up(
                f"{what} is replaced in each step, and each step would be captured again; change a buffer in place"
            )

    def _look_where_to_step(self) -> None:
        """Takes the optimizer's own step out of the next graphs if a change asks for it, such as step hooks that came late."""
        reason = reason_outside(self._parts)
        if not reason or self.steps_outside or self.why_eager:
            return
        refusal = refusal_of_optimizer(self._parts)
        if refusal:
            self._give_up(refusal)
        else:
            self._step_outside(reason)

    def _step_outside(self, reason: str) -> None:
        """Lets the optimizer step after each replay from the next capture on, and says why."""
        self.steps_outside = True
        self._session.run_summary.say_of_graph(said_of_outside(self._optimizer, reason))

    def _are_all_ready(self, key: Key | None, step: CapturedStep | None) -> bool:
        """Returns whether all ranks capture now; every rank has to call it until the ranks have agreed on the first captures."""
        if step is not None:
            stage = Stage.REPLAY
        elif key is not None and self._is_ready(key):
            stage = Stage.READY
        else:
            stage = Stage.EAGER
        return self._consensus.all_ready(stage, self._accumulate)

    def _is_ready(self, key: Key) -> bool:
        """Whether this micro-batch may be captured: enough of the same key have run eagerly."""
        if self._eager_updates < self._parts.strategy.eager_steps or key in self._too_large:
            return False
        shape = key[0]
        if self._eager_by_shape.get(shape, 0) + 1 < self._options.warmup:
            return False
        if self._eager_by_key.get(key, 0) < FEWEST_EAGER_CALLS:
            return False
        return key not in self._steps and len(self._other_shapes(key)) < self._options.shapes

    def _other_shapes(self, key: Key) -> set[Hashable]:
        """Returns the shapes that have graphs, without that of ``key``."""
        return {shape for shape, _ in self._steps} - {key[0]}

    def _is_checked(self, step: CapturedStep | None, role: Role) -> bool:
        """Whether this replay is compared with an eager step; the answer is the same on all ranks."""
        every = self._options.check_every
        if not every:
            return False
        if self._consensus.alone:
            return step is not None and step.replays % every == 0
        return self._consensus.should_check(every, role, replays=step is not None)

    # -- the graphs' memory, lent to eager steps -----------------------------------------------------------------------------------

    def _forward_backward(self, batch: Batch, batch_idx: int) -> Output:
        """Runs forward and backward, in the graphs' memory if it is lent; the outputs, which hooks may keep, are copied then.

        The update is not part of it: what an optimizer creates late stays for good.
        """
        if not self._runs_in_pool:
            return super()._forward_backward(batch, batch_idx)
        with self._pool.lent():
            outputs = super()._forward_backward(batch, batch_idx)
        return copied(outputs)

    @contextlib.contextmanager
    def _in_pool(self, role: Role) -> Iterator[None]:
        """A context within which eager steps of ``role`` run in the graphs' memory, if it is lent to them."""
        self._runs_in_pool = self._lends_to(role)
        try:
            yield
        finally:
            self._runs_in_pool = False

    def _reclaim_pool(self, step: CapturedStep | None = None, *, forgets: bool = True) -> bool:
        """Ends the loan of the graphs' memory, before a replay of ``step`` or a capture.

        If a tensor of an eager step is still alive in it, drops the graphs (``forgets``: as in :meth:`_drop`) and returns False.
        Their memory is left to what is alive, and later graphs have a pool that is not lent.
        """
        if not self._steps:
            self._pool.begin()
            return True
        if step is not None and self._accumulate == 1:
            step.show_gradients()  # frees those of the eager step
        if self._pool.reclaim():
            return True
        self._lends = False
        self._session.run_summary.say(
            "CUDA graph: a tensor of an eager step is kept in the graphs' memory, so they are captured again, in other memory; "
            "eager steps take memory of their own from here on"
        )
        self._drop(forgets=forgets)
        return False

    # -- 2: an eager step, watched -----------------------------------------------------------------------------------------------

    def _run_watched(self, key: Key, batch: Batch, batch_idx: int, last: bool) -> Output:
        """Runs an eager step; the first ``warmup`` of a key are watched for what a replay would not repeat."""
        shape, role = key
        self._eager_updates += role.closes
        call = partial(self._run_eagerly, role, batch, batch_idx, last)
        if not self.seen.counts(shape, self._view(batch)):
            return call()
        self._eager_by_shape[shape] = self._eager_by_shape.get(shape, 0) + 1
        calls = self._eager_by_key.get(key, 0) + 1
        self._eager_by_key[key] = calls
        if calls == self._options.warmup and len(self._other_shapes(key)) >= self._options.shapes:
            self.seen.note_full(batch)
        if calls > self._options.warmup:
            return call()
        looks_closely = calls == FEWEST_EAGER_CALLS
        if looks_closely:
            call = partial(self._memory_budget.measured, key, call)
        outputs, reason = self._watch.run(call, compares=calls > 1, looks_for_waits=looks_closely)
        reason = reason or self._changing_weight(key)
        if reason:
            self._give_up(reason)
        return outputs

    def _run_eagerly(self, role: Role, batch: Batch, batch_idx: int, last: bool) -> Output:
        """Runs an eager step in the graphs' memory.

        After the first capture that saves the memory of a second step.  Before it, optimizer state that the first update creates
        would lie among the step's memory in torch's cache, which could then not be given to the graphs.
        """
        with self._in_pool(role):
            return super().run_batch(batch, batch_idx, last)

    def _changing_weight(self, key: Key) -> str:
        """Returns why the loss weight cannot be captured, if it is a number that changed; else an empty string."""
        number = None if self.weights is None else self.weights.number
        if self._weight_by_key.setdefault(key, number) == number:
            return ""
        return (
            "training_step returns (sum, weight) with a number that differs between batches of one shape, and a replay keeps the "
            "captured number; give a tensor on the device, such as mask.sum()"
        )

    # -- 3: a capture and its first replay ---------------------------------------------------------------------------------------

    def _run_captured(self, key: Key, batch: Batch, batch_idx: int, last: bool, *, compares: bool) -> Output:
        """Captures the micro-batch and runs it as the first replay; ``compares``, equal on all ranks, checks that replay."""
        role = key[1]
        view = self._view(batch)
        loss = self.loss
        step: CapturedStep | None = None
        failure: Exception | None = None
        try:
            step = self._capture(key, view)
        except Exception as error:  # noqa: BLE001 - a step may raise anything; reported or raised by _run_instead
            failure = error
        # If one rank cannot capture, no rank replays: the comparison exchanges gradients once more, on all ranks or on none.
        if compares and not self._consensus.all(failure is None):
            failure = failure or NotCapturableError("another rank cannot capture its step")
        if step is not None and failure is None:
            if compares:
                failure = self._launch_checked(step, view, partial(self._launch, batch, batch_idx, role), key)
            else:
                step.launch(view)
            if failure is None:
                return self._after_replay(step, role, first=True)
        if step is not None:
            step.undo()
        self.loss = loss
        assert failure is not None
        return self._run_instead(failure, batch, batch_idx, last, key)

    def _capture(self, key: Key, batch: Batch) -> CapturedStep:
        """Captures the step of ``batch`` without running it on the device, and returns the graph."""
        parts = self._parts
        optimizer = self._optimizer
        role = key[1]
        assert optimizer is not None
        if not all(tensor.device == self._stream.device for tensor in tensors_of(batch)):
            raise NotCapturableError(
                "the batch holds tensors that are not on the GPU; move them there, or leave them out"
            )
        reason = "" if self.steps_outside else reason_outside(parts)
        if reason:
            # Step hooks that came after this object was made, and before the first capture.
            refusal = refusal_of_optimizer(parts)
            if refusal:
                raise NotCapturableError(refusal)
            self._step_outside(reason)
        memory = self._summing_memory()
        if role.opens:
            optimizer.zero_grad(set_to_none=True)  # so the captured backward allocates them in the graph's memory
        elif memory is None:
            self._fixed_gradients.settle()  # so the captured backward adds to them at the addresses of later accumulations
        other = next(iter(self._steps.values()), None)
        if other is not None:
            # Any graph moves the states of torchmetrics back that an eager step has left in the lent memory.
            other.metric_states.rebind()
        # A capture cannot build an optimizer's rows anew; the present ones are as good for it.
        self._reclaim_pool(forgets=False)
        inputs = copied(batch)
        shapes = len(self._other_shapes(key))
        self._memory_budget.check(
            key, kept=self._kept_bytes(role), shared=self._pool.reserved(), shapes=shapes, lends=self._lends_to(role)
        )
        # An optimizer outside of the graph runs its hooks on the host, whatever comes or goes.
        hooks = [] if self.steps_outside else step_hooks(optimizer)
        step = CapturedStep(parts.module, inputs, role, LogReplay(parts.metrics), memory, hooks)
        used = self._capture_launches(step, lambda: self._launch_captured(step, inputs, role))
        step.handed = self._handed
        step.handed_loss = self._handed_loss
        self._handed = []
        self._handed_loss = None
        step.loss = None if self.loss is None else self.loss.detach()
        verdicts = parts.precision.verdicts
        if role.closes and verdicts is not None:
            step.note = verdicts.repeated(optimizer)
        step.upload = same_parameters(optimizer) if self.steps_outside else hyperparameter_upload(optimizer)
        self._steps[key] = step
        self._state.runs_as = "graph"
        self._report(batch, role, used)
        return step

    def _summing_memory(self) -> GradientMemory | None:
        """Returns the memory in which the gradients of an accumulation are summed; None if they are summed in ``.grad``."""
        if not self._sums or self.optimizer_step is None:
            return None
        return self.optimizer_step.memory()

    def _kept_bytes(self, role: Role) -> int:
        """Returns the bytes of gradients that a graph keeps; twice with accumulation, whose graphs share one more copy of them."""
        if self._sums or not role.opens:
            return 0
        trained = [parameter for parameter in self._parts.module.parameters() if parameter.requires_grad]
        size: int = sum(local(parameter).nbytes for parameter in trained)
        return size if role.accumulate == 1 else 2 * size

    def _lends_to(self, role: Role) -> bool:
        """Whether eager steps of ``role`` run in the graphs' memory.

        Those of an accumulation do not: their gradients, or the sums of these, stay.
        """
        return self._lends and role.accumulate == 1 and not self._sums

    def _capture_launches(self, step: CapturedStep, run: Callable[[], Output]) -> int:
        """Captures what ``run`` launches; returns the bytes of memory that the graph reserves beside those of other graphs."""
        self._attachment.metrics = self._watch.log_watch()
        self._state.user_call.capturing = True
        # Eager steps have filled the pool before the first capture.
        before = self._pool.reserved() if self._steps else 0
        try:
            step.capture(run, self._stream, self._pool.id)
            self._pool.note_capture()
        finally:
            self._attachment.metrics = self._parts.metrics
            self._state.user_call.capturing = False
        return self._pool.reserved() - before

    def _launch_captured(self, step: CapturedStep, batch: Batch, role: Role) -> Output:
        """Runs a step for the capture and copies its gradient statistics out of the memory that earlier graphs write to."""
        with self._parts.strategy.captured() as step.strategy_after_replay:
            outputs = self._launch(batch, BatchIndex(), role)
        verdicts = self._parts.precision.verdicts
        if role.closes and self._steps and verdicts is not None and self._optimizer is not None:
            verdicts.keep_statistics(self._optimizer)
        return outputs

    def _launch(self, batch: Batch, batch_idx: Any, role: Role) -> Output:
        """Launches a step's work on the device; returns what hooks get."""
        self._parts.strategy.note_window(begun=not role.opens)
        self.loss = None if role.opens else self._loss_so_far
        exchanges_in_backward = role.closes and not self._sums
        with contextlib.nullcontext() if exchanges_in_backward else self._parts.strategy.no_sync():
            outputs = self._forward_backward(batch, batch_idx)
        if self.loss is None or self.loss is self._loss_so_far:
            raise NotCapturableError("training_step returned no loss, and a captured step has one for every batch")
        if role.accumulate > 1 and not self._sums:
            self._fixed_gradients.settle(closes=role.closes)
        if not role.closes:
            return outputs
        loss = self.loss
        self.loss = None
        if self.steps_outside:
            assert self.optimizer_step is not None
            self._handed_loss = loss.detach()
            self._handed = self.optimizer_step.prepare(loss)
            if any(gradient is not None and gradient.is_sparse for _, gradient in self._handed):
                name = type(self._optimizer).__name__
                raise NotCapturableError(
                    f"{name} steps after each replay, and a replay hands it no sparse gradients; leave out sparse=True"
                )
        else:
            self._launch_update(loss, batch_idx)
        return outputs

    def _launch_update(self, loss: Tensor | None, batch_idx: int = 0) -> None:
        """Launches an update's work on the device; an optimizer outside of the graph may wait for the device in an eager step."""
        if not self.steps_outside or self.optimizer_step is None or loss is None:
            super()._launch_update(loss, batch_idx)
            return
        self.optimizer_step.prepare(loss)
        with self._watch.allowing_waits():
            self._finish_prepared(self.optimizer_step, loss)

    def _finish_prepared(self, step: OptimizerStep, loss: Tensor | None) -> None:
        if self._closure is not None:
            self._closure.loss = loss
        step.finish_prepared()

    def _obstacle_to_second_pass(self) -> str:
        return "cuda_graph does not offer: a replay is one forward and backward; leave cuda_graph out"

    def _run_optimizer(self, step: CapturedStep, *, first: bool) -> None:
        """Steps the optimizer with the gradients of a replay."""
        assert self.optimizer_step is not None
        self._finish_prepared(self.optimizer_step, step.handed_loss)
        if first and (key := kept_gradient(self.optimizer_step.optimizer, step.handed)):
            name = type(self._optimizer).__name__
            self._give_up(
                f"{name} keeps a gradient in its state ({key!r}), and the next replay writes to the same memory; copy it there"
            )

    def _report(self, batch: Batch, role: Role, used: int, how: str = "") -> None:
        self.seen.captured = True
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(batch))
        self._session.run_summary.say(
            f"CUDA graph: steps of batches {shapes}{role.in_words} are replayed{how} from here on, with {used / _GIB:.2f} GiB"
        )

    # -- 3 and 5: a replay, compared with an eager step --------------------------------------------------------------------------

    def _launch_checked(
        self, step: CapturedStep, batch: Batch, eager: Callable[[], Output], key: Key
    ) -> NotCapturableError | None:
        """Runs a replay and compares it to an ``eager`` step bit by bit, if the memory suffices for that.

        Returns None, or an error that names the first difference; the state is as before the replay then.
        """
        parts = self._parts
        optimizer = self._optimizer
        assert optimizer is not None
        state = ComparedState(
            parts.module,
            optimizer,
            parts.precision,
            self._stream.device,
            step.metric_states,
            step.generators,
            memory=self._summing_memory(),
            weights=self.weights,
            accumulates=key[1].accumulate > 1,
            handed=[parameter for parameter, _ in step.handed],
        )
        # In the graphs' memory an eager step takes no more than the gradients that the graph keeps there.
        role = key[1]
        needed = self._kept_bytes(role) if self._lends_to(role) else self._memory_budget.eager_bytes(key)
        # Up to three copies: before the replay, after it, and after a first eager step.
        copies = 3 * state.bytes
        if copies <= free_host_memory() // parts.strategy.environment.local_world_size:
            state.copies_on = torch.device("cpu")
            needed += state.largest_bytes
        else:
            needed += copies
        if not self._consensus.all(self._memory_budget.has_free(needed)):
            _LOG.warning("the replay is not compared with an eager step: there is no memory for one")
            step.launch(batch)
            return None
        step.restore_gradients()
        logged = step.log_replay.table.bank.clone()
        before = state.copy()
        step.launch(batch)
        loss = self.loss
        muted = parts.metrics.muted
        parts.metrics.muted = True
        try:
            with self._in_pool(key[1]):
                difference = compare(state, before, eager, self._consensus.all)
        finally:
            parts.metrics.muted = muted
            self.loss = loss
            # Those of the eager steps.
            self._handed = []
            self._handed_loss = None
        if not difference:
            step.show_gradients()
            return None
        step.log_replay.table.bank.copy_(logged)
        return NotCapturableError(f"a replay differs bitwise from an eager step, first in {difference}")

    def _take_edits(self) -> None:
        """Lets masters take edits of their weights, as an eager update does: a replay begins with no call of the precision."""
        # Here, not in the update of an eager step, which runs in the graphs' memory: the comparison keeps some memory for good.
        is_due = self._state.global_step >= self._next_look
        if is_due:
            self._note_look()
        self._parts.precision.take_edits(look=is_due)

    def _run_instead(self, why: Exception, batch: Batch, batch_idx: int, last: bool, key: Key) -> Output:
        """Runs a micro-batch eagerly after a failed capture or a wrong replay, whose effects the caller has undone."""
        # Once the ranks capture by themselves, a graph that does not fit leaves those of other shapes alone.
        others_stay = bool(self._steps) and self._consensus.ended
        if isinstance(why, GraphMemoryError) and others_stay and not self._options.required:
            self._too_large.add(key)
            _LOG.warning("cuda_graph='auto' runs steps of one shape eagerly: %s", why)
        else:
            self._give_up(reason_of_failure(why), why)
        self._parts.strategy.note_window(begun=not key[1].opens)
        return super().run_batch(batch, batch_idx, last)

    # -- 3 to 5: after a replay --------------------------------------------------------------------------------------------------

    def _after_replay(self, step: CapturedStep, role: Role, *, first: bool = False) -> Output:
        """Does the host's work after a replay and returns the outputs; the capture has done part of it for the ``first`` replay."""
        if role.closes and self.steps_outside:
            self._run_optimizer(step, first=first)
        outputs = step.after_replay(first=first)
        if step.strategy_after_replay is not None:
            step.strategy_after_replay()
        if not self._consensus.alone:
            check_peers()  # a layer's kernel may have given up waiting for another rank
            self._parts.strategy.note_window(begun=not role.closes)
        if role.closes:
            self._note_replayed_update()
        else:
            self.loss = step.loss
            self._batch_complete = True
            self._state.open_batches += 1
        return outputs

    def _note_replayed_update(self) -> None:
        """Does the host's bookkeeping of a step whose update the device has launched."""
        self.loss = None
        self._state.open_batches = 0
        self._note_update()

    # -- giving up ---------------------------------------------------------------------------------------------------------------

    def _give_up(self, reason: str, error: BaseException | None = None) -> None:
        """Runs eagerly from now on and logs ``reason``; raises if a graph is required."""
        if self._options.required:
            raise refused(reason) from error
        self.why_eager = reason
        self._drop()
        if self._parts.strategy.rank == 0:
            _LOG.warning("cuda_graph='auto' runs eagerly: %s", reason)

    def _drop(self, *, waits: bool = True, forgets: bool = True) -> None:
        """Frees all graphs; each shape has to run eagerly again before its next capture.

        ``forgets``: a fused optimizer builds its rows anew in its next step.
        """
        if self._steps and waits:
            self._stream.synchronize()
        self._steps.clear()
        self._eager_by_key.clear()
        self._weight_by_key.clear()
        self._too_large.clear()
        self._pool = GraphPool(self._stream)
        self._state.runs_as = "eager"
        if forgets and isinstance(self._optimizer, FusedOptimizer | LARC):
            self._optimizer.forget()  # else it would refuse other parameters or state, as if a graph could still be replayed

    def close(self, *, waits: bool) -> None:
        """Frees the graphs, after a wait for the device with ``waits``."""
        self._drop(waits=waits)


_grad: Final = operator.attrgetter("grad")


class AccumulationGradients:
    """The ``.grad`` of an accumulation in progress, at the same addresses in every graph, outside of the graphs' shared memory."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._fixed: dict[Tensor, Tensor] = {}
        """The tensor at the fixed address, for each parameter."""

    @torch.no_grad()
    def settle(self, *, closes: bool = False) -> list[Tensor | None]:
        """Copies every gradient to its fixed address and sets ``.grad`` to it, eagerly or in a capture; returns all gradients.

        At the end of an accumulation (``closes``), views into the buckets of torch's DDP stay where they are: kernels may sum a
        copy with another alignment in another order.
        """
        fixed_tensors: list[Tensor] = []
        gradients: list[Tensor] = []
        parameters = list(self._module.parameters())
        for parameter in parameters:
            gradient = parameter.grad
            fixed = self._fixed.get(parameter)
            if gradient is None or gradient is fixed or (closes and gradient._is_view()):
                continue
            if fixed is None or fixed.dtype != gradient.dtype:
                fixed = lasting_like(gradient)
                self._fixed[parameter] = fixed
            fixed_tensors.append(fixed)
            gradients.append(gradient)
            parameter.grad = fixed
        if gradients:
            torch._foreach_copy_(fixed_tensors, gradients)
        return list(map(_grad, parameters))

    def prepare(self, captured: Sequence[Tensor | None]) -> bool:
        """Prepares the gradients for a graph that adds to the ``captured`` ones; returns False if other gradients are missing."""
        present = map(_grad, self._module.parameters())
        return all(map(operator.is_, present, captured)) or all(map(operator.is_, self.settle(), captured))
