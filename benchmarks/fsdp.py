"""Compares training with sharded weights by ``strategy="fsdp"`` with hand-written loops over torch's ``fully_shard``.

    torchrun --nproc_per_node=2 benchmarks/fsdp.py [--out results.json] [--cells 1.4B 6.9B] [--ways fabricamp fused foreach]
        [--minutes 5] [--warm] [--quick]

Two GPTs on synthetic tokens: 1.4 billion parameters on 4 x 1024 tokens per rank with reshard_after_forward=False, 6.9 billion
on 1 x 2048 with True.  Weights are fp32 shards, gathered and computed in bf16, gradients averaged in fp32, clipped to a norm
of 1, AdamW.  "fused" and "foreach" are torch's AdamW after ``clip_grad_norm_`` in a plain loop; "fabricamp" is the Trainer at O5
with FusedAdam, "fabricamp O4" the same under autocast; both with all of the Trainer's defaults.  All runs start with values of
the same distributions, because a GPU's clock rate depends on the values that it computes with.  "plain" is "fused" over plain
tensors in the memory of a rank's shards, clipped by the norm of these alone: the host's cost of clipping and update without
sharded tensors.
"fabricamp" also runs five steps of a network of Llama 3 8B's shape, to measure peak memory, and writes and reads checkpoints of
the first network ("saved").

The blocks of "compiled", which is otherwise "fused", are compiled by torch.compile, and those of "fabricamp blocks" by the
Trainer's ``compile="blocks"``.  "compiled fp8" and "fabricamp fp8 blocks" have FP8 products in all linear layers of the blocks,
with tensorwise scales and weights gathered in FP8, by torchao; in the former as torchao's page shows, in the latter by
``Float8(all_gather=True)``.  "fabricamp fp8 blocks, bf16 gather" is the same without it.  A way that ends with "graph" replays its
steps as CUDA graphs (``cuda_graph=CudaGraph(warmup=3, compare=False)``, which its row names): no hook runs within its steps, so
it has no update and host ms, and its first replay is not compared with an eager step, which ``first_replay.py`` measures.  Its
memory is what torch has reserved; else it is the peak of what was allocated.  The steps after the warm-up are cut into
seven windows, whose GPU times per step have the median "window_ms" with its quartiles.  The ratios to "compiled" are those of
medians, with the ranges that the quartiles of both give; the goals are 0.9 with compiled blocks and 0.8 with FP8.  Ways do not
alternate, as each compiles anew and two of them at 6.9 billion parameters do not fit on a GPU; a drift of the clock rate is part
of the ratios.

Step ms: wall time of all measured steps together.  Update ms: GPU time between events at the end of backward and at the end of
the update, with clipping.  Host ms: host time from the end of backward to the end of the step's calls.
Checkpoints: seconds of a save that training waits for; of the first background save, how long training waits (also for pinned
memory) and when the file is on the disk; of a run from its setup to its first batch, without and with a checkpoint.  All figures
are rank 0's; update and host are medians.  A cell already in ``--out`` is skipped, so an interrupted command can be repeated; no
cell begins after ``--minutes``.  ``--warm`` runs a few steps of two blocks in each way and keeps nothing: afterwards torch finds
the compiled code in its cache, and measuring begins sooner.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rounds as of_rounds
from benchmarks.models import Layer, llama_8b
from examples.gpt.gpt import GPT, Block
from fabricamp import Callback, Compile, CudaGraph, Float8, Trainer, TrainingModule, launch
from fabricamp.callbacks import AsyncCheckpoint
from fabricamp.optimizers import FusedAdam
from fabricamp.strategies import FSDP

if TYPE_CHECKING:
    from collections.abc import Callable

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
    llama: bool = False
    steps: int = 30

    def build(self) -> nn.Module:
        """Returns the network on the meta device."""
        with torch.device("meta"):
            if self.llama:
                return llama_8b(self.vocabulary, self.layers, self.width)
            shape = {"context": self.length, "layers": self.layers, "width": self.width, "heads": self.heads}
            return GPT(self.vocabulary, **shape)


CELLS = {
    "1.4B": Cell(24, 2048, 16, 4, 1024, False, steps=43),
    "6.9B": Cell(32, 4096, 32, 1, 2048, True, steps=29),
    "Llama 8B": Cell(32, 4096, 32, 1, 2048, True, 128256, llama=True, steps=5),
}
TINY = Cell(2, 64, 2, 2, 32, True, 128, steps=9)


def float8(*, all_gather: bool) -> Float8:
    """Returns the level with FP8 products in all linear layers of the blocks."""
    return Float8("tensorwise", include=["net.blocks"], all_gather=all_gather)


OURS: dict[str, Callable[[], str | Float8]] = {
    "fabricamp": lambda: "O5",
    "fabricamp O4": lambda: "O4",
    "fabricamp blocks": lambda: "O5",
    "fabricamp fp8 blocks": partial(float8, all_gather=True),
    "fabricamp fp8 blocks, bf16 gather": partial(float8, all_gather=False),
    "fabricamp graph": lambda: "O5",
    "fabricamp blocks graph": lambda: "O5",
    "fabricamp fp8 blocks graph": partial(float8, all_gather=True),
}
COMPILED, COMPILED_FP8 = "compiled", "compiled fp8"
GOALS = {
    "fabricamp blocks": 0.9,
    "fabricamp blocks graph": 0.9,
    "fabricamp fp8 blocks": 0.8,
    "fabricamp fp8 blocks graph": 0.8,
}
"""The largest ratios of a step to one of "compiled" that are aimed at."""
WINDOWS = 7
SAVED = "saved"
ALONE = {("1.4B", SAVED), ("Llama 8B", "fabricamp")}
"""Combinations measured for this network only; the other networks are measured in every other variant."""
WAYS = (*OURS, "fused", "foreach", "plain", COMPILED, COMPILED_FP8, SAVED)


class Tokens(Dataset[Any]):
    """Repeats the same few sequences, so that reading them takes no time."""

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
    """Measures the steps after a warm-up."""

    def __init__(self, device: torch.device, warm_up: int, last: int) -> None:
        self._device, self._warm_up, self._last, self._steps = device, warm_up, last, 0
        self._backward: list[torch.cuda.Event] = []
        self._updates: list[torch.cuda.Event] = []
        self._host: list[float] = []
        self._ends: list[float] = []
        self._loss = torch.zeros(())
        self._began = self._ended = self._backward_at = 0.0
        self._peak = 0

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _mark(self, marks: list[torch.cuda.Event]) -> None:
        if self._device.type == "cuda":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

    def after_backward(self) -> None:
        """Records the end of backward; not called in steps that are replayed."""
        self._mark(self._backward)
        self._backward_at = time.perf_counter()

    def after_step(self, loss: torch.Tensor) -> None:
        """Records the end of the update, and the step's loss."""
        self._loss = loss
        self._host.append(time.perf_counter() - self._backward_at)
        self._mark(self._updates)
        self._ends.append(time.perf_counter())
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
                # A replay allocates nothing.
                replays = not self._backward_at
                peak = torch.cuda.max_memory_reserved if replays else torch.cuda.max_memory_allocated
                self._peak = peak(self._device)

    def result(self, cell: Cell, parameters: int) -> dict[str, Any]:
        """Returns the figures; called after the last step."""
        step = (self._ended - self._began) / (self._last - self._warm_up)
        of_update: dict[str, float] = {}
        if self._backward_at:
            pairs = zip(self._backward[self._warm_up :], self._updates[self._warm_up :], strict=True)
            update = statistics.median([one.elapsed_time(other) for one, other in pairs] or [0.0])
            host = statistics.median(self._host[self._warm_up :]) * 1e3
            of_update = {"update_ms": round(update, 2), "host_ms": round(host, 2)}
        windows = self._windows()
        low, middle, high = statistics.quantiles(windows, method="inclusive")
        return {
            "step_ms": round(step * 1e3, 2),
            "window_ms": round(middle, 2),
            "window_quartiles_ms": [round(low, 2), round(high, 2)],
            **of_update,
            "tokens_s_gpu": round(cell.batch * cell.length / step),
            "tflops_gpu": round(6 * parameters * cell.batch * cell.length / step / 1e12, 1),
            "memory_gb": round(self._peak / 1e9, 2),
            "loss": round(self._loss.item(), 4),
        }

    def _windows(self) -> list[float]:
        """Returns the ms per step of each window, between the ends of updates; on a CPU those of the host."""
        size = max(1, (self._last - self._warm_up) // WINDOWS)
        ends = range(self._warm_up - 1, self._last, size)
        if self._device.type == "cuda":
            marks = [self._updates[step] for step in ends]
            return [one.elapsed_time(other) / size for one, other in pairwise(marks)]
        return [(self._ends[other] - self._ends[one]) * 1e3 / size for one, other in pairwise(ends)]


class StepTiming(Callback):
    """Calls the clock after a step, which has no other hooks."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, *_: Any) -> None:
        """Calls the clock after the update."""
        self.clock.after_step(outputs["loss"])


class Timing(StepTiming):
    """Calls the clock within a step, too."""

    def on_after_backward(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Calls the clock after backward."""
        self.clock.after_backward()


class Model(TrainingModule):
    """The network of a cell."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell

    def configure_model(self) -> None:
        """Builds the network on the meta device."""
        self.net = self.cell.build()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the loss."""
        loss: torch.Tensor = self.net(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Returns FusedAdam."""
        return FusedAdam(self.parameters(), lr=LR, weight_decay=0.01)


def backend(accelerator: str) -> str:
    """Returns the backend of torch.compile; a CPU may have no compiler for inductor."""
    return "inductor" if accelerator == "gpu" else "aot_eager"


def by_trainer(
    cell: Cell,
    level: str | Float8,
    steps: int,
    accelerator: str,
    *callbacks: Callback,
    ckpt_path: str | None = None,
    blocks: bool = False,
    graph: bool = False,
) -> int:
    """Runs a fit; returns the network's number of parameters.

    ``blocks``: each block is compiled.  ``graph``: steps are replayed as CUDA graphs, on a GPU.
    """
    trainer = Trainer(
        strategy=Sharded([Layer if cell.llama else Block], reshard_after_forward=cell.reshard),
        precision=level,
        accelerator=accelerator,
        devices="auto",
        max_steps=steps,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=any(isinstance(one, AsyncCheckpoint) for one in callbacks),
        enable_progress_bar=False,
        callbacks=[*callbacks],
        compile=Compile("blocks", backend=backend(accelerator)) if blocks else None,
        cuda_graph=CudaGraph(warmup=3, compare=False) if graph and accelerator == "gpu" else None,
    )
    model = Model(cell)
    loader = DataLoader(Tokens(cell, cell.batch * steps * trainer.world_size), batch_size=cell.batch)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return sum(one.numel() for one in model.parameters())


def by_hand(cell: Cell, way: str, clock: Clock, steps: int, device: torch.device) -> int:
    """Runs a plain loop; returns the network's number of parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = cell.build()
    if way == COMPILED_FP8:
        to_float8(net, emulate=device.type == "cpu")
    if way in (COMPILED, COMPILED_FP8):
        for number, block in enumerate(net.blocks):
            net.blocks[number] = torch.compile(block, backend=backend("gpu" if device.type == "cuda" else "cpu"))
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=cell.reshard)
    fully_shard(net, mesh=mesh, mp_policy=policy, reshard_after_forward=None if cell.reshard else False)
    net.to_empty(device=device)
    torch.manual_seed(0)
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    options = {"foreach": True} if way == "foreach" else {"fused": True}
    parameters: list[Any] = list(net.parameters())
    trained = [nn.Parameter(one.to_local().detach()) for one in parameters] if way == "plain" else parameters
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.01, **options)
    data = Tokens(cell, cell.batch * steps * dist.get_world_size())
    # As the Trainer does: each rank has other samples.
    for tokens, targets in DataLoader(data, batch_size=cell.batch, sampler=DistributedSampler(data, shuffle=False)):
        loss = net(tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True))
        net.zero_grad()
        loss.backward()
        if way == "plain":
            for own, parameter in zip(trained, parameters, strict=True):
                own.grad = parameter.grad.to_local()
        clock.after_backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        if way == COMPILED_FP8:
            precompute_scales(net)
        clock.after_step(loss.detach())
    return sum(one.numel() for one in net.parameters())


def to_float8(net: nn.Module, *, emulate: bool) -> None:
    """Gives the linear layers of the blocks torchao's FP8 products, with weights that FSDP gathers in FP8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    convert_to_float8_training(net, config=config, module_filter_fn=lambda _, name: name != "head")


def precompute_scales(net: nn.Module) -> None:
    """Computes the scales of all FP8 weights in one all-reduce, as torchao's page shows."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(net)


class Sharded(FSDP):
    """Skips the gathering of the weights after the last step, because nothing uses the trained weights."""

    def unshard_module(self, module: nn.Module, *, whole: bool = True) -> None:
        """Returns the module to plain tensors without gathering their values."""
        super().unshard_module(module, whole=False)


class Saves(AsyncCheckpoint):
    """Saves twice: after the second step training waits for the save, after the third it runs in the background."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "beside", every_n_train_steps=3, save_top_k=0, save_last=True)
        self.path = str(folder / "waited.ckpt")
        self.seconds: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, *arguments: Any) -> None:
        """Saves, and measures until the file is written."""
        synchronize(trainer.strategy.root_device)
        began, step = time.perf_counter(), trainer.global_step
        super().on_train_batch_end(trainer, pl_module, *arguments)
        if step == 2:
            trainer.save_checkpoint(self.path)
            self.seconds["save_s"] = time.perf_counter() - began
        if step == 3:
            synchronize(trainer.strategy.root_device)
            self.seconds["held_s"] = time.perf_counter() - began
            self._settle(trainer)
            self.seconds["written_s"] = time.perf_counter() - began


class Opened(Callback):
    """Measures the time from a run's setup to its first batch."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Starts the clock, before the module is built."""
        self._began = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Stops the clock, after everything is loaded."""
        synchronize(trainer.strategy.root_device)
        self.seconds = self.seconds or round(time.perf_counter() - self._began, 2)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def saved(cell: Cell, accelerator: str) -> dict[str, float]:
    """Returns the seconds of saves, and of starts without and with a checkpoint."""
    box = [tempfile.mkdtemp(prefix="fsdp-benchmark-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    folder = Path(box[0])
    saves, without, loaded = Saves(folder), Opened(), Opened()
    try:
        by_trainer(cell, "O5", 4, accelerator, without, saves)
        by_trainer(cell, "O5", 3, accelerator, loaded, ckpt_path=saves.path)
        size = sum(one.stat().st_size for one in Path(saves.path).rglob("*"))
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    seconds = {**saves.seconds, "begin_s": without.seconds, "begin_from_checkpoint_s": loaded.seconds}
    return {"checkpoint_gb": round(size / 1e9, 2), **{name: round(value, 2) for name, value in seconds.items()}}


def measured(cell: Cell, way: str, device: torch.device) -> dict[str, Any]:
    """Runs one cell in one variant."""
    accelerator, warm_up = "gpu" if device.type == "cuda" else "cpu", min(8, cell.steps // 3)
    clock = Clock(device, warm_up, cell.steps)
    if way == SAVED:
        result = saved(cell, accelerator)
    elif way in OURS:
        graph = way.endswith("graph")
        timing = StepTiming(clock) if graph else Timing(clock)
        parameters = by_trainer(cell, OURS[way](), cell.steps, accelerator, timing, blocks="blocks" in way, graph=graph)
        result = clock.result(cell, parameters)
        if graph:
            result["left_out"] = "the comparison of the first replay: CudaGraph(compare=False)"
    else:
        result = clock.result(cell, by_hand(cell, way, clock, cell.steps, device))
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm", action="store_true", help="fill torch's cache of compiled code, and measure nothing")
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
    begun = time.monotonic()
    if options.warm:
        for name, way in product(options.cells, options.ways):
            cell = TINY if options.quick else CELLS[name]
            # A small vocabulary, as most of the weights have to be in the blocks.
            cell = cell._replace(layers=2, vocabulary=128, steps=4)
            print(name, way, measured(cell, way, device)["loss"], flush=True)
        dist.destroy_process_group()
        return
    for name, way in product(options.cells, options.ways):
        if (name, way) in done or not is_wanted(name, way):
            continue
        if is_late(begun, options.minutes, device):
            break
        cell = CELLS[name]
        found = measured(TINY._replace(llama=cell.llama) if options.quick else cell, way, device)
        rows.append({"network": name, "way": way, **found})
        rows.sort(key=lambda row: (list(CELLS).index(row["network"]), WAYS.index(row["way"])))
        if dist.get_rank() == 0:
            print(name, way, found, flush=True)
            if options.out is not None:
                found = {**about(device), "rows": rows, "ratios": ratios(rows)}
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


def is_late(begun: float, minutes: float, device: torch.device) -> bool:
    """Returns whether ``minutes`` have passed on any rank since ``begun``."""
    late = torch.tensor(float(time.monotonic() - begun > 60 * minutes), device=device)
    dist.all_reduce(late, dist.ReduceOp.MAX)
    return bool(late.item())


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the ratios of each network's compiled ways to "compiled", and whether their quartiles decide the goal."""
    found = []
    bases = {row["network"]: row for row in rows if row["way"] == COMPILED}
    for row in rows:
        base = bases.get(row["network"])
        if base is None or row["way"] not in (*GOALS, COMPILED_FP8):
            continue
        low = row["window_quartiles_ms"][0] / base["window_quartiles_ms"][1]
        high = row["window_quartiles_ms"][1] / base["window_quartiles_ms"][0]
        ratio = {"median": round(row["window_ms"] / base["window_ms"], 4), "range": [round(low, 4), round(high, 4)]}
        goal = GOALS.get(row["way"])
        if goal is not None:
            decided = "met" if high <= goal else "missed" if low > goal else "not decided"
            ratio |= {"goal": goal, "decided": decided}
        found.append({"network": row["network"], "way": row["way"], **ratio})
    return found


def is_wanted(name: str, way: str) -> bool:
    """Returns whether this network is measured in this variant."""
    return (name, way) in ALONE or (way != SAVED and not CELLS[name].llama)


def about(device: torch.device) -> dict[str, str]:
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": f"{dist.get_world_size()} x {machine}",
        "torch": torch.__version__,
        "date": str(datetime.now(UTC).date()),
        "command": of_rounds.command(),
    }


if __name__ == "__main__":
    main()
