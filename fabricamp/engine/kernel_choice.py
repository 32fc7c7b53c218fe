"""How a run chooses between a norm's kernel and torch's: one rule from its first step to its last, saved with the run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fabricamp.checkpoint.record import Section
from fabricamp.cuda_graph import reason_against
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.ops import dispatch
from fabricamp.ops.dispatch import set_kernel_choice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabricamp._utils.types import StateDict
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer.arguments import Settings


@contextlib.contextmanager
def kernel_choice(settings: Settings, strategy: Strategy) -> Iterator[None]:
    """A context for a run: if steps are captured, the choice counts GPU time alone, also in steps that run eagerly."""
    before = dispatch.settings.mode
    if settings.cuda_graph is not None and not reason_against(strategy.device.type, strategy, settings):
        set_kernel_choice("graph")
    try:
        yield
    finally:
        set_kernel_choice(before)


class KernelChoice(Section):
    """The rule of the choice.  A resumed run keeps it, captured or not: another rule would give other bits."""

    name = "choice of kernels"

    def save(self) -> StateDict:
        """Returns the rule."""
        return {"loops.fit.kernel_choice": dispatch.settings.mode}

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Restores the rule; other programs' files have none."""
        saved = checkpoint.get("loops", {}).get("fit", {}).get("kernel_choice", dispatch.settings.mode)
        try:
            set_kernel_choice(saved)
        except ConfigError as error:
            raise CheckpointError(
                f"{path}: its loops.fit.kernel_choice is {saved!r}; use an older checkpoint"
            ) from error
