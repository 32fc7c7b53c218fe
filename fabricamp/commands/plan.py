"""The memory of a configured fit on a GPU, told on any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fabricamp.config import build_parts, check_config, read_config
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fabricamp.engine.planning import MemoryPlan

_OVERRIDES: Final = (
    "trainer.accelerator=cpu",
    "trainer.logger=false",
    "trainer.profiler=null",
    "trainer.cuda_graph=false",
)
"""The GPU need not be here."""


def plan(path: Path, overrides: Sequence[str], *, card: str | None = None) -> MemoryPlan:
    """Returns the plan of the fit that a file describes; raises :class:`ConfigError` for what cannot be planned."""
    content = read_config(path, [*overrides, *_OVERRIDES])
    check_config(content)
    trainer, module, data, _ = build_parts(content)
    if module is None:
        raise ConfigError(f"{path} has no module to plan for; write module: with its _target_")
    return trainer.plan(module, datamodule=data, card=card)
