"""A captured call: a CUDA graph, the memory that it reads and writes, and the host's work for each replay."""

from __future__ import annotations

import contextlib
import gc
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.engine.graph.batches import NotCapturableError, copied, tensors_of
from fabricamp.engine.graph.effects import CapturedConstantsGuard
from fabricamp.engine.graph.generators import Generators
from fabricamp.engine.graph.metric_states import MetricStates
from fabricamp.ops.copies import Copies
from fabricamp.torch_private import end_failed_capture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from fabricamp.engine.graph.logs import LogReplay

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
