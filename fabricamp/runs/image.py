"""Writes plots to files with matplotlib."""

from __future__ import annotations

import importlib.util
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricamp.errors import ConfigError
from fabricamp.profilers.phases import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp.profilers.phases import Breakdown
    from fabricamp.runs.panels import Line, Panel

FORMATS = (".png", ".svg", ".pdf")
_NOTEBOOK_DPI = 90
_LARGEST = 1e300


def check_out(out: str | Path) -> Path:
    """Returns the path; raises :class:`ConfigError` for an unknown file type or missing matplotlib."""
    path = Path(out).expanduser()
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"out={str(out)!r}: give a file that ends in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{path.name} is drawn by matplotlib, which is not installed: pip install matplotlib, or leave --out out "
            "for the picture in the terminal"
        )
    return path


def save(panels: Sequence[Panel], out: str | Path) -> None:
    """Writes the panels, one below the other, to a .png, .svg or .pdf file."""
    path = check_out(out)
    _write(_figure(panels), path)


def in_notebook(panels: Sequence[Panel]) -> bool:
    """Shows the panels as one picture in a notebook; returns False if there is no matplotlib to draw them."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from IPython.display import Image, display

    picture = io.BytesIO()
    _figure(panels).savefig(picture, format="png", dpi=2 * _NOTEBOOK_DPI)
    display(Image(picture.getvalue(), retina=True))
    return True


def _figure(panels: Sequence[Panel]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 2.2 * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    runs = list(dict.fromkeys(line.run for panel in panels for line in panel.lines))
    for axes, panel in zip(rows, panels, strict=True):
        _draw(axes, panel, runs)
    rows[-1].set_xlabel("step")
    # A single run has a legend too: the file is kept longer than the command that named the run's folder.
    handles = {line.get_label(): line for axes in rows for line in axes.get_lines() if line.get_label() in runs}
    figure.legend(handles.values(), handles.keys(), loc="outside upper left")
    return figure


def save_bars(breakdowns: Sequence[Breakdown], out: str | Path) -> None:
    """Writes a stacked bar of phases for each breakdown of a batch to a .png, .svg or .pdf file."""
    path = check_out(out)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.4 + 0.7 * len(breakdowns)), layout="constrained")
    axes = figure.subplots()
    titles = [breakdown.title for breakdown in breakdowns]
    names = [name for name in PHASES if any(name in breakdown.seconds for breakdown in breakdowns)]
    ends = [0.0] * len(breakdowns)
    for name in names:
        widths = [1e3 * max(breakdown.seconds.get(name, 0.0), 0.0) for breakdown in breakdowns]
        axes.barh(titles, widths, left=ends, label=name, color=f"C{PHASES.index(name)}")
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms a batch")
    figure.legend(loc="outside upper left", ncols=len(names))
    _write(figure, path)


def _write(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; give another file") from error


def _draw(axes: Any, panel: Panel, runs: Sequence[str]) -> None:
    names = list(dict.fromkeys(line.metric for line in panel.lines))
    title = panel.title if names == [panel.title] else f"{panel.title}: {', '.join(names)}"
    axes.set_title(title, loc="left", size="medium")
    axes.grid(alpha=0.3)
    if panel.logarithmic:
        axes.set_yscale("log", base=2)
    for line in panel.lines:
        _draw_line(axes, line, f"C{runs.index(line.run) % 10}")


def _draw_line(axes: Any, line: Line, colour: str) -> None:
    steps = line.curve.steps
    marker = "." if len(steps) == 1 else ""
    if line.smoothed:
        axes.plot(steps, _drawable(line.curve.values), color=colour, alpha=0.3, linewidth=0.8)
    axes.plot(steps, _drawable(line.smoothed or line.curve.values), color=colour, label=line.run, marker=marker)
    if line.skipped:
        bottom = [0.04] * len(line.skipped)
        axes.plot(line.skipped, bottom, "x", color=colour, transform=axes.get_xaxis_transform(), label="skipped steps")


def _drawable(values: Sequence[float]) -> list[float]:
    """Returns the values within what matplotlib can compute axes for; what is not finite stays a gap."""
    return [max(-_LARGEST, min(value, _LARGEST)) if math.isfinite(value) else value for value in values]
