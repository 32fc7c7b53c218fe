"""FusedAdagrad as a torch Optimizer: torch's numbers, torch's and apex's state, groups, scalers, graphs."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fabricamp.errors import ConfigError
from fabricamp.optimizers import FusedAdagrad, UnsupportedError
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
    "l2": {"weight_decay": 0.1, "maximize": True},
    "lr decay": {"lr_decay": 0.1, "eps": 1e-3},
}


def pair(device, options, dtype=torch.float32, **theirs):
    """Two equal modules, one with ours and one with torch's optimizer."""
    one, other = net(device, dtype), net(device, dtype)
    return (one, FusedAdagrad(one.parameters(), lr=0.01, **options)), (
        other,
        torch.optim.Adagrad(other.parameters(), lr=0.01, **options, **theirs),
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


def test_a_hundred_steps_with_decoupled_weight_decay(kernel_device):
    mine, twin = net(kernel_device), net(kernel_device)
    optimizer = FusedAdagrad(mine.parameters(), 0.01, weight_decay=0.1, adagrad_w_mode=True)
    sums = [torch.zeros_like(p) for p in twin.parameters()]
    for step in range(100):
        gradients(mine, step)
        gradients(twin, step)
        optimizer.step()
        with torch.no_grad():
            for p, total in zip(twin.parameters(), sums, strict=True):
                total.add_(p.grad.square())
                p.sub_(0.01 * (p.grad / (total.sqrt() + 1e-10) + 0.1 * p))
    assert_same(mine, twin, 1e-5)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.floats(0, 0.5),
    st.floats(1e-6, 0.1),
    st.floats(0, 0.2),
    st.floats(0, 0.5),
    st.booleans(),
    st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=4),
)
def test_any_rule_and_any_shapes_follow_torch(kernel_device, lr, eps, decay, lr_decay, maximize, shapes):
    options = {"lr": lr, "eps": eps, "weight_decay": decay, "lr_decay": lr_decay, "maximize": maximize}
    mine, twin = ([nn.Parameter(torch.ones(shape, device=kernel_device)) for shape in shapes] for _ in range(2))
    optimizer, reference = FusedAdagrad(mine, **options), torch.optim.Adagrad(twin, **options)
    for step in range(4):
        for index, (one, other) in enumerate(zip(mine, twin, strict=True)):
            one.grad = None if (step + index) % 3 == 0 else torch.full_like(one, step + index + 2.0)
            other.grad = None if one.grad is None else one.grad.clone()
        optimizer.step()
        reference.step()
    for one, other in zip(mine, twin, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_state_goes_to_torch_and_back(kernel_device, options):
    (mine, optimizer), (twin, reference) = pair(kernel_device, OPTIONS[options])
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
    assert {state["step"].item() for state in optimizer.state.values()} == {9.0}


def test_apexs_layout_loads(kernel_device):
    (mine, optimizer), (twin, reference) = pair(kernel_device, {"weight_decay": 0.1})
    gradients(twin, 0)
    reference.step()
    mine.load_state_dict(twin.state_dict())
    state = copy.deepcopy(reference.state_dict())
    for entry in state["state"].values():
        del entry["step"]
    keep = ("lr", "eps", "weight_decay", "params")
    state["param_groups"] = [{key: group[key] for key in keep} for group in state["param_groups"]]
    optimizer.load_state_dict(state)
    assert all("step" not in entry for entry in state["state"].values())
    for module, one in ((mine, optimizer), (twin, reference)):
        gradients(module, 1)
        one.step()
    assert_same(mine, twin)
    assert {entry["step"].item() for entry in optimizer.state.values()} == {1.0}


def test_half_parameters_have_fp32_state_which_loading_does_not_round(kernel_device):
    module = net(kernel_device, torch.float16)
    optimizer = FusedAdagrad(module.parameters(), 0.1)
    gradients(module, 0, scale=1e-4)  # its square underflows in fp16
    optimizer.step()
    states = [optimizer.state[p] for p in module.parameters()]
    assert all(state["sum"].dtype == torch.float32 and state["sum"].any() for state in states)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other = FusedAdagrad(net(kernel_device, torch.float16).parameters(), 0.1)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for state, loaded in zip(states, other.state.values(), strict=True):
        assert loaded.keys() == state.keys()
        for name, value in state.items():
            assert value.dtype == loaded[name].dtype
            assert torch.equal(value, loaded[name])


def test_groups_differ_change_and_grow_with_missing_gradients(kernel_device):
    mine, twin = net(kernel_device), net(kernel_device)

    def build(module, kind):
        first, second, third = module[0], module[2], module[3]
        groups = [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "eps": 1e-3}]
        return kind(groups, lr=0.01), {"params": list(third.parameters()), "weight_decay": 0.3, "maximize": True}

    pairs = [(mine, *build(mine, FusedAdagrad)), (twin, *build(twin, torch.optim.Adagrad))]
    for step in range(12):
        for module, optimizer, late in pairs:
            gradients(module, step)
            if step < 2 or step == 9:
                module[2].bias.grad = None
            if step == 4:
                optimizer.param_groups[0]["lr"] = 0.003
                optimizer.param_groups[1]["weight_decay"] = 0.2
            if step == 7:
                optimizer.add_param_group(late)
                if module is twin:  # torch's own makes state in its constructor only: 2.11 has none for these
                    for p in late["params"]:
                        optimizer.state[p] = {"step": torch.zeros(()), "sum": torch.zeros_like(p)}
            optimizer.step()
    assert_same(mine, twin, 1e-5)
    assert pairs[0][1].state[mine[2].bias]["step"].item() == 9
    pairs[0][1].add_param_group({"params": []})
    pairs[0][1].zero_grad()
    pairs[0][1].step()
    assert_same(mine, twin, 1e-5)


def test_closures_schedulers_copies_and_pickles(kernel_device):
    module = net(kernel_device)
    optimizer = FusedAdagrad(module.parameters(), lr=0.1, adagrad_w_mode=True, set_grad_none=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    check_closures_copies_and_pickles(module, optimizer, schedule, adagrad_w_mode=1, set_grad_none=False)
    check_zeroing(module, optimizer)


def test_a_step_can_be_steered(kernel_device):
    module, twin = net(kernel_device), net(kernel_device)
    optimizer = FusedAdagrad(module.parameters())
    check_steering(kernel_device, (module, optimizer), (twin, torch.optim.Adagrad(twin.parameters())))
    assert {entry["step"].item() for entry in optimizer.state.values()} == {2.0}


@pytest.mark.parametrize("overflow", [None, 0, 1])
def test_torchs_grad_scaler(kernel_device, overflow):
    check_grad_scaler(kernel_device, pair(kernel_device, {}), overflow)


def test_sparse_gradients_are_refused(kernel_device):
    embedding = nn.Embedding(5, 2, sparse=True, device=kernel_device)
    embedding(torch.tensor([1, 2], device=kernel_device)).sum().backward()
    with pytest.raises(UnsupportedError, match="FusedAdagrad got a sparse gradient"):
        FusedAdagrad(embedding.parameters()).step()


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"eps": -1.0}, {"weight_decay": float("nan")}, {"lr_decay": -0.1}])
def test_options_that_cannot_work(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        FusedAdagrad([nn.Parameter(torch.ones(1))], **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestGpu:
    @pytest.mark.parametrize("options", OPTIONS)
    def test_real_chunks_against_reference_and_torch(self, options):
        mine, reference, torchs = large(), large(), large()
        optimizers = [FusedAdagrad(own, 0.01, **OPTIONS[options]) for own in (mine, reference)]
        theirs = torch.optim.Adagrad(torchs, 0.01, **OPTIONS[options])
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
        optimizer, eager = (FusedAdagrad(own, 0.01, lr_decay=0.1) for own in (mine, twin))
        graph = captured(optimizer.step)
        for lr in (0.01, 0.01, 0.002, 0.03):
            eager.param_groups[0]["lr"] = lr
            eager.step()
        for lr in (0.002, 0.03):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.gather()
            graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(mine, twin, strict=True))
