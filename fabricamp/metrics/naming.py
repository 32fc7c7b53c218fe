"""The values and keys that one ``self.log`` call publishes, by Lightning's rules."""

from __future__ import annotations

from typing import Any

from fabricamp.errors import ConfigError, nearest
from fabricamp.metrics.slots import NO_LOADER, Arguments, Published
from fabricamp.state import RunState, Scope

_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch", "sync_dist", "add_dataloader_idx", "rank_zero_only")
_MODES = ("mean", "sum", "min", "max")
LOADER_MARK = "/dataloader_idx_"


def full_name(arguments: Arguments, state: RunState) -> str:
    """Returns the name within its table, with the loader's suffix if there are several evaluation loaders."""
    return arguments.name + _suffix(arguments, state)


def published_values(
    arguments: Arguments, state: RunState, *, metric: bool
) -> tuple[Published | None, Published | None]:
    """Returns the step value and the epoch value of a call; None for a value that the call does not publish."""
    on_step, on_epoch = _cadence(arguments, state.scope)
    mode = _mode(arguments)
    suffix = _suffix(arguments, state)
    forked = on_step and on_epoch

    def value(*, per_step: bool) -> Published:
        fork = ("_step" if per_step else "_epoch") if forked else ""
        return Published(
            key=f"{arguments.name}{fork}{suffix}",
            plain_key=f"{arguments.name}{suffix}",
            per_step=per_step,
            mode="metric" if metric and not per_step else mode,
            prog_bar=bool(arguments.prog_bar),
            logger=arguments.logger is None or bool(arguments.logger),
            sync_dist=bool(arguments.sync_dist),
            loader=state.dataloader_idx if state.scope is Scope.EVAL_STEP else NO_LOADER,
        )

    return value(per_step=True) if on_step else None, value(per_step=False) if on_epoch else None


def check_arguments(arguments: Arguments, state: RunState) -> None:
    """Raises :class:`ConfigError` for a call with wrong arguments, or in a hook where it cannot work."""
    name = arguments.name
    if not isinstance(name, str) or not name:
        raise ConfigError(f"self.log(name={name!r}, ...): a name is a string that is not empty")
    for flag in _FLAGS:
        value = getattr(arguments, flag)
        if not isinstance(value, bool | None):
            raise ConfigError(f"self.log({name!r}, {flag}={value!r}): give True or False")
    if LOADER_MARK in name:
        raise ConfigError(f"self.log({name!r}, ...): {LOADER_MARK!r} is added by itself; leave it out of the name")
    if state.scope in (Scope.NOWHERE, Scope.PREDICT):
        raise ConfigError(
            f"self.log({name!r}, ...) was called in {state.scope.value}; "
            "it works in training_step, validation_step, test_step and the hooks around them"
        )
    if arguments.sync_dist_group is not None:
        raise ConfigError(
            f"self.log({name!r}, sync_dist_group=...) is not supported: values are reduced over all ranks; leave it out"
        )
    _mode(arguments)
    _cadence(arguments, state.scope)


def _cadence(arguments: Arguments, scope: Scope) -> tuple[bool, bool]:
    """Returns ``on_step`` and ``on_epoch``; the defaults depend on the hook that calls."""
    step = scope is Scope.TRAIN_STEP if arguments.on_step is None else bool(arguments.on_step)
    epoch = scope is not Scope.TRAIN_STEP if arguments.on_epoch is None else bool(arguments.on_epoch)
    if step and scope in (Scope.TRAIN_EPOCH, Scope.EVAL_EPOCH):
        raise ConfigError(f"{arguments} was called in {scope.value}, where there is no step; use on_epoch=True alone")
    if not step and not epoch:
        raise ConfigError(f"{arguments} in {scope.value} would keep nothing; set on_step=True or on_epoch=True")
    return step, epoch


def _mode(arguments: Arguments) -> str:
    given: Any = arguments.reduce_fx
    mode = getattr(given, "__name__", given) if callable(given) else given
    if mode not in _MODES:
        raise ConfigError(
            f"self.log({arguments.name!r}, reduce_fx={given!r}): allowed are {', '.join(map(repr, _MODES))}"
            f"{nearest(mode, _MODES)}; for another reduction log a torchmetrics.Metric"
        )
    return str(mode)


def _suffix(arguments: Arguments, state: RunState) -> str:
    several = state.scope is Scope.EVAL_STEP and state.num_dataloaders > 1
    return f"{LOADER_MARK}{state.dataloader_idx}" if several and arguments.add_dataloader_idx else ""
