"""Keeps averages of trained weights: updates them after steps, and swaps them into the module temporarily."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricamp import ops
from fabricamp._utils.types import StateDict
from fabricamp.errors import ConfigError, nearest
from fabricamp.ops.remainders import is_remainder, joined, part_into, wide_values
from fabricamp.ops.shards import is_shard, local
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.master_weights import module_parameter, round_to
from fabricamp.strategies.base import Strategy

_STATISTICS: Final = ("running_mean", "running_var")
"""Running statistics, in a module that has both: they are averages already, and an average of them is one over more batches."""


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


class AveragedBuffer(NamedTuple):
    """A buffer's place in a module, where its code may put another tensor (``self.running_mean = ...``)."""

    module: nn.Module
    name: str
    is_statistic: bool

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there now."""
        tensor: Tensor = getattr(self.module, self.name)
        return tensor


def averaged_buffers(
    owner: object, module: nn.Module, use_buffers: bool | Sequence[str] | None
) -> dict[str, AveragedBuffer]:
    """Returns the buffers of ``module`` to average, by name, as :class:`WeightAveraging` describes ``use_buffers``.

    Raises:
        ConfigError: for a name in ``use_buffers`` of no buffer that can be averaged; ``owner`` is the callback that got it.
    """
    if use_buffers is False:
        return {}
    saved = module.state_dict().keys()
    possible = {name: buffer for name, buffer in _buffers(module) if name in saved and _holds_numbers(buffer.tensor)}
    if use_buffers is True:
        return possible
    names = use_buffers or ()
    for name in names:
        if name not in possible:
            hint = nearest(name, possible) or f" (known: {', '.join(possible) or 'none'})"
            raise ConfigError(
                f"{type(owner).__name__}(use_buffers={list(names)!r}): the module's state dict has no floating-point buffer "
                f"{name!r}{hint}"
            )
    return {name: buffer for name, buffer in possible.items() if buffer.is_statistic or name in names}


def _buffers(module: nn.Module) -> Iterator[tuple[str, AveragedBuffer]]:
    """Yields each buffer once, with the first of its names."""
    seen = set()
    for path, part in module.named_modules():
        own = dict(part.named_buffers(recurse=False))
        has_statistics = all(name in own for name in _STATISTICS)
        for name, tensor in own.items():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield f"{path}.{name}" if path else name, AveragedBuffer(part, name, has_statistics and name in _STATISTICS)


def _holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor can be averaged: floating-point of one byte holds codes that mean something with their scale alone."""
    return tensor.is_floating_point() and tensor.itemsize > 1


class Source(NamedTuple):
    """A tensor to average: what an optimizer ``updated`` (such as an fp32 master), and the module's ``own``.

    ``remainder``: the bits that a bf16 weight lacks.
    """

    updated: Tensor
    own: Tensor
    remainder: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """What the optimizer updates; of a weight with a remainder the fp32 value, a new tensor."""
        return self.updated if self.remainder is None else joined(self.updated, self.remainder)


class Averages:
    """Averages of the parameters that optimizers update, and of buffers.

    ``values`` are fp32 or wider, on ``device`` (None: where the weights are), keyed by the module's names.  They are sharded like
    the weights, and each rank averages its local shards.  ``count`` is the number of updates: a tensor on the device if steps may
    be skipped, so the host never waits to learn whether a step was skipped.
    """

    def __init__(self, rule: Rule, device: torch.device | None) -> None:
        self.values: dict[str, Tensor] = {}
        self.count: int | Tensor = 0
        self.begun = False
        """Whether any update was made; before the first there is no average."""
        self.applied: Tensor | None = None
        """Number of applied steps at the last update (before the first: at the start), on the device; None if none is skipped."""
        self._rule = rule
        self._device = device
        self._parameters: list[Tensor] = []  # local shards
        self._remainders: list[Tensor | None] = []
        self._buffers: dict[str, AveragedBuffer] = {}
        self._local_averages: list[Tensor] = []
        """The averages of parameters, then those of buffers."""
        self._is_statistic: Tensor | None = None
        """For each element of all buffers, whether it is of a running statistic; None if no buffer is averaged."""

    # -- the averaged tensors ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def follow(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        strategy: Strategy,
        buffers: Mapping[str, AveragedBuffer],
        saved: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Registers the tensors that are trained now, and ``buffers``; new averages start as ``saved``, or as the weights."""
        self._buffers = dict(buffers)
        sources = self._sources(module, optimizers, strategy)
        for name, source in sources.items():
            if name not in self.values:
                value = saved[name] if saved is not None and name in saved else source.value
                self.values[name] = self._new(value, torch.promote_types(source.updated.dtype, torch.float32))
        parameters = [source for name, source in sources.items() if name not in self._buffers]
        self._parameters = [local(source.updated) for source in parameters]
        self._remainders = [source.remainder for source in parameters]
        self._local_averages = [local(self.values[name]) for name in sources]
        self._is_statistic = None
        if self._buffers:
            averages = zip(self._buffers.values(), self._buffer_averages, strict=True)
            self._is_statistic = _joined(
                [torch.full_like(average, buffer.is_statistic, dtype=torch.bool) for buffer, average in averages]
            )

    @property
    def statistics(self) -> list[str]:
        """The names of the averaged buffers that are running statistics."""
        return [name for name, buffer in self._buffers.items() if buffer.is_statistic]

    @property
    def _buffer_averages(self) -> list[Tensor]:
        return self._local_averages[len(self._parameters) :]

    def _new(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        own = value.detach().to(dtype=dtype, copy=True)
        if self._device is None:
            return own
        if not is_shard(own):
            return own.to(self._device)
        part: Any = own  # only the local shard moves; the mesh stays on its device
        part._local_tensor = local(part).to(self._device)
        return own

    def _sources(self, module: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy) -> dict[str, Source]:
        """Returns what to average by name, buffers last."""
        strategy.sharding.settle_module(module)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        sources: dict[str, Source] = {}
        for optimizer in optimizers:
            remainders = optimizer.remainders if isinstance(optimizer, FusedOptimizer) else {}
            for updated in owned_parameters(optimizer):
                parameter = module_parameter(updated)
                if id(parameter) in names:
                    sources[names[id(parameter)]] = Source(updated.detach(), parameter, remainders.get(updated))
        for name, buffer in self._buffers.items():
            tensor = buffer.tensor
            sources[name] = Source(tensor, tensor)
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
        parameters = self._parameters
        remainders: Sequence[Tensor | None] = self._remainders
        is_copy = applied is None and isinstance(self.count, int) and self.count == 0
        if any(map(is_remainder, remainders)) and (is_copy or self._device is not None or self._rule.share is None):
            parameters = wide_values(parameters, remainders)  # else the kernel joins them
            remainders = ()
        weights = [*parameters, *[local(buffer.tensor) for buffer in self._buffers.values()]]
        if self._device is not None:
            weights = [weight.to(self._device) for weight in weights]
        buffers_before = _joined(self._buffer_averages) if self._buffers else None
        if applied is None and isinstance(self.count, int):
            self._move(averages, weights, remainders, self.count)
            self._settle_buffers(buffers_before, weights, None)
            self.count += 1
            return
        assert applied is not None, "else the number of updates is known to the host"
        assert self.applied is not None
        if isinstance(self.count, int):
            self.count = torch.full((), self.count, dtype=torch.int64, device=applied.device)
        # 1 or 0, on the device: whether this update counts.
        counts = torch.ones_like(self.count) if anyway else torch.ne(applied, self.applied).long()
        self.applied = applied.clone()
        self._move_where(averages, weights, remainders, self.count, counts)
        self._settle_buffers(buffers_before, weights, counts)
        self.count = self.count + counts

    def _move(
        self, averages: list[Tensor], weights: list[Tensor], remainders: Sequence[Tensor | None], count: int
    ) -> None:
        if count == 0:
            torch._foreach_copy_(averages, weights)
        elif self._rule.share is not None:
            _move_by(weights, remainders, averages, 1 - self._rule.share(count))
        else:
            count_tensor = torch.tensor(count, dtype=torch.int64, device=averages[0].device)
            self._rule.run(averages, _like(weights, averages), count_tensor)

    def _move_where(
        self,
        averages: list[Tensor],
        weights: list[Tensor],
        remainders: Sequence[Tensor | None],
        count: Tensor,
        counts: Tensor,
    ) -> None:
        """Moves the averages if ``counts`` is 1, and not if it is 0; the host does not know which."""
        if self._rule.share is not None:
            share = torch.where(count == 0, 1.0, self._rule.share(count.double()) * counts.double())
            _move_by(weights, remainders, averages, 1 - share)
            return
        # A user's function takes no condition: it runs in any case, and the old averages are put back.
        before = [average.clone() for average in averages]
        values = _like(weights, averages)
        self._rule.run(averages, values, count)
        for average, old, value in zip(averages, before, values, strict=True):
            is_first = (count == 0).to(average.device)
            is_counted = (counts != 0).to(average.device)
            average.copy_(torch.where(is_first, value, torch.where(is_counted, average, old)))

    def _settle_buffers(self, before: Tensor | None, weights: list[Tensor], counts: Tensor | None) -> None:
        """Corrects the averages of buffers, ``before`` an update and after it, where they or ``weights`` are no usual numbers.

        Of equal values the average is that value, whatever a user's function rounds it to.  A running statistic that is not finite
        leaves its average, because only an overflow makes it so; any other such value (-inf in a mask) replaces its average.
        All buffers are joined, so that the number of launches does not grow with theirs.
        """
        if before is None or self._is_statistic is None:
            return
        averages = self._buffer_averages
        now = _joined(weights[len(self._parameters) :]).to(before.dtype)
        finite = now.isfinite()
        is_average = finite & before.isfinite() & (now != before)
        settled = torch.where(is_average, _joined(averages), now)
        settled = torch.where(finite | ~self._is_statistic, settled, before)
        if counts is not None:
            settled = torch.where(counts.to(before.device) != 0, settled, before)
        parts = settled.split([average.numel() for average in averages])
        torch._foreach_copy_(averages, [part.view_as(average) for part, average in zip(parts, averages, strict=True)])

    # -- swapping averages and weights -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def put_in(self, module: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy) -> dict[str, Tensor]:
        """Writes the averages into the module; returns the weights that they replace.

        Every rank gets rank 0's averages of buffers, because those are the ones in a checkpoint.
        """
        sources = self._sources(module, optimizers, strategy)
        raw = {
            name: source.updated.clone() if source.remainder is None else source.value
            for name, source in sources.items()
        }
        values = {name: self.values[name] for name in sources if name in self.values}
        self._write(sources, {**values, **self._of_rank_zero(values, strategy)})
        return raw

    @torch.no_grad()
    def put_back(
        self, raw: Mapping[str, Tensor], module: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy
    ) -> None:
        """Writes the weights that :meth:`put_in` returned back into the module."""
        self._write(self._sources(module, optimizers, strategy), raw)

    def _write(self, sources: Mapping[str, Source], values: Mapping[str, Tensor]) -> None:
        """Writes ``values`` into the tensors that optimizers update, and rounds masters to the module's half weights."""
        updated: list[Tensor] = []
        new_values: list[Tensor] = []
        masters: list[Tensor] = []
        half_copies: list[Tensor] = []
        for name, value in values.items():
            if name not in sources:
                continue
            remainder = sources[name].remainder
            if remainder is not None:
                part_into(value, sources[name].own, remainder)
                continue
            source, own = local(sources[name].updated), local(sources[name].own)
            updated.append(source)
            new_values.append(local(value))
            if source.data_ptr() != own.data_ptr():
                masters.append(source)
                half_copies.append(own)
        if updated:
            torch._foreach_copy_(updated, new_values)
        round_to(masters, half_copies)

    def _of_rank_zero(self, values: Mapping[str, Tensor], strategy: Strategy) -> dict[str, Tensor]:
        if strategy.world_size == 1:
            return {}
        own = {name: values[name].cpu() for name in self._buffers}
        return strategy.broadcast(own) if own else {}


def _move_by(
    weights: Sequence[Tensor],
    remainders: Sequence[Tensor | None],
    averages: Sequence[Tensor],
    decay: float | Tensor,
) -> None:
    """Moves the averages: one launch, and one more for weights with remainders, the first of ``weights``."""
    joint = [row for row, remainder in enumerate(remainders) if remainder is not None]
    apart = [row for row in range(len(weights)) if row not in set(joint)]
    ops.ema([weights[row] for row in apart], [averages[row] for row in apart], decay)
    own = [remainder for remainder in remainders if remainder is not None]
    ops.ema([weights[row] for row in joint], [averages[row] for row in joint], decay, remainders=own)


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


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Returns one tensor of all elements, in the widest dtype."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


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
