"""Evaluation steps as CUDA graph replays, with one graph for each batch shape and loader."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabricamp.engine.graph.batches import BatchIndex, copied, signature, tensors_of, view_of
from fabricamp.engine.graph.capture_errors import reason_of_failure
from fabricamp.engine.graph.captured import Captured
from fabricamp.engine.graph.comparison import REPEATED_STEPS
from fabricamp.engine.graph.fallback import EagerFallback
from fabricamp.engine.graph.host_effects import FEWEST_EAGER_CALLS, MOST_CAPTURES_IN_A_ROW, StepWatch
from fabricamp.engine.graph.memory_budget import GraphMemoryError
from fabricamp.engine.graph.seen_batches import SeenBatches
from fabricamp.errors import NotCapturableError
from fabricamp.metrics.replay import LogReplay
from fabricamp.metrics.slots import MetricTable
from fabricamp.ops.tensors import same_bits

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from fabricamp._utils.types import Batch, Output, Step
    from fabricamp.engine.session import Session

_LOG = logging.getLogger("fabricamp")


class GraphEvaluation:
    """Calls ``forward`` with (batch, batch_idx, dataloader_idx), or fewer if it takes fewer, and replays it if possible."""

    def __init__(self, session: Session, kind: str, forward: Step) -> None:
        options = session.settings.cuda_graph
        assert options is not None
        self._options = options
        self._session = session
        self._state = session.trainer.state
        self._forward = forward
        self._step = "predict_step" if kind == "predict" else f"{kind}_step"
        self._watch = StepWatch(session, self._step)
        self.seen = SeenBatches(self._step, options, session.run_summary.say_of_graph)
        self._table = session.metrics.table(MetricTable.EVALUATION)
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Captured] = {}
        self._stream = torch.cuda.current_stream(session.strategy.device)
        self._pool = torch.cuda.graph_pool_handle()
        """The memory of all graphs: they run in turn, and their outputs are copied before the next one runs."""
        self._memory_budget = session.graphs.memory_budget
        self._too_large: set[Hashable] = set()
        self._captures_in_a_row = 0
        drop = partial(self.close, waits=True)
        self._fallback = EagerFallback(options, session.strategy, drop, self._step)

    @property
    def why_eager(self) -> str:
        """Why the evaluation captures nothing and runs eagerly; empty while it captures or replays."""
        return self._fallback.why

    def __call__(self, *arguments: Any) -> Any:
        """Runs a step, as a replay if there is a valid graph; returns the step's outputs."""
        if self._fallback.why:
            return self._forward(*arguments)
        view = self._view(arguments)
        try:
            key = (self._step, signature(view), self._state.user_call.dataloader_idx)
        except NotCapturableError as error:
            self._fallback.give_up(str(error))
            return self._forward(*arguments)
        graph = self._graphs.get(key)
        if graph is None or not graph.is_valid():
            return self._run_without_graph(key, arguments)
        self._captures_in_a_row = 0
        every = self._options.check_every
        if every and graph.replays % every == 0:
            return self._run_checked(graph, key, arguments, first=False)
        graph.launch(view)
        return graph.after_replay(first=False)

    def _view(self, arguments: tuple[Any, ...]) -> Batch:
        """Returns what graphs get of the batch: all but the entries that only hooks read, which an evaluation's batch may lack."""
        return view_of(arguments[0], self._options.hook_entries, skips_missing=True)

    def _run_without_graph(self, key: Hashable, arguments: tuple[Any, ...]) -> Output:
        """Runs a step for which there is no valid graph: eagerly, watched for the first calls of a key; then captures it."""
        if key in self._graphs:  # out of date
            self._captures_in_a_row += 1
            if self._captures_in_a_row > MOST_CAPTURES_IN_A_ROW:
                self._fallback.give_up(f"{self._step} reads other tensors in each call; change a buffer in place")
            self.close(waits=True)
            # Two watched eager calls come before the next capture.
            self._calls = dict.fromkeys(self._calls, self._options.warmup - FEWEST_EAGER_CALLS - 1)
        if not self.seen.counts(key, self._view(arguments)):
            return self._forward(*arguments)
        calls = self._calls.get(key, 0) + 1
        self._calls[key] = calls
        full = len(self._graphs) >= self._options.shapes or key in self._too_large
        if calls == self._options.warmup and full and key not in self._too_large:
            self.seen.note_full(arguments[0])
        if self._fallback.why or (calls >= self._options.warmup and full):
            return self._forward(*arguments)
        if calls < self._options.warmup:
            return self._run_watched(key, arguments, calls)
        try:
            graph = self._capture(key, arguments)
        except GraphMemoryError as error:
            self._leave_out(key, error)
            return self._forward(*arguments)
        except Exception as error:  # noqa: BLE001 - a step may raise anything; reported or raised by give_up
            self._fallback.give_up(reason_of_failure(error), error)
            return self._forward(*arguments)
        self._graphs[key] = graph
        return self._run_checked(graph, key, arguments, first=True)

    def _run_watched(self, key: Hashable, arguments: tuple[Any, ...], calls: int) -> Output:
        """Runs an eager step and looks for effects that a replay would not repeat; also measures the last step before a capture."""
        is_last = calls == self._options.warmup - 1
        call = partial(self._forward, *arguments)
        if is_last:
            call = partial(self._memory_budget.measured, key, call)
        outputs, reason = self._watch.run(call, compares=calls > 1, looks_for_waits=is_last)
        if reason:
            self._fallback.give_up(reason)
        return outputs

    def _capture(self, key: Hashable, arguments: tuple[Any, ...]) -> Captured:
        """Captures the step of these arguments without running it on the device."""
        session = self._session
        inputs = copied(self._view(arguments))
        if not all(tensor.device == self._stream.device for tensor in tensors_of(inputs)):
            raise NotCapturableError(
                "the batch holds tensors that are not on the GPU; move them there, or leave them out"
            )
        self._memory_budget.check(key, shapes=len(self._graphs))
        captured_arguments = (inputs, BatchIndex(self._step), *arguments[2:])[: len(arguments)]
        graph = Captured(session.module, inputs, LogReplay(session.metrics, MetricTable.EVALUATION))
        session.run_context.metrics = self._watch.log_watch()
        self._state.user_call.capturing = True
        try:
            graph.capture(lambda: self._forward(*captured_arguments), self._stream, self._pool)
        finally:
            session.run_context.metrics = session.metrics
            self._state.user_call.capturing = False
        self.seen.captured = True
        return graph

    def _run_checked(self, graph: Captured, key: Hashable, arguments: tuple[Any, ...], *, first: bool) -> Output:
        """Runs a replay, and compares its outputs, logged values, metric states and all else that it writes with an eager step's.

        Returns the outputs of the replay; if the replay is wrong, those of the eager step, with what that has written.
        """
        if not self._options.compare:
            graph.launch(self._view(arguments))
            return graph.after_replay(first=first)
        written = {**graph.written, "a logged value": self._table.bank}
        copies = 3 * sum(tensor.nbytes for tensor in written.values())
        if self._memory_budget.eager_bytes(key) + copies > self._memory_budget.free():
            _LOG.warning("a replay of %s is not compared with an eager call: there is no memory for one", self._step)
            graph.launch(self._view(arguments))
            return graph.after_replay(first=first)
        states = graph.metric_states
        generators = graph.generators
        written_before = _copies(written)
        states_before = states.copy()
        drawn_before = generators.states()
        graph.launch(self._view(arguments))
        replayed = {**_copies(_named(graph.outputs)), **_copies(written)}
        states_replayed = states.copy()
        drawn_replayed = generators.states()
        weights = [(cell, cell.weight) for cell in self._table.cells.values()]

        def run_eagerly() -> tuple[Output, dict[str, Tensor]]:
            _put_back(written, written_before)
            states.put_back(states_before)
            generators.put_back(drawn_before)
            outputs = self._forward(*arguments)
            return outputs, {**_named(outputs), **_copies(written)}

        outputs, eager = run_eagerly()
        states_eager = states.copy()
        drawn_eager = generators.states()
        difference = states.difference(states_replayed) or _difference(eager, replayed)
        if difference and any(_difference(run_eagerly()[1], eager) for _ in range(REPEATED_STEPS)):
            difference = ""  # eager calls differ, too: the step's kernels are not deterministic
        _put_back(written, eager if difference else replayed)
        # The update counts are on the host and stay those of the replay: after_replay continues them.
        states.put_back(states_eager._replace(counts=states_replayed.counts) if difference else states_replayed)
        generators.put_back(drawn_eager if difference else drawn_replayed)
        for cell, weight in weights:
            cell.weight = weight
        replayed_outputs = graph.after_replay(first=first)
        if not difference:
            return replayed_outputs
        self._fallback.give_up(f"a replay of {self._step} differs bitwise from an eager call, first in {difference}")
        return outputs

    def _leave_out(self, key: Hashable, error: GraphMemoryError) -> None:
        """Runs batches of one shape eagerly, or all batches if no shape has a graph, and logs the reason."""
        if self._options.required or not self._graphs:
            self._fallback.give_up(str(error), error)
            return
        self._too_large.add(key)
        if self._session.strategy.rank == 0:
            _LOG.warning("cuda_graph='auto' runs %s of one shape eagerly: %s", self._step, error)

    def close(self, *, waits: bool) -> None:
        """Frees the graphs, after a wait for the device with ``waits``."""
        self._too_large.clear()
        if self._graphs and waits:
            torch.cuda.synchronize(self._stream.device)
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()


def _named(outputs: Output) -> dict[str, Tensor]:
    """Returns the tensors of a step's outputs, by names for a message."""
    return {f"output {number}": tensor for number, tensor in enumerate(tensors_of(outputs))}


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _put_back(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def _difference(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> str:
    """Returns the name of the first tensor that differs in any bit; an empty string if none does."""
    if tensors.keys() != others.keys():
        return "the number of its outputs"
    return next((name for name, tensor in tensors.items() if not same_bits(tensor, others[name])), "")
