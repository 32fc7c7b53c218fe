"""Prints a table of the runs in a folder: start time, number of steps, best values, and how they ended."""

from __future__ import annotations

import contextlib
import json
import socket
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fabricamp.engine.run_file import NAME, process_start
from fabricamp.errors import ConfigError
from fabricamp.runs.panels import training_loss, validation_loss
from fabricamp.runs.reading import find_runs, read_curves

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fabricamp._utils.types import StateDict

_SHORT: Final = 30
_LEAST: Final = 6
"""Minimum width of the last column; below it, names are wrapped too."""
_TIME: Final = len("2026-11-23 15:27")
_BETWEEN: Final = len(" │ ") * 4
_STYLES = {"finished": "green", "running": "cyan", "unknown": "dim"}


class Summary(NamedTuple):
    """One run; ``status`` is finished, interrupted, failed, running, killed or unknown.

    ``started`` is the start of the first fit in the folder; the other values are of the newest fit, which may have resumed it.
    ``others`` are the folders of the run's other loggers.
    """

    folder: Path
    others: tuple[Path, ...]
    started: str
    steps: int | None
    best: dict[str, float]
    status: str
    reason: str


def summarise(folder: Path) -> Summary:
    """Returns the summary of a run from its run.json; from its logs if that file is missing or was never completed."""
    content: StateDict = {}
    if not (folder / NAME).exists():
        # Only a fit writes run.json.
        reason = f"an evaluation or another trainer's (no {NAME})"
        content = {"started": _first_written(folder), "reason": reason}
    content = _read(folder / NAME) or content
    status = str(content.get("status", "unknown"))
    reason = str(content.get("reason", ""))
    if status == "running":
        status, reason = _living(content.get("process"))
    steps = content.get("step")
    best = content.get("best")
    if steps is None or not best:
        logged_steps, logged_best = _from_logs(folder)
        steps = logged_steps if steps is None else steps
        best = best or logged_best
    others = tuple((folder / str(path)).resolve() for path in content.get("other_log_folders", ()))
    earlier = [_read(file) for file in folder.glob("run-*.json")]
    starts = [str(fit["started"]) for fit in (*earlier, content) if fit.get("started")]
    return Summary(folder, others, min(starts, key=_moment, default=""), steps, best, status, reason)


def _read(file: Path) -> StateDict:
    """Returns the content of a run file; empty if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        read = json.loads(file.read_text(encoding="utf-8"))
        return read if isinstance(read, dict) else {}
    return {}


def _moment(started: str) -> float:
    """Returns a start in seconds, so that starts with different UTC offsets compare; a time that cannot be read is the latest."""
    try:
        return datetime.fromisoformat(started).timestamp()
    except ValueError:
        return float("inf")


def show(folder: str | Path) -> None:
    """Prints the table of the runs below ``folder``; raises :class:`ConfigError` if there are none."""
    root = Path(folder).expanduser()
    runs = [summarise(path) for path in find_runs(root)] if root.is_dir() else []
    if not runs:
        raise ConfigError(
            f"{str(folder)!r} {'holds no run' if root.is_dir() else 'is not a folder'}; give the folder of runs"
        )
    others = {path for run in runs for path in run.others}
    runs = [run for run in runs if run.folder.resolve() not in others]
    runs.sort(key=lambda run: run.started)
    names = [str(run.folder.relative_to(root)) if run.folder != root else str(run.folder) for run in runs]
    started = [run.started[:_TIME].replace("T", " ") for run in runs]
    steps = ["" if run.steps is None else str(run.steps) for run in runs]
    ended = [_ending(run) for run in runs]
    console = Console(highlight=False)
    others_width = _TIME + _width(["steps", *steps]) + _BETWEEN
    best = ["\n".join(f"{metric} {value:.4g}" for metric, value in run.best.items()) for run in runs]
    if _width(names) + others_width + _width(best) + _width(" ".join(ended).split()) > console.width:
        best = [lines.replace(" ", "\n") for lines in best]
    # Times, metrics and short names stay on one line; in a narrow terminal the last column wraps.
    fits = _width(names) + others_width + _width(best) + _LEAST <= console.width
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("run", overflow="fold", no_wrap=fits and _width(names) <= _SHORT)
    table.add_column("started", no_wrap=True)
    table.add_column("steps", no_wrap=True, justify="right")
    table.add_column("best", no_wrap=True)
    table.add_column("how it ended", overflow="fold")
    for name, time, step, metrics, end, run in zip(names, started, steps, best, ended, runs, strict=True):
        table.add_row(Text(name), time, step, Text(metrics), Text(end, _STYLES.get(run.status, "yellow")))
    console.print(table)


def _width(cells: Iterable[str]) -> int:
    """Returns the width of a column with these cells, which may have several lines."""
    return max((len(line) for cell in cells for line in cell.splitlines()), default=0)


def _ending(run: Summary) -> str:
    """Returns the status and its reason; for a finished run, or after Ctrl-C, whose reason is the status, only the reason."""
    if run.reason and run.status in ("finished", run.reason):
        return run.reason
    return f"{run.status}: {run.reason}" if run.reason else run.status


def _first_written(folder: Path) -> str:
    """Returns the earliest modification time of a folder's files; empty if it has none."""
    times = [path.stat().st_mtime for path in folder.iterdir() if path.is_file()]
    return datetime.fromtimestamp(min(times)).astimezone().isoformat() if times else ""


def _living(process: Any) -> tuple[str, str]:
    """Returns status and reason of a run by its process: running or killed; unknown for a process on another machine."""
    if not isinstance(process, dict) or not isinstance(process.get("pid"), int):
        return "unknown", ""
    if process.get("host") != socket.gethostname():
        return "unknown", f"runs on {process.get('host')}, or was killed there"
    start = process_start(process["pid"])
    return ("running", "") if start and start == process.get("start") else ("killed", "")


def _from_logs(folder: Path) -> tuple[int | None, dict[str, float]]:
    try:
        curves = read_curves(folder)
    except ConfigError:
        return None, {}
    steps = max((max(curve.steps) for curve in curves.values()), default=None)
    return None if steps is None else steps + 1, _lowest_loss(curves)


def _lowest_loss(curves: Mapping[str, Any]) -> dict[str, float]:
    name = validation_loss(list(curves)) or training_loss(list(curves))
    finite = [value for value in curves[name].values if abs(value) < float("inf")] if name is not None else []
    return {name: min(finite)} if name is not None and finite else {}
