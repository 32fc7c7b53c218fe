"""A search for a learning rate before a fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.arguments.checks import check_choice, check_kind
from fabricamp.callbacks.base import Callback
from fabricamp.checkpoint.hyperparameters import setting_refs
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class LearningRateFinder(Callback):
    """Finds a learning rate before the fit, and trains with it: ``Tuner.lr_find``.

    The search ends before ``setup`` and ``configure_optimizers`` of the fit, so schedules are made with the new rate.  A resumed
    run takes the rate from its checkpoint.  To search during training, end the fit, call ``Tuner.lr_find`` and fit again.  A
    subclass that overrides ``on_fit_start`` makes no search.

    Args:
        min_lr: the first rate.
        max_lr: the last rate.
        num_training_steps: number of rates to try, with one update each.
        mode: how the rate grows: "exponential" or "linear".
        early_stop_threshold: ends the search when the loss is this many times the smallest loss; None: never.
        update_attr: sets the module's attribute to the suggested rate; False: only ``optimal_lr`` has it.
        attr_name: the name of that attribute or hyper-parameter; "" means ``lr`` or ``learning_rate``.

    Raises:
        ConfigError: for a wrong argument; in ``fit`` for several optimizers or manual optimization.

    Example:
        >>> finder = LearningRateFinder(min_lr=1e-6, max_lr=0.1)
    """

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        super().__init__()
        check_kind(self, "a number", min_lr=min_lr, max_lr=max_lr)
        check_kind(self, "a whole number", num_training_steps=num_training_steps)
        check_kind(self, "a number", optional=True, early_stop_threshold=early_stop_threshold)
        check_kind(self, "a string", attr_name=attr_name)
        check_kind(self, "True or False", update_attr=update_attr)
        if not 0 < min_lr < max_lr:
            raise ConfigError(f"min_lr={min_lr!r} and max_lr={max_lr!r}: give rates above 0, the smaller one as min_lr")
        if num_training_steps < 1:
            raise ConfigError(f"num_training_steps={num_training_steps!r}: give 1 or more")
        self.min_lr = min_lr
        self.max_lr = max_lr
        self.num_training_steps = num_training_steps
        self.mode = check_choice("mode", str(mode).lower(), ("exponential", "linear"))
        self.early_stop_threshold = early_stop_threshold
        self.update_attr = update_attr
        self.attr_name = attr_name
        self.optimal_lr: Any = None
        """The result of the search, with ``results``, ``suggestion()`` and ``plot()``; None before the search."""
        self.found: dict[str, Any] = {}
        """The name and the rate that were set."""

    def lr_find(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Raises :class:`ConfigError`: no search is possible within a fit."""
        raise ConfigError(
            "lr_find was called within a run, and a search would change that run; end the fit (max_epochs), call "
            "Tuner(trainer).lr_find(module), raise trainer.fit_loop.max_epochs and fit again"
        )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: StateDict) -> None:
        """Sets the rate that the run began with."""
        self.found = checkpoint.get("callbacks", {}).get(self.state_key, {})
        if self.found:
            for setting in setting_refs(self.found["name"], pl_module, trainer.datamodule):
                setting.value = self.found["rate"]

    def state_dict(self) -> StateDict:
        """Returns the name and the rate that were set."""
        return dict(self.found)
