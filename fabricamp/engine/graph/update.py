"""Automatic optimization whose steps are replays of a CUDA graph: the sibling of :class:`~fabricamp.engine.update.Update`."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.engine.graph.batches import BatchIndex, NotCapturableError, copied, signature, tensors_of
from fabricamp.engine.graph.captured import CapturedStep, reason_of
from fabricamp.engine.graph.comparison import StepState, compare
from fabricamp.engine.graph.effects import Attributes, host_generators
from fabricamp.engine.graph.logs import LogTape, LogWatch
from fabricamp.engine.graph.refusals import refused, upload_of
from fabricamp.engine.update import Update
from fabricamp.optimizers import LARC, FusedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from torch.optim import Optimizer

    from fabricamp.engine.loss_weights import LossWeights
    from fabricamp.engine.parts import FitParts
    from fabricamp.engine.session import Session

_LOG = logging.getLogger("fabricamp")
_MOST_IN_A_ROW = 3
_GIB = 2**30
_NUMBERS = (bool, int, float, str, tuple)


class GraphUpdate(Update):
    """Runs the first batches of each shape eagerly, captures the step then, and replays it.

    From the first batch on, all of the fit's work is on a stream of its own: AccumulateGrad nodes keep that of their first use.
    """

    def __init__(self, parts: FitParts, session: Session) -> None:
        super().__init__(parts)
        options = session.settings.cuda_graph
        assert options is not None
        self._options = options
        self._session = session
        self._attachment = session.attachment
        self._steps: dict[Hashable, CapturedStep] = {}
        self._seen: dict[Hashable, int] = {}
        self._captures_in_a_row = 0
        self.why_eager = ""
        """Why this run has no graph any more; empty where it has."""
        device = parts.strategy.device
        self._outer = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(self._outer)
        torch.cuda.set_stream(self._stream)

    # -- a batch -----------------------------------------------------------------------------------------------------------------

    def run_batch(self, batch: Any, batch_idx: int, last: bool) -> Any:
        """Runs a step, as a replay where there is a graph for batches like this one."""
        if self.why_eager:
            return super().run_batch(batch, batch_idx, last)
        try:
            key = signature(batch)
        except NotCapturableError as error:
            self._give_up(str(error))
            return super().run_batch(batch, batch_idx, last)
        step = self._steps.get(key)
        if step is None or not step.fits():
            return self._run_without_graph(key, batch, batch_idx, last)
        self._captures_in_a_row = 0
        step.show_gradients()
        every = self._options.check_every
        if every and step.replays % every == 0:
            self._launch_checked(step, batch, batch_idx)
        else:
            step.launch(batch)
        return self._follow(step)

    def _run_without_graph(self, key: Hashable, batch: Any, batch_idx: int, last: bool) -> Any:
        stale = self._steps.get(key)
        if stale is not None:
            self._count_capture(stale)
            # An eager step finds what has changed (another parameter, say), one is watched, and the next is captured.
            self._drop()
            self._seen = dict.fromkeys(self._seen, self._options.warmup - 3)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if self.why_eager or seen < self._options.warmup or len(self._steps) >= self._options.shapes:
            return self._run_watched(batch, batch_idx, last, seen)
        try:
            step = self._capture(key, batch)
        except Exception as error:  # noqa: BLE001 - whatever a step does; said, or raised
            self.loss = None
            self._give_up(reason_of(error), error)
            return super().run_batch(batch, batch_idx, last)
        self._launch_checked(step, batch, batch_idx)
        return self._follow(step, first=True)

    def _follow(self, step: CapturedStep, *, first: bool = False) -> Any:
        """What the host does behind a replay; the capture has done a part of it for the first."""
        outputs = step.follow(first=first)
        if self._bound.plain_step is None:
            self._note_update()
        else:
            self._state.global_step += 1
            self.stepped = True
        return outputs

    # -- eager steps, watched ----------------------------------------------------------------------------------------------------

    def _run_watched(self, batch: Any, batch_idx: int, last: bool, seen: int) -> Any:
        """An eager step; behind the first of a shape, what Python does in it is looked at too."""
        if self.why_eager or seen >= self._options.warmup:
            return super().run_batch(batch, batch_idx, last)
        attributes = Attributes(self._owners()) if seen > 1 else None
        generators = host_generators()
        try:
            outputs, waits = self._run_seen(batch, batch_idx, last, looks=seen == self._options.warmup - 1)
        except NotCapturableError as error:
            raise refused(str(error)) from None
        finally:
            self._attachment.metrics = self._parts.metrics
        effect = None if attributes is None else attributes.changed()
        if effect is not None:
            self._give_up(
                f"training_step changes {effect}, which a replay would not; keep it in a buffer on the device"
            )
        drawn = next((name for name, state in host_generators().items() if generators[name] != state), "")
        if drawn:
            self._give_up(f"training_step draws from {drawn}, which a replay would not; draw on the device")
        if waits:
            self._give_up(f"the step waits for the device: {waits}; leave the host out of it")
        return outputs

    def _run_seen(self, batch: Any, batch_idx: int, last: bool, *, looks: bool) -> tuple[Any, str]:
        """Runs a step with an eye on what it logs; returns where it waited too, where that is looked for."""
        if self._options.required:
            metrics: Any = LogWatch(self._parts.metrics)
            self._attachment.metrics = metrics
        if not looks:
            return super().run_batch(batch, batch_idx, last), ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                outputs = super().run_batch(batch, batch_idx, last)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        waits = [one for one in caught if "called a synchronizing CUDA operation" in str(one.message)]
        for one in caught:
            if one not in waits and "Synchronization debug mode" not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        return outputs, f"{waits[0].filename}:{waits[0].lineno}" if waits else ""

    def _owners(self) -> Iterator[object]:
        yield from self._parts.module.modules()
        for one in self._session.trainer.callbacks:
            if not type(one).__module__.startswith("fabricamp."):  # a bar has a thread of its own
                yield one

    # -- a capture ---------------------------------------------------------------------------------------------------------------

    def _capture(self, key: Hashable, batch: Any) -> CapturedStep:
        """Captures the step of ``batch``, which has not run on the device then."""
        parts, optimizer = self._parts, self._optimizer
        assert optimizer is not None
        optimizer.zero_grad(set_to_none=True)  # gradients of the graph come into the graph's own memory
        if not all(one.device == self._stream.device for one in tensors_of(batch)):
            raise NotCapturableError(
                "the batch holds tensors that are not on the GPU; move them there, or leave them out"
            )
        inputs = copied(batch)
        tape = LogTape(parts.metrics)
        step = CapturedStep(parts.module, inputs, tape)
        watch: Any = LogWatch(parts.metrics)
        self._attachment.metrics, self._state.capturing = watch, True
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._stream.device)
        try:
            step.capture(lambda: self._launch(inputs, BatchIndex()), self._stream)
        except BaseException:
            tape.undo()
            raise
        finally:
            self._attachment.metrics, self._state.capturing = parts.metrics, False
        verdicts = parts.precision.verdicts
        step.note = None if verdicts is None else verdicts.repeated(optimizer)
        step.upload = upload_of(optimizer) or _unchanged(optimizer)
        self._steps[key] = step
        used = (torch.cuda.memory_reserved(self._stream.device) - before) / _GIB
        shapes = ", ".join(str(tuple(one.shape)) for one in tensors_of(batch))
        self._session.notices.say(
            f"CUDA graph: steps of batches {shapes} are replayed from here on, with {used:.2f} GiB"
        )
        return step

    def _launch(self, batch: Any, batch_idx: Any) -> Any:
        """What a step does on the device."""
        outputs = self._forward_backward(batch, batch_idx)
        if self.loss is None:
            raise NotCapturableError("training_step returned no loss, and a captured step has one for every batch")
        loss, self.loss = self.loss, None
        if self._bound.plain_step is None:
            self._launch_update(loss, batch_idx)
        else:
            self._bound.plain_step()
        return outputs

    def _launch_checked(self, step: CapturedStep, batch: Any, batch_idx: int) -> None:
        """Runs a replay, and compares what it leaves with what an eager step does, where there is memory for that."""
        parts, optimizer = self._parts, self._optimizer
        assert optimizer is not None
        device = self._stream.device
        state = StepState(parts.module, optimizer, parts.precision.verdicts, device)
        torch.cuda.empty_cache()
        if 3 * state.bytes > torch.cuda.mem_get_info(device)[0]:
            _LOG.warning("fabricamp: the replay is not compared with an eager step, for which there is no memory")
            step.launch(batch)
            return
        before = state.copy()
        step.launch(batch)
        metrics = parts.metrics
        metrics.muted, muted = True, metrics.muted
        try:
            difference = compare(state, before, lambda: self._launch(batch, batch_idx))
        finally:
            metrics.muted = muted
        step.show_gradients()
        if difference:
            self._give_up(f"a replay leaves other bits than an eager step, first in {difference}")

    def _count_capture(self, stale: CapturedStep) -> None:
        """A value that is another one in every step would be captured in every step."""
        self._captures_in_a_row += 1
        if self._captures_in_a_row > _MOST_IN_A_ROW:
            name = stale.constants.changed()
            what = f"the attribute {name!r}" if name else "a tensor that the step uses"
            self._give_up(
                f"{what} is another one in each step, so each would be captured anew; change a buffer in place"
            )

    def _weigh(self) -> LossWeights:
        if self.weights is None:
            self._give_up("training_step returns (sum, weight), and the weight may be the host's; return the mean")
        return super()._weigh()

    # -- giving up ---------------------------------------------------------------------------------------------------------------

    def _give_up(self, reason: str, error: BaseException | None = None) -> None:
        """Runs eagerly from here on, and says why; raises where a graph is required."""
        if self._options.required:
            raise refused(reason) from error
        self.why_eager = reason
        self._drop()
        if self._parts.strategy.rank == 0:
            _LOG.warning("fabricamp: cuda_graph='auto' runs eagerly: %s", reason)

    def _drop(self) -> None:
        if self._steps:
            self._stream.synchronize()
            self._steps.clear()
        if isinstance(self._optimizer, FusedOptimizer | LARC):
            self._optimizer.forget()

    def close(self) -> None:
        """Frees the graphs, and goes back to the stream that the fit began on."""
        self._drop()
        self._outer.wait_stream(self._stream)
        torch.cuda.set_stream(self._outer)


def _unchanged(optimizer: Optimizer) -> Callable[[], bool]:
    """Returns what tells whether the numbers of ``optimizer``, which a graph has as constants, are still the same."""
    groups = optimizer.param_groups

    def numbers() -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if isinstance(value, _NUMBERS)} for group in groups]

    captured = numbers()
    return lambda: numbers() == captured
