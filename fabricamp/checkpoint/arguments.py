"""Rebuilds a module or DataModule from the hyper-parameters in a checkpoint."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fabricamp.arguments.environment import first_reference
from fabricamp.checkpoint.hyperparameters import Hyperparameters, HyperparametersMixin, kept_by
from fabricamp.checkpoint.plain import PRIVATE, described
from fabricamp.checkpoint.typed import interpolates, named_types, rebuilt
from fabricamp.errors import CheckpointError, ConfigError, nearest


@dataclass(frozen=True)
class Places:
    """The keys of hyper-parameters in a checkpoint."""

    values: str
    types: str
    """The notes about the values' original types."""
    name: str
    """The name of the argument, if a single argument held all hyper-parameters."""

    def written(self, owner: object) -> dict[str, Any]:
        """Returns the checkpoint entries of the ``owner``'s hyper-parameters; empty if there are none."""
        kept = kept_by(owner)
        if not kept.values:
            return {}
        values, notes = described(kept.values, private=kept.private)
        found = {self.values: values, self.types: notes, self.name: kept.name}
        return {key: value for key, value in found.items() if value}


MODULE = Places("hyper_parameters", "hyper_parameter_types", "hparams_name")
DATA = Places("datamodule_hyper_parameters", "datamodule_hyper_parameter_types", "datamodule_hparams_name")


Owner = TypeVar("Owner", bound=HyperparametersMixin)


def build(
    owner: type[Owner],
    checkpoint: dict[str, Any],
    places: Places,
    path: str,
    given: Mapping[str, Any],
    types: Iterable[type] = (),
    hparams_file: Any = None,
) -> Owner:
    """Returns an ``owner`` built with :func:`arguments_for`; raises :class:`CheckpointError` if its constructor refuses them.

    ``hparams_file`` is a YAML file with hyper-parameters, which replaces those in ``checkpoint``.
    """
    if hparams_file is not None:
        checkpoint = {**checkpoint, places.values: _from_yaml(hparams_file), places.types: []}
    arguments = arguments_for(owner, checkpoint, places, path, given, types)
    try:
        built = owner(**arguments)
    except TypeError as error:
        raise CheckpointError(
            f"{owner.__name__} cannot be built from {path}: {error}; pass what is missing as keyword arguments, "
            "or call self.save_hyperparameters() in __init__ before training"
        ) from error
    built.hparams_private = built.hparams_private or bool(checkpoint.get(PRIVATE))
    return built


def _from_yaml(file: Any) -> Any:
    yaml: Any = importlib.import_module("yaml")
    try:
        with Path(file).open() as text:
            return yaml.safe_load(text) or {}
    except (OSError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"hparams_file={str(file)!r} cannot be read ({' '.join(str(error).split()):.300}); give a YAML file of plain values"
        ) from error


def arguments_for(
    owner: type,
    checkpoint: Mapping[str, Any],
    places: Places,
    path: str,
    given: Mapping[str, Any],
    types: Iterable[type],
) -> dict[str, Any]:
    """Returns the arguments that build ``owner`` from ``checkpoint``, read from ``path``; those ``given`` take precedence.

    ``types`` are classes that hyper-parameters may be rebuilt as, in addition to those annotated in ``owner``'s constructor.
    Raises :class:`CheckpointError` if a value is not in the file (for example a module or a function): it has to be given.
    """
    types = _checked(types)
    saved, name = _saved(checkpoint, places, path)
    parameters = inspect.signature(owner).parameters
    named = {key for key, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    whole = name if name in named else None
    if whole in given:
        return dict(given)
    needed = {key: value for key, value in saved.items() if key not in given}
    _check_references(needed, path)
    try:
        values, absent = rebuilt(needed, checkpoint.get(places.types, []), named_types(owner, types))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if absent:
        calls = ", ".join(f"{key}=..." for key in absent)
        raise CheckpointError(
            f"{path}: the hyper-parameter {'; '.join(absent.values())}; pass what is missing, as in "
            f"{owner.__name__}.load_from_checkpoint(path, {calls})"
        )
    if whole is None:
        # Without **kwargs, drop unknown names: a base class may have saved them, or they were added to hparams.
        if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            values = {key: value for key, value in values.items() if key in named}
            for unknown in (key for key in given if key not in named):
                cure = nearest(unknown, named) or "; leave it out"
                raise CheckpointError(
                    f"load_from_checkpoint({unknown}=...): {owner.__name__} has no such argument{cure}"
                )
        return {**values, **given}
    beside = {key: value for key, value in given.items() if key in named and key not in saved}
    content = {**values, **{key: value for key, value in given.items() if key not in beside}}
    return {whole: _container(content, checkpoint.get(places.types, [])), **beside}


def _checked(types: Iterable[type]) -> list[type]:
    found = [] if isinstance(types, type) else list(types)
    if isinstance(types, type) or not all(isinstance(one, type) for one in found):
        raise ConfigError(f"types={types!r:.200}: give a list of classes, such as types=[Color, Options]")
    return found


def _saved(checkpoint: Mapping[str, Any], places: Places, path: str) -> tuple[dict[str, Any], str | None]:
    """Returns the hyper-parameters, and the name of the single argument that held them, or None."""
    saved, name = checkpoint.get(places.values, {}), checkpoint.get(places.name)
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        raise CheckpointError(
            f"{path}: its {places.values!r} are {saved!r:.200}, not a dict of arguments; load the weights alone with "
            "module.load_state_dict(torch.load(path, weights_only=True)['state_dict'])"
        )
    if not isinstance(name, str | None):
        raise CheckpointError(f"{path}: its {places.name!r} is {name!r:.200}, not the name of an argument")
    return dict(saved), name


def _check_references(arguments: Mapping[str, Any], path: str) -> None:
    """Raises :class:`CheckpointError` for an argument that is only a reference to the environment in the checkpoint.

    The reference is not resolved: no file decides what is read from the environment.
    """
    for name, value in arguments.items():
        if reference := first_reference(value):
            raise CheckpointError(
                f"{path} holds {reference} for the hyper-parameter {name!r}, and not the value that it had: pass it, as in "
                f"load_from_checkpoint(path, {name}=...)"
            )


def _container(content: dict[str, Any], notes: Any) -> Any:
    """Returns the value of a single argument: an OmegaConf container if it was one and can be rebuilt, else Hyperparameters."""
    if any(one["kind"] == "config" and not one["at"] for one in notes) and not interpolates(content):
        try:
            from omegaconf import OmegaConf
            from omegaconf.errors import OmegaConfBaseException
        except ModuleNotFoundError:
            return Hyperparameters(content)
        with contextlib.suppress(OmegaConfBaseException):  # given values may be anything
            return OmegaConf.create(content)
    return Hyperparameters(content)
