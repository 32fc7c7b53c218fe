"""Compares losses in FP8 with bf16 (O5): a GPT of width 1024 on real text, runs with the same seed and batches.

    python benchmarks/fp8_losses.py [--seeds 0,1,2] [--steps 2000] [--recipe tensorwise] [--minutes 8] --out FILE
    python benchmarks/fp8_losses.py --draw FILES                    (draws docs/fp8-losses.svg)

Each seed has a run in bf16, one in FP8, and a control: bf16 with each initial weight changed by up to one rounding of bf16, which
shows how far two runs part that differ by nothing else.  "gap" is the mean loss of the last 100 steps of a run divided by that of
the seed's bf16 run, minus 1.  ``--runs fp8:1`` adds runs with other changes of the initial weights: after the colon is the number
of a change, 0 for none.

Runs share the GPU, as nothing is timed.  What FILE has is left out, so a run may be cut.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from multiprocessing import TimeoutError, get_context  # noqa: A004 - raised by its pool
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpt_curves import ADAMW, Learner, Lesson, Sizes, loss_of, means
from benchmarks.render import gaps_of
from fabricamp import Float8, Trainer
from fabricamp.optimizers import FusedAdam

HERE = Path(__file__).resolve().parent
SIZES = Sizes(256, context=512, layers=4, width=1024, heads=16, batch=16)
QUICK = Sizes(256, context=32, layers=2, width=32, heads=2, batch=4)
LAST = 100
POINTS = 100
LINES = {
    "bf16": ("#999999", 4),
    "control": ("#d95f02", 1.2),
    "fp8": ("#1f77b4", 1.2),
}
"""Colour and width of the lines, in the order in which they are drawn."""
HIGHEST = 1.8
"""The loss at which the curves begin: above it they lie on each other."""
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 300, 56, 16, 16, 40


class Run(NamedTuple):
    """One training: its seed, "bf16" or "fp8", and the number of a change of the initial weights (0: none)."""

    seed: int
    kind: str
    change: int

    def is_in(self, rows):
        """Returns whether ``rows`` have the run."""
        return any((row["seed"], row["kind"], row["change"]) == self for row in rows)


class Pupil(Learner):
    """Trains a network of its own, with the highest learning rate ``peak``."""

    def __init__(self, lesson, network, peak):
        super().__init__(lesson)
        self.network = network
        self.peak = peak

    def training_step(self, batch, batch_idx):  # noqa: D102
        return loss_of(self.network, batch[0])

    def on_train_batch_end(self, outputs, *_):  # noqa: D102
        self.losses.append(outputs["loss"].clone())  # the next replay overwrites it

    def configure_optimizers(self):  # noqa: D102
        optimizer = FusedAdam(self.parameters(), **ADAMW)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.peak, total_steps=self.lesson.steps + 1, pct_start=0.1, cycle_momentum=False
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def changed(network, number):
    """Returns the network with each weight changed by up to one rounding of bf16, by random numbers of the seed ``number``."""
    generator = torch.Generator().manual_seed(number)
    if number:
        with torch.no_grad():
            for parameter in network.parameters():
                noise = 2 * torch.rand(parameter.shape, generator=generator) - 1
                parameter.mul_(1 + 2.0**-9 * noise.to(parameter.device))
    return network


def row_of(run, sizes, steps, peak, recipe):
    """Trains, and returns the losses; called in a process of its own."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lesson = Lesson.of(sizes, device, steps)
    # "include": this width is chosen for its accuracy, whether it is faster or not.
    precision = Float8(recipe, include=["network.blocks"]) if run.kind == "fp8" else "O5"
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        precision=precision,
        max_epochs=1,
        gradient_clip_val=1.0,
        compile="blocks" if device.type == "cuda" else False,
        cuda_graph=device.type == "cuda",
        **dict.fromkeys(off, False),
    )
    module = Pupil(lesson, changed(sizes.network(device, run.seed), run.change), peak)
    begun = time.monotonic()
    trainer.fit(module, lesson.batches)
    losses = torch.stack(module.losses).tolist()
    curve = [round(value, 4) for value in means(losses, max(1, steps // POINTS))]
    final = statistics.fmean(losses[-LAST:])
    return {**run._asdict(), "final": round(final, 5), "losses": curve, "seconds": round(time.monotonic() - begun)}


def draw(results):
    """Returns an SVG with a panel for each of ``results``: the curves of all runs, and the gaps in words."""
    panels = [panel for number, found in enumerate(results) for panel in panel_of(found, number * HEIGHT)]
    device, version = results[0]["device"], results[0]["torch"]
    height = HEIGHT * len(results)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">'
    title = f"<title>Loss of a GPT of width {SIZES.width} in bf16 and FP8, {device}, torch {version}</title>"
    background = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head, title, background, *panels, "</svg>"]) + "\n"


def panel_of(found, top):
    """Returns the elements of a panel whose upper edge is at ``top``; it begins where the first curve falls below ``HIGHEST``."""
    curves = [
        ("control" if row["kind"] == "bf16" and row["change"] else row["kind"], row["losses"]) for row in found["rows"]
    ]
    lowest = min(min(values) for _, values in curves) - 0.05
    start = min(
        next(index for index, loss in enumerate(values) if loss < HIGHEST) / len(values) for _, values in curves
    )

    def point(part, loss):
        x = LEFT + (part - start) / (1 - start) * (WIDTH - LEFT - RIGHT)
        return f"{x:.1f},{top + TOP + (HIGHEST - loss) / (HIGHEST - lowest) * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = []
    for name, values in sorted(curves, key=lambda curve: list(LINES).index(curve[0])):
        shown = [(index + 1, loss) for index, loss in enumerate(values) if loss < HIGHEST]
        points = " ".join(point(number / len(values), loss) for number, loss in shown)
        colour, width = LINES[name]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    for loss in (HIGHEST, (HIGHEST + lowest) / 2, lowest):
        y = point(0, loss).split(",")[1]
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{loss:.2f}</text>')
    for part in (start, (start + 1) / 2, 1):
        x = point(part, lowest).split(",")[0]
        y = top + HEIGHT - BOTTOM + 18
        parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">{round(part * found["steps"])}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{top + HEIGHT - 6}" text-anchor="middle">step</text>')
    gaps = gaps_of(found["rows"])
    shown = {
        kind: ", ".join(f"{gap:+.2%}" for (_, of, _), gap in sorted(gaps.items()) if of == kind)
        for kind in ("fp8", "bf16")
    }
    words = [
        ("black", f"loss, nats per byte; rate up to {found['peak']}"),
        (LINES["bf16"][0], "bf16 (O5), wide"),
        (LINES["fp8"][0], f"FP8 by the same seeds; last {LAST} steps: {shown['fp8']}"),
    ]
    if shown["bf16"]:
        words.append((LINES["control"][0], f"bf16 with other roundings at the start: {shown['bf16']}"))
    for number, (colour, line) in enumerate(words):
        y = top + TOP + 16 + 18 * number
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{y}" text-anchor="end" fill="{colour}">{line}</text>')
    return parts


def main() -> None:
    """Makes the runs that the file lacks, or draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", default="bf16:0,fp8:0,bf16:1")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--peak", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument("--batch", type=int, default=SIZES.batch, help="samples in a batch")
    parser.add_argument("--recipe", default="tensorwise")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=8.0, help="do not wait for later results")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path, nargs="+")
    parser.add_argument("--quick", action="store_true", help="a few steps of a small network, on any device")
    options = parser.parse_args()
    if options.draw is not None:
        found = [json.loads(path.read_text()) for path in options.draw]
        (HERE.parent / "docs" / "fp8-losses.svg").write_text(draw(found))
        return
    sizes = QUICK if options.quick else SIZES._replace(batch=options.batch)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    facts = {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(datetime.now(UTC).date()),
        "command": f"python benchmarks/fp8_losses.py --peak {options.peak} --batch {sizes.batch}",
    }
    about = {"steps": options.steps, "peak": options.peak, "recipe": options.recipe, "sizes": sizes._asdict()}
    found = {**facts, **about, "rows": []}
    if options.out is not None and options.out.exists():
        found = json.loads(options.out.read_text())
        if any(found[key] != value for key, value in about.items()):
            parser.error(f"{options.out} has runs with other options; give another file")
    kinds = [part.split(":") for part in options.runs.split(",")]
    runs = [Run(int(seed), kind, int(change)) for seed in options.seeds.split(",") for kind, change in kinds]
    runs = [run for run in runs if not run.is_in(found["rows"])]
    end = time.monotonic() + 60 * options.minutes
    with get_context("spawn").Pool(options.processes) as pool:
        arguments = (sizes, options.steps, options.peak, options.recipe)
        results = [pool.apply_async(row_of, (run, *arguments)) for run in runs]
        for result in results:
            try:
                row = result.get(timeout=max(0.0, end - time.monotonic()))
            except TimeoutError:
                print("not all is measured: give the same command again", flush=True)
                return
            found["rows"].append(row)
            print({key: value for key, value in row.items() if key != "losses"}, flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    for (seed, kind, change), gap in sorted(gaps_of(found["rows"]).items()):
        print(f"seed {seed}, {kind}, change {change}: gap {gap:+.3%}", flush=True)


if __name__ == "__main__":
    main()
