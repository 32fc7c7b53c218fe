"""Compares the wall time of a bf16 training step: hand-written, hand-written with torch.compile, Lightning, and the Trainer.

    python benchmarks/fastest.py [--only gpt2-16,resnet50-64,resnet50-256] [--rounds 5] [--minutes 8] [--out results.json] [--quick]

A hand-written step is bf16 autocast, clipping at norm 1 and torch's fused AdamW: eager, by ``torch.compile(network)``, and by
``torch.compile(network, mode="reduce-overhead")``, which uses CUDA graphs.  Lightning runs at "bf16-mixed".  The Trainer runs at O4
(bf16 autocast) and O5 (bf16 weights with fp32 masters), with FusedAdam: eager, as one CUDA graph, and at O4 with ``compile=True``.
Trainer and Lightning have all features on: bar, logger, a checkpoint callback with nothing to save, a ``self.log`` in each step.
All share network, loss and loader (batches in pinned memory, copied asynchronously).

Rounds are interleaved; each variant has a median and quartiles, and compiles again in each round, before the measured steps.  With
``--out``, networks already in the file are skipped, because a run may be interrupted, and stops by itself after ``--minutes``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loop import CASES, QUICK, WARM_UP, Stopwatch, module_of
from fabricamp import Trainer, TrainingModule
from fabricamp.optimizers import FusedAdam

NETWORKS = ("gpt2-16", "resnet50-64", "resnet50-256")


def by_hand(case, **compile_options):
    """Times a hand-written loop; ``compile_options`` are those of torch.compile, None for an eager step."""
    torch.manual_seed(0)
    network = case.network().cuda()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    called = torch.compile(network, **compile_options) if compile_options else network
    batches = case.loader(WARM_UP + case.steps).batches
    for number, batch in enumerate(batches):
        if number == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        on_gpu = [one.cuda(non_blocking=True) for one in batch]
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = case.loss(called, *on_gpu)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def ours(case, precision, **options):
    """Times the Trainer with all features on."""
    watch = Stopwatch(case.steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="gpu",
            devices=1,
            precision=precision,
            max_epochs=1,
            default_root_dir=folder,
            callbacks=[watch],
            gradient_clip_val=1.0,
            **options,
        )
        module = module_of(case, TrainingModule, lambda parameters: FusedAdam(parameters, lr=1e-4, weight_decay=0.01))
        trainer.fit(module, case.loader(WARM_UP + case.steps))
    return watch.seconds


def lightnings(case):
    """Times Lightning's Trainer with all features on."""
    import lightning.pytorch as pl

    class Watch(pl.Callback):
        __init__ = Stopwatch.__init__
        on_train_batch_end = Stopwatch.on_train_batch_end

    watch = Watch(case.steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed",
            max_epochs=1,
            default_root_dir=folder,
            callbacks=[watch],
            gradient_clip_val=1.0,
        )
        adamw = partial(
            torch.optim.AdamW, lr=1e-4
        )  # not fused: Lightning does not clip for a fused optimizer at bf16-mixed
        trainer.fit(module_of(case, pl.LightningModule, adamw), case.loader(WARM_UP + case.steps))
    return watch.seconds


WAYS = {
    "by hand": by_hand,
    "by hand, compiled": partial(by_hand, dynamic=False),
    "by hand, compiled, reduce-overhead": partial(by_hand, mode="reduce-overhead", dynamic=False),
    "Lightning": lightnings,
    "fabricamp O4": partial(ours, precision="O4"),
    "fabricamp O4, graph": partial(ours, precision="O4", cuda_graph=True),
    "fabricamp O4, compiled": partial(ours, precision="O4", compile=True),
    "fabricamp O5": partial(ours, precision="O5"),
    "fabricamp O5, graph": partial(ours, precision="O5", cuda_graph=True),
}


def measure(case, rounds):
    """Returns the milliseconds per step of each variant in each round, and the errors of variants that cannot run."""
    found = {name: [] for name in WAYS}
    missing = {}
    for _ in range(rounds):
        for name, way in WAYS.items():
            if name in missing:
                continue
            gc.collect()
            torch.cuda.empty_cache()
            torch.compiler.reset()
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    seconds = way(case)
            except (ImportError, RuntimeError, ValueError) as error:
                missing[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
                print(name, missing[name], flush=True)
                continue
            found[name].append(round(1000 * seconds / case.steps, 4))
    return {name: values for name, values in found.items() if values}


def row_of(network, times):
    """Returns medians and quartiles of the rounds."""
    row = {"network": network, "wall_ms": {}, "quartiles": {}, "wall_ms_of_rounds": times}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else 3 * values
        row["wall_ms"][name] = round(middle, 4)
        row["quartiles"][name] = [round(low, 4), round(high, 4)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="begin no network that would end later, by the longest so far"
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON too, after each network")
    parser.add_argument("--quick", action="store_true", help="a few steps of a small network: shows that it works")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("fabricamp", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    rows = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    done = {row["network"] for row in rows}
    end = time.monotonic() + 60 * arguments.minutes
    longest = 0.0
    for network in ["mlp"] if arguments.quick else arguments.only.split(","):
        if network in done or time.monotonic() + longest > end:
            continue
        begun = time.monotonic()
        rows.append(row_of(network, measure(QUICK if arguments.quick else CASES[network], arguments.rounds)))
        longest = max(longest, time.monotonic() - begun)
        print(network, json.dumps(rows[-1]["wall_ms"]), f"{time.monotonic() - begun:.0f} s", flush=True)
        if arguments.out:
            facts = {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "date": str(datetime.now(UTC).date()),
                "command": f"python benchmarks/fastest.py --rounds {arguments.rounds}",
            }
            arguments.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
