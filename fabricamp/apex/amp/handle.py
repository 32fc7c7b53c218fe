"""``scale_loss``, ``disable_casts`` and the handle of O1's casts."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.apex.amp._amp_state import AmpError, _amp_state, is_rank_zero, maybe_print
from fabricamp.apex.amp._process_optimizer import process_optimizer
from fabricamp.apex.amp._stash import AmpOptimizerState, give_masters
from fabricamp.errors import ConfigError, NonFiniteError
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.precision.autocast import Autocast, without_autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from fabricamp.apex.amp.opt import OptimWrapper
    from fabricamp.apex.amp.scaler import LossScaler


logger = logging.getLogger("fabricamp")

_MOST_NAMES = 5


class LossIdError(ConfigError, IndexError):
    """There is no scaler for this ``loss_id``."""


def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[Tensor]:
    """Returns a context that yields the scaled loss for backward; its exit unscales the gradients of ``optimizers``, in fp32.

    ``delay_unscale``: the gradients stay scaled, and a later call unscales them.  ``delay_overflow_check``: gradients are not
    checked for inf and nan, and the scale stays.  A step after an overflow has no effect.  If all optimizers can skip a step on the
    device, the host reads nothing, and reports an overflow two passes later.
    """
    if "opt_properties" not in _amp_state.__dict__:
        raise AmpError(
            "Invoked 'with amp.scale_loss', but internal Amp state has not been initialized. Call "
            "`model, optimizer = amp.initialize(model, optimizer, opt_level=...)` before it"
        )
    if not _amp_state.opt_properties.enabled:
        return contextlib.nullcontext(loss)
    return backward_pass(
        _stashes_of(optimizers),
        _scaler_of(loss_id),
        loss,
        loss_id,
        unscales=not delay_unscale,
        checks=not delay_overflow_check,
    )


@contextlib.contextmanager
def backward_pass(
    stashes: Sequence[AmpOptimizerState],
    scaler: LossScaler,
    loss: Tensor,
    loss_id: int,
    *,
    unscales: bool = True,
    checks: bool = True,
) -> Iterator[Tensor]:
    """Yields the scaled loss with casts off, as backward runs in the dtypes of the forward; then unscales the gradients."""
    handle = _amp_state.handle
    wide = loss.float() if loss.dtype in HALF_DTYPES else loss
    if loss.is_cuda and scaler.device.type == "cpu" and (handle.is_active() or not scaler.is_one):
        raise AmpError(
            "the model was on the CPU in amp.initialize, and its loss is on a GPU; call model.cuda() before amp.initialize"
        )
    plain = scaler.is_one and not any(stash.has_masters for stash in stashes)
    if not plain:
        _prepare(stashes, scaler)
    try:
        with handle.casts_off():
            yield wide if plain else scaler.scaled(wide)
    except BaseException:
        for stash in stashes:
            stash.restore()
        raise
    finally:
        handle._clear_cache()
    for stash in stashes:
        stash.note_backward(scaled=not (plain or unscales))
    if plain or not unscales:
        return
    # Before the exchange each rank would check only its own gradients, and the ranks' scales would diverge.  So the check waits for
    # the exchange, which carries inf and nan to all ranks.
    local = any(map(AmpOptimizerState.is_local, stashes))
    _unscale(stashes, scaler, loss, loss_id, checks=checks and not local)
    if local:
        for stash in stashes:
            stash.check_later = functools.partial(_check_without_exchange, stash, scaler, loss.detach(), loss_id)


def _prepare(stashes: Sequence[AmpOptimizerState], scaler: LossScaler) -> None:
    """Sets gradients of earlier passes aside; gradients that have not been exchanged go into this pass's exchange instead."""
    for stash in stashes:
        if not stash.params_have_scaled_gradients:
            stash.prepare()
            if stash.check_later is not None and not stash.is_local():
                stash.resend(scaler.factor)


def _check_without_exchange(stash: AmpOptimizerState, scaler: LossScaler, loss: Tensor, loss_id: int) -> None:
    """Checks the gradients of a step without an exchange; each rank checks its own."""
    if not scaler.dynamic:
        return
    stash.prepare()
    stash.resend(scaler.factor)
    _unscale([stash], scaler, loss, loss_id, checks=True)


def _stashes_of(optimizers: Any) -> list[AmpOptimizerState]:
    """Returns amp's state of each optimizer, without duplicates; adds optimizers that ``initialize`` has not seen."""
    stashes = []
    for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError("optimizers must be either a single optimizer or a list of optimizers.")
        if "_amp_stash" not in optimizer.__dict__:
            _adopt(optimizer)
        stashes.append(process_optimizer(optimizer))
    return list(dict.fromkeys(stashes))


def _adopt(optimizer: Any) -> None:
    """Warns about an optimizer that ``initialize`` has not seen; gives its half weights (of a model's copy) masters too."""
    kind = type(optimizer).__name__
    if optimizer.__dict__.get("_copied_masters", False):
        raise AmpError(
            f"this {kind} is a copy.deepcopy of an optimizer of a half model's fp32 masters, and no model is updated from the "
            "copied masters. Build both again, pass them to amp.initialize, then load the original's state_dict() into each"
        )
    if is_rank_zero():
        logger.warning(
            "this %s was built after amp.initialize, or never passed to it; it is used as if it had been. Build "
            "it before `model, optimizer = amp.initialize(model, optimizer)`",
            kind,
        )
    if _amp_state.opt_properties.master_weights:
        give_masters(optimizer.param_groups)


def _scaler_of(loss_id: int) -> LossScaler:
    scalers = _amp_state.loss_scalers
    if not 0 <= loss_id < len(scalers):
        raise LossIdError(
            f"loss_id={loss_id} with num_losses={len(scalers)}; pass num_losses={loss_id + 1} to amp.initialize"
        )
    return scalers[loss_id]


def _unscale(
    stashes: Sequence[AmpOptimizerState], scaler: LossScaler, loss: Tensor, loss_id: int, *, checks: bool
) -> None:
    scaler.clear_overflow_state()
    seen: set[int] = set()
    works = [stash.collect(seen) for stash in stashes]
    scaler.look([gradient for work in works for gradient in work.incoming])
    for stash, work in zip(stashes, works, strict=True):
        stash.distribute(work, scaler.multiplier)
    if not checks:
        return
    waits = scaler.dynamic and not all(map(AmpOptimizerState.may_skip_on_device, stashes))
    whole = loss.detach() if loss.numel() == 1 else loss.detach().mean()  # a script may reduce it inside the context
    overflowed, hopeless = scaler.end_pass(whole, waits=waits, loss_id=loss_id)
    if hopeless:
        raise NonFiniteError(_why_hopeless(stashes, scaler))
    if scaler.dynamic and not waits:
        for stash in stashes:
            stash.flag(scaler.moving.state.found_inf)
    elif overflowed:
        for stash in stashes:
            stash.skips = True


def _why_hopeless(stashes: Sequence[AmpOptimizerState], scaler: LossScaler) -> str:
    names = {id(parameter): name for model in _amp_state.models for name, parameter in model.named_parameters()}
    bad = []
    for stash in stashes:
        for parameter, updated in stash.pairs():
            if updated.grad is not None and not bool(torch.isfinite(updated.grad.sum())):
                bad.append(names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}"))
    shown = ", ".join(bad[:_MOST_NAMES]) + (", ..." if len(bad) > _MOST_NAMES else "")
    return (
        f"gradients keep overflowing, and the loss scale is down to {scaler.loss_scale():g}: the gradients of "
        f"{shown or 'some parameters'} are not finite at any scale. Look at the loss and the learning rate, or try "
        "opt_level='O0'"
    )


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Returns a context in which O1 casts nothing; it has no effect at other levels or without amp."""
    handle = _amp_state.__dict__.get("handle")
    if handle is None:
        yield
        return
    with handle._disable_casts():
        yield


class AmpHandle:
    """O1's casts; they are on in this thread from :meth:`start` to :meth:`_deactivate`.

    ``has_cache``: autocast keeps the half weights of a forward until the forward ends.
    """

    def __init__(self, loss_scale: float | str = "dynamic", enable_caching: bool = True, verbose: bool = False) -> None:
        self._loss_scale = loss_scale
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._replaced: list[tuple[Any, str, Any, bool]] = []
        self._casts: Autocast | None = None
        self._off: Autocast | None = None
        self._device_type = "cpu"
        self._caching = True

    def start(self, device_type: str, dtype: torch.dtype, *, allow_banned: bool = False) -> None:
        """Turns casts on, including those of functions that scripts have registered."""
        from fabricamp.apex.amp.amp import apply_lists

        self._device_type = device_type
        apply_lists(self, device_type, allow_banned=allow_banned)
        self._casts = Autocast(device_type, dtype)
        self._casts.__enter__()
        self._off = without_autocast(device_type)
        self._caching = torch.is_autocast_cache_enabled()
        # A cache across calls of the model would hold outdated weights after a step: CachingBoundary turns it on for one call.
        torch.set_autocast_cache_enabled(False)
        if self._verbose:
            from fabricamp.apex.amp.lists import describe

            maybe_print(describe(), rank0=True)

    def is_active(self) -> bool:
        """Returns whether functions called in this thread are cast at present."""
        return self._casts is not None and torch.is_autocast_enabled(self._device_type)

    def casts_off(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which nothing is cast."""
        return contextlib.nullcontext() if self._off is None else self._off

    _disable_casts = casts_off

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Returns the optimizer wrapper of apex's old interface, with ``num_loss`` separate scales."""
        from fabricamp.apex.amp.opt import OptimWrapper

        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> Any:
        """Raises AmpError: this method of apex's old interface is not supported."""
        raise AmpError(
            "The old Amp API is no longer supported. Call amp.initialize and `with amp.scale_loss(loss, optimizer) as scaled_loss`"
        )

    @property
    def has_cache(self) -> bool:
        """Whether half weights are kept within a forward."""
        return self._enable_caching

    @property
    def cache(self) -> dict[Any, Any]:
        """An empty dict: autocast's cache of half weights cannot be read."""
        return {}

    @property
    def verbose(self) -> bool:
        """Whether the lists of cast functions were printed."""
        return self._verbose

    def remove_cache(self, param: Tensor) -> None:
        """Clears autocast's whole cache, including the half copy of ``param``."""
        self._clear_cache()

    def _clear_cache(self) -> None:
        if self._casts is not None:
            torch.clear_autocast_cache()

    def _save_func(self, mod: Any, fn: str, func: Callable[..., Any]) -> None:
        """Records the original ``mod.fn``, for :meth:`_deactivate`."""
        self._replaced.append((mod, fn, func, fn in vars(mod)))

    def _deactivate(self) -> None:
        """Turns casts off, and restores every replaced function."""
        while self._replaced:
            module, name, function, was_its_own = self._replaced.pop()
            if was_its_own:
                setattr(module, name, function)
            else:  # it was inherited from a base class
                delattr(module, name)
        if self._casts is None:
            return
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(self._caching)
        self._casts.__exit__(None, None, None)
        self._casts = None
        self._off = None


class NoOpHandle(AmpHandle):
    """The handle of levels without casts; it is never started."""

    def __init__(self) -> None:
        super().__init__(enable_caching=False)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Yields the unscaled loss."""
        yield loss
