"""A compiled run that goes on in another process has the bits of a run that was never cut, with torch's cache warm or cold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import import_compiler, side_by_side
from tests.parity.compiled_run import run

ROOT = Path(__file__).parents[2]


def in_a_process(cache, **options):
    """Runs ``compiled_run`` with torch's caches in the folder ``cache``; returns the last weights."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    command = [sys.executable, "-m", "tests.parity.compiled_run", json.dumps(options)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **caches}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.load(options["out"])


def check_in_processes(tmp_path, **options):
    files = {"checkpoint": str(tmp_path / "cut.ckpt"), "out": str(tmp_path / "weights.pt")}
    whole = in_a_process(tmp_path / "one", saves=True, **options, **files)
    for cache in ("one", "other"):  # warm, cold
        resumed = in_a_process(tmp_path / cache, saves=False, **options, **files)
        assert all(map(torch.equal, resumed, whole)), cache


def test_with_a_backend_without_code_of_its_own(tmp_path):
    """Forked processes, of which none has what another one compiled; this backend writes no cache that could be warm."""
    options = {
        "compile": {"part": "blocks", "backend": "aot_eager"},
        "device": "cpu",
        "precision": "O0",
        "graph": False,
    }
    checkpoint = tmp_path / "cut.ckpt"
    import_compiler()
    torch.compiler.reset()
    for saves in (True, False):
        side_by_side(lambda: run(saves=saves, checkpoint=checkpoint, out=tmp_path / f"{saves}.pt", **options))
    assert all(map(torch.equal, torch.load(tmp_path / "True.pt"), torch.load(tmp_path / "False.pt")))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's default backend needs a C++ compiler")
@pytest.mark.parametrize(("part", "precision"), [("blocks", "O5"), ("step", "O0")])
def test_with_torchs_default_backend(part, precision, tmp_path):
    check_in_processes(tmp_path, compile={"part": part}, device="cpu", precision=precision, graph=False)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.skipif(shutil.which("cc") is None, reason="torch's default backend needs a C compiler")
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("part", "precision"), [("blocks", "O5"), ("step", "O4"), ("modules", "O2")])
def test_on_a_gpu(part, precision, graph, tmp_path):
    check_in_processes(tmp_path, compile={"part": part}, device="gpu", precision=precision, graph=graph)
