"""The focal loss of detectors."""

from __future__ import annotations

from fabricamp.apex.contrib.focal_loss.focal_loss import FocalLoss, focal_loss

__all__ = ["FocalLoss", "focal_loss"]
