from fabricamp.checkpoint.checkpoint_io import AsyncCheckpointIO as AsyncCheckpointIO
from fabricamp.checkpoint.checkpoint_io import CheckpointIO as CheckpointIO
from fabricamp.checkpoint.checkpoint_io import TorchCheckpointIO as TorchCheckpointIO

__all__ = ["AsyncCheckpointIO", "CheckpointIO", "TorchCheckpointIO"]
