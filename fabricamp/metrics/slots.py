"""Stores logged values until they are read: one device vector for tensors, and Python numbers on the host."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.state import Scope

if TYPE_CHECKING:
    from fabricamp.metrics.values import TorchMetric

_NEUTRAL = {"min": math.inf, "max": -math.inf}
_INITIAL_CAPACITY = 64
_STEP_SCOPES = (Scope.TRAIN_STEP, Scope.EVAL_STEP)

NO_LOADER = -1
"""Dataloader index of a value of no single dataloader, and of a slot without values since it was cleared."""

SEEN = 2
"""Absolute weight of a step value that monitors have seen already."""


class Arguments(NamedTuple):
    """The arguments of one ``self.log`` call without value and batch size; equal for every repetition of the call."""

    name: str
    prog_bar: bool = False
    logger: bool = True
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: object = "mean"
    sync_dist: bool = False
    sync_dist_group: object = None
    add_dataloader_idx: bool = True
    rank_zero_only: bool = False

    def __str__(self) -> str:
        """Returns the call as its author probably wrote it: without arguments that equal the default."""
        default = self._field_defaults
        changed = [
            f"{key}={value!r}" for key, value in self._asdict().items() if key in default and value != default[key]
        ]
        return f"self.log({', '.join([repr(self.name), '...', *changed])})"


class Published(NamedTuple):
    """Description of one published value.

    ``mode`` is "mean", "sum", "min", "max", or "metric" for a torchmetrics object; ``loader`` is its dataloader's index.
    """

    key: str
    plain_key: str
    per_step: bool
    mode: str
    prog_bar: bool
    logger: bool
    sync_dist: bool
    loader: int = NO_LOADER

    @property
    def identity(self) -> tuple[bool, str]:
        """The key of the value, unique within a table."""
        return self.per_step, self.key


class Cell:
    """Storage of one published value: the latest step value, or the running epoch value.

    A tensor goes to ``tensor`` (a view into the table's device vector), a Python number to ``number``.  ``weight`` is 0 for a value
    that was not logged; for a step value, 1 means that the value is in ``tensor``, and -1 that it is in ``number``; ``SEEN`` and
    ``-SEEN`` mean the same of a value that monitors have, but no flush.  ``sent`` is the weight of a step value at its flush, or of
    an epoch value at its last reduction.  ``computed`` is (number of updates, values by
    key) of the last computation of the torchmetrics object ``metric``.
    """

    __slots__ = ("computed", "metric", "number", "owner", "per_step", "published", "sent", "tensor", "weight")

    def __init__(self, published: Published, tensor: Tensor) -> None:
        self.published = published
        self.per_step = published.per_step
        self.tensor = tensor
        self.owner: Slot | None = None
        self.metric: TorchMetric | None = None
        self.computed: tuple[int, dict[str, float]] | None = None
        self.number = 0.0
        self.weight = 0
        self.sent = 0
        self.clear()

    def clear(self) -> None:
        """Drops the value."""
        self.weight = 0
        self.sent = 0
        self.computed = None
        self.number = _NEUTRAL.get(self.published.mode, 0.0)
        if not self.per_step:
            self.tensor.fill_(self.number)

    def add_tensor(self, value: Tensor, weight: int) -> None:
        """Accumulates a detached 0-dim tensor into the epoch value, with one operation on the device."""
        mode = self.published.mode
        if mode == "mean":
            self.tensor.add_(value, alpha=weight)
        elif mode == "sum":
            self.tensor.add_(value)
        elif mode == "min":
            torch.minimum(self.tensor, value, out=self.tensor)
        else:
            torch.maximum(self.tensor, value, out=self.tensor)
        self.weight += weight

    def add_number(self, value: float, weight: int) -> None:
        """Accumulates a Python number into the epoch value; nan propagates, as with tensors."""
        mode = self.published.mode
        if mode == "mean":
            self.number += value * weight
        elif mode == "sum":
            self.number += value
        elif math.isnan(value) or (value < self.number if mode == "min" else value > self.number):
            self.number = value
        self.weight += weight


class Slot:
    """The cells that one ``self.log`` call of the user's code writes to at each repetition."""

    __slots__ = ("arguments", "epoch", "loader", "metric", "published", "scope", "step", "weighs")

    def __init__(
        self, arguments: Arguments, scope: Scope, published: tuple[Published | None, Published | None]
    ) -> None:
        self.arguments = arguments
        self.scope = scope
        self.published = published
        self.loader = NO_LOADER
        self.step: Cell | None = None
        self.epoch: Cell | None = None
        self.metric: TorchMetric | None = None
        self.weighs = published[1] is not None and published[1].mode == "mean" and scope in _STEP_SCOPES

    def follow(self, published: tuple[Published | None, Published | None]) -> bool:
        """Updates the slot to the dataloader of a call; returns False if the call differs from earlier calls in anything else."""
        for new, earlier in zip(published, self.published, strict=True):
            if (new and new._replace(loader=NO_LOADER)) != (earlier and earlier._replace(loader=NO_LOADER)):
                return False
        self.published = published
        for cell, new in zip((self.step, self.epoch), published, strict=True):
            if cell is not None and new is not None:
                cell.published = new
        return True

    def clear(self) -> None:
        """Drops the epoch value and resets the torchmetrics object."""
        self.loader = NO_LOADER
        if self.epoch is not None:
            self.epoch.clear()
        if self.metric is not None:
            with torch.inference_mode(mode=False):  # training could not change inference tensors
                self.metric.reset()


class MetricTable:
    """All slots of training, or all slots of evaluation.

    A table has one fp64 vector on the device, which stores its cells in an order that the ranks agree on (exchange.py).
    """

    TRAINING = "training"
    EVALUATION = "evaluation"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots: dict[tuple[Scope, str], Slot] = {}
        self.cells: dict[tuple[bool, str], Cell] = {}
        self.exchange_size = _INITIAL_CAPACITY  # number of cells in one exchange, equal on every rank
        self.bank = self._new_bank(_INITIAL_CAPACITY)
        self._signature: int | None = None

    def add(self, published: Published, owner: Slot) -> Cell:
        """Returns the cell of ``published`` for ``owner``; raises :class:`ConfigError` if another slot publishes the same key."""
        cell = self.restore(published)
        if cell.owner is not None:
            raise ConfigError(
                f"{cell.owner.arguments} in {cell.owner.scope.value} and {owner.arguments} in {owner.scope.value} "
                f"would both be {published.key!r}; give one of them another name"
            )
        if cell.published.mode != published.mode:
            raise ConfigError(
                f"{owner.arguments} reduces {published.key!r} by {published.mode!r}, but another rank by "
                f"{cell.published.mode!r}; log it with the same reduce_fx on every rank"
            )
        cell.owner = owner
        return cell

    def restore(self, published: Published) -> Cell:
        """Returns the cell of ``published``; creates it without an owner, which is set by the first ``self.log`` call."""
        cell = self.cells.get(published.identity)
        if cell is None:
            cell = Cell(published, self._tensor(len(self.cells)))
            self.cells[published.identity] = cell
            self._signature = None
        return cell

    def published(self) -> tuple[Published, ...]:
        """Returns the published values in the order of their cells."""
        return tuple(cell.published for cell in self.cells.values())

    def signature(self) -> int:
        """Returns a 48-bit hash of :meth:`published`, which a double holds exactly."""
        if self._signature is None:
            text = "\n".join(f"{cell.per_step:d} {cell.mode} {cell.key}" for cell in self.published())
            digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
            self._signature = int.from_bytes(digest, "big")
        return self._signature

    def adopt(self, agreed: Sequence[Published]) -> None:
        """Reorders the cells to the order that the ranks agreed on; other cells of this rank come after them."""
        known = self.cells
        count = len({*known, *(published.identity for published in agreed)})
        self.bank = self._new_bank(_power_of_two(count, self.exchange_size))
        self.cells = {}
        for published in agreed:
            self._settle(known.pop(published.identity, None), published)
        for cell in known.values():
            self._settle(cell, cell.published)
        self._signature = None

    def widen(self, count: int) -> None:
        """Raises the number of cells in one exchange to at least ``count``."""
        self.exchange_size = _power_of_two(count, self.exchange_size)
        self._grow(self.exchange_size)

    def clear_epoch(self) -> None:
        """Drops the epoch values, keeps the slots."""
        for slot in self.slots.values():
            slot.clear()
        for cell in self.cells.values():
            if cell.owner is None and not cell.per_step:  # restored from a checkpoint, and not logged since
                cell.clear()
                if cell.metric is not None:
                    cell.metric.reset()

    def clear_steps(self, count: int) -> None:
        """Drops the step values among the first ``count`` cells, because their transfer has started."""
        for cell in islice(self.cells.values(), count):
            if cell.per_step and cell.weight:
                cell.sent = cell.weight
                cell.weight = 0

    def mark_reduced(self) -> None:
        """Marks the current epoch values as reduced, and the step values as seen by monitors."""
        for cell in self.cells.values():
            if not cell.per_step:
                cell.sent = cell.weight
        self.mark_seen()

    def mark_seen(self) -> None:
        """Marks the step values as seen by monitors; the next ``self.log`` call makes a value new again."""
        for cell in self.cells.values():
            if cell.per_step and cell.weight:
                cell.weight = SEEN if cell.weight > 0 else -SEEN

    def clear(self) -> None:
        """Drops every value, keeps the slots."""
        self.clear_epoch()
        for cell in self.cells.values():
            if cell.per_step:
                cell.weight = 0
                cell.sent = 0

    def _settle(self, cell: Cell | None, published: Published) -> None:
        tensor = self._tensor(len(self.cells))
        if cell is None:
            cell = Cell(published, tensor)
        else:
            tensor.copy_(cell.tensor)
            cell.tensor = tensor
        self.cells[published.identity] = cell

    def _tensor(self, index: int) -> Tensor:
        """Returns the view of a cell into the device vector, which grows for it."""
        self._grow(index + 1)
        with torch.inference_mode(mode=False):
            return self.bank[index]

    def _grow(self, count: int) -> None:
        if count <= len(self.bank):
            return
        self.bank = self._new_bank(_power_of_two(count, len(self.bank)))
        for index, cell in enumerate(self.cells.values()):
            tensor = self._tensor(index)
            tensor.copy_(cell.tensor)
            cell.tensor = tensor

    def _new_bank(self, capacity: int) -> Tensor:
        # A normal tensor even inside an evaluation step: an inference tensor could not be changed outside inference mode.
        with torch.inference_mode(mode=False):
            return torch.zeros(capacity, dtype=torch.float64, device=self.device)


def _power_of_two(count: int, least: int) -> int:
    """Returns the smallest ``least * 2**n`` that is at least ``count``."""
    while least < count:
        least *= 2
    return least
