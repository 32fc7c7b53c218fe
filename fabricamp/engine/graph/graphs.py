"""All CUDA graphs of a session, and the stream that they run on."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch

from fabricamp.cuda_graph import reason_against
from fabricamp.engine.graph.evaluation import GraphEvaluation
from fabricamp.engine.graph.group_update import GroupUpdate
from fabricamp.engine.graph.memory_budget import GraphMemoryBudget
from fabricamp.engine.graph.update import GraphUpdate
from fabricamp.ops.bridge import runs_kernels
from fabricamp.state import TrainerFn

if TYPE_CHECKING:
    from fabricamp._utils.types import Step
    from fabricamp.engine.loop import FitParts
    from fabricamp.engine.session import Session
    from fabricamp.engine.update import StepRunner, Update


class Graphs:
    """Creates and frees the CUDA graphs of ``session``; does nothing if no graph was asked for, or without a GPU."""

    def __init__(self, session: Session) -> None:
        self.update: GraphUpdate | None = None
        """Captures the steps of a fit; None if they are not captured."""
        self.group: GroupUpdate | None = None
        """Launches several of these steps at once; None if each is launched by itself."""
        self._session = session
        self._evaluations: dict[str, GraphEvaluation] = {}
        self._stream: SideStream | None = None

    @property
    def _wanted(self) -> bool:
        return self._session.settings.cuda_graph is not None and self._session.strategy.device.type == "cuda"

    @cached_property
    def memory_budget(self) -> GraphMemoryBudget:
        """The memory measurements of the session's eager steps."""
        options = self._session.settings.cuda_graph
        return GraphMemoryBudget(
            self._session.strategy.device,
            self._session.trainer.state,
            required=options is not None and options.required,
        )

    def enter_stream(self) -> None:
        """Makes a side stream current, since the default stream cannot be captured."""
        if self._wanted and self._stream is None:
            self._stream = SideStream(self._session.strategy.device)

    def runner(self, parts: FitParts, eager: Update, *, together: bool) -> StepRunner:
        """Returns what runs the batches of a fit, beside its ``eager`` update; ``together``: it launches several steps at once."""
        self.update = GraphUpdate(parts, eager, self._session)
        if not together:
            return self.update
        self.group = GroupUpdate(parts, self.update, self._session)
        return self.group

    def evaluation(self, kind: str, forward: Step) -> Step:
        """Returns the function to call for a step of an evaluation of ``kind``: ``forward``, or its captured form."""
        if not self._wanted or self._reason_for_eager_evaluation():
            self._say_why_eager(kind)
            return forward
        if kind not in self._evaluations:  # a later loop, over reloaded loaders, uses the same graphs
            self.enter_stream()  # outside of a fit, the evaluation is still on the default stream
            self._evaluations[kind] = GraphEvaluation(self._session, kind, forward)
        return self._evaluations[kind]

    def _reason_for_eager_evaluation(self) -> str:
        """Returns why evaluations run eagerly although captures are on; an empty string if they are captured."""
        strategy = self._session.strategy
        if strategy.device.type != "cuda":
            return reason_against(strategy.device.type, strategy, self._session.settings)
        if refusal := strategy.refuses_graph():
            return refusal
        if strategy.sharding.shards:
            return f"strategy {strategy.name!r} keeps gathered weights between the batches of an evaluation"
        return ""

    def _say_why_eager(self, kind: str) -> None:
        """Logs why an evaluation runs eagerly although captures are on; within a fit, the fit has logged the reason."""
        session = self._session
        if session.settings.cuda_graph is not None and session.fn is not TrainerFn.FITTING:
            reason = self._reason_for_eager_evaluation()
            session.run_summary.say_of_graph(f"the {kind} runs eagerly, without a CUDA graph: {reason}")

    def close(self, *, failed: bool) -> None:
        """Frees the graphs and leaves the side stream; a process group cannot end before the graphs that use its collectives.

        After a failure with several ranks, the device may wait for a rank that is gone, so the host does not wait for the device:
        CUDA frees a running graph when it has finished.
        """
        if not failed:
            self._say_what_was_never_captured()
        waits = not failed or self._session.strategy.world_size == 1
        for owner in (self.group or self.update, *self._evaluations.values()):
            if owner is not None:
                owner.close(waits=waits)
        if self._stream is not None:
            self._stream.leave(wait=waits)

    def _say_what_was_never_captured(self) -> None:
        """Logs why a run has ended without a graph; for validations within a fit, the training step's reason is enough."""
        owners: list[GraphUpdate | GraphEvaluation] = []
        if self.update is not None:
            owners = [self.update]
        elif self._session.fn is not TrainerFn.FITTING:
            owners = [*self._evaluations.values()]
        for owner in owners:
            if not owner.why_eager:
                owner.seen.end()


class SideStream:
    """Makes a side stream torch's current stream, until :meth:`leave`.

    The default stream cannot be captured.  AccumulateGrad nodes keep the stream of their first use, so torch's
    DistributedDataParallel, which creates them, is created on the side stream, too.  Captures and replays run on the same stream;
    else the capture's writes to the state of random generators would not be ordered before those of the first replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _lend_stream(device)
        self._outer = torch.cuda.current_stream(device)
        self.stream.wait_stream(self._outer)
        torch.cuda.set_stream(self.stream)

    def leave(self, *, wait: bool) -> None:
        """Makes the earlier stream current again; with ``wait``, that stream waits for this one, which is then free for reuse."""
        torch.cuda.set_stream(self._outer)
        if wait:
            self._outer.wait_stream(self.stream)
            _FREE.setdefault(self.stream.device, []).append(self.stream)


_FREE: Final[dict[torch.device, list[torch.cuda.Stream]]] = {}


def _lend_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream for exclusive use, until it is put back into ``_FREE``.

    Takes the streams of earlier runs first, since cuBLAS keeps a workspace for every stream that it ran on, for good.  Takes none
    of torch's 32 streams, which are dealt out in turn: work of another thread on the stream of a capture would break the capture.
    """
    free = _FREE.get(device)
    if free:
        return free.pop()
    if not runs_kernels(device):  # there is no CuPy
        return torch.cuda.Stream(device)
    from cupy.cuda import Device, runtime

    with Device(device.index):
        return torch.cuda.ExternalStream(runtime.streamCreateWithFlags(runtime.streamNonBlocking), device)
