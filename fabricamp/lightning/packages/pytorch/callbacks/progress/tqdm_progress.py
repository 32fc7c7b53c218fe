"""The bar of tqdm that Lightning draws, for code that draws one itself."""

from __future__ import annotations

from typing import Any

from fabricamp.callbacks.progress.tqdm_progress import TQDMProgressBar as TQDMProgressBar

_WIDTH = 5

try:
    from tqdm.auto import tqdm as _Tqdm
except ImportError:  # fabricamp's own bar does without tqdm
    _Tqdm = object


class Tqdm(_Tqdm):  # type: ignore[misc]  # the base is what is installed
    """A tqdm whose numbers have a width of at least five, so that the bar does not move as they change."""

    @staticmethod
    def format_num(n: float | str) -> Any:
        """Returns a number as text, a float with zeros behind it."""
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
    """Returns None, tqdm's word for an unknown total, for an infinite or undefined number; others as they are."""
    return None if x is None or x in (float("inf"), float("-inf")) or x != x else x  # noqa: PLR0124 - nan alone differs
