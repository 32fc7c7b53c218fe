"""amp's state of an optimizer: fp32 master weights in its groups, unscaled gradients for them, and steps that may be skipped."""

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
from fabricamp.precision.param_grads import Gradient, ParamGradMap, create_grad
from fabricamp.precision.torch_updates import leave_fused, may_skip, run_unless_overflow

logger = logging.getLogger("fabricamp")


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
        self._warned = False
        self._flagged = False
        """Whether the overflow flag in ``_state`` is of this accumulation."""
        self.earlier: list[Tensor | None] = []
        self.check_later: Callable[[], None] | None = None
        """Unscales and checks the gradients of the accumulation; set if they have not been exchanged with other ranks."""
        self._resent = False
        self._wrappers: list[weakref.ref[Any]] = []
        self.binding = ParamGradMap(
            optimizer, _LiveMasters(), NonFiniteTracker(optimizer, 0), sums=False, exchanged=False
        )
        devices = (parameter.device for parameter in owned_parameters(optimizer))
        self._state = ops.StepState.on(next(devices, torch.device("cpu")))
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
        for parameter, updated in self.pairs():
            if parameter.device != updated.device:
                raise AmpError(
                    f"the model moved from {updated.device} to {parameter.device} after amp.initialize, its fp32 masters did not; "
                    "call model.to(device) before amp.initialize"
                )
        own = set(map(id, self.binding.model_params))
        for conversion in list(_amp_state.conversions.values()):
            if conversion.has_masters and conversion.holds(own):
                conversion.refresh_edited()

    def prepare(self) -> None:
        """Moves the gradients of earlier passes (unscaled already) to ``earlier``."""
        self.lazy_init()
        pairs = self.pairs()
        gradients = [updated.grad for _, updated in pairs]
        self.earlier = [None if gradient is None else _own(gradient) for gradient in gradients]
        self._resent = False
        for parameter, updated in pairs:
            parameter.grad = None
            updated.grad = None

    def is_local(self) -> bool:
        """Returns whether ``no_sync`` or ``disable_allreduce`` keeps a wrapper around the model from exchanging gradients."""
        for reference in self._wrappers:
            wrapper = reference()
            if wrapper is not None and not wrapper.require_backward_grad_sync:
                return True
        return False

    @torch.no_grad()
    def resend(self, scale: Tensor | float) -> None:
        """Writes gradients of passes without an exchange back, times ``scale``: the wrapper averages them with the next pass's."""
        self._resent = True
        sources = []
        destinations = []
        for parameter, earlier in zip(self.binding.model_params, self.earlier, strict=True):
            if earlier is None:
                continue
            if earlier.is_sparse:
                parameter.grad = (earlier * scale).to(parameter.dtype)
            else:
                parameter.grad = torch.empty_like(parameter)
                sources.append(_as_real(earlier))
                destinations.append(_as_real(parameter.grad))
        multiply(sources, destinations, scale)

    def restore(self) -> None:
        """Restores the gradients of earlier passes after a backward that failed."""
        if self.params_have_scaled_gradients:
            return
        for updated, earlier in zip(self.binding.master_params, self.earlier, strict=False):
            if earlier is not None:
                updated.grad = earlier
        self.earlier = []

    def collect(self, seen: set[int]) -> _Unscaling:
        """Returns the gradients that backward left, except of parameters that another optimizer has too (ids in ``seen``)."""
        pairs = self.pairs()
        of_earlier_passes = self.earlier or [
            updated.grad if parameter is not updated else None for parameter, updated in pairs
        ]
        if self._resent:  # the new gradients contain the earlier ones
            of_earlier_passes = [None] * len(of_earlier_passes)
        self.earlier = []
        self.check_later = None
        self._resent = False
        work = _Unscaling([], [], [], [])
        for (parameter, updated), earlier in zip(pairs, of_earlier_passes, strict=True):
            new = parameter.grad
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if new is None:
                if earlier is not None:
                    updated.grad = earlier
                continue
            if new.is_complex() and new.is_conj():
                new = new.resolve_conj()
                parameter.grad = new
            work.incoming.append(new)
            if earlier is None:
                work.fresh.append(create_grad(Gradient(parameter, updated, new)))
            elif new.is_sparse or earlier.is_sparse:
                work.sparse.append((updated, new, earlier))
            else:
                destination = new if parameter is updated else earlier
                updated.grad = destination
                work.added.append((new, earlier, destination))
        return work.as_real()

    @torch.no_grad()
    def distribute(self, work: _Unscaling, multiplier: Tensor | float) -> None:
        """Unscales the collected gradients into the gradients of the updated tensors."""
        if work.fresh:
            sources, destinations = zip(*work.fresh, strict=True)
            multiply(sources, destinations, multiplier)
        if work.added:
            sources, earlier, destinations = zip(*work.added, strict=True)
            add(sources, earlier, destinations, multiplier)
        for updated, new, before in work.sparse:
            factor = multiplier.to(new.device) if isinstance(multiplier, torch.Tensor) else multiplier
            updated.grad = before + new.to(updated.dtype) * factor

    def note_backward(self, *, scaled: bool) -> None:
        """Records that backward ran, and whether its gradients are still scaled."""
        if not self._ever_had_backward:
            self._look_for_wrappers()
        self.had_backward = True
        self._ever_had_backward = True
        self.params_have_scaled_gradients = scaled

    def _look_for_wrappers(self) -> None:
        own = set(map(id, self.binding.model_params))
        self._wrappers = [weakref.ref(wrapper) for wrapper in wrappers_of(own)]
        for conversion in list(_amp_state.conversions.values()):
            if conversion.holds(own):
                conversion.stop_looking_for_wrapper()
                if conversion.wrapper is not None:
                    self._wrappers.append(conversion.wrapper)

    def may_skip_on_device(self) -> bool:
        """Returns whether the device can skip the next step without a host read."""
        self._leave_fused_sgd()
        return isinstance(self.optimizer, FusedOptimizer) or may_skip(self.optimizer)

    def _leave_fused_sgd(self) -> None:
        """Switches torch's fused SGD off for half weights on a CPU, which it does not support."""
        if isinstance(self.optimizer, torch.optim.SGD) and _half_on_cpu(self.binding.master_params):
            leave_fused(self.optimizer, tell=is_rank_zero())

    def flag(self, found_inf: Tensor) -> None:
        """Combines, on the device, the overflow flag of a pass with those of the accumulation's earlier passes."""
        flag = self._state.found_inf
        if self._flagged:
            torch.maximum(flag, found_inf.to(flag.device), out=flag)
        else:
            flag.copy_(found_inf)
        self._flagged = True

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Steps the optimizer, or skips the step after an overflow; then rounds the masters into the model."""
        if closure is not None:
            return self._step_with(closure)
        self._check_order()
        if self.check_later is not None:
            self.check_later()
        result = None
        if self.skips:
            self.optimizer._opt_called = True  # schedulers check it, and a skipped step counts as called
        else:
            with _casts_off(), self._stepping():
                result = self._update()
        # If the device decides, this is its flag, valid until the next backward: only a caller that reads the flag waits.
        self.optimizer.last_step_skipped = self.skips or (self._state.found_inf if self._flagged else False)
        self._end_accumulation()
        return result

    def _check_order(self) -> None:
        if self.had_backward:
            return
        pairs = self.pairs()
        outside = any(parameter.grad is not None for parameter, updated in pairs if parameter is not updated)
        if outside and not self._ever_had_backward:
            raise AmpError(
                "the model's half gradients were not computed inside amp.scale_loss, and never reached the fp32 masters; write "
                "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()` before optimizer.step()"
            )
        if not self._warned and all(updated.grad is None for _, updated in pairs):
            self._warned = True
            if is_rank_zero():
                logger.warning(
                    "optimizer.step() before any backward inside amp.scale_loss changes nothing; call it after"
                )

    def _update(self) -> Any:
        optimizer = self.optimizer
        has_masters = self.has_masters
        if isinstance(optimizer, FusedOptimizer) and not optimizer._optimizer_step_pre_hooks:
            # One pass over memory: the fused step reads the flag, and writes the half weights too.
            optimizer.gather(None, self.binding.copies if has_masters else None, None)
            optimizer.steer(self._state if self._flagged else None, skips=self._flagged)
            return self.own_step()
        self._leave_fused_sgd()
        result = None
        if self._flagged:
            run_unless_overflow(optimizer, self._state.found_inf, self.own_step)
        else:
            result = self.own_step()
        self.round()
        return result

    def round(self) -> None:
        """Rounds the masters into the half weights."""
        pairs = self.binding.master_pairs
        half_weights = [half for half, _ in pairs]
        for _, (masters, halves) in by_device([master for _, master in pairs], half_weights):
            round_to(masters, halves)

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
        self._end_accumulation()
        return result

    @contextlib.contextmanager
    def _stepping(self) -> Any:
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def _end_accumulation(self) -> None:
        self.skips = False
        self.had_backward = False
        self._flagged = False
        self.check_later = None
        for _, master in self.binding.master_pairs:
            master.grad = None

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Clears the accumulation's gradients (scaled, unscaled and set aside) and its overflow flag."""
        self._zero_grad(*args, **options)
        to_none = options.get("set_to_none", args[0] if args else None)
        self.binding.refresh()
        for half, master in self.binding.master_pairs:
            master.grad = None
            if to_none is False and half.grad is not None:
                half.grad = half.grad.detach().zero_()  # a wrapper's views cannot be detached in place
            else:
                half.grad = None
        self.earlier = []
        self.check_later = None
        self._resent = False
        self.params_have_scaled_gradients = False
        self.skips = False
        self._flagged = False
        self.had_backward = False

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Adds parameters, with masters for half ones."""
        self._add_param_group(group)
        if self.binding.master_pairs:
            give_masters(self.optimizer.param_groups[-1:])
        self.binding.refresh()


class _Unscaling(NamedTuple):
    """The gradients of a backward pass, and the operations that unscale them into the gradients of the updated tensors."""

    incoming: list[Tensor]
    fresh: list[tuple[Tensor, Tensor]]
    """(source, destination) of gradients without earlier ones."""
    added: list[tuple[Tensor, Tensor, Tensor]]
    """(source, gradient of earlier passes, destination of the sum)."""
    sparse: list[tuple[Tensor, Tensor, Tensor]]
    """(updated tensor, its new gradient, its gradient of earlier passes), if one of the gradients is sparse."""

    def as_real(self) -> _Unscaling:
        """Returns the same work with complex gradients viewed as real ones, twice as many numbers."""
        if not any(map(torch.is_complex, self.incoming)):
            return self
        return _Unscaling(
            [_as_real(gradient) for gradient in self.incoming],
            [(_as_real(source), _as_real(destination)) for source, destination in self.fresh],
            [
                (_as_real(source), _as_real(earlier), _as_real(destination))
                for source, earlier, destination in self.added
            ],
            self.sparse,
        )


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
        for conversion in _amp_state.conversions.values():
            if conversion.has_masters and tensor in conversion.full:
                masters: MasterWeights = conversion.full
                return masters
        return None


def give_masters(groups: Sequence[dict[str, Any]]) -> None:
    """Gives masters to half weights of ``groups`` that no ``initialize`` has seen: those of a model's copy, or of new layers."""
    converted = next((conversion for conversion in _amp_state.conversions.values() if conversion.has_masters), None)
    if converted is not None:
        for group in groups:
            for parameter in group["params"]:
                converted.adopt_half(parameter)


def _as_real(gradient: Tensor) -> Tensor:
    return torch.view_as_real(gradient) if gradient.is_complex() and not gradient.is_sparse else gradient


def _own(gradient: Tensor) -> Tensor:
    """Returns the gradient, cloned if it is a view: a wrapper's gradients are views of memory that the next backward overwrites."""
    return gradient.clone() if gradient._is_view() else gradient


def _half_on_cpu(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.dtype in HALF_DTYPES and tensor.device.type == "cpu" for tensor in tensors)


def _casts_off() -> contextlib.AbstractContextManager[None]:
    handle = _amp_state.__dict__.get("handle")
    return contextlib.nullcontext() if handle is None else handle.casts_off()
