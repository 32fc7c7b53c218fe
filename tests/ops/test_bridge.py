"""The backend of an op and its reason, the text that is compiled, and the checks of barriers when kernels run on the CPU."""

from __future__ import annotations

import ctypes
import struct
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
    """Makes the bridge see a GPU and torch for CUDA 13."""
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
    with pytest.warns(UserWarning, match=r"pip install cupy-cuda13x"):
        assert not bridge.runs_kernels(torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not bridge.runs_kernels(torch.device("cuda"))
    assert ops.backend()["adam"].name == "torch"


def test_without_a_gpu_nothing_is_said():
    bridge._cupy_obstacle.cache_clear()
    if torch.version.cuda is not None:
        pytest.skip("this torch is built with CUDA")
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
    kernel = bridge.Kernel(compiler(bool(order))(RACE % sync, "race", out.device), out.device, ("pointer",))
    kernel(1, 64, out)
    assert torch.equal(out, torch.arange(64.0).sub(1).clamp(0)) is right


def test_a_divergent_barrier_ends_the_process():
    script = """
import torch
from fabricamp.ops import bridge
from tests.cuda_on_cpu.compiler import compiler
text = 'extern "C" __global__ void half(float* out) { if (threadIdx.x < 32) __syncthreads(); out[0] = 1; }'
device = torch.device("cpu")
bridge.Kernel(compiler(False)(text, "half", device), device, ("pointer",))(1, 64, torch.zeros(1))
"""
    root = Path(bridge.__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode != 0
    assert "block 0 is stuck: 32 threads done, 32 at __syncthreads" in ran.stderr


def test_launches_are_laid_out_once_and_not_kept_forever(monkeypatch):
    calls = []
    types = ("pointer", "double", "int64")
    kernel = bridge.Kernel(lambda *arguments: calls.append(arguments), torch.device("cpu"), types)
    one, other = torch.zeros(1), torch.zeros(1)
    for tensor in (one, other, one):
        kernel(1, 32, tensor, 2.0, 3)
    assert calls[0] == calls[2] != calls[1]
    monkeypatch.setattr(bridge, "_MOST_CALLS", 4)
    for number in range(20):
        kernel(1, 32, one, float(number), 3)
    assert len(kernel._calls) <= 4
    kernel(0, 32, one)
    assert len(calls) == 23


def test_a_launch_during_another_leaves_its_numbers():
    seen = []

    def read(arguments):
        addresses = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        return [ctypes.c_longlong.from_address(addresses[place]).value for place in range(2)]

    def run(blocks, threads, arguments, stream):
        if blocks > 1:
            kernel.launch(blocks - 1, 32, 7, blocks - 1)
        seen.append(read(arguments))

    kernel = bridge.Kernel(run, torch.device("cpu"), ("pointer", "int64"))
    for _ in range(3):
        kernel.launch(3, 32, 7, 3)
    assert seen == [[7, 1], [7, 2], [7, 3]] * 3
    assert len(kernel._argument_memory) == 3  # used again


TYPED = """
extern "C" __global__ void __launch_bounds__(512, 2)
typed(const float* in, double* out, double factor,
      int64 count) {
  if (threadIdx.x == 0) out[0] = in[0] * factor + count;
}
"""


def test_an_argument_arrives_as_the_type_in_its_place():
    device = torch.device("cpu")
    types = bridge.parameter_types(TYPED, "typed")
    assert types == ("pointer", "pointer", "double", "int64")
    text = "typedef long long int64;" + TYPED
    kernel = bridge.Kernel(compiler(False)(text, "typed", device), device, types)
    value, out = torch.full((1,), 3.0), torch.zeros(1, dtype=torch.float64)
    for factor, count, expected in ((2, 5, 11.0), (2.0, True, 7.0), (2, 1, 7.0), (True, 5, 8.0), (0.5, 0, 1.5)):
        kernel(1, 32, value, out, factor, count)
        assert out.item() == expected
    refused = [
        (value, out, 2.0, 5.5),
        (value, out, torch.ones(()), 5),
        (value, 7, 2.0, 5),
        (value, out, 2.0),
        (value, out, "x", 5),
    ]
    for arguments in refused:
        with pytest.raises((TypeError, ValueError)):
            kernel(1, 32, *arguments)
    for factor, count, expected in ((2, 5, 11.0), (True, 1, 4.0), (0.5, 0, 1.5)):
        kernel.launch(1, 32, value.data_ptr(), out.data_ptr(), factor, count)
        assert out.item() == expected
    for numbers in (
        (value.data_ptr(), out.data_ptr(), 2.0, 5.5),
        (value.data_ptr(), out.data_ptr(), 2.0),
        (None, 0, 2.0, 5),
    ):
        with pytest.raises(struct.error):
            kernel.launch(1, 32, *numbers)
    with pytest.raises(ValueError, match="not in memory of its own"):
        kernel(1, 32, value.to("meta"), out, 2.0, 5)


def test_the_types_of_every_kernel_are_known():
    known = {"pointer", "double", "int64", "Table", "Layer", "Rule"}
    for file in bridge.kernel_files():
        text = bridge.source(file)
        functions = [found[0] for found in bridge._FUNCTION.findall(text)]
        assert functions, file
        assert text.count("__global__ void") == len(functions)
        for function in functions:
            assert known.issuperset(bridge.parameter_types(text, function)), (file, function)


STRUCTURES = {
    "finish": [("common.cuh", "Table"), ("common.cuh", "StepState"), ("finish.cu", "Rule")],
    "sync_batch_norm": [("batch_norm.cuh", "Layer"), ("batch_norm.cuh", "Tiling")],
}


@pytest.mark.parametrize("file", STRUCTURES)
def test_structures_are_laid_out_as_a_compiler_lays_them_out(file, tmp_path):
    lines = ["#include <cstddef>", '#include "cuda_on_cpu.h"', bridge.source(file)]
    for where, name in STRUCTURES[file]:
        known = bridge.structure(where, name)
        lines.append(f'static_assert(sizeof({name}) == {ctypes.sizeof(known)}, "{name}");')
        for field in known._fields_:
            place = getattr(known, field[0])
            found = f"offsetof({name}, {field[0]}) == {place.offset} && sizeof({name}::{field[0]}) == {place.size}"
            lines.append(f'static_assert({found}, "{name}.{field[0]}");')
    unit = tmp_path / "unit.cpp"
    unit.write_text("\n".join(lines))
    folder = Path(sys.modules[compiler.__module__].__file__).parent
    built = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", "-w", f"-I{folder}", unit], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr


def test_a_structure_knows_its_fields():
    table = bridge.structure("common.cuh", "Table")
    assert table(rows=3).rows == 3
    with pytest.raises(AttributeError, match="row"):
        table(row=3)
    with pytest.raises(AttributeError, match="row"):
        table().row = 3
    with pytest.raises(ValueError, match=r"common.cuh has no struct Rule"):
        bridge.structure("common.cuh", "Rule")


@pytest.mark.gpu
def test_a_thread_may_launch_before_it_has_met_the_device():
    device = torch.device("cuda", torch.cuda.current_device())
    text = 'extern "C" __global__ void fill(float* out) { out[threadIdx.x] = 3; }'
    compiled = bridge.COMPILERS["cuda"](text, "fill", device)
    fill, out = bridge.Kernel(compiled, device, bridge.parameter_types(text, "fill")), torch.zeros(8, device=device)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fill, 1, 8, out).result()
    torch.cuda.synchronize()
    assert out.tolist() == [3.0] * 8
