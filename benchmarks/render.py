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
            f"{row['limit_here_us']:.0f}" if row["limit_here_us"] else "",
        ]
        for row in result["rows"]
    ]
    head = ["one process on CPU, one thread", "mean us a step", "over", "median", "over", "goal", "goal here"]
    about = (
        "The Trainer beside a hand-written loop: MLP 32-32-2, batch 4, AdamW; the rounds' median difference. The goals are for a\n"
        f"machine that takes {result['smallest_loop_goal_us']} us for a step of the smallest loop (Linear(32, 2), SGD); this one\n"
        f'took {result["smallest_loop_us"]:.0f}, and "goal here" is longer in proportion.'
    )
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


def cross_entropy(result):
    names = {"forward_ms": "{:.3f}", "backward_ms": "{:.3f}", "both_ms": "{:.3f}", "wall_ms": "{:.3f}"}
    names |= {"share_of_copy": "{:.0%}", "peak": "{:.2f}"}
    rows = [
        [row["shape"], row["row"], *[form.format(row[name]) for name, form in names.items()]] for row in result["rows"]
    ]
    head = ["rows x classes", "by", "forward ms", "backward ms", "both ms", "wall ms", "share of copy", "peak"]
    about = (
        f"A large device-to-device copy moved {result['copy_gb_per_s']} GB/s in the same run. Forward, backward and both are GPU\n"
        "ms; the share is of three passes over the logits; the peak counts the logits and all that is made of them, in multiples\n"
        "of the logits."
    )
    return f"## Cross-entropy on {result['device']}\n\n{about}\n\n{table(head, rows)}"


def end_to_end(result):
    about = (
        f"GPT-2-small with a head of its own ({result['sizes']['vocabulary']} words), 16 x 512 tokens, AdamW, clip at norm 1, one\n"
        "GPU; medians of interleaved runs. fabricamp: through the Trainer with FusedAdam and everything on (bar, TensorBoard,\n"
        "checkpoints, one `self.log`). All share one network, which returns its loss. The last column is the speed over torch's\n"
        "autocast fp16."
    )
    parts = [f"## End to end on {result['device']}"]
    if result["rows"]:
        parts += [about, table(["run", "GPU ms", "wall ms", "goal", "GiB", "goal", "speed"], steps(result["rows"]))]
    if result.get("curves"):
        parts.append(learning(result["curves"]))
    return "\n\n".join(parts)


def steps(rows):
    (mixed,) = (row["wall_ms"] for row in rows if row["run"].startswith("torch autocast fp16"))
    columns = {"gpu_ms": "{:.1f}", "wall_ms": "{:.1f}", "goal_ms": "{:.1f}", "peak_gib": "{:.2f}", "goal_gib": "{:.1f}"}
    cells = [["" if row[name] is None else form.format(row[name]) for name, form in columns.items()] for row in rows]
    return [[row["run"], *own, f"{mixed / row['wall_ms']:.2f}x"] for row, own in zip(rows, cells, strict=True)]


def learning(result):
    about = (
        f"Losses (nats a byte) of a small GPT over {result['steps']} steps, with equal batches and, but for the second row, equal\n"
        "weights at the start: the mean of the last 100 steps, how far it is from torch's fp32 loop, and the largest gap of means\n"
        "over 100 steps on the way. The second row says what noise is."
    )
    rows = [
        [row["run"], f"{row['final']:.4f}", f"{row['over_fp32']:+.4f}", f"{row['largest_gap']:.4f}"]
        for row in result["rows"]
    ]
    return f"{about}\n\n{table(['run', 'last 100 steps', 'over fp32', 'largest gap'], rows)}"


def syncbn(result):
    def cell(row, name, form, factor=1.0):
        return form.format(row[name] * factor) if isinstance(row.get(name), (int, float)) else ""

    layers = [
        [
            " x ".join(map(str, row["shape"])),
            row["layout"],
            row["run"],
            cell(row, "wall_ms", "{:.3f}"),
            cell(row, "gpu_ms", "{:.3f}"),
            cell(row, "host_us", "{:.0f}"),
        ]
        for row in result["layers"]
    ]
    steps = [[str(row["batch"]), row["run"], cell(row, "wall_ms", "{:.2f}")] for row in result["networks"]]
    exchanges = [
        [row["run"], cell(row, "wall_ms", "{:.1f}", 1e3), cell(row, "gpu_ms", "{:.1f}", 1e3)]
        for row in result["exchanges"]
    ]
    goals = [[name, f"{value:.2f}", f"{result['goals'][name]:.2f}"] for name, value in result["ratios"].items()]
    about = (
        "One layer, forward and backward, fp16; a whole ResNet-50 step (fp16 autocast, channels_last, torch's\n"
        "DistributedDataParallel; under a CUDA graph one all_reduce in its place); the exchange of (2, 512) by itself."
    )
    parts = [f"## SyncBatchNorm on {result['ranks']} x {result['device']}", about]
    parts.append(table(["what", "worst row", "goal"], goals))
    parts.append(table(["shape of a rank", "layout", "by", "wall ms", "GPU ms", "host us"], layers))
    parts.append(table(["batch of a rank", "ResNet-50 step with", "wall ms"], steps))
    parts.append(table(["exchange", "wall us", "GPU us"], exchanges))
    return "\n\n".join(parts)


RENDERERS = {
    "syncbn": syncbn,
    "overhead": overhead,
    "optimizers": optimizers,
    "cross_entropy": cross_entropy,
    "end_to_end": end_to_end,
}


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
