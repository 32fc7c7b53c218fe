"""What runs an op and why, the text that is compiled, and the barriers that the CPU's kernels are checked for."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fabricamp import ops
from fabricamp.ops import bridge
from tests.cuda_on_cpu.compiler import compiler

RACE = """
extern "C" __global__ void race(float* out) {
  __shared__ float shared[64];
  shared[threadIdx.x] = threadIdx.x;
  %s
  out[threadIdx.x] = shared[threadIdx.x > 0 ? threadIdx.x - 1 : 0];
}
"""


def test_every_op_says_what_runs_it():
    choices = ops.backend("cpu")
    assert set(choices) >= {"adam", "scale", "axpby", "l2norm", "gradient_statistics", "finish", "update_scale"}
    assert str(choices["adam"]) == "torch: its tensors are on cpu"
    for name in choices:
        assert callable(getattr(ops, name)), name


@pytest.fixture
def gpu_machine(monkeypatch):
    """A machine with a GPU and torch for CUDA 13, as far as the bridge can tell."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(bridge, "find_spec", lambda name: object())
    bridge._cupy_obstacle.cache_clear()
    yield
    bridge._cupy_obstacle.cache_clear()


def cupy_of(version, monkeypatch):
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(runtimeGetVersion=lambda: version))
    monkeypatch.setitem(sys.modules, "cupy", cupy)


def test_cupy_of_the_same_cuda_serves(gpu_machine, monkeypatch):
    cupy_of(13020, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bridge.runs_kernels(torch.device("cuda"))
    assert ops.backend()["adam"].name == "cupy"


@pytest.mark.parametrize("problem", ["missing", "other CUDA", "broken"])
def test_one_warning_names_the_cure(gpu_machine, monkeypatch, problem):
    if problem == "missing":
        monkeypatch.setattr(bridge, "find_spec", lambda name: None)
    elif problem == "other CUDA":
        cupy_of(12090, monkeypatch)
    else:
        monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.warns(UserWarning, match=r'pip install "fabricamp\[cuda13\]"'):
        assert not bridge.runs_kernels(torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not bridge.runs_kernels(torch.device("cuda"))
    assert ops.backend()["adam"].name == "torch"


def test_without_a_gpu_nothing_is_said():
    bridge._cupy_obstacle.cache_clear()
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not bridge.runs_kernels(torch.device("cuda"))
        assert "built without CUDA" in str(ops.backend("cuda")["adam"])


def test_the_text_is_whole():
    text = bridge.source("adam", [(torch.float16, torch.float32, None)])
    assert "KIND(0, __half, float, None)" in text
    assert '#include "' not in text
    assert "#pragma once" not in text


@pytest.mark.parametrize(
    ("order", "sync", "right"),
    [(0, "", True), (1, "", False), (0, "__syncthreads();", True), (1, "__syncthreads();", True)],
)
def test_a_missing_barrier_shows_in_reverse_order(order, sync, right):
    out = torch.zeros(64)
    kernel = bridge.Kernel(compiler(bool(order))(RACE % sync, "race", out.device), out.device)
    kernel(1, 64, out)
    assert torch.equal(out, torch.arange(64.0).sub(1).clamp(0)) is right


def test_a_divergent_barrier_ends_the_process():
    script = """
import torch
from fabricamp.ops import bridge
from tests.cuda_on_cpu.compiler import compiler
text = 'extern "C" __global__ void half(float* out) { if (threadIdx.x < 32) __syncthreads(); out[0] = 1; }'
bridge.Kernel(compiler(False)(text, "half", torch.device("cpu")), torch.device("cpu"))(1, 64, torch.zeros(1))
"""
    root = Path(bridge.__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode != 0
    assert "block 0 is stuck: 32 threads done, 32 at __syncthreads" in ran.stderr


def test_launches_are_laid_out_once_and_not_kept_forever(monkeypatch):
    calls = []
    kernel = bridge.Kernel(lambda *arguments: calls.append(arguments), torch.device("cpu"))
    one, other = torch.zeros(1), torch.zeros(1)
    for tensor in (one, other, one):
        kernel(1, 32, tensor, 2.0, 3)
    assert calls[0] == calls[2] != calls[1]
    monkeypatch.setattr(bridge, "_MOST_CALLS", 4)
    for number in range(20):
        kernel(1, 32, one, float(number))
    assert len(kernel._calls) <= 4
    kernel(0, 32, one)
    assert len(calls) == 23


@pytest.mark.gpu
def test_a_thread_may_launch_before_it_has_met_the_device():
    device = torch.device("cuda", torch.cuda.current_device())
    text = 'extern "C" __global__ void fill(float* out) { out[threadIdx.x] = 3; }'
    fill, out = bridge.Kernel(bridge.COMPILERS["cuda"](text, "fill", device), device), torch.zeros(8, device=device)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fill, 1, 8, out).result()
    torch.cuda.synchronize()
    assert out.tolist() == [3.0] * 8
