"""From a window's gradients to an update: statistics, one multiplier, one pass, then the optimizer's own step or none."""

from __future__ import annotations

import functools
import logging
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.optimizers import FusedOptimizer
from fabricamp.precision.base import demands_closure
from fabricamp.precision.fused import FusedStep, add_up
from fabricamp.precision.gradients import Binding, Gradient
from fabricamp.precision.master_weights import round_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from fabricamp.precision.base import Clip
    from fabricamp.precision.loss_scaler import LossScaler
    from fabricamp.precision.master_weights import MasterWeights
    from fabricamp.strategies.base import Gradients, Strategy

__all__ = ["Updater"]

logger = logging.getLogger("fabricamp")


class Updater:
    """Steps optimizers whose gradients are scaled, half, or both.

    ``scaler`` None: the scale is a constant, and no step is skipped.
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
    ) -> None:
        self._strategy = strategy
        self._name = name
        self._scaler = scaler
        self._several_losses = scaler is not None and len(scaler.losses) > 1
        self._static_scale = static_scale
        self._state = scaler.state if scaler is not None else ops.StepState.on(device)
        self._one = torch.ones((), device=device)
        self._constant = torch.full((), float(static_scale), device=device)
        self._told = False
        exchanged = sums and strategy.distributed and strategy.world_size > 1
        self._bindings: dict[Any, Binding] = {}
        for optimizer in optimizers:
            self._check(optimizer, masters is not None or sums)
            binding = Binding(optimizer, masters, sums=sums, exchanged=exchanged)
            self._bindings[optimizer] = binding
            if masters is not None or sums:
                # Backward fills other tensors than those of param_groups: these have to be cleared too.
                optimizer.zero_grad = MethodType(functools.partial(_zero_grad, binding), optimizer)  # type: ignore[method-assign]
        if sums:
            self._check_shared()
        self._half_on_cpu = device.type == "cpu" and any(
            target.dtype in (torch.float16, torch.bfloat16)
            for binding in self._bindings.values()
            for target in binding.targets
        )

    def _check(self, optimizer: Optimizer, elsewhere: bool) -> None:
        scaled = self._scaler is not None or self._static_scale != 1
        if (scaled or elsewhere) and demands_closure(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__}.step runs forward and backward itself, which cannot work with loss scaling or "
                f"fp32 masters (precision {self._name!r}); use precision 'O0' or 'O4'"
            )

    def _check_shared(self) -> None:
        holders = [id(holder) for binding in self._bindings.values() for holder in binding.holders]
        if len(set(holders)) < len(holders):
            raise ConfigError(
                f"two optimizers update the same parameter, whose fp32 sum of gradients (precision {self._name!r}) belongs to one; "
                "give each parameter to one optimizer"
            )

    def _binding(self, optimizer: Optimizer) -> Binding:
        binding = self._bindings.get(optimizer)
        if binding is None:
            raise ConfigError(
                f"this {type(optimizer).__name__} is not one that precision {self._name!r} was set up with; "
                "step the optimizers that configure_optimizers returned"
            )
        return binding

    def holders(self, optimizer: Optimizer) -> list[Tensor]:
        """Returns the tensors whose ``.grad`` backward fills for ``optimizer``."""
        binding = self._binding(optimizer)
        binding.refresh()
        return binding.holders

    def sums(self, optimizer: Optimizer | None) -> list[Tensor]:
        """Returns the flat fp32 sums of one optimizer, or of all."""
        if optimizer is None and len(self._bindings) == 1:
            (optimizer,) = self._bindings
        if optimizer is not None:
            return self._binding(optimizer).flat
        return [flat for binding in self._bindings.values() for flat in binding.flat]

    def collect(self, loss_id: int | None = None) -> None:
        """Moves every ``.grad`` into the sums: as it is, or unscaled and checked for the scaler of ``loss_id``."""
        if loss_id is None:
            for binding in self._bindings.values():
                binding.collect_sums()
            return
        assert self._scaler is not None
        state = self._scaler.losses[loss_id]
        inverse = state.scale.reciprocal()
        for binding in self._bindings.values():
            statistics = ops.gradient_statistics(binding.collect_sums(inverse), state.scale)
            state.finite.mul_(torch.isfinite(statistics.sum()))

    def agree(self) -> None:
        """Makes the ranks agree which loss overflowed, before several scales move (one small exchange)."""
        if self._scaler is not None and self._several_losses and self._strategy.distributed:
            finite = self._strategy.reduce(torch.stack([state.finite for state in self._scaler.losses]), "min")
            for state, flag in zip(self._scaler.losses, finite, strict=True):
                state.finite.copy_(flag)

    @torch.no_grad()
    def unscale(self, optimizer: Optimizer, gradients: Gradients) -> None:
        """Writes unscaled, averaged gradients into ``.grad``.

        A half weight and its master get the same fp32 tensor, so that edits reach both.
        """
        binding = self._binding(optimizer)
        if binding.seen is not None:
            return
        self._write(binding, gradients, None)
        binding.found_inf = self._state.found_inf.clone()
        binding.seen = [target.grad for target in binding.targets]
        for holder, target in zip(binding.holders, binding.targets, strict=True):
            holder.grad = target.grad

    @torch.no_grad()
    def step(
        self, optimizer: Optimizer, gradients: Gradients, clip: Clip | None, run: Callable[[], Any] | None
    ) -> None:
        """Clips and updates, or skips."""
        binding = self._binding(optimizer)
        if isinstance(optimizer, FusedOptimizer) and binding.seen is None and run is None:
            self._step_fused(optimizer, binding, gradients, clip)
            return
        if binding.seen is None:
            self._write(binding, gradients, clip)
            found_inf = self._state.found_inf
        else:
            found_inf = self._rewrite(binding, binding.seen, clip)
        pairs = [pair for pair in zip(binding.targets, binding.holders, strict=True) if pair[0].grad is not None]
        self._run(optimizer, run, found_inf)
        round_to([target for target, _ in pairs], [holder for _, holder in pairs])
        binding.clear()

    def _step_fused(self, optimizer: FusedOptimizer, binding: Binding, gradients: Gradients, clip: Clip | None) -> None:
        """Statistics, finish and update; ``.grad`` stays as backward left it."""
        values, flags = binding.rows(gradients)
        step = FusedStep(self._state, self._loss_scale(), gradients.divisor, self._scaler is not None, self._strategy)
        step(optimizer, clip, gradients=values, copies=binding.copies, flags=flags)
        binding.clear()

    def _write(self, binding: Binding, gradients: Gradients, clip: Clip | None) -> None:
        gathered = binding.gather(gradients)
        filled = {id(gradient.target) for gradient in gathered}
        for target in binding.targets:
            if id(target) not in filled:
                target.grad = None
        pairs = [_pair(gradient) for gradient in gathered]
        self._scale(pairs, self._loss_scale(), gradients.divisor, clip)

    def _rewrite(self, binding: Binding, seen: list[Tensor | None], clip: Clip | None) -> Tensor:
        """Takes in what hooks made of the gradients they were shown, and clips it; returns whether the step has to be skipped."""
        for holder, target, shown in zip(binding.holders, binding.targets, seen, strict=True):
            if holder is not target and holder.grad is not shown and target.grad is shown:
                target.grad = None if holder.grad is None else holder.grad.to(target.dtype)
        assert binding.found_inf is not None
        if clip is None:
            return binding.found_inf
        values = [_values(target.grad) for target in binding.targets if target.grad is not None]
        self._scale([(value, value) for value in values], self._one, 1.0, clip)
        return torch.maximum(binding.found_inf, self._state.found_inf)

    def _loss_scale(self) -> Tensor:
        """What gradients still carry, on the device: the dynamic scale, a constant, or 1 where the sums are unscaled."""
        if self._scaler is None:
            return self._constant
        return self._one if self._several_losses else self._state.scale

    def _scale(self, pairs: list[tuple[Tensor, Tensor]], scale: Tensor, divisor: float, clip: Clip | None) -> None:
        """Statistics, finish, one pass over the gradients."""
        sources, destinations = [source for source, _ in pairs], [destination for _, destination in pairs]
        max_norm = clip.value if clip is not None and clip.algorithm == "norm" else None
        limit = clip.value if clip is not None and clip.algorithm == "value" else None
        if self._scaler is None and max_norm is None:
            static = 1.0 if scale is self._one else self._static_scale
            ops.scale(sources, destinations, 1.0 / (static * divisor), limit)
            return
        statistics = add_up(self._strategy, ops.gradient_statistics(sources, scale, divisor))
        ops.finish(self._state, statistics, scale=scale, divisor=divisor, max_norm=max_norm)
        ops.scale(sources, destinations, self._state.multiplier, limit)

    def _run(self, optimizer: Optimizer, run: Callable[[], Any] | None, found_inf: Tensor) -> None:
        update = run or optimizer.step
        if self._half_on_cpu and isinstance(optimizer, torch.optim.SGD):
            _leave_fused(optimizer, tell=self._strategy.rank == 0)
        if self._scaler is None:
            with torch.enable_grad():
                update()
        elif run is None and _skips_by_itself(optimizer) and _prepare_to_skip(optimizer):
            _run_unless_overflow(optimizer, found_inf)
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
            "fabricamp: the host waits for the device once a step, to know whether %s has to skip it (precision %r); %s",
            type(optimizer).__name__, self._name, cure,
        )  # fmt: skip

    def release(self) -> None:
        """Gives the optimizers back as they came."""
        for optimizer, binding in self._bindings.items():
            binding.release()
            optimizer.__dict__.pop("zero_grad", None)


def _zero_grad(binding: Binding, optimizer: Any, set_to_none: bool = True) -> None:
    type(optimizer).zero_grad(optimizer, set_to_none)
    binding.clear()


def _pair(gradient: Gradient) -> tuple[Tensor, Tensor]:
    """Where the values of a gradient are, and where they go: ``target.grad``, in the target's dtype."""
    _, target, value = gradient
    if value.is_sparse:
        value = value.coalesce()
        target.grad = torch.sparse_coo_tensor(
            value.indices(),
            value.values().to(target.dtype, copy=True),
            value.shape,
            is_coalesced=True,
            check_invariants=False,
        )
        return value.values(), target.grad.values()
    if value.dtype == target.dtype:
        target.grad = value
        return value, value
    target.grad = torch.empty_like(target)
    return value, target.grad


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether ``step`` reads ``found_inf`` on the device: torch's protocol for optimizers with ``fused=True``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused", True) for group in optimizer.param_groups
    )


def _leave_fused(optimizer: torch.optim.SGD, *, tell: bool) -> None:
    """Lets SGD take its plain path: on CPU, torch's fused one (seen in 2.13) leaves most half weights as they are.

    Looked at in each step, because loading an optimizer's state brings back the option that was saved.
    """
    for group in optimizer.param_groups:
        if group["fused"]:
            group["fused"] = False
            if tell:
                logger.warning(
                    "fabricamp: torch's SGD(fused=True) does not update half weights on CPU; fused=False is used"
                )
                tell = False


def _prepare_to_skip(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` may skip its next step by itself, after it was given the state that this takes.

    torch's fused SGD allocates its momentum buffers in the first step and leaves them uninitialised where that one is skipped.
    Zeros make the same first step without dampening; with dampening they do not, and the host has to decide until the buffers
    are there.
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


def _run_unless_overflow(optimizer: Any, found_inf: Tensor) -> None:
    optimizer.grad_scale, optimizer.found_inf = None, found_inf
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
