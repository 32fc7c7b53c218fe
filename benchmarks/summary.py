"""The figures at the top of docs/performance.md, one row each, from benchmarks/results; README.md repeats some of them."""

from __future__ import annotations


def overhead(result):
    """Returns a row for each kind of run, of a machine on which Lightning was measured in the same run."""
    names = {"everything at default": "everything on", "3 callbacks, 1 log": "three callbacks and a log"}
    added = {row["run"]: f"{row['mean_over_us']:,.0f} us" for row in result["rows"]}
    return [
        [
            f"time that the Trainer adds to a step of a hand-written loop, {name}",
            added[f"fabricamp: {run}"],
            f"Lightning 2: {added[f'Lightning: {run}']}",
            where(result),
        ]
        for run, name in names.items()
        if f"Lightning: {run}" in added
    ]


def end_to_end(result):
    rows = {row["run"]: row for row in result["rows"]}
    if "fabricamp O2" not in rows:
        return []
    ours, theirs = rows["fabricamp O2"], rows["torch autocast fp16, GradScaler"]
    what = "a whole step of GPT-2-small (16 x 512 tokens) at O2, everything on"
    beside = "torch's autocast fp16 and GradScaler: "
    return [[what, step_of(ours), beside + step_of(theirs), where(result)]]


def step_of(row):
    return f"{row['wall_ms']:.1f} ms, {row['peak_gib']:.2f} GiB"


def fastest(result):
    found = []
    for network, name in {"gpt2-16": "GPT-2-small", "resnet50-64": "ResNet-50 at batch 64"}.items():
        times = next((row["wall_ms"] for row in result["rows"] if row["network"] == network), {})
        own = [way for way in times if way.startswith("fabricamp") and "compiled" in way and "by time" not in way]
        if own:
            found.append(beside_compiled(times, min(own, key=times.get), name, result))
    return found


def beside_compiled(times, own, name, result):
    by_hand = {
        "`torch.compile`": "by hand, compiled",
        "with CUDA graphs": "by hand, compiled, reduce-overhead",
        "eager": "by hand",
    }
    known = [f"{way} {times[key]:.1f} ms" for way, key in by_hand.items() if key in times]
    graph = " and `cuda_graph=True`" if "graph" in own else ""
    what = f"a whole bf16 step of {name} with `compile=True`{graph}, everything on"
    return [what, f"{times[own]:.1f} ms", f"by hand: {', '.join(known)}", where(result)]


def optimizers(result):
    times = {(row["optimizer"], row["set"], row["row"]): row.get("gpu_ms") for row in result["rows"]}
    wide, compact = (times.get(("adam", "gpt-1.3b", row)) for row in ("O5 ours", "O5 ours, remainder and 8bit"))
    if wide and compact:
        what = "clipping and Adam's update of 1.3 billion parameters at O5 with 8-bit states and remainders"
        return [[what, f"{compact:.2f} ms", f"with fp32 states and masters: {wide:.2f} ms", where(result)]]
    ours, theirs = (times.get(("adam", "gpt2", row)) for row in ("O1 ours", "O1 GradScaler, clip, torch fused"))
    if not ours or not theirs:
        return []
    what = "unscaling, clipping and Adam's update of GPT-2-small's parameters at O1"
    return [
        [what, f"{ours:.2f} ms", f"GradScaler, clip_grad_norm_, torch's fused Adam: {theirs:.2f} ms", where(result)]
    ]


def norms(result):
    both = [row for row in result["rows"] if row["op"] != "cross_entropy" and row["way"] == "both"]
    gains = [row["times_torch"] for row in both]
    if not gains:
        return []
    what = f"LayerNorm and RMSNorm, forward and backward, {len(gains)} shapes"
    return [[what, f"{min(gains):.2f} to {max(gains):.2f} times as fast", "torch's", where(result)]]


def cross_entropy(result):
    rows = {row["row"]: row for row in result["rows"] if row["shape"] == "8192x50304 bfloat16"}
    if not rows:
        return []
    ours, theirs = (
        f"{rows[name]['both_ms']:.2f} ms, {rows[name]['peak']:.0f} x the logits" for name in ("ours", "torch")
    )
    return [["cross-entropy of 8192 x 50304 bf16 logits, time and memory", ours, f"torch's: {theirs}", where(result)]]


def linear_cross_entropy(result):
    rows = {
        row["row"]: f"{row['both_ms']:.1f} ms, {row['peak_gb']:.2f} GB"
        for row in result["rows"]
        if row["shape"] == "8192x128256x4096 bfloat16" and "error" not in row
    }
    others = {
        "torch's on stored logits": "stored, torch",
        "fabricamp's in place on stored logits": "stored, fused in place",
    }
    others |= {"Liger's": "Liger"}
    if "ours" not in rows:
        return []
    beside = "; ".join(f"{name}: {rows[key]}" for name, key in others.items() if key in rows)
    what = "a head of 128,256 words with its loss, 8192 x 4096 bf16 hidden states, time and memory beyond the operands"
    return [[what, rows["ours"], beside, where(result)]]


def syncbn(result):
    steps = {row["run"]: row["wall_ms"] for row in result["networks"] if row["batch"] == 64}
    ours, theirs = steps.get("fabricamp SyncBatchNorm"), steps.get("torch SyncBatchNorm")
    if not ours or not theirs:
        return []
    what = "a ResNet-50 step with SyncBatchNorm, batch 64 per GPU"
    return [[what, f"{ours:.1f} ms", f"torch's SyncBatchNorm: {theirs:.1f} ms", where(result)]]


def ddp(result):
    found = []
    for name, column in result["columns"].items():
        rows = {row["run"]: row for row in column["rows"] if row["gpu_ms"] is not None}
        ours, theirs = rows.get("fabricamp, overlapped"), rows.get("torch DDP, gradient_as_bucket_view")
        if ours and theirs:
            what = f"a step with the all-reduce of gradients overlapped with backward, {name}"
            found.append(
                [what, gpu_and_wall(ours), f"torch's DDP at its fastest: {gpu_and_wall(theirs)}", where(result)]
            )
    return found


def fsdp(result):
    """Returns a row for the larger network, as CUDA graphs; by hand the host sets the pace of the smaller one."""
    times = {row["way"]: row["step_ms"] for row in result["rows"] if row["network"] == "6.9B" and "step_ms" in row}
    half = times.get("fabricamp blocks graph")
    fp8 = times.get("fabricamp fp8 blocks graph")
    by_hand = times.get("compiled")
    if not (half and fp8 and by_hand):
        return []
    what = 'a step of a GPT of 6.9 billion parameters with `strategy="fsdp"`, `compile="blocks"` and `cuda_graph=True`'
    ours = f"bf16 {half:.1f} ms, FP8 {fp8:.1f} ms"
    beside = f"torch's fully_shard by hand, bf16, compiled blocks: {by_hand:.1f} ms"
    return [[what, ours, beside, where(result)]]


def titan(result):
    """Returns a row for bf16 and one for FP8."""
    rows = {
        row["way"]: f"{row['tokens_s_gpu']:,} tokens/s a GPU, {row['reserved_gib']:.1f} GiB" for row in result["rows"]
    }
    what = "Llama 3 8B by torchtitan's own model code, 1 x 8192 tokens, compiled blocks"
    found = []
    for kind, name in (("", ""), (" fp8", ", FP8")):
        ours, theirs = rows.get(f"fabricamp{kind}"), rows.get(f"torchtitan{kind}")
        if ours and theirs:
            found.append([what + name, ours, f"torchtitan {result['torchtitan']}: {theirs}", where(result)])
    return found


def gpu_and_wall(row):
    return f"{row['gpu_ms']:.2f} ms on the GPU, {row['wall_ms']:.1f} ms in all"


def where(result):
    """Returns the card or the processor, torch's version, and the day."""
    card = result.get("device") or f"{result['cores']} CPU cores"
    cards = f"{result['ranks']} x {card}" if "ranks" in result else card
    return f"{cards}, torch {result['torch']}, {result['date']}"


KINDS = {
    "overhead": overhead,
    "end_to_end": end_to_end,
    "fastest": fastest,
    "fsdp": fsdp,
    "titan": titan,
    "syncbn": syncbn,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "norms": norms,
    "optimizers": optimizers,
    "ddp": ddp,
}
"""Functions that summarise a kind of results, in the order of the table."""

HEAD = ["what", "fabricamp", "compared with", "on"]


def rows_of(results):
    """Returns the rows for ``results``, a dict by file name."""
    rows = []
    for kind, summarized in KINDS.items():
        for name, result in results.items():
            if name.partition("-")[0] == kind and (kind != "optimizers" or "copy_gb_per_s" in result):
                rows += summarized(result)
    return rows
