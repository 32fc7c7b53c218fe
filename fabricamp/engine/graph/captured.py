"""A captured call: a CUDA graph, the memory that it reads and writes, and the host's work for each replay."""

from __future__ import annotations

import contextlib
import gc
import operator
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricamp._utils.containers import with_parts
from fabricamp.engine.graph.batches import NotCapturableError, copied, tensors_of
from fabricamp.engine.graph.host_effects import CapturedConstantsGuard, Generators, LogReplay, MetricStates
from fabricamp.errors import ConfigError
from fabricamp.ops.copies import Copies
from fabricamp.torch_private import end_failed_capture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp.engine.graph.lr_table import LrTable
    from fabricamp.engine.graph.update import Role, WindowGradients
    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.metrics import Metrics


_OWN_FOLDER = str(Path(__file__).parents[2])
_TORCHS_FOLDER = str(Path(torch.__file__).parent)


class Captured:
    """A captured call for batches of one shape, with the host's work for each replay.

    The graph reads ``inputs`` and writes ``outputs``; this object keeps both alive.
    """

    def __init__(self, module: nn.Module, inputs: Any, tape: LogReplay) -> None:
        self.outputs: Any = None
        self.replays = 0
        self._copy_inputs = Copies(tensors_of(inputs))
        self.tape = tape
        self._graph = torch.cuda.CUDAGraph()
        self.generators = Generators(module)
        self.metric_states = MetricStates(module)
        self.constants = CapturedConstantsGuard(module, getattr(module, "hparams", {}))

    def capture(self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any) -> None:
        """Captures ``run``, which launches on ``stream``, without running it on the device.

        Graphs of one ``pool`` overwrite each other's memory.  Raises the exception of ``run`` after the host's state is restored.
        """
        captured = torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        try:
            with (
                without_collection(),
                self.generators.captured(self._graph),
                _ended_on_failure(stream.device, pool),
                captured,
            ):
                self.outputs = run()
                self.metric_states.settle()
        except BaseException:
            self.withdraw()
            raise
        self.tape.take()
        self.metric_states.take()

    def withdraw(self) -> None:
        """Restores the host's state from before the capture; called if its first replay does not happen."""
        self.tape.undo()
        self.metric_states.withdraw()

    @property
    def logged(self) -> torch.Tensor | None:
        """The tensor with the values that the call logs."""
        return self.tape.table.bank

    def fits(self) -> bool:
        """Whether all tensors of the graph still have their addresses, and all captured numbers their values."""
        return self.constants.hold() and self.tape.holds() and self.metric_states.bring()

    def launch(self, batch: Any) -> None:
        """Copies the batch into the graph's inputs and replays the graph."""
        self._copy_inputs(tensors_of(batch))
        self._graph.replay()
        self.replays += 1

    def follow(self, *, first: bool) -> Any:
        """Does the host's work after a replay, which the capture has done for the ``first``; returns copies of the outputs."""
        if not first:
            self.count()
        return None if self.outputs is None else copied(self.outputs)

    def count(self) -> None:
        """Updates the host's counters as the call does: weights of logged values, and counts of torchmetrics objects."""
        self.tape.play()
        self.metric_states.play()


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """A context without garbage collection, since freeing the graph of an earlier run would break a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _ended_on_failure(device: torch.device, pool: Any) -> Iterator[None]:
    """A context that resets torch's allocator after a failed capture, which would stay in capture mode."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # raised if the capture had not begun, or if torch has ended it
            end_failed_capture(device, pool)
        raise


def place_of(error: BaseException) -> str:
    """Returns the line of user code that raised the first exception of the chain; an empty string if there is none."""
    seen: set[int] = set()
    while (earlier := error.__cause__ or error.__context__) is not None and id(earlier) not in seen:
        seen.add(id(earlier))
        error = earlier
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OWN_FOLDER, _TORCHS_FOLDER, "<")):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failed capture in one line, with the line of user code."""
    if isinstance(error, NotCapturableError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the graph's memory does not fit beside what is allocated; give a smaller batch"
    place = place_of(error)
    first = str(error).partition("\n")[0]
    where = f" at {place}" if place else ""
    return f"the step does what a capture cannot hold{where} ({type(error).__name__}: {first})"


# ~~~ from engine.graph.captured_step: A captured micro-batch of training: the captured call with its gradients and the optimizer's hyper-parameters.


_grad: Final = operator.attrgetter("grad")
_NUMBERS: Final = (bool, int, float, str, tuple)


def unchanged(optimizer: Optimizer) -> Callable[[], bool]:
    """Returns a check that the hyper-parameters of ``optimizer``, constants in a graph, are unchanged since this call."""
    groups = optimizer.param_groups

    def numbers() -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if isinstance(value, _NUMBERS)} for group in groups]

    captured = numbers()
    return lambda: numbers() == captured


class CapturedStep(Captured):
    """A captured micro-batch of one shape and one ``role`` in its accumulation.

    ``memory`` is the memory in which gradients are summed; None if they are summed in ``.grad``.
    """

    def __init__(
        self, module: nn.Module, inputs: Any, role: Role, tape: LogReplay, memory: GradientMemory | None
    ) -> None:
        super().__init__(module, inputs, tape)
        self.loss: Tensor | None = None
        """The loss, if the micro-batch does not finish its accumulation."""
        self.note: Callable[[], None] | None = None
        """Callback after a replay; it records which parameters the gradient statistics belong to."""
        self.upload: Callable[[], bool] = lambda: True
        """Uploads the optimizer's hyper-parameters; returns whether the optimizer still uses the tensors of the capture."""
        self._role = role
        self._memory = memory
        self._flat = None if memory is None else memory.flat
        self._parameters = list(module.parameters())
        self._before: list[Tensor | None] = []
        self._gradients: list[Tensor | None] = []
        self._presence = [] if memory is None else [memory.presence]

    def capture(self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any) -> None:
        """Captures ``run`` and records the gradients before and after it."""
        self._before = list(map(_grad, self._parameters))
        super().capture(run, stream, pool)
        # These references keep the graph's memory for the gradients from being reused.
        self._gradients = list(map(_grad, self._parameters))
        if self._memory is not None:
            self._presence.append(self._memory.presence)

    def withdraw(self) -> None:
        """Also restores the gradients."""
        super().withdraw()
        self.ready()

    def fits(self) -> bool:
        """Also checks the gradient memory and the optimizer's tensors, and uploads its hyper-parameters."""
        return (self._memory is None or self._memory.flat is self._flat) and super().fits() and self.upload()

    def takes_over(self, window: WindowGradients) -> bool:
        """Prepares the accumulation in progress for the graph; False if other parameters have gradients than in the capture."""
        if self._memory is not None and self._memory.presence != self._presence[0]:
            return False
        return self._role.opens or window.bring(self._before)

    def ready(self) -> None:
        """Restores the host's gradients from before the step: a capture has already put the graph's own into ``.grad``."""
        self._put(self._before)
        if self._memory is not None:
            self._memory.presence = self._presence[0]

    def launch(self, batch: Any) -> None:
        """Runs the step on the device; ``.grad`` has the graph's gradients afterwards."""
        super().launch(batch)
        self.show_gradients()
        if self._memory is not None:
            self._memory.presence = self._presence[1]

    def show_gradients(self) -> None:
        """Puts the graph's gradients into ``.grad``, unless they are there; an eager step or a validation may have put others."""
        if not all(map(operator.is_, map(_grad, self._parameters), self._gradients)):
            self._put(self._gradients)

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def follow(self, *, first: bool) -> Any:
        """Also records which parameters the gradient statistics belong to."""
        if not first and self.note is not None:
            self.note()
        return super().follow(first=first)


# ~~~ from engine.graph.captured_group: Several steps in one graph, each with separate inputs, outputs and logged values.


class CapturedGroup(CapturedStep):
    """The steps of one launch, captured in one graph.

    ``single`` is the graph of one such step; it has the host's work after each step.  ``rates`` is None unless a schedule follows
    steps.  ``shows_logs``: each step's logged values are restored before its hooks run.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: list[Any],
        role: Role,
        metrics: Metrics,
        single: CapturedStep,
        *,
        rates: LrTable | None,
        shows_logs: bool,
    ) -> None:
        super().__init__(module, inputs, role, LogReplay(metrics), None)
        self.rates = rates
        self.notes: list[Callable[[], None]] = []
        """One callback per step; it records which parameters the step's gradient statistics belong to."""
        self._single = single
        self._steps = len(inputs)
        self._each: list[list[Tensor]] = []
        self._stacked: list[Tensor] = []
        self._rows: list[tuple[Tensor, ...]] = []
        self._names: tuple[str, ...] | None = None
        """The keys of the outputs, if they are a dict of tensors: a fast path for the usual form."""
        self._metrics = metrics
        self._sums: list[int] = []
        self._number = self._shown = 0
        self._places: Tensor | None = None
        if shows_logs and single.tape.cells:
            table = single.tape.table
            index = {cell: number for number, cell in enumerate(table.cells.values())}
            places = [index[cell] for cell in single.tape.cells]
            self._places = torch.tensor(places, dtype=torch.int64, device=table.device)
            self._logged = torch.zeros(self._steps, len(places), dtype=torch.float64, device=table.device)

    def capture(self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any) -> None:
        """Captures ``run``, which calls :meth:`keep` after each step; restores the host's state."""
        super().capture(run, stream, pool)
        self.tape.undo()
        self.metric_states.withdraw()
        if type(self.outputs) is dict and all(isinstance(one, Tensor) for one in self.outputs.values()):
            self._names = tuple(self.outputs)

    def keep(self, number: int, outputs: Any) -> None:
        """Captures copies of a step's outputs and logged values, which the next step overwrites."""
        self.metric_states.settle()
        if outputs is not None:
            self._each.append(tensors_of(outputs))
        if self._places is not None:
            torch.index_select(self._single.tape.table.bank, 0, self._places, out=self._logged[number])
        if number == self._steps - 1:  # stacked, so that launch() copies an output of all steps by one clone
            self._stacked = [torch.stack(column) for column in zip(*self._each, strict=True)]
            self._each.clear()

    def fits(self) -> bool:
        """Also checks that the learning-rate table is still valid."""
        return super().fits() and (self.rates is None or self.rates.hold())

    def launch(self, batch: list[Any]) -> None:
        """Runs one step per batch, all in one replay."""
        super().launch(batch)
        self._rows = list(zip(*[one.clone().unbind() for one in self._stacked], strict=True))

    def follow_one(self, number: int) -> Any:
        """Does the host's work after a step of the launch; returns the step's outputs."""
        if self.notes:
            self.notes[number]()
        if self._places is not None:
            self._follow_logs(number)
        self._single.count()
        return None if self.outputs is None else self._outputs_of(number)

    def _outputs_of(self, number: int) -> Any:
        row = self._rows[number] if self._rows else ()
        if self._names is not None:
            return dict(zip(self._names, row, strict=True))
        return _filled(self.outputs, iter(row))

    # -- logged values, one row a step -------------------------------------------------------------------------------------------

    def _follow_logs(self, number: int) -> None:
        tape = self._single.tape
        if number and tape.sums() != self._sums:
            names = ", ".join(sorted({repr(cell.published.key) for cell in tape.cells}))
            raise ConfigError(
                f"cuda_graph: a batch hook logs what training_step logs too (one of {names}), which would be in another order "
                "in a launch of several steps; log it under a name of its own, or give CudaGraph(steps=1)"
            )
        self._sums = tape.sums_behind()
        self._number = number
        if number == 0:
            self._shown, self._metrics.before_look = self._steps - 1, self._show_logs
        elif number == self._steps - 1:
            self._show_logs()
            self._metrics.before_look = None

    def _show_logs(self) -> None:
        """Writes the current step's logged values into the bank, where a launch leaves those of its last step."""
        if self._shown != self._number and self._places is not None:
            self._single.tape.table.bank.index_copy_(0, self._places, self._logged[self._number])
            self._shown = self._number


def _filled(outputs: Any, tensors: Iterator[Tensor]) -> Any:
    """Returns ``outputs`` with its tensors replaced, in the order of :func:`~fabricamp.engine.graph.batches.tensors_of`."""
    if isinstance(outputs, Tensor):
        return next(tensors)
    return with_parts(outputs, lambda part: _filled(part, tensors))
