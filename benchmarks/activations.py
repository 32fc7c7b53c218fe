"""Time and memory of a training step by what blocks keep for backward (``Trainer(activations=...)``): Llama 3 8B on one GPU.

    python benchmarks/activations.py [--only "1 x 8192, all;1 x 8192, a quarter offloaded"] [--out results.json]
        [--steps 3] [--compile] [--quick] [--layers 32] [--width 4096] [--vocabulary 128256] [--length 8192] [--again]

A row is one fresh process, of some 60 s at most on an H200, and its result is written at once; rows that ``--out`` has are left out
unless ``--again``.  All train at O5 with ``FusedAdam(state="8bit", masters="remainder")``, clipped to a norm of 1, with a head that
stores no logits, on random tokens.  The network is :func:`benchmarks.models.llama_8b` without its head's loss.

Step ms: between the ends of micro-batches on the GPU, after two; median.  TFLOP/s: 6 a parameter and token, without attention and
without what is computed again.  Memory: torch's peaks of allocated and of reserved bytes after the first step.  Moved:
bytes that wait in pinned memory.  Ratios: the step ms of a row over that of the row that keeps on the GPU what it moves, or all;
its losses have to be the same.  ``--quick`` is a tiny network,
wherever it runs; ``--compile`` compiles the blocks, and names its rows so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.models import Llama, llama_8b
from fabricamp import Activations, Callback, Trainer, TrainingModule, seed_everything
from fabricamp.nn import FusedLinearCrossEntropy
from fabricamp.optimizers import FusedAdam

WARM_UP = 2


class Row(NamedTuple):
    """Sequences of a batch, their length, and what blocks keep."""

    batch: int
    length: int
    activations: Activations | str


INPUTS = Activations(save="inputs", offload=1.0)
ROWS = {
    "1 x 32768, inputs": Row(1, 32768, "recompute"),
    "1 x 32768, inputs offloaded": Row(1, 32768, INPUTS),
    "1 x 8192, all": Row(1, 8192, "keep"),
    "1 x 8192, a quarter offloaded": Row(1, 8192, Activations(offload=0.25)),
    "1 x 8192, products": Row(1, 8192, Activations(save="products")),
    "1 x 8192, inputs": Row(1, 8192, "recompute"),
    "4 x 8192, inputs": Row(4, 8192, "recompute"),
    "4 x 8192, inputs offloaded": Row(4, 8192, INPUTS),
}
RATIOS = {
    "1 x 32768, inputs offloaded": ("1 x 32768, inputs", 1.03),
    "1 x 8192, a quarter offloaded": ("1 x 8192, all", 1.10),
    "4 x 8192, inputs offloaded": ("4 x 8192, inputs", None),
    "1 x 8192, inputs": ("1 x 8192, all", None),
    "1 x 8192, products": ("1 x 8192, all", None),
}
"""The row that a row is compared with, and the largest ratio that was aimed at."""


class Tokens(Dataset[torch.Tensor]):
    """Random tokens of a sequence and the one after it."""

    def __init__(self, number: int, length: int, vocabulary: int):
        self.number, self.length, self.vocabulary = number, length, vocabulary

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self.vocabulary, (self.length + 1,), generator=generator)


class Model(TrainingModule):
    """The network, built where it trains, with its loss in chunks."""

    def __init__(self, sizes: argparse.Namespace):
        super().__init__()
        self.sizes = sizes

    def configure_model(self) -> None:
        """Builds the network on the meta device, whose tensors the Trainer fills."""
        with torch.device("meta"):
            self.net: Llama = llama_8b(self.sizes.vocabulary, self.sizes.layers, self.sizes.width)
            self.head = FusedLinearCrossEntropy(self.sizes.width, self.sizes.vocabulary, bias=False)
            self.net.head = nn.Identity()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Returns the loss of the next tokens."""
        hidden = self.net.norm(self.net.layers(self.net.tokens(batch[:, :-1])))
        return self.head(hidden.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> FusedAdam:
        """Returns AdamW with 8 bytes a parameter."""
        return FusedAdam(self.parameters(), lr=1e-5, weight_decay=0.1, state="8bit", masters="remainder")


class Watch(Callback):
    """The times of micro-batches, the losses, and the peak of memory after the first step."""

    def __init__(self) -> None:
        self.marks: list[Any] = []
        self.losses: list[torch.Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Marks the end of a micro-batch, without a wait."""
        self.losses.append(outputs["loss"])
        if pl_module.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
            if batch_idx == 0:
                torch.cuda.reset_peak_memory_stats()
        else:
            self.marks.append(time.perf_counter())

    def step_ms(self) -> list[float]:
        """Returns the times of the steps after the warm-up."""
        marks = self.marks[WARM_UP - 1 :]
        if isinstance(marks[0], float):
            return [1e3 * (after - before) for before, after in itertools.pairwise(marks)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


def measured(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Trains some steps; returns what was measured."""
    began = time.perf_counter()
    seed_everything(0, verbose=False)
    watch = Watch()
    steps = WARM_UP + options.steps
    module = Model(options)
    trainer = Trainer(
        strategy="single",
        devices=1,
        precision="O5",
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[watch],
        compile="blocks" if options.compile else False,
        activations=row.activations,
    )
    length = min(row.length, options.length)
    trainer.fit(module, DataLoader(Tokens(steps * row.batch, length, options.vocabulary), batch_size=row.batch))
    times = watch.step_ms()
    ms = statistics.median(times)
    tokens = row.batch * length
    parameters = sum(one.numel() for one in module.parameters())
    found = {
        "tokens": tokens,
        "parameters": parameters,
        "step_ms": round(ms, 2),
        "steps_ms": [round(one, 2) for one in times],
        "tokens_per_s": round(1e3 * tokens / ms, 1),
        "tflops": round(6 * parameters * tokens / ms / 1e9, 1),
        "losses": [float(one) for one in watch.losses],
    }
    if torch.cuda.is_available():
        found["allocated_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    found["seconds"] = round(time.perf_counter() - began, 1)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measures the rows that are asked for, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of rows, with ';' between them")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--length", type=int, default=1 << 30, help="a limit of the rows' lengths")
    parser.add_argument("--limit", type=float, default=60, help="seconds that a row may take")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--row", help="measures this row in this process, and prints it as JSON")
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.width, options.vocabulary = 3, 64, 512
        options.length, options.steps = min(options.length, 1024), min(options.steps, 2)
    if options.row:
        print(json.dumps(measured(ROWS[options.row], options)))
        return
    names = [name.strip() for name in options.only.split(";")] if options.only else list(ROWS)
    kept = read(options.out)
    for name in names:
        shown = f"{name}, compiled" if options.compile else name
        if shown in kept["rows"] and not options.again:
            continue
        kept["rows"][shown] = in_a_process(name, options)
        compare(shown, kept["rows"])
        if options.out is not None:
            options.out.write_text(json.dumps(kept, indent=1) + "\n")
        print(line(shown, kept["rows"]), flush=True)


def read(path: Path | None) -> dict[str, Any]:
    """Returns what the file has, or its beginning."""
    if path is not None and path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    return {"device": device, "torch": torch.__version__, "rows": {}}


def in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns what a fresh process measures; what went wrong, if it fails or takes too long."""
    command = [sys.executable, __file__, "--row", name]
    for key in ("steps", "layers", "width", "vocabulary", "length"):
        command += [f"--{key}", str(getattr(options, key))]
    command += ["--compile"] if options.compile else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {options.limit:.0f} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:500]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    told = [text for text in done.stderr.splitlines() if "that blocks keep of a micro-batch" in text]
    return found | ({"moved": told[0].partition("activations: ")[2]} if told else {})


def compare(name: str, rows: dict[str, Any]) -> None:
    """Notes in a row its ratio to the row that it is compared with, if that is there, and whether the losses are equal."""
    row = rows[name]
    plain = name.removesuffix(", compiled")
    beside = RATIOS[plain][0] + name[len(plain) :] if plain in RATIOS else ""
    base = rows.get(beside, {})
    if "step_ms" in base and "step_ms" in row:
        row["beside"] = beside
        row["ratio"] = round(row["step_ms"] / base["step_ms"], 4)
        row["equal"] = row["losses"] == base["losses"]


def line(name: str, rows: dict[str, Any]) -> str:
    """Returns a row as text, with its ratio if the other row is there."""
    row = rows[name]
    if "failed" in row:
        return f"{name}: failed: {row['failed']}"
    text = f"{name}: {row['step_ms']:.1f} ms, {row['tokens_per_s']:.0f} tokens/s, {row['tflops']:.0f} TFLOP/s"
    if "allocated_gib" in row:
        text += f", {row['allocated_gib']:.1f} GiB allocated, {row['reserved_gib']:.1f} reserved"
    if "ratio" in row:
        goal = RATIOS[name.removesuffix(", compiled")][1]
        text += f", {row['ratio']:.3f} x {row['beside']}" + ("" if goal is None else f" (goal {goal:.2f})")
        text += ", the same losses" if row["equal"] else ", other losses"
    return text + (f"; {row['moved']}" if "moved" in row else "")


if __name__ == "__main__":
    main()
