"""Installs the distributions into clean environments and tries them there: ``python tools/matrix.py [CELL ...]``.

A cell is a Python and a torch, "3.11/2.11.0" or "3.12/newest"; without arguments all of ``CELLS`` are tried, each without CuPy and
then with its wheel.  The cell "here" installs the wheel alone, and has everything else from the environment of this interpreter: it
takes a minute, and CI does it for each change.

The sdist is built from the working tree, and the wheel from the sdist.  The environment has the wheel; the tests come from the
sdist, whose package is removed, so that they import what is installed.  uv makes the environments: it links files from its cache in
place of copies, several GB for each torch.  A table is printed; if all cells were tried, it is written to
``benchmarks/results/matrix.md``.  A Python that this machine lacks is named in the table.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "matrix.md"
UV = Path(sys.executable).with_name("uv")
OLDEST = "3.11/2.11.0"
CELLS = (OLDEST, "3.11/newest", "3.12/newest", "3.13/newest", "3.14/newest")
CUPY = "cuda13"
"""The extra that brings CuPy: PyPI's torch for Linux is built for CUDA 13."""

TOOLS = ("pytest>=8.2", "pytest-timeout>=2.3", "hypothesis>=6.100", "psutil>=5.9")
TESTS = (
    "tests/test_torch_private.py",  # each private name of torch that is used is there
    "tests/test_rng.py",
    "tests/precision/test_loss_scaler.py",
    "tests/trainer/test_resume.py",
    "tests/examples/test_digits.py::test_the_config_trains_tests_and_predicts",
)
OF_FILES = (
    "tests/precision/test_loss_scaler.py",
    "tests/examples/test_digits.py::test_the_config_trains_tests_and_predicts",
)
"""The tests of the cell "here": its Python and torch are those of the suite, so only files of the package may be missing."""
IMPORTS = """
import importlib, pathlib, pkgutil, sys
import fabricamp
assert pathlib.Path(fabricamp.__file__).is_relative_to(sys.prefix), fabricamp.__file__
optional = {"cupy", "lightning", "matplotlib", "optuna", "torchft", "wandb", "mlflow", "comet_ml"}
count = 0
for module in pkgutil.walk_packages(fabricamp.__path__, "fabricamp."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in optional:
            raise
    count += 1
print(count, "modules")
"""
VERSIONS = """
import importlib.metadata as metadata, platform
found = {one.metadata["Name"]: one.version for one in metadata.distributions()}
cupy = [name for name in found if name.startswith("cupy")]
print(platform.python_version(), found["torch"], *(f"{one} {found[one]}" for one in cupy))
"""


def call(words: list[str], folder: Path, minutes: float = 30) -> str:
    """Returns what a command prints; raises CalledProcessError, after its output, if it fails."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | hidden
    done = subprocess.run(  # noqa: S603
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60 * minutes, check=False
    )
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", flush=True)
        done.check_returncode()
    return done.stdout


def distributions(folder: Path) -> tuple[Path, Path]:
    """Builds the sdist, and the wheel from it; returns the wheel, and a folder with the sdist's tests and no package."""
    call([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)], folder)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (tree,) = (folder / "sdist").iterdir()
    shutil.rmtree(tree / "fabricamp")
    return wheel, tree


def interpreter(version: str) -> str | None:
    """Returns the path of a Python of ``version``, None if this machine has none."""
    # pyenv's own commands start the selected version alone: its other versions are found where they are installed.
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    folders = [*map(str, sorted(pyenv.glob("*/bin"))), os.environ.get("PATH", "")]
    # Never a download: what the machine has is what is tried.
    words = [str(UV), "python", "find", "--no-python-downloads", "--no-project", "--system", version]
    environment = {**os.environ, "PATH": os.pathsep.join(folders)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() if done.returncode == 0 else None


def here(wheel: Path, tree: Path, folder: Path) -> list[tuple[str, str, str, float]]:
    """Returns the row of the wheel in an environment that has its other packages from this one."""
    start = time.monotonic()
    place = folder / "here"
    python = place / "bin" / "python"
    call([sys.executable, "-m", "venv", "--without-pip", str(place)], folder)
    (site,) = place.glob("lib/python*/site-packages")
    # A path in a .pth file stands behind the environment's own packages, and its .pth files are not read: an editable fabricamp
    # there is not found.
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    call([str(UV), "pip", "install", "-q", "--no-deps", "--python", str(python), str(wheel)], folder)
    installed = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    try:
        result = tried(python, tree, OF_FILES)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        result = f"FAILED: {' '.join(map(str, error.cmd))[:60]}"
    return [(installed, "as it is here", result, time.monotonic() - start)]


def tried(python: Path, tree: Path, tests: tuple[str, ...]) -> str:
    """Imports all modules and runs ``tests`` with an interpreter; returns what came out."""
    imported = call([str(python), "-c", IMPORTS], tree.parent).strip()
    doctor = call([str(python.with_name("fabricamp")), "--help"], tree.parent)
    assert doctor, "fabricamp --help printed nothing"
    printed = call([str(python), "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *tests], tree)
    return f"{imported}; {re.sub(r' in .*', '', printed.strip().splitlines()[-1]).strip('= ')}"


def cell(name: str, wheel: Path, tree: Path, folder: Path) -> list[tuple[str, str, str, float]]:
    """Returns rows (what is installed, CuPy or not, result, seconds) of one Python and one torch."""
    version, _, torch = name.partition("/")
    found = interpreter(version)
    if found is None:
        return [(f"Python {version}, torch {torch}", "", "this machine has no such Python", 0.0)]
    place = folder / name.replace("/", "-")
    python = place / "bin" / "python"
    torch_needed = "torch" if torch == "newest" else f"torch=={torch}"
    rows = []
    start = time.monotonic()
    installed = f"Python {version}, torch {torch}"
    for extra in ("examples", f"examples,{CUPY}"):
        with_cupy = "without" if extra == "examples" else "with its wheel"
        try:
            if not place.exists():
                call([str(UV), "venv", "-q", "--no-project", "--python", found, str(place)], folder)
            needed = [torch_needed, f"fabricamp[{extra}] @ {wheel.as_uri()}", *TOOLS]
            call([str(UV), "pip", "install", "-q", "--python", str(python), *needed], folder, minutes=60)
            python_is, torch_is, *cupy_is = call([str(python), "-c", VERSIONS], folder).split()
            installed = f"Python {python_is}, torch {torch_is}"
            with_cupy = " ".join(cupy_is) or "without"
            result = tried(python, tree, TESTS)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            result = f"FAILED: {' '.join(map(str, error.cmd))[:60]}"
        rows.append((installed, with_cupy, result, time.monotonic() - start))
        start = time.monotonic()
    shutil.rmtree(place, ignore_errors=True)
    return rows


def table(rows: list[tuple[str, str, str, float]]) -> str:
    """Returns the rows as Markdown."""
    head = ["| installed | CuPy | result | seconds |", "|---|---|---|---|"]
    return "\n".join(head + [f"| {what} | {cupy} | {out} | {seconds:.0f} |" for what, cupy, out, seconds in rows])


def main() -> None:
    """Tries the cells that are named, or all."""
    if not UV.exists():
        raise SystemExit(f"uv is not installed beside {sys.executable}; `make setup` installs it")
    names = sys.argv[1:] or list(CELLS)
    rows = []
    with tempfile.TemporaryDirectory(prefix="fabricamp-matrix-", dir=os.environ.get("TMPDIR")) as temporary:
        folder = Path(temporary)
        wheel, tree = distributions(folder)
        print(f"built {wheel.name} from the sdist", flush=True)
        for name in names:
            new = here(wheel, tree, folder) if name == "here" else cell(name, wheel, tree, folder)
            print(table(new), flush=True)
            rows += new
    text = table(rows)
    if len(names) > 1:
        print(f"\n{text}")
    if names == list(CELLS):
        tests = "\n".join(f"- `{one}`" for one in TESTS)
        RESULT.write_text(
            "# Pythons, torches, CuPy\n\nWritten by `make matrix`: the wheel, built from the sdist, in clean environments.\nEach "
            "imports all modules, calls `fabricamp --help`, and runs these tests of the sdist on the installed package:\n\n"
            f"{tests}\n\n{text}\n\n{platform.system()} {platform.machine()}, no GPU, {datetime.now(UTC):%Y-%m-%d}. "
            "Seconds are those of the installation and the tests.\n"
        )
        print(f"\nwritten: {RESULT.relative_to(ROOT)}")
    if any(result.startswith("FAILED") for _, _, result, _ in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
