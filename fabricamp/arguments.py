"""The Trainer's arguments: each one checked by itself, before anything is built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricamp.callbacks.base import CALLBACKS, Callback
from fabricamp.errors import ConfigError, nearest
from fabricamp.loggers.base import Logger
from fabricamp.precision.base import Clip
from fabricamp.precision.nonfinite import NAN_POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LIGHTNINGS", "Settings", "as_callbacks", "as_loggers", "check_settings", "refuse_unknown"]

INFINITE = math.inf

# Arguments of Lightning's Trainer that have another form here: the nearest name would lead astray.
LIGHTNINGS = {
    "barebones": "leave it out: what is switched off costs nothing (logger=False, enable_progress_bar=False, and so on)",
    "enable_autolog_hparams": "leave it out, and call save_hyperparameters(logger=False) for what loggers shall not get",
    "model_registry": "leave it out, and upload ModelCheckpoint's best_model_path after fit",
    "plugins": "pass precision= and strategy= an object, such as OptLevel('O2', loss_scale=128.0) or DDP(bucket_cap_mb=50)",
    "profiler": "leave it out, and run torch.profiler around fit or in a Callback",
    "reload_dataloaders_every_n_epochs": "leave it out, and give the dataset or sampler a set_epoch(epoch), called before each one",
    "suggest_integrations": "leave it out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checked arguments that are plain values."""

    num_nodes: int
    max_epochs: float
    max_steps: float
    min_epochs: int
    min_steps: int
    max_time: float | None
    limit_batches: dict[str, int | float]
    fast_dev_run: int
    overfit_batches: int | float
    val_check_interval: int | float
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: float
    log_every_n_steps: int
    accumulate_grad_batches: int
    clip: Clip | None
    nan_policy: str | None
    deterministic: bool | str
    benchmark: bool | None
    detect_anomaly: bool
    use_distributed_sampler: bool
    per_sample_seed: bool
    sync_batchnorm: bool
    inference_mode: bool
    default_root_dir: str
    start_method: str


def check_settings(given: dict[str, Any]) -> Settings:
    """Returns the checked plain arguments; raises :class:`ConfigError` for the first wrong one."""
    trial = _trial_batches(given["fast_dev_run"])
    max_epochs = check_count("max_epochs", given["max_epochs"], least=0, endless=True, optional=True)
    max_steps = check_count("max_steps", given["max_steps"], least=0, endless=True)
    max_time = as_seconds(given["max_time"])
    if max_epochs is None:
        max_epochs = INFINITE if max_steps != INFINITE or max_time is not None else 1000
    limits = {
        kind: check_limit(f"limit_{kind}_batches", given[f"limit_{kind}_batches"])
        for kind in ("train", "val", "test", "predict")
    }
    overfit = check_limit("overfit_batches", given["overfit_batches"])
    if overfit:
        limits.update(train=overfit, val=overfit)
    if trial:
        limits, max_epochs, max_steps = dict.fromkeys(limits, trial), 1, trial
    return Settings(
        num_nodes=_count("num_nodes", given["num_nodes"], least=1),
        max_epochs=max_epochs,
        max_steps=INFINITE if max_steps is None else max_steps,
        min_epochs=_count("min_epochs", given["min_epochs"] or 0, least=0),
        min_steps=_count("min_steps", given["min_steps"] or 0, least=0),
        max_time=max_time,
        limit_batches={kind: 1.0 if limit is None else limit for kind, limit in limits.items()},
        fast_dev_run=trial,
        overfit_batches=overfit or 0,
        **_validation_cadence(given, trial=trial > 0),
        num_sanity_val_steps=0
        if trial
        else check_count("num_sanity_val_steps", given["num_sanity_val_steps"], least=0, endless=True) or 0,
        log_every_n_steps=_count("log_every_n_steps", given["log_every_n_steps"], least=1),
        accumulate_grad_batches=_count("accumulate_grad_batches", given["accumulate_grad_batches"], least=1),
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
        default_root_dir=_folder(given["default_root_dir"]),
        start_method=check_choice("start_method", given["start_method"], ("auto", "script", "spawn", "fork")),
    )


def _trial_batches(value: Any) -> int:
    if isinstance(value, bool):
        return int(value)
    return _count("fast_dev_run", value, least=0)


def _count(name: str, value: Any, *, least: int) -> int:
    return int(check_count(name, value, least=least) or 0)


def _validation_cadence(given: dict[str, Any], *, trial: bool) -> dict[str, Any]:
    interval, epochs = given["val_check_interval"], given["check_val_every_n_epoch"]
    interval = 1.0 if interval is None else interval
    if isinstance(interval, (str, dict, timedelta)):
        raise ConfigError(
            f"val_check_interval={interval!r} is a wall time, on which processes disagree; give a number of batches (int) or a "
            "share of the epoch (float)"
        )
    check_limit("val_check_interval", interval, allow_none=False)
    if interval == 0:
        raise ConfigError("val_check_interval=0 is not allowed; to leave validation out give limit_val_batches=0")
    epochs = None if epochs is None else _count("check_val_every_n_epoch", epochs, least=1)
    if epochs is None and isinstance(interval, float):
        raise ConfigError(
            f"check_val_every_n_epoch=None counts batches across epochs, so val_check_interval={interval!r} has to be a number of "
            "batches (int)"
        )
    if trial:  # validates once, after its few batches
        interval, epochs = 1.0, 1
    return {"val_check_interval": interval, "check_val_every_n_epoch": epochs}


def _folder(value: Any) -> str:
    if value is None:
        return str(Path.cwd())
    if not isinstance(value, (str, Path)):
        raise ConfigError(f"default_root_dir={value!r} is not a path; give a string or a pathlib.Path")
    folder = Path(value).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"default_root_dir={str(folder)!r} is a file; give a folder")
    return str(folder)


def refuse_unknown(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises :class:`ConfigError` for the first argument that the Trainer does not have."""
    known = list(known)
    for name in given:
        if name in LIGHTNINGS:
            raise ConfigError(f"Trainer has no argument {name!r}, which is Lightning's; {LIGHTNINGS[name]}")
        raise ConfigError(f"Trainer has no argument {name!r}{nearest(name, known)} (known: {', '.join(known)})")


def check_count(name: str, value: Any, *, least: int, endless: bool = False, optional: bool = False) -> float | None:
    """Returns a whole number from ``least``; -1 as infinity where ``endless``; None where ``optional``."""
    if value is None and optional:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and endless and value == -1:
        return INFINITE
    if not whole or value < least:
        allowed = (
            f"a whole number from {least}"
            + (", or -1 for no limit" if endless else "")
            + (", or None" if optional else "")
        )
        raise ConfigError(f"{name}={value!r} is not allowed; give {allowed}")
    return int(value)


def check_limit(name: str, value: Any, *, allow_none: bool = True) -> int | float | None:
    """Returns a number of batches (int) or a share of them (float from 0 to 1)."""
    if value is None and allow_none:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or value < 0
        or (isinstance(value, float) and value > 1)
    ):
        raise ConfigError(
            f"{name}={value!r} is not allowed; give a number of batches (int from 0) or a share (float from 0.0 to 1.0)"
        )
    return value


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


def as_seconds(value: Any) -> float | None:
    """Returns the seconds of ``max_time``: "DD:HH:MM:SS", a timedelta, or a dict of timedelta's arguments."""
    try:
        if value is None:
            return None
        if isinstance(value, str):
            days, hours, minutes, seconds = (int(part) for part in value.split(":"))
            value = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        elif isinstance(value, dict):
            value = timedelta(**value)
        if isinstance(value, timedelta) and value >= timedelta(0):
            return value.total_seconds()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"max_time={value!r} is not allowed ({error}); give 'DD:HH:MM:SS', a timedelta or a dict such as {{'hours': 2}}"
        ) from error
    raise ConfigError(
        f"max_time={value!r} is not allowed; give 'DD:HH:MM:SS', a timedelta or a dict such as {{'hours': 2}}"
    )


def as_clip(value: Any, algorithm: Any) -> Clip | None:
    """Returns how gradients are limited; None where ``value`` is None or 0, as in Lightning."""
    check_choice("gradient_clip_algorithm", algorithm, ("norm", "value", None))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"gradient_clip_val={value!r} is not allowed; give a number from 0 (0 and None: no clipping)")
    return Clip(float(value), algorithm or "norm") if value else None


def as_callbacks(value: Any) -> list[Callback]:
    """Returns a list of callbacks from one, several, names among them, or None."""
    given = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    callbacks = [CALLBACKS.build(one) if isinstance(one, str) else one for one in given]
    for one in callbacks:
        if not isinstance(one, Callback):
            hint = "; give an instance, not the class" if isinstance(one, type) else ""
            raise ConfigError(f"callbacks holds {one!r}, which is not a fabricamp Callback{hint}")
    keys = [one.state_key for one in callbacks]
    for one, key in zip(callbacks, keys, strict=True):
        if keys.count(key) > 1 and one.state_dict():
            raise ConfigError(
                f"two callbacks have the state key {key!r}; give them different arguments, or override state_key"
            )
    return callbacks


def as_loggers(value: Any) -> list[Logger] | None:
    """Returns a list of loggers; None stands for the default one (``True`` or None given), ``False`` for none."""
    if value is None or value is True:
        return None
    given = [] if value is False else list(value) if isinstance(value, (list, tuple)) else [value]
    for one in given:
        if not isinstance(one, Logger):
            raise ConfigError(
                f"logger={one!r} is not a fabricamp Logger; give one, a list of them, True (TensorBoard) or False"
            )
    return given
