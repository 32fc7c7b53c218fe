"""The environment of a run: revision and changes of its code, installed packages, the machine."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

_SECONDS = 5.0
"""How long git may take for an answer."""
_MOST_BYTES = 1_000_000
_MOST_LINES = 5_000
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
_STATUS = ("status", "--porcelain", "--untracked-files=normal")


def code_of(module: object) -> dict[str, Any]:
    """Returns revision, changed files and diff of the repository of the module's class, or else of the current folder."""
    try:
        folders = [str(Path(inspect.getfile(type(module))).resolve().parent), str(Path.cwd())]
    except (TypeError, OSError):  # a class defined in a notebook, or a deleted folder
        folders = [os.curdir]
    return next(filter(None, map(_repository, folders)), {})


@functools.cache
def packages() -> dict[str, str]:
    """Returns the version of every installed package, from the names of the metadata folders; torch's with its build."""
    versions = {}
    for folder in map(Path, reversed(sys.path)):  # Python imports from the first one
        if folder.is_dir():
            entries = (entry.name.removesuffix(".dist-info").partition("-") for entry in folder.glob("*.dist-info"))
            versions.update({name: version for name, dash, version in entries if dash})
    versions["torch"] = torch.__version__
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def machine(device: torch.device) -> dict[str, Any]:
    """Returns the machine's name and hardware; asks for GPUs only if the run is on one."""
    system = os.uname()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    description: dict[str, Any] = {
        "host": system.nodename,
        "system": f"{system.sysname} {system.release} {system.machine}",
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
    }
    if device.type == "cuda":
        cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        description["gpus"] = [f"{card.name}, {card.total_memory / 2**30:.0f} GiB" for card in cards]
        description["cuda"] = torch.version.cuda
    return description


@functools.cache
def _repository(folder: str) -> dict[str, Any]:
    """Returns the state of the repository; cached, since a process runs the code as it was at the import."""
    git = shutil.which("git")
    lines = _git_output(git, folder, "rev-parse", "--show-toplevel", "HEAD") if git else []
    if not git or not lines:
        return {}
    top = lines[0]
    revision = lines[1]
    status = _git_output(git, top, *_STATUS)
    changed = any(not line.startswith("??") for line in status)
    return {
        "folder": top,
        "revision": revision,
        "status": status,
        "diff": _git_output(git, top, *_DIFF) if changed else [],
    }


def _git_output(git: str, folder: str, *words: str) -> list[str]:
    """Returns the lines that git prints; none if it fails; if the output is cut off, the first lines and a line that says why.

    Output is cut off after ``_SECONDS``, ``_MOST_BYTES`` or ``_MOST_LINES``.
    """
    command = [git, "-c", "core.fsmonitor=false", "-C", folder, *words]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, **options) as process:  # noqa: S603
        started = time.monotonic()
        timer = threading.Timer(_SECONDS, process.kill)
        try:
            timer.start()
        except RuntimeError:  # no thread can be started, and git may take for ever
            process.kill()
            return []
        try:
            assert process.stdout is not None
            content = process.stdout.read(_MOST_BYTES + 1)
            cut = len(content) > _MOST_BYTES
            if cut:
                process.kill()
        finally:
            timer.cancel()
    late = bool(process.returncode) and time.monotonic() - started >= _SECONDS
    if process.returncode and not cut and not late:
        return []
    lines: list[str] = content.decode(errors="replace").splitlines()
    if cut or late or len(lines) > _MOST_LINES:
        lines = lines[:_MOST_LINES]
        why = f"git took more than {_SECONDS:g} s" if late else f"the first {len(lines)} lines are kept"
        lines.append(f"... cut here by fabricamp: {why}")
    return lines


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")
