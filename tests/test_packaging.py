"""What is distributed: a source distribution as a clone is, versions and releases; and a package that imports little."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import fabricamp
from tools import matrix, release

ROOT = Path(__file__).parents[1]


def python(*words, **options):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FRESH = """
import json, sys
import fabricamp as pl
found = {"torch": "torch" in sys.modules}
found["shown"] = {"callbacks", "loggers", "utilities", "Trainer", "LightningModule"} <= set(dir(pl))
import torch
before = set(sys.modules)
pl.Trainer
found["with a Trainer"] = [one for one in sys.modules if "distributed" in one]
pl.callbacks.ModelCheckpoint, pl.loggers.CSVLogger, pl.utilities.rank_zero_only, pl.strategies.DDP, pl.LightningModule
import fabricamp.checkpoint, fabricamp.loggers.mlflow, fabricamp.loggers.wandb, fabricamp.metrics, fabricamp.precision
pl.DDP, fabricamp.checkpoint.plain({"a": 1})
with fabricamp.rng.deterministic_mode(False):  # around every run
    pass
pl.Trainer(accelerator="cpu", logger=False).fit_loop.epoch_loop
found["brought"] = sorted(set(sys.modules) - before)
sys.modules |= {"mlflow": None, "wandb": None}
for kind in (fabricamp.loggers.mlflow.MLFlowLogger, fabricamp.loggers.wandb.WandbLogger):
    try:
        kind()
    except (ModuleNotFoundError, ValueError) as error:
        found[kind.__name__] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fresh():
    """Returns what a new interpreter finds while it imports."""
    return json.loads(python("-c", FRESH))


def test_importing_brings_nothing_heavy_and_missing_extras_are_named(fresh):
    found = fresh
    assert not found["torch"]
    assert found["shown"]
    assert "torch._dynamo" not in found["brought"]
    assert "fabricamp.lightning.private_attributes" not in found["brought"], "of Lightning, which few programs read"
    heavy = {"rich", "tensorboard", "omegaconf", "cupy", "torchmetrics", "sklearn", "scipy", "matplotlib", "yaml"}
    heavy |= {"mlflow", "wandb"}
    assert not {name.partition(".")[0] for name in found["brought"]} & heavy
    assert found["MLFlowLogger"] == (
        "NotInstalledError: MLFlowLogger needs MLflow, which is not installed: pip install mlflow-skinny"
    )
    assert "pip install wandb" in found["WandbLogger"]


def test_a_trainer_does_not_import_what_only_sharded_runs_need(fresh):
    """The import of torch's distributed checkpoint takes a second."""
    assert "torch.distributed" in fresh["with a Trainer"]
    assert "torch.distributed.checkpoint" not in fresh["with a Trainer"]
    assert "torch.distributed.tensor" not in fresh["with a Trainer"]


def test_the_license_is_the_whole_apache_license():
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


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
    assert project["urls"] == {
        "Homepage": "https://host/project",
        "Documentation": "https://host/project/blob/main/docs/index.md",
        "Source": "https://host/project",
        "Changelog": "https://host/project/blob/main/CHANGELOG.md",
        "Issues": "https://host/project/issues",
    }
    assert release.variables('[tool.fabricamp.release]\naddress = "https://host"\n') == {"address": "https://host"}


def test_the_oldest_corner_is_what_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python, torch = matrix.OLDEST.split("/")
    assert project["requires-python"] == f">={python}"
    assert f"torch>={torch.removesuffix('.0')}" in project["dependencies"]


def test_the_tests_of_an_installed_wheel_are_there():
    assert [one for one in matrix.TESTS if not (ROOT / one.partition("::")[0]).is_file()] == []
    named = [one.split("::") for one in matrix.TESTS if "::" in one]
    assert all(f"def {test}(" in (ROOT / file).read_text() for file, test in named)


def test_hints_name_packages_that_an_index_has():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].values()
    known = {re.match(r"[\w-]+", requirement)[0] for extra in extras for requirement in extra} | {"torch"}
    hint = re.compile(r"pip install (?:-\S+ |--\S+ |\\?[\"'])*([\w.{}\[-]+)")
    for file in [*ROOT.glob("fabricamp/**/*.py"), *ROOT.glob("examples/*/*.py")]:
        for name in hint.findall(file.read_text()):
            assert name.partition("[")[0].rstrip(".") in known or ("{" in name and "fabricamp" not in name), (
                f"{file}: pip install {name}"
            )
