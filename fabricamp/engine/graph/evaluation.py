"""Evaluation steps as CUDA graph replays, with one graph for each batch shape and loader."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.engine.graph.batches import BatchIndex, NotCapturableError, copied, signature, tensors_of
from fabricamp.engine.graph.captured import Captured, reason_of
from fabricamp.engine.graph.host_effects import FEWEST_SIGHTS, MOST_IN_A_ROW, LogReplay, StepWatch, same_bits
from fabricamp.engine.graph.memory_budget import GraphMemoryError
from fabricamp.engine.graph.refusals import refused
from fabricamp.metrics.slots import MetricTable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from fabricamp.engine.session import Session

_LOG = logging.getLogger("fabricamp")


class GraphEvaluation:
    """Calls ``forward`` with (batch, batch_idx, dataloader_idx), or fewer if it takes fewer, and replays it if possible."""

    def __init__(self, session: Session, kind: str, forward: Callable[..., Any]) -> None:
        options = session.settings.cuda_graph
        assert options is not None
        self._options = options
        self._session = session
        self._state = session.trainer.state
        self._forward = forward
        self._step = "predict_step" if kind == "predict" else f"{kind}_step"
        self._watch = StepWatch(session, self._step)
        self._table = session.metrics.table(MetricTable.EVALUATION)
        self._seen: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Captured] = {}
        self._stream = torch.cuda.current_stream(session.strategy.device)
        self._room = session.graphs.room
        self._left_out: set[Hashable] = set()
        self._captures_in_a_row = 0
        self.why_eager = ""
        """Why the evaluation captures nothing and runs eagerly; empty while it captures or replays."""

    def __call__(self, *arguments: Any) -> Any:
        """Runs a step, as a replay if there is a valid graph; returns the step's outputs."""
        if self.why_eager:
            return self._forward(*arguments)
        try:
            key = (self._step, signature(arguments[0]), self._state.dataloader_idx)
        except NotCapturableError as error:
            self._give_up(str(error))
            return self._forward(*arguments)
        graph = self._graphs.get(key)
        if graph is None or not graph.fits():
            return self._run_without_graph(key, arguments)
        self._captures_in_a_row = 0
        every = self._options.check_every
        if every and graph.replays % every == 0:
            self._launch_checked(graph, key, arguments)
        else:
            graph.launch(arguments[0])
        return graph.follow(first=False)

    def _run_without_graph(self, key: Hashable, arguments: tuple[Any, ...]) -> Any:
        if key in self._graphs:
            self._captures_in_a_row += 1
            if self._captures_in_a_row > MOST_IN_A_ROW:
                self._give_up(f"what {self._step} reads is another one in each call; change a buffer in place")
            self.close(waits=True)
            # Two watched eager calls come before the next capture.
            self._seen = dict.fromkeys(self._seen, self._options.warmup - FEWEST_SIGHTS - 1)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        full = len(self._graphs) >= self._options.shapes or key in self._left_out
        if self.why_eager or (seen >= self._options.warmup and full):
            return self._forward(*arguments)
        if seen < self._options.warmup:
            return self._run_watched(key, arguments, seen)
        try:
            graph = self._capture(key, arguments)
        except GraphMemoryError as error:
            self._leave_out(key, error)
            return self._forward(*arguments)
        except Exception as error:  # noqa: BLE001 - a step may raise anything; reported or raised by _give_up
            self._give_up(reason_of(error), error)
            return self._forward(*arguments)
        self._graphs[key] = graph
        self._launch_checked(graph, key, arguments)
        return graph.follow(first=True)

    def _run_watched(self, key: Hashable, arguments: tuple[Any, ...], seen: int) -> Any:
        looks, call = seen == self._options.warmup - 1, partial(self._forward, *arguments)
        if looks:
            call = partial(self._room.measured, key, call)
        outputs, reason = self._watch.run(call, compares=seen > 1, looks=looks)
        if reason:
            self._give_up(reason)
        return outputs

    def _capture(self, key: Hashable, arguments: tuple[Any, ...]) -> Captured:
        session, state = self._session, self._state
        inputs = copied(arguments[0])
        if not all(one.device == self._stream.device for one in tensors_of(inputs)):
            raise NotCapturableError(
                "the batch holds tensors that are not on the GPU; move them there, or leave them out"
            )
        self._room.check(key, shapes=len(self._graphs))
        given = (inputs, BatchIndex(self._step), *arguments[2:])[: len(arguments)]
        graph = Captured(session.module, inputs, LogReplay(session.metrics, MetricTable.EVALUATION))
        session.run_context.metrics, state.capturing = self._watch.log_watch(), True
        try:
            graph.capture(lambda: self._forward(*given), self._stream, torch.cuda.graph_pool_handle())
        finally:
            session.run_context.metrics, state.capturing = session.metrics, False
        return graph

    def _launch_checked(self, graph: Captured, key: Hashable, arguments: tuple[Any, ...]) -> None:
        """Runs a replay and compares its outputs, logged values and metric states with those of an eager step."""
        if not self._room.has(self._room.takes(key)):
            _LOG.warning("a replay of %s is not compared with an eager call, for which there is no memory", self._step)
            graph.launch(arguments[0])
            return
        states, bank, before = graph.metric_states, self._table.bank, self._table.bank.clone()
        generators, drawn_before = graph.generators, graph.generators.states()
        metrics_before = states.copy()
        graph.launch(arguments[0])
        replayed = [*map(torch.clone, tensors_of(graph.outputs)), bank.clone()]
        metrics, drawn = states.copy(), generators.states()
        weights = [(cell, cell.weight) for cell in self._table.cells.values()]

        def eager() -> list[torch.Tensor]:
            bank.copy_(before)
            states.put_back(metrics_before)
            generators.put_back(drawn_before)
            outputs = self._forward(*arguments)
            return [*tensors_of(outputs), bank.clone()]

        found = eager()
        difference = states.difference(metrics) or _difference(found, replayed)
        if difference and _difference(eager(), found):
            difference = ""  # two eager calls differ, too: the step's kernels are not deterministic
        bank.copy_(replayed[-1])
        states.put_back(metrics)
        generators.put_back(drawn)
        for cell, weight in weights:
            cell.weight = weight
        if difference:
            self._give_up(f"a replay of {self._step} gives other bits than an eager call, first in {difference}")

    def _give_up(self, reason: str, error: BaseException | None = None) -> None:
        """Runs eagerly from now on and logs ``reason``; raises if a graph is required."""
        if self._options.required:
            raise refused(reason) from error
        self.why_eager = reason
        self.close(waits=True)
        if self._session.strategy.rank == 0:
            _LOG.warning("cuda_graph='auto' runs %s eagerly: %s", self._step, reason)

    def _leave_out(self, key: Hashable, error: GraphMemoryError) -> None:
        """Runs batches of one shape eagerly, or all batches if no shape has a graph, and logs the reason."""
        if self._options.required or not self._graphs:
            self._give_up(str(error), error)
            return
        self._left_out.add(key)
        if self._session.strategy.rank == 0:
            _LOG.warning("cuda_graph='auto' runs %s of one shape eagerly: %s", self._step, error)

    def close(self, *, waits: bool) -> None:
        """Frees the graphs, after a wait for the device with ``waits``."""
        self._left_out.clear()
        if self._graphs and waits:
            torch.cuda.synchronize(self._stream.device)
        self._graphs.clear()


def _difference(found: list[torch.Tensor], replayed: list[torch.Tensor]) -> str:
    """Returns which output, or the logged values (the last tensor), differs in any bit; an empty string if none does."""
    if len(found) != len(replayed):
        return "the number of its outputs"
    for number, (one, other) in enumerate(zip(found, replayed, strict=True)):
        if not same_bits(one, other):
            return "a logged value" if number == len(found) - 1 else f"output {number}"
    return ""
