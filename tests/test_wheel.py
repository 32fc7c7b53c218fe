"""`pip install .`: the wheel's content, and a package that works outside its folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.shared import once, shared_folder
from tools import matrix

ROOT = Path(__file__).parents[1]
PARTS = ("fabricamp", "fabricamp-stubs", "docs", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def python(*words, **options):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds the wheel from a copy of the sources, because a build leaves folders behind."""
    folder = shared_folder(tmp_path_factory, "wheel")

    def build():
        for name in PARTS:
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored) if source.is_dir() else shutil.copy(source, folder)
        # A header as kernels may have one: package data has to include it.
        (folder / "fabricamp" / "ops" / "kernels").mkdir(exist_ok=True)
        (folder / "fabricamp" / "ops" / "kernels" / "probe.cuh").write_text("// probe\n")
        (folder / "fabricamp" / "ops" / "kernels" / "probe.cu").write_text("// probe\n")
        python("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder / "dist"), str(folder))
        (found,) = (folder / "dist").glob("*.whl")
        return found

    return once(folder, build)


def test_the_wheel_holds_every_source_and_only_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {
        str(file.relative_to(ROOT))
        for pattern in ("*.py", "*.cu", "*.cuh", "*.toml", "dispatch.json", "py.typed")
        for file in (ROOT / "fabricamp").rglob(pattern)
    }
    assert sources <= names
    assert {"fabricamp/ops/kernels/probe.cu", "fabricamp/ops/kernels/probe.cuh", "fabricamp/py.typed"} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"fabricamp", "fabricamp-stubs"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_describes_itself(wheel):
    with zipfile.ZipFile(wheel) as archive:
        # The METADATA files below fabricamp/lightning belong to the alias of Lightning's distributions.
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA") and one.count("/") == 1)
        metadata = archive.read(name).decode()
        (name,) = (one for one in archive.namelist() if one.endswith("entry_points.txt"))
        scripts = archive.read(name).decode()
    head, _, description = metadata.partition("\n\n")
    assert "Author: The fabricamp authors" in head
    assert "Description-Content-Type: text/markdown" in head
    assert description.startswith("# fabricamp\n")
    # A link within a clone would lead nowhere on an index; its page is in the wheel.
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", description) == []
    # Nor is there anything that only a clone has: its files, its goals of make, the picture above the table.
    words = r"<!--|\bmake\b|\.venv|[Pp]icture|clone|\b(?:examples|benchmarks|tests)/|[A-Z]\.md\b"
    assert re.findall(words, description) == []
    assert "    fabricamp fit config.yaml trainer.max_epochs=5" in description
    topics = set(re.findall(r"`fabricamp help ([\w-]+)`", description))
    assert {"tutorial", "performance", "fp8"} <= topics
    with zipfile.ZipFile(wheel) as archive:
        pages = {Path(one).stem for one in archive.namelist() if one.startswith("fabricamp/pages/")}
    assert topics <= pages
    assert "License-Expression: Apache-2.0" in metadata
    assert "Provides-Extra: cuda13" in metadata
    assert "Requires-Dist: torch>=2.11" in metadata
    assert "fabricamp = fabricamp.cli:main" in scripts


def test_it_works_where_it_is_installed(wheel, tmp_path):
    python("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import fabricamp.config, fabricamp; print(fabricamp.__file__, fabricamp.Trainer)"
    assert str(tmp_path / "site") in python("-c", code, env=environment, cwd=tmp_path)
    page = python("-m", "fabricamp", "help", "slow-data", env=environment, cwd=tmp_path)
    assert page.startswith("# Slow data\n")
    assert "`fabricamp help data`" in page
    listed = python("-m", "fabricamp", "help", env=environment, cwd=tmp_path)
    assert listed.splitlines()[2:4] == ["Start here", "  tutorial         Tutorial: fifteen minutes"]


def test_a_python_that_a_machine_lacks_is_named(wheel, tmp_path):
    pytest.importorskip("uv", reason="needs the package uv")
    assert Path(matrix.interpreter(f"{sys.version_info.major}.{sys.version_info.minor}")).exists()
    (row,) = matrix.cell("3.99/newest", wheel, tmp_path, tmp_path)
    assert row[:3] == ("Python 3.99, torch newest", "", "this machine has no such Python")
    assert "| Python 3.99, torch newest |  | this machine has no such Python | 0 |" in matrix.table([row])
