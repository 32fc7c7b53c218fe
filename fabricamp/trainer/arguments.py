"""The Trainer's plain arguments: their allowed values, the checks of several together, and their defaults.

In this order: checks of one argument alone; :class:`Settings`, which declares the arguments; checks of several together; arguments
that nobody knows; arguments that are left out, or given by environment variables.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec

from fabricamp._utils.containers import own_containers
from fabricamp.activations import Activations, as_activations
from fabricamp.arguments.cadence import as_seconds, validation_times
from fabricamp.arguments.checks import NO_LIMIT, check_choice, check_count, check_flag, check_number
from fabricamp.arguments.environment import arguments_from_environment
from fabricamp.arguments.migration import ignored_at_none
from fabricamp.compilation import Compile, as_compile, check_compile
from fabricamp.cuda_graph import CudaGraph, as_cuda_graph
from fabricamp.data.lengths import check_limit
from fabricamp.data.loaders import MOST_AHEAD
from fabricamp.engine.performance import Performance, as_performance, check_performance
from fabricamp.errors import ArgumentTypeError, ConfigError, UnknownArgumentError, advice
from fabricamp.habits import habits
from fabricamp.precision.base import Clip
from fabricamp.precision.step_results import NAN_POLICIES

Arguments = ParamSpec("Arguments")

# -- checks of one argument alone ----------------------------------------------------------------------------------------------


def _trial_batches(name: str, value: object) -> int:
    return int(value) if isinstance(value, bool) else check_number(name, value, least=0)


def check_accumulation(name: str, value: object) -> int:
    """Returns a whole number from 1; for a dict of epochs raises ConfigError that names GradientAccumulationScheduler."""
    if isinstance(value, dict):
        raise ConfigError(
            f"{name}={value!r} is a schedule; give callbacks=[GradientAccumulationScheduler({value!r})], and here a number from 1"
        )
    return check_number(name, value, least=1)


def check_prefetch(name: str, value: object) -> int:
    """Returns the number of batches to move ahead of their steps, 0 to ``MOST_AHEAD``."""
    number = check_number(name, value, least=0)
    if number > MOST_AHEAD:
        raise ConfigError(f"{name}={value!r} is not allowed; give 0 (none) to {MOST_AHEAD}")
    return number


def check_limit_of(name: str, value: object) -> int | float:
    """Returns a number of batches (int) or a fraction of them (float); None means all."""
    limit = check_limit(value, name, optional=True)
    return 1.0 if limit is None else limit


def _overfit(name: str, value: object) -> int | float:
    return check_limit(value, name) or 0


def _objects(name: str, value: object) -> bool:
    """Returns whether checkpoints hold objects; None: as in Lightning, in a script that imports Lightning's names from here."""
    if value is None:
        return habits().checkpoints_hold_objects
    return bool(check_flag(name, value))


def check_weights_only(entry: str, value: object) -> bool | None:
    """Returns the permission to rebuild objects in a checkpoint: only False gives it, and None means True."""
    if value is not None and not isinstance(value, bool):
        raise ConfigError(
            f"{entry}(weights_only={value!r}): give None or True (no code runs), or False, which allows a file that you trust to "
            "rebuild its objects by code"
        )
    return value


def _folder(name: str, value: object) -> str:
    if value is None:
        return str(Path.cwd())
    if not isinstance(value, (str, Path)):
        raise ConfigError(f"{name}={value!r} is not a path; give a string or a pathlib.Path")
    folder = Path(value).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{name}={str(folder)!r} is a file; give a folder")
    return str(folder)


_ENDLESS = functools.partial(check_number, least=0, endless=True)
_FROM_0, _FROM_1 = (functools.partial(check_number, least=least) for least in (0, 1))


def _one_of(*choices: Any) -> Callable[[str, Any], Any]:
    return functools.partial(check_choice, choices=choices)


def _checked(check: Callable[[str, Any], Any]) -> Any:
    """Declares a field of :class:`Settings`, an argument of the Trainer: ``check(name, value)`` returns the value to keep."""
    return field(metadata={"check": check})


# -- the arguments -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Settings:
    """The checked arguments with plain values; the Trainer's setters change them.

    To add an argument, add a field with its check here, and the argument to the signature and the docstring of
    ``Trainer.__init__``.  Its default is only in the signature.
    """

    num_nodes: int = _checked(_FROM_1)
    max_epochs: int = _checked(_ENDLESS)
    max_epochs_by_default: bool
    max_steps: int = _checked(_ENDLESS)
    min_epochs: int = _checked(_FROM_0)
    min_steps: int = _checked(_FROM_0)
    max_time: float | None = _checked(as_seconds)
    limit_train_batches: int | float = _checked(check_limit_of)
    limit_val_batches: int | float = _checked(check_limit_of)
    limit_test_batches: int | float = _checked(check_limit_of)
    limit_predict_batches: int | float = _checked(check_limit_of)
    fast_dev_run: int = _checked(_trial_batches)
    overfit_batches: int | float = _checked(_overfit)
    val_check_interval: int | float | str | dict[str, Any] | timedelta
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: float = _checked(_ENDLESS)
    log_every_n_steps: int = _checked(_FROM_0)
    accumulate_grad_batches: int = _checked(check_accumulation)
    partial_window: str = _checked(_one_of("step", "carry", "drop"))
    on_world_change: str = _checked(_one_of("keep_per_rank", "keep_global_batch"))
    clip: Clip | None
    nan_policy: str | None = _checked(_one_of(*NAN_POLICIES, None))
    on_out_of_memory: str = _checked(_one_of("raise", "halve"))
    deterministic: bool | str = _checked(functools.partial(check_flag, others=("warn",)))
    benchmark: bool | None = _checked(functools.partial(check_flag, others=(None,)))
    detect_anomaly: bool = _checked(check_flag)
    use_distributed_sampler: bool = _checked(check_flag)
    per_sample_seed: bool = _checked(check_flag)
    prefetch_batches: int = _checked(check_prefetch)
    sync_batchnorm: bool = _checked(check_flag)
    inference_mode: bool = _checked(check_flag)
    barebones: bool = _checked(check_flag)
    enable_autolog_hparams: bool = _checked(check_flag)
    checkpoint_objects: bool = _checked(_objects)
    reload_dataloaders_every_n_epochs: int = _checked(_FROM_0)
    default_root_dir: str = _checked(_folder)
    start_method: str = _checked(_one_of("auto", "script", "spawn", "fork"))
    cuda_graph: CudaGraph | None
    performance: Performance | None = _checked(as_performance)  # noqa: RUF009 - a field of the dataclass
    compile: Compile | None = _checked(as_compile)  # noqa: RUF009
    activations: Activations | None = _checked(as_activations)  # noqa: RUF009
    accumulation_schedule: Mapping[int, int] | None = None
    """Maps an epoch to ``accumulate_grad_batches`` from that epoch on; None: the same in all epochs."""
    left_by_schedule: int = 1
    """``accumulate_grad_batches`` after the last fit's schedule; another schedule may replace this value."""

    @property
    def most_accumulated(self) -> int:
        """The largest number of micro-batches in a step."""
        return max(self.accumulate_grad_batches, *(self.accumulation_schedule or {0: 1}).values())

    @property
    def accumulates(self) -> bool:
        """Whether any step has several micro-batches."""
        return self.most_accumulated > 1

    def accumulated_in(self, epoch: int) -> int:
        """Returns the number of micro-batches of a step in ``epoch``."""
        schedule = self.accumulation_schedule
        return (
            self.accumulate_grad_batches if schedule is None else schedule[max(one for one in schedule if one <= epoch)]
        )

    def begin_epoch(self, epoch: int) -> None:
        """Sets ``accumulate_grad_batches`` to the value of ``epoch``."""
        self.accumulate_grad_batches = self.accumulated_in(epoch)


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    one.name: one.metadata["check"] for one in fields(Settings) if "check" in one.metadata
}
"""The check of each argument that can be checked alone; the setters of limits use the same checks."""

LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")


def check_settings(given: dict[str, Any]) -> Settings:
    """Returns the checked plain arguments; raises :class:`ConfigError` for the first wrong one."""
    by_default = given["max_epochs"] is None and given["max_steps"] == NO_LIMIT and given["max_time"] is None
    if given["max_epochs"] is None:
        given = {**given, "max_epochs": 1000 if by_default else NO_LIMIT}
    # These are None in the signature, as in Lightning's.
    for name, default in (("val_check_interval", 1.0), ("min_epochs", 0), ("min_steps", 0)):
        if given[name] is None:
            given = {**given, name: default}
    val_check_interval, check_val_every_n_epoch = check_cadence(
        given["val_check_interval"], given["check_val_every_n_epoch"]
    )
    settings = Settings(
        **{name: check(name, given[name]) for name, check in CHECKS.items()},
        max_epochs_by_default=by_default,
        val_check_interval=val_check_interval,
        check_val_every_n_epoch=check_val_every_n_epoch,
        clip=as_clip(given["gradient_clip_val"], given["gradient_clip_algorithm"]),
        cuda_graph=as_cuda_graph(given["cuda_graph"]),
    )
    if settings.num_sanity_val_steps == NO_LIMIT:
        settings.num_sanity_val_steps = math.inf
    if settings.overfit_batches:
        settings.limit_train_batches = settings.limit_val_batches = settings.overfit_batches
    check_compile(settings)
    check_performance(settings.performance, settings.benchmark, settings.deterministic)
    _check_order("epochs", settings.min_epochs, settings.max_epochs)
    _check_order("steps", settings.min_steps, settings.max_steps)
    if settings.fast_dev_run:
        _make_trial(settings)
    return settings


def _check_order(what: str, least: int, most: int) -> None:
    """Raises :class:`ConfigError` if the minimum is above the maximum."""
    if least > most >= 0:
        raise ConfigError(f"min_{what}={least} is above max_{what}={most}; lower it, or raise max_{what}")


def _make_trial(settings: Settings) -> None:
    """Limits ``settings`` to a trial run: a few batches of each loader, and one validation after them."""
    for name in LIMITS:
        setattr(settings, name, settings.fast_dev_run)
    settings.max_epochs, settings.max_steps, settings.num_sanity_val_steps = 1, settings.fast_dev_run, 0
    settings.val_check_interval, settings.check_val_every_n_epoch = 1.0, 1


def check_schedule(settings: Settings, schedule: Mapping[int, int]) -> Mapping[int, int]:
    """Returns the schedule; raises :class:`ConfigError` if another argument of the Trainer cannot work with a schedule."""
    accumulated = settings.accumulate_grad_batches
    replaceable = settings.accumulation_schedule is not None or accumulated in (1, settings.left_by_schedule)
    others = {
        "accumulate_grad_batches": accumulated if replaceable else 1,
        "partial_window": "step" if settings.partial_window == "carry" else settings.partial_window,
        "on_world_change": "keep_per_rank",
    }
    for name, possible in others.items():
        given = getattr(settings, name)
        if given != possible:
            raise ConfigError(
                f"GradientAccumulationScheduler({dict(schedule)}) changes how many micro-batches make a step, which cannot work "
                f"with {name}={given!r}; leave one of them out"
            )
    return schedule


def check_cadence(interval: Any, epochs: object) -> tuple[Any, int | None]:
    """Returns ``val_check_interval`` and ``check_val_every_n_epoch``; raises :class:`ConfigError` if they cannot work."""
    number = check_count("check_val_every_n_epoch", epochs, least=1, optional=True)
    if isinstance(interval, (str, dict, timedelta)):
        times = validation_times(interval)
        # A time alone may be limited to every n-th epoch, as in Lightning.
        if number not in (None, 1) and (times.steps or times.epochs):
            raise ConfigError(
                f"val_check_interval={interval!r} is the whole schedule of validations; leave "
                f"check_val_every_n_epoch={number!r} out, or write both as '100 steps, 2 epochs'"
            )
        return interval, number
    interval = check_limit(interval, "val_check_interval")
    if interval == 0:
        raise ConfigError("val_check_interval=0 is not allowed; to leave validation out give limit_val_batches=0")
    if number is None and isinstance(interval, float):
        raise ConfigError(
            f"check_val_every_n_epoch=None counts batches across epochs, so val_check_interval={interval!r} has to be a number of "
            "batches (int)"
        )
    return interval, number


def refuse_unknown(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises :class:`ConfigError` for the first argument that the Trainer does not have."""
    known = list(known)
    for name, value in given.items():
        if value is None and name in ignored_at_none("Trainer"):
            continue
        raise UnknownArgumentError(f"Trainer has no argument {name!r}{advice('Trainer', name, known, value)}")


def refuse_unknown_data(entry: str, given: Mapping[str, Any]) -> None:
    """Raises :class:`ConfigError` for the first argument that fit, validate, test or predict (``entry``) does not have."""
    known = ["model", *(("train_dataloaders", "val_dataloaders") if entry == "fit" else ("dataloaders",))]
    known += ["datamodule", "ckpt_path", "weights_only"]
    for name in given:
        meant = "model" if name == "module" else _loaders_meant(name, known)
        cure = f"; give {meant}=..." if meant else advice(entry, name, known)
        raise UnknownArgumentError(f"{entry} has no argument {name!r}{cure}")


def _loaders_meant(name: str, known: Sequence[str]) -> str | None:
    """Returns the argument in ``known`` meant by a name such as "train_loader" or "val_dataloader"; None if there is none."""
    if "loader" not in name:
        return None
    return next(
        (one for one in known if one.split("_")[0] == name.split("_", maxsplit=1)[0] or one == "dataloaders"), None
    )


def as_clip(value: Any, algorithm: Any) -> Clip | None:
    """Returns the gradient clipping; None if ``value`` is None or 0, as in Lightning."""
    check_choice("gradient_clip_algorithm", algorithm, ("norm", "value", None))
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        kind = ConfigError if is_number else ArgumentTypeError
        raise kind(f"gradient_clip_val={value!r} is not allowed; give a number from 0 (0 and None: no clipping)")
    return Clip(float(value), algorithm or "norm") if value else None


# -- arguments that are left out -----------------------------------------------------------------------------------------------

_NONE_IS_A_VALUE = ("check_val_every_n_epoch", "gradient_clip_algorithm", "logger")
"""Arguments for which None is a value of its own, not the default."""

_BARE: dict[str, Any] = {
    "detect_anomaly": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "fast_dev_run": False,
    "logger": False,
    "num_sanity_val_steps": 0,
    "profiler": None,
}
"""The values that ``barebones=True`` sets."""


def with_defaults(given: Mapping[str, Any], init: Callable[..., None]) -> dict[str, Any]:
    """Returns ``given`` with each None replaced by the default in the signature of ``init``, unless None is a value of its own."""
    parameters = inspect.signature(init).parameters
    return {
        name: parameters[name].default if value is None and name not in _NONE_IS_A_VALUE else value
        for name, value in given.items()
    }


def from_environment(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorates ``init``: environment variables such as ``PL_TRAINER_MAX_EPOCHS=3`` set arguments that are not given."""
    names = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def initialize(*args: Arguments.args, **given: Arguments.kwargs) -> None:
        values = arguments_from_environment("PL_TRAINER", names)
        values |= {name: own_containers(value) for name, value in given.items()}
        init(*args, **_bared(values))

    return initialize


def _bared(given: dict[str, Any]) -> dict[str, Any]:
    """Returns ``given``, with ``barebones=True`` updated by ``_BARE``; raises ConfigError if another argument contradicts that."""
    if given.get("barebones") is not True:
        return given
    for name, off in _BARE.items():
        if (value := given.get(name)) is not None and value != off:
            raise ConfigError(
                f"barebones=True stands for {name}={off!r}, and {name}={value!r} is given; leave one of them out"
            )
    return {**given, **_BARE}
