"""The torchmetrics objects of a replayed step: their states stay at fixed addresses, and the host keeps their counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.engine.graph.batches import NotCapturableError
from fabricamp.metrics.values import is_metric, is_metric_collection

if TYPE_CHECKING:
    from torch import nn

COUNTS: Final = frozenset({"_update_count", "_computed", "_forward_cache", "_cache"})
"""Attributes of a torchmetrics object that hold the host's data on its updates, beside its states; they have no public names."""
_COLLECTION: Final = frozenset({"_state_is_copy"})
"""Attribute of a MetricCollection: whether its metrics have copies of shared states, as after compute; addresses stay shared."""
_NOTHING: Final[frozenset[str]] = frozenset()


def kept_apart(owner: object) -> frozenset[str]:
    """Returns the attributes of a torchmetrics object that :class:`MetricStates` manages; empty for other objects."""
    if not is_metric(owner):
        return _COLLECTION if is_metric_collection(owner) else _NOTHING
    defaults: dict[str, Any] = owner._defaults  # type: ignore[attr-defined]
    return COUNTS.union(name for name, value in defaults.items() if isinstance(value, Tensor))


class MetricCopies(NamedTuple):
    """Copies of the states, and the update counts."""

    states: list[Tensor]
    counts: list[int]


class MetricStates:
    """The tensor states of the torchmetrics objects within ``module``.

    An update and ``reset`` bind new tensors to the states' attributes; a graph always reads and writes the same tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics: list[Any] = [one for one in module.modules() if is_metric(one)]
        self._places: list[tuple[Any, str, Tensor]] = [
            (one, name, getattr(one, name))
            for one in self._metrics
            for name, default in one._defaults.items()
            if isinstance(default, Tensor)
        ]
        self._before = self._counts()
        self._updates: list[int] = []

    def _counts(self) -> list[int]:
        return [one._update_count for one in self._metrics]

    @torch.no_grad()
    def settle(self) -> None:
        """Copies states that an update has bound anew back to their fixed addresses, as part of the capture."""
        for metric, name, place in self._places:
            value = getattr(metric, name)
            if value is place:
                continue
            if value.shape != place.shape or value.dtype != place.dtype:
                raise NotCapturableError(
                    f"{type(metric).__name__} changes its state {name!r} from {place.dtype} {tuple(place.shape)} to {value.dtype} "
                    f"{tuple(value.shape)}, which a replay would not; update it in on_train_batch_end"
                )
            place.copy_(value)
            setattr(metric, name, place)

    def take(self) -> None:
        """Records how often the step updated each metric."""
        self._updates = [after - before for after, before in zip(self._counts(), self._before, strict=True)]

    def bring(self) -> bool:
        """Copies states at other addresses (after a reset, or an eager step) to the fixed ones; returns whether that succeeded."""
        for metric, name, place in self._places:
            value = getattr(metric, name)
            if value is place:
                continue
            if value.shape != place.shape or value.dtype != place.dtype or value.device != place.device:
                return False
            place.copy_(value)
            setattr(metric, name, place)
        return True

    def play(self) -> None:
        """Adds the updates of a replay to the metrics' counts."""
        for metric, updates in zip(self._metrics, self._updates, strict=True):
            if updates:
                metric._update_count += updates
                metric._computed = None

    def withdraw(self) -> None:
        """Restores counts and states from before the capture."""
        for metric, count in zip(self._metrics, self._before, strict=True):
            metric._update_count = count
        for metric, name, place in self._places:
            setattr(metric, name, place)

    def copy(self) -> MetricCopies:
        """Returns copies of the states, and the counts."""
        return MetricCopies([getattr(metric, name).clone() for metric, name, _ in self._places], self._counts())

    @torch.no_grad()
    def put_back(self, copies: MetricCopies) -> None:
        """Restores states and counts from ``copies``."""
        for (metric, name, place), values in zip(self._places, copies.states, strict=True):
            place.copy_(values)
            setattr(metric, name, place)
        for metric, count in zip(self._metrics, copies.counts, strict=True):
            metric._update_count = count

    def difference(self, copies: MetricCopies) -> str:
        """Returns the name of the first state that differs from ``copies`` in any bit; an empty string if none does."""
        for (metric, name, _), values in zip(self._places, copies.states, strict=True):
            if not same_bits(getattr(metric, name), values):
                return f"the state {name!r} of a {type(metric).__name__}"
        return ""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same bytes; waits for the device."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    left, right = (each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(left, right)
