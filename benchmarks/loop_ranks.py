"""Compares the wall time of a step on two GPUs: torch's wrappers, a hand-written graph, and the Trainer, eager and as a graph.

    torchrun --nproc_per_node=2 benchmarks/loop_ranks.py [--batches 8,64] [--rounds 3] [--out results.json] [--quick]
    torchrun --nproc_per_node=2 benchmarks/loop_ranks.py --exchange [--rounds 7] [--out results.json] [--quick]

The network is ResNet-50 with SyncBatchNorm.  A step is the copy of a batch from pinned memory, forward, loss and backward at O0
(fp32 with TF32) or O1 (fp16 autocast and a loss scale), the exchange of gradients and of BatchNorm's statistics, and an update by
AdamW.  "torch" is its SyncBatchNorm within its DistributedDataParallel; "by hand" our SyncBatchNorm and one all_reduce of all
gradients in one flat tensor, captured as a bare graph together with torch's update.  The Trainer has all features on.  Each figure
is the median of interleaved rounds, on rank 0.

``--exchange`` measures the networks of ``benchmarks/ddp.py`` at O1, without SyncBatchNorm, as graphs only: torch's fastest DDP
(gradient_as_bucket_view), captured as a bare graph with torch's AdamW, and the Trainer with ``DelayedDDP``, delayed and overlapped.
None sends BatchNorm's buffers.  The goals are ratios to torch's graph, taken in each round; a goal is not decided if the quartiles
of the rounds span 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rounds as of_rounds
from benchmarks.loop import Batches, Stopwatch
from benchmarks.models import resnet50, tiny_resnet
from examples.gpt.gpt import GPT
from fabricamp import Trainer, TrainingModule
from fabricamp.nn import convert_syncbn_model
from fabricamp.optimizers import FusedAdam
from fabricamp.strategies import DelayedDDP

WARM_UP = 30
STEPS = 60
EXCHANGE_WARM_UP = 15  # torch's DDP records events in its first ten steps, which a capture does not allow
EXCHANGE_STEPS = 30


class Case:
    """A ResNet-50, or a small ResNet, and the batches of this rank."""

    warm_up, steps = WARM_UP, STEPS
    sync_batchnorm = True

    def __init__(self, batch, *, quick):
        self.make = tiny_resnet if quick else resnet50
        self.batch, self.size = batch, 32 if quick else 224
        self.classes = 10 if quick else 1000

    def network(self):
        """Returns a network with the same weights in each call."""
        torch.manual_seed(0)
        return self.make().to(memory_format=torch.channels_last)

    def loss(self, network, x, y):
        """Returns the cross-entropy of a batch."""
        return F.cross_entropy(network(x), y)

    def loader(self):
        """Returns a loader that repeats a few batches in pinned memory."""
        return Batches([self.few[number % 4] for number in range(self.warm_up + self.steps)])

    @functools.cached_property
    def few(self):
        """The batches, generated once."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        batches = [self.made(generator) for _ in range(4)]
        if torch.cuda.is_available():
            batches = [tuple(one.pin_memory() for one in batch) for batch in batches]
        return batches

    def made(self, generator):
        """Returns a batch on the host."""
        x = torch.randn(self.batch, 3, self.size, self.size, generator=generator)
        y = torch.randint(0, self.classes, (self.batch,), generator=generator)
        return x.to(memory_format=torch.channels_last), y


class Alone(Case):
    """The base class without SyncBatchNorm, to measure the exchange of gradients alone."""

    warm_up, steps = EXCHANGE_WARM_UP, EXCHANGE_STEPS
    sync_batchnorm = False


class Windows(Alone):
    """GPT-2-small, or a smaller GPT, and windows of tokens."""

    def __init__(self, batch, *, quick):
        self.batch, self.vocabulary = batch, 256 if quick else 50304
        self.sizes = {"context": 512, "layers": 12, "width": 768, "heads": 12}
        if quick:
            self.sizes = {"context": 16, "layers": 1, "width": 16, "heads": 2}

    def network(self):
        """Returns a network with the same weights in each call, drawn on the device, because that takes seconds on the host."""
        torch.manual_seed(0)
        with torch.device("cuda", torch.cuda.current_device()):
            return GPT(self.vocabulary, **self.sizes)

    def loss(self, network, windows):
        """Returns the cross-entropy of the next tokens."""
        return network(windows[:, :-1], windows[:, 1:])

    def made(self, generator):
        """Returns a batch on the host."""
        return (torch.randint(self.vocabulary, (self.batch, self.sizes["context"] + 1), generator=generator),)


def measured(loader, step, warm_up=WARM_UP):
    """Returns the seconds of the steps after the warm-up."""
    for batch in loader.batches[:warm_up]:
        step(*batch)
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for batch in loader.batches[warm_up:]:
        step(*batch)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def by_torch(case, precision):
    network = nn.SyncBatchNorm.convert_sync_batchnorm(case.network().cuda())
    wrapped = DistributedDataParallel(network, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(enabled=precision == "O1")

    def step(x, y):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=precision == "O1"):
            loss = F.cross_entropy(wrapped(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return measured(case.loader(), step)


def by_hand(case, precision):
    """Returns the seconds of replays of one graph: forward, backward, one all_reduce and the update."""
    network = convert_syncbn_model(case.network().cuda())
    parameters = list(network.parameters())
    flat = torch.zeros(sum(one.numel() for one in parameters), device="cuda")
    pieces = flat.split([one.numel() for one in parameters])
    slots = [piece.as_strided(one.shape, one.stride()) for piece, one in zip(pieces, parameters, strict=True)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=True)
    scaler = torch.amp.GradScaler(enabled=precision == "O1")
    loader = case.loader()
    inputs = [one.cuda() for one in loader.batches[0]]
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def launch():
        for one in parameters:
            one.grad = None
        with torch.autocast("cuda", torch.float16, enabled=precision == "O1"):
            loss = F.cross_entropy(network(inputs[0]), inputs[1])
        scaler.scale(loss).backward()
        torch._foreach_copy_(slots, [one.grad for one in parameters])
        flat.div_(dist.get_world_size())
        dist.all_reduce(flat)
        for one, slot in zip(parameters, slots, strict=True):
            one.grad = slot
        scaler.step(optimizer)
        scaler.update()

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            launch()
        with torch.cuda.graph(captured, stream=stream, capture_error_mode="thread_local"):
            launch()

        def step(*batch):
            for own, one in zip(inputs, batch, strict=True):
                own.copy_(one, non_blocking=True)
            captured.replay()

        seconds = measured(loader, step)
    captured.reset()
    return seconds


def torchs_graph(case, precision):
    """Returns the seconds of replays of one graph: forward, backward in torch's DDP, and the update; without SyncBatchNorm."""
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        network = case.network().cuda()
        wrapped = DistributedDataParallel(
            network,
            device_ids=[torch.cuda.current_device()],
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True, capturable=True)
        scaler = torch.amp.GradScaler(enabled=precision == "O1")
        loader = case.loader()
        inputs = [one.cuda() for one in loader.batches[0]]

        def launch():
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16, enabled=precision == "O1"):
                loss = case.loss(wrapped, *inputs)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        for _ in range(case.warm_up):
            launch()
        with torch.cuda.graph(captured, stream=stream, capture_error_mode="thread_local"):
            launch()

        def step(*batch):
            for own, one in zip(inputs, batch, strict=True):
                own.copy_(one, non_blocking=True)
            captured.replay()

        seconds = measured(loader, step, case.warm_up)
    captured.reset()
    return seconds


class Module(TrainingModule):
    """The module of a case for the Trainer."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.network = case.network()

    def training_step(self, batch, batch_idx):
        """Returns and logs the loss."""
        loss = self.case.loss(self.network, *batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        """Returns FusedAdam, which is AdamW in one launch."""
        return FusedAdam(self.parameters(), lr=1e-4, weight_decay=0.01)


def ours(case, precision, strategy, *, graph):
    watch = Stopwatch(case.steps, case.warm_up)
    folder = os.environ.get("LOOP_RANKS_FOLDER") or tempfile.gettempdir()
    trainer = Trainer(
        accelerator="gpu", devices="auto", precision=precision, max_epochs=1, default_root_dir=folder, callbacks=[watch],
        strategy=strategy, sync_batchnorm=case.sync_batchnorm, use_distributed_sampler=False, cuda_graph=graph,
    )  # fmt: skip
    trainer.fit(Module(case), case.loader())
    return watch.seconds


WAYS = {
    "torch, SyncBatchNorm and DDP": by_torch,
    "by hand, bare graph": by_hand,
    **{
        f"fabricamp, {strategy}{', graph' if graph else ''}": (
            lambda case, precision, strategy=strategy, graph=graph: ours(case, precision, strategy, graph=graph)
        )
        for strategy in ("delayed_ddp", "ddp")
        for graph in (False, True)
    },
}


TORCHS_GRAPH = "torch DDP, gradient_as_bucket_view, bare graph"
MESSAGE_SIZES = {"delayed": None, "overlapped": 10_000_000}
EXCHANGE_WAYS = {
    TORCHS_GRAPH: torchs_graph,
    **{
        f"fabricamp, {name}, graph": (
            lambda case, precision, size=size: ours(
                case, precision, DelayedDDP(message_size=size, broadcast_buffers=False), graph=True
            )
        )
        for name, size in MESSAGE_SIZES.items()
    },
}
COLUMNS = {
    "GPT-2-small, 8 x 512": (Windows, 8),
    "ResNet-50, batch 8": (Alone, 8),
    "ResNet-50, batch 64": (Alone, 64),
}


def measure(case, precision, rounds):
    found = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            found[name].append(milliseconds(way, case, precision))
    return {name: round(statistics.median(values), 4) for name, values in found.items()}


def milliseconds(way, case, precision):
    """Returns the wall time per step of ``way``."""
    gc.collect()
    torch.cuda.empty_cache()
    dist.barrier()
    with contextlib.redirect_stdout(io.StringIO()):
        return 1000 * way(case, precision) / case.steps


def exchanges(arguments):
    """Measures and prints the columns of ``--exchange``; writes them after each round, because a run may be interrupted."""
    cases = {name: case(batch, quick=arguments.quick) for name, (case, batch) in COLUMNS.items()}
    found = {name: {way: [] for way in EXCHANGE_WAYS} for name in COLUMNS}
    for number in range(1, arguments.rounds + 1):
        begun = time.monotonic()
        for name, case in cases.items():
            for way, values in found[name].items():
                values.append(round(milliseconds(EXCHANGE_WAYS[way], case, "O1"), 4))
        columns = {name: column_of(rounds) for name, rounds in found.items()}
        if dist.get_rank() == 0:
            print(f"round {number}: {time.monotonic() - begun:.0f} s", flush=True)
            if arguments.out:
                result = {**about(), "rounds": number, "columns": columns}
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if dist.get_rank() == 0:
        for name, column in columns.items():
            print(name, column["wall_ms"])
            for way, ratio in column["ratios"].items():
                print(f"  {way} / torch's graph: {of_rounds.described(ratio)}", flush=True)


def column_of(rounds):
    """Returns medians and ratios of one column's rounds, by variant."""
    ratios = {
        name: of_rounds.ratio(rounds[f"fabricamp, {name}, graph"], rounds[TORCHS_GRAPH], 1.0) for name in MESSAGE_SIZES
    }
    medians = {way: round(statistics.median(values), 4) for way, values in rounds.items()}
    return {"wall_ms": medians, "wall_ms_of_rounds": rounds, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="8,64")
    parser.add_argument("--precisions", default="O0,O1")
    parser.add_argument("--exchange", action="store_true", help="the exchange of gradients alone, as graphs")
    parser.add_argument("--rounds", type=int, help="3, or 7 with --exchange")
    parser.add_argument("--out", type=Path, help="write the results as JSON too, after each cell")
    parser.add_argument("--quick", action="store_true", help="a small network: shows that it works")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (7 if arguments.exchange else 3)
    warnings.simplefilter("ignore")
    logging.getLogger("fabricamp").setLevel(logging.ERROR)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    if arguments.exchange:
        exchanges(arguments)
        dist.destroy_process_group()
        return
    rows = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    done = {(row["batch"], row["precision"]) for row in rows}
    for batch in map(int, arguments.batches.split(",")):
        for precision in arguments.precisions.split(","):
            if (batch, precision) in done:
                continue
            times = measure(Case(batch, quick=arguments.quick), precision, arguments.rounds)
            if dist.get_rank() == 0:
                rows.append({"batch": batch, "precision": precision, "rounds": arguments.rounds, "wall_ms": times})
                print(batch, precision, times, flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps({**about(), "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def about():
    return {
        "device": f"{dist.get_world_size()} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(datetime.now(UTC).date()),
        "command": of_rounds.command(),
    }


if __name__ == "__main__":
    main()
