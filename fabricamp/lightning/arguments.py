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
    attributes = {"_save_dir": vars(value).get("_root_dir"), **vars(value)}
    if name in _STORED_ELSEWHERE:
        attributes |= _STORED_ELSEWHERE[name](attributes)
    arguments = {}
    for argument in lightning_constructors()[name]:
        attribute = f"_{argument}" if f"_{argument}" in attributes else argument
        if attribute not in attributes:
            return None  # an object of another Lightning release
        arguments[argument] = attributes[attribute]
    arguments.update(arguments.pop("kwargs", {}))
    if "min_delta" in arguments:  # Lightning stores it with the sign of the mode
        arguments["min_delta"] = abs(arguments["min_delta"])
    if arguments.get("name") == "":  # Lightning's form of no name folder
        arguments["name"] = None
    if any(arguments.get(cadence) for cadence in _CADENCES):  # Lightning stores 0 for the others
        arguments.update({cadence: None for cadence in _CADENCES if not arguments[cadence]})
    parameters = inspect.signature(ours).parameters
    return {key: one for key, one in arguments.items() if key not in parameters or one != parameters[key].default}


def _of_comet(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the project, and no mode: the mode says whether to create the experiment, which exists already."""
    return {"_project": attributes["_project_name"], "_mode": None}


def _of_ema(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the decay, which only the closure of torch's averaging function holds."""
    closure = inspect.getclosurevars(inspect.unwrap(attributes["_kwargs"]["avg_fn"])).nonlocals
    decay = {"decay": closure["decay"]} if "decay" in closure else {}
    return {**_of_average(attributes), **decay}


def _of_average(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns use_buffers, with None for True: it is Lightning's default, so nobody need have asked for averages of all buffers."""
    return {"_use_buffers": None if attributes["_use_buffers"] else False}


def _of_swa(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the averaging function, or None for Lightning's own."""
    function = attributes["_avg_fn"]
    return {"_avg_fn": None if function.__module__.endswith("callbacks.stochastic_weight_avg") else function}


def _of_timer(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the duration as a timedelta (Lightning stores seconds) and the interval as a string (it may be Lightning's enum)."""
    seconds = attributes["_duration"]
    interval = attributes["_interval"]
    return {
        "_duration": None if seconds is None else timedelta(seconds=seconds),
        "_interval": getattr(interval, "value", interval),
    }


def _of_mlflow(attributes: dict[str, Any]) -> dict[str, Any]:
    return {"synchronous": attributes["_log_batch_kwargs"].get("synchronous")}


def _of_wandb(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments taken out of those for ``wandb.init``; resume="allow" is left out, as both loggers set it."""
    options = dict(attributes["_wandb_init"])
    arguments = {"_save_dir": options.pop("dir"), "anonymous": options.pop("anonymous") is not None or None}
    arguments |= {f"_{name}": options.pop(name) for name in ("name", "id", "project")}
    if options.get("resume") == "allow":
        del options["resume"]
    return {**arguments, "kwargs": options}


_STORED_ELSEWHERE: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "callbacks.EMAWeightAveraging": _of_ema,
    "callbacks.StochasticWeightAveraging": _of_swa,
    "callbacks.Timer": _of_timer,
    "callbacks.WeightAveraging": _of_average,
    "loggers.CometLogger": _of_comet,
    "loggers.MLFlowLogger": _of_mlflow,
    "loggers.WandbLogger": _of_wandb,
}
"""Functions for classes that store arguments in another form: each takes an object's attributes and returns the arguments."""
