"""A run among replica groups that come and go: what it gives to one that comes, and what it takes from one that runs."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricamp.checkpoint import read_together
from fabricamp.checkpoint.background import on_host
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from fabricamp.engine.session import Session

PEER: Final = "a replica group that runs"
"""What stands for the path of a state that came from one."""

Found = tuple[str | None, dict[str, Any] | None]


def join_groups(session: Session, path: str | None, checkpoint: dict[str, Any] | None) -> Found:
    """Returns what a fit goes on from: ``path`` and its ``checkpoint``, or where others know better the state that they have.

    Groups that begin together go by what one of them was given.  Raises :class:`ConfigError` for what cannot work among groups.
    """
    strategy = session.strategy
    if not strategy.heals:
        return path, checkpoint
    _check(session)
    given = read_together(path, strategy) if path is not None and checkpoint is None else checkpoint
    runs = False

    def state() -> Tensor:
        return _packed({"path": PEER, "checkpoint": _present(session)} if runs else {"path": path, "checkpoint": given})

    received = strategy.join(state)
    runs = True
    if received is None:
        return path, given
    found = _unpacked(received)
    return found["path"], found["checkpoint"]


@torch.no_grad()
def _present(session: Session) -> dict[str, Any]:
    """The state of this run, but for that of its loggers, whose files are its own."""
    kept: list[dict[str, Any]] = []
    session.save_checkpoint(PEER, weights_only=False, write=lambda _, checkpoint: kept.append(checkpoint))
    return {name: value for name, value in kept[0].items() if name != "loggers"}


def _packed(content: dict[str, Any]) -> Tensor:
    """As bytes: what comes of it later does not follow the training."""
    file = io.BytesIO()
    torch.save(on_host(content), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    return content


def _check(session: Session) -> None:
    name, settings = session.strategy.name, session.settings
    if not session.module.automatic_optimization:
        raise ConfigError(
            f"strategy {name!r} averages automatic optimization's gradients; leave the steps to the Trainer"
        )
    if settings.sync_batchnorm:
        raise ConfigError(f"sync_batchnorm=True with strategy {name!r}: groups exchange gradients alone; leave it out")
