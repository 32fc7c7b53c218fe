"""A step of one optimizer on one page: from the gradients of backward to new parameters.

An :class:`OptimizerStep` is made once a fit, by :meth:`Precision.step_of <fabricamp.precision.Precision.step_of>`.  The usual step
calls two of its methods; the others are variants of ``run``.  A CUDA graph captures what the first one launches; the function of
``StepResults.repeated`` then replaces the second one::

    run(loss)   launches
      exchange      the strategy averages the gradients over the ranks, or completes their exchange
      statistics    sums of squares of the gradients; an inf or nan makes its sum non-finite
      finish        norm, overflow flag, and one multiplier that unscales, averages and clips; also moves the loss scale
      update        parameters and optimizer state from gradients * multiplier; nothing if the overflow flag is set
      end           of the training step, unless finish has ended it; not in manual optimization, which ends it later
    after()     the host's part: which parameters the statistics belong to; the gradients that were used are dropped

The host waits for a result only if the optimizer cannot read the overflow flag on the device, or the module overrides
``optimizer_step`` (the flag is fetched before the step), or if an optimizer without kernels lacks a gradient on this rank of
several.  There are four ways from the exchanged gradients to the update:

====================================  ===============================================================================
``optimizer.step`` alone              full precision, no clipping, nothing exchanged: no other stage has work
``_launch``                           the package's optimizers: their kernels read the gradients where they are
``_write``, then ``_update``          other optimizers: gradients * multiplier go into ``.grad``, which they read
:meth:`OptimizerStep.run_shown`       hooks read or edit gradients, or the module overrides ``optimizer_step`` or
                                      ``configure_gradient_clipping``: ``.grad`` has unscaled ones before the step
====================================  ===============================================================================

No method checks before ``run`` what hooks may have changed since the last step.  Each change is found where the step reads the
value anyway: parameters of the groups by ``ParamGradMap.refresh``; their memory, missing gradients, state and numbers by
``FusedOptimizer.gather``.  A graph compares them before each replay (``CapturedStep.is_valid``).

For an optimizer whose step a CUDA graph cannot hold, :meth:`OptimizerStep.prepare` is captured, and
:meth:`OptimizerStep.finish_prepared` runs after each replay.  Together they do what ``run`` and ``after`` do; ``prepare`` also ends
the training step, which ``run`` does last.

In this order: the step in full precision; what the scaled steps of a precision share; the step of gradients that are scaled, half,
or checked.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

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
    clip_gradients,
    leave_fused,
    may_skip,
    run_unless_overflow,
    write_gradients,
)
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from fabricamp.precision.base import Clip, Precision
    from fabricamp.precision.loss_scaler import LossScaler

logger = logging.getLogger("fabricamp")

_grad: Final = operator.attrgetter("grad")
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def is_own(part: object, name: str, base: type) -> bool:
    """Returns whether method ``name`` of ``part`` is that of ``base``, or None: neither class nor object override it."""
    if getattr(part, name, None) is None:
        return True
    method = vars(part).get(name) or getattr(type(part), name, None)
    return getattr(method, "__func__", method) is getattr(base, name)


class OptimizerStep:
    """The step of one ``optimizer`` in full precision: no masters, no scale, every step is applied.

    Also the base of a precision's own steps: override :meth:`exchange` to change the gradients, or :meth:`run` and
    :meth:`run_shown` to make the update yourself.

    Args:
        precision: made this step; gives the memory of gradients (``gradients``) and the statuses of steps (``verdicts``).
        optimizer: has the parameters to update.
        strategy: exchanges the gradients.
        clip: how gradients are clipped; None: not at all.
        outside: two contexts around the optimizer's own step, without the autocast and the dtype boundary of the user's step.

    Example:
        >>> from fabricamp.precision import Clip, Precision
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> step = Precision().step_of(torch.optim.SGD([weight], lr=0.5), Strategy(), Clip(1.0))
        >>> weight.grad = torch.full((1,), 4.0)
        >>> step.run(loss=None)
        >>> step.after()
        >>> round(weight.item(), 3)
        0.5
    """

    splits: ClassVar[bool] = True
    """Whether :meth:`prepare` and :meth:`finish_prepared` do what :meth:`run` does: not if a class overrides only ``run``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "run" in vars(cls):
            cls.splits = {"prepare", "finish_prepared"} <= vars(cls).keys()

    def __init__(
        self,
        precision: Precision,
        optimizer: Optimizer,
        strategy: Strategy,
        clip: Clip | None,
        *,
        outside: tuple[AbstractContextManager[None], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.optimizer: Any = optimizer  # its kernels' methods are called only if it is a FusedOptimizer
        self.clip = clip
        self.call: Callable[[], object] | None = None
        """Called in place of ``optimizer.step``, for an optimizer that takes a closure."""
        self.reduce: Callable[[GradientMemory | None], Gradients] = strategy.reduce_gradients
        """Exchanges the gradients; losses with weights put a division around it."""
        self.memory: Callable[[], GradientMemory] = functools.partial(precision.gradients, optimizer)
        """Returns the memory with the gradients of this optimizer."""
        self.sums = self.memory().flat is not None
        """Whether gradients are summed in that memory, and ``.grad`` holds those of one micro-batch."""
        self.hands_over = self.sums or strategy.asks_for_parameters
        """Whether the strategy gets the memory, and does not know by itself where gradients are: so in manual optimization too."""
        self.exchanges = self.sums or not is_own(strategy, "reduce_gradients", Strategy)
        """Whether :meth:`exchange` has work."""
        self._by_kernels = isinstance(optimizer, FusedOptimizer)
        self._outside = outside or (_NOTHING, _NOTHING)
        self._device_type = strategy.device.type
        self._end = None if precision.verdicts is None else precision.verdicts.launch_end
        # Whether only the strategy's exchange and clipping can surround the optimizer's own step.
        self._is_bare = self._end is None and outside is None and is_own(self, "exchange", OptimizerStep)
        self._torch_clips = True
        # Whether the launch of finish also ends the training step, if it has the loss.
        self._finish_ends = False

    # -- each step runs one of these, then after() ---------------------------------------------------------------------------------

    def run(self, loss: Tensor | None) -> None:
        """Launches the update, and the end of the training step with its ``loss``; None: it ends later (manual optimization)."""
        if self._is_bare and not self.exchanges and self.clip is None:
            # Looked up in each step: a scheduler that is created within a run replaces ``step`` by torch's wrapper.
            (self.call or self.optimizer.step)()
        elif self._by_kernels and self.call is None:
            # Not within the contexts: a fused step runs nothing that autocast or a boundary affects.
            self._launch(self.exchange(), self.clip, loss)
            if loss is None or (self._end is not None and not self._finish_ends):
                self._end_step(loss)
        else:
            gradients = self.exchange()
            with self._outside[0], self._outside[1]:
                found_inf = self._write(gradients, self.clip, loss)
                self._update(None, found_inf)
            self._end_step(loss)

    def run_shown(
        self, loss: Tensor | None, look: Callable[[], Clip | None], run: Callable[[], object] | None = None
    ) -> None:
        """As :meth:`run`, but first calls ``look``, with unscaled, averaged gradients in ``.grad`` of the updated tensors.

        ``look`` may edit them, and returns how to clip them.  ``run`` is the user's ``optimizer_step``, called in place of
        ``optimizer.step``.
        """
        shown = self._show(self.exchange())
        clip = look()
        with self._outside[0], self._outside[1]:
            self._update_shown(shown, clip, run)
        self._end_step(loss)

    def after(self) -> None:
        """Does the host's part of a step; launches nothing."""

    # -- or, if a CUDA graph cannot hold the optimizer's own step, these two -------------------------------------------------------

    def prepare(self, loss: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Launches all of :meth:`run` but the optimizer's own step and the rounding of its masters.

        Returns each updated parameter with the ``.grad`` for it.  Only if the step :attr:`splits`; for optimizers without kernels.
        """
        gradients = self.exchange()
        with self._outside[0], self._outside[1]:
            self._write(gradients, self.clip, loss)
        self._note_prepared()
        self._end_step(loss)
        return [(parameter, parameter.grad) for parameter in owned_parameters(self.optimizer)]

    def finish_prepared(self) -> None:
        """Steps the optimizer with the gradients of :meth:`prepare` in ``.grad``, or skips; drops the used gradients."""
        with self._outside[0], self._outside[1]:
            self._update(None, None)

    # -- the stages, in full precision ---------------------------------------------------------------------------------------------

    def exchange(self) -> Gradients:
        """Averages the gradients over the ranks, or completes their exchange; returns where they are."""
        if not self.exchanges:
            return IN_PLACE
        return self.reduce(self.memory() if self.hands_over else None)

    def _launch(self, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> None:
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
            max_norm, max_value = _limits(clip)
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

    def _write(self, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> Tensor | None:
        """Writes unscaled, averaged and clipped gradients into ``.grad``.

        Returns the flag that skips the step; None: it is applied.  With ``loss``, one of its launches may end the training step.
        """
        if gradients is not IN_PLACE:
            write_gradients(self.optimizer, gradients)
        self._clip(clip)
        return None

    def _clip(self, clip: Clip | None) -> None:
        """Clips the gradients in ``.grad`` by torch's functions, for the same bits as in a hand-written loop; else kernels do."""
        if clip is not None and self._torch_clips:
            clip_gradients(self.optimizer, clip)

    def _update(self, run: Callable[[], object] | None, found_inf: Tensor | None) -> None:
        """Steps the optimizer with the gradients in ``.grad``, by ``run`` if the user steps it, unless ``found_inf`` is set."""
        (run or self.call or self.optimizer.step)()

    def _show(self, gradients: Gradients) -> Shown | None:
        """Writes unscaled, averaged gradients into ``.grad``, for hooks that read or edit them."""
        if gradients is not IN_PLACE:
            write_gradients(self.optimizer, gradients)
        return None

    def _update_shown(self, shown: Shown | None, clip: Clip | None, run: Callable[[], object] | None) -> None:
        """Updates from the gradients that hooks left in ``.grad``, once they are clipped."""
        if self._by_kernels and run is None and self.call is None:
            self._launch(IN_PLACE, clip, None)
        else:
            self._write(IN_PLACE, clip, None)
            self._update(run, None)

    def _note_prepared(self) -> None:
        """Does the host's part of :meth:`prepare`."""

    def _end_step(self, loss: Tensor | None) -> None:
        """Ends the training step, unless manual optimization does so later."""
        if loss is not None and self._end is not None:
            self._end(loss)
        elif loss is None and torch.is_autocast_enabled(self._device_type):
            torch.clear_autocast_cache()  # this is within the user's step, and autocast's half copies of weights are outdated now


# -- scaled, half or checked gradients ---------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """What hooks got to see: the ``gradients`` of the updated parameters, and the flag that skips the step for them."""

    gradients: list[Tensor | None]
    found_inf: Tensor


@dataclass(kw_only=True, eq=False)
class Scaling:
    """What the scaled steps of a precision share: the scale, the masters, and the gradients of each optimizer.

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
    optimizers: Sequence[Optimizer]

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
        self.ends_step = self.scaler is not None and len(self.optimizers) == 1 and not several_losses
        self.stats_per_optimizer = (2**31 - 1) // max(len(self.optimizers), 1)
        """Size of each optimizer's range of statistic numbers; the ranges do not overlap and fit into int32."""
        self.half_on_cpu = False
        """Whether an optimizer updates half weights on a CPU."""
        self.warned_of_wait = False
        for optimizer in self.optimizers:
            self._check(optimizer)
        self.params_of = {optimizer: self._params(number) for number, optimizer in enumerate(self.optimizers)}
        """The parameters of each optimizer, with their masters and gradients."""
        if self.sums:
            self._check_sums_have_one_owner()
        for optimizer, params in self.params_of.items():
            self._take_over(optimizer, params)

    def _check(self, optimizer: Optimizer) -> None:
        """Refuses an optimizer that cannot step from gradients that are scaled or elsewhere."""
        scaled = self.scaler is not None or self.static_scale != 1
        if (scaled or self._gradients_elsewhere) and demands_closure(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__}.step runs forward and backward itself, which cannot work with loss scaling, a "
                f"nan_policy or fp32 masters (precision {self.name!r}); use precision 'O0' or 'O4' and nan_policy=None"
            )
        if self._exchanged and isinstance(optimizer, torch.optim.SparseAdam):
            raise ConfigError(
                f"SparseAdam updates from sparse gradients only, and precision {self.name!r} exchanges the fp32 sums of several "
                "micro-batches or losses as dense ones; take torch.optim.SGD or Adagrad, accumulate_grad_batches=1, or precision "
                "'O1' or 'O4'"
            )

    def _params(self, number: int) -> ParamGradMap:
        """Returns the parameters of an optimizer, with their masters in its groups."""
        optimizer = self.optimizers[number]
        tracker = NonFiniteTracker(optimizer, stat_offset=number * self.stats_per_optimizer)
        params = ParamGradMap(optimizer, self.masters, tracker, sums=self.sums, exchanged=self._exchanged)
        if self.device.type == "cpu":
            self.half_on_cpu |= any(parameter.dtype in HALF_DTYPES for parameter in params.master_params)
        return params

    @property
    def _exchanged(self) -> bool:
        """Whether ranks exchange the sums."""
        return self.sums and self.strategy.distributed and self.strategy.world_size > 1

    @property
    def _gradients_elsewhere(self) -> bool:
        """Whether backward fills tensors outside of param_groups: half weights, or sums of gradients."""
        return self.masters is not None or self.sums

    def _check_sums_have_one_owner(self) -> None:
        parameters = [id(parameter) for params in self.params_of.values() for parameter in params.model_params]
        if len(set(parameters)) < len(parameters):
            raise ConfigError(
                f"two optimizers update the same parameter, whose fp32 sum of gradients (precision {self.name!r}) belongs to one; "
                "give each parameter to one optimizer"
            )

    def _take_over(self, optimizer: Any, params: ParamGradMap) -> None:
        """Makes ``zero_grad`` clear the gradients elsewhere too, and a fused optimizer tell what its update has written."""
        if self._gradients_elsewhere:
            optimizer.zero_grad = MethodType(functools.partial(_zero_grad, params), optimizer)
        if self.masters is not None and isinstance(optimizer, FusedOptimizer):
            optimizer.after_update = functools.partial(self.masters.note_update, len(self.optimizers) == 1)

    def release(self) -> None:
        """Restores the optimizers: their own parameters and ``zero_grad``."""
        for optimizer, params in self.params_of.items():
            params.release()
            optimizer.__dict__.pop("zero_grad", None)
            optimizer.__dict__.pop("after_update", None)

    def collect(self, loss_id: int) -> None:
        """Moves every ``.grad`` into the sums, unscaled and checked for the scaler of ``loss_id``.

        Called after each backward, if several losses have a scale each.
        """
        assert self.scaler is not None
        state = self.scaler.losses[loss_id]
        for params in self.params_of.values():
            statistics = ops.gradient_statistics(params.collect(state.scale.reciprocal()), state.scale)
            state.finite.mul_(torch.isfinite(statistics.sum()))

    def params(self, optimizer: Optimizer) -> ParamGradMap:
        """Returns the parameters of ``optimizer``; raises :class:`ConfigError` if it is none of this fit's."""
        params = self.params_of.get(optimizer)
        if params is None:
            raise ConfigError(
                f"this {type(optimizer).__name__} is not one that precision {self.name!r} was set up with; "
                "step the optimizers that configure_optimizers returned"
            )
        return params


class ScaledStep(OptimizerStep):
    """The step of one optimizer from gradients that are scaled, half, or checked for non-finite values."""

    def __init__(
        self,
        precision: Precision,
        optimizer: Optimizer,
        strategy: Strategy,
        clip: Clip | None,
        *,
        outside: tuple[AbstractContextManager[None], AbstractContextManager[None]] | None = None,
        scaling: Scaling,
    ) -> None:
        super().__init__(precision, optimizer, strategy, clip, outside=outside)
        self.params = scaling.params(optimizer)
        self._scaling = scaling
        self._scaler = scaling.scaler
        self._state = scaling.state
        self._scale = scaling.scale
        self._masters = scaling.masters
        self._skips = scaling.scaler is not None
        self._sticky = scaling.scaler is not None and scaling.scaler.sticky
        self._is_bare = False
        self._torch_clips = scaling.plain
        # Results of another class have to be called.  An update that reads the loss scale again must not find it moved.
        own_end = precision.verdicts is not None and is_own(precision.verdicts, "launch_end", StepResults)
        self._finish_ends = own_end and scaling.ends_step and self._by_kernels and not self.optimizer.reads_scale

    def exchange(self) -> Gradients:
        """Averages the gradients over the ranks, or completes their exchange; returns where they are."""
        self.params.refresh()
        if not self.exchanges:
            return IN_PLACE
        return self.reduce(self.params.memory if self.hands_over else None)

    # -- by kernels ----------------------------------------------------------------------------------------------------------------

    def _launch(self, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> None:
        """Launches statistics, finish and update; the kernels read the gradients where they are.

        ``.grad`` stays as it is, unless hooks may look there after the update: then one more launch unscales and clips it.
        """
        optimizer = self.optimizer
        params = self.params
        skips = self._skips
        divisor = gradients.divisor
        max_norm, max_value = _limits(clip)
        with torch.set_grad_enabled(False):  # half the time of torch.no_grad
            if self._masters is not None:
                self._masters.take_edits()
            flags = None
            if gradients.tensors is None and not params.sums:
                tensors: Sequence[Tensor | None] = list(map(params.grad_of, params.model_params))
            else:
                tensors, flags = params.tensors_and_flags(gradients)
            optimizer.gather(tensors, params.copies, flags, parameters=params.master_params)
            scale = self._scale if gradients.weight is None else gradients.carried(self._scale)

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

    def after(self) -> None:
        """Does the host's part of a step: records the parameters of the statistics, and drops the used gradients."""
        self._note_statistics()
        self.params.clear(sums=False)

    def _note_prepared(self) -> None:
        """Does the host's part of :meth:`prepare`."""
        self._note_statistics()
        self.params.drop_half_grads()

    def finish_prepared(self) -> None:
        """Steps the optimizer with the gradients of :meth:`prepare` in ``.grad``, or skips; drops the used gradients."""
        self.params.has_written_grads = True  # by the graph, which leaves out the host's part of prepare()
        super().finish_prepared()
        self.params.clear(sums=False)

    def _note_statistics(self) -> None:
        """Records which parameters the statistics belong to."""
        params = self.params
        if params.stats_record is not None:
            if self._scaler is not None:
                params.nonfinite_tracker.note(self._scaler.steps, params.stats_record)
            params.stats_record = None

    # -- a step through .grad: optimizers without kernels, a replaced optimizer.step, gradients that hooks saw ---------------------

    @torch.no_grad()
    def _write(self, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> Tensor:
        """Writes the accumulated gradients into ``.grad``, unscaled, averaged and clipped: statistics, finish, one more pass."""
        params = self.params
        params.has_written_grads = True
        if self._scaling.plain:
            # torch's own functions write and clip, for the same bits as without a nan_policy; only the check is ours.
            write_gradients(self.optimizer, gradients)
            masters = [master for master in params.master_params if master.grad is not None]
            values = params.local_shards([values_of(master.grad) for master in masters])
            self._check(masters, values, self._scaling.one, 1.0, None, loss)
        else:
            self._write_scaled(gradients, clip, loss)
        self._clip(clip)
        return self._state.found_inf

    def _write_scaled(self, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> None:
        params = self.params
        gathered = params.gather(gradients)
        filled = {id(gradient.master) for gradient in gathered}
        for master in params.master_params:
            if id(master) not in filled:
                master.grad = None
        sources, destinations = self._places(gathered)
        max_norm, max_value = _limits(clip)
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
        params = self.params
        pairs = [
            create_grad(gradient, torch.float32 if params.has_remainder(gradient.master) else None)
            for gradient in gathered
        ]
        sources = params.local_shards([source for source, _ in pairs])
        destinations = params.local_shards([destination for _, destination in pairs])
        return sources, destinations

    @torch.no_grad()
    def _update(self, run: Callable[[], object] | None, found_inf: Tensor | None) -> None:
        """Steps the optimizer with the gradients in ``.grad``, unless ``found_inf`` is set, and rounds its masters."""
        params = self.params
        if self._masters is not None:
            self._masters.settle()
        self._run(run, self._state.found_inf if found_inf is None else found_inf)
        if self._masters is not None:
            # All of them: hooks of the step may have edited masters without a gradient.
            round_to(params.master_params, params.model_params)
            self._masters.note()
        if params.sums:
            params.memory.clear()

    @torch.no_grad()
    def _show(self, gradients: Gradients) -> Shown:
        """Writes unscaled, averaged gradients into ``.grad``, for hooks that read or edit them.

        A half weight and its master get the same fp32 tensor, so edits reach both.
        """
        params = self.params
        found_inf = self._write(gradients, None, None)
        for model_param, master in zip(params.model_params, params.master_params, strict=True):
            model_param.grad = master.grad
        # A copy: the step checks the edited gradients, which overwrites the flag in the state.
        return Shown(list(map(_grad, params.master_params)), found_inf.clone())

    def _update_shown(self, shown: Shown | None, clip: Clip | None, run: Callable[[], object] | None) -> None:
        """Updates from the gradients that hooks left in ``.grad``, once they are clipped."""
        assert shown is not None
        found_inf = self._take_edits(shown, clip)
        self._update(run, found_inf)

    @torch.no_grad()
    def _take_edits(self, shown: Shown, clip: Clip | None) -> Tensor:
        """Makes the step use the gradients that hooks left in ``.grad``, clipped; returns the flag that skips the step.

        What was ``shown`` is unscaled, averaged, and checked already.  The step still has to find replaced tensors, to check what
        hooks have written, and to clip.
        """
        params = self.params
        # Edits in place have reached the master, as it shares its .grad with the half weight.  A hook that knows only the module
        # may also have set another .grad on the half weight; the master takes it over, unless a hook replaced the master's too.
        for model_param, master, before in zip(params.model_params, params.master_params, shown.gradients, strict=True):
            if model_param is not master and model_param.grad is not before and master.grad is before:
                master.grad = None if model_param.grad is None else model_param.grad.to(master.dtype)
        masters = [master for master in params.master_params if master.grad is not None]
        values = params.local_shards([values_of(master.grad) for master in masters])
        max_norm, max_value = _limits(None if self._torch_clips else clip)
        found_inf = shown.found_inf
        multiplier: Tensor | float = 1.0
        if self._scaler is not None or max_norm is not None:
            # A second check, at scale 1: hooks may have written non-finite values, and the norm to clip is that of the edits.
            self._check(masters, values, self._scaling.one, 1.0, max_norm, None)
            multiplier = self._state.multiplier
            found_inf = torch.maximum(found_inf, self._state.found_inf)
        if max_norm is not None or max_value is not None:
            ops.scale(values, values, multiplier, max_value)
        self._clip(clip)
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
        """Runs the optimizer's step, or ``run`` in its place, unless ``found_inf`` says that the step is skipped."""
        optimizer = self.optimizer
        update = run or self.call
        if self._scaling.half_on_cpu and isinstance(optimizer, torch.optim.SGD):
            leave_fused(optimizer, tell=self._scaling.strategy.rank == 0)
        if self._scaler is not None and run is None and may_skip(optimizer):
            run_unless_overflow(optimizer, found_inf, update)
            return
        if self._scaler is not None:
            self._warn_of_wait(is_override=run is not None)
            if found_inf.item():
                return
        with torch.enable_grad():
            (update or optimizer.step)()

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


def _limits(clip: Clip | None) -> tuple[float | None, float | None]:
    """Returns (maximal norm, maximal value) of ``clip``; None for no limit."""
    if clip is None:
        return None, None
    return (clip.value, None) if clip.algorithm == "norm" else (None, clip.value)


def _zero_grad(params: ParamGradMap, optimizer: Optimizer, set_to_none: bool = True) -> None:
    type(optimizer).zero_grad(optimizer, set_to_none)
    params.clear()
