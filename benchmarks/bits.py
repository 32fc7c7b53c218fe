"""Which bits repeat, and which depend on the batch: attention's backward, products, norms, sums; and RMSNorm under autocast.

    python benchmarks/bits.py [--only attention,batch,rms_norm] [--quick] [--out benchmarks/results/bits-h200.json]

attention: gradients of torch's scaled_dot_product_attention by each backend, from the same inputs again and again, with and
without torch.use_deterministic_algorithms: in how many runs dq, dk and dv differ from those of the first, and the time of both.
batch: an operation's result for the first row of m rows: which m give it the same bits, and which those of this row alone?
rms_norm: torch's RMSNorm with fp32 weights and bf16 inputs under autocast, the same after fabricamp.nn.fuse, and in bf16.

GPU ms: events around passes that were queued after a sleeping kernel, the ways of a row alternately, medians.  Without a GPU small
sizes run on the CPU: bits are compared as there, and times are the host's.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fabricamp.nn import fuse
from fabricamp.ops import layer_norm, rms_norm
from fabricamp.torch_private import sleep_on_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
GRADIENTS = ("dq", "dk", "dv")
MODES = {"default": False, "deterministic": True}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
ROWS = (
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    12,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    192,
    256,
    384,
    512,
    768,
)
MANY_ROWS = (*ROWS, 1024, 1536, 2048, 3072, 4096, 8192)


class Heads(NamedTuple):
    """The size of an attention: batch, heads, length, and width of a head."""

    batch: int
    heads: int
    length: int
    width: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.heads} x {self.length} x {self.width}"


class Sizes(NamedTuple):
    """What is measured: attentions; (inputs, outputs) of products; widths of norms, softmax and sums; (rows, width) of RMSNorms."""

    attention: tuple[Heads, ...]
    products: tuple[tuple[int, int], ...]
    norms: tuple[int, ...]
    classes: tuple[int, ...]
    rms_norms: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    runs: int
    rounds: int


# Widths of GPT-2 (768, 3072, 50304 classes), Llama 3 8B (4096, 14336, 128256 classes) and 70B (8192).
FULL = Sizes(
    attention=(Heads(8, 12, 1024, 64), Heads(2, 32, 2048, 128), Heads(1, 32, 8192, 128)),
    products=(
        (768, 2304),
        (768, 3072),
        (3072, 768),
        (768, 50304),
        (4096, 4096),
        (4096, 14336),
        (14336, 4096),
        (4096, 128256),
    ),
    norms=(768, 1024, 4096, 8192),
    classes=(1024, 50304, 128256),
    rms_norms=((16384, 768), (16384, 4096), (8192, 8192)),
    rows=MANY_ROWS,
    runs=30,
    rounds=7,
)
QUICK = Sizes(
    attention=(Heads(2, 2, 64, 32),),
    products=((64, 96), (256, 64)),
    norms=(64,),
    classes=(512,),
    rms_norms=((64, 128),),
    rows=ROWS[:8],
    runs=4,
    rounds=1,
)


# -- what is the same for all parts ------------------------------------------------------------------------------------------------


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors of one shape and dtype have equal bits; nan equals nan, and 0 differs from -0."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def milliseconds(step: Callable[[], object], device: torch.device, repeat: int = 3) -> float:
    """Returns the ms of ``step``: on a GPU those of the device, queued after a kernel that sleeps meanwhile."""
    if device.type == "cpu":
        begun = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - begun)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    sleep_on_gpu(1_000_000 * repeat)
    start.record()
    for _ in range(repeat):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeat


def medians(steps: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Returns the median ms of each step, measured in turn; a first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn, (name, step) in itertools.product(range(rounds + 1), steps.items()):
        found = milliseconds(step, device)
        if turn > 0:
            taken[name].append(found)
    return {name: round(statistics.median(times), 5) for name, times in taken.items()}


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """A context with torch's deterministic algorithms, or without."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def products_in(name: str) -> Iterator[None]:
    """A context in which fp32 products are computed in TF32 (``name="tf32"``) or in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# -- attention ---------------------------------------------------------------------------------------------------------------------


def differing(first: Sequence[Tensor], repeat: Callable[[], Sequence[Tensor]], runs: int) -> list[int]:
    """Returns for each tensor in how many of ``runs`` repetitions its bits were not those of ``first``."""
    counts = [0] * len(first)
    for _ in range(runs):
        for index, (one, other) in enumerate(zip(first, repeat(), strict=True)):
            counts[index] += not same_bits(one, other)
    return counts


def attention(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields a row for each size, dtype and backend."""
    for heads, name, backend in itertools.product(sizes.attention, ("bf16", "fp16", "fp32"), BACKENDS):
        # "math" has all scores in memory, several times: batch x heads x length squared.
        if backend != "math" or heads.batch * heads.heads * heads.length**2 <= 2**30:
            row = {"part": "attention", "size": str(heads), "dtype": name, "backend": backend, "runs": sizes.runs}
            yield {**row, **attention_row(heads, DTYPES[name], BACKENDS[backend], device, sizes)}


def attention_row(
    heads: Heads, dtype: torch.dtype, backend: SDPBackend, device: torch.device, sizes: Sizes
) -> dict[str, Any]:
    """Returns for each mode in how many runs a tensor had other bits, or why torch refuses it; and the ms of backward."""
    generator = torch.Generator(device).manual_seed(0)
    operands = [torch.randn(heads, generator=generator, dtype=dtype, device=device) for _ in range(4)]
    inputs, upstream = [one.requires_grad_() for one in operands[:3]], operands[3]

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*inputs, is_causal=True)

    found: dict[str, Any] = {}
    steps: dict[str, Callable[[], object]] = {}
    for mode, wanted in MODES.items():
        try:
            with deterministic(wanted):
                output = forward()

                def backward(output: Tensor = output) -> tuple[Tensor, ...]:
                    return torch.autograd.grad(output, inputs, upstream, retain_graph=True)

                counts = differing(backward(), backward, sizes.runs)
                found[mode] = dict(zip(GRADIENTS, counts, strict=True))
                found[mode]["forward"] = differing([output], lambda: [forward()], sizes.runs)[0]
        except RuntimeError as error:  # no kernel of this backend for the dtype, or none that is deterministic
            found[mode] = {"refused": str(error).partition("\n")[0]}
            continue
        steps[f"{mode}_ms"] = in_mode(backward, wanted)
    found |= medians(steps, device, sizes.rounds)
    if len(steps) == len(MODES):
        found["cost"] = round(found["deterministic_ms"] / found["default_ms"], 3)
    return found


def in_mode(step: Callable[[], object], wanted: bool) -> Callable[[], None]:
    """Returns ``step`` in a context of :func:`deterministic`."""

    def run() -> None:
        with deterministic(wanted):
            step()

    return run


# -- the batch ---------------------------------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """An operation on rows: ``run`` takes (m, width) rows and returns a result for each."""

    name: str
    shape: str
    dtype: str
    width: int
    run: Callable[[Tensor], Tensor]


def operations(sizes: Sizes, device: torch.device) -> Iterator[Operation]:
    """Yields the operations one by one, since the weights of all do not fit into memory together."""
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int, name: str) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(DTYPES[name])

    for (inputs, outputs), name in itertools.product(sizes.products, DTYPES):
        weight = random(outputs, inputs, name=name)
        bias = random(outputs, name=name)
        size = f"{inputs} to {outputs}"
        yield Operation("F.linear", size, name, inputs, lambda rows, weight=weight: F.linear(rows, weight))
        yield Operation(
            "F.linear with bias",
            size,
            name,
            inputs,
            lambda rows, weight=weight, bias=bias: F.linear(rows, weight, bias),
        )
        del weight, bias
    for width, name in itertools.product(sizes.norms, ("bf16", "fp16", "fp32")):
        weight, bias = random(width, name=name), random(width, name=name)
        of_norms: dict[str, Callable[[Tensor], Tensor]] = {
            "F.layer_norm": lambda rows, w=weight, b=bias: F.layer_norm(rows, w.shape, w, b),
            "fabricamp's layer_norm": lambda rows, w=weight, b=bias: layer_norm(rows, w.shape, w, b),
            "F.rms_norm": lambda rows, w=weight: F.rms_norm(rows, w.shape, w, 1e-5),
            "fabricamp's rms_norm": lambda rows, w=weight: rms_norm(rows, w.shape, w, 1e-5),
        }
        for norm, run in of_norms.items():
            yield Operation(norm, str(width), name, width, run)
    for width, name in itertools.product(sizes.classes, ("bf16", "fp16", "fp32")):
        of_classes: dict[str, Callable[[Tensor], Tensor]] = {
            "softmax": lambda rows: rows.softmax(-1),
            "log_softmax": lambda rows: rows.log_softmax(-1),
            "sum": lambda rows: rows.sum(-1),
            "mean": lambda rows: rows.mean(-1),
            "norm": lambda rows: torch.linalg.vector_norm(rows, dim=-1),
        }
        for sum_, run in of_classes.items():
            yield Operation(sum_, str(width), name, width, run)


def groups_of_bits(run: Callable[[Tensor], Tensor], rows: Tensor, sizes: Sequence[int]) -> list[list[int]]:
    """Returns the numbers of rows m in groups: within one, the first row's result has the same bits.  The first is that of m=1."""
    groups: list[tuple[Tensor, list[int]]] = []
    for m in (1, *sizes):
        result = run(rows[:m])[0].clone()
        group = next((numbers for known, numbers in groups if same_bits(known, result)), None)
        if group is None:
            groups.append((result, [m]))
        else:
            group.append(m)
    return [numbers for _, numbers in groups]


@torch.no_grad()
def batch(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields a row for each operation, shape and dtype: the numbers of rows, in groups of equal bits."""
    generator = torch.Generator(device).manual_seed(2)
    for one in operations(sizes, device):
        # Not more than 2**28 values: a softmax over 128256 classes has as many results as inputs.
        tried = [m for m in sizes.rows if m * max(one.width, *map(int, one.shape.split(" to "))) <= 2**28]
        drawn = torch.randn(tried[-1], one.width, generator=generator, dtype=torch.float32, device=device)
        rows = drawn.to(DTYPES[one.dtype])
        with products_in(one.dtype):
            groups = groups_of_bits(one.run, rows, tried)
        yield {"part": "batch", "operation": one.name, "shape": one.shape, "dtype": one.dtype, "groups": groups}


# -- RMSNorm under autocast --------------------------------------------------------------------------------------------------------


def rms_norms(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields a row for each shape: ms of forward, and of forward and backward, by torch, after ``fuse``, and in bf16."""
    for rows, width in sizes.rms_norms:
        plain = nn.RMSNorm(width, device=device, dtype=torch.float32)
        layers = {"torch": plain, "fused": fuse(copy.deepcopy(plain)), "bf16": copy.deepcopy(plain).bfloat16()}
        x = torch.randn(rows, width, dtype=torch.bfloat16, device=device).requires_grad_()
        steps: dict[str, Callable[[], object]] = {}
        for name, layer in layers.items():
            steps[f"{name}_forward_ms"], steps[f"{name}_both_ms"] = passes(layer, x, device)
        found = medians(steps, device, sizes.rounds)
        found["times_fused"] = round(found["torch_both_ms"] / found["fused_both_ms"], 3)
        yield {"part": "rms_norm", "rows": rows, "width": width, **found}


def passes(layer: nn.RMSNorm, x: Tensor, device: torch.device) -> tuple[Callable[[], Tensor], Callable[[], object]]:
    """Returns the forward pass of ``layer`` under autocast, and forward and backward together."""
    upstream = torch.randn_like(x)

    def forward() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            output: Tensor = layer(x)
        return output

    def both() -> object:
        output = forward()
        return torch.autograd.grad(output, (x, layer.weight), upstream.to(output.dtype))

    return forward, both


# -- the program -------------------------------------------------------------------------------------------------------------------

PARTS = {"attention": attention, "batch": batch, "rms_norm": rms_norms}


def told(row: dict[str, Any]) -> str:
    """Returns a row as a line for the terminal."""
    return "  ".join(f"{name} {value}" for name, value in row.items() if name != "part")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that all runs; always so without a GPU"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    sizes = QUICK if arguments.quick or not on_gpu else FULL
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "rows": [],
    }
    if on_gpu:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # deterministic products need it before cuBLAS begins
        found["cudnn"] = torch.backends.cudnn.version()
    for part in arguments.only.split(","):
        for row in PARTS[part](sizes, device):
            print(told(row), flush=True)
            found["rows"].append(row)
            if arguments.out is not None:  # after each row, so that an interrupted run keeps them
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
