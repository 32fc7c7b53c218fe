"""Runs each example whole by the command in its row of the gallery: ``python tools/run_examples.py [NAME ...]``.

It ends with a table of name, seconds by the clock and of the processor, and "ok" or the file that has what the example printed; its
exit status is 1 if one failed.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "runs" / "examples"
LONGEST = 1800
"""Seconds after which an example is ended: they take two minutes at most where the processor is theirs."""


def commands(gallery: str) -> dict[str, str]:
    """Returns the command of each example, by name, from the text of the gallery."""
    rows = re.findall(r"^\|[^|]*\| \[(\w+)\]\(\w+/README\.md\) \|.*\| `([^`]+)` \|$", gallery, re.MULTILINE)
    return dict(rows)


def processor_seconds() -> float:
    """Returns the seconds that ended child processes have computed, which do not depend on what else runs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(name: str, command: str) -> tuple[float, float, str]:
    """Runs a command in the repository's root; returns its seconds, those of the processor, and "ok" or what went wrong."""
    log = LOGS / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # Bars are for terminals: a file gets plain lines.
    with log.open("w") as file:
        start = time.monotonic()
        computed = processor_seconds()
        outcome = "ok"
        try:
            status = subprocess.run(  # noqa: S602 - the gallery's commands set variables, as a shell reads them
                command, shell=True, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=LONGEST, check=False
            ).returncode
            if status != 0:
                outcome = f"exit status {status}: {log.relative_to(ROOT)}"
        except subprocess.TimeoutExpired:
            outcome = f"ended after {LONGEST} s: {log.relative_to(ROOT)}"
    return time.monotonic() - start, processor_seconds() - computed, outcome


def main() -> None:
    """Runs the examples that are named, or all."""
    known = commands((ROOT / "examples" / "README.md").read_text())
    names = sys.argv[1:] or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no example is named {', '.join(unknown)}; the gallery has {', '.join(known)}")
    results = []
    for name in names:
        print(f"{name}: {known[name]}", flush=True)
        results.append((name, *run(name, known[name])))
    threads = os.environ.get("OMP_NUM_THREADS", "torch's own number of")
    print(f"\n{len(os.sched_getaffinity(0))} cores, {threads} threads a process\n")
    print(f"{'example':<16}{'seconds':>8}{'processor':>11}  result")
    for name, seconds, computed, result in results:
        print(f"{name:<16}{seconds:>8.0f}{computed:>11.0f}  {result}")
    if any(result != "ok" for *_, result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
