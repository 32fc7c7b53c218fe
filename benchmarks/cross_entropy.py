"""Compares the cross-entropy, also in place, with torch's: GPU ms, wall ms, share of the copy bandwidth, peak memory.

    python benchmarks/cross_entropy.py [--only 8192x50304] [--quick] [--out results.json]
    python benchmarks/cross_entropy.py --linear [--only 8192x128256] [--quick] [--out results.json]

GPU ms: events around work that was queued after a sleeping kernel, so launch gaps do not count.  Wall ms: forward and backward
back to back, as in a loop.  The rows of a shape are measured alternately; figures are medians of the rounds.
Share: the bandwidth of three passes over the logits (read forward; read and written backward) in the GPU time, divided by the
bandwidth of a large copy in the same run.  Peak: memory of the logits and of everything computed from them, in multiples of the
logits, over forward and backward together.

``--linear`` compares losses of hidden states and the head's weight: fused_linear_cross_entropy, stored logits (torch's, and
with the fused loss in place), both compiled, eight checkpointed chunks, torch's F.linear_cross_entropy in chunks and Liger's
where they are installed.  Ratio: GPU ms divided by the fastest with stored logits.  Peak: GB beyond the operands, and beyond the
weight's gradient too.  Loss and weight: distance of the loss, and the largest of the weight's gradient over its largest value,
to torch in fp32 with stored logits of the same operands.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fabricamp.ops import dispatch, fused_cross_entropy, fused_linear_cross_entropy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Shape(NamedTuple):
    """Rows, classes and dtype; ``compiled`` adds a row for torch.compile, which takes seconds to compile."""

    rows: int
    classes: int
    dtype: torch.dtype = BF16
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.rows}x{self.classes} {str(self.dtype).removeprefix('torch.')}"


SHAPES = [
    Shape(8192, 50304, BF16, compiled=True),
    Shape(8192, 50304, FP16),
    Shape(8192, 50304, FP32),
    Shape(8192, 50257, BF16),  # rows that do not start at 16 bytes
    Shape(16384, 32000, BF16),
    Shape(4096, 128256, BF16),
    Shape(2048, 262144, BF16),
    Shape(131072, 1024, BF16),
]
QUICK = [Shape(512, 50304), Shape(512, 50257)]


def ours(logits: Tensor, target: Tensor) -> Tensor:
    with dispatch.always("cupy"):
        return fused_cross_entropy(logits, target)


def ours_in_place(logits: Tensor, target: Tensor) -> Tensor:
    with dispatch.always("cupy"):
        return fused_cross_entropy(logits, target, in_place=True)


def eager_fp32(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def contestants(shape: Shape) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    rows = {"ours": ours, "ours, in place": ours_in_place, "torch": F.cross_entropy}
    if shape.dtype != FP32 and shape.compiled:
        rows["torch, logits.float()"] = eager_fp32
    if shape.compiled:
        rows["torch.compile"] = torch.compile(F.cross_entropy, fullgraph=True)
    return rows


class Result(NamedTuple):
    """Medians of one row."""

    forward_ms: float
    backward_ms: float
    both_ms: float
    wall_ms: float
    peak: float


class Case:
    """Makes new logits for each call, because in-place contestants overwrite them."""

    def __init__(self, shape: Shape, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        made = torch.empty(shape.rows, shape.classes, dtype=shape.dtype, device=device)
        self.source = made.normal_(generator=generator).requires_grad_()
        self.target = torch.randint(0, shape.classes, (shape.rows,), device=device, generator=generator)

    def logits(self) -> Tensor:
        """Returns logits from an operation that does not need its output in backward, so they may be overwritten."""
        return self.source * 1

    def asleep(self, function: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float, float]:
        """Returns GPU ms of forward, backward and both, queued after a sleeping kernel."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        logits = self.logits()
        torch.cuda._sleep(int(2e7))
        events[0].record()
        loss = function(logits, self.target)
        events[1].record()
        torch.autograd.grad(loss, logits)
        events[2].record()
        torch.cuda.synchronize()
        return tuple(events[one].elapsed_time(events[other]) for one, other in ((0, 1), (1, 2), (0, 2)))

    def wall(self, function: Callable[[Tensor, Tensor], Tensor], repeat: int = 5) -> float:
        """Returns wall ms of forward and backward, without the time to make their logits."""
        given = [self.logits() for _ in range(repeat)]
        torch.cuda.synchronize()
        started = time.perf_counter()
        for logits in given:
            torch.autograd.grad(function(logits, self.target), logits)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / repeat * 1e3

    def peak(self, function: Callable[[Tensor, Tensor], Tensor]) -> float:
        """Returns the peak memory, in multiples of the logits."""
        logits = self.logits()
        size = logits.numel() * logits.element_size()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - size
        torch.autograd.grad(function(logits, self.target), logits)
        return (torch.cuda.max_memory_allocated() - before) / size


def measured(shape: Shape, rounds: int) -> dict[str, Result]:
    case, rows = Case(shape, "cuda"), contestants(shape)
    for function in rows.values():
        for _ in range(3):
            case.asleep(function)
    gpu: dict[str, list[tuple[float, float, float]]] = {name: [] for name in rows}
    wall: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, function in rows.items():
            gpu[name].append(case.asleep(function))
            wall[name].append(case.wall(function))
    return {
        name: Result(
            *map(statistics.median, zip(*gpu[name], strict=True)), statistics.median(wall[name]), case.peak(function)
        )
        for name, function in rows.items()
    }


class Linear(NamedTuple):
    """Rows, classes, width of the hidden states, and dtype."""

    rows: int
    classes: int
    width: int
    dtype: torch.dtype = BF16

    def __str__(self) -> str:
        return f"{self.rows}x{self.classes}x{self.width} {str(self.dtype).removeprefix('torch.')}"


LINEAR = [Linear(8192, 128256, 4096), Linear(8192, 128256, 4096, FP16), Linear(16384, 50304, 768)]
QUICK_LINEAR = [Linear(2048, 50304, 1024)]
CHUNKS = 8


def stored(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    with dispatch.always("cupy"):
        return fused_cross_entropy(F.linear(hidden, weight), target, in_place=True)


def stored_by_torch(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def stored_in_fp32(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def in_fp32_sums(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return fused_linear_cross_entropy(hidden, weight, target, accumulate="fp32")


def checkpointed_chunks(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    def of_chunk(some: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(some, weight).float(), labels, reduction="sum")

    parts = zip(hidden.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)
    return sum(checkpoint(of_chunk, some, weight, labels, use_reentrant=False) for some, labels in parts) / len(target)


def torch_in_chunks(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.linear_cross_entropy(hidden, weight, target, options=torch.nn.LinearCrossEntropyOptions())


def of_liger() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        print(f"without Liger: {error}")
        return None
    return liger_fused_linear_cross_entropy


def linear_contestants() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    rows = {
        "ours": fused_linear_cross_entropy,
        "ours, fp32 sums": in_fp32_sums,
        "stored, fused in place": stored,
        "stored, torch": stored_by_torch,
        "stored, torch in fp32": stored_in_fp32,
        "ours, compiled": torch.compile(fused_linear_cross_entropy, fullgraph=True),
        "stored, compiled": torch.compile(stored_in_fp32, fullgraph=True),
        "checkpointed chunks": checkpointed_chunks,
    }
    if hasattr(F, "linear_cross_entropy"):
        rows["torch, in chunks"] = torch_in_chunks
    liger = of_liger()
    if liger is not None:
        rows["Liger"] = liger
    return rows


class LinearResult(NamedTuple):
    """Medians of one row, in ms; memory in GB; distances to fp32."""

    forward_ms: float
    backward_ms: float
    both_ms: float
    peak_gb: float
    beyond_gradient_gb: float
    loss_error: float
    weight_error: float


class LinearCase:
    """One loss of hidden states and the weight of a head."""

    def __init__(self, shape: Linear, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def made(*size: int) -> Tensor:
            return torch.empty(*size, dtype=shape.dtype, device=device).normal_(generator=generator)

        self.hidden = made(shape.rows, shape.width).requires_grad_()
        self.weight = made(shape.classes, shape.width).mul_(shape.width**-0.5).requires_grad_()
        self.target = torch.randint(0, shape.classes, (shape.rows,), device=device, generator=generator)
        # fp16 trains with a loss scale, without which most of these gradients are zeros.
        self.scale = 65536.0 if shape.dtype == FP16 else 1.0
        self.truth = self._in_fp32()

    def _in_fp32(self) -> tuple[Tensor, Tensor]:
        leaves = [one.detach().float().requires_grad_() for one in (self.hidden, self.weight)]
        loss = F.cross_entropy(F.linear(*leaves), self.target)
        return loss.detach(), torch.autograd.grad(loss * self.scale, leaves[1])[0].cpu()

    def once(self, function: Callable[..., Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the loss and the gradients of a forward and backward."""
        loss = function(self.hidden, self.weight, self.target)
        return loss, torch.autograd.grad(loss * self.scale, (self.hidden, self.weight))

    def asleep(self, function: Callable[..., Tensor]) -> tuple[float, float, float]:
        """Returns GPU ms of forward, backward and both, queued after a sleeping kernel."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda._sleep(int(2e7))
        events[0].record()
        loss = function(self.hidden, self.weight, self.target)
        events[1].record()
        torch.autograd.grad(loss * self.scale, (self.hidden, self.weight))
        events[2].record()
        torch.cuda.synchronize()
        return tuple(events[one].elapsed_time(events[other]) for one, other in ((0, 1), (1, 2), (0, 2)))

    def memory_and_errors(self, function: Callable[..., Tensor]) -> tuple[float, float, float, float]:
        """Returns the peak in GB, with and without the weight's gradient, and the distances of loss and that gradient to fp32."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, (_, of_weight) = self.once(function)
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        exact = self.truth[1].to(of_weight.device)
        error = ((of_weight.float() - exact).abs().max() / exact.abs().max()).item()
        own = self.weight.numel() * self.weight.element_size() / 1e9
        return peak, peak - own, abs(loss.item() - self.truth[0].item()), error


def linear_measured(shape: Linear, rounds: int) -> dict[str, LinearResult | str]:
    case, rows, found = LinearCase(shape, "cuda"), linear_contestants(), {}
    for name, function in list(rows.items()):
        try:
            for _ in range(2):
                case.asleep(function)
        except Exception as error:  # noqa: BLE001 - another package's kernels on another machine: the others are still measured
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            del rows[name]
    gpu: dict[str, list[tuple[float, float, float]]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, function in rows.items():
            gpu[name].append(case.asleep(function))
    for name, function in rows.items():
        times = map(statistics.median, zip(*gpu[name], strict=True))
        found[name] = LinearResult(*times, *case.memory_and_errors(function))
    return found


def compare_linear(found: dict, arguments: argparse.Namespace) -> None:
    print(
        f"{'shape':26} {'row':24} {'forward':>8} {'backward':>8} {'both':>8} {'ratio':>6} {'peak':>6} {'beyond':>6} loss, weight"
    )
    for shape in QUICK_LINEAR if arguments.quick else LINEAR:
        if not str(shape).startswith(arguments.only):
            continue
        results = linear_measured(shape, 3 if arguments.quick else 5)
        fastest = min(
            result.both_ms
            for name, result in results.items()
            if name.startswith("stored") and isinstance(result, LinearResult)
        )
        for name, result in results.items():
            about = {
                "shape": str(shape),
                "rows": shape.rows,
                "classes": shape.classes,
                "width": shape.width,
                "row": name,
            }
            if isinstance(result, str):
                print(f"{shape!s:26} {name:24} {result}")
                found["rows"].append({**about, "error": result})
                continue
            ratio = result.both_ms / fastest
            times = " ".join(f"{one:8.3f}" for one in result[:3])
            memory = f"{result.peak_gb:6.2f} {result.beyond_gradient_gb:6.2f}"
            print(f"{shape!s:26} {name:24} {times} {ratio:6.3f} {memory} {result[5]:.1e} {result[6]:.1e}", flush=True)
            found["rows"].append({**about, **result._asdict(), "ratio_to_stored": round(ratio, 4)})
        torch.cuda.empty_cache()
        write(found, arguments.out)


def copy_bandwidth() -> float:
    """Returns the GB/s of a large device-to-device copy, counting read and written bytes."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        target.copy_(source)
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return 2 * source.numel() / statistics.median(times) / 1e6


def write(found: dict, out: Path | None) -> None:
    """Writes the results; called after every shape, so that an interrupted run keeps them."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes whose name begins with this")
    parser.add_argument("--quick", action="store_true", help="two small shapes: a run of seconds")
    parser.add_argument("--linear", action="store_true", help="losses of hidden states and the head's weight")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU here")
    bandwidth = copy_bandwidth()
    found = {"torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    found |= {"device": torch.cuda.get_device_name(), "copy_gb_per_s": round(bandwidth)}
    found |= {"command": " ".join(["python", *sys.argv]), "rows": []}
    print(f"{found['device']}, torch {torch.__version__}, copy {bandwidth:.0f} GB/s")
    if arguments.linear:
        compare_linear(found, arguments)
        return
    print(f"{'shape':22} {'row':22} {'forward':>8} {'backward':>8} {'both':>8} {'wall':>8} {'share':>6} {'peak':>6}")
    for shape in QUICK if arguments.quick else SHAPES:
        if not str(shape).startswith(arguments.only):
            continue
        logits = shape.rows * shape.classes * shape.dtype.itemsize
        for name, result in measured(shape, 3 if arguments.quick else 7).items():
            share = 3 * logits / result.both_ms / 1e6 / bandwidth
            times = " ".join(f"{one:8.3f}" for one in result[:4])
            print(f"{shape!s:22} {name:22} {times} {share:6.0%} {result.peak:6.2f}", flush=True)
            about = {"shape": str(shape), "rows": shape.rows, "classes": shape.classes, "row": name}
            found["rows"].append({**about, **result._asdict(), "share_of_copy": round(share, 4)})
        torch.cuda.empty_cache()
        write(found, arguments.out)


if __name__ == "__main__":
    main()
