"""Converts models and optimizers for ``amp.initialize``, and undoes the conversion.

In order: :func:`begin` and its steps, :func:`release_all`, which undoes them, and the :class:`Conversion` of one model.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.hooks import RemovableHandle

from fabricamp.apex._full_values import ScriptMasters
from fabricamp.apex.amp._amp_state import AmpError, _amp_state, warn_or_err
from fabricamp.apex.amp._boundary import CachingBoundary, OpenBoundary, forget_calls
from fabricamp.apex.amp._process_optimizer import process_optimizer, release
from fabricamp.apex.amp.handle import AmpHandle, NoOpHandle
from fabricamp.apex.amp.scaler import LossScaler
from fabricamp.errors import ConfigError
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.closures import demands_closure
from fabricamp.optimizers.refusals import refuse_masters_of_scripts
from fabricamp.precision.casting import bounded, check_autocast, check_full_weights, convert, own_tensors
from fabricamp.precision.opt_levels import Level


class AmpTypeError(ConfigError, TypeError):
    """An argument of amp has the wrong type."""


def as_list(value: Any, kind: str) -> list[Any]:
    """Returns the models or optimizers of ``initialize`` as a list; raises AmpTypeError with apex's message."""
    if value is None:
        return []
    if kind == "model":
        if isinstance(value, nn.Module):
            return [value]
        if isinstance(value, list) and all(isinstance(model, nn.Module) for model in value):
            return value
        raise AmpTypeError("models must be either a single model or a list of models.")
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if all(hasattr(value, "param_groups") and callable(getattr(value, "step", None)) for value in values):
        return values
    raise AmpTypeError("optimizers must be either a single optimizer or a list of optimizers.")


def begin(models: list[nn.Module], optimizers: list[Any], level: Level, *, patches: bool, allow_banned: bool) -> None:
    """Checks everything, then converts the models, gives the optimizers their masters and turns casts on."""
    if not torch.backends.cudnn.enabled:
        raise AmpError("Amp requires torch.backends.cudnn.enabled = True")
    optimizers = list({id(optimizer): optimizer for optimizer in optimizers}.values())
    # torch.compile returns a wrapper of the module, and cannot trace hooks on both; so the module inside gets them.
    models = [getattr(model, "_orig_mod", model) for model in models]
    _check_optimizers(optimizers, level)
    _release_known(models, optimizers)
    _check_models(models)
    device = _device_of(models, optimizers)
    if patches and level.autocast is not None:
        for model in models:
            if not (_amp_state.allow_incoming_model_not_fp32 or _amp_state.hard_override):
                check_full_weights(model, level.name)
            check_autocast(model, level.autocast, level.name, device.type)
    stop_casts()
    _amp_state.loss_scalers = [_scaler_of(level, device) for _ in range(level.num_losses)]
    _amp_state.models.update(models)
    for model in {id(model): model for model in models}.values():
        if level.cast_model_type is not None or level.autocast is not None or level.cast_model_outputs is not None:
            _amp_state.conversions[model] = Conversion(model, level)
    for optimizer in optimizers:
        process_optimizer(optimizer)
        _match_state(optimizer)
    _amp_state.handle = NoOpHandle()
    if patches and level.autocast is not None:
        _amp_state.handle = AmpHandle(level.loss_scale, True, _amp_state.verbosity == 2)
        _amp_state.handle.start(device.type, level.autocast, allow_banned=allow_banned)


def _check_optimizers(optimizers: Sequence[Any], level: Level) -> None:
    for optimizer in optimizers:
        if type(optimizer).__name__ == "FP16_Optimizer":
            raise AmpError(
                f"An incoming optimizer is an instance of {type(optimizer).__module__}.FP16_Optimizer, which has its own "
                "masters and loss scale; give amp.initialize the optimizer that it wraps, or leave amp out"
            )
        refuse_masters_of_scripts(optimizer, "amp")
        if demands_closure(optimizer) and level.dynamic:
            raise AmpError(
                f"{type(optimizer).__name__}.step runs backward itself and cannot be skipped when gradients overflow; "
                "pass a number as loss_scale to amp.initialize"
            )


def _release_known(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    """Undoes an earlier ``initialize`` of the same models and optimizers, so that another one starts from fp32."""
    model_ids = set(map(id, models))
    known = [model for model in _amp_state.conversions if id(model) in model_ids]
    optimizer_ids = set(map(id, optimizers))
    released = []
    for stash in list(_amp_state.optimizers):
        own = set(map(id, stash.binding.model_params))
        if id(stash.optimizer) in optimizer_ids:
            _check_models_given(stash, model_ids)
        elif not any(_amp_state.conversions[model].holds(own) for model in known):
            continue  # stays as it is; the released optimizers hold masters of models that are about to be restored
        release(stash)
        released.append(stash.optimizer)
    for model in known:
        _amp_state.conversions.pop(model).release()
    for optimizer in released:
        _match_state(optimizer)


def _check_models_given(stash: Any, model_ids: set[int]) -> None:
    """Raises AmpError for an optimizer passed again without the model that has the masters it updates."""
    half_weights = {id(half) for half, _ in stash.binding.master_pairs}
    for model, conversion in list(_amp_state.conversions.items()):
        if id(model) not in model_ids and half_weights and conversion.holds(half_weights):
            raise AmpError(
                "A given optimizer should only be passed through amp.initialize once. This one updates the masters of a "
                f"{type(model).__name__} that was converted with it; pass both again, or call amp.shutdown() before"
            )


def _check_models(models: Sequence[nn.Module]) -> None:
    for model in models:
        if isinstance(model, (TorchDDP, DataParallel)) or type(model).__name__ == "DistributedDataParallel":
            raise AmpError(
                f"Incoming model is an instance of {type(model).__module__}.{type(model).__name__}. Parallel wrappers should "
                "only be applied to the model(s) AFTER amp.initialize; move that line below it"
            )
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dtype is torch.float16 and not _amp_state.allow_incoming_model_not_fp32:
                warn_or_err(
                    f"Found param/buffer {name} with type {tensor.type()}, expected torch.cuda.FloatTensor. amp.initialize "
                    "converts the model itself: give it the fp32 model, without .half()"
                )


def _device_of(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> torch.device:
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                device: torch.device = parameter.device
                return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def stop_casts() -> None:
    """Turns off the casts of an earlier O1."""
    forget_calls()
    handle = _amp_state.__dict__.pop("handle", None)
    if handle is not None:
        handle._deactivate()


def _scaler_of(level: Level, device: torch.device) -> LossScaler:
    scaler = LossScaler(
        level.loss_scale, min_loss_scale=_amp_state.min_loss_scale, max_loss_scale=_amp_state.max_loss_scale
    )
    scaler.place(device)
    return scaler


def _match_state(optimizer: Any) -> None:
    """Casts the state of a torch optimizer to the dtype of its weights, if that has changed; fused optimizers keep fp32 state."""
    if isinstance(getattr(optimizer, "optim", optimizer), FusedOptimizer):
        return
    differs = any(
        isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
        and value.dtype != parameter.dtype
        and (value.dtype in HALF_DTYPES or parameter.dtype in HALF_DTYPES)
        for parameter, state in getattr(optimizer, "state", {}).items()
        if isinstance(parameter, torch.Tensor) and isinstance(state, dict)
        for value in state.values()
    )
    if differs:
        optimizer.load_state_dict(optimizer.state_dict())


def release_all() -> None:
    """Restores every model and optimizer, and torch's functions."""
    stop_casts()
    stashes = list(_amp_state.optimizers)
    for stash in stashes:
        release(stash)
    for model in list(_amp_state.conversions):
        _amp_state.conversions.pop(model).release()
    for stash in stashes:
        _match_state(stash.optimizer)
    _amp_state.forget()


class Conversion:
    """A model that was made half or got a boundary, with its full values and its hooks."""

    def __init__(self, model: nn.Module, level: Level) -> None:
        self.level = level
        self.has_masters = level.master_weights
        self.full = ScriptMasters()
        self._handles: list[RemovableHandle] = []
        self._model = weakref.ref(model)
        self._device = _device_of([model], [])
        self.wrapper_group: Any = None
        self.wrapper: weakref.ref[TorchDDP] | None = None
        self._wrapper_hook: RemovableHandle | None = None
        dtype = level.cast_model_type
        outputs = level.cast_model_outputs or torch.float32
        if dtype is None:
            _attach(self._handles, model, CachingBoundary(level.cast_model_outputs))
        elif dtype is torch.float32:
            # Only allow_incoming_model_not_fp32 allows a model with half weights here.
            if any(tensor.dtype in HALF_DTYPES for module in model.modules() for tensor in own_tensors(module)):
                model.float()
            _attach(self._handles, model, OpenBoundary(dtype, outputs, object()))
        else:
            keep = level.keep_batchnorm_fp32
            converted = convert(model, dtype, self.full, keep_batchnorm_fp32=keep)
            # Boundaries are plain data and are copied with the model; full values are not.
            root = object()
            for module in bounded(model, converted, keep_batchnorm_fp32=keep):
                self._handles += OpenBoundary(dtype, outputs, root).attach(module)
            if self.has_masters:  # for BatchNorms that were half before
                adopted = []
                for module in model.modules():
                    masters_made = [self.adopt_half(tensor) for tensor in own_tensors(module)]
                    if any(masters_made):
                        adopted.append(module)
                self.full.watch_loading(adopted)
            self.full.watch_saving(model.modules(), exact=self.has_masters)
        if self.has_masters or (dist.is_available() and dist.is_initialized()):
            self._wrapper_hook = model.register_forward_pre_hook(_WrapperNotice(self))
            self._handles.append(self._wrapper_hook)

    def holds(self, ids: set[int]) -> bool:
        """Returns whether this model has one of the parameters (ids)."""
        model = self._model()
        return model is not None and any(id(parameter) in ids for parameter in model.parameters())

    def refresh_edited(self) -> None:
        """Refreshes the masters of half weights that the script, or torch's DistributedDataParallel, has written into.

        With that wrapper all ranks refresh together if any rank has to: the wrapper's constructor broadcast rank 0's half weights,
        and rank 0 itself sees no change.
        """
        edited = self.full.edited()
        if self.wrapper_group is None:
            self.full.refresh(edited)
            return
        flag = torch.tensor([float(bool(edited) or self.full.has_taken)], dtype=torch.float32, device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, self.wrapper_group)
        if flag.item():
            self.full.refresh()

    def stop_looking_for_wrapper(self) -> None:
        """Removes the hook that looks for a wrapper; called after the first backward, when a wrapper would have been found."""
        if self._wrapper_hook is not None:
            self._wrapper_hook.remove()

    def adopt_half(self, tensor: Tensor) -> bool:
        """Makes a master for ``tensor`` if it is a half parameter of no converted model; returns whether it made one."""
        known = tensor in self.full or any(tensor in other.full for other in _amp_state.conversions.values())
        if known or tensor.dtype not in HALF_DTYPES or not isinstance(tensor, nn.Parameter):
            return False
        self.full.convert([tensor], tensor.dtype)
        return True

    def release(self) -> None:
        """Restores the model: puts the full values back, and removes the hooks."""
        self.full.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _WrapperNotice:
    """A hook that gives a conversion torch's wrapper around its model, and the process group; a copy of the hook does nothing."""

    def __init__(self, conversion: Conversion | None) -> None:
        self._conversion = conversion

    def __reduce__(self) -> tuple[Any, ...]:
        return _WrapperNotice, (None,)

    def __call__(self, module: nn.Module, args: Any) -> None:
        conversion = self._conversion
        if conversion is not None and conversion.wrapper is None:
            wrapper = TorchDDP._active_ddp_module  # set while its forward runs
            if wrapper is not None:
                conversion.wrapper = weakref.ref(wrapper)
                conversion.wrapper_group = wrapper.process_group


def _attach(handles: list[RemovableHandle], model: nn.Module, boundary: OpenBoundary | CachingBoundary) -> None:
    if not isinstance(model, torch.jit.ScriptModule):  # a ScriptModule takes no hooks
        handles += boundary.attach(model)
