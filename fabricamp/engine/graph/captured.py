"""A captured call: a CUDA graph, the memory that it reads and writes, and the host's work for each replay.

Three classes, each derived from the one before it:

- :class:`Captured`: a call for batches of one shape, such as a step of an evaluation.
- :class:`CapturedStep`: a micro-batch of training.  It also looks after the gradients and the optimizer's hyper-parameters.
- :class:`CapturedGroup`: several steps of training in one graph, started by one launch.  It inherits what concerns the graph: its
  memory, the checks and the launch.  The host's work after each step is done by ``single``, the ``CapturedStep`` of the same shape.

The order of use:

1. ``capture``, once.  For a group, ``keep`` is called at the end of each step within the capture.
2. Before each launch ``is_valid``, then ``can_continue`` (only of a step).  Both return whether the graph may be replayed, and both
   prepare the replay: they copy metric states, upload hyper-parameters, or move gradients.  So call them only for a graph that is
   about to be launched; the checks without effects come first.
3. ``launch``.
4. ``after_replay``; for a group ``after_step``, once per step.

If the first replay after a capture does not happen, ``undo`` takes the place of 3 and 4.  If a replay is compared with an eager
step, ``restore_gradients`` comes before the replay, and ``show_gradients`` or ``adopt_gradients`` after the comparison.

Logged values are in a *bank*, one tensor on the device for a table of metrics; a *cell* is the place of one value in it.  The
*weight* of a cell is the number on the host by which a logged mean is divided.
"""

from __future__ import annotations

import contextlib
import gc
import operator
from collections import deque
from itertools import chain, compress, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp._utils.containers import with_parts
from fabricamp.engine.graph.batches import copied, refuse_placeholders, tensors_of
from fabricamp.engine.graph.capture_errors import explained_errors
from fabricamp.engine.graph.host_effects import CapturedConstantsGuard, Generators, is_plain
from fabricamp.engine.graph.refusals import is_fused
from fabricamp.errors import ConfigError
from fabricamp.metrics.replay import LogReplay, MetricStates, managed_attributes
from fabricamp.ops.copies import Copies
from fabricamp.ops.shards import MemoryOf, local
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.torch_private import end_failed_capture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp._utils.types import Batch, Output, ParamGroup
    from fabricamp.engine.graph.batches import Role
    from fabricamp.engine.graph.capture import AccumulationGradients
    from fabricamp.engine.graph.lr_table import LrTable
    from fabricamp.gradients.memory import GradientMemory, Presence
    from fabricamp.metrics import Metrics

MOST_IN_FLIGHT: Final = 4
"""The number of replays of large batches that the host launches ahead of the device, which has work then while the host waits."""
_LARGE: Final = 2**20
"""The bytes from which a batch is large."""
_grad_of: Final = operator.attrgetter("grad")
_values: Final = operator.methodcaller("values")


class Captured:
    """A captured call for batches of one shape, with the host's work for each replay.

    The graph reads ``inputs`` and writes ``outputs``; this object keeps both alive.  ``hooks``: tables of hooks that the call runs.
    """

    def __init__(
        self, module: nn.Module, inputs: Batch, log_replay: LogReplay, hooks: Sequence[Mapping[int, Any]] = ()
    ) -> None:
        self.outputs: Output = None
        self.replays = 0
        self._counts = False
        """Whether the host counts anything for a replay; set by the capture."""
        self._copy_inputs = Copies(tensors_of(inputs))
        self._in_flight: deque[torch.cuda.Event] | None = None
        """The ends of the last replays, if the batches are large: the host launches far ahead of the device otherwise, and each
        batch that waits for its replay has memory of its own."""
        if sum(tensor.nbytes for tensor in tensors_of(inputs)) >= _LARGE:
            self._in_flight = deque()
        self.log_replay = log_replay
        self.written: dict[str, Tensor] = {}
        """The tensors in attributes of the modules, by name, that the call writes to in place; set by the capture."""
        self._versions = list(_versions_of(module))
        self._graph = torch.cuda.CUDAGraph()
        self.generators = Generators(module)
        self.metric_states = MetricStates(module)
        self.constants = CapturedConstantsGuard(module, getattr(module, "hparams", {}), hooks)

    def capture(self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any) -> None:
        """Captures ``run``, which launches on ``stream``, without running it on the device; keeps what it returns (:meth:`take`).

        Graphs of one ``pool`` overwrite each other's memory.  Restores the host's state before it raises: the error of the user's
        code, or what :func:`explained_errors` makes of CUDA's.
        """
        recording = torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        try:
            with (
                explained_errors(),
                without_collection(),
                self.generators.registered_with(self._graph),
                _ended_on_failure(stream.device, pool),
                recording,
            ):
                self.take(run())
                self.metric_states.rebind_in_capture()
        except BaseException:
            self.undo()
            raise
        self.written = {name: tensor for name, tensor, version in self._versions if tensor._version != version}
        self.log_replay.record()
        self.metric_states.record()
        self._counts = bool(self.log_replay.cells) or self.metric_states.repeats

    def take(self, results: Any) -> None:
        """Keeps what the captured call has returned: its outputs."""
        self.outputs = refuse_placeholders(results)

    def undo(self) -> None:
        """Restores the host's state from before the capture; called if its first replay does not happen.

        The state is as recorded before the capture, so a second call changes nothing.
        """
        self.log_replay.undo()
        self.metric_states.undo()

    def is_valid(self) -> bool:
        """Whether all tensors of the graph still have their addresses, and all captured numbers their values.

        Copies metric states that are elsewhere (after a reset, or an eager step) to the graph's tensors.  This comes last, so it is
        done only if the other checks have passed.
        """
        return self.constants.are_unchanged() and self.log_replay.is_valid() and self.metric_states.rebind()

    def launch(self, batch: Batch) -> None:
        """Copies the batch into the graph's inputs and replays the graph."""
        self._copy_inputs(tensors_of(batch))
        self._graph.replay()
        self.replays += 1
        if self._in_flight is not None:
            end = torch.cuda.Event(blocking=True)
            end.record()
            self._in_flight.append(end)
            if len(self._in_flight) > MOST_IN_FLIGHT:
                self._in_flight.popleft().synchronize()

    def after_replay(self, *, first: bool) -> Output:
        """Does the host's work after a replay (the capture has done that of the ``first``); returns copies of the outputs."""
        if not first and self._counts:
            self.count()
        return None if self.outputs is None else copied(self.outputs)

    def count(self) -> None:
        """Updates the host's counters as the call does: weights of logged values, and counts of torchmetrics objects."""
        self.log_replay.repeat()
        self.metric_states.repeat()


class Launched(NamedTuple):
    """What the launches of a micro-batch leave for the host."""

    outputs: Output
    """What hooks get."""
    loss: Tensor | None = None
    """The loss, if the host has a use for it: the micro-batch does not end its accumulation, or the optimizer has yet to step."""
    handed: Sequence[tuple[Tensor, Tensor | None]] = ()
    """Each parameter that an optimizer outside of the graph updates (it may be a master), with the gradient for it."""
    after_replay: Callable[[], None] | None = None
    """The strategy's part of the host's work after a replay; see :meth:`fabricamp.strategies.base.Strategy.captured`."""


class CapturedStep(Captured):
    """A captured micro-batch of one shape and one ``role`` in its accumulation.

    ``memory`` is the memory in which gradients are summed; None if they are summed in ``.grad``.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Batch,
        role: Role,
        log_replay: LogReplay,
        memory: GradientMemory | None,
        hooks: Sequence[Mapping[int, Any]],
    ) -> None:
        super().__init__(module, inputs, log_replay, hooks)
        self.launched = Launched(None)
        """What the capture has left; its tensors are in the graph's memory."""
        self.note: Callable[[], None] | None = None
        """Callback after a replay; it records which parameters the gradient statistics belong to.  None in a group, which has
        ``notes``, one for each of its steps."""
        self.upload: Callable[[], bool] = lambda: True
        """Prepares the optimizer's hyper-parameters, and returns whether the graph may be replayed with them; see
        :func:`hyperparameter_upload`."""
        self.role = role
        self.steps = 1
        """The number of steps that a launch runs."""
        self._memory = memory
        self._flat = None if memory is None else memory.flat
        self._parameters = list(module.parameters())
        self._gradients_before: list[Tensor | None] = []
        self._gradients: list[Tensor | None] = []
        self._presence_before = None if memory is None else memory.presence
        """Which parameters have summed gradients before the step; None without ``memory``."""
        self._presence_after: Presence | None = None
        """Which parameters have summed gradients after the step; set by the capture."""

    def capture(self, run: Callable[[], Launched], stream: torch.cuda.Stream, pool: Any) -> None:
        """Captures ``run`` and records the gradients before and after it."""
        self._gradients_before = list(map(_grad_of, self._parameters))
        super().capture(run, stream, pool)
        # These references keep the graph's memory for the gradients from being reused.
        self._gradients = list(map(_grad_of, self._parameters))
        if self._memory is not None:
            self._presence_after = self._memory.presence

    def take(self, results: Launched) -> None:
        """Keeps what the captured launches have left."""
        super().take(results.outputs)
        self.launched = results

    def undo(self) -> None:
        """Also restores the gradients, again with the same result for every call."""
        super().undo()
        self.restore_gradients()

    def restore_gradients(self) -> None:
        """Restores the host's gradients from before the step: a capture has already put the graph's own into ``.grad``."""
        self._put(self._gradients_before)
        if self._memory is not None and self._presence_before is not None:
            self._memory.presence = self._presence_before

    def is_valid(self) -> bool:
        """Also checks the gradient memory and the optimizer's tensors; uploads its hyper-parameters if all checks have passed."""
        return (self._memory is None or self._memory.flat is self._flat) and super().is_valid() and self.upload()

    def can_continue(self, gradients: AccumulationGradients) -> bool:
        """Prepares the accumulation in progress for the graph; False if other parameters have gradients than in the capture.

        May copy gradients to the addresses that the graph reads.
        """
        if self._memory is not None and self._memory.presence != self._presence_before:
            return False
        return self.role.opens or gradients.prepare(self._gradients_before)

    def launch(self, batch: Batch) -> None:
        """Runs the step on the device; ``.grad`` has the graph's gradients afterwards."""
        super().launch(batch)
        self.show_gradients()
        for parameter, gradient in self.launched.handed:
            parameter.grad = gradient
        if self._memory is not None and self._presence_after is not None:
            self._memory.presence = self._presence_after

    @torch.no_grad()
    def adopt_gradients(self, parameters: Sequence[Tensor]) -> None:
        """As :meth:`show_gradients`, after an eager step of the same bits, whose gradients of ``parameters`` are elsewhere."""
        own = dict(zip(self._parameters, self._gradients, strict=True)) | dict(self.launched.handed)
        for parameter in parameters:
            gradient = own.get(parameter)
            if gradient is not None and parameter.grad is not None and parameter.grad is not gradient:
                local(gradient).copy_(local(parameter.grad))
        self.show_gradients()
        for parameter, gradient in self.launched.handed:
            parameter.grad = gradient

    def show_gradients(self) -> None:
        """Puts the graph's gradients into ``.grad``, unless they are there; an eager step or a validation may have put others."""
        if not all(map(operator.is_, map(_grad_of, self._parameters), self._gradients)):
            self._put(self._gradients)

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def after_replay(self, *, first: bool) -> Output:
        """Also records which parameters the gradient statistics belong to, and does the strategy's part."""
        if not first and self.note is not None:
            self.note()
        outputs = super().after_replay(first=first)
        if self.launched.after_replay is not None:
            self.launched.after_replay()
        return outputs


class CapturedGroup(CapturedStep):
    """The steps of one launch, captured in one graph.

    It has no gradient ``memory``: steps that accumulate are launched one by one (``refusals.group_refusal``), so no gradients are
    kept between two steps.

    ``single`` is the graph of one such step; it has the host's work after each step.  ``lr_table`` is None unless a schedule
    follows steps.  ``shows_logs``: each step's logged values are restored before its hooks run.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: list[Batch],
        role: Role,
        metrics: Metrics,
        single: CapturedStep,
        hooks: Sequence[Mapping[int, Any]],
        *,
        lr_table: LrTable | None,
        shows_logs: bool,
    ) -> None:
        super().__init__(module, inputs, role, LogReplay(metrics), None, hooks)
        self.lr_table = lr_table
        self.notes: list[Callable[[], None]] = []
        """One callback per step, in place of ``note``; it records which parameters the step's gradient statistics belong to."""
        self._single = single
        self.steps = len(inputs)
        self._outputs_by_step: list[list[Tensor]] = []
        """The output tensors of each step so far, during the capture; empty after it."""
        self._stacked_outputs: list[Tensor] = []
        """The same in the graph's memory, each stacked over the steps; every replay overwrites them."""
        self._launched_outputs: list[tuple[Tensor, ...]] = []
        """Copies of the output tensors of the last launch, one tuple per step."""
        self._names: tuple[str, ...] | None = None
        """The keys of the outputs, if they are a dict of tensors: a fast path for the usual form."""
        self._metrics = metrics
        self._expected_weights: list[int] = []
        """The weights of the logged means after the current step, unless a hook logs to the same cells."""
        self._step = 0
        """The step of the launch for which the host works now."""
        self._step_in_bank = 0
        """The step whose logged values are in the bank."""
        self._logged_cells: Tensor | None = None
        """The indices in the bank of the cells that a step logs to; None if their values are not restored."""
        if shows_logs and single.log_replay.cells:
            table = single.log_replay.table
            index = {cell: number for number, cell in enumerate(table.cells.values())}
            indices = [index[cell] for cell in single.log_replay.cells]
            self._logged_cells = torch.tensor(indices, dtype=torch.int64, device=table.device)
            self._logged = torch.zeros(self.steps, len(indices), dtype=torch.float64, device=table.device)

    def capture(self, run: Callable[[], Launched], stream: torch.cuda.Stream, pool: Any) -> None:
        """Captures ``run``, which calls :meth:`keep` after each step; restores the host's state."""
        super().capture(run, stream, pool)
        # The host does each step's work in after_step(), also after the first replay.
        self.log_replay.undo()
        self.metric_states.undo()
        if type(self.outputs) is dict and all(isinstance(value, Tensor) for value in self.outputs.values()):
            self._names = tuple(self.outputs)

    def keep(self, number: int, outputs: Output) -> None:
        """Captures copies of a step's outputs and logged values, which the next step overwrites."""
        self.metric_states.rebind_in_capture()
        if outputs is not None:
            self._outputs_by_step.append(tensors_of(outputs))
        if self._logged_cells is not None:
            torch.index_select(self._single.log_replay.table.bank, 0, self._logged_cells, out=self._logged[number])
        if number == self.steps - 1:  # stacked, so that launch() copies an output of all steps by one clone
            self._stacked_outputs = [torch.stack(each) for each in zip(*self._outputs_by_step, strict=True)]
            self._outputs_by_step.clear()

    def is_valid(self) -> bool:
        """Also checks that the learning-rate table is still valid."""
        return super().is_valid() and (self.lr_table is None or self.lr_table.is_valid())

    def launch(self, batch: Batch) -> None:
        """Runs one step for each batch of the list ``batch``, all in one replay."""
        super().launch(batch)
        copies = [stacked.clone() for stacked in self._stacked_outputs]
        self._launched_outputs = list(zip(*[stacked.unbind() for stacked in copies], strict=True))

    def after_step(self, number: int) -> Output:
        """Does the host's work after a step of the launch; returns the step's outputs."""
        if self.notes:
            self.notes[number]()
        if self._logged_cells is not None:
            self._restore_logs(number)
        self._single.count()
        if self.outputs is None:
            return None
        tensors = self._launched_outputs[number] if self._launched_outputs else ()
        if self._names is not None:
            return dict(zip(self._names, tensors, strict=True))
        return _filled(self.outputs, iter(tensors))

    # -- the logged values of each step ------------------------------------------------------------------------------------------

    def _restore_logs(self, number: int) -> None:
        """Lets the hooks of a step see the step's logged values: they are written into the bank when a hook reads them.

        Sets ``metrics.before_look`` from the first step of a launch to the last.  After an exception in between,
        ``GroupUpdate.close`` removes it, which every end of a run calls.
        """
        log_replay = self._single.log_replay
        if number and log_replay.accumulated_weights() != self._expected_weights:
            names = ", ".join(sorted({repr(cell.published.key) for cell in log_replay.cells}))
            raise ConfigError(
                f"cuda_graph: a batch hook logs a name that training_step logs too (one of {names}), and a launch of several "
                "steps would log them in another order; log it under a name of its own, or give CudaGraph(steps=1)"
            )
        self._expected_weights = log_replay.next_accumulated_weights()
        self._step = number
        if number == 0:
            self._step_in_bank = self.steps - 1
            self._metrics.before_look = self._write_logs
        elif number == self.steps - 1:
            self._write_logs()
            self._metrics.before_look = None

    def _write_logs(self) -> None:
        """Writes the current step's logged values into the bank, where a launch leaves those of its last step."""
        if self._step_in_bank != self._step and self._logged_cells is not None:
            self._single.log_replay.table.bank.index_copy_(0, self._logged_cells, self._logged[self._step])
            self._step_in_bank = self._step


def _filled(outputs: Output, tensors: Iterator[Tensor]) -> Output:
    """Returns ``outputs`` with its tensors replaced, in the order of :func:`~fabricamp.engine.graph.batches.tensors_of`."""
    if isinstance(outputs, Tensor):
        return next(tensors)
    return with_parts(outputs, lambda part: _filled(part, tensors))


def _versions_of(module: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """Yields buffers and tensors in other attributes of the modules, with torch's count of the writes to each."""
    for path, part in module.named_modules():
        managed = managed_attributes(part)
        for name, value in chain(part._buffers.items(), vars(part).items()):
            if isinstance(value, Tensor) and name not in managed and not value.is_inference():
                yield f"{path}.{name}".removeprefix("."), value, value._version


# -- around a capture --------------------------------------------------------------------------------------------------------------


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


def hyperparameter_upload(optimizer: Optimizer) -> Callable[[], bool]:
    """Returns the call that prepares the optimizer's hyper-parameters for a replay; it returns whether the graph may be replayed.

    A fused optimizer uploads them, as long as it still has the tensors of the capture.  For other optimizers they are constants in
    the graph, or tensors that it reads, and are compared with the present values; so are its parameters, its state and the memory
    of both.
    """
    if is_fused(optimizer):
        upload: Callable[[], bool] = optimizer.upload
        return upload
    return CapturedOptimizer(optimizer).is_unchanged


class CapturedOptimizer:
    """What a graph holds of an optimizer that is not fused: numbers of its groups, and tensors of groups, parameters and state.

    :meth:`is_unchanged` is called before each replay, so it works by C functions (``map``, ``chain``, ``compress``), without a loop
    in Python over tensors.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._constants = self._present_constants()
        self._values = list(chain.from_iterable(map(_values, optimizer.param_groups)))
        # Whether the same objects in the groups are the same numbers.
        self._are_fixed = all(
            _is_fixed(value, group["params"])
            for group in optimizer.param_groups
            for key, value in group.items()
            if key != "params"
        )
        updated = self._updated()
        self._are_tensors = [isinstance(value, Tensor) for value in updated]
        self._tensors = list(compress(updated, self._are_tensors))
        self._places = MemoryOf(self._tensors)

    def is_unchanged(self) -> bool:
        """Whether numbers, tensors and the memory of parameters and state are those of the capture."""
        updated = self._updated()
        if list(map(isinstance, updated, repeat(Tensor))) != self._are_tensors:
            return False
        tensors = list(compress(updated, self._are_tensors))
        return (
            all(map(operator.is_, tensors, self._tensors)) and self._places.is_unchanged() and self._has_same_numbers()
        )

    def _updated(self) -> list[Any]:
        """Returns the parameters and the values of all state; no state is looked up, as the hash of a tensor is Python code."""
        entries = [entry for entry in self._optimizer.state.values() if isinstance(entry, dict)]
        return [*owned_parameters(self._optimizer), *chain.from_iterable(map(_values, entries))]

    def _has_same_numbers(self) -> bool:
        values = list(chain.from_iterable(map(_values, self._optimizer.param_groups)))
        if len(values) != len(self._values):
            return False
        same = list(map(operator.is_, values, self._values))
        if all(same) and self._are_fixed:
            return True
        # A number may be another object of the same value, as a schedule writes it; a tensor may not.
        changed = [not one for one in same]
        replaced = chain(compress(values, changed), compress(self._values, changed))
        return not any(map(isinstance, replaced, repeat(Tensor))) and self._present_constants() == self._constants

    def _present_constants(self) -> list[ParamGroup]:
        return [
            {key: _constant(value, group["params"]) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]


def _is_fixed(value: Any, parameters: Sequence[Tensor]) -> bool:
    """Whether a step that is not fused reads the same from the object ``value`` whatever is done to it."""
    return _constant(value, parameters) is None if isinstance(value, Tensor) else is_plain(value)


def _constant(value: Any, parameters: Sequence[Tensor]) -> Any:
    """Returns a hyper-parameter as a step that is not fused reads it on the host; None for a tensor that it reads on the device."""
    if isinstance(value, Tensor):
        reads_on_host = value.device.type == "cpu" and any(one.device.type != "cpu" for one in parameters)
        return value.tolist() if reads_on_host else None
    if hasattr(value, "tolist"):  # an array of NumPy's, which may be changed in place as a list may
        return value.tolist()
    return list(value) if isinstance(value, list) else value


def same_parameters(optimizer: Optimizer) -> Callable[[], bool]:
    """Returns the check before a replay whose optimizer steps outside of the graph: whether it still has the same parameters."""
    before = owned_parameters(optimizer)

    def are_unchanged() -> bool:
        now = owned_parameters(optimizer)
        return len(now) == len(before) and all(map(operator.is_, now, before))

    return are_unchanged


def kept_gradient(optimizer: Optimizer, handed: Sequence[tuple[Tensor, Tensor | None]]) -> str:
    """Returns the key of optimizer state that shares memory with a gradient of ``handed``; an empty string if none does.

    Such a state changes with the next replay, which writes its gradients to the same memory.
    """
    addresses = {local(gradient).untyped_storage().data_ptr() for _, gradient in handed if gradient is not None}
    addresses.discard(0)  # of empty tensors
    for parameter, _ in handed:
        for key, value in optimizer.state.get(parameter, {}).items():
            # Tensors of other classes, such as quantized ones, may have no storage, and were computed from the gradient.
            part = local(value)
            if type(part) is Tensor and part.untyped_storage().data_ptr() in addresses:
                return str(key)
    return ""
