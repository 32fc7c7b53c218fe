"""Teaches one thing: a script for NVIDIA apex keeps its digits here, unchanged or written with the Trainer.

``python train.py`` runs before.py (apex.amp) under fabricamp and after.py (Trainer), at the same opt level.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def run(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 - the scripts of this folder
        [sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    """Returns the lines that a script printed."""
    out, err = process.communicate()
    if process.returncode:
        sys.exit(f"{process.args!r} failed:\n{out}{err}")
    return out.splitlines()


def draw(path: Path, before: list[float], after: list[float], level: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("--picture needs matplotlib: pip install matplotlib")
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(before, color="#f5cba7", linewidth=5, label=f"before.py: apex.amp, {level}")
    axes.plot(after, color="#1f618d", linewidth=1, label=f"after.py: Trainer(precision={level!r})")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one epoch instead of four")
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--picture", type=Path, help="draw the losses into this .png or .svg file")
    options = parser.parse_args()
    words = ["--epochs", "1" if options.quick else "4", "--opt-level", options.opt_level]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = run(["-m", "fabricamp.apex", str(HERE / "before.py"), *words], folder)
        second = run([str(HERE / "after.py"), *words, "--folder", name], folder)
        printed = finish(first)
        (weights_after,) = finish(second)
        (log,) = folder.rglob("metrics.csv")
        after = [float(row["loss"]) for row in csv.DictReader(log.open()) if row["loss"]]
    before = [float(line.removeprefix("loss ")) for line in printed if line.startswith("loss ")]
    same = before == after and printed[-1] == weights_after
    print(f"python -m fabricamp.apex before.py: {len(before)} losses, from {before[0]:.3f} to {before[-1]:.3f}")
    print(printed[-1])
    print(f"python after.py: {len(after)} losses, from {after[0]:.3f} to {after[-1]:.3f}")
    print(weights_after)
    print("equal digits" if same else "different digits")
    if options.picture:
        draw(options.picture, before, after, options.opt_level)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
