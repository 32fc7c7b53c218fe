"""Compares training steps of GPT-2-small by the Trainer with hand-written loops in torch: ms per step, peak memory, losses.

    python benchmarks/end_to_end.py [--rounds 3] [--steps 40] [--curves 2000] [--out results.json] [--quick]

GPT-2-small with a separate head (162 million parameters), 16 windows of 512 tokens, AdamW, gradients clipped at norm 1, one GPU;
fp32 products in TF32.  All runs share the network of `examples/gpt`, which returns the loss from its forward.  In hand-written
loops the loss is torch's log-softmax in fp32 over logits in the network's dtype (less memory than torch's own cross_entropy under
autocast and on half weights); by the Trainer it is `fused_cross_entropy`.  All runs also share the loader (pinned memory,
asynchronous copies).
The Trainer has all its features on: bar, summary, TensorBoard, a checkpoint callback that has nothing to save in the measured
steps, a `self.log` in each step, a flush every ten steps.

Runs are interleaved.  GPU ms: the median time between events at the start of each step.  Wall ms: the measured steps together,
the GPU's work included.  GiB: the peak of torch's allocated memory in these steps.  Each is the median of the rounds.
`--curves STEPS`: losses of a small network on the text of `examples/gpt`, compared with a hand-written fp32 loop with torch's AdamW
on the same weights and batches; a second loop with other initial weights shows the size of the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpt_curves import ADAMW, LEVELS, Lesson, Sizes, curves, loss_of, torch_loss
from examples.gpt.gpt import BYTES, GPT
from fabricamp import Trainer, TrainingModule, ops
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.optimizers import FusedAdam

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP = 10
FLUSH_EVERY = 10
# ms per step and GiB, set for an H200.
GOALS = {"fabricamp O1": (27.3, 9.3), "fabricamp O2": (23.7, 8.9), "fabricamp O5": (23.7, 8.9)}


# 50257 tokens rounded up to a multiple of 64: rows of logits that start at odd addresses are slow to compute.
GPT2_SMALL = Sizes(50304, context=512, layers=12, width=768, heads=12, batch=16)
SMALL = Sizes(BYTES, context=256, layers=3, width=256, heads=4, batch=16)
TINY = Sizes(BYTES, context=16, layers=1, width=16, heads=2, batch=4)


class Setting(NamedTuple):
    """The settings that all runs share."""

    sizes: Sizes
    device: torch.device
    warm_up: int
    steps: int
    root: str

    def loader(self) -> DataLoader:
        """Returns random tokens, one batch more than steps, because a step is measured until the next one starts."""
        generator = torch.Generator().manual_seed(0)
        shape = ((self.warm_up + self.steps + 1) * self.sizes.batch, self.sizes.context + 1)
        tokens = torch.randint(self.sizes.vocabulary, shape, generator=generator)
        return DataLoader(TensorDataset(tokens), batch_size=self.sizes.batch, pin_memory=self.device.type == "cuda")


class Result(NamedTuple):
    """The result of one run; on a CPU GPU time and memory are None."""

    gpu_ms: float | None
    wall_ms: float
    peak_gib: float | None


class Clock:
    """Measures the steps after the warm-up; :meth:`tick` is called at the start of every step."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.cuda = setting.device.type == "cuda"
        self.events = []
        self.started = 0.0
        self.count = -1
        self.result: Result | None = None

    def tick(self):
        """Records the start of a step."""
        self.count += 1
        measured = self.count - self.setting.warm_up
        if measured < 0:
            return
        if measured in (0, self.setting.steps) and self.cuda:
            torch.cuda.synchronize()
        if measured == self.setting.steps:
            self.finish()
            return
        if measured == 0:
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
            self.started = time.perf_counter()
        if self.cuda:
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()

    def finish(self):
        """Computes the result, after the last measured step."""
        wall = (time.perf_counter() - self.started) / self.setting.steps * 1e3
        if not self.cuda:
            self.result = Result(None, wall, None)
            return
        between = [first.elapsed_time(second) for first, second in pairwise(self.events)]
        self.result = Result(statistics.median(between), wall, torch.cuda.max_memory_allocated() / 2**30)


def by_hand(
    setting: Setting,
    *,
    weights: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
) -> Result:
    clock, device = Clock(setting), setting.device
    network = setting.sizes.network(device, loss=torch_loss).to(weights)
    optimizer = torch.optim.AdamW(network.parameters(), **ADAMW, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=scaled)
    for batch in setting.loader():
        clock.tick()
        windows = batch[0].to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            loss = loss_of(network, windows)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return clock.result


class Measured(TrainingModule):
    """Trains the network, and ticks the clock at each step."""

    def __init__(self, network: GPT, clock: Clock):
        super().__init__()
        self.network = network
        self.clock = clock

    def training_step(self, batch, batch_idx):  # noqa: D102
        self.clock.tick()
        loss = loss_of(self.network, batch[0])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):  # noqa: D102
        return FusedAdam(self.parameters(), **ADAMW)


def through_the_trainer(setting: Setting, *, level: str) -> Result:
    clock = Clock(setting)
    trainer = Trainer(
        accelerator="gpu" if setting.device.type == "cuda" else "cpu",
        devices=1,
        precision=level,
        max_steps=setting.warm_up + setting.steps + 1,
        gradient_clip_val=1.0,
        log_every_n_steps=FLUSH_EVERY,
        default_root_dir=setting.root,
        callbacks=[ModelCheckpoint(every_n_train_steps=10**9)],
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(Measured(setting.sizes.network(setting.device), clock), setting.loader())
    return clock.result


RUNS: dict[str, Callable[[Setting], Result]] = {
    "torch fp32 (TF32 products)": by_hand,
    "torch autocast fp16, GradScaler": partial(by_hand, autocast=torch.float16, scaled=True),
    "torch autocast bf16": partial(by_hand, autocast=torch.bfloat16),
    "torch pure bf16, no masters": partial(by_hand, weights=torch.bfloat16),
    **{f"fabricamp {level}": partial(through_the_trainer, level=level) for level in LEVELS},
}


def free_memory(device: torch.device) -> float:
    """Frees the memory of earlier runs; returns the MiB of GPU memory that are still allocated."""
    gc.collect()
    if device.type == "cpu":
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / 2**20


def measure(setting: Setting, rounds: int) -> list[dict]:
    results = {name: [] for name in RUNS}
    for number in range(rounds):
        for name, run in RUNS.items():
            left = free_memory(setting.device)
            results[name].append(run(setting))
            about = f"{results[name][-1].wall_ms:8.2f} ms, {left:.0f} MiB left by what ran before"
            print(f"round {number + 1}  {name:34} {about}", file=sys.stderr, flush=True)
    rows = []
    for name, found in results.items():
        columns = zip(Result._fields, zip(*found, strict=True), strict=True)
        medians = {field: None if None in values else statistics.median(values) for field, values in columns}
        goal_ms, goal_gib = GOALS.get(name, (None, None)) if setting.sizes is GPT2_SMALL else (None, None)
        every = [one.wall_ms for one in found]
        rows.append({"run": name, **medians, "goal_ms": goal_ms, "goal_gib": goal_gib, "wall_ms_of_rounds": every})
    return rows


def cell(value: float | None, form: str = "8.2f") -> str:
    return format("" if value is None else format(value, form), ">8")


def print_rows(rows: list[dict]):
    print(f"\n{'':34} {'GPU ms':>8} {'wall ms':>8} {'goal':>8} {'GiB':>8} {'goal':>8}")
    for row in rows:
        columns = ("gpu_ms", "wall_ms", "goal_ms", "peak_gib", "goal_gib")
        print(f"{row['run']:34} " + " ".join(cell(row[column]) for column in columns), flush=True)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="0: no measurement, only curves")
    parser.add_argument("--steps", type=int, default=40, help="measured steps of a run")
    parser.add_argument("--curves", type=int, default=0, metavar="STEPS", help="also losses over so many steps")
    parser.add_argument("--out", type=Path, help="write the results as JSON too")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny network, on a CPU too: shows that the script works"
    )
    arguments = parser.parse_args(words)
    if not (torch.cuda.is_available() or arguments.quick):
        sys.exit("no CUDA GPU here; --quick runs a tiny network on the CPU")
    logging.getLogger("fabricamp").setLevel(
        logging.ERROR
    )  # hides the overflows that occur until the loss scale has settled
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kernels = sorted({str(choice) for choice in ops.backend(device).values()})
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, torch {torch.__version__}, kernels: {', '.join(kernels)}")
    found = {"device": name, "kernels": kernels, "torch": torch.__version__, "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as root:
        torch.set_float32_matmul_precision("high")
        setting = Setting(TINY if arguments.quick else GPT2_SMALL, device, WARM_UP, arguments.steps, root)
        found |= {
            "sizes": setting.sizes._asdict(),
            "rows": measure(setting, arguments.rounds) if arguments.rounds else [],
        }
    print_rows(found["rows"])
    if arguments.curves:
        lesson = Lesson.of(TINY if arguments.quick else SMALL, device, arguments.curves)
        found["curves"] = {"steps": lesson.steps, "sizes": lesson.sizes._asdict(), "rows": curves(lesson)}
    found |= {"date": time.strftime("%Y-%m-%d"), "command": " ".join(["python", *(words or sys.argv)])}
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
