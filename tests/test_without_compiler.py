"""A fit that compiles nothing imports no compiler, and nothing that other runs need; its numbers are those of torch's own steps.

Processes start without tests/startup, which keeps the compiler out of other tests' processes by itself.
"""

from __future__ import annotations

import json

from tests.distributed.scripts import ROOT, finish, start

NET = """
import json, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from fabricamp import Trainer, TrainingModule
from fabricamp.optimizers import FusedAdam

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=0.1),
}

class Net(TrainingModule):
    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())

torch.manual_seed(1)
data = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
BARE = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}

def loaded():
    return [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
"""

ONE = """
found = {}
net = Net("SGD")
Trainer(max_epochs=1, accelerator="cpu", **BARE).fit(net, DataLoader(data, 4))
found["bare"] = list(sys.modules)
for name in OPTIMIZERS:
    again = Net(name)
    trainer = Trainer(max_epochs=1, accelerator="cpu", default_root_dir=name)
    trainer.fit(again, DataLoader(data, 4))
    trainer.save_checkpoint(name + ".ckpt")
    Trainer(max_epochs=2, accelerator="cpu", **BARE).fit(Net(name), DataLoader(data, 4), ckpt_path=name + ".ckpt")
found["default"] = list(sys.modules)

import torch._dynamo
def by_hand(step):
    other = Net("SGD")
    optimizer = other.configure_optimizers()
    for x, y in DataLoader(data, 4):
        step(other, optimizer, x, y)
    return other

def step(other, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(other.net(x).float(), y).backward()
    optimizer.step()

def equal(one, two):
    return [torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True)]

found["torch's own steps"] = equal(net, by_hand(step))
found["compiled steps"] = equal(net, by_hand(torch.compile(step, backend="eager")))
again = Net("SGD")
Trainer(max_epochs=1, accelerator="cpu", **BARE).fit(again, DataLoader(data, 4))
found["a fit with it"] = equal(net, again)
print(json.dumps(found))
"""

RANKS = """
for strategy in ("ddp", "delayed_ddp"):
    for level in ("O0", "O1", "O2"):
        for name in OPTIMIZERS:
            trainer = Trainer(max_steps=2, accelerator="cpu", devices=2, strategy=strategy, precision=level, **BARE)
            trainer.fit(Net(name), DataLoader(data, 4))
            found = [strategy, level, name, trainer.global_rank, trainer.global_step, loaded()]
            sys.stdout.write(json.dumps(found) + "\\n")  # print() may write the end of the line apart, after the other rank's line
            sys.stdout.flush()
"""

HEAVY = {
    "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.onnx", "omegaconf", "yaml", "cupy", "torchmetrics", "sklearn", "scipy", "pandas", "matplotlib", "mlflow",
    "wandb", "comet_ml", "lightning", "pytorch_lightning", "torchvision", "IPython", "optuna", "fabricamp.apex", "fabricamp.runs",
    "fabricamp.config", "fabricamp.commands",
}  # fmt: skip
DRAWING = {"rich", "tensorboard", "google", "absl"}
"""What draws the table of the layers and writes TensorBoard's file."""


def within(modules, names):
    return sorted(one for one in names if any(name == one or name.startswith(f"{one}.") for name in modules))


def test_a_plain_fit_imports_no_compiler_and_nothing_that_only_other_runs_need(tmp_path):
    (tmp_path / "train.py").write_text(NET + ONE)
    code, out, err = finish(start(tmp_path, "train.py", PYTHONPATH=str(ROOT)))
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert within(found["bare"], HEAVY | DRAWING) == []
    assert within(found["default"], HEAVY) == []
    assert all(found["torch's own steps"])
    assert all(found["compiled steps"])
    assert all(found["a fit with it"])


def test_ranks_of_ddp_and_delayed_ddp_import_no_compiler(tmp_path):
    (tmp_path / "train.py").write_text(NET + RANKS)
    command = ("-m", "torch.distributed.run", "--nproc_per_node=2", "train.py")
    code, out, err = finish(start(tmp_path, *command, PYTHONPATH=str(ROOT)))
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    assert len(found) == 2 * 3 * 3 * 2
    assert all(steps == 2 for *_, steps, _ in found)
    assert [row for row in found if row[-1]] == []
