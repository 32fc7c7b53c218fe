"""Keeps averages of trained weights: updates them after steps, and swaps them into the module temporarily."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricamp import ops
from fabricamp._utils.types import StateDict
from fabricamp.errors import ConfigError
from fabricamp.ops.shards import is_shard, local
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.master_weights import module_parameter, round_to
from fabricamp.strategies.base import Strategy


class Rule(NamedTuple):
    """How averages move towards the weights; exactly one of the three functions is given.

    ``share`` returns the fraction of the way to the weights, given the number of previous updates (a number, or a tensor if steps
    may be skipped).  ``one`` returns the new average of one tensor.  ``many`` updates all averages in place.  Both take averages,
    weights and that number.
    """

    share: Callable[[Any], Any] | None = None
    one: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    many: Callable[[list[Tensor], list[Tensor], Tensor], None] | None = None

    def run(self, averages: list[Tensor], weights: list[Tensor], count: Tensor) -> None:
        """Calls ``many`` or ``one``, whichever was given."""
        if self.many is not None:
            self.many(averages, weights, count)
        elif self.one is not None:
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(self.one(average, weight, count))


class Averages:
    """Averages of the parameters that optimizers update, and with ``use_buffers`` of floating-point buffers that are saved.

    ``values`` are fp32 or wider, on ``device`` (None: where the weights are), keyed by the module's names.  They are sharded like
    the weights, and each rank averages its local shards.  ``count`` is the number of updates: a tensor on the device if steps may
    be skipped, so the host never waits to learn whether a step was skipped.
    """

    def __init__(self, rule: Rule, device: torch.device | None, *, use_buffers: bool) -> None:
        self.values: dict[str, Tensor] = {}
        self.count: int | Tensor = 0
        self.begun = False
        """Whether any update was made; before the first there is no average."""
        self.applied: Tensor | None = None
        """Number of applied steps at the last update (before the first: at the start), on the device; None if none is skipped."""
        self._rule = rule
        self._device = device
        self._use_buffers = use_buffers
        self._weights: list[Tensor] = []
        self._local_averages: list[Tensor] = []

    # -- the averaged tensors ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def follow(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        strategy: Strategy,
        saved: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Registers the tensors that are trained now; new averages start as ``saved``, or as the weights."""
        sources = self._sources(module, optimizers, strategy)
        for name, (updated, _) in sources.items():
            if name not in self.values:
                value = updated if saved is None else saved.get(name, updated)
                self.values[name] = self._new(value, torch.promote_types(updated.dtype, torch.float32))
        self._weights = [local(updated) for updated, _ in sources.values()]
        self._local_averages = [local(self.values[name]) for name in sources]

    def _new(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        own = value.detach().to(dtype=dtype, copy=True)
        if self._device is None:
            return own
        if not is_shard(own):
            return own.to(self._device)
        part: Any = own  # only the local shard moves; the mesh stays on its device
        part._local_tensor = local(part).to(self._device)
        return own

    def _sources(
        self, module: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns by name (tensor that an optimizer updates, such as an fp32 master; the module's own tensor)."""
        strategy.sharding.settle_module(module)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        sources: dict[str, tuple[Tensor, Tensor]] = {}
        for optimizer in optimizers:
            for updated in owned_parameters(optimizer):
                parameter = module_parameter(updated)
                if id(parameter) in names:
                    sources[names[id(parameter)]] = (updated.detach(), parameter)
        if self._use_buffers:
            saved = module.state_dict().keys()
            for name, buffer in module.named_buffers():
                if name in saved and buffer.is_floating_point():
                    sources[name] = (buffer, buffer)
        return sources

    # -- updates -----------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, applied: Tensor | None, *, anyway: bool = False) -> None:
        """Updates the averages; the first update copies the weights.

        ``applied`` is the number of steps applied so far, a tensor on the device; None if no step can be skipped.  If no step was
        applied since the last update, nothing changes, unless ``anyway``.
        """
        self.begun = True
        averages = self._local_averages
        weights = self._weights
        if self._device is not None:
            weights = [weight.to(self._device) for weight in weights]
        if applied is None and isinstance(self.count, int):
            self._move(averages, weights, self.count)
            self.count += 1
            return
        assert applied is not None, "else the number of updates is known to the host"
        assert self.applied is not None
        if isinstance(self.count, int):
            self.count = torch.full((), self.count, dtype=torch.int64, device=applied.device)
        # 1 or 0, on the device: whether this update counts.
        counts = torch.ones_like(self.count) if anyway else torch.ne(applied, self.applied).long()
        self.applied = applied.clone()
        self._move_where(averages, weights, self.count, counts)
        self.count = self.count + counts

    def _move(self, averages: list[Tensor], weights: list[Tensor], count: int) -> None:
        if count == 0:
            torch._foreach_copy_(averages, weights)
        elif self._rule.share is not None:
            ops.ema(weights, averages, 1 - self._rule.share(count))
        else:
            count_tensor = torch.tensor(count, dtype=torch.int64, device=averages[0].device)
            self._rule.run(averages, _like(weights, averages), count_tensor)

    def _move_where(self, averages: list[Tensor], weights: list[Tensor], count: Tensor, counts: Tensor) -> None:
        """Moves the averages if ``counts`` is 1, and not if it is 0; the host does not know which."""
        if self._rule.share is not None:
            share = torch.where(count == 0, 1.0, self._rule.share(count.double()) * counts.double())
            ops.ema(weights, averages, 1 - share)
            return
        # A user's function takes no condition: it runs in any case, and the old averages are put back.
        before = [average.clone() for average in averages]
        values = _like(weights, averages)
        self._rule.run(averages, values, count)
        for average, old, value in zip(averages, before, values, strict=True):
            is_first = (count == 0).to(average.device)
            is_counted = (counts != 0).to(average.device)
            average.copy_(torch.where(is_first, value, torch.where(is_counted, average, old)))

    # -- swapping averages and weights -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def put_in(self, module: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy) -> dict[str, Tensor]:
        """Writes the averages into the module; returns the weights that they replace.

        Every rank gets rank 0's averages of buffers, because those are the ones in a checkpoint.
        """
        sources = self._sources(module, optimizers, strategy)
        raw = {name: updated.clone() for name, (updated, _) in sources.items()}
        values = {name: self.values[name] for name in sources if name in self.values}
        self._write(sources, {**values, **self._of_rank_zero(module, values, strategy)})
        return raw

    @torch.no_grad()
    def put_back(
        self, raw: Mapping[str, Tensor], module: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy
    ) -> None:
        """Writes the weights that :meth:`put_in` returned back into the module."""
        self._write(self._sources(module, optimizers, strategy), raw)

    def _write(self, sources: Mapping[str, tuple[Tensor, Tensor]], values: Mapping[str, Tensor]) -> None:
        """Writes ``values`` into the tensors that optimizers update, and rounds masters to the module's half weights."""
        updated: list[Tensor] = []
        new_values: list[Tensor] = []
        masters: list[Tensor] = []
        half_copies: list[Tensor] = []
        for name, value in values.items():
            if name not in sources:
                continue
            source, own = map(local, sources[name])
            updated.append(source)
            new_values.append(local(value))
            if source.data_ptr() != own.data_ptr():
                masters.append(source)
                half_copies.append(own)
        if updated:
            torch._foreach_copy_(updated, new_values)
        round_to(masters, half_copies)

    def _of_rank_zero(self, module: nn.Module, values: Mapping[str, Tensor], strategy: Strategy) -> dict[str, Tensor]:
        if strategy.world_size == 1:
            return {}
        own = {name: values[name].cpu() for name, _ in module.named_buffers() if name in values}
        return strategy.broadcast(own) if own else {}


def mean(count: Any) -> Any:
    """Returns the share that makes an average the mean over all updates."""
    return 1 / (count + 1)


def in_state(module: nn.Module, state: StateDict, values: Mapping[str, Tensor]) -> StateDict:
    """Returns a copy of the module's state dict ``state`` in which ``values`` replace the tensors of these names."""
    result = copy.copy(state)
    by_id = {id(tensor): values[name] for name, tensor in _tensors(module) if name in values}
    for name, tensor in _tensors(module, remove_duplicate=False):  # a tied tensor has several names
        if name in result and id(tensor) in by_id:
            result[name] = by_id[id(tensor)]
    return result


def _tensors(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=remove_duplicate),
        *module.named_buffers(remove_duplicate=remove_duplicate),
    ]


def _like(weights: list[Tensor], averages: list[Tensor]) -> list[Tensor]:
    return [weight.to(average.dtype) for weight, average in zip(weights, averages, strict=True)]


def refuse_several(own: object, callbacks: Sequence[object]) -> None:
    """Raises :class:`ConfigError` if two callbacks would write averages into the same weights."""
    kinds = [type(callback).__name__ for callback in callbacks if getattr(callback, "averages_weights", False)]
    if len(kinds) > 1:
        raise ConfigError(
            f"{type(own).__name__} is one of {len(kinds)} callbacks that average the weights ({', '.join(kinds)}), and the module "
            "can hold one average; give one of them"
        )
