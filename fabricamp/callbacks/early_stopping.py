"""Early stopping: ends training when a metric stops improving."""

from __future__ import annotations

import enum
import logging
import math
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from fabricamp.arguments.checks import check_kind
from fabricamp.callbacks._monitoring import checks_at_train_epoch_end, metric_tensors, missing_in, monitored_value
from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError, MissingMetricError
from fabricamp.metrics.values import number_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fabricamp._utils.types import StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")


class EarlyStoppingReason(enum.Enum):
    """Why training was ended; Lightning's checkpoints contain the same numbers."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Ends training after ``patience`` checks without an improvement of ``monitor`` by more than ``min_delta``.

    Checks run after validation, or at the end of the train epoch.  Every rank decides on the same value.

    Args:
        monitor: the logged value to watch.
        min_delta: the least change that counts as an improvement.
        patience: number of checks without an improvement after which training ends.
        verbose: logs each improvement.
        mode: "min" or "max": which value is better.
        strict: a ``monitor`` that was not logged is an error.
        check_finite: ends training at once if the value is nan or inf.
        stopping_threshold: ends training at once if the value is better than this.
        divergence_threshold: ends training at once if the value is worse than this.
        check_on_train_epoch_end: checks at the end of the train epoch (True) or after validation (False); None: at the train
            epoch's end if validation runs there, or not at all.
        log_rank_zero_only: logs messages on rank 0 only; False: on each rank.

    Example:
        >>> stopping = EarlyStopping(monitor="val_loss", patience=5, min_delta=0.001)
    """

    monitors: ClassVar[bool] = True
    mode_dict: ClassVar[dict[str, Callable[..., Tensor]]] = {"min": torch.lt, "max": torch.gt}
    order_dict: ClassVar[dict[str, str]] = {"min": "<", "max": ">"}

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = True,
    ) -> None:
        super().__init__()
        check_kind(self, "a string", monitor=monitor)
        check_kind(self, "a whole number", patience=patience)
        check_kind(self, "a number", min_delta=min_delta)
        thresholds = {"stopping_threshold": stopping_threshold, "divergence_threshold": divergence_threshold}
        check_kind(self, "a number", optional=True, **thresholds)
        check_kind(self, "True or False", strict=strict, check_finite=check_finite)
        check_kind(self, "True or False", optional=True, check_on_train_epoch_end=check_on_train_epoch_end)
        self.monitor = monitor
        self.min_delta = float(min_delta)
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self.wait_count = 0
        self.stopped_epoch = 0
        self._best = -math.inf if mode == "max" else math.inf
        self.last_score: float | None = None
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self._announced_missing = False
        self._check_arguments()
        if self._decides_by_override and mode == "min":
            self.min_delta = -self.min_delta  # an override finds Lightning's sign

    @property
    def best_score(self) -> Tensor:
        """The best value so far, on the CPU; infinite before the first check."""
        return number_tensor(self._best)

    @best_score.setter
    def best_score(self, score: Tensor | float) -> None:
        self._best = float(score)

    @property
    def monitor_op(self) -> Callable[..., Tensor]:
        """The comparison of torch that says whether a value is better than another."""
        return self.mode_dict[self.mode]

    @property
    def _decides_by_override(self) -> bool:
        """Whether a subclass overrides the decision, which ranks could then make differently."""
        name = "_evaluate_stopping_criteria"
        return name in vars(self) or getattr(type(self), name) is not getattr(EarlyStopping, name)

    @property
    def state_key(self) -> str:
        """The key of this callback's state; contains metric and mode, so a Trainer may have several."""
        return f"{type(self).__qualname__}{{'monitor': {self.monitor!r}, 'mode': {self.mode!r}}}"

    def state_dict(self) -> StateDict:
        """Returns the best value so far, the checks since then (both under Lightning's keys) and the reason of a stop."""
        return {
            "wait_count": self.wait_count,
            "patience": self.patience,
            "stopped_epoch": self.stopped_epoch,
            "best_score": torch.tensor(self._best, dtype=torch.float64, device="cpu"),
            "last_score": self.last_score,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continues counting from this state; keeps the constructor's patience, so a resumed run can be given more."""
        self.wait_count = int(state_dict["wait_count"])
        self.stopped_epoch = int(state_dict["stopped_epoch"])
        self._best = float(state_dict["best_score"])
        last = state_dict.get("last_score")
        self.last_score = None if last is None else float(last)
        self.stopping_reason = EarlyStoppingReason(
            state_dict.get("stopping_reason", EarlyStoppingReason.NOT_STOPPED.value)
        )
        self.stopping_reason_message = state_dict.get("stopping_reason_message")

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Stops a resumed run that this callback had ended, unless the arguments allow more now; forgets an earlier ``fit``."""
        if trainer.ckpt_path is not None and self.still_ends():
            trainer.stop(self.stopping_reason_message or str(self.stopping_reason.value))
            return
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message = None

    def still_ends(self) -> bool:
        """Returns whether this callback has ended the run that its state is of, and its arguments allow no more now."""
        if self.stopping_reason is EarlyStoppingReason.NOT_STOPPED or self.last_score is None:
            return False
        if self.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED:
            return self.wait_count >= self.patience
        return self._judge_at_once(self.last_score)[0] is not EarlyStoppingReason.NOT_STOPPED

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Checks, unless this callback checks at the end of the train epoch."""
        if not self._at_train_epoch_end(trainer) and not self._should_skip_check(trainer):
            self._run_early_stopping_check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Checks, unless this callback checks after validation."""
        if self._at_train_epoch_end(trainer) and not self._should_skip_check(trainer):
            self._run_early_stopping_check(trainer)

    def _check_arguments(self) -> None:
        if self.mode not in ("min", "max"):
            raise ConfigError(f"EarlyStopping(mode={self.mode!r}): choose 'min' (lower is better) or 'max'")
        if not self.min_delta >= 0:
            raise ConfigError(
                f"EarlyStopping(min_delta={self.min_delta!r}): give 0 or a positive number, whichever the mode"
            )
        if self.patience < 0:
            raise ConfigError(
                f"EarlyStopping(patience={self.patience!r}): give the number of checks to wait, 0 or more"
            )

    def _at_train_epoch_end(self, trainer: Trainer) -> bool:
        if self._check_on_train_epoch_end is not None:
            return self._check_on_train_epoch_end
        return checks_at_train_epoch_end(trainer)

    # -- Lightning's methods, in the order of a check; a subclass may override and call them ------------------------------------

    def _should_skip_check(self, trainer: Trainer) -> bool:
        """Returns whether nothing is checked now, because no fit is running."""
        return not trainer.state.fitting

    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        """Checks the value of ``monitor``, and ends training if a criterion is met; every rank calls it."""
        if trainer.fast_dev_run:
            return
        # Epoch metrics are equal on every rank, but a monitored step value is not; ranks that disagree would wait for ever.
        current = trainer.strategy.broadcast(monitored_value(trainer, self.monitor))
        logs = metric_tensors(trainer.monitored_metrics)
        logs.pop(self.monitor, None)
        if current is not None:
            logs[self.monitor] = torch.tensor(current, dtype=torch.float64, device="cpu")
        if not self._validate_condition_metric(logs):
            if not self._announced_missing:
                self._announced_missing = True
                self._log_info(trainer, self._missing(logs), self.log_rank_zero_only)
            return
        before = self.stopping_reason
        should_stop, message = self._evaluate_stopping_criteria(logs[self.monitor])
        if self._decides_by_override:
            should_stop = trainer.strategy.reduce_boolean_decision(should_stop, all=False)
        if should_stop:
            if self.stopping_reason is EarlyStoppingReason.NOT_STOPPED is before:
                self.stopping_reason = EarlyStoppingReason.PATIENCE_EXHAUSTED
            self.stopping_reason_message = message
            self.stopped_epoch = trainer.current_epoch
            trainer.stop(message or "EarlyStopping")
        if message and self.verbose:
            self._log_info(trainer, message, self.log_rank_zero_only)

    def _validate_condition_metric(self, logs: dict[str, Tensor]) -> bool:
        """Returns whether ``logs`` has the value of ``monitor``; raises :class:`MissingMetricError` if not, with ``strict``."""
        if self.monitor in logs:
            return True
        if self.strict:
            raise MissingMetricError(self._missing(logs))
        return False

    def _missing(self, logs: dict[str, Tensor]) -> str:
        cure = "Log it where the check runs (check_on_train_epoch_end), or pass strict=False to skip checks without it"
        return f"{missing_in(logs, f'EarlyStopping(monitor={self.monitor!r})', self.monitor)}. {cure}"

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        """Records the value of ``monitor``; returns whether it ends training, and a message for it or for an improvement."""
        reason, message = self._judge(float(current))
        if reason is not EarlyStoppingReason.NOT_STOPPED:
            self.stopping_reason = reason
        return reason is not EarlyStoppingReason.NOT_STOPPED, message or None

    def _improvement_message(self, current: Tensor) -> str:
        """Returns the message for a value that is better than ``best_score``."""
        return f"{self.monitor}={float(current):.6g} is better than {self._best:.6g}"

    @staticmethod
    def _log_info(trainer: Trainer, message: str, log_rank_zero_only: bool) -> None:
        """Logs a line on rank 0, or on each rank with its number."""
        if not log_rank_zero_only:
            _LOG.info("[rank %d] EarlyStopping: %s", trainer.global_rank, message)
        elif trainer.is_global_zero:
            _LOG.info("EarlyStopping: %s", message)

    # -- the decision ------------------------------------------------------------------------------------------------------------

    def _judge_at_once(self, current: float) -> tuple[EarlyStoppingReason, str]:
        """Returns the reason and message if this value alone ends training."""
        shown = f"{self.monitor}={current:.6g}"
        if self.check_finite and not math.isfinite(current):
            return (
                EarlyStoppingReason.NON_FINITE_METRIC,
                f"{shown} is not finite; the best value was {self._best:.6g}",
            )
        if self.stopping_threshold is not None and self._better(current, self.stopping_threshold):
            return (
                EarlyStoppingReason.STOPPING_THRESHOLD,
                f"{shown} has passed stopping_threshold={self.stopping_threshold}",
            )
        if self.divergence_threshold is not None and self._better(-current, -self.divergence_threshold):
            return (
                EarlyStoppingReason.DIVERGENCE_THRESHOLD,
                f"{shown} is worse than divergence_threshold={self.divergence_threshold}",
            )
        return EarlyStoppingReason.NOT_STOPPED, ""

    def _judge(self, current: float) -> tuple[EarlyStoppingReason, str]:
        """Records the monitor's value; returns the resulting reason and message."""
        self.last_score = current
        reason, message = self._judge_at_once(current)
        if reason is not EarlyStoppingReason.NOT_STOPPED:
            return reason, message
        delta = abs(self.min_delta)
        margin = delta if self.mode == "max" else -delta
        if self._better(current - margin, self._best):
            message = self._improvement_message(torch.tensor(current, dtype=torch.float64, device="cpu"))
            self._best = current
            self.wait_count = 0
            return EarlyStoppingReason.NOT_STOPPED, message
        self.wait_count += 1
        if self.wait_count < self.patience:
            return EarlyStoppingReason.NOT_STOPPED, ""
        by = f" by more than min_delta={delta:g}" if delta else ""
        checks = "1 check" if self.wait_count == 1 else f"{self.wait_count} checks"
        return (
            EarlyStoppingReason.PATIENCE_EXHAUSTED,
            f"{self.monitor} has not improved on {self._best:.6g}{by} in {checks}",
        )

    def _better(self, value: float, than: float) -> bool:
        return value > than if self.mode == "max" else value < than
