"""The face of a callback: Lightning's hook names, in Lightning's order."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fabricamp.errors import ConfigError
from fabricamp.keywords import NamesKeywords
from fabricamp.not_offered import is_lightnings, mixed_with_lightnings_trainer
from fabricamp.registry import Registry
from fabricamp.state import NON_FINITE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.optim import Optimizer

    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class Callback(NamesKeywords):
    """Code that runs beside training.  Override the hooks that you need: hooks that nobody overrides cost nothing.

    ``help("fabricamp.hooks")`` shows the order in which hooks run.

    Example:
        >>> class Announce(Callback):
        ...     def on_train_epoch_end(self, trainer, pl_module):
        ...         print(f"epoch {trainer.current_epoch} is over")
    """

    monitors: ClassVar[bool] = False
    """True for callbacks that decide by the epoch's metrics: their ``on_train_epoch_end`` runs last, when what the others have
    logged is reduced over ranks too."""

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint; includes its arguments if several of one class may be given."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """A ``state_key`` of the class's name and these values, as Lightning's callbacks make one."""
        return f"{type(self).__qualname__}{kwargs}"

    def accepts_state_of(self, key: str) -> bool:
        """Whether the state under another key is also this callback's, from a run in which it had other arguments."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps: tensors, numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned."""

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """First of all; ``stage`` is "fit", "validate", "test" or "predict"."""
        # Lightning calls this for every callback, and our Trainer only what overrides it.
        if is_lightnings(trainer) and (own := _own_class(type(self))):
            raise ConfigError(mixed_with_lightnings_trainer(own))

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """The last hook of a run."""

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After the optimizers are built and a checkpoint is restored."""

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After training."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before the sanity check, the validation batches before training."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After them."""

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before the first epoch."""

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before an epoch."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After an epoch, and after the validation that belongs to it."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int) -> None:
        """Before a micro-batch; the batch is on the device."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a micro-batch; ``outputs`` is what ``training_step`` returned."""

    def holds_at(self, global_step: int) -> float:
        """The next step, from ``global_step`` on, after which the batch hooks must run before another one does.

        Under ``CudaGraph(steps=...)`` no launch goes beyond it.  The batch hooks of a launch's steps run after it, in their
        order: they see weights, gradients and states of the module as the last of these steps left them.  A class whose hooks
        look at none of these answers ``math.inf``; one that has batch hooks and does not override this is refused there.
        """
        return global_step + 1

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before a validation run."""

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After a validation run; its metrics are reduced."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before the validation batches."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After the validation batches, while values can still be logged."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After a validation batch."""

    def on_test_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before a test run."""

    def on_test_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After a test run; its metrics are reduced."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before the test batches."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After the test batches, while values can still be logged."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a test batch."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After a test batch."""

    def on_predict_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before a prediction run."""

    def on_predict_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After a prediction run."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before the batches to predict."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After the batches to predict."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a batch to predict."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After a batch to predict."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        """Before gradients are cleared."""

    def on_before_backward(self, trainer: Trainer, pl_module: TrainingModule, loss: Tensor) -> None:
        """Before ``loss.backward()``; the loss is not scaled yet."""

    def on_after_backward(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After ``loss.backward()``; with a scaler the gradients are still scaled."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        """Before an update; gradients are averaged and unscaled, but not clipped yet."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """May add to a checkpoint that is about to be written."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """May read from a checkpoint that is being restored."""

    def evaluation_context(self, trainer: Trainer, pl_module: TrainingModule) -> AbstractContextManager[None]:
        """A context around each validation, test and prediction, with their hooks; an exception ends it too."""
        return contextlib.nullcontext()

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        """When training ends by an exception, Ctrl-C included."""


_AnyCallback = TypeVar("_AnyCallback", bound=Callback)

CALLBACKS: Registry[Callback] = Registry("callbacks", "callbacks")


def decides_by_metrics(callback: Callback) -> bool:
    """Whether a callback is one of those that run last; one on Lightning's base has nothing that says so."""
    return getattr(callback, "monitors", None) is True


def _own_class(kind: type) -> str:
    """The name of fabricamp's callback that ``kind`` is or derives from; nothing for one on the bare base: it may suit anybody."""
    ours = (one for one in kind.__mro__ if issubclass(one, Callback) and one is not Callback)
    return next((one.__name__ for one in ours if one.__module__.startswith("fabricamp.")), "")


def ends_everywhere(trainer: Trainer, exception: BaseException) -> bool:
    """Whether training was ended by what ends it behind the same step on all ranks: Ctrl-C, a signal or a ``nan_policy``."""
    if is_lightnings(trainer):  # which calls on_exception for what setup raised
        return False
    stopped = isinstance(exception, KeyboardInterrupt) or trainer.state.stop_reason == NON_FINITE
    return stopped and trainer.state.fitting


def waits_between_steps(callback: object) -> bool:
    """Whether batch hooks of a callback look at each step: those of a class without a :meth:`Callback.holds_at` beside them."""
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
    """Returns each callback with its state: the one under its key, else one that it accepts and that is no other's."""
    keys = {one.state_key for one in callbacks}
    left = [key for key in states if key not in keys]
    for one in callbacks:
        key = one.state_key
        if key not in states:
            accepts = getattr(one, "accepts_state_of", _accepts_none)  # Lightning's base has no such method
            key = next((other for other in left if accepts(other)), "")
            left = [other for other in left if other != key]
        if key in states:
            yield one, states[key]
