"""``fabricamp config convert``: writes a configuration for ``fabricamp fit`` from one that LightningCLI reads."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fabricamp.arguments.annotations import PARTIAL, TARGET
from fabricamp.arguments.migration import ignored_at_none
from fabricamp.arguments.not_offered import words_for
from fabricamp.config import check_config, locate
from fabricamp.errors import ConfigError
from fabricamp.lightning import aliases
from fabricamp.lightning.cli.written import arguments_of_ours
from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")
_COMMANDS: Final = ("fit", "validate", "test", "predict")
_LIGHTNINGS: Final = ("lightning.", "pytorch_lightning.")
_CLASS: Final = {"class_path", "init_args", "dict_kwargs"}
_OF_ENTRIES: Final = {"return_predictions": True, "verbose": True, "weights_only": None}
"""Arguments of fit, validate, test and predict without a key of ours, and the values that they have here."""
_HOMES: Final = ("callbacks", "loggers", "plugins", "profilers", "strategies")
"""The packages of the classes that LightningCLI finds by their names alone."""
_HEADER: Final = """\
# From {path}, which LightningCLI reads.  What its program sets itself is not in there: add arguments that it links to others.
"""


def convert(path: Path, module: str | None = None, data: str | None = None) -> str:
    """Returns the text of the configuration; ``module`` and ``data`` are the classes that only the program names.

    What the configuration needs before it starts a run is logged.

    Raises:
        ConfigError: for a file that cannot be read, a class that is not offered, or a key that a configuration cannot have.
    """
    content = _read(path)
    for folder in (str(path.resolve().parent), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    converted: dict[str, Any] = {}
    seed = content.pop("seed_everything", None)
    if seed is not None and seed is not False:
        converted["seed"] = 0 if seed is True else seed
    converted["trainer"] = _trainer(content.pop("trainer", None) or {})
    converted["module"] = _part("module", content.pop("model", None), module)
    data_section = _part("data", content.pop("data", None), data)
    if data_section:
        converted["data"] = data_section
    if ckpt_path := content.pop("ckpt_path", None):
        converted["ckpt_path"] = ckpt_path
    for key, value in content.items():
        _refuse_other(key, value)
    try:
        check_config(converted)
    except ConfigError as error:  # for example of a module that still derives from Lightning's class
        _LOG.warning("before the new configuration starts a run: %s", error)
    return _HEADER.format(path=path) + yaml.safe_dump(converted, sort_keys=False, allow_unicode=True)


def _read(path: Path) -> dict[str, Any]:
    """Returns the file's content, of the one subcommand that it is for."""
    if not path.is_file():
        raise ConfigError(
            f"{str(path)!r} is {'a folder' if path.is_dir() else 'not there'}; give a file that LightningCLI reads with --config"
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no mapping; give a file that LightningCLI reads with --config")
    commands = [name for name in _COMMANDS if isinstance(content.get(name), dict)]
    if len(commands) > 1:
        raise ConfigError(
            f"{path} is for {', '.join(commands)}, and a configuration for one; keep one of them in the file"
        )
    content.pop("config", None)
    return dict(content[commands[0]]) if commands else content


def _trainer(section: dict[str, Any]) -> dict[str, Any]:
    """Returns the Trainer's arguments without those that are the defaults."""
    parameters = inspect.signature(Trainer).parameters
    kept = {}
    for name, value in section.items():
        if value is None and (name in ignored_at_none("Trainer") or name != "check_val_every_n_epoch"):
            continue  # None means the default
        at = f"trainer.{name}"
        if name == "callbacks":
            made: Any = [_converted(one, f"{at}.{index}", by_name=True) for index, one in enumerate(_listed(value))]
        else:
            made = _converted(value, at)
        if name not in parameters or made != parameters[name].default:
            kept[name] = made
    return kept


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _part(name: str, section: Any, class_path: str | None) -> Any:
    """Returns the section of the module or of the data."""
    if isinstance(section, str):
        section = {"class_path": section}
    if isinstance(section, dict) and "class_path" in section:
        return _converted(section, name)
    if section is None and class_path is None and name == "data":
        return None
    if class_path is None:
        raise ConfigError(f"{name} has no class_path, because the program names the class; add --{name} package.Class")
    target = _ours(class_path, f"--{name}")
    return {TARGET: target, **_arguments(locate(target, f"--{name}"), section or {}, name)}


def _converted(value: Any, at: str, *, by_name: bool = False) -> Any:
    """Returns ``value`` with ``_target_`` in place of ``class_path``; ``by_name``: a string is the class itself."""
    if by_name and isinstance(value, str):
        value = {"class_path": value}
    if isinstance(value, list):
        return [_converted(one, f"{at}.{index}") for index, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if not (isinstance(value.get("class_path"), str) and {*value} <= _CLASS):
        return {key: _converted(one, f"{at}.{key}") for key, one in value.items()}
    target = _ours(value["class_path"], at)
    kind: Any = locate(target, f"{at}.{TARGET}")
    arguments, more = value.get("init_args") or {}, value.get("dict_kwargs") or {}
    if kind.__module__.startswith("fabricamp."):
        arguments, unnamed = arguments_of_ours(kind, arguments)
        parameters = inspect.signature(kind).parameters
        arguments = {
            key: one for key, one in arguments.items() if key not in parameters or parameters[key].default != one
        }
        more = {**unnamed, **more}
    later = {PARTIAL: True} if isinstance(kind, type) and issubclass(kind, Optimizer | LRScheduler) else {}
    return {TARGET: target, **later, **_arguments(kind, {**arguments, **more}, at)}


def _arguments(kind: Any, arguments: dict[str, Any], at: str) -> dict[str, Any]:
    """Returns the arguments of ``kind``; the name of a function, for an argument that is one, is a target that is called later."""
    parameters = inspect.signature(kind).parameters
    made: dict[str, Any] = {}
    for key, value in arguments.items():
        takes_function = key in parameters and "Callable" in inspect.formatannotation(parameters[key].annotation)
        if takes_function and isinstance(value, str) and "." in value:
            made[key] = {TARGET: _ours(value, f"{at}.{key}"), PARTIAL: True}
        elif key == "timeout" and isinstance(value, str) and (time := re.fullmatch(r"(\d+):(\d\d):(\d\d)", value)):
            hours, minutes, seconds = map(int, time.groups())
            made[key] = hours * 3600 + minutes * 60 + seconds
        else:
            made[key] = _converted(value, f"{at}.{key}")
    return made


def _ours(path: str, at: str) -> str:
    """Returns fabricamp's path of a class or function of Lightning's, or of a class without a path; any other path as it is."""
    if "." not in path:
        found = [f"fabricamp.{part}.{path}" for part in _HOMES if path in _names(part)]
        if not found:
            raise ConfigError(f"{at}: {path!r} has no path; write package.{path}")
        return found[0]
    if not path.startswith(_LIGHTNINGS):
        return path
    below = path.partition(".")[2].removeprefix("pytorch.")
    if words := words_for(below):
        raise ConfigError(f"{at}: {words}")
    for candidate in _candidates(below):
        module, _, name = candidate.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if callable(kind):
            return candidate
    raise ConfigError(f"{at}: {path!r} is not offered by fabricamp (fabricamp help from-lightning)")


def _candidates(below: str) -> Iterator[str]:
    words = below.split(".")
    yield f"fabricamp.{words[0]}.{words[-1]}"
    yield f"fabricamp.{below}"
    yield f"{aliases.HOME}.pytorch.{below}"


def _names(part: str) -> list[str]:
    names: list[str] = getattr(importlib.import_module(f"fabricamp.{part}"), "__all__", [])
    return names


def _refuse_other(key: str, value: Any) -> None:
    """Raises :class:`ConfigError` for a section that a configuration cannot have; None, and what is done anyway, is left out."""
    if value is None or _OF_ENTRIES.get(key, ...) == value:
        return
    if key in ("optimizer", "lr_scheduler"):
        name = value.get("class_path", value) if isinstance(value, dict) else value
        raise ConfigError(
            f"{key} is {name}, and fabricamp's modules make their own: return it from configure_optimizers, with its options as "
            f"arguments of the module, and take {key} out of the file"
        )
    if key in _OF_ENTRIES:
        raise ConfigError(f"{key}={value!r} has no key in a configuration; take it out of the file")
    raise ConfigError(
        f"{key!r} is an option of the program itself: add a callback to trainer.callbacks, or make it an argument of the module, "
        "and take it out of the file"
    )
