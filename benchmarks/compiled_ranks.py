"""Compares compiled steps of ResNet-50 with SyncBatchNorm on two GPUs: torch's compiled DDP, and the Trainer's compiled graph.

    torchrun --nproc_per_node=2 benchmarks/compiled_ranks.py [--batches 8 64] [--ways eager graph compiled] [--rounds 7]
        [--minutes 5] [--out results.json] [--quick]

A step is the copy of a batch from pinned memory, forward, loss and backward under bf16 autocast, the exchange of gradients and of
BatchNorm's statistics, and an update by AdamW.  "torch" is ``torch.compile`` of DistributedDataParallel over a network with torch's
SyncBatchNorm, with the fused AdamW.  If torch cannot compile that, its option ``optimize_ddp``, which cuts the graph at the buckets
of gradients, is off; the result says so.  "torch, eager" is the same DDP without ``torch.compile``, and "torch, graph" is that
captured by hand as a bare graph, with the update.  torch's DDP does not send BatchNorm's buffers, which are equal on all ranks.
"fabricamp" is the Trainer at O4 with ``compile=True``, ``cuda_graph=True``, ``strategy="delayed_ddp"``, ``sync_batchnorm=True`` and
FusedAdam.

All are compiled or captured once.  Then windows of their steps alternate in one process: a callback runs one of each of torch's
ways after each of the Trainer's.  Figures are medians of the rounds on rank 0; the ratio is taken in each round, and a goal of 0.9
is not decided if the quartiles of the ratios span it.  A batch size already in ``--out`` is skipped, and none begins after
``--minutes``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rounds as of_rounds
from benchmarks.loop import Batches
from benchmarks.loop_ranks import Case, Module
from fabricamp import Callback, Compile, Trainer

WARM_UP = 15
STEPS = 30
LONG_STEPS = 10  # of what is not captured: these take tens of milliseconds each
GOAL = 0.9
WAYS = ("eager", "graph", "compiled")
OPTIMIZE_DDP = (True, False)
"""torch's settings of this name, in the order in which they are tried."""


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Torchs:
    """torch's DDP: its eager step, warmed up."""

    steps = LONG_STEPS
    """Of a window."""

    def __init__(self, case, device):
        self.device = device
        network = case.network().to(device)
        if device.type == "cuda":  # torch's layer is for GPUs
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        ids = [device.index] if device.type == "cuda" else None
        ddp = DistributedDataParallel(network, device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False)
        self.called = self.wrapped(ddp)
        self.optimizer = self.adamw(network.parameters())
        self.case = case
        for batch in [*case.few] * (WARM_UP // len(case.few) + 1):
            self.step(*batch)

    def wrapped(self, network):
        """Returns what a step calls."""
        return network

    def adamw(self, parameters, **options):
        """Returns the optimizer."""
        return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True, **options)

    def step(self, x, y):
        """Runs one step."""
        self.update(x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True))

    def update(self, x, y):
        """Runs forward, backward and the update."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.case.loss(self.called, x, y)
        loss.backward()
        self.optimizer.step()

    def window(self):
        """Returns the seconds per step of a window that all ranks begin together."""
        synchronize(self.device)
        dist.barrier()
        began = time.perf_counter()
        for number in range(self.steps):
            self.step(*self.case.few[number % len(self.case.few)])
        synchronize(self.device)
        return (time.perf_counter() - began) / self.steps

    def close(self):
        """Frees what torch does not free by itself."""


class Compiled(Torchs):
    """torch's DDP, compiled."""

    def wrapped(self, network):
        """Returns what a step calls."""
        return torch.compile(network, dynamic=False, backend=backend(self.device))


class Captured(Torchs):
    """torch's DDP, eager, captured as a bare graph together with its update."""

    steps = STEPS

    def __init__(self, case, device):
        self.inputs = [one.to(device) for one in case.few[0]]
        self.captured = torch.cuda.CUDAGraph()
        self.is_captured = False
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            super().__init__(case, device)
            with torch.cuda.graph(self.captured, stream=stream, capture_error_mode="thread_local"):
                self.update(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.is_captured = True

    def adamw(self, parameters, **options):
        """Returns the optimizer."""
        return super().adamw(parameters, capturable=True, **options)

    def step(self, x, y):
        """Runs one step, before the capture an eager one."""
        for own, one in zip(self.inputs, (x, y), strict=True):
            own.copy_(one, non_blocking=True)
        if self.is_captured:
            self.captured.replay()
        else:
            self.update(*self.inputs)

    def close(self):
        """Frees the graph, which torch's NCCL communicator must outlive."""
        self.captured.reset()


class Alternate(Callback):
    """Measures a window of the Trainer's steps, then one of each of torch's ways, and so on."""

    def __init__(self, torchs, device):
        self.torchs, self.device = torchs, device
        self.began = 0.0
        self.seconds = {name: [] for name in ("fabricamp", *torchs)}

    def holds_at(self, global_step):
        """Returns the next step after which the hook below must run."""
        if global_step < WARM_UP:
            return WARM_UP
        return global_step + STEPS - (global_step - WARM_UP) % STEPS

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        """Ends a window, measures those of torch, and begins the next."""
        windows, within = divmod(batch_idx + 1 - WARM_UP, STEPS)
        if windows < 0 or within:
            return
        synchronize(self.device)
        if windows:
            self.seconds["fabricamp"].append((time.perf_counter() - self.began) / STEPS)
            for name, way in self.torchs.items():
                self.seconds[name].append(way.window())
        dist.barrier()
        self.began = time.perf_counter()


def backend(device):
    """Returns the backend of torch.compile; a CPU may have no compiler for inductor."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def torchs_step(case, device):
    """Returns torch's compiled step, and the setting of ``optimize_ddp`` that it has."""
    for optimize in OPTIMIZE_DDP:
        torch._dynamo.config.optimize_ddp = optimize
        try:
            return Compiled(case, device), optimize
        except torch._dynamo.exc.TorchDynamoException as error:
            print(f"optimize_ddp={optimize}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            torch.compiler.reset()
    sys.exit("torch compiles its DDP with neither setting of optimize_ddp")


def measured(case, device, ways, rounds):
    """Returns the ms per step of each window, by name, and torch's setting."""
    torchs = {}
    optimize = None
    if "eager" in ways:
        torchs["torch, eager"] = Torchs(case, device)
    if "graph" in ways and device.type == "cuda":
        torchs["torch, graph"] = Captured(case, device)
    if "compiled" in ways:
        torchs["torch"], optimize = torchs_step(case, device)
    alternate = Alternate(torchs, device)
    cuda = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            accelerator="gpu" if cuda else "cpu",
            devices="auto",
            precision="O4",
            max_epochs=1,
            default_root_dir=folder,
            callbacks=[alternate],
            strategy="delayed_ddp",
            sync_batchnorm=True,
            use_distributed_sampler=False,
            compile=Compile(backend=backend(device)),
            cuda_graph=cuda,
        )
        trainer.fit(Module(case), Batches([case.few[number % 4] for number in range(WARM_UP + rounds * STEPS)]))
    times = {name: [round(1e3 * value, 4) for value in values] for name, values in alternate.seconds.items()}
    for way in torchs.values():
        way.close()
    del alternate, torchs, trainer
    torch.compiler.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return times, optimize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 64])
    parser.add_argument(
        "--ways", nargs="+", default=WAYS, choices=WAYS, help="torch's; compiling its DDP takes a minute"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="write the results as JSON too, after each batch size")
    parser.add_argument("--quick", action="store_true", help="a small network, on CPUs too: shows that it works")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("fabricamp").setLevel(logging.ERROR)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    begun = time.monotonic()
    rows = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    done = {row["batch"] for row in rows}
    for batch in arguments.batches:
        if batch in done or is_late(begun, arguments.minutes, device):
            continue
        times, optimize = measured(Case(batch, quick=arguments.quick), device, arguments.ways, arguments.rounds)
        row = {
            "batch": batch,
            "optimize_ddp": optimize,
            "wall_ms": {name: statistics.median(values) for name, values in times.items()},
            "wall_ms_of_rounds": times,
            "ratios": {
                name: of_rounds.ratio(times["fabricamp"], values, GOAL)
                for name, values in times.items()
                if name != "fabricamp"
            },
        }
        rows.append(row)
        if dist.get_rank() == 0:
            print(batch, row["wall_ms"], flush=True)
            for name, ratio in row["ratios"].items():
                print(f"  over {name}: {of_rounds.described(ratio)}", flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps({**about(device), "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def is_late(begun, minutes, device):
    """Returns whether ``minutes`` have passed on any rank since ``begun``."""
    late = torch.tensor(float(time.monotonic() - begun > 60 * minutes), device=device)
    dist.all_reduce(late, dist.ReduceOp.MAX)
    return bool(late.item())


def about(device):
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": f"{dist.get_world_size()} x {name}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(datetime.now(UTC).date()),
        "command": of_rounds.command(),
    }


if __name__ == "__main__":
    main()
