"""Renders benchmarks/results/*.json and notes.md as docs/performance.md and docs/measurements.md: ``python benchmarks/render.py``.

The first has what a reader decides by: a row for each gain, the fastest steps, and what falls short.  The second has all tables.
Results of code that was replaced since are in benchmarks/results/earlier, and become benchmarks/results/earlier.md.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rounds, summary

HERE = Path(__file__).parent
HEAD = """# Performance

The table shows what the Trainer costs, and what its parts gain, beside torch and Lightning. The figures of a row were measured in
one run, on the machine and the day in its last column. Compare their ratio: the absolute times are those of one machine."""
ABOUT = """- **Where it gains little or nothing**, and the targets that were missed: [the last section](#what-falls-short-and-why).
- The same as pictures: [charts.md](charts.md). How to make your own step faster: [speed.md](how-to/speed.md). `fabricamp bench`
  measures it.
- All tables, each with its command, machine and day: [measurements.md](measurements.md). A script in `benchmarks/` measured every
  figure, and its result is in `benchmarks/results/`."""
MEASUREMENTS = """# Measurements

All tables behind [performance.md](performance.md). A script in `benchmarks/` measured each; the line below a table has its command,
machine and day. `make docs` writes both pages from `benchmarks/results/`. Results of code that was replaced since, and revisions
beside each other: [earlier.md](../benchmarks/results/earlier.md)."""
EARLIER = """# Earlier code

Results of code that was replaced since, and of revisions beside each other: they are kept as measured. What holds today:
[performance.md](../../docs/performance.md)."""


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
        'The table compares the Trainer with a hand-written loop: MLP 32-32-2, batch 4, AdamW. "Over" is the median of the\n'
        f"differences of all rounds. A step of the smallest loop (Linear(32, 2), SGD) took {result['smallest_loop_us']:.0f} us "
        "on this machine."
    )
    return f"## What a step costs on the host, {result['cores']} cores\n\n{about}\n\n{table(head, rows)}"


def overhead_trees(result):
    def cell(row, name, form):
        low, middle, high = row[name]
        return f"{middle:{form}} ({low:{form}} to {high:{form}})"

    rows = [
        [
            row["run"],
            row["step"],
            cell(row, "old_us", ".1f"),
            cell(row, "new_us", ".1f"),
            cell(row, "new_over_old", ".3f"),
        ]
        for row in result["rows"]
    ]
    head = ["one process on CPU, one thread", "step", "us before", "us now", "now / before"]
    at_once = "; all rounds ran at once, each on a core of its own" if result["rounds_at_once"] else ""
    about = (
        "Steps of `benchmarks/overhead.py`, in the tree before the agenda of the loop and in this one: four processes a round, in\n"
        f"the order before, now, now, before{at_once}. Medians with quartiles; a ratio is that of the two sums of a round."
    )
    return f"## What a step costs on the host beside an earlier tree, {result['cores']} cores\n\n{about}\n\n{table(head, rows)}"


def calls(result):
    rows = [
        [name, f"{row['calls']:.0f}", f"{row['files']}", f"{row['changes_of_file']:.0f}"]
        for name, row in result["rows"].items()
    ]
    about = (
        "Calls of fabricamp's own functions in one steady step at O2 with FusedAdam and clipping (resumed generators included),\n"
        "the files that they are in, and how often the file changes from one call to the next. They say how much a reader has to\n"
        "follow, not what a step costs."
    )
    return f"## Calls in a step, {result['device']}\n\n{about}\n\n{table(['a step', 'calls', 'files', 'changes of file'], rows)}"


def two_trees(result):
    def cell(row, name, form):
        low, middle, high = (format(value, form) for value in row[name])
        return f"{middle} ({low} to {high})"

    rows = []
    for row in result["rows"]:
        if "failed" in row:
            rows.append([row["row"], "failed", "failed", "", "", ""])
            continue
        form = ".3f" if row["unit"].endswith("ms") else ".0f"
        low, high = row["median_ratio_in"]
        cells = [cell(row, "before", form), cell(row, "after", form), cell(row, "ratio", ".3f")]
        rows.append([f"{row['row']}, {row['unit']}", *cells, f"{low:.3f} to {high:.3f}", f"{row['rounds']}"])
    about = (
        f"Revisions {result['before']} and {result['after']} in turn, in short windows (before, after, after, before), in two\n"
        f"processes each, all pinned to the same {result['pinned_to_cores']} cores: medians of the rounds with their quartiles.\n"
        "The ratio is the later revision's figure over the earlier one's in the same round; beside it the interval in which its\n"
        "median lies with 95 % probability; of fewer than six rounds it is their range, with 88 % for four and 94 % for five. "
        "`benchmarks/two_trees.py` says what each row runs."
    )
    head = ["row", result["before"], result["after"], "ratio", "its median in", "rounds"]
    return f"## Two revisions, {result['device']}, {result['cores']} cores\n\n{about}\n\n{table(head, rows)}"


def optimizers_on_cpu(result):
    rows = [[row["optimizer"], row["row"], f"{row['ms']:.1f}"] for row in result["rows"]]
    about = "Time of `optimizer.step()` with ResNet-50's parameters, one thread."
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
    about = (
        f'In the same run a large device-to-device copy moved {result["copy_gb_per_s"]} GB/s. "Share of copy" is the '
        "optimizer's\nbandwidth as a share of this."
    )
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
        f"In the same run a large device-to-device copy moved {result['copy_gb_per_s']} GB/s. Forward, backward and both are "
        'GPU ms.\n"Share of copy" is the bandwidth of three passes over the logits as a share of this. "Peak" is the '
        'memory of the logits\nand all tensors computed from them, divided by that of the logits. "Speed" is torch\'s GPU '
        "time for both, divided by\nthe row's."
    )
    return "\n\n".join([f"## Cross-entropy on {result['device']}", about, table(head, rows)])


def linear_cross_entropy(result):
    forms = {"forward_ms": "{:.2f}", "backward_ms": "{:.2f}", "both_ms": "{:.2f}", "ratio_to_stored": "{:.2f}"}
    forms |= {"peak_gb": "{:.2f}", "beyond_gradient_gb": "{:.2f}", "loss_error": "{:.0e}", "weight_error": "{:.0e}"}
    rows = [
        [row["shape"], row["row"], *[form.format(row[name]) for name, form in forms.items()]]
        for row in result["rows"]
        if "error" not in row
    ]
    failed = sorted({row["row"] for row in result["rows"] if "error" in row})
    head = [
        "rows x classes x width",
        "by",
        "forward ms",
        "backward ms",
        "both ms",
        "ratio",
        "peak GB",
        "beyond the gradient",
    ]
    head += ["loss", "weight"]
    about = (
        'Loss of hidden states and the head\'s weight, GPU ms. "Ratio" is the time for both, divided by the fastest with stored\n'
        'logits. "Peak" is memory beyond the operands, "beyond the gradient" the same without the weight\'s gradient. "Loss" and\n'
        '"weight" are distances of the loss, and of the weight\'s gradient as a share of its largest value, to fp32.'
    )
    if failed:
        about += f"\nNot measured, because it failed in this run: {', '.join(failed)}."
    return "\n\n".join([f"## Losses without stored logits on {result['device']}", about, table(head, rows)])


def titan(result):
    """Llama 3 8B by torchtitan and by the Trainer."""
    peers = {row["way"].endswith("fp8"): row for row in result["rows"] if row["way"].startswith("torchtitan")}

    def beside(row, name, form):
        peer = peers.get(row["way"].endswith("fp8"))
        ratio = "" if peer is None or peer is row else f" ({row[name] / peer[name]:.2f} x)"
        return f"{row[name]:{form}}{ratio}"

    rows = [
        [
            row["way"],
            beside(row, "tokens_s_gpu", ",.0f"),
            f"{row['step_ms']:.1f} ({' to '.join(f'{one:.1f}' for one in row['step_quartiles_ms'])})",
            beside(row, "allocated_gib", ".1f"),
            beside(row, "reserved_gib", ".1f"),
            beside(row, "device_gib", ".1f"),
            ", ".join(f"{one:.3f}" for one in (*row["losses"][:3], row["losses"][-1])),
        ]
        for row in result["rows"]
    ]
    about = (
        f"torchtitan {result['torchtitan']}'s own `Transformer`, {result['batch']} x {result['length']} tokens, compiled blocks, "
        "AdamW, clipped at norm 1,\n"
        "expandable segments. `fabricamp` is `FSDP([TransformerBlock])` at O5 with torch's loss, `head` has\n"
        "`FusedLinearCrossEntropy` and embedding and head as units, `fp8` are FP8 products and gathers on both sides.\n"
        f"Rows with and without FP8 are of two hosts; each way is one run of {result['steps']} steps. Medians of a step with\n"
        "quartiles; GiB at the peak: what torch allocated and reserved, and what was in use on the device. Losses of\n"
        "steps 1, 2, 3 and the last; first values are other numbers of the same distributions."
    )
    head = ["way", "tokens/s a GPU", "step ms", "allocated", "reserved", "in use", "losses"]
    return f"## Llama 3 8B beside torchtitan, {result['device']}\n\n{about}\n\n{table(head, rows)}"


NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "cross_entropy": "Cross-entropy"}


def norms(result):
    about = (
        f"In the same run a large device-to-device copy moved {result['copy_gb_per_s']} GB/s. A cell has the GPU ms and, in "
        "brackets, the\nbandwidth for the bytes that have to move, as a share of the copy's. \"Gain\" is torch's time for "
        "both, divided by the\nkernel's. torch.compile was measured for the shapes of models. \"Runs\" is what the package's "
        "dispatch table chooses."
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
    """Returns the three consecutive rows of one shape, by "way"; a shape may have been measured twice."""
    return {row["way"]: row for row in rows[place : place + 3]}


def time_and_share(row, who):
    return f"{row[f'{who}_ms']:.4f} ({row[f'{who}_share']:.0%})" if f"{who}_ms" in row else ""


def extremes_of_norms(measured):
    """Returns the shapes with the kernel's worst values."""
    both = [shape["both"] for shape in measured]
    wide = [row for row in both if row["op"] != "cross_entropy" and row["width"] >= 4096]
    kernels = [row for row in both if row["runs"] == "kernel"]
    rows = []
    for what, among, name, form in (
        ("norms of width 4096 or more: gain", wide, "times_torch", "{:.2f}x"),
        ("norms of width 4096 or more: share of copy", wide, "ours_share", "{:.0%}"),
        ("shapes for which the kernel runs: gain", kernels, "times_torch", "{:.2f}x"),
    ):
        if among:
            worst = min(among, key=lambda row, name=name: row[name])
            shape = f"{NORMS[worst['op']]} {worst['rows']} x {worst['width']} {worst['dtype']}"
            rows.append([what, str(len(among)), form.format(worst[name]), shape])
    return table(["forward and backward", "shapes", "worst value", "its shape"], rows)


def end_to_end(result):
    about = (
        f"GPT-2-small with an untied head ({result['sizes']['vocabulary']} words), 16 x 512 tokens, AdamW, gradients clipped "
        "at norm 1,\none GPU; medians of interleaved runs. The rows of fabricamp use the Trainer with FusedAdam and everything "
        "on (bar,\nTensorBoard, checkpoints, one `self.log`). All rows train the same network. The hand-written loops compute "
        "the loss\nby torch's log-softmax in fp32, the Trainer's runs by `fused_cross_entropy`. \"Speed\" is the wall time of "
        "torch's\nautocast fp16, divided by the row's."
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
        "Wall ms per step, including the device's work: the median of interleaved rounds. AdamW, gradients clipped at norm 1,\n"
        "batches in pinned memory. In the rows O1 and O2 torch's columns, the bare graph too, use autocast and GradScaler.\n"
        'Lightning and fabricamp have everything on. "Eager" is fabricamp\'s time divided by that of the hand-written loop,\n'
        '"graph" that of fabricamp\'s graph divided by that of the bare graph.'
    )
    head = ["network and batch", "precision", "rounds", *ways, "eager", "graph"]
    shown = f"## The step as a CUDA graph on {result['device']}\n\n{about}\n\n{table(head, rows)}"
    together = [row for row in result["rows"] if "fabricamp, steps=8" in row["wall_ms"]]
    return f"{shown}\n\n{several_steps(together)}" if together else shown


def several_steps(rows):
    ways = ("bare graph, resident", "fabricamp, steps=8")
    about = (
        "With the dataset in GPU memory. The hand-written loop gathers each batch and replays the bare graph of one step;\n"
        "fabricamp uses a ResidentLoader and launches eight steps at once."
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
        "ResNet-50 (channels_last) with SyncBatchNorm: wall ms per step, including the all-reduce and AdamW's update; medians of\n"
        'interleaved rounds. "By hand" captures fabricamp\'s SyncBatchNorm and one all_reduce of all gradients as a bare graph.\n'
        "The last columns are the time of each strategy's graph divided by that of the graph by hand, and torch's time\n"
        "divided by that of the graph of delayed_ddp."
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
    steps = [row for row in result["rows"] if "step_ms" in row and not is_compiled(row)]
    by_hand = {row["network"]: row["step_ms"] for row in steps if row["way"] == "fused"}
    plain = {row["network"]: row["host_ms"] for row in steps if row["way"] == "plain"}
    rows = [
        [
            row["network"],
            row["way"],
            *[cell(row.get(name)) for name in names],
            str(row["tokens_s_gpu"]),
            f"{row['tflops_gpu'] / BF16_TFLOPS:.2f}",
            cell(row["step_ms"] / by_hand[row["network"]] if row["network"] in by_hand else None),
            cell(row["host_ms"] / plain[row["network"]] if row["network"] in plain and "host_ms" in row else None),
        ]
        for row in steps
    ]
    about = (
        "GPTs with sharded weights: 1.4 billion parameters, 4 x 1024 tokens per rank, reshard_after_forward=False; and 6.9 "
        "billion,\n1 x 2048 tokens, reshard_after_forward=True. The shards are fp32, the computation is bf16, gradients are "
        'averaged in\nfp32 and clipped at norm 1, the optimizer is AdamW. "Ours" is the Trainer at O5 with FusedAdam and '
        'everything on.\n"By hand" is torch\'s fully_shard, its AdamW (fused or foreach) and clip_grad_norm_. "Plain" is '
        'the fused AdamW with plain\ntensors as large as a rank\'s shards, and one norm per rank. "Llama 8B" is a network of '
        "Llama 3 8B's shape, 1 x 2048\ntokens, five steps. Every row is one run; MFU is relative to 989.4 TFLOP/s."
    )
    parts = [f"## Sharded weights on {result['device']}"]
    head = ["network", "by", *names.values(), "tokens/s a GPU", "MFU", "step over fused", "host over plain"]
    if rows:
        parts += [about, table(head, rows)]
    if compiled := [row for row in result["rows"] if is_compiled(row)]:
        parts += compiled_blocks(compiled, result["ratios"])
    parts += [checkpoints(row) for row in result["rows"] if "save_s" in row]
    return "\n\n".join(parts)


def is_compiled(row):
    return row["way"].startswith("compiled") or "blocks" in row["way"]


def compiled_blocks(rows, ratios):
    """Returns the steps of sharded weights with compiled blocks."""
    about = (
        "GPTs with sharded weights and compiled blocks: 1.4 billion parameters, 4 x 1024 tokens per rank, "
        'reshard_after_forward=False;\nand 6.9 billion, 1 x 2048 tokens, reshard_after_forward=True. "Compiled" is torch\'s '
        "fully_shard by hand, each block within\ntorch.compile, in bf16 with fp32 shards, the fused AdamW and clip_grad_norm_; "
        '"compiled fp8" is the same with torchao\'s FP8\nproducts and FP8 gathers. "fabricamp blocks" is the Trainer at O5 with '
        '`compile="blocks"` and everything on, "fabricamp fp8 blocks" with\n`Float8("tensorwise", all_gather=True)`. GPU ms of a '
        'step: the median of seven windows of steps, with quartiles; ratios to\n"compiled" are those of the medians, with the '
        'range that the quartiles give. A way is one run; ways do not alternate. Steps of a way that ends with "graph" are '
        "replayed as CUDA\ngraphs, without the comparison of the first replay with an eager step; its memory is what torch has "
        "reserved, else the peak of\nwhat was allocated."
    )
    over = {(row["network"], row["way"]): row for row in ratios}
    cells = []
    for row in rows:
        low, high = row["window_quartiles_ms"]
        ratio = over.get((row["network"], row["way"]))
        words = "1"
        if ratio is not None:
            least, most = ratio["range"]
            words = f"{ratio['median']:.3f} ({least:.3f} to {most:.3f})"
            if "goal" in ratio:
                words += f"; aim {ratio['goal']}, {ratio['decided']}"
        cells.append(
            [
                row["network"],
                row["way"],
                f"{row['window_ms']:.2f} ({low:.2f} to {high:.2f})",
                cell(row.get("update_ms")),
                f"{row['memory_gb']:.2f}",
                str(row["tokens_s_gpu"]),
                words if ratio is not None or row["way"] == "compiled" else "",
            ]
        )
    head = ["network", "by", "step, GPU ms", "clip and update", "GB", "tokens/s a GPU", "over compiled"]
    return [about, table(head, cells)]


def compiled_ranks(result):
    about = (
        "ResNet-50 (channels_last) with SyncBatchNorm under bf16 autocast, AdamW: wall ms per step, medians of windows that "
        'alternate\nin one process. "torch" is `torch.compile` of DistributedDataParallel over its SyncBatchNorm, with the fused '
        'AdamW;\n"fabricamp" is the Trainer with `compile=True`, `cuda_graph=True`, `strategy="delayed_ddp"` and everything on. '
        "Ratios are\nmedians of the rounds' with quartiles; the aim is at most 0.9, met or missed where both are on one side of it."
    )
    names = [
        name
        for name in ("torch", "torch, eager", "torch, graph")
        if any(name in row["ratios"] for row in result["rows"])
    ]
    if names != ["torch"]:
        about += '\n"torch, eager" is its DDP without `torch.compile`, "torch, graph" that one captured by hand.'
    rows = [
        [
            str(row["batch"]),
            str(len(row["wall_ms_of_rounds"]["fabricamp"])),
            *[f"{row['wall_ms'][name]:.2f}" if name in row["wall_ms"] else "" for name in (*names, "fabricamp")],
            *[rounds.described(row["ratios"][name]) if name in row["ratios"] else "" for name in names],
        ]
        for row in result["rows"]
    ]
    head = ["batch per rank", "rounds", *names, "fabricamp", *[f"fabricamp over {name}" for name in names]]
    return "\n\n".join([f"## Compiled steps of two ranks on {result['device']}", about, table(head, rows)])


def checkpoints(row):
    """Returns the seconds of checkpoints of sharded weights."""
    names = {
        "save_s": "a save for which training waits",
        "held_s": "the first save in the background: time for which training waits",
        "written_s": "the same save: time until it is on disk",
        "begin_s": "set-up of a run, up to its first batch",
        "begin_from_checkpoint_s": "set-up of a run that resumes from a checkpoint",
    }
    about = f"Seconds for a checkpoint of {row['network']}: {row['checkpoint_gb']:.1f} GB in a folder on the machine's disk."
    return f"{about}\n\n{table(['what', 's'], [[words, f'{row[name]:.2f}'] for name, words in names.items()])}"


def steps(rows):
    (mixed,) = (row["wall_ms"] for row in rows if row["run"].startswith("torch autocast fp16"))
    columns = {"gpu_ms": "{:.1f}", "wall_ms": "{:.1f}", "peak_gib": "{:.2f}"}
    cells = [["" if row[name] is None else form.format(row[name]) for name, form in columns.items()] for row in rows]
    return [[row["run"], *own, f"{mixed / row['wall_ms']:.2f}x"] for row, own in zip(rows, cells, strict=True)]


def learning(result):
    about = (
        f"Losses (nats per byte) of a small GPT over {result['steps']} steps. All runs read the same batches; all but the "
        "second row\nstart from the same weights, so the second row shows the noise. The columns are the mean loss of the last "
        "100 steps,\nits difference from torch's fp32 loop, and the largest difference between means over 100 steps of training."
    )
    rows = [
        [row["run"], f"{row['final']:.4f}", f"{row['over_fp32']:+.4f}", f"{row['largest_gap']:.4f}"]
        for row in result["rows"]
    ]
    return f"{about}\n\n{table(['run', 'last 100 steps', 'over fp32', 'largest gap'], rows)}"


def syncbn(result):
    about = (
        'The first tables measure forward and backward of one layer in fp16, in wall ms. "GPU ms" is the time of iterations '
        'that\nwere queued while a kernel slept. "Host us" is the time in which a rank issues one iteration (torch\'s layer '
        "waits for\nthe GPU). The next table has a whole ResNet-50 step (fp16 autocast, channels_last, torch's "
        "DistributedDataParallel;\nunder a CUDA graph one all_reduce instead). The last one has only the exchange of (2, 512) "
        "values."
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
    """Returns a row per shape: the local layer, ours, torch's (GPUs only)."""
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
    """Returns the ratio of a step to the same step with local BatchNorm; both have a CUDA graph, or neither has."""
    return f"{steps[batch, run] / steps[batch, LOCAL + GRAPH if run.endswith(GRAPH) else LOCAL]:.2f}"


def ddp(result):
    about = (
        "A step is forward and backward under fp16 autocast, the all-reduce of gradients, and torch's fused SGD. The figures are\n"
        "medians of rounds, in each of which every row has the turns that the command names, among those of the others. For\n"
        '"GPU ms" all launches of a step were queued before it began. "Wall ms" is a step of a usual loop, in which the host is\n'
        "slower than the GPU. The ratios divide GPU times: delayed by the sum of no exchange and the flat all_reduce alone,\n"
        "overlapped by torch's with gradient_as_bucket_view."
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
        rows[-1][-1] = ""  # the collective alone is not a step
        parts.append(table([name, "GPU ms", "wall ms", "wall ms of rounds", "over no exchange"], rows))
    return "\n\n".join(parts)


def exchanges_in_wall_time(columns):
    """Returns ratios with quartiles, or nothing for results without them."""
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


GOALS = {
    "gpt2-16": ("GPT-2-small, 16 x 512", 0.92),
    "resnet50-64": ("ResNet-50, batch 64", 0.95),
    "resnet50-256": ("ResNet-50, batch 256", 0.99),
    "mlp": ("MLP, batch 4", 1.15),
    "gpt-1.3b": ("GPT 1.3 B, 4 x 2048", 0.91),
    "gpt-1.3b-fp8": ("GPT 1.3 B, 4 x 2048, with FP8", 0.90),
    "gpt-1.3b-fp8-loss": ("GPT 1.3 B, 4 x 2048, with FP8 and `fused_cross_entropy`", 0.90),
    "cold-24": ("first step, GPT of 24 layers", 0.3),
}
"""What `benchmarks/fastest.py` measures: its name in a table, and the goal over the fastest way by hand."""


def fastest(result):
    rows = result["rows"]
    ways = list(dict.fromkeys(way for row in rows for way in row["wall_ms"]))

    def shown(row, way):
        if way not in row["wall_ms"]:
            return ""
        low, high = row["quartiles"][way]
        digits = 1 if high >= 1 else 3
        return f"{row['wall_ms'][way]:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    lines = [[way, *[shown(row, way) for row in rows]] for way in ways]
    about = (
        "Wall ms of a whole step: forward, backward, clipping and AdamW, medians of interleaved rounds with quartiles. By hand:\n"
        "bf16 autocast and torch's fused AdamW, eager, by `torch.compile(network)` and by its mode reduce-overhead (CUDA graphs).\n"
        "The Trainer and Lightning (bf16-mixed) have everything on. A cell is empty where a way was not measured."
    )
    head = f"## The fastest step on {result['device']}"
    return f"{head}\n\n{about}\n\n{table(['wall ms', *[GOALS[row['network']][0] for row in rows]], lines)}"


def against_goals(result):
    """The fastest way by hand beside the fastest of the Trainer, with the goal and the losses of both."""
    lines = []
    rounds_made = []
    for row in sorted(result["rows"], key=lambda row: list(GOALS).index(row["network"])):
        name, goal = GOALS[row["network"]]
        times = row["wall_ms"]
        numbers = {way: len(values) for way, values in row["wall_ms_of_rounds"].items()}
        hands, own = (measured_most(numbers, side) for side in ("by hand", "fabricamp"))
        if not hands or not own:
            continue
        rounds_made += [numbers[hands[0]], numbers[own[0]]]
        theirs, ours = (min(each, key=times.get) for each in (hands, own))
        # Several steps a launch have the losses of single ones, and no hook that could copy them.
        keys = [way.removesuffix(", 8 steps a launch") for way in (theirs, ours)]
        losses = [f"{row['losses'][key]:.4f}" if key in row["losses"] else "" for key in keys]
        if "first_losses" in row:  # later ones differ between two runs of one way too
            losses = [f"{row['first_losses'][key]:.4f} (1 to 12)" for key in keys]
        shares = [f"{times[ours] / times[theirs]:.2f}", f"{goal:.2f}"]
        lines.append([name, theirs, with_spread(row, theirs), ours, with_spread(row, ours), *shares, *losses])
    columns = ["", "fastest by hand", "ms", "fastest of the Trainer", "ms", "share", "target"]
    about = (
        f"A whole step on one {result['device']}, torch {result['torch']}: forward, backward, clipping and AdamW in bf16.\n"
        f"Wall ms, medians of {min(rounds_made)} to {max(rounds_made)} rounds with quartiles. By hand is the fastest of bf16\n"
        "autocast and of bf16 weights with fp32 masters, by `torch.compile`, also with its CUDA graphs. The Trainer has\n"
        "everything on: bar, logger, checkpoint callback, a logged value. The losses are means of steps 100 to 200, or of those\n"
        "that are named."
    )
    heading = f"## A whole step by hand and with the Trainer, each at its fastest, {result['device']}"
    return f"{heading}\n\n{about}\n\n{table([*columns, 'loss by hand', 'of the Trainer'], lines)}"


def measured_most(numbers, side):
    """Returns the ways of a side that have the most rounds: those that were slow in the first one have no others."""
    of_side = {way: number for way, number in numbers.items() if way.startswith(side)}
    return [way for way, number in of_side.items() if number == max(of_side.values())]


def with_spread(row, way):
    """Returns a median with its quartiles; the digits depend on its size."""
    middle = row["wall_ms"][way]
    if middle < 1:
        digits = 3
    elif middle < 1000:
        digits = 2
    else:
        digits = 0
    low, high = row["quartiles"][way]
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def fp8_linears(result):
    """Compiled blocks in bf16 and FP8, by width and tokens."""
    recipes = list(dict.fromkeys(recipe for row in result["rows"] for recipe in row["gain"]))
    rows = [
        [
            str(row["width"]),
            str(row["tokens"]),
            f"{row['gpu_ms']['bf16']:.2f}",
            *[f"{row['gpu_ms'][one]:.2f} ({row['gain'][one]:.2f}x)" if one in row["gain"] else "" for one in recipes],
        ]
        for row in sorted(result["rows"], key=lambda row: (-row["tokens"], row["width"]))
    ]
    about = (
        'GPU ms of forward and backward of one block of GPT with bf16 weights, compiled as `compile="blocks"` does; passes\n'
        f"{result['passes']}; sequences of {result['length']} tokens. FP8: all linear layers of\n"
        "the block, by recipe, and in brackets the time of bf16 divided by that of FP8."
    )
    head = f"## Linear layers in FP8 on {result['device']}"
    return "\n\n".join([head, about, table(["width", "tokens", "bf16", *recipes], rows)])


def gaps_of(rows):
    """Returns by seed, kind and change how far each run ends from its seed's bf16 run without a change, as a share."""
    exact = {row["seed"]: row["final"] for row in rows if row["kind"] == "bf16" and not row["change"]}
    return {
        (row["seed"], row["kind"], row["change"]): row["final"] / exact[row["seed"]] - 1
        for row in rows
        if row["seed"] in exact and (row["kind"] == "fp8" or row["change"])
    }


def fp8_losses(result):
    """The last losses of runs in FP8 and of controls in bf16, beside bf16 by the same seed."""
    gaps = gaps_of(result["rows"])
    exact = {row["seed"]: row for row in result["rows"] if row["kind"] == "bf16" and not row["change"]}
    rows = []
    for seed, row in sorted(exact.items()):
        shown = {
            kind: [f"{gap:+.2%}" for run, gap in sorted(gaps.items()) if run[:2] == (seed, kind)]
            for kind in ("fp8", "bf16")
        }
        rows.append([str(seed), f"{row['final']:.4f}", ", ".join(shown["fp8"]), ", ".join(shown["bf16"])])
    sizes = result["sizes"]
    batch = f"{sizes['batch']} x {sizes['context']}"
    about = (
        f"A GPT of width {sizes['width']} with {sizes['layers']} layers, {result['steps']} steps of {batch} bytes of text; the "
        f"rate rises to {result['peak']}.\nMean loss of the last 100 steps in bf16 (O5), and how far other runs with the same seed "
        f"and batches end from it:\nFP8 ({result['recipe']}, all layers of the blocks), and bf16 with each initial weight changed "
        "by up to one rounding."
    )
    head = f"## Losses in FP8 on {result['device']}, rate {result['peak']}"
    return "\n\n".join([head, about, table(["seed", "bf16", "FP8", "bf16, other roundings"], rows)])


def graph_memory(result):
    """The peaks of eager and of graphed runs, and their ratio."""
    rows = []
    for row in result["rows"]:
        peaks = [f"{row['runs'][way]['peak'] / 2**30:.2f}" for way in ("eager", "graph")]
        rows.append([GOALS[row["network"]][0], row["level"], *peaks, f"{row['ratio']:.2f}", "1.15"])
    about = (
        "GiB at the peak, from the first batch to the last: the larger of the memory used on the device and of what torch's\n"
        "allocator has reserved. The graphed run compares its first replay with an eager step."
    )
    head = f"## Memory of a graphed run on {result['device']}"
    return f"{head}\n\n{about}\n\n{table(['', 'level', 'eager', 'graph', 'ratio', 'target'], rows)}"


def bits(result):
    """What repeats, what depends on the batch, and RMSNorm under autocast: a table for each part that was measured."""
    parts = [f"## Which bits repeat, and which depend on the batch, on {result['device']}"]
    for part, (about, head, cells) in BITS.items():
        rows = [cells(row) for row in result["rows"] if row["part"] == part]
        if part == "batch":
            rows = merged(merged(rows, head.index("shape")), head.index("dtype"))
        parts += [about, table(head, rows)] if rows else []
    return "\n\n".join(parts)


def merged(rows, column):
    """Returns the rows with those in one that are equal in all other columns: it has each one's cell of ``column``."""
    cells = {}
    for row in rows:
        cells.setdefault((*row[:column], *row[column + 1 :]), []).append(row[column])
    return [[*others[:column], ", ".join(own), *others[column:]] for others, own in cells.items()]


def attention_bits(row):
    """Returns the cells of an attention: which gradients have equal bits in each mode, and the times."""

    def repeats(found):
        if "refused" in found:
            return "refused"
        others = [f"{name} {found[name]}" for name in ("forward", "dq", "dk", "dv") if found[name]]
        return f"not in {', '.join(others)}" if others else "all"

    times = [cell(row.get(f"{mode}_ms"), "{:.3f}") for mode in ("default", "deterministic")]
    modes = [repeats(row[mode]) for mode in ("default", "deterministic")]
    return [row["size"], row["dtype"], row["backend"], *modes, *times, cell(row.get("cost"), "{:.2f}x")]


def batch_bits(row):
    """Returns the cells of an operation: the numbers of rows with the bits of one row alone, and all groups."""
    alone, *others = row["groups"]
    return [
        row["operation"],
        row["shape"],
        row["dtype"],
        "every" if not others else spans(alone, row["groups"]),
        "; ".join(spans(group, row["groups"]) for group in others),
    ]


def spans(numbers, groups):
    """Returns numbers of rows as text: "1 to 8, 16" where no number that was tried lies between 1 and 8 and is missing."""
    tried = sorted(number for group in groups for number in group)
    found = []
    for number in numbers:
        if found and tried.index(number) == tried.index(found[-1][-1]) + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{span[0]} to {span[-1]}" if len(span) > 1 else str(span[0]) for span in found)


def rms_norm_times(row):
    """Returns the cells of an RMSNorm: ms of both ways, and the gain."""
    times = [row[f"{name}_{way}_ms"] for way in ("forward", "both") for name in ("torch", "fused", "bf16")]
    return [f"{row['rows']} x {row['width']}", *[f"{time:.4f}" for time in times], f"{row['times_fused']:.2f}x"]


ABOUT_ATTENTION = """Attention (causal; batch x heads x length x width), its backward again and again from the same inputs: whether
output and gradients had the bits of the first run each time; "not in dk 7" means that dk had others in 7 runs. Then the ms of
backward, and those of the deterministic algorithms divided by those of torch's default."""
ABOUT_BATCH = """The result for the first of m rows: for which m it has the bits of that row alone, and which other m give each
other's bits. A shape is the inputs and outputs of a product, or the width of a row; 35 numbers from 2 to 8192 were tried, as far as
memory goes. Groups are separated by a semicolon; between two numbers of a range all that were tried are in it."""
ABOUT_RMS_NORM = """RMSNorm of bf16 inputs under autocast, ms: torch's with fp32 weights, the same after `fabricamp.nn.fuse`, and
torch's with bf16 weights. "Gain" is torch's time for both with fp32 weights, divided by that after `fuse`."""
BITS = {
    "attention": (
        ABOUT_ATTENTION,
        ["size", "dtype", "backend", "by default", "deterministic", "ms", "ms, deterministic", "cost"],
        attention_bits,
    ),
    "batch": (
        ABOUT_BATCH,
        ["operation", "shape", "dtype", "m with the bits of m = 1", "other groups of m"],
        batch_bits,
    ),
    "rms_norm": (
        ABOUT_RMS_NORM,
        [
            "rows x width",
            *[f"{name}: {way}" for way in ("forward", "both") for name in ("torch", "fused", "bf16")],
            "gain",
        ],
        rms_norm_times,
    ),
}
"""For each part of benchmarks/bits.py: a text, the head of its table, and the cells of a row."""


def start(result):
    """From the start of a process to the end of a fit of ten steps."""

    def times(found):
        low, high = found["quartiles"]
        return f"{found['min']:.1f}", f"{found['median']:.1f} ({low:.1f} to {high:.1f})"

    rows = [
        [
            row["way"],
            *times(row["processor_s"]),
            *times(row["wall_s"]),
            f"{row['modules']:,}",
            "yes" if row["compiler"] else "no",
        ]
        for row in result["rows"]
    ]
    over = ""
    if "over_lightning" in result:
        ratio = result["over_lightning"]
        over = f" Processor seconds over those of Lightning {result['lightning']}, round by round:"
        over += f" {rounds.described(ratio)} at a target of {ratio['goal']}."
    about = (
        "Whole processes in turn: seconds of processors and of the wall, minimum and median with quartiles, and modules at the\n"
        f"end; the machine had a load of {result['load'][0]}, so that the wall says less.{over}"
    )
    head = ["start to the end of ten steps", "processor s", "median", "wall s", "median", "modules", "compiler"]
    heading = f"## From the start of a process to the end of ten steps, {result['device']}"
    return f"{heading}\n\n{about}\n\n{table(head, rows)}"


def first_replay(result):
    """The first replay of a CUDA graph, with its comparison and without."""
    rows = []
    for row in result["rows"]:
        compared, alone = row["compared"], row["compare=False"]
        gib = compared["gib"]
        rows.append(
            [
                f"{row['network']}, {row['level']}",
                f"{compared['first_replay_s']:.2f}",
                f"{alone['first_replay_s']:.2f}",
                f"{compared['eager_s']:.3f}",
                f"{compared['replay_s']:.3f}",
                f"{gib['before']:.1f}, {gib['most']:.1f}, {gib['after']:.1f}",
            ]
        )
    about = (
        "Seconds of the batch that captures, replays for the first time and compares the replay with eager steps, and of the same\n"
        "batch with `CudaGraph(compare=False)`; an eager step before and a replay after it; GiB in use on the device before, at\n"
        "the most during, and after the comparison."
    )
    head = [
        "network, level",
        "compared, s",
        "compare=False, s",
        "eager step, s",
        "replay, s",
        "GiB before, most, after",
    ]
    return f"## The first replay of a CUDA graph, {result['device']}\n\n{about}\n\n{table(head, rows)}"


def compiled_start(result):
    """Starts of a compiled network: cold, warm, and from a kept folder."""

    def times(row, name):
        found = row.get(name)
        return "" if found is None else f"{found['min']:.1f} ({found['median']:.1f})"

    names = ("first_step_s", "start_s", "processor_s", "compilation_s")
    rows = [
        [row["tree"], str(row["ranks"]), row["way"], *(times(row, name) for name in names)] for row in result["rows"]
    ]
    about = (
        f"{result['network']}; seconds, minimum and median. Cold: with empty caches of torch; warm: with what that left; kept:\n"
        'with empty caches and a folder of `Compile(cache=...)`. "Compilation" is processor time of all processes, less that of\n'
        f"the eager run, in which the compiler is not imported. The machine had a load of {result['load'][0]}."
    )
    head = ["tree", "ranks", "start", "first step", "start to there", "processors", "compilation"]
    return f"## Starts of a compiled network, {result['device']}\n\n{about}\n\n{table(head, rows)}"


def cell(value, form="{:.2f}", factor=1.0):
    """Returns a number as text, or empty text for None: a CPU has no GPU time."""
    return "" if value is None else form.format(value * factor)


RENDERERS = {
    "bits": bits,
    "syncbn": syncbn,
    "overhead": overhead,
    "overhead_trees": overhead_trees,
    "calls": calls,
    "two_trees": two_trees,
    "optimizers": optimizers,
    "norms": norms,
    "ddp": ddp,
    "ddp_graphs": ddp_graphs,
    "fastest": fastest,
    "first_replay": first_replay,
    "fp8_linears": fp8_linears,
    "fp8_losses": fp8_losses,
    "graph_memory": graph_memory,
    "start": start,
    "compiled_start": compiled_start,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "end_to_end": end_to_end,
    "loop": loop,
    "loop_ranks": loop_ranks,
    "fsdp": fsdp,
    "titan": titan,
    "compiled_ranks": compiled_ranks,
}
"""Keyed by the first part of a result file's name, before ``-``."""


def section(name, result):
    """Returns the section of a result file; what sets its run apart from another one on the same device stands in the heading."""
    text = RENDERERS[name.partition("-")[0]](result)
    if "run" in result:
        heading, end, rest = text.partition("\n")
        text = f"{heading}, {result['run']}{end}{rest}"
    return text


def by_fabricamp(text):
    """Returns the text with "fabricamp" in place of "ours" and "our"."""
    return re.sub(r"\bours?\b", "fabricamp", text)


def results_in(folder):
    """Returns the results of a folder by file name, without those of the folders in it."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), reverse=True)}


def sections(results):
    """Returns the section of each result, followed by how it was measured."""
    parts = []
    for name, result in results.items():
        parts.append(by_fabricamp(section(name, result)))
        parts.append(
            # Ways that were called "ours" when a result was measured have the package's name now.
            f"`{by_fabricamp(result['command'])}`, {facts(result, 'processor', 'cores', 'device', 'torch', 'python', 'date')}\n"
        )
    return parts


def main():
    results = results_in(HERE / "results")
    parts = [HEAD]
    if rows := summary.rows_of(results):
        parts.append(table(summary.HEAD, rows))
    parts.append(ABOUT)
    for name, result in results.items():
        # Results of earlier versions have no losses.
        if name.startswith("fastest-") and any(row.get("losses") for row in result["rows"]):
            parts.append(by_fabricamp(against_goals(result)))
    docs = HERE.parent / "docs"
    pages = [HERE / "results" / name for name in ("waits.md", "notes.md")]
    write(docs / "performance.md", [*parts, *(page.read_text().rstrip() for page in pages if page.exists())])
    write(docs / "measurements.md", [MEASUREMENTS, *sections(results)])
    earlier = HERE / "results" / "earlier"
    if earlier.exists():
        notes = (earlier / "notes.md").read_text()
        write(HERE / "results" / "earlier.md", [EARLIER, *sections(results_in(earlier)), notes])


def write(page, parts):
    page.write_text("\n\n".join(parts).rstrip() + "\n")


if __name__ == "__main__":
    main()
