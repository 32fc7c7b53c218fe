"""All stages of a step in one file: how an update gets from the gradients of backward to new parameters.

Laid out once a fit, run once a step.  The usual step calls two methods of :class:`UpdatePlan` (the others are variants of ``run``).
A CUDA graph captures what the first one launches; the function of ``StepResults.repeated`` then replaces the second one::

    run(loss)   launches
      exchange      the strategy averages the gradients over the ranks, or completes their exchange
      statistics    sums of squares of the gradients; an inf or nan makes its sum non-finite
      finish        norm, overflow flag, and one multiplier that unscales, averages and clips; also moves the loss scale
      update        parameters and optimizer state from gradients * multiplier; nothing if the overflow flag is set
    after()     the host's part: which parameters the statistics belong to; the gradients that were used are dropped

The host waits for a result only if the optimizer cannot read the overflow flag on the device, or the module overrides
``optimizer_step`` (the flag is fetched before the step), or if an optimizer without kernels lacks a gradient on this rank of
several.  Four kinds of step run the same stages:

===========================================  ========================================================================
``optimizer.step`` alone                     full precision, no clipping, nothing exchanged: no other stage has work
:meth:`Stages.launch`                        the package's optimizers: their kernels read the gradients where they are
:meth:`Stages.step` by ``.grad``             other optimizers: gradients * multiplier go into ``.grad`` first, and the
                                             optimizer reads them there
:meth:`Stages.show`, then :meth:`~Stages.step`  hooks read or edit gradients, or the module overrides ``optimizer_step`` or
                                             ``configure_gradient_clipping``: ``.grad`` has unscaled ones before the step
===========================================  ========================================================================

No method checks before ``run`` what hooks may have changed since the last step.  Each change is found where the step reads the
value anyway: parameters of the groups by ``ParamGradMap.refresh``; their memory, missing gradients, state and numbers by
``FusedOptimizer.gather``.  A graph compares them before each replay (``CapturedStep.is_valid``).

For an optimizer whose step a CUDA graph cannot hold, :meth:`UpdatePlan.prepare` is captured and :meth:`UpdatePlan.step_prepared`
runs after each replay.  Together they do what ``run`` and ``after`` do; ``prepare`` also ends the training step, which ``run`` does
last.

The parts of this file: the plan, which also calls the ``step`` of another package's precision; the stages in full precision;
the stages of gradients that are scaled, half, or checked.
"""

from __future__ import annotations

import functools
import logging
import operator
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.gradients.flat import IN_PLACE, Gradients
from fabricamp.gradients.memory import GradientMemory
from fabricamp.ops.layouts import elements_of
from fabricamp.ops.shards import local_gradient
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.closures import demands_closure
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.master_weights import MasterWeights, round_to
from fabricamp.precision.nonfinite_tracker import GradStatsRecord, NonFiniteTracker
from fabricamp.precision.param_grads import Gradient, ParamGradMap, create_grad, flags_of, values_of
from fabricamp.precision.step_results import StepResults
from fabricamp.precision.torch_updates import (
    StepClosure,
    clip_gradients,
    clip_limits,
    leave_fused,
    may_skip,
    run_unless_overflow,
    write_gradients,
)
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabricamp.precision.base import Clip, Precision
    from fabricamp.precision.loss_scaler import LossScaler

logger = logging.getLogger("fabricamp")

_grad: Final = operator.attrgetter("grad")


def is_own(part: object, name: str, base: type) -> bool:
    """Returns whether method ``name`` of ``part`` is that of ``base``, or None: neither class nor object override it."""
    if getattr(part, name, None) is None:
        return True
    method = vars(part).get(name) or getattr(type(part), name, None)
    return getattr(method, "__func__", method) is getattr(base, name)


class UpdatePlan:
    """The update of one ``optimizer``, laid out for a fit: what the strategy exchanges, how ``precision`` steps.

    ``exchanges``: whether :meth:`exchange` has work; ``reduce`` does it.  Losses with weights replace both.  ``sums``: whether
    gradients are summed in memory of the precision, and ``.grad`` holds those of one micro-batch.  ``memory`` returns the gradients
    to exchange; None if the strategy finds them itself.
    """

    def __init__(self, precision: Precision, optimizer: Optimizer, strategy: Strategy, clip: Clip | None) -> None:
        self.optimizer = optimizer
        self.clip = clip
        self.reduce: Callable[[GradientMemory | None], Gradients] = strategy.reduce_gradients
        self.sums = precision.gradients(optimizer).flat is not None
        self.memory: Callable[[], GradientMemory] | None = None
        if self.sums or strategy.asks_for_parameters:
            self.memory = functools.partial(precision.gradients, optimizer)
        self.exchanges = self.sums or not is_own(strategy, "reduce_gradients", Strategy)
        self._precision = precision
        self._end = None if precision.verdicts is None else precision.verdicts.launch_end

    def run(self, loss: Tensor | None) -> None:
        """Launches the update, and the end of the training step with its ``loss``."""
        self._precision.step(self.optimizer, self.exchange(), self.clip, loss=loss)
        if self._end is not None:
            self._end(loss)

    def run_by(self, step: Callable[[], object], loss: Tensor | None) -> None:
        """As :meth:`run`, but ``step``, which gives the optimizer a closure, replaces ``optimizer.step``."""
        self._precision.step(self.optimizer, self.exchange(), self.clip, run=step, loss=loss)
        if self._end is not None:
            self._end(loss)

    def run_shown(self, loss: Tensor | None, look: Callable[[], Clip | None], run: Callable[[], object] | None) -> None:
        """As :meth:`run`, but ``look`` sees and edits unscaled gradients before, and ``run`` replaces ``optimizer.step``."""
        self._precision.step(self.optimizer, self.exchange(), run=run, look=look)
        if self._end is not None:
            self._end(loss)

    def step(self, clip: Clip | None) -> None:
        """Runs the update alone: manual optimization clips as the step asks, and ends the training step later."""
        gradients = self.reduce(self._precision.gradients(self.optimizer))
        self._precision.step(self.optimizer, gradients, clip)

    def step_by(self, step: Callable[[], object], clip: Clip | None) -> None:
        """As :meth:`step`, but ``step``, which gives the optimizer a closure, replaces ``optimizer.step``."""
        gradients = self.reduce(self._precision.gradients(self.optimizer))
        self._precision.step(self.optimizer, gradients, clip, run=step)

    def step_shown(self, look: Callable[[], Clip | None], run: Callable[[], object] | None = None) -> None:
        """As :meth:`step`, but ``look`` sees and edits unscaled gradients before, and returns how to clip them."""
        gradients = self.reduce(self._precision.gradients(self.optimizer))
        self._precision.step(self.optimizer, gradients, run=run, look=look)

    def prepare(self, loss: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
        """Launches all of :meth:`run` but the optimizer's own step and the rounding of its masters.

        Returns each updated parameter with the ``.grad`` for it.

        Only if the precision :attr:`~fabricamp.precision.Precision.splits_steps`, and for an optimizer that is not fused.
        """
        self._precision.prepare_step(self.optimizer, self.exchange(), self.clip, loss)
        if self._end is not None:
            self._end(loss)
        return [(parameter, parameter.grad) for parameter in owned_parameters(self.optimizer)]

    def step_prepared(self, step: Callable[[], object] | None = None) -> None:
        """Steps the optimizer with the gradients of :meth:`prepare` in ``.grad``, or skips; drops the used gradients.

        ``step``, which gives the optimizer a closure, replaces ``optimizer.step``.
        """
        self._precision.step_prepared(self.optimizer, step)

    def exchange(self) -> Gradients:
        """Averages the gradients over the ranks, or completes their exchange; returns where they are."""
        if not self.exchanges:
            return IN_PLACE
        return self.reduce(None if self.memory is None else self.memory())

    def after(self) -> None:
        """Does the host's part of :meth:`run`; here :meth:`Precision.step <fabricamp.precision.Precision.step>` has done it."""


class StepPlan(UpdatePlan):
    """The update in full precision, without clipping: the optimizer's own step, unless gradients are exchanged before it."""

    def run(self, loss: Tensor | None) -> None:
        """Launches the update."""
        if self.exchanges:
            super().run(loss)
        else:
            # Looked up in each step: a scheduler that is created within a run replaces ``step`` by torch's wrapper.
            self.optimizer.step()


class FusedPlan(UpdatePlan):
    """The update of one of the package's optimizers by an OptLevel whose ``step`` and ``gradients`` nobody has overridden.

    Calls the stages directly.
    """

    def __init__(
        self, stages: Stages, precision: Precision, optimizer: FusedOptimizer, strategy: Strategy, clip: Clip | None
    ) -> None:
        super().__init__(precision, optimizer, strategy, clip)
        self._gradients = stages.gradients
        if self.memory is not None:
            self.memory = stages.gradients
        # In full precision the optimizer's step enters no_grad itself; entered here, it would also cover the step's hooks.
        self._launch = torch.no_grad()(stages.launch) if isinstance(stages, ScaledStages) else stages.launch
        self.after = stages.after  # type: ignore[method-assign]  # the loop calls it without a frame in between
        # Whether the launch of finish also ends the training step, if it has the loss; results of another class have to be called.
        verdicts = precision.verdicts
        self._ends_step = verdicts is not None and is_own(verdicts, "launch_end", StepResults)
        self._ends_step &= stages.ends_step(optimizer)

    def run(self, loss: Tensor | None) -> None:
        """Launches the update, and the end of the training step with its ``loss``."""
        gradients = IN_PLACE
        if self.exchanges:
            gradients = self.reduce(None if self.memory is None else self.memory())
        self._launch(gradients, self.clip, loss)
        if self._end is not None and (loss is None or not self._ends_step):
            self._end(loss)

    def step(self, clip: Clip | None) -> None:
        """Runs the update alone: manual optimization clips as the step asks, and ends the training step later."""
        gradients = IN_PLACE
        if self.exchanges:
            gradients = self.reduce(self._gradients())
        self._launch(gradients, clip, None)
        self.after()


# -- full precision ----------------------------------------------------------------------------------------------------------------


class Stages:
    """The stages of one optimizer's update in full precision: no masters, no scale, every step is applied."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer: Any = optimizer  # its kernels' methods are called only if it is a FusedOptimizer

    def gradients(self) -> GradientMemory:
        """Returns the memory with the optimizer's gradients before its step."""
        return GradientMemory(owned_parameters(self.optimizer))

    def collect(self, loss_id: int) -> None:
        """Moves every ``.grad`` into the sums, unscaled and checked for the scaler of ``loss_id``.

        Called after each backward, if several losses have a scale each.
        """

    def show(self, gradients: Gradients) -> None:
        """Writes unscaled, averaged gradients into ``.grad``, for hooks that read or edit them before :meth:`step`."""
        if gradients is not IN_PLACE:
            write_gradients(self.optimizer, gradients)

    def step(
        self, gradients: Gradients, clip: Clip | None, run: Callable[[], object] | None, loss: Tensor | None
    ) -> None:
        """Clips and updates, or skips; ``loss``: see :meth:`Precision.step <fabricamp.precision.Precision.step>`."""
        if run is None and isinstance(self.optimizer, FusedOptimizer):
            self.launch(gradients, clip, loss)
            return
        self.prepare(gradients, clip, loss)
        (run or self.optimizer.step)()

    def prepare(self, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> None:
        """Writes averaged and clipped gradients into ``.grad``: :meth:`step` up to ``optimizer.step``."""
        if gradients is not IN_PLACE:
            write_gradients(self.optimizer, gradients)
        if clip is not None:
            clip_gradients(self.optimizer, clip)

    def step_prepared(self, run: Callable[[], object] | None = None) -> None:
        """Steps the optimizer, or skips: :meth:`step` from ``optimizer.step`` on, with the gradients of :meth:`prepare`."""
        (run or self.optimizer.step)()

    def launch(self, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> None:
        """Updates from the gradients in the strategy's buffers, by kernels; writes ``.grad`` only if hooks may look there."""
        optimizer = self.optimizer
        flags = None if gradients.present is None else flags_of(gradients.present)
        optimizer.gather(gradients.tensors, None, flags)
        state: ops.StepState | None = None
        max_value: float | None = None
        if clip is None and gradients.divisor == 1 and gradients.weight is None:
            optimizer.steer(None)  # the gradients are used as they are: no statistics, no finish
        else:
            device = next((parameter.device for parameter in owned_parameters(optimizer)), torch.device("cpu"))
            state = optimizer.own_state(device)
            scale = gradients.carried(state.scale)
            max_norm, max_value = clip_limits(clip)
            # Only the norm needs an extra pass over the gradients.
            statistics = scale.new_empty(0) if max_norm is None else optimizer.statistics(scale, gradients.divisor)
            ops.finish(state, statistics, scale=scale, divisor=gradients.divisor, max_norm=max_norm)
            optimizer.steer(state, limit=max_value, skips=False)
        optimizer.step()
        if optimizer.leaves_gradients:
            # "complete": the host does not wait for the flags of missing gradients, which are 0 in the strategy's buffers.
            write_gradients(optimizer, gradients._replace(divisor=1, weight=None, complete=True))
            if state is not None:
                used = [one for one in map(local_gradient, owned_parameters(optimizer)) if one is not None]
                ops.scale(used, used, state.multiplier, max_value)

    def ends_step(self, optimizer: FusedOptimizer) -> bool:
        """Returns whether :meth:`launch`, given the loss, also launches the end of the training step."""
        return False

    def after(self) -> None:
        """Does the host's part of a step; launches nothing."""

    def release(self) -> None:
        """Restores the optimizer."""


# -- scaled, half or checked gradients ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Scaling:
    """What the stages of all optimizers of a precision share.

    ``scaler`` None: the scale is a constant, and no step is skipped.  ``plain``: gradients are fp32 and unscaled, so torch's own
    functions write and clip them.  ``sums``: gradients are summed in memory of the precision.
    """

    strategy: Strategy
    name: str
    device: torch.device
    scaler: LossScaler | None
    static_scale: float
    masters: MasterWeights | None
    sums: bool
    plain: bool
    optimizers: int
    """The number of optimizers."""

    def __post_init__(self) -> None:
        several_losses = self.scaler is not None and len(self.scaler.losses) > 1
        self.state = ops.StepState.on(self.device) if self.scaler is None else self.scaler.state
        self.one = torch.ones((), dtype=torch.float32, device=self.device)
        # The factor in the gradients, on the device: the dynamic scale, a constant, or 1 if the sums are unscaled already.
        if self.scaler is None:
            self.scale = torch.full((), float(self.static_scale), dtype=torch.float32, device=self.device)
        elif several_losses:
            self.scale = self.one
        else:
            self.scale = self.state.scale
        # A single optimizer step also finishes the training step, in the same launch.
        self.ends_step = self.scaler is not None and self.optimizers == 1 and not several_losses
        self.stats_per_optimizer = (2**31 - 1) // max(self.optimizers, 1)
        """Size of each optimizer's range of statistic numbers; the ranges do not overlap and fit into int32."""
        self.half_on_cpu = False
        """Whether an optimizer updates half weights on a CPU."""
        self.warned_of_wait = False


class ScaledStages(Stages):
    """The stages of one optimizer's update from gradients that are scaled, half, or checked for non-finite values.

    ``number`` is the optimizer's position among those of the precision.
    """

    def __init__(self, optimizer: Optimizer, number: int, scaling: Scaling) -> None:
        super().__init__(optimizer)
        self._scaling = scaling
        self._scaler = scaling.scaler
        self._state = scaling.state
        self._scale = scaling.scale
        self._masters = scaling.masters
        self._skips = scaling.scaler is not None
        self._sticky = scaling.scaler is not None and scaling.scaler.sticky
        # Backward may fill tensors outside of param_groups: half weights, or sums of gradients.
        gradients_elsewhere = scaling.masters is not None or scaling.sums
        scaled = scaling.scaler is not None or scaling.static_scale != 1
        if (scaled or gradients_elsewhere) and demands_closure(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__}.step runs forward and backward itself, which cannot work with loss scaling, a "
                f"nan_policy or fp32 masters (precision {scaling.name!r}); use precision 'O0' or 'O4' and nan_policy=None"
            )
        tracker = NonFiniteTracker(optimizer, stat_offset=number * scaling.stats_per_optimizer)
        strategy = scaling.strategy
        exchanged = scaling.sums and strategy.distributed and strategy.world_size > 1
        if exchanged and isinstance(optimizer, torch.optim.SparseAdam):
            raise ConfigError(
                f"SparseAdam updates from sparse gradients only, and precision {scaling.name!r} exchanges the fp32 sums of several "
                "micro-batches or losses as dense ones; take torch.optim.SGD or Adagrad, accumulate_grad_batches=1, or precision "
                "'O1' or 'O4'"
            )
        self.params = ParamGradMap(optimizer, scaling.masters, tracker, sums=scaling.sums, exchanged=exchanged)
        if gradients_elsewhere:
            # zero_grad has to clear these gradients too.
            zero_grad = MethodType(functools.partial(_zero_grad, self.params), optimizer)
            optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        if scaling.masters is not None and isinstance(optimizer, FusedOptimizer):
            optimizer.after_update = self._note_update
        if scaling.device.type == "cpu":
            scaling.half_on_cpu |= any(parameter.dtype in HALF_DTYPES for parameter in self.params.master_params)

    # -- before a step: gradients summed over micro-batches, or shown to hooks -----------------------------------------------------

    def gradients(self) -> GradientMemory:
        """Returns the memory with the optimizer's gradients before its step."""
        self.params.refresh()
        return self.params.memory

    def collect(self, loss_id: int) -> None:
        """Moves every ``.grad`` into the sums, unscaled and checked for the scaler of ``loss_id``.

        Called after each backward, if several losses have a scale each.
        """
        assert self._scaler is not None
        state = self._scaler.losses[loss_id]
        statistics = ops.gradient_statistics(self.params.collect(state.scale.reciprocal()), state.scale)
        state.finite.mul_(torch.isfinite(statistics.sum()))

    @torch.no_grad()
    def show(self, gradients: Gradients) -> None:
        """Writes unscaled, averaged gradients into ``.grad``, for hooks that read or edit them before :meth:`step`.

        A half weight and its master get the same fp32 tensor, so edits reach both.
        """
        params = self.params
        self._write_gradients(gradients, None, None)
        # A copy: the step checks the edited gradients, which overwrites the flag in the state.
        params.shown_found_inf = self._state.found_inf.clone()
        params.shown = list(map(_grad, params.master_params))
        for model_param, master in zip(params.model_params, params.master_params, strict=True):
            model_param.grad = master.grad

    # -- a step --------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self, gradients: Gradients, clip: Clip | None, run: Callable[[], object] | None, loss: Tensor | None
    ) -> None:
        """Clips and updates, or skips; with ``loss`` it also finishes the training step if the same launch can do so."""
        if run is None and self.params.shown is None and isinstance(self.optimizer, FusedOptimizer):
            self.launch(gradients, clip, loss)
        else:
            self._launch_by_grad(gradients, clip, run, loss)
        self.after()

    def launch(self, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> None:
        """Launches statistics, finish and update; the kernels read the gradients where they are.

        ``.grad`` stays as it is, unless hooks may look there after the update: then one more launch unscales and clips it.
        """
        optimizer = self.optimizer
        params = self.params
        skips = self._skips
        divisor = gradients.divisor
        params.refresh()
        if self._masters is not None:
            self._masters.take_edits()
        flags = None
        if gradients.tensors is None and not params.sums:
            tensors: Sequence[Tensor | None] = list(map(params.grad_of, params.model_params))
        else:
            tensors, flags = params.tensors_and_flags(gradients)
        optimizer.gather(tensors, params.copies, flags, parameters=params.master_params)
        scale = self._scale if gradients.weight is None else gradients.carried(self._scale)
        max_norm = None
        max_value = None
        if clip is not None and clip.algorithm == "norm":
            max_norm = clip.value
        elif clip is not None:
            max_value = clip.value

        # 1. Statistics, if the overflow flag or the norm is needed; else the gradients are read once, by the update.
        statistics = optimizer.statistics(scale, divisor) if skips or max_norm is not None else scale.new_empty(0)
        params.stats_record = GradStatsRecord(statistics)

        # 2. Finish.  With the loss it also moves the loss scale, so not if the update reads the scale again.
        self._finish(statistics, scale, divisor, max_norm, None if optimizer.reads_scale else loss)

        # 3. Update, or nothing after an overflow.
        optimizer.steer(self._state, limit=max_value, skips=skips)
        optimizer.step()
        if params.sums:
            params.memory.clear()
        elif optimizer.leaves_gradients and self._masters is None:
            # "complete": the host does not wait for the flags of missing gradients, which are 0 in the strategy's buffers.
            sources, destinations = self._places(params.gather(gradients._replace(complete=True)))
            ops.scale(sources, destinations, self._state.multiplier, max_value)

    def _note_update(self, written: int) -> None:
        """Notes what the update itself has written; ``written``: the number of parameters that kernels have written."""
        assert self._masters is not None
        # Each kernel moves a counter by one, so those of all half weights need not be read if it wrote them all.
        all_by_kernels = self._scaling.optimizers == 1 and written == len(self.params.master_params)
        if written and not all_by_kernels:
            self._masters.round_edits()  # masters that the update has not rounded, as they had no gradient
        self._masters.note(halves_moved_by_one=all_by_kernels)

    def ends_step(self, optimizer: FusedOptimizer) -> bool:
        """Returns whether :meth:`launch`, given the loss, also launches the end of the training step.

        Not if the update reads the loss scale again, which must not have moved by then.
        """
        return self._scaling.ends_step and not optimizer.reads_scale

    def _finish(
        self, statistics: Tensor, scale: Tensor, divisor: float, max_norm: float | None, loss: Tensor | None
    ) -> None:
        """Launches finish: writes multiplier, norm and overflow flag to the state.

        With ``loss`` the same launch finishes the training step, if this is its only optimizer step.
        """
        rule: ops.ScaleRule | None = None
        if loss is None or not self._scaling.ends_step or self._scaler is None:
            loss = None
        else:
            rule = self._scaler.ending()
            loss = self._scaler.as_loss(loss)
        ops.finish(
            self._state,
            statistics,
            scale=scale,
            divisor=divisor,
            max_norm=max_norm,
            origin=self.params.nonfinite_tracker.stat_offset,
            sticky=self._sticky,
            ending=rule,
            loss=loss,
        )

    @torch.no_grad()
    def prepare(self, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> None:
        """Writes unscaled, averaged and clipped gradients into ``.grad`` of the updated parameters, and records the statistics."""
        self._write_gradients(gradients, clip, loss)
        self._note_statistics()
        self.params.drop_half_grads()

    @torch.no_grad()
    def step_prepared(self, run: Callable[[], object] | None = None) -> None:
        """Steps the optimizer, or skips; then rounds its masters and drops the used gradients."""
        self.params.has_written_grads = True  # by the graph, which leaves out the host's part of prepare()
        self._update_by_grad(run, self._state.found_inf)
        self.params.clear(sums=False)

    def after(self) -> None:
        """Does the host's part of a step: records the parameters of the statistics, and drops the used gradients."""
        self._note_statistics()
        self.params.clear(sums=False)

    def _note_statistics(self) -> None:
        """Records which parameters the statistics belong to."""
        params = self.params
        if params.stats_record is not None:
            if self._scaler is not None:
                params.nonfinite_tracker.note(self._scaler.steps, params.stats_record)
            params.stats_record = None

    # -- a step through .grad: optimizers without kernels, a replaced optimizer.step, gradients that hooks saw ---------------------

    def _launch_by_grad(
        self, gradients: Gradients, clip: Clip | None, run: Callable[[], object] | None, loss: Tensor | None
    ) -> None:
        """Writes unscaled and clipped gradients into ``.grad``, runs the optimizer on them, and rounds its masters."""
        params = self.params
        if params.shown is None:
            self._write_gradients(gradients, clip, loss)
            found_inf = self._state.found_inf
        else:
            found_inf = self._take_edits(params.shown, clip)
        self._update_by_grad(run, found_inf)

    def _update_by_grad(self, run: Callable[[], object] | None, found_inf: Tensor) -> None:
        """Runs the optimizer on the gradients in ``.grad``, unless ``found_inf`` is set, and rounds its masters."""
        params = self.params
        if self._masters is not None:
            self._masters.settle()
        self._run(run, found_inf)
        if self._masters is not None:
            # All of them: hooks of the step may have edited masters without a gradient.
            round_to(params.master_params, params.model_params)
            self._masters.note()
        if params.sums:
            params.memory.clear()

    def _write_gradients(self, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> None:
        """Writes the accumulated gradients into ``.grad``, unscaled, averaged and clipped: statistics, finish, one more pass."""
        params = self.params
        params.has_written_grads = True
        if self._scaling.plain:
            # torch's own functions write and clip, for the same bits as without a nan_policy; only the check is ours.
            write_gradients(self.optimizer, gradients)
            masters = [master for master in params.master_params if master.grad is not None]
            values = params.local_shards([values_of(master.grad) for master in masters])
            self._check(masters, values, self._scaling.one, 1.0, None, loss)
            if clip is not None:
                clip_gradients(self.optimizer, clip)
            return
        gathered = params.gather(gradients)
        filled = {id(gradient.master) for gradient in gathered}
        for master in params.master_params:
            if id(master) not in filled:
                master.grad = None
        sources, destinations = self._places(gathered)
        max_norm, max_value = clip_limits(clip)
        scale = gradients.carried(self._scale)
        divisor = gradients.divisor
        if self._scaler is None and max_norm is None:
            # The multiplier needs no statistics; without a weight the host knows it, and no kernel computes it.
            if gradients.weight is None:
                ops.scale(sources, destinations, 1.0 / (self._scaling.static_scale * divisor), max_value)
            else:
                ops.scale(sources, destinations, (scale * divisor).reciprocal(), max_value)
            return
        self._check([gradient.master for gradient in gathered], sources, scale, divisor, max_norm, loss)
        ops.scale(sources, destinations, self._state.multiplier, max_value)

    def _places(self, gathered: Sequence[Gradient]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the memory of these gradients, and that of the masters' ``.grad``, which is set: often the same."""
        pairs = [create_grad(gradient) for gradient in gathered]
        sources = self.params.local_shards([source for source, _ in pairs])
        destinations = self.params.local_shards([destination for _, destination in pairs])
        return sources, destinations

    def _take_edits(self, shown: list[Tensor | None], clip: Clip | None) -> Tensor:
        """Makes the step use the gradients that hooks left in ``.grad``, clipped; returns the flag that skips the step.

        ``shown`` are the tensors that :meth:`show` put there: unscaled, averaged, and checked already.  The step still has to find
        replaced tensors, to check what hooks have written, and to clip.
        """
        params = self.params
        # Edits in place have reached the master, as it shares its .grad with the half weight.  A hook that knows only the module
        # may also have set another .grad on the half weight; the master takes it over, unless a hook replaced the master's too.
        for model_param, master, before in zip(params.model_params, params.master_params, shown, strict=True):
            if model_param is not master and model_param.grad is not before and master.grad is before:
                master.grad = None if model_param.grad is None else model_param.grad.to(master.dtype)
        masters = [master for master in params.master_params if master.grad is not None]
        values = params.local_shards([values_of(master.grad) for master in masters])
        max_norm, max_value = clip_limits(None if self._scaling.plain else clip)
        assert params.shown_found_inf is not None
        found_inf = params.shown_found_inf
        multiplier: Tensor | float = 1.0
        if self._scaler is not None or max_norm is not None:
            # A second check, at scale 1: hooks may have written non-finite values, and the norm to clip is that of the edits.
            self._check(masters, values, self._scaling.one, 1.0, max_norm, None)
            multiplier = self._state.multiplier
            found_inf = torch.maximum(found_inf, self._state.found_inf)
        if clip is not None:
            if self._scaling.plain:
                clip_gradients(self.optimizer, clip)
            else:
                ops.scale(values, values, multiplier, max_value)
        return found_inf

    def _check(
        self,
        masters: list[Tensor],
        gradients: list[Tensor],
        scale: Tensor,
        divisor: float,
        max_norm: float | None,
        loss: Tensor | None,
    ) -> None:
        """Launches statistics and finish of the ``gradients`` of ``masters``, and keeps the record for the host."""
        params = self.params
        shared = params.shared_rows(masters)
        statistics = ops.gradient_statistics(gradients, scale, divisor, shared=shared)
        self._finish(statistics, scale, divisor, max_norm, loss)
        # Sharded gradients have one statistic each, others one per chunk of their elements.
        if shared is not None:
            sizes = [1] * len(gradients)
        elif params.is_complex:
            sizes = list(map(elements_of, gradients))
        else:
            sizes = [gradient.numel() for gradient in gradients]
        params.stats_record = GradStatsRecord(statistics, (masters, sizes))

    def _run(self, run: Callable[[], object] | None, found_inf: Tensor) -> None:
        """Runs ``optimizer.step``, or ``run`` in its place, unless ``found_inf`` says that the step is skipped."""
        optimizer = self.optimizer
        if self._scaling.half_on_cpu and isinstance(optimizer, torch.optim.SGD):
            leave_fused(optimizer, tell=self._scaling.strategy.rank == 0)
        is_override = run is not None and not isinstance(getattr(run, "__self__", None), StepClosure)
        if self._scaler is not None and not is_override and may_skip(optimizer):
            run_unless_overflow(optimizer, found_inf, run)
            return
        if self._scaler is not None:
            self._warn_of_wait(is_override=is_override)
            if found_inf.item():
                return
        with torch.enable_grad():
            (run or optimizer.step)()

    def _warn_of_wait(self, *, is_override: bool) -> None:
        scaling = self._scaling
        if scaling.warned_of_wait or scaling.strategy.rank != 0 or scaling.strategy.device.type == "cpu":
            return
        scaling.warned_of_wait = True
        if is_override:
            cure = "leave optimizer_step to the Trainer"
        else:
            cure = "Adam, AdamW, Adagrad and SGD without dampening decide it on the device with fused=True"
        logger.warning(
            "the host waits for the device once per step, to learn whether %s has to skip that step (precision %r); %s",
            type(self.optimizer).__name__, scaling.name, cure,
        )  # fmt: skip

    def release(self) -> None:
        """Restores the optimizer: its own parameters and ``zero_grad``."""
        self.params.release()
        self.optimizer.__dict__.pop("zero_grad", None)
        self.optimizer.__dict__.pop("after_update", None)


def _zero_grad(params: ParamGradMap, optimizer: Optimizer, set_to_none: bool = True) -> None:
    type(optimizer).zero_grad(optimizer, set_to_none)
    params.clear()
