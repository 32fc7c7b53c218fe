"""Reads the logs of runs: TensorBoard's event files, a CSV file, or JSON lines."""

from __future__ import annotations

import contextlib
import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fabricamp.engine.run_file import NAME
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CSV_FILE, JSON_FILE = "metrics.csv", "metrics.jsonl"
_EVENTS = "*tfevents*"
_DEPTH = 3
"""Depth of the search for runs below the given folder: ``runs/name/version_0``."""


class Curve(NamedTuple):
    """The values of one metric, with their times if the log has them."""

    steps: list[int]
    values: list[float]
    times: list[float]


class Run(NamedTuple):
    """The logged metrics of one run; ``name`` distinguishes the runs of a picture."""

    name: str
    curves: dict[str, Curve]


def read_runs(places: Sequence[str | Path]) -> list[Run]:
    """Returns the runs in these folders or files; raises :class:`ConfigError` if nothing was logged."""
    paths = [Path(place).expanduser() for place in places]
    return [Run(name, read_curves(path)) for name, path in zip(_names(paths), paths, strict=True)]


def read_curves(place: Path) -> dict[str, Curve]:
    """Returns the curves that were logged into a folder, or into one log file, by metric name."""
    if not place.exists():
        raise ConfigError(f"{str(place)!r} is not there; give the folder of a run, such as runs/version_0")
    events = sorted(place.glob(_EVENTS)) if place.is_dir() else [place] if "tfevents" in place.name else []
    files = [place / CSV_FILE, place / JSON_FILE] if place.is_dir() else [place]
    readers = {".csv": _from_table, ".jsonl": _from_lines}
    try:
        if events:
            return _curves(_from_events(events))
        for file in (one for one in files if one.is_file() and one.suffix in readers):
            return _curves(readers[file.suffix](file))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{place} cannot be read as a log: {str(error) or type(error).__name__}") from error
    raise ConfigError(f"{place} holds no log{_why_no_log(place)}")


def is_run(folder: Path) -> bool:
    """Returns whether this folder has a log, or the run.json of a fit."""
    return any((folder / name).is_file() for name in (CSV_FILE, JSON_FILE, NAME)) or any(folder.glob(_EVENTS))


def find_runs(folder: Path) -> list[Path]:
    """Returns the run folders in ``folder``, including ``folder`` itself, oldest first."""
    return sorted(_found(folder, _DEPTH), key=lambda one: (one.stat().st_mtime, str(one)))


def _found(folder: Path, depth: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # a folder that may not be listed has no run of this user
        if is_run(folder):
            yield folder
        for inner in folder.iterdir() if depth else ():
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                yield from _found(inner, depth - 1)


def _why_no_log(place: Path) -> str:
    """Returns why there is no log: a fit logged no value, or else the files and folders that were searched."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((place / NAME).read_text(encoding="utf-8"))
        every, steps = int(content["trainer"]["log_every_n_steps"]), int(content["step"]) - int(content["first_step"])
        return f": its run of {steps} steps logged no value, with log_every_n_steps={every}"
    return f": TensorBoard's events, {CSV_FILE} or {JSON_FILE}{_runs_below(place)}"


def _runs_below(place: Path) -> str:
    found = [one for one in find_runs(place) if one != place] if place.is_dir() else []
    found = [one for one in found if (one / NAME).is_file()] or found  # prefer fits to test and predict runs
    return f"; runs below it: {', '.join(str(one) for one in found[-3:])}" if found else "; give the folder of a run"


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns the paths without their common leading folders."""
    parts = [path.absolute().parts for path in paths]
    common = 0
    while all(len(one) > common + 1 and one[common] == parts[0][common] for one in parts):
        common += 1
    return ["/".join(one[common:]) for one in parts]


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
        for event in (one for file in files for one in read_events(file)):
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                valid = [one for one in valid if one.step < event.step]
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
            step, time = int(row.pop("step")), row.pop("time", None)
            for name, value in row.items():
                yield name, step, float(value), time
