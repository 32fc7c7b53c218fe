"""Builds an object from hyper-parameters that LightningCLI saved: what its configuration had, with classes by their paths."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from fabricamp._utils.optional_packages import load
from fabricamp.errors import CheckpointError

INSTANTIATOR: Final = "_instantiator"
"""The hyper-parameter that says by which function the others build the object."""
CLASS_PATH: Final = "_class_path"
"""The hyper-parameter with the path of the object's class, where the configuration chose it."""
LIGHTNINGS: Final = "lightning.pytorch.cli.instantiate_module"
"""The only function that is followed, and under no import of its name: :func:`instantiate_module`."""


def instantiate_module(class_type: type, config: Mapping[str, Any]) -> Any:
    """Returns an object of ``class_type``, or of its subclass ``config["_class_path"]``, built by jsonargparse from ``config``.

    Raises :class:`NotInstalledError` without jsonargparse, and its ``ArgumentError`` for arguments that the class does not take.
    """
    jsonargparse = load(
        "jsonargparse",
        "hyper-parameters of LightningCLI need jsonargparse, which is missing; run: pip install 'jsonargparse[signatures]'",
    )
    arguments = {key: value for key, value in config.items() if key not in (INSTANTIATOR, CLASS_PATH)}
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    if CLASS_PATH in config:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        # dict_kwargs: what the class takes by **kwargs is among the arguments.
        arguments = {"class_path": config[CLASS_PATH], "dict_kwargs": arguments}
    else:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
    return parser.instantiate(parser.parse_object({"module": arguments})).module


def check_classes(owner: type, config: Mapping[str, Any], types: Iterable[type], path: str) -> None:
    """Raises :class:`CheckpointError` if ``config``, read from ``path``, names a class that no annotation names a base of.

    ``types`` are those of ``owner``'s constructor.  Without this, a file could have any class built for an argument without an
    annotation.
    """
    from fabricamp.checkpoint.load_from_checkpoint import named_types

    kind = owner
    if CLASS_PATH in config:
        kind = _class_named(config[CLASS_PATH], [owner], CLASS_PATH, path)
        types = [*types, *named_types(kind)]
    waiting: list[tuple[str, Any, list[type]]] = [(key, value, [*types]) for key, value in config.items()]
    while waiting:
        at, value, allowed = waiting.pop()
        if isinstance(value, Mapping) and "class_path" in value:
            allowed = named_types(_class_named(value["class_path"], allowed, at, path))
        waiting += [(f"{at}.{key}", one, allowed) for key, one in _children(value)]


def _class_named(name: Any, allowed: Iterable[type], at: str, path: str) -> type:
    try:
        found = pkgutil.resolve_name(name) if isinstance(name, str) else None
    except (ImportError, AttributeError, ValueError):
        found = None
    bases = tuple(one for one in allowed if one is not object)
    if isinstance(found, type) and issubclass(found, bases):
        return found
    raise CheckpointError(
        f"{path}: the hyper-parameter {at!r} names the class {name!r}, which is not there, or derives from no class in the "
        "annotations of the constructor; annotate that argument, or pass it to load_from_checkpoint"
    )


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
