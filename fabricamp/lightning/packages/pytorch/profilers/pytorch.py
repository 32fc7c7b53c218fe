"""Lightning's path to PyTorchProfiler, and whether torch can record."""

from __future__ import annotations

import torch

from fabricamp.profilers.pytorch import PyTorchProfiler as PyTorchProfiler

_KINETO_AVAILABLE = torch.profiler.kineto_available()
"""Read by finetuning-scheduler."""
