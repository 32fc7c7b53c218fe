"""Runs each library's script under Lightning and under fabricamp's alias, and compares logged values, weights and predictions.

    python tests/libraries/run.py [LIBRARY ...] [--write] [--built]

Each library has a script (train_*.py) and a separate environment with the versions of requirements/*.txt. torch, Lightning and
packages that many libraries share are in a base environment, which follows the environment's own packages on the path; fabricamp
is this tree. Environments are kept in $FABRICAMP_LIBRARIES or ~/.cache/fabricamp-libraries; building all takes an hour on 2 cores.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from compare import SAME, compared

HERE = Path(__file__).parent
TREE = HERE.parents[1]
PLACE = Path(os.environ.get("FABRICAMP_LIBRARIES") or Path.home() / ".cache" / "fabricamp-libraries")
PAGE = TREE / "docs" / "from-lightning.md"
LIBRARIES = sorted(path.stem.removeprefix("train_").replace("_", "-") for path in HERE.glob("train_*.py"))
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
HEAD = "| library | version | runs | agrees | largest difference | since |\n|---|---|---|---|---|---|\n"
ROW = re.compile(r"^\| ([\w.-]+) \|[^|]*\| (yes|no) \| (yes|no) \|[^|]*\| *([^|]*?) *\|$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Libraries built on Lightning, trained under Lightning and under fabricamp."
    )
    parser.add_argument(
        "names", nargs="*", metavar="LIBRARY", help=f"all of them where none is named: {', '.join(LIBRARIES)}"
    )
    parser.add_argument("--built", action="store_true", help="only those whose environment is there")
    parser.add_argument("--write", action="store_true", help="write the rows into docs/from-lightning.md")
    given = parser.parse_args()
    unknown = set(given.names) - set(LIBRARIES)
    if unknown:
        parser.error(f"no script for {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    before = {name: (runs, agrees, since) for name, runs, agrees, since in ROW.findall(PAGE.read_text())}
    rows = {}
    worse = []
    for name in given.names or LIBRARIES:
        if given.built and not is_built(name):
            print(f"{name}: no environment in {PLACE}: left out", flush=True)
            continue
        runs, agrees, difference, took = outcome(name, build(name))
        was_running, was_agreeing, since = before.get(name, ("no", "no", ""))
        if not agrees or was_agreeing == "no":
            since = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]["version"] if agrees else ""
        if (was_running, was_agreeing) > (yes(runs), yes(agrees)):
            worse.append(name)
        rows[name] = f"| {name} | {version(name)} | {yes(runs)} | {yes(agrees)} | {difference} | {since} |"
        print(f"{rows[name]} {took:.0f} s", flush=True)
    print("\n" + HEAD + "\n".join(rows.values()))
    if given.write:
        write(rows)
    agreeing = sum(" | yes | yes | " in row for row in rows.values())
    print(f"\n{len(rows)} libraries: {agreeing} run and agree within {SAME:g}")
    if worse:
        print(f"worse than {PAGE.name} says: {', '.join(worse)}")
    return bool(worse)


def yes(value: bool) -> str:
    return "yes" if value else "no"


def version(name: str) -> str:
    """Returns the library's version from its requirements."""
    lines = (HERE / "requirements" / f"{name}.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.partition("==")[0].lower().replace("_", "-") == name)


def build(name: str) -> Path:
    """Returns the environment's Python; builds the environment if it is missing or its requirements have changed."""
    folder = PLACE / name
    if is_built(name) and (name == "base" or is_built("base")):
        return folder / "bin" / "python"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = build("base") if name != "base" else None
    subprocess.run([sys.executable, "-m", "venv", *(["--without-pip"] if base else []), "--clear", folder], check=True)
    if base:
        # After the environment's own packages, so that a version in its requirements takes precedence.
        packages = Path("lib", python, "site-packages")
        (folder / packages / "base.pth").write_text(f"{PLACE / 'base' / packages}\n")
    pip = [
        base or folder / "bin" / "python",
        "-m",
        "pip",
        "--python",
        folder / "bin" / "python",
        "--disable-pip-version-check",
    ]
    requirements = HERE / "requirements" / f"{name}.txt"
    # --no-deps: the files list all dependencies, and some libraries work with versions outside of their own limits.
    command = [*pip, "install", "-q", "--no-deps", "-r", requirements]
    if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode != 0:
        subprocess.run([*command, "--extra-index-url", CPU_BUILDS], check=True)
    stamp(name).write_text(digest(name))
    return folder / "bin" / "python"


def stamp(name: str) -> Path:
    return PLACE / name / "requirements.sha256"


def digest(name: str) -> str:
    return hashlib.sha256((HERE / "requirements" / f"{name}.txt").read_bytes()).hexdigest()


def is_built(name: str) -> bool:
    return stamp(name).exists() and stamp(name).read_text() == digest(name)


def outcome(name: str, python: Path) -> tuple[bool, bool, str, float]:
    """Returns whether the script runs under the alias and agrees with Lightning, the difference as text, and the seconds."""
    began = time.monotonic()
    script = HERE / f"train_{name.replace('-', '_')}.py"
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, package) for package in ("lightning", "fabricamp")]
        for folder, launcher in zip(folders, ([], ["-m", "fabricamp.lightning"]), strict=True):
            error = trained(folder, [python, *launcher, script], with_tree=bool(launcher))
            if error and launcher:
                return False, False, error, time.monotonic() - began
            if error:
                raise SystemExit(f"{name} does not run under Lightning itself: {error}")
        difference = compared(*folders)
    agrees = difference.largest <= SAME
    if not agrees:
        print(
            f"  {name}: {difference.over} of {difference.numbers} numbers differ, the most {difference.where}",
            flush=True,
        )
    return True, agrees, words(difference), time.monotonic() - began


def trained(folder: Path, command: list[str | Path], *, with_tree: bool) -> str:
    """Trains, and predicts in a second process; returns the last line of the error, or an empty text."""
    folder.mkdir()
    paths = [str(TREE)] if with_tree else []
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "FABRICAMP_", "PYTHON"))}
    variables = kept | {
        "PYTHONPATH": os.pathsep.join([*paths, str(HERE)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "agg",
    }
    for stage in ("fit", "predict"):
        ran = subprocess.run(
            [*command, stage], cwd=folder, env=variables, capture_output=True, text=True, timeout=600, check=False
        )
        if ran.returncode != 0:
            return f"{stage}: {(ran.stderr.strip() or ran.stdout.strip()).splitlines()[-1]}".replace("|", "/")
    return ""


def words(difference) -> str:
    """Returns the largest difference as text for the table."""
    if difference.largest == 0:
        return f"none in {difference.numbers} values"
    if math.isinf(difference.largest):
        return "values are missing, or others are there"
    return f"{difference.largest:.0e} in {difference.numbers} values"


def write(rows: dict[str, str]) -> None:
    """Replaces the rows of these libraries in the page."""
    text = PAGE.read_text()
    for name, row in rows.items():
        cells = rf"^\| {re.escape(name)} \|[^|]*\| (?:yes|no) \| (?:yes|no) \|.*$"
        text, count = re.subn(cells, lambda _, row=row: row, text, flags=re.MULTILINE)
        if count != 1:
            raise SystemExit(f"{PAGE} has {count} rows of {name} with yes or no; it needs one")
    PAGE.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
