"""Mixed precision: the opt levels as one Precision, composed of autocast, casting, master weights and loss scaling.

First the loss scale of a level: constant, constant with a ``nan_policy``, or dynamic with one scale per loss.  Then
:class:`OptLevel`: its options, its set-up (module, optimizers), a step (forward, backward, step), and its state.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fabricamp.errors import ConfigError
from fabricamp.ops.shards import device_of
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.precision.autocast import Autocast, without_autocast
from fabricamp.precision.base import Conversion, Precision
from fabricamp.precision.boundary import Boundary, InsideStep, OutsideStep, is_outside_step
from fabricamp.precision.casting import bounded, cast_floating, check_autocast, check_full_weights, convert
from fabricamp.precision.loss_scaler import LossScaler
from fabricamp.precision.master_weights import MasterWeights
from fabricamp.precision.mixed_dtypes import explained
from fabricamp.precision.opt_levels import DEFAULT_CEILING, DEFAULT_WINDOW, resolve
from fabricamp.precision.optimizer_step import OptimizerStep, ScaledStep, Scaling
from fabricamp.precision.step_results import StepResults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from fabricamp._utils.types import AnyBatch, StateDict, Step
    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.precision.base import Clip
    from fabricamp.precision.opt_levels import Level
    from fabricamp.strategies.base import Strategy

_CPU = torch.device("cpu")
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class ConstantScale:
    """A constant scale; every step is applied."""

    verdicts: StepResults | None = None
    scaler: LossScaler | None = None

    def __init__(self, level: Level, device: torch.device | None = None) -> None:
        self.device = device
        """The device of the scale; None before a module is known."""
        self.early: StateDict = {}
        """A state that was loaded before the scalers existed; they load it when they are made."""
        self._level = level
        self._factor = 1.0 if level.dynamic else float(level.loss_scale)

    def scaled(self, loss: Tensor, loss_id: int) -> Tensor:
        """Returns the scaled loss, in fp32 or wider."""
        loss = loss.float() if loss.dtype in HALF_DTYPES else loss
        return loss * self._factor

    def follow(self, module: nn.Module, strategy: Strategy, scaling: Scaling) -> None:
        """Stores what is needed to name the parameters with non-finite gradients."""

    def leave(self) -> None:
        """Drops module and optimizers after a run."""

    def state_dict(self) -> StateDict:
        """Returns scales, counters and step statuses not read yet."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Restores the state that :meth:`state_dict` returned."""
        self.early = state


class JudgedScale(ConstantScale):
    """A constant scale with a ``policy`` for non-finite gradients: each step has a status (applied or skipped)."""

    verdicts: StepResults
    scaler: LossScaler

    def __init__(self, level: Level, device: torch.device, policy: str | None) -> None:
        super().__init__(level, device)
        self.scaler = LossScaler.for_level(level, device, sticky=policy in ("stop", "raise"))
        self.verdicts = StepResults(self.scaler, policy, dynamic=level.dynamic)

    def follow(self, module: nn.Module, strategy: Strategy, scaling: Scaling) -> None:
        """Stores what is needed to name the parameters with non-finite gradients."""
        self.verdicts.follow(module, strategy, list(scaling.params_of.values()), scaling.stats_per_optimizer)

    def leave(self) -> None:
        """Drops module and optimizers after a run; the step statuses stay."""
        self.verdicts.leave()

    def state_dict(self) -> StateDict:
        """Returns scales, counters, step statuses not read yet, and whether schedules wait for them."""
        return {"scaler": self.scaler.state_dict(), "schedules_follow": self.verdicts.schedules_follow}

    def load_state_dict(self, state: StateDict) -> None:
        """Restores a :meth:`state_dict`; the scale starts fresh if only one of the saved and the current one is dynamic."""
        if "scaler" in state and (state.get("loss_scale") == "dynamic") == self._level.dynamic:
            self.scaler.load_state_dict(state["scaler"])


class DynamicScale(JudgedScale):
    """A dynamic scale per loss: each step has a status (applied or skipped)."""

    def scaled(self, loss: Tensor, loss_id: int) -> Tensor:
        """Returns the loss times its own scale, in fp32 or wider.

        Raises :class:`ConfigError` if ``loss_id`` is not below ``num_losses``.
        """
        losses = self.scaler.losses
        if not 0 <= loss_id < len(losses):
            name = self._level.name
            raise ConfigError(
                f"loss_id={loss_id} with precision {name!r} and num_losses={len(losses)}; "
                f"use OptLevel({name!r}, num_losses={loss_id + 1})"
            )
        loss = loss.float() if loss.dtype in HALF_DTYPES else loss
        return loss * losses[loss_id].scale


def scale_for(level: Level, device: torch.device, policy: str | None) -> ConstantScale:
    """Returns the loss scale of an opt level, with ``policy`` for non-finite gradients."""
    if level.dynamic:
        return DynamicScale(level, device, policy)
    return ConstantScale(level, device) if policy is None else JudgedScale(level, device, policy)


class OptLevel(Precision):
    """An opt level with options; None means the level's default (see the table of opt levels in README.md).

    Args:
        level: "O0" to "O5".
        cast_model_type: the dtype of the model's weights.
        keep_batchnorm_fp32: BatchNorm stays fp32.
        master_weights: the optimizer updates fp32 copies of half weights.
        loss_scale: a number, or "dynamic".
        min_loss_scale: the lowest value of a dynamic scale; None means 2**-14.
        max_loss_scale: the highest value of a dynamic scale.
        scale_window: number of steps without an overflow after which a dynamic scale is doubled.
        cast_model_outputs: the dtype of the model's outputs in your step.
        num_losses: number of losses with a dynamic scale of their own; ``loss_id`` of ``manual_backward`` is below this.

    Raises:
        ConfigError: for options that the level does not allow.

    Example:
        >>> OptLevel("O2", loss_scale="128.0", keep_batchnorm_fp32="False").name
        'O2'
    """

    def __init__(
        self,
        level: str = "O1",
        *,
        cast_model_type: torch.dtype | str | bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | str | None = None,
        loss_scale: float | str | None = None,
        min_loss_scale: float | None = None,
        max_loss_scale: float = DEFAULT_CEILING,
        scale_window: int = DEFAULT_WINDOW,
        cast_model_outputs: torch.dtype | str | None = None,
        num_losses: int = 1,
    ) -> None:
        overrides = {
            "cast_model_type": cast_model_type,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
            "scale_window": scale_window,
            "cast_model_outputs": cast_model_outputs,
            "num_losses": num_losses,
        }
        self.level = resolve(level, overrides)
        self.name = self.level.name
        self._has_trained = False
        self._shared: Scaling | None = None
        """What the steps of all optimizers share; None before :meth:`setup_optimizers`, and in full precision."""
        self._scaling = ConstantScale(self.level)
        self._several_losses = self.level.dynamic and self.level.num_losses > 1
        # Weights and gradients equal those of a plain loop, so torch's own clipping and step are used.
        self._plain = self.level.cast_model_type not in HALF_DTYPES and self.level.loss_scale == 1.0
        self._device = _CPU
        self._nan_policy: str | None = None
        self._full = MasterWeights()
        self._bounded: list[tuple[nn.Module, Boundary]] = []
        self._autocast: AbstractContextManager[None] = _NOTHING
        self._inside: AbstractContextManager[None] = _NOTHING
        self._outside: tuple[AbstractContextManager[None], AbstractContextManager[None]] | None = None

    def __getstate__(self) -> StateDict:
        """Returns the state without the scalers: their kernels hold memory addresses, so a copy makes scalers of its own."""
        scaling = ConstantScale(self.level)
        scaling.early = self._scaling.early
        return {**self.__dict__, "_scaling": scaling, "verdicts": None}

    def take_nan_policy(self, policy: str | None) -> None:
        """Sets the policy for non-finite gradients; called before the module is converted."""
        if policy != self._nan_policy:
            self._nan_policy = policy
            self._scale_by(ConstantScale(self.level))

    def check_device(self, device_type: str) -> None:
        """Raises :class:`ConfigError` if devices of ``device_type`` ("cpu" or "cuda") do not support this level."""
        self.level.check_device(device_type)

    def _scale_by(self, scaling: ConstantScale) -> None:
        scaling.early = self._scaling.early
        self._scaling = scaling
        self.verdicts = scaling.verdicts

    # -- set-up ------------------------------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> Conversion:
        """Converts the module in place to its compute dtype; returns the functions that undo it.

        ``undo`` restores the weights in their original dtype (with the masters' values) or in fp64.  ``full_state`` returns the
        fp32 values of half weights and buffers: all of them with masters, else only those not written since the conversion.
        """
        self._restore()
        with contextlib.ExitStack() as after_failure:
            after_failure.callback(self._restore)
            self._convert(module)
            after_failure.pop_all()
        in_state = functools.partial(self._full.in_state, module, written=bool(self.level.master_weights))
        return Conversion(self._restore, in_state)

    def _convert(self, module: nn.Module) -> None:
        level = self.level
        self._device = next(map(device_of, module.parameters()), _CPU)
        self.check_device(self._device.type)
        if level.autocast is not None:
            check_full_weights(module, self.name)
            check_autocast(module, level.autocast, self.name, self._device.type)
            self._autocast = Autocast(self._device.type, level.autocast)
        self._full.module = module
        converted: set[int] = set()
        if level.cast_model_type is not None:
            converted = self._convert_weights(module, level.cast_model_type)
        elif level.cast_model_outputs is not None:
            # No weight is converted, but the outputs of all modules with floating parameters are cast.
            converted = {id(parameter) for parameter in module.parameters() if parameter.is_floating_point()}
        if converted:
            self._add_boundaries(module, converted)
        if level.autocast is not None or converted:
            self._outside = (without_autocast(self._device.type), OutsideStep())
        if self._scaling.device != self._device:
            self._scale_by(scale_for(level, self._device, self._nan_policy))
            self._scaling.load_state_dict(self._scaling.early)

    def _convert_weights(self, module: nn.Module, dtype: torch.dtype) -> set[int]:
        """Converts weights and buffers to ``dtype``; returns the identities of the parameters."""
        return convert(
            module,
            dtype,
            self._full,
            keep_batchnorm_fp32=self.level.keep_batchnorm_fp32,
            whole_step=self.level.whole_step,
        )

    def _add_boundaries(self, module: nn.Module, converted: set[int]) -> None:
        dtype = self.level.cast_model_type
        output_dtype = self.level.cast_model_outputs
        if output_dtype is None:
            output_dtype = torch.float64 if dtype is torch.float64 else torch.float32
        for submodule in bounded(module, converted, keep_batchnorm_fp32=self.level.keep_batchnorm_fp32):
            boundary = Boundary(dtype, output_dtype)
            boundary.put_on(submodule)
            self._bounded.append((submodule, boundary))
        self._inside = InsideStep()

    def _restore(self) -> None:
        if self._shared is not None:
            self._has_trained = True
            self._shared.release()
            self._shared = None
        self._scaling.leave()
        self._full.restore()
        for submodule, boundary in self._bounded:
            boundary.take_off(submodule)
        self._bounded.clear()
        self._autocast = _NOTHING
        self._inside = _NOTHING
        self._outside = None

    def convert_input(self, batch: AnyBatch) -> AnyBatch:
        """Casts the floating tensors of a batch to fp64 if the module is fp64; else returns the batch unchanged.

        Half modules cast their own inputs (:class:`Boundary`).  Casting complete batches would also round the targets, and in
        fp16 it would turn targets above 65504 into infinity.
        """
        return cast_floating(batch, torch.float64) if self.level.cast_model_type is torch.float64 else batch

    def setup_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], strategy: Strategy, *, accumulates: bool = False
    ) -> None:
        """Puts master weights into the optimizers' own ``param_groups``."""
        if self._plain and self._nan_policy is None:
            super().setup_optimizers(module, optimizers, strategy, accumulates=accumulates)
            return
        if self._has_trained:
            # A second fit starts with a fresh scale and without the last step statuses of the fit before.
            self._scale_by(scale_for(self.level, self._device, self._nan_policy))
            self._has_trained = False
        masters = self._full if self.level.master_weights and not strategy.sharding.owns_master_weights else None
        self._shared = Scaling(
            strategy=strategy,
            name=self.name,
            device=_CPU if strategy.offload else self._device,
            scaler=self._scaling.scaler,
            static_scale=1.0 if self.level.dynamic else float(self.level.loss_scale),
            masters=masters,
            # Each loss has its own scale, so its gradients are unscaled before they are summed; half gradients are summed in fp32.
            sums=self._several_losses or (accumulates and masters is not None),
            plain=self._plain,
            optimizers=optimizers,
        )
        self._scaling.follow(module, strategy, self._shared)

    def gradients(self, optimizer: Optimizer) -> GradientMemory:
        """Returns the memory with this optimizer's gradients before its step."""
        if self._shared is None:
            return super().gradients(optimizer)
        params = self._shared.params(optimizer)
        params.refresh()
        return params.memory

    def step_of(self, optimizer: Optimizer, strategy: Strategy, clip: Clip | None) -> OptimizerStep:
        """Returns the step of ``optimizer`` in this fit."""
        if self._shared is None:
            return OptimizerStep(self, optimizer, strategy, clip, outside=self._outside)
        return ScaledStep(self, optimizer, strategy, clip, outside=self._outside, scaling=self._shared)

    # -- a step ------------------------------------------------------------------------------------------------------------------

    def forward(self, step: Step, *args: Any) -> Any:
        """Runs the user's step under autocast, or with the half module's boundary hooks armed."""
        self._full.round_edits()
        with self._autocast, self._inside:
            try:
                return step(*args)
            except RuntimeError as error:
                explanation = self._explained(error)
                if explanation is None:
                    raise
                raise explanation from error

    def _explained(self, error: RuntimeError) -> ConfigError | None:
        """Returns the error in place of ``error``, if the step mixed half weights with the fp32 values that modules return."""
        level, module = self.level, self._full.module
        gives_fp32 = not level.whole_step and level.cast_model_outputs in (None, torch.float32)
        if module is None or level.cast_model_type not in HALF_DTYPES or not gives_fp32:
            return None
        return explained(error, module, [bounded for bounded, _ in self._bounded], level)

    def backward(
        self, loss: Tensor, loss_id: int = 0, run: Callable[..., object] = Tensor.backward, **options: Any
    ) -> None:
        """Runs ``run(loss, **options)`` on the scaled loss, in fp32 or wider."""
        if self.level.loss_scale != 1.0:
            loss = self._scaling.scaled(loss, loss_id)
        if self._outside is None or is_outside_step(self._device.type):
            # Nearly every backward of automatic optimization: the two contexts would change nothing.
            run(loss, **options)
        else:
            with self._outside[0], self._outside[1]:
                run(loss, **options)
        if self._several_losses and self._shared is not None:
            self._shared.collect(loss_id)

    def slowness(self, *, compiled: bool) -> str:
        """Returns a line if RMSNorms are slow: torch's fused operation needs weights of the dtype that autocast gives inputs."""
        module, autocast = self._full.module, self.level.autocast
        if compiled or module is None or autocast is None:
            return ""
        weights = [layer.weight for layer in module.modules() if type(layer) is nn.RMSNorm]
        count = sum(weight is not None and weight.dtype != autocast for weight in weights)
        if count == 0:
            return ""
        norms = "1 RMSNorm has" if count == 1 else f"{count} RMSNorms have"
        return (
            f"{norms} fp32 weights and, at precision {self.name!r}, inputs in {str(autocast).removeprefix('torch.')}: torch takes "
            "several operations for each; fabricamp.nn.fuse(module) before the fit, or in configure_model(), makes them one"
        )

    # -- state -------------------------------------------------------------------------------------------------------------------

    def take_edits(self, *, look: bool = False) -> None:
        """Lets the masters take edits of the module's weights that version counters show, and the weights those of the masters."""
        self._full.settle()
        if look:
            self._full.look_for_unseen_edits()

    def note_restored_weights(self) -> None:
        """Notes that weights and their fp32 masters were written together, from an earlier state: neither was edited."""
        self._full.note()

    @contextlib.contextmanager
    def fp32_values(self, module: nn.Module) -> Iterator[dict[str, Tensor]]:
        """Yields the parameters of ``module`` by name, to be edited in place, without gradients: the fp32 values of half weights.

        At the end of the block these are rounded into the half weights, which must not be edited meanwhile.
        """
        with self._full.editable(module) as values:
            yield values

    def refresh_masters(self) -> None:
        """Lets the masters take every element of the module's weights that was changed, also through ``.data``.

        An element counts as changed if it differs from the rounded master; the others keep all bits of their masters.
        """
        self._full.refresh()

    def state_dict(self) -> StateDict:
        """Returns level and dtype; if steps may be skipped, also scales, counters and step statuses not read yet."""
        level = self.level
        return {
            "level": level.name,
            "cast_model_type": str(level.cast_model_type or level.autocast or torch.float32).removeprefix("torch."),
            "loss_scale": level.loss_scale,
            **self._scaling.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restores a :meth:`state_dict` of any level; the scale starts fresh if only one of the two is dynamic."""
        self._scaling.load_state_dict(state)
