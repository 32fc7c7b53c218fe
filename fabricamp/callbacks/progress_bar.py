"""Shows progress: a live bar on a terminal or in a notebook, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import math
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from fabricamp.callbacks._renderers import Pairs, Renderer, Task, duration, open_renderer
from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fabricamp._utils.types import AnyBatch, AnyOutput, StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

_FREE_LINES = 100
"""Number of lines written at any rate; further ones at most once a second, so tiny epochs do not flood a log."""

_Value = TypeVar("_Value")


class _Computed(Generic[_Value]):
    """A computed attribute that a subclass may set, as it could when this class did not have it."""

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, bar: ProgressBar | None, owner: type | None = None) -> _Value:
        return self if bar is None else self._compute(bar)  # type: ignore[return-value]  # as a property of the class


class ProgressBar(Callback):
    """Shows epoch, batch, speed, the ``prog_bar`` metrics, and ``lr`` and loss ``scale`` if they change; leaves a line per epoch.

    Under ``Trainer(cuda_graph=...)`` the bar also shows whether steps run as a ``graph`` or ``eager``.  Only rank 0 shows the bar.
    On a GPU, shown values lag by one or two refreshes; the epoch's line is exact.  The bar never waits for a tensor, and takes at
    most 1 % of the time.  If stdout is no terminal (file, pipe, CI, ``TERM=dumb``), a plain line goes through logger ``fabricamp``
    every ten seconds.  Validations within an epoch leave a line too; ``validate`` and ``test`` show their values in a table.

    Args:
        refresh_rate_hz: the largest number of refreshes per second.

    Example:
        >>> trainer = Trainer(callbacks=[ProgressBar(refresh_rate_hz=1)])
    """

    # The epoch's line shows the epoch's values.
    monitors: ClassVar[bool] = True
    _enabled = True
    _trainer: Trainer | None = None
    _eval_loader: int | None = None
    refresh_rate: int = 1
    """Lightning's name, in batches; the bar itself is drawn ``refresh_rate_hz`` times a second."""

    def __init__(self, refresh_rate_hz: float = 4.0) -> None:
        super().__init__()
        if not isinstance(refresh_rate_hz, int | float) or not 0 < refresh_rate_hz <= 60:
            raise ConfigError(
                f"ProgressBar(refresh_rate_hz={refresh_rate_hz!r}) takes a number of refreshes a second, "
                "above 0 and up to 60; for no bar at all pass enable_progress_bar=False to the Trainer"
            )
        self._enabled = True
        self._interval = 1 / refresh_rate_hz
        self._stage = ""
        self._reset()

    def _reset(self) -> None:
        self._due = math.inf
        self._screen: Renderer | None = None
        self._train: Task | None = None
        self._evaluation: Task | None = None
        self._outdated = False  # the bar still shows the sanity check
        self._opened = 0.0
        self._label = ""
        self._totals: list[float] = []
        self._loader = 0
        self._shown: Pairs = []
        self._pending: Pairs | None = None
        self._rate: float | None = None
        self._num_lines = 0
        self._last_line = -math.inf

    def __getstate__(self) -> StateDict:
        return {**vars(self), "_trainer": None}

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def get_metrics(self, trainer: Trainer, pl_module: TrainingModule) -> dict[str, Any]:
        """Returns the values shown beside the bar, as numbers or as text; override this method to change them."""
        values: dict[str, Any] = dict(trainer.progress_bar_metrics)
        for name, value in _changing_values(trainer):
            values.setdefault(name, value)
        return values

    def enable(self) -> None:
        """Shows bars again, beginning with the next one that opens."""
        self._enabled = True

    def disable(self) -> None:
        """Hides the bar."""
        self._enabled = False
        self._close(keep=True)

    @property
    def is_enabled(self) -> bool:
        """Whether bars are shown."""
        return self._enabled

    @is_enabled.setter
    def is_enabled(self, enabled: bool) -> None:
        self._enabled = enabled

    @_Computed
    def is_disabled(self) -> bool:
        """Whether bars are hidden."""
        return not self.is_enabled

    def print(self, *args: Any, **options: Any) -> None:
        """Prints above the bar, on the rank that shows it; prints nothing if the bar is disabled."""
        begun = self._trainer  # None in prepare_data, which rank 0 of a host calls
        if self.is_enabled and (begun is None or begun.is_global_zero):
            print(*args, **options)  # an open bar takes over stdout, and writes it above itself

    # -- what Lightning's bars offer to subclasses that draw their own -------------------------------------------------

    @_Computed
    def trainer(self) -> Trainer:
        """The Trainer of the running, or the last, run; raises TypeError before the first."""
        if self._trainer is None:
            raise TypeError(
                f"{type(self).__name__}.trainer is known from setup() on; call super().setup(...) in your own"
            )
        return self._trainer

    @_Computed
    def total_train_batches(self) -> float:
        """The number of micro-batches in an epoch; with ``max_steps`` and no limit of epochs, at most the steps that are left."""
        trainer = self.trainer
        if trainer.max_epochs == -1 and trainer.max_steps > 0:
            return min(trainer.num_training_batches, trainer.max_steps - trainer.global_step)
        return trainer.num_training_batches

    @_Computed
    def total_val_batches(self) -> float:
        """The number of validation batches of all loaders; 0 in an epoch that does not validate."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        validates = trainer.enable_validation and (every is None or (trainer.current_epoch + 1) % every == 0)
        return sum(trainer.num_val_batches) if validates else 0

    @_Computed
    def total_val_batches_current_dataloader(self) -> float:
        """The number of batches of the validation loader that runs."""
        trainer = self.trainer
        return self._of_loader(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @_Computed
    def total_test_batches_current_dataloader(self) -> float:
        """The number of batches of the test loader that runs."""
        return self._of_loader(self.trainer.num_test_batches)

    @_Computed
    def total_predict_batches_current_dataloader(self) -> float:
        """The number of batches of the prediction loader that runs."""
        return self._of_loader(self.trainer.num_predict_batches)

    def _of_loader(self, batches: list[float]) -> float:
        return batches[self._eval_loader or 0]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Returns whether this is another loader than in the call before, and notes it."""
        changed = dataloader_idx != self._eval_loader
        self._eval_loader = dataloader_idx
        return changed

    def reset_dataloader_idx_tracker(self) -> None:
        """Forgets the loader, at the end of an evaluation."""
        self._eval_loader = None

    sanity_check_description: str = "Sanity Checking"
    train_description: str = "Training"
    validation_description: str = "Validation"
    test_description: str = "Testing"
    predict_description: str = "Predicting"

    # -- start and end -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Resets the bar; disables it on other ranks than 0, where a subclass that draws must not either."""
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer
        self._close(keep=False)
        self._stage = stage
        if not trainer.is_global_zero:
            self.disable()

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Releases the terminal."""
        self._close(keep=False)

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        """Releases the terminal, and leaves the bar as it is."""
        if self._screen is not None and self._screen.is_live:
            self._advance_train(trainer, trainer.state.batch_idx)
            # With the metrics of the last refresh: reading the device might fail with the same error.  The host knows the step.
            self._shown = [(name, str(trainer.global_step) if name == "step" else text) for name, text in self._shown]
            self._draw_tasks()
        self._close(keep=True)

    # -- training ------------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Opens the epoch's bar; a resumed epoch starts at its resume point."""
        if not trainer.is_global_zero:
            return
        label = f"epoch {trainer.current_epoch + 1}"
        if trainer.max_epochs >= 0:
            label += f"/{trainer.max_epochs}"
        self._train = Task(label, done=trainer.state.batch_idx)
        self._train.total = _train_total(trainer, self._train.done)
        by_epochs = any(config.interval == "epoch" for config in trainer.lr_scheduler_configs[:1])
        self._rate = dict(_changing_values(trainer)).get("lr") if by_epochs else None
        self._open(trainer)
        if self._outdated and self._screen is not None and self._screen.is_live:
            self._draw(trainer)
        self._outdated = False

    def holds_at(self, global_step: int) -> float:
        """Returns inf: the bar shows the latest known values, so no launch has to end for it."""
        return math.inf

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Draws if a refresh is due."""
        if monotonic() < self._due:
            return
        self._advance_train(trainer, batch_idx + 1)
        if self._pending:
            self._write_pending()
        self._draw(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Writes the epoch's line."""
        train = self._train
        if train is None:
            return
        self._advance_train(trainer, trainer.state.batch_idx)
        cut_short = train.total is not None and train.done < train.total
        position = [("", train.position)] if cut_short else []
        time = ("", duration(monotonic() - train.started))
        values = self._step_and_metrics(trainer)
        if self._rate is not None and "lr" not in trainer.progress_bar_metrics:
            # The scheduler has stepped already: its rate is the next epoch's.
            values = [(name, _as_text(self._rate) if name == "lr" else text) for name, text in values]
        self._pending = [(train.label, ""), *position, *values, time, ("", train.mean_pace)]
        self._shown = values
        self._write_pending()
        self._train = None

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Releases the terminal; always writes the last epoch's line."""
        self._write_pending(in_any_case=True)
        self._close(keep=False)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Opens the bar of a validation run; in ``fit`` it is below the epoch's bar."""
        self._advance_train(trainer, trainer.state.batch_idx)
        if trainer.sanity_checking:
            self._open_evaluation(trainer, "sanity check", trainer.num_sanity_val_batches)
        else:
            self._open_evaluation(trainer, "validation", trainer.num_val_batches)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Closes the bar and writes its line; at the end of an epoch the epoch's line replaces it."""
        train = self._train
        if train is None:
            self._close_evaluation(trainer)
            return
        self._evaluation = None
        train.resume()
        self._shown = self._step_and_metrics(trainer)
        self._pending = [(train.label, ""), ("", train.position), *self._shown, ("", train.pace)]
        if train.total is not None and train.done < train.total:
            self._write_pending()

    def on_test_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Opens the bar."""
        self._open_evaluation(trainer, "test", trainer.num_test_batches)

    def on_test_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Writes the run's line."""
        self._close_evaluation(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Opens the bar."""
        self._open_evaluation(trainer, "predict", trainer.num_predict_batches)

    def on_predict_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Writes the run's line."""
        self._close_evaluation(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draws if a refresh is due."""
        if monotonic() < self._due:
            return
        if dataloader_idx != self._loader:
            self._start_loader(dataloader_idx)
        if self._evaluation is not None:
            self._evaluation.advance(batch_idx + 1)
            self._draw(trainer)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    def _open_evaluation(self, trainer: Trainer, label: str, totals: float | Sequence[float]) -> None:
        if not trainer.is_global_zero:
            return
        self._opened = monotonic()
        self._label = label
        self._totals = [totals] if isinstance(totals, int | float) else list(totals)
        self._start_loader(0)
        self._open(trainer)

    def _start_loader(self, index: int) -> None:
        label = self._label
        if len(self._totals) > 1:
            label += f" {index + 1}/{len(self._totals)}"
        self._loader = index
        self._evaluation = Task(label)
        self._evaluation.total = _finite(self._totals[index]) if index < len(self._totals) else None

    def _close_evaluation(self, trainer: Trainer) -> None:
        """Writes the line of an evaluation outside of training; the sanity check has no line."""
        task = self._evaluation
        self._evaluation = None
        self._outdated = self._stage == "fit"  # the first batch may take long, and must not look like the sanity check
        if task is None or self._outdated:
            return
        # Its values follow in a table.
        self._pending = [(self._label, ""), ("", duration(monotonic() - self._opened))]
        self._write_pending(in_any_case=True)
        self._close(keep=False)

    # -- the screen ----------------------------------------------------------------------------------------------------

    def _advance_train(self, trainer: Trainer, done: int) -> None:
        if self._train is not None:
            self._train.advance(done)
            self._train.total = _train_total(trainer, done)

    def _open(self, trainer: Trainer) -> None:
        if self._screen is not None or not self.is_enabled:
            return
        self._screen = open_renderer(self._interval)
        self._due = monotonic() + self._screen.interval
        if self._screen.is_live:  # the first batch may take long: show at once that something runs
            self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        if self._screen is None:
            self._due = math.inf
            return
        self._shown = self._step_and_metrics(trainer) if self._train is not None else []
        self._draw_tasks()

    def _draw_tasks(self) -> bool:
        """Draws the open bars; returns whether the terminal is still there."""
        tasks = [task for task in (self._train, self._evaluation) if task is not None]
        if self._screen is None or not tasks:  # no bar is open between two epochs or before the first
            return self._screen is not None
        try:
            self._screen.draw(tasks, self._shown)
        except OSError:  # the terminal, or the reader of the pipe, is gone: no reason to end the training
            self._close(keep=False)
            return False
        self._due = monotonic() + self._screen.interval
        return True

    def _write_pending(self, *, in_any_case: bool = False) -> None:
        now = monotonic()
        if self._pending is None or self._screen is None:
            return
        too_many_lines = self._num_lines >= _FREE_LINES and now - self._last_line < 1.0
        if too_many_lines and not in_any_case:
            return
        # A line is written above the bar of the last refresh: of an earlier epoch, if epochs are shorter than the time between two
        # refreshes.
        if self._screen.is_live and not self._draw_tasks():
            return
        try:
            self._screen.write(self._pending)
        except OSError:  # as above
            self._close(keep=False)
            return
        self._pending = None
        self._num_lines += 1
        self._last_line = now
        self._due = now + self._screen.interval

    def _step_and_metrics(self, trainer: Trainer) -> Pairs:
        values = self.get_metrics(trainer, trainer.module)
        pairs = [("step", str(trainer.global_step))]
        if trainer.state.runs_as:
            pairs.append(("", trainer.state.runs_as))
        return [*pairs, *((name, _as_text(value)) for name, value in values.items())]

    def _close(self, *, keep: bool) -> None:
        screen = self._screen
        self._reset()
        if screen is not None:
            with contextlib.suppress(OSError):
                screen.close(keep=keep)


def _finite(number: float) -> int | None:
    return int(number) if math.isfinite(number) else None


def _train_total(trainer: Trainer, done: int) -> int | None:
    """Returns the number of micro-batches in the epoch, limited by the loader and ``max_steps``; None if unknown."""
    batches = _finite(trainer.num_training_batches)
    if trainer.max_steps < 0:
        return batches
    per_step = trainer.accumulate_grad_batches
    end = done - done % per_step + (trainer.max_steps - trainer.global_step) * per_step
    return end if batches is None else min(batches, end)


def _changing_values(trainer: Trainer) -> Iterator[tuple[str, float]]:
    """Yields the learning rate if a scheduler changes it and the loss scale if it is dynamic, as the host knows them."""
    for config in trainer.lr_scheduler_configs[:1]:
        # A scheduler object that the module steps itself may have no optimizer attribute.
        optimizer = getattr(config.scheduler, "optimizer", None)
        if optimizer is None:
            optimizer = trainer.optimizers[0]
        rate = optimizer.param_groups[0]["lr"]
        if isinstance(rate, int | float):  # reading a tensor might wait for the device
            yield "lr", float(rate)
    verdicts = trainer.precision_plugin.verdicts
    if verdicts is not None and verdicts.dynamic:
        yield "scale", verdicts.scale


def _as_text(value: object) -> str:
    """Formats a number with always four significant digits, so the line does not jump; a large count with all of its digits."""
    if not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or 1e4 <= abs(value) < 1e7:
        return f"{value:.0f}"
    if 1e7 <= abs(value) < 2**53 and value.is_integer():
        return f"{value:.0f}"
    return f"{value:#.4g}"
