"""Trains Llama 3 8B beside torchtitan: tokens per second, memory by three measures, and the losses of the first steps.

    python benchmarks/titan.py [--processes 2] [--ways torchtitan fabricamp] [--segments expandable plain] [--steps 20] [--batch 1]
        [--accumulation 1] [--rounds 1] [--minutes 60] [--out results.json] [--quick]

The network is torchtitan's own ``Transformer``, built on the meta device, for each way; torchtitan 0.2.2 has to be installed.  Each
way trains in fresh processes, started by torchrun, in turn; the rounds begin with another way each.  The tokens are synthetic, the
same in all ways, 8,192 a sample.  All train with AdamW, clipped to a norm of 1, at a constant rate.  First values are of the same
distributions by the same seed, and other numbers, as each way fills the network itself.

- "torchtitan": its model converters, ``parallelize_llama`` (each block compiled; ``fully_shard`` with embedding, blocks, and norm
  with head as units, gathered in bf16), its compiled loss, its optimizers (torch's fused AdamW), its clipping and its garbage
  collection, in the order of its ``Trainer.train_step``, without its log.  "selective" computes activations again by its activation
  checkpointing of operations, of which the other ways do none.
- "fabricamp": ``Trainer(strategy=FSDP([TransformerBlock]), precision="O5", compile="blocks")`` with FusedAdam; all else are
  defaults.  The loss is torch's cross-entropy of what the network returns.  "head" has ``FusedLinearCrossEntropy`` in place of the
  network's ``output``, and embedding and head as units: ``FSDP([TransformerBlock, "net.tok_embeddings", "head"])``.
- "fp8" has FP8 products in the linear layers of the blocks, with tensorwise scales and weights gathered in FP8: torchtitan's
  converter, and ``Float8(all_gather=True)``.

``--segments`` says with which allocators: "expandable" sets ``PYTORCH_ALLOC_CONF=expandable_segments:True``, as torchtitan's
scripts do, and "plain" leaves it unset.

Step ms: between the ends of updates on the GPU, after a third of the steps; median and quartiles, those of rank 0.  Memory, in
GiB, of the rank that takes most: ``allocated`` and ``reserved`` are torch's peaks of the whole run, ``steady`` is that of what was
allocated after the warm-up, ``device`` the most that the driver had given away on this GPU, whoever asked, seen every 20 ms.
Losses are means over the tokens of all ranks.  No way begins after ``--minutes``.  With ``--quick`` the network is tiny, wherever
it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

OUT = "TITAN_OUT"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
SEGMENTS = {"expandable": "expandable_segments:True", "plain": ""}
CLIP, LR, BETAS, DECAY = 1.0, 3e-4, (0.9, 0.95), 0.1
SEED = 0
ROWS = 64
"""Samples that differ; they repeat, so that reading them takes no time."""
FIRST_LOSSES = 20
GIB = 2**30


class Way(NamedTuple):
    """Who trains, and how."""

    peer: bool
    fp8: bool = False
    selective: bool = False
    head: bool = False


WAYS = {
    "torchtitan": Way(peer=True),
    "fabricamp": Way(peer=False),
    "fabricamp head": Way(peer=False, head=True),
    "torchtitan fp8": Way(peer=True, fp8=True),
    "fabricamp fp8": Way(peer=False, fp8=True),
    "fabricamp head fp8": Way(peer=False, fp8=True, head=True),
    "torchtitan selective": Way(peer=True, selective=True),
    "torchtitan selective fp8": Way(peer=True, fp8=True, selective=True),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What a way trains on: numbers of steps, of samples in a micro-batch, and of micro-batches in a step."""

    steps: int
    batch: int
    accumulation: int
    quick: bool

    @property
    def length(self) -> int:
        """Tokens in a sample."""
        return 32 if self.quick else 8192

    @property
    def warm_up(self) -> int:
        """The number of steps that are not timed."""
        return max(1, self.steps // 3)

    @property
    def tokens(self) -> int:
        """Tokens in a rank's step."""
        return self.batch * self.accumulation * self.length

    def network_arguments(self) -> Any:
        """Returns torchtitan's arguments of the network."""
        from torchtitan.models.llama3 import llama3_args

        if self.quick:
            small = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128, "multiple_of": 16}
            return dataclasses.replace(llama3_args["8B"], max_seq_len=self.length, **small)
        return dataclasses.replace(llama3_args["8B"], max_seq_len=self.length)


class Samples(Dataset[Any]):
    """Tokens, and the next tokens."""

    def __init__(self, work: Work, words: int, ranks: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(words, (ROWS, work.length + 1), generator=generator)
        self.number = work.steps * work.accumulation * work.batch * ranks

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.rows[index % ROWS]
        return row[:-1], row[1:]


class DeviceMemory:
    """A thread that notes the most memory of a GPU that its driver had given away."""

    def __init__(self, device: torch.device) -> None:
        self.peak = 0
        self._device = device
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if device.type == "cuda":
            self._thread.start()

    def _watch(self) -> None:
        while True:
            free, total = torch.cuda.mem_get_info(self._device)
            self.peak = max(self.peak, total - free)
            if self._ended.wait(0.02):
                return

    def end(self) -> None:
        """Ends the thread, after a last look."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()


class Clock:
    """Notes the ends of steps, the losses, and the peaks of memory."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work, self._device = work, device
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._losses: list[Tensor] = []
        self._before = (0, 0)
        """Peaks before the end of the warm-up."""
        self.memory = DeviceMemory(device)

    def note_loss(self, loss: Tensor) -> None:
        """Takes the loss of a micro-batch, whose sum over a step's micro-batches is the step's, on this rank."""
        self._losses.append(loss.detach())

    def end_step(self) -> bool:
        """Notes the end of a step; returns whether it was the last one."""
        if self._on_gpu:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        self._times.append(time.perf_counter())
        if len(self._times) == self._work.warm_up and self._on_gpu:
            self._before = self._peaks()
            torch.cuda.reset_peak_memory_stats(self._device)
        return len(self._times) == self._work.steps

    def _peaks(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)

    def _milliseconds(self) -> list[float]:
        first = self._work.warm_up - 1
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            return [one.elapsed_time(other) for one, other in pairwise(self._events[first:])]
        return [1e3 * (other - one) for one, other in pairwise(self._times[first:])]

    def result(self) -> dict[str, Any]:
        """Returns the figures; every rank calls it."""
        times = self._milliseconds()
        low, middle, high = statistics.quantiles(times, method="inclusive") if len(times) > 1 else 3 * times
        self.memory.end()
        steady, reserved = self._peaks() if self._on_gpu else (0, 0)
        bytes_of = [max(steady, self._before[0]), max(reserved, self._before[1]), steady, self.memory.peak]
        peaks = torch.tensor(bytes_of, dtype=torch.float64, device=self._device)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        losses = torch.stack(self._losses).view(self._work.steps, -1).sum(1)[:FIRST_LOSSES].double()
        dist.all_reduce(losses)
        names = ("allocated_gib", "reserved_gib", "steady_gib", "device_gib")
        return {
            "step_ms": round(middle, 2),
            "step_quartiles_ms": [round(low, 2), round(high, 2)],
            "tokens_s_gpu": round(self._work.tokens / middle * 1e3),
            **{name: round(one / GIB, 2) for name, one in zip(names, peaks.tolist(), strict=True)},
            "losses": [round(one / dist.get_world_size(), 4) for one in losses.tolist()],
        }


def by_torchtitan(way: Way, work: Work, device: torch.device) -> None:
    """Trains by torchtitan's parts, in the order of its trainer."""
    from torchtitan.components.loss import IGNORE_INDEX, build_cross_entropy_loss
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.llama3 import Transformer, parallelize_llama
    from torchtitan.protocols.model_converter import build_model_converters
    from torchtitan.tools.utils import GarbageCollection

    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    ranks = dist.get_world_size()
    config = JobConfig()
    config.training.seq_len, config.training.local_batch_size, config.training.max_norm = work.length, work.batch, CLIP
    config.compile.enable, config.compile.backend = on_gpu or not way.fp8, "inductor" if on_gpu else "aot_eager"
    config.activation_checkpoint.mode = "selective" if way.selective else "none"
    config.activation_checkpoint.selective_ac_option = "op"
    config.optimizer.lr, (config.optimizer.beta1, config.optimizer.beta2) = LR, BETAS
    config.optimizer.weight_decay = DECAY
    if way.fp8:
        config.model.converters = ["quantize.linear.float8"]
        float8 = config.quantize.linear.float8
        float8.enable_fsdp_float8_all_gather = float8.precompute_float8_dynamic_scale_for_fsdp = True
        float8.filter_fqns, float8.emulate = ["output"], not on_gpu
    dims = ParallelDims(dp_replicate=1, dp_shard=-1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=ranks)
    config.debug.seed = SEED
    collection = GarbageCollection(gc_freq=config.training.gc_freq)
    dist_utils.set_determinism(dims, device, config.debug, distinct_seed_mesh_dims=["pp"])
    arguments = work.network_arguments()
    with torch.device("meta"):
        net = Transformer(arguments)
    converters = build_model_converters(config, dims)
    converters.convert(net)
    loss_of = build_cross_entropy_loss(config)
    net = parallelize_llama(net, dims, config)
    for unit in net.modules():
        if isinstance(unit, FSDPModule) and not on_gpu:
            unit.set_force_sum_reduction_for_comms(True)  # Gloo has no sum with a factor
    net.to_empty(device=device)
    with torch.no_grad():
        net.init_weights(buffer_device=None)
    net.train()
    optimizers = build_optimizers([net], config.optimizer, dims)
    optimizers.register_step_post_hook(lambda *_, **__: converters.post_optimizer_hook([net]))
    context, autocast = dist_utils.get_train_context(False), dist_utils.maybe_enable_amp(dims, "bfloat16", device.type)

    clock = Clock(work, device)
    data = Samples(work, arguments.vocab_size, ranks)
    sampler: Any = torch.utils.data.DistributedSampler(data, shuffle=False)
    batches = iter(DataLoader(data, batch_size=work.batch, sampler=sampler))
    for step in range(1, work.steps + 1):
        collection.run(step)
        optimizers.zero_grad()
        micro_batches = [next(batches) for _ in range(work.accumulation)]
        valid = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in micro_batches]).sum().to(device)
        all_valid = dist_utils.dist_sum(valid, dims.get_optional_mesh("batch"))
        for tokens, labels in micro_batches:
            tokens, labels = tokens.to(device), labels.to(device)  # noqa: PLW2901  # as torchtitan does
            with context(), autocast:
                scores = net(tokens)
                loss = loss_of(scores, labels) / all_valid
            del scores
            loss.backward()
            clock.note_loss(loss.detach() * ranks)
        dist_utils.clip_grad_norm_([*net.parameters()], config.training.max_norm, foreach=True, pp_mesh=None)
        optimizers.step()
        clock.end_step()
    finish(clock)


def by_fabricamp(way: Way, work: Work, device: torch.device) -> None:
    """Trains by the Trainer."""
    from torchtitan.models.llama3 import Transformer
    from torchtitan.models.llama3.model.model import TransformerBlock

    from fabricamp import Callback, Compile, Float8, Trainer, TrainingModule, seed_everything
    from fabricamp.nn import FusedLinearCrossEntropy
    from fabricamp.optimizers import FusedAdam
    from fabricamp.strategies import FSDP

    on_gpu = device.type == "cuda"
    seed_everything(SEED, verbose=False)
    clock = Clock(work, device)
    arguments = work.network_arguments()

    class Model(TrainingModule):
        def configure_model(self) -> None:
            with torch.device("meta"):
                self.net = Transformer(arguments)
                if way.head:
                    self.head, self.net.output = FusedLinearCrossEntropy.of(self.net.output), None

        def init_weights(self) -> None:
            if way.head:  # as the network would fill its own
                std = float(arguments.dim**-0.5)
                nn.init.trunc_normal_(self.head.weight, std=std, a=-3 * std, b=3 * std)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            tokens, labels = batch
            if way.head:
                loss: Tensor = self.head(self.net(tokens), labels)
            else:
                loss = F.cross_entropy(self.net(tokens).flatten(0, 1), labels.flatten())
            clock.note_loss(loss.detach() / work.accumulation)
            return loss

        def configure_optimizers(self) -> Any:
            return FusedAdam(self.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)

    class Ends(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if (batch_idx + 1) % work.accumulation == 0 and clock.end_step():
                finish(clock)

    trainer = Trainer(
        strategy=FSDP([TransformerBlock, *(["net.tok_embeddings", "head"] if way.head else [])]),
        precision=Float8(all_gather=True, include=[] if on_gpu else ["net.layers"]) if way.fp8 else "O5",
        accelerator="gpu" if on_gpu else "cpu",
        devices="auto",
        compile="blocks" if on_gpu else Compile("blocks", backend="aot_eager"),
        max_steps=work.steps,
        accumulate_grad_batches=work.accumulation,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Ends()],
    )
    data = Samples(work, arguments.vocab_size, trainer.world_size)
    trainer.fit(Model(), DataLoader(data, batch_size=work.batch))


def finish(clock: Clock) -> NoReturn:
    """Writes the result on rank 0, and ends the process: what comes after the last step is not measured."""
    result = clock.result()
    if dist.get_rank() == 0:
        Path(os.environ[OUT]).write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def train(name: str, work: Work) -> None:
    """Trains in one way, as one of the processes of torchrun."""
    warnings.filterwarnings("ignore")
    way = WAYS[name]
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    elif way.peer:
        # torchtitan takes a machine without an accelerator for one with CUDA.
        import torchtitan.distributed.parallel_dims as parallel_dims

        parallel_dims.device_type = "cpu"
    (by_torchtitan if way.peer else by_fabricamp)(way, work, device)


def measured(name: str, segments: str, work: Work, processes: int) -> dict[str, Any]:
    """Starts the processes of a way; returns its figures, or how it failed."""
    environment = {key: value for key, value in os.environ.items() if key not in (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF")}
    if SEGMENTS[segments]:
        environment[ALLOCATOR] = SEGMENTS[segments]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={processes}",
            __file__,
        ]
        command += [
            "--way",
            name,
            f"--steps={work.steps}",
            f"--batch={work.batch}",
            f"--accumulation={work.accumulation}",
        ]
        ended = subprocess.run(
            [*command, *(["--quick"] if work.quick else [])], env={**environment, OUT: str(out)}, check=False
        )
        found = json.loads(out.read_text()) if out.exists() else {"failed": ended.returncode}
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def about(processes: int) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    versions = {}
    for package in ("torch", "torchtitan", "torchao"):
        versions[package] = metadata.version(package)
    return {
        "device": f"{processes} x {torch.cuda.get_device_name()}" if on_gpu else f"{os.cpu_count()} CPU cores",
        **versions,
        "python": platform.python_version(),
        "date": datetime.now(tz=UTC).date().isoformat(),
    }


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the ratios of fabricamp's medians to those of "torchtitan" with the same products and segments."""
    found = []
    for row in rows:
        way = WAYS[row["way"]]
        base = "torchtitan fp8" if way.fp8 else "torchtitan"
        other = next((one for one in rows if (one["way"], one["segments"]) == (base, row["segments"])), None)
        if way.peer or other is None or "failed" in row or "failed" in other:
            continue
        names = ("tokens_s_gpu", "allocated_gib", "reserved_gib", "device_gib")
        shares = {name: round(row[name] / other[name], 4) for name in names if other[name]}
        found.append({"way": row["way"], "segments": row["segments"], "to": base, **shares})
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, help="a process of this way, by torchrun")
    parser.add_argument(
        "--ways", nargs="+", default=["torchtitan", "fabricamp", "torchtitan fp8", "fabricamp fp8"], choices=WAYS
    )
    parser.add_argument("--segments", nargs="+", default=list(SEGMENTS), choices=SEGMENTS)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny network, wherever it runs: whether it runs at all")
    options = parser.parse_args(arguments)
    work = Work(options.steps, options.batch, options.accumulation, options.quick)
    if options.way is not None:
        train(options.way, work)
        return
    began = time.monotonic()
    turns = [(segments, way) for segments in options.segments for way in options.ways]
    rounds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        first = number % len(turns)
        for segments, way in turns[first:] + turns[:first]:
            if time.monotonic() - began > 60 * options.minutes:
                break
            found = measured(way, segments, work, options.processes)
            rounds.setdefault((segments, way), []).append(found)
            print(way, segments, found, flush=True)
            if options.out is not None:
                rows = [summary(*key, runs) for key, runs in rounds.items()]
                result = {**about(options.processes), **dataclasses.asdict(work), "length": work.length}
                options.out.write_text(json.dumps({**result, "rows": rows, "ratios": ratios(rows)}, indent=1) + "\n")


def summary(segments: str, way: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a way's row: the run with the median rate, and the rates of all."""
    whole = sorted((one for one in runs if "failed" not in one), key=lambda one: one["tokens_s_gpu"])
    chosen = whole[len(whole) // 2] if whole else runs[-1]
    return {"way": way, "segments": segments, **chosen, "rounds": [one.get("tokens_s_gpu") for one in runs]}


if __name__ == "__main__":
    main()
