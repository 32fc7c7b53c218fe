"""Compares losses with compact optimizer states with those of fp32 states: the GPT of `fp8_losses.py` on real text, byte by byte.

    python benchmarks/state_losses.py [--seeds 0,1,2] [--steps 2000] [--kinds fp32,control,bf16,8bit,compact] [--out FILE] [--quick]

For each seed a run at O5 with each kind, on the same batches from the same weights.  "compact" is `masters="remainder"` with
`state="8bit"`.  "control" has fp32 states, and each initial weight changed by up to one rounding of bf16: it shows how far two
runs part that differ by nothing else.  A row has the mean loss of the last 100 steps, and the gap to the seed's run with fp32
states; the last lines have for each kind the mean gap beside the spread of fp32 states over seeds.  FILE has the curves.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fp8_losses import LAST, POINTS, QUICK, SIZES, Pupil, changed
from benchmarks.gpt_curves import ADAMW, Lesson, Sizes, means
from fabricamp import Trainer
from fabricamp.optimizers import FusedAdam

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "control": {},
    "bf16": {"state": "bf16"},
    "8bit": {"state": "8bit"},
    "compact": {"masters": "remainder", "state": "8bit"},
}


class Student(Pupil):
    """Trains with states of a kind."""

    def __init__(self, lesson: Lesson, network: torch.nn.Module, peak: float, kind: str) -> None:
        super().__init__(lesson, network, peak)
        self.kind = kind

    def configure_optimizers(self) -> dict[str, Any]:  # noqa: D102
        optimizer = FusedAdam(self.parameters(), **ADAMW, **KINDS[self.kind])
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.peak, total_steps=self.lesson.steps + 1, pct_start=0.1, cycle_momentum=False
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def row_of(kind: str, seed: int, sizes: Sizes, steps: int, peak: float) -> dict[str, Any]:
    """Trains, and returns the losses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lesson = Lesson.of(sizes, device, steps)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        precision="O5",
        max_epochs=1,
        gradient_clip_val=1.0,
        cuda_graph=device.type == "cuda",
        **dict.fromkeys(off, False),
    )
    module = Student(lesson, changed(sizes.network(device, seed), int(kind == "control")), peak, kind)
    begun = time.monotonic()
    trainer.fit(module, lesson.batches)
    losses = torch.stack(module.losses).tolist()
    curve = [round(value, 4) for value in means(losses, max(1, steps // POINTS))]
    final = round(statistics.fmean(losses[-LAST:]), 5)
    return {"seed": seed, "kind": kind, "final": final, "losses": curve, "seconds": round(time.monotonic() - begun)}


def main() -> None:
    """Makes the runs, and prints how far they are from those with fp32 states."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--peak", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument("--width", type=int, default=SIZES.width)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few steps of a small network, on any device")
    options = parser.parse_args()
    sizes = QUICK._replace(width=64) if options.quick else SIZES._replace(width=options.width)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
    found |= {"command": " ".join(["python", *sys.argv]), "steps": options.steps, "sizes": sizes._asdict(), "rows": []}
    gaps: dict[str, list[float]] = {}
    finals = []
    for seed in map(int, options.seeds.split(",")):
        for kind in options.kinds.split(","):
            row = row_of(kind, seed, sizes, options.steps, options.peak)
            reference = next(
                one["final"] for one in [*found["rows"], row] if one["seed"] == seed and one["kind"] == "fp32"
            )
            gaps.setdefault(kind, []).append(row["final"] - reference)
            if kind == "fp32":
                finals.append(row["final"])
            found["rows"].append(row)
            print(
                f"seed {seed} {kind:8} {row['final']:.4f} ({row['final'] - reference:+.4f}), {row['seconds']} s",
                flush=True,
            )
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    spread = max(finals) - min(finals)
    for kind, own in gaps.items():
        print(f"{kind:8} {statistics.fmean(own):+.4f} beside fp32 states, whose seeds differ by {spread:.4f}")


if __name__ == "__main__":
    main()
