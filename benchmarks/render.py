"""Renders benchmarks/results/*.json and notes.md as docs/performance.md: ``python benchmarks/render.py``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rounds, summary

HERE = Path(__file__).parent
HEAD = """# Performance

Every figure comes from a script in `benchmarks/` and a file in `benchmarks/results/`; `make docs` makes this page. Both figures
of a row were measured in one run. Their ratio is what counts: absolute times hold on that machine only. What falls short is
[at the end](#what-falls-short-and-why)."""


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
        ]
        for row in result["rows"]
    ]
    head = ["one process on CPU, one thread", "mean us per step", "over", "median", "over"]
    about = (
        "The Trainer beside a hand-written loop: MLP 32-32-2, batch 4, AdamW; median difference over the rounds. A step of\n"
        f"the smallest loop (Linear(32, 2), SGD) took {result['smallest_loop_us']:.0f} us on this machine."
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
        "ms. The share is that of three passes over the logits. The peak counts the logits and everything made of them, in\n"
        "multiples of the logits. The speed is torch's GPU time for both over this row's."
    )
    return "\n\n".join([f"## Cross-entropy on {result['device']}", about, table(head, rows)])


NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "cross_entropy": "Cross-entropy"}


def norms(result):
    about = (
        f"A large device-to-device copy moved {result['copy_gb_per_s']} GB/s in the same run. GPU ms, and the share of that speed\n"
        "for the bytes that have to move. The gain is torch's time for both over the kernel's. torch.compile was measured for\n"
        "models' shapes. The last column is the choice of the package's table."
    )
    measured = [by_way(result["rows"], place) for place, row in enumerate(result["rows"]) if row["way"] == "forward"]
    parts = [f"## Norms and cross-entropy on {result['device']}", about, extremes_of_norms(measured)]
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


def extremes_of_norms(measured):
    """The shapes of which the kernel is worst."""
    both = [shape["both"] for shape in measured]
    wide = [row for row in both if row["op"] != "cross_entropy" and row["width"] >= 4096]
    kernels = [row for row in both if row["runs"] == "kernel"]
    rows = []
    for what, among, name, form in (
        ("norms from width 4096: gain", wide, "times_torch", "{:.2f}x"),
        ("norms from width 4096: share of copy", wide, "ours_share", "{:.0%}"),
        ("wherever the kernel runs: gain", kernels, "times_torch", "{:.2f}x"),
    ):
        if among:
            worst = min(among, key=lambda row, name=name: row[name])
            shape = f"{NORMS[worst['op']]} {worst['rows']} x {worst['width']} {worst['dtype']}"
            rows.append([what, str(len(among)), form.format(worst[name]), shape])
    return table(["forward and backward", "shapes", "the worst", "of"], rows)


def end_to_end(result):
    about = (
        f"GPT-2-small with an untied head ({result['sizes']['vocabulary']} words), 16 x 512 tokens, AdamW, clip at norm 1, one\n"
        "GPU; medians of interleaved runs. fabricamp: through the Trainer with FusedAdam and everything on (bar, TensorBoard,\n"
        "checkpoints, one `self.log`). All share one network. Its loss is torch's log-softmax in fp32 in the hand-written\n"
        "loops, and `fused_cross_entropy` through the Trainer. The last column is the speed over torch's autocast fp16."
    )
    parts = []
    if result["rows"]:
        head = ["run", "GPU ms", "wall ms", "GiB", "speed"]
        parts = [f"## A whole step of GPT-2-small on {result['device']}", about, table(head, steps(result["rows"]))]
    if result.get("curves"):
        curves = result["curves"]
        parts += [f"## Losses over {curves['steps']} steps on {result['device']}", learning(curves)]
    return "\n\n".join(parts)


def loop(result):
    ways = ("by hand", "bare graph", "Lightning", "fabricamp", "fabricamp, graph")
    rows = []
    for row in result["rows"]:
        times = row["wall_ms"]
        if "by hand" not in times:
            continue
        shares = [
            f"{times[own] / times[other]:.2f}" if own in times and other in times else ""
            for own, other in (("fabricamp", "by hand"), ("fabricamp, graph", "bare graph"))
        ]
        cells = [f"{times[way]:.3f}" if way in times else "" for way in ways]
        rows.append([row["network"], row["precision"], str(row["rounds"]), *cells, *shares])
    about = (
        "Wall ms per step, the device's work included: median of interleaved rounds. AdamW, clip at norm 1, batches in pinned\n"
        "memory. At O1 torch's columns have autocast and GradScaler, in the bare graph too; O2 is compared with the same.\n"
        "Lightning and fabricamp have everything on. The last columns: fabricamp over the hand-written loop, and its graph\n"
        "over the bare graph."
    )
    head = ["network and batch", "precision", "rounds", *ways, "eager", "graph"]
    shown = f"## The step as a CUDA graph on {result['device']}\n\n{about}\n\n{table(head, rows)}"
    together = [row for row in result["rows"] if "fabricamp, steps=8" in row["wall_ms"]]
    return f"{shown}\n\n{several_steps(together)}" if together else shown


def several_steps(rows):
    ways = ("bare graph, resident", "fabricamp, steps=8")
    about = (
        "With the data on the GPU: by hand, a gather for each batch and the bare graph of one step; fabricamp, a ResidentLoader\n"
        "and eight steps per launch."
    )
    cells = []
    for row in rows:
        times = [row["wall_ms"].get(way) for way in ways]
        share = f"{times[1] / times[0]:.2f}" if all(times) else ""
        cells.append([row["network"], row["precision"], *(f"{one:.3f}" if one else "" for one in times), share])
    return f"{about}\n\n{table(['network', 'precision', *ways, 'steps=8'], cells)}"


def loop_ranks(result):
    hand = "by hand, bare graph"
    ways = list(result["rows"][0]["wall_ms"])
    rows = []
    for row in result["rows"]:
        times = row["wall_ms"]
        cells = [f"{times[way]:.2f}" for way in ways]
        shares = [f"{times[f'fabricamp, {name}, graph'] / times[hand]:.2f}" for name in ("delayed_ddp", "ddp")]
        faster = f"{times[ways[0]] / times['fabricamp, delayed_ddp, graph']:.1f}x"
        rows.append([str(row["batch"]), row["precision"], str(row["rounds"]), *cells, *shares, faster])
    about = (
        "ResNet-50 (channels_last) with SyncBatchNorm, wall ms per step, exchange and AdamW's update included; medians of\n"
        "interleaved rounds. By hand: fabricamp's SyncBatchNorm and one all_reduce of all gradients, captured as a bare\n"
        "graph. The last columns: each strategy's graph over the one by hand, and torch over the graph of delayed_ddp."
    )
    head = ["batch per rank", "precision", "rounds", *ways, "delayed_ddp, graph", "ddp, graph", "torch"]
    return f"## A step of two ranks as a CUDA graph on {result['device']}\n\n{about}\n\n{table(head, rows)}"


BF16_TFLOPS = 989.4
"""Of an H200, without sparsity."""


def fsdp(result):
    names = {
        "step_ms": "step ms",
        "update_ms": "clip and update, GPU ms",
        "host_ms": "host ms of them",
        "memory_gb": "GB",
    }
    steps = [row for row in result["rows"] if "step_ms" in row]
    by_hand = {row["network"]: row["step_ms"] for row in steps if row["way"] == "fused"}
    plain = {row["network"]: row["host_ms"] for row in steps if row["way"] == "plain"}
    rows = [
        [
            row["network"],
            row["way"],
            *[f"{row[name]:.2f}" for name in names],
            str(row["tokens_s_gpu"]),
            f"{row['tflops_gpu'] / BF16_TFLOPS:.2f}",
            cell(row["step_ms"] / by_hand[row["network"]] if row["network"] in by_hand else None),
            cell(row["host_ms"] / plain[row["network"]] if row["network"] in plain else None),
        ]
        for row in steps
    ]
    about = (
        "GPTs with sharded weights: 1.4 billion parameters on 4 x 1024 tokens a rank with reshard_after_forward=False, 6.9\n"
        "billion on 1 x 2048 with True; fp32 shards, computed in bf16, gradients averaged in fp32, clipped at norm 1, AdamW. Ours\n"
        "is the Trainer at O5 with FusedAdam, everything on. By hand is torch's fully_shard, its AdamW (fused or foreach) and\n"
        "clip_grad_norm_. Plain is the fused AdamW over plain tensors in the memory of a rank's shards, with a norm per rank.\n"
        "Llama 8B is a network of Llama 3 8B's shape on 1 x 2048 tokens, five steps. One run each; MFU is of 989.4 TFLOP/s."
    )
    parts = [f"## Sharded weights on {result['device']}", about]
    head = ["network", "by", *names.values(), "tokens/s a GPU", "MFU", "step over fused", "host over plain"]
    parts.append(table(head, rows))
    parts += [checkpoints(row) for row in result["rows"] if "save_s" in row]
    return "\n\n".join(parts)


def checkpoints(row):
    """Seconds that a checkpoint of sharded weights takes."""
    names = {
        "save_s": "a save that training waits for",
        "held_s": "the first beside it: training waits",
        "written_s": "and it is on the disk after",
        "begin_s": "a run from its set-up to its first batch",
        "begin_from_checkpoint_s": "one that goes on from a checkpoint",
    }
    about = f"Seconds for a checkpoint of {row['network']}, {row['checkpoint_gb']:.1f} GB in a folder on the machine's disk:"
    return f"{about}\n\n{table(['what', 's'], [[words, f'{row[name]:.2f}'] for name, words in names.items()])}"


def steps(rows):
    (mixed,) = (row["wall_ms"] for row in rows if row["run"].startswith("torch autocast fp16"))
    columns = {"gpu_ms": "{:.1f}", "wall_ms": "{:.1f}", "peak_gib": "{:.2f}"}
    cells = [["" if row[name] is None else form.format(row[name]) for name, form in columns.items()] for row in rows]
    return [[row["run"], *own, f"{mixed / row['wall_ms']:.2f}x"] for row, own in zip(rows, cells, strict=True)]


def learning(result):
    about = (
        f"Losses (nats per byte) of a small GPT over {result['steps']} steps, with equal batches and, but for the second row,\n"
        "equal weights at the start: the mean of the last 100 steps, its distance from torch's fp32 loop, and the largest gap\n"
        "between means over 100 steps on the way. The second row shows the noise."
    )
    rows = [
        [row["run"], f"{row['final']:.4f}", f"{row['over_fp32']:+.4f}", f"{row['largest_gap']:.4f}"]
        for row in result["rows"]
    ]
    return f"{about}\n\n{table(['run', 'last 100 steps', 'over fp32', 'largest gap'], rows)}"


def syncbn(result):
    about = (
        "One layer, forward and backward, fp16, wall ms. GPU ms: iterations that were queued behind a sleeping kernel. Host us:\n"
        "the time a rank takes to issue one (torch's waits for the GPU). Then a whole ResNet-50 step (fp16 autocast,\n"
        "channels_last, torch's DistributedDataParallel, or one all_reduce under a CUDA graph), and the exchange of (2, 512)\n"
        "alone."
    )
    worst = [[name, f"{value:.2f}"] for name, value in result["ratios"].items()]
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
    parts.append(table(["ratio of times", "in the worst row"], worst))
    parts.append(layers(result["layers"]))
    parts.append(table(["batch per rank", "ResNet-50 step with", "wall ms", "over local"], networks))
    parts.append(table(["exchange", "wall us", "GPU us", "host us"], exchanges))
    return "\n\n".join(parts)


LOCAL, OURS, OF_TORCH = "BatchNorm, each rank alone", "fabricamp SyncBatchNorm", "torch SyncBatchNorm"
GRAPH = ", CUDA graph"


def layers(rows):
    """A row per shape: the local layer, ours, torch's (which a CPU has not)."""
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
    head = ["shape per rank", "layout", "local", "ours", "torch's", "ours over local", "torch's over ours"]
    return table([*head, "GPU ms: local / ours / torch's", "host us: local / ours"], cells)


def over_local(steps, batch, run):
    """A step beside the one whose ranks normalise alone, both in a CUDA graph or neither."""
    return f"{steps[batch, run] / steps[batch, LOCAL + GRAPH if run.endswith(GRAPH) else LOCAL]:.2f}"


def ddp(result):
    about = (
        "Forward and backward under fp16 autocast, the exchange of gradients, and torch's fused SGD; medians of rounds that run\n"
        "every row in turn. GPU ms: a step whose launches were queued before it began. Wall ms: steps as a loop runs them, with\n"
        "the host slower than the GPU. Ratios are of GPU time: delayed over no exchange plus the flat all_reduce alone,\n"
        "overlapped over torch's with gradient_as_bucket_view."
    )
    columns = result["columns"]
    names = next(iter(columns.values()))["ratios"]
    ratios = [[name, *[f"{one['ratios'][name]:.3f}" for one in columns.values()]] for name in names]
    parts = [f"## Exchange of gradients on {result['ranks']} x {result['device']}", about]
    parts.append(table(["ratio", *columns], ratios))
    parts += exchanges_in_wall_time(columns)
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


def exchanges_in_wall_time(columns):
    """Ratios with quartiles; results from before these were taken have none."""
    if any("wall" not in column for column in columns.values()):
        return []
    ways = next(iter(columns.values()))["wall"]
    rows = [[way, *[rounds.described(column["wall"][way]) for column in columns.values()]] for way in ways]
    about = (
        "In wall time, over torch's DDP at its best: medians of the rounds' ratios, with their quartiles. The aim is at most\n"
        "1.0; it is met or missed where both quartiles are on one side of it."
    )
    return [about, table(["wall time", *columns], rows)]


def ddp_graphs(result):
    about = (
        "Whole steps as CUDA graphs, fp16 autocast and a loss scale, AdamW's update included: torch's DDP with\n"
        "gradient_as_bucket_view, captured as a bare graph with torch's fused AdamW, beside the Trainer at O1 with FusedAdam and\n"
        "`DelayedDDP`, everything on. Wall ms, medians of interleaved rounds; ratios to torch's graph with quartiles. The aim\n"
        "is at most 1.0; it is met or missed where both quartiles are on one side of it."
    )
    columns = result["columns"]
    ways = next(iter(columns.values()))["wall_ms"]
    ratios = next(iter(columns.values()))["ratios"]
    rows = [[way, *[f"{column['wall_ms'][way]:.2f}" for column in columns.values()]] for way in ways]
    rows += [
        [f"{way} over torch's", *[rounds.described(column["ratios"][way]) for column in columns.values()]]
        for way in ratios
    ]
    head = f"## Exchange of gradients within CUDA graphs on {result['device']}"
    return "\n\n".join([head, about, table(["wall ms", *columns], rows)])


def cell(value, form="{:.2f}", factor=1.0):
    """A number, or nothing where there is none: a CPU has no GPU time."""
    return "" if value is None else form.format(value * factor)


RENDERERS = {
    "syncbn": syncbn,
    "overhead": overhead,
    "optimizers": optimizers,
    "norms": norms,
    "ddp": ddp,
    "ddp_graphs": ddp_graphs,
    "cross_entropy": cross_entropy,
    "end_to_end": end_to_end,
    "loop": loop,
    "loop_ranks": loop_ranks,
    "fsdp": fsdp,
}
"""By what the names of the result files begin with, in front of the first ``-``."""


def by_fabricamp(text):
    """The names that results call "ours" and "our", as a reader knows them."""
    return re.sub(r"\bours?\b", "fabricamp", text)


def main():
    paths = sorted((HERE / "results").glob("*.json"), reverse=True)
    results = {path.name: json.loads(path.read_text()) for path in paths}
    parts = [HEAD]
    if rows := summary.rows_of(results):
        parts.append(table(summary.HEAD, rows))
    for name, result in results.items():
        parts.append(by_fabricamp(RENDERERS[name.partition("-")[0]](result)))
        parts.append(
            f"`{result['command']}`, {facts(result, 'processor', 'cores', 'device', 'torch', 'python', 'date')}\n"
        )
    parts.append((HERE / "results" / "notes.md").read_text())
    (HERE.parent / "docs" / "performance.md").write_text("\n\n".join(parts).rstrip() + "\n")


if __name__ == "__main__":
    main()
