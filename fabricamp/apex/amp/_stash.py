"""amp's state of an optimizer: fp32 masters in its groups, unscaled gradients for them, and steps that may be skipped."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.apex.amp._amp_state import AmpError, _amp_state, is_rank_zero
from fabricamp.apex.amp._parameter_lists import ParameterLists
from fabricamp.apex.amp.scaler import add, by_device, multiply
from fabricamp.apex.parallel.distributed import wrappers_of
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.master_weights import MasterWeights, round_to
from fabricamp.precision.nonfinite_tracker import NonFiniteTracker
from fabricamp.precision.stepper import Gradient, ParamGradMap, create_grad, leave_fused, may_skip, run_unless_overflow

logger = logging.getLogger("fabricamp")


class _LiveMasters(MasterWeights):
    """The masters of all models that amp has converted and that still exist."""

    def __contains__(self, tensor: Tensor) -> bool:
        return self._of(tensor) is not None

    def master_of(self, parameter: Tensor) -> Tensor:
        """Returns the fp32 master of ``parameter``, or ``parameter`` itself if it has none."""
        masters = self._of(parameter)
        return parameter if masters is None else masters.master_of(parameter)

    @staticmethod
    def _of(tensor: Tensor) -> MasterWeights | None:
        kept = (one.full for one in _amp_state.conversions.values() if one.has_masters)
        return next((masters for masters in kept if tensor in masters), None)


class _Unscaling(NamedTuple):
    """The gradients of a backward pass, and the operations that unscale them into the gradients of the updated tensors."""

    incoming: list[Tensor]
    fresh: list[tuple[Tensor, Tensor]]
    """(source, destination) of gradients without earlier ones."""
    added: list[tuple[Tensor, Tensor, Tensor]]
    """(source, gradient of earlier passes, destination of the sum)."""
    sparse: list[tuple[Tensor, Tensor, Tensor]]
    """(target, its new gradient, its gradient of earlier passes), if one of them is sparse."""

    def in_reals(self) -> _Unscaling:
        """Returns the same work with complex gradients viewed as real ones, twice as many numbers."""
        if not any(one.is_complex() for one in self.incoming):
            return self
        return _Unscaling(
            [_reals(one) for one in self.incoming],
            [(_reals(one), _reals(place)) for one, place in self.fresh],
            [(_reals(one), _reals(earlier), _reals(place)) for one, earlier, place in self.added],
            self.sparse,
        )


class AmpOptimizerState(ParameterLists):
    """``optimizer._amp_stash``: the model and master parameters of an optimizer, and the state of the accumulation in progress."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.lazy_init_called = False
        self.replaced: dict[str, Any] = {}
        self.params_have_scaled_gradients = False
        self.skips = False
        """Whether the host knows that the next step is to be skipped."""
        self.had_backward = False
        self.stepping = False
        self._ever_had_backward = False
        self._told = False
        self._flagged = False
        self.kept: list[Tensor | None] = []
        self.settle: Callable[[], None] | None = None
        """Unscales and checks the gradients of the accumulation; set if they have not been exchanged with other ranks."""
        self._resent = False
        self._wrappers: list[weakref.ref[Any]] = []
        self.binding = ParamGradMap(
            optimizer, _LiveMasters(), NonFiniteTracker(optimizer, 0), sums=False, exchanged=False
        )
        self._state = ops.StepState.on(_device_of(optimizer))
        self.own_step = optimizer.step
        self._zero_grad = optimizer.zero_grad
        self._add_param_group = optimizer.add_param_group

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped; waits for the device if only the device knows."""
        return self.skips or (self._flagged and bool(self._state.found_inf))

    # -- before and after a backward -------------------------------------------------------------------------------------------

    def lazy_init(self) -> None:
        """Prepares the first backward: updates masters of half weights that the script has edited since ``initialize``.

        Raises AmpError if the model moved to another device than its masters.  Only the first call does anything.
        """
        if self.lazy_init_called:
            return
        self.lazy_init_called = True
        for holder, target in self.pairs():
            if holder.device != target.device:
                raise AmpError(
                    f"the model moved from {target.device} to {holder.device} after amp.initialize, its fp32 masters did not; "
                    "call model.to(device) before amp.initialize"
                )
        holders = set(map(id, self.binding.model_params))
        for conversion in list(_amp_state.conversions.values()):
            if conversion.has_masters and conversion.holds(holders):
                conversion.take_edits()

    def prepare(self) -> None:
        """Sets the gradients of earlier passes, which are unscaled, aside in ``kept``."""
        self.lazy_init()
        binding = self.binding
        binding.refresh()
        self.kept, self._resent = [_own(target.grad) for target in binding.master_params], False
        for holder, target in zip(binding.model_params, binding.master_params, strict=True):
            holder.grad = None
            if holder is not target:
                target.grad = None

    def is_local(self) -> bool:
        """Returns whether ``no_sync`` or ``disable_allreduce`` keeps a wrapper around the model from exchanging gradients."""
        wrappers = [wrapper() for wrapper in self._wrappers]
        return any(one is not None and not one.require_backward_grad_sync for one in wrappers)

    @torch.no_grad()
    def resend(self, scale: Tensor | float) -> None:
        """Writes gradients of passes without an exchange back, times ``scale``: the wrapper averages them with the next pass's."""
        self._resent = True
        rows = [(kept, one) for one, kept in zip(self.binding.model_params, self.kept, strict=True) if kept is not None]
        for kept, holder in rows:
            holder.grad = (kept * scale).to(holder.dtype) if kept.is_sparse else torch.empty_like(holder)
        dense = [
            (_reals(kept), _reals(holder.grad))
            for kept, holder in rows
            if holder.grad is not None and not kept.is_sparse
        ]
        if dense:
            sources, places = zip(*dense, strict=True)
            multiply(sources, places, scale)

    def restore(self) -> None:
        """Restores the gradients of earlier passes after a backward that failed."""
        if self.params_have_scaled_gradients:
            return
        for target, kept in zip(self.binding.master_params, self.kept, strict=False):
            if kept is not None:
                target.grad = kept
        self.kept = []

    def collect(self, seen: set[int]) -> _Unscaling:
        """Returns the gradients that backward left, except of parameters that another optimizer has too (ids in ``seen``)."""
        binding, work = self.binding, _Unscaling([], [], [], [])
        binding.refresh()
        earlier = self.kept or [target.grad if holder is not target else None for holder, target in self.pairs()]
        if self._resent:  # the new gradients contain the earlier ones
            earlier = [None] * len(earlier)
        self.kept, self.settle, self._resent = [], None, False
        for holder, target, kept in zip(binding.model_params, binding.master_params, earlier, strict=True):
            new = holder.grad
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            if new is None:
                if kept is not None:
                    target.grad = kept
                continue
            if new.is_complex() and new.is_conj():
                holder.grad = new = new.resolve_conj()
            work.incoming.append(new)
            if kept is None:
                work.fresh.append(create_grad(Gradient(holder, target, new)))
            elif new.is_sparse or kept.is_sparse:
                work.sparse.append((target, new, kept))
            else:
                target.grad = into = new if holder is target else kept
                work.added.append((new, kept, into))
        return work.in_reals()

    @torch.no_grad()
    def distribute(self, work: _Unscaling, multiplier: Tensor | float) -> None:
        """Unscales the collected gradients into the gradients of the updated tensors."""
        if work.fresh:
            sources, places = zip(*work.fresh, strict=True)
            multiply(sources, places, multiplier)
        if work.added:
            sources, earlier, places = zip(*work.added, strict=True)
            add(sources, earlier, places, multiplier)
        for target, new, kept in work.sparse:
            target.grad = kept + new.to(target.dtype) * (
                multiplier.to(new.device) if isinstance(multiplier, torch.Tensor) else multiplier
            )

    def note_backward(self, *, scaled: bool) -> None:
        """Records that backward ran, and whether its gradients are still scaled."""
        if not self._ever_had_backward:
            self._look_for_wrappers()
        self.had_backward = self._ever_had_backward = True
        self.params_have_scaled_gradients = scaled

    def _look_for_wrappers(self) -> None:
        holders = set(map(id, self.binding.model_params))
        self._wrappers = [weakref.ref(one) for one in wrappers_of(holders)]
        for conversion in list(_amp_state.conversions.values()):
            if conversion.holds(holders):
                conversion.stop_noticing()
                self._wrappers += [] if conversion.wrapper is None else [conversion.wrapper]

    def may_skip_on_device(self) -> bool:
        """Returns whether the device can skip the next step without a host read."""
        self._leave_what_cpus_lack()
        return isinstance(self.optimizer, FusedOptimizer) or may_skip(self.optimizer)

    def _leave_what_cpus_lack(self) -> None:
        if isinstance(self.optimizer, torch.optim.SGD) and _half_on_cpu(self.binding.master_params):
            leave_fused(self.optimizer, tell=is_rank_zero())

    def flag(self, found_inf: Tensor) -> None:
        """Combines, on the device, the overflow flag of a pass with those of the accumulation's earlier passes."""
        own = self._state.found_inf
        if self._flagged:
            torch.maximum(own, found_inf.to(own.device), out=own)
        else:
            own.copy_(found_inf)
        self._flagged = True

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Steps the optimizer, or skips the step after an overflow; then rounds the masters into the model."""
        if closure is not None:
            return self._step_with(closure)
        self._check_order()
        if self.settle is not None:
            self.settle()
        result = None
        if self.skips:
            self.optimizer._opt_called = True  # schedulers check it, and a skipped step counts as called
        else:
            with _casts_off(), self._stepping():
                result = self._update()
        # If the device decides, this is its flag, valid until the next backward: only a caller that reads the flag waits.
        self.optimizer.last_step_skipped = self.skips or (self._state.found_inf if self._flagged else False)
        self._end_window()
        return result

    def _check_order(self) -> None:
        if self.had_backward:
            return
        pairs = self.pairs()
        if not self._ever_had_backward and any(one.grad is not None for one, other in pairs if one is not other):
            raise AmpError(
                "the model's half gradients were not computed inside amp.scale_loss, and never reached the fp32 masters; write "
                "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()` before optimizer.step()"
            )
        if not self._told and all(target.grad is None for _, target in pairs):
            self._told = True
            if is_rank_zero():
                logger.warning(
                    "optimizer.step() before any backward inside amp.scale_loss changes nothing; call it after"
                )

    def _update(self) -> Any:
        optimizer, has_masters = self.optimizer, self.has_masters
        if isinstance(optimizer, FusedOptimizer) and not optimizer._optimizer_step_pre_hooks:
            # One pass over memory: the fused step reads the flag, and writes the half weights too.
            optimizer.gather(None, self.binding.copies if has_masters else None, None)
            optimizer.steer(self._state if self._flagged else None, skips=self._flagged)
            return self.own_step()
        self._leave_what_cpus_lack()
        result = None
        if self._flagged:
            run_unless_overflow(optimizer, self._state.found_inf, self.own_step)
        else:
            result = self.own_step()
        self.round()
        return result

    def round(self) -> None:
        """Rounds the masters into the half weights."""
        holders, targets = [one for one, _ in self.binding.master_pairs], [one for _, one in self.binding.master_pairs]
        for _, (masters, half) in by_device(targets, holders):
            round_to(masters, half)

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        if any(scaler.dynamic for scaler in _amp_state.loss_scalers):
            raise AmpError(
                "Currently, Amp does not support closure use with optimizers. A step that runs backward itself cannot be left "
                "out when gradients overflow; pass a number as loss_scale to amp.initialize, or call step without closure"
            )

        def run() -> Any:
            self.round()
            with torch.enable_grad():
                return closure()

        with self._stepping():
            result = self.own_step(run)
        self.round()
        self._end_window()
        return result

    @contextlib.contextmanager
    def _stepping(self) -> Any:
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def _end_window(self) -> None:
        self.skips = self.had_backward = self._flagged = False
        self.settle = None
        for _, target in self.binding.master_pairs:
            target.grad = None

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Clears the accumulation's gradients (scaled, unscaled and set aside) and its overflow flag."""
        self._zero_grad(*args, **options)
        to_none = options.get("set_to_none", args[0] if args else None)
        self.binding.refresh()
        for holder, target in self.binding.master_pairs:
            target.grad = None
            if to_none is False and holder.grad is not None:
                holder.grad = holder.grad.detach().zero_()  # a wrapper's views cannot be detached in place
            else:
                holder.grad = None
        self.kept, self.settle, self._resent = [], None, False
        self.params_have_scaled_gradients = self.skips = self._flagged = self.had_backward = False

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Adds parameters, with masters for half ones."""
        self._add_param_group(group)
        if self.binding.master_pairs:
            give_masters(self.optimizer.param_groups[-1:])
        self.binding.refresh()


def give_masters(groups: Sequence[dict[str, Any]]) -> None:
    """Gives masters to half weights of ``groups`` that no ``initialize`` has seen: those of a model's copy, or of new layers."""
    masters = next((one for one in _amp_state.conversions.values() if one.has_masters), None)
    if masters is not None:
        for group in groups:
            for one in group["params"]:
                masters.adopt_half(one)


def _device_of(optimizer: Any) -> torch.device:
    return next((one.device for one in owned_parameters(optimizer)), torch.device("cpu"))


def _reals(gradient: Tensor) -> Tensor:
    return torch.view_as_real(gradient) if gradient.is_complex() and not gradient.is_sparse else gradient


def _own(gradient: Tensor | None) -> Tensor | None:
    """Returns the gradient, cloned if it is a view: a wrapper's gradients are views of memory that the next backward overwrites."""
    return gradient.clone() if gradient is not None and gradient._is_view() else gradient


def _half_on_cpu(targets: list[Tensor]) -> bool:
    return any(target.dtype in HALF_DTYPES and target.device.type == "cpu" for target in targets)


def _casts_off() -> contextlib.AbstractContextManager[None]:
    handle = _amp_state.__dict__.get("handle")
    return contextlib.nullcontext() if handle is None else handle.casts_off()
