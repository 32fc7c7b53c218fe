"""LARC's rates by its kernels, against the reference and float64: every dtype, size and layout in one table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabricamp import ops
from tests.cuda_on_cpu.compiler import references
from tests.ops.lists import FLOATS, all_pairs, assert_near, tensors

many = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RULES = {
    "clip": ops.LarcRule(0.1),
    "decay": ops.LarcRule(0.1, 0.3, 0.001),
    "rate alone": ops.LarcRule(0.1, 0.3, 0.02, 1e-3, clip=False),
}


def formula(gradient, parameter, rule, multiplier=1.0):
    gradient, parameter = gradient.double() * multiplier, parameter.double()
    of_gradient, of_parameter = gradient.norm(), parameter.norm()
    if of_gradient == 0 or of_parameter == 0:
        return gradient
    rate = rule.trust_coefficient * of_parameter / (of_gradient + rule.weight_decay * of_parameter + rule.eps)
    if rule.clip:
        rate = min(rate / rule.lr, 1)
    return (gradient + rule.weight_decay * parameter) * rate


def check(gradients, before, parameters, rule, multiplier=1.0):
    for mine, gradient, parameter in zip(gradients, before, parameters, strict=True):
        exact = formula(gradient, parameter, rule, multiplier)
        coarse = torch.float32 if mine.dtype == torch.float64 and parameter.dtype != torch.float64 else mine.dtype
        assert_near(mine, exact, coarse, factor=4)


@pytest.mark.parametrize("runs", ["kernel", "reference"])
@pytest.mark.parametrize("rule", RULES)
def test_all_pairs_of_dtypes(kernel_device, rule, runs):
    gradients, parameters = all_pairs(kernel_device)
    before = [one.clone() for one in gradients]
    state = ops.StepState.on(kernel_device)
    state.multiplier.fill_(0.5)
    if runs == "kernel":
        ops.larc(gradients, parameters, RULES[rule], state=state)
    else:
        with references(kernel_device):
            ops.larc(gradients, parameters, RULES[rule], state=state)
    check(gradients, before, parameters, RULES[rule], 0.5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_layouts_and_sizes(kernel_device, dtype, rule):
    gradients, parameters = tensors(kernel_device, dtype, seed=1), tensors(kernel_device, dtype)
    before, values = [one.clone() for one in gradients], [one.clone() for one in parameters]
    ops.larc(gradients, parameters, RULES[rule])
    check(gradients, before, parameters, RULES[rule])
    assert all(torch.equal(one, old) for one, old in zip(parameters, values, strict=True))


def test_gradients_of_another_layout_than_their_parameters(kernel_device):
    parameters = [one for one in tensors(kernel_device) if one.dim() > 1]
    gradients = [torch.empty(one.shape, device=kernel_device).copy_(one * 3) for one in parameters]
    gradients[0] = torch.zeros(one_more := [2 * size for size in parameters[0].shape], device=kernel_device)[::2, ::2]
    gradients[0].copy_(parameters[0])
    assert len(one_more) == 2
    assert not gradients[0].is_contiguous()
    before = [one.clone() for one in gradients]
    ops.larc(gradients, parameters, RULES["decay"])
    check(gradients, before, parameters, RULES["decay"])


@many
@given(
    st.floats(1e-4, 10),
    st.sampled_from([0.0, 1e-4, 0.5]),
    st.floats(1e-4, 1),
    st.floats(0, 1e-3),
    st.booleans(),
    st.integers(1, 200),
    st.integers(0, 999),
)
def test_equals_the_formula_in_float64(kernel_device, lr, decay, trust, eps, clip, size, seed):
    rule = ops.LarcRule(lr, decay, trust, eps, clip=clip)
    generator = torch.Generator().manual_seed(seed)
    parameter, gradient = (
        (torch.rand(size, generator=generator, dtype=torch.float64) + 0.1).to(kernel_device) for _ in range(2)
    )
    twin, single = gradient.clone(), [gradient.float(), parameter.float()]
    exact = formula(gradient, parameter, rule)
    ops.larc([gradient], [parameter], rule)
    with references(kernel_device):
        ops.larc([twin], [parameter], rule)
    torch.testing.assert_close(gradient, exact, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(twin, exact, rtol=1e-12, atol=1e-14)
    ops.larc([single[0]], [single[1]], rule)
    torch.testing.assert_close(single[0].double(), exact, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("runs", ["kernel", "reference"])
def test_zeros_keep_their_gradient_and_nan_is_not_lost(kernel_device, runs):
    ones, zeros = torch.ones(70, device=kernel_device), torch.zeros(70, device=kernel_device)
    bad = ones.clone()
    bad[40] = float("nan")
    parameters = [zeros, ones, ones]
    gradients = [ones.clone(), zeros.clone(), bad]
    if runs == "kernel":
        ops.larc(gradients, parameters, RULES["decay"])
    else:
        with references(kernel_device):
            ops.larc(gradients, parameters, RULES["decay"])
    assert torch.equal(gradients[0], ones)
    assert torch.equal(gradients[1], zeros)
    assert gradients[2].isnan().all()


@pytest.mark.parametrize("runs", ["kernel", "reference"])
def test_an_overflow_changes_nothing(kernel_device, runs):
    gradients, parameters = tensors(kernel_device, torch.float16, seed=1), tensors(kernel_device)
    gradients[1][3] = float("inf")
    before = [one.clone() for one in gradients]
    state = ops.StepState.on(kernel_device)
    state.multiplier.fill_(0.5)
    state.found_inf.fill_(1.0)
    if runs == "kernel":
        ops.larc(gradients, parameters, RULES["decay"], state=state)
    else:
        with references(kernel_device):
            ops.larc(gradients, parameters, RULES["decay"], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, gradients, strict=True))


def test_two_runs_are_bit_equal_and_many_tensors_go_at_once(kernel_device):
    parameters = [torch.full((70,), index + 1.0, device=kernel_device) for index in range(300)]
    runs = []
    for _ in range(2):
        gradients = [torch.ones_like(one) for one in parameters]
        ops.larc(gradients, parameters, ops.LarcRule(1.0, trust_coefficient=0.001))
        runs.append(torch.stack(gradients))
    assert torch.equal(*runs)
    torch.testing.assert_close(runs[0][:, 0].cpu(), torch.arange(1, 301) * 0.001, rtol=1e-5, atol=0)
    ops.larc([], [], ops.LarcRule(1.0))
