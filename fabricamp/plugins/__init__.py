"""Lightning's path to plug-ins for ``Trainer(plugins=...)``: those that write and read checkpoints."""

from __future__ import annotations

from types import ModuleType

from fabricamp.checkpoint.checkpoint_io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

__all__ = ["AsyncCheckpointIO", "CheckpointIO", "TorchCheckpointIO"]


def __getattr__(name: str) -> ModuleType:
    from fabricamp.arguments.not_offered import part_of

    return part_of(__name__, name, __all__)
