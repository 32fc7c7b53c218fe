"""Writes and reads hyper-parameters as YAML and CSV, and loads modules from checkpoints."""

from __future__ import annotations

import ast
import csv
from argparse import Namespace
from pathlib import PurePath
from typing import Any

import yaml
from omegaconf import OmegaConf

from fabricamp.data import DataModule
from fabricamp.lightning.packages.fabric.utilities.cloud_io import _is_dir, _load
from fabricamp.lightning.packages.fabric.utilities.cloud_io import get_filesystem as get_filesystem
from fabricamp.module import TrainingModule
from fabricamp.utilities.rank_zero import rank_zero_warn

CHECKPOINT_PAST_HPARAMS_KEYS = ("hparams", "module_arguments")

pl_load = _load


def _load_from_checkpoint(
    cls: Any,
    checkpoint_path: Any,
    map_location: Any = None,
    hparams_file: Any = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Returns the result of the base class's ``load_from_checkpoint`` for ``cls``; overrides of that method call this."""
    options = {"map_location": map_location, "hparams_file": hparams_file, "weights_only": weights_only, **kwargs}
    if issubclass(cls, DataModule):
        return DataModule.load_from_checkpoint.__func__(cls, checkpoint_path, **options)  # type: ignore[attr-defined]
    return TrainingModule.load_from_checkpoint.__func__(cls, checkpoint_path, strict=strict, **options)  # type: ignore[attr-defined]


def update_hparams(hparams: dict[str, Any], updates: dict[str, Any]) -> None:
    """Writes ``updates`` into ``hparams``, nested dicts key by key."""
    for key, value in updates.items():
        if key in hparams and isinstance(value, dict):
            update_hparams(hparams[key], value)
        else:
            hparams[key] = value


def save_hparams_to_tags_csv(tags_csv: Any, hparams: dict[str, Any] | Namespace) -> None:
    """Writes a row for each hyper-parameter, after the row "key,value"."""
    with _opened_to_write(tags_csv) as file:
        csv.writer(file).writerows([("key", "value"), *_as_dict(hparams).items()])


def load_hparams_from_tags_csv(tags_csv: Any) -> dict[str, Any]:
    """Returns the hyper-parameters from a file of :func:`save_hparams_to_tags_csv`; warns and returns {} if there is no file."""
    if not _is_there(tags_csv):
        return {}
    with get_filesystem(tags_csv).open(str(tags_csv), "r", newline="") as file:
        return {row[0]: convert(row[1]) for row in [*csv.reader(file)][1:]}


def save_hparams_to_yaml(config_yaml: Any, hparams: dict[str, Any] | Namespace, use_omegaconf: bool = True) -> None:
    """Writes the hyper-parameters; leaves out values that YAML cannot hold, with a warning for each."""
    values = {}
    for key, value in _as_dict(hparams).items():
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        try:
            yaml.safe_load(yaml.safe_dump(plain))
        except yaml.YAMLError:
            rank_zero_warn(f"{key!r} is left out of {config_yaml}: YAML has no form for a {type(value).__name__}")
        else:
            values[key] = plain
    with _opened_to_write(config_yaml) as file:
        yaml.safe_dump(values, file, sort_keys=False)


def load_hparams_from_yaml(config_yaml: Any, use_omegaconf: bool = True) -> Any:
    """Returns the hyper-parameters of a file, by default as OmegaConf's container; warns and returns {} if there is no file."""
    if not _is_there(config_yaml):
        return {}
    with get_filesystem(config_yaml).open(str(config_yaml), "r") as file:
        values = yaml.safe_load(file)
    return OmegaConf.create(values) if use_omegaconf and isinstance(values, (dict, list)) else values


def convert(val: str) -> Any:
    """Returns the value of a Python literal, or the text itself."""
    try:
        return ast.literal_eval(val)
    except (ValueError, SyntaxError):
        return val


def _as_dict(hparams: Any) -> dict[str, Any]:
    if isinstance(hparams, Namespace):
        return vars(hparams)
    if not isinstance(hparams, dict):
        raise TypeError(f"hyper-parameters are a dict or a Namespace, not {type(hparams).__name__}")
    return dict(hparams)


def _opened_to_write(path: Any) -> Any:
    folder = str(PurePath(str(path)).parent) if "://" not in str(path) else str(path).rpartition("/")[0]
    files = get_filesystem(path)
    if not _is_dir(files, folder):
        raise RuntimeError(f"there is no folder {folder}; make it before the file")
    return files.open(str(path), "w", newline="")


def _is_there(path: Any) -> bool:
    there: bool = get_filesystem(path).exists(str(path))
    if not there:
        rank_zero_warn(f"there is no file {path}", category=RuntimeWarning)
    return there
