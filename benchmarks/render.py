"""Renders benchmarks/results/*.json and notes.md as docs/performance.md: ``python benchmarks/render.py``."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
HEAD = """# Performance

Every figure comes from a script in `benchmarks/` and a file in `benchmarks/results/`; `python benchmarks/render.py` made this page.
Ratios in one run are what counts: absolute times hold on that machine only.
"""


def facts(result, *names):
    return ", ".join(f"{name} {result[name]}" for name in names if result.get(name))


def table(head, rows):
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def overhead(result):
    rows = [
        [
            row["run"],
            f"{row['mean_us']:.1f}",
            f"{row['mean_over_us']:+.1f}",
            f"{row['median_us']:.1f}",
            f"{row['median_over_us']:+.1f}",
            str(row["limit_us"] or ""),
        ]
        for row in result["rows"]
    ]
    head = ["one process on CPU, one thread", "mean us a step", "over", "median", "over", "goal"]
    about = "The Trainer beside a hand-written loop: MLP 32-32-2, batch 4, AdamW; medians of interleaved runs."
    return f"## What a step costs on the host\n\n{about}\n\n{table(head, rows)}"


def optimizers(result):
    def cell(row, name, form):
        return form.format(row[name]) if isinstance(row.get(name), (int, float)) else str(row.get(name) or "")

    rows = [
        [
            row["optimizer"],
            row["set"],
            row["kind"],
            row["row"],
            cell(row, "gpu_ms", "{:.3f}"),
            cell(row, "wall_ms", "{:.3f}"),
            cell(row, "host_us", "{:.0f}"),
            cell(row, "share_of_copy", "{:.0%}"),
        ]
        for row in result["rows"]
    ]
    head = ["optimizer", "parameters", "what", "by", "GPU ms", "wall ms", "host us", "share of copy"]
    about = f"A large device-to-device copy moved {result['copy_gb_per_s']} GB/s in the same run."
    return f"## Optimizers on {result['device']}\n\n{about}\n\n{table(head, rows)}"


RENDERERS = {"overhead": overhead, "optimizers": optimizers}


def main():
    parts = [HEAD]
    for path in sorted((HERE / "results").glob("*.json"), reverse=True):
        result = json.loads(path.read_text())
        parts.append(RENDERERS[path.name.partition("-")[0]](result))
        parts.append(
            f"`{result['command']}`, {facts(result, 'processor', 'cores', 'device', 'torch', 'python', 'date')}\n"
        )
    parts.append((HERE / "results" / "notes.md").read_text())
    (HERE.parent / "docs" / "performance.md").write_text("\n\n".join(parts).rstrip() + "\n")


if __name__ == "__main__":
    main()
