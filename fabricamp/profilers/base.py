"""The profiler of a Trainer without a ``profiler`` argument."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fabricamp.profilers.profiler import Profiler

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class PassThroughProfiler(Profiler):
    """Records nothing; the loops do not call it.

    Example:
        >>> with PassThroughProfiler().profile("loss"):
        ...     pass
    """

    def profile(self, action_name: str) -> AbstractContextManager[str]:  # type: ignore[override]  # also a context manager of str
        """Returns a context that records nothing."""
        return contextlib.nullcontext(action_name)
