"""Measures from which width on a compiled block of a transformer is faster in FP8 than in bf16: forward and backward, by recipe.

    python benchmarks/fp8_linears.py [--widths 1024,2048] [--tokens 4096,8192] [--seconds 100] [--out FILE]

The block is that of the GPT example, compiled as ``Trainer(compile="blocks")`` compiles it, so the casts are fused with what comes
before and after.  A way names the recipe, then the layers in FP8: all four, all but the square one (width x width), or the two of
the feed-forward part alone.  The difference of two ways is what a layer gains or loses within a block.

GPU ms: events around passes that were queued after a sleeping kernel, so launch gaps do not count; the ways alternately, medians.
"gain" is bf16's time divided by that of a way.  Each size has a process; all compile at the same time, then they measure one after
the other.  Ways at the end of the list are left out when the time is over.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from examples.gpt.gpt import Block
from fabricamp.precision.float8_linears import change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

LENGTH: Final = 2048
HEAD: Final = 128
ALL: Final = ("attention.inward", "attention.outward", "wide", "narrow")
PARTS: Final = {
    "all": ALL,
    "not the square one": ("attention.inward", "wide", "narrow"),
    "feed-forward": ("wide", "narrow"),
}
WAYS: Final = {
    "bf16": None,
    "tensorwise, all": ("tensorwise", "all"),
    "rowwise, all": ("rowwise", "all"),
    "tensorwise, not the square one": ("tensorwise", "not the square one"),
    "tensorwise, feed-forward": ("tensorwise", "feed-forward"),
    "rowwise_with_gw_hp, all": ("rowwise_with_gw_hp", "all"),
    "rowwise, not the square one": ("rowwise", "not the square one"),
    "rowwise, feed-forward": ("rowwise", "feed-forward"),
}


def pass_of(width: int, tokens: int, way: str, device: torch.device) -> Callable[[], None]:
    """Returns a compiled forward and backward of a block with bf16 weights."""
    torch.manual_seed(0)
    heads = max(1, width // HEAD)
    block = Block(width, heads).to(device, torch.bfloat16)
    chosen = WAYS[way]
    if chosen is not None:
        recipe, part = chosen
        change([block.get_submodule(name) for name in PARTS[part]], recipe, emulate=device.type == "cpu")
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


def milliseconds(run: Callable[[], None], device: torch.device, repeats: int = 8) -> float:
    """Returns the time of one call of ``run`` in ms."""
    if device.type == "cpu":
        begun = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begun)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(100_000_000)  # the host queues the calls meanwhile, about 1 ms each
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def worker(width: int, tokens: int, rounds: int, parent: Connection) -> None:
    """Compiles the ways of one size until ``parent`` says "stop", measures them when it says "measure", and sends the row."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.config.recompile_limit = 4 * len(WAYS)  # each way is a variant of the block's code
    runs: dict[str, Callable[[], None]] = {}
    for way in WAYS:
        if parent.poll():
            break
        run = pass_of(width, tokens, way, device)
        run()
        run()
        runs[way] = run
    parent.send("ready")
    while parent.recv() != "measure":
        pass
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(rounds):
        for way, run in runs.items():
            times[way].append(milliseconds(run, device))
    middle = {way: statistics.median(each) for way, each in times.items()}
    gains = {way: round(middle["bf16"] / each, 3) for way, each in middle.items() if way != "bf16"}
    spread = {way: round(max(each) / min(each) - 1, 4) for way, each in times.items()}
    gpu_ms = {way: round(each, 4) for way, each in middle.items()}
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
        """Waits until all have compiled their ways, or the one that they compile at the time ``end``."""
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


def numbers(text: str) -> list[int]:
    """Returns the integers of a list with commas."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measures the sizes and prints a row each."""
    begun = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=numbers, default=[2048, 1024, 1536, 3072, 4096])
    parser.add_argument("--tokens", type=numbers, default=[8192, 4096])
    parser.add_argument("--seconds", type=float, default=100, help="no way is compiled after 60 %% of them")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = [(width, tokens) for tokens in options.tokens for width in options.widths]
    # The processes share the cores.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(sizes)))
    os.environ["OMP_NUM_THREADS"] = "1"
    workers = Workers(sizes, options.rounds)
    workers.compile(begun + 0.6 * options.seconds)
    print(f"compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "length": LENGTH, "rows": []}
    for row in workers.rows():
        found["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
