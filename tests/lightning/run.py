"""Runs the programs of this folder with a package's name in place of Lightning's.

As a script: ``python tests/lightning/run.py PROGRAM [PACKAGE]`` prints what the program prints.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in (HERE / "programs").glob("*.py"))
STARTS_PROCESSES = {"ddp_strategy"}

_LIGHTNING = re.compile(
    r"\b(lightning\.pytorch|pytorch_lightning)\b|(?<=import )lightning\b(?= as )|(?<=from )lightning\b(?= import )"
)
_TRAINER = re.compile(r"(?<![\w.])(?:(?:pl|L)\.)?Trainer\(")
_TRAINERS_PATH = "lightning.pytorch.trainer.Trainer"
LIGHTNINGS_OBJECTS = "Lightning's objects in fabricamp's Trainer"
_LAST_PRINTED = 1.01e-8
_DECIMAL = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


def source(name: str, package: str) -> str:
    """Returns the program's text with ``package`` in place of Lightning's name and no other change.

    :data:`LIGHTNINGS_OBJECTS` changes only the calls of the Trainer: module, data and callbacks stay Lightning's.
    """
    text = (HERE / "programs" / f"{name}.py").read_text()
    if package != LIGHTNINGS_OBJECTS:
        return _LIGHTNING.sub(package, text)
    return _TRAINER.sub('__import__("fabricamp").Trainer(', text.replace(_TRAINERS_PATH, "fabricamp.Trainer"))


def printed(name: str, package: str) -> str:
    """Runs the program in the current folder; returns its own output without bars and tables."""
    script = Path(f"{name}.py")
    script.write_text(source(name, package))
    if name in STARTS_PROCESSES:
        command = [sys.executable, str(script)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=200).stdout
    lines = io.StringIO()

    def show(*values: object) -> None:
        print(*values, file=lines)

    with (
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", [str(script)]),
        contextlib.redirect_stdout(io.StringIO()),
        logging_kept(),
    ):
        runpy.run_path(str(script), {"print": show}, "__main__")
    return lines.getvalue()


@contextlib.contextmanager
def logging_kept() -> Iterator[None]:
    """Restores the loggers for later tests of the process, because hydra disables existing ones."""
    root, loggers = logging.getLogger(), logging.Logger.manager.loggerDict
    before = {name: one.disabled for name, one in loggers.items() if isinstance(one, logging.Logger)}
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        for name, disabled in before.items():
            logging.getLogger(name).disabled = disabled


def recorded(name: str) -> str:
    """Returns Lightning's output; the first line of the file has the version and the command that records it."""
    return (HERE / "printed" / f"{name}.txt").read_text().partition("\n")[2]


def nearly(text: str, other: str, relative: float) -> bool:
    """Returns whether two texts are equal, except that decimal numbers may differ by ``relative`` or in the eighth digit."""
    if _DECIMAL.sub("#", text) != _DECIMAL.sub("#", other):
        return False
    pairs = zip(map(float, _DECIMAL.findall(text)), map(float, _DECIMAL.findall(other)), strict=True)
    return all(abs(one - two) <= max(relative * max(abs(one), abs(two)), _LAST_PRINTED) for one, two in pairs)


if __name__ == "__main__":
    sys.stdout.write(printed(sys.argv[1], *sys.argv[2:] or ["fabricamp"]))
