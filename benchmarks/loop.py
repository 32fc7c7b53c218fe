"""Compares the wall time of a step: hand-written, as a bare CUDA graph, by Lightning, and by the Trainer, eager and as a graph.

    python benchmarks/loop.py [--only mlp,resnet50-8,...] [--rounds 3] [--minutes 8] [--out results.json] [--quick]

All variants share network, loss, AdamW, clipping at norm 1 and the loader: batches in pinned memory, copied asynchronously.  Two
more variants of the smallest network keep their data on the GPU, hand-written and in a ResidentLoader with eight steps per launch.
At O1 torch's variants use autocast and a GradScaler, also within the bare graph; O2 is compared with these too.  The Trainer
and Lightning have all features on: bar, logger, a checkpoint callback with nothing to save in the measured steps, a `self.log`
in each step.  Rounds are interleaved and each figure is the median; replays of the smallest network are measured over five times
as many steps.  With `--out`, cells already in the file are skipped: a run may be interrupted, and stops by itself after
`--minutes`; the same command then measures the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import io
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpt_curves import Sizes, torch_loss
from benchmarks.models import resnet50
from fabricamp import Callback, CudaGraph, Trainer, TrainingModule
from fabricamp.data import ResidentLoader
from fabricamp.optimizers import FusedAdam

WARM_UP = 30
PRECISIONS = ("O0", "O1", "O2")


class Batches:
    """A loader without workers; Lightning would take a list for several loaders."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


class Case(NamedTuple):
    """A network, its batches on the host, and the number of measured steps."""

    network: object
    batches: object
    loss: object
    steps: int
    is_small: bool = False
    """Whether its data fit onto the GPU; its steps are so short that replays are measured over five times as many steps."""

    def replayed(self):
        """Returns the case for measurements with a graph."""
        return self._replace(steps=5 * self.steps) if self.is_small else self

    def loader(self, steps):
        """Returns a loader that repeats a few batches in pinned memory."""
        few = pinned(self.batches)
        return Batches([few[number % 4] for number in range(steps)])

    def data(self, steps):
        """Returns the same samples concatenated into tensors, and the batch size."""
        batches = self.loader(steps).batches
        return [torch.cat(parts) for parts in zip(*batches, strict=True)], len(batches[0][0])


@functools.cache
def pinned(batches):
    """Returns four batches, generated once, because generating a large batch of images takes longer than training on it."""
    torch.manual_seed(0)
    return [tuple(one.pin_memory() for one in batches()) for _ in range(4)]


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))


def images(batch):
    def make():
        x = torch.randn(batch, 3, 224, 224).to(memory_format=torch.channels_last)
        return x, torch.randint(0, 1000, (batch,))

    return make


def words(batch):
    return lambda: (torch.randint(0, 50257, (batch, 513)),)


def classify(network, x, y):
    return F.cross_entropy(network(x), y)


def predict(network, windows):
    return network(windows[:, :-1], windows[:, 1:])


def gpt(batch):
    sizes = Sizes(50304, context=512, layers=12, width=768, heads=12, batch=batch)
    first = functools.cache(lambda: sizes.network(torch.device("cpu"), loss=torch_loss))
    return lambda: copy.deepcopy(first())


CASES = {
    "mlp": Case(mlp, lambda: (torch.randn(4, 32), torch.randint(0, 2, (4,))), classify, 600, is_small=True),
    **{
        f"resnet50-{batch}": Case(
            lambda: resnet50().to(memory_format=torch.channels_last), images(batch), classify, steps
        )
        for batch, steps in ((8, 80), (64, 40), (256, 20))
    },
    **{f"gpt2-{batch}": Case(gpt(batch), words(batch), predict, steps) for batch, steps in ((1, 60), (16, 20))},
}
QUICK = CASES["mlp"]._replace(steps=20)


class Stopwatch(Callback):
    """Times the steps after the first ``warm_up``, with the device's work, and nothing after the last step."""

    def __init__(self, steps, warm_up=WARM_UP):
        self.first = warm_up
        self.last = warm_up + steps - 1

    def holds_at(self, global_step):
        """Returns the next step at which the hooks below must run: after the warm-up, or after the last step."""
        return self.first if global_step < self.first else self.last + 1

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        """Starts the clock after the warm-up, and stops it after the last step."""
        if batch_idx == self.first - 1:
            torch.cuda.synchronize()
            self.start = time.perf_counter()
        elif batch_idx == self.last:
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.start


def by_hand(case, precision, *, graph, resident=False):
    """Times a hand-written loop; with ``graph`` the step is captured, and the loop makes two copies and a replay per step.

    With ``resident`` the copies are gathers from data on the GPU, in a random order.
    """
    amp = precision != "O0"
    torch.manual_seed(0)
    network = case.network().cuda()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True, capturable=graph)
    scaler = torch.amp.GradScaler(enabled=amp)
    loader = case.loader(WARM_UP + case.steps).batches

    def step(*batch):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=amp):
            loss = case.loss(network, *batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if graph else contextlib.nullcontext():
        for batch in loader[:WARM_UP]:
            step(*(one.cuda(non_blocking=True) for one in batch))
        run = step
        if graph:
            inputs = [one.cuda() for one in loader[0]]
            captured = torch.cuda.CUDAGraph()
            optimizer.zero_grad()
            with torch.cuda.graph(captured, stream=stream):
                step(*inputs)
        chosen, data = [], []
        if resident:
            tensors, size = case.data(case.steps)
            data = [one.cuda() for one in tensors]
            chosen = torch.randperm(size * case.steps).cuda().split(size)

        def gather(indices):
            for own, one in zip(inputs, data, strict=True):
                torch.index_select(one, 0, indices, out=own)

        for indices in chosen[:1]:  # loads the kernels before the measurement
            gather(indices)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for indices in chosen:
            gather(indices)
            captured.replay()
        for batch in () if resident else loader[WARM_UP:]:
            if graph:
                for own, one in zip(inputs, batch, strict=True):
                    own.copy_(one, non_blocking=True)
                captured.replay()
            else:
                run(*(one.cuda(non_blocking=True) for one in batch))
        torch.cuda.synchronize()
        return time.perf_counter() - start


def module_of(case, base, optimizer):
    """Returns a module for the case that derives from ``base``, fabricamp's or Lightning's class."""

    class Module(base):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.network = case.network()

        def training_step(self, batch, batch_idx):
            loss = case.loss(self.network, *batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return optimizer(self.parameters())

    return Module()


def ours(case, precision, *, graph, resident=False):
    watch = Stopwatch(case.steps)
    loader = case.loader(WARM_UP + case.steps)
    if resident:
        tensors, size = case.data(WARM_UP + case.steps)
        loader = ResidentLoader(*tensors, batch_size=size, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="gpu", devices=1, precision=precision, max_epochs=1, default_root_dir=folder, callbacks=[watch],
            gradient_clip_val=1.0, cuda_graph=graph,
        )  # fmt: skip
        module = module_of(case, TrainingModule, lambda parameters: FusedAdam(parameters, lr=1e-4, weight_decay=0.01))
        trainer.fit(module, loader)
    return watch.seconds


def lightnings(case, precision):
    import lightning.pytorch as pl

    class Watch(pl.Callback):
        __init__ = Stopwatch.__init__
        on_train_batch_end = Stopwatch.on_train_batch_end

    watch = Watch(case.steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="gpu", devices=1, precision="32-true" if precision == "O0" else "16-mixed", max_epochs=1,
            default_root_dir=folder, callbacks=[watch], gradient_clip_val=1.0,
        )  # fmt: skip
        module = module_of(
            # Lightning refuses fused optimizers if it both scales the loss and clips.
            case,
            pl.LightningModule,
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=precision == "O0"),
        )
        trainer.fit(module, case.loader(WARM_UP + case.steps))
    return watch.seconds


WAYS = {
    "by hand": lambda case, precision: by_hand(case, precision, graph=False),
    "bare graph": lambda case, precision: by_hand(case, precision, graph=True),
    "Lightning": lightnings,
    "fabricamp": lambda case, precision: ours(case, precision, graph=False),
    "fabricamp, graph": lambda case, precision: ours(case, precision, graph=True),
}
RESIDENT_WAYS = {
    "bare graph, resident": lambda case, precision: by_hand(case, precision, graph=True, resident=True),
    "fabricamp, steps=8": lambda case, precision: ours(case, precision, graph=CudaGraph(steps=8), resident=True),
}


GRAPHS = {"bare graph", "fabricamp, graph", *RESIDENT_WAYS}


def measure(case, precision, rounds):
    """Returns milliseconds per step of each variant (medians of interleaved rounds), and errors of variants that cannot run."""
    ways = WAYS | RESIDENT_WAYS if case.is_small else WAYS
    found = {name: [] for name in ways}
    missing = {}
    for _ in range(rounds):
        for name, way in ways.items():
            if name in missing:
                continue
            gc.collect()
            torch.cuda.empty_cache()
            one = case.replayed() if name in GRAPHS else case
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    seconds = way(one, precision)
            except (ImportError, RuntimeError) as error:
                missing[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
                print(name, missing[name], flush=True)
                continue
            found[name].append(1000 * seconds / one.steps)
    return {name: round(statistics.median(values), 4) for name, values in found.items() if values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="begin no cell that would end later, by the longest so far"
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON too, after each cell")
    parser.add_argument("--quick", action="store_true", help="a few steps of the smallest network: shows that it works")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("fabricamp", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    rows = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    done = {(row["network"], row["precision"]) for row in rows}
    end, longest = time.monotonic() + 60 * arguments.minutes, 0.0
    for network in ["mlp"] if arguments.quick else arguments.only.split(","):
        for precision in arguments.precisions.split(","):
            if (network, precision) in done or time.monotonic() + longest > end:
                continue
            begun = time.monotonic()
            case = QUICK if arguments.quick else CASES[network]
            times = measure(case, precision, arguments.rounds)
            rows.append({"network": network, "precision": precision, "rounds": arguments.rounds, "wall_ms": times})
            longest = max(longest, time.monotonic() - begun)
            print(network, precision, times, f"{time.monotonic() - begun:.0f} s", flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps({**about(), "rows": rows}, indent=1) + "\n")


def about():
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(datetime.now(UTC).date()),
        "command": "python benchmarks/loop.py",
    }


if __name__ == "__main__":
    main()
