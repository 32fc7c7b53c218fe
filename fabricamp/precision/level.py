"""The opt levels as one Precision, composed of autocast, casting, masters and loss scaling."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fabricamp.errors import ConfigError
from fabricamp.optimizers import FusedOptimizer
from fabricamp.precision.autocast import Autocast, without_autocast
from fabricamp.precision.base import Precision, Verdict
from fabricamp.precision.boundary import Boundary, InsideStep, OutsideStep
from fabricamp.precision.casting import cast_floating
from fabricamp.precision.conversion import bound, check_autocast, convert
from fabricamp.precision.loss_scaler import LAG, LossScaler
from fabricamp.precision.master_weights import MasterWeights
from fabricamp.precision.nonfinite import described
from fabricamp.precision.opt_levels import resolve
from fabricamp.precision.updates import Updater
from fabricamp.strategies.base import IN_PLACE, Gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from fabricamp.precision.base import Clip
    from fabricamp.strategies.base import Strategy

__all__ = ["OptLevel"]

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
_HALF = (torch.float16, torch.bfloat16)


class OptLevel(Precision):
    """One of O0 to O5, with what the caller overrides; None is the level's own.

    ``loss_scale`` is ``"dynamic"`` or a number; ``num_losses`` is how many ``loss_id`` there are, each with its own dynamic scale.

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
        max_loss_scale: float = 2.0**24,
        scale_window: int = 2000,
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
        self._has_sums = False
        self._has_trained = False
        self._several_losses = self.level.dynamic and self.level.num_losses > 1
        # torch's own clipping and step where neither weights nor gradients differ from what a plain loop has.
        self._plain = self.level.cast_model_type not in _HALF and self.level.loss_scale == 1.0
        self._device = torch.device("cpu")
        self._scaler: LossScaler | None = None
        self._updater: Updater | None = None
        self._module: nn.Module | None = None
        self._full = MasterWeights()
        self._handles: list[RemovableHandle] = []
        self._autocast: AbstractContextManager[None] = _NOTHING
        self._inside: AbstractContextManager[None] = _NOTHING
        self._outside: tuple[AbstractContextManager[None], AbstractContextManager[None]] = (_NOTHING, _NOTHING)
        self._saved: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """All but the scaler, whose kernels know its memory: a copy makes one of its own."""
        return {**self.__dict__, "_scaler": None}

    @property
    def lag(self) -> int:
        """How many windows later :meth:`close_window` tells what became of one; 0 where every window is applied."""
        return LAG if self.level.dynamic or self.nan_policy is not None else 0

    @property
    def follows_verdicts(self) -> bool:
        """Whether learning-rate schedules follow applied windows; not where the first one that is not applied is the end."""
        return self.level.dynamic or self.nan_policy == "skip"

    def take_nan_policy(self, policy: str | None) -> None:
        """Sets what a non-finite gradient means, before the module is converted."""
        if policy != self.nan_policy:
            self.nan_policy, self._scaler = policy, None

    @property
    def skipped_steps(self) -> int:
        """Windows skipped for overflow, as far as the host knows without waiting."""
        return self._scaler.known.skipped_steps if self._scaler is not None else 0

    @property
    def applied_steps(self) -> int:
        """Windows applied where some may be skipped, as far as the host knows without waiting."""
        return self._scaler.known.applied_steps if self._scaler is not None else 0

    @property
    def scale(self) -> float:
        """The loss scale, as far as the host knows without waiting."""
        if self._scaler is not None:
            return self._scaler.known.scale
        return 1.0 if self.level.loss_scale == "dynamic" else float(self.level.loss_scale)

    # -- set-up ------------------------------------------------------------------------------------------------------------------

    def check_device(self, device_type: str) -> None:
        """Raises :class:`ConfigError` where devices of ``device_type`` cannot compute at this level."""
        level = self.level
        dtype = level.autocast or level.cast_model_type
        if level.autocast is not None and not torch.amp.is_autocast_available(device_type):
            raise ConfigError(
                f"precision {self.name!r} needs torch.autocast, which {device_type!r} lacks; use 'O0', 'O2' or 'O3'"
            )
        if dtype is torch.float64 and device_type == "mps":
            raise ConfigError(f"precision {self.name!r} is set to float64, which {device_type!r} lacks; use 'O0'")
        if (
            dtype is torch.bfloat16
            and device_type == "cuda"
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            raise ConfigError(
                f"precision {self.name!r} needs bfloat16, which {torch.cuda.get_device_name()} lacks; use 'O1' or 'O2' (fp16)"
            )

    def convert_module(self, module: nn.Module) -> None:
        """Brings the module to the dtype that it runs in, in place; :meth:`restore_module` undoes it."""
        self.restore_module(module)
        self._device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
        self.check_device(self._device.type)
        level = self.level
        if level.autocast is not None:
            check_autocast(module, level.autocast, self.name, self._device.type)
            self._autocast = Autocast(self._device.type, level.autocast)
        converted: set[int] = set()
        if level.cast_model_type is not None:
            keep = level.keep_batchnorm_fp32
            converted = convert(module, level.cast_model_type, self._full, keep_batchnorm_fp32=keep)
        elif level.cast_model_outputs is not None:
            converted = {id(parameter) for parameter in module.parameters() if parameter.is_floating_point()}
        if converted:
            self._bound(module, converted)
        if level.autocast is not None or converted:
            self._outside = (without_autocast(self._device.type), OutsideStep())
        if self.lag and (self._scaler is None or self._scaler.device != self._device):
            self._scaler = self._new_scaler()
            self.load_state_dict(self._saved)

    def _new_scaler(self) -> LossScaler:
        return LossScaler.for_level(self.level, self._device, sticky=self.nan_policy in ("stop", "raise"))

    def _bound(self, module: nn.Module, converted: set[int]) -> None:
        dtype, outputs = self.level.cast_model_type, self.level.cast_model_outputs
        if outputs is None:
            outputs = torch.float64 if dtype is torch.float64 else torch.float32
        make = functools.partial(Boundary, dtype, outputs)
        self._handles += bound(module, converted, make, keep_batchnorm_fp32=self.level.keep_batchnorm_fp32)
        self._inside = InsideStep()

    def restore_module(self, module: nn.Module) -> None:
        """Undoes :meth:`convert_module`: weights in the dtype they came in (the masters' values) or fp64, hooks removed."""
        if self._updater is not None:
            self._updater.release()
            self._updater = self._module = None
            self._has_trained = True
        self._full.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._autocast = self._inside = _NOTHING
        self._outside = (_NOTHING, _NOTHING)

    def convert_input(self, batch: Any) -> Any:
        """Brings the floating tensors of a batch to fp64 where the module is fp64.

        Half modules cast what they are called with (:class:`Boundary`): casting whole batches would round targets too, and in
        fp16 make those above 65504 infinite.
        """
        return cast_floating(batch, torch.float64) if self.level.cast_model_type is torch.float64 else batch

    def setup_optimizers(self, module: nn.Module, optimizers: list[Optimizer], strategy: Strategy) -> None:
        """Gives the optimizers their masters, in the ``param_groups`` that they have."""
        if self._plain and self.nan_policy is None:
            return
        self._module = module
        if self._scaler is not None and self._has_trained:
            # Another fit: what the one before learnt, and its last verdicts, are not this one's.
            self._scaler, self._has_trained = self._new_scaler(), False
        masters = self._full if self.level.master_weights and not strategy.owns_master_weights else None
        self._has_sums = self._several_losses or (self.accumulating and masters is not None)
        self._updater = Updater(
            optimizers,
            strategy,
            name=self.name,
            device=self._device,
            scaler=self._scaler,
            static_scale=self.scale if self._scaler is None else 1.0,
            masters=masters,
            sums=self._has_sums,
            plain=self._plain,
        )

    # -- a step ------------------------------------------------------------------------------------------------------------------

    def gradient_holders(self, optimizer: Optimizer) -> list[Tensor]:
        """The tensors whose ``.grad`` backward fills for this optimizer: its parameters, or the half copies of its masters."""
        return super().gradient_holders(optimizer) if self._updater is None else self._updater.holders(optimizer)

    def accumulation_buffers(self, optimizer: Optimizer | None = None) -> Sequence[Tensor] | None:
        """The flat fp32 sums of half gradients, where micro-batches or losses are several; None: autograd sums them."""
        return self._updater.sums(optimizer) if self._updater is not None and self._has_sums else None

    def accumulate(self) -> None:
        """Moves the micro-batch's half gradients into the fp32 sums."""
        if self._updater is not None and self._has_sums and not self._several_losses:
            self._updater.collect()

    def window_tensors(self) -> list[Tensor]:
        """What an open window has beside ``.grad``: sums, and what is known of each of several losses."""
        losses = self._scaler.losses if self._several_losses and self._scaler is not None else []
        return [*super().window_tensors(), *(state.words for state in losses)]

    def take_window(self) -> None:
        """Takes note that :meth:`window_tensors` were written into."""
        if self._updater is not None and self._has_sums:
            self._updater.take_sums()

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs the user's step under autocast, or with the half module's boundary armed."""
        with self._autocast, self._inside:
            return step(*args)

    def backward(
        self, loss: Tensor, loss_id: int = 0, run: Callable[..., Any] = Tensor.backward, **options: Any
    ) -> None:
        """Runs ``run(loss, **options)`` on the scaled loss, fp32 at least."""
        if self._scaler is not None and self.level.dynamic:
            if not 0 <= loss_id < len(self._scaler.losses):
                raise ConfigError(
                    f"loss_id={loss_id} with precision {self.name!r} and num_losses={len(self._scaler.losses)}; "
                    f"use OptLevel({self.name!r}, num_losses={loss_id + 1})"
                )
            loss = _at_least_fp32(loss) * self._scaler.losses[loss_id].scale
        elif self.scale != 1.0:
            loss = _at_least_fp32(loss) * self.scale
        with self._outside[0], self._outside[1]:
            run(loss, **options)
        if self._several_losses and self._updater is not None:
            self._updater.collect(loss_id)

    def unscale(self, optimizer: Optimizer, gradients: Gradients = IN_PLACE) -> None:
        """Writes unscaled, averaged gradients into ``.grad``, of half weights too, for those who look at them."""
        if self._updater is None:
            super().unscale(optimizer, gradients)
        else:
            self._updater.unscale(optimizer, gradients)

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients = IN_PLACE,
        clip: Clip | None = None,
        run: Callable[[], Any] | None = None,
        loss: Tensor | None = None,
    ) -> None:
        """Unscales, clips and updates, or skips; then rounds the masters into the module."""
        if self._updater is not None and run is None and isinstance(optimizer, FusedOptimizer):
            # Nothing in it that autocast or a boundary would touch.
            self._updater.step(optimizer, gradients, clip, None, loss)
            return
        with self._outside[0], self._outside[1]:
            if self._updater is None:
                super().step(optimizer, gradients, clip, run)
            else:
                self._updater.step(optimizer, gradients, clip, run, loss)
        if torch.is_autocast_enabled(self._device.type):
            torch.clear_autocast_cache()  # a step inside the user's step: the half weights it cached are old ones

    def close_window(self, loss: Tensor | None) -> Verdict | None:
        """Ends an update window; returns what became of the window two windows ago where windows may be skipped."""
        scaler = self._scaler
        if scaler is None:
            return None
        if self._several_losses and self._updater is not None:
            self._updater.agree()
        verdict = scaler.close(loss)
        if verdict is not None and not verdict.applied and self._updater is not None:
            self._updater.look_at(scaler.overflow)
        return verdict

    def drain(self) -> list[Verdict]:
        """Reads, waiting, the verdicts that :meth:`close_window` has not told yet; they stay to be told."""
        return self._scaler.pending() if self._scaler is not None else []

    def explain(self, global_step: int) -> str:
        """Returns which gradients were not finite first, in the overflow for which the run has to end; waits for the device."""
        scaler, updater = self._scaler, self._updater
        if scaler is None or updater is None or self._module is None:
            return ""
        if self.nan_policy == "stop":
            scaler.settle()
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        blamed = [names[id(one)] for one in updater.blamed(scaler.overflow) if id(one) in names]
        return described(scaler.overflow, blamed, global_step - 1 - scaler.windows_since(scaler.overflow))

    # -- state -------------------------------------------------------------------------------------------------------------------

    def refresh_masters(self) -> None:
        """Takes the masters anew from the module's weights, after these were edited in place."""
        self._full.refresh()

    def module_state(self, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Returns ``state`` with the fp32 values behind half weights and buffers: all with masters, else those not written into."""
        return self._full.in_state(module, state, written=bool(self.level.master_weights))

    def state_dict(self) -> dict[str, Any]:
        """Level and dtypes, and where windows may be skipped the scales, counters and the verdicts on their way."""
        level = self.level
        state: dict[str, Any] = {
            "level": level.name,
            "cast_model_type": str(level.cast_model_type or level.autocast or torch.float32).removeprefix("torch."),
            "loss_scale": level.loss_scale,
        }
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave at any level; a scale starts fresh where one of the two is a constant."""
        if self._scaler is None:
            self._saved = state
        elif "scaler" in state and (state.get("loss_scale") == "dynamic") == self.level.dynamic:
            self._scaler.load_state_dict(state["scaler"])


def _at_least_fp32(loss: Tensor) -> Tensor:
    return loss.float() if loss.dtype in _HALF else loss
