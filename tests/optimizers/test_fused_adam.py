"""FusedAdam as a torch Optimizer: torch's numbers, torch's and apex's state, groups, closures, schedulers, the GradScaler."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
from torch import nn

from fabricamp import ops
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.optimizers import FusedAdam, UnsupportedError
from tests.cuda_on_cpu.compiler import in_pairs
from tests.optimizers.checks import check_closures_copies_and_pickles, check_zeroing
from tests.optimizers.twins import assert_same, gradients, net


def pair(device, ours, theirs, dtype=torch.float32):
    """Two equal modules with their optimizers."""
    one, other = net(device, dtype), net(device, dtype)
    return (one, FusedAdam(one.parameters(), **ours)), (other, theirs(other.parameters()))


OPTIONS = {
    "adamw": ({"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam": ({"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.1}),
    "maximize": ({"maximize": True, "betas": (0.5, 0.9)}, torch.optim.Adam, {"maximize": True, "betas": (0.5, 0.9)}),
}


@in_pairs("options, dtype", OPTIONS, [torch.float32, torch.float64])
def test_a_hundred_steps_follow_torch(kernel_device, options, dtype):
    ours, theirs, their_options = OPTIONS[options]
    (mine, optimizer), (twin, reference) = pair(
        kernel_device, {"lr": 0.01, **ours}, lambda p: theirs(p, lr=0.01, foreach=True, **their_options), dtype
    )
    for step in range(100):
        gradients(mine, step, contiguous=step % 2 == 0)
        gradients(twin, step)
        optimizer.step()
        reference.step()
    assert_same(mine, twin, 1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_on_a_cpu_it_has_the_bits_of_torchs_foreach(options):
    ours, theirs, their_options = OPTIONS[options]
    (mine, optimizer), (twin, reference) = pair(
        "cpu", {"lr": 0.01, **ours}, lambda p: theirs(p, lr=0.01, foreach=True, **their_options)
    )
    for step in range(5):
        gradients(mine, step)
        gradients(twin, step)
        optimizer.step()
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(mine.parameters(), twin.parameters(), strict=True))


def test_half_parameters_have_fp32_state_which_loading_does_not_round(kernel_device):
    module = net(kernel_device, torch.float16)
    optimizer = FusedAdam(module.parameters())
    gradients(module, 0, scale=1e-3)  # its square underflows in fp16
    optimizer.step()
    states = [optimizer.state[p] for p in module.parameters()]
    assert all(state[name].dtype == torch.float32 for state in states for name in ("exp_avg", "exp_avg_sq"))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other = FusedAdam(net(kernel_device, torch.float16).parameters())
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for state, loaded in zip(states, other.state.values(), strict=True):
        assert loaded.keys() == state.keys()
        assert all(
            torch.equal(value, loaded[name]) and value.dtype == loaded[name].dtype for name, value in state.items()
        )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("torchs", [torch.optim.Adam, torch.optim.AdamW])
def test_state_goes_to_torch_and_back(kernel_device, torchs, fused):
    adam_w = torchs is torch.optim.AdamW
    (mine, optimizer), (twin, reference) = pair(
        kernel_device, {"lr": 0.01, "adam_w_mode": adam_w}, lambda p: torchs(p, lr=0.01, weight_decay=0.0, fused=fused)
    )
    for step in range(9):
        gradients(mine, step)
        gradients(twin, step)
        optimizer.step()
        reference.step()
        if step % 3 == 2:
            states = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(reference.state_dict())
            optimizer.load_state_dict(states[1])
            reference.load_state_dict(states[0])
            assert optimizer.param_groups[0]["bias_correction"] is True
    assert_same(mine, twin, 1e-6)
    assert {state["step"].item() for state in optimizer.state.values()} == {9.0}


def test_torchs_own_options_are_left_out_of_the_groups():
    (mine, optimizer), (twin, reference) = pair("cpu", {"lr": 0.01}, lambda p: torch.optim.AdamW(p, lr=0.02))
    for module, one in ((mine, optimizer), (twin, reference)):
        gradients(module, 0)
        one.step()
    keys = set(optimizer.param_groups[0])
    reference.param_groups[0]["name"] = "all"
    optimizer.load_state_dict(reference.state_dict())
    assert set(optimizer.param_groups[0]) == keys | {"name"}
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_apexs_layout_loads(kernel_device):
    (mine, optimizer), (twin, reference) = pair(
        kernel_device, {"lr": 0.01}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0)
    )
    gradients(twin, 0)
    reference.step()
    mine.load_state_dict(twin.state_dict())
    state = copy.deepcopy(reference.state_dict())
    for entry in state["state"].values():
        del entry["step"]
    keep = ("lr", "betas", "eps", "weight_decay", "params")
    state["param_groups"] = [
        {**{key: group[key] for key in keep}, "bias_correction": True, "step": 1} for group in state["param_groups"]
    ]
    optimizer.load_state_dict(state)
    assert "step" in state["param_groups"][0]
    for module, one in ((mine, optimizer), (twin, reference)):
        gradients(module, 1)
        one.step()
    assert_same(mine, twin)
    del state["param_groups"][0]["step"]
    with pytest.raises(CheckpointError, match="has no 'step'"):
        optimizer.load_state_dict(state)


def test_state_that_it_would_lose_is_refused():
    module = net("cpu")
    reference = torch.optim.Adam(module.parameters(), amsgrad=True)
    with pytest.raises(CheckpointError, match="amsgrad"):
        FusedAdam(module.parameters()).load_state_dict(reference.state_dict())


def test_groups_differ_change_and_grow(kernel_device):
    mine, twin = net(kernel_device), net(kernel_device)

    def build(module, kind, **options):
        first, second, third = module[0], module[2], module[3]
        optimizer = kind(
            [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "betas": (0.5, 0.6)}], **options
        )
        return optimizer, {"params": list(third.parameters()), "weight_decay": 0.3, "eps": 1e-3}

    pairs = [
        (mine, *build(mine, FusedAdam, lr=0.01)),
        (twin, *build(twin, torch.optim.AdamW, lr=0.01, weight_decay=0.0)),
    ]
    for step in range(12):
        for module, optimizer, late in pairs:
            gradients(module, step)
            if step == 4:
                optimizer.param_groups[0]["lr"] = 0.003
                optimizer.param_groups[1]["weight_decay"] = 0.2
            if step == 7:
                optimizer.add_param_group(late)
            optimizer.step()
    assert_same(mine, twin)


def test_missing_frozen_and_late_gradients(kernel_device):
    (mine, optimizer), (twin, reference) = pair(
        kernel_device, {"lr": 0.01}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0)
    )
    for module in (mine, twin):
        module[0].requires_grad_(requires_grad=False)
    for step in range(8):
        for module, one in ((mine, optimizer), (twin, reference)):
            gradients(module, step)
            for parameter in module[0].parameters():
                parameter.grad = None
            if step < 3 or step == 5:
                module[3].weight.grad = None
            one.step()
    assert_same(mine, twin)
    assert optimizer.state[mine[3].weight]["step"].item() == 4
    assert not optimizer.state.get(mine[0].weight)
    optimizer.zero_grad()
    optimizer.step()
    assert_same(mine, twin)


def test_memory_that_moves_is_found(kernel_device):
    (mine, optimizer), (twin, reference) = pair(
        kernel_device, {"lr": 0.01}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0)
    )
    for step in range(4):
        for module, one in ((mine, optimizer), (twin, reference)):
            gradients(module, step)
            if step == 2:
                for parameter in module.parameters():
                    parameter.data = parameter.data.clone()
            one.step()
    assert_same(mine, twin)


def test_closures_schedulers_copies_and_pickles(kernel_device):
    module = net(kernel_device)
    optimizer = FusedAdam(module.parameters(), lr=0.1, adam_w_mode=False, set_grad_none=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    check_closures_copies_and_pickles(module, optimizer, schedule, adam_w_mode=0, set_grad_none=False)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 32)
    check_zeroing(module, optimizer)


def test_lr_may_be_a_tensor(kernel_device):
    lr = torch.tensor(0.01, device=kernel_device)
    (mine, optimizer), (twin, reference) = pair(
        kernel_device, {"lr": lr}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0)
    )
    for step in range(3):
        gradients(mine, step)
        gradients(twin, step)
        if step == 1:
            lr.fill_(0.05)
            reference.param_groups[0]["lr"] = 0.05
        optimizer.step()
        reference.step()
    assert_same(mine, twin, 1e-5)


def test_it_keeps_masters_of_half_parameters_where_asked(kernel_device):
    module, full = net(kernel_device, torch.float16), net(kernel_device, torch.float16).float()
    optimizer = FusedAdam(module.parameters(), lr=1e-4, capturable=True, master_weights=True)
    reference = torch.optim.AdamW(full.parameters(), lr=1e-4, weight_decay=0)
    for step in range(20):
        gradients(module, step)
        for half, wide in zip(module.parameters(), full.parameters(), strict=True):
            wide.grad = half.grad.float()
        optimizer.step()
        reference.step()
        if step == 10:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = FusedAdam(module.parameters(), lr=1e-4, capturable=True, master_weights=True)
            optimizer.load_state_dict(state)
    for half, wide in zip(module.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[half]["master_param"], wide.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(half, optimizer.state[half]["master_param"].half())


def test_a_step_can_be_steered(kernel_device):
    module = net(kernel_device)
    optimizer = FusedAdam(module.parameters(), lr=0.1)
    state = ops.StepState.on(kernel_device, scale=4.0)
    before = [p.detach().clone() for p in module.parameters()]
    values = [torch.full_like(p, 8.0) for p in module.parameters()]
    values[1][0] = float("inf")
    halves = [torch.zeros_like(p, dtype=torch.float16) for p in module.parameters()]
    for finite in (False, True):
        if finite:
            values[1][0] = 8.0
        optimizer.gather(values, halves)
        statistics = optimizer.statistics(state.scale, 2.0)
        ops.finish(state, statistics, scale=state.scale, divisor=2.0)
        optimizer.steer(state)
        optimizer.step()
        if not finite:
            assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
            name = optimizer.parameter_of_statistic(int(state.bad_chunk))
            assert name is module[0].bias
    assert state.norm.item() == pytest.approx(sum(p.numel() for p in module.parameters()) ** 0.5)
    for old, new, half in zip(before, module.parameters(), halves, strict=True):
        torch.testing.assert_close(new, old - 0.1, rtol=1e-5, atol=1e-6)
        assert torch.equal(half, new.half())
    assert {s["step"].item() for s in optimizer.state.values()} == {1.0}


def test_flags_decide_on_the_device(kernel_device):
    module = net(kernel_device)
    optimizer = FusedAdam(module.parameters(), lr=0.1)
    parameters = list(module.parameters())
    before = [p.detach().clone() for p in parameters]
    values = [torch.ones_like(p) for p in parameters]
    flags = [torch.tensor(float(index % 2), device=kernel_device) for index in range(len(parameters))]
    optimizer.gather(values, flags=flags)
    assert optimizer.statistics(torch.ones((), device=kernel_device)).sum().item() == sum(
        p.numel() for p in parameters[1::2]
    )
    optimizer.steer(None)
    optimizer.step()
    assert [torch.equal(old, new) for old, new in zip(before, parameters, strict=True)] == [
        i % 2 == 0 for i in range(len(flags))
    ]
    # Without flags, those of the last call apply.
    before = [p.detach().clone() for p in parameters]
    optimizer.gather(values)
    optimizer.steer(None)
    optimizer.step()
    assert [torch.equal(old, new) for old, new in zip(before, parameters, strict=True)] == [
        i % 2 == 0 for i in range(len(flags))
    ]


def test_a_backward_through_older_weights_fails(kernel_device):
    module = net(kernel_device)
    optimizer = FusedAdam(module.parameters())
    loss = module(torch.randn(3, 2, 6, 6, device=kernel_device)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_sparse_and_unknown_things_are_refused(kernel_device):
    embedding = nn.Embedding(5, 2, sparse=True, device=kernel_device)
    optimizer = FusedAdam(embedding.parameters())
    embedding(torch.tensor([1, 2], device=kernel_device)).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse gradient"):
        optimizer.step()
    embedding.weight.grad = embedding.weight.grad.to_dense()
    optimizer.step()
    embedding.weight.grad = torch.ones_like(embedding.weight).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        optimizer.step()
    number = nn.Parameter(torch.ones(2, dtype=torch.complex64, device=kernel_device))
    number.grad = torch.ones_like(number)
    with pytest.raises(UnsupportedError, match="complex64"):
        FusedAdam([number]).step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "no amsgrad"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": torch.tensor([1e-3, 1e-4])}, "one element"),
        ({"lr": "fast"}, "lr='fast'; it has to be a number, 0 or more"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": 0.9}, "betas=0.9; it has to be two numbers"),
        ({"betas": (0.9,)}, "betas=.*; it has to be two numbers"),
        ({"betas": (0.9, "x")}, "betas=.*; it has to be two numbers"),
        ({"eps": float("nan")}, "eps"),
        ({"master_weights": True}, "capturable"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        FusedAdam([nn.Parameter(torch.ones(1))], **options)


def test_a_module_in_place_of_its_parameters():
    with pytest.raises(
        ConfigError, match=r"FusedAdam got a Linear; give its parameters: FusedAdam\(module\.parameters\(\)"
    ):
        FusedAdam(nn.Linear(1, 1))
    FusedAdam(nn.ParameterList([nn.Parameter(torch.ones(1))]))


@pytest.mark.parametrize("overflow", [False, True])
def test_torchs_grad_scaler(kernel_device, overflow):
    (mine, optimizer), (twin, reference) = pair(
        kernel_device, {"lr": 0.01}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0)
    )
    for module, one in ((mine, optimizer), (twin, reference)):
        scaler = torch.amp.GradScaler(kernel_device.type, init_scale=1024.0)
        for step in range(3):
            gradients(module, step, scale=float(scaler.scale(torch.ones((), device=kernel_device))))
            if overflow and step == 1:
                next(module.parameters()).grad[0, 0, 0, 2] = float("inf")
            scaler.step(one)
            scaler.update()
        assert scaler.get_scale() == (512.0 if overflow else 1024.0)
    assert_same(mine, twin, 1e-5)
    assert {s["step"].item() for s in optimizer.state.values()} == {2.0 if overflow else 3.0}


def test_gradients_are_not_kept_alive(kernel_device):
    module = net(kernel_device)
    optimizer = FusedAdam(module.parameters())
    for contiguous in (False, True):
        gradients(module, 0, contiguous=contiguous)
        alive = [weakref.ref(parameter.grad) for parameter in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert [one() for one in alive] == [None] * len(alive)
