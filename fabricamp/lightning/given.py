"""Objects of Lightning's own classes: those that a class of ours can stand for, by its name and arguments."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, Final

from fabricamp.data import CombinedLoader
from fabricamp.lightning.bases import own_class, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_AS_THEY_ARE: Final = {
    ("callbacks.callback", "Callback"),
    ("callbacks.lambda_function", "LambdaCallback"),
    ("callbacks.prediction_writer", "BasePredictionWriter"),
}
"""Classes whose own methods ask only for what our Trainer has; users' subclasses of them run."""

_ARGUMENTS: Final = {
    "callbacks.BackboneFinetuning": (
        "unfreeze_backbone_at_epoch", "lambda_func", "backbone_initial_ratio_lr", "backbone_initial_lr", "should_align",
        "initial_denom_lr", "train_bn", "verbose", "rounding",
    ),
    "callbacks.BatchSizeFinder": (
        "mode", "steps_per_trial", "init_val", "max_trials", "batch_arg_name", "margin", "max_val",
    ),
    "callbacks.DeviceStatsMonitor": ("cpu_stats",),
    "callbacks.EarlyStopping": (
        "monitor", "min_delta", "patience", "verbose", "mode", "strict", "check_finite", "stopping_threshold",
        "divergence_threshold", "check_on_train_epoch_end", "log_rank_zero_only",
    ),
    "callbacks.LearningRateFinder": (
        "min_lr", "max_lr", "num_training_steps", "mode", "early_stop_threshold", "update_attr", "attr_name",
    ),
    "callbacks.LearningRateMonitor": ("logging_interval", "log_momentum", "log_weight_decay"),
    "callbacks.ModelCheckpoint": (
        "dirpath", "filename", "monitor", "verbose", "save_last", "save_top_k", "save_on_exception", "save_weights_only", "mode",
        "auto_insert_metric_name", "every_n_train_steps", "train_time_interval", "every_n_epochs", "save_on_train_epoch_end",
        "enable_version_counter",
    ),
    "callbacks.ModelSummary": ("max_depth",),
    "callbacks.RichModelSummary": ("max_depth",),
    "callbacks.RichProgressBar": ("refresh_rate", "leave"),
    "callbacks.TQDMProgressBar": ("refresh_rate", "leave"),
    "loggers.CSVLogger": ("save_dir", "name", "version", "prefix", "flush_logs_every_n_steps"),
    "loggers.TensorBoardLogger": (
        "save_dir", "name", "version", "log_graph", "default_hp_metric", "prefix", "sub_dir", "kwargs",
    ),
}  # fmt: skip
"""Arguments by classes of Lightning's that there is one of ours for.  The objects keep them under these names, or behind a dash."""

_FINDINGS: Final = {
    "callbacks.BatchSizeFinder": ("optimal_batch_size",),
    "callbacks.EarlyStopping": ("best_score", "stopped_epoch", "wait_count"),
    "callbacks.LearningRateFinder": ("optimal_lr",),
    "callbacks.ModelCheckpoint": (
        "best_k_models", "best_model_path", "best_model_score", "dirpath", "kth_best_model_path", "kth_value", "last_model_path",
    ),
    "loggers.CSVLogger": ("_version",),
    "loggers.TensorBoardLogger": ("_version",),
}  # fmt: skip
"""What scripts read of the object that they gave, once the run is over."""

_CADENCES: Final = ("every_n_train_steps", "every_n_epochs", "train_time_interval")
_GIVEN: Final = "_given_as_lightnings"
_LINE: Final = "_line_on_lightnings"


def adopted(value: Any) -> Any:
    """Returns ours of the same name and arguments in the place of a callback or logger of Lightning's own.

    Everything else is returned as it is.
    """
    name = _known_as(value)
    arguments = None if name is None else _arguments(value, _ARGUMENTS[name])
    if name is None or arguments is None:
        return value
    module, _, kind = name.partition(".")
    ours = getattr(importlib.import_module(f"fabricamp.{module}"), kind)(**arguments)
    shown = ", ".join(f"{key}={one!r}" for key, one in arguments.items())
    line = (
        f"Lightning's {kind} runs as fabricamp.{name}({shown}), which stands in trainer.{module}; the object that was given is "
        "told its results where the run ends"
    )
    vars(ours).update({_GIVEN: value, _LINE: line})
    return ours


def lines_of(parts: Iterable[object]) -> list[str]:
    """Returns, once each, what is to be said of callbacks and loggers that stand for Lightning's."""
    return [vars(one).pop(_LINE) for one in parts if _LINE in vars(one)]


def hand_back(parts: Iterable[object]) -> None:
    """Writes what callbacks and loggers have found into the objects of Lightning's that they stand for."""
    for ours in parts:
        given = vars(ours).get(_GIVEN)
        for name in _FINDINGS.get(_known_as(given) or "", ()):
            vars(given)[name] = getattr(ours, name)


def own_loader(value: Any) -> Any:
    """Returns our CombinedLoader in the place of Lightning's; any other loader as it is."""
    if place_of(type(value)) != ("utilities.combined_loader", "CombinedLoader"):
        return value
    return CombinedLoader(value.iterables, vars(value)["_mode"])


def runs_as_it_is(callback: object) -> bool:
    """Whether it is a callback that a user wrote on a base of Lightning's which needs nothing else of Lightning."""
    kind = own_class(callback)
    return kind is not None and place_of(kind) in _AS_THEY_ARE


def writes_predictions(callback: object) -> bool:
    """Whether it derives from Lightning's BasePredictionWriter."""
    return any(
        place_of(one) == ("callbacks.prediction_writer", "BasePredictionWriter") for one in type(callback).__mro__
    )


def _known_as(value: object) -> str | None:
    """Which of :data:`_ARGUMENTS` an object is of; a subclass of a user's is of none."""
    place = place_of(type(value))
    name = "" if place is None else f"{place[0].partition('.')[0]}.{place[1]}"
    return name if name in _ARGUMENTS else None


def _arguments(value: object, names: Iterable[str]) -> dict[str, Any] | None:
    """The arguments that ``value`` was made with, but for those that are our defaults; None where it keeps them elsewhere."""
    kept = {"_save_dir": vars(value).get("_root_dir"), **vars(value)}
    found = {}
    for name in names:
        place = f"_{name}" if f"_{name}" in kept else name
        if place not in kept:
            return None  # of another release
        found[name] = kept[place]
    found.update(found.pop("kwargs", {}))
    if "min_delta" in found:  # kept with the sign of its mode
        found["min_delta"] = abs(found["min_delta"])
    if found.get("name") == "":  # no folder of that name
        found["name"] = None
    if any(found.get(name) for name in _CADENCES):  # the others are kept as 0
        found.update({name: None for name in _CADENCES if not found[name]})
    home, _, kind = str(_known_as(value)).partition(".")
    ours = inspect.signature(getattr(importlib.import_module(f"fabricamp.{home}"), kind)).parameters
    return {name: one for name, one in found.items() if name not in ours or one != ours[name].default}
