"""The digits example reaches its accuracy on GPUs: at every opt level and with both optimizers on one, and over NCCL on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.in_process import digits_accuracy

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "digits" / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
one_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


def accuracy(command, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = re.search(r"test accuracy\D+([\d.]+)%", done.stdout)
    assert found, done.stdout
    return float(found[1]) / 100


@pytest.mark.gpu
@one_gpu
@pytest.mark.parametrize("optimizer", ["torch", "fused"])
@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_one_gpu(precision, optimizer):
    assert digits_accuracy(precision, optimizer, epochs=20, accelerator="gpu") >= 0.98


@pytest.mark.gpu
@one_gpu
def test_the_script_on_one_gpu(tmp_path):
    arguments = ["--accelerator", "gpu", "--devices", "1", "--precision", "O2", "--optimizer", "fused"]
    assert accuracy([sys.executable, SCRIPT, *arguments], tmp_path) >= 0.98


@pytest.mark.gpu2
@two_gpus
@pytest.mark.parametrize("starter", [[sys.executable], TORCHRUN])
@pytest.mark.parametrize("precision", ["O1", "O2"])
def test_two_gpus(starter, precision, tmp_path):
    command = [
        *starter,
        SCRIPT,
        "--accelerator",
        "gpu",
        "--devices",
        "2",
        "--strategy",
        "ddp",
        "--precision",
        precision,
    ]
    assert accuracy(command, tmp_path) >= 0.98
