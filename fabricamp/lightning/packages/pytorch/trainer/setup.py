"""Logs the devices that are there."""

from __future__ import annotations

from typing import Any

import torch

from fabricamp.utilities.rank_zero import rank_zero_info


def _log_device_info(trainer: Any) -> None:
    """Logs how many GPUs torch sees, and what the Trainer uses; the Trainer itself says so in its first line."""
    rank_zero_info(f"GPUs available: {torch.cuda.device_count()}, used: {type(trainer.accelerator).__name__}")
