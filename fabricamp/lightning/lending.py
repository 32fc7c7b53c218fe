"""What an object of Lightning's is lent for a run, so that its own methods work: a face of the Trainer, and ``log``."""

from __future__ import annotations

from functools import partial
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.engine.attachment import Attachment
from fabricamp.engine.gathering import gathered
from fabricamp.errors import ConfigError
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
"""Ours in the place of Lightning's: what these need is not what a Trainer of ours has."""

_LOGS = ("log", "log_dict")
"""The module's methods that callbacks have in a run, where they have none of these names themselves."""

_HOOKS = {
    Scope.TRAIN_EPOCH: "on_train_epoch_end",
    Scope.EVAL_EPOCH: "on_validation_epoch_end",
    Scope.EVAL_STEP: "validation_step",
}


def attach(module: Any, source: GivenData, trainer: Trainer, metrics: Metrics | None, *, fits: bool) -> Attachment:
    """Ties module, data and callbacks to a run; what Lightning's objects and callbacks are lent goes back by :func:`detach`."""
    if source.datamodule is not None:
        source.datamodule.trainer = trainer
    attachment = _tied(module, trainer, metrics, fits=fits)
    for one in trainer.callbacks:
        lent = {name: getattr(module, name) for name in _LOGS if not hasattr(one, name)}
        vars(one).update(lent)
        attachment.lent += [(one, name) for name in lent]
    return attachment


def callbacks_of(module: Any, trainer: Trainer) -> list[Callback]:
    """Returns what ``configure_callbacks`` does, in which ``self.trainer`` is the Trainer already."""
    attachment = _tied(module, trainer, None, fits=False)
    try:
        found = module.configure_callbacks()
    finally:
        attachment.release()
    return [adopted(one) for one in (found if isinstance(found, (list, tuple)) else [found])]


def _tied(module: Any, trainer: Trainer, metrics: Metrics | None, *, fits: bool) -> Attachment:
    if lightnings_base(type(module)) is None:
        return module.attach(trainer, metrics, fits=fits)  # type: ignore[no-any-return]  # a TrainingModule's
    return Loan(module, trainer, metrics)


def detach(attachment: Attachment, source: GivenData) -> None:
    """Takes back what Lightning's objects were lent, however the run ended; modules of ours stay attached."""
    while attachment.toggled:  # by a step that raised
        attachment.toggled.pop().requires_grad_(True)
    attachment.release()
    if derives_from(source.datamodule, DATA):
        vars(source.datamodule)["trainer"] = None


class Loan(Attachment):
    """An attachment that knows what was lent, and to which modules: LightningModules within the module log, too."""

    __slots__ = ("_borrowers",)

    def __init__(self, module: nn.Module, trainer: Trainer, metrics: Metrics | None) -> None:
        super().__init__()
        self.trainer, self.metrics = trainer, metrics
        self._borrowers: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        for one in module.modules():
            if lightnings_base(type(one)) is not None:
                lent = self._lent(one) | {"_trainer": _trainer_face(trainer, one, self)}
                self._borrowers.append((one, lent, {name: vars(one)[name] for name in lent if name in vars(one)}))
                # Past nn.Module's own __setattr__: these are neither parameters nor submodules.
                vars(one).update(lent)

    def _lent(self, module: Any) -> dict[str, Any]:
        """Attributes of the object, where neither it nor its class has its own; the class stays as it is."""
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
        """Lightning's modules keep a dtype apart from their parameters, which we convert past ``to``."""
        for one, *_ in self._borrowers:
            if any(parameter.is_floating_point() for parameter in one.parameters()):
                vars(one)["_dtype"] = TrainingModule.dtype.fget(one)  # type: ignore[attr-defined]  # a property's

    def release(self) -> None:
        """Takes back what was lent; a second time changes nothing."""
        super().release()
        self.show_dtypes()
        for one, lent, before in self._borrowers:
            for name, value in lent.items():
                if vars(one).get(name) is value:
                    del vars(one)[name]
            vars(one).update(before, _current_fx_name=None)
        self._borrowers = []


def _call_hook(module: Any, name: str, *args: Any) -> Any:
    return getattr(module, name)(*args)


def _state_without(module: Any, lent: frozenset[str]) -> Any:
    """What a copy or a pickle of the module gets: all but what was lent."""
    kind: Any = type(module)
    state = kind.__getstate__(module)
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if name not in lent} | {"_trainer": None}


class _Face:
    """A part of ours, beside which, or in the place of which, there is what LightningModule's own methods reach for."""

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
        """Where ``super().log`` of a module that overrides ``log`` arrives; it asks for the hook's name next."""
        module, trainer = vars(self)["_module"], vars(self)["_ours"]
        vars(module)["_current_fx_name"] = _HOOKS.get(trainer.state.scope, "training_step")
        return SimpleNamespace(log=partial(_log, module))

    @property
    def gradient_clip_algorithm(self) -> Any:
        """None without clipping by the Trainer, as there."""
        trainer = vars(self)["_ours"]
        return trainer.gradient_clip_algorithm if trainer.gradient_clip_val else None


class _StrategyFace(_Face):
    @property
    def _lightning_optimizers(self) -> Any:
        """What ``self.optimizers()`` returns: it knows a single one by its class alone."""
        optimizers = vars(self)["_attachment"].optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)


def _trainer_face(trainer: Trainer, module: Any, attachment: Attachment) -> _Face:
    strategy = _StrategyFace(
        trainer.strategy,
        _attachment=attachment,
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
    """Keeps what Lightning's ``log`` hands over, behind the hook's name."""
    TrainingModule.log(module, name, value, **{key: one for key, one in options.items() if key != "sync_dist_fn"})


def _backward(module: Any, loss: Tensor, _: Any, *args: Any, **kwargs: Any) -> None:
    TrainingModule.manual_backward(module, loss, *args, **kwargs)


def _clip(module: Any, optimizer: Any, value: float = 0.0, algorithm: Any = "norm") -> None:
    TrainingModule.clip_gradients(module, optimizer, value, str(getattr(algorithm, "value", algorithm)))


def _all_gather(trainer: Trainer, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
    """Lightning's: in one process the tensor as it is."""
    if trainer.world_size == 1:
        return tensor
    if sync_grads or group not in (None, torch.distributed.group.WORLD):
        raise ConfigError(
            f"all_gather(group={group!r}, sync_grads={sync_grads}) is not possible: values come from all ranks and have no "
            "gradients; torch.distributed.nn.functional.all_gather has both"
        )
    return gathered(trainer, tensor)
