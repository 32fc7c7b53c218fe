"""Draws results as docs/charts.md and its pictures: ``python benchmarks/draw_charts.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bars import drawn

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"


class Chart(NamedTuple):
    """One picture: bars of one result, and what is said of it."""

    name: str
    heading: str
    result: str
    unit: str
    text: str
    bars: dict[str, float]
    digits: int = 1


def rows_by(result, column, **where):
    """The rows of a result by the value of ``column``, those that are as ``where`` says."""
    rows = [row for row in result["rows"] if all(row[name] == value for name, value in where.items())]
    return {row[column]: row for row in rows}


def charts():
    """The pictures, from the committed results."""
    read = {name: json.loads((HERE / "results" / f"{name}.json").read_text()) for name in RESULTS}
    overhead = rows_by(read["overhead-16cores"], "run")
    step = rows_by(read["fastest-h200"], "network")["gpt2-16"]["wall_ms"]
    whole = rows_by(read["end_to_end-h200"], "run")
    sync = {row["run"]: row["wall_ms"] for row in read["syncbn-2xh200"]["networks"] if row["batch"] == 64}
    fsdp = rows_by(read["fsdp-2xh200-graphs"], "way", network="6.9B")
    loop = {row["network"]: row["wall_ms"] for row in read["loop-h200"]["rows"] if row["precision"] == "O1"}
    adam = rows_by(read["optimizers-h200"], "row", optimizer="adam", set="resnet50", kind="step")
    entropy = rows_by(read["cross_entropy-h200"], "row", shape="8192x50304 bfloat16")
    return [
        Chart(
            "overhead",
            "What a trainer adds to a step",
            "overhead-16cores",
            "us a step, beside the hand-written loop",
            "The same small step in each, less the loop by hand. Means; on 2 cores fabricamp's was 53 us.",
            {
                name: row["mean_over_us"]
                for name, row in overhead.items()
                if row["mean_over_us"] > 0 and "3 callbacks" not in name
            },
            0,
        ),
        Chart(
            "gpt_step",
            "A step of GPT-2-small, by trainer and compiler",
            "fastest-h200",
            "ms a step, 16 x 512 tokens, bf16",
            "torch's own norms and loss in all of them.",
            step,
        ),
        Chart(
            "gpt_levels",
            "A step of GPT-2-small, by precision",
            "end_to_end-h200",
            "ms a step, 16 x 512 tokens",
            "With fabricamp's kernels where a row says fabricamp.",
            {name: row["wall_ms"] for name, row in whole.items()},
        ),
        Chart(
            "gpt_memory",
            "Its memory",
            "end_to_end-h200",
            "GiB at the peak, 16 x 512 tokens",
            "The same runs.",
            {name: row["peak_gib"] for name, row in whole.items()},
            2,
        ),
        Chart(
            "graph",
            "A small network as a CUDA graph",
            "loop-h200",
            "ms a step of a small MLP at O1",
            "The GPU needs less than 0.1 ms for such a step: the host decides. `bare graph` has no trainer.",
            loop["mlp"],
            3,
        ),
        Chart(
            "sync_batch_norm",
            "ResNet-50 with BatchNorm over two GPUs",
            "syncbn-2xh200",
            "ms a step, 64 images per GPU",
            "",
            sync,
        ),
        Chart(
            "fsdp",
            "A GPT of 6.9 billion parameters, sharded over two GPUs",
            "fsdp-2xh200-graphs",
            "ms a step",
            "`compiled` is `fully_shard` by hand in bf16, with compiled blocks and torch's AdamW.",
            {name: row["step_ms"] for name, row in fsdp.items() if "step_ms" in row},
        ),
        Chart(
            "adam",
            "Adam's update of ResNet-50",
            "optimizers-h200",
            "ms on the GPU, 25.6 million parameters",
            "",
            {name: row["gpu_ms"] for name, row in adam.items()},
            2,
        ),
        Chart(
            "cross_entropy",
            "Cross-entropy, forward and backward",
            "cross_entropy-h200",
            "ms on the GPU, 8192 x 50304 bf16 logits",
            "",
            {name: row["both_ms"] for name, row in entropy.items()},
            2,
        ),
    ]


HEAD = """`python benchmarks/draw_charts.py` draws these from the committed results. Blue is fabricamp; shorter is better.
All tables, and how it was measured: [measurements.md](measurements.md); what was missed: [performance.md](performance.md)."""
RESULTS = [
    "overhead-16cores",
    "fastest-h200",
    "end_to_end-h200",
    "loop-h200",
    "syncbn-2xh200",
    "fsdp-2xh200-graphs",
    "optimizers-h200",
    "cross_entropy-h200",
]


def draw(chart):
    """The bars of a chart, the longest first."""
    bars = [(name.replace("ours", "fabricamp"), value) for name, value in chart.bars.items()]
    bars.sort(key=lambda bar: -bar[1])
    return drawn(f"{chart.heading}: {chart.unit}", chart.unit, bars, digits=chart.digits)


def revisions():
    """The commit that brought each result: what was measured is the code of that time."""
    command = ["git", "log", "-1", "--format=%h", "--abbrev=9", "--"]
    return {
        name: subprocess.run(
            [*command, f"results/{name}.json"], cwd=HERE, capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in RESULTS
    }


def page(brought_by):
    """docs/charts.md."""
    parts = [
        "# Performance in charts",
        HEAD,
    ]
    for chart in charts():
        result = json.loads((HERE / "results" / f"{chart.result}.json").read_text())
        where = result.get("device") or f"{result['cores']} CPU cores"
        about = f"`{result['command']}`, {result['date']}, {where}, torch {result['torch']}, revision {brought_by[chart.result]}"
        parts += [f"## {chart.heading}", f"![{chart.unit}](charts/{chart.name}.svg)"]
        parts += [
            text
            for text in (chart.text, f"Measured by {about} ([result](../benchmarks/results/{chart.result}.json)).")
            if text
        ]
    return "\n\n".join(parts) + "\n"


def main():
    """Writes the page and its pictures."""
    (DOCS / "charts").mkdir(exist_ok=True)
    for chart in charts():
        (DOCS / "charts" / f"{chart.name}.svg").write_text(draw(chart))
    (DOCS / "charts.md").write_text(page(revisions()))


if __name__ == "__main__":
    main()
