"""A call of fit, validate, test or predict that runs in worker processes, and the results that they return to the caller."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, cast

import torch

from fabricamp import launch
from fabricamp.data import move_to_device
from fabricamp.engine.session import Session
from fabricamp.hooks import call_hook
from fabricamp.lightning.given import hand_back
from fabricamp.lightning.lending import detach
from fabricamp.watchdog import end_by_sigint_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp._utils.types import StateDict
    from fabricamp.engine.runner import Runner
    from fabricamp.engine.source import GivenData
    from fabricamp.module import TrainingModule
    from fabricamp.state import TrainerFn

Result = TypeVar("Result")

_SECTIONS = ("weights", "callbacks")
_CPU = torch.device("cpu")
_LOG = logging.getLogger("fabricamp")


class Outcome(TypedDict, Generic[Result]):
    """What rank 0's worker sends back."""

    result: Result
    sections: StateDict
    """Weights and callbacks; empty from other ranks."""
    state: dict[str, object]
    """Values of ``RunState`` by name."""
    log_dir: str | None
    log_folder: str | None
    skipped_steps: int
    lengths: dict[str, Any]
    loggers: list[object]
    """What identifies the run of each logger."""
    metrics: StateDict


def start_workers(
    runner: Runner, run: Callable[[], Result], fn: TrainerFn, module: TrainingModule, source: GivenData
) -> Result:
    """Starts the Trainer's worker processes, which call ``run``; returns its result, and updates module and callbacks.

    Start method "script" runs the script again in every process; this process then ends with them and does not return.
    """
    end_by_sigint_at_exit()
    method = launch.choose_start_method(runner.settings.start_method)
    if method == "script":
        if launch.has_run():
            _LOG.warning(
                "the script is run again from its beginning, in %d processes: what its Trainers did before this call, rank 0 does "
                "again", runner.num_processes,
            )  # fmt: skip
        launch.run_script(runner.num_processes)
    outcome: Outcome[Result] = launch.run_function(_in_worker, (runner, run), runner.num_processes, method)
    _take_outcome(runner, outcome, fn, module, source)
    return outcome["result"]


def run_on_first(
    runner: Runner, run: Callable[[], Result], fn: TrainerFn, module: TrainingModule, source: GivenData
) -> Result:
    """Calls ``run`` on rank 0 of the processes that run the script; updates module and callbacks on the others.

    For a Trainer whose ``devices`` asks for another number of processes.
    """
    around = runner.around
    assert around is not None
    outcome = runner.for_all(lambda: _outcome_of(runner, run()))
    if around.rank > 0:
        _take_outcome(runner, outcome, fn, module, source)
    return outcome["result"]


def _take_outcome(
    runner: Runner, outcome: Outcome[Any], fn: TrainerFn, module: TrainingModule, source: GivenData
) -> None:
    """Leaves the Trainer, its callbacks and the module as a run in this process would."""
    runner.take_callbacks(module)
    _take_over(runner, outcome)
    call_hook(module, "configure_model")
    session = Session(runner, fn, module, source)
    session.attach()
    session.run_context.metrics = None  # the run is over
    session.metrics.close()
    session.record.restore(outcome["sections"], "what the workers sent back", *_SECTIONS)
    session.data.take_lengths(outcome["lengths"])
    session.metrics.take_published(outcome["metrics"], outcome["metrics"])
    runner.take_session(session)
    detach(session.run_context, source)
    hand_back((*runner.trainer.callbacks, *runner.trainer.loggers))


def _take_over(runner: Runner, outcome: Outcome[Result]) -> None:
    trainer = runner.trainer
    trainer.log_dir = outcome["log_dir"]
    trainer.log_folder = outcome["log_folder"]
    trainer.state.skipped_before = outcome["skipped_steps"]
    for name, value in outcome["state"].items():
        setattr(trainer.state, name, value)
    for logger, identity in zip(trainer.loggers, outcome["loggers"], strict=True):
        logger.join(identity)


def _in_worker(runner: Runner, run: Callable[[], Result]) -> Outcome[Result]:
    runner.become_worker()
    return _outcome_of(runner, run())


def _outcome_of(runner: Runner, result: Result) -> Outcome[Result]:
    trainer = runner.trainer
    session = runner.session
    assert session is not None
    counters = (
        "fn", "status", "epoch", "global_step", "batch_idx", "batches_done", "closed_at", "validations",
        "should_stop", "stop_reason", "stop_error", "interruption",
    )  # fmt: skip
    sections: StateDict = {}
    if trainer.is_global_zero:  # the caller gets rank 0's state: of a sharded module no other rank has the weights
        sections = cast("StateDict", move_to_device(session.record.save(*_SECTIONS), _CPU))
    return {
        "result": result,
        "sections": sections,
        "state": {name: getattr(trainer.state, name) for name in counters},
        "log_dir": trainer.log_dir,
        "log_folder": trainer.log_folder,
        "skipped_steps": trainer.skipped_steps,
        "lengths": session.data.lengths(),
        "loggers": [one.identity() for one in trainer.loggers],
        "metrics": session.metrics.published(),
    }
