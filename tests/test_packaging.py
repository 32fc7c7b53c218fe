"""`pip install .`: the wheel's content, and a package that works outside its folder and imports little."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import fabricamp
from tools import release

ROOT = Path(__file__).parents[1]
PARTS = ("fabricamp", "pyproject.toml", "README.md", "LICENSE")


def python(*words, **options):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds the wheel from a copy of the sources, because a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
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


def test_the_wheel_holds_every_source_and_only_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {
        str(file.relative_to(ROOT))
        for pattern in ("*.py", "*.cu", "*.cuh", "dispatch.json", "py.typed")
        for file in (ROOT / "fabricamp").rglob(pattern)
    }
    assert sources <= names
    assert {"fabricamp/ops/kernels/probe.cu", "fabricamp/ops/kernels/probe.cuh", "fabricamp/py.typed"} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"fabricamp"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_describes_itself(wheel):
    with zipfile.ZipFile(wheel) as archive:
        # The METADATA files below fabricamp/lightning belong to the alias of Lightning's distributions.
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA") and one.count("/") == 1)
        metadata = archive.read(name).decode()
        (name,) = (one for one in archive.namelist() if one.endswith("entry_points.txt"))
        scripts = archive.read(name).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Provides-Extra: cuda13" in metadata
    assert "Requires-Dist: torch>=2.11" in metadata
    assert "fabricamp = fabricamp.cli:main" in scripts


def test_it_works_where_it_is_installed(wheel, tmp_path):
    python("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import fabricamp.config, fabricamp; print(fabricamp.__file__, fabricamp.Trainer)"
    assert str(tmp_path / "site") in python("-c", code, env=environment, cwd=tmp_path)


FRESH = """
import json, sys
import fabricamp as pl
found = {"torch": "torch" in sys.modules}
found["shown"] = {"callbacks", "loggers", "utilities", "Trainer", "LightningModule"} <= set(dir(pl))
import torch
before = set(sys.modules)
pl.callbacks.ModelCheckpoint, pl.loggers.CSVLogger, pl.utilities.rank_zero_only, pl.strategies.DDP, pl.LightningModule
import fabricamp.checkpoint, fabricamp.loggers.mlflow, fabricamp.loggers.wandb, fabricamp.metrics, fabricamp.precision
pl.Trainer, pl.DDP, fabricamp.checkpoint.plain({"a": 1})
with fabricamp.rng.deterministic_mode(False):  # around every run
    pass
found["brought"] = sorted(set(sys.modules) - before)
sys.modules |= {"mlflow": None, "wandb": None}
for kind in (fabricamp.loggers.mlflow.MLFlowLogger, fabricamp.loggers.wandb.WandbLogger):
    try:
        kind()
    except (ModuleNotFoundError, ValueError) as error:
        found[kind.__name__] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def test_importing_brings_nothing_heavy_and_missing_extras_are_named():
    found = json.loads(python("-c", FRESH))
    assert not found["torch"]
    assert found["shown"]
    assert "torch._dynamo" not in found["brought"]
    heavy = {"rich", "tensorboard", "omegaconf", "cupy", "torchmetrics", "sklearn", "scipy", "matplotlib", "yaml"}
    heavy |= {"mlflow", "wandb"}
    assert not {name.partition(".")[0] for name in found["brought"]} & heavy
    assert found["MLFlowLogger"] == (
        'ModuleNotFoundError: MLFlowLogger needs MLflow, which is not installed: pip install "fabricamp[mlflow]"'
    )
    assert 'pip install "fabricamp[wandb]"' in found["WandbLogger"]


def test_the_license_is_the_whole_apache_license():
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_a_trainer_does_not_import_what_only_sharded_runs_need():
    """The import of torch's distributed checkpoint takes a second."""
    code = "import sys; from fabricamp import Trainer; print([one for one in sys.modules if 'distributed' in one])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch.distributed.checkpoint" not in done.stdout
    assert "torch.distributed.tensor" not in done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Returns the names in the source distribution, built from tracked and new files, and the files that git tracks."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs the git repository")
    folder = tmp_path_factory.mktemp("sdist")
    tracked, new = (
        subprocess.run(
            ["git", "ls-files", *options], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        for options in ((), ("--others", "--exclude-standard"))
    )
    for name in (*tracked, *new):
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    build = (
        "import os, sys; from setuptools import build_meta; os.chdir(sys.argv[1]); build_meta.build_sdist(sys.argv[2])"
    )
    python("-c", build, str(folder / "tree"), str(folder / "dist"))
    (found,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    return names, set(tracked), set(new)


def test_the_source_distribution_is_what_a_clone_is(sdist):
    names, tracked, new = sdist
    missing = {name for name in tracked - names if not name.startswith((".ci", ".github", ".gitignore"))}
    assert not missing
    generated = {name for name in names - tracked - new if not name.startswith("fabricamp.egg-info")}
    folders = {str(parent) for name in tracked | new for parent in Path(name).parents}
    assert generated - folders <= {"", "PKG-INFO", "setup.cfg"}


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert fabricamp.__version__ == project
    assert f"version: {project}" in (ROOT / "CITATION.cff").read_text()


def test_a_release_without_an_address_is_refused():
    done = subprocess.run([sys.executable, "tools/release.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "set address, authors, contact in [tool.fabricamp.release] of pyproject.toml first; nothing was built\n"
    )


def test_a_release_has_links_to_its_address_and_its_authors():
    text = "[a](docs/a.md#b) ![picture](docs/p.svg) [c](https://c.org) [d](#d)"
    absolute = release.with_absolute_links(text, "https://host/project/", "1.2")
    assert absolute == (
        "[a](https://host/project/blob/v1.2/docs/a.md#b) ![picture](https://host/project/raw/v1.2/docs/p.svg) "
        "[c](https://c.org) [d](#d)"
    )
    found = {"address": "https://host/project", "authors": ["Ann B <ann@host>", "Carl"], "contact": "safe@host"}
    project = tomllib.loads(release.with_metadata((ROOT / "pyproject.toml").read_text(), found))["project"]
    assert project["authors"] == [{"name": "Ann B", "email": "ann@host"}, {"name": "Carl"}]
    assert project["maintainers"] == [{"name": "contact", "email": "safe@host"}]
    assert project["urls"]["Issues"] == "https://host/project/issues"
    assert release.variables('[tool.fabricamp.release]\naddress = "https://host"\n') == {"address": "https://host"}
