"""The base of Lightning's classes that can be imported but not constructed: construction raises an error with advice."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from fabricamp.arguments.not_offered import words_for
from fabricamp.errors import ConfigError


class Refused:
    """A class for type hints, ``isinstance`` and subclasses only; it has no instances.

    Libraries import such classes only to check the types of objects that they get.
    """

    _lightnings_name: ClassVar[str]
    """The class's name, such as "strategies.DeepSpeedStrategy": it or its package is a key of migration.toml's ``not_offered``."""

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Raises :class:`ConfigError`, which says what to write instead."""
        name = cls._lightnings_name
        package = name.rpartition(".")[0]
        of_package = words_for(package) or f"Lightning's {package} is not offered by fabricamp"
        words = words_for(name) or of_package.replace(f"Lightning's {package} ", f"Lightning's {name} ", 1)
        derived = "" if name.endswith(cls.__name__) else f"{cls.__name__} cannot be constructed: "
        raise ConfigError(f"{derived}{words}")
