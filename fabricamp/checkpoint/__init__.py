"""Checkpoints: allowed content, the file and its location, other libraries' layouts, and writing in the background."""

from fabricamp.checkpoint.background import BackgroundWriter, HostCopy, StagedFolder
from fabricamp.checkpoint.checkpoint_io import CheckpointIO
from fabricamp.checkpoint.file import copy_checkpoint, link_checkpoint, write_checkpoint
from fabricamp.checkpoint.foreign import apex_scales, fit_names
from fabricamp.checkpoint.plain import check_content, plain
from fabricamp.checkpoint.reading import read_checkpoint
from fabricamp.checkpoint.record import read_together, write_together
from fabricamp.checkpoint.search import Candidates, progress_in, read_header
from fabricamp.checkpoint.storage import PARTIAL_SUFFIX

__all__ = [
    "PARTIAL_SUFFIX",
    "BackgroundWriter",
    "Candidates",
    "CheckpointIO",
    "HostCopy",
    "StagedFolder",
    "apex_scales",
    "check_content",
    "copy_checkpoint",
    "fit_names",
    "link_checkpoint",
    "plain",
    "progress_in",
    "read_checkpoint",
    "read_header",
    "read_together",
    "write_checkpoint",
    "write_together",
]
