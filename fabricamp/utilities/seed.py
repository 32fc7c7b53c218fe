"""Lightning's path to seeds and to a context that gives the generators back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fabricamp.rng import capture_rng, restore_rng
from fabricamp.rng import seed_everything as seed_everything


@contextlib.contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """A context that leaves every generator as it found it; those of CUDA devices only where ``include_cuda``."""
    state = capture_rng()
    if not include_cuda:
        state["cuda"] = []
    try:
        yield
    finally:
        restore_rng(state)
