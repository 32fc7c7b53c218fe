"""Compiles CUDA C++ for any GPU, without one: NVRTC through its C interface, from the ``nvidia-cuda-nvrtc`` wheel."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest

_LOGS = Path(tempfile.gettempdir()) / "nvrtc_logs"
"""Compilers' logs by their inputs, as ``tests/cuda_on_cpu`` keeps what g++ makes."""
_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12")


def _installed(suffix: str) -> Path | None:
    for package in _PACKAGES:
        try:
            found = next((one for one in files(package) or () if str(one).endswith(suffix) or suffix in one.name), None)
        except PackageNotFoundError:
            continue
        if found is not None:
            return Path(str(found.locate()))
    return None


def _without(wheel: str) -> None:
    if os.environ.get("CI"):  # there the kernels have to be compiled
        pytest.fail(f"the {wheel} wheel is not installed: pip install -e '.[dev]'")
    pytest.skip(f"needs the {wheel} wheel")


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """Returns the library; skips the test if its wheel is not installed."""
    path = next((p for s in ("libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64") if (p := _installed(s)) is not None), None)
    if path is None:
        _without("nvidia-cuda-nvrtc")
    return ctypes.CDLL(str(path))


@functools.cache
def headers() -> Path:
    """The folder of ``cuda_fp16.h``."""
    path = _installed("/cuda_fp16.h")
    if path is None:
        _without("nvidia-cuda-runtime")
    return path.parent


def architectures() -> list[int]:
    """Every compute capability that this NVRTC compiles for."""
    count = ctypes.c_int()
    nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    nvrtc().nvrtcGetSupportedArchs(found)
    return list(found)


def version() -> tuple[int, int]:
    """Major and minor version of this NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@functools.cache
def _compiler() -> str:
    """What the compiler's log depends on beside the text and its options; not on where the wheels are installed."""
    header_texts = [path.read_bytes() for path in sorted(headers().glob("cuda_*16*"))]
    others = sorted((path.name, path.stat().st_size) for path in headers().iterdir())
    library = Path(nvrtc()._name)
    texts = b"".join([*header_texts, str(others).encode()])
    return f"{version()} {library.stat().st_size} {hashlib.sha256(texts).hexdigest()}"


def compile_for(text: str, architecture: int) -> str:
    """Returns the log of compiling ``text`` to machine code, registers and spills included; a log is kept for later sessions."""
    options = [f"-arch=sm_{architecture}", "--std=c++17", "--ptxas-options=-v"]
    kept = _LOGS / hashlib.sha256(f"{_compiler()}{options}{text}".encode()).hexdigest()
    if not kept.exists():
        log = _compiled(text, architecture, [*options, f"-I{headers()}"])
        _LOGS.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_LOGS, delete=False) as own:  # several workers may write it at once
            own.write(log)
        Path(own.name).replace(kept)
    return kept.read_text()


def _compiled(text: str, architecture: int, options: list[str]) -> str:
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    status = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))
    )
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if status != 0:
        raise AssertionError(f"sm_{architecture}: {log.value.decode()}")
    return log.value.decode()
