"""Default values of the Trainer's arguments that are left out or None."""

from __future__ import annotations

import ast
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from fabricamp._utils.containers import own_containers
from fabricamp.arguments.checks import NO_LIMIT
from fabricamp.errors import ConfigError

Arguments = ParamSpec("Arguments")

_DEFAULTS: dict[str, Any] = {
    "accelerator": "auto",
    "accumulate_grad_batches": 1,
    "barebones": False,
    "compile": False,
    "cuda_graph": False,
    "detect_anomaly": False,
    "deterministic": False,
    "devices": "auto",
    "enable_autolog_hparams": True,
    "enable_checkpointing": True,
    "enable_model_summary": True,
    "enable_progress_bar": True,
    "fast_dev_run": False,
    "inference_mode": True,
    "log_every_n_steps": 50,
    "max_steps": NO_LIMIT,
    "min_epochs": 0,
    "min_steps": 0,
    "num_nodes": 1,
    "num_sanity_val_steps": 2,
    "overfit_batches": 0.0,
    "on_world_change": "keep_per_rank",
    "partial_window": "step",
    "per_sample_seed": False,
    "precision": "O0",
    "prefetch_batches": 1,
    "reload_dataloaders_every_n_epochs": 0,
    "start_method": "auto",
    "strategy": "auto",
    "sync_batchnorm": False,
    "use_distributed_sampler": True,
    "val_check_interval": 1.0,
}
"""The value that None means, for arguments where None has no meaning of its own."""

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


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``given`` with each None replaced by the argument's default; None stays where it has a meaning of its own."""
    return {name: _DEFAULTS.get(name) if value is None else value for name, value in given.items()}


def from_environment(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorates ``init``: environment variables such as ``PL_TRAINER_MAX_EPOCHS=3`` set arguments that are not given."""
    names = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def initialize(*args: Arguments.args, **given: Arguments.kwargs) -> None:
        found = {name: os.environ.get(f"PL_TRAINER_{name.upper()}") for name in names}
        values = {name: _parsed(text) for name, text in found.items() if text}
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


def _parsed(text: str) -> Any:
    """Returns the Python literal in ``text``, or ``text`` itself if it is not a literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
