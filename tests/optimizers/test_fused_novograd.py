"""FusedNovoGrad as a torch Optimizer: the formula's numbers, apex's two lists of norms, a fresh state that loads."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn

from fabricamp import ops
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.optimizers import FusedNovoGrad, UnsupportedError
from tests.cuda_on_cpu.compiler import in_pairs
from tests.optimizers.checks import check_closures_copies_and_pickles
from tests.optimizers.nets import Plain, assert_same, average, gradients, net


class PlainNovoGrad(Plain):
    def __init__(self, params, lr=1e-2, **options):
        defaults = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "grad_averaging": True, "norm_type": 2}
        defaults |= {"bias_correction": True, "reg_inside_moment": False, "init_zero": False}
        super().__init__(params, lr=lr, **(defaults | options))

    def direction(self, g, p, state, group, norm):
        (beta1, beta2), power = group["betas"], 2 if group["norm_type"] == 2 else 1
        norm = g.norm() if power == 2 else g.abs().max()
        old = state.get("norm", torch.zeros_like(norm) if group["init_zero"] else norm)
        state["norm"] = (beta2 * old**power + (1 - beta2) * norm**power) ** (1 / power)
        t, new = state["step"], 1 - beta1 if group["grad_averaging"] else 1
        c1, c2 = (1 - beta1**t, math.sqrt(1 - beta2**t)) if group["bias_correction"] else (1, 1)
        denominator = state["norm"] / c2 + group["eps"]
        if group["reg_inside_moment"]:
            return average(state, "m", g / denominator + group["weight_decay"] * p, beta1, new) / c1
        return average(state, "m", g, beta1, new) / c1 / denominator + group["weight_decay"] * p


OPTIONS = {
    "defaults": {},
    "inside": {"reg_inside_moment": True, "weight_decay": 0.1},
    "largest": {"norm_type": 0, "betas": (0.95, 0.98), "weight_decay": 0.01},
    "from zero": {"init_zero": True, "bias_correction": False, "betas": (0.9, 0.5)},
    "whole": {"grad_averaging": False, "reg_inside_moment": True, "norm_type": math.inf, "init_zero": True},
}


def pair(device, dtype=torch.float32, **options):
    """Two equal modules with their optimizers."""
    mine, twin = net(device, dtype), net(device, dtype)
    optimizer = FusedNovoGrad(mine.parameters(), lr=0.01, **options)
    return (mine, optimizer), (twin, PlainNovoGrad(twin.parameters(), **options))


@in_pairs("options, dtype, kernels", OPTIONS, [torch.float32, torch.float64], [True, False])
def test_a_hundred_steps_follow_the_formula(kernel_device, options, dtype, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr("fabricamp.optimizers.rows.runs_kernels", lambda device: False)
    (mine, optimizer), (twin, reference) = pair(kernel_device, dtype, **OPTIONS[options])
    for step in range(100):
        for module, one in ((mine, optimizer), (twin, reference)):
            gradients(module, step)
            one.step()
    assert_same(mine, twin, 1e-5 if dtype == torch.float32 else 1e-12)


def test_groups_differ_change_and_grow(kernel_device):
    runs = []
    for kind in (FusedNovoGrad, PlainNovoGrad):
        module = net(kernel_device)
        groups = [
            {"params": module[0].parameters(), "lr": 0.1, "norm_type": 0},
            {"params": module[2].parameters(), "betas": (0.5, 0.6), "init_zero": True},
            {"params": []},
        ]
        late = {"params": list(module[3].parameters()), "weight_decay": 0.3, "eps": 1e-3}
        runs.append((module, kind(groups, lr=0.01), late))
    for step in range(12):
        for module, optimizer, late in runs:
            gradients(module, step)
            if step == 4:
                optimizer.param_groups[0]["lr"] = 0.003
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_state_loads_as_it_was_saved(kernel_device, dtype):
    module, twin = net(kernel_device, dtype), net(kernel_device, dtype)
    optimizer, fresh = FusedNovoGrad(module.parameters()), FusedNovoGrad(twin.parameters())
    fresh.load_state_dict(optimizer.state_dict())  # a state without steps
    gradients(module, 0, scale=1e-3)
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    wide = torch.promote_types(dtype, torch.float32)
    for state, loaded in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert state.keys() == loaded.keys() == {"exp_avg", "exp_avg_norm", "step"}
        assert state["exp_avg"].dtype == state["exp_avg_norm"].dtype == wide
        assert all(
            value.dtype == loaded[name].dtype and torch.equal(value, loaded[name]) for name, value in state.items()
        )
    twin.load_state_dict(module.state_dict())
    for own, one in ((module, optimizer), (twin, fresh)):
        gradients(own, 1)
        one.step()
    assert all(torch.equal(one, other) for one, other in zip(module.parameters(), twin.parameters(), strict=True))


def as_in_apex(optimizer):
    """Returns the state in apex's layout: in each group a step, the norms of fp16 parameters, and those of fp32 parameters."""
    state = copy.deepcopy(optimizer.state_dict())
    for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        norms = {True: [], False: []}
        for key, parameter in zip(group["params"], own["params"], strict=True):
            entry = state["state"].get(key)
            if entry:
                norms[parameter.dtype == torch.float16].append(entry.pop("exp_avg_norm"))
                group["step"] = int(entry.pop("step"))
        group["exp_avg_sq"] = [torch.stack(one) if one else torch.tensor([]) for one in (norms[True], norms[False])]
    return state


@pytest.mark.parametrize("mixed", [False, True])
def test_apexs_layout_loads(kernel_device, mixed):
    module = net(kernel_device)
    if mixed:
        module[2].half()
    optimizer = FusedNovoGrad(module.parameters())
    gradients(module, 0)
    module[0].bias.grad = None
    optimizer.step()
    fresh = FusedNovoGrad(module.parameters())
    given = as_in_apex(optimizer)
    fresh.load_state_dict(given)
    assert "exp_avg_sq" in given["param_groups"][0]
    assert "exp_avg_sq" not in fresh.param_groups[0]
    for parameter, state in optimizer.state.items():
        if state:
            assert {name: value.tolist() for name, value in state.items()} == {
                name: value.tolist() for name, value in fresh.state[parameter].items()
            }
    given["param_groups"][0]["exp_avg_sq"][1] = torch.ones(11)
    with pytest.raises(CheckpointError, match=r"norms for \d parameters"):
        fresh.load_state_dict(given)
    if mixed:
        given = as_in_apex(optimizer)
        module.float()
        with pytest.raises(CheckpointError, match="2 fp16 parameters"):
            fresh.load_state_dict(given)


def test_closures_schedulers_copies_and_pickles(kernel_device):
    module = net(kernel_device)
    optimizer = FusedNovoGrad(module.parameters(), lr=0.02, reg_inside_moment=True, set_grad_none=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    check_closures_copies_and_pickles(module, optimizer, schedule, moment_mode=0, set_grad_none=False)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_step_can_be_steered(kernel_device, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr("fabricamp.optimizers.rows.runs_kernels", lambda device: False)
    (mine, optimizer), (twin, reference) = pair(kernel_device, weight_decay=0.1)
    state = ops.StepState.on(kernel_device, scale=4.0)
    for step in range(5):
        gradients(mine, step, scale=8.0)
        gradients(twin, step)
        if step == 2:
            mine[3].bias.grad[0] = float("nan")
        halves = [torch.zeros_like(p, dtype=torch.bfloat16) for p in mine.parameters()]
        optimizer.gather([p.grad for p in mine.parameters()], halves)
        statistics = optimizer.statistics(state.scale, 2.0)
        ops.finish(state, statistics, scale=state.scale, divisor=2.0, max_norm=1.0)
        optimizer.steer(state)
        optimizer.step()
        if step == 2:
            assert not any(half.any() for half in halves)
            continue
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        reference.step()
        assert all(torch.equal(half, p.bfloat16()) for half, p in zip(halves, mine.parameters(), strict=True))
    assert_same(mine, twin)
    assert {state["step"].item() for state in optimizer.state.values()} == {4.0}


@pytest.mark.parametrize("overflow", [False, True])
def test_torchs_grad_scaler(kernel_device, overflow):
    (mine, optimizer), (twin, reference) = pair(kernel_device)
    for module, one in ((mine, optimizer), (twin, reference)):
        scaler = torch.amp.GradScaler(kernel_device.type, init_scale=1024.0)
        for step in range(3):
            gradients(module, step, scale=float(scaler.scale(torch.ones((), device=kernel_device))))
            if overflow and step == 0:
                next(module.parameters()).grad[0] = float("inf")
            scaler.step(one)
            scaler.update()
    assert_same(mine, twin)
    assert {s["step"].item() for s in optimizer.state.values()} == {2.0 if overflow else 3.0}


def test_what_cannot_work_is_refused(kernel_device):
    weight = nn.Parameter(torch.ones(1, device=kernel_device))
    with pytest.raises(UnsupportedError, match="no amsgrad"):
        FusedNovoGrad([weight], amsgrad=True)
    with pytest.raises(ConfigError, match="norm_type=3"):
        FusedNovoGrad([weight], norm_type=3)
    with pytest.raises(ConfigError, match="lr=-1"):
        FusedNovoGrad([weight], lr=-1)
    embedding = nn.Embedding(5, 2, sparse=True, device=kernel_device)
    optimizer = FusedNovoGrad(embedding.parameters())
    embedding(torch.tensor([1, 2], device=kernel_device)).sum().backward()
    with pytest.raises(RuntimeError, match="FusedNovoGrad got a sparse gradient"):
        optimizer.step()
