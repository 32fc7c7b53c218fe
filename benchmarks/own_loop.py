"""Compares the wall time of a step on a GPU: hand-written, by the Trainer, and by a Loop, eager and as a CUDA graph.

    python benchmarks/own_loop.py [--only mlp,gpt2] [--rounds 3] [--out results.json]

All variants of a network share batches that are on the GPU, AdamW and clipping at norm 1.  mlp: 32-32-2 in fp32, batches of 64, so
what the host does.  gpt2: GPT-2-small over bytes, 8 x 1024, bf16 autocast (O4).  Rounds alternate; figures are medians of their
means, in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.gpt import BYTES, GPT
from fabricamp import Callback, CudaGraph, Loop, Trainer, TrainingModule
from fabricamp.optimizers import FusedAdam

WARM_UP = {"mlp": 60, "gpt2": 16}
STEPS = {"mlp": 400, "gpt2": 24}
PRECISION = {"mlp": "O0", "gpt2": "O4"}
GPT2 = {"context": 1024, "layers": 12, "width": 768, "heads": 12}


class Loss(nn.Module):
    """The MLP with its loss, as the GPT has it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x, y):
        """Returns the loss."""
        return F.cross_entropy(self.net(x), y)


def new(kind):
    """Returns the network, and four batches on the GPU."""
    torch.manual_seed(0)
    model = Loss() if kind == "mlp" else GPT(BYTES, **GPT2)
    shape = (64, 32) if kind == "mlp" else (8, 1024)
    batches = []
    for _ in range(4):
        if kind == "mlp":
            batches.append((torch.randn(shape), torch.randint(2, (64,))))
        else:
            batches.append((torch.randint(BYTES, shape), torch.randint(BYTES, shape)))
    return model, [tuple(one.cuda() for one in batch) for batch in batches]


def steps_of(kind, batches):
    """Yields the batches of a run."""
    for number in range(WARM_UP[kind] + STEPS[kind]):
        yield batches[number % len(batches)]


class Clock:
    """The time between the end of the warm-up and the last step."""

    def __init__(self, kind):
        self.kind, self.count, self.begun, self.mean = kind, 0, 0.0, 0.0

    def step(self):
        """Counts a step; waits for the device at two of them."""
        self.count += 1
        if self.count in (WARM_UP[self.kind], WARM_UP[self.kind] + STEPS[self.kind]):
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.mean = 1e6 * (now - self.begun) / STEPS[self.kind]
            self.begun = now


def by_hand(kind):
    model, batches = new(kind)
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    clock = Clock(kind)
    for x, y in steps_of(kind, batches):
        with torch.autocast("cuda", torch.bfloat16, enabled=kind == "gpt2"):
            loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        clock.step()
    return clock.mean


class Module(TrainingModule):
    """The network for the Trainer."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        """Returns the loss."""
        return self.model(*batch)

    def configure_optimizers(self):
        """Returns the optimizer."""
        return FusedAdam(self.parameters(), lr=1e-4)


class Timed(Callback):
    """Counts the Trainer's steps."""

    def __init__(self, clock):
        self.clock = clock

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Counts a step."""
        self.clock.step()


class Repeated:
    """The batches of a run as a loader."""

    def __init__(self, kind, batches):
        self.kind, self.batches = kind, batches

    def __len__(self):
        return WARM_UP[self.kind] + STEPS[self.kind]

    def __iter__(self):
        return steps_of(self.kind, self.batches)


def by_trainer(kind, graph):
    model, batches = new(kind)
    clock = Clock(kind)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        precision=PRECISION[kind],
        max_epochs=1,
        gradient_clip_val=1.0,
        cuda_graph=graph,
        callbacks=[Timed(clock)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(model), Repeated(kind, batches))
    return clock.mean


def by_loop(kind, graph):
    model, batches = new(kind)
    clock = Clock(kind)
    with Loop(accelerator="gpu", devices=1, precision=PRECISION[kind], cuda_graph=graph) as run:
        run.prepare(model, FusedAdam(model.parameters(), lr=1e-4), clip=1.0)
        for batch in run.prepare_data(Repeated(kind, batches)):
            run.step(lambda b: model(*b), batch)
            clock.step()
    return clock.mean


def graph():
    return CudaGraph(warmup=5, compare=False)


WAYS = {
    "hand-written": by_hand,
    "Trainer": lambda kind: by_trainer(kind, False),
    "Loop": lambda kind: by_loop(kind, False),
    "Trainer, graph": lambda kind: by_trainer(kind, graph()),
    "Loop, graph": lambda kind: by_loop(kind, graph()),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="mlp,gpt2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows = []
    for kind in options.only.split(","):
        rounds = {name: [] for name in WAYS}
        for _ in range(options.rounds):
            for name, way in WAYS.items():
                rounds[name].append(way(kind))
                gc.collect()
        for name, means in rounds.items():
            rows.append({"network": kind, "way": name, "us": statistics.median(means), "rounds": means})
            print(
                f"{kind:6} {name:16} {statistics.median(means):10.1f} us   {[round(one, 1) for one in means]}",
                flush=True,
            )
    if options.out:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
