"""FusedLAMB as a torch Optimizer: the formula's numbers, clipping by group, apex's state, a Precision's steering."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import ops
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.optimizers import FusedLAMB, UnsupportedError
from fabricamp.precision import Clip, OptLevel
from fabricamp.strategies.base import Strategy
from tests.cuda_on_cpu.compiler import in_pairs
from tests.optimizers.checks import check_closures_copies_and_pickles
from tests.optimizers.nets import Plain, assert_same, average, gradients, net
from tests.windows import end_step, make_step


class PlainLamb(Plain):
    def __init__(self, params, lr=1e-2, **options):
        defaults = {
            "betas": (0.9, 0.999),
            "eps": 1e-6,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "grad_averaging": True,
        }
        defaults |= {"bias_correction": True, "adam_w_mode": True, "use_nvlamb": False}
        super().__init__(params, lr=lr, **(defaults | options))

    def direction(self, g, p, state, group, norm):
        most, (beta1, beta2), decay = group["max_grad_norm"], group["betas"], group["weight_decay"]
        if most and norm > most:
            g = g / (norm / most)
        if not group["adam_w_mode"]:
            g = g + decay * p
        m = average(state, "m", g, beta1, 1 - beta1 if group["grad_averaging"] else 1)
        v = average(state, "v", g * g, beta2, 1 - beta2)
        t = state["step"]
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if group["bias_correction"] else (1, 1)
        u = m / c1 / ((v / c2).sqrt() + group["eps"])
        if group["adam_w_mode"]:
            u = u + decay * p
        adapts = (group["use_nvlamb"] or decay != 0) and p.norm() > 0 and u.norm() > 0
        return u * (p.norm() / u.norm() if adapts else 1)


OPTIONS = {
    "defaults": {},
    "nvlamb": {"use_nvlamb": True, "weight_decay": 0.0},
    "no decay": {"weight_decay": 0.0, "max_grad_norm": 5.0},
    "l2": {"adam_w_mode": False, "weight_decay": 0.1, "max_grad_norm": None},
    "whole": {"grad_averaging": False, "bias_correction": False, "betas": (0.5, 0.9), "max_grad_norm": 0.0},
}


def pair(device, dtype=torch.float32, **options):
    """Two equal modules with their optimizers."""
    mine, twin = net(device, dtype), net(device, dtype)
    return (mine, FusedLAMB(mine.parameters(), lr=0.01, **options)), (twin, PlainLamb(twin.parameters(), **options))


@in_pairs("options, dtype, kernels", OPTIONS, [torch.float32, torch.float64], [True, False])
def test_a_hundred_steps_follow_the_formula(kernel_device, options, dtype, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr("fabricamp.optimizers.rows.runs_kernels", lambda device: False)
    (mine, optimizer), (twin, reference) = pair(kernel_device, dtype, **OPTIONS[options])
    for step in range(100):
        for module, one in ((mine, optimizer), (twin, reference)):
            gradients(module, step)
            one.step()
    assert_same(mine, twin, 1e-5 if dtype == torch.float32 else 1e-10)


def test_groups_differ_change_and_grow(kernel_device):
    runs = []
    for kind in (FusedLAMB, PlainLamb):
        module = net(kernel_device)
        groups = [
            {"params": module[0].parameters(), "lr": 0.1, "max_grad_norm": 0.5},
            {"params": module[2].parameters(), "betas": (0.5, 0.6), "max_grad_norm": None},
            {"params": []},
        ]
        late = {"params": list(module[3].parameters()), "weight_decay": 0.3, "eps": 1e-3, "max_grad_norm": 30.0}
        runs.append((module, kind(groups, lr=0.01), late))
    for step in range(12):
        for module, optimizer, late in runs:
            gradients(module, step)
            if step < 7:  # so that the norm leaves out parameters that are not in the optimizer yet
                module[3].zero_grad()
            if step == 4:
                optimizer.param_groups[0]["lr"] = 0.003
                optimizer.param_groups[0]["max_grad_norm"] = 3.0
                optimizer.param_groups[1]["weight_decay"] = 0.2
            if step == 7:
                optimizer.add_param_group(late)
            optimizer.step()
    assert_same(runs[0][0], runs[1][0])


@pytest.mark.parametrize("kernels", [True, False])
def test_missing_frozen_and_late_gradients(kernel_device, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr("fabricamp.optimizers.rows.runs_kernels", lambda device: False)
    (mine, optimizer), (twin, reference) = pair(kernel_device)
    for step in range(8):
        for module, one in ((mine, optimizer), (twin, reference)):
            gradients(module, step)
            module[0].zero_grad()
            if step < 3 or step == 5:
                module[3].weight.grad = None
            one.step()
    assert_same(mine, twin)
    assert optimizer.state[mine[3].weight]["step"].item() == 4
    assert not optimizer.state.get(mine[0].weight)
    optimizer.zero_grad()
    optimizer.step()
    assert_same(mine, twin)


def test_half_parameters_have_fp32_state_which_loading_does_not_round(kernel_device):
    module = net(kernel_device, torch.float16)
    optimizer = FusedLAMB(module.parameters())
    gradients(module, 0, scale=1e-3)  # its square underflows in fp16
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other = FusedLAMB(net(kernel_device, torch.float16).parameters())
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for state, loaded in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert state.keys() == loaded.keys() == {"exp_avg", "exp_avg_sq", "step"}
        assert all(value.dtype == torch.float32 and torch.equal(value, loaded[name]) for name, value in state.items())


def test_apexs_layout_loads(kernel_device):
    (mine, optimizer), (twin, reference) = pair(kernel_device)
    for module, one in ((mine, optimizer), (twin, reference)):
        gradients(module, 0)
        one.step()
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        del entry["step"]
    for group in state["param_groups"]:
        group["step"] = 1
    fresh = FusedLAMB(mine.parameters())
    fresh.load_state_dict(state)
    for module, one in ((mine, fresh), (twin, reference)):
        gradients(module, 1)
        one.step()
    assert_same(mine, twin)
    del state["param_groups"][0]["step"]
    with pytest.raises(CheckpointError, match="has no 'step'"):
        fresh.load_state_dict(state)


def test_closures_schedulers_copies_and_pickles(kernel_device):
    module = net(kernel_device)
    optimizer = FusedLAMB(module.parameters(), lr=0.1, adam_w_mode=False, use_nvlamb=True, set_grad_none=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    kept = {"adam_w_mode": 0, "use_nvlamb": True, "set_grad_none": False}
    check_closures_copies_and_pickles(module, optimizer, schedule, **kept)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 32)


@pytest.mark.parametrize("limit", [None, 0.3])
@pytest.mark.parametrize("max_norm", [None, 2.0, 0.5])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_steered_step_clips_what_it_reads(kernel_device, kernels, max_norm, limit, monkeypatch):
    if not kernels:
        monkeypatch.setattr("fabricamp.optimizers.rows.runs_kernels", lambda device: False)
    (mine, optimizer), (twin, reference) = pair(kernel_device)
    state = ops.StepState.on(kernel_device, scale=4.0)
    for step in range(4):
        gradients(mine, step, scale=8.0)
        gradients(twin, step)
        halves = [torch.zeros_like(p, dtype=torch.float16) for p in mine.parameters()]
        optimizer.gather([p.grad for p in mine.parameters()], halves)
        measures = max_norm is not None or step % 2  # without clipping the statistics are optional
        statistics = optimizer.statistics(state.scale, 2.0) if measures else state.scale.new_empty(0)
        ops.finish(state, statistics, scale=state.scale, divisor=2.0, max_norm=max_norm)
        optimizer.steer(state, limit=limit, skips=False)
        optimizer.step()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        if limit is not None:
            nn.utils.clip_grad_value_(twin.parameters(), limit)
        reference.step()
        assert all(torch.equal(half, p.half()) for half, p in zip(halves, mine.parameters(), strict=True))
    assert_same(mine, twin)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_precision_steers_it(kernel_device, level):
    runs = []
    for kind in (FusedLAMB, PlainLamb):
        torch.manual_seed(0)
        module, precision = (
            nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)).to(kernel_device),
            OptLevel(level),
        )
        precision.convert_module(module)
        optimizer = kind(module.parameters(), lr=0.01)
        precision.setup_optimizers(module, [optimizer], Strategy())
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
            x, y = x.to(kernel_device), y.to(kernel_device)
            loss = precision.forward(
                lambda m=module, x=x, y=y, c=precision: F.cross_entropy(m(c.convert_input(x)).float(), y)
            )
            precision.backward(loss)
            make_step(precision, optimizer, clip=Clip(0.5))
            end_step(precision, loss.detach())
            optimizer.zero_grad()
        runs.append([p for group in optimizer.param_groups for p in group["params"]])
    for one, other in zip(*runs, strict=True):
        # Gradients of a half model have half precision.
        tolerance = 1e-5 if level == "O0" else 2e-3
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("overflow", [False, True])
def test_torchs_grad_scaler(kernel_device, overflow):
    (mine, optimizer), (twin, reference) = pair(kernel_device)
    for module, one in ((mine, optimizer), (twin, reference)):
        scaler = torch.amp.GradScaler(kernel_device.type, init_scale=1024.0)
        for step in range(3):
            gradients(module, step, scale=float(scaler.scale(torch.ones((), device=kernel_device))))
            if overflow and step == 1:
                next(module.parameters()).grad[0] = float("inf")
            if step == 2:
                scaler.unscale_(one)
            scaler.step(one)
            scaler.update()
    assert_same(mine, twin)
    assert {s["step"].item() for s in optimizer.state.values()} == {2.0 if overflow else 3.0}


def test_lr_may_be_a_tensor(kernel_device):
    (mine, optimizer), (twin, reference) = pair(kernel_device)
    optimizer.param_groups[0]["lr"] = lr = torch.tensor(0.01, device=kernel_device)
    for step in range(3):
        if step == 1:
            lr.fill_(0.05)
            reference.param_groups[0]["lr"] = 0.05
        for module, one in ((mine, optimizer), (twin, reference)):
            gradients(module, step)
            one.step()
    assert_same(mine, twin)


def test_what_cannot_work_is_refused(kernel_device):
    weight = nn.Parameter(torch.ones(1, device=kernel_device))
    with pytest.raises(UnsupportedError, match="no amsgrad"):
        FusedLAMB([weight], amsgrad=True)
    with pytest.raises(ConfigError, match="max_grad_norm=-1"):
        FusedLAMB([weight], max_grad_norm=-1)
    with pytest.raises(ConfigError, match="betas"):
        FusedLAMB([weight], betas=(0.9, 1.0))
    embedding = nn.Embedding(5, 2, sparse=True, device=kernel_device)
    optimizer = FusedLAMB(embedding.parameters())
    embedding(torch.tensor([1, 2], device=kernel_device)).sum().backward()
    with pytest.raises(RuntimeError, match="FusedLAMB got a sparse gradient"):
        optimizer.step()
