"""Configuration files for the command line: read, overridden, checked against what they build, and built."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from fabricamp._utils.files import replace_text
from fabricamp._utils.masking import hidden
from fabricamp.arguments.annotations import PARTIAL, TARGET, fits, kinds_of, misfits, read_as
from fabricamp.arguments.environment import FromEnvironment, exposes, references_alone, resolved, without_references
from fabricamp.callbacks.base import Callback
from fabricamp.data import DataModule
from fabricamp.errors import ConfigError, advice, meant, nearest
from fabricamp.hooks import overrides
from fabricamp.module import TrainingModule
from fabricamp.state import TrainerFn
from fabricamp.trainer import Trainer

SECTIONS = {
    "trainer": "the Trainer's arguments",
    "module": "the TrainingModule: its class as _target_, and its arguments",
    "data": "the DataModule: its class as _target_, and its arguments",
    "seed": "a number for seed_everything, or null",
    "ckpt_path": "the checkpoint to start from, or null",
    "variables": "values of your own, for ${variables.name}",
    "import_from": "the folders that _target_ is looked for in",
}
"""The top-level keys of a configuration file, and their meaning."""

_LIST_EXAMPLE = "trainer.callbacks=[{_target_: fabricamp.callbacks.EarlyStopping, monitor: val_loss}]"
_LONGEST = 200
"""The most characters of an override or a name that an error shows."""
_MADE = (DataLoader, Sampler, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, nn.Module)
"""torch's bases of what refuses its arguments while it is made."""
_MOST_WORDS = 50
"""The most words of a dotted name: Python imports each package within the import of the one before."""


class Configuration(dict[str, Any]):
    """A configuration with its interpolations resolved; ``written`` is the form to save, with references to the environment.

    ``private``: ``written`` still holds a value from the environment, or a value whose name says that it is secret.
    ``texts``: what stands for each value in the file, or in an override; :func:`check_config` reads it by the annotations.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        written: Mapping[str, Any],
        *,
        private: bool = False,
        texts: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(content)
        self.written = dict(written)
        self.private = private
        self.texts = texts or {}


class Parts(NamedTuple):
    """The objects built from a configuration."""

    trainer: Trainer
    module: TrainingModule
    data: DataModule | None
    ckpt_path: str | None


def read_config(path: Path, overrides: Sequence[str] = ()) -> Configuration:
    """Returns the file's content with ``key=value`` overrides applied and interpolations resolved.

    Strings from ``${oc.env:...}`` keep their reference.  Raises :class:`ConfigError` if the file or an override cannot be read;
    :func:`check_config` checks the content.
    """
    from omegaconf.errors import OmegaConfBaseException

    content = _load(path)
    texts = _texts_of(path.read_text(encoding="utf-8"))
    for override in overrides:
        _put(content, override)
        _note_text(texts, override)
    try:
        values, written = resolved(content, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_reason(error)} (at {error.full_key})") from None
    except RecursionError as error:
        raise ConfigError(f"{path}: {_reason(error)}") from None
    folders = values.get("import_from", [])
    if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders):
        raise ConfigError(f"import_from={folders!r} is not a list of folders; write import_from: [folder, ...]")
    # Absolute paths, so that the copy in the log folder works from there.
    given = [path.parent / folder for folder in folders]
    try:
        folders = list(dict.fromkeys(str(folder.resolve()) for folder in (*given, path.parent, Path.cwd())))
    except (ValueError, RuntimeError) as error:  # a character that no path has, or a circle of links
        raise ConfigError(f"import_from={folders!r} has a folder that no path can name: {error}") from None
    private = any(isinstance(folder, FromEnvironment) for folder in values.get("import_from", []))
    private = private or hidden(written) != written
    return Configuration(
        {**values, "import_from": folders}, {**written, "import_from": folders}, private=private, texts=texts
    )


def check_config(content: Mapping[str, Any]) -> None:
    """Raises :class:`ConfigError` for a key or class that does not exist, a missing argument or a wrong type; builds nothing.

    Numbers, flags and names in ``content`` become what the annotations of the arguments say.
    """
    for key in content:
        if key not in SECTIONS:
            raise ConfigError(f"{key!r} is not a section of a configuration{_section_meant(key)}")
    for name in ("trainer", "module", "data"):
        section = content.get(name)
        if not isinstance(section, dict | None):
            raise ConfigError(f"{name}={section!r} is not a mapping; {name} takes {SECTIONS[name]}")
        if TARGET not in (section or {}) and (name == "module" or (name == "data" and section)):
            raise ConfigError(f"{name} has no {TARGET}; write {name}.{TARGET}: package.Class ({SECTIONS[name]})")
    for folder in reversed(content.get("import_from", [])):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if isinstance(content, Configuration) and "seed" in content:
        _read_key(content, content.written, "seed", int | None, content.texts, content.texts)
    if not isinstance(content.get("seed"), int | None) or isinstance(content.get("seed"), bool):
        raise ConfigError(f"seed={content['seed']!r} is not a whole number; give one, or null")
    ckpt_path = content.get("ckpt_path")
    if ckpt_path is not None and not (isinstance(ckpt_path, str) and ckpt_path):
        raise ConfigError(
            f"ckpt_path={ckpt_path!r} is not a path; give that of a checkpoint, or best, last, auto or null"
        )
    section = _trainer_section(content)
    reading = _Reading(content) if isinstance(content, Configuration) else None
    _check_node(section, "trainer", reading=reading)
    if content.get("trainer"):
        content["trainer"].update({key: section[key] for key in content["trainer"]})
    _check_node(content["module"], "module", TrainingModule, reading=reading)
    _check_node(content.get("data"), "data", DataModule, reading=reading)


def targets_of(content: Mapping[str, Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields (key, class or function) for every ``_target_`` of a checked configuration, the Trainer first."""

    def within(node: Any, where: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        if isinstance(node, dict) and TARGET in node:
            yield where, locate(node[TARGET], f"{where}.{TARGET}")
        for key, value in _children(node):
            yield from within(value, f"{where}.{key}")

    yield from within(_trainer_section(content), "trainer")
    for name in ("module", "data"):
        yield from within(content.get(name), name)


@contextlib.contextmanager
def refusals_explained(content: Configuration) -> Iterator[None]:
    """A context around a run: what torch refuses when module or data make a loader, an optimizer or a layer is a ConfigError."""
    try:
        yield
    except Exception as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        keys = _keys_behind(error, refusal.arguments, content)
        if keys:
            raise ConfigError(f"{', '.join(keys)} is refused by {refusal}") from error
        raise ConfigError(f"{refusal}; change the value in the configuration that it comes from") from error


def build_parts(content: Mapping[str, Any], loaders: str = "train") -> Parts:
    """Returns the objects that a checked configuration describes; sets the seed before it builds them.

    ``loaders`` names those that the run needs: train, val, test or predict.  Raises :class:`ConfigError` if nothing has them.
    """
    if content.get("seed") is not None:
        from fabricamp.rng import seed_everything

        seed_everything(content["seed"])
    if not isinstance(content, Configuration):
        content = Configuration(content, content)
    section = without_references(_trainer_section(content))
    arguments = {key: _build(value, f"trainer.{key}") for key, value in section.items()}
    callbacks = arguments.get("callbacks") or []
    arguments["callbacks"] = [
        *(callbacks if isinstance(callbacks, list) else [callbacks]),
        SaveConfig(content.written, private=content.private),
    ]
    trainer = locate(arguments.pop(TARGET), f"trainer.{TARGET}")(**arguments)
    module, data = (_build_part(content, name) for name in ("module", "data"))
    hook = f"{loaders}_dataloader"
    # A setup of the module may still make one.
    if data is None and not any(overrides(module, name, TrainingModule) for name in (hook, "setup")):
        raise ConfigError(
            f"the configuration has no section data, and {type(module).__name__} has no {hook}; write data: with _target_: "
            f"package.Class (a DataModule), or {type(module).__name__}.{hook}"
        )
    return Parts(trainer, module, data, content.get("ckpt_path"))


class SaveConfig(Callback):
    """A callback that writes a run's configuration to ``config.yaml`` in its log folder, without values from the environment."""

    def __init__(self, content: Mapping[str, Any], *, private: bool = False) -> None:
        self.content = dict(content)
        self._private = private

    def on_fit_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Writes the file; not earlier, so that a run that fails a check leaves no folder."""
        self._write(trainer)

    def on_validation_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Writes the file in ``validate``; in ``fit`` the file is there already."""
        if trainer.state.fn is TrainerFn.VALIDATING:
            self._write(trainer)

    def on_test_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Writes the file."""
        self._write(trainer)

    def on_predict_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Writes the file."""
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        """Writes the file on rank 0, unless nothing is logged."""
        folder = trainer.log_folder if trainer.loggers and not trainer.fast_dev_run else None
        if folder is None or not trainer.is_global_zero:
            return
        from omegaconf import OmegaConf

        Path(folder).mkdir(parents=True, exist_ok=True)
        text = OmegaConf.to_yaml(OmegaConf.create(self.content))
        replace_text(Path(folder) / "config.yaml", text, private=self._private)


# -- reading -----------------------------------------------------------------------------------------------------------------------


def _load(path: Path) -> Any:
    """Returns the file as an OmegaConf container."""
    from omegaconf import DictConfig, OmegaConf

    if "=" in path.name and not path.exists():
        raise ConfigError(f"{str(path)!r} is an override; the file comes first: fabricamp fit config.yaml {path}")
    if not path.is_file():
        siblings = [str(one) for one in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        matches = difflib.get_close_matches(str(path), siblings, n=1)
        hint = f"; did you mean {matches[0]!r}?" if matches else ""
        raise ConfigError(f"{str(path)!r} is {'a folder' if path.is_dir() else 'not there'}; give a YAML file{hint}")
    try:
        content = OmegaConf.load(path)
    except Exception as error:  # noqa: BLE001 - YAML's errors, and those of Python for a number, a date, a key or a nesting
        raise ConfigError(f"{path} cannot be read as YAML: {_reason(error)}") from None
    if not isinstance(content, DictConfig) or not content:
        raise ConfigError(
            f"{path} holds no mapping; write sections such as trainer: and module: (see fabricamp --help)"
        )
    return content


def _put(content: Any, override: str) -> None:
    """Applies one ``key=value`` override to the container; raises ConfigError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, equals, text = override.partition("=")
    if not equals or not key or key != key.strip() or key.startswith("-"):
        bare = key.strip().lstrip("-") or "trainer.precision"
        bare = f"trainer.{bare}" if bare in inspect.signature(Trainer).parameters else bare
        example = f"{bare}={text.strip() or 'VALUE'}"
        if bare == "config":
            raise ConfigError(
                "give the file without --config, before the overrides, as in: fabricamp fit FILE key=value"
            )
        raise ConfigError(f"{override!r} is not an override; write key=value without spaces or dashes, as in {example}")
    try:
        value = _parsed(text)
    except Exception as error:  # noqa: BLE001 - as in a file
        raise ConfigError(
            f"{_cut(override)!r}: the value cannot be read as YAML ({_reason(error)}); "
            "quote the whole override for the shell, as in 'trainer.devices=[0, 1]'"
        ) from None
    try:
        _check_way(content, key, override)
        OmegaConf.update(content, key, value, merge=False)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{_cut(override)!r} cannot be put in: {_reason(error)}") from None


def _texts_of(text: str) -> Any:
    """Returns the text of each value without quotes in a YAML document, in the document's mappings and lists; else None."""
    yaml: Any = importlib.import_module("yaml")
    return _texts(yaml.compose(text, Loader=yaml.SafeLoader))


def _texts(node: Any) -> Any:
    value = getattr(node, "value", None)
    if isinstance(value, str):
        return value if node.style is None else None
    if node is None or not value or not isinstance(value[0], tuple):
        return [_texts(one) for one in value or ()] if node is not None and node.id == "sequence" else {}
    found: dict[str, Any] = {}
    for key, one in value:
        below = _texts(one)
        if key.value == "<<" and key.style is None:  # a key of the mapping itself wins
            for merged in below if isinstance(below, list) else [below]:
                found = {**merged, **found}
        elif isinstance(key.value, str):
            found[key.value] = below
    return found


def _note_text(texts: dict[str, Any], override: str) -> None:
    """Puts the text of a checked override in the place of those that were there."""
    key, _, text = override.partition("=")
    *way, last = key.split(".")
    node: Any = texts
    for word in way:
        if isinstance(node, dict) and not isinstance(node.get(word), dict | list):
            node[word] = {}
        node = _below(node, word)
    if isinstance(node, dict):
        node[last] = _texts_of(text)
    elif isinstance(node, list) and last.isdecimal() and int(last) < len(node):
        node[int(last)] = _texts_of(text)


def _parsed(text: str) -> Any:
    """Returns the value that ``text`` is in YAML."""
    from omegaconf import OmegaConf

    container = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    assert isinstance(container, dict)
    return container["value"]


def _check_way(content: Any, key: str, override: str) -> None:
    """Raises :class:`ConfigError` if ``key`` leads past a list's end, or through a value that OmegaConf would silently replace."""
    from omegaconf import OmegaConf

    node = OmegaConf.to_container(content, resolve=False)
    words = key.split(".")
    for depth, word in enumerate(words):
        way = ".".join(words[:depth])
        if word.isdecimal() and depth and node in (None, []):
            raise ConfigError(
                f"{_cut(override)!r}: {way} {'is not in the file' if node is None else 'is an empty list'}, so it has no element "
                f"{word} to change; give it as a whole, as in '{_LIST_EXAMPLE if words[0] == 'trainer' else f'{way}=[VALUE, ...]'}'"
            )
        if isinstance(node, list) and not (word.isdecimal() and int(word) < len(node)):
            raise ConfigError(
                f"{override!r}: {way} has {len(node)} element(s), numbered from 0; {word!r} is not one of them"
            )
        if node is None or (isinstance(node, str) and node.startswith("${")):
            return
        if not isinstance(node, dict | list):
            raise ConfigError(f"{override!r}: {way} is {node!r}, which has no {word!r} below it")
        node = node[int(word)] if isinstance(node, list) else node.get(word)


def _reason(error: BaseException) -> str:
    """Returns in one line why a configuration cannot be read."""
    from omegaconf.errors import OmegaConfBaseException

    if "RecursionError" in f"{type(error).__name__}: {error}":  # OmegaConf names it in its own error
        return "it is nested too deep, or refers to itself in a circle"
    # OmegaConf's further lines name the key and its class.
    text = str(error).split("\n", 1)[0] if isinstance(error, OmegaConfBaseException) else str(error)
    return " ".join(text.split()) or type(error).__name__


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


# -- checking and building ---------------------------------------------------------------------------------------------------------


def _trainer_section(content: Mapping[str, Any]) -> dict[str, Any]:
    return {TARGET: "fabricamp.Trainer", **(content.get("trainer") or {})}


def _section_meant(key: str) -> str:
    """Returns a hint what to write instead of the unknown section ``key``."""
    if key in inspect.signature(Trainer).parameters:
        return f"; write trainer.{key}"
    return meant("configuration", key) or f"{nearest(key, SECTIONS)} (known: {', '.join(SECTIONS)})"


class _Reading:
    """Reads the arguments of a configuration by the annotations of what they are given to."""

    def __init__(self, content: Configuration) -> None:
        self._texts = content.texts
        self._written = content.written

    def arguments(self, target: Callable[..., Any], node: dict[str, Any], where: str) -> None:
        """Replaces values in ``node``, at the key ``where``, and in what is written to files."""
        try:
            kinds = kinds_of(target)
        except ValueError:  # written in C, without a signature
            return
        texts: Any = self._texts
        written: Any = self._written
        for word in where.split("."):
            texts = _below(_followed(texts, self._texts), word)
            written = _below(written, word)
        texts = _followed(texts, self._texts)
        for key in node:
            if key not in (TARGET, PARTIAL):
                _read_key(node, written, key, kinds.get(key, Any), texts, self._texts)


def _below(node: Any, word: str) -> Any:
    """Returns what is below ``node`` at a key or at an index; None if there is nothing."""
    if isinstance(node, dict):
        return node.get(word)
    return node[int(word)] if isinstance(node, list) and word.isdecimal() and int(word) < len(node) else None


def _read_key(node: Any, written: Any, key: Any, kind: Any, texts: Any, root: dict[str, Any]) -> None:
    """Reads one argument by its annotation ``kind``, in place; ``texts``: those of all arguments."""
    text = _followed(_below(texts, str(key)), root)
    value = read_as(kind, node[key], text)
    if value is node[key]:
        return
    if isinstance(written, dict) and written.get(key) == node[key] and "${" not in str(written[key]):
        written[key] = value
    node[key] = value


def _followed(text: Any, root: dict[str, Any], depth: int = 20) -> Any:
    """Returns the texts behind a reference to another key of the file, within mappings and lists too; None for any other."""
    if isinstance(text, dict):
        return {key: _followed(one, root, depth) for key, one in text.items()}
    if isinstance(text, list):
        return [_followed(one, root, depth) for one in text]
    if not isinstance(text, str) or "${" not in text:
        return text
    reference = re.fullmatch(r"\$\{([\w.]+)\}", text)
    if reference is None or not depth:
        return None
    found: Any = root
    for word in reference[1].split("."):
        found = _below(found, word)
    return _followed(found, root, depth - 1)


def _check_node(node: Any, where: str, kind: type | None = None, *, reading: _Reading | None) -> None:
    """Checks the ``_target_`` and arguments of every mapping in ``node``, the outermost first; raises ConfigError."""
    if isinstance(node, dict) and TARGET in node:
        target = locate(node[TARGET], f"{where}.{TARGET}")
        if kind is not None and isinstance(target, type) and not issubclass(target, kind):
            raise ConfigError(
                f"{where}.{TARGET}={node[TARGET]!r} is not a {kind.__name__}; derive the class from fabricamp.{kind.__name__}"
            )
        if reading is not None:
            reading.arguments(target, node, where)
        arguments = {key: value for key, value in node.items() if key not in (TARGET, PARTIAL)}
        _check_arguments(target, arguments, where, is_partial=_is_partial(node, where))
    for key, value in _children(node):
        _check_node(value, f"{where}.{key}", reading=reading)


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, list):
        yield from enumerate(node)


def _is_partial(node: Mapping[str, Any], where: str) -> bool:
    """Returns whether the target is called later, with more arguments."""
    value = node.get(PARTIAL, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}.{PARTIAL}={value!r} is not a flag; write true, so that the target is called later")
    return value


def _check_arguments(
    target: Callable[..., Any], arguments: dict[str, Any], where: str, *, is_partial: bool = False
) -> None:
    """Raises :class:`ConfigError` for an argument that ``target`` does not take, one that is missing, or a wrong type."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:
        # Written in C, without a signature: the call itself will raise.
        return
    named = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    # The Trainer takes any keyword only to refuse unknown ones with its own message.
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters) and target is not Trainer
    name = getattr(target, "__name__", str(target))
    for key, value in arguments.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"{where} has the key {key!r}, which is no argument's name; write a name, or it in quotes"
            )
        if key not in named and not takes_any:
            raise ConfigError(f"{where}.{key} is not known{advice(name, key, named, value)}")
    for key, one in named.items():
        if one.default is one.empty and key not in arguments and not is_partial:
            raise ConfigError(f"{where}.{key} is missing, and {name} needs it; add {where}.{key}=VALUE")
    if target is not Trainer:  # it checks values itself, and more than their types
        for key, kind in misfits(target, arguments).items():
            value = arguments[key]
            wanted = inspect.formatannotation(kind).replace("collections.abc.", "")
            raise ConfigError(
                f"{where}.{key}={_shown(key, value)} is not allowed; {name} takes {wanted}{_cure(value, kind)}"
            )


def _cure(value: Any, kind: Any) -> str:
    """Returns how to write what ``kind`` takes and ``value`` may mean, or the nearest choice, or ""."""
    if isinstance(value, float) and value.is_integer() and fits(int(value), kind):
        return f"; write {int(value)}"
    if isinstance(value, int | float) and fits(str(value), kind):
        return f"; put it in quotes, as in '{value}'"
    if isinstance(value, str):
        with contextlib.suppress(Exception):  # text that is no YAML
            if fits(read_as(kind, _parsed(value), str(value)), kind):
                if isinstance(value, FromEnvironment):
                    return f"; write ${{oc.decode:{value.reference}}}"
                return "; write it without quotes"
    literals = [one for one in (kind, *get_args(kind)) if get_origin(one) is Literal]
    return nearest(value, (str(choice) for one in literals for choice in get_args(one)))


def _shown(key: str, value: Any) -> str:
    """Returns the repr of a value, for a message: without secrets and what comes from the environment."""
    return _cut(repr(hidden(references_alone(value), key)))


def locate(target: Any, where: str) -> Callable[..., Any]:
    """Returns the class or function with the dotted name ``target``, found at key ``where``; raises :class:`ConfigError`."""
    words = target.split(".") if isinstance(target, str) else []
    if not 2 <= len(words) <= _MOST_WORDS or not all(word.isidentifier() for word in words):
        shown = _cut(target) if words else target
        raise ConfigError(f"{where}={shown!r} is not a dotted name; write package.module.Class")
    found, rest = _import_longest(words, where)
    for word in rest:
        if not hasattr(found, word):
            names = [name for name in dir(found) if name[0] != "_"]
            if word is rest[-1]:  # the last word names a class or a function, so modules are no candidates
                names = [name for name in names if not isinstance(vars(found).get(name), ModuleType)]
            raise ConfigError(f"{where}={target!r}: {found.__name__} has no {word!r}{nearest(word, names)}")
        found = getattr(found, word)
    if not callable(found):
        raise ConfigError(f"{where}={target!r} is a {type(found).__name__}; name a class or a function")
    return found  # type: ignore[no-any-return]


def _import_longest(words: list[str], where: str) -> tuple[Any, list[str]]:
    """Imports the longest module path that ``words`` begin with; returns the module and the remaining words."""
    for end in range(len(words) - 1, 0, -1):
        name = ".".join(words[:end])
        try:
            return importlib.import_module(name), words[end:]
        except ModuleNotFoundError as error:
            # Continue only if a module of the name itself is missing; a failed import inside a found module keeps its traceback.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    nearby = "beside the configuration or in a folder of import_from"
    if where.startswith("--"):
        nearby = "in the current folder or one of PYTHONPATH"
    # import_from has put its folders first on sys.path.
    files = [file.stem for folder in sys.path[:3] if folder for file in Path(folder).glob("*.py")]
    raise ConfigError(
        f"{where}={'.'.join(words)!r}: there is no module {words[0]!r}, neither installed "
        f"nor {nearby}{nearest(words[0], [*files, 'fabricamp'])}"
    )


def _build_part(content: Configuration, name: str) -> Any:
    """Returns the built module or data, marked private if its hyper-parameters may hold values from the environment."""
    part = _build(content.get(name), name)
    if part is not None and exposes(content[name], content.written[name]):
        part.hparams_private = True
    return part


def _build(node: Any, where: str) -> Any:
    """Returns ``node`` with every mapping that has a ``_target_`` replaced by the built object, the innermost first."""
    if isinstance(node, list):
        return [_build(one, f"{where}.{index}") for index, one in enumerate(node)]
    if not isinstance(node, dict):
        return node
    built = {key: _build(value, f"{where}.{key}") for key, value in node.items()}
    if TARGET not in built:
        return built
    target = locate(built.pop(TARGET), TARGET)
    if built.pop(PARTIAL, False):
        return functools.partial(target, **built)
    try:
        return target(**built)
    except ConfigError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={_shown(key, value)}" for key, value in built.items())
        call = f"{getattr(target, '__name__', target)}({given})"
        if isinstance(error, TypeError | ValueError) or _refusal(error) is not None:
            _explain_unknown(error, target, built, where)
            place = _place(error, target)
            raise ConfigError(f"{where}: {call} raised {type(error).__name__}: {_reason(error)} ({place})") from error
        error.add_note(f"fabricamp: {where} of the configuration was being built: {call}")
        raise


def _explain_unknown(error: Exception, target: Callable[..., Any], built: Mapping[str, Any], where: str) -> None:
    """Raises :class:`ConfigError` with the nearest name for a key that ``target`` took as one of any, and a parent refused."""
    parents = target.__mro__ if isinstance(target, type) else ()
    inits = filter(inspect.isfunction, (vars(parent).get("__init__") for parent in parents))
    known = {name: None for init in inits for name in list(inspect.signature(init).parameters)[1:]}
    for key in built:
        if f"unexpected keyword argument {key!r}" in str(error) and (hint := nearest(key, known)):
            raise ConfigError(f"{where}.{key} is not known{hint}") from error


class _Refusal(NamedTuple):
    """What a class of torch raised while it was being made: its name, its arguments' names, the caller, and the reason."""

    made: str
    arguments: frozenset[str]
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.made}: {self.reason} ({self.place})"


def _refusal(error: Exception) -> _Refusal | None:
    """Returns which loader, sampler, optimizer, schedule or layer of torch refused its arguments; None for any other error."""
    # Subclasses of RuntimeError tell of memory and devices.
    if (
        not isinstance(error, TypeError | ValueError | ArithmeticError | AssertionError)
        and type(error) is not RuntimeError
    ):
        return None
    made: FrameType | None = None
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
            is_made = frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), _MADE)
            made = frame if is_made else made
            continue
        if made is None:
            return None
        arguments = frozenset(made.f_code.co_varnames[1 : made.f_code.co_argcount + made.f_code.co_kwonlyargcount])
        place = f"{frame.f_code.co_name} in {Path(frame.f_code.co_filename).name}, line {line}"
        return _Refusal(type(made.f_locals["self"]).__name__, arguments, place, _reason(error))
    return None


def _keys_behind(error: Exception, arguments: Collection[str], content: Mapping[str, Any]) -> list[str]:
    """Returns the keys, with their values, that an error's text names, or that have the name of one of the arguments."""
    words = re.findall(r"[\w.+-]*\w", str(error))
    leaves = [leaf for name in ("module", "data") for leaf in _leaves(content.get(name), name)]
    named = [(key, value) for key, value in leaves if key.rpartition(".")[2] in {*arguments, *words}]
    told = [(key, value) for key, value in named if {key.rpartition(".")[2], str(value)} & {*words}]
    return [f"{key}={_shown(key, value)}" for key, value in told or named]


def _leaves(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    children = [*_children(node)]
    for key, value in children:
        yield from _leaves(value, f"{where}.{key}")
    if not children and not isinstance(node, dict | list):
        yield where, node


def _place(error: Exception, target: Callable[..., Any]) -> str:
    """Returns the file and the line of ``target``'s module in which ``error`` was raised; the innermost, if it was in none."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(target.__module__), "__file__", None)
    frame = next((one for one in reversed(frames) if one.filename == file), frames[-1])
    return f"{Path(frame.filename).name}, line {frame.lineno}"
