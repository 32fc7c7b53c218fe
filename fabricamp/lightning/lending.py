"""Temporary attributes of Lightning's objects during a run, so that their own methods work: a Trainer proxy, and ``log``."""

from __future__ import annotations

from functools import partial
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.engine.run_context import RunContext, gathered
from fabricamp.errors import ConfigError
from fabricamp.hooks import call_hook
from fabricamp.lightning.bases import DATA, derives_from, lightnings_base
from fabricamp.lightning.given import adopted
from fabricamp.module import TrainingModule
from fabricamp.state import Scope

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fabricamp.callbacks import Callback
    from fabricamp.engine.source import GivenData
    from fabricamp.metrics import Metrics
    from fabricamp.trainer import Trainer

_METHODS = ("log", "log_dict", "print", "toggle_optimizer", "untoggle_optimizer")
"""Methods replaced by TrainingModule's, because Lightning's need attributes that fabricamp's Trainer does not have."""

_LOGS = ("log", "log_dict")
"""The module's methods attached to callbacks during a run, unless a callback has a method of this name."""

_HOOKS = {
    Scope.TRAIN_EPOCH: "on_train_epoch_end",
    Scope.EVAL_EPOCH: "on_validation_epoch_end",
    Scope.EVAL_STEP: "validation_step",
}


def attach(module: Any, source: GivenData, trainer: Trainer, metrics: Metrics | None, *, fits: bool) -> RunContext:
    """Attaches module, data and callbacks to a run; :func:`detach` removes the temporary attributes again."""
    if source.datamodule is not None:
        source.datamodule.trainer = trainer
    run_context = _context_of(module, trainer, metrics, fits=fits)
    for callback in trainer.callbacks:
        methods = {name: getattr(module, name) for name in _LOGS if not hasattr(callback, name)}
        vars(callback).update(methods)
        run_context.lent_methods += [(callback, name) for name in methods]
    return run_context


def callbacks_of(module: Any, trainer: Trainer) -> list[Callback]:
    """Returns the callbacks of ``configure_callbacks``, called with ``self.trainer`` set."""
    run_context = _context_of(module, trainer, None, fits=False)
    try:
        callbacks = call_hook(module, "configure_callbacks") or []
    finally:
        run_context.release()
    if not isinstance(callbacks, (list, tuple)):
        callbacks = [callbacks]
    return [adopted(callback) for callback in callbacks]


def _context_of(module: Any, trainer: Trainer, metrics: Metrics | None, *, fits: bool) -> RunContext:
    if lightnings_base(type(module)) is None:
        return module._attach(trainer, metrics, fits=fits)  # type: ignore[no-any-return]  # a TrainingModule's
    return LentRunContext(module, trainer, metrics)


def detach(run_context: RunContext, source: GivenData) -> None:
    """Removes the temporary attributes from Lightning's objects, however the run ended; fabricamp's modules stay attached."""
    while run_context.toggled:  # left by a step that raised
        run_context.toggled.pop().requires_grad_(True)
    run_context.release()
    if derives_from(source.datamodule, DATA):
        vars(source.datamodule)["trainer"] = None


class LentRunContext(RunContext):
    """A run context that gives temporary attributes to every LightningModule in the module, because inner ones may log too."""

    __slots__ = ("_modules",)

    def __init__(self, module: nn.Module, trainer: Trainer, metrics: Metrics | None) -> None:
        super().__init__()
        self.trainer = trainer
        self.metrics = metrics
        self._modules: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        """(LightningModule, its temporary attributes, its own values of these names)."""
        for submodule in module.modules():
            if lightnings_base(type(submodule)) is not None:
                lent = self._attributes_for(submodule) | {"_trainer": _trainer_face(trainer, submodule, self)}
                before = {name: vars(submodule)[name] for name in lent if name in vars(submodule)}
                self._modules.append((submodule, lent, before))
                # Bypasses nn.Module.__setattr__: these are neither parameters nor submodules.
                vars(submodule).update(lent)

    def _attributes_for(self, module: Any) -> dict[str, Any]:
        """Returns the attributes to attach; a method only if neither the object nor its class overrides it."""
        base = lightnings_base(type(module))
        lent: dict[str, Any] = {
            name: MethodType(getattr(TrainingModule, name), module)
            for name in _METHODS
            if name not in vars(module) and getattr(type(module), name) is getattr(base, name, None)
        }
        lent |= {"_attachment": self, "_call_batch_hook": partial(_call_hook, module)}
        lent["__getstate__"] = partial(_state_without, module, frozenset([*lent, "__getstate__"]))
        return lent

    def show_dtypes(self) -> None:
        """Updates the dtype that LightningModules store: the precision converts parameters without calling ``to``."""
        for module, *_ in self._modules:
            if any(parameter.is_floating_point() for parameter in module.parameters()):
                vars(module)["_dtype"] = TrainingModule.dtype.fget(module)  # type: ignore[attr-defined]  # a property's

    def release(self) -> None:
        """Removes the temporary attributes; a second call has no effect."""
        super().release()
        self.show_dtypes()
        for module, lent, before in self._modules:
            for name, value in lent.items():
                if vars(module).get(name) is value:
                    del vars(module)[name]
            vars(module).update(before, _current_fx_name=None)
        self._modules = []


def _call_hook(module: Any, name: str, *args: Any) -> Any:
    return getattr(module, name)(*args)


def _state_without(module: Any, lent: frozenset[str]) -> Any:
    """Returns the state for a copy or pickle of the module, without the temporary attributes."""
    kind: Any = type(module)
    state = kind.__getstate__(module)
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if name not in lent} | {"_trainer": None}


class _Face:
    """A proxy of a fabricamp object, with attributes added or replaced for LightningModule's own methods."""

    def __init__(self, ours: object, **beside: Any) -> None:
        vars(self).update(_ours=ours, **beside)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_ours"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_ours"], name, value)

    def __repr__(self) -> str:
        return repr(vars(self)["_ours"])


class _TrainerFace(_Face):
    @property
    def _results(self) -> Any:
        """The object that ``super().log`` calls in a module that overrides ``log``; sets the hook's name, which it reads next."""
        module = vars(self)["_module"]
        trainer = vars(self)["_ours"]
        vars(module)["_current_fx_name"] = _HOOKS.get(trainer.state.user_call.scope, "training_step")
        return SimpleNamespace(log=partial(_log, module))

    @property
    def gradient_clip_algorithm(self) -> Any:
        """The Trainer's clipping algorithm; None without clipping by the Trainer, as in Lightning."""
        trainer = vars(self)["_ours"]
        return trainer.gradient_clip_algorithm if trainer.gradient_clip_val else None


class _StrategyFace(_Face):
    @property
    def _lightning_optimizers(self) -> Any:
        """The optimizers for ``self.optimizers()``; a single one is not in a list, because that method checks its class."""
        optimizers = vars(self)["_attachment"].optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)


def _trainer_face(trainer: Trainer, module: Any, run_context: RunContext) -> _Face:
    strategy = _StrategyFace(
        trainer.strategy,
        _attachment=run_context,
        backward=partial(_backward, module),
        all_gather=partial(_all_gather, trainer),
    )
    return _TrainerFace(
        trainer,
        _module=module,
        _logger_connector=SimpleNamespace(should_reset_tensors=lambda _: False),
        barebones=False,
        precision_plugin=_Face(trainer.precision_plugin, clip_gradients=partial(_clip, module)),
        strategy=strategy,
    )


def _log(module: Any, _: str, name: str, value: Any, **options: Any) -> None:
    """Logs the value that Lightning's ``log`` passes on; the hook's name comes first and is ignored."""
    options.pop("sync_dist_fn", None)
    TrainingModule.log(module, name, value, **options)


def _backward(module: Any, loss: Tensor, _: Any, *args: Any, **kwargs: Any) -> None:
    TrainingModule.manual_backward(module, loss, *args, **kwargs)


def _clip(module: Any, optimizer: Any, value: float = 0.0, algorithm: Any = "norm") -> None:
    TrainingModule.clip_gradients(module, optimizer, value, str(getattr(algorithm, "value", algorithm)))


def _all_gather(trainer: Trainer, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
    """Returns the tensors of all ranks, stacked; with one process the tensor as it is, as in Lightning."""
    if trainer.world_size == 1:
        return tensor
    if sync_grads or group not in (None, torch.distributed.group.WORLD):
        raise ConfigError(
            f"all_gather(group={group!r}, sync_grads={sync_grads}) is not possible: values come from all ranks and have no "
            "gradients; torch.distributed.nn.functional.all_gather has both"
        )
    return gathered(trainer, tensor)
