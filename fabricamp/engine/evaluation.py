"""The evaluation loop: validate, test and predict over one loader or several; then prints or gathers the results."""

from __future__ import annotations

import inspect
import io
import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.data import Feed
from fabricamp.errors import ConfigError
from fabricamp.hooks import Hooks, ModuleHooks, call_all, call_hook, overrides
from fabricamp.messages import on_screen
from fabricamp.state import NOT_VALIDATING, RunState, Scope, TrainerFn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fabricamp._utils.types import Batch, Output, Step
    from fabricamp.engine.report.prediction_record import PredictionRecord
    from fabricamp.metrics import Metrics
    from fabricamp.module import TrainingModule
    from fabricamp.precision.base import Precision
    from fabricamp.strategies.base import Strategy
    from fabricamp.watchdog import StopAgreement

_LOG = logging.getLogger("fabricamp")


class EvaluationLoop:
    """One pass over the loaders of ``kind`` ("validation", "test" or "predict"); hooks and arguments are looked up once."""

    def __init__(
        self,
        kind: str,
        *,
        module: TrainingModule,
        precision: Precision,
        state: RunState,
        metrics: Metrics,
        hooks: Hooks,
        agreement: StopAgreement,
        together: Callable[[Iterable[Batch]], Iterable[Batch]],
        inference_mode: bool,
        tell_of_empty: Callable[[int], None],
        settle: Callable[[], None],
        record: PredictionRecord | None = None,
        compiled: Callable[[Step], Step] = lambda step: step,
    ) -> None:
        self._kind = kind
        self._module = module
        self._state = state
        self._metrics = metrics
        self._agreement = agreement
        self._together = together
        self._no_gradients: Callable[[], AbstractContextManager[object]] = (
            torch.inference_mode if inference_mode else torch.no_grad
        )
        step = getattr(module, f"{kind}_step")
        self._arguments = _count_arguments(step)
        self.forward: Step = partial(precision.forward, compiled(step))
        """Calls the step with (batch, batch_idx, dataloader_idx), or as many of these as it takes."""
        self._in_fit = state.fitting
        # The sanity check is short: it is never stopped early.
        self._stops = self._in_fit or state.fn is not TrainerFn.FITTING
        self.cut_short = False
        """Whether the ranks agreed to stop the last run early: no end hook is called, and within fit it counts as not begun."""
        self._contexts = hooks.callbacks("evaluation_context")
        self._start = hooks(f"on_{kind}_start")
        self._end = hooks(f"on_{kind}_end")
        self._epoch_start = hooks(f"on_{kind}_epoch_start")
        self._epoch_end = hooks(f"on_{kind}_epoch_end")
        self._batch_start = hooks(f"on_{kind}_batch_start")
        self._batch_end = hooks(f"on_{kind}_batch_end")
        self._tell_of_empty = tell_of_empty
        self._settle = settle
        self._record = record
        if record is not None and record.writes:
            self._batch_start = (record.begin_batch, *self._batch_start)
            self._batch_end = (*self._batch_end, record.end_batch)

    def run(self, feeds: Sequence[Feed], *, keep: bool = False) -> list[list[Output]]:
        """Runs every loader once; returns one list per loader, with the steps' outputs if ``keep``."""
        state = self._state
        modes = [(submodule, submodule.training) for submodule in self._module.modules()]
        call_hook(self._module, f"on_{self._kind}_model_eval")
        # Restored for the training loop after a validation within fit.
        user_call = state.user_call
        before = replace(user_call)
        user_call.num_dataloaders = len(feeds)
        self.cut_short = False
        state.evaluated = 0 if self._in_fit else NOT_VALIDATING
        if state.fn is not TrainerFn.FITTING:
            self._agreement.begin()
        try:
            outputs = self._within((*self._contexts, self._no_gradients), partial(self._run_loaders, feeds, keep=keep))
        except BaseException:
            _set_modes(modes)  # for whoever trains the module next
            raise
        state.evaluated = NOT_VALIDATING
        user_call.scope = before.scope
        user_call.batch = before.batch
        user_call.dataloader_idx = before.dataloader_idx
        user_call.num_dataloaders = before.num_dataloaders
        name = f"on_{self._kind}_model_train"
        # As in Lightning, predict has no such hook.
        if self._kind != "predict" and overrides(self._module, name, ModuleHooks):
            getattr(self._module, name)()
        else:
            _set_modes(modes)
        return outputs

    def _within(
        self, contexts: Sequence[Callable[..., Any]], run: Callable[[], list[list[Output]]]
    ) -> list[list[Output]]:
        """Calls ``run`` within all contexts; an ExitStack loses a context if an interruption comes right after its entry."""
        if not contexts:
            return run()
        with contexts[0]():
            return self._within(contexts[1:], run)

    def _run_loaders(self, feeds: Sequence[Feed], *, keep: bool) -> list[list[Output]]:
        state = self._state
        # It counts the batches of an entry point's evaluation meanwhile (_count_and_stop).
        batches_done = state.batches_done
        state.user_call.scope = Scope.PREDICT if self._kind == "predict" else Scope.EVAL_EPOCH
        outputs: list[list[Output]] = [[] for _ in feeds]
        if self._record is not None:
            self._record.share(outputs)
        self._settle()  # gathered copies that a hook's forward has left may be older than an update
        call_all(self._start)
        call_all(self._epoch_start)
        for index, feed in enumerate(feeds):
            self._run_loader(feed, index, outputs[index] if keep else None)
        self._settle()  # else what a hook writes to gathered copies would be lost
        state.batches_done = batches_done
        if self._stops:
            # Whether any rank stopped early: all ranks have to know before the next collective.
            self.cut_short = self._agreement.ended_early(here=self.cut_short)
        if not self.cut_short:
            self._call_end()
        return outputs

    def _call_end(self) -> None:
        """Reduces logged values and runs the end hooks, in the order of the training epoch's end."""
        if self._kind != "predict":
            self._metrics.reduce_evaluation(self._state.global_step)
        call_all(self._epoch_end)
        if self._kind != "predict":
            self._metrics.end_evaluation(self._state.global_step)
            self._state.user_call.scope = Scope.NOWHERE  # values logged from here on would get lost
        call_all(self._end)

    def _run_loader(self, feed: Feed, dataloader_idx: int, outputs: list[Output] | None) -> None:
        user_call = self._state.user_call
        user_call.dataloader_idx = dataloader_idx
        # As in Lightning: with one loader, hooks need not take dataloader_idx.
        index = (dataloader_idx,) if user_call.num_dataloaders > 1 else ()
        if self._kind != "predict":
            user_call.scope = Scope.EVAL_STEP
        if self.cut_short:  # in an earlier loader
            return
        # The first loader only: ranks reach later ones at different times, as a loader may have fewer batches on one rank.
        batches = self._together(feed) if dataloader_idx == 0 else feed
        batch_idx = -1
        for batch_idx, batch in enumerate(batches):
            user_call.batch = batch
            for hook in self._batch_start:
                hook(batch, batch_idx, *index)
            arguments = (batch, batch_idx, dataloader_idx)[: self._arguments or 2 + len(index)]
            output = self.forward(*arguments)
            for hook in self._batch_end:
                hook(output, batch, batch_idx, *index)
            if outputs is not None:
                outputs.append(output)
            if self._stops and self._count_and_stop():
                break
        if batch_idx < 0:
            self._tell_of_empty(dataloader_idx)
        if self._kind != "predict":
            user_call.scope = Scope.EVAL_EPOCH

    def _count_and_stop(self) -> bool:
        """Counts a batch for the stop agreement; returns whether all ranks agreed to stop here."""
        state = self._state
        if self._in_fit:
            state.evaluated += 1
            reached = state.evaluated >= state.agenda.hold_evaluated
        else:
            state.batches_done += 1
            reached = state.batches_done >= state.agenda.hold_at
        self.cut_short = reached and self._agreement.hold()
        return self.cut_short


def _set_modes(modes: list[tuple[torch.nn.Module, bool]]) -> None:
    for submodule, training in modes:
        submodule.training = training


def _count_arguments(step: Step) -> int:
    """Returns how many of (batch, batch_idx, dataloader_idx) the step takes by position; 0 for ``*args``, which takes all."""
    parameters = inspect.signature(step).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 0
    count = sum(
        parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD} for parameter in parameters
    )
    if not 1 <= count <= 3:
        raise ConfigError(
            f"{step.__qualname__} takes {count} arguments; it gets (batch), (batch, batch_idx) or those and dataloader_idx"
        )
    return count


def gather_predictions(predictions: list[list[list[Output]]], strategy: Strategy) -> list[Any]:
    """Returns all ranks' predictions, one list per loader, or the list of a single loader.

    They are in the order in which samples were distributed: batch 0 of every rank, then batch 1.  ``predictions`` has a list of
    loaders for each rank; of tensor-parallel ranks, which compute one batch together, only the list of the first is used.
    """
    loaders = []
    for ranks in zip(*predictions[:: strategy.tensor_parallel], strict=True):
        most = max(map(len, ranks))
        loaders.append([batches[index] for index in range(most) for batches in ranks if index < len(batches)])
    return loaders[0] if len(loaders) == 1 else loaders


def print_results(results: list[dict[str, float]], stage: str) -> None:
    """Prints the logged values as a table, one column per loader; logs it line by line if stdout is not a screen."""
    from rich import get_console
    from rich.console import Console
    from rich.table import Table

    kind = "validation" if stage == TrainerFn.VALIDATING else stage
    columns = [kind] if len(results) == 1 else [f"loader {index}" for index in range(len(results))]
    table = Table("metric", *columns)
    for name in sorted({name for result in results for name in result}):
        table.add_row(name, *(f"{result[name]:.6g}" if name in result else "" for result in results))
    console = get_console()
    if on_screen():
        console.print(table)
        return
    text = io.StringIO()
    Console(file=text, width=console.width).print(table)
    for line in text.getvalue().splitlines():
        _LOG.info(line)
