"""FusedSGD as a torch Optimizer: torch's numbers, torch's and apex's state, momentum that comes and goes, scalers, graphs."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fabricamp.errors import ConfigError
from fabricamp.optimizers import FusedSGD, UnsupportedError
from tests.cuda_on_cpu.compiler import in_pairs, references
from tests.optimizers.checks import (
    check_closures_copies_and_pickles,
    check_grad_scaler,
    check_steering,
    check_zeroing,
    follow,
)
from tests.optimizers.twins import assert_same, captured, gradients, large, net, same_bits

OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "dampening": {"momentum": 0.8, "dampening": 0.3, "maximize": True},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


def pair(device, options, dtype=torch.float32, **theirs):
    """Two equal modules, one with ours and one with torch's optimizer."""
    one, other = net(device, dtype), net(device, dtype)
    return (one, FusedSGD(one.parameters(), lr=0.01, **options)), (
        other,
        torch.optim.SGD(other.parameters(), lr=0.01, **options, **theirs),
    )


@in_pairs("options, dtype", OPTIONS, [torch.float32, torch.float64])
def test_a_hundred_steps_follow_torch(kernel_device, options, dtype):
    one, other = pair(kernel_device, OPTIONS[options], dtype, foreach=True)
    follow(one, other, 100, alternate=True)
    assert_same(one[0], other[0], 1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_on_a_cpu_it_has_the_bits_of_torchs_foreach(options):
    one, other = pair("cpu", OPTIONS[options], foreach=True)
    follow(one, other, 5)
    assert same_bits(one[0], other[0])


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_hundred_steps_with_decay_after_momentum(kernel_device, nesterov):
    mine, twin = net(kernel_device), net(kernel_device)
    optimizer = FusedSGD(
        mine.parameters(), 0.01, momentum=0.9, weight_decay=0.1, nesterov=nesterov, wd_after_momentum=True
    )
    buffers = [torch.zeros_like(p) for p in twin.parameters()]
    for step in range(100):
        gradients(mine, step)
        gradients(twin, step)
        optimizer.step()
        with torch.no_grad():
            for p, buffer in zip(twin.parameters(), buffers, strict=True):
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(0.01 * ((p.grad + 0.9 * buffer if nesterov else buffer) + 0.1 * p))
    assert_same(mine, twin, 1e-5)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.floats(0, 0.5),
    st.sampled_from([0.0, 0.5, 0.99]),
    st.sampled_from([0.0, 0.7]),
    st.floats(0, 0.2),
    st.booleans(),
    st.booleans(),
    st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=4),
)
def test_any_rule_and_any_shapes_follow_torch(
    kernel_device, lr, momentum, dampening, decay, nesterov, maximize, shapes
):
    nesterov = nesterov and momentum > 0 and dampening == 0
    options = {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov}
    mine, twin = ([nn.Parameter(torch.ones(shape, device=kernel_device)) for shape in shapes] for _ in range(2))
    optimizer = FusedSGD(mine, lr, maximize=maximize, **options)
    reference = torch.optim.SGD(twin, lr, maximize=maximize, **options)
    for step in range(4):
        for index, (one, other) in enumerate(zip(mine, twin, strict=True)):
            one.grad = None if (step + index) % 3 == 0 else torch.full_like(one, float(step - index))
            other.grad = None if one.grad is None else one.grad.clone()
        optimizer.step()
        reference.step()
    for one, other in zip(mine, twin, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_state_goes_to_torch_and_back(kernel_device, options, fused):
    (mine, optimizer), (twin, reference) = pair(kernel_device, OPTIONS[options], fused=fused)
    for step in range(9):
        gradients(mine, step)
        gradients(twin, step)
        optimizer.step()
        reference.step()
        if step % 3 == 2:
            states = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(reference.state_dict())
            optimizer.load_state_dict(states[1])
            reference.load_state_dict(states[0])
    assert_same(mine, twin, 1e-5)


def test_apexs_layout_loads(kernel_device):
    (mine, optimizer), (twin, reference) = pair(kernel_device, OPTIONS["dampening"])
    gradients(twin, 0)
    reference.step()
    mine.load_state_dict(twin.state_dict())
    state = copy.deepcopy(reference.state_dict())
    keep = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "params")
    state["param_groups"] = [{key: group[key] for key in keep} for group in state["param_groups"]]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["maximize"] is True
    for module, one in ((mine, optimizer), (twin, reference)):
        gradients(module, 1)
        one.step()  # dampened, because the loaded buffers have received a gradient
    assert_same(mine, twin)


def test_half_parameters_have_fp32_state_which_loading_does_not_round(kernel_device):
    module = net(kernel_device, torch.float16)
    optimizer = FusedSGD(module.parameters(), 0.1, momentum=0.9)
    for step in range(2):
        gradients(module, step, scale=1e-3)
        optimizer.step()
    states = [optimizer.state[p] for p in module.parameters()]
    assert all(state["momentum_buffer"].dtype == torch.float32 for state in states)
    assert not all(torch.equal(s["momentum_buffer"], s["momentum_buffer"].half().float()) for s in states)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other = FusedSGD(net(kernel_device, torch.float16).parameters(), 0.1, momentum=0.9)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for state, loaded in zip(states, other.state.values(), strict=True):
        assert loaded.keys() == state.keys()
        for name, value in state.items():
            assert value.dtype == loaded[name].dtype
            assert torch.equal(value, loaded[name])


def test_each_parameter_has_a_first_gradient_of_its_own(kernel_device):
    # One group with new and old parameters, in both orders: only the first gradient of a new parameter is not dampened.
    (mine, optimizer), (twin, reference) = pair(kernel_device, OPTIONS["dampening"])
    for step in range(4):
        for module, one in ((mine, optimizer), (twin, reference)):
            gradients(module, step)
            if step < 2:
                module[3].weight.grad = None
            if step == 0:
                module[0].weight.grad = None
            one.step()
    assert_same(mine, twin)


def test_momentum_may_come_go_and_come_back(kernel_device):
    (mine, optimizer), (twin, reference) = pair(kernel_device, {"dampening": 0.3})
    for step in range(12):
        for module, one in ((mine, optimizer), (twin, reference)):
            one.param_groups[0]["momentum"] = 0.9 if step // 3 % 2 else 0.0
            gradients(module, step)
            one.step()
        buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
        assert all((buffer is None) == (step < 3) for buffer in buffers)
    assert_same(mine, twin, 1e-5)


def test_groups_differ_change_and_grow(kernel_device):
    mine, twin = net(kernel_device), net(kernel_device)

    def build(module, kind):
        first, second, third = module[0], module[2], module[3]
        groups = [
            {"params": first.parameters(), "lr": 0.1, "momentum": 0.9, "nesterov": True},
            {"params": second.parameters(), "lr": 0.2},
        ]
        late = {"params": list(third.parameters()), "lr": 0.01, "momentum": 0.5, "weight_decay": 0.3, "maximize": True}
        return kind(groups, **({"lr": 1.0} if kind is torch.optim.SGD else {})), late

    pairs = [(mine, *build(mine, FusedSGD)), (twin, *build(twin, torch.optim.SGD))]
    for step in range(12):
        for module, optimizer, late in pairs:
            gradients(module, step)
            if step == 4:
                optimizer.param_groups[0]["lr"] = 0.003
                optimizer.param_groups[1]["weight_decay"] = 0.2
            if step == 7:
                optimizer.add_param_group(late)
            optimizer.step()
    assert_same(mine, twin, 1e-5)


def test_missing_frozen_and_no_gradients(kernel_device):
    (mine, optimizer), (twin, reference) = pair(kernel_device, OPTIONS["momentum"])
    for module in (mine, twin):
        module[0].requires_grad_(requires_grad=False)
    for step in range(4):
        for module, one in ((mine, optimizer), (twin, reference)):
            gradients(module, step)
            for parameter in module[0].parameters():
                parameter.grad = None
            one.step()
    assert not optimizer.state.get(mine[0].weight)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert_same(mine, twin)
    optimizer.add_param_group({"params": []})
    optimizer.step()


def test_closures_schedulers_copies_and_pickles(kernel_device):
    module = net(kernel_device)
    optimizer = FusedSGD(module.parameters(), lr=0.002, momentum=0.9, wd_after_momentum=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.002, total_steps=20)
    kept = {"wd_after_momentum": True, "set_grad_none": False, "most_recent_scale": 1.0}
    check_closures_copies_and_pickles(module, optimizer, schedule, steps=10, **kept)
    assert optimizer.param_groups[0]["momentum"] != 0.9
    check_zeroing(module, optimizer)


@pytest.mark.parametrize("options", ["plain", "dampening"])
def test_a_step_can_be_steered(kernel_device, options):
    # The first step is skipped, so the second step has the first gradient.
    module, twin = net(kernel_device), net(kernel_device)
    optimizer = FusedSGD(module.parameters(), lr=0.1, **OPTIONS[options])
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, **OPTIONS[options])
    check_steering(kernel_device, (module, optimizer), (twin, reference))


@pytest.mark.parametrize("overflow", [None, 0, 1])
def test_torchs_grad_scaler(kernel_device, overflow):
    check_grad_scaler(kernel_device, pair(kernel_device, OPTIONS["dampening"]), overflow)


def test_what_is_refused(kernel_device):
    embedding = nn.Embedding(5, 2, sparse=True, device=kernel_device)
    embedding(torch.tensor([1, 2], device=kernel_device)).sum().backward()
    with pytest.raises(UnsupportedError, match="FusedSGD got a sparse gradient"):
        FusedSGD(embedding.parameters(), 0.1).step()
    with pytest.raises(ValueError, match="lr"):
        FusedSGD(embedding.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": 0.1, "momentum": -0.1}, "momentum=-0.1"),
        ({"lr": 0.1, "weight_decay": float("nan")}, "weight_decay"),
        ({"lr": 0.1, "nesterov": True}, "nesterov"),
        ({"lr": 0.1, "nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening=0.1"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        FusedSGD([nn.Parameter(torch.ones(1))], **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestGpu:
    @pytest.mark.parametrize("options", OPTIONS)
    def test_real_chunks_against_reference_and_torch(self, options):
        mine, reference, torchs = large(), large(), large()
        optimizers = [FusedSGD(own, 0.01, **OPTIONS[options]) for own in (mine, reference)]
        theirs = torch.optim.SGD(torchs, 0.01, **OPTIONS[options])
        for _ in range(10):
            optimizers[0].step()
            with references(torch.device("cuda")):
                optimizers[1].step()
            theirs.step()
        for one, two, three in zip(mine, reference, torchs, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(one, three, rtol=1e-5, atol=1e-5)

    def test_a_captured_step_replays_with_another_lr_and_two_runs_are_bit_equal(self):
        mine, twin = large(), large()
        optimizer, eager = (FusedSGD(own, 0.01, momentum=0.9, dampening=0.1) for own in (mine, twin))
        graph = captured(optimizer.step)
        for lr in (0.01, 0.01, 0.002, 0.03):
            eager.param_groups[0]["lr"] = lr
            eager.step()
        for lr in (0.002, 0.03):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.gather()
            graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(mine, twin, strict=True))
