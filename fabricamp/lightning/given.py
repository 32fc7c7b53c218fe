"""Objects of Lightning's own classes: those that a class of ours can stand for, by its name and arguments."""

from __future__ import annotations

import importlib
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

_LOGS: Final = {"name": "_name", "version": "_version", "prefix": "_prefix"}

_ARGUMENTS: Final[dict[str, dict[str, str]]] = {
    "callbacks.DeviceStatsMonitor": {"cpu_stats": "_cpu_stats"},
    "callbacks.EarlyStopping": {
        **{name: name for name in ("monitor", "min_delta", "patience", "verbose", "mode", "strict", "check_finite")},
        **{name: name for name in ("stopping_threshold", "divergence_threshold", "log_rank_zero_only")},
        "check_on_train_epoch_end": "_check_on_train_epoch_end",
    },
    "callbacks.LearningRateMonitor": {name: name for name in ("logging_interval", "log_momentum", "log_weight_decay")},
    "callbacks.ModelCheckpoint": {
        **{name: name for name in ("dirpath", "filename", "monitor", "verbose", "save_last", "save_top_k", "mode")},
        **{name: name for name in ("save_on_exception", "save_weights_only", "auto_insert_metric_name")},
        **{name: f"_{name}" for name in ("every_n_train_steps", "train_time_interval", "every_n_epochs")},
        **{name: f"_{name}" for name in ("save_on_train_epoch_end", "enable_version_counter")},
    },
    "callbacks.ModelSummary": {"max_depth": "_max_depth"},
    "callbacks.RichModelSummary": {"max_depth": "_max_depth"},
    "callbacks.RichProgressBar": {"refresh_rate": "_refresh_rate", "leave": "_leave"},
    "callbacks.TQDMProgressBar": {"refresh_rate": "_refresh_rate", "leave": "_leave"},
    "loggers.CSVLogger": {"save_dir": "_save_dir", **_LOGS, "flush_logs_every_n_steps": "_flush_logs_every_n_steps"},
    "loggers.TensorBoardLogger": {
        "save_dir": "_root_dir",
        **_LOGS,
        **{name: f"_{name}" for name in ("default_hp_metric", "log_graph", "sub_dir")},
    },
}
"""Where an object of Lightning's keeps the arguments that it was made with."""


_FINDINGS: Final[dict[str, dict[str, str]]] = {
    "callbacks.EarlyStopping": {name: name for name in ("best_score", "stopped_epoch", "wait_count")},
    "callbacks.ModelCheckpoint": {
        **{
            name: name
            for name in ("best_k_models", "best_model_path", "best_model_score", "dirpath", "last_model_path")
        },
        **{name: name for name in ("kth_best_model_path", "kth_value")},
    },
    "loggers.CSVLogger": {"_version": "_version"},
    "loggers.TensorBoardLogger": {"_version": "_version"},
}
"""What scripts read of the object that they gave, once the run is over, and where that keeps it."""

_GIVEN: Final = "_given_as_lightnings"
_LINE: Final = "_line_on_lightnings"


def adopted(value: Any) -> Any:
    """Returns ours of the same name and arguments in the place of a callback or logger of Lightning's own.

    Everything else is returned as it is.
    """
    place = place_of(type(value))
    if place is None:
        return value
    name = f"{place[0].partition('.')[0]}.{place[1]}"
    if name not in _ARGUMENTS:
        return value
    module, _, kind = name.partition(".")
    if not all(place in vars(value) for place in _ARGUMENTS[name].values()):
        return value  # of a release that keeps them elsewhere
    arguments = _arguments(value, _ARGUMENTS[name])
    ours = getattr(importlib.import_module(f"fabricamp.{module}"), kind)(**arguments)
    shown = ", ".join(f"{key}={one!r}" for key, one in arguments.items())
    line = (
        f"Lightning's {kind} runs as fabricamp.{module}.{kind}({shown}), which stands in trainer.{module}; the object that was "
        "given is told its results where the run ends"
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
        if given is not None:
            kind = type(given).__name__
            module = "loggers" if f"loggers.{kind}" in _ARGUMENTS else "callbacks"
            for name, place in _FINDINGS.get(f"{module}.{kind}", {}).items():
                vars(given)[place] = getattr(ours, name)


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


def _arguments(value: Any, places: dict[str, str]) -> dict[str, Any]:
    found = {name: vars(value)[place] for name, place in places.items() if vars(value).get(place) is not None}
    if "min_delta" in found:  # kept with the sign of its mode
        found["min_delta"] = abs(found["min_delta"])
    cadences = ("every_n_train_steps", "every_n_epochs", "train_time_interval")
    if any(found.get(name) for name in cadences):  # the others are kept as 0
        found = {name: one for name, one in found.items() if name not in cadences or one}
    if found.get("name") == "":  # no folder of that name
        found["name"] = None
    return {name: one for name, one in found.items() if not (name in ("log_graph", "prefix", "sub_dir") and not one)}
