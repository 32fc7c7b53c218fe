"""Measures what passes from the start of a process to the end of a fit of ten steps on a CPU, whole processes in turn.

    python benchmarks/start.py [--before TREE] [--lightning PYTHON] [--python PYTHON] [--rounds 9] [--out results.json]

Each way is a process of its own: ``import torch`` alone; fabricamp's fit with a Trainer's defaults (logger, progress bar,
checkpoint, table of the layers) and with all of them off, here and in the tree ``--before``; and Lightning's fit with its defaults,
in an environment of its own, whose interpreter is ``--lightning``.  ``--python`` is that of the others, this one by default: an
environment with the package's own dependencies alone is what a user has.  The network has two layers and ``torch.optim.SGD``.

Rounds take the ways in turn, after one of each that writes bytecode.  Seconds of the wall and of processors (on a machine that
others use, the latter are what the process itself costs) have minimum, median and quartiles; modules are those of ``sys.modules``
at the end.
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rounds as of_rounds

HERE = Path(__file__).resolve().parents[1]
TORCH = "import torch"
FIT = """
from {package} import LightningModule, Trainer
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = TensorDataset(torch.randn(80, 32), torch.randint(0, 2, (80,)))
Trainer(accelerator="cpu", max_epochs=1, log_every_n_steps=10{options}).fit(Net(), DataLoader(data, 8))
"""
BARE = ", logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False"
COUNT = "\nimport sys\nprint('modules', len(sys.modules), int('torch._dynamo' in sys.modules))\n"


def ways(python, before, lightning):
    """Returns by name: the interpreter, the tree of the package, and the script."""
    found = {"import torch": (python, None, TORCH)}
    for tree, name in ((HERE, "fabricamp"), (before, "fabricamp, before")):
        if tree is not None:
            found[name] = (python, tree, FIT.format(package="fabricamp", options=""))
            found[f"{name}, all off"] = (python, tree, FIT.format(package="fabricamp", options=BARE))
    if lightning is not None:
        found["Lightning"] = (lightning, None, FIT.format(package="lightning.pytorch", options=""))
    return found


def measured(python, tree, script):
    """Returns seconds of the wall, seconds of processors, and modules of one process, and whether it has torch's compiler."""
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    variables["CUDA_VISIBLE_DEVICES"] = ""
    if tree is not None:
        variables["PYTHONPATH"] = str(tree)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "fit.py").write_text(script + COUNT)
        with Path(folder, "out").open("w+") as out:
            began = time.perf_counter()
            process = subprocess.Popen(
                [python, "fit.py"], cwd=folder, env=variables, stdout=out, stderr=subprocess.STDOUT
            )
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - began
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            text = out.read()
    if process.returncode != 0:
        sys.exit(f"{python}: {text}")
    modules, compiler = text.rpartition("modules ")[2].split()
    return wall, usage.ru_utime + usage.ru_stime, int(modules), bool(int(compiler))


def spread(values):
    """Returns minimum, median and quartiles."""
    low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else 3 * values
    return {
        "min": round(min(values), 3),
        "median": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
    }


def row(name, runs):
    walls, processors, modules, compiler = zip(*runs, strict=True)
    return {
        "way": name,
        "wall_s": spread(walls),
        "processor_s": spread(processors),
        "modules": max(modules),
        "compiler": any(compiler),
    }


def version_of(python, package):
    asked = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another tree of the package")
    parser.add_argument("--lightning", help="the interpreter of an environment with Lightning and the same torch")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the others")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the results as JSON too")
    arguments = parser.parse_args()
    found = ways(arguments.python, arguments.before, arguments.lightning)
    runs = {name: [] for name in found}
    for number in range(arguments.rounds + 1):
        for name, way in found.items():
            run = measured(*way)
            if number:
                runs[name].append(run)
    rows = [row(name, each) for name, each in runs.items()]
    for one in rows:
        print(one, flush=True)
    about = {
        "device": f"{os.cpu_count()} CPU cores",
        "torch": version_of(arguments.python, "torch"),
        "python": platform.python_version(),
        "date": str(datetime.now(UTC).date()),
        "command": f"python benchmarks/start.py --before TREE --lightning PYTHON --python PYTHON --rounds {arguments.rounds}",
        "load": [round(value, 1) for value in os.getloadavg()],
    }
    if arguments.lightning:
        about["lightning"] = version_of(arguments.lightning, "lightning")
        over = of_rounds.ratio([one[1] for one in runs["fabricamp"]], [one[1] for one in runs["Lightning"]], 0.6)
        about["over_lightning"] = over
        print("processor seconds over Lightning's:", of_rounds.described(over))
    if arguments.out:
        arguments.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
