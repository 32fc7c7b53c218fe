"""The ImageNet example: alone, on two ranks with its options, and on folders of files."""

from __future__ import annotations

import csv
import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "imagenet" / "train.py"

Image = pytest.importorskip("PIL.Image", reason="needs the package pillow")


def run(*arguments):
    """Runs the script in this process; returns what it printed."""
    sys.argv[:] = [str(SCRIPT), *map(str, arguments)]
    sys.path.insert(0, str(SCRIPT.parent))
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def losses(printed):
    """The logged losses of the run that printed this."""
    (folder,) = re.findall(r"^best val accuracy .*; logs in (.*)$", printed, re.MULTILINE)
    with (Path(folder) / "metrics.csv").open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


def test_one_process_learns_and_draws():
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    found = losses(run("--quick", "--devices", 1, "--picture", "picture.svg"))
    assert found[-1] < 0.8 * found[0]
    assert Path("picture.svg").stat().st_size > 1000


def test_two_ranks_learn_with_all_options():
    options = ("--precision", "O5", "--strategy", "delayed_ddp", "--sync-batchnorm", "--batch-size", 16, "--size", 32)
    first, second = run_ranks(run, 2, "--quick", "--devices", 2, *options, backend=None)
    found = losses(first)
    assert found[-1] < 0.8 * found[0]
    assert second == ""


def test_folders_of_files_are_read_and_a_run_is_resumed():
    for part, name, color in [(p, *n) for p in ("train", "val") for n in (("cat", "red"), ("dog", "blue"))]:
        folder = Path("data", part, name)
        folder.mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (40 + number, 50), color).save(folder / f"{number}.jpg")
    words = ("--data", "data", "--arch", "tiny", "--size", 32, "--batch-size", 4, "--devices", 1, "--resume")
    run(*words, "--epochs", 2)
    (last,) = Path("runs").rglob("*step=6.ckpt")
    last.unlink()
    run(*words, "--epochs", 2)
    (again,) = Path("runs").rglob("*step=6.ckpt")
    assert again.parts[-3:-1] == ("version_1", "checkpoints")
    (_,) = Path("runs").rglob("*step=3.ckpt")


def test_the_network_is_resnet_50(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import torch

    from examples.imagenet import imagenet

    with torch.device("meta"):
        net = imagenet.resnet([3, 4, 6, 3], 64, 1000)
    assert sum(parameter.numel() for parameter in net.parameters()) == 25_557_032


@pytest.mark.slow
def test_the_long_form_reaches_its_accuracy():
    (accuracy,) = re.findall(r"^best val accuracy ([\d.]+)%", run("--devices", 1), re.MULTILINE)
    assert float(accuracy) > 98
