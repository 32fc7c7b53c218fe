"""Compares LayerNorm, RMSNorm and cross-entropy with torch's: GPU ms and share of the copy bandwidth, forward and backward.

    python benchmarks/norms.py [--only layer_norm,rms_norm] [--widths 768,4096] [--dtypes bfloat16] [--quick] [--out FILE]
    python benchmarks/norms.py --host                              (host time of a call of the norms, at 4096 x 768; seconds)
    python benchmarks/norms.py --write-dispatch fabricamp/ops/dispatch.json      (the package's own table; minutes)

GPU ms: events around passes that were queued after a sleeping kernel, so launch gaps do not count; kernels and torch alternately,
medians.  Share: the bandwidth of the necessary bytes (each input read once, each output written once) in the GPU time, divided by
the bandwidth of a large device-to-device copy in the same run.  "runs" is the choice of the package's table for that row.
torch.compile is only measured for the shapes of MODELS, because compiling takes seconds.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import platform
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F

from fabricamp.ops import dispatch, fused_cross_entropy, layer_norm, rms_norm
from fabricamp.ops.measure import about, measure_card

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

WIDTHS = (128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
FEW_WIDTHS = (1024, 4096, 16384)  # of the dtypes after the first
CLASSES = (1024, 32768, 50304, 128256)
MODELS = ((16384, 768), (16384, 4096), (8192, 8192))
ELEMENTS = 2**26  # 128 MiB of half values


class Pass(NamedTuple):
    """A forward pass, the tensors to differentiate with respect to, and the gradient of the output."""

    forward: Callable[[], Tensor]
    inputs: list[Tensor]
    upstream: Tensor | None


class Subject(NamedTuple):
    """An operation to compare: our function, torch's, their operands, and the passes over the input of each direction."""

    operands: Callable[[int, int, torch.dtype], tuple[list[Tensor], Tensor | None]]
    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    passes: dict[str, int]
    widths: tuple[int, ...]


def norm_operands(*, bias: bool) -> Callable[[int, int, torch.dtype], tuple[list[Tensor], Tensor | None]]:
    def make(rows: int, width: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
        x = torch.randn(rows, width, dtype=dtype, device="cuda")
        parameters = [torch.randn(width, dtype=dtype, device="cuda") for _ in range(1 + bias)]
        return [one.requires_grad_() for one in (x, *parameters)], torch.randn_like(x)

    return make


def class_operands(rows: int, width: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    logits = torch.randn(rows, width, dtype=dtype, device="cuda").requires_grad_()
    return [logits, torch.randint(width, (rows,), device="cuda")], None


NORM_PASSES = {"forward": 2, "backward": 3, "both": 5}

# Each entry is a row of the table; the code below is the same for all rows.
SUBJECTS: dict[str, Subject] = {
    "layer_norm": Subject(
        norm_operands(bias=True),
        lambda x, weight, bias: layer_norm(x, x.shape[-1], weight, bias),
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
        NORM_PASSES,
        WIDTHS,
    ),
    "rms_norm": Subject(
        norm_operands(bias=False),
        lambda x, weight: rms_norm(x, x.shape[-1], weight, 1e-5),
        lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-5),
        NORM_PASSES,
        WIDTHS,
    ),
    "cross_entropy": Subject(
        class_operands, fused_cross_entropy, F.cross_entropy, {"forward": 1, "backward": 2, "both": 3}, CLASSES
    ),
}


def milliseconds(step: Callable[[], object], repeat: int) -> float:
    """Returns the GPU ms of ``step``, queued ``repeat`` times after a kernel that sleeps while the host queues them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(1e6 * repeat))
    start.record()
    for _ in range(repeat):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeat


def steps_of(one: Pass) -> dict[str, Callable[[], object]]:
    output = one.forward()

    def both() -> object:
        return torch.autograd.grad(one.forward(), one.inputs, one.upstream)

    def backward() -> object:
        return torch.autograd.grad(output, one.inputs, one.upstream, retain_graph=True)

    return {"forward": one.forward, "backward": backward, "both": both}


def measure(subject: Subject, rows: int, width: int, dtype: torch.dtype, *, compiled: bool, rounds: int) -> dict:
    """Returns medians by implementation and direction: ``{"ours": {"forward": ms, ...}, ...}``."""
    operands, upstream = subject.operands(rows, width, dtype)
    inputs = [one for one in operands if one.requires_grad]
    functions: dict[str, Callable[..., Tensor]] = {"ours": subject.ours, "torch": subject.torchs}
    if compiled:
        torch._dynamo.reset()
        functions["compiled"] = torch.compile(subject.torchs, dynamic=False)
    steps: dict[str, dict[str, Callable[[], object]]] = {}
    for name, function in functions.items():
        with dispatch.always("cupy"):
            one = Pass(lambda function=function: function(*operands), inputs, upstream)
            steps[name] = steps_of(one)
            if name == "compiled":  # a compiled function frees its saved tensors after one backward pass
                del steps[name]["backward"]
    taken: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name, ways in steps.items()}
    for turn in range(rounds + 1):
        for name, ways in steps.items():
            for way, step in ways.items():
                with dispatch.always("cupy") if name == "ours" else nullcontext():
                    found = milliseconds(step, 3)
                if turn > 0:  # the first compiles
                    taken[name][way].append(found)
    medians = {name: {way: statistics.median(times) for way, times in ways.items()} for name, ways in taken.items()}
    if compiled:
        medians["compiled"]["backward"] = medians["compiled"]["both"] - medians["compiled"]["forward"]
    return medians


def on_the_host(calls: int = 200, rounds: int = 15) -> None:
    """Prints the host us to launch a forward and backward pass, measured alternately: medians and minima.

    Compares kernels, torch's operations, and "chosen", the choice of eager calls of ours at this size.
    """
    for name, dtype in itertools.product(("layer_norm", "rms_norm"), (torch.bfloat16, torch.float32)):
        subject = SUBJECTS[name]
        operands, upstream = subject.operands(4096, 768, dtype)
        for way in ("both", "forward"):
            taken: dict[str, list[float]] = {"kernels": [], "chosen": [], "torch": []}
            for turn, who in itertools.product(range(rounds + 2), taken):
                function = subject.torchs if who == "torch" else subject.ours
                step = steps_of(Pass(functools.partial(function, *operands), operands, upstream))[way]
                with dispatch.always("cupy") if who == "kernels" else nullcontext():
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                    for _ in range(calls):
                        step()
                if turn > 1:  # the first ones compile
                    taken[who].append(1e6 * (time.perf_counter() - begun) / calls)
            found = "  ".join(f"{who} {statistics.median(one):6.1f} ({min(one):6.1f})" for who, one in taken.items())
            ours, chosen = (
                statistics.median(taken[who]) / statistics.median(taken["torch"]) for who in ("kernels", "chosen")
            )
            print(
                f"{name:11} {dispatch.name_of(dtype):9} {way:8} host us: {found}  {ours:.2f}, {chosen:.2f}", flush=True
            )


def copy_bandwidth() -> float:
    """Returns the GB/s of a large device-to-device copy, counting read and written bytes."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    target.copy_(source)
    taken = statistics.median(milliseconds(lambda: target.copy_(source), 3) for _ in range(5))
    return 2 * source.numel() / taken / 1e6


def shapes(name: str, dtype: torch.dtype, arguments: argparse.Namespace) -> list[tuple[int, int, bool]]:
    """Returns (rows, width, whether torch.compile is measured too) of each measurement."""
    subject = SUBJECTS[name]
    first = arguments.dtypes.split(",")[0]
    if arguments.widths:
        widths = tuple(int(one) for one in arguments.widths.split(","))
    elif dispatch.name_of(dtype) == first or subject.passes is not NORM_PASSES:
        widths = subject.widths
    else:
        widths = FEW_WIDTHS
    if arguments.quick:
        return [(1024, widths[0], False)]
    found = [(ELEMENTS // width, width, False) for width in widths]
    if subject.passes is NORM_PASSES and dispatch.name_of(dtype) == first and not arguments.widths:
        found += [(*model, not arguments.no_compile) for model in MODELS]
    return found


def show(name: str, dtype: torch.dtype, rows: int, width: int, medians: dict, bandwidth: float) -> list[dict]:
    made = []
    chosen = dispatch.chosen(name, dtype, width, torch.device("cuda", torch.cuda.current_device()))
    for way, passes in SUBJECTS[name].passes.items():
        moved = passes * rows * width * dtype.itemsize
        row: dict[str, Any] = {"op": name, "dtype": dispatch.name_of(dtype), "rows": rows, "width": width, "way": way}
        cells = []
        for who in ("ours", "torch", "compiled"):
            if who not in medians:
                cells.append(f"{'':14}")
                continue
            taken = medians[who][way]
            row |= {f"{who}_ms": round(taken, 5), f"{who}_share": round(moved / taken / 1e6 / bandwidth, 4)}
            cells.append(f"{taken:8.4f} {row[f'{who}_share']:5.0%}")
        gain = medians["torch"][way] / medians["ours"][way]
        row |= {"times_torch": round(gain, 3), "runs": "kernel" if chosen else "torch"}
        print(
            f"{name:13} {row['dtype']:9} {rows:7} {width:6} {way:8} {'  '.join(cells)} {gain:6.2f}x {row['runs']}",
            flush=True,
        )
        made.append(row)
    return made


def run(arguments: argparse.Namespace, found: dict) -> None:
    bandwidth = copy_bandwidth()
    found |= {"device": torch.cuda.get_device_name(), "copy_gb_per_s": round(bandwidth)}
    print(f"{about(torch.device('cuda', 0))}, copy {bandwidth:.0f} GB/s")
    heads = "  ".join(f"{who:>8} {'share':>5}" for who in ("ours", "torch", "compiled"))
    print(f"{'op':13} {'dtype':9} {'rows':>7} {'width':>6} {'way':8} {heads} {'gain':>7} runs")
    for name in arguments.only.split(","):
        for dtype in (getattr(torch, one) for one in arguments.dtypes.split(",")):
            for rows, width, compiled in shapes(name, dtype, arguments):
                rounds = 1 if arguments.quick else 5
                medians = measure(SUBJECTS[name], rows, width, dtype, compiled=compiled, rounds=rounds)
                found["rows"] += show(name, dtype, rows, width, medians, bandwidth)
                write(found, arguments.out)
                torch.cuda.empty_cache()


def write(found: dict, out: Path | None) -> None:
    """Writes the results; called after every part, so that an interrupted run keeps them."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SUBJECTS))
    parser.add_argument("--widths", default="", help="by default those of each row of SUBJECTS")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--quick", action="store_true", help="one small shape of each, to see that all runs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--host", action="store_true", help="the host's time of a call of the norms, and nothing else")
    parser.add_argument(
        "--write-dispatch", type=Path, metavar="FILE", help="measure the dispatch table and put it there"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU here")
    torch.manual_seed(0)
    if arguments.host:
        on_the_host()
        return
    if arguments.write_dispatch:
        device = torch.device("cuda", torch.cuda.current_device())
        dispatch.write(arguments.write_dispatch, dispatch.capability(device), measure_card(device))
        return
    found = {"torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    found |= {"command": " ".join(["python", *sys.argv]), "rows": []}
    run(arguments, found)


if __name__ == "__main__":
    main()
