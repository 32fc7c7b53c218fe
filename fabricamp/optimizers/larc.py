"""LARC: a learning rate for each layer, around any optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricamp import ops
from fabricamp._utils.keywords import NamesKeywords
from fabricamp.errors import ConfigError
from fabricamp.ops import LarcRule, Steering
from fabricamp.ops.shards import SharedRows, is_shard, local, local_gradient
from fabricamp.optimizers.base import FusedOptimizer, from_grad_scaler
from fabricamp.optimizers.closures import FreeClosure, takes_closure
from fabricamp.optimizers.refusals import at_least_0, owned_parameters, refuse_rebuild, refuse_unreadable
from fabricamp.optimizers.rows import DeviceParams, RowsCacheKey, set_scalars

if TYPE_CHECKING:
    from fabricamp._utils.types import Closure, ParamGroup, StateDict

_OF_ONE_UPDATE: Final = "LARC has rewritten the gradients of this step alone; take the optimizer without LARC"


class LARC(NamesKeywords, Optimizer):
    """Rewrites the gradients of ``optimizer``, then steps it: a layer's rate is the ratio of its weight norm and gradient norm.

    The ratio is ``trust_coefficient * |weight| / (|gradient| + weight_decay * |weight| + eps)``.  The rate of a layer is the
    smaller of this ratio and ``lr`` with ``clip``, else (LARS) the ratio times ``lr``.  LARC applies the weight decay itself, so
    it is 0 in ``optimizer`` during its step.  If a layer's weights or gradients are all zeros, its gradient stays unchanged,
    without weight decay.  ``.grad`` is rewritten in place; the host reads nothing.

    LARC is an ``Optimizer`` for schedulers and scalers; groups, state and all other attributes are those of ``optim``.

    >>> weight = torch.nn.Parameter(torch.ones(4))
    >>> optimizer = LARC(torch.optim.SGD([weight], lr=0.1), trust_coefficient=0.02)
    >>> weight.sum().backward(); optimizer.step()
    >>> weight.data
    tensor([0.9800, 0.9800, 0.9800, 0.9800])
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"LARC wraps an optimizer, got {type(optimizer).__name__}; build one first: LARC(FusedSGD(parameters, lr=0.1))"
            )
        if isinstance(optimizer, (LARC, torch.optim.LBFGS)):
            raise ConfigError(
                f"LARC cannot wrap {type(optimizer).__name__}, which computes its gradients itself; wrap FusedSGD, or another "
                "optimizer that reads each gradient once per step"
            )
        for name, value in (("trust_coefficient", trust_coefficient), ("eps", eps)):
            if not at_least_0(value):
                raise ConfigError(f"LARC got {name}={value!r}; it has to be a number, 0 or more")
        # Not Optimizer.__init__, which would create its own groups; __setstate__ sets up the hooks of a step.
        self.__setstate__({"optim": optimizer, "trust_coefficient": trust_coefficient, "clip": clip, "eps": eps})

    def __setstate__(self, state: StateDict) -> None:
        self._parts: list[DeviceParams] | None = None
        self._rows_key: RowsCacheKey | None = None
        self._own_state: ops.StepState | None = None
        super().__setstate__(state)

    def __getstate__(self) -> StateDict:
        return {name: getattr(self, name) for name in ("optim", "trust_coefficient", "clip", "eps")}

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # while being unpickled
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``step`` reads ``found_inf`` on the device: it does if ``optim`` does and is not torch's SGD.

        torch's fused SGD leaves momentum buffers uninitialised if the first step is skipped.
        """
        return bool(getattr(self.optim, "_step_supports_amp_scaling", False)) and not isinstance(
            self.optim, torch.optim.SGD
        )

    # -- a step ----------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Rewrites the gradients and steps ``optim``; returns what ``closure`` (forward and backward, called once) returned.

        ``optim`` gets a closure that returns the same loss.  Raises :class:`ConfigError` if ``optim`` calls it after it has changed
        weights or gradients: the gradients of another forward and backward would not be LARC's.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state = from_grad_scaler(self, self._own_state)
        self._own_state = state or self._own_state
        gradients = self._gather_own()
        for part in self._parts or ():
            own = Steering(None if state is None else state.seen_from(part.device))
            if part.table is not None:
                LarcRule.launch(part.table, own)
                continue
            for index, group in enumerate(self.param_groups):
                self._rule(group).reference(part.of_group(index), own)
        torch.autograd.graph.increment_version([gradient for gradient in gradients if gradient is not None])
        with self._without_weight_decay(), self._overflow_passed_on(state):
            if closure is not None and takes_closure(self.optim):
                self.optim.step(closure=FreeClosure(self.optim, loss, _OF_ONE_UPDATE))
            else:
                self.optim.step()
        for part in self._parts or ():
            part.release()
        return loss

    def gather(self) -> None:
        """Uploads changed numbers and addresses (lr, gradients); a step does this itself, a replay needs it before."""
        self._gather_own()
        if isinstance(self.optim, FusedOptimizer):
            with self._without_weight_decay():
                self.optim.gather()

    def upload(self) -> bool:
        """Uploads changed numbers (lr and its like) before a replay; returns whether nothing else has changed."""
        if self._parts is None or not isinstance(self.optim, FusedOptimizer):
            return False
        set_scalars(self._parts, list(map(self._rule, self.param_groups)))
        with self._without_weight_decay():
            return self.optim.upload()

    def _gather_own(self) -> list[Tensor | None]:
        """Sets gradients and parameters in the rows, uploads the scalars, and returns the gradients."""
        parameters = owned_parameters(self)
        gradients = [local_gradient(parameter) if is_shard(parameter) else parameter.grad for parameter in parameters]
        if self._parts is None or self._rows_key is None or not self._rows_key.holds(parameters, gradients, None, None):
            refuse_rebuild(self, self._parts, parameters)
            refuse_unreadable(self, parameters, "parameter")
            self._parts = self._build(parameters)
            self._rows_key = RowsCacheKey(parameters, self._parts, None, None)
        for part in self._parts:
            try:
                own = part.take(gradients)
                if part.table is None:
                    part.refresh(own)
                else:
                    part.table.refresh(own)
            except (RuntimeError, ValueError):  # a sparse gradient has no address, a wrapper has address 0
                refuse_unreadable(self, gradients, "gradient")
                raise
        set_scalars(self._parts, list(map(self._rule, self.param_groups)))
        return gradients

    def _build(self, parameters: list[Tensor]) -> list[DeviceParams]:
        """Returns the rows of each device, of all parameters."""
        groups = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        indices_of: dict[torch.device, list[int]] = {}
        for index, parameter in enumerate(parameters):
            indices_of.setdefault(parameter.device, []).append(index)
        return [
            DeviceParams(
                device,
                indices,
                [groups[index] for index in indices],
                parameters=[local(parameters[index]) for index in indices],
                states=[],
                cells=[],
                copies=[None for _ in indices],
                flags=None,
                shared=SharedRows.of([parameters[index] for index in indices]),
            )
            for device, indices in indices_of.items()
        ]

    def _rule(self, group: ParamGroup) -> LarcRule:
        return LarcRule(group["lr"], group.get("weight_decay", 0.0), self.trust_coefficient, self.eps, self.clip)

    @contextlib.contextmanager
    def _without_weight_decay(self) -> Iterator[None]:
        decays = [(group, group["weight_decay"]) for group in self.param_groups if "weight_decay" in group]
        for group, _ in decays:
            group["weight_decay"] = 0.0
        try:
            yield
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay

    @contextlib.contextmanager
    def _overflow_passed_on(self, state: ops.StepState | None) -> Iterator[None]:
        """Passes ``found_inf`` to ``optim``, which then skips too; without ``grad_scale``: the gradients are already unscaled."""
        if state is None:
            yield
            return
        inner: Any = self.optim
        inner.grad_scale = None
        inner.found_inf = state.found_inf
        try:
            yield
        finally:
            del inner.grad_scale, inner.found_inf

    def forget(self) -> None:
        """Makes the next step rebuild its rows; graphs that captured a step must not be replayed afterwards."""
        self._parts = None
        if isinstance(self.optim, FusedOptimizer):
            self.optim.forget()

    # -- what belongs to the wrapped optimizer ---------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The state of ``optim``; setting it sets that of ``optim``."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The groups of ``optim``; setting them sets those of ``optim``."""
        groups: list[ParamGroup] = self.optim.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        self.optim.param_groups = groups

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets the gradients to None, or to zero; ``set_to_none=None`` takes the default of ``optim``."""
        if set_to_none is None:
            self.optim.zero_grad()
        else:
            self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds parameters to ``optim``."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> StateDict:
        """Returns the state of ``optim``; LARC itself has no state."""
        state: StateDict = self.optim.state_dict()
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads the state of ``optim``."""
        self.optim.load_state_dict(state_dict)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Registers ``hook`` to run before ``optim.state_dict()``."""
        return self.optim.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Registers ``hook`` to run after ``optim.state_dict()``."""
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Registers ``hook`` to run before ``optim.load_state_dict()``."""
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Registers ``hook`` to run after ``optim.load_state_dict()``."""
        return self.optim.register_load_state_dict_post_hook(hook, prepend)
