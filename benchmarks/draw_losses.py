"""Draws the losses of benchmarks/results/end_to_end-h200-curves.json as docs/losses.svg: ``python benchmarks/draw_losses.py``."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHOWN = {
    "torch fp32": ("#bbbbbb", "torch fp32, by hand (wide line)"),
    "fabricamp O2": ("#d62728", "O2: fp16, fp32 masters"),
    "fabricamp O5": ("#1f77b4", "O5: bf16, fp32 masters"),
    "fabricamp O3": ("#2ca02c", "O3: fp16 alone"),
}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 300, 56, 16, 16, 40
LOWEST, HIGHEST = 0.9, 2.6


def place(part, loss):
    """Returns the point "x,y" of a loss; ``part`` (0 to 1) is the position in the run."""
    x = LEFT + part * (WIDTH - LEFT - RIGHT)
    y = TOP + (HIGHEST - loss) / (HIGHEST - LOWEST) * (HEIGHT - TOP - BOTTOM)
    return f"{x:.1f},{y:.1f}"


def text(x, y, words, more=""):
    return f'<text x="{x}" y="{y}" {more}>{words}</text>'


def axes(steps):
    parts = []
    for loss in (1.0, 1.5, 2.0, 2.5):
        left, y = place(0, loss).split(",")
        right = place(1, loss).split(",")[0]
        parts.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 8, float(y) + 4, f"{loss:.1f}", 'text-anchor="end"'))
    for part in (0, 0.25, 0.5, 0.75, 1):
        x = place(part, 1).split(",")[0]
        parts.append(text(x, HEIGHT - BOTTOM + 18, int(part * steps), 'text-anchor="middle"'))
    return [*parts, text(WIDTH / 2, HEIGHT - 6, "step", 'text-anchor="middle"')]


def draw(found):
    curves = found["curves"]
    losses = {row["run"]: row["losses"] for row in curves["rows"]}
    parts = axes(curves["steps"])
    for number, (run, (colour, name)) in enumerate(SHOWN.items()):
        values = losses[run]
        points = " ".join(
            place((index + 1) / len(values), loss) for index, loss in enumerate(values) if loss <= HIGHEST
        )
        wide = 6 if run == "torch fp32" else 1.5  # wide, so that it is visible below the other curves
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{wide}"/>')
        parts.append(text(WIDTH - 220, TOP + 42 + 18 * number, name, f'fill="{colour}"'))
    title = f"Loss (nats per byte) of a small GPT, {found['device']}, torch {found['torch']}"
    parts.append(text(WIDTH - 220, TOP + 20, "loss, nats per byte"))
    parts.append(text(WIDTH - 220, TOP + 46 + 18 * len(SHOWN), found["device"], 'fill="#666666"'))
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
    return f'{head}\n<title>{title}</title>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'


def main():
    found = json.loads((HERE / "results" / "end_to_end-h200-curves.json").read_text())
    (HERE.parent / "docs" / "losses.svg").write_text(draw(found))


if __name__ == "__main__":
    main()
