"""Reads the constructor arguments of an object of Lightning's classes from its attributes."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from fabricamp.arguments.migration import lightning_constructors

if TYPE_CHECKING:
    from collections.abc import Callable

_CADENCES: Final = ("every_n_train_steps", "every_n_epochs", "train_time_interval")


def arguments_of(value: Any, name: str, ours: type) -> dict[str, Any] | None:
    """Returns the arguments of ``value`` that differ from the defaults of ``ours``; None if one is not among its attributes."""
    kept = {"_save_dir": vars(value).get("_root_dir"), **vars(value)}
    if name in _ELSEWHERE:
        kept |= _ELSEWHERE[name](kept)
    found = {}
    for argument in lightning_constructors()[name]:
        place = f"_{argument}" if f"_{argument}" in kept else argument
        if place not in kept:
            return None  # an object of another Lightning release
        found[argument] = kept[place]
    found.update(found.pop("kwargs", {}))
    if "min_delta" in found:  # Lightning stores it with the sign of the mode
        found["min_delta"] = abs(found["min_delta"])
    if found.get("name") == "":  # Lightning's form of no name folder
        found["name"] = None
    if any(found.get(cadence) for cadence in _CADENCES):  # Lightning stores 0 for the others
        found.update({cadence: None for cadence in _CADENCES if not found[cadence]})
    defaults = inspect.signature(ours).parameters
    return {key: one for key, one in found.items() if key not in defaults or one != defaults[key].default}


def _of_comet(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the project, and no mode: the mode says whether to create the experiment, which exists already."""
    return {"_project": kept["_project_name"], "_mode": None}


def _of_ema(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the decay, which only the closure of torch's averaging function holds."""
    cells = inspect.getclosurevars(inspect.unwrap(kept["_kwargs"]["avg_fn"])).nonlocals
    return {"decay": cells["decay"]} if "decay" in cells else {}


def _of_swa(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the averaging function, or None for Lightning's own."""
    function = kept["_avg_fn"]
    return {"_avg_fn": None if function.__module__.endswith("callbacks.stochastic_weight_avg") else function}


def _of_timer(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the duration as a timedelta (Lightning stores seconds) and the interval as a string (it may be Lightning's enum)."""
    seconds, interval = kept["_duration"], kept["_interval"]
    return {
        "_duration": None if seconds is None else timedelta(seconds=seconds),
        "_interval": getattr(interval, "value", interval),
    }


def _of_mlflow(kept: dict[str, Any]) -> dict[str, Any]:
    return {"synchronous": kept["_log_batch_kwargs"].get("synchronous")}


def _of_wandb(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments taken out of those for ``wandb.init``; resume="allow" is left out, as both loggers set it."""
    options = dict(kept["_wandb_init"])
    own = {"_save_dir": options.pop("dir"), "anonymous": options.pop("anonymous") is not None or None}
    own |= {f"_{name}": options.pop(name) for name in ("name", "id", "project")}
    if options.get("resume") == "allow":
        del options["resume"]
    return {**own, "kwargs": options}


_ELSEWHERE: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "callbacks.EMAWeightAveraging": _of_ema,
    "callbacks.StochasticWeightAveraging": _of_swa,
    "callbacks.Timer": _of_timer,
    "loggers.CometLogger": _of_comet,
    "loggers.MLFlowLogger": _of_mlflow,
    "loggers.WandbLogger": _of_wandb,
}
