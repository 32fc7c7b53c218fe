"""The parameters of one optimizer with their masters and gradients: what backward fills, and what the optimizer updates."""

from __future__ import annotations

import operator
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from fabricamp.errors import ConfigError
from fabricamp.gradients.flat import Gradients
from fabricamp.gradients.memory import GradientMemory
from fabricamp.ops.shards import SharedRows, any_shard, local, local_gradient
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.master_weights import MasterWeights, adopt
from fabricamp.precision.nonfinite_tracker import GradStatsRecord, NonFiniteTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_grad: Final = operator.attrgetter("grad")
_params: Final = operator.itemgetter("params")


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
        self.master_params: tuple[Tensor, ...] = ()
        self.master_pairs: list[tuple[Tensor, Tensor]] = []
        """The (model parameter, master) pairs with gradients that a step clears: two tensors, one with a remainder, or summed."""
        self._cleared: list[Tensor] = []
        """The model parameters of :attr:`master_pairs`: a loop over pairs takes half as long again."""
        self.copies: list[Tensor | None] | None = None
        """For each master the half parameter that a fused step rounds it to; None if it is the model parameter itself."""
        self.sums = sums
        """Whether :attr:`memory` sums the gradients of micro-batches; ``.grad`` then holds those of one micro-batch."""
        # Fused optimizers take dense gradients, and an exchange makes the sums dense.
        keeps_sparse = not exchanged and not isinstance(optimizer, FusedOptimizer)
        self.memory = GradientMemory((), sums=sums, keeps_sparse=keeps_sparse)
        self.has_written_grads = False
        """Whether ``.grad`` of masters was written since the last :meth:`clear`."""
        self.stats_record: GradStatsRecord | None = None
        """The statistics of a launched step, until the host has recorded them."""
        self.is_complex = False
        """Whether a parameter is complex."""
        self._masters = masters
        self._exchanged = exchanged
        self.grad_of: Callable[[Tensor], Tensor | None] = _grad
        """Returns the ``.grad`` of a model parameter; of a sharded one this rank's shard."""
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
        self.master_params = tuple(owned_parameters(self.optimizer))
        self.is_complex = any(map(torch.is_complex, self.master_params))
        self._shared_rows = SharedRows.of(self.master_params)
        self.grad_of = local_gradient if any_shard(self.master_params) else _grad
        self.memory.hold(model_params)
        self.model_params = self.memory.parameters
        pairs = self._pairs()
        self.master_pairs = [
            pair for pair in pairs if self.sums or pair[0] is not pair[1] or self.has_remainder(pair[0])
        ]
        self._cleared = [model_param for model_param, _ in self.master_pairs]
        if self._masters is not None:
            self.copies = [None if model_param is master else model_param for model_param, master in pairs]

    def has_remainder(self, parameter: Tensor) -> bool:
        """Whether the optimizer updates ``parameter``, which is bf16, with its remainder in place of a master."""
        return isinstance(self.optimizer, FusedOptimizer) and parameter in self.optimizer.remainders

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.model_params, self.master_params, strict=True))

    def collect(self, multiplier: Tensor) -> list[Tensor]:
        """Adds every model parameter's ``.grad``, times ``multiplier``, to its sum, and clears it; returns the gradients added."""
        self.refresh()
        return self.memory.add(multiplier)

    def tensors_and_flags(self, gradients: Gradients) -> tuple[Sequence[Tensor | None], Sequence[Tensor] | None]:
        """Returns one gradient (or None) per master, and device flags that mark the gradients to use (None: all).

        Like :meth:`gather`, but without a wait, for optimizers that read the flags on the device; call :meth:`refresh` before.
        """
        gradients = self._located(gradients)
        if gradients.tensors is None:
            return list(map(self.grad_of, self.model_params)), None
        if gradients.present is None:
            return self._values(gradients), None
        return self._values(gradients._replace(present=None)), flags_of(gradients.present)

    def gather(self, gradients: Gradients) -> list[Gradient]:
        """Returns the accumulated gradients: those given, this process's sums, or each ``.grad``; call :meth:`refresh` before."""
        values = self._values(self._located(gradients))
        if self.is_complex:
            # Autograd may leave a conjugate view, which kernels would have to copy in each launch.
            values = [None if value is None else value.resolve_conj() for value in values]
        return [
            Gradient(model_param, master, value)
            for (model_param, master), value in zip(self._pairs(), values, strict=True)
            if value is not None
        ]

    def _located(self, gradients: Gradients) -> Gradients:
        """Returns this process's own sums for gradients that backward left there, else ``gradients``.

        Raises :class:`ConfigError` if the sums have to be exchanged first.
        """
        if gradients.tensors is not None or not self.sums:
            return gradients
        if self._exchanged:
            raise ConfigError(
                "the fp32 sums of an optimizer's gradients have to be exchanged before its step: exchange() of an OptimizerStep "
                "returns what strategy.reduce_gradients(precision.gradients(optimizer)) does"
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
        return gradients if self.grad_of is _grad else list(map(local, gradients))

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
        if sums and self.sums:
            self.memory.clear()
        for model_param in self._cleared:
            model_param.grad = None
        if self.has_written_grads:
            self.has_written_grads = False
            for _, master in self.master_pairs:
                master.grad = None

    def drop_half_grads(self) -> None:
        """Drops ``.grad`` of the parameters that have masters, once the masters' gradients are written."""
        for model_param, master in self.master_pairs:
            if model_param is not master:
                model_param.grad = None

    def release(self) -> None:
        """Puts the module's own parameters back into the optimizer, with the optimizer state of their masters."""
        self.clear()
        if isinstance(self.optimizer, FusedOptimizer) and self.optimizer.remainders:
            self.optimizer.forget()
            del self.optimizer.remainders
        original = {id(master): model_param for model_param, master in self._pairs()}
        for group in self.optimizer.param_groups:
            for index, master in enumerate(group["params"]):
                model_param = original.get(id(master), master)
                if model_param is not master:
                    group["params"][index] = model_param
                    if master in self.optimizer.state:
                        self.optimizer.state[model_param] = self.optimizer.state.pop(master)


def create_grad(gradient: Gradient, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Creates the master's ``.grad`` in its dtype, not filled yet; returns (source values, destination values).

    ``dtype`` is given in place of that of a weight with a remainder.
    """
    _, master, value = gradient
    dtype = dtype or master.dtype
    if value.is_sparse:
        # Widened first: the parts of one row are added here.
        master.grad = value.to(dtype).coalesce()
        return master.grad.values(), master.grad.values()
    if value.dtype == dtype:
        master.grad = value
        return value, value
    master.grad = torch.empty_like(master, dtype=dtype)
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
