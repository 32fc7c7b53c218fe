"""FusedLion as a torch Optimizer: the paper's numbers, state, groups, schedules, a Precision's steering."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from fabricamp import Trainer, TrainingModule
from fabricamp.errors import ConfigError
from fabricamp.optimizers import FusedLion
from tests.cuda_on_cpu.compiler import in_pairs
from tests.optimizers.checks import check_steering
from tests.optimizers.nets import Plain, assert_same, average, gradients, net

BETAS = (0.9, 0.99)


class PlainLion(Plain):
    """The formula in fp64, tensor by tensor."""

    def direction(self, gradient, parameter, state, group, norm):
        beta1, beta2 = group["betas"]
        towards = (beta1 * state.get("m", torch.zeros_like(gradient)) + (1 - beta1) * gradient).sign()
        average(state, "m", gradient, beta2, 1 - beta2)
        return towards + group["weight_decay"] * parameter


def pair(device, dtype=torch.float32, **options):
    one, other = net(device, dtype), net(device, torch.float64 if dtype == torch.float64 else torch.float32)
    options = {"lr": 1e-3, "betas": BETAS, "weight_decay": 0.1, **options}
    return (one, FusedLion(one.parameters(), **options)), (other, PlainLion(other.parameters(), **options))


def test_the_papers_defaults():
    (group,) = FusedLion([nn.Parameter(torch.ones(1))]).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.9, 0.99), 0.0)


@in_pairs("options, dtype", [{}, {"weight_decay": 0.0, "betas": (0.95, 0.98)}], [torch.float32, torch.float64])
def test_a_hundred_steps_follow_the_paper(kernel_device, options, dtype):
    pairs = pair(kernel_device, dtype, **options)
    for step in range(100):
        for module, optimizer in pairs:
            gradients(module, step)
            optimizer.step()
    assert_same(pairs[0][0], pairs[1][0], 1e-5 if dtype == torch.float32 else 1e-12)


def test_groups_differ_change_and_grow_with_missing_gradients(kernel_device):
    mine, twin = net(kernel_device), net(kernel_device)

    def build(module, kind):
        groups = [
            {"params": module[0].parameters(), "lr": 0.01},
            {"params": module[2].parameters(), "weight_decay": 0.3},
        ]
        return kind(groups, lr=1e-3, betas=BETAS, weight_decay=0.0), {"params": list(module[3].parameters())}

    pairs = [(mine, *build(mine, FusedLion)), (twin, *build(twin, PlainLion))]
    for step in range(12):
        for module, optimizer, late in pairs:
            gradients(module, step)
            if step < 2 or step == 9:
                module[2].bias.grad = None
            if step == 4:
                optimizer.param_groups[0]["lr"] = 0.003
            if step == 7:
                optimizer.add_param_group(late)
            optimizer.step()
    assert_same(mine, twin)


def test_half_parameters_have_fp32_momentum_which_loading_does_not_round(kernel_device):
    module = net(kernel_device, torch.float16)
    optimizer = FusedLion(module.parameters(), 1e-3)
    gradients(module, 0, scale=1e-3)
    optimizer.step()
    states = [optimizer.state[p] for p in module.parameters()]
    assert all(state.keys() == {"exp_avg"} and state["exp_avg"].dtype == torch.float32 for state in states)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other = FusedLion(net(kernel_device, torch.float16).parameters())
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for state, loaded in zip(states, other.state.values(), strict=True):
        assert loaded["exp_avg"].dtype == torch.float32
        assert torch.equal(state["exp_avg"], loaded["exp_avg"])
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert len(again.state) == len(states)


def test_a_step_can_be_steered(kernel_device):
    check_steering(kernel_device, *pair(kernel_device))


class Regression(TrainingModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return FusedLion(self.parameters(), lr=1e-3, weight_decay=0.1)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_in_the_trainer(level, tmp_path):
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(step)) for step in range(6)]
    module, twin = Regression(), Regression()
    optimizer = PlainLion(twin.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(
        max_epochs=1,
        precision=level,
        accumulate_grad_batches=2,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        **quiet,
    )
    trainer.fit(module, batches)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        ((twin.training_step(first, 0) + twin.training_step(second, 0)) / 2).backward()
        optimizer.step()
    assert_same(module.float(), twin, 1e-6 if level == "O0" else 1e-2)


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"weight_decay": float("nan")}, {"betas": (0.9, 1.0)}])
def test_options_that_cannot_work(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        FusedLion([nn.Parameter(torch.ones(1))], **options)
