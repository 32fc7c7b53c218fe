"""Steps optimizers with loss scaling or half weights: statistics, one multiplier, one pass over the gradients, update or skip."""

from __future__ import annotations

import functools
import inspect
import logging
import operator
from collections.abc import Callable
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.gradients.flat import IN_PLACE, Gradients
from fabricamp.gradients.memory import GradientMemory
from fabricamp.ops.shards import SharedRows, any_shard, local, local_gradient
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.master_weights import MasterWeights, adopt, round_to
from fabricamp.precision.nonfinite_tracker import GradStatsRecord, NonFiniteTracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp.precision.base import Clip
    from fabricamp.precision.loss_scaler import LossScaler
    from fabricamp.strategies.base import Strategy


# ~~~ from precision.fused: A step of a fused optimizer: statistics, finish, update, and no other pass over the gradients.


_FLAGS = WeakTensorKeyDictionary()


def flags_of(present: Tensor) -> list[Tensor]:
    """Returns one fp32 scalar tensor per parameter flag, for fused optimizers to read on the device; cached per tensor."""
    flags: list[Tensor] | None = _FLAGS.get(present)
    if flags is None:
        flags = _FLAGS[present] = list(present.to(torch.float32).unbind())
    return flags


class UnscaleArgs(NamedTuple):
    """The arguments of the finish kernel: it writes multiplier, norm and overflow flag to ``state``.

    The gradients are ``scale`` times ``divisor`` too large.  ``skips`` False: overflows are not checked, and the step is always
    applied.  ``origin``, ``sticky``, ``closing`` and ``loss`` are those of :func:`~fabricamp.ops.finish`.
    """

    state: ops.StepState
    scale: Tensor
    divisor: float
    skips: bool
    origin: int = 0
    sticky: bool = False
    closing: ops.ScaleRule | None = None
    loss: Tensor | None = None

    def finish(self, statistics: Tensor, max_norm: float | None) -> None:
        """Computes multiplier, norm and overflow flag from the statistics of all gradients."""
        ops.finish(
            self.state,
            statistics,
            scale=self.scale,
            divisor=self.divisor,
            max_norm=max_norm,
            origin=self.origin,
            sticky=self.sticky,
            closing=self.closing,
            loss=self.loss,
        )


def step_fused(
    optimizer: FusedOptimizer,
    how: UnscaleArgs | None,
    clip: Clip | None,
    *,
    gradients: Sequence[Tensor | None] | None = None,
    copies: Sequence[Tensor | None] | None = None,
    flags: Sequence[Tensor | None] | None = None,
) -> Tensor | None:
    """Clips and updates, or skips, all on the device; returns the statistics.

    ``how`` None: gradients are neither unscaled nor clipped, the step is always applied, and None is returned.
    """
    optimizer.gather(gradients, copies, flags)
    if how is None:
        optimizer.steer(None)
        optimizer.step()
        return None
    max_norm, limit = limits(clip)
    asked = how.skips or max_norm is not None  # else neither norm nor flag is needed: the gradients are read once
    statistics = optimizer.statistics(how.scale, how.divisor) if asked else how.scale.new_empty(0)
    how.finish(statistics, max_norm)
    optimizer.steer(how.state, limit=limit, skips=how.skips)
    optimizer.step()
    return statistics


def limits(clip: Clip | None) -> tuple[float | None, float | None]:
    """Returns (maximal norm, maximal value) of ``clip``; None for no limit."""
    if clip is None:
        return None, None
    return (clip.value, None) if clip.algorithm == "norm" else (None, clip.value)


# ~~~ from precision.skipping: Lets torch's and other foreign optimizers skip a step, by torch's ``found_inf`` protocol if they support it.


logger = logging.getLogger("fabricamp")


def may_skip(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer`` can skip its next step on the device; creates the optimizer state that this needs."""
    return _skips_by_itself(optimizer) and _prepare_to_skip(optimizer)


def _skips_by_itself(optimizer: Optimizer) -> bool:
    """Returns whether ``step`` reads ``found_inf`` on the device: torch's protocol for optimizers with ``fused=True``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused", True) for group in optimizer.param_groups
    )


def _prepare_to_skip(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer state for a skipped step exists or could be created.

    torch's fused SGD allocates its momentum buffers in the first step and leaves them uninitialised if that step is skipped.
    Without dampening, zeros give the same first step.  With dampening they do not, so the host has to decide until the buffers
    exist.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            if parameter.grad is None or optimizer.state[parameter].get("momentum_buffer") is not None:
                continue
            if group["dampening"] != 0:
                return False
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return True


def run_unless_overflow(optimizer: Any, found_inf: Tensor, update: Callable[[], Any] | None = None) -> None:
    """Steps ``optimizer``, which reads ``found_inf`` on the device; calls ``update`` instead of ``optimizer.step`` if given.

    ``update`` is for an optimizer with a replaced ``step``.
    """
    optimizer.grad_scale, optimizer.found_inf = None, found_inf
    try:
        (update or optimizer.step)()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def leave_fused(optimizer: torch.optim.SGD, *, tell: bool) -> None:
    """Sets ``fused=False`` in SGD: on CPU, torch's fused SGD (seen in 2.13) does not update most half weights.

    Called in each step, because loading an optimizer's state restores the saved ``fused`` option.
    """
    for group in optimizer.param_groups:
        if group["fused"]:
            group["fused"] = False
            if tell:
                logger.warning("torch's SGD(fused=True) does not update half weights on CPU; fused=False is used")
                tell = False


# ~~~ from precision.gradients: Maps model parameters to master parameters for one optimizer, and holds the sums of its micro-batches' gradients.


_grad: Final = operator.attrgetter("grad")
_params: Final = operator.itemgetter("params")


class Gradient(NamedTuple):
    """A gradient ``value`` with its model parameter (``holder``, filled by backward) and the ``target`` that is updated."""

    holder: Tensor
    target: Tensor
    value: Tensor


class ParamGradMap:
    """The model parameters and updated tensors of one optimizer, in the order of its ``param_groups``.

    ``holders`` are the model parameters; backward fills their ``.grad``.  ``targets`` are updated: the fp32 master of a half
    holder, else the holder itself.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights | None,
        nonfinite_tracker: NonFiniteTracker,
        *,
        sums: bool,
        exchanged: bool,
    ) -> None:
        self.optimizer = optimizer
        self.nonfinite_tracker = nonfinite_tracker
        self.holders: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.seen: list[Tensor | None] | None = None
        self.stats_record: GradStatsRecord | None = None
        """The statistics of a launched step, until the host has recorded them."""
        self.found_inf: Tensor | None = None
        self.copies: list[Tensor | None] | None = None
        self.writes = False
        """Whether gradients of targets were written since the last :meth:`clear`."""
        self.apart: list[tuple[Tensor, Tensor]] = []
        """The (holder, target) pairs with gradients that a step clears: two tensors, or gradients summed in :attr:`memory`."""
        self._masters = masters
        self._exchanged = exchanged
        self._grad_of: Callable[[Any], Any] = _grad
        self._shared: SharedRows | None = None
        self.sums = sums
        """Whether :attr:`memory` sums the gradients of micro-batches; ``.grad`` then holds those of one micro-batch."""
        self.memory = GradientMemory((), sums=sums)
        self.refresh()

    def refresh(self) -> None:
        """Adds parameters from calls of ``add_param_group`` since the last step; keeps the sums so far."""
        groups = self.optimizer.param_groups
        current = groups[0]["params"] if len(groups) == 1 else list(chain.from_iterable(map(_params, groups)))
        if len(current) == len(self.targets) and all(map(operator.is_, current, self.targets)):
            return
        known = {id(target): holder for holder, target in zip(self.holders, self.targets, strict=True)}
        holders = [known.get(id(parameter), parameter) for parameter in current]
        if self._masters is not None:
            adopt(self._masters, self.optimizer)
        self.targets = owned_parameters(self.optimizer)
        self._shared = SharedRows.of(self.targets)
        self._grad_of = local_gradient if any_shard(self.targets) else _grad
        self.memory.hold(holders)
        self.holders = self.memory.parameters
        pairs = list(zip(holders, self.targets, strict=True))
        self.apart = [pair for pair in pairs if self.sums or pair[0] is not pair[1]]
        if self._masters is not None:
            self.copies = [None if holder is target else holder for holder, target in pairs]

    def collect(self, multiplier: Tensor) -> list[Tensor]:
        """Adds every holder's ``.grad``, times ``multiplier``, to its sum, and clears ``.grad``; returns the gradients added."""
        self.refresh()
        return self.memory.add(multiplier)

    def gather(self, gradients: Gradients) -> list[Gradient]:
        """Returns the accumulated gradients: those given, this process's sums, or each ``.grad``."""
        self.refresh()
        values = self._given(self._own_sums() if self.sums and gradients.tensors is None else gradients)
        return [
            Gradient(holder, target, value)
            for holder, target, value in zip(self.holders, self.targets, values, strict=True)
            if value is not None
        ]

    def own(self, gradients: list[Tensor]) -> list[Tensor]:
        """Returns the local shards of sharded gradients, else the gradients themselves."""
        return gradients if self._grad_of is _grad else [local(one) for one in gradients]

    def shared(self, targets: Sequence[Tensor]) -> SharedRows | None:
        """Returns which ranks hold the other shards of ``targets``, a subset of :attr:`targets`; None if nothing is sharded."""
        if self._shared is None or len(targets) == len(self.targets):
            return self._shared
        wanted = set(map(id, targets))
        return self._shared.chosen([place for place, one in enumerate(self.targets) if id(one) in wanted])

    def rows(self, gradients: Gradients) -> tuple[Sequence[Tensor | None], Sequence[Tensor] | None]:
        """Returns one gradient (or None) per target, and device flags that mark the gradients to use (None: all).

        The same as :meth:`gather` without a wait, for optimizers that read the flags on the device.
        """
        self.refresh()
        if self.sums and gradients.tensors is None:
            gradients = self._own_sums()
        if gradients.tensors is None:
            return list(map(self._grad_of, self.holders)), None
        if gradients.present is None:
            return self._given(gradients), None
        return self._given(gradients._replace(present=None)), flags_of(gradients.present)

    def _own_sums(self) -> Gradients:
        """Returns this process's own sums; raises :class:`ConfigError` if they have to be exchanged first."""
        if self._exchanged:
            raise ConfigError(
                "the fp32 sums of an optimizer's gradients have to be exchanged before step: give it what "
                "strategy.reduce_gradients(precision.gradients(optimizer)) returns"
            )
        return self.memory.local()

    def _given(self, gradients: Gradients) -> Sequence[Tensor | None]:
        if gradients.tensors is None:
            return list(map(_grad, self.holders))
        if len(gradients.tensors) != len(self.holders):
            raise ConfigError(
                f"step got {len(gradients.tensors)} gradient tensors for {len(self.holders)} parameters; give one (or None) "
                "for each of precision.gradients(optimizer).parameters, in that order"
            )
        return gradients.values()

    def clear(self, *, sums: bool = True) -> None:
        """Drops the accumulated gradients, except ``.grad`` of parameters that backward fills and the optimizer updates itself.

        ``sums`` False keeps the sums, so nothing is launched.
        """
        self.seen = None
        if sums and self.sums:
            self.memory.clear()
        for holder, _ in self.apart:
            holder.grad = None
        if self.writes:
            self.writes = False
            for _, target in self.apart:
                target.grad = None

    def release(self) -> None:
        """Puts the module's own parameters back into the optimizer, with the optimizer state of their masters."""
        self.clear()
        original = {id(target): holder for holder, target in zip(self.holders, self.targets, strict=True)}
        for group in self.optimizer.param_groups:
            for index, target in enumerate(group["params"]):
                holder = original.get(id(target), target)
                if holder is not target:
                    group["params"][index] = holder
                    if target in self.optimizer.state:
                        self.optimizer.state[holder] = self.optimizer.state.pop(target)


def pair(gradient: Gradient) -> tuple[Tensor, Tensor]:
    """Creates ``target.grad`` in the target's dtype; returns (source values, destination values)."""
    _, target, value = gradient
    if value.is_sparse:
        value = value.coalesce()
        target.grad = torch.sparse_coo_tensor(
            value.indices(),
            value.values().to(target.dtype, copy=True),
            value.shape,
            dtype=target.dtype,
            device=value.device,
            is_coalesced=True,
            check_invariants=False,
        )
        return value.values(), target.grad.values()
    if value.dtype == target.dtype:
        target.grad = value
        return value, value
    target.grad = torch.empty_like(target)
    return value, target.grad


def values_of(gradient: Tensor | None) -> Tensor:
    """Returns the values of a dense or sparse gradient as a dense tensor."""
    assert gradient is not None
    return gradient.coalesce().values() if gradient.is_sparse else gradient


# ~~~ from precision.plain_step: An optimizer step in full precision: torch's own clipping, no scaling, no skipping.


class Stepper:
    """Updates parameters from their gradients; this base serves full precision, without masters or scaling."""

    def gradients(self, optimizer: Optimizer) -> GradientMemory:
        """Returns the memory with the gradients of ``optimizer`` before its step."""
        return GradientMemory(owned_parameters(optimizer))

    def collect(self, loss_id: int) -> None:
        """Moves every ``.grad`` into the sums, unscaled and checked for the scaler of ``loss_id``."""

    def show(self, optimizer: Optimizer, gradients: Gradients) -> None:
        """Writes unscaled, averaged gradients into ``.grad``, for hooks that read or edit them before :meth:`step`."""
        if gradients is not IN_PLACE:
            write_gradients(optimizer, gradients)

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        clip: Clip | None,
        run: Callable[[], Any] | None,
        loss: Tensor | None,
    ) -> None:
        """Clips and updates, or skips; ``loss``: see :meth:`Precision.step <fabricamp.precision.Precision.step>`."""
        if run is None and isinstance(optimizer, FusedOptimizer):
            # Reads the gradients from the strategy's buffers; .grad stays as it is.
            flags = None if gradients.present is None else flags_of(gradients.present)
            how = None
            if clip is not None or gradients.divisor != 1 or gradients.weight is not None:
                device = next((one.device for one in owned_parameters(optimizer)), torch.device("cpu"))
                state = optimizer.own_state(device)
                carried = gradients.carried(state.scale)
                how = UnscaleArgs(state, carried, gradients.divisor, skips=False)
            step_fused(optimizer, how, clip, gradients=gradients.tensors, flags=flags)
            return
        if gradients is not IN_PLACE:
            write_gradients(optimizer, gradients)
        if clip is not None:
            clip_gradients(optimizer, clip)
        (run or optimizer.step)()

    def release(self) -> None:
        """Restores the optimizers."""


PLAIN: Final = Stepper()
_SHARED: Final[WeakKeyDictionary[Any, tuple[list[Tensor], SharedRows | None]]] = WeakKeyDictionary()


@torch.no_grad()
def write_gradients(optimizer: Optimizer, gradients: Gradients) -> None:
    """Writes gradients from a strategy's buffers into ``.grad``, and applies the division that the strategy left out."""
    parameters = owned_parameters(optimizer)
    if gradients.tensors is not None:
        for parameter, value in zip(parameters, gradients.values(), strict=True):
            parameter.grad = None if value is None else value.to(parameter.dtype)
    for divisor in (gradients.divisor, gradients.weight):
        if isinstance(divisor, torch.Tensor) or divisor not in (None, 1):
            torch._foreach_div_([parameter.grad for parameter in parameters if parameter.grad is not None], divisor)


@torch.no_grad()
def clip_gradients(optimizer: Optimizer, clip: Clip) -> None:
    """Clips the ``.grad`` of all parameters of ``optimizer`` by torch's own functions, for the same bits as a hand-written loop.

    Sharded gradients are clipped shard by shard, with one exchange in total; torch would exchange a norm per parameter.
    """
    parameters = [one for one in owned_parameters(optimizer) if one.grad is not None]
    if any_shard(parameters):
        _clip_parts(optimizer, parameters, clip)
    elif clip.algorithm == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, clip.value)
    else:
        torch.nn.utils.clip_grad_value_(parameters, clip.value)


def _clip_parts(optimizer: Optimizer, parameters: list[Tensor], clip: Clip) -> None:
    own = list(map(local_gradient, parameters))
    if clip.algorithm == "norm":
        one = torch.ones((), dtype=torch.float32, device=own[0].device)
        squares = ops.gradient_statistics(own, one, shared=_shared_rows(optimizer, parameters))
        torch._foreach_mul_(own, (clip.value / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0))
    else:
        torch._foreach_clamp_min_(own, -clip.value)
        torch._foreach_clamp_max_(own, clip.value)


def _shared_rows(optimizer: Optimizer, parameters: list[Tensor]) -> SharedRows | None:
    """Returns which ranks share the parameters; cached until the list of parameters changes."""
    known = _SHARED.get(optimizer)
    if known is None or len(known[0]) != len(parameters) or not all(map(operator.is_, known[0], parameters)):
        known = _SHARED[optimizer] = parameters, SharedRows.of(parameters)
    return known[1]


def demands_closure(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer.step`` cannot be called without a closure (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class OptimizerStepper(Stepper):
    """Steps optimizers with gradients that are scaled, half, or checked for non-finite values.

    ``scaler`` None: the scale is a constant, and no step is skipped.  ``plain``: gradients are fp32 and unscaled, so torch's own
    functions write and clip them.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        strategy: Strategy,
        *,
        name: str,
        device: torch.device,
        scaler: LossScaler | None,
        static_scale: float,
        masters: MasterWeights | None,
        sums: bool,
        plain: bool = False,
    ) -> None:
        self._strategy = strategy
        self._plain = plain
        self._name = name
        self._scaler = scaler
        self._several_losses = scaler is not None and len(scaler.losses) > 1
        self._static_scale = static_scale
        self._state = scaler.state if scaler is not None else ops.StepState.on(device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        # The factor in the gradients, on the device: the dynamic scale, a constant, or 1 if the sums are unscaled already.
        self._scale = torch.full((), float(static_scale), dtype=torch.float32, device=device)
        if scaler is not None:
            self._scale = self._one if self._several_losses else self._state.scale
        self._told = False
        self._bindings: dict[Any, ParamGradMap] = {}
        # A single optimizer step also finishes the training step, in the same launch.
        self._closes = len(optimizers) == 1 and not self._several_losses
        self.numbers_each = (2**31 - 1) // max(len(optimizers), 1)
        """Size of each optimizer's range of statistic numbers; the ranges do not overlap and fit into int32."""
        for optimizer in optimizers:
            self._bind(optimizer, masters, sums=sums)
        if sums:
            self._check_shared()
        self._half_on_cpu = device.type == "cpu" and any(
            target.dtype in HALF_DTYPES for binding in self._bindings.values() for target in binding.targets
        )

    def _bind(self, optimizer: Optimizer, masters: MasterWeights | None, *, sums: bool) -> None:
        elsewhere = masters is not None or sums
        self._check(optimizer, elsewhere)
        nonfinite_tracker = NonFiniteTracker(optimizer, origin=len(self._bindings) * self.numbers_each)
        exchanged = sums and self._strategy.distributed and self._strategy.world_size > 1
        binding = self._bindings[optimizer] = ParamGradMap(
            optimizer, masters, nonfinite_tracker, sums=sums, exchanged=exchanged
        )
        if elsewhere:
            # Backward fills tensors outside of param_groups, so zero_grad has to clear these too.
            optimizer.zero_grad = MethodType(functools.partial(_zero_grad, binding), optimizer)  # type: ignore[method-assign]

    def _check(self, optimizer: Optimizer, elsewhere: bool) -> None:
        scaled = self._scaler is not None or self._static_scale != 1
        if (scaled or elsewhere) and demands_closure(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__}.step runs forward and backward itself, which cannot work with loss scaling, a "
                f"nan_policy or fp32 masters (precision {self._name!r}); use precision 'O0' or 'O4' and nan_policy=None"
            )

    def _check_shared(self) -> None:
        holders = [id(holder) for binding in self._bindings.values() for holder in binding.holders]
        if len(set(holders)) < len(holders):
            raise ConfigError(
                f"two optimizers update the same parameter, whose fp32 sum of gradients (precision {self._name!r}) belongs to one; "
                "give each parameter to one optimizer"
            )

    def _binding(self, optimizer: Optimizer) -> ParamGradMap:
        binding = self._bindings.get(optimizer)
        if binding is None:
            raise ConfigError(
                f"this {type(optimizer).__name__} is not one that precision {self._name!r} was set up with; "
                "step the optimizers that configure_optimizers returned"
            )
        return binding

    @property
    def bindings(self) -> list[ParamGradMap]:
        """The binding of each optimizer, in the order given."""
        return list(self._bindings.values())

    def gradients(self, optimizer: Optimizer) -> GradientMemory:
        """Returns the memory with the gradients of ``optimizer`` before its step."""
        binding = self._binding(optimizer)
        binding.refresh()
        return binding.memory

    def collect(self, loss_id: int) -> None:
        """Moves every ``.grad`` into the sums, unscaled and checked for the scaler of ``loss_id``."""
        assert self._scaler is not None
        state = self._scaler.losses[loss_id]
        inverse = state.scale.reciprocal()
        for binding in self._bindings.values():
            statistics = ops.gradient_statistics(binding.collect(inverse), state.scale)
            state.finite.mul_(torch.isfinite(statistics.sum()))

    @torch.no_grad()
    def show(self, optimizer: Optimizer, gradients: Gradients) -> None:
        """Writes unscaled, averaged gradients into ``.grad``, for hooks that read or edit them before :meth:`step`.

        A half weight and its master get the same fp32 tensor, so edits reach both.
        """
        binding = self._binding(optimizer)
        self._write(binding, gradients, None, None)
        binding.found_inf = self._state.found_inf.clone()
        binding.seen = [target.grad for target in binding.targets]
        for holder, target in zip(binding.holders, binding.targets, strict=True):
            holder.grad = target.grad

    @torch.no_grad()
    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        clip: Clip | None,
        run: Callable[[], Any] | None,
        loss: Tensor | None,
    ) -> None:
        """Clips and updates, or skips; with ``loss`` it also finishes the training step if the same launch can do so."""
        self.launch_step(optimizer, gradients, clip, run, loss)
        self.note_stepped(optimizer)

    def launch_step(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        clip: Clip | None,
        run: Callable[[], Any] | None,
        loss: Tensor | None,
    ) -> None:
        """Runs the device part of :meth:`step`."""
        binding = self._bindings.get(optimizer) or self._binding(optimizer)
        if isinstance(optimizer, FusedOptimizer) and binding.seen is None and run is None:
            self._launch_fused(optimizer, binding, gradients, clip, loss)
        else:
            found_inf = self._fill(binding, gradients, clip, loss)
            pairs = [pair for pair in zip(binding.targets, binding.holders, strict=True) if pair[0].grad is not None]
            self._run(optimizer, run, found_inf)
            round_to([target for target, _ in pairs], [holder for _, holder in pairs])
        if binding.sums:
            binding.memory.clear()

    def note_stepped(self, optimizer: Optimizer) -> None:
        """Runs the host part of :meth:`step`: records the parameters of the statistics, and drops the used gradients."""
        binding = self._bindings[optimizer]
        if self._scaler is not None and binding.stats_record is not None:
            binding.nonfinite_tracker.note(self._scaler.windows, binding.stats_record)
        binding.stats_record = None
        binding.clear(sums=False)

    def _fill(self, binding: ParamGradMap, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> Tensor:
        """Writes the gradients into ``.grad`` in one pass; returns the device flag that tells the optimizer to skip its step."""
        if binding.seen is not None:
            return self._rewrite(binding, binding.seen, clip)
        self._write(binding, gradients, clip, loss)
        return self._state.found_inf

    def _launch_fused(
        self,
        optimizer: FusedOptimizer,
        binding: ParamGradMap,
        gradients: Gradients,
        clip: Clip | None,
        loss: Tensor | None,
    ) -> None:
        """Launches statistics, finish and update; leaves ``.grad`` unchanged."""
        values, flags = binding.rows(gradients)
        scaler, scale, divisor = self._scaler, self._scale, gradients.divisor
        if gradients.weight is not None:
            scale = gradients.carried(scale)
        if scaler is None:
            how = UnscaleArgs(self._state, scale, divisor, skips=False)
        else:
            closing, loss = self._closing(None if optimizer.reads_scale else loss)
            origin, sticky = binding.nonfinite_tracker.origin, scaler.sticky
            how = UnscaleArgs(self._state, scale, divisor, True, origin, sticky, closing, loss)
        statistics = step_fused(optimizer, how, clip, gradients=values, copies=binding.copies, flags=flags)
        binding.stats_record = None if statistics is None else GradStatsRecord(statistics)

    def _closing(self, loss: Tensor | None) -> tuple[ops.ScaleRule | None, Tensor | None]:
        """Returns (rule, loss) to finish the training step in the optimizer step's launch; Nones if it needs another launch."""
        scaler = self._scaler
        if loss is None or scaler is None or not self._closes:
            return None, None
        return scaler.closing(), scaler.as_loss(loss)

    def _write(self, binding: ParamGradMap, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> None:
        """Writes the accumulated gradients into ``.grad``, unscaled, averaged and clipped."""
        binding.writes = True
        if self._plain:
            self._look(binding, gradients, clip, loss)
            return
        gathered = binding.gather(gradients)
        filled = {id(gradient.target) for gradient in gathered}
        for target in binding.targets:
            if id(target) not in filled:
                target.grad = None
        pairs = [pair(gradient) for gradient in gathered]
        sources = binding.own([source for source, _ in pairs])
        destinations = binding.own([destination for _, destination in pairs])
        max_norm, limit = limits(clip)
        scale, divisor = gradients.carried(self._scale), gradients.divisor
        if self._scaler is None and max_norm is None:
            constant = 1.0 / (self._static_scale * divisor)
            factor = constant if gradients.weight is None else (scale * divisor).reciprocal()
            ops.scale(sources, destinations, factor, limit)
            return
        self._finish(binding, [one.target for one in gathered], sources, scale, divisor, max_norm, loss)
        ops.scale(sources, destinations, self._state.multiplier, limit)

    def _look(self, binding: ParamGradMap, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> None:
        """Writes and clips by torch's own functions, as without a policy, and checks that all gradients are finite."""
        write_gradients(binding.optimizer, gradients)
        targets = [target for target in binding.targets if target.grad is not None]
        values = binding.own([values_of(target.grad) for target in targets])
        self._finish(binding, targets, values, self._one, 1.0, None, loss)
        if clip is not None:
            clip_gradients(binding.optimizer, clip)

    def _finish(
        self,
        binding: ParamGradMap,
        targets: list[Tensor],
        sources: list[Tensor],
        scale: Tensor,
        divisor: float,
        max_norm: float | None,
        loss: Tensor | None,
    ) -> None:
        """Computes statistics of the gradients of ``targets``, and from them the step's multiplier, norm and overflow flag."""
        scaler = self._scaler
        shared = binding.shared(targets)
        statistics = ops.gradient_statistics(sources, scale, divisor, shared=shared)
        closing, loss = self._closing(loss)
        origin, sticky = binding.nonfinite_tracker.origin, scaler is not None and scaler.sticky
        how = UnscaleArgs(self._state, scale, divisor, True, origin, sticky, closing, loss)
        how.finish(statistics, max_norm)
        sizes = [source.numel() for source in sources] if shared is None else [1] * len(sources)
        binding.stats_record = GradStatsRecord(statistics, (targets, sizes))

    def _rewrite(self, binding: ParamGradMap, seen: list[Tensor | None], clip: Clip | None) -> Tensor:
        """Reads the gradients from ``.grad`` after hooks edited them, and clips them; returns the flag that skips the step."""
        # A hook may have replaced the .grad of a half weight; the master's .grad, if unchanged, follows it.
        for holder, target, shown in zip(binding.holders, binding.targets, seen, strict=True):
            if holder is not target and holder.grad is not shown and target.grad is shown:
                target.grad = None if holder.grad is None else holder.grad.to(target.dtype)
        assert binding.found_inf is not None
        targets = [target for target in binding.targets if target.grad is not None]
        values, found_inf = binding.own([values_of(target.grad) for target in targets]), binding.found_inf
        max_norm, limit = limits(None if self._plain else clip)
        multiplier: Tensor | float = 1.0
        if self._scaler is not None or max_norm is not None:  # hooks may have written non-finite values
            self._finish(binding, targets, values, self._one, 1.0, max_norm, None)
            multiplier, found_inf = self._state.multiplier, torch.maximum(found_inf, self._state.found_inf)
        if clip is not None and self._plain:
            clip_gradients(binding.optimizer, clip)
        elif clip is not None:
            ops.scale(values, values, multiplier, limit)
        return found_inf

    def _run(self, optimizer: Optimizer, run: Callable[[], Any] | None, found_inf: Tensor) -> None:
        update = run or optimizer.step
        if self._half_on_cpu and isinstance(optimizer, torch.optim.SGD):
            leave_fused(optimizer, tell=self._strategy.rank == 0)
        if self._scaler is None:
            with torch.enable_grad():
                update()
        elif run is None and may_skip(optimizer):
            run_unless_overflow(optimizer, found_inf)
        else:
            self._tell_of_wait(optimizer, run)
            if not found_inf.item():
                with torch.enable_grad():
                    update()

    def _tell_of_wait(self, optimizer: Optimizer, run: Callable[[], Any] | None) -> None:
        if self._told or self._strategy.rank != 0 or self._strategy.device.type == "cpu":
            return
        self._told = True
        cure = (
            "leave optimizer_step to the Trainer"
            if run is not None
            else "Adam, AdamW, Adagrad and SGD without dampening decide it on the device with fused=True"
        )
        logger.warning(
            "the host waits for the device once per step, to know whether %s has to skip it (precision %r); %s",
            type(optimizer).__name__, self._name, cure,
        )  # fmt: skip

    def release(self) -> None:
        """Restores the optimizers: their own parameters and ``zero_grad``."""
        for optimizer, binding in self._bindings.items():
            binding.release()
            optimizer.__dict__.pop("zero_grad", None)


def _zero_grad(binding: ParamGradMap, optimizer: Any, set_to_none: bool = True) -> None:
    type(optimizer).zero_grad(optimizer, set_to_none)
    binding.clear()
