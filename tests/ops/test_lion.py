"""Lion by its kernel, against the reference and float64: every dtype, size and layout in one launch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabricamp import ops
from tests.cuda_on_cpu.compiler import in_pairs, references
from tests.ops.rows import MIXES, Rows

many = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RULES = {
    "plain": ops.LionRule(1e-2),
    "decay": ops.LionRule(1e-2, 0.8, 0.95, 0.1),
    "signs alone": ops.LionRule(1e-2, 0.0, 0.0),
}


class Case(Rows):
    def step(self, rule, **options):
        ops.lion(self.gradients, self.parameters, self.averages, rule, copies=self.copies, **options)


@in_pairs("mix, rule", MIXES, RULES)
def test_equals_its_reference(kernel_device, mix, rule):
    mine = Case(kernel_device, mix)
    theirs = mine.twin()
    state = ops.StepState.on(kernel_device)
    state.multiplier.fill_(0.5)
    for limit in (None, 0.3, None):
        mine.step(RULES[rule], state=state, limit=limit)
        with references(kernel_device):
            theirs.step(RULES[rule], state=state, limit=limit)
    mine.assert_near(theirs)


@many
@given(st.floats(1e-4, 0.1), st.floats(0, 0.99), st.floats(0, 0.99), st.floats(0, 0.5), st.integers(0, 10_000))
def test_equals_the_formula_in_float64(kernel_device, lr, beta1, beta2, decay, seed):
    generator = torch.Generator().manual_seed(seed)
    g, p, m = (torch.randn(130, generator=generator, dtype=torch.float64) for _ in range(3))
    # If momentum and gradient cancel, rounding decides the sign.
    g = torch.where((beta1 * m + (1 - beta1) * g).abs() < 1e-4, m, g)
    own = [one.to(kernel_device, torch.float32) for one in (g, p, m)]
    g, p, m = (one.double().cpu() for one in own)
    ops.lion(*([one] for one in own), ops.LionRule(lr, beta1, beta2, decay))
    p = p - lr * ((beta1 * m + (1 - beta1) * g).sign() + decay * p)
    m = beta2 * m + (1 - beta2) * g
    for mine, exact in zip(own[1:], (p, m), strict=True):
        torch.testing.assert_close(mine.double().cpu(), exact, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_nothing_moves_where_nothing_pulls_and_a_nan_is_not_lost(kernel_device, by_kernel):
    gradient, parameter, average = (torch.zeros(4, device=kernel_device) for _ in range(3))
    gradient[1:] = torch.tensor([math.nan, math.inf, -math.inf])
    columns = [gradient], [parameter], [average], ops.LionRule(0.5)
    if by_kernel:
        ops.lion(*columns)
    else:
        with references(kernel_device):
            ops.lion(*columns)
    expected = torch.tensor([0.0, math.nan, -0.5, 0.5])
    assert torch.equal(parameter.cpu().nan_to_num(9.0), expected.nan_to_num(9.0))


def test_an_overflow_changes_nothing(kernel_device):
    case = Case(kernel_device, "half masters")
    case.copies = [None if one is None else one.fill_(7) for one in case.copies]
    before = [one.clone() for one in case.written]
    state = ops.StepState.on(kernel_device)
    state.found_inf.fill_(1.0)
    case.step(RULES["decay"], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, case.written, strict=True))
    with references(kernel_device):
        case.step(RULES["decay"], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, case.written, strict=True))


def test_two_runs_are_bit_equal(kernel_device):
    cases = [Case(kernel_device, "everything") for _ in range(2)]
    for case in cases:
        for _ in range(3):
            case.step(RULES["decay"])
    assert all(torch.equal(one, other) for one, other in zip(cases[0].written, cases[1].written, strict=True))


def test_many_tensors_in_one_launch(kernel_device):
    parameters = [torch.full((3,), float(index), device=kernel_device) for index in range(700)]
    gradients, averages = ([make(one) for one in parameters] for make in (torch.ones_like, torch.zeros_like))
    ops.lion(gradients, parameters, averages, ops.LionRule(1.0))
    torch.testing.assert_close(torch.stack(parameters).cpu(), torch.arange(700.0).sub(1).unsqueeze(1).expand(700, 3))
    ops.lion([], [], [], ops.LionRule(1.0))
