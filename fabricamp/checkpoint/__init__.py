"""Checkpoints: what they may hold, the file and where it lies, others' layouts, and writing beside training."""

from __future__ import annotations

from fabricamp.checkpoint.background import BackgroundWriter, HostCopy
from fabricamp.checkpoint.content import check_content, plain
from fabricamp.checkpoint.file import (
    PARTIAL_SUFFIX,
    copy_checkpoint,
    link_checkpoint,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from fabricamp.checkpoint.fitting import (
    check_counters,
    check_optimizer_states,
    fitting,
    read_together,
    step_due_schedules,
)
from fabricamp.checkpoint.foreign import apex_scales, fit_names
from fabricamp.checkpoint.search import choose_checkpoint, read_header

__all__ = [
    "PARTIAL_SUFFIX",
    "BackgroundWriter",
    "HostCopy",
    "apex_scales",
    "check_content",
    "check_counters",
    "check_optimizer_states",
    "choose_checkpoint",
    "copy_checkpoint",
    "fit_names",
    "fitting",
    "link_checkpoint",
    "plain",
    "read_checkpoint",
    "read_header",
    "read_together",
    "step_due_schedules",
    "verify_checkpoint",
    "write_checkpoint",
]
