"""The Trainer's arguments: each one checked by itself, before anything is built."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from fabricamp.cuda_graph import CudaGraph, as_cuda_graph
from fabricamp.data.lengths import check_limit
from fabricamp.data.loaders import MOST_AHEAD
from fabricamp.durations import as_seconds
from fabricamp.errors import ConfigError, UnknownArgumentError, advice, nearest
from fabricamp.precision.base import Clip
from fabricamp.precision.nonfinite import NAN_POLICIES

NO_LIMIT = -1
"""``max_epochs`` and ``max_steps`` of a training that something else ends."""

LIGHTNINGS_DEFAULTS: dict[str, Any] = {
    "barebones": False,
    "enable_autolog_hparams": True,
    "model_registry": None,
    "plugins": None,
    "reload_dataloaders_every_n_epochs": 0,
}
"""What asks for nothing: configurations that Lightning wrote are full of these."""


@dataclass(slots=True, kw_only=True)
class Settings:
    """The checked arguments that are plain values; the Trainer's setters change them."""

    num_nodes: int
    max_epochs: int
    max_epochs_by_default: bool
    max_steps: int
    min_epochs: int
    min_steps: int
    max_time: float | None
    limit_train_batches: int | float
    limit_val_batches: int | float
    limit_test_batches: int | float
    limit_predict_batches: int | float
    fast_dev_run: int
    overfit_batches: int | float
    val_check_interval: int | float
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: float
    log_every_n_steps: int
    accumulate_grad_batches: int
    partial_window: str
    clip: Clip | None
    nan_policy: str | None
    deterministic: bool | str
    benchmark: bool | None
    detect_anomaly: bool
    use_distributed_sampler: bool
    per_sample_seed: bool
    prefetch_batches: int
    sync_batchnorm: bool
    inference_mode: bool
    default_root_dir: str
    start_method: str
    cuda_graph: CudaGraph | None


def check_settings(given: dict[str, Any]) -> Settings:
    """Returns the checked plain arguments; raises :class:`ConfigError` for the first wrong one."""
    trial = _trial_batches(given["fast_dev_run"])
    max_epochs = check_count("max_epochs", given["max_epochs"], least=0, endless=True, optional=True)
    max_steps = check_number("max_steps", given["max_steps"], least=0, endless=True)
    max_time = as_seconds(given["max_time"], "max_time")
    by_default = max_epochs is None and max_steps == NO_LIMIT and max_time is None
    if max_epochs is None:
        max_epochs = 1000 if by_default else NO_LIMIT
    limits = {
        name: check_limit_of(name, given[name])
        for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
    }
    overfit = check_limit(given["overfit_batches"], "overfit_batches", optional=True)
    if overfit:
        limits.update(limit_train_batches=overfit, limit_val_batches=overfit)
    _check_order(given, max_epochs, max_steps)
    if trial:
        limits, max_epochs, max_steps = dict.fromkeys(limits, trial), 1, trial
    return Settings(
        num_nodes=check_number("num_nodes", given["num_nodes"], least=1),
        max_epochs=max_epochs,
        max_epochs_by_default=by_default,
        max_steps=max_steps,
        min_epochs=check_number("min_epochs", given["min_epochs"] or 0, least=0),
        min_steps=check_number("min_steps", given["min_steps"] or 0, least=0),
        max_time=max_time,
        limit_train_batches=limits["limit_train_batches"],
        limit_val_batches=limits["limit_val_batches"],
        limit_test_batches=limits["limit_test_batches"],
        limit_predict_batches=limits["limit_predict_batches"],
        fast_dev_run=trial,
        overfit_batches=overfit or 0,
        **_validation_cadence(given, trial=trial > 0),
        num_sanity_val_steps=0
        if trial
        else _all_or(check_number("num_sanity_val_steps", given["num_sanity_val_steps"], least=0, endless=True)),
        log_every_n_steps=check_number("log_every_n_steps", given["log_every_n_steps"], least=1),
        accumulate_grad_batches=check_accumulation("accumulate_grad_batches", given["accumulate_grad_batches"]),
        partial_window=check_choice("partial_window", given["partial_window"], ("step", "carry", "drop")),
        clip=as_clip(given["gradient_clip_val"], given["gradient_clip_algorithm"]),
        nan_policy=check_choice("nan_policy", given["nan_policy"], (*NAN_POLICIES, None)),
        deterministic=check_flag("deterministic", given["deterministic"], others=("warn",)),
        benchmark=None if given["benchmark"] is None else check_flag("benchmark", given["benchmark"]),
        **{
            name: check_flag(name, given[name])
            for name in (
                "detect_anomaly",
                "use_distributed_sampler",
                "per_sample_seed",
                "sync_batchnorm",
                "inference_mode",
            )
        },
        prefetch_batches=check_prefetch(given["prefetch_batches"]),
        default_root_dir=_folder(given["default_root_dir"]),
        cuda_graph=as_cuda_graph(given["cuda_graph"]),
        start_method=check_choice("start_method", given["start_method"], ("auto", "script", "spawn", "fork")),
    )


def _check_order(given: dict[str, Any], max_epochs: int, max_steps: int) -> None:
    """Raises :class:`ConfigError` for a least that is above the most."""
    for what, most in (("epochs", max_epochs), ("steps", max_steps)):
        least = check_number(f"min_{what}", given[f"min_{what}"] or 0, least=0)
        if least > most >= 0:
            raise ConfigError(f"min_{what}={least} is above max_{what}={most}; lower it, or raise max_{what}")


def _trial_batches(value: Any) -> int:
    if isinstance(value, bool):
        return int(value)
    return check_number("fast_dev_run", value, least=0)


def check_number(name: str, value: Any, *, least: int, endless: bool = False) -> int:
    """Returns a whole number from ``least``, or -1 where ``endless``."""
    return check_count(name, value, least=least, endless=endless) or 0


def check_accumulation(name: str, value: Any) -> int:
    """Returns a whole number from 1; a schedule by epochs is refused with the way it is done here."""
    if isinstance(value, dict):
        raise ConfigError(
            f"{name}={value!r} is a schedule; give a whole number from 1, fit as far as it holds, then set trainer.{name} and "
            "trainer.max_epochs and fit again, which goes on"
        )
    return check_number(name, value, least=1)


def check_prefetch(value: Any) -> int:
    """Returns how many batches are moved ahead of their steps."""
    number = check_number("prefetch_batches", value, least=0)
    if number > MOST_AHEAD:
        raise ConfigError(f"prefetch_batches={value!r} is not allowed; give 0 (none) to {MOST_AHEAD}")
    return number


def check_limit_of(name: str, value: Any) -> int | float:
    """Returns a number of batches or a share of them; None stands for all."""
    limit = check_limit(value, name, optional=True)
    return 1.0 if limit is None else limit


def _all_or(number: int) -> float:
    return math.inf if number == NO_LIMIT else number


def _validation_cadence(given: dict[str, Any], *, trial: bool) -> dict[str, Any]:
    interval, epochs = given["val_check_interval"], given["check_val_every_n_epoch"]
    interval = 1.0 if interval is None else interval
    check_cadence(interval, epochs)
    if trial:  # validates once, after its few batches
        interval, epochs = 1.0, 1
    return {"val_check_interval": interval, "check_val_every_n_epoch": epochs}


def check_cadence(interval: Any, epochs: Any) -> None:
    """Raises :class:`ConfigError` for a ``val_check_interval`` and a ``check_val_every_n_epoch`` that cannot work."""
    if isinstance(interval, (str, dict, timedelta)):
        raise ConfigError(
            f"val_check_interval={interval!r} is a wall time, on which processes disagree; give a number of batches (int) or a "
            "share of the epoch (float)"
        )
    check_limit(interval, "val_check_interval")
    if interval == 0:
        raise ConfigError("val_check_interval=0 is not allowed; to leave validation out give limit_val_batches=0")
    check_count("check_val_every_n_epoch", epochs, least=1, optional=True)
    if epochs is None and isinstance(interval, float):
        raise ConfigError(
            f"check_val_every_n_epoch=None counts batches across epochs, so val_check_interval={interval!r} has to be a number of "
            "batches (int)"
        )


def _folder(value: Any) -> str:
    if value is None:
        return str(Path.cwd())
    if not isinstance(value, (str, Path)):
        raise ConfigError(f"default_root_dir={value!r} is not a path; give a string or a pathlib.Path")
    folder = Path(value).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"default_root_dir={str(folder)!r} is a file; give a folder")
    return str(folder)


def refuse_unknown(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises :class:`ConfigError` for the first argument that the Trainer does not have."""
    known = list(known)
    for name, value in given.items():
        if name in LIGHTNINGS_DEFAULTS and value == LIGHTNINGS_DEFAULTS[name]:
            continue
        raise UnknownArgumentError(f"Trainer has no argument {name!r}{advice('Trainer', name, known, value)}")


def refuse_unknown_data(entry: str, given: Mapping[str, Any]) -> None:
    """Raises :class:`ConfigError` for the first argument that fit, validate, test or predict (``entry``) does not have."""
    known = ["model", *(("train_dataloaders", "val_dataloaders") if entry == "fit" else ("dataloaders",))]
    known += ["datamodule", "ckpt_path"]
    for name, value in given.items():
        if name == "weights_only" and value in (None, True, False):
            continue  # files are always read so, and one that would need code to run is refused by name
        meant = "model" if name == "module" else _loaders_meant(name, known)
        cure = f"; give {meant}=..." if meant else advice(entry, name, known)
        raise UnknownArgumentError(f"{entry} has no argument {name!r}{cure}")


def _loaders_meant(name: str, known: Sequence[str]) -> str | None:
    """Which of ``known`` stands for a name such as "train_loader" or "val_dataloader"."""
    if "loader" not in name:
        return None
    return next(
        (one for one in known if one.split("_")[0] == name.split("_", maxsplit=1)[0] or one == "dataloaders"), None
    )


def check_count(name: str, value: Any, *, least: int, endless: bool = False, optional: bool = False) -> int | None:
    """Returns a whole number from ``least``; -1 where ``endless``; None where ``optional``."""
    if value is None and optional:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and endless and value == NO_LIMIT:
        return NO_LIMIT
    if not whole or value < least:
        allowed = (
            f"a whole number from {least}"
            + (", or -1 for no limit" if endless else "")
            + (", or None" if optional else "")
        )
        raise ConfigError(f"{name}={value!r} is not allowed; give {allowed}")
    return int(value)


def check_flag(name: str, value: Any, *, others: tuple[Any, ...] = ()) -> Any:
    """Returns True, False or one of ``others``."""
    if isinstance(value, bool) or (value in others and not isinstance(value, int)):
        return value
    allowed = ", ".join(repr(one) for one in (True, False, *others))
    raise ConfigError(f"{name}={value!r} is not allowed (allowed: {allowed})")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Returns ``value``, one of ``choices``."""
    if value not in choices:
        known = [one for one in choices if isinstance(one, str)]
        allowed = ", ".join(repr(one) for one in choices)
        raise ConfigError(f"{name}={value!r} is not known{nearest(value, known)} (known: {allowed})")
    return value


def as_clip(value: Any, algorithm: Any) -> Clip | None:
    """Returns how gradients are limited; None where ``value`` is None or 0, as in Lightning."""
    check_choice("gradient_clip_algorithm", algorithm, ("norm", "value", None))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"gradient_clip_val={value!r} is not allowed; give a number from 0 (0 and None: no clipping)")
    return Clip(float(value), algorithm or "norm") if value else None
