"""Refuses classes that override a private method of Lightning, which nothing here calls: it would be left out in silence."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Final

from fabricamp.errors import ConfigError

_HONOURED: Final = ("EarlyStopping", "ModelCheckpoint")
"""Classes whose methods of Lightning are called here as there."""

_LIGHTNINGS_NAMES: Final = {
    "DDP": "DDPStrategy",
    "DataModule": "LightningDataModule",
    "TrainingModule": "LightningModule",
}
_OURS: Final = "fabricamp"
_OTHERS: Final = ("builtins", "torch")  # they define no method of Lightning


@functools.cache
def _methods() -> dict[str, list[str]]:
    text = resources.files(__package__).joinpath("lightning_methods.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def refuse_private_methods(kind: type) -> None:
    """Raises :class:`ConfigError` if a class of a program overrides a private method of Lightning that nothing here calls.

    Private names that Lightning does not have are free.
    """
    packages = {base: base.__module__.partition(".")[0] for base in kind.__mro__}
    if packages[kind] == _OURS:
        return
    private: dict[str, type] = {}
    for base in kind.__mro__:
        if packages[base] == _OURS or packages[base] in _OTHERS:
            continue
        for name, value in vars(base).items():
            if name.startswith("_") and not name.startswith("__") and hasattr(value, "__get__"):
                private.setdefault(name, base)
    if not private:
        return
    for base in kind.__mro__:
        if packages[base] != _OURS or base.__name__ in _HONOURED:
            continue
        lightnings = _LIGHTNINGS_NAMES.get(base.__name__, base.__name__)
        for name in _methods().get(lightnings, ()):
            if name in private:
                raise ConfigError(
                    f"{private[name].__qualname__}.{name} overrides a private method of Lightning's {lightnings}, which fabricamp "
                    "never calls: use a public method or a hook instead; if the method is your own, give it another name"
                )
