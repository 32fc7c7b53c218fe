"""Teaches one thing: a script for Lightning keeps its digits here, unchanged or with another import.

``python train.py`` runs before.py under fabricamp, after.py, and before.py under Lightning if that is installed.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
COMMANDS = {
    "python -m fabricamp.lightning before.py": ["-m", "fabricamp.lightning", str(HERE / "before.py")],
    "python after.py": [str(HERE / "after.py")],
    "python before.py (Lightning)": [str(HERE / "before.py")],
}


def run(names: list[str], epochs: int, folder: Path) -> dict[str, str]:
    """Runs the commands side by side; returns what each one printed."""
    started = {}
    for number, name in enumerate(names):
        words = [sys.executable, *COMMANDS[name], "--epochs", str(epochs), "--folder", str(folder / str(number))]
        log = (folder / f"{number}.log").open("w")
        started[name] = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)  # noqa: S603 - scripts of this folder
    printed = {}
    for number, (name, process) in enumerate(started.items()):
        out, _ = process.communicate()
        if process.returncode:
            sys.exit(f"{name} failed:\n{(folder / f'{number}.log').read_text()}")
        printed[name] = out[out.index("steps ") :]
    return printed


def curve(folder: Path) -> tuple[list[int], list[float]]:
    """Returns steps and losses of a run's log."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("train_loss")]
    return [int(row["step"]) for row in rows], [float(row["train_loss"]) for row in rows]


def draw(path: Path, curves: dict[str, tuple[list[int], list[float]]]) -> None:
    """Draws the losses over each other, each line thinner than the one below it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("--picture needs matplotlib: pip install matplotlib")
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    styles = zip((6, 3, 1), ("#f5cba7", "#5dade2", "#1b2631"), strict=True)
    for (name, (steps, losses)), (width, color) in zip(reversed(curves.items()), styles, strict=False):
        axes.plot(steps, losses, color=color, linewidth=width, label=name)
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 epochs instead of 20, and not under Lightning")
    parser.add_argument("--picture", type=Path, help="draw the losses into this .png or .svg file")
    options = parser.parse_args()
    names = list(COMMANDS)
    if options.quick or importlib.util.find_spec("lightning") is None:
        names.pop()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        printed = run(names, 3 if options.quick else 20, folder)
        curves = {name: curve(folder / str(number)) for number, name in enumerate(names)}
    for name, text in printed.items():
        print(f"{name}\n{text}")
    same = len(set(printed.values())) == 1 and all(one == curves[names[0]] for one in curves.values())
    losses = curves[names[0]][1]
    print(f"{len(losses)} logged losses each, from {losses[0]:.3f} to {losses[-1]:.3f}")
    print(f"{len(names)} runs: {'equal digits' if same else 'different digits'}")
    if options.picture:
        draw(options.picture, curves)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
