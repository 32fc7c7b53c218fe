"""Saves and loads logged values in a checkpoint: a table's running values, pending flushes, and torchmetrics objects."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from fabricamp._utils.types import StateDict
from fabricamp.errors import CheckpointError
from fabricamp.metrics.exchange import RankValues
from fabricamp.metrics.slots import MetricTable, Published
from fabricamp.metrics.values import TorchMetric, is_metric, parts_of


def save_table(table: MetricTable, objects: dict[int, str]) -> StateDict:
    """Returns the values of ``table``'s cells; ``objects`` names torchmetrics objects by their ids."""
    return {
        "slots": [
            {
                "published": cell.published._asdict(),
                "host_value": cell.number,
                "weight": cell.weight,
                "flushed_weight": cell.sent,
                "metric_attribute": objects.get(id(cell.metric), ""),
            }
            for cell in table.cells.values()
        ],
        "values": table.bank[: len(table.cells)].clone(),
    }


def load_table(table: MetricTable, states: Sequence[StateDict], objects: dict[str, TorchMetric]) -> None:
    """Loads ``states`` into ``table`` before anything is logged: one rank's values, or several ranks' values combined."""
    for state in states:
        for saved, value in zip(state["slots"], state["values"], strict=True):
            published = Published(**saved["published"])
            if len(states) > 1 and published.per_step:
                continue  # step values of several ranks cannot be combined
            cell = table.restore(published)
            cell.metric = objects.get(saved["metric_attribute"], cell.metric)
            if published.per_step:
                cell.tensor.copy_(value)
                cell.number = saved["host_value"]
                cell.weight = saved["weight"]
                cell.sent = saved.get("flushed_weight", 0)
            elif published.mode in ("min", "max"):
                cell.add_number(saved["host_value"], 0)
                cell.add_tensor(value.to(table.device), saved["weight"])
            elif saved["weight"]:
                cell.tensor.add_(value.to(table.device))
                cell.number += saved["host_value"]
                cell.weight = 1 if published.mode == "metric" else cell.weight + saved["weight"]


def save_rows(rows: Sequence[RankValues]) -> list[StateDict]:
    """Returns a flush on the host as plain values."""
    return [
        {
            "published": [published._asdict() for published in row.published],
            "host_values": list(row.numbers),
            "weights": list(row.weights),
            "device_values": list(row.device),
        }
        for row in rows
    ]


def load_rows(saved: Sequence[StateDict]) -> list[RankValues]:
    """Returns the rows that :func:`save_rows` saved."""
    return [
        RankValues(
            published=[Published(**published) for published in row["published"]],
            numbers=row["host_values"],
            weights=row["weights"],
            device=row["device_values"],
        )
        for row in saved
    ]


def find_objects(module: nn.Module) -> dict[str, TorchMetric]:
    """Returns the torchmetrics objects in ``module`` by name, without a metric whose states its wrapper (ClasswiseWrapper) has."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return {}
    for part in module.modules():
        if isinstance(part, torchmetrics.MetricCollection):
            part.values()  # updates members that share the states of one member
    found: dict[str, TorchMetric] = {}
    known: set[int] = set()
    for name, part in module.named_modules():
        if is_metric(part) and id(part._defaults) not in known:
            found[name] = part
            known.add(id(part._defaults))
    return found


def updated(objects: dict[str, TorchMetric]) -> set[str]:
    """Returns the names of those ``objects`` that have been updated."""
    return {name for name, metric in objects.items() if _update_count(metric)}


def save_objects(objects: dict[str, TorchMetric], names: Collection[str]) -> StateDict:
    """Returns the states of the ``objects`` of these ``names``, and what any wrapper keeps beside states (extremes)."""
    saved: StateDict = {}
    for name, metric in objects.items():
        if name in names:
            states = {key: _state(metric, key) for key in metric._defaults}
            saved[name] = {"update_count": _update_count(metric), "states": states}
        if kept := _kept_by_wrapper(metric):
            saved.setdefault(name, {})["kept"] = kept
    return saved


def load_objects(objects: dict[str, TorchMetric], states: Sequence[StateDict]) -> None:
    """Loads the states of one rank, or of several ranks combined, into ``objects``; objects without a state are reset."""
    for name, metric in objects.items():
        metric.reset()
        of_ranks = [state[name] for state in states if name in state]
        for key, value in (of_ranks[0].get("kept", {}) if of_ranks else {}).items():
            setattr(metric, key, value.to(metric.device))  # computed over all ranks, so equal on each
        saved = [one for one in of_ranks if "states" in one]
        if not saved:
            continue
        for key in metric._defaults:
            values = [_on(metric.device, of_rank["states"][key]) for of_rank in saved]
            setattr(metric, key, values[0] if len(values) == 1 else _reduced(name, metric, key, values))
        for part in _of_same_states(metric):
            part._update_count = sum(of_rank["update_count"] for of_rank in saved)
            part._computed = None


def _update_count(metric: TorchMetric) -> int:
    own, *within = (part.update_count for part in _of_same_states(metric))
    if not within or any(within):
        return max([own, *within])
    # A ClasswiseWrapper counts 1 before its first update. In a compute group it has the count of the metric whose states it shares.
    return (
        own if own > 1 or any(_differs(getattr(metric, key), metric._defaults[key]) for key in metric._defaults) else 0
    )


def _differs(state: torch.Tensor | list[torch.Tensor], default: torch.Tensor | list[torch.Tensor]) -> bool:
    if isinstance(state, list) or isinstance(default, list):
        return len(state) > 0
    return not torch.equal(state, default.to(state.device))


def _of_same_states(metric: TorchMetric) -> list[TorchMetric]:
    """Returns the metric and those of its parts that have the very same states."""
    return [part for part in parts_of(metric) if part._defaults is metric._defaults]


def _kept_by_wrapper(metric: TorchMetric) -> dict[str, torch.Tensor]:
    """Returns the tensors of a wrapper that are no states, by name: the extremes of MinMaxMetric, which a reset leaves."""
    if len(parts_of(metric)) == 1:
        return {}
    return {
        key: value
        for key, value in vars(metric).items()
        if isinstance(value, torch.Tensor) and key not in metric._defaults and not key.startswith("_")
    }


def _state(metric: object, key: str) -> object:
    value = getattr(metric, key)
    return list(value) if isinstance(value, list) else value  # copied, because reset() empties the list in place


def _on(device: torch.device, value: Any) -> object:
    return [part.to(device) for part in value] if isinstance(value, list) else value.to(device)


def _reduced(name: str, metric: TorchMetric, key: str, values: list[Any]) -> object:
    """Returns the states of several ranks combined, by the metric's own reduction."""
    if isinstance(values[0], list):
        return [part for value in values for part in value]
    reduction = metric._reductions[key]
    rule = getattr(reduction, "__name__", "")
    if reduction is None or rule not in ("dim_zero_sum", "dim_zero_min", "dim_zero_max", "dim_zero_cat"):
        raise CheckpointError(
            f"the checkpoint holds {type(metric).__name__} {name!r} of {len(values)} ranks, whose state {key!r} cannot be "
            "combined; resume with as many processes as wrote it, or from the end of an epoch"
        )
    return reduction(torch.stack(values) if rule != "dim_zero_cat" else values)
