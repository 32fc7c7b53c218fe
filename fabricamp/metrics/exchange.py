"""A flush: transfers a table's values to the host, with those of the other ranks, by one packed vector and one copy.

Every rank sends the same number of cells; the exchange cannot hang, whatever the ranks have logged:

    [signature of the cells' order, number of cells, Python numbers..., weights..., device values...]

If the signatures differ, the ranks exchange the meaning of their cells once, and adopt one common order.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from fabricamp.errors import DistributedError
from fabricamp.metrics.slots import SEEN
from fabricamp.metrics.values import count_updates

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from fabricamp.metrics.slots import Cell, MetricTable, Published
    from fabricamp.strategies.base import Strategy

_HEADER = 2


class Contribution(NamedTuple):
    """One rank's contribution to one value; ``seen`` is whether monitors have its step value already.

    For a "metric", ``total`` is 0.0 if the rank has no metric object, 1.0 if the object has to compute, 2.0 if nothing is new.
    """

    total: float
    weight: int
    seen: bool = False


class Merged(NamedTuple):
    """One value over all ranks: ``reduced``, or None if a torchmetrics object computes it; ``parts`` are per rank, in order."""

    published: Published
    reduced: float | None
    parts: list[Contribution | None]

    @property
    def seen(self) -> bool:
        """Whether monitors have this value already: no rank has logged it since."""
        return all(part.seen for part in self.parts if part is not None and part.weight)


@dataclass(slots=True)
class Snapshot:
    """A table's values at one time, in transfer to the host: the first ``sent`` of ``published``."""

    step: int
    published: tuple[Published, ...]
    numbers: list[float]
    weights: list[int]
    sent: int
    copy: Tensor
    event: torch.cuda.Event | None


class RankValues(NamedTuple):
    """The values of one rank, on the host."""

    published: Sequence[Published]
    numbers: Sequence[float]
    weights: Sequence[float]
    device: Sequence[float]

    def contributions(self) -> Iterator[tuple[Published, Contribution]]:
        """Yields each value of the rank, including values that it did not log."""
        for published, number, weight, device in zip(
            self.published, self.numbers, self.weights, self.device, strict=False
        ):
            size = int(abs(weight))
            total = _total(published, number, weight, device)
            if published.per_step:
                yield published, Contribution(total, min(size, 1), seen=size == SEEN)
            else:
                yield published, Contribution(total, size)


def take(table: MetricTable, strategy: Strategy, step: int) -> Snapshot:
    """Starts the transfer of all ranks' values of ``table`` to the host; on a GPU it does not wait."""
    if strategy.world_size == 1:
        return take_own(table, step)
    numbers, weights = _on_host(table)
    copy, event = _start_copy(strategy.all_gather(_packed(table, numbers, weights)))
    return Snapshot(step, table.published(), numbers, weights, min(len(numbers), table.exchange_size), copy, event)


def take_own(table: MetricTable, step: int) -> Snapshot:
    """Starts the transfer of this rank's values to its host; does not wait and uses no collective."""
    numbers, weights = _on_host(table)
    copy, event = _start_copy(table.bank[: len(numbers)])
    return Snapshot(step, table.published(), numbers, weights, len(numbers), copy, event)


def _on_host(table: MetricTable) -> tuple[list[float], list[int]]:
    """Returns the Python numbers of all cells, and their weights."""
    cells = table.cells.values()
    numbers = [_of_object(cell) if cell.published.mode == "metric" else cell.number for cell in cells]
    return numbers, [cell.weight for cell in cells]


def _of_object(cell: Cell) -> float:
    """Returns the state of a torchmetrics object: 0.0 no object, 1.0 has to compute, 2.0 nothing new (a reset adds nothing)."""
    if cell.metric is None:
        return 0.0
    known = cell.computed is not None and count_updates(cell.metric) in (0, cell.computed[0])
    return 2.0 if known else 1.0


def read(snapshot: Snapshot, table: MetricTable, strategy: Strategy) -> tuple[list[RankValues], bool]:
    """Waits for the copy and returns the ranks' values, and whether all values fitted into the exchange.

    Every rank reads the same snapshots in the same order; if the cell orders differ, all ranks see it at the same snapshot.
    """
    if snapshot.event is not None:
        snapshot.event.synchronize()
    if strategy.world_size == 1:
        return [read_own(snapshot)], True
    size = (snapshot.copy.shape[1] - _HEADER) // 3  # of this exchange; the table's may have grown since
    received = snapshot.copy.tolist()
    orders = _orders(snapshot, received, table, strategy)
    most = max(int(row[1]) for row in received)
    if most > table.exchange_size:
        table.widen(most)
    rows = [_unpacked(order, row, size) for order, row in zip(orders, received, strict=True)]
    return rows, most <= size


def read_own(snapshot: Snapshot) -> RankValues:
    """Returns the values of :func:`take_own`; call it after the copy has arrived."""
    return RankValues(snapshot.published, snapshot.numbers, snapshot.weights, snapshot.copy.tolist())


def merge(rows: Sequence[RankValues], together: int = 1) -> list[Merged]:
    """Returns each value that any rank has logged, reduced over the ranks that have it.

    ``together`` is the size of a group of ranks that compute the same batch; only the first rank of each group counts.
    """
    parts: dict[Published, list[Contribution | None]] = {}
    for rank, row in enumerate(rows):
        for published, contribution in row.contributions():
            parts.setdefault(published, [None] * len(rows))[rank] = contribution
    merged = []
    for published, of_ranks in parts.items():
        if any(part and part.weight for part in of_ranks):
            merged.append(Merged(published, _reduce(published.mode, of_ranks[::together]), of_ranks))
    return merged


def _packed(table: MetricTable, numbers: list[float], weights: list[int]) -> Tensor:
    count = len(numbers)
    size = table.exchange_size
    padding = [0.0] * max(0, size - count)
    header = [float(table.signature()), float(count)]
    host = [*header, *numbers[:size], *padding, *weights[:size], *padding]
    pinned = torch.tensor(host, dtype=torch.float64, device="cpu", pin_memory=table.device.type == "cuda")
    return torch.cat([pinned.to(table.device, non_blocking=True), table.bank[:size]])


def _unpacked(published: Sequence[Published], row: list[float], size: int) -> RankValues:
    parts = (row[_HEADER + index * size : _HEADER + (index + 1) * size] for index in range(3))
    return RankValues(published, *parts)


def _start_copy(vector: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Starts a copy of ``vector`` to the host; returns it with the event of its arrival (torch caches the pinned memory)."""
    if vector.device.type != "cuda":
        return vector, None
    pinned = torch.empty(vector.shape, dtype=vector.dtype, device="cpu", pin_memory=True)
    pinned.copy_(vector, non_blocking=True)
    return pinned, torch.cuda.current_stream(vector.device).record_event()


def _orders(
    snapshot: Snapshot, received: list[list[float]], table: MetricTable, strategy: Strategy
) -> list[tuple[Published, ...]]:
    """Returns the meaning of the cells in each rank's row; ranks that differ agree on one order for the next exchanges."""
    if len({row[0] for row in received}) == 1:
        return [snapshot.published] * len(received)
    orders = strategy.all_gather_object(snapshot.published)
    agreed: dict[tuple[bool, str], Published] = {}
    for published in itertools.chain.from_iterable(orders):
        other = agreed.setdefault(published.identity, published)
        if other.mode != published.mode:
            raise DistributedError(
                f"one rank logs {published.key!r} with reduce_fx={other.mode!r}, another with {published.mode!r}; "
                "use the same on every rank"
            )
    table.adopt(list(agreed.values()))
    return [tuple(agreed[published.identity] for published in order) for order in orders]


def _total(published: Published, number: float, weight: float, device: float) -> float:
    """Returns a rank's part of a value, from its device value and its Python number."""
    if published.mode == "metric":
        return number
    if published.per_step:
        return device if weight > 0 else number
    if published.mode in ("min", "max"):
        return _extreme(published.mode, (number, device))
    return number + device


def _reduce(mode: str, parts: list[Contribution | None]) -> float | None:
    if mode == "metric":
        return None
    present = [part for part in parts if part is not None and part.weight]
    total = sum(part.total for part in present)
    if mode == "mean":
        return total / sum(part.weight for part in present)
    return total if mode == "sum" else _extreme(mode, (part.total for part in present))


def _extreme(mode: str, values: Iterable[float]) -> float:
    """Returns the minimum or maximum of ``values``; nan if any of them is nan, as in torch."""
    gathered = list(values)
    if any(math.isnan(value) for value in gathered):
        return math.nan
    return min(gathered) if mode == "min" else max(gathered)
