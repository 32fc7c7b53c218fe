"""Compares the rate of one program in four forms: a plain loop, Lightning, fabricamp by Lightning's names, and with a word.

    python benchmarks/sparse_network.py [--device cuda] [--rounds 1] [--small] [--only loop,lightning] [--out results.json]

The program has the shape of a trainer of chess networks: two large sparse embedding bags, layers chosen by a bucket, weights that
are clipped after each step, an optimizer that wraps another, torchmetrics in the step, three loggers, and a loader that hands over
arrays as C code does.  Batches come from host memory, or are made on the device, so that no loader limits the rate.  The Lightning
form runs unchanged under ``python -m fabricamp.lightning``; the last form adds ``cuda_graph="auto"``.

Forms alternate, each in a process of its own that trains on both kinds of batches.  Figures are thousands of positions a second
after a warm-up; "loss" and "weights" show that all forms have trained alike.  Needs Lightning for its form.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"features": 22528, "width": 1024, "batch": 16384, "active": 32, "warm_up": 30, "steps": 150}
SMALL = {"features": 512, "width": 32, "batch": 64, "active": 8, "warm_up": 5, "steps": 20}
BUCKETS = 8
FORMS = {
    "plain loop": ["--form", "loop"],
    "Lightning": ["--form", "lightning"],
    "fabricamp, by Lightning's names": ["--form", "lightning", "--door"],
    'fabricamp, cuda_graph="auto"': ["--form", "lightning", "--door", "--graph"],
}
SOURCES = ("host", "device")


class Network(nn.Module):
    """Sums of embeddings of two sides, their products, and three small layers of which a bucket chooses the outputs."""

    def __init__(self, sizes):
        super().__init__()
        width = self.width = sizes["width"]
        self.bag = nn.EmbeddingBag(sizes["features"] + 1, width + BUCKETS, mode="sum", padding_idx=sizes["features"])
        self.first = nn.Linear(width, 16 * BUCKETS)
        self.second = nn.Linear(16, 32 * BUCKETS)
        self.last = nn.Linear(32, BUCKETS)
        nn.init.uniform_(self.bag.weight, -0.05, 0.05)

    def forward(self, white, black, turn, bucket):
        """Returns the values of the positions."""
        ours, of_bucket = self.bag(white).split([self.width, BUCKETS], 1)
        theirs, of_other = self.bag(black).split([self.width, BUCKETS], 1)
        both = torch.where(turn, torch.cat([ours, theirs], 1), torch.cat([theirs, ours], 1)).clamp(0.0, 1.0)
        one, two, three, four = both.chunk(4, 1)
        hidden = torch.cat([one * two, three * four], 1)
        for layer in (self.first, self.second):
            outputs = layer(hidden).unflatten(1, (BUCKETS, -1))
            index = bucket.view(-1, 1, 1).expand(-1, 1, outputs.shape[2])
            hidden = outputs.gather(1, index).squeeze(1).clamp(0.0, 1.0)
        value = self.last(hidden).gather(1, bucket.view(-1, 1))
        return value + (of_bucket - of_other).gather(1, bucket.view(-1, 1)) * torch.where(turn, 0.5, -0.5)

    def loss(self, batch):
        """Returns the loss, and the mean error."""
        white, black, turn, target, bucket = batch
        error = (self(white, black, turn, bucket).sigmoid() - target).abs()
        return error.pow(2.5).mean(), error.mean()

    @torch.no_grad()
    def clip(self):
        """Keeps the weights of the layers in the range of their later integers."""
        for layer in (self.first, self.second, self.last):
            layer.weight.clamp_(-1.98, 1.98)


class Lookahead(torch.optim.Optimizer):
    """Every sixth step moves the weights half of the way back: an optimizer around another."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.param_groups = inner.param_groups
        self.count = 0

    def step(self, closure=None):
        """Makes the inner step, and every sixth time the slow one."""
        result = self.inner.step(closure)
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "slow" not in state:
                    state["slow"] = parameter.detach().clone()
                elif self.count % 6 == 0:
                    state["slow"].lerp_(parameter.detach(), 0.5)
                    parameter.data.copy_(state["slow"])
        return result


def optimizer_and_schedule(module):
    optimizer = Lookahead(torch.optim.RAdam(module.parameters(), lr=8.75e-4, betas=(0.9, 0.999), eps=1e-7))
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 100, gamma=0.992)


class Positions(IterableDataset):
    """Batches on the device: of arrays in host memory, which are pinned and copied, or made there."""

    def __init__(self, sizes, source, device):
        self.sizes, self.source, self.device = sizes, source, torch.device(device)
        self.count = sizes["warm_up"] + sizes["steps"]

    def __len__(self):
        return self.count

    def shapes(self):
        """Returns the shape of each tensor."""
        batch, active = self.sizes["batch"], self.sizes["active"]
        return [(batch, active), (batch, active), (batch, 1), (batch, 1), (batch,)]

    def __iter__(self):
        yield from self.of_host() if self.source == "host" else self.of_device()

    def of_host(self):
        """Yields batches of arrays, of which the fourth is followed by the first."""
        numbers = np.random.default_rng(1)
        features, shapes = self.sizes["features"], self.shapes()
        arrays = [
            (
                numbers.integers(0, features + 1, shapes[0], dtype=np.int32),
                numbers.integers(0, features + 1, shapes[1], dtype=np.int32),
                numbers.integers(0, 2, shapes[2]).astype(bool),
                numbers.random(shapes[3], dtype=np.float32),
                numbers.integers(0, BUCKETS, shapes[4]),
            )
            for _ in range(4)
        ]
        for number in range(self.count):
            tensors = [torch.from_numpy(one) for one in arrays[number % 4]]
            if self.device.type == "cuda":
                yield tuple(one.pin_memory().to(self.device, non_blocking=True) for one in tensors)
            else:
                yield tuple(one.clone() for one in tensors)

    def of_device(self):
        """Yields batches that the device's own generator makes."""
        source = torch.Generator(self.device).manual_seed(2)
        options = {"device": self.device, "generator": source}
        features, shapes = self.sizes["features"], self.shapes()
        for _ in range(self.count):
            yield (
                torch.randint(features + 1, shapes[0], dtype=torch.int32, **options),
                torch.randint(features + 1, shapes[1], dtype=torch.int32, **options),
                torch.randint(2, shapes[2], dtype=torch.int64, **options).bool(),
                torch.rand(shapes[3], dtype=torch.float32, **options),
                torch.randint(BUCKETS, shapes[4], dtype=torch.int64, **options),
            )


class Clock:
    """The time between the end of the warm-up and the last step."""

    def __init__(self, sizes, device):
        self.sizes, self.waits = sizes, device == "cuda"
        self.count, self.begun, self.seconds = 0, 0.0, 0.0

    def step(self):
        """Counts a step; waits for the device at two of them."""
        self.count += 1
        if self.count in (self.sizes["warm_up"], self.sizes["warm_up"] + self.sizes["steps"]):
            if self.waits:
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds, self.begun = now - self.begun, now


def loader(sizes, source, device):
    return DataLoader(Positions(sizes, source, device), batch_size=None)


def new_network(sizes, device):
    torch.manual_seed(3)
    return Network(sizes).to(device)


def by_loop(sizes, source, device, folder, _graph):
    """The loop that a team writes when it takes its trainer out."""
    from torch.utils.tensorboard import SummaryWriter

    network = new_network(sizes, device)
    optimizer, schedule = optimizer_and_schedule(network)
    loss_mean, error_mean = torchmetrics.MeanMetric().to(device), torchmetrics.MeanMetric().to(device)
    clock = Clock(sizes, device)
    with Path(folder, "a.csv").open("w") as first, Path(folder, "b.csv").open("w") as second:
        tables = [csv.writer(first), csv.writer(second)]
        board = SummaryWriter(str(folder))
        for number, batch in enumerate(loader(sizes, source, device)):
            optimizer.zero_grad()
            loss, error = network.loss(batch)
            loss_mean.update(loss.detach())
            error_mean.update(error.detach())
            loss.backward()
            optimizer.step()
            schedule.step()
            network.clip()
            if (number + 1) % 50 == 0:
                value = loss.item()
                board.add_scalar("loss", value, number)
                for table in tables:
                    table.writerow([number, value])
            clock.step()
        board.close()
    return clock, network, float(loss_mean.compute())


def by_lightning(sizes, source, device, folder, graph):
    """The program for Lightning, which runs unchanged under ``python -m fabricamp.lightning``."""
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    class Trained(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = new_network(sizes, "cpu")
            self.loss_mean, self.error_mean = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()

        def training_step(self, batch, batch_idx):
            loss, error = self.network.loss(batch)
            self.loss_mean.update(loss.detach())
            self.error_mean.update(error.detach())
            self.log("loss", loss)
            self.log("loss_mean", self.loss_mean, on_step=False, on_epoch=True)
            self.log("error_mean", self.error_mean, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            optimizer, schedule = optimizer_and_schedule(self.network)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Clips(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.network.clip()
            clock.step()

    clock = Clock(sizes, device)
    module = Trained()
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        log_every_n_steps=50,
        logger=[CSVLogger(folder, name="a"), CSVLogger(folder, name="b"), TensorBoardLogger(folder, name="c")],
        callbacks=[Clips()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"cuda_graph": "auto"} if graph else {}),
    )
    trainer.fit(module, loader(sizes, source, device))
    return clock, module.network, float(trainer.callback_metrics["loss_mean"])


def run_form(options, sizes):
    """Runs one form in this process; prints its figures as JSON."""
    run = {"loop": by_loop, "lightning": by_lightning}[options.form]
    found = {}
    for source in SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            clock, network, loss = run(sizes, source, options.device, folder, options.graph)
        weights = sum(float(one.detach().double().abs().sum()) for one in network.parameters())
        rate = sizes["steps"] * sizes["batch"] / clock.seconds / 1000
        found[source] = {"rate": rate, "loss": loss, "weights": weights}
    print("FOUND " + json.dumps(found), flush=True)


def result_of(arguments, options):
    """Returns the figures of one form, run in a process of its own."""
    door = ["-m", "fabricamp.lightning"] if "--door" in arguments else []
    command = [sys.executable, *door, __file__, "--device", options.device, *arguments]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    finished = subprocess.run(
        [*command, *(["--small"] if options.small else [])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    line = next((one for one in finished.stdout.splitlines() if one.startswith("FOUND ")), None)
    if line is None:
        raise RuntimeError(f"{' '.join(command)} ended with {finished.returncode}\n{finished.stderr[-2000:]}")
    said = [one for one in finished.stderr.splitlines() if "graph" in one]
    return json.loads(line.removeprefix("FOUND ")), said


def write(options, sizes, rows):
    """Writes what is there so far."""
    if options.out:
        device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        facts = {"device": device, "torch": torch.__version__, "python": platform.python_version(), "sizes": sizes}
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="a tiny network, to try the script")
    parser.add_argument("--only", help="names of forms that begin so, with commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--form", choices=["loop", "lightning"], help="run this form here")
    parser.add_argument("--graph", action="store_true", help="with --form: cuda_graph='auto'")
    parser.add_argument("--door", action="store_true", help="with --form: runs under python -m fabricamp.lightning")
    options = parser.parse_args()
    sizes = SMALL if options.small else SIZES
    if options.form:
        run_form(options, sizes)
        return
    chosen = [name for name in FORMS if not options.only or name.startswith(tuple(options.only.split(",")))]
    if importlib.util.find_spec("lightning") is None:
        chosen.remove("Lightning")
    rows = {name: [] for name in chosen}
    for _ in range(options.rounds):
        for name in chosen:
            found, said = result_of(FORMS[name], options)
            rows[name].append(found)
            write(options, sizes, rows)
            print(name, {key: round(one["rate"]) for key, one in found.items()}, *said, sep="\n    ", flush=True)
    print(
        f"\n{'thousand positions a second':34}"
        + "".join(f"{source:>10}{'loss':>12}{'weights':>16}" for source in SOURCES)
    )
    for name, results in rows.items():
        figures = ""
        for source in SOURCES:
            rate = statistics.median(one[source]["rate"] for one in results)
            figures += f"{rate:10.0f}{results[0][source]['loss']:12.7f}{results[0][source]['weights']:16.4f}"
        print(f"{name:34}{figures}")


if __name__ == "__main__":
    main()
