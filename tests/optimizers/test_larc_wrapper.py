"""LARC around any optimizer: the plain formula's numbers, one state, schedulers, closures, scalers, graphs."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import defaultdict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fabricamp.errors import ConfigError
from fabricamp.optimizers import LARC, FusedAdam, FusedSGD, UnsupportedError
from fabricamp.precision import Clip, OptLevel
from fabricamp.strategies.base import Strategy
from tests.cuda_on_cpu.compiler import in_pairs, references
from tests.optimizers.checks import check_closures_copies_and_pickles
from tests.optimizers.twins import assert_same, captured, gradients, large, net
from tests.windows import end_step, make_step

INNER = {
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01, foreach=False),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "FusedAdam": lambda p: FusedAdam(p, lr=0.1, weight_decay=0.01),
}
OPTIONS = [{}, {"trust_coefficient": 0.001, "clip": False}, {"trust_coefficient": 0.5, "eps": 1e-3}]


@torch.no_grad()
def by_hand(optimizer, trust_coefficient=0.02, clip=True, eps=1e-8):
    """The step in fp64, tensor by tensor, with the host reading every norm."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = 0.0
        for p in group["params"]:
            if p.grad is None:
                continue
            of_parameter, of_gradient = p.double().norm().item(), p.grad.double().norm().item()
            if of_parameter == 0 or of_gradient == 0:
                continue
            rate = trust_coefficient * of_parameter / (of_gradient + decay * of_parameter + eps)
            rate = min(rate / group["lr"], 1) if clip else rate
            p.grad.add_(p, alpha=decay).mul_(rate)
    optimizer.step()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay


@in_pairs("inner, options", INNER, OPTIONS)
def test_a_hundred_steps_follow_the_formula(kernel_device, inner, options):
    mine, twin = net(kernel_device), net(kernel_device)
    optimizer, reference = LARC(INNER[inner](mine.parameters()), **options), INNER[inner](twin.parameters())
    for step in range(100):
        gradients(mine, step, contiguous=step % 2 == 0)
        gradients(twin, step)
        optimizer.step()
        by_hand(reference, **options)
    assert_same(mine, twin, 1e-5)
    assert optimizer.param_groups[0]["weight_decay"] == 0.01


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.floats(1e-3, 1),
    st.floats(1e-3, 1),
    st.floats(0, 0.2),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
    st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=4),
)
def test_any_shapes_and_missing_gradients(kernel_device, lr, trust, decay, clip, dtype, shapes):
    mine, twin = (
        [
            nn.Parameter(torch.full(shape, index * 0.5, device=kernel_device, dtype=dtype))
            for index, shape in enumerate(shapes)
        ]
        for _ in range(2)
    )
    optimizer = LARC(FusedSGD(mine, lr, weight_decay=decay), trust, clip)
    reference = torch.optim.SGD(twin, lr, weight_decay=decay)
    for step in range(4):
        for index, (one, other) in enumerate(zip(mine, twin, strict=True)):
            one.grad = None if (step + index) % 3 == 0 else torch.full_like(one, float(step - index))
            other.grad = None if one.grad is None else one.grad.clone()
        optimizer.step()
        by_hand(reference, trust, clip)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for one, other in zip(mine, twin, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("inner", INNER)
def test_it_is_an_optimizer_with_the_groups_and_state_of_the_other(kernel_device, inner):
    module = net(kernel_device)
    first, late = list(module[0].parameters()), list(module[2].parameters())
    own = INNER[inner](first)
    optimizer = LARC(own)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.optim is own
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for step in range(4):
        gradients(module, step)
        before = late[0].clone()
        if step == 2:
            optimizer.add_param_group({"params": late, "lr": 0.1})
        optimizer.step()
        assert torch.equal(before, late[0]) == (step < 2)
        if step < 2:
            scheduler.step()
    assert seen == ["before", "after"] * 4
    assert own.param_groups is optimizer.param_groups
    assert own.param_groups[0]["lr"] == pytest.approx(0.025)
    assert own.state is optimizer.state
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in (*first, *late))
    optimizer.step()


def test_state_dicts_are_the_inner_optimizers(kernel_device):
    mine, twin = net(kernel_device), net(kernel_device)
    optimizer, other = (LARC(INNER["FusedSGD"](module.parameters())) for module in (mine, twin))
    calls = []
    other.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    for step in range(6):
        gradients(mine, step)
        if step >= 3:
            gradients(twin, step)
            other.step()
        optimizer.step()
        if step == 2:
            state = optimizer.state_dict()
            assert state.pop("more") == 1
            other.load_state_dict(copy.deepcopy(state))
            twin.load_state_dict(mine.state_dict())
            assert other.param_groups is other.optim.param_groups
    assert_same(mine, twin, 0)
    assert calls == ["loaded"]


def test_closures_copies_and_pickles(kernel_device):
    module = net(kernel_device)
    optimizer = LARC(INNER["FusedSGD"](module.parameters()), 0.01, clip=False, eps=1e-6)
    check_closures_copies_and_pickles(module, optimizer, trust_coefficient=0.01, clip=False, eps=1e-6)
    optimizer.zero_grad()  # zeroes them, like FusedSGD itself
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


def test_weight_decay_comes_back_after_an_error():
    module = net("cpu")
    optimizer = LARC(INNER["torch SGD"](module.parameters()))
    optimizer.optim.register_step_post_hook(lambda *_: 1 / 0)
    gradients(module, 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.01


@pytest.mark.parametrize("runs", ["kernel", "reference"])
def test_gradients_are_not_kept_alive(kernel_device, runs):
    module = net(kernel_device)
    optimizer = LARC(INNER["FusedSGD"](module.parameters()))
    with references(kernel_device) if runs == "reference" else contextlib.nullcontext():
        for contiguous in (False, True):
            gradients(module, 0, contiguous=contiguous)
            alive = [weakref.ref(parameter.grad) for parameter in module.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            assert [one() for one in alive] == [None] * len(alive)


def test_a_change_of_weight_decay_and_memory_is_seen(kernel_device):
    mine, twin = net(kernel_device), net(kernel_device)
    optimizer, reference = LARC(INNER["FusedSGD"](mine.parameters())), INNER["torch SGD"](twin.parameters())
    for step in range(4):
        for module, one in ((mine, optimizer), (twin, reference)):
            gradients(module, step)
            if step == 1:
                one.param_groups[0].update(weight_decay=0.3, lr=0.05)
            if step == 2:
                for p in module.parameters():
                    p.data = p.data.clone()
        optimizer.step()
        by_hand(reference)
    assert_same(mine, twin, 1e-5)


@pytest.mark.parametrize("overflow", [None, 0, 1])
@pytest.mark.parametrize("inner", ["FusedSGD", "FusedAdam", "torch SGD", "fused torch SGD", "fused torch AdamW"])
def test_torchs_grad_scaler(kernel_device, inner, overflow):
    builds = {
        **INNER,
        "fused torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
        "fused torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01, fused=True),
    }
    mine, twin = net(kernel_device), net(kernel_device)
    optimizer, reference = LARC(builds[inner](mine.parameters())), builds[inner](twin.parameters())
    scaler = torch.amp.GradScaler(kernel_device.type, init_scale=1024.0)
    for step in range(3):
        gradients(mine, step, scale=float(scaler.scale(torch.ones((), device=kernel_device))))
        if step == overflow:
            next(mine.parameters()).grad[0, 0, 0, 2] = float("inf")
        else:
            gradients(twin, step)
            by_hand(reference)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (1024.0 if overflow is None else 512.0)
    assert_same(mine, twin, 1e-5)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("inner", ["FusedSGD", "torch SGD"])
def test_a_precision_steps_it(kernel_device, inner, level):
    module, twin = net(kernel_device), net(kernel_device)
    precision = OptLevel(level)
    conversion = precision.convert_module(module)
    optimizer, reference = LARC(INNER[inner](module.parameters())), INNER["torch SGD"](twin.parameters())
    precision.setup_optimizers(module, [optimizer], Strategy())
    x = torch.randn(3, 2, 6, 6, device=kernel_device)
    for _ in range(5):
        for own, one in ((module, optimizer), (twin, reference)):
            one.zero_grad()
            if own is twin:
                own(x).square().mean().backward()
                nn.utils.clip_grad_norm_(own.parameters(), 1.0)
                by_hand(reference)
                continue
            loss = precision.forward(lambda: module(precision.convert_input(x)).float().square().mean())
            precision.backward(loss)
            make_step(precision, optimizer, clip=Clip(1.0))
            end_step(precision, loss.detach())
    conversion.undo()
    assert_same(module, twin, {"O0": 1e-5, "O1": 1e-3, "O2": 1e-3, "O4": 1e-2, "O5": 1e-2}[level])


def test_what_is_refused(kernel_device):
    weight = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ConfigError, match="LARC wraps an optimizer, got list"):
        LARC(weight)
    with pytest.raises(ConfigError, match="cannot wrap LBFGS"):
        LARC(torch.optim.LBFGS(weight))
    with pytest.raises(ConfigError, match="cannot wrap LARC"):
        LARC(LARC(FusedAdam(weight)))
    with pytest.raises(ConfigError, match="trust_coefficient=-1"):
        LARC(FusedAdam(weight), -1)
    assert not hasattr(LARC(FusedAdam(weight)), "nothing")
    embedding = nn.Embedding(5, 2, sparse=True, device=kernel_device)
    embedding(torch.tensor([1, 2], device=kernel_device)).sum().backward()
    with pytest.raises(UnsupportedError, match="LARC got a sparse gradient"):
        LARC(torch.optim.SGD(embedding.parameters(), 0.1)).step()


@pytest.mark.parametrize("inner", INNER)
def test_another_state_and_other_groups_go_to_the_wrapped_optimizer(kernel_device, inner):
    mine = [nn.Parameter(torch.ones(4, device=kernel_device))]
    optimizer = LARC(INNER[inner](mine))
    mine[0].grad = torch.full_like(mine[0], 0.5)
    optimizer.step()
    optimizer.state = defaultdict(dict)
    assert not optimizer.optim.state
    fresh = LARC(INNER[inner]([nn.Parameter(mine[0].detach().clone())]))
    for one in (optimizer, fresh):
        one.param_groups[0]["params"][0].grad = torch.full_like(mine[0], 0.5)
        one.step()
    assert torch.equal(mine[0], fresh.param_groups[0]["params"][0])
    assert len(optimizer.state_dict()["state"]) == 1
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.5}]
    assert optimizer.optim.param_groups[0]["lr"] == 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestGpu:
    def test_real_chunks_against_reference_and_formula(self):
        mine, reference, plain = large(), large(), large()
        optimizers = [LARC(INNER["FusedSGD"](own)) for own in (mine, reference)]
        theirs = INNER["torch SGD"](plain)
        given_gradients = [p.grad.clone() for p in mine]
        for _ in range(10):
            for own in (mine, reference, plain):
                for p, gradient in zip(own, given_gradients, strict=True):
                    p.grad.copy_(gradient)
            optimizers[0].step()
            with references(torch.device("cuda")):
                optimizers[1].step()
            by_hand(theirs)
        for one, two, three in zip(mine, reference, plain, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(one, three, rtol=1e-5, atol=1e-5)

    def test_a_step_waits_for_nothing(self):
        optimizer = LARC(INNER["FusedSGD"](large()))
        for _ in range(3):
            optimizer.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_a_captured_step_replays_with_another_lr_and_two_runs_are_bit_equal(self):
        mine, twin = large(), large()
        optimizer, eager = (LARC(INNER["FusedSGD"](own), 0.5) for own in (mine, twin))
        graph = captured(optimizer.step)
        for lr in (0.1, 0.1, 0.002, 0.03):
            eager.param_groups[0]["lr"] = lr
            eager.step()
        for lr in (0.002, 0.03):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.gather()
            graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(mine, twin, strict=True))
