"""Reads the logs of runs: TensorBoard's event files, a CSV file, or JSON lines."""

from __future__ import annotations

import contextlib
import csv
import json
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fabricamp.engine.run_file import NAME
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CSV_FILE = "metrics.csv"
JSON_FILE = "metrics.jsonl"
_EVENTS = "*tfevents*"
_DEPTH = 3
"""Depth of the search for runs below the given folder: ``runs/name/version_0``."""


class Curve(NamedTuple):
    """The values of one metric, with their times if the log has them."""

    steps: list[int]
    values: list[float]
    times: list[float]


class Run(NamedTuple):
    """The logged metrics of one run; ``name`` distinguishes the runs of a plot."""

    name: str
    curves: dict[str, Curve]
    monitors: tuple[str, ...] = ()
    """The names that its ModelCheckpoints monitored."""


def read_runs(folders_or_files: Sequence[str | Path]) -> list[Run]:
    """Returns the runs in these folders or files; raises :class:`ConfigError` if nothing was logged."""
    paths = [Path(path).expanduser() for path in folders_or_files]
    return [Run(name, read_curves(path), _monitors_of(path)) for name, path in zip(_names(paths), paths, strict=True)]


def read_curves(path: Path) -> dict[str, Curve]:
    """Returns the curves that were logged into a folder, or into one log file, by metric name."""
    if not path.exists():
        raise ConfigError(f"{str(path)!r} is not there; give the folder of a run, such as runs/version_0")
    if path.is_dir():
        events = sorted(path.glob(_EVENTS))
        files = [path / CSV_FILE, path / JSON_FILE]
    else:
        events = [path] if "tfevents" in path.name else []
        files = [path]
    readers = {".csv": _from_table, ".jsonl": _from_lines}
    try:
        if events:
            return _curves(_from_events(events))
        for file in files:
            if file.is_file() and file.suffix in readers:
                return _curves(readers[file.suffix](file))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read as a log: {str(error) or type(error).__name__}") from error
    raise ConfigError(f"{path} holds no log{_why_no_log(path)}")


def _monitors_of(path: Path) -> tuple[str, ...]:
    """Returns what the ModelCheckpoints of a run monitored; empty without a run.json, which only fits of this package write."""
    folder = path if path.is_dir() else path.parent
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        # Files of earlier versions name only those that had a best value.
        return tuple(map(str, content.get("monitors", content.get("best", ()))))
    return ()


def is_run(folder: Path) -> bool:
    """Returns whether this folder has a log, or the run.json of a fit."""
    return any((folder / name).is_file() for name in (CSV_FILE, JSON_FILE, NAME)) or any(folder.glob(_EVENTS))


def find_runs(folder: Path) -> list[Path]:
    """Returns the run folders in ``folder``, including ``folder`` itself, oldest first."""
    return sorted(_runs_within(folder, _DEPTH), key=lambda path: (path.stat().st_mtime, str(path)))


def _runs_within(folder: Path, depth: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # a folder without permission to list it has no run of this user
        if is_run(folder):
            yield folder
        for inner in folder.iterdir() if depth else ():
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                yield from _runs_within(inner, depth - 1)


def _why_no_log(path: Path) -> str:
    """Returns why there is no log: a fit logged no value, or else the files and folders that were searched."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((path / NAME).read_text(encoding="utf-8"))
        every = int(content["trainer"]["log_every_n_steps"])
        steps = int(content["step"]) - int(content["first_step"])
        return f": its run of {steps} steps logged no value, with log_every_n_steps={every}"
    return f": TensorBoard's events, {CSV_FILE} or {JSON_FILE}{_runs_below(path)}"


def _runs_below(path: Path) -> str:
    """Returns the end of a message: which runs are below a folder, or what to give."""
    runs = [run for run in find_runs(path) if run != path] if path.is_dir() else []
    runs = [run for run in runs if (run / NAME).is_file()] or runs  # prefer fits to test and predict runs
    return f"; runs below it: {', '.join(str(run) for run in runs[-3:])}" if runs else "; give the folder of a run"


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns the paths without their common leading folders."""
    parts = [path.absolute().parts for path in paths]
    common = 0
    while all(len(names) > common + 1 and names[common] == parts[0][common] for names in parts):
        common += 1
    return ["/".join(names[common:]) for names in parts]


def _curves(points: Iterator[tuple[str, int, float, float | None]]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for name, step, value, time in points:
        curve = curves.setdefault(name, Curve([], [], []))
        curve.steps.append(step)
        curve.values.append(value)
        if time is not None:
            curve.times.append(time)
    return curves


def _from_events(files: Sequence[Path]) -> Iterator[tuple[str, int, float, float | None]]:
    """Yields the points of event files in order; a restart discards earlier points from its step on."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import SessionLog

    from fabricamp.loggers.event_file import read_events

    valid: list[Any] = []
    try:
        for event in chain.from_iterable(map(read_events, files)):
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                valid = [earlier for earlier in valid if earlier.step < event.step]
            elif event.HasField("summary"):
                valid.append(event)
    except DecodeError as error:
        raise ValueError("an event in it is damaged") from error
    for event in valid:
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield value.tag, event.step, value.simple_value, event.wall_time


def _from_table(file: Path) -> Iterator[tuple[str, int, float, float | None]]:
    with file.open(newline="", encoding="utf-8") as text:
        for row in csv.DictReader(text):
            step = int(float(row.pop("step")))
            for name, value in row.items():
                if name is not None and value:
                    yield name, step, float(value), None


def _from_lines(file: Path) -> Iterator[tuple[str, int, float, float | None]]:
    with file.open(encoding="utf-8") as text:
        for row in map(json.loads, text):
            step = int(row.pop("step"))
            time = row.pop("time", None)
            for name, value in row.items():
                yield name, step, float(value), time
