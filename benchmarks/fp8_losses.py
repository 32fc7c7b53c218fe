"""Compares losses in FP8 with bf16 (O5): a GPT of width 1024 on real text, pairs of runs with the same seed and batches.

    python benchmarks/fp8_losses.py [--seeds 3] [--steps 2000] [--recipe tensorwise] [--minutes 8] --out FILE
    python benchmarks/fp8_losses.py --draw FILE                     (draws docs/fp8-losses.svg)

"gap" is the mean loss of the last 100 steps in FP8 divided by that in bf16, minus 1.  What FILE has is left out, so a run may be
cut.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpt_curves import Learner, Lesson, Sizes, means
from fabricamp import Float8, Trainer

HERE = Path(__file__).resolve().parent
SIZES = Sizes(256, context=512, layers=4, width=1024, heads=16, batch=16)
LAST = 100
POINTS = 100
COLOURS = {"bf16": "#bbbbbb", "fp8": "#1f77b4"}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 300, 56, 16, 16, 40


def learnt(lesson, precision, seed):
    """Returns the losses of a run with the weights of ``seed``."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    device = lesson.device.type
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        precision=precision,
        max_epochs=1,
        gradient_clip_val=1.0,
        compile="blocks" if device == "cuda" else False,
        **dict.fromkeys(off, False),
    )
    module = Learner(lesson)
    module.network = lesson.sizes.network(lesson.device, seed)
    trainer.fit(module, lesson.batches)
    return torch.stack(module.losses).tolist()


def pair(lesson, recipe, seed):
    """Returns the row of one seed: losses in bf16 and FP8, and their gap."""
    # "include": this width is chosen for its accuracy, whether it is faster or not.
    runs = {"bf16": "O5", "fp8": Float8(recipe, include=["network.blocks"])}
    losses = {name: learnt(lesson, precision, seed) for name, precision in runs.items()}
    final = {name: statistics.fmean(values[-LAST:]) for name, values in losses.items()}
    size = max(1, lesson.steps // POINTS)
    curves = {name: means(values, size) for name, values in losses.items()}
    return {"seed": seed, "recipe": recipe, "final": final, "gap": final["fp8"] / final["bf16"] - 1, "losses": curves}


def draw(found):
    """Returns an SVG with the curves of all seeds, and the gaps in words."""
    curves = [(name, values) for row in found["rows"] for name, values in row["losses"].items()]
    lowest = min(min(values) for _, values in curves) - 0.05
    highest = sorted(value for _, values in curves for value in values)[-len(curves)]

    def point(part, loss):
        x = LEFT + part * (WIDTH - LEFT - RIGHT)
        return f"{x:.1f},{TOP + (highest - loss) / (highest - lowest) * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = []
    for name, values in sorted(curves, key=lambda curve: curve[0] != "bf16"):
        points = " ".join(
            point((index + 1) / len(values), loss) for index, loss in enumerate(values) if loss <= highest
        )
        width = 5 if name == "bf16" else 1.2  # wide, so that it is visible below the other
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="{width}"/>')
    for loss in (highest, (highest + lowest) / 2, lowest):
        y = point(0, loss).split(",")[1]
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{loss:.2f}</text>')
    for part in (0, 0.5, 1):
        x = point(part, lowest).split(",")[0]
        step = int(part * found["steps"])
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    gaps = ", ".join(f"{row['gap']:+.2%}" for row in found["rows"])
    words = ("loss, nats per byte; bf16 (O5) wide", "FP8 by the same seeds", f"last {LAST} steps: {gaps}")
    for number, line in enumerate(words):
        parts.append(f'<text x="{WIDTH - 300}" y="{TOP + 24 + 18 * number}">{line}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
    title = f"<title>Loss of a GPT of width {SIZES.width} in bf16 and FP8, {found['device']}, torch {found['torch']}</title>"
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, title, background, *parts, "</svg>"]) + "\n"


def main() -> None:
    """Runs the pairs that the file lacks, or draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--recipe", default="tensorwise")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing that would end later")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few steps of a small network, on any device")
    options = parser.parse_args()
    if options.draw is not None:
        (HERE.parent / "docs" / "fp8-losses.svg").write_text(draw(json.loads(options.draw.read_text())))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = Sizes(256, context=32, layers=2, width=32, heads=2, batch=4) if options.quick else SIZES
    lesson = Lesson.of(sizes, device, options.steps)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    found = {"device": name, "torch": torch.__version__, "steps": options.steps, "sizes": sizes._asdict(), "rows": []}
    if options.out is not None and options.out.exists():
        found = json.loads(options.out.read_text())
    of_others = {row["recipe"] for row in found["rows"]} - {options.recipe}
    if of_others:
        parser.error(f"{options.out} has rows of recipe {', '.join(sorted(of_others))}; give another file")
    end = time.monotonic() + 60 * options.minutes
    longest = 0.0
    for seed in range(len(found["rows"]), options.seeds):
        if time.monotonic() + longest > end:
            print("not all is measured: give the same command again", flush=True)
            return
        begun = time.monotonic()
        row = pair(lesson, options.recipe, seed)
        longest = time.monotonic() - begun
        found["rows"].append(row)
        print(f"seed {seed}: {row['final']}, gap {row['gap']:+.3%}, {longest:.0f} s", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
