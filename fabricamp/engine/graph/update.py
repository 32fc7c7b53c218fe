"""Automatic optimization by CUDA graph replays; the eager counterpart is :class:`~fabricamp.engine.update.Update`."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fabricamp.engine.graph.batches import BatchIndex, NotCapturableError, copied, signature, tensors_of
from fabricamp.engine.graph.capture_consensus import CaptureConsensus, Stage
from fabricamp.engine.graph.captured import CapturedStep, reason_of, unchanged
from fabricamp.engine.graph.comparison import ComparedState, compare
from fabricamp.engine.graph.host_effects import FEWEST_SIGHTS, MOST_IN_A_ROW, LogReplay, StepWatch
from fabricamp.engine.graph.memory_budget import GraphMemoryError
from fabricamp.engine.graph.refusals import refused, upload_of
from fabricamp.engine.update import Update
from fabricamp.ops.peer_memory import check_peers
from fabricamp.ops.uploads import lasting_like
from fabricamp.optimizers import LARC, FusedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from fabricamp.engine.parts import FitParts
    from fabricamp.engine.session import Session


# ~~~ from engine.graph.window: An accumulation that several graphs work on: the role of each micro-batch, and the addresses of the shared gradients.


_grad: Final = operator.attrgetter("grad")


class Role(NamedTuple):
    """The role of a micro-batch in its accumulation of ``accumulate`` micro-batches; each role has a separate graph."""

    accumulate: int
    opens: bool
    closes: bool

    @property
    def place(self) -> str:
        """The role in words, to follow "batches" in a message; empty without accumulation."""
        if self.accumulate == 1:
            return ""
        does = "end" if self.closes else "begin" if self.opens else "continue"
        return f" that {does} an accumulation of {self.accumulate}"


class WindowGradients:
    """The ``.grad`` of an accumulation in progress, at the same addresses in every graph, outside of the graphs' shared memory."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def settle(self, *, closes: bool = False) -> list[Tensor | None]:
        """Copies every gradient to its fixed address, makes that ``.grad``, now or in a capture, and returns all gradients.

        At the end of an accumulation (``closes``), views into the buckets of torch's DDP stay where they are: kernels may sum a
        copy with another alignment in another order.
        """
        moved: list[tuple[Tensor, Tensor]] = []
        parameters = list(self._module.parameters())
        for parameter in parameters:
            gradient, place = parameter.grad, self._places.get(parameter)
            if gradient is None or gradient is place or (closes and gradient._is_view()):
                continue
            if place is None or place.dtype != gradient.dtype:
                place = self._places[parameter] = lasting_like(gradient)
            moved.append((place, gradient))
            parameter.grad = place
        if moved:
            torch._foreach_copy_([place for place, _ in moved], [gradient for _, gradient in moved])
        return list(map(_grad, parameters))

    def bring(self, captured: Sequence[Tensor | None]) -> bool:
        """Prepares the gradients for a graph that adds to the ``captured`` ones; returns False if other gradients are missing."""
        present = map(_grad, self._module.parameters())
        return all(map(operator.is_, present, captured)) or all(map(operator.is_, self.settle(), captured))


_LOG = logging.getLogger("fabricamp")
_GIB = 2**30
Key: TypeAlias = tuple[Hashable, Role]


class GraphUpdate(Update):
    """Runs the first batches of each shape eagerly, then captures the step and replays it.

    The first, a middle and the last micro-batch of an accumulation have separate graphs.  All work of the fit runs on a
    :class:`~fabricamp.engine.graph.graphs.SideStream`.
    """

    def __init__(self, parts: FitParts, session: Session) -> None:
        self._steps: dict[Key, CapturedStep] = {}
        self._sights: dict[Hashable, int] = {}
        self._seen: dict[Key, int] = {}
        self._weights_seen: dict[Key, float | None] = {}
        self._closed = 0
        super().__init__(parts)
        options = session.settings.cuda_graph
        assert options is not None
        self._options = options
        self._session = session
        self._attachment = session.run_context
        self._watch = StepWatch(session, "training_step")
        self._window = WindowGradients(parts.module)
        self._together = CaptureConsensus(parts.strategy, options.warmup)
        self._captures_in_a_row = 0
        self.why_eager = ""
        """Why the run captures nothing and stays eager; empty while it captures or replays."""
        device = parts.strategy.device
        self._open = torch.zeros((), dtype=torch.float32, device=device)
        """Placeholder for the loss of an accumulation in progress during a capture."""
        self._pool: Any = None
        self._pool_bytes = 0
        self._room = session.graphs.room
        self._left_out: set[Key] = set()
        self._stream = torch.cuda.current_stream(device)
        self._state.runs_as = "eager"

    def use(self, step: Callable[..., Any]) -> None:
        """Sets another step to run; it is captured again after it has run eagerly."""
        super().use(step)
        self._sights.clear()
        self._closed = 0  # the step may come with a new torch DDP wrapper, which needs some eager steps
        if self._steps:
            self._drop()

    def begin_epoch(self, batch_idx: int) -> None:
        """Prepares an epoch; drops the graphs if the number of accumulated micro-batches has changed."""
        before = self._accumulate
        super().begin_epoch(batch_idx)
        if self._accumulate != before and self._steps:
            self._drop()

    # -- a batch -----------------------------------------------------------------------------------------------------------------

    def run_batch(self, batch: Any, batch_idx: int, last: bool) -> Any:
        """Runs a micro-batch, as a replay if there is a graph for its shape and role."""
        role = Role(self._accumulate, self.loss is None, self._ends_accumulation(batch_idx, last))
        key = None if self.why_eager else self._key_of(batch, role)
        step = None if key is None else self._replayable(key)
        # Both may be collectives: every rank calls them, also a rank that runs this micro-batch eagerly.
        together = not self._together.settled and self._meet(key, step)
        checks = self._is_checked(step, role)
        if key is None or self.why_eager:
            return super().run_batch(batch, batch_idx, last)
        if step is None:
            if together or (self._together.settled and self._is_ready(key)):
                return self._run_captured(key, batch, batch_idx, last, compares=together or self._together.alone)
            return self._run_watched(key, batch, batch_idx, last)
        self._captures_in_a_row = 0
        if not checks:
            step.launch(batch)
        elif difference := self._launch_checked(step, batch, partial(self._launch, batch, batch_idx, role), key):
            return self._run_instead(difference, batch, batch_idx, last, key)
        return self._follow(step, role)

    def _key_of(self, batch: Any, role: Role) -> Key | None:
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
        if not step.fits():
            self._count_capture(step)
            # One eager step adopts what has changed (another parameter, say), one is watched, and the next is captured.
            self._drop()
            return None
        return step if step.takes_over(self._window) else None

    def _is_ready(self, key: Key) -> bool:
        """Whether this micro-batch may be captured: enough of the same key have run eagerly."""
        settled = self._closed >= self._parts.strategy.eager_steps and key not in self._left_out
        enough = self._sights.get(key[0], 0) + 1 >= self._options.warmup and self._seen.get(key, 0) >= FEWEST_SIGHTS
        return settled and enough and key not in self._steps and len(self._other_shapes(key)) < self._options.shapes

    def _other_shapes(self, key: Key) -> set[Hashable]:
        return {shape for shape, _ in self._steps} - {key[0]}

    def _is_checked(self, step: CapturedStep | None, role: Role) -> bool:
        """Whether this replay is compared with an eager step; the answer is the same on all ranks."""
        every = self._options.check_every
        if not every:
            return False
        if self._together.alone:
            return step is not None and step.replays % every == 0
        return self._together.checks(every, role, replays=step is not None)

    def _meet(self, key: Key | None, step: CapturedStep | None) -> bool:
        """Returns whether all ranks capture now; every rank has to call it until the ranks have agreed on the first captures."""
        stage = Stage.REPLAY
        if step is None:
            stage = Stage.READY if key is not None and self._is_ready(key) else Stage.EAGER
        return self._together.meet(stage, self._accumulate)

    def _run_captured(self, key: Key, batch: Any, batch_idx: int, last: bool, *, compares: bool) -> Any:
        """Captures the micro-batch and runs it as the first replay; ``compares``, equal on all ranks, checks that replay."""
        role, loss = key[1], self.loss
        step, error = None, None
        try:
            step = self._capture(key, batch)
        except Exception as raised:  # noqa: BLE001 - a step may raise anything; reported or raised below
            error = raised
        if compares and not self._together.all(error is None):
            error = error or NotCapturableError("another rank cannot capture its step")
        if step is None or error is not None:
            assert error is not None
            if step is not None:
                step.withdraw()
            self.loss = loss
            return self._run_instead(error, batch, batch_idx, last, key)
        if not compares:
            step.launch(batch)
        elif difference := self._launch_checked(step, batch, partial(self._launch, batch, batch_idx, role), key):
            step.withdraw()
            self.loss = loss
            return self._run_instead(difference, batch, batch_idx, last, key)
        return self._follow(step, role, first=True)

    def _run_instead(
        self, why: NotCapturableError | Exception, batch: Any, batch_idx: int, last: bool, key: Key
    ) -> Any:
        """Runs a micro-batch eagerly after a failed capture or a wrong replay, whose effects the caller has undone."""
        others = bool(self._steps) and self._together.settled
        if isinstance(why, GraphMemoryError) and others and not self._options.required:
            self._left_out.add(key)
            _LOG.warning("cuda_graph='auto' runs steps of one shape eagerly: %s", why)
        else:
            self._give_up(reason_of(why), why)
        self._parts.strategy.note_window(begun=not key[1].opens)
        return super().run_batch(batch, batch_idx, last)

    def _follow(self, step: CapturedStep, role: Role, *, first: bool = False) -> Any:
        """Does the host's work after a replay and returns the outputs; the capture has done part of it for the ``first`` replay."""
        outputs = step.follow(first=first)
        if not self._together.alone:
            check_peers()  # a layer's kernel may have given up waiting for another rank
            self._parts.strategy.note_window(begun=not role.closes)
        if not role.closes:
            self.loss, self._batch_complete = step.loss, True
            self._state.open_batches += 1
            return outputs
        self._note_replay()
        return outputs

    def _note_replay(self) -> None:
        """Does the host's bookkeeping of a step whose update the device has launched."""
        self.loss, self._state.open_batches = None, 0
        if self._hooks.plain_step is None:
            self._note_update()
        else:
            self._state.global_step += 1
            self.stepped = True

    # -- eager steps, watched ----------------------------------------------------------------------------------------------------

    def _run_watched(self, key: Key, batch: Any, batch_idx: int, last: bool) -> Any:
        """Runs an eager step; the first ``warmup`` of a key are watched for what a replay would not repeat."""
        self._sights[key[0]] = self._sights.get(key[0], 0) + 1
        self._closed += key[1].closes
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen > self._options.warmup:
            return super().run_batch(batch, batch_idx, last)
        call = partial(super().run_batch, batch, batch_idx, last)
        if seen == FEWEST_SIGHTS:
            call = partial(self._room.measured, key, call)
        outputs, reason = self._watch.run(call, compares=seen > 1, looks=seen == FEWEST_SIGHTS)
        reason = reason or self._changing_weight(key)
        if reason:
            self._give_up(reason)
        return outputs

    def _changing_weight(self, key: Key) -> str:
        """Returns why the loss weight cannot be captured, if it is a number that changed; else an empty string."""
        number = None if self.weights is None else self.weights.number
        if self._weights_seen.setdefault(key, number) == number:
            return ""
        return (
            "training_step returns (sum, weight) with a number that is another one in batches of one shape, which no replay would "
            "see; give a tensor on the device, such as mask.sum()"
        )

    # -- a capture ---------------------------------------------------------------------------------------------------------------

    def _capture(self, key: Key, batch: Any) -> CapturedStep:
        """Captures the step of ``batch`` without running it on the device, and returns the graph."""
        parts, optimizer, role = self._parts, self._optimizer, key[1]
        assert optimizer is not None
        if not all(one.device == self._stream.device for one in tensors_of(batch)):
            raise NotCapturableError(
                "the batch holds tensors that are not on the GPU; move them there, or leave them out"
            )
        memory = self._memory() if self._sums and self._memory is not None else None
        if role.opens:
            optimizer.zero_grad(set_to_none=True)  # so the captured backward allocates them in the graph's memory
        elif memory is None:
            self._window.settle()
        inputs = copied(batch)
        shared = self._pool_bytes if role.accumulate > 1 else 0
        self._room.check(key, kept=self._kept(role), shared=shared, shapes=len(self._other_shapes(key)))
        tape = LogReplay(parts.metrics)
        step = CapturedStep(parts.module, inputs, role, tape, memory)
        used = self._captured(step, lambda: self._launch_captured(inputs, role), self._pool_of(role))
        step.loss = None if self.loss is None else self.loss.detach()
        verdicts = parts.precision.verdicts
        step.note = verdicts.repeated(optimizer) if role.closes and verdicts is not None else None
        step.upload = upload_of(optimizer) or unchanged(optimizer)
        self._steps[key] = step
        self._state.runs_as = "graph"
        self._pool_bytes += used if role.accumulate > 1 else 0
        self._tell(batch, role, used)
        return step

    def _captured(self, step: CapturedStep, run: Callable[[], Any], pool: Any) -> int:
        """Captures what ``run`` launches; returns the bytes of memory that the graph reserves."""
        self._attachment.metrics, self._state.capturing = self._watch.log_watch(), True
        before = torch.cuda.memory_reserved(self._stream.device)
        try:
            step.capture(run, self._stream, pool)
        finally:
            self._attachment.metrics, self._state.capturing = self._parts.metrics, False
        return torch.cuda.memory_reserved(self._stream.device) - before

    def _kept(self, role: Role) -> int:
        """Returns the bytes of gradients that a graph keeps; twice with accumulation, whose graphs share one more copy of them."""
        if self._sums or not role.opens:
            return 0
        trained = [one for one in self._parts.module.parameters() if one.requires_grad]
        return sum(one.numel() * one.element_size() for one in trained) * (1 if role.accumulate == 1 else 2)

    def _pool_of(self, role: Role) -> Any:
        """Returns the graph's memory pool; graphs of an accumulation share one, as they run in turn and leave nothing in it."""
        if role.accumulate == 1:
            return torch.cuda.graph_pool_handle()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _tell(self, batch: Any, role: Role, used: int, how: str = "") -> None:
        shapes = ", ".join(str(tuple(one.shape)) for one in tensors_of(batch))
        self._session.run_summary.say(
            f"CUDA graph: steps of batches {shapes}{role.place} are replayed{how} from here on, with {used / _GIB:.2f} GiB"
        )

    def _launch_captured(self, batch: Any, role: Role) -> Any:
        """Runs a step for the capture and copies its gradient statistics out of the memory that other graphs write to."""
        outputs = self._launch(batch, BatchIndex(), role)
        verdicts = self._parts.precision.verdicts
        if role.closes and role.accumulate > 1 and verdicts is not None and self._optimizer is not None:
            verdicts.keep_statistics(self._optimizer)
        return outputs

    def _launch(self, batch: Any, batch_idx: Any, role: Role) -> Any:
        """Launches a step's work on the device; returns what hooks get."""
        self._parts.strategy.note_window(begun=not role.opens)
        self.loss = None if role.opens else self._open
        with contextlib.nullcontext() if role.closes and not self._sums else self._parts.strategy.no_sync():
            outputs = self._forward_backward(batch, batch_idx)
        if self.loss is None or self.loss is self._open:
            raise NotCapturableError("training_step returned no loss, and a captured step has one for every batch")
        if role.accumulate > 1 and not self._sums:
            self._window.settle(closes=role.closes)
        if not role.closes:
            return outputs
        loss, self.loss = self.loss, None
        if self._hooks.plain_step is None:
            self._launch_update(loss, batch_idx)
        else:
            self._hooks.plain_step()
        return outputs

    def _launch_checked(
        self, step: CapturedStep, batch: Any, eager: Callable[[], Any], key: Key
    ) -> NotCapturableError | None:
        """Runs a replay and compares it to an ``eager`` step bit by bit, if the memory suffices for that.

        Returns None, or an error that names the first difference; the state is as before the replay then.
        """
        parts, optimizer, device, role = self._parts, self._optimizer, self._stream.device, key[1]
        assert optimizer is not None
        memory = self._memory() if self._sums and self._memory is not None else None
        window = role.accumulate > 1
        verdicts, states = parts.precision.verdicts, step.metric_states
        state = ComparedState(
            parts.module, optimizer, verdicts, device, states, step.generators,
            memory=memory, weights=self.weights, window=window,
        )  # fmt: skip
        # Up to three copies: before the replay, after it, and after a first eager step.
        if not self._together.all(self._room.has(3 * state.bytes + self._room.takes(key))):
            _LOG.warning("the replay is not compared with an eager step, for which there is no memory")
            step.launch(batch)
            return None
        step.ready()
        logged = None if step.logged is None else step.logged.clone()
        before = state.copy()
        step.launch(batch)
        metrics, loss = parts.metrics, self.loss
        metrics.muted, muted = True, metrics.muted
        try:
            difference = compare(state, before, eager, self._together.all)
        finally:
            metrics.muted, self.loss = muted, loss
        if not difference:
            step.show_gradients()
            return None
        if logged is not None and step.logged is not None:
            step.logged.copy_(logged)
        return NotCapturableError(f"a replay leaves other bits than an eager step, first in {difference}")

    def _count_capture(self, stale: CapturedStep) -> None:
        """Counts graphs that are out of date; gives up after a few in a row, since a value changes in every step then."""
        self._captures_in_a_row += 1
        if self._captures_in_a_row > MOST_IN_A_ROW:
            name = stale.constants.changed()
            what = f"the attribute {name!r}" if name else "a tensor that the step uses"
            self._give_up(
                f"{what} is another one in each step, so each would be captured anew; change a buffer in place"
            )

    # -- giving up ---------------------------------------------------------------------------------------------------------------

    def _give_up(self, reason: str, error: BaseException | None = None) -> None:
        """Runs eagerly from now on and logs ``reason``; raises if a graph is required."""
        if self._options.required:
            raise refused(reason) from error
        self.why_eager = reason
        self._drop()
        if self._parts.strategy.rank == 0:
            _LOG.warning("cuda_graph='auto' runs eagerly: %s", reason)

    def _drop(self, *, waits: bool = True) -> None:
        if self._steps and waits:
            self._stream.synchronize()
        self._steps.clear()
        self._seen.clear()
        self._weights_seen.clear()
        self._left_out.clear()
        self._pool, self._pool_bytes = None, 0
        self._state.runs_as = "eager"
        if isinstance(self._optimizer, FusedOptimizer | LARC):
            self._optimizer.forget()

    def close(self, *, waits: bool) -> None:
        """Frees the graphs, after a wait for the device with ``waits``."""
        self._drop(waits=waits)
