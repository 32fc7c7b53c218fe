"""Reports a logger's errors: a warning at the first error, and one at the end of the run with the lost values."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator

from fabricamp.errors import FabricampError


class LoggerErrors:
    """The errors of one logger's disk or server; they cost values, never the run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told = False  # whether this run has had its first error
        self._reason = ""  # of the last error
        self._lost = 0  # number of lost rows
        self._steps: tuple[int, int] | None = None  # their first and last step

    @contextlib.contextmanager
    def guard(self, step: int | None = None) -> Iterator[None]:
        """Returns a context that reports and suppresses ``OSError``; with ``step`` such an error loses that step's values."""
        try:
            yield
        except FabricampError:  # a missing checkpoint, which is an OSError too, is no trouble of the logger's disk
            raise
        except OSError as error:
            self.tell(reason_of(error))
            if step is not None:
                self.lose(1, [step])

    def tell(self, reason: str) -> None:
        """Records ``reason``; warns about the first error of a run."""
        self._reason = reason
        if not self._told:
            self._told = True
            warnings.warn(
                f"{self._name}: {reason}; training continues, and lost values are reported at its end",
                RuntimeWarning,
                stacklevel=4,
            )

    def say(self, text: str) -> None:
        """Warns about something that costs no values from now on."""
        warnings.warn(f"{self._name}: {text}", RuntimeWarning, stacklevel=4)

    def lose(self, rows: int, steps: Iterable[int]) -> None:
        """Counts ``rows`` rows of these steps as lost."""
        self._lost += rows
        ends = [*steps, *(self._steps or ())]
        self._steps = (min(ends), max(ends)) if ends else None

    def sum_up(self) -> None:
        """Warns about lost rows at the end of a run, and resets the counts."""
        if self._lost and self._steps:
            first, last = self._steps
            rows = "1 row is" if self._lost == 1 else f"{self._lost} rows are"
            warnings.warn(
                f"{self._name}: {rows} lost, of the steps {first} to {last}: {self._reason}",
                RuntimeWarning,
                stacklevel=3,
            )
        self._told = False
        self._reason = ""
        self._lost = 0
        self._steps = None


def reason_of(error: OSError) -> str:
    """Returns the path and the system's reason, as far as they are known."""
    if error.filename is None:
        return str(error) or type(error).__name__
    return f"cannot write {error.filename}: {error.strerror}"
