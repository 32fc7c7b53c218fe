"""The base of plug-ins that write and read checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class CheckpointIO(ABC):
    """Saves, loads and removes checkpoints."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes ``checkpoint`` at ``path``."""

    @abstractmethod
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Returns the checkpoint at ``path``."""

    @abstractmethod
    def remove_checkpoint(self, path: Any) -> None:
        """Removes the checkpoint at ``path``."""

    def teardown(self) -> None:  # noqa: B027 - an override is optional
        """Called at the end of a run."""
