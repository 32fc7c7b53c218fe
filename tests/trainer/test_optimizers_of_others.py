"""Other packages' optimizers: stepped as by hand, on fp32 masters, with skipped steps and checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import Callback, OptLevel, TrainingModule
from tests.small import data, quiet_trainer


class Signs(torch.optim.Optimizer):
    """A typical optimizer of a user: it has its own kinds of state and no code for precision."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                state["steps"] = state.get("steps", 0) + 1
                mean.lerp_(parameter.grad, 0.1)
                parameter.add_(mean.sign(), alpha=-group["lr"])


OPTIMIZERS = {"Signs": Signs, "Muon": lambda parameters: torch.optim.Muon(parameters, lr=0.02)}


class Net(TrainingModule):
    def __init__(self, optimizer):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 3, bias=False))
        self.optimizer = optimizer
        self.updated = set()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.updated |= {one.dtype for group in self.trainer.optimizers[0].param_groups for one in group["params"]}

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


class Spoils(Callback):
    """Makes the gradients of one step infinite."""

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == 3:
            loss.register_hook(lambda gradient: gradient * float("inf"))


def batches():
    x, y = data(48).tensors
    return [*zip(x.split(4), y.split(4), strict=True)]


def flat(module):
    return torch.cat([one.detach().flatten() for one in module.parameters()])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_it_trains_what_a_loop_by_hand_trains(level, optimizer):
    """Steps with overflow are skipped; for half weights the optimizer gets fp32 masters."""
    scaled = level in ("O1", "O2")
    module = Net(optimizer)
    twin, before = copy.deepcopy(module), flat(module)
    updates = twin.configure_optimizers()
    for number, batch in enumerate(batches()):
        updates.zero_grad()
        twin.training_step(batch, 0).backward()
        if not scaled or number != 3:
            updates.step()
    trainer = quiet_trainer(
        max_epochs=1,
        precision=OptLevel(level, max_loss_scale=256.0) if scaled else level,
        callbacks=[Spoils()] if scaled else [],
    )
    trainer.fit(module, batches())
    assert module.updated == {torch.float32}
    assert (trainer.global_step, trainer.skipped_steps) == (12, int(scaled))
    if optimizer == "Signs":
        steps = {state["steps"] for state in trainer.optimizers[0].state.values()}
        assert steps == {11 if scaled else 12}
    apart = (flat(module) - flat(twin)).norm() / (flat(twin) - before).norm()
    assert apart < {"O0": 1e-6, "O1": 0.2, "O2": 0.2, "O4": 0.4, "O5": 0.4}[level]  # Muon itself rounds to bf16


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_bit_for_bit(level, optimizer, tmp_path):
    ends = []
    for cut in (False, True):
        module, options = Net(optimizer), {}
        if cut:
            trainer = quiet_trainer(max_steps=5, precision=level)
            trainer.fit(module, batches())
            trainer.save_checkpoint(tmp_path / "file.ckpt")
            module, options = Net(optimizer), {"ckpt_path": tmp_path / "file.ckpt"}
        quiet_trainer(max_steps=10, precision=level).fit(module, batches(), **options)
        ends.append(flat(module))
    assert torch.equal(*ends)
