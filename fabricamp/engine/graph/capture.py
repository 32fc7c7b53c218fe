"""The capture of a micro-batch: its launches, at once or into a graph, and the graph.

:class:`StepCapture` makes the graphs of single steps; a graph of several steps takes its launches from it.
:class:`AccumulationGradients` keeps the gradients of an accumulation where all its graphs find them.
"""

from __future__ import annotations

import contextlib
import operator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricamp.engine.graph.batches import BatchIndex, copied, tensors_of
from fabricamp.engine.graph.captured import CapturedStep, Launched, hyperparameter_upload, same_parameters
from fabricamp.engine.graph.refusals import step_hooks
from fabricamp.errors import NotCapturableError
from fabricamp.metrics.replay import LogReplay
from fabricamp.ops.shards import local
from fabricamp.ops.uploads import lasting_like

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from fabricamp._utils.types import Batch
    from fabricamp.engine.graph.batches import Key, Role
    from fabricamp.engine.graph.cache import GraphCache
    from fabricamp.engine.graph.host_effects import StepWatch
    from fabricamp.engine.graph.memory_budget import GraphMemoryBudget
    from fabricamp.engine.graph.optimizer_place import OptimizerPlace
    from fabricamp.engine.loop import FitParts
    from fabricamp.engine.run_context import RunContext
    from fabricamp.engine.update import Update

_GIB: Final = 2**30
_grad: Final = operator.attrgetter("grad")


class StepCapture:
    """Launches micro-batches for ``eager``'s update, and captures these launches into ``graphs``.

    ``say`` logs a line.
    """

    def __init__(
        self,
        parts: FitParts,
        eager: Update,
        graphs: GraphCache,
        place: OptimizerPlace,
        memory_budget: GraphMemoryBudget,
        watch: StepWatch,
        run_context: RunContext,
        say: Callable[[str], None],
    ) -> None:
        self.gradients = AccumulationGradients(parts.module)
        self._parts = parts
        self._eager = eager
        self._optimizer = parts.optimizers[0]
        self._graphs = graphs
        self._place = place
        self._memory_budget = memory_budget
        self._watch = watch
        self._run_context = run_context
        self._say = say
        self._loss_so_far = torch.zeros((), dtype=torch.float32, device=parts.strategy.device)
        """Placeholder for the loss of an accumulation in progress."""

    # -- the launches of a micro-batch -------------------------------------------------------------------------------------------

    def launch(self, batch: Batch, batch_idx: Any, role: Role, *, lends: bool = False) -> Launched:
        """Launches a micro-batch's work on the device, and the update if it ends an accumulation; notes nothing on the host.

        Within a capture a graph holds the launches.  ``lends``: they run at once, in the graphs' memory if that is lent.
        """
        eager = self._eager
        self._parts.strategy.note_window(begun=not role.opens)
        earlier = None if role.opens else self._loss_so_far
        with self.exchanging(role), self._graphs.lent(role) if lends else contextlib.nullcontext():
            outputs, loss = eager.forward_backward(batch, batch_idx, earlier)
        if loss is None or loss is earlier:
            raise NotCapturableError("training_step returned no loss, and a captured step has one for every batch")
        if role.accumulate > 1 and not eager.sums:
            self.gradients.settle(closes=role.closes)
        if not role.closes:
            return Launched(outputs, loss.detach())
        if not self._place.outside:
            eager.launch_update(loss, batch_idx)
            return Launched(outputs)
        handed = eager.prepare_update(loss)
        if any(gradient is not None and gradient.is_sparse for _, gradient in handed):
            name = type(self._optimizer).__name__
            raise NotCapturableError(
                f"{name} steps after each replay, and a replay hands it no sparse gradients; leave out sparse=True"
            )
        return Launched(outputs, loss.detach(), handed)

    def exchanging(self, role: Role) -> AbstractContextManager[None]:
        """A context for forward and backward, whose gradients are exchanged within backward if the update needs no sums of them."""
        if role.closes and not self._eager.sums:
            return contextlib.nullcontext()
        return self._parts.strategy.no_sync()

    # -- a capture ---------------------------------------------------------------------------------------------------------------

    def capture(self, key: Key, batch: Batch) -> CapturedStep:
        """Captures the step of ``batch`` without running it on the device, and returns the graph."""
        parts = self._parts
        graphs = self._graphs
        optimizer = self._optimizer
        role = key[1]
        if not all(tensor.device == graphs.stream.device for tensor in tensors_of(batch)):
            raise NotCapturableError(
                "the batch holds tensors that are not on the GPU; move them there, or leave them out"
            )
        self._place.look_before_capture()
        outside = self._place.outside
        memory = self._eager.summing_memory()
        if role.opens:
            optimizer.zero_grad(set_to_none=True)  # so the captured backward allocates them in the graph's memory
        elif memory is None:
            self.gradients.settle()  # so the captured backward adds to them at the addresses of later accumulations
        other = next(iter(graphs.steps.values()), None)
        if other is not None:
            # Any graph moves the states of torchmetrics back that an eager step has left in the lent memory.
            other.metric_states.rebind()
        # A capture cannot build an optimizer's rows anew; the present ones are as good for it.
        graphs.reclaim(forgets=False)
        inputs = copied(batch)
        self.check_memory(key, shapes=len(graphs.other_shapes(key)))
        # An optimizer outside of the graph runs its hooks on the host, whatever comes or goes.
        hooks = [] if outside else step_hooks(optimizer)
        step = CapturedStep(parts.module, inputs, role, LogReplay(parts.metrics), memory, hooks)
        used = self.capture_launches(step, partial(self._launch_in_capture, inputs, role))
        verdicts = parts.precision.verdicts
        if role.closes and verdicts is not None:
            step.note = verdicts.repeated(optimizer)
        step.upload = same_parameters(optimizer) if outside else hyperparameter_upload(optimizer)
        graphs.steps[key] = step
        parts.state.runs_as = "graph"
        self.report(batch, role, used)
        return step

    def check_memory(self, key: Key, *, shapes: int = 0) -> None:
        """Raises if a graph of ``key`` would not fit into memory, beside those of ``shapes`` other shapes."""
        graphs = self._graphs
        role = key[1]
        self._memory_budget.check(
            key,
            kept=self.kept_bytes(role),
            shared=graphs.pool.reserved(),
            shapes=shapes,
            lends=graphs.lends_to(role),
        )

    def kept_bytes(self, role: Role) -> int:
        """Returns the bytes of gradients that a graph keeps; twice with accumulation, whose graphs share one more copy of them."""
        if self._eager.sums or not role.opens:
            return 0
        trained = [parameter for parameter in self._parts.module.parameters() if parameter.requires_grad]
        size: int = sum(local(parameter).nbytes for parameter in trained)
        return size if role.accumulate == 1 else 2 * size

    def capture_launches(self, step: CapturedStep, run: Callable[[], Launched]) -> int:
        """Captures what ``run`` launches; returns the bytes of memory that the graph reserves beside those of other graphs."""
        graphs = self._graphs
        user_call = self._parts.state.user_call
        self._run_context.metrics = self._watch.log_watch()
        user_call.capturing = True
        # Eager steps have filled the pool before the first capture.
        before = graphs.pool.reserved() if graphs.steps else 0
        try:
            step.capture(run, graphs.stream, graphs.pool.id)
            graphs.pool.note_capture()
        finally:
            self._run_context.metrics = self._parts.metrics
            user_call.capturing = False
        return graphs.pool.reserved() - before

    def _launch_in_capture(self, batch: Batch, role: Role) -> Launched:
        """Launches a step for the capture and copies its gradient statistics out of the memory that earlier graphs write to."""
        with self._parts.strategy.captured() as after_replay:
            launched = self.launch(batch, BatchIndex(), role)
        verdicts = self._parts.precision.verdicts
        if role.closes and self._graphs.steps and verdicts is not None:
            verdicts.keep_statistics(self._optimizer)
        return launched._replace(after_replay=after_replay)

    def report(self, batch: Batch, role: Role, used: int, how: str = "") -> None:
        """Logs that batches of this shape and ``role`` are replayed from here on, with ``used`` bytes of memory."""
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(batch))
        self._say(
            f"CUDA graph: steps of batches {shapes}{role.in_words} are replayed{how} from here on, with {used / _GIB:.2f} GiB"
        )


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
