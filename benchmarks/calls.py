"""Counts the calls into fabricamp in one step after the warm-up: how much of the package a reader has to follow for a step.

    python benchmarks/calls.py [--steps 20] [--only "manual optimization"] [--out results.json] [--files]

``sys.setprofile`` counts in the main thread, after the warm-up; resuming a generator counts as a call.  For each run the script
prints the number of calls of the package's functions, the number of files with these functions, and how often the file changes
from one call to the next: means over ``--steps`` steps.  ``--files`` shows the calls by file.  The network is an MLP 16-16-2 with
FusedAdam and clipping at O2, logs and progress bar off.  The runs are:

- one process, on a GPU if there is one: eager, and (on a GPU) replayed as a CUDA graph;
- ``delayed_ddp``, rank 0's calls: two GPUs over NCCL where there are two, and always two ranks over Gloo on CPUs, which also counts
  the torch references that stand in for kernels there;
- manual optimization, one process;
- a hand-written loop with ``apex.amp`` at O2.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import platform
import socket
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fabricamp
from fabricamp.optimizers import FusedAdam

PACKAGE = str(Path(fabricamp.__file__).parent) + os.sep
WARM_UP = 40
BATCH = 8


class Calls:
    """Counts the package's calls between :meth:`start` and :meth:`stop`."""

    def __init__(self):
        self.by_file = collections.Counter()
        self.changes = 0
        self._last = None

    def _note(self, frame, event, _):
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        file = frame.f_code.co_filename
        self.by_file[file] += 1
        self.changes += file != self._last
        self._last = file

    def start(self):
        """Starts counting in this thread."""
        sys.setprofile(self._note)

    def stop(self):
        """Stops counting."""
        sys.setprofile(None)

    def a_step(self, steps):
        """Returns the means per step of the counts, and the calls by file."""
        by_file = {file.removeprefix(PACKAGE): count / steps for file, count in self.by_file.most_common()}
        return {
            "calls": round(self.by_file.total() / steps, 1),
            "files": len(by_file),
            "changes_of_file": round(self.changes / steps, 1),
            "by_file": {file: round(count, 2) for file, count in by_file.items()},
        }


class Between(fabricamp.Callback):
    """Counts from the end of the warm-up's last batch to the end of the last measured batch."""

    def __init__(self, calls, steps):
        self.calls = calls
        self.last = WARM_UP + steps

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        """Starts after the warm-up, stops after the last batch."""
        if batch_idx == WARM_UP:
            self.calls.start()
        elif batch_idx == self.last:
            self.calls.stop()


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def loader(steps, ranks=1):
    torch.manual_seed(2)
    number = (WARM_UP + steps + 3) * BATCH * ranks
    return DataLoader(
        TensorDataset(torch.randn(number, 16), torch.randint(0, 2, (number,))), batch_size=BATCH, drop_last=True
    )


class Classifier(fabricamp.TrainingModule):
    """The network and its optimizer."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        """Returns the loss."""
        features, labels = batch
        return F.cross_entropy(self.net(features).float(), labels)

    def configure_optimizers(self):
        """Returns the fused optimizer."""
        return FusedAdam(self.parameters(), lr=1e-3)


class ByHand(Classifier):
    """Uses manual optimization; its step calls the clipping itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        """Runs backward, clipping and the optimizer's step."""
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()


def of_trainer(module, steps, folder, **options):
    """Returns the calls per step of a fit."""
    calls = Calls()
    if module.automatic_optimization:
        options["gradient_clip_val"] = 1.0
    trainer = fabricamp.Trainer(
        max_epochs=1,
        precision="O2",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[Between(calls, steps)],
        **options,
    )
    trainer.fit(module, loader(steps, trainer.world_size))
    return calls.a_step(steps)


def of_rank(rank, accelerator, port, steps, folder):
    """Runs one of two ranks; rank 0 writes its counts."""
    quiet()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    module = Classifier()
    found = of_trainer(module, steps, folder, accelerator=accelerator, devices=2, strategy="delayed_ddp")
    if rank == 0:
        Path(folder, "ranks.json").write_text(json.dumps(found))


def of_ranks(accelerator, steps, folder):
    """Returns the calls per step of rank 0 of two."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(of_rank, (accelerator, port, steps, folder), nprocs=2)
    return json.loads(Path(folder, "ranks.json").read_text())


def of_apex(steps, device):
    """Returns the calls per step of a hand-written loop with ``apex.amp``."""
    from fabricamp.apex import amp

    model = network().to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    calls = Calls()
    for number, (features, labels) in enumerate(loader(steps)):
        loss = F.cross_entropy(model(features.to(device)).float(), labels.to(device))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number == WARM_UP:
            calls.start()
        elif number == WARM_UP + steps:
            calls.stop()
            break
    return calls.a_step(steps)


def quiet():
    """Silences notes and warnings of the runs."""
    warnings.simplefilter("ignore")
    logging.getLogger("fabricamp").setLevel(logging.ERROR)


def all_runs(steps, folder):
    """Returns the runs that this machine supports, by name."""
    gpu = torch.cuda.is_available()
    where = {"accelerator": "gpu" if gpu else "cpu", "devices": 1}
    runs = {"one process, eager": lambda: of_trainer(Classifier(), steps, folder, **where)}
    if gpu:
        runs["one process, CUDA graph"] = lambda: of_trainer(Classifier(), steps, folder, cuda_graph=True, **where)
    runs["delayed_ddp, 2 ranks"] = lambda: of_ranks("cpu", steps, folder)
    if torch.cuda.device_count() > 1:
        runs["delayed_ddp, 2 GPUs"] = lambda: of_ranks("gpu", steps, folder)
    runs["manual optimization"] = lambda: of_trainer(ByHand(), steps, folder, **where)
    runs["apex.amp, loop by hand"] = lambda: of_apex(steps, "cuda" if gpu else "cpu")
    return runs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", help="the name of one run")
    parser.add_argument("--out", type=Path, help="write the results as JSON too")
    parser.add_argument("--files", action="store_true", help="show the calls by file")
    arguments = parser.parse_args()
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        runs = all_runs(arguments.steps, folder)
        rows = {name: run() for name, run in runs.items() if arguments.only in (None, name)}
    print(f"{'a step':28}{'calls':>8}{'files':>8}{'changes of file':>18}")
    for name, row in rows.items():
        print(f"{name:28}{row['calls']:>8}{row['files']:>8}{row['changes_of_file']:>18}")
        if arguments.files:
            for file, count in row["by_file"].items():
                print(f"    {count:>7} {file}")
    if arguments.out:
        facts = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
            "command": f"python benchmarks/calls.py --steps {arguments.steps}",
        }
        arguments.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
