"""Logs the devices that are there."""

from __future__ import annotations

from typing import Any

import torch

from fabricamp.utilities.rank_zero import rank_zero_info


def _log_device_info(trainer: Any) -> None:
    """Logs the number of GPUs that torch sees and the devices that the Trainer uses; the Trainer's own first log line has both."""
    rank_zero_info(f"GPUs available: {torch.cuda.device_count()}, used: {type(trainer.accelerator).__name__}")
