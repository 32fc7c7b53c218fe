"""A captured call: a CUDA graph, the memory that it reads and writes, and what the host does beside a replay."""

from __future__ import annotations

import contextlib
import gc
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.engine.graph.batches import NotCapturableError, copied, tensors_of
from fabricamp.engine.graph.effects import Constants
from fabricamp.engine.graph.generators import Generators
from fabricamp.engine.graph.metric_states import MetricStates
from fabricamp.ops.copies import Copies
from fabricamp.torch_private import end_failed_capture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from fabricamp.engine.graph.logs import LogTape

_OWN_FOLDER = str(Path(__file__).parents[2])
_TORCHS_FOLDER = str(Path(torch.__file__).parent)


class Captured:
    """A call for batches of one shape, captured, with what the host does beside a replay.

    ``inputs`` are read by the graph, and ``outputs`` written; all live as long as this does.
    """

    def __init__(self, module: nn.Module, inputs: Any, tape: LogTape) -> None:
        self.outputs: Any = None
        self.replays = 0
        self._copy_inputs = Copies(tensors_of(inputs))
        self.tape = tape
        self._graph = torch.cuda.CUDAGraph()
        self.generators = Generators(module)
        self.metric_states = MetricStates(module)
        self.constants = Constants(module, getattr(module, "hparams", {}))

    def capture(self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any) -> None:
        """Captures ``run``, which launches on ``stream``; nothing of it has run on the device then.

        Graphs of one ``pool`` write over each other's memory.  Raises what ``run`` does, with the host as it was.
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
        """Leaves the host as it was before the capture, whose first replay does not come."""
        self.tape.undo()
        self.metric_states.withdraw()

    @property
    def logged(self) -> torch.Tensor | None:
        """Where the values lie that the call logs."""
        return self.tape.table.bank

    def fits(self) -> bool:
        """Whether everything that the graph reads and writes is still where it was, and every number what it was."""
        return self.constants.hold() and self.tape.holds() and self.metric_states.bring()

    def launch(self, batch: Any) -> None:
        """Runs the call on the device."""
        self._copy_inputs(tensors_of(batch))
        self._graph.replay()
        self.replays += 1

    def follow(self, *, first: bool) -> Any:
        """Does what the host does behind a replay, which the capture has done for the first; returns copies of the outputs."""
        if not first:
            self.count()
        return None if self.outputs is None else copied(self.outputs)

    def count(self) -> None:
        """Does on the host what the call does there: weights of logged values, and counts of torchmetrics objects."""
        self.tape.play()
        self.metric_states.play()


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """A context in which no garbage is looked for: the graph of an earlier run among it would end a capture by its end."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _ended_on_failure(device: torch.device, pool: Any) -> Iterator[None]:
    """A capture that fails leaves torch's allocator as if it went on: it is brought out of it."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the capture had not begun, or torch has ended it
            end_failed_capture(device, pool)
        raise


def place_of(error: BaseException) -> str:
    """Returns the line of the user's code at which the first of a chain of exceptions was raised; empty where there is none."""
    seen: set[int] = set()
    while (earlier := error.__cause__ or error.__context__) is not None and id(earlier) not in seen:
        seen.add(id(earlier))
        error = earlier
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OWN_FOLDER, _TORCHS_FOLDER, "<")):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def reason_of(error: BaseException) -> str:
    """Returns why a capture failed, in a line, with the user's line."""
    if isinstance(error, NotCapturableError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the graph's memory does not fit beside what is allocated; give a smaller batch"
    place = place_of(error)
    first = str(error).partition("\n")[0]
    where = f" at {place}" if place else ""
    return f"the step does what a capture cannot hold{where} ({type(error).__name__}: {first})"
