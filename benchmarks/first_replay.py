"""Measures what a user waits for at the first replay of ``cuda_graph``, with its comparison to an eager step and without it.

    python benchmarks/first_replay.py [--networks small gpt-1.3b] [--levels O5 O4] [--rounds 3] [--out results.json] [--quick]

Two GPTs on synthetic tokens with FusedAdam: "small" is GPT-2-small on 16 x 512 tokens, "gpt-1.3b" has 1.3 billion parameters on
4 x 2048.  ``CudaGraph(warmup=4)`` captures the fourth batch; "compared" is its default, "compare=False" leaves the comparison out.
Each run is a process of its own, and the two ways alternate.  The seconds of a batch are from the hook before it to the hook after
it, each of which waits for the device: the fourth has the capture, the first replay and the comparison.  Beside it stand the
medians of the eager batches before and of the replays after.  Memory in GiB: what is used on the device before the fourth batch,
the most during it (read by a thread about every millisecond), after it, and torch's peak of reserved memory of the batches after.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import subprocess
import sys
import threading
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpt_curves import Sizes
from examples.gpt.gpt import GPT
from fabricamp import Callback, CudaGraph, Trainer, TrainingModule
from fabricamp.optimizers import FusedAdam

WARM_UP = 4
GIB = 2**30
NETWORKS = {
    "small": Sizes(50304, context=512, layers=12, width=768, heads=12, batch=16),
    "gpt-1.3b": Sizes(50304, context=2048, layers=24, width=2048, heads=16, batch=4),
}
TINY = Sizes(64, context=16, layers=2, width=32, heads=2, batch=2)
WAYS = {"compared": True, "compare=False": False}


class Model(TrainingModule):
    """A GPT of some sizes, made where it will live."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        super().__init__()
        shape = {"context": sizes.context, "layers": sizes.layers, "width": sizes.width, "heads": sizes.heads}
        with torch.device(device):
            self.net: nn.Module = GPT(sizes.vocabulary, **shape)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the loss."""
        loss: torch.Tensor = self.net(batch[:, :-1], batch[:, 1:])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Returns FusedAdam."""
        return FusedAdam(self.parameters(), lr=1e-4, weight_decay=0.01)


class Watch(threading.Thread):
    """Reads the memory that is used on the device about every millisecond, and keeps the most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._ended = threading.Event()

    def run(self) -> None:
        """Runs until :meth:`end`."""
        while not self._ended.wait(0.001):
            self.most = max(self.most, used())

    def end(self) -> int:
        """Ends the thread; returns the most."""
        self._ended.set()
        self.join()
        return max(self.most, used())


def used() -> int:
    """Returns the bytes that are used on the device; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


class Clock(Callback):
    """Times each batch, and looks at the memory around the first replay."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.memory: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int) -> None:
        """Starts the clock, once the device is idle."""
        synchronize()
        if batch_idx == WARM_UP - 1:
            self.memory["before"] = used() / GIB
            self._watch = Watch()
            self._watch.start()
        self._begun = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops the clock, once the device has done the batch."""
        synchronize()
        self.seconds.append(time.perf_counter() - self._begun)
        if batch_idx == WARM_UP - 1:
            self.memory["most"] = self._watch.end() / GIB
            self.memory["after"] = used() / GIB
        if torch.cuda.is_available():
            self.memory["later peak, reserved"] = torch.cuda.max_memory_reserved() / GIB


class Lines(logging.Handler):
    """Keeps what the run says of its graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line."""
        if "replay" in record.getMessage():
            self.lines.append(record.getMessage())


def synchronize() -> None:
    """Waits for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(sizes: Sizes, level: str, way: str, *, accelerator: str = "gpu", batches: int = 24) -> dict[str, Any]:
    """Runs the batches; returns the seconds, the memory, and what the run has said."""
    clock, lines = Clock(), Lines()
    logger = logging.getLogger("fabricamp")
    logger.addHandler(lines)
    try:
        trainer = Trainer(
            accelerator=accelerator,
            devices=1,
            precision=level,
            max_steps=batches,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            gradient_clip_val=1.0,
            callbacks=[clock],
            cuda_graph=CudaGraph(warmup=WARM_UP, compare=WAYS[way]),
        )
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(sizes.vocabulary, (batches * sizes.batch, sizes.context + 1), generator=generator)
        model = Model(sizes, "cuda" if accelerator == "gpu" else "cpu")
        trainer.fit(model, DataLoader(rows, batch_size=sizes.batch))
    finally:
        logger.removeHandler(lines)
    return {
        "first_replay_s": round(clock.seconds[WARM_UP - 1], 4),
        "eager_s": round(statistics.median(clock.seconds[1 : WARM_UP - 1]), 4),
        "replay_s": round(statistics.median(clock.seconds[WARM_UP:]), 4),
        "gib": {name: round(value, 2) for name, value in clock.memory.items()},
        "said": lines.lines,
    }


def in_a_process(network: str, level: str, way: str) -> dict[str, Any]:
    """Returns the result of :func:`measured` in a process of its own."""
    command = [sys.executable, __file__, "--one", network, level, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def summed(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Returns the medians over rounds, with the smallest and largest, and what the comparison adds in steps of this run."""
    found: dict[str, Any] = {}
    for way in WAYS:
        seconds = [one[way]["first_replay_s"] for one in rounds]
        row = rounds[-1][way]
        found[way] = {
            **row,
            "first_replay_s": statistics.median(seconds),
            "least_s": min(seconds),
            "most_s": max(seconds),
        }
    added = found["compared"]["first_replay_s"] - found["compare=False"]["first_replay_s"]
    found["added_s"] = round(added, 4)
    found["added_eager_steps"] = round(added / found["compared"]["eager_s"], 2)
    return found


def about() -> dict[str, str]:
    """Returns the machine and the versions."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(datetime.now(UTC).date()),
        "command": "python benchmarks/first_replay.py",
    }


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--levels", nargs="+", default=["O5", "O4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the results as JSON too, after each row")
    parser.add_argument("--quick", action="store_true", help="a tiny network, once: shows that it works")
    parser.add_argument("--one", nargs=3, metavar=("NETWORK", "LEVEL", "WAY"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    warnings.simplefilter("ignore")
    if options.one:
        network, level, way = options.one
        print(json.dumps(measured(TINY if network == "tiny" else NETWORKS[network], level, way)))
        return
    rows = []
    for network in ["tiny"] if options.quick else options.networks:
        for level in options.levels:
            count = 1 if options.quick else options.rounds
            rounds = [{way: in_a_process(network, level, way) for way in WAYS} for _ in range(count)]
            rows.append({"network": network, "level": level, "rounds": count, **summed(rounds)})
            compared, without = (rows[-1][way] for way in WAYS)
            print(
                f"{network} {level}: the first replay {compared['first_replay_s']:.2f} s, without the comparison "
                f"{without['first_replay_s']:.2f} s; an eager step {compared['eager_s']:.3f} s; GiB {compared['gib']}",
                *compared["said"],
                sep="\n  ",
                flush=True,
            )
            if options.out:
                options.out.write_text(json.dumps({**about(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
