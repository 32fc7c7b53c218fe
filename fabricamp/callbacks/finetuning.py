"""Freezes parts of a module, and adds their parameters to the optimizer at a later epoch."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.nn import Module, ModuleDict
from torch.optim import Optimizer

from fabricamp.arguments.checks import check_kind
from fabricamp.callbacks.base import Callback
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.habits import habits, say_difference
from fabricamp.optimizers.closures import demands_closure
from fabricamp.optimizers.later_groups import check_later_groups, refuse_later_group
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.master_weights import module_parameter
from fabricamp.torch_private import AnyBatchNorm

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict
    from fabricamp.engine.optimizer_setup import SchedulerConfig
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")

Modules: TypeAlias = "Module | Iterable[Module | Iterable[Any]]"


def multiplicative(epoch: int) -> float:  # noqa: ARG001 - Lightning's signature
    """Returns 2: the learning rate doubles with each epoch."""
    return 2.0


class BaseFinetuning(Callback):
    """Base class of callbacks that train parts of a module from a later epoch on.

    ``freeze_before_training`` runs at the beginning of a fit, before ``configure_optimizers``: give the optimizer only parameters
    that require gradients there.  ``finetune_function`` runs before each epoch, for each optimizer; it adds groups, and leaves
    those that are there.  A resumed run has the same parameter groups and frozen parameters.

    Raises:
        ConfigError: for an optimizer that takes one group of parameters (LBFGS), for a group whose parameters ``finetune_function``
            changes in place, and for a schedule that has no learning rate for a new group.

    Example:
        >>> class FromTheSecondEpoch(BaseFinetuning):
        ...     def freeze_before_training(self, pl_module):
        ...         self.freeze(pl_module.encoder)
        ...
        ...     def finetune_function(self, pl_module, epoch, optimizer):
        ...         if epoch == 1:
        ...             self.unfreeze_and_add_param_group(pl_module.encoder, optimizer, lr=1e-4)
    """

    def __init__(self) -> None:
        super().__init__()
        self._state: StateDict = {}
        self._trainer: Trainer | None = None
        self._module: Callable[[], TrainingModule | None] = lambda: None

    def __getstate__(self) -> StateDict:
        """Returns the attributes without references to the current run."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_trainer", "_module")}

    def __setstate__(self, state: StateDict) -> None:
        BaseFinetuning.__init__(self)
        self.__dict__.update(state)

    # -- overridden by subclasses ------------------------------------------------------------------------------------------------

    def freeze_before_training(self, pl_module: TrainingModule) -> None:
        """Freezes the parameters that are not trained from the beginning."""
        raise NotImplementedError

    def finetune_function(self, pl_module: TrainingModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreezes the parameters to train from this ``epoch`` on, and adds them to ``optimizer``."""
        raise NotImplementedError

    # -- tools for subclasses ----------------------------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[Module]:
        """Returns the modules in ``modules`` (at any depth) with own parameters or without children; each once."""
        if isinstance(modules, ModuleDict):
            modules = modules.values()
        if isinstance(modules, Module):
            flat = [module for module in modules.modules() if not list(module.children()) or _own_parameters(module)]
        else:
            flat = [module for part in modules for module in BaseFinetuning.flatten_modules(part)]
        return list(dict.fromkeys(flat))

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yields the parameters of ``modules`` with this ``requires_grad``; without ``train_bn`` none of BatchNorm."""
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, AnyBatchNorm) and not train_bn:
                continue
            for parameter in _own_parameters(module):
                if parameter.requires_grad == requires_grad:
                    yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreezes ``modules``; BatchNorm updates its running statistics again."""
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, AnyBatchNorm):
                module.track_running_stats = True
            for parameter in _own_parameters(module):
                parameter.requires_grad = True

    @staticmethod
    def freeze_module(module: Module) -> None:
        """Freezes one module's own parameters; a BatchNorm keeps its running statistics."""
        if isinstance(module, AnyBatchNorm):
            module.track_running_stats = False
        for parameter in _own_parameters(module):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freezes ``modules``; with ``train_bn`` BatchNorm stays trainable."""
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, AnyBatchNorm) and train_bn:
                BaseFinetuning.make_trainable(module)
            else:
                BaseFinetuning.freeze_module(module)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the ``params`` that ``optimizer`` does not update yet; warns if it already updates some of them."""
        known = _updated_by(optimizer)
        parameters = list(params)
        new = [parameter for parameter in parameters if id(parameter) not in known]
        if habits().says_differences and _any_equal(new, optimizer):
            say_difference(
                "parameters equal in value to others that the optimizer updates are added to it; Lightning treats them as the same"
            )
        if len(new) < len(parameters):
            _LOG.warning(
                "%s updates %d of %d parameters already, and they stay in their group; give it only parameters that "
                "require gradients: %s(filter(lambda p: p.requires_grad, self.parameters()), ...)",
                type(optimizer).__name__, len(parameters) - len(new), len(parameters), type(optimizer).__name__,
            )  # fmt: skip
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreezes ``modules`` and adds their parameters to ``optimizer`` as a new group.

        ``lr`` None: the first group's rate, divided by ``initial_denom_lr``.  ``train_bn`` False: adds no BatchNorm parameters.
        """
        norms = [module for module in BaseFinetuning.flatten_modules(modules) if isinstance(module, AnyBatchNorm)]
        # BatchNorm parameters that freeze left trainable, and that the optimizer updates already.
        trained = {id(parameter) for parameter in BaseFinetuning.filter_params(norms)} & _updated_by(optimizer)
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        trainable = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        unfrozen = [parameter for parameter in trainable if id(parameter) not in trained]
        if new := BaseFinetuning.filter_on_optimizer(optimizer, unfrozen):
            optimizer.add_param_group({"params": new, "lr": rate})

    # -- in a run ----------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Calls ``freeze_before_training`` before a fit."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if trainer.current_epoch == 0 or self._module() is not pl_module:
            self._state = {}
        self._trainer = trainer
        self._module = weakref.ref(pl_module)
        self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Checks the optimizers; another fit of the same module continues with its parameter groups."""
        for optimizer in trainer.optimizers:
            if demands_closure(optimizer):
                raise ConfigError(
                    f"{type(self).__name__} adds parameter groups, and {type(optimizer).__name__} takes only one; use another "
                    "optimizer, or leave the callback out"
                )
        self._restore()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Calls ``finetune_function`` once per epoch; not again if a run resumes within the epoch."""
        if self._state.get("epoch") == trainer.current_epoch:
            return
        for optimizer in trainer.optimizers:
            before = [(group, list(group["params"])) for group in optimizer.param_groups]
            self.finetune_function(pl_module, trainer.current_epoch, optimizer)
            self._refuse_changes_in_place(optimizer, before)
        for config in trainer.lr_scheduler_configs:  # under manual optimization too, where the user steps them
            check_later_groups(config.scheduler)
        self._record(trainer, pl_module)

    def state_dict(self) -> StateDict:
        """Returns the parameter groups, with parameters by name, and the names of trainable parameters."""
        return self._state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restores the parameter groups, before the optimizers' states are loaded."""
        self._state = dict(state_dict)
        self._restore()

    def _refuse_changes_in_place(self, optimizer: Optimizer, before: list[tuple[dict[str, Any], list[Any]]]) -> None:
        for number, (group, parameters) in enumerate(before):
            is_there = number < len(optimizer.param_groups) and optimizer.param_groups[number] is group
            if not is_there or [*map(id, group["params"])] != [*map(id, parameters)]:
                raise ConfigError(
                    f"{type(self).__name__}.finetune_function has changed group {number} of {type(optimizer).__name__} in place "
                    f"({len(parameters)} parameters before, {len(group['params'])} now): a resumed run, whose optimizer is built "
                    "without the change, could not load its state; leave the groups as they are, and add another by "
                    "self.unfreeze_and_add_param_group(...) or optimizer.add_param_group({...})"
                )

    def _record(self, trainer: Trainer, module: TrainingModule) -> None:
        """Stores the parameter groups, with parameters by name, and the names of trainable parameters and layers."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._state = {
            "internal_optimizer_metadata": {
                number: [
                    {**group, "params": [names[id(module_parameter(updated))] for updated in group["params"]]}
                    for group in optimizer.param_groups
                ]
                for number, optimizer in enumerate(trainer.optimizers)
            },
            "epoch": trainer.current_epoch,
            "trainable": [name for name, parameter in module.named_parameters() if parameter.requires_grad],
            "following": [name for name, norm in _norms(module) if norm.track_running_stats],
        }

    def _restore(self) -> None:
        """Adds the saved parameter groups that the optimizers do not have, and freezes parameters as saved."""
        trainer = self._trainer
        module = self._module()
        if trainer is None or module is None or not self._state:
            return
        parameters = dict(module.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        for number, saved in self._state["internal_optimizer_metadata"].items():
            optimizer = trainer.optimizers[number]
            existing = [
                [names.get(id(module_parameter(updated))) for updated in group["params"]]
                for group in optimizer.param_groups
            ]
            if [group["params"] for group in saved[: len(existing)]] != existing:
                raise CheckpointError(
                    f"{type(self).__name__}: the parameter groups of optimizer {number} ({type(optimizer).__name__}) differ from "
                    "those of the resumed run; freeze the same parameters in freeze_before_training, and build the same optimizers"
                )
            for group in saved[len(existing) :]:
                optimizer.add_param_group({**group, "params": [parameters[name] for name in group["params"]]})
        self._freeze_as_saved(module)

    def _freeze_as_saved(self, module: TrainingModule) -> None:
        groups = [group for saved in self._state["internal_optimizer_metadata"].values() for group in saved]
        added = [name for group in groups for name in group["params"]]  # the only source in Lightning's files
        trainable = set(self._state.get("trainable", added))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trainable)
        if "following" in self._state:
            for name, norm in _norms(module):
                norm.track_running_stats = name in self._state["following"]


class BackboneFinetuning(BaseFinetuning):
    """Trains ``pl_module.backbone`` from a given epoch on; its own learning rate grows towards that of the other parameters.

    Args:
        unfreeze_backbone_at_epoch: the first epoch that trains it.
        lambda_func: returns the factor of its learning rate before each later epoch, given the epoch's number from 1.
        backbone_initial_ratio_lr: its first learning rate, as a share of the first group's.
        backbone_initial_lr: its first learning rate itself; None: ``backbone_initial_ratio_lr`` decides.
        should_align: limits its learning rate to the first group's.
        initial_denom_lr: has no effect, as in Lightning: the first learning rate is always known.
        train_bn: adds the parameters of BatchNorm too.
        verbose: logs both learning rates.
        rounding: number of digits in these log lines.

    Raises:
        ConfigError: for arguments of another kind, and for a module without a ``backbone``.

    Example:
        >>> finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=3, lambda_func=lambda epoch: 1.5)
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        check_kind(self, "a whole number", unfreeze_backbone_at_epoch=unfreeze_backbone_at_epoch, rounding=rounding)
        check_kind(self, "a number", backbone_initial_ratio_lr=backbone_initial_ratio_lr)
        check_kind(self, "a number", initial_denom_lr=initial_denom_lr)
        check_kind(self, "a number", optional=True, backbone_initial_lr=backbone_initial_lr)
        check_kind(self, "True or False", should_align=should_align, train_bn=train_bn, verbose=verbose)
        if not callable(lambda_func):
            raise ConfigError(f"BackboneFinetuning(lambda_func={lambda_func!r}): give a function of the epoch's number")
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def state_dict(self) -> StateDict:
        """Returns the parameter groups and the backbone's learning rate."""
        return {**self._state, "previous_backbone_lr": self.previous_backbone_lr} if self._state else {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restores the parameter groups and the backbone's learning rate."""
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "previous_backbone_lr"})

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Checks the optimizers, and whether their schedules can take the backbone's group."""
        super().on_fit_start(trainer, pl_module)
        epoch = self.unfreeze_backbone_at_epoch
        if trainer.current_epoch > epoch or 0 <= trainer.max_epochs <= epoch:
            return
        for config in trainer.lr_scheduler_configs:
            refuse_later_group(
                config.scheduler,
                _schedule_steps(trainer, config, epoch),
                f"BackboneFinetuning adds a parameter group at epoch {epoch}",
            )

    def freeze_before_training(self, pl_module: TrainingModule) -> None:
        """Freezes the backbone, except for its BatchNorm."""
        if not isinstance(getattr(pl_module, "backbone", None), Module):
            raise ConfigError(
                f"BackboneFinetuning trains {type(pl_module).__name__}.backbone, which is not a module; call the part that is "
                "trained later `backbone`, or derive from BaseFinetuning"
            )
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: TrainingModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreezes the backbone at its epoch, and raises its learning rate in later epochs."""
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        others = optimizer.param_groups[0]["lr"]
        if epoch == self.unfreeze_backbone_at_epoch or self.previous_backbone_lr is None:
            rate = self.backbone_initial_lr
            if rate is None:
                rate = others * self.backbone_initial_ratio_lr
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, rate, train_bn=self.train_bn)
        else:
            rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            if self.should_align:
                rate = min(rate, others)
            optimizer.param_groups[-1]["lr"] = rate
        self.previous_backbone_lr = rate
        if self.verbose:
            _LOG.info(
                "learning rate %s, of the backbone %s",
                round(others, self.rounding), round(rate, self.rounding),
            )  # fmt: skip


def _schedule_steps(trainer: Trainer, config: SchedulerConfig, epoch: int) -> float:
    """Returns how many steps a schedule makes before ``epoch``; infinite where only the run will tell."""
    if not trainer.module.automatic_optimization:
        return math.inf
    if config.interval == "epoch":
        return epoch // config.frequency
    if not math.isfinite(trainer.num_training_batches):
        return math.inf
    return epoch * math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches) // config.frequency


def _any_equal(parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> bool:
    """Returns whether a parameter has the values of one that ``optimizer`` updates."""
    updated = [one for group in optimizer.param_groups for one in group["params"]]
    return any(torch.equal(parameter, one) for parameter in parameters for one in updated)


def _updated_by(optimizer: Optimizer) -> set[int]:
    """Returns the ids of the module's parameters that ``optimizer`` updates."""
    return {id(module_parameter(updated)) for updated in owned_parameters(optimizer)}


def _own_parameters(module: Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _norms(module: Module) -> list[tuple[str, AnyBatchNorm]]:
    """Returns (name, BatchNorm) for each BatchNorm with running statistics."""
    norms = [(name, norm) for name, norm in module.named_modules() if isinstance(norm, AnyBatchNorm)]
    return [(name, norm) for name, norm in norms if norm.running_mean is not None]
