"""TrainingModule: what the user subclasses."""

from __future__ import annotations

import contextlib
from typing import IO, TYPE_CHECKING, Any, Self, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from fabricamp._utils.say_once import say_once
from fabricamp.checkpoint import read_checkpoint
from fabricamp.checkpoint.compiled_names import with_names_of
from fabricamp.checkpoint.hyperparameters import MODULE, HyperparametersMixin
from fabricamp.checkpoint.load_from_checkpoint import build
from fabricamp.checkpoint.reading import name_of_source
from fabricamp.checkpoint.sections import restore_weights
from fabricamp.engine.optimizer_setup import ManagedOptimizer
from fabricamp.engine.run_context import DETACHED, RunContext, gathered
from fabricamp.errors import ConfigError, NotAttachedError, nearest
from fabricamp.exporting import ExportMixin
from fabricamp.habits import habits
from fabricamp.hooks import ModuleHooks, call_hook
from fabricamp.ops.shards import device_of
from fabricamp.precision.base import Clip
from fabricamp.precision.torch_updates import clip_gradients, refuse_values_of_complex

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from torch.optim import Optimizer

    from fabricamp._utils.types import AnyBatch, Closure
    from fabricamp.loggers.base import Logger
    from fabricamp.metrics import Metrics
    from fabricamp.metrics.values import MetricCollection
    from fabricamp.trainer import Trainer


class TrainingModule(HyperparametersMixin, ExportMixin, ModuleHooks, nn.Module):
    """Base class of a user's module: training step, optimizers and data; has Lightning's names where the meaning is the same.

    Write ``training_step`` and ``configure_optimizers``, and the other steps, loaders and hooks that you need.
    ``help("fabricamp.hooks")`` shows the order in which hooks run.

    Example:
        >>> class Line(TrainingModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(1, 1)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         loss = torch.nn.functional.mse_loss(self.layer(x), y)
        ...         self.log("loss", loss)
        ...         return loss
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    """

    automatic_optimization: bool = True
    """False: ``training_step`` itself calls ``manual_backward`` and the optimizers' ``step``."""
    strict_loading: bool = True
    """False: a checkpoint may lack weights of the module or have others; only weights of the same name are loaded."""
    CHECKPOINT_HYPER_PARAMS_KEY = MODULE.values
    CHECKPOINT_HYPER_PARAMS_NAME = MODULE.name
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"
    _attachment: RunContext = DETACHED  # pickles of 0.1 have this name

    def _attach(self, trainer: Trainer, metrics: Metrics | None, *, fits: bool) -> RunContext:
        """Attaches the module to a run; the Trainer calls it.  ``fits`` False keeps the last fit's optimizers and schedulers."""
        run_context = RunContext()
        run_context.trainer = trainer
        run_context.metrics = metrics
        run_context.toggled = list(self._attachment.toggled)
        if not fits:
            run_context.optimizers = self._attachment.optimizers
            run_context.schedulers = self._attachment.schedulers
        # Bypasses nn.Module.__setattr__: the run context is neither a parameter nor a submodule.
        object.__setattr__(self, "_attachment", run_context)
        return run_context

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except AttributeError as error:
            if "before Module.__init__() call" not in str(error):
                raise
            raise ConfigError(
                f"{type(self).__name__} sets {name!r} before its base is initialised; in __init__ call super().__init__() first"
            ) from None

    # -- methods that the user writes ----------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes ``(batch, batch_idx)``; returns the loss, or a dict with ``"loss"``; None leaves the batch out (one process).

        A step without any loss updates nothing, and counts.  The loss may be ``(sum, weight)``: the step divides once, by the total
        weight of its micro-batches on all ranks.
        """
        raise ConfigError(f"{type(self).__name__} has no training_step; write one, or call validate, test or predict")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes ``(batch, batch_idx)``, and ``dataloader_idx`` with several loaders; log values in it."""

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Does the same as :meth:`validation_step`, for ``test``."""

    def predict_step(self, batch: AnyBatch, *args: Any, **kwargs: Any) -> Any:
        """Returns the predictions for a batch; by default those of ``self(batch)``."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Returns one optimizer, a list, a tuple of two lists, or a dict with ``"optimizer"`` and ``"lr_scheduler"``."""
        raise ConfigError(
            f"{type(self).__name__} has no configure_optimizers; return an optimizer from it, or None to train without"
        )

    def configure_callbacks(self) -> Any:
        """Returns callbacks for this module; each replaces the Trainer's callbacks of the same class."""
        return []

    # -- the update ----------------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Runs backward on the loss, which the precision has scaled already."""
        loss.backward(*args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clears gradients before the first backward of an accumulation."""
        optimizer.zero_grad()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Closure | None = None
    ) -> None:
        """Runs the update.  Forward and backward have run: the closure's first call returns their loss, others run them again."""
        optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips the unscaled gradients before the update."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: Optimizer | ManagedOptimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the gradients of the parameters of ``optimizer``, by norm (default) or value.

        Under manual optimization the optimizer's next step clips, after the gradients are averaged over ranks and unscaled.
        """
        if not gradient_clip_val:
            return
        clip = Clip(float(gradient_clip_val), gradient_clip_algorithm or "norm")  # type: ignore[arg-type]
        if clip.algorithm not in ("norm", "value") or not clip.value > 0:
            raise ConfigError(
                f"clip_gradients(gradient_clip_val={gradient_clip_val!r}, gradient_clip_algorithm={gradient_clip_algorithm!r}); "
                f"give a positive number, and 'norm' or 'value'{nearest(clip.algorithm, ('norm', 'value'))}"
            )
        own = optimizer.optimizer if isinstance(optimizer, ManagedOptimizer) else optimizer
        if clip.algorithm == "value":
            refuse_values_of_complex(own)
        clip_or_note = self._attachment.manual_clip or clip_gradients
        clip_or_note(own, clip)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Steps a learning-rate scheduler; ``metric`` is the monitored value, or None."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Returns the optimizer, or a list of several; its ``step`` reduces, unscales, clips if requested, and counts the step.

        Returns the same objects each time, from ``configure_optimizers`` until the next fit.
        """
        managed = self._attachment.optimizers
        optimizers = list(managed) if use_pl_optimizer else [one.optimizer for one in managed]
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """Returns the scheduler, a list of several, or None."""
        schedulers = self._attachment.schedulers
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else list(schedulers)

    def manual_backward(self, loss: Tensor, *args: Any, loss_id: int = 0, **kwargs: Any) -> None:
        """Runs backward under manual optimization; a precision with loss scaling scales the loss with scaler ``loss_id``."""
        backward = self._attachment.manual_backward
        if backward is None:
            raise ConfigError(
                "manual_backward works in training_step with automatic_optimization=False; set it in __init__"
            )
        backward(loss, *args, loss_id=loss_id, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Freezes every parameter that only other optimizers update, until :meth:`untoggle_optimizer`."""
        # With master weights an optimizer holds the masters, but backward fills the gradients of the module's own parameters.
        gradients = self.trainer.precision_plugin.gradients
        own = optimizer.optimizer if isinstance(optimizer, ManagedOptimizer) else optimizer
        mine = {id(parameter) for parameter in gradients(own).parameters}
        for other in self._attachment.optimizers:
            for parameter in gradients(other.optimizer).parameters:
                if id(parameter) not in mine and parameter.requires_grad:
                    self._attachment.toggled.append(parameter)
                    parameter.requires_grad_(False)

    def untoggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer | None = None) -> None:
        """Unfreezes the parameters that :meth:`toggle_optimizer` froze."""
        while self._attachment.toggled:
            self._attachment.toggled.pop().requires_grad_(True)

    @contextlib.contextmanager
    def toggled_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> Iterator[None]:
        """Returns a context in which only this optimizer's parameters get gradients."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def freeze(self) -> Self:
        """Freezes every parameter and switches to evaluation; returns the module."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Unfreezes every parameter and switches to training; returns the module."""
        self.requires_grad_(True)
        return self.train()

    # -- logging -----------------------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Logs a scalar or a torchmetrics object: per step, over the epoch, or both; epoch values are reduced over all ranks.

        The value is detached and copied, and stays on the device; a flush reads all values every ``log_every_n_steps`` steps.
        ``on_step`` together with ``on_epoch`` logs two values, ``name_step`` and ``name_epoch``.

        Args:
            name: the value's name in logs, monitors and file names.
            value: a number, a tensor with one element, or a torchmetrics object.
            prog_bar: shows the value beside the progress bar.
            logger: sends the value to the loggers.
            on_step: logs the value of this step.  The default in ``training_step`` and the hooks around it.
            on_epoch: logs the value over the epoch.  The default everywhere else.
            reduce_fx: how the values of an epoch are reduced to one: "mean" (also "avg"), "sum", "min" or "max".
            enable_graph: has no effect.
            sync_dist: reduces the value of a step over all ranks, too.
            sync_dist_group: only None, which means all ranks.
            add_dataloader_idx: adds ``/dataloader_idx_N`` to the name if there are several loaders.
            batch_size: the weight in a mean; None is the length of the batch's first tensor that has a dimension.
            metric_attribute: has no effect.
            rank_zero_only: logs rank 0's value alone.

        Raises:
            ConfigError: for a value, a hook or a combination that cannot work.  Outside a run nothing is logged, and a warning is
                logged once.

        Example:
            >>> def validation_step(self, batch, batch_idx):
            ...     self.log("val_loss", self.loss(batch), prog_bar=True)
        """
        metrics = self._attachment.metrics
        if metrics is None:
            say_once("self.log outside a Trainer's fit, validate and test, and with barebones=True, logs nothing")
            return
        call = (
            name, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, sync_dist_group, add_dataloader_idx, rank_zero_only
        )  # fmt: skip
        metrics.keep(call, value, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        """Logs every entry of a dict, or of a torchmetrics collection, with the same options as :meth:`log`.

        A metric of the collection that computes several values (ClasswiseWrapper, MinMaxMetric) is logged at the end of the epoch,
        each value under the name that it has in the collection's ``compute()``.
        """
        collection = {}
        if hasattr(dictionary, "compute_groups"):
            # By default MetricCollection.items() copies states and drops the prefix.
            collection = {"keep_base": False, "copy_state": False}
            if self._attachment.metrics is not None:
                self._attachment.metrics.note_collection(cast("MetricCollection", dictionary))
        for name, value in dictionary.items(**collection):
            self.log(name, value, *arguments, **options)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints once, not once per process; above the progress bar and by its ``print``, if one is shown."""
        trainer = self.trainer
        bar = trainer.progress_bar_callback
        if bar is None or not bar.is_enabled:
            trainer.print(*args, **kwargs)
        elif trainer.is_global_zero:
            bar.print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Returns ``data`` of every rank, stacked along a new first dimension (also with one process), without gradients.

        In a program written for Lightning, one process gets its own ``data`` as tensors, as in Lightning.  ``data`` is a tensor, a
        number, or a collection of such, with the same keys and shapes on every rank.
        """
        if sync_grads or group is not None:
            raise ConfigError(
                f"all_gather(group={group!r}, sync_grads={sync_grads}) is not possible: values come from all ranks and have no "
                "gradients; torch.distributed.nn.functional.all_gather has both"
            )
        trainer = self.trainer
        device = self.device
        if trainer.world_size == 1 and habits().one_process_gathers_nothing:
            return apply_to_collection(data, (Tensor, float, int), lambda value: _as_tensor(value, device))
        return apply_to_collection(
            data, (Tensor, float, int), lambda value: gathered(trainer, _as_tensor(value, device))
        )

    # -- position of the run -------------------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs the module; raises :class:`NotAttachedError`, a RuntimeError, if there is none."""
        trainer = self._attachment.trainer
        if trainer is None:
            raise NotAttachedError(
                f"{type(self).__name__} is not attached to a Trainer; call Trainer(...).fit(module) first"
            )
        return trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        if self._attachment is DETACHED:
            object.__setattr__(self, "_attachment", RunContext())
        self._attachment.trainer = trainer
        for child in self.children():
            if isinstance(child, TrainingModule):
                child.trainer = trainer

    @property
    def _trainer(self) -> Any:
        """The Trainer, or None if there is none; neuralforecast and darts read this attribute.

        In a program that was not written for Lightning, a value that the program sets under this name is kept for the program.
        """
        for own in (vars(self), self._modules):
            if "_trainer" in own:
                return own["_trainer"]
        return self._attachment.trainer

    @_trainer.setter
    def _trainer(self, trainer: Any) -> None:
        if habits().trainer_by_private_name or hasattr(trainer, "_runner"):  # a Trainer
            vars(self).pop("_trainer", None)
            self.trainer = trainer
        else:
            vars(self)["_trainer"] = trainer

    @property
    def global_step(self) -> int:
        """The number of attempted steps so far; 0 outside a Trainer."""
        trainer = self._attachment.trainer
        return 0 if trainer is None else trainer.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch, from 0; 0 outside a Trainer."""
        trainer = self._attachment.trainer
        return 0 if trainer is None else trainer.current_epoch

    @property
    def global_rank(self) -> int:
        """The number of this process among all."""
        trainer = self._attachment.trainer
        return 0 if trainer is None else trainer.global_rank

    @property
    def local_rank(self) -> int:
        """The number of this process on its node."""
        trainer = self._attachment.trainer
        return 0 if trainer is None else trainer.local_rank

    @property
    def device(self) -> torch.device:
        """The device of the module's first parameter or buffer."""
        tensor = next(self.parameters(), next(self.buffers(), None))
        if tensor is not None:
            return device_of(tensor)
        trainer = self._attachment.trainer
        return torch.device("cpu") if trainer is None else trainer.strategy.device

    @property
    def on_gpu(self) -> bool:
        """Whether the module is on a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating parameter."""
        return next(
            (parameter.dtype for parameter in self.parameters() if parameter.is_floating_point()), torch.float32
        )

    @property
    def logger(self) -> Logger | None:
        """The Trainer's first logger."""
        trainer = self._attachment.trainer
        return None if trainer is None else trainer.logger

    @property
    def loggers(self) -> list[Logger]:
        """The Trainer's loggers."""
        trainer = self._attachment.trainer
        return [] if trainer is None else trainer.loggers

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        *,
        types: Iterable[type] = (),
        **overrides: Any,
    ) -> Self:
        """Returns a module built from a checkpoint's hyper-parameters, updated by ``overrides``, with the checkpoint's weights.

        Enums, dataclasses and paths are restored as such if the annotations of ``__init__`` or ``types`` name their class.  Pass
        modules, functions, classes and partials as ``overrides``; raises :class:`CheckpointError` with the names of missing ones.
        If the file holds them as objects, ``weights_only=False`` allows it to rebuild them by code (only for files that you
        trust); None means True, and raises :class:`CheckpointObjectsError`.  ``strict`` None means the module's ``strict_loading``.
        """
        device = "cpu" if map_location is None else map_location
        checkpoint = read_checkpoint(checkpoint_path, device, weights_only=weights_only)
        path = name_of_source(checkpoint_path)
        module = build(cls, checkpoint, MODULE, path, overrides, types, hparams_file, weights_only=weights_only)
        call_hook(module, "configure_model")
        checkpoint = with_names_of(checkpoint, module)
        call_hook(module, "on_load_checkpoint", checkpoint)
        restore_weights(module, checkpoint, path, strict=strict)
        return module


def _as_tensor(value: Tensor | float, device: torch.device) -> Tensor:
    """Returns a tensor on ``device``; a number becomes fp32, int64 or bool, whatever torch's default dtype is."""
    if isinstance(value, Tensor):
        return value.to(device)
    # bool before int, of which it is a subclass.
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float32}
    dtype = next(dtypes[kind] for kind in dtypes if isinstance(value, kind))
    return torch.tensor(value, dtype=dtype, device=device)
