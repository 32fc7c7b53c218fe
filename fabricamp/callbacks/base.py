"""The base class of callbacks, with Lightning's hook names in Lightning's order."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fabricamp._utils.keywords import NamesKeywords
from fabricamp._utils.registry import Registry
from fabricamp.arguments.not_offered import is_lightnings, mixed_with_lightnings_trainer
from fabricamp.errors import ConfigError
from fabricamp.state import NON_FINITE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.optim import Optimizer

    from fabricamp._utils.types import AnyBatch, AnyOutput, StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class Callback(NamesKeywords):
    """Runs code at points of training.  Override the hooks that you need; hooks that nobody overrides cost nothing.

    ``help("fabricamp.hooks")`` shows the order in which hooks run.

    Example:
        >>> class Announce(Callback):
        ...     def on_train_epoch_end(self, trainer, pl_module):
        ...         print(f"epoch {trainer.current_epoch} is over")
    """

    monitors: ClassVar[bool] = False
    """True for callbacks that decide by the epoch's metrics: their ``on_train_epoch_end`` runs last, after the values logged by
    other callbacks are reduced over the ranks."""

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint; contains arguments if a Trainer may have several of the class."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """Returns a ``state_key`` made of the class's name and these values, as in Lightning."""
        return f"{type(self).__qualname__}{kwargs}"

    def accepts_state_of(self, key: str) -> bool:
        """Returns whether the state under ``key``, from a run with other arguments, also belongs to this callback."""
        return False

    def state_dict(self) -> StateDict:
        """Returns the state to keep in a checkpoint: tensors, numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restores the state that :meth:`state_dict` returned."""

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Called first of all hooks; ``stage`` is "fit", "validate", "test" or "predict"."""
        # Lightning's Trainer calls setup of every callback, ours only of those that override it.
        if is_lightnings(trainer) and (own := _own_class(type(self))):
            raise ConfigError(mixed_with_lightnings_trainer(own))

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Called last in a run."""

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after the optimizers are built and a checkpoint is restored."""

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after training."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before the sanity check, the validation batches before training."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after the sanity check."""

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before the first epoch."""

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before an epoch."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after an epoch, and after the validation that belongs to it."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Called before a micro-batch; the batch is on the device."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Called after a micro-batch; ``outputs`` is what ``training_step`` returned."""

    def holds_at(self, global_step: int) -> float:
        """Returns the next step after ``global_step`` at which the batch hooks must run before another step does.

        Under ``CudaGraph(steps=...)`` a launch ends at that step at the latest.  The batch hooks of a launch's steps run after the
        launch, in order; they see weights, gradients and module state after the last of these steps.  Return ``math.inf`` if the
        hooks look at none of these.  ``CudaGraph(steps=...)`` refuses a class with batch hooks that does not override this method.
        """
        return global_step + 1

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before a validation run."""

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after a validation run; its metrics are reduced."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before the validation batches."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after the validation batches, while values can still be logged."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a validation batch."""

    def on_test_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before a test run."""

    def on_test_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after a test run; its metrics are reduced."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before the test batches."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after the test batches, while values can still be logged."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a test batch."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a test batch."""

    def on_predict_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before a prediction run."""

    def on_predict_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after a prediction run."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before the batches to predict."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after the batches to predict."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a batch to predict."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a batch to predict."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, trainer: Trainer, pl_module: TrainingModule, loss: Tensor) -> None:
        """Called before ``loss.backward()``; the loss is not scaled yet."""

    def on_after_backward(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after ``loss.backward()``; with a scaler the gradients are still scaled."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        """Called before an update; gradients are averaged and unscaled, but not clipped yet."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: StateDict) -> None:
        """Called before a checkpoint is written; may add to it."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: StateDict) -> None:
        """Called while a checkpoint is restored; may read from it."""

    def evaluation_context(self, trainer: Trainer, pl_module: TrainingModule) -> AbstractContextManager[None]:
        """Returns a context around each validation, test and prediction run and its hooks; an exception also exits it."""
        return contextlib.nullcontext()

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        """Called when training ends by an exception, including Ctrl-C."""


_AnyCallback = TypeVar("_AnyCallback", bound=Callback)

CALLBACKS: Registry[Callback] = Registry("callbacks", "callbacks")


def decides_by_metrics(callback: Callback) -> bool:
    """Returns whether ``callback`` runs last, because it ``monitors``; callbacks on Lightning's base lack that attribute."""
    return getattr(callback, "monitors", None) is True


def _own_class(kind: type) -> str:
    """Returns the name of fabricamp's callback that ``kind`` is or derives from.

    Empty for a direct subclass of :class:`Callback`, which may also work in Lightning's Trainer.
    """
    for base in kind.__mro__:
        if issubclass(base, Callback) and base is not Callback and base.__module__.startswith("fabricamp."):
            return base.__name__
    return ""


def ends_everywhere(trainer: Trainer, exception: BaseException) -> bool:
    """Returns whether training ended at the same position on all ranks: by Ctrl-C, a signal or a ``nan_policy``."""
    if is_lightnings(trainer):  # Lightning also calls on_exception for errors in setup
        return False
    stopped = isinstance(exception, KeyboardInterrupt) or trainer.state.stop_reason == NON_FINITE
    return stopped and trainer.state.fitting


def waits_between_steps(callback: object) -> bool:
    """Returns whether batch hooks must run after each step: ``callback`` has such hooks, and no ``holds_at`` for them."""
    names = ("on_train_batch_start", "on_train_batch_end")
    if any(name in vars(callback) for name in names):
        return True
    for kind in type(callback).__mro__:
        if "holds_at" in vars(kind) and kind is not Callback:
            return False
        if any(name in vars(kind) for name in names):
            return kind is not Callback
    return False


def _accepts_none(key: str) -> bool:  # noqa: ARG001 - the signature of Callback.accepts_state_of
    return False


def matched_states(callbacks: Sequence[_AnyCallback], states: Mapping[str, Any]) -> Iterator[tuple[_AnyCallback, Any]]:
    """Yields each callback with its state: the state under its key, else a state that it accepts and no other callback owns.

    Of those the callback takes first one that was saved with its own arguments, by another class.
    """
    keys = [callback.state_key for callback in callbacks]
    unclaimed = [key for key in states if key not in keys]
    accepted: dict[int, list[str]] = {}
    for number, (callback, key) in enumerate(zip(callbacks, keys, strict=True)):
        if key not in states:
            accepts = getattr(callback, "accepts_state_of", _accepts_none)  # Lightning's base has no such method
            accepted[number] = [other for other in unclaimed if accepts(other)]
    for any_arguments in (False, True):
        for number, others in accepted.items():
            own = _arguments(keys[number])
            fitting = [other for other in others if other in unclaimed and (any_arguments or _arguments(other) == own)]
            if fitting and keys[number] not in states:
                keys[number] = fitting[0]
                unclaimed.remove(fitting[0])
    for callback, key in zip(callbacks, keys, strict=True):
        if key in states:
            yield callback, states[key]


def _arguments(key: str) -> str:
    """Returns what stands in a state's key behind the name of the class."""
    return key.partition("{")[2]
