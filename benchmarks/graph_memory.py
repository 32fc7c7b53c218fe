"""Peak of device memory of a run whose steps are a CUDA graph, beside that of the same run with eager steps.

    python benchmarks/graph_memory.py [--only gpt2-16,resnet50-64] [--levels O2,O4,O5] [--batches 200] [--out results.json]

The peak of a run is the larger of two numbers, each from the first batch to the last: the memory that is used on the device, read
by a thread about every millisecond, and the memory that torch's allocator has reserved.  The CUDA context is in the first one, and
so is all else on the card: let nothing else run there.  The graph has the defaults, so its first replay is compared with an eager
step.  Each run is a process of its own.  At its end the reserved and allocated bytes are listed by pool: the ordinary pool, and
the sum of the graphs' pools.  ``--quick`` makes 20 batches of the smallest network.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loop import CASES, QUICK, about, module_of
from fabricamp import Callback, Trainer, TrainingModule
from fabricamp.optimizers import FusedAdam

NETWORKS = ("gpt2-16", "resnet50-64")
LEVELS = ("O2", "O4", "O5")
WAYS = {"eager": False, "graph": True}
GIB = 2**30


class Watch(threading.Thread):
    """Reads the memory that is used on the device, and what torch's allocator has reserved, about every millisecond."""

    def __init__(self):
        super().__init__(daemon=True)
        self.used = 0
        self.reserved = 0
        self._ended = threading.Event()

    def look(self):
        """Updates the peaks."""
        free, total = torch.cuda.mem_get_info()
        self.used = max(self.used, total - free)
        self.reserved = max(self.reserved, torch.cuda.memory_reserved())

    def run(self):
        """Runs until :meth:`end`."""
        while not self._ended.wait(0.001):
            self.look()

    def end(self):
        """Ends the thread."""
        self._ended.set()
        self.join()


class Peaks(Callback):
    """Keeps the peaks of a run's batches, and after each batch what was reached until then.

    The numbers that change within a step are in another object: an attribute of a callback that a step changes is refused.
    """

    def __init__(self):
        self.watch = Watch()
        self.by_batch = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        """Starts the thread before the first batch."""
        if batch_idx == 0:
            self.watch.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        """Adds what was reached."""
        self.watch.look()
        self.watch.reserved = max(self.watch.reserved, torch.cuda.max_memory_reserved())
        self.by_batch.append((self.watch.used, self.watch.reserved))

    def on_train_end(self, trainer, module):
        """Ends the thread, and lists the memory by pool."""
        self.watch.end()
        self.pools = by_pool()


def by_pool():
    """Returns the reserved and the allocated bytes of the ordinary pool, and of all other pools."""
    found = Counter()
    for segment in torch.cuda.memory_snapshot():
        pool = "ordinary" if segment["segment_pool_id"] == (0, 0) else "graphs"
        found[f"{pool} pool, reserved"] += segment["total_size"]
        found[f"{pool} pool, allocated"] += segment["allocated_size"]
    return dict(found)


def measured(case, level, way, batches):
    """Runs the batches; returns the peaks, and what each pool has at the end."""
    peaks = Peaks()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="gpu",
            devices=1,
            precision=level,
            max_epochs=1,
            default_root_dir=folder,
            callbacks=[peaks],
            gradient_clip_val=1.0,
            cuda_graph=WAYS[way],
        )
        optimizer = partial(FusedAdam, lr=1e-4, weight_decay=0.01)
        trainer.fit(module_of(case, TrainingModule, optimizer), case.loader(batches))
    return {
        "peak": max(peaks.watch.used, peaks.watch.reserved),
        "used": peaks.watch.used,
        "reserved": peaks.watch.reserved,
        "batches_at_which_it_grew": grown(peaks.by_batch),
        "pools_at_the_end": peaks.pools,
        "seconds": round(time.perf_counter() - start, 2),
    }


def grown(by_batch):
    """Returns (number of the batch, used, reserved) for the batches that reached more than all before them."""
    before = (0, 0)
    rows = []
    for number, now in enumerate(by_batch, 1):
        if now != before:
            rows.append((number, *now))
        before = now
    return rows


def in_a_process(network, level, way, batches):
    """Returns the result of :func:`measured` in a process of its own."""
    command = [sys.executable, __file__, "--one", network, level, way, "--batches", str(batches)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def print_one(network, level, way, batches):
    """Prints the result of :func:`measured` as a line of JSON; warnings stay on stderr."""
    case = QUICK if network == "quick" else CASES[network]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    with contextlib.redirect_stdout(io.StringIO()):
        found = measured(case, level, way, batches)
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NETWORKS))
    parser.add_argument("--levels", default=",".join(LEVELS))
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--out", type=Path, help="write the results as JSON too, after each run")
    parser.add_argument("--quick", action="store_true", help="20 batches of the smallest network: shows that it works")
    parser.add_argument("--one", nargs=3, metavar=("NETWORK", "LEVEL", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("fabricamp").setLevel(logging.ERROR)
    if arguments.one:
        print_one(*arguments.one, arguments.batches)
        return
    networks = ["quick"] if arguments.quick else arguments.only.split(",")
    batches = 20 if arguments.quick else arguments.batches
    rows = []
    for network in networks:
        for level in arguments.levels.split(","):
            runs = {way: in_a_process(network, level, way, batches) for way in WAYS}
            ratio = runs["graph"]["peak"] / runs["eager"]["peak"]
            rows.append(
                {"network": network, "level": level, "batches": batches, "ratio": round(ratio, 4), "runs": runs}
            )
            print(
                network,
                level,
                *(f"{way} {run['peak'] / GIB:.2f} GiB" for way, run in runs.items()),
                f"{ratio:.3f} x",
                flush=True,
            )
            if arguments.out:
                command = {"command": "python benchmarks/graph_memory.py"}
                arguments.out.write_text(json.dumps({**about(), **command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
