"""Compiles a ``.cu`` text with g++ and the headers beside this file, and launches its kernels on CPU tensors."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from fabricamp.ops import bridge, table

HERE = Path(__file__).parent
_NUMBERS = {"CLUSTER": 1, "MAILBOXES": 2}  # of a text that does not say
_DYNAMIC = re.compile(r"extern __shared__ (.+) (\w+)\[\];")
waiting: dict[str, int] = {}
"""The most blocks of a launch that waited for somebody outside it, by kernel; for tests to clear and read."""
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")


@functools.cache
def library(text: str, reverse: bool) -> ctypes.CDLL:
    """Builds the kernels of ``text``, whose threads (and blocks) run first to last or in ``reverse``."""
    headers = "".join(path.read_text() for path in sorted(HERE.glob("*.h")))
    name = hashlib.sha256(f"{text}{headers}{reverse}".encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / "cuda_on_cpu"
    built = folder / f"{name}.so"
    if not built.exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            unit, made = Path(own, "unit.cpp"), Path(own, "unit.so")
            exports = "\n".join(f"EXPORT({kernel})" for kernel in _KERNEL.findall(text))
            body = _DYNAMIC.sub(r"\1* \2 = (\1*)::cuda_on_cpu::dynamic_shared;", text)
            numbers = "".join(f"#ifndef {name}\n#define {name} {n}\n#endif\n" for name, n in _NUMBERS.items())
            unit.write_text(f'#include "cuda_on_cpu.h"\n{body}\n{numbers}{exports}\n')
            # Without -fno-gnu-unique, libraries would share each other's __shared__ arrays of functions of one name.
            flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-gnu-unique", "-fPIC", "-shared", "-w", f"-I{HERE}"]
            subprocess.run(["g++", *flags, *(["-DREVERSE"] if reverse else []), unit, "-o", made], check=True)
            made.replace(built)
    return ctypes.CDLL(str(built))


def compiler(reverse: bool):
    """Returns what ``bridge.COMPILERS`` holds for a kind of device."""

    def compile_for_cpu(text: str, function: str, device, shared: int = 0):
        built = library(text, reverse)
        launch = getattr(built, f"launch_{function}")
        launch.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]

        def run(blocks: int, threads: int, arguments: int, stream: int) -> None:
            launch(blocks, threads, shared, arguments)
            if waited := built.blocks_that_waited():
                waiting[function] = max(waited, waiting.get(function, 0))

        return run

    return compile_for_cpu


ON_CPU = ["forward", "reverse"]
ON_GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
)


@pytest.fixture(params=[*ON_CPU, ON_GPU])
def kernel_device(request, monkeypatch):
    """Runs a test on the real kernels: on the CPU with threads in both orders, and on a GPU where there is one.

    Chunks are small, so that small tensors have several; what depends on their size reads ``table.CHUNK_SIZE``.
    """
    monkeypatch.setattr(table, "_tables", {})
    monkeypatch.setattr(table, "CHUNK_SIZE", 64)
    if request.param == "cuda":
        yield torch.device("cuda", torch.cuda.current_device())
        return
    monkeypatch.setitem(bridge.COMPILERS, "cpu", compiler(request.param == "reverse"))
    monkeypatch.setattr(table, "THREADS", 64)
    bridge.kernel.cache_clear()
    yield torch.device("cpu")
    bridge.kernel.cache_clear()


@contextlib.contextmanager
def references(device: torch.device):
    """Runs the torch references instead."""
    compile_it = bridge.COMPILERS.pop(device.type)
    try:
        yield
    finally:
        bridge.COMPILERS[device.type] = compile_it
