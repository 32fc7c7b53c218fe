"""LAMB for mixed precision: learning rate and step count on the device, master weights of half parameters in its state."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from fabricamp.errors import ConfigError
from fabricamp.ops import LambRule, Steering
from fabricamp.optimizers.base import FusedOptimizer
from fabricamp.optimizers.lamb import FusedLAMB
from fabricamp.optimizers.rows import Column, DeviceParams

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from fabricamp._utils.types import Closure, ParamGroup, StateDict


class _UncountedRule(LambRule):
    """LAMB without step counting: the optimizer counts the steps of each group."""

    counts: ClassVar[bool] = False


class FusedMixedPrecisionLamb(FusedLAMB):
    """LAMB; each group's ``lr`` and ``step`` are fp32 tensors on the device of its parameters.

    A group counts the steps of all its parameters together, starting from ``step``.  Parameters of ``reduced_precision_dtype``
    have fp32 masters (``param_groups_full_precision``); loading a state restores the masters and never casts.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedMixedPrecisionLamb([weight], lr=0.5)
    >>> weight.sum().backward(); optimizer.step()
    >>> weight.data, optimizer.param_groups[0]["step"]
    (tensor([0.5000, 0.5000]), tensor(1.))
    """

    options: ClassVar[tuple[str, ...]] = (*FusedLAMB.options, "reduced_precision_dtype", "first_step")
    rule: ClassVar[type[LambRule]] = _UncountedRule
    reduced_precision_dtype: torch.dtype | None = None
    first_step: int = 0
    _skip: Tensor | None = None
    _steps: tuple[Tensor, ...] = ()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        if reduced_precision_dtype not in (None, torch.float16, torch.bfloat16):
            raise ConfigError(
                f"FusedMixedPrecisionLamb got reduced_precision_dtype={reduced_precision_dtype!r}; it has to be torch.float16, "
                "torch.bfloat16 or None"
            )
        self.reduced_precision_dtype = reduced_precision_dtype
        self.first_step = step
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )

    @property
    def param_groups_full_precision(self) -> list[dict[str, list[Tensor | None]]]:
        """The groups with each parameter's master, or None (before the first step, and for parameters without a master)."""
        return [
            {"params": [self.state.get(parameter, {}).get("master_param") for parameter in group["params"]]}
            for group in self.param_groups
        ]

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group of parameters with its own ``lr`` and ``step``; also possible during training."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("step", self.first_step)
        _as_device_numbers(group, copies=True)  # groups must not share the tensor of a default lr

    def _before_rows(self) -> None:
        steps = [group["step"] for group in self.param_groups]
        if len(steps) != len(self._steps) or not all(map(operator.is_, steps, self._steps)):
            self._rows_key = None  # the user has set them
        super()._before_rows()

    def _build(
        self, parameters: Sequence[Tensor], gradients: Column, copies: Column | None, flags: Column | None
    ) -> list[DeviceParams]:
        gradients_left = iter(gradients)
        for group in self.param_groups:
            _as_device_numbers(group)
            for parameter, gradient in zip(group["params"], gradients_left, strict=False):
                if gradient is not None or self.state.get(parameter):
                    self.state[parameter]["step"] = group["step"]
        self._steps = tuple(group["step"] for group in self.param_groups)
        return super()._build(parameters, gradients, copies, flags)

    def _fill_state(self, parameter: Tensor) -> None:
        super()._fill_state(parameter)
        if parameter.dtype == self.reduced_precision_dtype and "master_param" not in self.state[parameter]:
            self.state[parameter]["master_param"] = parameter.detach().float()

    def _measure(self, steering: Steering) -> Mapping[torch.device, Tensor]:
        self._skip = steering.state.found_inf if steering.state is not None and steering.skips else None
        return super()._measure(steering)

    def step(self, closure: Closure | None = None, grad_scaler: torch.amp.GradScaler | None = None) -> Any:
        """Updates the parameters that have a gradient; returns what ``closure`` (forward and backward) returned.

        ``grad_scaler`` is torch's: its scale and its overflow flag are read on the device.
        """
        if grad_scaler is None or not grad_scaler.is_enabled():
            return self._step_and_count(closure)
        if closure is not None:
            raise ConfigError(
                "FusedMixedPrecisionLamb.step got a closure and a grad_scaler; a GradScaler allows no closure"
            )
        self.found_inf, self.grad_scale = self._overflow_and_scale(grad_scaler)
        try:
            return self._step_and_count(None)
        finally:
            del self.found_inf, self.grad_scale

    def _overflow_and_scale(self, grad_scaler: torch.amp.GradScaler) -> tuple[Tensor, Tensor | None]:
        """Returns found_inf, and the scale that the gradients still contain (None: they are already unscaled)."""
        own = grad_scaler._per_optimizer_states[id(self)]  # torch passes the scaler to step for exactly this
        unscaled = own["stage"] is OptState.UNSCALED
        if not unscaled:
            grad_scaler._check_inf_per_device(self)
        scale = grad_scaler._get_scale_async()
        assert scale is not None
        flags = [flag.to(scale.device, non_blocking=True) for flag in own["found_inf_per_device"].values()]
        found_inf = torch.stack(flags).amax() if flags else torch.zeros_like(scale)
        return found_inf, None if unscaled else scale

    @torch.no_grad()
    def _step_and_count(self, closure: Closure | None) -> Any:
        loss = FusedOptimizer.step(self, closure)  # FusedLAMB's step is wrapped in hooks, which have already run
        for group in self.param_groups:
            group["step"].add_(1.0)
            if self._skip is not None:
                group["step"].sub_(self._skip.to(group["step"].device, non_blocking=True))
        return loss

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state of this optimizer, FusedLAMB's, or apex's; ``lr`` and ``step`` are written into the existing tensors."""
        own = [(group["lr"], group["step"]) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, given, (lr, step) in zip(self.param_groups, state_dict["param_groups"], own, strict=True):
            counts = [self.state[parameter]["step"] for parameter in group["params"] if self.state.get(parameter)]
            saved = torch.stack(counts).amax() if counts else self.first_step
            _write(step, given.get("step", saved))
            _write(lr, group["lr"])
            group["lr"] = lr
            group["step"] = step


def _as_device_numbers(group: ParamGroup, *, copies: bool = False) -> None:
    """Makes ``lr`` and ``step`` of a group fp32 tensors on its parameters' device; ``copies``: always new tensors."""
    devices = {parameter.device for parameter in group["params"]}
    if len(devices) > 1:
        raise ConfigError(
            f"FusedMixedPrecisionLamb got a group with parameters on {', '.join(sorted(map(str, devices)))}; "
            "its lr and step are on one device: make one group a device"
        )
    for name in ("lr", "step"):
        value = group[name]
        own = value.device if isinstance(value, Tensor) else torch.device("cpu")  # of a group without parameters
        number = torch.as_tensor(value, dtype=torch.float32, device=next(iter(devices), own))
        if copies or number is not value or number.shape:
            group[name] = number.detach().reshape(()).clone()


def _write(cell: Tensor, value: Tensor | float) -> None:
    cell.copy_(torch.as_tensor(value, dtype=cell.dtype, device=cell.device).reshape(()))
