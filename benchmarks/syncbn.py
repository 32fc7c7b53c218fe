"""Compares SyncBatchNorm with torch's and with a local BatchNorm: single layers, a ResNet-50 step, and the exchange alone.

    torchrun --nproc_per_node=2 benchmarks/syncbn.py [--rounds 7] [--out results.json] [--quick]

Layers: forward and backward of one layer, fp16, shapes with the batch of one rank, NCHW and channels_last.  Wall ms: iterations
back to back, as in a loop.  GPU ms: iterations that were queued after a sleeping kernel, so launch gaps do not count; the ranks
wait for each other inside.  Host us: the time of a rank's Python and driver to queue an iteration while the GPU sleeps.
ResNet-50: forward and backward under fp16 autocast, torch's DistributedDataParallel, torch's fused SGD, channels_last.  Under a
CUDA graph: the complete step captured, with one all_reduce of all gradients at its end in place of the wrapper.
Exchange: a forward of (2, 512) in fp32 without gradients, with hardly any values: two launches (three by a collective),
and 1025 floats to the other rank; compared with NCCL's collectives alone on the same size.

Rows of a table are measured alternately; figures are medians of the rounds, on rank 0.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.models import resnet50, tiny_resnet
from fabricamp.nn import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = [(64, 64, 112, 112), (64, 256, 56, 56), (64, 512, 28, 28), (64, 2048, 7, 7), (2, 256, 64, 64)]
QUICK_SHAPES = [(4, 16, 8, 8), (2, 24, 7, 7)]
LOCAL, OF_TORCH, OURS = "BatchNorm, each rank alone", "torch SyncBatchNorm", "fabricamp SyncBatchNorm"
GRAPH = ", CUDA graph"
GOALS = {
    "step over local": 1.3,
    "step over local, CUDA graph": 1.1,
    "torch over ours, NHWC": 3.0,
    "torch over ours, NCHW": 2.5,
}
GOALS |= {"ours over local": 1.8}


class Timing(NamedTuple):
    """Times of one iteration; GPU time is None without a GPU, host time if the iteration waits for the GPU."""

    wall_ms: float
    gpu_ms: float | None = None
    host_us: float | None = None


def settle(device: torch.device) -> None:
    """Waits for all ranks and the device, so that the ranks start together."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def wall(step: Callable[[], object], count: int, device: torch.device) -> float:
    settle(device)
    started = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count * 1e3


def behind_a_sleep(step: Callable[[], object], count: int, device: torch.device) -> tuple[float | None, float | None]:
    """Returns GPU ms and host us of an iteration; all its launches are queued before the first one runs."""
    if device.type != "cuda":
        return None, None
    settle(device)
    asleep, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(int(1e8))  # 50 ms
    asleep.record()
    first.record()
    started = time.perf_counter()
    for _ in range(count):
        step()
    host = (time.perf_counter() - started) / count * 1e6
    waited = asleep.query()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / count, None if waited else host


def in_turn(
    runs: dict[str, Callable[[], object]], rounds: int, count: int, device: torch.device, *, queued: int = 0
) -> dict[str, Timing]:
    """Returns the medians of every run over the rounds; ``queued``: iterations to queue after a sleeping kernel (0: none)."""
    for step in runs.values():
        for _ in range(4):
            step()
    walls: dict[str, list[float]] = {name: [] for name in runs}
    gpus: dict[str, list[float]] = {name: [] for name in runs}
    hosts: dict[str, list[float | None]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, step in runs.items():
            walls[name].append(wall(step, count, device))
            gpu, host = behind_a_sleep(step, queued, device) if queued else (None, None)
            if gpu is not None:
                gpus[name].append(gpu)
                hosts[name].append(host)
    return {name: Timing(statistics.median(walls[name]), middle(gpus[name]), middle(hosts[name])) for name in runs}


def middle(values: list) -> float | None:
    return statistics.median(values) if values and None not in values else None


def layer_runs(shape: tuple[int, ...], *, rows: bool, device: torch.device) -> dict[str, Callable[[], object]]:
    """Runs one forward and backward of each layer; checks that ours equals torch's."""
    torch.manual_seed(dist.get_rank())
    kind = torch.float16 if device.type == "cuda" else torch.float32
    form = torch.channels_last if rows else torch.contiguous_format
    x = torch.randn(shape, device=device, dtype=kind).to(memory_format=form).requires_grad_()
    dy = torch.randn_like(x)
    layers: dict[str, nn.Module] = {LOCAL: nn.BatchNorm2d(shape[1]), OURS: SyncBatchNorm(shape[1])}
    if device.type == "cuda":
        layers[OF_TORCH] = nn.SyncBatchNorm(shape[1])
    outcomes = {}

    def run(layer: nn.Module) -> Callable[[], object]:
        def step() -> torch.Tensor:
            x.grad = layer.weight.grad = layer.bias.grad = None
            y = layer(x)
            y.backward(dy)
            return y

        return step

    runs = {}
    for name, layer in layers.items():
        runs[name] = run(layer.to(device))
        y = runs[name]()
        outcomes[name] = [one.detach().float() for one in (y, x.grad, layer.weight.grad, layer.running_var)]
    if OF_TORCH in outcomes:
        for one, other in zip(outcomes[OURS], outcomes[OF_TORCH], strict=True):
            error = ((one - other).norm() / other.norm()).item()
            assert error < 2e-3, f"ours differs from torch's by {error} at {shape}"
    return runs


def layers(shapes: list[tuple[int, ...]], rounds: int, device: torch.device) -> list[dict]:
    found = []
    say(f"\n{'layer, fp16':30} {'by':28} {'wall ms':>8} {'GPU ms':>8} {'host us':>8}")
    for shape in shapes:
        for rows in (False, True):
            timings = in_turn(layer_runs(shape, rows=rows, device=device), rounds, 20, device, queued=10)
            where = f"{shape} {'NHWC' if rows else 'NCHW'}"
            for name, timing in timings.items():
                say(f"{where:30} {name:28} {timing.wall_ms:8.3f} {form(timing.gpu_ms)} {form(timing.host_us, 0)}")
                found.append({"shape": list(shape), "layout": where[-4:], "run": name, **timing._asdict()})
            free_memory(device)
    return found


def converted(model: nn.Module, name: str) -> nn.Module:
    if name.startswith(OURS):
        return convert_syncbn_model(model)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if name.startswith(OF_TORCH) else model


def step_of(
    model: nn.Module, images: torch.Tensor, parameters: list[nn.Parameter], flat: torch.Tensor | None
) -> Callable[[], object]:
    """Returns a training step; with ``flat``, a tensor of all gradients, the step averages them itself."""
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True)
    kind = torch.float16 if images.is_cuda else torch.bfloat16

    def step() -> None:
        if flat is None:
            optimizer.zero_grad()
        else:
            flat.zero_()
        with torch.autocast(images.device.type, dtype=kind, cache_enabled=flat is None):
            loss = model(images).float().square().mean()
        loss.backward()
        if flat is not None:
            dist.all_reduce(flat)
        optimizer.step()

    return step


def eager_step(model: nn.Module, images: torch.Tensor) -> Callable[[], object]:
    cuda = images.is_cuda
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases of torch rename broadcast_buffers
        wrapped = DistributedDataParallel(
            model,
            device_ids=[images.device.index] if cuda else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
    return step_of(wrapped, images, list(model.parameters()), None)


def graph_step(model: nn.Module, images: torch.Tensor) -> Callable[[], object]:
    parameters = list(model.parameters())
    flat = torch.zeros(sum(one.numel() for one in parameters), device=images.device)
    for one, piece in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
        one.grad = piece.as_strided(one.size(), one.stride())  # the fused step needs both in one layout
    step = step_of(model, images, parameters, flat)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    settle(images.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        step()

    def replay(_holder: object = step) -> None:  # keeps the step's tensors alive, because the graph uses their memory
        graph.replay()

    return replay


def networks(rounds: int, device: torch.device, *, quick: bool) -> list[dict]:
    found = []
    make, size = (tiny_resnet, 32) if quick else (resnet50, 224)
    say(f"\n{'tiny ResNet' if quick else 'ResNet-50'} step, fp16 autocast, channels_last: wall ms")
    cuda = device.type == "cuda"
    for batch in (64, 8):
        torch.manual_seed(0)
        origin = make().to(device).to(memory_format=torch.channels_last)
        images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
        runs = {}
        for name in (LOCAL, OURS, *((OF_TORCH,) if cuda else ())):
            runs[name] = eager_step(converted(copy.deepcopy(origin), name), images)
        if cuda:
            for name in (LOCAL, OURS):
                runs[name + GRAPH] = graph_step(converted(copy.deepcopy(origin), name), images)
        for name, timing in in_turn(runs, rounds, 1 if quick else 10, device).items():
            say(f"batch {batch:<4} {name:42} {timing.wall_ms:8.3f}")
            found.append({"batch": batch, "run": name, "wall_ms": timing.wall_ms})
        del runs, origin
        free_memory(device)
    return found


def exchanges(rounds: int, device: torch.device) -> list[dict]:
    alone = create_syncbn_process_group(1)
    x = torch.randn(2, 512, device=device)
    mine = torch.zeros(1025, device=device)
    everyone = torch.zeros(dist.get_world_size(), 1025, device=device)
    layers = {
        "fabricamp, fastest exchange": SyncBatchNorm(512),
        "fabricamp, collective": SyncBatchNorm(512, exchange="collective"),
        "fabricamp, no exchange": SyncBatchNorm(512, process_group=alone),
    }

    def run(layer: nn.Module) -> Callable[[], object]:
        def forward() -> None:
            with torch.no_grad():
                layer(x)

        return forward

    runs: dict[str, Callable[[], object]] = {name: run(layer.to(device)) for name, layer in layers.items()}
    runs["all_gather of 1025 floats alone"] = lambda: dist.all_gather(list(everyone.unbind()), mine)
    if device.type == "cuda":
        runs["all_gather of 1025 floats alone"] = lambda: dist.all_gather_into_tensor(everyone.view(-1), mine)
    runs["all_reduce of 1024 floats alone"] = lambda: dist.all_reduce(mine[:1024])
    say(f"\n{'exchange':40} {'wall us':>8} {'GPU us':>8} {'host us':>8}")
    found = []
    for name, timing in in_turn(runs, rounds, 100, device, queued=50).items():
        gpu = None if timing.gpu_ms is None else timing.gpu_ms * 1e3
        say(f"{name:40} {timing.wall_ms * 1e3:8.1f} {form(gpu, 1)} {form(timing.host_us, 1)}")
        found.append({"run": name, **timing._asdict()})
    say(f"chosen: {layers['fabricamp, fastest exchange'].exchanges}")
    return found


def ratios(found: dict) -> dict[str, float]:
    """Returns the worst ratio of each goal's rows, in wall time."""
    of_layers = {(*row["shape"], row["layout"], row["run"]): row["wall_ms"] for row in found["layers"]}
    of_steps = {(row["batch"], row["run"]): row["wall_ms"] for row in found["networks"]}
    rows = {key[:-1] for key in of_layers}
    made = {"ours over local": max(of_layers[*row, OURS] / of_layers[*row, LOCAL] for row in rows)}
    if any(key[-1] == OF_TORCH for key in of_layers):
        for layout in ("NHWC", "NCHW"):
            made[f"torch over ours, {layout}"] = min(
                of_layers[*row, OF_TORCH] / of_layers[*row, OURS] for row in rows if row[-1] == layout
            )
    for suffix in ("", GRAPH):
        steps = [
            of_steps[batch, OURS + suffix] / of_steps[batch, LOCAL + suffix]
            for batch in (64, 8)
            if (batch, OURS + suffix) in of_steps
        ]
        if steps:
            made[f"step over local{suffix}"] = max(steps)
    return made


def form(value: float | None, digits: int = 3) -> str:
    return " " * 8 if value is None else f"{value:8.{digits}f}"


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the results as JSON too")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, on CPUs too: shows that the script works")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        sys.exit("start it on several ranks: torchrun --nproc_per_node=2 benchmarks/syncbn.py")
    if not (cuda or arguments.quick):
        sys.exit("no CUDA GPU here; --quick runs tiny sizes on the CPU")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    torch.backends.cudnn.benchmark = True
    name = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    found = {"device": name, "ranks": dist.get_world_size(), "torch": torch.__version__}
    found |= {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    say(f"{found['ranks']} x {name}, torch {torch.__version__}")
    rounds = 1 if arguments.quick else arguments.rounds
    found["exchanges"] = exchanges(rounds, device)
    found["layers"] = layers(QUICK_SHAPES if arguments.quick else SHAPES, rounds, device)
    found["networks"] = networks(rounds, device, quick=arguments.quick)
    found |= {"ratios": ratios(found), "goals": GOALS, "command": " ".join(["torchrun", *sys.argv])}
    say("")
    for goal, value in found["ratios"].items():
        say(f"{goal:30} {value:6.2f}  (goal {GOALS[goal]:.2f})")
    if dist.get_rank() == 0 and arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
