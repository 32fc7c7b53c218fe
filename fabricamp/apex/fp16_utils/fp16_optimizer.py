"""apex's FP16_Optimizer: adds master weights and a loss scale to any optimizer of a half model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricamp import ops
from fabricamp.apex._full_values import ScriptMasters
from fabricamp.apex.amp._parameter_lists import GroupLists
from fabricamp.apex.amp.scaler import by_device
from fabricamp.apex.fp16_utils.fp16util import clip_grad_norm
from fabricamp.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.gradients.flat import IN_PLACE
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.optimizers.refusals import owned_parameters, refuse_masters_of_scripts
from fabricamp.precision.master_weights import round_to
from fabricamp.precision.nonfinite_tracker import NonFiniteTracker
from fabricamp.precision.param_grads import ParamGradMap, create_grad


class FP16_Optimizer(GroupLists, Optimizer):  # noqa: N801  # apex's name
    """Wraps ``init_optimizer``, which then updates fp32 masters of its half weights; call ``backward(loss)`` on the wrapper.

    Use ``dynamic_loss_scale`` with ``dynamic_loss_args`` (those of :class:`DynamicLossScaler`), or ``static_loss_scale``.  The host
    reads whether gradients overflowed.  The wrapper is an ``Optimizer``, so that schedulers accept it.

    >>> model = torch.nn.Linear(2, 1).half()
    >>> optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.5), static_loss_scale=128.0, verbose=False)
    >>> optimizer.zero_grad(); optimizer.backward(model(torch.ones(1, 2).half()).sum()); optimizer.step()
    """

    optimizer: Optimizer

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        refuse_masters_of_scripts(init_optimizer, "FP16_Optimizer")
        # Not Optimizer.__init__, which would create separate groups; __setstate__ sets up the hooks of a step.
        super().__setstate__({"optimizer": init_optimizer})
        self.verbose = verbose
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.loss_scaler: LossScaler
        if dynamic_loss_scale:
            self.loss_scaler = DynamicLossScaler(**(dynamic_loss_args or {}))
        else:
            self.loss_scaler = LossScaler(static_loss_scale)
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm
        self._masters = ScriptMasters()
        self._convert(owned_parameters(init_optimizer))
        self.binding = ParamGradMap(
            init_optimizer, self._masters, NonFiniteTracker(init_optimizer, 0), sums=False, exchanged=False
        )

    def _convert(self, parameters: list[Tensor]) -> None:
        """Makes fp32 masters of half ``parameters``."""
        for parameter in parameters:
            if parameter.dtype in HALF_DTYPES:
                self._masters.convert([parameter], parameter.dtype)

    def maybe_print(self, msg: str) -> None:
        """Prints ``msg`` if ``verbose`` is set."""
        if self.verbose:
            print(msg)  # on stdout, as in apex

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803  # apex's name
        """Zeroes the gradients, or sets them to None; sets those of masters to None."""
        for parameter, updated in zip(self.binding.model_params, self.binding.master_params, strict=True):
            if parameter is not updated:
                updated.grad = None
            if parameter.grad is None or set_grads_to_None:
                parameter.grad = None
            else:
                parameter.grad = parameter.grad.detach().zero_()  # a wrapper's views cannot be detached in place

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Runs backward on the scaled loss; then calls :meth:`update_master_grads` if the argument of this name is True."""
        self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Writes unscaled gradients into ``.grad`` of the masters, and checks for overflow."""
        self.binding.refresh()
        gathered = self.binding.gather(IN_PLACE)
        if self.dynamic_loss_scale:
            self.overflow = self.loss_scaler.has_overflow([one.model_param for one in gathered])
            if self.overflow:
                return
        pairs = [create_grad(one) for one in gathered]
        for _, (sources, destinations) in by_device([source for source, _ in pairs], [to for _, to in pairs]):
            ops.scale(sources, destinations, 1.0 / self.loss_scale)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clips the norm of the masters' gradients; returns the norm before clipping, or -1 after an overflow."""
        if self.overflow:
            return -1
        return clip_grad_norm(owned_parameters(self), max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the optimizer, or skips after an overflow; ``closure`` runs forward and ``backward(loss)`` of this object."""
        scale = self.loss_scaler.loss_scale
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            self._print_overflow(scale)
            return None
        result = self.optimizer.step() if closure is None else self._step_with(closure)
        self._master_params_to_model_params()
        return result

    def _print_overflow(self, scale: float) -> None:
        self.maybe_print(
            f"OVERFLOW! Skipping step. Attempted loss scale: {scale}, reducing to {self.loss_scaler.loss_scale}"
        )

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        def run() -> Any:
            if not self.first_closure_call_this_step:
                self._master_params_to_model_params()
            self.first_closure_call_this_step = False
            with torch.enable_grad():
                loss = closure()
                while self.overflow:
                    scale = self.loss_scaler.loss_scale
                    if scale <= 1:
                        raise ConfigError(
                            "gradients are not finite at a loss scale of 1; look at the loss and the learning rate"
                        )
                    self.loss_scaler.update_scale(self.overflow)
                    self._print_overflow(scale)
                    loss = closure()
            return loss

        result = self.optimizer.step(run)
        self.first_closure_call_this_step = True
        return result

    def _master_params_to_model_params(self) -> None:
        self.binding.refresh()
        pairs = self.binding.master_pairs
        round_to([master for _, master in pairs], [half for half, _ in pairs])

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Returns the masters' gradients, group by group; None after an overflow."""
        if self.overflow:
            self.maybe_print(
                "The gradients overflowed and were not copied to the masters; there is nothing to inspect."
            )
            return None
        return [[parameter.grad for parameter in group["params"]] for group in self.param_groups]

    # -- state -----------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale, the masters and the optimizer's state, as tensors, numbers, strings, lists and dicts."""
        return {
            "loss_scaler": dict(vars(self.loss_scaler)),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of :meth:`state_dict`, or apex's, which holds the scaler as an object."""
        saved = state_dict["loss_scaler"]
        self.loss_scaler = DynamicLossScaler() if state_dict["dynamic_loss_scale"] else LossScaler()
        vars(self.loss_scaler).update(saved if isinstance(saved, dict) else vars(saved))
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        own = self.fp32_from_fp16_groups
        loaded = state_dict["fp32_from_fp16"]
        if [len(group) for group in own] != [len(group) for group in loaded]:
            raise CheckpointError(
                f"the file has masters of groups with {[len(group) for group in loaded]} half weights, this optimizer has "
                f"{[len(group) for group in own]}; build model and optimizer as they were"
            )
        for group, values in zip(own, loaded, strict=True):
            for master, value in zip(group, values, strict=True):
                master.copy_(value)
        self._master_params_to_model_params()

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("FP16_Optimizer should be saved through state_dict(), not pickled")

    def __setstate__(self, state: dict[str, Any]) -> NoReturn:
        raise RuntimeError("FP16_Optimizer should be loaded through load_state_dict(), not unpickled")

    @property
    def loss_scale(self) -> float:
        """The factor that losses are multiplied by."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        """The parameter groups of the wrapped optimizer, with masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> Any:  # type: ignore[override]  # never set here
        """The defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with masters for half ones."""
        self.optimizer.add_param_group(param_group)
        self._convert(self.optimizer.param_groups[-1]["params"])
        self.binding.refresh()
