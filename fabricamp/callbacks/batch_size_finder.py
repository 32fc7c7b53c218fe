"""A search for the largest batch size before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.arguments.checks import check_choice, check_kind, check_number
from fabricamp.callbacks.base import Callback
from fabricamp.checkpoint.hyperparameters import setting_refs
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class BatchSizeFinder(Callback):
    """Finds the largest batch size that fits into memory before a run, and runs with it: ``Tuner.scale_batch_size``.

    The module or the DataModule must make its loaders with its attribute ``batch_arg_name``.  A resumed run takes the size from
    its checkpoint.  A subclass that overrides ``on_fit_start`` makes no search.

    Args:
        mode: "power" doubles the size until it does not fit; "binsearch" then searches between the last two sizes.
        steps_per_trial: number of steps (or batches) tried with each size.
        init_val: the first size.
        max_trials: number of fitting sizes after which the search ends.
        batch_arg_name: the attribute or hyper-parameter of module or DataModule that holds the size.
        margin: the share of the largest fitting size that "binsearch" leaves unused.
        max_val: the largest size to try.

    Raises:
        ConfigError: for a wrong argument; in a run with several processes, with loaders as arguments (their batch size cannot be
            changed), or if neither module nor DataModule has ``batch_arg_name``.

    Example:
        >>> finder = BatchSizeFinder(mode="binsearch", init_val=16)
    """

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        super().__init__()
        check_kind(self, "a number", margin=margin)
        check_kind(self, "a string", batch_arg_name=batch_arg_name)
        if not 0 <= margin < 1:
            raise ConfigError(f"margin={margin!r} is not allowed; give a share from 0 up to, not including, 1")
        self.mode = check_choice("mode", str(mode).lower(), ("power", "binsearch"))
        self.steps_per_trial = check_number("steps_per_trial", steps_per_trial, least=1)
        self.init_val = check_number("init_val", init_val, least=1)
        self.max_trials = check_number("max_trials", max_trials, least=1)
        self.batch_arg_name = batch_arg_name
        self.margin = margin
        self.max_val = check_number("max_val", max_val, least=1)
        self.optimal_batch_size: int | None = None
        """The size that the search found; None before the search."""

    def scale_batch_size(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Raises :class:`ConfigError`: no search is possible within a run."""
        raise ConfigError(
            "scale_batch_size was called within a run, and a search would change that run; end the fit "
            "(max_epochs), call Tuner(trainer).scale_batch_size(module), raise trainer.fit_loop.max_epochs and fit again"
        )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: StateDict) -> None:
        """Sets the size that the run began with."""
        size = checkpoint.get("callbacks", {}).get(self.state_key, {}).get("batch_size")
        if size is not None:
            self.optimal_batch_size = size
            for setting in setting_refs(self.batch_arg_name, pl_module, trainer.datamodule):
                setting.value = size

    def state_dict(self) -> StateDict:
        """Returns the size that was found."""
        return {} if self.optimal_batch_size is None else {"batch_size": self.optimal_batch_size}
