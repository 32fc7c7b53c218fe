"""Compares the ways in which ``strategy="fsdp"`` exchanges weights and gradients: peer memory, collectives, torch's own switch.

    torchrun --nproc_per_node=2 benchmarks/fsdp_exchanges.py [--out results.json] [--cells 1.4B] [--rounds 3] [--quick]

"peer" and "collective" are the two values of FABRICAMP_FSDP_EXCHANGE.  "torch" is "collective" with torch's
``FSDPModule.set_symm_mem_for_comm`` on each unit, set by a callback at the beginning of the fit; it is left out, with a line, where
torch has no such method.  Networks: GPT with 1.4 billion parameters as in ``fsdp.py``, and one of Llama 3 8B's shape on 1 x 8192
tokens, whose layers are compiled; the former also as a CUDA graph, without the comparison of its first replay.  All train at O5
with FusedAdam and otherwise with the Trainer's defaults.

The ways take turns, each round in another order; a fit of each gives one figure, the wall time of its steps after the warm-up.
Ratios are those of rounds.  Memory: the peak of what was allocated and of what was reserved, rank 0's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rounds as of_rounds
from benchmarks.fsdp import CELLS, CLIP, TINY, Cell, Clock, Model, StepTiming, Tokens, about
from benchmarks.models import Layer
from examples.gpt.gpt import Block
from fabricamp import Callback, CudaGraph, Trainer, TrainingModule, launch
from fabricamp.strategies import FSDP
from fabricamp.strategies.fsdp_collectives import VARIABLE

NETWORKS = {
    "1.4B": CELLS["1.4B"]._replace(steps=90),
    "1.4B graph": CELLS["1.4B"]._replace(steps=90),
    "Llama 8B, 8192 tokens": CELLS["Llama 8B"]._replace(length=8192, steps=10),
}
PEER, COLLECTIVE, OF_TORCH = "peer", "collective", "torch"
SWITCH = "set_symm_mem_for_comm"


class Switch(Callback):
    """Turns torch's symmetric memory on for every sharded unit."""

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Calls torch's switch."""
        for unit in pl_module.modules():
            if isinstance(unit, FSDPModule):
                getattr(unit, SWITCH)()


def measured(cell: Cell, way: str, device: torch.device, *, graph: bool) -> dict[str, float]:
    """Trains once, with a ``graph`` if asked; returns the milliseconds of a step and the peaks of memory in GB."""
    os.environ[VARIABLE] = PEER if way == PEER else COLLECTIVE
    clock = Clock(device, cell.steps // 3, cell.steps)
    trainer = Trainer(
        strategy=FSDP([Layer if cell.llama else Block], reshard_after_forward=cell.reshard),
        precision="O5",
        compile="blocks" if cell.llama and device.type == "cuda" else False,
        cuda_graph=CudaGraph(warmup=3, compare=False) if graph and device.type == "cuda" else False,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices="auto",
        max_steps=cell.steps,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[StepTiming(clock), *([Switch()] if way == OF_TORCH else [])],
    )
    loader = DataLoader(Tokens(cell, cell.batch * cell.steps * trainer.world_size), batch_size=cell.batch)
    model = Model(cell)
    trainer.fit(model, loader)
    result = clock.result(cell, sum(one.numel() for one in model.parameters()))
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    del trainer, model, loader
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"step_ms": result["step_ms"], "allocated_gb": result["memory_gb"], "reserved_gb": round(reserved / 1e9, 2)}


def compared(cell: Cell, ways: list[str], rounds: int, device: torch.device, *, graph: bool) -> dict[str, Any]:
    """Returns each way's figures of all rounds, and the ratios of "peer" to the others."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(rounds):
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            found[way].append(measured(cell, way, device, graph=graph))
            if dist.get_rank() == 0:
                print(way, found[way][-1], flush=True)
    steps = {way: [one["step_ms"] for one in figures] for way, figures in found.items()}
    return {
        "ways": {
            way: {name: statistics.median(one[name] for one in figures) for name in figures[0]}
            for way, figures in found.items()
        },
        "rounds": steps,
        "peer to": {way: of_rounds.ratio(steps[PEER], steps[way], 0.97) for way in ways if way != PEER},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cells", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--rounds", type=int, default=3)
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
    ways = [PEER, COLLECTIVE] if cuda else [COLLECTIVE]  # no memory of a peer is read on a CPU
    if hasattr(FSDPModule, SWITCH):
        ways += [OF_TORCH] * cuda
    elif dist.get_rank() == 0:
        print(f"torch {torch.__version__} has no FSDPModule.{SWITCH}: left out")
    found: dict[str, Any] = {}
    for name in options.cells:
        cell = NETWORKS[name]
        if options.quick:
            cell = TINY._replace(llama=cell.llama, length=TINY.length)
        if cuda:
            found[name] = compared(cell, ways, options.rounds, device, graph=name.endswith("graph"))
        else:
            found[name] = {"ways": {way: measured(cell, way, device, graph=False) for way in ways}}
        if dist.get_rank() == 0 and options.out is not None:
            options.out.write_text(json.dumps({**about(device), "networks": found}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
