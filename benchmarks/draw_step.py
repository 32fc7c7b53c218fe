"""Draws a step of GPT-2-small of benchmarks/results/fastest-h100.json as docs/step.svg: ``python benchmarks/draw_step.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bars import drawn

HERE = Path(__file__).resolve().parent
SHOWN = {
    "by hand, compiled": "by hand, torch.compile",
    "by hand, bf16 weights, compiled": "by hand, bf16 weights, torch.compile",
    "by hand, compiled, reduce-overhead": "by hand, torch.compile with graphs",
    "fabricamp O4, compiled, graph": "fabricamp, O4, compile and cuda_graph",
    "fabricamp O5, compiled, graph": "fabricamp, O5, compile and cuda_graph",
}


def draw(result):
    """Returns the SVG with one bar per variant, in the order of ``SHOWN``, longest first."""
    (row,) = (one for one in result["rows"] if one["network"] == "gpt2-16")
    title = f"Wall ms of a step of GPT-2-small, 16 x 512 tokens, {result['device']}, torch {result['torch']}"
    unit = f"ms a step of GPT-2-small, {result['device']}, {result['date']}"
    return drawn(title, unit, [(name, row["wall_ms"][way]) for way, name in SHOWN.items()])


def main():
    """Writes docs/step.svg."""
    result = json.loads((HERE / "results" / "fastest-h100.json").read_text())
    (HERE.parent / "docs" / "step.svg").write_text(draw(result))


if __name__ == "__main__":
    main()
