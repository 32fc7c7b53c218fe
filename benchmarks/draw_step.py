"""Draws a step of GPT-2-small of benchmarks/results/fastest-h200.json as docs/step.svg: ``python benchmarks/draw_step.py``."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
OTHERS, OURS = "#9a9a9a", "#1f77b4"
SHOWN = {
    "Lightning": ("Lightning, bf16-mixed", OTHERS),
    "by hand": ("by hand, bf16 autocast", OTHERS),
    "fabricamp O4": ("fabricamp, O4", OURS),
    "fabricamp O5": ("fabricamp, O5", OURS),
    "fabricamp O5, graph": ("fabricamp, O5, CUDA graph", OURS),
    "by hand, compiled": ("by hand, torch.compile", OTHERS),
    "fabricamp O4, compiled": ("fabricamp, O4, compile=True", OURS),
    "by hand, compiled, reduce-overhead": ("by hand, torch.compile with graphs", OTHERS),
}
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 720, 250, 60, 34, 20, 8


def draw(result):
    """Returns the SVG with one bar per variant, in the order of ``SHOWN``, longest first."""
    (row,) = (one for one in result["rows"] if one["network"] == "gpt2-16")
    times = row["wall_ms"]
    scale = (WIDTH - LEFT - RIGHT) / max(times[way] for way in SHOWN)
    height = TOP + len(SHOWN) * (BAR + GAP) + 8
    title = f"Wall ms of a step of GPT-2-small, 16 x 512 tokens, {result['device']}, torch {result['torch']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" fill="#444444">ms a step of GPT-2-small (16 x 512 tokens), {result["device"]}</text>',
    ]
    for number, (way, (name, colour)) in enumerate(SHOWN.items()):
        y = TOP + number * (BAR + GAP)
        length = times[way] * scale
        parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{name}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 15}">{times[way]:.1f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main():
    """Writes docs/step.svg."""
    result = json.loads((HERE / "results" / "fastest-h200.json").read_text())
    (HERE.parent / "docs" / "step.svg").write_text(draw(result))


if __name__ == "__main__":
    main()
