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

from fabricamp.ops import bridge, dispatch, table
from tests.pairs import pairs

HERE = Path(__file__).parent
_FOLDER = Path(tempfile.gettempdir()) / "cuda_on_cpu"
_NUMBERS = {"CLUSTER": 1, "MAILBOXES": 2}  # for a text that does not define them
_DYNAMIC = re.compile(r"extern __shared__ (.+) (\w+)\[\];")
waiting: dict[str, int] = {}
"""For each kernel, the largest number of blocks of one launch that waited for other ranks; tests clear and read it."""
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")


# Without -fno-gnu-unique, functions of the same name in two libraries would share their __shared__ arrays.
_COMPILE = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fno-gnu-unique", "-fPIC", "-w"]


@functools.cache
def library(text: str) -> ctypes.CDLL:
    """Builds the kernels of ``text``."""
    common = _common()
    name = hashlib.sha256(f"{common.name}{text}".encode()).hexdigest()[:32]
    exports = "\n".join(f"EXPORT({kernel})" for kernel in _KERNEL.findall(text))
    body = _DYNAMIC.sub(r"\1* \2 = (\1*)::cuda_on_cpu::dynamic_shared;", text)
    numbers = "".join(f"#ifndef {name}\n#define {name} {n}\n#endif\n" for name, n in _NUMBERS.items())
    unit = f'#include "cuda_on_cpu.h"\n{body}\n{numbers}{exports}\n'
    options = [f"-I{common}", f"-I{HERE}", "-shared", f"{common}/cuda_on_cpu.o"]
    return ctypes.CDLL(str(_made(f"{name}.so", "unit.cpp", unit, options)))


@functools.cache
def _common() -> Path:
    """Returns a folder with the precompiled header and the runner of all kernels, which saves more than half of a compilation."""
    texts = "".join(path.read_text() for path in sorted(HERE.glob("cuda*")))
    folder = _FOLDER / hashlib.sha256(f"{_COMPILE}{texts}".encode()).hexdigest()[:32]
    for made, source, options in (("h.gch", "h", ["-xc++-header"]), ("o", "cpp", ["-c", "-O2"])):
        name = f"cuda_on_cpu.{source}"
        _made(f"{folder.name}/cuda_on_cpu.{made}", name, (HERE / name).read_text(), [f"-I{HERE}", *options])
    return folder


def _made(name: str, source: str, text: str, options: list[str]) -> Path:
    """Returns the file that g++ makes of ``text``; it is renamed when complete, because several workers may make it at once."""
    made = _FOLDER / name
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as own:
            (unit := Path(own, source)).write_text(text)
            subprocess.run([*_COMPILE, *options, unit, "-o", (result := Path(own, "made"))], check=True)
            result.replace(made)
    return made


def compiler(reverse: bool):
    """Returns an entry for ``bridge.COMPILERS``; threads (and blocks) run first to last, or in ``reverse`` order."""

    def compile_for_cpu(text: str, function: str, device, shared: int = 0):
        built = library(text)
        launch = getattr(built, f"launch_{function}")
        launch.argtypes = [ctypes.c_bool, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]

        def run(blocks: int, threads: int, arguments: int, stream: int) -> None:
            launch(reverse, blocks, threads, shared, arguments)
            if waited := built.blocks_that_waited():
                waiting[function] = max(waited, waiting.get(function, 0))

        return run

    return compile_for_cpu


ON_CPU = ["forward", "reverse"]
ON_GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
)


one_order = pytest.mark.parametrize("kernel_device", ["forward", ON_GPU], indirect=True)
"""The mark of tests of what the host does: which kernels it launches, on what memory and with which numbers."""


def in_pairs(names: str, *columns):
    """Returns the mark of a test with ``kernel_device`` and the arguments ``names``, with every pair of values.

    On a CPU the order of threads is one more column: it matters where threads add up shared sums, whatever their rule and dtype.
    """
    on_gpu = [pytest.param(ON_GPU.values[0], *row, marks=ON_GPU.marks) for row in pairs(*columns)]
    return pytest.mark.parametrize(
        f"kernel_device, {names}", [*pairs(ON_CPU, *columns), *on_gpu], indirect=["kernel_device"]
    )


@pytest.fixture(params=[*ON_CPU, ON_GPU])
def kernel_device(request, monkeypatch):
    """Runs a test on the real kernels: on the CPU with threads in both orders, and on a GPU if there is one.

    Chunks are small, so that small tensors have several of them; tests read the size from ``table.CHUNK_SIZE``.
    """
    monkeypatch.setattr(table, "_tables", {})
    monkeypatch.setattr(table, "CHUNK_SIZE", 64)
    if request.param == "cuda":
        yield torch.device("cuda", torch.cuda.current_device())
        return
    monkeypatch.setitem(bridge.COMPILERS, "cpu", compiler(request.param == "reverse"))
    monkeypatch.setattr(table, "THREADS", 64)
    _forget()
    yield torch.device("cpu")
    _forget()


@contextlib.contextmanager
def references(device: torch.device):
    """Runs the torch references instead."""
    compile_it = bridge.COMPILERS.pop(device.type)
    dispatch.forget()
    try:
        yield
    finally:
        bridge.COMPILERS[device.type] = compile_it
        dispatch.forget()


def _forget():
    """Drops kernels and choices cached for another compiler."""
    bridge.kernel.cache_clear()
    dispatch.forget()
