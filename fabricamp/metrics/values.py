"""Checks of logged values and their weights, which stay off the hot path."""

from __future__ import annotations

import numbers
import operator
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fabricamp.containers import tensors_within
from fabricamp.errors import ConfigError
from fabricamp.ops.shards import is_shard, whole
from fabricamp.say_once import say_once


def is_metric(value: object) -> bool:
    """Returns whether ``value`` is a torchmetrics object, without importing torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def is_metric_collection(value: object) -> bool:
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


def plain_value(name: str, value: Any) -> Tensor | float:
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
    """Returns ``batch_size`` as a Python int; a tensor is refused because reading it would wait for the device."""
    if isinstance(batch_size, Tensor):
        raise ConfigError(
            f"self.log({name!r}, batch_size=...) was given a tensor, which the host would have to wait for; "
            "pass an int such as batch.shape[0]"
        )
    try:
        weight = operator.index(batch_size)
    except TypeError:
        weight = -1
    if weight < 0:
        raise ConfigError(f"self.log({name!r}, batch_size={batch_size!r}): batch_size is an int, 0 or more")
    return weight


def tell_of_lengths(name: str, batch: Any) -> None:
    """Warns once if the batch size is ambiguous, because the batch's tensors are not equally long."""
    lengths = {one.shape[0] for one in tensors_within(batch) if one.ndim}
    if len(lengths) > 1:
        say_once(
            f"self.log({name!r}, on_epoch=True) weighs each value with the length of the batch's first tensor, but its "
            "tensors are not equally long; pass batch_size="
        )


def batch_length(name: str, batch: Any) -> int:
    """Returns the length of the first tensor in ``batch`` (1 for a 0-dim tensor)."""
    first = batch[0] if type(batch) in (tuple, list) and batch else batch
    if type(first) is not Tensor:
        first = next(tensors_within(batch), None)
    if first is None:
        raise ConfigError(
            f"self.log({name!r}, on_epoch=True) weighs each value with the batch size, but the batch "
            f"({type(batch).__name__}) holds no tensor to take it from; pass batch_size="
        )
    return first.shape[0] if first.ndim else 1
