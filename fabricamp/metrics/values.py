"""Logged values: how ``self.log`` checks them and their weights, and how Lightning's dicts show them.

The dicts are created on access, from device tensors and without waiting.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from fabricamp._utils.containers import batch_length, tensors_within
from fabricamp._utils.say_once import say_once
from fabricamp.errors import ConfigError, NotCapturableError
from fabricamp.ops.shards import is_shard, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fabricamp._utils.types import Batch
    from fabricamp.metrics.slots import MetricTable, Published
    from fabricamp.state import Scope


class TorchMetric(Protocol):
    """What ``self.log`` and checkpoints ask of a metric of torchmetrics; the names with an underscore have no public ones."""

    update_count: int
    sync_on_compute: bool
    device: torch.device
    _update_count: int
    _computed: object
    """The result of the last :meth:`compute`; None if there are updates since."""
    _forward_cache: object
    """The value of the last ``forward``."""
    _defaults: dict[str, Tensor | list[Tensor]]
    """The states by name, with their values after a reset."""
    _reductions: dict[str, Callable[[Tensor | list[Tensor]], Tensor] | None]

    def modules(self) -> Iterator[nn.Module]:
        """Yields the metric itself, then the metrics that a wrapper holds."""
        ...

    def reset(self) -> None:
        """Sets the states to their defaults."""
        ...

    def compute(self) -> Tensor | Mapping[str, Tensor]:
        """Returns the value of all updates, some wrappers several by name; a collective call."""
        ...


class MetricCollection(Protocol):
    """What is asked of torchmetrics' collection: its metrics, and their values with the names that it gives them."""

    def values(self, copy_state: bool = True) -> Iterable[TorchMetric]:
        """Returns the metrics; with ``copy_state`` those that share states get copies."""
        ...

    def compute(self) -> dict[str, Tensor]:
        """Returns the values of all metrics, those of a wrapper each under a name of its own; a collective call."""
        ...


def is_metric(value: object) -> TypeGuard[TorchMetric]:
    """Returns whether ``value`` is a torchmetrics object, without importing torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def parts_of(metric: TorchMetric) -> list[TorchMetric]:
    """Returns the metric itself, then the metrics that a wrapper such as ClasswiseWrapper holds, at any depth."""
    return [part for part in metric.modules() if is_metric(part)]


def count_updates(metric: TorchMetric) -> int:
    """Returns the number of updates since the last reset; a wrapper leaves its own number at 0 or 1, so its parts' are counted."""
    own, *within = (part.update_count for part in parts_of(metric))
    if not within:
        return own
    # In a compute group, the collection gives a wrapper the number of the metric whose states it shares.
    return sum(within) or (own if own > 1 else 0)


def is_metric_collection(value: object) -> TypeGuard[MetricCollection]:
    """Returns whether ``value`` is torchmetrics' MetricCollection, without importing torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.MetricCollection)


def as_scalar(name: str, value: Tensor) -> Tensor:
    """Returns ``value`` detached as a 0-dim tensor; a sharded one is gathered, for which every rank has to call."""
    if value.numel() != 1:
        raise ConfigError(
            f"self.log({name!r}, ...) was given a tensor of shape {tuple(value.shape)}; a logged value has one element: "
            "log its mean(), or each element under a name of its own"
        )
    if value.is_complex():
        raise ConfigError(f"self.log({name!r}, ...) was given a complex tensor; log its abs(), .real or .imag")
    value = value.detach()
    return (whole(value) if is_shard(value) else value).reshape(())


def plain_value(name: str, value: object) -> Tensor | float:
    """Returns ``value`` as a detached 0-dim tensor or as a Python number; raises :class:`ConfigError` for anything else."""
    if isinstance(value, Tensor):
        return as_scalar(name, value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        raise ConfigError(f"self.log({name!r}, ...) was given a {type(value).__name__}; log it with self.log_dict(...)")
    raise ConfigError(
        f"self.log({name!r}, ...) was given a {type(value).__name__}; "
        "allowed are a tensor with one element, a number, or a torchmetrics.Metric"
    )


def as_weight(name: str, batch_size: Any) -> int:
    """Returns ``batch_size`` as a Python int; a tensor on a device is read, which waits for the device."""
    if isinstance(batch_size, Tensor):
        batch_size = _number_in(name, batch_size)
    try:
        weight = operator.index(batch_size)
    except TypeError:
        weight = -1
    if weight < 0:
        raise ConfigError(f"self.log({name!r}, batch_size={batch_size!r}): batch_size is an int, 0 or more")
    return weight


def _number_in(name: str, batch_size: Tensor) -> Any:
    """Returns the number in a ``batch_size`` given as a tensor of one element; a whole number is an int."""
    if not batch_size.is_cpu:
        given = f"self.log({name!r}, batch_size=...) was given a tensor on {batch_size.device}"
        cure = "pass an int such as batch.shape[0]"
        if batch_size.is_cuda and torch.cuda.is_current_stream_capturing():
            raise NotCapturableError(f"{given}, which a CUDA graph cannot read; {cure}")
        say_once(f"{given}, and the host waits for the device to read it; {cure}")
    if batch_size.numel() != 1:
        raise ConfigError(
            f"self.log({name!r}, batch_size=...) was given a tensor of shape {tuple(batch_size.shape)}; pass one number, an int "
            "such as batch.shape[0]"
        )
    number = batch_size.item()
    return int(number) if float(number).is_integer() else number


def tell_of_lengths(name: str, batch: Batch) -> None:
    """Warns once if the batch size is ambiguous, because the batch's tensors are not equally long."""
    lengths = {tensor.shape[0] for tensor in tensors_within(batch) if tensor.ndim}
    if len(lengths) > 1:
        say_once(
            f"self.log({name!r}, on_epoch=True) weighs each value with the length of the batch's first tensor that has a "
            "dimension, but its tensors are not equally long; pass batch_size="
        )


def batch_weight(name: str, batch: Batch) -> int:
    """Returns :func:`batch_length` of ``batch``; raises :class:`ConfigError` if the batch holds no tensor."""
    first: object = batch
    if (type(batch) is tuple or type(batch) is list) and batch:
        first = batch[0]
    if type(first) is Tensor and first.ndim:  # nearly every batch: as below, without a walk
        return first.shape[0]
    length = batch_length(batch)
    if length is None:
        raise ConfigError(
            f"self.log({name!r}, on_epoch=True) weighs each value with the batch size, but the batch "
            f"({type(batch).__name__}) holds no tensor to take it from; pass batch_size="
        )
    return length


USUAL: Final = torch.float32
"""The dtype of most values, whatever torch's default dtype is: in bf16 a loss would lose digits."""

_WIDE_INTEGERS: Final = (torch.int64, torch.int32, torch.uint64, torch.uint32)
_HELD_IN_FLOAT32: Final = 2**24
"""Up to here float32 holds every whole number."""


def dtype_of(value: object) -> torch.dtype:
    """Returns the dtype in which a value is shown: float64 stays, a metric object keeps its dtype, all others become ``USUAL``.

    A large number that ``USUAL`` does not hold is shown in float64 all the same (:func:`dtype_of_number`).
    """
    if is_metric(value):
        value = getattr(value, "_forward_cache", None)
        return value.dtype if isinstance(value, Tensor) else USUAL
    return torch.float64 if isinstance(value, Tensor) and value.dtype is torch.float64 else USUAL


def dtype_of_number(value: float) -> torch.dtype:
    """Returns float32, or float64 for a finite number above 2**24 that float32 does not hold: a count would lose digits."""
    if abs(value) <= _HELD_IN_FLOAT32 or not math.isfinite(value):
        return USUAL
    return USUAL if torch.tensor(value, dtype=USUAL, device="cpu").item() == value else torch.float64


def number_tensor(value: float) -> Tensor:
    """Returns a number as a tensor on the CPU, in the dtype that :func:`dtype_of_number` says."""
    return torch.tensor(value, dtype=dtype_of_number(value), device="cpu")


class Dtypes:
    """The dtypes in which logged values are shown, by key."""

    def __init__(self) -> None:
        self._other: dict[str, torch.dtype] = {}  # keys without an entry are shown in USUAL
        self._counts: set[str] = set()

    def note(self, published: Published, dtype: torch.dtype) -> None:
        """Stores the dtype of a value; cheap enough for a first ``self.log`` and an epoch's end, not for each step."""
        for key in (published.key, published.plain_key):
            if dtype is USUAL:
                self._other.pop(key, None)
            else:
                self._other[key] = dtype

    def note_on_device(self, published: Published, dtype: torch.dtype) -> None:
        """Notes if a key has whole numbers on the device: without reading them the host cannot tell whether float32 holds them."""
        if dtype in _WIDE_INTEGERS:
            self._counts.update((published.key, published.plain_key))

    def on_device(self, key: str) -> torch.dtype:
        """Returns the dtype in which a value on the device is shown."""
        return self._other.get(key, torch.float64 if key in self._counts else USUAL)

    def for_number(self, key: str, value: float) -> torch.dtype:
        """Returns the dtype in which a number on the host is shown."""
        return self._other.get(key) or dtype_of_number(value)

    def rounded(self, key: str, value: float) -> float:
        """Returns ``value`` rounded to the dtype in which it is shown."""
        return float(torch.tensor(value, dtype=self.for_number(key, value), device="cpu").item())

    def state_dict(self) -> dict[str, str]:
        """Returns the names of the dtypes that are not ``USUAL``."""
        return {key: str(dtype).removeprefix("torch.") for key, dtype in self._other.items()}

    def load_state_dict(self, saved: Mapping[str, str]) -> None:
        """Restores the state that :meth:`state_dict` returned."""
        self._other.update({key: getattr(torch, name) for key, name in saved.items()})


class View:
    """A dict that is updated at each access; entries that user code put into it stay."""

    def __init__(self) -> None:
        self._shown: dict[str, Any] = {}
        self._ours: set[str] = set()

    def show(self, fresh: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns the dict, with ``fresh`` tensors in place of older ones."""
        self._ours.update(fresh)
        self._shown.update(fresh)
        return self._shown

    @property
    def user_entries(self) -> dict[str, Any]:
        """The entries that user code added under other keys."""
        return {key: value for key, value in self._shown.items() if key not in self._ours}

    def put(self, values: Mapping[str, float]) -> None:
        """Adds values as user code would."""
        self._shown.update(as_tensors(values))

    def leave_device(self) -> None:
        """Moves the tensors to the host at the end of a run."""
        self._shown.update({key: value.cpu() for key, value in self._shown.items() if isinstance(value, Tensor)})


def as_tensors(values: Mapping[str, float]) -> dict[str, Tensor]:
    """Returns the numbers as CPU tensors, which can be read without waiting."""
    return {key: number_tensor(value) for key, value in values.items()}


def filled(values: Mapping[str, float], dtypes: Dtypes, device: torch.device) -> dict[str, Tensor]:
    """Returns a new tensor for each value; made by a fill kernel, because a copy from the host would wait."""
    with torch.inference_mode(mode=False):  # training could not use inference tensors
        return {
            key: torch.full((), value, dtype=dtypes.for_number(key, value), device=device)
            for key, value in values.items()
        }


def latest_steps(table: MetricTable, dtypes: Dtypes) -> Iterator[tuple[Published, Tensor]]:
    """Yields the step values that this rank has logged last, as views into one device copy per dtype."""
    copies: dict[torch.dtype, Tensor] = {}
    for index, cell in enumerate(table.cells.values()):
        weight = cell.weight or cell.sent
        published = cell.published
        if not cell.per_step or not weight:
            continue
        with torch.inference_mode(mode=False):
            if weight < 0:  # the value is a Python number
                dtype = dtypes.for_number(published.key, cell.number)
                yield published, torch.full((), cell.number, dtype=dtype, device=table.device)
                continue
            dtype = dtypes.on_device(published.key)
            if dtype not in copies:
                copies[dtype] = table.bank[: len(table.cells)].to(dtype, copy=True)
            yield published, copies[dtype][index]


def latest_of_hooks(table: MetricTable, dtypes: Dtypes, scope: Scope) -> Iterator[tuple[Published, Tensor]]:
    """Yields the values that this rank has logged in hooks of ``scope`` since the last reduction.

    Metric objects are left out: they compute with all ranks only.
    """
    for cell in table.cells.values():
        if cell.per_step or cell.metric is not None or cell.weight == cell.sent:
            continue
        if cell.owner is None or cell.owner.scope is not scope:
            continue
        mode = cell.published.mode
        divisor = cell.weight if mode == "mean" else 1
        key = cell.published.key
        dtype = torch.promote_types(dtypes.on_device(key), dtypes.for_number(key, cell.number / divisor))
        with torch.inference_mode(mode=False):
            if mode in ("min", "max"):
                value = cell.tensor.clamp(**{"max" if mode == "min" else "min": cell.number})
            else:
                value = (cell.tensor + cell.number) / divisor
            yield cell.published, value.to(dtype, copy=True)


def as_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the entries of ``values`` that are single numbers, for a checkpoint."""
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    }
