"""Measures the start of a compiled GPT: cold, with torch's cache on this machine, and from a kept folder, on one rank and on two.

    python benchmarks/compiled_start.py [--before TREE] [--layers 2] [--width 64] [--device cpu] [--ranks 1 2] [--rounds 3]
        [--ways eager cold warm kept] [--part blocks] [--out results.json]

Each way is a run of its own under torchrun, of three steps.  "eager" compiles nothing.  "cold" begins with empty caches of torch.
"warm" has those that "cold" left.  "kept" begins with empty caches, and with the folder of ``Compile(cache=...)`` that a run before
it has filled.  In the tree ``--before``, which has no such option, "kept" is left out.

"first step" is the time from the first batch to the end of its update on rank 0, "start" that from the start of all processes to
there.  "compilation" is what all processes took of processors, the C++ compiler and workers included, less those of the eager run
with as many ranks.  Figures are minimum and median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
WAYS = ("eager", "cold", "warm", "kept")
STEPS = 3


def fit(arguments):
    """Fits in this process, a rank; rank 0 prints when its first batch began and when its update had ended."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from fabricamp import Callback, Compile, Trainer, TrainingModule

    class Block(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.heads = width // 32
            self.norm, self.norm_of_mlp = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.of_input, self.of_heads = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

        def forward(self, x):
            rows, length, width = x.shape
            parts = self.of_input(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.of_heads(attended.transpose(1, 2).reshape(rows, length, width))
            return x + self.down(F.gelu(self.up(self.norm_of_mlp(x))))

    class GPT(TrainingModule):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(512, arguments.width)
            self.blocks = torch.nn.ModuleList(Block(arguments.width) for _ in range(arguments.layers))
            self.head = torch.nn.Linear(arguments.width, 512)

        def training_step(self, batch, batch_idx):
            x = self.embedding(batch[0])
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), batch[0][:, 1:].flatten())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Clock(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.began = time.time()

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 0 and trainer.is_global_zero:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                print("FIRST", self.began, time.time(), flush=True)

    options = {} if arguments.keep is None else {"cache": arguments.keep}
    compiled = {} if arguments.fit == "eager" else {"compile": Compile(arguments.part, **options)}
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        max_steps=STEPS,
        accelerator=arguments.device,
        devices=ranks,
        strategy="delayed_ddp" if ranks > 1 else "single",
        precision="O4" if arguments.device == "gpu" else "O0",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[Clock()],
        **compiled,
    )
    data = TensorDataset(torch.randint(0, 512, (4 * STEPS * ranks, arguments.length)))
    trainer.fit(GPT(), DataLoader(data, 4))


def measured(tree, way, ranks, arguments, caches, keep):
    """Returns seconds of the first step and of the start, and seconds of processors of all processes, of one run."""
    variables = dict(os.environ)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    variables |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    shape = [f"--{name}={getattr(arguments, name)}" for name in ("layers", "width", "length", "device", "part")]
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *launcher, __file__, "--fit", way, *shape]
    command += [] if keep is None else ["--keep", str(keep)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.time()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    batch, end = map(float, next(line for line in done.stdout.splitlines() if line.startswith("FIRST")).split()[1:])
    processors = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"first_step_s": end - batch, "start_s": end - began, "processor_s": processors}


def round_of(tree, ranks, arguments, folder, *, keeps):
    """Returns the measurements of each way, once."""
    caches, keep = folder / "caches", folder / "kept"
    found = {}
    for way in arguments.ways:
        if way == "kept" and not keeps:
            continue
        if way == "cold" or way == "kept":
            shutil.rmtree(caches, ignore_errors=True)
        if way == "kept" and not keep.exists():
            measured(tree, "cold", ranks, arguments, caches, keep)
            shutil.rmtree(caches, ignore_errors=True)
        found[way] = measured(tree, way, ranks, arguments, caches, keep if way == "kept" else None)
    return found


def spread(values):
    return {"min": round(min(values), 2), "median": round(statistics.median(values), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another tree of the package")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--part", default="blocks")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the results as JSON too, after each round")
    parser.add_argument("--fit", help=argparse.SUPPRESS)
    parser.add_argument("--keep", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fit:
        fit(arguments)
        return
    trees = {"fabricamp": HERE} | ({"before": arguments.before} if arguments.before else {})
    runs: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(arguments.rounds):
            for ranks in arguments.ranks:
                for tree, path in trees.items():
                    folder = Path(name, tree.replace(" ", "_"), str(ranks))
                    for way, run in round_of(path, ranks, arguments, folder, keeps=tree != "before").items():
                        runs.setdefault((tree, ranks, way), []).append(run)
                        print(tree, ranks, way, run, flush=True)
            rows = rows_of(runs)
            if arguments.out:
                arguments.out.write_text(json.dumps({**about(arguments), "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(row)


def rows_of(runs):
    """Returns a row for each tree, number of ranks and way."""
    rows = []
    for (tree, ranks, way), each in runs.items():
        row = {"tree": tree, "ranks": ranks, "way": way}
        row |= {name: spread([run[name] for run in each]) for name in each[0]}
        eager = runs.get((tree, ranks, "eager"))
        if eager and way != "eager":
            paired = zip(each, eager, strict=False)
            row["compilation_s"] = spread([one["processor_s"] - other["processor_s"] for one, other in paired])
        rows.append(row)
    return rows


def about(arguments):
    import torch

    cuda = arguments.device == "gpu"
    before = " --before TREE" if arguments.before else ""
    shape = f"--layers {arguments.layers} --width {arguments.width} --length {arguments.length}"
    shape += f" --device {arguments.device} --part {arguments.part}"
    return {
        "device": torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} CPU cores",
        "network": f"GPT, {arguments.layers} layers, width {arguments.width}, {arguments.part}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(datetime.now(UTC).date()),
        "load": [round(value, 1) for value in os.getloadavg()],
        "command": f"python benchmarks/compiled_start.py{before} {shape} --rounds {arguments.rounds}",
    }


if __name__ == "__main__":
    main()
