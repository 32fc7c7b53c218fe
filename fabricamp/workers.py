"""A call of fit, validate, test or predict that runs in worker processes, and what comes back to the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp import launch
from fabricamp.session import Session
from fabricamp.source import Source

if TYPE_CHECKING:
    from fabricamp.module import TrainingModule
    from fabricamp.state import Stage
    from fabricamp.trainer import Trainer

__all__ = ["start_workers"]


def start_workers(
    trainer: Trainer, stage: Stage, module: TrainingModule, call: tuple[Any, ...], options: dict[str, bool]
) -> Any:
    """Starts the processes that the Trainer wants and returns the call's result, the module and callbacks updated.

    A script is run again in every process, and this one ends with them: then there is no return.
    """
    method = launch.choose_start_method(trainer.settings.start_method)
    if method == "script":
        launch.run_script(trainer.num_processes)
    outcome = launch.run_function(_in_worker, (trainer, stage, module, call, options), trainer.num_processes, method)
    module.load_state_dict(outcome["state_dict"])
    trainer.state.epoch, trainer.state.global_step = outcome["epoch"], outcome["global_step"]
    session = Session(trainer, stage, module, Source(datamodule=call[2]))
    session.metrics.callback_metrics.update(outcome["callback_metrics"])
    session.metrics.logged_metrics.update(outcome["logged_metrics"])
    trainer.session = session
    for callback in trainer.callbacks:
        if callback.state_key in outcome["callbacks"]:
            callback.load_state_dict(outcome["callbacks"][callback.state_key])
    return outcome["result"]


def _in_worker(
    trainer: Trainer, stage: Stage, module: TrainingModule, call: tuple[Any, ...], options: dict[str, bool]
) -> dict[str, Any]:
    trainer.become_worker()
    train, evaluation, datamodule, ckpt_path = call
    result = trainer.run(stage, module, train, evaluation, datamodule, ckpt_path, **options)
    return {
        "result": result,
        "state_dict": {name: value.cpu() for name, value in module.state_dict().items()},
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "callback_metrics": dict(trainer.callback_metrics),
        "logged_metrics": dict(trainer.logged_metrics),
        "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
    }
