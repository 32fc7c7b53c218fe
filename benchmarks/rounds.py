"""Benchmarks of ranks in interleaved rounds: ratios with their quartiles, whether these decide a goal, and the command."""

from __future__ import annotations

import os
import shlex
import statistics
import sys
from typing import Any

__all__ = ["best_of", "command", "described", "ratio"]


def best_of(rounds: dict[str, list[float]], names: list[str]) -> str:
    """Returns the one of ``names`` with the smallest median."""
    return min(names, key=lambda name: statistics.median(rounds[name]))


def ratio(own: list[float], other: list[float], goal: float) -> dict[str, Any]:
    """Returns median and quartiles of ``own`` over ``other``, round by round, and on which side of ``goal`` both quartiles are.

    >>> ratio([9.0, 9.0, 8.0], [10.0, 10.0, 10.0], 1.0)
    {'median': 0.9, 'quartiles': [0.85, 0.9], 'goal': 1.0, 'decided': 'met'}
    """
    values = [one / two for one, two in zip(own, other, strict=True)]
    low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else 3 * values
    decided = "met" if high <= goal else "missed" if low > goal else "not decided"
    return {
        "median": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "goal": goal,
        "decided": decided,
    }


def described(found: dict[str, Any]) -> str:
    """Returns a ratio as text.

    >>> described(ratio([9.0, 9.0, 8.0], [10.0, 10.0, 10.0], 1.0))
    '0.900 (0.850 to 0.900), met'
    """
    low, high = found["quartiles"]
    return f"{found['median']:.3f} ({low:.3f} to {high:.3f}), {found['decided']}"


def command() -> str:
    """Returns the command of this process, without ``--out``, whose path belongs to one machine."""
    words = list(sys.argv)
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return shlex.join(["torchrun", f"--nproc_per_node={os.environ['WORLD_SIZE']}", *words])
