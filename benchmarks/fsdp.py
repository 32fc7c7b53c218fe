"""Training with sharded weights: ``strategy="fsdp"`` beside torch's ``fully_shard`` written by hand.

    torchrun --nproc_per_node=2 benchmarks/fsdp.py [--out results.json] [--cells 1.4B 6.9B] [--ways ours fused foreach] [--quick]

Two GPTs on synthetic tokens: 1.4 billion parameters on 4 x 1024 tokens a rank with reshard_after_forward=False, 6.9 billion
on 1 x 2048 with True.  Weights are fp32 parts, gathered and computed in bf16, gradients averaged in fp32, clipped to a norm
of 1, AdamW.  "fused" and "foreach" are torch's AdamW behind ``clip_grad_norm_`` in a plain loop; "ours" is the Trainer at O5
with FusedAdam, "ours O4" the same under autocast, with everything that a Trainer does by itself.

Step ms: wall time of all measured steps together.  Update ms: what lies on the GPU between the end of backward and the end of
the update, clipping included, by events.  Host ms: what the host takes from the end of backward to the end of the step's calls.
All are rank 0's; of update and host the median.  A cell that is in ``--out`` already is not measured again: the command may be
cut and repeated.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.gpt import GPT, Block
from fabricamp import Callback, Trainer, TrainingModule, launch
from fabricamp.optimizers import FusedAdam
from fabricamp.strategies import FSDP

CLIP, LR = 1.0, 1e-4


class Cell(NamedTuple):
    """A network, its batch, and whether weights are freed between forward and backward."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    reshard: bool
    vocabulary: int = 50304

    @property
    def parameters(self) -> int:
        """How many the network has, but for norms and biases."""
        return 12 * self.layers * self.width**2 + 2 * self.vocabulary * self.width

    def build(self) -> GPT:
        """Returns the network without values."""
        shape = {"context": self.length, "layers": self.layers, "width": self.width, "heads": self.heads}
        with torch.device("meta"):
            return GPT(self.vocabulary, **shape)


CELLS = {"1.4B": Cell(24, 2048, 16, 4, 1024, False), "6.9B": Cell(32, 4096, 32, 1, 2048, True)}
TINY = Cell(2, 64, 2, 2, 32, True, 128)
WAYS = ("ours", "ours O4", "fused", "foreach")


class Tokens(Dataset[Any]):
    """The same few sequences again and again: reading them costs nothing."""

    def __init__(self, cell: Cell, number: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(cell.vocabulary, (16, cell.length + 1), generator=generator)
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.rows[index % len(self.rows)]
        return row[:-1], row[1:]


class Clock:
    """Times of steps behind some that are not counted."""

    def __init__(self, device: torch.device, warm_up: int, last: int) -> None:
        self._device, self._warm_up, self._last, self._steps = device, warm_up, last, 0
        self._events: list[list[torch.cuda.Event]] = []
        self._host: list[float] = []
        self._began = self._ended = self._backward_at = 0.0
        self._peak = 0

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _mark(self) -> list[torch.cuda.Event]:
        if self._device.type != "cuda":
            return []
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return [event]

    def after_backward(self) -> None:
        """Called behind backward."""
        self._events.append(self._mark())
        self._backward_at = time.perf_counter()

    def after_step(self) -> None:
        """Called behind the update."""
        self._host.append(time.perf_counter() - self._backward_at)
        self._events[-1] += self._mark()
        self._steps += 1
        if self._steps == self._warm_up:
            self._synchronize()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            self._began = time.perf_counter()
        if self._steps == self._last:
            self._synchronize()
            self._ended = time.perf_counter()
            if self._device.type == "cuda":
                self._peak = torch.cuda.max_memory_allocated(self._device)

    def result(self, cell: Cell) -> dict[str, float]:
        """Returns the figures, behind the last step."""
        step = (self._ended - self._began) / (self._last - self._warm_up)
        pairs = [pair for pair in self._events[self._warm_up :] if len(pair) == 2]
        update = statistics.median(one.elapsed_time(other) for one, other in pairs) if pairs else 0.0
        return {
            "step_ms": round(step * 1e3, 2),
            "update_ms": round(update, 2),
            "host_ms": round(statistics.median(self._host[self._warm_up :]) * 1e3, 2),
            "tokens_s_gpu": round(cell.batch * cell.length / step),
            "tflops_gpu": round(6 * cell.parameters * cell.batch * cell.length / step / 1e12, 1),
            "memory_gb": round(self._peak / 1e9, 2),
        }


class Timing(Callback):
    """Tells the clock; there are no other hooks in a step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_after_backward(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Behind backward."""
        self.clock.after_backward()

    def on_train_batch_end(self, *_: Any) -> None:
        """Behind the update."""
        self.clock.after_step()


class Model(TrainingModule):
    """The network of a cell."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell

    def configure_model(self) -> None:
        """Builds it on the meta device."""
        self.net = self.cell.build()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the loss."""
        loss: torch.Tensor = self.net(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Returns FusedAdam."""
        return FusedAdam(self.parameters(), lr=LR, weight_decay=0.01)


def by_trainer(cell: Cell, level: str, clock: Clock, steps: int, accelerator: str) -> None:
    trainer = Trainer(
        strategy=FSDP([Block], reshard_after_forward=cell.reshard),
        precision=level,
        accelerator=accelerator,
        devices="auto",
        max_steps=steps,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Timing(clock)],
    )
    trainer.fit(Model(cell), DataLoader(Tokens(cell, cell.batch * steps * trainer.world_size), batch_size=cell.batch))


def by_hand(cell: Cell, fused: bool, clock: Clock, steps: int, device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = cell.build()
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=cell.reshard)
    fully_shard(net, mesh=mesh, mp_policy=policy, reshard_after_forward=None if cell.reshard else False)
    net.to_empty(device=device)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.02)
    options = {"fused": True} if fused else {"foreach": True}
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.01, **options)
    for tokens, targets in DataLoader(Tokens(cell, cell.batch * steps), batch_size=cell.batch):
        loss = net(tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        clock.after_backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        clock.after_step()


def measured(cell: Cell, way: str, steps: int, warm_up: int, device: torch.device) -> dict[str, float]:
    clock = Clock(device, warm_up, steps)
    if way.startswith("ours"):
        # Within the group that is there; the module that comes back whole in host memory is not timed.
        by_trainer(cell, "O4" if way == "ours O4" else "O5", clock, steps, "gpu" if device.type == "cuda" else "cpu")
    else:
        by_hand(cell, way == "fused", clock, steps, device)
    result = clock.result(cell)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="tiny networks, wherever it runs: whether it runs at all")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    environment = launch.detect()
    assert environment is not None, "start it by torchrun"
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", environment.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rows = json.loads(options.out.read_text())["rows"] if options.out is not None and options.out.exists() else []
    done = {(row["network"], row["way"]) for row in rows}
    steps, warm_up = (6, 2) if options.quick else (options.steps, 8)
    for name in options.cells:
        for way in options.ways:
            if (name, way) in done:
                continue
            found = measured(TINY if options.quick else CELLS[name], way, steps, warm_up, device)
            rows.append({"network": name, "way": way, **found})
            if dist.get_rank() == 0:
                print(name, way, found, flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps({**about(device), "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def about(device: torch.device) -> dict[str, str]:
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": f"{dist.get_world_size()} x {machine}",
        "torch": torch.__version__,
        "date": str(datetime.now(UTC).date()),
        "command": "torchrun --nproc_per_node=2 benchmarks/fsdp.py",
    }


if __name__ == "__main__":
    main()
