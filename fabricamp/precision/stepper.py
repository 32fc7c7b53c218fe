"""Steps optimizers: unscaling, overflow check and gradient clipping, then the update, or a skipped step.

A step is three launches over all parameters of an optimizer.  The host reads none of their results, unless the optimizer cannot
read the overflow flag on the device (:func:`may_skip`)::

    statistics    sums of squares of the gradients; an inf or nan makes its sum non-finite
    finish        norm, overflow flag, and one multiplier that unscales, averages and clips; may also move the loss scale
    update        parameters and optimizer state from gradients * multiplier; nothing if the overflow flag is set

    Precision.step
     +- Stepper.step                  full precision: nothing is scaled or skipped, so most steps need the update alone
     +- OptimizerStepper.step         scaled, half or checked gradients
         +- launch_step               the device's part: statistics, finish, update
         |   +- _launch_by_grad       the same for optimizers without kernels: gradients * multiplier go into .grad first
         +- note_stepped              the host's part: which parameters the statistics belong to

If hooks see the gradients, :meth:`Stepper.show` writes them into ``.grad`` before the step.  The parts of this file: the two
steppers; :class:`ParamGradMap`, the parameters and gradients of one optimizer; how an optimizer skips a step on the device;
writing and clipping ``.grad`` by torch's own functions.
"""

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

logger = logging.getLogger("fabricamp")

_grad: Final = operator.attrgetter("grad")
_params: Final = operator.itemgetter("params")


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
            self._step_fused(optimizer, gradients, clip)
            return
        if gradients is not IN_PLACE:
            write_gradients(optimizer, gradients)
        if clip is not None:
            clip_gradients(optimizer, clip)
        (run or optimizer.step)()

    def _step_fused(self, optimizer: FusedOptimizer, gradients: Gradients, clip: Clip | None) -> None:
        """Updates from the gradients in the strategy's buffers; ``.grad`` stays as it is."""
        flags = None if gradients.present is None else flags_of(gradients.present)
        optimizer.gather(gradients.tensors, None, flags)
        if clip is None and gradients.divisor == 1 and gradients.weight is None:
            optimizer.steer(None)  # the gradients are used as they are: no statistics, no finish
        else:
            device = next((parameter.device for parameter in owned_parameters(optimizer)), torch.device("cpu"))
            state = optimizer.own_state(device)
            scale = gradients.carried(state.scale)
            max_norm, max_value = clip_limits(clip)
            # Only the norm needs a pass over the gradients of its own.
            statistics = scale.new_empty(0) if max_norm is None else optimizer.statistics(scale, gradients.divisor)
            ops.finish(state, statistics, scale=scale, divisor=gradients.divisor, max_norm=max_norm)
            optimizer.steer(state, limit=max_value, skips=False)
        optimizer.step()

    def release(self) -> None:
        """Restores the optimizers."""


PLAIN: Final = Stepper()


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
        if scaler is None:
            self._scale = torch.full((), float(static_scale), dtype=torch.float32, device=device)
        elif self._several_losses:
            self._scale = self._one
        else:
            self._scale = self._state.scale
        self._warned_of_wait = False
        # A single optimizer step also finishes the training step, in the same launch.
        self._ends_training_step = len(optimizers) == 1 and not self._several_losses
        self.stats_per_optimizer = (2**31 - 1) // max(len(optimizers), 1)
        """Size of each optimizer's range of statistic numbers; the ranges do not overlap and fit into int32."""
        self._param_maps: dict[Any, ParamGradMap] = {}
        for optimizer in optimizers:
            self._add(optimizer, masters, sums=sums)
        if sums:
            self._check_sums_have_one_owner()
        self._half_on_cpu = device.type == "cpu" and any(
            parameter.dtype in HALF_DTYPES for param_map in self.param_maps for parameter in param_map.master_params
        )

    def _add(self, optimizer: Optimizer, masters: MasterWeights | None, *, sums: bool) -> None:
        # Backward may fill tensors outside of param_groups: half weights, or sums of gradients.
        gradients_elsewhere = masters is not None or sums
        scaled = self._scaler is not None or self._static_scale != 1
        if (scaled or gradients_elsewhere) and demands_closure(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__}.step runs forward and backward itself, which cannot work with loss scaling, a "
                f"nan_policy or fp32 masters (precision {self._name!r}); use precision 'O0' or 'O4' and nan_policy=None"
            )
        tracker = NonFiniteTracker(optimizer, stat_offset=len(self._param_maps) * self.stats_per_optimizer)
        exchanged = sums and self._strategy.distributed and self._strategy.world_size > 1
        param_map = ParamGradMap(optimizer, masters, tracker, sums=sums, exchanged=exchanged)
        self._param_maps[optimizer] = param_map
        if gradients_elsewhere:
            # zero_grad has to clear these gradients too.
            optimizer.zero_grad = MethodType(functools.partial(_zero_grad, param_map), optimizer)  # type: ignore[method-assign]

    def _check_sums_have_one_owner(self) -> None:
        parameters = [id(parameter) for param_map in self.param_maps for parameter in param_map.model_params]
        if len(set(parameters)) < len(parameters):
            raise ConfigError(
                f"two optimizers update the same parameter, whose fp32 sum of gradients (precision {self._name!r}) belongs to one; "
                "give each parameter to one optimizer"
            )

    @property
    def param_maps(self) -> list[ParamGradMap]:
        """The parameters and gradients of each optimizer, in the order given."""
        return list(self._param_maps.values())

    def _param_map(self, optimizer: Optimizer) -> ParamGradMap:
        param_map = self._param_maps.get(optimizer)
        if param_map is None:
            raise ConfigError(
                f"this {type(optimizer).__name__} is not one that precision {self._name!r} was set up with; "
                "step the optimizers that configure_optimizers returned"
            )
        return param_map

    # -- before a step: gradients summed over micro-batches, or shown to hooks -----------------------------------------------------

    def gradients(self, optimizer: Optimizer) -> GradientMemory:
        """Returns the memory with the gradients of ``optimizer`` before its step."""
        param_map = self._param_map(optimizer)
        param_map.refresh()
        return param_map.memory

    def collect(self, loss_id: int) -> None:
        """Moves every ``.grad`` into the sums, unscaled and checked for the scaler of ``loss_id``."""
        assert self._scaler is not None
        state = self._scaler.losses[loss_id]
        inverse = state.scale.reciprocal()
        for param_map in self._param_maps.values():
            statistics = ops.gradient_statistics(param_map.collect(inverse), state.scale)
            state.finite.mul_(torch.isfinite(statistics.sum()))

    @torch.no_grad()
    def show(self, optimizer: Optimizer, gradients: Gradients) -> None:
        """Writes unscaled, averaged gradients into ``.grad``, for hooks that read or edit them before :meth:`step`.

        A half weight and its master get the same fp32 tensor, so edits reach both.
        """
        param_map = self._param_map(optimizer)
        self._write_gradients(param_map, gradients, None, None)
        # A copy: the step checks the edited gradients, which overwrites the flag in the state.
        param_map.shown_found_inf = self._state.found_inf.clone()
        param_map.shown = list(map(_grad, param_map.master_params))
        for model_param, master in zip(param_map.model_params, param_map.master_params, strict=True):
            model_param.grad = master.grad

    # -- a step --------------------------------------------------------------------------------------------------------------------

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
        """Runs the device part of :meth:`step`: the launches of statistics, finish and update."""
        param_map = self._param_maps.get(optimizer) or self._param_map(optimizer)  # the second call raises
        if isinstance(optimizer, FusedOptimizer) and param_map.shown is None and run is None:
            # The kernels read the gradients where they are; .grad stays as it is.
            tensors, flags = param_map.tensors_and_flags(gradients)
            optimizer.gather(tensors, param_map.copies, flags)
            scale = self._scale if gradients.weight is None else gradients.carried(self._scale)
            divisor = gradients.divisor
            max_norm, max_value = clip_limits(clip)
            skips = self._scaler is not None

            # 1. Statistics, if the overflow flag or the norm is needed; else the gradients are read once, by the update.
            statistics = optimizer.statistics(scale, divisor) if skips or max_norm is not None else scale.new_empty(0)
            param_map.stats_record = GradStatsRecord(statistics)

            # 2. Finish.  With the loss it also moves the loss scale, so not if the update reads the scale again.
            self._finish(param_map, statistics, scale, divisor, max_norm, None if optimizer.reads_scale else loss)

            # 3. Update, or nothing after an overflow.
            optimizer.steer(self._state, limit=max_value, skips=skips)
            optimizer.step()
        else:
            self._launch_by_grad(optimizer, param_map, gradients, clip, run, loss)
        if param_map.sums:
            param_map.memory.clear()

    def _finish(
        self,
        param_map: ParamGradMap,
        statistics: Tensor,
        scale: Tensor,
        divisor: float,
        max_norm: float | None,
        loss: Tensor | None,
    ) -> None:
        """Launches finish: writes multiplier, norm and overflow flag to the state.

        With ``loss`` the same launch finishes the training step, if this is its only optimizer step.
        """
        scaler = self._scaler
        rule: ops.ScaleRule | None = None
        if loss is None or scaler is None or not self._ends_training_step:
            loss = None
        else:
            rule = scaler.closing()
            loss = scaler.as_loss(loss)
        ops.finish(
            self._state,
            statistics,
            scale=scale,
            divisor=divisor,
            max_norm=max_norm,
            origin=param_map.nonfinite_tracker.stat_offset,
            sticky=scaler is not None and scaler.sticky,
            closing=rule,
            loss=loss,
        )

    def note_stepped(self, optimizer: Optimizer) -> None:
        """Runs the host part of :meth:`step`: records the parameters of the statistics, and drops the used gradients."""
        param_map = self._param_maps[optimizer]
        if self._scaler is not None and param_map.stats_record is not None:
            param_map.nonfinite_tracker.note(self._scaler.steps, param_map.stats_record)
        param_map.stats_record = None
        param_map.clear(sums=False)

    # -- a step through .grad: optimizers without kernels, a replaced optimizer.step, gradients that hooks saw ---------------------

    def _launch_by_grad(
        self,
        optimizer: Optimizer,
        param_map: ParamGradMap,
        gradients: Gradients,
        clip: Clip | None,
        run: Callable[[], Any] | None,
        loss: Tensor | None,
    ) -> None:
        """Writes unscaled and clipped gradients into ``.grad``, runs the optimizer on them, and rounds its masters."""
        if param_map.shown is None:
            self._write_gradients(param_map, gradients, clip, loss)
            found_inf = self._state.found_inf
        else:
            found_inf = self._take_edits(param_map, param_map.shown, clip)
        params = zip(param_map.model_params, param_map.master_params, strict=True)
        updated = [(model_param, master) for model_param, master in params if master.grad is not None]
        self._run(optimizer, run, found_inf)
        round_to([master for _, master in updated], [model_param for model_param, _ in updated])

    def _write_gradients(
        self, param_map: ParamGradMap, gradients: Gradients, clip: Clip | None, loss: Tensor | None
    ) -> None:
        """Writes the accumulated gradients into ``.grad``, unscaled, averaged and clipped: statistics, finish, one more pass."""
        param_map.has_written_grads = True
        if self._plain:
            # torch's own functions write and clip, for the same bits as without a nan_policy; only the check is ours.
            write_gradients(param_map.optimizer, gradients)
            masters = [master for master in param_map.master_params if master.grad is not None]
            values = param_map.local_shards([values_of(master.grad) for master in masters])
            self._check(param_map, masters, values, self._one, 1.0, None, loss)
            if clip is not None:
                clip_gradients(param_map.optimizer, clip)
            return
        gathered = param_map.gather(gradients)
        filled = {id(gradient.master) for gradient in gathered}
        for master in param_map.master_params:
            if id(master) not in filled:
                master.grad = None
        pairs = [create_grad(gradient) for gradient in gathered]
        sources = param_map.local_shards([source for source, _ in pairs])
        destinations = param_map.local_shards([destination for _, destination in pairs])
        max_norm, max_value = clip_limits(clip)
        scale = gradients.carried(self._scale)
        divisor = gradients.divisor
        if self._scaler is None and max_norm is None:
            # The multiplier needs no statistics; without a weight the host knows it, and no kernel computes it.
            if gradients.weight is None:
                ops.scale(sources, destinations, 1.0 / (self._static_scale * divisor), max_value)
            else:
                ops.scale(sources, destinations, (scale * divisor).reciprocal(), max_value)
            return
        self._check(param_map, [gradient.master for gradient in gathered], sources, scale, divisor, max_norm, loss)
        ops.scale(sources, destinations, self._state.multiplier, max_value)

    def _take_edits(self, param_map: ParamGradMap, shown: list[Tensor | None], clip: Clip | None) -> Tensor:
        """Makes the step use the gradients that hooks left in ``.grad``, clipped; returns the flag that skips the step.

        ``shown`` are the tensors that :meth:`show` put there: unscaled, averaged, and checked already.  The step still has to find
        replaced tensors, to check what hooks have written, and to clip.
        """
        # Edits in place have reached the master, as it shares its .grad with the half weight.  A hook that knows the module alone
        # may also have set another .grad on the half weight; the master takes it over, unless a hook replaced the master's too.
        for model_param, master, before in zip(param_map.model_params, param_map.master_params, shown, strict=True):
            if model_param is not master and model_param.grad is not before and master.grad is before:
                master.grad = None if model_param.grad is None else model_param.grad.to(master.dtype)
        masters = [master for master in param_map.master_params if master.grad is not None]
        values = param_map.local_shards([values_of(master.grad) for master in masters])
        max_norm, max_value = clip_limits(None if self._plain else clip)
        assert param_map.shown_found_inf is not None
        found_inf = param_map.shown_found_inf
        multiplier: Tensor | float = 1.0
        if self._scaler is not None or max_norm is not None:
            # A second check, at scale 1: hooks may have written non-finite values, and the norm to clip is that of the edits.
            self._check(param_map, masters, values, self._one, 1.0, max_norm, None)
            multiplier = self._state.multiplier
            found_inf = torch.maximum(found_inf, self._state.found_inf)
        if clip is not None:
            if self._plain:
                clip_gradients(param_map.optimizer, clip)
            else:
                ops.scale(values, values, multiplier, max_value)
        return found_inf

    def _check(
        self,
        param_map: ParamGradMap,
        masters: list[Tensor],
        gradients: list[Tensor],
        scale: Tensor,
        divisor: float,
        max_norm: float | None,
        loss: Tensor | None,
    ) -> None:
        """Launches statistics and finish of the ``gradients`` of ``masters``, and keeps the record for the host."""
        shared = param_map.shared_rows(masters)
        statistics = ops.gradient_statistics(gradients, scale, divisor, shared=shared)
        self._finish(param_map, statistics, scale, divisor, max_norm, loss)
        # Sharded gradients have one statistic each, others one per chunk of their elements.
        sizes = [gradient.numel() for gradient in gradients] if shared is None else [1] * len(gradients)
        param_map.stats_record = GradStatsRecord(statistics, (masters, sizes))

    def _run(self, optimizer: Optimizer, run: Callable[[], Any] | None, found_inf: Tensor) -> None:
        """Runs ``optimizer.step``, or ``run`` in its place, unless ``found_inf`` says that the step is skipped."""
        if self._half_on_cpu and isinstance(optimizer, torch.optim.SGD):
            leave_fused(optimizer, tell=self._strategy.rank == 0)
        if self._scaler is not None and run is None and may_skip(optimizer):
            run_unless_overflow(optimizer, found_inf)
            return
        if self._scaler is not None:
            self._warn_of_wait(optimizer, run)
            if found_inf.item():
                return
        with torch.enable_grad():
            (run or optimizer.step)()

    def _warn_of_wait(self, optimizer: Optimizer, run: Callable[[], Any] | None) -> None:
        if self._warned_of_wait or self._strategy.rank != 0 or self._strategy.device.type == "cpu":
            return
        self._warned_of_wait = True
        cure = (
            "leave optimizer_step to the Trainer"
            if run is not None
            else "Adam, AdamW, Adagrad and SGD without dampening decide it on the device with fused=True"
        )
        logger.warning(
            "the host waits for the device once per step, to learn whether %s has to skip that step (precision %r); %s",
            type(optimizer).__name__, self._name, cure,
        )  # fmt: skip

    def release(self) -> None:
        """Restores the optimizers: their own parameters and ``zero_grad``."""
        for optimizer, param_map in self._param_maps.items():
            param_map.release()
            optimizer.__dict__.pop("zero_grad", None)


def _zero_grad(param_map: ParamGradMap, optimizer: Any, set_to_none: bool = True) -> None:
    type(optimizer).zero_grad(optimizer, set_to_none)
    param_map.clear()


# -- the parameters and gradients of one optimizer ---------------------------------------------------------------------------------


class Gradient(NamedTuple):
    """A gradient ``value`` with its model parameter (filled by backward) and the ``master`` that is updated."""

    model_param: Tensor
    master: Tensor
    value: Tensor


class ParamGradMap:
    """The model parameters of one optimizer, their masters and gradients, in the order of its ``param_groups``.

    ``model_params``: backward fills their ``.grad``.  ``master_params``: the optimizer updates them; the fp32 master of a half
    parameter, else the model parameter itself.
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
        self.model_params: list[Tensor] = []
        self.master_params: list[Tensor] = []
        self.master_pairs: list[tuple[Tensor, Tensor]] = []
        """The (model parameter, master) pairs with gradients that a step clears: two tensors, or summed in :attr:`memory`."""
        self.copies: list[Tensor | None] | None = None
        """For each master the half parameter that a fused step rounds it to; None if it is the model parameter itself."""
        self.sums = sums
        """Whether :attr:`memory` sums the gradients of micro-batches; ``.grad`` then holds those of one micro-batch."""
        self.memory = GradientMemory((), sums=sums)
        self.shown: list[Tensor | None] | None = None
        """The masters' gradients as hooks have got them; None if the next step shows them to nobody."""
        self.shown_found_inf: Tensor | None = None
        """The overflow flag of :attr:`shown`."""
        self.has_written_grads = False
        """Whether ``.grad`` of masters was written since the last :meth:`clear`."""
        self.stats_record: GradStatsRecord | None = None
        """The statistics of a launched step, until the host has recorded them."""
        self._masters = masters
        self._exchanged = exchanged
        self._grad_of: Callable[[Any], Any] = _grad
        self._shared_rows: SharedRows | None = None
        self.refresh()

    def refresh(self) -> None:
        """Adds parameters from calls of ``add_param_group`` since the last step; keeps the sums so far."""
        groups = self.optimizer.param_groups
        current = groups[0]["params"] if len(groups) == 1 else list(chain.from_iterable(map(_params, groups)))
        if len(current) == len(self.master_params) and all(map(operator.is_, current, self.master_params)):
            return
        known = {id(master): model_param for model_param, master in self._pairs()}
        model_params = [known.get(id(parameter), parameter) for parameter in current]
        if self._masters is not None:
            adopt(self._masters, self.optimizer)
        self.master_params = owned_parameters(self.optimizer)
        self._shared_rows = SharedRows.of(self.master_params)
        self._grad_of = local_gradient if any_shard(self.master_params) else _grad
        self.memory.hold(model_params)
        self.model_params = self.memory.parameters
        pairs = self._pairs()
        self.master_pairs = [pair for pair in pairs if self.sums or pair[0] is not pair[1]]
        if self._masters is not None:
            self.copies = [None if model_param is master else model_param for model_param, master in pairs]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.model_params, self.master_params, strict=True))

    def collect(self, multiplier: Tensor) -> list[Tensor]:
        """Adds every model parameter's ``.grad``, times ``multiplier``, to its sum, and clears it; returns the gradients added."""
        self.refresh()
        return self.memory.add(multiplier)

    def tensors_and_flags(self, gradients: Gradients) -> tuple[Sequence[Tensor | None], Sequence[Tensor] | None]:
        """Returns one gradient (or None) per master, and device flags that mark the gradients to use (None: all).

        The same as :meth:`gather` without a wait, for optimizers that read the flags on the device.
        """
        self.refresh()
        if self.sums and gradients.tensors is None:
            gradients = self._own_sums()
        if gradients.tensors is None:
            return list(map(self._grad_of, self.model_params)), None
        if gradients.present is None:
            return self._values(gradients), None
        return self._values(gradients._replace(present=None)), flags_of(gradients.present)

    def gather(self, gradients: Gradients) -> list[Gradient]:
        """Returns the accumulated gradients: those given, this process's sums, or each ``.grad``."""
        self.refresh()
        if self.sums and gradients.tensors is None:
            gradients = self._own_sums()
        return [
            Gradient(model_param, master, value)
            for (model_param, master), value in zip(self._pairs(), self._values(gradients), strict=True)
            if value is not None
        ]

    def _own_sums(self) -> Gradients:
        """Returns this process's own sums; raises :class:`ConfigError` if they have to be exchanged first."""
        if self._exchanged:
            raise ConfigError(
                "the fp32 sums of an optimizer's gradients have to be exchanged before step: give it what "
                "strategy.reduce_gradients(precision.gradients(optimizer)) returns"
            )
        return self.memory.local()

    def _values(self, gradients: Gradients) -> Sequence[Tensor | None]:
        """Returns one gradient (or None) per parameter."""
        if gradients.tensors is None:
            return list(map(_grad, self.model_params))
        if len(gradients.tensors) != len(self.model_params):
            raise ConfigError(
                f"step got {len(gradients.tensors)} gradient tensors for {len(self.model_params)} parameters; give one (or None) "
                "for each of precision.gradients(optimizer).parameters, in that order"
            )
        return gradients.values()

    def local_shards(self, gradients: list[Tensor]) -> list[Tensor]:
        """Returns this rank's shards of sharded gradients, else the gradients themselves."""
        return gradients if self._grad_of is _grad else list(map(local, gradients))

    def shared_rows(self, masters: Sequence[Tensor]) -> SharedRows | None:
        """Returns which ranks hold the other shards of ``masters``, some of :attr:`master_params`; None if nothing is sharded."""
        if self._shared_rows is None or len(masters) == len(self.master_params):
            return self._shared_rows
        wanted = set(map(id, masters))
        return self._shared_rows.chosen(
            [index for index, master in enumerate(self.master_params) if id(master) in wanted]
        )

    def clear(self, *, sums: bool = True) -> None:
        """Drops the accumulated gradients, except ``.grad`` of parameters that backward fills and the optimizer updates itself.

        ``sums`` False keeps the sums, so nothing is launched.
        """
        self.shown = None
        if sums and self.sums:
            self.memory.clear()
        for model_param, _ in self.master_pairs:
            model_param.grad = None
        if self.has_written_grads:
            self.has_written_grads = False
            for _, master in self.master_pairs:
                master.grad = None

    def release(self) -> None:
        """Puts the module's own parameters back into the optimizer, with the optimizer state of their masters."""
        self.clear()
        original = {id(master): model_param for model_param, master in self._pairs()}
        for group in self.optimizer.param_groups:
            for index, master in enumerate(group["params"]):
                model_param = original.get(id(master), master)
                if model_param is not master:
                    group["params"][index] = model_param
                    if master in self.optimizer.state:
                        self.optimizer.state[model_param] = self.optimizer.state.pop(master)


def create_grad(gradient: Gradient) -> tuple[Tensor, Tensor]:
    """Creates the master's ``.grad`` in its dtype, not filled yet; returns (source values, destination values)."""
    _, master, value = gradient
    if value.is_sparse:
        value = value.coalesce()
        master.grad = torch.sparse_coo_tensor(
            value.indices(),
            value.values().to(master.dtype, copy=True),
            value.shape,
            dtype=master.dtype,
            device=value.device,
            is_coalesced=True,
            check_invariants=False,
        )
        return value.values(), master.grad.values()
    if value.dtype == master.dtype:
        master.grad = value
        return value, value
    master.grad = torch.empty_like(master)
    return value, master.grad


def values_of(gradient: Tensor | None) -> Tensor:
    """Returns the values of a dense or sparse gradient as a dense tensor."""
    assert gradient is not None
    return gradient.coalesce().values() if gradient.is_sparse else gradient


_FLAGS: Final = WeakTensorKeyDictionary()


def flags_of(present: Tensor) -> list[Tensor]:
    """Returns one fp32 scalar tensor per parameter flag, for fused optimizers to read on the device; cached per tensor."""
    flags: list[Tensor] | None = _FLAGS.get(present)
    if flags is None:
        flags = list(present.to(torch.float32).unbind())
        _FLAGS[present] = flags
    return flags


# -- skipping a step on the device, by torch's found_inf protocol ------------------------------------------------------------------


def may_skip(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer`` can skip its next step on the device; creates the optimizer state that this needs."""
    # torch's protocol: with fused=True, ``step`` reads ``found_inf`` on the device.
    reads_found_inf = bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused", True) for group in optimizer.param_groups
    )
    return reads_found_inf and _prepare_to_skip(optimizer)


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
    optimizer.grad_scale = None
    optimizer.found_inf = found_inf
    try:
        (update or optimizer.step)()
    finally:
        del optimizer.grad_scale
        del optimizer.found_inf


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


# -- torch's own writing and clipping of .grad -------------------------------------------------------------------------------------


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


def clip_limits(clip: Clip | None) -> tuple[float | None, float | None]:
    """Returns (maximal norm, maximal value) of ``clip``; None for no limit."""
    if clip is None:
        return None, None
    return (clip.value, None) if clip.algorithm == "norm" else (None, clip.value)


@torch.no_grad()
def clip_gradients(optimizer: Optimizer, clip: Clip) -> None:
    """Clips the ``.grad`` of all parameters of ``optimizer`` by torch's own functions, for the same bits as a hand-written loop.

    Sharded gradients are clipped shard by shard, with one exchange in total; torch would exchange a norm per parameter.
    """
    parameters = [parameter for parameter in owned_parameters(optimizer) if parameter.grad is not None]
    if any_shard(parameters):
        _clip_shards(optimizer, parameters, clip)
    elif clip.algorithm == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, clip.value)
    else:
        torch.nn.utils.clip_grad_value_(parameters, clip.value)


_SHARED_ROWS: Final[WeakKeyDictionary[Any, tuple[list[Tensor], SharedRows | None]]] = WeakKeyDictionary()
"""For each optimizer the parameters clipped last, and which ranks share them."""


def _clip_shards(optimizer: Optimizer, parameters: list[Tensor], clip: Clip) -> None:
    own = list(map(local_gradient, parameters))
    if clip.algorithm == "norm":
        known = _SHARED_ROWS.get(optimizer)
        if known is None or len(known[0]) != len(parameters) or not all(map(operator.is_, known[0], parameters)):
            known = (parameters, SharedRows.of(parameters))
            _SHARED_ROWS[optimizer] = known
        scale = torch.ones((), dtype=torch.float32, device=own[0].device)
        squares = ops.gradient_statistics(own, scale, shared=known[1])
        torch._foreach_mul_(own, (clip.value / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0))
    else:
        torch._foreach_clamp_min_(own, -clip.value)
        torch._foreach_clamp_max_(own, clip.value)


def demands_closure(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer.step`` cannot be called without a closure (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
