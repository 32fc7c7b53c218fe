"""Measures whether kernels or torch are faster on a card: for ``fabricamp doctor --measure``, and for the package's own table."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NamedTuple

import torch

from fabricamp.ops import dispatch
from fabricamp.ops.cross_entropy import fused_cross_entropy
from fabricamp.ops.dispatch import Bands, Card, Runner
from fabricamp.ops.norm.normalization import layer_norm, rms_norm
from fabricamp.torch_private import sleep_on_gpu

_BYTES: Final = 2**28  # several times any cache, and long enough for the host to keep ahead
_ROUNDS: Final = 5
_STEPS: Final = 3
_SLEEP: Final = 3_000_000  # clock ticks, about 2 ms
_MARGIN: Final = 0.98
"""A kernel is chosen if it takes less than this share of torch's time: noise must not make a model slower."""


class Case(NamedTuple):
    """An op that a table decides about: ``step`` returns its forward and backward pass; measured for ``dtypes`` x ``widths``."""

    step: Callable[[torch.dtype | None, int, int, torch.device], Callable[[], object]]
    dtypes: tuple[torch.dtype | None, ...]
    widths: tuple[int, ...]


def layer_norm_step(dtype: torch.dtype | None, rows: int, width: int, device: torch.device) -> Callable[[], object]:
    """Returns a function that runs LayerNorm forward and backward; ``dtype=None``: bf16 inputs with fp32 parameters."""
    x, weight, upstream = _operands(dtype, rows, width, device)
    bias = torch.zeros_like(weight).requires_grad_()

    def step() -> object:
        made = layer_norm(x, width, weight, bias)
        return torch.autograd.grad(made, [x, weight, bias], upstream)

    return step


def rms_norm_step(dtype: torch.dtype | None, rows: int, width: int, device: torch.device) -> Callable[[], object]:
    """Returns a function that runs RMSNorm forward and backward; ``dtype=None``: bf16 inputs with fp32 parameters."""
    x, weight, upstream = _operands(dtype, rows, width, device)
    return lambda: torch.autograd.grad(rms_norm(x, width, weight, 1e-5), [x, weight], upstream)


def _operands(
    dtype: torch.dtype | None, rows: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, width, dtype=dtype or torch.bfloat16, device=device).requires_grad_()
    weight = torch.ones(width, dtype=dtype or torch.float32, device=device).requires_grad_()
    return x, weight, torch.randn_like(x)


def cross_entropy_step(dtype: torch.dtype | None, rows: int, width: int, device: torch.device) -> Callable[[], object]:
    """Returns a function that runs the cross-entropy of ``width`` classes forward and backward."""
    logits = torch.randn(rows, width, dtype=dtype or torch.float32, device=device).requires_grad_()
    target = torch.randint(width, (rows,), dtype=torch.int64, device=device)
    return lambda: torch.autograd.grad(fused_cross_entropy(logits, target), logits)


_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_WIDTHS: Final = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768, 65536)

CASES: Final = {
    "layer_norm": Case(layer_norm_step, (*_DTYPES, None), _WIDTHS),
    "rms_norm": Case(rms_norm_step, (*_DTYPES, None), _WIDTHS),
    "cross_entropy": Case(cross_entropy_step, _DTYPES, (16, 256, 1024, 4096, 16384, 32768, 50304, 128256, 256000)),
}
"""The ops to measure, by their names in the tables."""


def _milliseconds(step: Callable[[], object], name: Runner) -> float:
    """Returns the GPU time of one ``step()``: the passes are queued after a sleeping kernel, so the host's time does not count."""
    with dispatch.always(name):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sleep_on_gpu(_SLEEP)
        start.record()
        for _ in range(_STEPS):
            step()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / _STEPS


def compare(op: str, dtype: torch.dtype | None, width: int, device: torch.device) -> dict[Runner, float]:
    """Returns the milliseconds of a forward and backward pass by kernel and by torch: medians, measured alternately."""
    rows = max(1, _BYTES // (width * (dtype or torch.bfloat16).itemsize))
    step = CASES[op].step(dtype, rows, width, device)
    times: dict[Runner, list[float]] = {"cupy": [], "torch": []}
    for turn in range(_ROUNDS + 1):
        for name, own_times in times.items():
            milliseconds = _milliseconds(step, name)
            if turn > 0:  # the first compiles
                own_times.append(milliseconds)
    return {name: statistics.median(own_times) for name, own_times in times.items()}


def bands(times: dict[int, dict[Runner, float]]) -> Bands:
    """Returns the bands of widths with their faster runner, from the results of :func:`compare` by width."""
    bands: Bands = []
    before: Runner = "torch"
    for width, of_width in sorted(times.items()):
        name: Runner = "cupy" if of_width["cupy"] < _MARGIN * of_width["torch"] else "torch"
        if name != before:
            bands.append((width, name))
            before = name
    return bands


def measure_card(device: torch.device) -> Card:
    """Measures ``device`` (one or two minutes) and returns its table; prints a line for every dtype."""
    choices: dict[str, dict[str, Bands]] = {}
    with torch.cuda.device(device):
        for op, case in CASES.items():
            choices[op] = {}
            for dtype in case.dtypes:
                times = {width: compare(op, dtype, width, device) for width in case.widths}
                torch.cuda.empty_cache()
                name = dispatch.name_of(dtype)
                choices[op][name] = bands(times)
                gains = "  ".join(f"{width}: {time['torch'] / time['cupy']:.2f}x" for width, time in times.items())
                print(f"{op} {name}: {gains}  -> {choices[op][name] or 'torch'}")
    return {"measured": about(device), "choices": choices}


def about(device: torch.device) -> str:
    """Returns a text with the card, the versions and the date of a measurement."""
    card = torch.cuda.get_device_name(device)
    return f"{card}, torch {torch.__version__}, CuPy {_cupy()}, {time.strftime('%Y-%m-%d')}"


@functools.cache
def _cupy() -> str:
    for package in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"
