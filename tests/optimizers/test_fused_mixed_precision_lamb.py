"""FusedMixedPrecisionLamb: lr and step on the device, masters of its own, torch's GradScaler handed over."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.optimizers import FusedLAMB, FusedMixedPrecisionLamb
from tests.optimizers.nets import assert_same, gradients, net


def pair(device, dtype=torch.float32, **options):
    """Two equal modules, one with this optimizer and one with FusedLAMB."""
    mine, twin = net(device, dtype), net(device, dtype)
    optimizer = FusedMixedPrecisionLamb(mine.parameters(), lr=0.01, **options)
    return (mine, optimizer), (twin, FusedLAMB(twin.parameters(), lr=0.01))


def by_reference(monkeypatch):
    monkeypatch.setattr("fabricamp.optimizers.rows.runs_kernels", lambda device: False)


@pytest.mark.parametrize("kernels", [True, False])
def test_it_is_lamb_with_numbers_on_the_device(kernel_device, kernels, monkeypatch):
    if not kernels:
        by_reference(monkeypatch)
    (mine, optimizer), (twin, reference) = pair(kernel_device)
    group = optimizer.param_groups[0]
    lr, count = group["lr"], group["step"]
    scheduler, other = (torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (optimizer, reference))
    for step in range(100):
        for module, one in ((mine, optimizer), (twin, reference)):
            gradients(module, step)
            one.step()
        scheduler.step()
        other.step()
    assert_same(mine, twin)
    assert group["lr"] is lr
    assert group["step"] is count
    assert count.item() == 100
    assert lr.item() == pytest.approx(reference.param_groups[0]["lr"], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_of_the_reduced_dtype(kernel_device, dtype):
    module, full = net(kernel_device, dtype), net(kernel_device, dtype).float()
    module[3].float()
    optimizer = FusedMixedPrecisionLamb(module.parameters(), lr=1e-4, reduced_precision_dtype=dtype)
    reference = FusedLAMB(full.parameters(), lr=1e-4)
    assert optimizer.param_groups_full_precision == [{"params": [None] * 6}]
    for step in range(10):
        gradients(module, step)
        for half, wide in zip(module.parameters(), full.parameters(), strict=True):
            wide.grad = half.grad.float()
        optimizer.step()
        reference.step()
        if step == 5:
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
            buffer.seek(0)
            optimizer = FusedMixedPrecisionLamb(module.parameters(), lr=1e-4, reduced_precision_dtype=dtype)
            optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    masters = optimizer.param_groups_full_precision[0]["params"]
    assert [one is None for one in masters] == [False] * 4 + [True] * 2
    assert optimizer.param_groups[0]["step"].item() == 10
    for half, wide, master in zip(module.parameters(), full.parameters(), masters, strict=True):
        torch.testing.assert_close((half if master is None else master).detach(), wide.detach(), rtol=1e-6, atol=1e-7)
        assert master is None or torch.equal(half, master.to(dtype))
        assert optimizer.state[half]["exp_avg"].dtype == torch.float32


def test_steps_are_the_groups(kernel_device):
    module = net(kernel_device)
    groups = [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.5, "step": 3}]
    optimizer = FusedMixedPrecisionLamb(groups, step=7)
    optimizer.add_param_group({"params": module[3].parameters()})
    numbers = [(group["lr"], group["step"]) for group in optimizer.param_groups]
    assert len({id(one) for pair in numbers for one in pair}) == 6
    assert [(lr.item(), step.item()) for lr, step in numbers] == [
        (pytest.approx(1e-3), 7),
        (0.5, 3),
        (pytest.approx(1e-3), 7),
    ]
    assert all(one.device == module[0].weight.device and one.dtype == torch.float32 for pair in numbers for one in pair)
    gradients(module, 0)
    module[3].zero_grad()
    optimizer.step()
    gradients(module, 1)
    optimizer.step()
    assert [group["step"].item() for group in optimizer.param_groups] == [9, 5, 9]
    optimizer.param_groups[0]["step"] = 20
    optimizer.step()
    assert [group["step"].item() for group in optimizer.param_groups] == [21, 6, 10]
    assert optimizer.state[module[0].bias]["step"] is optimizer.param_groups[0]["step"]


def test_groups_do_not_share_a_tensor_given_as_lr(kernel_device):
    module, lr = net(kernel_device), torch.tensor(0.25, device=kernel_device)
    groups = [{"params": module[0].parameters()}, {"params": module[2].parameters()}]
    optimizer = FusedMixedPrecisionLamb(groups, lr=lr)
    optimizer.param_groups[0]["lr"].fill_(0.5)
    assert [lr.item(), *[group["lr"].item() for group in optimizer.param_groups]] == [0.25, 0.5, 0.25]


@pytest.mark.parametrize("kernels", [True, False])
def test_bias_correction_goes_by_the_groups_step(kernel_device, kernels, monkeypatch):
    if not kernels:
        by_reference(monkeypatch)
    weight, twin = (nn.Parameter(torch.ones(3, device=kernel_device)) for _ in range(2))
    optimizer = FusedMixedPrecisionLamb([weight], lr=0.1, step=4)
    reference = FusedLAMB([twin], lr=0.1)
    reference.state[twin]["step"] = torch.tensor(4.0, device=kernel_device)
    for one, own in ((weight, optimizer), (twin, reference)):
        one.grad = torch.arange(3.0, device=kernel_device)
        own.step()
    assert torch.equal(weight, twin)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop")
def test_torchs_grad_scaler_is_handed_over(kernel_device, overflow, kernels, monkeypatch):
    if not kernels:
        by_reference(monkeypatch)
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
        assert scaler.get_scale() == (512.0 if overflow else 1024.0)
        gradients(module, 4)
        torch.amp.GradScaler(kernel_device.type, enabled=False).step(one)
    assert_same(mine, twin)
    assert optimizer.param_groups[0]["step"].item() == (3 if overflow else 4)
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("kernels", [True, False])
def test_a_step_can_be_steered(kernel_device, kernels, monkeypatch):
    if not kernels:
        by_reference(monkeypatch)
    runs = []
    for module, optimizer in pair(kernel_device):
        state = ops.StepState.on(kernel_device, scale=4.0)
        for step in range(4):
            gradients(module, step)
            if step == 1:
                module[0].bias.grad[0] = float("inf")
            optimizer.gather()
            ops.finish(state, optimizer.statistics(state.scale), scale=state.scale)
            optimizer.steer(state)
            optimizer.step()
        runs.append(module)
        steps = {one["step"].item() for one in optimizer.state.values()}
        assert steps == {3.0}
    assert_same(*runs)


def test_state_from_elsewhere(kernel_device):
    (mine, optimizer), (twin, reference) = pair(kernel_device)
    for step in range(3):
        gradients(twin, step)
        reference.step()
    mine.load_state_dict(twin.state_dict())
    lr, count = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["step"]
    given = copy.deepcopy(reference.state_dict())
    given["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(given)  # FusedLAMB's
    assert (count.item(), lr.item()) == (3, 0.25)
    for entry in given["state"].values():
        del entry["step"]
    given["param_groups"][0] |= {"step": torch.tensor([3], dtype=torch.int32), "lr": torch.tensor(0.01)}
    optimizer.load_state_dict(given)  # apex's
    assert optimizer.param_groups[0]["lr"] is lr
    assert optimizer.param_groups[0]["step"] is count
    assert (count.item(), lr.item()) == (3, pytest.approx(0.01))
    for module, one in ((mine, optimizer), (twin, reference)):
        gradients(module, 4)
        one.step()
    assert_same(mine, twin)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {state["step"].item() for state in reference.state.values()} == {4.0}


def test_copies_and_pickles(kernel_device):
    module = net(kernel_device, torch.float16)
    optimizer = FusedMixedPrecisionLamb(module.parameters(), step=2, reduced_precision_dtype=torch.float16)
    gradients(module, 0)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.reduced_precision_dtype, other.first_step) == (torch.float16, 2)
        own = [p for group in other.param_groups for p in group["params"]]
        gradients(nn.ParameterList(own), 1)
        other.step()
        assert other.param_groups[0]["step"].item() == 4
        assert optimizer.param_groups[0]["step"].item() == 3


def test_what_cannot_work_is_refused(kernel_device):
    weight = nn.Parameter(torch.ones(1, device=kernel_device))
    with pytest.raises(ConfigError, match="reduced_precision_dtype=torch.float64"):
        FusedMixedPrecisionLamb([weight], reduced_precision_dtype=torch.float64)
    with pytest.raises(RuntimeError, match="FusedMixedPrecisionLamb has no amsgrad"):
        FusedMixedPrecisionLamb([weight], amsgrad=True)
    elsewhere = nn.Parameter(torch.ones(1, device="meta"))
    with pytest.raises(ConfigError, match="one group a device"):
        FusedMixedPrecisionLamb([weight, elsewhere])
    scaler = torch.amp.GradScaler(kernel_device.type)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ConfigError, match="no closure"):
        FusedMixedPrecisionLamb([weight]).step(lambda: None, grad_scaler=scaler)
