"""Installs amp's methods on an optimizer, and removes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

from fabricamp.apex.amp._amp_state import _amp_state
from fabricamp.apex.amp._stash import AmpOptimizerState
from fabricamp.apex.amp.scaler import LossScaler
from fabricamp.optimizers import LARC


def process_optimizer(optimizer: Any) -> AmpOptimizerState:
    """Returns ``optimizer._amp_stash``; if there is none, creates it and installs amp's methods on the optimizer.

    They are bound methods, so that schedulers, which wrap ``step``, accept them, whether built before or after.
    ``optimizer.last_step_skipped`` says, until the next backward, whether an overflow made the last step have no effect: a bool, or
    a tensor if the device decided; only a read of this tensor waits.
    """
    stash: AmpOptimizerState | None = optimizer.__dict__.get("_amp_stash")
    if stash is not None:
        return stash
    stash = AmpOptimizerState(optimizer)
    stash.replaced = {name: optimizer.__dict__.get(name) for name in _METHODS}
    watched = hasattr(stash.own_step, "_wrapped_by_lr_sched")
    for name, function in _METHODS.items():
        bound = _step_after_scheduler if name == "step" and watched else function
        setattr(optimizer, name, MethodType(bound, optimizer))
    optimizer._amp_stash = stash
    optimizer.last_step_skipped = False
    if isinstance(optimizer, LARC):
        optimizer.optim._amp_stash = stash  # scripts pass either of the two to scale_loss
    _amp_state.optimizers.add(stash)
    return stash


def release(stash: AmpOptimizerState) -> None:
    """Restores the optimizer, with the model's parameters in its groups and the state of their masters."""
    optimizer = stash.optimizer
    for name, function in _METHODS.items():
        current = optimizer.__dict__.get(name)
        if getattr(current, "__func__", None) not in (function, _step_after_scheduler):
            continue  # a scheduler has wrapped the method, which works without amp too (see _step)
        if stash.replaced[name] is None:
            del optimizer.__dict__[name]
        else:
            setattr(optimizer, name, stash.replaced[name])
    for name in ("_amp_stash", "last_step_skipped"):
        optimizer.__dict__.pop(name, None)
    if isinstance(optimizer, LARC):
        optimizer.optim.__dict__.pop("_amp_stash", None)
    stash.binding.release()
    _amp_state.optimizers.discard(stash)


# Plain functions, not closures: a scheduler's wrapper around one outlives amp.


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    stash = self.__dict__.get("_amp_stash")
    if stash is None or stash.stepping:
        return type(self).step(self) if closure is None else type(self).step(self, closure)
    return stash.step(closure)


def _step_after_scheduler(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    return _step(self, closure)


_step_after_scheduler._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's mark that its wrapper is inside


def _zero_grad(self: Any, *args: Any, **options: Any) -> None:
    self._amp_stash.zero_grad(*args, **options)


def _add_group(self: Any, param_group: dict[str, Any]) -> None:
    self._amp_stash.add_param_group(param_group)


def _copy(self: Any, memo: dict[int, Any]) -> Any:
    own = self.__dict__.pop("__deepcopy__")
    try:
        result = copy.deepcopy(self, memo)
    finally:
        self.__dict__["__deepcopy__"] = own
    result._copied_masters = self._amp_stash.has_masters  # scale_loss refuses it
    return result


def _lazy_init(self: Any) -> None:
    self._amp_stash.lazy_init()


def _prepare(self: Any) -> None:
    self._amp_stash.prepare()


def _post(self: Any, scaler: LossScaler) -> None:
    stash = self._amp_stash
    work = stash.collect(set())
    scaler.look(work.incoming)
    stash.distribute(work, scaler.multiplier)


def _round(self: Any) -> None:
    self._amp_stash.round()


_METHODS: dict[str, Callable[..., Any]] = {
    "step": _step,
    "zero_grad": _zero_grad,
    "add_param_group": _add_group,
    "__deepcopy__": _copy,
    "_lazy_init_maybe_master_weights": _lazy_init,
    "_amp_lazy_init": _lazy_init,
    "_prepare_amp_backward": _prepare,
    "_post_amp_backward": _post,
    "_master_params_to_model_params": _round,
}
