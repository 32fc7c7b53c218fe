"""Compiles ``.cu`` files and launches their kernels on torch's memory and stream, both through CuPy; torch does the rest.

In order: :func:`kernel` and the :class:`Kernel` that it returns, compilers, the reading of kernel files (sources, structures,
argument types), and what runs an op on a device (:func:`runs_kernels`, :func:`backend`).
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
import struct
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from fabricamp.torch_private import current_device, current_stream

_MOST_CALLS: Final = 256
_INVALID_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT
_TYPES: Final = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.uint8: "unsigned char",
    torch.int16: "Remainder",
    None: "None",
}
Defines = tuple[tuple[str, str], ...]
"""Macros that a kernel's source is compiled with: pairs of name and text."""

Kind = tuple["torch.dtype | None", ...]
"""The dtypes of one row of a table, one per column; None if the row does not have the column."""

_OPS: Final = re.compile(r"^// ops: (.+)$", re.MULTILINE)
"""The line in which a kernel file names the ops that run it."""
_FUNCTION: Final = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)")
_NUMBERS: Final[dict[str, Callable[[Any], Any]]] = {
    "double": lambda value: ctypes.c_double(float(value)),
    "int64": lambda value: ctypes.c_longlong(operator.index(value)),
}
"""Converts a number to a launch argument, by the argument's type in the kernel's source."""

_CODES: Final = {"pointer": "P", "int64": "q", "double": "d"}
"""The :mod:`struct` code of each argument type; all have eight bytes, so they can be packed one after the other."""

_FIELDS: Final[dict[str, type[Any]]] = {
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "int": ctypes.c_int,
    "int64": ctypes.c_longlong,
}
"""The ctypes of the number types in structures."""


@functools.cache
def kernel(
    file: str, function: str, kinds: tuple[Kind, ...], device: torch.device, defines: Defines = (), shared: int = 0
) -> Kernel:
    """Returns ``function`` of ``<file>.cu``, compiled once per device.

    A kernel over a table is compiled for rows of ``kinds``; a kernel over single tensors takes its types and sizes as ``defines``.
    Each block gets ``shared`` bytes of dynamic shared memory, at most the device's limit per block.
    """
    dynamic = (shared,) if shared else ()
    text = source(file, kinds, defines)
    return Kernel(COMPILERS[device.type](text, function, device, *dynamic), device, parameter_types(text, function))


class Kernel:
    """A compiled kernel of one device, called with tensors, numbers and structures.

    Each argument is converted to its entry in ``types`` (see :func:`parameter_types`): a number, int or float, to ``double`` or
    ``int64``; a tensor or None to an address; a structure is passed by value.  Each distinct set of arguments is converted once
    and cached: values that change from step to step are read from device memory instead.

    A call raises TypeError for an argument that does not fit its type, and ValueError for a tensor without memory of its own.
    """

    def __init__(self, function: Function, device: torch.device, types: tuple[str, ...]) -> None:
        self._function = function
        self._types = types
        self._index = device.index
        self._current = index_of_current(device.type)
        self._stream: Callable[[int], int] = current_stream if device.type == "cuda" else _no_stream
        self._calls: dict[tuple[Any, ...], tuple[int, Any]] = {}
        self._argument_memory: list[_ArgumentMemory] = []  # not used by a running launch

    @property
    def address(self) -> int:
        """The driver's handle of the kernel, on a GPU."""
        return int(self._function.compiled.ptr)  # type: ignore[attr-defined]

    def __call__(self, blocks: int, threads: int, *arguments: Tensor | ctypes.Structure | float | None) -> None:
        """Launches on torch's current stream of the kernel's device."""
        if blocks == 0:
            return
        key = tuple([value.data_ptr() if isinstance(value, Tensor) else value for value in arguments])
        call = self._calls.get(key)
        if call is None:
            call = self._lay_out(key, arguments)
        if self._current() == self._index:
            self._function(blocks, threads, call[0], self._stream(self._index))
        else:
            self._launch_elsewhere(blocks, threads, call[0])

    def launch(self, blocks: int, threads: int, *numbers: float) -> None:
        """Launches with plain addresses and numbers, without a cache: for operands that are new in every call.

        The caller has made sure that the addresses are those of tensors.  ``numbers`` has one entry for each of ``types``; none of
        these is a structure.  Raises struct.error for another count or type.
        """
        # Removed during the launch: another thread that launches this kernel must not overwrite the arguments being read.
        try:
            memory = self._argument_memory.pop()
        except IndexError:
            memory = _memory_for(self._types)
        write, values, address, _ = memory
        write(values, 0, *numbers)
        if self._current() == self._index:
            self._function(blocks, threads, address, self._stream(self._index))
        else:
            self._launch_elsewhere(blocks, threads, address)
        self._argument_memory.append(memory)

    def _launch_elsewhere(self, blocks: int, threads: int, arguments: int) -> None:
        """Launches on the kernel's device while another one is torch's current device."""
        with torch.cuda.device(self._index):
            self._function(blocks, threads, arguments, self._stream(self._index))

    def _lay_out(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[int, Any]:
        if len(self._calls) >= _MOST_CALLS:  # a caller with new tensors in each call must not fill the memory
            self._calls.clear()
        if len(arguments) != len(self._types):
            raise TypeError(f"a kernel that takes {len(self._types)} arguments {self._types} got {len(arguments)}")
        values = [_as_c(kind, value) for kind, value in zip(self._types, arguments, strict=True)]
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        call = ctypes.addressof(addresses), (addresses, values)  # the address alone would keep neither alive
        self._calls[key] = call
        return call


class _ArgumentMemory(NamedTuple):
    """Memory for a launch's arguments (``values``), the function that writes them, and the array of addresses for the driver."""

    write: Callable[..., None]
    values: Any
    address: int
    addresses: Any


def _memory_for(types: tuple[str, ...]) -> _ArgumentMemory:
    values = (ctypes.c_uint64 * len(types))()
    first = ctypes.addressof(values)
    addresses = (ctypes.c_void_p * len(types))(*[first + 8 * index for index in range(len(types))])
    write = struct.Struct("".join([_CODES[kind] for kind in types])).pack_into
    return _ArgumentMemory(write, values, ctypes.addressof(addresses), addresses)


def _as_c(kind: str, value: Any) -> Any:
    """Returns an argument converted to type ``kind``: an int passed where the source has double would be read as other bits."""
    if kind == "pointer" and (value is None or isinstance(value, Tensor)):
        return ctypes.c_void_p(0 if value is None else address_of(value))
    if kind in _NUMBERS and not isinstance(value, Tensor):
        return _NUMBERS[kind](value)
    if kind not in _NUMBERS and isinstance(value, ctypes.Structure):
        return value
    raise TypeError(f"a kernel got {value!r} where it takes {kind}")


def address_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's elements; raises ValueError if ``tensor`` has elements but no memory of its own."""
    address = tensor.data_ptr()
    if address == 0 and tensor.numel() > 0:
        raise ValueError(
            f"a kernel got a {type(tensor).__name__} on {tensor.device} whose {tensor.numel()} elements are not in memory of its "
            "own (a DTensor, another wrapper, a tensor on meta, or freed storage); give the plain tensor that holds them"
        )
    return address


def index_of_current(kind: str) -> Callable[[], int | None]:
    """Returns a function that returns the index of the current device of a type; for a CPU it returns None."""
    return current_device if kind == "cuda" else _none


def _none() -> None: ...


def _no_stream(_: int) -> int:
    return 0


class Function(Protocol):
    """A compiled kernel: ``launch(blocks, threads, arguments, stream)``; ``arguments`` is the address of an array of addresses."""

    def __call__(self, blocks: int, threads: int, arguments: int, stream: int, /) -> None:
        """Launches it on ``stream``."""


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
    pointer = compiled.ptr
    launch = driver.launchKernel

    def run(blocks: int, threads: int, arguments: int, stream: int) -> None:
        try:
            launch(pointer, blocks, 1, 1, threads, 1, 1, shared, stream, arguments, 0)
        except driver.CUDADriverError as error:
            if error.status != _INVALID_CONTEXT:
                raise
            # This thread (maybe one of autograd's) uses the device for the first time: runtime calls bind the context to it.
            cupy.cuda.runtime.setDevice(device.index)
            cupy.cuda.runtime.memGetInfo()
            launch(pointer, blocks, 1, 1, threads, 1, 1, shared, stream, arguments, 0)

    run.compiled = compiled  # type: ignore[attr-defined]  # keeps it alive: the module is unloaded with it
    return run


COMPILERS: dict[str, Callable[..., Function]] = {"cuda": _with_cupy}
"""The compiler of each device type: ``compile(text, function, device)``, plus the bytes of dynamic shared memory for a kernel
that uses it; the tests add one for "cpu"."""


def source(file: str, kinds: Sequence[Kind] = (), defines: Defines = ()) -> str:
    """Returns the source of ``<file>.cu`` with the package's headers inserted.

    The macro ``KINDS``, the kinds of rows to compile for, is defined before the source; without ``kinds`` a file uses its own
    default, the rows that most runs have.  ``defines`` are defined there too: the types and widths of a kernel on single tensors.

    The headers are inserted because CuPy's disk cache is keyed by the source text alone.
    """
    paths = kernel_texts()
    text = paths[f"{file}.cu"].read_text()
    text = re.sub(r'#include "(\w+\.cuh)"', lambda match: paths[match[1]].read_text(), text)
    lines = []
    if kinds:
        rows = [f"KIND({index}, {', '.join(_TYPES[dtype] for dtype in kind)})" for index, kind in enumerate(kinds)]
        lines.append(f"#define KINDS {' '.join(rows)}\n")
    lines += [f"#define {name} {value}\n" for name, value in defines]
    return "".join(lines) + text.replace("#pragma once", "")


def c_type(dtype: torch.dtype | None) -> str:
    """Returns the CUDA C++ type of ``dtype``; None stands for the type of a column that a row does not have."""
    return _TYPES[dtype]


@functools.cache
def kernel_texts() -> dict[str, Path]:
    """Returns the path of each kernel file and header of the package, by file name; each name exists once in the package."""
    return {path.name: path for path in Path(__file__).parent.rglob("*.cu*")}


def kernel_files() -> list[str]:
    """Returns the names of the kernel files, without their suffix."""
    return sorted(path.stem for path in kernel_texts().values() if path.suffix == ".cu")


@functools.cache
def structure(file: str, name: str) -> type[ctypes.Structure]:
    """Returns ``struct name`` of the kernel file or header ``file`` as a ctypes structure, with the fields that the file declares.

    A field is a number, a pointer (here an address), or another structure of the same file.
    """
    text = re.sub(r"//.*", "", kernel_texts()[file].read_text())
    body = re.search(rf"^struct {name} {{(.*?)^}};", text, re.DOTALL | re.MULTILINE)
    if body is None:
        raise ValueError(f"{file} has no struct {name}")
    fields: list[tuple[str, type[Any]]] = []
    for declaration in filter(None, map(str.strip, body[1].split(";"))):
        kind, field = declaration.rsplit(maxsplit=1)
        if "*" in kind:
            fields.append((field, ctypes.c_void_p))
        else:
            fields.append((field, _FIELDS.get(kind) or structure(file, kind)))
    # Without __dict__, setting a name that is not a field raises.  Hashable, because launches are cached by their arguments.
    return type(name, (ctypes.Structure,), {"_fields_": fields, "__slots__": (), "__hash__": object.__hash__})


def parameter_types(text: str, function: str) -> tuple[str, ...]:
    """Returns the argument types of ``function`` in a kernel's ``text``: "pointer", or the name of the type."""
    declared = {match[1]: match[2] for match in _FUNCTION.finditer(text)}[function]
    parameters = [parameter for parameter in declared.split(",") if parameter.strip()]
    return tuple(["pointer" if "*" in parameter else parameter.split()[0] for parameter in parameters])


def check_compiles(file: str, device: torch.device) -> None:
    """Compiles ``<file>.cu`` for ``device`` and the dtypes that most runs have; raises RuntimeError if that fails."""
    function = _FUNCTION.findall(source(file))[-1][0]
    kernel(file, function, (), device)


def runs_kernels(device: torch.device) -> bool:
    """Returns whether ops on tensors of ``device`` run as kernels; warns once if there is a GPU but CuPy cannot be used."""
    return device.type in COMPILERS and (device.type != "cuda" or _cupy_obstacle() is None)


@functools.cache
def _cupy_obstacle() -> str | None:
    """Returns why CuPy cannot run kernels for this torch (warned about once), or None if it can."""
    major = (torch.version.cuda or "0").split(".")[0]
    install = f"pip install cupy-cuda{major}x"
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


class Backend(NamedTuple):
    """What runs an op, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def backend(device: torch.device | str | None = None) -> dict[str, Backend]:
    """Returns what runs each op on ``device`` (default: the first GPU, else the CPU) and why.

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
    return dict.fromkeys(_ops(), choice)


@functools.cache
def _ops() -> list[str]:
    """Returns the names of all ops with a kernel, read from the kernel files."""
    lines = [line for name in kernel_files() for line in _OPS.findall(kernel_texts()[f"{name}.cu"].read_text())]
    return sorted([op for line in lines for op in line.split(", ")])
