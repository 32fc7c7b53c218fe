"""What a checkpoint costs: the stall of a step, steps while a file is written, the rate of the disk, loading, and a restart.

    python benchmarks/checkpoints.py [--gb 1] [--folder DIR] [--ranks 2] [--ways fabricamp-async,dcp-process] [--out results.json]

First come the rates that bound all else: of a copy from the device to host memory (pinned, for a GPU), into memory that is touched
for the first time and into memory that was, and of ``dd bs=64M oflag=direct``.  Then each way of saving is a process of its own.
It trains a stack of linear layers with Adam, whose weights and states have ``--gb`` gigabytes together, and saves at two steps:

    first_save, later_save   the step with a save over the median of steps without one, and its seconds
    while_written            the median of steps during a write over the same
    write_gb_per_s           bytes over the seconds from the save's begin until the folder no longer grows
    host_memory              the most host memory since the first save beside that before it, over the bytes of the state

The host waits for the device at the end of each step, in every way.  ``load`` is the time of reading a file into host memory, and
``restart`` the time from the call of fit until the first step is done, with 1 rank, and with ``--ranks`` that torchrun has started.
Before each of them the file is dropped from the system's cache (``--drop-caches``: all of the cache, which needs root).  A file is
flushed to the disk by fabricamp before it has its name; the others leave that to the system, so ``write_gb_per_s`` may be that of
its memory.
Everything is done by public options alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WAYS = (
    "fabricamp",
    "fabricamp-async",
    "lightning",
    "lightning-async",
    "dcp",
    "dcp-thread",
    "dcp-process",
)
BYTES_OF_A_PARAMETER = 12
"""fp32: the weight, and Adam's two states."""
MARK = "result: "


def main(argv: list[str] | None = None) -> None:
    """Measures each way in a process of its own, or, in such a process, one way."""
    options = parsed(argv)
    if options.measure:
        result = MEASURED[options.measure.partition(":")[0]](options)
        if result:  # of several ranks only the first one has it
            print(MARK + json.dumps(result), flush=True)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for found in measured(options, Path(folder)):
            text = json.dumps(found, indent=1)
            if options.out:
                options.out.write_text(text + "\n")
    print(text)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="gigabytes (1e9) of weights and optimizer states")
    parser.add_argument("--batch", type=int, default=256, help="rows of a batch: how long a step takes")
    parser.add_argument("--steps", type=int, default=40, help="steps; saves are after a quarter and after a half")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the second restart; 1: only the first one")
    parser.add_argument("--ways", default=",".join(WAYS), help="ways of saving, by comma")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; else the temporary folder")
    parser.add_argument("--drop-caches", action="store_true", help="drop the cache of the whole machine before a load")
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = set(options.ways.split(",")) - set(WAYS)
    if unknown:
        parser.error(f"--ways: {', '.join(sorted(unknown))} unknown; known: {', '.join(WAYS)}")
    return options


def measured(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields what is known after the rates and after each way, in the order of the page."""
    found: dict[str, Any] = {"about": about(options)}
    found["copy"] = copy_rates(options)
    found["dd_gb_per_s"] = dd_rate(folder, options.gb)
    found["ways"] = {}
    yield found
    for way in options.ways.split(","):
        own = folder / way
        own.mkdir()
        package = "lightning" if way.startswith("lightning") else "torch"
        if importlib.util.find_spec(package) is None:
            found["ways"][way] = f"{package} is not installed"
            continue
        row = in_process(options, f"save:{way}", own)
        found["ways"][way] = row
        yield found
        if "error" in row:
            continue
        saved = newest(own)
        drop(saved, everything=options.drop_caches)
        row["load"] = in_process(options, f"load:{way}", saved)
        row["restart"] = {}
        for ranks in dict.fromkeys([1, options.ranks]):
            if ranks > 1 and way.startswith("dcp"):
                continue  # the loop by hand has one process
            drop(saved, everything=options.drop_caches)
            row["restart"][str(ranks)] = in_process(options, f"restart:{way}:{ranks}", saved)
        subprocess.run(["rm", "-rf", str(own)], check=True)
        yield found


def in_process(options: argparse.Namespace, measure: str, file: Path) -> dict[str, Any]:
    """Returns what another process measures."""
    ranks = int(measure.split(":")[2]) if measure.startswith("restart") else 1
    started = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *started, __file__, "--measure", measure, "--file", str(file)]
    command += ["--gb", str(options.gb), "--batch", str(options.batch), "--steps", str(options.steps)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    results = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not results:
        return {"error": (done.stderr.strip().splitlines() or ["no result"])[-1][:300]}
    result: dict[str, Any] = json.loads(results[-1])
    return result


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Returns machine, versions and sizes."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(datetime.now(UTC).date()),
        "gb": options.gb,
        "batch": options.batch,
        "steps": options.steps,
        "cache": "drop_caches" if options.drop_caches else "fadvise of the file",
        "parameters": sum(parameter.numel() for parameter in network(options.gb, "meta").parameters()),
    }


# -- what bounds all else ----------------------------------------------------------------------------------------------------------


def copy_rates(options: argparse.Namespace) -> dict[str, float]:
    """Returns GB/s of a copy to host memory: into new memory, and into memory that was written before."""
    size = int(min(options.gb, 8.0) * 1e9)
    source = torch.ones(size, dtype=torch.uint8, device=device())
    begin = now()
    target = torch.empty(size, dtype=torch.uint8, pin_memory=source.is_cuda)
    target.copy_(source)
    first = now() - begin
    again = []
    for _ in range(3):
        begin = now()
        target.copy_(source)
        again.append(now() - begin)
    return {
        "first_touch_gb_per_s": round(size / 1e9 / first, 2),
        "grown_gb_per_s": round(size / 1e9 / min(again), 2),
    }


def dd_rate(folder: Path, gb: float) -> float | str:
    """Returns GB/s of one ``dd bs=64M oflag=direct``, or why it does not work here."""
    blocks = max(int(gb * 1e9) >> 26, 2)
    target = folder / "dd"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=64M", f"count={blocks}", "oflag=direct"]
    begin = time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    target.unlink(missing_ok=True)
    if done.returncode:
        return done.stderr.strip().splitlines()[0]
    return round(blocks * (1 << 26) / 1e9 / seconds, 2)


def drop(saved: Path, *, everything: bool) -> None:
    """Drops files, or with root's rights everything, from the system's cache."""
    for file in [saved, *saved.rglob("*")]:
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if everything:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


# -- what is trained ---------------------------------------------------------------------------------------------------------------


def device() -> torch.device:
    """Returns the GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now() -> float:
    """Returns the time once the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def network(gb: float, on: str | torch.device) -> nn.Sequential:
    """Returns linear layers whose weights and Adam's states have ``gb`` gigabytes together."""
    parameters = gb * 1e9 / BYTES_OF_A_PARAMETER
    width = min(4096, max(16, int((parameters / 8) ** 0.5) // 8 * 8))
    layers = max(1, round(parameters / (width * (width + 1))))
    with torch.device(on):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


class Steps:
    """Notes when each step begins, and which are saved after."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.every = max(options.steps // 4, 2)
        self.saves = (self.every, 2 * self.every)
        self.begins: list[float] = []
        self.before = 0
        self._watch = Growth(folder)

    def begin(self) -> None:
        """Called at the begin of each step, numbered from 1; a save after a step counts as a part of it."""
        self.begins.append(now())
        if len(self.begins) == self.saves[0]:
            self.before = resident()
            self._watch.start()

    def result(self, gb: float) -> dict[str, Any]:
        """Returns the figures of the page."""
        grown = self._watch.end()
        seconds = [after - before for before, after in zip(self.begins, self.begins[1:], strict=False)]
        saves = [self.begins[save - 1] for save in self.saves]
        size = max((size for _, size in grown), default=0) // len(self.saves)  # the files are as long as each other
        ends = [
            next((at for at, reached in grown if reached >= number * size), begin)
            for number, begin in enumerate(saves, start=1)
        ]
        writes = [end - begin for begin, end in zip(saves, ends, strict=True)]
        plain, meanwhile = [], []
        for number, (begin, length) in enumerate(zip(self.begins, seconds, strict=False), start=1):
            if number <= 2 or number in self.saves:
                continue
            writing = any(start < begin < end for start, end in zip(saves, ends, strict=True))
            (meanwhile if writing else plain).append(length)
        step = statistics.median(plain)
        first, later = (seconds[save - 1] for save in self.saves)
        return {
            "step_ms": round(1e3 * step, 2),
            "first_save": {"ratio": round(first / step, 3), "seconds": round(first, 4)},
            "later_save": {"ratio": round(later / step, 3), "seconds": round(later, 4)},
            "while_written": round(statistics.median(meanwhile) / step, 3) if meanwhile else None,
            "write_seconds": [round(write, 3) for write in writes],
            "write_gb_per_s": round(size / 1e9 / statistics.mean(writes), 3) if size else None,
            "host_memory": round((highest() - self.before) / (gb * 1e9), 3),
        }


class Growth(threading.Thread):
    """Notes how many bytes the files in a folder have, whenever this grows, and when."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self._ended = threading.Event()
        self._grown: list[tuple[float, int]] = []

    def run(self) -> None:
        """Looks every 10 ms until :meth:`end`."""
        while not self._ended.wait(0.01):
            self._look()

    def _look(self) -> None:
        size = 0
        for file in self._folder.rglob("*"):
            with contextlib.suppress(OSError):
                size += file.stat().st_size if file.is_file() else 0
        if size > (self._grown[-1][1] if self._grown else 0):
            self._grown.append((time.perf_counter(), size))

    def end(self) -> list[tuple[float, int]]:
        """Ends the thread; returns times and sizes."""
        self._ended.set()
        self.join()
        self._look()
        return self._grown


def resident() -> int:
    """Returns the bytes of host memory that this process has now."""
    match = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def highest() -> int:
    """Returns the most bytes of host memory that this process or an ended child of it has had."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) * 1024


def newest(folder: Path) -> Path:
    """Returns the newest checkpoint in a folder, a file or a folder."""
    return max(
        (path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.stat().st_mtime
    )


# -- the ways: trainers ------------------------------------------------------------------------------------------------------------


def trained(way: str, options: argparse.Namespace, noted: Callable[[], None]) -> tuple[Any, Any, Any]:
    """Returns module, data and a callback of the trainer of ``way``; ``noted`` is called at the begin of each step."""
    if way.startswith("fabricamp"):
        from fabricamp import Callback, TrainingModule

        module_class: Any = TrainingModule
    else:
        from lightning.pytorch import Callback, LightningModule

        module_class = LightningModule

    class Net(module_class):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network(options.gb, "cpu")

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-4)

    class Noting(Callback):
        def on_train_batch_start(self, *_: object) -> None:
            noted()

        def on_train_end(self, *_: object) -> None:
            noted()

    module = Net()
    rows = torch.randn(options.batch, module.net[0].in_features)
    # A loader, since Lightning takes a list of tensors for several loaders.
    return module, DataLoader([rows] * (options.steps + 1), batch_size=None), Noting()


def trainer_of(way: str, callbacks: list[Any], **more: Any) -> Any:
    """Returns a trainer of ``way`` that shows and logs nothing."""
    if way.startswith("fabricamp"):
        from fabricamp import Trainer
    else:
        from lightning.pytorch import Trainer
    return Trainer(
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        callbacks=callbacks,
        **{"devices": 1, **more},
    )


def saves_of(way: str, steps: Steps, folder: Path) -> tuple[Any, list[Any]]:
    """Returns the callback that saves, and plug-ins."""
    arguments: dict[str, Any] = {"dirpath": folder, "every_n_train_steps": steps.every, "save_top_k": -1}
    if way.startswith("fabricamp"):
        from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint

        return (AsyncCheckpoint if way == "fabricamp-async" else ModelCheckpoint)(**arguments), []
    from lightning.pytorch.callbacks import ModelCheckpoint as TheirCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    return TheirCheckpoint(**arguments), [AsyncCheckpointIO()] if way == "lightning-async" else []


def save_by_trainer(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains with saves at two steps."""
    steps = Steps(options, options.file)
    module, data, noting = trained(way, options, steps.begin)
    saving, plugins = saves_of(way, steps, options.file)
    # The last save is after the half: what is measured behind it is the write, and steps without one.
    trainer = trainer_of(way, [noting, saving], max_steps=3 * steps.every - 1, plugins=plugins or None)
    trainer.fit(module, data)
    return steps.result(options.gb)


def restart_by_trainer(way: str, options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Goes on from a file; returns the seconds from the call of fit to the end of the first step."""
    begun: list[float] = []
    module, data, noting = trained(way, options, lambda: begun.append(now()))
    more: dict[str, Any] = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    trainer = trainer_of(way, [noting], max_steps=2 * (options.steps // 4) + 2, enable_checkpointing=False, **more)
    begin = now()
    trainer.fit(module, data, ckpt_path=str(options.file))
    return {"seconds": round(begun[1] - begin, 3)} if trainer.is_global_zero else {}


# -- the ways: torch's distributed checkpoint in a loop by hand --------------------------------------------------------------------


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, which async_save wants."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    torch.distributed.init_process_group("cpu:gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def loop_by_hand(options: argparse.Namespace) -> tuple[dict[str, Any], Callable[[], None]]:
    """Returns the state to save and to load, and a training step."""
    net = network(options.gb, device())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    rows = torch.randn(options.batch, net[0].in_features, device=device())

    def step() -> None:
        net(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}, step


def save_by_dcp(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains by hand with saves at two steps."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    steps = Steps(options, options.file)
    state, step = loop_by_hand(options)
    kinds = {"dcp-thread": AsyncCheckpointerType.THREAD, "dcp-process": AsyncCheckpointerType.PROCESS}
    waiting: Any = None
    with one_rank():
        for number in range(1, 3 * steps.every):
            steps.begin()
            step()
            if number not in steps.saves:
                continue
            target = options.file / f"step={number}"
            if waiting is not None:
                waiting.result()
            if way == "dcp":
                dcp.save(state, checkpoint_id=target)
            else:
                waiting = dcp.async_save(state, checkpoint_id=target, async_checkpointer_type=kinds[way])
        steps.begin()
        if waiting is not None:
            waiting.result()
    return steps.result(options.gb)


def restart_by_dcp(options: argparse.Namespace) -> dict[str, Any]:
    """Loads into a new loop; returns the seconds until the first step is done."""
    import torch.distributed.checkpoint as dcp

    state, step = loop_by_hand(options)
    begin = now()
    with one_rank():
        dcp.load(state, checkpoint_id=options.file)
    step()
    return {"seconds": round(now() - begin, 3)}


# -- one measurement of this process -----------------------------------------------------------------------------------------------


def save(options: argparse.Namespace) -> dict[str, Any]:
    """Measures saves."""
    way = options.measure.split(":")[1]
    return save_by_dcp(way, options) if way.startswith("dcp") else save_by_trainer(way, options)


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the reading of a file into host memory."""
    way = options.measure.split(":")[1]
    if way.startswith("fabricamp"):
        from fabricamp.checkpoint import read_checkpoint

        begin = time.perf_counter()
        read_checkpoint(options.file)
    elif way.startswith("lightning"):
        begin = time.perf_counter()
        torch.load(options.file, map_location="cpu", weights_only=False)
    else:
        import torch.distributed.checkpoint as dcp

        state, _ = loop_by_hand(options)
        begin = time.perf_counter()
        with one_rank():
            dcp.load(state, checkpoint_id=options.file)
    seconds = time.perf_counter() - begin
    return {"seconds": round(seconds, 3), "gb_per_s": round(options.gb / seconds, 2)}


def restart(options: argparse.Namespace) -> dict[str, Any]:
    """Measures a restart."""
    _, way, ranks = options.measure.split(":")
    return restart_by_dcp(options) if way.startswith("dcp") else restart_by_trainer(way, options, int(ranks))


MEASURED: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"save": save, "load": load, "restart": restart}


if __name__ == "__main__":
    main()
