"""Reads a file of weights whose tensors come from the disk when they are used."""

from __future__ import annotations

from typing import Any

import torch


class _NotYetLoadedTensor:
    """For ``isinstance``: a tensor of :func:`_lazy_load` is one of torch's, over the file's memory."""


def _lazy_load(filename: Any) -> Any:
    """Returns the content of a file, with tensors that are read from it when they are used."""
    return torch.load(filename, map_location="cpu", mmap=True, weights_only=True)
