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
    return f"## What a step costs on the host, {result['cores']} cores\n\n{about}\n\n{table(head, rows)}"


def optimizers_on_cpu(result):
    rows = [[row["optimizer"], row["row"], f"{row['ms']:.1f}"] for row in result["rows"]]
    about = "The step alone on ResNet-50's parameters, one thread."
    return f"## Optimizers on a CPU\n\n{about}\n\n{table(['optimizer', 'by', 'ms'], rows)}"


def optimizers(result):
    if "copy_gb_per_s" not in result:
        return optimizers_on_cpu(result)

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
    forms = {"forward_ms": "{:.3f}", "backward_ms": "{:.3f}", "both_ms": "{:.3f}", "wall_ms": "{:.3f}"}
    forms |= {"share_of_copy": "{:.0%}", "peak": "{:.2f}"}
    of_torch = {row["shape"]: row for row in result["rows"] if row["row"] == "torch"}
    rows = [
        [
            row["shape"],
            row["row"],
            *[form.format(row[name]) for name, form in forms.items()],
            f"{of_torch[row['shape']]['both_ms'] / row['both_ms']:.2f}x",
        ]
        for row in result["rows"]
    ]
    head = ["rows x classes", "by", "forward ms", "backward ms", "both ms", "wall ms", "share of copy", "peak", "speed"]
    about = (
        f"A large device-to-device copy moved {result['copy_gb_per_s']} GB/s in the same run. Forward, backward and both are GPU\n"
        "ms; the share is of three passes over the logits; the peak counts the logits and all that is made of them, in multiples\n"
        "of the logits; the speed is torch's GPU time for both over this row's."
    )
    parts = [f"## Cross-entropy on {result['device']}", about, *goals_of_cross_entropy(result["rows"], of_torch)]
    return "\n\n".join([*parts, table(head, rows)])


def goals_of_cross_entropy(rows, of_torch):
    """The goals are about one shape, which a run may have left out."""
    shape = "8192x50304 bfloat16"
    ours = [row for row in rows if row["shape"] == shape and row["row"] == "ours"]
    if not ours:
        return []
    found = [
        ["torch's GPU time over ours", "at least 2.00", f"{of_torch[shape]['both_ms'] / ours[0]['both_ms']:.2f}"],
        ["our peak over torch's", "at most 0.50", f"{ours[0]['peak'] / of_torch[shape]['peak']:.2f}"],
    ]
    return [table([shape, "goal", "found"], found)]


NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "cross_entropy": "Cross-entropy"}


def norms(result):
    about = (
        f"A large device-to-device copy moved {result['copy_gb_per_s']} GB/s in the same run. GPU ms, and the share of that speed\n"
        "for the bytes that have to move; the gain is torch's time for both over the kernel's; torch.compile was measured for\n"
        "models' shapes. The last column is what the package's table chooses there."
    )
    measured = [by_way(result["rows"], place) for place, row in enumerate(result["rows"]) if row["way"] == "forward"]
    parts = [f"## Norms and cross-entropy on {result['device']}", about, goals_of_norms(measured)]
    ways = ("forward", "backward", "both")
    for op, title in NORMS.items():
        rows = [
            [
                f"{shape['both']['rows']} x {shape['both']['width']}",
                shape["both"]["dtype"],
                *[time_and_share(shape[way], who) for who in ("ours", "torch") for way in ways],
                time_and_share(shape["both"], "compiled"),
                f"{shape['both']['times_torch']:.2f}x",
                shape["both"]["runs"],
            ]
            for shape in measured
            if shape["both"]["op"] == op
        ]
        columns = [f"{who}: {way}" for who in ("kernel", "torch") for way in ways]
        head = [f"{title}, rows x width", "dtype", *columns, "compiled: both", "gain", "runs"]
        parts += [table(head, rows)] if rows else []
    return "\n\n".join(parts)


def by_way(rows, place):
    """The three rows of one shape, which stand together; a shape may have been measured twice."""
    return {row["way"]: row for row in rows[place : place + 3]}


def time_and_share(row, who):
    return f"{row[f'{who}_ms']:.4f} ({row[f'{who}_share']:.0%})" if f"{who}_ms" in row else ""


def goals_of_norms(measured):
    """How many shapes reach each goal, and the one that is furthest from it."""
    both = [shape["both"] for shape in measured]
    wide = [row for row in both if row["op"] != "cross_entropy" and row["width"] >= 4096]
    goals = [("norms from width 4096: gain", wide, "times_torch", 1.6, "{:.2f}x")]
    goals.append(("norms from width 4096: share of copy", wide, "ours_share", 0.75, "{:.0%}"))
    kernels = [row for row in both if row["runs"] == "kernel"]
    goals.append(("wherever the kernel runs: gain", kernels, "times_torch", 1.0, "{:.2f}x"))
    rows = []
    for what, among, name, goal, form in goals:
        if among:
            worst = min(among, key=lambda row, name=name: row[name])
            where = f"{NORMS[worst['op']]} {worst['rows']} x {worst['width']} {worst['dtype']}"
            held = f"{sum(row[name] >= goal for row in among)} of {len(among)}"
            rows.append([what, f"at least {form.format(goal)}", held, f"{form.format(worst[name])} ({where})"])
    return table(["forward and backward", "goal", "shapes that reach it", "the worst"], rows)


def end_to_end(result):
    about = (
        f"GPT-2-small with a head of its own ({result['sizes']['vocabulary']} words), 16 x 512 tokens, AdamW, clip at norm 1, one\n"
        "GPU; medians of interleaved runs. fabricamp: through the Trainer with FusedAdam and everything on (bar, TensorBoard,\n"
        "checkpoints, one `self.log`). All share one network, whose loss is torch's log-softmax in fp32 by hand, and\n"
        "`fused_cross_entropy` through the Trainer. The last column is the speed over torch's\n"
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
    about = (
        "One layer, forward and backward, fp16, wall ms; GPU ms is of iterations queued behind a sleeping kernel, host us what a\n"
        "rank takes to issue one (torch's waits for the GPU). Then a whole ResNet-50 step (fp16 autocast, channels_last, torch's\n"
        "DistributedDataParallel; under a CUDA graph one all_reduce in its place), and the exchange of (2, 512) by itself."
    )
    goals = [
        # A ratio to torch's has to be large, one to a layer that exchanges nothing small.
        [name, f"{'at least' if name.startswith('torch') else 'at most'} {result['goals'][name]:.2f}", f"{value:.2f}"]
        for name, value in result["ratios"].items()
    ]
    steps = {(row["batch"], row["run"]): row["wall_ms"] for row in result["networks"]}
    networks = [[str(batch), run, cell(ms), over_local(steps, batch, run)] for (batch, run), ms in steps.items()]
    exchanges = [
        [
            row["run"],
            *[
                cell(row[name], "{:.1f}", factor)
                for name, factor in (("wall_ms", 1e3), ("gpu_ms", 1e3), ("host_us", 1))
            ],
        ]
        for row in result["exchanges"]
    ]
    parts = [f"## SyncBatchNorm on {result['ranks']} x {result['device']}", about]
    parts.append(table(["what", "goal", "the worst row"], goals))
    parts.append(layers(result["layers"]))
    parts.append(table(["batch of a rank", "ResNet-50 step with", "wall ms", "over local"], networks))
    parts.append(table(["exchange", "wall us", "GPU us", "host us"], exchanges))
    return "\n\n".join(parts)


LOCAL, OURS, OF_TORCH = "BatchNorm, each rank alone", "fabricamp SyncBatchNorm", "torch SyncBatchNorm"
GRAPH = ", CUDA graph"


def layers(rows):
    """A row a shape: the local layer, ours, torch's (which a CPU has not)."""
    shapes = {}
    for row in rows:
        shapes.setdefault((" x ".join(map(str, row["shape"])), row["layout"]), {})[row["run"]] = row
    cells = []
    for (shape, layout), by in shapes.items():
        local, ours, of_torch = by[LOCAL], by[OURS], by.get(OF_TORCH, {})
        walls = [cell(one.get("wall_ms"), "{:.3f}") for one in (local, ours, of_torch)]
        ratio = f"{of_torch['wall_ms'] / ours['wall_ms']:.2f}" if of_torch else ""
        gpu = " / ".join(cell(one.get("gpu_ms"), "{:.3f}") or "-" for one in (local, ours, of_torch))
        host = " / ".join(cell(one.get("host_us"), "{:.0f}") or "-" for one in (local, ours))
        cells.append([shape, layout, *walls, f"{ours['wall_ms'] / local['wall_ms']:.2f}", ratio, gpu, host])
    head = ["shape of a rank", "layout", "local", "ours", "torch's", "ours over local", "torch's over ours"]
    return table([*head, "GPU ms: local / ours / torch's", "host us: local / ours"], cells)


def over_local(steps, batch, run):
    """A step beside the one whose ranks normalise alone, both in a CUDA graph or neither."""
    return f"{steps[batch, run] / steps[batch, LOCAL + GRAPH if run.endswith(GRAPH) else LOCAL]:.2f}"


def ddp(result):
    about = (
        "Forward and backward under fp16 autocast, the exchange of gradients, and torch's fused SGD; medians of rounds that run\n"
        "every way in turn. GPU ms: a step whose launches are queued before it begins; wall ms: steps as a loop runs them, where\n"
        "the host is slower than the GPU. The goals are ratios of GPU time: delayed over no exchange plus the flat all_reduce\n"
        "alone, overlapped over torch's with gradient_as_bucket_view."
    )
    columns = result["columns"]
    goals = next(iter(columns.values()))["goals"]
    ratios = [
        [name, f"at most {goal:.2f}", *[f"{one['ratios'][name]:.3f}" for one in columns.values()]]
        for name, goal in goals.items()
    ]
    parts = [f"## Exchange of gradients on {result['ranks']} x {result['device']}", about]
    parts.append(table(["ratio", "goal", *columns], ratios))
    for name, column in columns.items():
        limit = column["rows"][0]
        time = "wall_ms" if limit["gpu_ms"] is None else "gpu_ms"
        rows = [
            [
                row["run"],
                cell(row["gpu_ms"]),
                cell(row["wall_ms"]),
                f"{min(row['wall_ms_of_rounds']):.2f} to {max(row['wall_ms_of_rounds']):.2f}",
                f"{row[time] - limit[time]:+.2f}",
            ]
            for row in column["rows"]
        ]
        rows[-1][-1] = ""  # the collective by itself is no step
        parts.append(table([name, "GPU ms", "wall ms", "wall ms of rounds", "over no exchange"], rows))
    return "\n\n".join(parts)


def cell(value, form="{:.2f}", factor=1.0):
    """A number, or nothing where there is none: a CPU has no GPU time."""
    return "" if value is None else form.format(value * factor)


RENDERERS = {
    "syncbn": syncbn,
    "overhead": overhead,
    "optimizers": optimizers,
    "norms": norms,
    "ddp": ddp,
    "cross_entropy": cross_entropy,
    "end_to_end": end_to_end,
}
"""By what the names of the result files begin with, in front of the first ``-``."""


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
