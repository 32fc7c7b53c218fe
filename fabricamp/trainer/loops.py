"""Lightning's loops as callbacks see them: views of the Trainer's limits and counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from fabricamp.engine.evaluation import print_results

if TYPE_CHECKING:
    from fabricamp.engine.report.prediction_record import PredictionRecord
    from fabricamp.trainer.properties import TrainerProperties


class Count(NamedTuple):
    """The number of epochs, or micro-batches, that were begun and that are done."""

    ready: int
    completed: int

    @property
    def started(self) -> int:
        """The same as ``ready``."""
        return self.ready

    @property
    def processed(self) -> int:
        """The same as ``completed``."""
        return self.completed


class Progress(NamedTuple):
    """A count of the running epoch, and of the whole run."""

    current: Count
    total: Count


Value = TypeVar("Value")


class _Limit(Generic[Value]):
    """A descriptor that reads and sets the Trainer's limit of the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loop: _Loop | None, owner: type | None = None) -> Value:
        return cast("Value", self if loop is None else getattr(loop._trainer, self._name))

    def __set__(self, loop: _Loop, value: Value) -> None:
        setattr(loop._trainer, self._name, value)


def private_attribute(kind: str, owner: object, name: str) -> Any:
    """Returns an attribute of Lightning's that a library reads; raises AttributeError, as Python does, if there is none.

    The module that holds these attributes is imported here: programs that read none of them do without it.
    """
    from fabricamp.lightning.private_attributes import ATTRIBUTES

    read = ATTRIBUTES.get((kind, name))
    if read is None:
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}", name=name, obj=owner)
    return read(owner)


class _Loop:
    """The base of the loops; what a library reads of Lightning's internals is in ``fabricamp.lightning.private_attributes``."""

    def __init__(self, trainer: TrainerProperties) -> None:
        self._trainer = trainer

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Called for a name that the class lacks."""
            return private_attribute(type(self).__name__, self, name)


class EpochLoop(_Loop):
    """``trainer.fit_loop.epoch_loop``: the steps of an epoch."""

    max_steps = _Limit[int]()
    """The step at which training ends; -1 for no limit."""

    min_steps = _Limit[int]()
    """The minimum number of steps: a stop request waits for them."""

    @property
    def global_step(self) -> int:
        """The number of steps so far."""
        return self._trainer.global_step

    @property
    def batch_idx(self) -> int:
        """The index, in its epoch, of the micro-batch that was begun last, also between two epochs; -1 before the first."""
        return self.batch_progress.current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        """The same, counted over all epochs."""
        return self.batch_progress.total.ready - 1

    @property
    def batch_progress(self) -> Progress:
        """The number of micro-batches that were begun, and that are done."""
        state = self._trainer.state
        begun = 1 if state.open_batch else 0
        current, total = state.batch_idx, state.batches_done
        if not current and not begun:  # between two epochs
            current = state.batches_of_last_epoch
        return Progress(Count(current + begun, current), Count(total + begun, total))

    @property
    def val_loop(self) -> EvaluationLoop:
        """The validation within fit."""
        return EvaluationLoop(self._trainer, "val")


class FitLoop(_Loop):
    """``trainer.fit_loop``: the epochs of a fit."""

    max_epochs = _Limit[int]()
    """The epoch at which training ends; -1 for no limit."""

    min_epochs = _Limit[int]()
    """The minimum number of epochs: a stop request waits for them."""

    max_steps = _Limit[int]()
    """The step at which training ends; -1 for no limit."""

    min_steps = _Limit[int]()
    """The minimum number of steps: a stop request waits for them."""

    def setup_data(self) -> None:
        """Builds the training loader if it is not built yet; reading ``trainer.train_dataloader`` does the same."""
        _ = self._trainer.train_dataloader

    @property
    def epoch_loop(self) -> EpochLoop:
        """The steps of an epoch."""
        return EpochLoop(self._trainer)

    @property
    def batch_idx(self) -> int:
        """The index, in its epoch, of the micro-batch that was begun last; -1 before the first."""
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """The same, counted over all epochs."""
        return self.epoch_loop.total_batch_idx

    @property
    def max_batches(self) -> float:
        """The number of micro-batches in an epoch."""
        return self._trainer.num_training_batches

    @property
    def epoch_progress(self) -> Progress:
        """The number of epochs that were begun, and that are done, in this fit and the fit that it continues."""
        epoch = self._trainer.current_epoch
        count = Count(epoch + (1 if self._trainer.state.fitting else 0), epoch)
        return Progress(count, count)


class EvaluationLoop(_Loop):
    """``trainer.validate_loop`` and ``test_loop``."""

    def __init__(self, trainer: TrainerProperties, kind: str) -> None:
        super().__init__(trainer)
        self._kind = kind

    @property
    def max_batches(self) -> list[float]:
        """The number of batches, one per loader."""
        found: list[float] = getattr(self._trainer, f"num_{self._kind}_batches")
        return found

    @property
    def num_dataloaders(self) -> int:
        """The number of loaders."""
        return len(self.max_batches)

    def show_results(self, results: list[dict[str, float]], stage: str) -> None:
        """Prints a table of what the run returned."""
        print_results(results, stage)


class PredictionLoop(EvaluationLoop):
    """``trainer.predict_loop``: predictions while it runs; sample indices only if there is a ``BasePredictionWriter``."""

    def __init__(self, trainer: TrainerProperties) -> None:
        super().__init__(trainer, "predict")

    @property
    def current_batch_indices(self) -> list[Any] | None:
        """The indices of the batch's samples; None if they are not known."""
        record = self._record
        return None if record is None else record.indices

    @property
    def epoch_batch_indices(self) -> list[list[list[Any]] | None]:
        """The indices of every batch so far, one list per loader; None for a loader that does not report indices."""
        record = self._record
        return [] if record is None or not record.writes else record.epoch_indices

    @property
    def predictions(self) -> list[Any]:
        """The predictions of this rank so far: a list of batches; with several loaders one list per loader.

        Empty with ``return_predictions=False``, unless a prediction writer writes at the end of an epoch.
        """
        kept = [] if self._record is None else self._record.predictions
        return kept[0] if len(kept) == 1 else kept

    @property
    def _record(self) -> PredictionRecord | None:
        return self._trainer._opened.predicted
