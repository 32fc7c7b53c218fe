"""What a logger could not do: told once when it begins, and once at the end with what was lost by it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator


class Trouble:
    """The troubles of one logger with its disk or its server: they cost values, never the run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told = False
        self._reason = ""
        self._lost = 0
        self._steps: tuple[int, int] | None = None

    @contextlib.contextmanager
    def guard(self, step: int | None = None) -> Iterator[None]:
        """Within it an ``OSError`` is told and goes no further; with ``step`` the values of that step are lost by it."""
        try:
            yield
        except OSError as error:
            self.tell(reason_of(error))
            if step is not None:
                self.lose(1, [step])

    def tell(self, reason: str) -> None:
        """Warns of the first trouble in a run."""
        self._reason = reason
        if not self._told:
            self._told = True
            warnings.warn(
                f"{self._name}: {reason}; training goes on, and what is lost is told at its end",
                RuntimeWarning,
                stacklevel=4,
            )

    def lose(self, rows: int, steps: Iterable[int]) -> None:
        """Counts so many rows, of these steps, that are nowhere."""
        self._lost += rows
        ends = [*steps, *(self._steps or ())]
        self._steps = (min(ends), max(ends)) if ends else None

    def sum_up(self) -> None:
        """At the end of a run: says what was lost in it, and begins anew."""
        if self._lost and self._steps:
            first, last = self._steps
            rows = "1 row is" if self._lost == 1 else f"{self._lost} rows are"
            warnings.warn(
                f"{self._name}: {rows} lost, of the steps {first} to {last}: {self._reason}",
                RuntimeWarning,
                stacklevel=3,
            )
        self._told, self._reason, self._lost, self._steps = False, "", 0, None


def reason_of(error: OSError) -> str:
    """The path and the system's reason, as far as they are known."""
    if error.filename is None:
        return str(error) or type(error).__name__
    return f"cannot write {error.filename}: {error.strerror}"
