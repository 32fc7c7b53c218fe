"""Wall time of a bf16 training step: by hand, by hand with torch.compile, through Lightning, and through the Trainer.

    python benchmarks/fastest.py [--only gpt2-16,...] [--targets] [--rounds 5] [--minutes 8] [--out results.json] [--quick]

By hand a step is bf16 autocast, or bf16 weights with fp32 masters, clipping at norm 1 and torch's fused AdamW: eager, by
``torch.compile(network)``, and by its mode "reduce-overhead", which has CUDA graphs; the whole compiled step of the MLP is captured
as a bare graph too.  Lightning runs at "bf16-mixed".  The Trainer runs at O4 (bf16 autocast) and O5 (bf16 weights with fp32
masters), with FusedAdam: eager, as one CUDA graph, compiled, and both.  Trainer and Lightning have everything on: bar, logger, a
checkpoint callback with nothing to save, a ``self.log`` in each step.  All share network, loss and loader (batches in pinned
memory, copied without a wait).

Rounds are interleaved; each way has a median and quartiles, and compiles anew in each round, before the measured steps.  Round 0
checks that the ways learn alike: each makes 200 steps, and the mean loss of the last 100 is kept; its time is kept apart, as its
steps copy their losses.  "cold-24" is another measure: the first step of a GPT of 24 layers, compilation included, in a fresh
process with empty caches.

``--targets`` leaves out the ways that no target needs, and after round 0 those that were 10 % slower than the fastest of their
side (by hand, or the Trainer).  With ``--out``, what the file has is left out: a run may be cut, and ends by itself after
``--minutes``; give the same command again for the rest, on the same card.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import io
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpt_curves import Sizes, torch_loss
from benchmarks.loop import CASES as SMALLER
from benchmarks.loop import QUICK, WARM_UP, Case, Stopwatch, module_of, predict
from fabricamp import Callback, CudaGraph, Float8, Trainer, TrainingModule
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.ops import fused_cross_entropy
from fabricamp.optimizers import FusedAdam

LEARNT = 200
"""Steps of the first round, of which the last half gives the mean loss."""


class Run(NamedTuple):
    """What one run of one way gives: seconds of the measured steps, and the losses of all steps on the device."""

    seconds: float
    losses: list[torch.Tensor]


def gpt(sizes):
    first = functools.cache(lambda: sizes.network(torch.device("cpu"), loss=torch_loss))
    return lambda: copy.deepcopy(first())


def words(sizes):
    return lambda: (torch.randint(0, 50257, (sizes.batch, sizes.context + 1)),)


LARGE = Sizes(50304, context=2048, layers=24, width=2048, heads=16, batch=4)
DEEP = Sizes(50304, context=512, layers=24, width=1024, heads=16, batch=8)
CASES = {
    "gpt2-16": SMALLER["gpt2-16"],
    "resnet50-64": SMALLER["resnet50-64"],
    "resnet50-256": SMALLER["resnet50-256"],
    "mlp": SMALLER["mlp"].replayed(),
    "gpt-1.3b": Case(gpt(LARGE), words(LARGE), predict, 10),
}
# The same network, with the ways in FP8 and those that they are compared with.
CASES["gpt-1.3b-fp8"] = CASES["gpt-1.3b"]
# The Trainer's network has the package's cross-entropy, and by hand it has torch's.
CASES["gpt-1.3b-fp8-loss"] = CASES["gpt-1.3b"]


# -- by hand -----------------------------------------------------------------------------------------------------------------------


class Halves:
    """bf16 weights with fp32 masters: the network is cast, and the optimizer has fp32 copies of its parameters."""

    def __init__(self, network):
        network.bfloat16()
        for layer in network.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.float()
        self.weights = list(network.parameters())
        self.masters = [one.detach().float().clone().requires_grad_() for one in self.weights]

    def take_gradients(self):
        """Makes the masters' gradients, and frees the weights'."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None

    @torch.no_grad()
    def give_weights(self):
        """Rounds the masters into the network."""
        torch._foreach_copy_(self.weights, self.masters)


def to_float8(network, recipe):
    """Gives the linear layers of the blocks FP8 products, as torchao's page shows."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(network, config=config, module_filter_fn=lambda _, name: name != "head")


def by_hand(case, *, keep_losses, halves=False, graph=False, float8=None, blocks=False, **compile_options):
    """A loop as one writes it; ``compile_options``: those of torch.compile, none for an eager step; ``graph``: a bare graph.

    ``float8``: a recipe of torchao; ``blocks``: each block is compiled, instead of the network.
    """
    torch.manual_seed(0)
    network = case.network().cuda()
    if float8 is not None:
        to_float8(network, float8)
    pairs = Halves(network) if halves else None
    trained = pairs.masters if pairs else list(network.parameters())
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True, capturable=graph)
    if blocks:
        for block in network.blocks:
            block.compile(**compile_options)
    called = torch.compile(network, **compile_options) if compile_options and not blocks else network
    losses = []

    def step(*batch):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=not halves):
            loss = case.loss(called, *(one.bfloat16() if halves and one.is_floating_point() else one for one in batch))
        loss.backward()
        if pairs:
            pairs.take_gradients()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if pairs:
            pairs.give_weights()
        return loss.detach()

    batches = case.loader(WARM_UP + case.steps).batches
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if graph else contextlib.nullcontext():
        captured = None
        for number, batch in enumerate(batches):
            if number == WARM_UP:
                if graph:
                    inputs = [one.cuda() for one in batch]
                    captured = torch.cuda.CUDAGraph()
                    optimizer.zero_grad()
                    with torch.cuda.graph(captured, stream=stream):
                        loss = step(*inputs)
                torch.cuda.synchronize()
                start = time.perf_counter()
            if captured is None:
                loss = step(*[one.cuda(non_blocking=True) for one in batch])
                if keep_losses:
                    losses.append(loss.clone())  # torch's own graphs overwrite what they returned
                continue
            for own, one in zip(inputs, batch, strict=True):
                own.copy_(one, non_blocking=True)
            captured.replay()
            if keep_losses:
                losses.append(loss.clone())
        torch.cuda.synchronize()
    return Run(time.perf_counter() - start, losses)


# -- through trainers --------------------------------------------------------------------------------------------------------------


def keeping_losses(module):
    """Gives the module a hook after each batch, and returns the list to which it adds the losses."""
    losses = []

    def on_train_batch_end(outputs, *_):
        losses.append(outputs["loss"].detach().clone())

    module.on_train_batch_end = on_train_batch_end
    return losses


def ours(case, precision, *, keep_losses, fused_loss=False, **options):
    """The Trainer with everything on; ``fused_loss``: a GPT has the package's cross-entropy, as in the example, not torch's."""
    watch = Stopwatch(case.steps)
    # It is asked at each step, and writes nothing, also after the last step: that would be 20 GB of the largest network.
    checkpoints = ModelCheckpoint(every_n_train_steps=10**6)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="gpu",
            devices=1,
            precision=precision,
            max_epochs=1,
            default_root_dir=folder,
            callbacks=[watch, checkpoints],
            gradient_clip_val=1.0,
            **options,
        )
        optimizer = partial(FusedAdam, lr=1e-4, weight_decay=0.01)
        module = module_of(case, TrainingModule, optimizer)
        if fused_loss:
            module.network.loss = partial(fused_cross_entropy, in_place=True)
        losses = keeping_losses(module) if keep_losses else []
        trainer.fit(module, case.loader(WARM_UP + case.steps))
    return Run(watch.seconds, losses)


def ours_in_fp8(recipe, case, **options):
    """The Trainer at "fp8" with a recipe, blocks compiled; the layers by hand are the same ones."""
    return ours(case, Float8(recipe, include=["*.blocks"]), compile="blocks", **options)


def lightnings(case, *, keep_losses):
    """Lightning's Trainer with everything on."""
    import lightning.pytorch as pl

    class Watch(pl.Callback):
        __init__ = Stopwatch.__init__
        on_train_batch_end = Stopwatch.on_train_batch_end

    watch = Watch(case.steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed",
            max_epochs=1,
            default_root_dir=folder,
            callbacks=[watch],
            gradient_clip_val=1.0,
        )
        adamw = partial(torch.optim.AdamW, lr=1e-4)  # Lightning refuses to clip for a fused one at bf16-mixed
        module = module_of(case, pl.LightningModule, adamw)
        losses = keeping_losses(module) if keep_losses else []
        trainer.fit(module, case.loader(WARM_UP + case.steps))
    return Run(watch.seconds, losses)


WAYS = {
    "by hand": by_hand,
    "by hand, compiled": partial(by_hand, dynamic=False),
    "by hand, compiled, reduce-overhead": partial(by_hand, mode="reduce-overhead", dynamic=False),
    "by hand, bf16 weights, compiled": partial(by_hand, halves=True, dynamic=False),
    "by hand, bf16 weights, compiled, reduce-overhead": partial(
        by_hand, halves=True, mode="reduce-overhead", dynamic=False
    ),
    "by hand, compiled, bare graph": partial(by_hand, graph=True, dynamic=False),
    "Lightning": lightnings,
    "fabricamp O4": partial(ours, precision="O4"),
    "fabricamp O4, graph": partial(ours, precision="O4", cuda_graph=True),
    "fabricamp O4, compiled": partial(ours, precision="O4", compile=True),
    "fabricamp O4, compiled, graph": partial(ours, precision="O4", compile=True, cuda_graph=True),
    "fabricamp O4, compiled, graph, kernels by time": partial(
        ours, precision="O4", compile={"options": {"deterministic": False}}, cuda_graph=True
    ),
    "fabricamp O4, compiled, graph, 8 steps a launch": partial(
        ours, precision="O4", compile=True, cuda_graph=CudaGraph(steps=8)
    ),
    "fabricamp O5": partial(ours, precision="O5"),
    "fabricamp O5, graph": partial(ours, precision="O5", cuda_graph=True),
    "fabricamp O5, compiled, graph": partial(ours, precision="O5", compile=True, cuda_graph=True),
    "fabricamp O5, compiled, graph, kernels by time": partial(
        ours, precision="O5", compile={"options": {"deterministic": False}}, cuda_graph=True
    ),
    "fabricamp O5, blocks": partial(ours, precision="O5", compile="blocks"),
    "fabricamp O5, blocks, graph": partial(ours, precision="O5", compile="blocks", cuda_graph=True),
}
FP8_BY_HAND = {"halves": True, "dynamic": False}
for recipe in ("tensorwise", "rowwise"):
    WAYS[f"by hand, bf16 weights, fp8 {recipe}, compiled"] = partial(by_hand, float8=recipe, **FP8_BY_HAND)
    WAYS[f"by hand, bf16 weights, fp8 {recipe}, blocks"] = partial(by_hand, float8=recipe, blocks=True, **FP8_BY_HAND)
    WAYS[f"fabricamp fp8 {recipe}, blocks"] = partial(ours_in_fp8, recipe)
    WAYS[f"fabricamp fp8 {recipe}, blocks, fused loss"] = partial(ours_in_fp8, recipe, fused_loss=True)
COMPILED_BY_HAND = tuple(
    name for name in WAYS if name.startswith("by hand,") and "bare graph" not in name and " fp8 " not in name
)
OF_THE_MLP = ("by hand, compiled, bare graph", "fabricamp O4, compiled, graph, 8 steps a launch")
BOTH = tuple(
    name for name in WAYS if name.startswith("fabricamp") and "compiled, graph" in name and name not in OF_THE_MLP
)
ALL = tuple(name for name in WAYS if name not in OF_THE_MLP and "blocks" not in name and " fp8 " not in name)
TARGETS = {
    "gpt2-16": (*COMPILED_BY_HAND, *BOTH),
    "resnet50-64": (*COMPILED_BY_HAND, *BOTH),
    "resnet50-256": (*COMPILED_BY_HAND, *BOTH),
    "mlp": (*OF_THE_MLP, "fabricamp O4, compiled, graph"),
    # Each step of it keeps the GPU at work for 150 ms, so CUDA graphs do not make it faster.
    "gpt-1.3b": ("by hand, compiled", "by hand, bf16 weights, compiled", "fabricamp O5, blocks"),
}
TARGETS["gpt-1.3b-fp8"] = (
    "by hand, bf16 weights, compiled",
    "fabricamp O5, blocks",
    *(name for name in WAYS if " fp8 " in name and not name.endswith("fused loss")),
)
TARGETS["gpt-1.3b-fp8-loss"] = tuple(
    name for name in WAYS if (name.startswith("by hand") and " fp8 " in name) or name.endswith("fused loss")
)
"""The ways that a target compares: the fastest by hand with the fastest of the Trainer."""
OTHERS = dict.fromkeys(("gpt2-16", "resnet50-64", "resnet50-256"), ALL) | {
    "mlp": ("by hand, compiled, reduce-overhead", "fabricamp O4, graph"),
    "gpt-1.3b": ("by hand", *COMPILED_BY_HAND, "fabricamp O5", "fabricamp O5, blocks, graph"),
    "gpt-1.3b-fp8": (),
    "gpt-1.3b-fp8-loss": (),
}


# -- the first step of a deep network ----------------------------------------------------------------------------------------------


class FirstStep(Callback):
    """Times the first step of a fit."""

    def on_train_batch_start(self, *_):
        """Starts."""
        torch.cuda.synchronize()
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_):
        """Stops."""
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.start


def cold_by_hand(case):
    network = case.network().cuda()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    called = torch.compile(network)
    (batch,) = case.loader(1).batches
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.autocast("cuda", torch.bfloat16):
        loss = case.loss(called, *(one.cuda() for one in batch))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def cold_ours(case, part):
    watch = FirstStep()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="gpu", devices=1, precision="O4", max_steps=1, callbacks=[watch], gradient_clip_val=1.0, compile=part, **off
    )  # fmt: skip
    trainer.fit(module_of(case, TrainingModule, partial(FusedAdam, lr=1e-4)), case.loader(1))
    return watch.seconds


COLD_WAYS = {
    "by hand, compiled": cold_by_hand,
    "fabricamp O4, compiled": partial(cold_ours, part=True),
    "fabricamp O4, blocks": partial(cold_ours, part="blocks"),
}
TARGETS["cold-24"] = ("by hand, compiled", "fabricamp O4, blocks")
OTHERS["cold-24"] = ("fabricamp O4, compiled",)
COLD = Case(gpt(DEEP), words(DEEP), predict, 1)


def cold(way, *, quick):
    """Seconds of the first step of a way in a fresh process, with empty caches of inductor and triton."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, __file__, "--cold", way, *(["--quick"] if quick else [])]
        done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    return float(done.stdout.strip().rpartition("\n")[2])


# -- rounds ------------------------------------------------------------------------------------------------------------------------


def measure(case, way, *, learns):
    """Milliseconds a step, the peaks of allocated and reserved memory in GiB, and the mean loss of the last 100 of 200 steps.

    The loss is None unless it ``learns``.
    """
    if learns:
        case = case._replace(steps=max(case.steps, LEARNT - WARM_UP))
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.compiler.reset()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = WAYS[way](case, keep_losses=learns)
    loss = torch.stack(run.losses[LEARNT // 2 : LEARNT]).double().mean().item() if learns else None
    peaks = [round(peak / 2**30, 2) for peak in (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())]
    return round(1000 * run.seconds / case.steps, 4), peaks, loss


def measure_once(row, way, number, *, quick):
    """Measures one way in one round and writes its figures into ``row``; an error is written there too."""
    network = row["network"]
    begun = time.monotonic()
    peaks = loss = None
    try:
        if network == "cold-24":
            milliseconds = round(1000 * cold(way, quick=quick), 1)
        else:
            case = QUICK if quick else CASES[network]
            # What keeps losses looks at each step, which a launch of several steps does not allow.
            learns = number == 0 and not quick and "steps a launch" not in way
            milliseconds, peaks, loss = measure(case, way, learns=learns)
    except (ImportError, RuntimeError, ValueError) as error:
        row["missing"][way] = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(network, way, row["missing"][way], flush=True)
        return
    if number == 0:
        row["round_0_ms"][way] = milliseconds
        if loss is not None:
            row["losses"][way] = round(loss, 5)
    else:
        row["wall_ms_of_rounds"].setdefault(way, []).append(milliseconds)
        if peaks is not None:
            row["peak_gib"][way] = peaks
    print(network, way, milliseconds, peaks or "", loss or "", f"{time.monotonic() - begun:.0f} s", flush=True)


def is_slow(row, way):
    """Whether round 0 was 10 % slower than the fastest of its side."""
    first = row["round_0_ms"]
    by_hand = way.startswith("by hand")
    return first[way] > 1.1 * min(first[other] for other in first if other.startswith("by hand") == by_hand)


def fill(row, ways, rounds, end, *, quick, targets, save):
    """Measures what ``row`` lacks, round by round; returns whether it was all done before ``end``."""
    first = 1 if row["network"] == "cold-24" else 0
    longest = {}
    for number in range(first, rounds + 1):
        for way in ways:
            done = way in row["round_0_ms"] if number == 0 else len(row["wall_ms_of_rounds"].get(way, [])) >= number
            if way in row["missing"] or done:
                continue
            # In FP8 each way is a row of its own, also the slow ones.
            drops = targets and "-fp8" not in row["network"]
            if drops and number and first == 0 and is_slow(row, way):
                continue
            if time.monotonic() + longest.get(way, 0.0) > end:
                return False
            begun = time.monotonic()
            measure_once(row, way, number, quick=quick)
            longest[way] = time.monotonic() - begun
            settle(row)
            save()
    return True


def settle(row):
    """Writes medians and quartiles of the rounds."""
    for name, values in row["wall_ms_of_rounds"].items():
        if not values:
            continue
        low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else 3 * values
        row["wall_ms"][name] = round(middle, 4)
        row["quartiles"][name] = [round(low, 4), round(high, 4)]


def empty_row(network):
    names = ("wall_ms", "quartiles", "peak_gib", "losses", "missing", "round_0_ms", "wall_ms_of_rounds")
    return {"network": network, **{name: {} for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TARGETS))
    parser.add_argument("--targets", action="store_true", help="only the ways that a target compares")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing that would end later")
    parser.add_argument("--out", type=Path, help="write the results as JSON too, after each figure")
    parser.add_argument("--quick", action="store_true", help="a few steps of a small network: shows that it works")
    parser.add_argument("--cold", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("fabricamp", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if arguments.cold:
        print(COLD_WAYS[arguments.cold](QUICK if arguments.quick else COLD))
        return
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(datetime.now(UTC).date()),
        "command": f"python benchmarks/fastest.py --rounds {arguments.rounds}",
    }
    rows = []
    if arguments.out and arguments.out.exists():
        known = json.loads(arguments.out.read_text())
        if known["device"] != facts["device"]:
            raise SystemExit(
                f"{arguments.out} is of {known['device']}, and this is {facts['device']}; give another --out"
            )
        rows = [{**empty_row(row["network"]), **row} for row in known["rows"]]

    def save():
        if arguments.out:
            arguments.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")

    end = time.monotonic() + 60 * arguments.minutes
    for network in arguments.only.split(","):
        if not any(row["network"] == network for row in rows):
            rows.append(empty_row(network))
        row = next(row for row in rows if row["network"] == network)
        ways = TARGETS[network] if arguments.targets else dict.fromkeys([*TARGETS[network], *OTHERS[network]])
        done = fill(
            row, tuple(ways), arguments.rounds, end, quick=arguments.quick, targets=arguments.targets, save=save
        )
        print(network, json.dumps(row["wall_ms"]), flush=True)
        if not done:
            print("not all is measured: give the same command again", flush=True)
            return
    save()


if __name__ == "__main__":
    main()
