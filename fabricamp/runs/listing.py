"""Prints a table of the runs in a folder: start time, number of steps, best values, and how they ended.

Evaluations stand below the run whose checkpoint they loaded.  Files of a run may be damaged, or of anybody: what is in them is
checked, and shown without control characters.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import stat
import sys
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fabricamp.engine.report.run_file import EVALUATIONS, NAME, process_start
from fabricamp.errors import ConfigError
from fabricamp.messages import is_terminal, printable
from fabricamp.runs.panels import training_loss, validation_loss
from fabricamp.runs.reading import find_runs, read_curves, read_run_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from fabricamp._utils.types import StateDict

_MOST_STEPS: Final = 2**63
_TIME: Final = len("2026-11-23 15:27")
_BETWEEN: Final = len(" │ ")
_ENDING: Final = 24
"""The most columns that the last column is given before other columns are left out."""
_HEADS: Final = ("run", "started", "steps", "best", "how it ended")
_LEFT_OUT_FIRST: Final = ("started", "steps", "best")
_BREAKS_OF_BEST: Final = (" (?=[^ ]+$)", " ")
"""Before a value, and then before each word."""
_STYLES = {"finished": "green", "running": "cyan", "unknown": "dim"}


class Summary(NamedTuple):
    """One run; ``status`` is finished, interrupted, failed, running, killed or unknown.

    ``started`` is the start of the first fit in the folder; the other values are of the newest fit, which may have resumed it.
    ``others`` are the folders of the run's other loggers.  ``of`` is the folder of the run that an evaluation belongs to, and
    ``resumes`` that of the run which this one goes on with.
    """

    folder: Path
    others: tuple[Path, ...]
    started: str
    steps: int | None
    best: dict[str, float]
    status: str
    reason: str
    of: Path | None = None
    resumes: Path | None = None


def summarise(folder: Path) -> Summary:
    """Returns the summary of a run from its run.json; from its logs if that file is missing or was never completed."""
    content = read_run_file(folder / NAME)
    status = _text(content, "status") or "unknown"
    reason = _text(content, "reason")
    if not (folder / NAME).exists():
        # Only a fit writes run.json.
        reason = f"no {NAME}: another trainer's"
    elif not content:
        reason = f"{NAME} cannot be read"
    if status == "running":
        status, reason = _living(content.get("process"))
    steps = _steps(content)
    best = _numbers(content.get("best"))
    if steps is None or not best:
        logged_steps, logged_best = _from_logs(folder)
        steps = logged_steps if steps is None else steps
        best = best or logged_best
    fits = [content, *map(read_run_file, folder.glob("run-*.json"))]
    starts = [start for fit in fits if (start := _text(fit, "started"))] or [_first_written(folder)]
    earlier = next((path for fit in fits if (path := _text(fit, "resumes"))), "")
    resumes = _resolved(folder, earlier) if earlier else None
    return Summary(
        folder, _others(folder, content), min(starts, key=_moment), steps, best, status, reason, None, resumes
    )


def evaluations(folder: Path) -> Iterator[Summary]:
    """Yields the newest validation, test and prediction that logged into a folder."""
    for fn, name in EVALUATIONS.items():
        content = read_run_file(folder / name)
        if not content:
            continue
        status = _text(content, "status") or "unknown"
        checkpoint = _text(content, "ckpt_path").rpartition("/")[2]
        said = [f"{fn} of {checkpoint}" if checkpoint else fn, _text(content, "reason")]
        values = _numbers(content.get("metrics"))
        first = dict([next(iter(values.items()))]) if values else {}
        of = _resolved(folder, _text(content, "run") or ".")
        best = _shown_loss(values) or first
        others = _others(folder, content)
        yield Summary(folder, others, _text(content, "started"), None, best, status, ": ".join(filter(None, said)), of)


def show(folder: str | Path) -> None:
    """Prints the runs below ``folder``, as a table or, for a pipe, with tabs; raises :class:`ConfigError` if there are none."""
    root = Path(folder).expanduser()
    runs = _listed(find_runs(root)) if root.is_dir() else []
    if not runs:
        raise ConfigError(
            f"{str(folder)!r} {'holds no run' if root.is_dir() else 'is not a folder'}; give the folder of runs"
        )
    rows = list(map(_row, runs))
    # `watch` shows what comes through its pipe on a terminal, whose width it sets as COLUMNS.
    is_watched = "COLUMNS" in os.environ and not _is_file(sys.stdout)
    if not is_terminal(sys.stdout) and not is_watched:
        _print_plain(rows)
        return
    width = Console().width
    heads = _fitting(rows, width)
    table = Table(show_edge=False, pad_edge=False)
    for head in heads:
        is_last = head == _HEADS[-1]
        table.add_column(
            head,
            no_wrap=not is_last,
            overflow="ellipsis",
            justify="right" if head == "steps" else "left",
        )
    for row, run in zip(rows, runs, strict=True):
        colour = _STYLES.get(run.status, "yellow")
        table.add_row(*(Text(row[head], colour if head == _HEADS[-1] else "") for head in heads))
    least = sum(_width(_column(rows, head)) + _BETWEEN for head in heads[:-1])
    last = _column(rows, _HEADS[-1])
    # The terminal wraps a name that is wider than itself: a part of it would be of no use.
    console = Console(width=max(width, least + _least(last)), highlight=False)
    console.print(table)
    if left_out := [head for head in _HEADS if head not in heads]:
        console.print(f"in {width} columns without: {', '.join(left_out)}", style="dim")


def _is_file(stream: TextIO | None) -> bool:
    """Returns whether ``stream`` is written to a file of the disk."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # None, a program's own object, or closed
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)  # type: ignore[union-attr]
    return False


def _print_plain(rows: Sequence[dict[str, str]]) -> None:
    """Prints a line with the heads and one for each run, with tabs between whole values, for programs such as ``cut``."""
    print(*_HEADS, sep="\t")
    for row in rows:
        print(*(row[head].strip().replace("\n", ", ") for head in _HEADS), sep="\t")


# -- the table ---------------------------------------------------------------------------------------------------------------------


def _listed(folders: Sequence[Path]) -> list[Summary]:
    """Returns the rows by time: fits, each with its evaluations below it."""
    evaluated = [one for folder in folders for one in evaluations(folder)]
    only_evaluated = {one.folder for one in evaluated if not (one.folder / NAME).exists()}
    fits = [summarise(folder) for folder in folders if folder not in only_evaluated]
    others = {path for run in (*fits, *evaluated) for path in run.others}
    fits = [run for run in fits if run.folder.resolve() not in others]
    known = {run.folder.resolve() for run in fits}
    alone = [one._replace(of=None) for one in evaluated if one.of not in known]
    listed: list[Summary] = []
    for row in sorted([*fits, *alone], key=_start):
        listed.append(row)
        if row in fits:
            listed += sorted((one for one in evaluated if one.of == row.folder.resolve()), key=_start)
    return listed


def _row(run: Summary) -> dict[str, str]:
    """Returns the cells of a run; its name is its path from the current folder, as ``fabricamp plot`` takes it."""
    ending = _ending(run)
    if run.resumes is not None:  # named as seen from its own folder's neighbours: the column is narrow
        ending = f"resumes {os.path.relpath(run.resumes, run.folder.resolve().parent)}: {ending}"
    indent = "" if run.of is None else "  "
    return {
        "run": indent + printable(str(run.folder)),
        "started": printable(run.started[:_TIME].replace("T", " ")),
        "steps": "" if run.steps is None else str(run.steps),
        "best": "\n".join(f"{printable(metric)} {value:.4g}" for metric, value in run.best.items()),
        "how it ended": printable(ending),
    }


def _fitting(rows: Sequence[dict[str, str]], width: int) -> tuple[str, ...]:
    """Returns the columns that a terminal has room for; changes ``best`` to a line for each name and value if that helps."""
    heads: tuple[str, ...] = _HEADS
    for change in (None, *_BREAKS_OF_BEST, *_LEFT_OUT_FIRST):
        if change in _BREAKS_OF_BEST:
            for row in rows:
                row["best"] = re.sub(change, "\n", row["best"], flags=re.MULTILINE)
        heads = tuple(head for head in heads if head != change)
        before_last = sum(_width([head, *_column(rows, head)]) + _BETWEEN for head in heads[:-1])
        if before_last + _least(_column(rows, heads[-1])) <= width:
            break
    return heads


def _column(rows: Iterable[Mapping[str, str]], head: str) -> list[str]:
    return [head, *(row[head] for row in rows)]


def _least(cells: Sequence[str]) -> int:
    """Returns the columns that the endings need: for each of their words, and for about three lines."""
    words = _width(chain.from_iterable(cell.split() for cell in cells))
    return min(max(words, math.ceil(_width(cells) / 3)), _ENDING)


def _width(cells: Iterable[str]) -> int:
    """Returns the width of a column with these cells, which may have several lines."""
    return max((Text(line).cell_len for cell in cells for line in cell.splitlines()), default=0)


def _ending(run: Summary) -> str:
    """Returns the status and its reason; for a finished run, or after Ctrl-C, whose reason is the status, only the reason."""
    if run.reason and run.status in ("finished", run.reason):
        return run.reason
    return f"{run.status}: {run.reason}" if run.reason else run.status


# -- what is in the files ----------------------------------------------------------------------------------------------------------


def _text(content: StateDict, key: str) -> str:
    value = content.get(key)
    return value if isinstance(value, str) else ""


def _steps(content: StateDict) -> int | None:
    value = content.get("step")
    return value if type(value) is int and 0 <= value < _MOST_STEPS else None


def _numbers(values: Any) -> dict[str, float]:
    """Returns the finite numbers of a mapping."""
    items = values.items() if isinstance(values, dict) else ()
    return {name: float(value) for name, value in items if type(value) in (int, float) and abs(value) < 1e308}


def _others(folder: Path, content: StateDict) -> tuple[Path, ...]:
    paths = content.get("other_log_folders")
    texts = [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else []
    return tuple(path for text in texts if (path := _resolved(folder, text)) is not None)


def _resolved(folder: Path, path: str) -> Path | None:
    with contextlib.suppress(
        OSError, ValueError, RuntimeError
    ):  # a loop of links, or a character that no path can have
        return (folder / path).resolve()
    return None


def _start(run: Summary) -> tuple[float, str]:
    return _moment(run.started), str(run.folder)


def _moment(started: str) -> float:
    """Returns a start in seconds, so that starts with different UTC offsets compare; a time that cannot be read is the latest."""
    try:
        return datetime.fromisoformat(started).timestamp()
    except (ValueError, OverflowError):
        return float("inf")


def _first_written(folder: Path) -> str:
    """Returns the earliest modification time of a folder's files; empty if it has none."""
    with contextlib.suppress(OSError, ValueError, OverflowError):
        times = [path.stat().st_mtime for path in folder.iterdir() if path.is_file()]
        return datetime.fromtimestamp(min(times)).astimezone().isoformat() if times else ""
    return ""


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
    lowest = {name: min(finite) for name, curve in curves.items() if (finite := [*filter(math.isfinite, curve.values)])}
    # Nothing was monitored, so no checkpoint was chosen by this value.
    return None if steps is None else steps + 1, {f"min {name}": value for name, value in _shown_loss(lowest).items()}


def _shown_loss(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the loss to show among some values: that of validation, or else that of training."""
    name = validation_loss(list(values)) or training_loss(list(values))
    return {} if name is None else {name: values[name]}
