"""Measures from which width on a compiled block of a transformer is faster in FP8 than in bf16: forward and backward, by recipe.

    python benchmarks/fp8_linears.py [--sizes 2048x8192,4096x4096] [--seconds 100] [--out FILE]

A size is a width and a number of tokens.  The block is that of the GPT example, compiled as ``Trainer(compile="blocks")`` compiles
it, so the casts are fused with what comes before and after; all of its linear layers are in FP8.

GPU ms: a pass is a CUDA graph, so the host does not count, and is replayed for half a second at a time, as a card that multiplies
without a pause runs at a lower clock; the recipes alternately, medians.  "gain" is bf16's time divided by that of a recipe.  Each
size has a process; all compile at the same time, then they measure one after the other.  Recipes at the end of the list are left
out when the time is over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from examples.gpt.gpt import Block
from fabricamp.precision.float8_linears import change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

LENGTH: Final = 2048
HEAD: Final = 128
LAYERS: Final = 24
"""Of the network that the block is part of: its first values depend on it."""
KINDS: Final = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp")
SIZES: Final = "2048x8192,4096x8192,3072x8192,1536x8192,2048x4096,4096x4096"


def pass_of(width: int, tokens: int, kind: str, device: torch.device) -> Callable[[], None]:
    """Returns a compiled forward and backward of a block with bf16 weights."""
    torch.manual_seed(0)
    block = Block(width, max(1, width // HEAD), LAYERS).to(device, torch.bfloat16)
    if kind != "bf16":
        layers = [layer for layer in block.modules() if isinstance(layer, torch.nn.Linear)]
        change(layers, kind, emulate=device.type == "cpu")
    length = min(LENGTH, tokens)
    x = torch.randn(tokens // length, length, width, dtype=torch.bfloat16, device=device).requires_grad_()
    upstream = torch.randn_like(x)
    compiled = torch.compile(block, dynamic=False, options={"deterministic": True})  # as the Trainer compiles

    def run() -> None:
        x.grad = None
        for parameter in block.parameters():
            parameter.grad = None
        compiled(x).backward(upstream)

    return run


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that replays a CUDA graph of ``run``, which is called a few times before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return Replay(graph, run)


class Replay(NamedTuple):
    """A captured pass."""

    graph: torch.cuda.CUDAGraph
    reads: Callable[[], None]
    """What was captured: the graph reads its weights and its input, which would be freed without a reference."""

    def __call__(self) -> None:
        """Replays the graph."""
        self.graph.replay()


def milliseconds(run: Callable[[], None], estimate: float) -> float:
    """Returns the GPU time of one call of ``run`` in ms, over half a second after a quarter; it takes about ``estimate`` ms."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(round(250 / estimate)):
        run()
    repeats = round(500 / estimate)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def estimated(run: Callable[[], None]) -> float:
    """Returns about how many ms one call of ``run`` takes."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    return 200 * (time.perf_counter() - begun)


def worker(width: int, tokens: int, rounds: int, parent: Connection) -> None:
    """Compiles the kinds of one size until ``parent`` says "stop", measures them when it says "measure", and sends the row."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.config.recompile_limit = 4 * len(KINDS)  # each kind is a variant of the block's code
    runs: dict[str, Callable[[], None]] = {}
    for kind in KINDS:
        if parent.poll():
            break
        run = pass_of(width, tokens, kind, device)
        run()
        runs[kind] = run if device.type == "cpu" else captured(run)
    parent.send("ready")
    while parent.recv() != "measure":
        pass
    if device.type == "cpu":
        parent.send({"width": width, "tokens": tokens, "compiled": list(runs)})
        return
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    estimates = {kind: estimated(run) for kind, run in runs.items()}
    for _ in range(rounds):
        for kind, run in runs.items():
            times[kind].append(milliseconds(run, estimates[kind]))
    middle = {kind: statistics.median(each) for kind, each in times.items()}
    gains = {kind: round(middle["bf16"] / each, 3) for kind, each in middle.items() if kind != "bf16"}
    spread = {kind: round(max(each) / min(each) - 1, 4) for kind, each in times.items()}
    gpu_ms = {kind: round(each, 4) for kind, each in middle.items()}
    parent.send({"width": width, "tokens": tokens, "gpu_ms": gpu_ms, "spread": spread, "gain": gains})


class Workers:
    """The processes of all sizes."""

    def __init__(self, sizes: list[tuple[int, int]], rounds: int) -> None:
        context = get_context("spawn")
        self.pipes = []
        for width, tokens in sizes:
            own, other = context.Pipe()
            context.Process(target=worker, args=(width, tokens, rounds, other), daemon=True).start()
            other.close()
            self.pipes.append(own)

    def compile(self, end: float) -> None:
        """Waits until all have compiled their kinds, or the one that they compile at the time ``end``."""
        waiting = list(self.pipes)
        while waiting and time.perf_counter() < end:
            ready = wait(waiting, timeout=max(0.0, end - time.perf_counter()))
            waiting = [pipe for pipe in waiting if pipe not in ready]
        for pipe in waiting:
            pipe.send("stop")
        self.pipes = [pipe for pipe in self.pipes if is_alive(pipe)]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields a row per size."""
        for pipe in self.pipes:
            pipe.send("measure")
            yield pipe.recv()


def is_alive(pipe: Connection) -> bool:
    """Returns whether a process has said that it is ready; one that has failed has printed its error."""
    try:
        pipe.recv()
    except EOFError:
        return False
    return True


def check_rows(sizes: list[tuple[int, int]], rows: list[dict[str, Any]]) -> None:
    """Ends the script with an error if ``rows`` lack a size, as its process has failed."""
    measured = {(row["width"], row["tokens"]) for row in rows}
    failed = [f"{width}x{tokens}" for width, tokens in sizes if (width, tokens) not in measured]
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}; the errors are above")


def sizes_of(text: str) -> list[tuple[int, int]]:
    """Returns pairs of width and tokens."""
    pairs = [part.split("x") for part in text.split(",")]
    return [(int(width), int(tokens)) for width, tokens in pairs]


def main() -> None:
    """Measures the sizes and prints a row each."""
    begun = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=sizes_of, default=SIZES)
    parser.add_argument("--seconds", type=float, default=100, help="nothing is compiled after 60 %% of them")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    # The processes share the cores.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(options.sizes)))
    os.environ["OMP_NUM_THREADS"] = "1"
    workers = Workers(options.sizes, options.rounds)
    workers.compile(begun + 0.6 * options.seconds)
    print(f"compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(datetime.now(UTC).date()),
        "command": "python benchmarks/fp8_linears.py",
        "length": LENGTH,
        "passes": "replayed as a CUDA graph for half a second at a time",
        "rows": [],
    }
    for row in workers.rows():
        found["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    check_rows(options.sizes, found["rows"])


if __name__ == "__main__":
    main()
