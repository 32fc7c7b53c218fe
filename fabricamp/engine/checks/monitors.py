"""Tells of a monitored name that nothing has logged, at the first batch: at the end of the epoch it is an error."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from fabricamp.agenda import Entry, Position
from fabricamp.callbacks.base import Callback, decides_by_metrics
from fabricamp.callbacks.checkpoint import Checkpoint
from fabricamp.engine.checks.model_checks import strings_in
from fabricamp.errors import nearest
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
_MARKS = "_/.-: |"
"""The characters that join the parts of a name."""
_FIELDS = re.compile(r"%\w|\{[^}]*\}")
"""What is filled in when a name is composed by ``%`` or ``format``."""
_SUFFIX = re.compile(r"(_step|_epoch)?(/dataloader_idx_\d+)?$")
"""What :meth:`TrainingModule.log` appends to a name."""


class MonitorLook(Entry):
    """Warns, once a fit, of monitored names that were not logged by a first batch and a validation.

    A name that the code of the module or of a callback of the user has as a string may still be logged, and is not told of; nor is
    one that it may compose (:class:`_Names`).

    Args:
        parts: those of the fit.
        callbacks: the Trainer's.
        validates: whether the fit has a validation.
        of_validation: the names that the sanity check has logged; None if there was none: then a validation has to come first.
    """

    at_every_look = True
    """Until it has looked: it acts after the first validation too, which may come before the sanity check's names are known."""

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

    def next(self) -> Position:
        """Returns the first micro-batch; never where a validation has to come first."""
        return Position(batches=0) if self.at_every_look and self._is_known() else Position()

    def act(self, *, last: bool) -> PassEnd | None:
        """Looks which names were logged, once."""
        if self.at_every_look and self._is_known():
            self.at_every_look = False
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
        names = self._names()
        for what, name in missing:
            if not names.may_be_logged(name, logged):
                known = nearest(name, logged) or f" (logged so far: {', '.join(sorted(logged)) or 'nothing'})"
                _LOG.warning("%s: nothing has logged it yet%s", what, known)

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

    def _names(self) -> _Names:
        module = self._parts.module
        strings = strings_in(module, TrainingModule, without=_NAME_MONITORS)
        strings.update(*(strings_in(one, Callback) for one in self._callbacks))
        part: Any
        for part in module.modules():
            strings.update(text for value in vars(part).values() for text in _texts(value))
            if hasattr(part, "compute") and hasattr(part, "keys"):  # torchmetrics' collections
                strings.update(map(str, part.keys()))
        return _Names(strings)


class _Names:
    """The names that may still be logged: strings of the code, what is composed of them, and both with the suffixes of fabricamp.

    A string that begins or ends with a mark (``"val_"``, ``"{}/acc"``) is a part of composed names.  A name with such a part may be
    logged, unless its rest is nearly that of a logged name with the same part, and no string.
    """

    def __init__(self, strings: set[str]) -> None:
        self._strings = strings
        pieces = {piece for text in strings for piece in _FIELDS.split(text) if piece.strip(_MARKS)}
        self._beginnings = {piece for piece in pieces if piece[-1] in _MARKS}
        self._endings = {piece for piece in pieces if piece[0] in _MARKS}

    def may_be_logged(self, name: str, logged: Collection[str]) -> bool:
        """Whether ``name``, which is not among the ``logged`` names, may be logged later."""
        name = _SUFFIX.sub("", name)
        if name in self._strings:
            return True
        return any(
            rest in self._strings or not nearest(rest, self._rests(logged, beginning, ending))
            for beginning, ending in self._parts_of(name)
            if (rest := name[len(beginning) : len(name) - len(ending)])
        )

    def _parts_of(self, name: str) -> Iterator[tuple[str, str]]:
        """Yields the beginning and the ending that strings give to ``name``, one of them empty."""
        yield from ((piece, "") for piece in self._beginnings if name.startswith(piece))
        yield from (("", piece) for piece in self._endings if name.endswith(piece))

    @staticmethod
    def _rests(logged: Collection[str], beginning: str, ending: str) -> list[str]:
        alike = [name for name in logged if name.startswith(beginning) and name.endswith(ending)]
        return [name[len(beginning) : len(name) - len(ending)] for name in alike]


def _texts(value: object) -> Iterator[str]:
    """Yields a string, or those in a dict, list, tuple or set."""
    several = [*value, *value.values()] if isinstance(value, dict) else value
    several = several if isinstance(several, list | tuple | set) else [several]
    yield from (one for one in several if isinstance(one, str))
