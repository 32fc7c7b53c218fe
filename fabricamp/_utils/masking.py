"""Masks secret values in descriptions of a run; a value is secret if its name says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

MASK = "***"
_SECRETS = ("auth", "credential", "credentials", "passphrase", "passwd", "password", "pwd", "secret", "token")
_KEYS = ("access", "api", "auth", "encryption", "private", "secret", "signing", "ssh")


def masked(command: Sequence[str]) -> list[str]:
    """Returns a command line with ``***`` for values of secret names (such as ``--api-key``), and for passwords in addresses."""
    shown: list[str] = []
    hides = False
    for word in command:
        name, equals, value = word.partition("=")
        if hides and not word.startswith("-"):
            shown.append(MASK)
        elif equals and value and is_secret(name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(_without_password(word))
        hides = word.startswith("-") and not equals and is_secret(word)
    return shown


def hidden(value: object, name: str = "") -> Any:
    """Returns plain data with ``***`` for strings under a secret name, and for passwords in addresses.

    References to environment variables stay.

    >>> hidden({"lr": 0.1, "login": {"user": "me", "token": "abc"}, "at": "http://me:abc@host"})
    {'lr': 0.1, 'login': {'user': 'me', 'token': '***'}, 'at': 'http://me:***@host'}
    """
    if isinstance(value, dict):
        return {key: hidden(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(item, name) for item in value]
    if not isinstance(value, str) or "${" in value:
        return value
    return MASK if value and is_secret(name) else _without_password(value)


def is_secret(name: str) -> bool:
    """Returns whether an argument's name says that its value is secret; its last word decides."""
    *before, last = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return last in _SECRETS or last == "apikey" or (last == "key" and bool(before) and before[-1] in _KEYS)


def _without_password(text: str) -> str:
    return re.sub(r"(://[^/@\s:]*):[^/\s]+@", rf"\1:{MASK}@", text)
