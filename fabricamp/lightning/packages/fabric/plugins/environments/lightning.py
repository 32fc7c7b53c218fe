"""Finds a free port, for ``MASTER_PORT``."""

from __future__ import annotations

import os
import socket

from fabricamp.lightning.packages.fabric.plugins.environments import (  # type: ignore[attr-defined]  # a row of aliases.toml
    LightningEnvironment as LightningEnvironment,
)


def find_free_network_port() -> int:
    """Returns ``STANDALONE_PORT`` if that is set, else a port that is free now."""
    if "STANDALONE_PORT" in os.environ:
        return int(os.environ["STANDALONE_PORT"])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port
