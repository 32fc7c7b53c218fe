"""The hooks of a module, and how hooks become plain tuples of calls before the first batch.

The order of a fit; (c) is a hook of callbacks, (m) of the module, (c, m) of both: callbacks first, then the module::

    configure_callbacks (m)
    prepare_data (m)
    setup (c, m)                                    after the DataModule's
    configure_model (m)
    on_load_checkpoint (c, m)                       if the run resumes from a checkpoint
    configure_optimizers (m)
    on_fit_start (c, m)
    on_sanity_check_start (c)                       if the run does not resume
        val_dataloader (m)
        the validation
    on_sanity_check_end (c)                         if the run does not resume
    val_dataloader (m)                              if the run resumes from a checkpoint
    train_dataloader (m)
    on_train_start (c, m)
    for each epoch
        on_train_epoch_start (c, m)
        for each micro-batch
            on_before_batch_transfer (m)            on a GPU one batch ahead, as the next hook (``prefetch_batches``)
            transfer_batch_to_device (m)
            on_after_batch_transfer (m)
            on_train_batch_start (c, m)
            training_step (m)
            on_before_zero_grad (c, m)              for the first micro-batch of a step, as the next hook
            optimizer_zero_grad (m)
            on_before_backward (c, m)
            backward (m)
            on_after_backward (c, m)
            on_before_optimizer_step (c, m)         for the last micro-batch of a step, as the next three hooks
            configure_gradient_clipping (m)
            optimizer_step (m)
            lr_scheduler_step (m)
            on_train_batch_end (c, m)
        on_validation_model_zero_grad (m)           if the epoch is validated, as the next line
        the validation
        on_train_epoch_end (c, m)                   the epoch's values are reduced; callbacks with ``monitors = True`` come last
        on_save_checkpoint (c, m)                   if a ModelCheckpoint writes
    on_train_end (c, m)
    on_fit_end (c, m)
    teardown (c, m)                                 after the DataModule's

The validation.  ``validate``, ``test`` and ``predict`` call hooks of their own names in the same order, between ``configure_model``
and ``teardown``::

    on_validation_model_eval (m)
    on_validation_start (c, m)
    on_validation_epoch_start (c, m)
    for each batch
        on_before_batch_transfer (m)
        transfer_batch_to_device (m)
        on_after_batch_transfer (m)
        on_validation_batch_start (c, m)
        validation_step (m)
        on_validation_batch_end (c, m)
    on_validation_epoch_end (c, m)
    on_validation_end (c, m)
    on_validation_model_train (m)               not in ``predict``

An exception calls ``on_exception`` (c), and no ``teardown``.  A signal or Ctrl-C that stops the loop calls both.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from fabricamp._utils.reach import reaches
from fabricamp.arguments.migration import refused_hooks
from fabricamp.callbacks.base import Callback, decides_by_metrics
from fabricamp.data import move_to_device
from fabricamp.engine.report.profiling import profiled, profiler_of
from fabricamp.errors import ConfigError
from fabricamp.lightning.bases import lightnings_base
from fabricamp.state import TrainerFn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fabricamp._utils.types import AnyBatch, AnyOutput, StateDict
    from fabricamp.trainer import Trainer

Calls = tuple["Callable[..., object]", ...]

_RUNS_OF = {
    "training_epoch_end": {TrainerFn.FITTING},
    "validation_epoch_end": {TrainerFn.FITTING, TrainerFn.VALIDATING},
    "test_epoch_end": {TrainerFn.TESTING},
}
"""The runs that refuse a hook of Lightning 1: those that called it; in others it may be left over."""


class ModuleHooks:
    """The hooks that a module may override.  Only those that move data, clear gradients or switch modes do anything by default."""

    def configure_model(self) -> None:
        """Builds large submodules late, after every process knows its device."""

    def prepare_data(self) -> None:
        """Downloads and converts; runs in one process per node, before ``setup``.  Keep no state: other processes do not see it."""

    def setup(self, stage: str) -> None:
        """Builds data sets and layers; runs in every process; ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """The last hook of a run."""

    def train_dataloader(self) -> Any:
        """Returns the loader to train on, or a dict or list of loaders."""

    def val_dataloader(self) -> Any:
        """Returns the loader to validate on, or a list of loaders."""

    def test_dataloader(self) -> Any:
        """Returns the loader to test on, or a list of loaders."""

    def predict_dataloader(self) -> Any:
        """Returns the loader to predict, or a list of loaders."""

    def on_before_batch_transfer(self, batch: AnyBatch, dataloader_idx: int) -> AnyBatch:
        """Returns the batch, changed before the transfer to the device."""
        return batch

    def transfer_batch_to_device(self, batch: AnyBatch, device: torch.device, dataloader_idx: int) -> AnyBatch:
        """Returns the batch on ``device``; override this hook for batches of your own type.

        On a GPU this hook runs one batch ahead, as ``on_before_batch_transfer`` does, and does not see changes that the step makes;
        use ``on_after_batch_transfer`` for that.
        """
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: AnyBatch, dataloader_idx: int) -> AnyBatch:
        """Returns the batch, changed on the device (augmentation)."""
        return batch

    def on_fit_start(self) -> None:
        """After the optimizers are built and a checkpoint is restored."""

    def on_fit_end(self) -> None:
        """After training."""

    def on_train_start(self) -> None:
        """Before the first epoch."""

    def on_train_end(self) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Before an epoch."""

    def on_train_epoch_end(self) -> None:
        """After an epoch, while values can still be logged."""

    def on_train_batch_start(self, batch: AnyBatch, batch_idx: int) -> int | None:
        """Before a micro-batch; return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: AnyOutput, batch: AnyBatch, batch_idx: int) -> None:
        """After a micro-batch."""

    def on_validation_start(self) -> None:
        """Before a validation run."""

    def on_validation_end(self) -> None:
        """After a validation run."""

    def on_validation_epoch_start(self) -> None:
        """Before the validation batches."""

    def on_validation_epoch_end(self) -> None:
        """After the validation batches, while values can still be logged."""

    def on_validation_batch_start(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(
        self, outputs: AnyOutput, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a validation batch."""

    def on_test_start(self) -> None:
        """Before a test run."""

    def on_test_end(self) -> None:
        """After a test run."""

    def on_test_epoch_start(self) -> None:
        """Before the test batches."""

    def on_test_epoch_end(self) -> None:
        """After the test batches, while values can still be logged."""

    def on_test_batch_start(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a test batch."""

    def on_test_batch_end(self, outputs: AnyOutput, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a test batch."""

    def on_predict_start(self) -> None:
        """Before a prediction run."""

    def on_predict_end(self) -> None:
        """After a prediction run."""

    def on_predict_epoch_start(self) -> None:
        """Before the batches to predict."""

    def on_predict_epoch_end(self) -> None:
        """After the batches to predict."""

    def on_predict_batch_start(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a batch to predict."""

    def on_predict_batch_end(
        self, outputs: AnyOutput, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a batch to predict."""

    def on_validation_model_zero_grad(self) -> None:
        """Frees gradients before a validation inside ``fit`` (not in the middle of an accumulation)."""
        self.zero_grad(set_to_none=True)  # type: ignore[attr-defined]  # nn.Module's

    def on_validation_model_eval(self) -> None:
        """Switches to evaluation; the Trainer records every submodule's mode before."""
        self.eval()  # type: ignore[attr-defined]  # nn.Module's

    def on_validation_model_train(self) -> None:
        """Switches to training, if overridden; otherwise the Trainer restores every submodule's mode."""
        self.train()  # type: ignore[attr-defined]  # nn.Module's

    def on_test_model_eval(self) -> None:
        """Switches to evaluation."""
        self.eval()  # type: ignore[attr-defined]  # nn.Module's

    def on_test_model_train(self) -> None:
        """Switches to training, if overridden; otherwise the Trainer restores every submodule's mode."""
        self.train()  # type: ignore[attr-defined]  # nn.Module's

    def on_predict_model_eval(self) -> None:
        """Switches to evaluation."""
        self.eval()  # type: ignore[attr-defined]  # nn.Module's

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before gradients are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Before backward; the loss is not scaled yet."""

    def on_after_backward(self) -> None:
        """After backward; with a scaler the gradients are still scaled."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Before an update; gradients are averaged and unscaled, but not clipped yet."""

    def on_save_checkpoint(self, checkpoint: StateDict) -> None:
        """May add entries to a checkpoint before it is written."""

    def on_load_checkpoint(self, checkpoint: StateDict) -> None:
        """May read entries from a checkpoint while it is restored."""


def overrides(part: object, name: str, base: type) -> bool:
    """Returns whether ``part`` overrides the method ``name`` of ``base``, in its class or on the instance.

    An object derived from one of Lightning's classes is compared with Lightning's base class instead.  A method that is set to
    None counts as not overridden.
    """
    if getattr(part, name, None) is None:
        return False
    base = lightnings_base(type(part)) or base
    method = vars(part).get(name) or getattr(type(part), name, None)
    # A method of the base that was set on the instance is not overridden either: self.val_dataloader = super().val_dataloader.
    return getattr(method, "__func__", method) is not getattr(base, name, None)


def call_hook(part: object, name: str, *args: Any) -> Any:
    """Calls the hook ``name`` of a module or DataModule, and returns its result; None for a hook that is set to None."""
    hook = getattr(part, name)
    return None if hook is None else hook(*args)


def call_with_stage(hook: Callable[..., Any] | None, stage: str) -> None:
    """Calls a ``setup`` or ``teardown``, by ``stage=`` where it takes that, as Lightning does; None: a hook set to None."""
    if hook is None:
        return
    try:
        inspect.signature(hook).bind(stage=stage)
    except (TypeError, ValueError):  # another name, or a callable without a signature
        hook(stage)
    else:
        hook(stage=stage)


def call_all(calls: Calls, *args: Any) -> None:
    """Runs each call with ``args``."""
    for call in calls:
        call(*args)


class Hooks:
    """Looks up the overridden hooks of callbacks and module: ``hooks("on_fit_start")`` returns a tuple of bound calls.

    Callbacks come before the module.  The callbacks' arguments ``trainer`` and ``module`` are bound already, so the loops pass only
    the other arguments.
    """

    def __init__(self, trainer: Trainer, module: nn.Module, callbacks: Sequence[Callback]) -> None:
        self._trainer = trainer
        self._module = module
        self._callbacks = callbacks
        self._profiler = profiler_of(trainer)
        for name, successor in refused_hooks().items():
            if trainer.state.fn in _RUNS_OF[name] and hasattr(module, name):
                raise ConfigError(
                    f"{type(module).__name__} has {name}, which nothing calls (as in Lightning 2); keep what the steps return in "
                    f"a list of your own, and rename the hook to {successor}(self)"
                )

    def callbacks(self, name: str, *, monitors: bool | None = None) -> Calls:
        """Returns the callbacks' calls of ``name``; ``monitors``: only of those that read epoch metrics (True) or don't (False)."""
        calls = []
        for callback in self._callbacks:
            wanted = monitors is None or decides_by_metrics(callback) is monitors
            if wanted and overrides(callback, name, Callback):
                call = partial(getattr(callback, name), self._trainer, self._module)
                calls.append(self._profiled(f"[Callback]{type(callback).__name__}.{name}", call))
        return tuple(calls)

    def module(self, name: str) -> Calls:
        """Returns the module's call of ``name``; empty if the module does not override the hook."""
        if not overrides(self._module, name, ModuleHooks):
            return ()
        call = getattr(self._module, name)
        return (self._profiled(f"[LightningModule]{type(self._module).__name__}.{name}", call),)

    def __call__(self, name: str) -> Calls:
        """Returns the calls of ``name``: callbacks first, then the module."""
        return self.callbacks(name) + self.module(name)

    def reach(self, wanted: Collection[str], *names: str) -> bool:
        """Returns whether code of the program in the hooks ``names``, or code that it reaches, has one of the ``wanted`` names."""
        parts = [*((callback, Callback) for callback in self._callbacks), (self._module, ModuleHooks)]
        return any(
            overrides(part, name, base) and reaches(getattr(part, name), wanted, (part, self._module))
            for part, base in parts
            for name in names
        )

    def _profiled(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return call if self._profiler is None else profiled(self._profiler, name, call)
