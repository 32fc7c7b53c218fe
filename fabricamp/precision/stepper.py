"""Steps optimizers with loss scaling or half weights: statistics, one multiplier, one pass over the gradients, update or skip."""

from __future__ import annotations

import functools
import logging
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.ops.dtypes import HALF_DTYPES
from fabricamp.optimizers import FusedOptimizer
from fabricamp.precision.fused import UnscaleArgs, limits, step_fused
from fabricamp.precision.gradients import ParamGradMap, pair, values_of
from fabricamp.precision.master_weights import round_to
from fabricamp.precision.nonfinite_tracker import GradStatsRecord, NonFiniteTracker
from fabricamp.precision.plain_step import Stepper, clip_gradients, demands_closure, write_gradients
from fabricamp.precision.skipping import leave_fused, may_skip, run_unless_overflow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from fabricamp.gradients.flat import Gradients
    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.precision.base import Clip
    from fabricamp.precision.loss_scaler import LossScaler
    from fabricamp.precision.master_weights import MasterWeights
    from fabricamp.strategies.base import Strategy

logger = logging.getLogger("fabricamp")


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
