"""Lightning's tqdm class, for code that draws a bar itself."""

from __future__ import annotations

from typing import Any

from fabricamp.callbacks.progress.tqdm_progress import TQDMProgressBar as TQDMProgressBar

_WIDTH = 5

try:
    from tqdm.auto import tqdm as _Tqdm
except ImportError:  # fabricamp's own bar does not need tqdm
    _Tqdm = object


class Tqdm(_Tqdm):  # type: ignore[misc]  # the base depends on the installed packages
    """A tqdm that shows numbers with at least five characters, so that the bar does not move when they change."""

    @staticmethod
    def format_num(n: float | str) -> Any:
        """Returns a number as text; a float is padded with zeros."""
        text = n if isinstance(n, str) else _Tqdm.format_num(n)
        if isinstance(n, int) or "e" in text:
            return text
        if "." not in text and len(text) < _WIDTH:
            try:
                float(text)
            except ValueError:
                return text
            text += "."
        return text.ljust(_WIDTH, "0")


def convert_inf(x: float | None) -> float | None:
    """Returns None, which means an unknown total to tqdm, for infinity and NaN; other values unchanged."""
    return None if x is None or x in (float("inf"), float("-inf")) or x != x else x  # noqa: PLR0124 - nan alone differs
