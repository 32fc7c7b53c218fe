"""Lightning's path to seeding, and to a context that restores the random generators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fabricamp.rng import capture_rng, restore_rng
from fabricamp.rng import seed_everything as seed_everything


@contextlib.contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Returns a context that restores every random generator at its end; those of CUDA devices only with ``include_cuda``."""
    state = capture_rng()
    if not include_cuda:
        state["cuda"] = []
    try:
        yield
    finally:
        restore_rng(state)
