"""Tells of a monitored name that nothing has logged, at the first batch: at the end of the epoch it is an error."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fabricamp.agenda import Entry, Position
from fabricamp.callbacks._monitoring import missing_in
from fabricamp.callbacks.base import Callback, decides_by_metrics
from fabricamp.callbacks.checkpoint import Checkpoint
from fabricamp.engine.checks.model_checks import strings_in
from fabricamp.module import TrainingModule

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from fabricamp.agenda import PassEnd
    from fabricamp.engine.run_parts import RunParts

_LOG = logging.getLogger("fabricamp")

_ALWAYS = ("epoch", "step")
"""The names that checkpoints may monitor although nothing logs them."""
_NAME_MONITORS = ("configure_optimizers", "configure_callbacks")
"""The methods of a module that say what is monitored, and log nothing."""


class MonitorLook(Entry):
    """Warns, once a fit, of monitored names that were not logged by a first batch and a validation.

    A name that the code of the module or of a callback of the user has as a string may still be logged, and is not told of.

    Args:
        parts: those of the fit.
        callbacks: the Trainer's.
        validates: whether the fit has a validation.
        of_validation: the names that the sanity check has logged; None if there was none: then a validation has to come first.
    """

    at_every_look = True
    """It acts after the first validation too, which may come before the sanity check's names are known."""

    def __init__(
        self,
        parts: RunParts,
        callbacks: Sequence[Callback],
        *,
        validates: bool,
        of_validation: Collection[str] | None,
    ) -> None:
        self._parts = parts
        self._callbacks = callbacks
        self._state = parts.state
        self._validates = validates
        self._of_validation = of_validation
        self._validations = self._state.validations
        self._looked = False

    def next(self) -> Position:
        """Returns the first micro-batch; never where a validation has to come first."""
        return Position() if self._looked or not self._is_known() else Position(batches=0)

    def act(self, *, last: bool) -> PassEnd | None:
        """Looks which names were logged, once."""
        if not self._looked and self._is_known():
            self._looked = True
            self._tell()
        return None

    def _is_known(self) -> bool:
        """Whether all names of validation are known: there is none, or one was run."""
        validated = self._of_validation is not None or self._state.validations > self._validations
        return validated or not self._validates

    def _tell(self) -> None:
        logged = {*self._parts.metrics.known_names(), *(self._of_validation or ())}
        missing = [(what, name) for what, name in self._monitored() if name not in logged]
        if not missing:
            return
        may_come = self._strings()
        for what, name in missing:
            if name not in may_come:
                _LOG.warning("%s; it may be logged until it is needed", missing_in(logged, what, name))

    def _monitored(self) -> Iterator[tuple[str, str]]:
        """Yields who monitors, and the name."""
        for callback in self._callbacks:
            name = getattr(callback, "monitor", None)
            always = isinstance(callback, Checkpoint) and name in _ALWAYS
            if decides_by_metrics(callback) and isinstance(name, str) and not always:
                yield f"{type(callback).__name__}(monitor={name!r})", name
        if self._parts.module.automatic_optimization:
            for config in self._parts.schedulers:
                if config.reduce_on_plateau and config.monitor is not None:
                    yield f"{type(config.scheduler).__name__} with monitor={config.monitor!r}", str(config.monitor)

    def _strings(self) -> set[str]:
        module = strings_in(self._parts.module, TrainingModule, without=_NAME_MONITORS)
        return module.union(*(strings_in(one, Callback) for one in self._callbacks))
