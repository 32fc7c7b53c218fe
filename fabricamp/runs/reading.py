"""Reads the logs of runs: TensorBoard's event files, a CSV file, or JSON lines."""

from __future__ import annotations

import contextlib
import csv
import json
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fabricamp.engine.report.run_file import EVALUATIONS, NAME
from fabricamp.errors import ConfigError
from fabricamp.messages import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabricamp._utils.types import StateDict

CSV_FILE = "metrics.csv"
JSON_FILE = "metrics.jsonl"
_EVENTS = "*tfevents*"
_LARGEST_STEP = 2**63
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
    resumes: tuple[int, ...] = ()
    """The steps at which its later fits began: time has passed before each of them."""


def read_runs(folders_or_files: Sequence[str | Path]) -> list[Run]:
    """Returns the runs in these folders or files; raises :class:`ConfigError` if nothing was logged."""
    paths = [Path(path).expanduser() for path in folders_or_files]
    named = zip(_names(paths), paths, strict=True)
    return [Run(name, read_curves(path), _monitors_of(path), _resumes_of(path)) for name, path in named]


def read_run_file(file: Path) -> StateDict:
    """Returns the content of a run.json; empty if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        read = json.loads(file.read_text(encoding="utf-8"))
        return read if isinstance(read, dict) else {}
    return {}


def read_curves(path: Path) -> dict[str, Curve]:
    """Returns the curves that were logged into a folder, or into one log file, by metric name as it can be printed."""
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
    except Exception as error:  # a log may hold anything
        raise ConfigError(f"{path} cannot be read as a log: {str(error) or type(error).__name__}") from error
    raise ConfigError(f"{path} holds no log{_why_no_log(path)}")


def _monitors_of(path: Path) -> tuple[str, ...]:
    """Returns what the ModelCheckpoints of a run monitored; empty without a run.json, which only fits of this package write."""
    content = read_run_file(_folder_of(path) / NAME)
    # Files of earlier versions name only those that had a best value.
    names = content.get("monitors", content.get("best"))
    return tuple(printable(str(name)) for name in names) if isinstance(names, list | dict) else ()


def _resumes_of(path: Path) -> tuple[int, ...]:
    """Returns the steps at which fits in a run's folder began, but for the first one, in order."""
    files = (_folder_of(path) / NAME, *_folder_of(path).glob("run-*.json"))
    begun = [content.get("first_step") for content in map(read_run_file, files)]
    return tuple(sorted({step for step in begun if type(step) is int}))[1:]


def _folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def is_run(folder: Path) -> bool:
    """Returns whether this folder has a log, or the file of a fit or an evaluation."""
    files = (CSV_FILE, JSON_FILE, NAME, *EVALUATIONS.values())
    return any((folder / name).is_file() for name in files) or any(folder.glob(_EVENTS))


def find_runs(folder: Path) -> list[Path]:
    """Returns the run folders in ``folder``, including ``folder`` itself, oldest first."""
    return sorted(_runs_within(folder, _DEPTH), key=lambda path: (_changed(path), str(path)))


def _changed(path: Path) -> float:
    with contextlib.suppress(OSError):  # it may be gone by now
        return path.stat().st_mtime
    return 0.0


def _runs_within(folder: Path, depth: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # a folder without permission to list it has no run of this user
        if is_run(folder):
            yield folder
        for inner in folder.iterdir() if depth else ():
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                yield from _runs_within(inner, depth - 1)


def _why_no_log(path: Path) -> str:
    """Returns why there is no log: a fit logged no value, or else the files and folders that were searched."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        content = read_run_file(path / NAME)
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
    return [printable("/".join(names[common:])) for names in parts]


def _curves(points: Iterator[tuple[str, float, float, float | None]]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for name, step, value, time in points:
        if not abs(step) < _LARGEST_STEP:
            raise ValueError("a step in it is too large, or no number")
        curve = curves.setdefault(printable(name), Curve([], [], []))
        curve.steps.append(int(step))
        curve.values.append(value)
        if time is not None:
            curve.times.append(time)
    return curves


def _from_events(files: Sequence[Path]) -> Iterator[tuple[str, float, float, float | None]]:
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


def _from_table(file: Path) -> Iterator[tuple[str, float, float, float | None]]:
    with file.open(newline="", encoding="utf-8") as text:
        for row in csv.DictReader(text):
            step = float(row.pop("step"))
            for name, value in row.items():
                if name is not None and value:
                    yield name, step, float(value), None


def _from_lines(file: Path) -> Iterator[tuple[str, float, float, float | None]]:
    with file.open(encoding="utf-8") as text:
        for row in map(json.loads, text):
            step = int(row.pop("step"))
            time = row.pop("time", None)
            for name, value in row.items():
                yield name, step, float(value), time
