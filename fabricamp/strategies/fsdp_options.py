"""Checks of ``FSDP``'s options, before any process starts."""

from __future__ import annotations

from typing import Final

from torch import nn

from fabricamp.errors import ConfigError

_ZERO_NAMES: Final = {"zero3": True, "zero2": False}


def checked_classes(name: str, given: object) -> list[type[nn.Module]]:
    """Returns the list of classes of option ``name``; raises :class:`ConfigError` for anything but module classes."""
    listed = list(given) if isinstance(given, (list, tuple, set)) else []
    wrong = [one for one in listed if not (isinstance(one, type) and issubclass(one, nn.Module))]
    if wrong or not isinstance(given, (list, tuple, set)) or (name == "units" and not listed):
        also = "'auto', or " if name == "units" else ""
        raise ConfigError(
            f"FSDP({name}={given!r:.200}) has to be {also}a list of classes of submodules, such as {name}=[Block]"
        )
    return listed


def checked_flag(value: object) -> bool:
    """Returns ``offload``; raises :class:`ConfigError` unless it is True or False."""
    if isinstance(value, bool):
        return value
    raise ConfigError(f"FSDP(offload={value!r}) has to be True (shards are in host memory) or False")


def checked_copies(value: object) -> int:
    """Returns ``replicate``; raises :class:`ConfigError` unless it is a whole number from 1."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError(
        f"FSDP(replicate={value!r}) has to be a whole number from 1: how many copies of the module there are"
    )


def checked_reshard(value: object) -> bool | int:
    """Returns ``reshard_after_forward`` in torch's form; raises :class:`ConfigError` for a wrong value."""
    named = _ZERO_NAMES.get(value, value) if isinstance(value, str) else value
    if isinstance(named, bool) or (isinstance(named, int) and named > 1):
        return named
    raise ConfigError(
        f"FSDP(reshard_after_forward={value!r}) has to be True ('zero3'), False ('zero2'), or a number of ranks above 1 that "
        "divides that of all"
    )
