"""Ranks of one machine compile a graph in turns: the first compiles it, the others then find its code in torch's cache.

Each rank traces its own functions; what comes after that takes most of the time.  The lock is a file in the folder of torch's
cache, so ranks with caches of their own do not wait for each other.  It is named after the graph and its inputs: different graphs,
and those of different devices, are compiled at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricamp.torch_private import InductorBackend, compiler_cache, with_backward

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LONGEST_WAIT: Final = 600.0
"""Seconds after which a rank compiles a graph itself, while another rank still does."""


class InTurns(InductorBackend):  # type: ignore[misc]  # torch has no types for it
    """inductor, as a backend of ``torch.compile`` that takes turns with the other ranks of the machine.

    Nothing is exchanged with other ranks while the lock is held: graphs with collectives, for which torch may do so, take no turns.
    A rank that dies gives its lock back.
    """

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compiles ``graph``, its backward too: torch would compile that in the first backward, and keeps both as one."""
        if _has_collectives(graph):
            return super().__call__(graph, inputs, **options)
        with _turn(_key(graph, inputs)), with_backward():
            return super().__call__(graph, inputs, **options)


@contextlib.contextmanager
def _turn(key: str) -> Iterator[None]:
    from filelock import FileLock, Timeout  # torch's own locks are of this package

    folder = Path(compiler_cache(), "turns")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{key}.lock", timeout=LONGEST_WAIT)
        lock.acquire()
    except (OSError, Timeout):  # a file system without locks, or a rank that hangs: each compiles for itself
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _key(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> str:
    described = [_described(one) for one in inputs]
    return hashlib.sha256(f"{graph.graph}\n{described}".encode()).hexdigest()[:32]


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {tuple(value.shape)} {value.device} {value.requires_grad}"


def _has_collectives(graph: torch.fx.GraphModule) -> bool:
    return any("c10d" in str(node.target) for node in graph.graph.nodes)
