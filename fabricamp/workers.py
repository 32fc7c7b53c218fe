"""A call of fit, validate, test or predict that runs in worker processes, and what comes back to the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp import launch
from fabricamp.loggers.run_folder import RunFolderLogger
from fabricamp.session import Session

if TYPE_CHECKING:
    from fabricamp.module import TrainingModule
    from fabricamp.source import Source
    from fabricamp.state import Stage
    from fabricamp.trainer import Trainer

__all__ = ["start_workers"]


def start_workers(
    trainer: Trainer, stage: Stage, module: TrainingModule, source: Source, ckpt_path: Any, options: dict[str, bool]
) -> Any:
    """Starts the processes that the Trainer wants and returns the call's result, the module and callbacks updated.

    A script is run again in every process, and this one ends with them: then there is no return.
    """
    method = launch.choose_start_method(trainer.settings.start_method)
    if method == "script":
        launch.run_script(trainer.num_processes)
    work = (trainer, stage, module, source, ckpt_path, options)
    outcome = launch.run_function(_in_worker, work, trainer.num_processes, method)
    trainer.take_callbacks(module)
    _take_over(trainer, outcome)
    module.configure_model()
    module.load_state_dict(outcome["state_dict"])
    session = Session(trainer, stage, module, source)
    session.attach()
    session.data.take_lengths(outcome["lengths"])
    session.metrics.callback_metrics.update(outcome["callback_metrics"])
    session.metrics.logged_metrics.update(outcome["logged_metrics"])
    trainer.session = session
    return outcome["result"]


def _take_over(trainer: Trainer, outcome: dict[str, Any]) -> None:
    trainer.log_dir, trainer.skipped_in_workers = outcome["log_dir"], outcome["skipped_steps"]
    for name, value in outcome["state"].items():
        setattr(trainer.state, name, value)
    for logger, version in zip(trainer.loggers, outcome["versions"], strict=True):
        if isinstance(logger, RunFolderLogger):
            logger.version = version
    for callback in trainer.callbacks:
        if callback.state_key in outcome["callbacks"]:
            callback.load_state_dict(outcome["callbacks"][callback.state_key])


def _in_worker(
    trainer: Trainer, stage: Stage, module: TrainingModule, source: Source, ckpt_path: Any, options: dict[str, bool]
) -> dict[str, Any]:
    trainer.become_worker()
    result = trainer.run(stage, module, source.train, source.evaluation, source.datamodule, ckpt_path, **options)
    assert trainer.session is not None
    counters = ("epoch", "global_step", "batch_idx", "batches_done", "should_stop", "stop_reason")
    return {
        "result": result,
        "state_dict": {name: value.cpu() for name, value in module.state_dict().items()},
        "state": {name: getattr(trainer.state, name) for name in counters},
        "log_dir": trainer.log_dir,
        "skipped_steps": trainer.skipped_steps,
        "lengths": trainer.session.data.lengths(),
        "versions": [one.version if isinstance(one, RunFolderLogger) else None for one in trainer.loggers],
        "callback_metrics": dict(trainer.callback_metrics),
        "logged_metrics": dict(trainer.logged_metrics),
        "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
    }
