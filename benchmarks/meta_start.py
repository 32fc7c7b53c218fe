"""Measures what a user waits for from the start of the processes to the end of the first step, for a network on the meta device.

    python benchmarks/meta_start.py [--network own torchtitan] [--processes 2] [--rounds 3] [--out results.json] [--quick]

Each round starts fresh processes in each way, in turn:

- "fabricamp": ``Trainer(strategy=FSDP(...), precision="O5")``, whose ``configure_model`` builds the network on the meta device.
- "torch": torchtitan's way by hand: ``fully_shard`` on the meta device, ``to_empty`` on the GPU, and the network's own
  ``init_weights`` (or its layers' ``reset_parameters``) on the shards; bf16 by a MixedPrecisionPolicy, torch's fused AdamW.

The network "own" is ``benchmarks.models.llama_8b``; "torchtitan" is the ``Transformer`` of an installed torchtitan, 8B too.
Nothing is compiled.  Seconds are those of rank 0: ``import`` from the start of the processes to the end of the imports; ``group``,
the process group, which fabricamp makes within ``build``; ``build``, the network without values; ``fill``, sharded first values and
an optimizer; ``step``, the first step on the device.  ``without_import`` is the sum of all but the imports.  With ``--quick`` the
network is tiny, wherever it runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("fabricamp", "torch")
NETWORKS = ("own", "torchtitan")
STAGES = ("import", "group", "build", "fill", "step")
GOAL = 3.0
"""Seconds, without the imports, by which fabricamp's start may be longer than torch's."""
BEGAN = "META_START_BEGAN"
LR = 1e-4


class Clock:
    """Notes the ends of stages, in seconds since the processes were started."""

    def __init__(self) -> None:
        self._last = float(os.environ[BEGAN])
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def end(self, stage: str) -> None:
        """Ends a stage; those between are 0."""
        now = time.time()  # the processes were started by another one
        self.seconds[stage] = round(now - self._last, 2)
        self._last = now


def network_of(name: str, *, quick: bool) -> nn.Module:
    """Returns the network; called on the meta device."""
    if name == "own":
        from benchmarks.models import llama_8b

        return llama_8b(128, 2, 64) if quick else llama_8b()
    llama3 = importlib.import_module("torchtitan.models.llama3")
    shape: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128}
    if not quick:
        shape = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256}
        shape |= {"ffn_dim_multiplier": 1.3, "multiple_of": 1024, "rope_theta": 500000}
    net: nn.Module = llama3.Transformer(llama3.TransformerModelArgs(**shape))
    return net


def loss_of(net: nn.Module, name: str, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the loss; the network "own" returns it itself."""
    if name == "own":
        loss: torch.Tensor = net(tokens, targets)
        return loss
    from torch.nn import functional as F

    return F.cross_entropy(net(tokens).flatten(0, 1).float(), targets.flatten())


def block_class(name: str) -> type[nn.Module]:
    if name == "own":
        from benchmarks.models import Layer

        return Layer
    found: type[nn.Module] = importlib.import_module("torchtitan.models.llama3.model.model").TransformerBlock
    return found


def by_trainer(name: str, clock: Clock, *, quick: bool) -> None:
    """Runs one step of a fit."""
    import torch
    import torch.distributed.fsdp  # the Trainer imports it in its fit; told with the other imports, as in the other way
    from torch.utils.data import DataLoader, TensorDataset

    from fabricamp import Callback, Trainer, TrainingModule
    from fabricamp.optimizers import FusedAdam
    from fabricamp.strategies import FSDP

    blocks = block_class(name)
    clock.end("import")

    class Stages(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
            synchronize(pl_module.device)
            clock.end("fill")

        def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, *_: Any) -> None:
            synchronize(pl_module.device)
            clock.end("step")
            trainer.strategy.barrier()
            finish(clock, trainer.global_rank)

    class Model(TrainingModule):
        def configure_model(self) -> None:
            with torch.device("meta"):
                self.net = network_of(name, quick=quick)
            clock.end("build")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return loss_of(self.net, name, *batch)

        def configure_optimizers(self) -> Any:
            return FusedAdam(self.parameters(), lr=LR)

    trainer = Trainer(
        strategy=FSDP([blocks]),
        precision="O5",
        devices="auto",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Stages()],
    )
    tokens, targets = batch(quick=quick)
    data = TensorDataset(tokens.expand(trainer.world_size, -1), targets.expand(trainer.world_size, -1))
    trainer.fit(Model(), DataLoader(data, batch_size=1))


def by_torch(name: str, clock: Clock, *, quick: bool) -> None:
    """Runs one step by hand."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    blocks = block_class(name)
    clock.end("import")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    clock.end("group")
    with torch.device("meta"):
        net: Any = network_of(name, quick=quick)
    clock.end("build")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in net.modules():
        if isinstance(module, blocks):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    net.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        if hasattr(net, "init_weights"):
            net.init_weights(buffer_device=device)
        else:
            for module in net.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
    synchronize(device)
    clock.end("fill")
    loss_of(net, name, *(part.to(device) for part in batch(quick=quick))).backward()
    optimizer.step()
    synchronize(device)
    clock.end("step")
    dist.barrier()
    finish(clock, dist.get_rank())


def batch(*, quick: bool) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    rows = torch.randint(128, (1, (32 if quick else 2048) + 1), generator=torch.Generator().manual_seed(0))
    return rows[:, :-1], rows[:, 1:]


def synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def finish(clock: Clock, rank: int) -> None:
    """Writes the result on rank 0, and ends the process: what comes after the first step is not measured."""
    if rank == 0:
        Path(os.environ["META_START_OUT"]).write_text(json.dumps(clock.seconds))
    sys.stdout.flush()
    os._exit(0)


def measured(way: str, network: str, processes: int, *, quick: bool) -> dict[str, float]:
    """Starts the processes; returns the seconds of each stage."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "seconds.json")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={processes}",
            __file__,
        ]
        command += ["--way", way, "--network", network, *(["--quick"] if quick else [])]
        # Without the start of torchrun itself: each process asks the system when it was started.
        subprocess.run(command, check=True, env={**os.environ, "META_START_OUT": str(out)})
        seconds: dict[str, float] = json.loads(out.read_text())
    seconds["without_import"] = round(sum(seconds[stage] for stage in STAGES[1:]), 2)
    return seconds


def started() -> float:
    """Returns when this process was started, in seconds since the epoch."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - float(Path("/proc/uptime").read_text().split()[0]) + since_boot


def about() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        if cuda
        else f"{os.cpu_count()} CPU cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(tz=UTC).date().isoformat(),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, help="a process of this way, by torchrun")
    parser.add_argument("--network", nargs="+", default=["own"], choices=NETWORKS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny network: whether it runs at all")
    options = parser.parse_args(arguments)
    if options.way is not None:
        os.environ[BEGAN] = str(started())
        run = by_trainer if options.way == "fabricamp" else by_torch
        run(options.network[0], Clock(), quick=options.quick)
        return
    rows = []
    for network in options.network:
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            for way in WAYS[number % 2 :] + WAYS[: number % 2]:
                rounds[way].append(measured(way, network, options.processes, quick=options.quick))
                print(network, way, rounds[way][-1], flush=True)
        for way, found in rounds.items():
            middle = {stage: statistics.median(one[stage] for one in found) for stage in found[0]}
            rows.append({"network": network, "way": way, "median": middle, "rounds": found})
    if options.out is not None:
        options.out.write_text(
            json.dumps({**about(), "processes": options.processes, "goal": GOAL, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
