"""Compares the cost of the gradient exchange: torch's DistributedDataParallel, ours delayed and overlapped, and no exchange.

    torchrun --nproc_per_node=2 benchmarks/ddp.py [--rounds 7] [--turns 12] [--out results.json] [--quick]

A step is forward and backward under fp16 autocast, the exchange, and torch's fused SGD with momentum; ResNet-50 (channels_last)
at batch 64 and 8 per rank, and GPT-2-small with a separate head (162 million parameters) on 8 windows of 512 tokens.  All runs of
a column have the same network, weights, batch and optimizer; only the wrapper differs, and none sends BatchNorm's buffers.  "flat
all_reduce" is the exchange alone: one collective over all gradients, in fp32.

A round runs some steps of each variant in turn, several times, each time beginning with another one: a host that slows down for
some seconds slows all of them.  Wall ms: back-to-back steps, as in a loop; the mean of a round's turns.  GPU ms: a step queued
while the GPU sleeps, which starts after the ranks have synchronised; neither the host's speed nor a late rank counts; the median of
several.  Both are medians of the rounds, on rank 0; all ranks synchronise between runs.  The goals are ratios in GPU time: delayed
to no exchange plus the flat all_reduce, overlapped to torch's with gradient_as_bucket_view.  In wall time the goal of both is at
most the fastest torch DDP: the ratio is taken in each round, and is not decided if the quartiles of the rounds span 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as OfTorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rounds as of_rounds
from benchmarks.models import resnet50, tiny_resnet
from examples.gpt.gpt import GPT
from fabricamp import ops
from fabricamp.apex.parallel import DistributedDataParallel as Ours

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

QUEUED = 3  # steps of a variant in a round that are queued while the GPU sleeps
WARM_UP = 6  # after the first step torch's DDP rebuilds its buckets, and ours knows the order of the gradients
GOALS = {"delayed": 1.03, "overlapped": 1.0}
WALL_GOAL = 1.0


class Workload(NamedTuple):
    """A network and its batch; ``loss`` calls the network, wrapped or not."""

    network: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]


def images(make: Callable[[], nn.Module], batch: int, size: int, classes: int, device: torch.device) -> Workload:
    torch.manual_seed(0)
    network = make().to(device).to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(batch, 3, size, size, generator=generator).to(device).to(memory_format=torch.channels_last)
    y = torch.randint(classes, (batch,), generator=generator).to(device)
    return Workload(network, lambda model: F.cross_entropy(model(x), y))


def tokens(vocabulary: int, batch: int, device: torch.device, **sizes: int) -> Workload:
    torch.manual_seed(0)
    with device:
        network = GPT(vocabulary, **sizes)
    generator = torch.Generator().manual_seed(dist.get_rank())
    windows = torch.randint(vocabulary, (batch, sizes["context"] + 1), generator=generator).to(device)
    return Workload(network, lambda model: model(windows[:, :-1], windows[:, 1:]))


WORKLOADS: dict[str, Callable[[torch.device], Workload]] = {
    "ResNet-50, batch 64": partial(images, resnet50, 64, 224, 1000),
    "GPT-2-small, 8 x 512": partial(tokens, 50304, 8, context=512, layers=12, width=768, heads=12),
    "ResNet-50, batch 8": partial(images, resnet50, 8, 224, 1000),
}
QUICK: dict[str, Callable[[torch.device], Workload]] = {
    "tiny ResNet, batch 2": partial(images, tiny_resnet, 2, 32, 10),
    "tiny GPT, 2 x 16": partial(tokens, 256, 2, context=16, layers=1, width=16, heads=2),
}


def of_torch(network: nn.Module, **options: bool) -> nn.Module:
    device = next(network.parameters()).device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases of torch rename broadcast_buffers
        return OfTorch(
            network, device_ids=[device.index] if device.type == "cuda" else None, broadcast_buffers=False, **options
        )


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "no exchange": lambda network: network,
    "torch DDP": of_torch,
    "torch DDP, gradient_as_bucket_view": partial(of_torch, gradient_as_bucket_view=True),
    "fabricamp, delayed": partial(Ours, delay_allreduce=True),
    "fabricamp, overlapped": Ours,
}
FLAT = "flat all_reduce alone"
OF_TORCH = ["torch DDP", "torch DDP, gradient_as_bucket_view"]


def wall_ms(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Returns the wall ms of one of ``steps`` steps that all ranks start together."""
    settle(device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps * 1e3


def wall_ms_of_round(
    runs: dict[str, Callable[[], None]], turns: int, steps: int, device: torch.device
) -> dict[str, float]:
    """Returns the mean wall ms of a step of each variant, over ``turns`` runs of ``steps`` steps."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(wall_ms(runs[name], steps, device))
    return {name: statistics.fmean(of_turns) for name, of_turns in found.items()}


def settle(device: torch.device) -> None:
    """Waits for all ranks and the device, so that the ranks start together."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def queued(step: Callable[[], None], device: torch.device) -> float:
    """Returns the GPU ms of a step that starts after it is queued completely and the ranks have synchronised."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    token = torch.zeros(1, device=device)
    settle(device)
    torch.cuda._sleep(int(1e8))  # 50 ms
    dist.all_reduce(token)
    first.record()
    step()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def make_step(workload: Workload, wrap: Callable[[nn.Module], nn.Module], device: torch.device) -> Callable[[], None]:
    model = wrap(workload.network)
    optimizer = torch.optim.SGD(workload.network.parameters(), lr=1e-4, momentum=0.9, fused=True)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16):
            loss = workload.loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(
    make: Callable[[torch.device], Workload], device: torch.device, rounds: int, turns: int, steps: int
) -> list[dict[str, Any]]:
    """Returns one row per variant; each has its own network, because two wrappers on one would hook each other's gradients."""
    runs = {name: make_step(make(device), wrap, device) for name, wrap in WAYS.items()}
    elements = sum(one.numel() for one in make(device).network.parameters())
    flat = torch.zeros(elements, device=device)
    runs[FLAT] = lambda: dist.all_reduce(flat)
    for step in runs.values():
        wall_ms(step, WARM_UP, device)
    walls: dict[str, list[float]] = {name: [] for name in runs}
    gpus: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, wall in wall_ms_of_round(runs, turns, steps, device).items():
            walls[name].append(wall)
        if device.type == "cuda":
            for name, step in runs.items():
                gpus[name].append(statistics.median(queued(step, device) for _ in range(QUEUED)))
    return [
        {
            "run": name,
            "gpu_ms": statistics.median(gpus[name]) if gpus[name] else None,
            "wall_ms": statistics.median(walls[name]),
            "wall_ms_of_rounds": [round(one, 3) for one in walls[name]],
        }
        for name in runs
    ]


def ratios(rows: list[dict]) -> dict[str, float]:
    """Returns the ratios that the goals limit, in GPU time, or in wall time without a GPU."""
    column = "gpu_ms" if rows[0]["gpu_ms"] is not None else "wall_ms"
    of = {row["run"]: row[column] for row in rows}
    return {
        "delayed": of["fabricamp, delayed"] / (of["no exchange"] + of[FLAT]),
        "overlapped": of["fabricamp, overlapped"] / of["torch DDP, gradient_as_bucket_view"],
    }


def wall_ratios(rows: list[dict]) -> dict[str, dict[str, Any]]:
    """Returns the ratios of our steps to those of the fastest torch DDP, in wall time."""
    walls = {row["run"]: row["wall_ms_of_rounds"] for row in rows}
    best = walls[of_rounds.best_of(walls, OF_TORCH)]
    return {name: of_rounds.ratio(walls[f"fabricamp, {name}"], best, WALL_GOAL) for name in GOALS}


def print_column(name: str, rows: list[dict]) -> None:
    print(f"\n{name:38} {'GPU ms':>8} {'wall ms':>8}")
    for row in rows:
        gpu = "" if row["gpu_ms"] is None else f"{row['gpu_ms']:.3f}"
        print(f"{row['run']:38} {gpu:>8} {row['wall_ms']:8.3f}")
    found = ratios(rows)
    print(f"delayed / (no exchange + flat all_reduce)   {found['delayed']:.3f}  (goal {GOALS['delayed']:.2f})")
    print(f"overlapped / torch's with bucket views      {found['overlapped']:.3f}  (goal {GOALS['overlapped']:.2f})")
    for name, ratio in wall_ratios(rows).items():
        print(f"{name} / torch's best, wall: {of_rounds.described(ratio)}", flush=True)


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=12, help="turns of each way in a round")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a way in a turn")
    parser.add_argument("--out", type=Path, help="write the results as JSON too")
    parser.add_argument("--quick", action="store_true", help="tiny networks, on CPUs too: shows that the script works")
    arguments = parser.parse_args(words)
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        sys.exit("start it on several ranks: torchrun --nproc_per_node=2 benchmarks/ddp.py")
    if not (cuda or arguments.quick):
        sys.exit("no CUDA GPU here; --quick runs tiny networks on the CPU")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    torch.backends.cudnn.benchmark = True
    first = dist.get_rank() == 0
    name = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    found = {
        "device": name,
        "ranks": dist.get_world_size(),
        "kernels": sorted({str(choice) for choice in ops.backend(device).values()}),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": of_rounds.command(),
        "columns": {},
    }
    if first:
        print(f"{found['ranks']} x {name}, torch {torch.__version__}, kernels: {', '.join(found['kernels'])}")
    for column, make in (QUICK if arguments.quick else WORKLOADS).items():
        free_memory(device)
        rows = measure(make, device, arguments.rounds, arguments.turns, arguments.steps)
        found["columns"][column] = {"rows": rows, "ratios": ratios(rows), "goals": GOALS, "wall": wall_ratios(rows)}
        if first:
            print_column(column, rows)
        if first and arguments.out is not None:  # after each column, because a run may be interrupted
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
