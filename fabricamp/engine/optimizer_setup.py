"""Checks what ``configure_optimizers`` returned and brings it to one form; wraps optimizers for manual optimization."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.weak import WeakTensorKeyDictionary

from fabricamp.arguments.checks import check_choice, check_names, check_number
from fabricamp.checkpoint.compiled_names import plain_name
from fabricamp.errors import ConfigError, OptimizationError
from fabricamp.optimizers import LARC, FusedOptimizer
from fabricamp.optimizers.closures import demands_closure
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.torch_updates import refuse_values_of_complex
from fabricamp.rng import global_seed

if TYPE_CHECKING:
    from fabricamp._utils.types import Closure, OptimizerFace
    from fabricamp.module import TrainingModule
    from fabricamp.precision.base import Precision
    from fabricamp.trainer.arguments import Settings

SCHEDULER_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")
OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor", "frequency")


@dataclass(slots=True)
class SchedulerConfig:
    """A learning-rate scheduler and when it steps: every ``frequency`` epochs, or applied steps."""

    scheduler: object
    """torch's scheduler, or any object that the module's ``lr_scheduler_step`` steps."""
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False


class ManagedOptimizer:
    """An optimizer under manual optimization: its ``step`` also exchanges gradients, unscales, checks and counts.

    Everything else is the optimizer's own.  :meth:`step` runs ``update``, which is set from the first ``training_step`` on.
    """

    def __init__(self, optimizer: Optimizer, module: TrainingModule | None = None) -> None:
        self.optimizer = optimizer
        self._module = module
        self.update: Callable[[Optimizer, Closure | None], Any] | None = None

    def step(self, closure: Closure | None = None, **options: Any) -> Any:
        """Makes one update from the gradients that ``manual_backward`` left; runs ``closure`` first if one is given.

        ``options``: further arguments of the optimizer's own ``step``.
        """
        if self.update is None:
            raise ConfigError(
                "the Trainer steps the optimizer under automatic optimization; to call step yourself, in training_step, set "
                "self.automatic_optimization = False in __init__"
            )
        if not options:
            return self.update(self.optimizer, closure)
        with _given(self.optimizer, options):
            return self.update(self.optimizer, closure)

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        """Returns the module's ``toggled_optimizer(self)``; :meth:`step` exchanges gradients, whatever ``sync_grad`` is."""
        if self._module is None:
            raise ConfigError("toggle_model works with the optimizers that self.optimizers() of a module returns")
        return self._module.toggled_optimizer(self)

    @property  # type: ignore[misc]  # read only, as Python's is not
    def __class__(self) -> Any:
        """The optimizer's class: torch's schedulers check by ``isinstance`` that they get an Optimizer."""
        return type(self.__dict__["optimizer"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def __repr__(self) -> str:
        return f"Managed{self.optimizer!r}"


@contextlib.contextmanager
def _given(optimizer: Any, options: dict[str, Any]) -> Iterator[None]:
    """A context in which each call of ``optimizer.step`` also gets ``options``; raises TypeError if it does not take them."""
    step = optimizer.step
    inspect.signature(step).bind(None, **options)
    own = vars(optimizer).get("step")  # torch's schedulers set one
    optimizer.step = functools.partial(step, **options)
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own


def parse_optimizers(
    returned: object, *, own_step: bool = False, manual: bool = False
) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Returns optimizers and scheduler configs from any form that ``configure_optimizers`` may return.

    One optimizer; a list or tuple of optimizers; a pair (optimizers, schedulers) of lists, or of a list and one scheduler; a dict
    with ``"optimizer"`` and ``"lr_scheduler"``; a list or tuple of such dicts; None. A scheduler may be any object if the module
    steps it itself: if ``own_step`` (the module overrides ``lr_scheduler_step``) or ``manual`` (manual optimization, where it needs
    no monitor either); else it needs a ``step()``. Raises :class:`ConfigError` for anything else, and for a scheduler of an
    optimizer that was not returned.
    """
    optimizers, schedulers = _unpacked(returned)
    for config in schedulers:
        _check_scheduler(config.scheduler, own_step=own_step or manual)
        if config.reduce_on_plateau and config.monitor is None and not manual:
            raise ConfigError(
                "a ReduceLROnPlateau scheduler needs 'monitor': the name of the logged value that it watches"
            )
        owner = getattr(config.scheduler, "optimizer", None)
        # Compared by their groups: LARC shares those of the optimizer that it wraps.
        if owner is not None and not any(owner.param_groups is optimizer.param_groups for optimizer in optimizers):
            raise ConfigError(
                f"the lr_scheduler {type(config.scheduler).__name__} belongs to a {type(owner).__name__} that "
                "configure_optimizers did not return; build it from the optimizer that is returned"
            )
    return optimizers, schedulers


def _unpacked(returned: object) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    if returned is None:
        return [], []
    if _is_optimizer(returned):
        return [_optimizer(returned)], []
    if isinstance(returned, dict):
        return _from_dicts([returned])
    if isinstance(returned, (list, tuple)):
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            optimizers, schedulers = returned
            if not isinstance(schedulers, (list, tuple)):
                schedulers = [schedulers]
            return [_optimizer(one) for one in optimizers], [_scheduler(one) for one in schedulers]
        if returned and all(isinstance(part, dict) for part in returned):
            return _from_dicts(returned)
        return [_optimizer(one) for one in returned], []
    raise ConfigError(
        f"configure_optimizers returned {type(returned).__name__}; return an optimizer, a list of them, a pair ([optimizers], "
        "[schedulers]), a dict with 'optimizer' and 'lr_scheduler', a list of such dicts, or None"
    )


def check_optimizers(optimizers: list[Optimizer], module: nn.Module) -> None:
    """Raises :class:`ConfigError` if an optimizer updates tensors that are not the module's parameters, or was returned twice."""
    mine = {id(parameter) for parameter in module.parameters()}
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise ConfigError("configure_optimizers returned the same optimizer twice; return each one once")
    for number, optimizer in enumerate(optimizers):
        foreign = [tuple(parameter.shape) for parameter in owned_parameters(optimizer) if id(parameter) not in mine]
        if foreign:
            raise ConfigError(
                f"optimizer {number} ({type(optimizer).__name__}) updates {len(foreign)} tensors that are not parameters of "
                f"{type(module).__name__} (the first has shape {foreign[0]}); build it from self.parameters() in "
                "configure_optimizers, after the layers have their final form"
            )


_EMBEDDINGS: Final = (nn.Embedding, nn.EmbeddingBag)


def name_parameters(optimizers: Iterable[OptimizerFace], module: nn.Module) -> None:
    """Tells fused optimizers the names of the module's parameters and the run's seed, from which their states' rounding follows."""
    for optimizer in optimizers:
        inner: Any = optimizer.optim if isinstance(optimizer, LARC) else optimizer
        if not isinstance(inner, FusedOptimizer) or inner.state_format == "fp32":
            continue
        inner.seed = global_seed()
        inner.names = WeakTensorKeyDictionary()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            plain = plain_name(name)
            inner.names[parameter] = min(plain, inner.names.get(parameter, plain))
        wide = [part for part in module.modules() if isinstance(part, _EMBEDDINGS) or "Norm" in type(part).__name__]
        inner.wide_names = frozenset(inner.names[one] for part in wide for one in part.parameters(recurse=False))


@contextlib.contextmanager
def sharing_weights(precision: Precision, optimizers: Iterable[OptimizerFace]) -> Iterator[None]:
    """Lets a strategy write rank 0's weights within, which all ranks have: for weights with remainders this is no edit."""
    alike = any(getattr(optimizer, "remainders", None) for optimizer in optimizers)
    if alike:
        precision.take_edits()  # refuses those of hooks before
    yield
    if alike:
        precision.note_restored_weights()


def check_optimization(
    optimizers: list[Optimizer], module: TrainingModule, settings: Settings, world_size: int
) -> None:
    """Raises :class:`ConfigError` if the optimizers do not work with automatic, or manual, optimization as it is set up."""
    if module.automatic_optimization and len(optimizers) > 1:
        raise OptimizationError(
            f"configure_optimizers returned {len(optimizers)} optimizers, but automatic optimization takes one; set "
            "self.automatic_optimization = False in __init__ and step each one in training_step"
        )
    if not module.automatic_optimization and settings.accumulates:
        raise ConfigError(
            "accumulate_grad_batches works with automatic optimization only; accumulate in training_step, or leave it out"
        )
    if not module.automatic_optimization and settings.clip is not None:
        raise ConfigError(
            "gradient_clip_val works with automatic optimization only; call self.clip_gradients(...) in training_step"
        )
    for optimizer in optimizers:
        if settings.clip is not None and settings.clip.algorithm == "value":
            refuse_values_of_complex(optimizer)
        if not demands_closure(optimizer):
            continue
        name = type(optimizer).__name__
        if settings.accumulates:
            raise ConfigError(
                f"{name} calls the forward itself, which cannot work with accumulate_grad_batches > 1; give 1"
            )
        if not module.automatic_optimization and world_size > 1:
            raise ConfigError(
                f"{name} calls the forward itself, which cannot work with several processes under manual optimization; "
                "use automatic optimization, or one process"
            )


def _is_optimizer(value: object) -> TypeGuard[OptimizerFace]:
    # Duck-typed: a wrapper of another library's may not be an Optimizer.
    return isinstance(value, Optimizer) or (hasattr(value, "step") and hasattr(value, "param_groups"))


def _optimizer(value: object) -> Optimizer:
    if not _is_optimizer(value):
        raise ConfigError(
            f"configure_optimizers returned a {type(value).__name__} where an optimizer was expected: {value!r}; "
            "return schedulers as the second list of a pair, or as 'lr_scheduler' in a dict"
        )
    return cast("Optimizer", value)  # torch's schedulers and annotations name the class


def _from_dicts(dicts: Iterable[dict[str, Any]]) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    optimizers = []
    schedulers = []
    for options in dicts:
        check_names("configure_optimizers returned a dict with key", options, OPTIMIZER_KEYS)
        if "optimizer" not in options:
            raise ConfigError(f"configure_optimizers returned a dict without 'optimizer'; it has {sorted(options)}")
        optimizers.append(_optimizer(options["optimizer"]))
        if options.get("lr_scheduler") is not None:
            schedulers.append(_scheduler(options["lr_scheduler"], monitor=options.get("monitor")))
    return optimizers, schedulers


def _check_scheduler(scheduler: object, *, own_step: bool) -> None:
    if scheduler is None or isinstance(scheduler, type):
        raise ConfigError(f"lr_scheduler has no usable 'scheduler', got {scheduler!r}; give an object with step()")
    if not own_step and not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"lr_scheduler has no usable 'scheduler', got {scheduler!r}; give an object with step(), or write "
            "lr_scheduler_step(self, scheduler, metric) in the module, which then is called for it"
        )


def _scheduler(value: object, monitor: str | None = None) -> SchedulerConfig:
    options: dict[str, Any] = dict(value) if isinstance(value, dict) else {"scheduler": value}
    check_names("lr_scheduler has key", options, SCHEDULER_KEYS)
    scheduler = options.setdefault("scheduler", None)
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    options.setdefault("monitor", monitor)
    options.setdefault("reduce_on_plateau", plateau)
    config = SchedulerConfig(**options)
    check_choice("lr_scheduler interval", config.interval, ("epoch", "step"))
    config.frequency = check_number("lr_scheduler frequency", config.frequency, least=1)
    return config
