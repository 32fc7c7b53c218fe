"""The scripts for clusters are valid shell and give arguments that the example has; the one for torchrun runs on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.scripts import PATHS

ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / "examples" / "cluster" / name for name in ("imagenet.sbatch", "torchrun.sh")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_the_script(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_example_has_the_arguments(script):
    known = re.findall(r'add_argument\(\s*"(--[\w-]+)"', (ROOT / "examples" / "imagenet" / "train.py").read_text())
    command = script.read_text().partition("examples/imagenet/train.py \\\n")[2]
    given = re.findall(r"^    (--[\w-]+)", command, re.MULTILINE)
    assert len(given) >= 6
    assert set(given) <= set(known)


@pytest.mark.slow
def test_torchrun_trains_on_this_machine(tmp_path):
    variables = {"GPUS": "2", "PORT": "0", "PYTHON": sys.executable, "PYTHONPATH": PATHS}
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    words = ["bash", str(SCRIPTS[1]), "--accelerator=cpu", "--quick"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("best val accuracy") == 1
