"""Updates by torch's own functions: gradients in ``.grad``, clipped there; steps skipped by torch's protocol; closures.

Used for optimizers without kernels of the package, and wherever the results have to equal a hand-written loop's bit by bit.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.gradients.flat import Gradients
from fabricamp.ops.shards import SharedRows, any_shard, local_gradient
from fabricamp.optimizers.closures import calls_once
from fabricamp.optimizers.refusals import name_of, owned_parameters
from fabricamp.precision.master_weights import module_parameter

if TYPE_CHECKING:
    from fabricamp.precision.base import Clip

logger = logging.getLogger("fabricamp")

_grad: Final = operator.attrgetter("grad")
_is_sparse: Final = operator.attrgetter("is_sparse")
_version: Final = operator.attrgetter("_version")


def may_skip(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer`` can skip its next step on the device; creates the optimizer state that this needs."""
    return reads_found_inf(optimizer) and _prepare_to_skip(optimizer)


def reads_found_inf(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer.step`` reads ``found_inf`` on the device: torch's protocol, which needs ``fused=True``."""
    supports = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return supports and all(group.get("fused", True) for group in optimizer.param_groups)


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


def run_unless_overflow(optimizer: Any, found_inf: Tensor, update: Callable[[], object] | None = None) -> None:
    """Steps ``optimizer``, which reads ``found_inf`` on the device; calls ``update`` instead of ``optimizer.step`` if given.

    ``update`` is for an optimizer with a replaced ``step``.  Torch's class does not declare the two attributes that are set here.
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


@torch.no_grad()
def clip_gradients(optimizer: Optimizer, clip: Clip) -> None:
    """Clips the ``.grad`` of all parameters of ``optimizer`` by torch's own functions, for the same bits as a hand-written loop.

    Sharded gradients are clipped shard by shard, with one exchange in total; torch would exchange a norm per parameter.
    """
    parameters = owned_parameters(optimizer)
    gradients = list(map(_grad, parameters))  # read once: with many parameters this takes as long as the checks below
    if not all(map(operator.is_not, gradients, repeat(None))):
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = list(map(_grad, parameters))
    if any_shard(parameters):
        _clip_shards(optimizer, parameters, clip)
        return
    if any(map(_is_sparse, gradients)):
        parameters = list(map(_with_values_as_grad, parameters))
    if clip.algorithm == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, clip.value)
    else:
        torch.nn.utils.clip_grad_value_(parameters, clip.value)


def refuse_values_of_complex(optimizer: Optimizer) -> None:
    """Raises :class:`ConfigError` for a clip by value if a parameter of ``optimizer`` is complex: its values have no order."""
    for index, parameter in enumerate(owned_parameters(optimizer)):
        if parameter.is_complex():
            raise ConfigError(
                f"gradients are clipped by value, but {name_of(optimizer, index)} of {type(optimizer).__name__} is complex "
                f"({parameter.dtype}), and complex values have no order; clip by norm: gradient_clip_algorithm='norm'"
            )


def _with_values_as_grad(parameter: Tensor) -> Tensor:
    """Returns ``parameter``, or for a sparse ``.grad`` a tensor whose dense ``.grad`` is the memory of its values.

    torch's functions cannot clip a sparse gradient.  Its values have the same norm, once those of one position are added.
    """
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter
    parameter.grad = parameter.grad.coalesce()
    values = parameter.grad.values()
    stand_in = torch.empty_like(values)
    stand_in.grad = values
    return stand_in


_SHARED_ROWS: Final[WeakKeyDictionary[Optimizer, tuple[list[Tensor], SharedRows | None]]] = WeakKeyDictionary()
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


# -- closures ----------------------------------------------------------------------------------------------------------------------


class StepClosure:
    """The closure of each step of ``optimizer``: returns the loss, with its gradients in ``.grad``, ready for the update.

    The first call in a step returns the loss that is there, if neither the weights nor their gradients were written since the step
    began: an optimizer that calls its closure once, at its beginning, costs nothing.  Each other call runs ``again``, which returns
    the new loss; or raises :class:`ConfigError` with ``obstacle``, which says why that is impossible and what to change.
    """

    def __init__(self, optimizer: Optimizer, again: Callable[[], Any], obstacle: str) -> None:
        self.loss: Any = None
        """The loss of the step's gradients, set before each step; in manual optimization what the user's closure returned."""
        self._optimizer: Any = optimizer
        self._again = again
        self._obstacle = obstacle
        self._calls_once = calls_once(optimizer)
        self._is_first = True
        self._tensors: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._versions: list[int] = []

    def step(self) -> object:
        """Steps the optimizer with this closure."""
        return self.during(functools.partial(self._optimizer.step, closure=self))

    def during(self, step: Callable[[], object]) -> object:
        """Calls ``step``, which may call this closure any number of times."""
        self._note_versions()
        try:
            return step()
        finally:
            self._gradients = []  # keeps no gradient alive

    def __call__(self) -> Any:
        """Returns the loss."""
        is_first, self._is_first = self._is_first, False
        if is_first and self._is_unwritten():
            return self.loss
        if not self._obstacle:
            return self._again()
        # Between the calls of an optimizer that makes one, and of the module's own optimizer_step, only the module's lines ran.
        if self._calls_once and self._is_unwritten():
            return self.loss
        raise ConfigError(
            f"{type(self._optimizer).__name__}.step calls its closure a second time, or after it has changed weights or gradients: "
            f"that takes another forward and backward, which {self._obstacle}"
        )

    def _note_versions(self) -> None:
        owned = owned_parameters(self._optimizer)
        if len(owned) > len(self._tensors) or not all(map(operator.is_, owned, self._tensors)):
            halves = [half for master in owned if (half := module_parameter(master)) is not master]
            self._tensors = [*owned, *halves]
        self._is_first = True
        self._gradients = list(map(_grad, self._tensors))
        self._versions = self._current_versions()

    def _is_unwritten(self) -> bool:
        same = all(map(operator.is_, map(_grad, self._tensors), self._gradients))
        return same and self._current_versions() == self._versions

    def _current_versions(self) -> list[int]:
        gradients = [gradient for gradient in self._gradients if gradient is not None]
        return list(map(_version, [*self._tensors, *gradients]))
