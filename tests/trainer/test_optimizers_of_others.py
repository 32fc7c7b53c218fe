"""Other packages' optimizers: stepped as by hand, on fp32 masters, with skipped steps and checkpoints."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import Callback, ConfigError, OptLevel, TrainingModule
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


def from_package(package, name, **options):
    """Returns what makes an optimizer of a package; skips the test where the package is missing."""
    module = package.partition(".")[0]

    def make(parameters):
        pytest.importorskip(module, reason=f"needs the package {module}")
        return getattr(importlib.import_module(package), name)(parameters, **options)

    return make


PACKAGED = {
    "torchao": from_package("torchao.optim", "AdamW8bit", lr=0.01, block_size=64),
    "bitsandbytes": from_package("bitsandbytes.optim", "AdamW8bit", lr=0.01, min_8bit_size=16),
    "prodigyopt": from_package("prodigyopt", "Prodigy"),
}
"""Their steps and states are as those of the classes above, and of tests/trainer/test_optimizer_states.py."""

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
        return {**OPTIMIZERS, **PACKAGED}[self.optimizer](self.parameters())


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
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *PACKAGED])
@torch.compiler.set_stance("force_eager")  # torchao's step compiles itself, for longer than it trains here
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


# -- torch's Muon ------------------------------------------------------------------------------------------------------------


class Matrices(TrainingModule):
    """Trains its matrices by torch's Muon, with ``options``; ``later``: the hook in which the biases are added to it."""

    def __init__(self, later=None, **options):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
        self.later, self.options, self.steps = later, options, 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def add(self, hook, optimizer, epoch):
        if hook == self.later and epoch in (0, 1):
            optimizer.add_param_group({"params": [one for one in self.parameters() if one.ndim == 1]})
            self.later = None

    def configure_optimizers(self):
        optimizer = torch.optim.Muon([one for one in self.parameters() if one.ndim == 2], lr=0.02, **self.options)
        self.add("configure_optimizers", optimizer, 0)
        return optimizer

    def on_train_start(self):
        self.add("on_train_start", self.trainer.optimizers[0], 0)

    def on_train_epoch_start(self):
        self.add("on_train_epoch_start", self.trainer.optimizers[0], self.current_epoch - 1)


@pytest.mark.parametrize("precision", ["O0", "O5", "bf16-true"])
@pytest.mark.parametrize(
    ("later", "steps"), [("configure_optimizers", 0), ("on_train_start", 0), ("on_train_epoch_start", 4)]
)
def test_a_group_of_muons_that_is_no_matrix_is_refused_before_its_first_batch(later, steps, precision):
    module = Matrices(later)
    with pytest.raises(ConfigError, match=r"Muon updates matrices alone, and its group 1 has .* shape \(4,\).*AdamW"):
        quiet_trainer(max_epochs=3, precision=precision).fit(module, torch.utils.data.DataLoader(data(16), 4))
    assert module.steps == steps


@pytest.mark.parametrize("precision", ["O3", "bf16-true"])
def test_muon_that_forgets_its_momentum_is_refused(precision):
    if precision == "O3":
        precision = OptLevel("O3", cast_model_type=torch.bfloat16)
    module = Matrices(nesterov=False)
    with pytest.raises(
        ConfigError, match=r"Muon\(nesterov=False\) of torch .* scales the momentum of bf16 .*precision='O5'"
    ):
        quiet_trainer(max_epochs=1, precision=precision).fit(module, torch.utils.data.DataLoader(data(16), 4))
    assert module.steps == 0


@pytest.mark.parametrize("precision", ["O0", "O4", "O5", "bf16-mixed"])
def test_muon_on_fp32_weights_keeps_its_momentum(precision):
    module = Matrices(nesterov=False, momentum=0.0)
    trainer = quiet_trainer(max_epochs=1, precision=precision)
    trainer.fit(module, torch.utils.data.DataLoader(data(16), 4))
    momentum = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
    assert module.steps == 4
    assert {one.dtype for one in momentum} == {torch.float32}
    assert all(abs(one.norm() - 1) > 0.05 for one in momentum)
