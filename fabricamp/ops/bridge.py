"""From a ``.cu`` file to a launch on torch's memory and stream: CuPy compiles and launches, torch does all the rest."""

from __future__ import annotations

import ctypes
import functools
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "COMPILERS",
    "Backend",
    "Kernel",
    "backend",
    "c_type",
    "check_compiles",
    "kernel",
    "kernel_files",
    "runs_kernels",
    "source",
]

KERNELS: Final = Path(__file__).parent / "kernels"
_MOST_CALLS: Final = 256
_INVALID_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT
_TYPES: Final = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    None: "None",
}
_FILES: Final = {
    "accumulate": "sums",
    "adagrad": "adagrad",
    "adam": "adam",
    "axpby": "sums",
    "copy_cast": "tensors",
    "ema": "ema",
    "finish": "finish",
    "focal_loss": "focal_loss",
    "fused_cross_entropy": "cross_entropy",
    "gradient_statistics": "statistics",
    "l2norm": "statistics",
    "lamb": "lamb",
    "larc": "larc",
    "layer_norm": "norm_forward",
    "novograd": "novograd",
    "rms_norm": "norm_forward",
    "scale": "tensors",
    "sgd": "sgd",
    "sync_batch_norm": "sync_batch_norm",
    "update_scale": "finish",
}
"""Which ``.cu`` file each op runs."""

Defines = tuple[tuple[str, str], ...]
"""What a kernel's text is compiled with besides: pairs of a macro's name and its text."""

Kind = tuple["torch.dtype | None", ...]
"""The dtypes of one row of a table, a column each; None where the row does not have the column."""

_HALF, _FULL = torch.float16, torch.float32
_TYPICAL: Final[dict[str, tuple[Kind, ...]]] = {
    "adagrad": ((_FULL, _FULL, _FULL, None), (_HALF, _FULL, _FULL, _HALF)),
    "adam": ((_FULL, _FULL, _FULL, _FULL, None), (_HALF, _FULL, _FULL, _FULL, _HALF)),
    "ema": ((_FULL, _FULL),),
    "lamb": ((_FULL, _FULL, _FULL, _FULL, None), (_HALF, _FULL, _FULL, _FULL, _HALF)),
    "larc": ((_FULL, _FULL, None),),
    "novograd": ((_FULL, _FULL, _FULL, None), (_HALF, _FULL, _FULL, _HALF)),
    "sgd": ((_FULL, _FULL, _FULL, None), (_HALF, _FULL, _FULL, _HALF)),
    "statistics": ((_FULL,), (_HALF,)),
    "sums": ((_HALF, _FULL, _FULL),),
    "tensors": ((_FULL, _FULL), (_FULL, _HALF)),
}
"""Rows that most runs have, of the files that serve tables."""
_FUNCTION: Final = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")


class Backend(NamedTuple):
    """What runs an op, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Function(Protocol):
    """A compiled kernel: ``launch(blocks, threads, arguments, stream)``, with the address of an array of argument addresses."""

    def __call__(self, blocks: int, threads: int, arguments: int, stream: int, /) -> None: ...


def c_type(dtype: torch.dtype | None) -> str:
    """Returns what CUDA C++ calls ``dtype``; None is the type of a column that a row does not have."""
    return _TYPES[dtype]


def source(file: str, kinds: Sequence[Kind] = (), defines: Defines = ()) -> str:
    """Returns the text of ``kernels/<file>.cu`` with our headers in place.

    ``KINDS``, the rows that it has to serve, is defined in front of it, and each of ``defines`` (a kernel on single tensors
    takes its types and widths so).

    The headers are part of the text because CuPy's disk cache goes by the text alone.
    """
    rows = " ".join(f"KIND({index}, {', '.join(_TYPES[one] for one in kind)})" for index, kind in enumerate(kinds))
    text = (KERNELS / f"{file}.cu").read_text()
    text = re.sub(r'#include "(\w+\.cuh)"', lambda found: (KERNELS / found[1]).read_text(), text)
    lines = [f"#define {name} {value}\n" for name, value in (("KINDS", rows), *defines)]
    return "".join(lines) + text.replace("#pragma once", "")


def _with_cupy(text: str, function: str, device: torch.device, shared: int = 0) -> Function:
    import cupy
    from cupy.cuda import driver

    with cupy.cuda.Device(device.index):
        try:
            module = cupy.RawModule(code=text, options=("--std=c++17",), backend="nvrtc")
            raw = module.get_function(function)
            if shared:
                raw.max_dynamic_shared_size_bytes = shared
            compiled = raw.kernel
        except cupy.cuda.compiler.CompileException as error:
            raise RuntimeError(f"kernel {function} does not compile for {device}: {error}") from error
    pointer, launch = compiled.ptr, driver.launchKernel

    def run(blocks: int, threads: int, arguments: int, stream: int) -> None:
        try:
            launch(pointer, blocks, 1, 1, threads, 1, 1, shared, stream, arguments, 0)
        except driver.CUDADriverError as error:
            if error.status != _INVALID_CONTEXT:
                raise
            # This thread, one of autograd's maybe, meets the device for the first time: the runtime binds the context to it.
            cupy.cuda.runtime.setDevice(device.index)
            cupy.cuda.runtime.memGetInfo()
            launch(pointer, blocks, 1, 1, threads, 1, 1, shared, stream, arguments, 0)

    run.compiled = compiled  # type: ignore[attr-defined]  # the module is unloaded with it
    return run


COMPILERS: dict[str, Callable[..., Function]] = {"cuda": _with_cupy}
"""How a kernel of a source text is compiled, by device type: ``compile(text, function, device)``, with the bytes of dynamic
shared memory after these for a kernel that has it; the tests add one for "cpu"."""


def _public_current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# Asked for at every launch: 0.1 us this way (which Triton takes too), 9.5 us by the public one.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_current_stream)


class Kernel:
    """A compiled kernel of one device, called with tensors, numbers and structures.

    Integers arrive as ``long long``, floats as ``double``, tensors and None as addresses.  Each set of arguments is laid out
    once: what changes from step to step is read from device memory.
    """

    def __init__(self, function: Function, device: torch.device) -> None:
        self._function = function
        self._device = device
        self._cuda = device.type == "cuda"
        self._calls: dict[tuple[Any, ...], tuple[int, Any]] = {}

    @property
    def address(self) -> int:
        """What the driver calls the kernel, on a GPU."""
        return int(self._function.compiled.ptr)  # type: ignore[attr-defined]

    def __call__(self, blocks: int, threads: int, *arguments: Tensor | ctypes.Structure | float | None) -> None:
        """Launches on torch's current stream of the kernel's device."""
        if blocks == 0:
            return
        key = tuple([one.data_ptr() if isinstance(one, Tensor) else one for one in arguments])
        call = self._calls.get(key)
        if call is None:
            call = self._lay_out(key)
        if not self._cuda:
            self._function(blocks, threads, call[0], 0)
            return
        stream = _current_stream(self._device.index)
        if torch.cuda.current_device() == self._device.index:
            self._function(blocks, threads, call[0], stream)
        else:
            with torch.cuda.device(self._device):
                self._function(blocks, threads, call[0], stream)

    def _lay_out(self, key: tuple[Any, ...]) -> tuple[int, Any]:
        if len(self._calls) >= _MOST_CALLS:  # a caller that brings new tensors each time must not fill the memory
            self._calls.clear()
        values = [_as_c(one) for one in key]
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        call = ctypes.addressof(addresses), (addresses, values)
        self._calls[key] = call
        return call


def _as_c(value: Any) -> Any:
    if isinstance(value, ctypes.Structure):
        return value
    if isinstance(value, float):
        return ctypes.c_double(value)
    return ctypes.c_longlong(value or 0)


@functools.cache
def kernel(
    file: str, function: str, kinds: tuple[Kind, ...], device: torch.device, defines: Defines = (), shared: int = 0
) -> Kernel:
    """Returns ``function`` of ``kernels/<file>.cu``, compiled once per device.

    A kernel over a table serves rows of ``kinds``; one over single tensors takes its types and sizes as ``defines``.  Each of
    its blocks gets ``shared`` bytes of dynamic shared memory, at most what the device gives to one block.
    """
    dynamic = (shared,) if shared else ()
    return Kernel(COMPILERS[device.type](source(file, kinds, defines), function, device, *dynamic), device)


def kernel_files() -> list[str]:
    """Returns the names of the files in ``kernels/``, without their suffix."""
    return sorted(path.stem for path in KERNELS.glob("*.cu"))


def check_compiles(file: str, device: torch.device) -> None:
    """Compiles ``kernels/<file>.cu`` for ``device`` and the dtypes that most runs have; raises RuntimeError where it cannot."""
    kinds = _TYPICAL.get(file, ())
    function = _FUNCTION.findall(source(file, kinds))[-1]
    kernel(file, function, kinds, device)


def runs_kernels(device: torch.device) -> bool:
    """Returns whether ops on tensors of ``device`` run as kernels; warns once where a GPU could and CuPy is in the way."""
    return device.type in COMPILERS and (device.type != "cuda" or _cupy_obstacle() is None)


@functools.cache
def _cupy_obstacle() -> str | None:
    """Why CuPy cannot serve torch's GPU, told once; None where it can."""
    major = (torch.version.cuda or "0").split(".")[0]
    install = f'pip install "fabricamp[cuda{major}]"'
    reason: str | None = None
    if torch.version.cuda is None:
        reason = "this torch is built without CUDA"
    elif find_spec("cupy") is None:
        reason = f"CuPy is not installed; {install}"
    else:
        reason = _version_obstacle(major, install)
    if reason is not None and torch.cuda.is_available():
        warnings.warn(f"fabricamp's kernels do not run, torch's slower operations do: {reason}", stacklevel=2)
    return reason


def _version_obstacle(major: str, install: str) -> str | None:
    try:
        import cupy
    except (ImportError, OSError) as error:
        return f"CuPy cannot be imported ({error}); {install}"
    theirs = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if str(theirs) != major:
        return f"CuPy is for CUDA {theirs} and torch for CUDA {major}; {install}"
    return None


def backend(device: torch.device | str | None = None) -> dict[str, Backend]:
    """Returns what runs each op on ``device`` (the first GPU where there is one) and why.

    >>> str(backend("cpu")["scale"])
    'torch: its tensors are on cpu'
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if runs_kernels(chosen):
        choice = Backend("cupy", f"kernels for {chosen.type}, compiled on first use")
    elif chosen.type != "cuda":
        choice = Backend("torch", f"its tensors are on {chosen.type}")
    else:
        choice = Backend("torch", str(_cupy_obstacle()))
    return dict.fromkeys(_FILES, choice)
