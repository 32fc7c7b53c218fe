"""Lightning's evaluation loop, for programs that derive from it to print results in their own way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from fabricamp.engine.evaluation import print_results
from fabricamp.errors import ConfigError
from fabricamp.trainer.loops import EvaluationLoop

if TYPE_CHECKING:
    from torch import Tensor

    from fabricamp.state import RunningStage, TrainerFn
    from fabricamp.trainer import Trainer

_NOT_CALLED: Final = {
    "run", "setup_data", "reset", "skip", "done", "teardown", "on_run_start", "on_run_end", "update_restart_stage",
    "reset_restart_stage", "restarting", "is_resuming", "restarted_mid_evaluation", "increment_progress_to_evaluation_end",
    "on_save_checkpoint", "on_load_checkpoint", "state_dict", "load_state_dict", "on_iteration_done", "num_dataloaders",
    "max_batches", "_is_sequential", "_should_reload_val_dl", "_on_evaluation_start", "_on_evaluation_model_eval",
    "_on_evaluation_model_train", "_on_evaluation_end", "_on_evaluation_epoch_start", "_on_evaluation_epoch_end",
    "_store_dataloader_outputs", "_on_before_fetch", "_on_after_fetch", "_evaluation_step", "_build_kwargs",
    "_build_step_args_from_hook_kwargs", "_verify_dataloader_idx_requirement", "_get_keys", "_find_value",
    "_load_from_state_dict",
}  # fmt: skip
"""Names of Lightning's loop that nothing here calls, so that an override would have no effect."""


class _EvaluationLoop(EvaluationLoop):
    """``trainer.validate_loop`` or ``trainer.test_loop``; a subclass may override ``_print_results`` and nothing else."""

    def __init__(
        self,
        trainer: Trainer,
        trainer_fn: TrainerFn,
        stage: RunningStage,
        verbose: bool = True,
        inference_mode: bool = True,
    ) -> None:
        kind = type(self)
        classes = kind.__mro__[: kind.__mro__.index(_EvaluationLoop)]
        overridden = sorted({name for one in classes for name in vars(one)} & _NOT_CALLED)
        if overridden:
            raise ConfigError(
                f"{kind.__name__} overrides {', '.join(overridden)} of Lightning's evaluation loop, and no such loop runs here: "
                "override _print_results alone, or hooks of the module (fabricamp help from-lightning)"
            )
        super().__init__(trainer, stage.dataloader_prefix)
        self.trainer = trainer
        self.verbose = verbose
        self.inference_mode = inference_mode
        self._stage = stage
        self._trainer_fn = trainer_fn

    def show_results(self, results: list[dict[str, float]], stage: str) -> None:
        """Calls the method that a program may override, with values as tensors."""
        self._print_results(
            [
                {
                    name: torch.tensor(value, dtype=torch.get_default_dtype(), device="cpu")
                    for name, value in one.items()
                }
                for one in results
            ],
            stage,
        )

    @staticmethod
    def _print_results(results: list[dict[str, Tensor]], stage: str) -> None:
        print_results([{name: float(value) for name, value in one.items()} for one in results], stage)
