"""Runs on disk: lists them, plots their logs, and verifies that a script which is killed goes on with the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def plot(
    runs: Sequence[str | Path], *, out: str | Path | None = None, metrics: Sequence[str] = (), smooth: float = 0.6
) -> None:
    """Draws the logs of runs over each other in the terminal, or as a picture in a notebook, and into the file ``out``, if given.

    Panels: loss of training and of validation, what the runs' ModelCheckpoints monitor, learning rate, loss scale with the skipped
    steps marked, gradient norm and throughput, as far as they were logged.  If no throughput was logged, steps per second are
    computed from the times in TensorBoard's events and JSON lines.

    Args:
        runs: folders of runs, or the event, CSV or JSON files in them.
        out: a .png, .svg or .pdf file; needs matplotlib (``pip install matplotlib``), as a notebook's picture does: without
            it a notebook shows text.
        metrics: names to draw in place of these panels.
        smooth: weight of the previous mean at each value, 0 to below 1; raw values are drawn too.

    Raises:
        ConfigError: if nothing was logged, a name is unknown, or matplotlib is missing.

    Example:
        >>> plot(["runs/digits/version_0", "runs/digits/version_1"], out="both.png")  # doctest: +SKIP
    """
    from rich.console import Console

    from fabricamp.runs.image import check_out, in_notebook, save
    from fabricamp.runs.panels import choose
    from fabricamp.runs.reading import read_runs
    from fabricamp.runs.text import show

    if out is not None:
        check_out(out)
    panels = choose(read_runs(runs), metrics, smooth)
    console = Console(highlight=False)
    if not (console.is_jupyter and in_notebook(panels)):
        show(panels, console)
    if out is not None:
        save(panels, out)
