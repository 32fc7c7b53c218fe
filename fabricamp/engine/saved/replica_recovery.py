"""Elastic replica groups: a run sends its state to a group that joins, or takes the state of a group that runs."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricamp._utils.types import StateDict
from fabricamp.checkpoint import read_together
from fabricamp.checkpoint.background import on_host
from fabricamp.checkpoint.object_files import save
from fabricamp.checkpoint.packing import pack_objects, unpack_objects
from fabricamp.checkpoint.reading import load_closed
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.engine.run_parts import RunParts

PEER: Final = "a replica group that runs"
"""Replaces the path of a checkpoint, for a state that came from a running group."""

Found = tuple[str | None, StateDict | None]


def join_groups(
    parts: RunParts,
    save: Callable[..., None],
    path: str | None,
    checkpoint: StateDict | None,
    *,
    weights_only: bool | None = None,
) -> Found:
    """Returns what a fit resumes from: ``path`` and its ``checkpoint``, or the state that another group sends.

    ``save`` is the session's ``save_checkpoint``; ``weights_only`` False allows code to rebuild objects in what comes.  Groups that
    start together all use the checkpoint that one of them was given.  Raises :class:`ConfigError` for manual optimization and for
    ``sync_batchnorm``, which do not work across groups.
    """
    strategy = parts.strategy
    if not strategy.membership.heals:
        return path, checkpoint
    if not parts.module.automatic_optimization:
        raise ConfigError(
            f"strategy {strategy.name!r} averages automatic optimization's gradients; leave the steps to the Trainer"
        )
    if parts.settings.sync_batchnorm:
        raise ConfigError(
            f"sync_batchnorm=True with strategy {strategy.name!r}: groups exchange only gradients; leave it out"
        )
    given = checkpoint
    if path is not None and given is None:
        given = read_together(path, strategy, weights_only=weights_only)
    runs = False

    def state() -> Tensor:
        """Returns the bytes for a group that joins: now what this group was given, later the state of this run."""
        if runs:
            return _packed({"path": PEER, "checkpoint": _present(save)})
        return _packed({"path": path, "checkpoint": given})

    received = strategy.membership.join(state)
    runs = True
    if received is None:
        return path, given
    content: StateDict = load_closed(io.BytesIO(received.numpy().tobytes()), "cpu", weights_only=None)
    unpack_objects(content, PEER, weights_only=weights_only)
    return content["path"], content["checkpoint"]


@torch.no_grad()
def _present(save: Callable[..., None]) -> StateDict:
    """Returns the state of this run, without that of its loggers, whose files belong to this run alone."""
    saved: list[dict[str, Any]] = []
    save(PEER, weights_only=False, write=lambda _, checkpoint: saved.append(checkpoint))
    return {name: value for name, value in saved[0].items() if name != "loggers"}


def _packed(content: StateDict) -> Tensor:
    """Returns ``content`` as bytes, which later training does not change."""
    file = io.BytesIO()
    save(on_host(pack_objects(content)), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
