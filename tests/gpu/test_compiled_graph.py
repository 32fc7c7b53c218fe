"""A step that is compiled by inductor and then captured: the bits of compiled steps, at every level and part."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fabricamp import Callback, Compile, ConfigError, CudaGraph
from fabricamp.data import ResidentLoader
from fabricamp.optimizers import FusedAdam
from tests.small import Classifier, data, loader, quiet_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="torch's default backend needs a C compiler"),
]


@pytest.fixture(autouse=True)
def _no_code_of_earlier_tests():
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def inner(self, x):
        p = 0.0 if self.kind == "without dropout" else 0.1
        return F.dropout(self.down(F.gelu(self.up(self.norm(x)))), p, self.training)

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.kind == "checkpoint" else self.inner(x))


class Deep(Classifier):
    """Blocks of one class; ``kind`` "frozen" freezes one of them, "checkpoint" has activation checkpointing in each.

    torch's compiler draws other numbers for dropout than torch.
    """

    def __init__(self, kind=""):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), *(Block(kind) for _ in range(3)), nn.Linear(32, 3))
        if kind == "frozen":
            self.net[1].requires_grad_(False)

    def configure_optimizers(self):
        optimizer = FusedAdam(self.parameters(), lr=1e-2, eps=1e-4)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.05 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Runs(Callback):
    """What the steps ran as, and their losses."""

    def __init__(self):
        self.ways, self.losses = set(), []

    def holds_at(self, global_step):
        return float("inf")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ways.add(trainer.state.runs_as)
        self.losses.append(outputs["loss"])


def fit(compiled, graph, module=None, batches=None, **options):
    runs = Runs()
    module = module or Deep()
    given = {"accelerator": "gpu", "max_epochs": 3, "gradient_clip_val": 1.0, "log_every_n_steps": 8, **options}
    torch.manual_seed(3)
    trainer = quiet_trainer(compile=compiled, cuda_graph=graph, callbacks=[runs], **given)
    trainer.fit(module, batches or loader(132, 8), loader(20, 8))  # the last batches are shorter
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return [one.tolist() for one in module.parameters()], torch.stack(runs.losses).tolist(), values, runs.ways


@pytest.mark.parametrize(
    ("part", "precision"),
    [
        *(("step", precision) for precision in ("O0", "O1", "O4", "bf16-true")),
        *(("modules", precision) for precision in ("O2", "O5")),
        *(("blocks", precision) for precision in ("O1", "O3", "O5")),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_bits_are_those_of_compiled_steps(part, precision, accumulate):
    options = {"precision": precision, "accumulate_grad_batches": accumulate}
    eager = fit(Compile(part, fullgraph=True), False, **options)
    torch.compiler.reset()
    captured = fit(Compile(part, fullgraph=True), CudaGraph(warmup=4, check_every=5), **options)
    assert captured[:3] == eager[:3]
    assert "graph" in captured[3]


@pytest.mark.parametrize("kind", ["frozen", "checkpoint"])
def test_blocks_that_are_frozen_or_checkpointed(kind):
    found = []
    for graph in (False, CudaGraph(warmup=4)):
        torch.compiler.reset()
        found.append(fit(Compile("blocks", fullgraph=True), graph, Deep(kind), precision="O5")[:3])
    assert found[0] == found[1]


def test_several_steps_a_launch():
    found = []
    for graph in (False, CudaGraph(warmup=4, steps=4)):
        torch.compiler.reset()
        batches = ResidentLoader(*data(128).tensors, batch_size=8)
        found.append(fit(Compile("modules"), graph, batches=batches, precision="O5")[:2])
    assert found[0] == found[1]


def test_evaluation_is_compiled_and_captured_if_asked_for():
    found = []
    for graph in (False, CudaGraph(warmup=3)):
        torch.compiler.reset()
        found.append(fit(Compile("blocks", evaluation=True), graph, precision="O5")[:3])
    assert found[0] == found[1]


def test_what_the_user_compiled_is_captured():
    def compiled():
        module = Deep()
        # As Compile does: by torch's defaults full batches run by other code once there was a short one.
        module.net.compile(dynamic=False, options={"deterministic": True})
        return module

    found = []
    for graph in (False, CudaGraph(warmup=4)):
        torch.compiler.reset()
        found.append(fit(False, graph, compiled(), precision="O5"))
    assert found[0][:3] == found[1][:3]
    assert "graph" in found[1][3]


def test_graphs_of_torchs_own_are_refused():
    with pytest.raises(ConfigError, match="mode='reduce-overhead' makes torch capture CUDA graphs of its own"):
        quiet_trainer(accelerator="gpu", compile={"mode": "reduce-overhead"}, cuda_graph=True)


def test_a_compiled_step_is_close_to_an_eager_one():
    begun = torch.cat([one.flatten() for one in Deep().parameters()])
    ends = [
        torch.cat(
            [torch.tensor(one).flatten() for one in fit(compiled, graph, Deep("without dropout"), precision="O0")[0]]
        )
        for compiled, graph in ((False, False), (True, False), (True, CudaGraph(warmup=4)))
    ]
    assert (ends[1] - ends[0]).norm() < 1e-3 * (ends[0] - begun).norm()
    assert torch.equal(ends[1], ends[2])
