"""Checks the callbacks, loggers and plugins given to a Trainer, and adds the defaults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fabricamp import callbacks
from fabricamp._utils.types import CheckpointFiles
from fabricamp.arguments.checks import check_flag
from fabricamp.arguments.not_offered import lightnings
from fabricamp.callbacks.async_checkpoint import AsyncCheckpoint
from fabricamp.callbacks.base import CALLBACKS, Callback
from fabricamp.callbacks.checkpoint import Checkpoint
from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
from fabricamp.callbacks.model_summary import ModelSummary
from fabricamp.callbacks.progress_bar import ProgressBar
from fabricamp.checkpoint.checkpoint_io import CheckpointIO, innermost, reads_own_files, writes_own_files
from fabricamp.checkpoint.form import form_of
from fabricamp.errors import ConfigError, DuplicateCallbackError, without_address
from fabricamp.habits import habits
from fabricamp.lightning.given import adopted, runs_as_it_is
from fabricamp.loggers.base import Logger
from fabricamp.loggers.dummy import DummyLogger
from fabricamp.loggers.tensorboard import TensorBoardLogger
from fabricamp.precision.base import Precision
from fabricamp.strategies.base import Environment, Strategy
from fabricamp.trainer.arguments import Settings

_BY_DEFAULT: Final[Mapping[str, type[Callback]]] = {
    "enable_checkpointing": ModelCheckpoint,
    "enable_progress_bar": ProgressBar,
    "enable_model_summary": ModelSummary,
}


def as_callbacks(value: object) -> list[Callback]:
    """Returns the list of callbacks for a callback, a registered name, a sequence of these, or None; raises ConfigError."""
    given = [] if value is None else _listed(value)
    given += _of_installed_packages()
    found = [_by_name(one) if isinstance(one, str) else adopted(one) for one in given]
    for one in found:
        if not (isinstance(one, Callback) or runs_as_it_is(one)):
            hint = f"; give an instance: {one.__name__}(...)" if isinstance(one, type) else ""
            raise ConfigError(
                f"callbacks: {words}"
                if (words := lightnings(one))
                else f"callbacks holds {without_address(one)}, which is not a fabricamp Callback{hint}"
            )
    keys = [one.state_key for one in found]
    for one, key in zip(found, keys, strict=True):
        if keys.count(key) > 1 and one.state_dict():
            raise DuplicateCallbackError(
                f"two callbacks have the state key {key!r}; give them different arguments, or override state_key"
            )
    return found


def _of_installed_packages() -> list[Any]:
    """Returns the callbacks that installed packages add to each Trainer of a program that imports Lightning's names."""
    if not habits().packages_add_callbacks:
        return []
    import importlib.metadata

    return [
        callback
        for factory in importlib.metadata.entry_points(group="lightning.pytorch.callbacks_factory")
        for callback in _listed(factory.load()())
    ]


def _listed(value: object) -> list[Any]:
    """Returns a list of the value, or of its items if it is any sequence: hydra's ``instantiate`` passes its own list class."""
    return [*value] if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def default_callbacks(given: Mapping[str, Any], callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns the default callbacks that ``given`` enables; raises ConfigError if ``callbacks`` contradicts ``given``."""
    wanted: list[type[Callback]] = [kind for name, kind in _BY_DEFAULT.items() if check_flag(name, given[name])]
    saving = next((one for one in callbacks if isinstance(one, Checkpoint)), None)
    if ModelCheckpoint not in wanted and saving is not None:
        name = type(saving).__name__
        raise ConfigError(f"callbacks holds a {name}, but enable_checkpointing=False; leave one of them out")
    bars = [type(one).__name__ for one in callbacks if isinstance(one, ProgressBar)]
    if len(bars) > 1:
        raise ConfigError(f"callbacks holds {len(bars)} progress bars ({', '.join(bars)}); give one")
    defaults = [kind() for kind in wanted]
    if given["max_time"] is None:
        return defaults
    from fabricamp.callbacks.timer import Timer

    return [Timer.of_max_time(given["max_time"]), *defaults]


def _by_name(name: str) -> Callback:
    """Returns the callback that a third party has registered under ``name``; raises ConfigError if there is none."""
    if name in CALLBACKS.names():
        return CALLBACKS.build(name)
    matches = difflib.get_close_matches(name, callbacks.__all__, n=1)
    meant = matches[0] if matches else "ModelCheckpoint"
    raise ConfigError(
        f"callbacks={name!r} is not a registered name; write callbacks=[{meant}(...)], in a configuration "
        f"_target_: fabricamp.callbacks.{meant}"
    )


def as_loggers(value: object, settings: Settings) -> list[Logger]:
    """Returns the list of loggers: None or True: the default logger; False: none; a trial run: one logger that writes nothing."""
    default = value is None or value is True
    found: list[Logger] = [TensorBoardLogger(settings.default_root_dir)] if default else _checked_loggers(value)
    return [DummyLogger()] if found and settings.fast_dev_run else found


def _checked_loggers(value: object) -> list[Logger]:
    given = [] if value is False else _listed(value)
    given = [adopted(one) for one in given]
    for one in given:
        if not isinstance(one, Logger):
            raise ConfigError(
                f"logger: {words}"
                if (words := lightnings(one))
                else f"logger={without_address(one)} is not a fabricamp Logger; give one, a list of "
                "them, True (TensorBoard) or False"
            )
    return given


def of_plugins(plugins: Any, precision: Any) -> tuple[Any, Environment | None, CheckpointIO | None]:
    """Returns (precision, environment or None, CheckpointIO or None); a precision in ``plugins`` replaces ``precision``."""
    given = [] if plugins is None else _listed(plugins)
    precisions = [one for one in given if isinstance(one, Precision)]
    environments = [one for one in given if isinstance(one, Environment)]
    writers = [one for one in given if isinstance(one, CheckpointIO)]
    for one in given:
        if not isinstance(one, Precision | Environment | CheckpointIO):
            raise ConfigError(
                f"plugins holds {without_address(one)}; it takes a precision of fabricamp's, such as OptLevel('O2'), a "
                "fabricamp.strategies.Environment, and a CheckpointIO of fabricamp.plugins.io. A strategy goes to strategy=; "
                "sync_batchnorm=True stands for Lightning's TorchSyncBatchNorm; torchrun and SLURM are found by themselves"
            )
    if max(len(precisions), len(environments), len(writers)) > 1:
        raise ConfigError(
            "plugins holds two precisions, two environments or two CheckpointIOs; give one of each at most"
        )
    if precisions and precision != "O0":
        raise ConfigError(f"precision={precision!r} and a precision in plugins; give one of them")
    environment = environments[0] if environments else None
    return (precisions or [precision])[0], environment, writers[0] if writers else None


def give_checkpoint_io(io: CheckpointFiles | None, strategy: Strategy, callbacks: Sequence[Callback]) -> None:
    """Gives the strategy the plug-in of ``plugins``; raises ConfigError for what cannot work with one that writes by itself."""
    if io is not None and strategy.checkpoint_io is not None and io is not strategy.checkpoint_io:
        raise ConfigError("a CheckpointIO in plugins and another one in the strategy; give one of them")
    strategy.checkpoint_io = io = strategy.checkpoint_io if io is None else io
    if writes_own_files(io) and reads_own_files(io):
        return
    name = type(innermost(io) or io).__name__
    if form_of(strategy).all_ranks_write:
        raise ConfigError(
            f"{name} with strategy={strategy.name!r}: each rank writes its own shards, and a CheckpointIO is called on rank 0 "
            "only; leave it out, or give strategy='ddp'"
        )
    if not writes_own_files(io) and any(isinstance(one, AsyncCheckpoint) for one in callbacks):
        raise ConfigError(
            f"{name} in plugins and an AsyncCheckpoint: AsyncCheckpoint writes files by itself; give ModelCheckpoint, and "
            f"plugins=[AsyncCheckpointIO({name}(...))] to write in the background"
        )
