"""NovoGrad by its kernels, against the reference and float64: every dtype, size and layout in one table."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabricamp import ops
from fabricamp.ops import table
from tests.cuda_on_cpu.compiler import in_pairs, references
from tests.ops.rows import MIXES, Rows

many = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RULES = {
    "plain": ops.NovoGradRule(1e-2, eps=1e-4),
    "inside": ops.NovoGradRule(1e-2, 0.8, 0.95, 1e-4, 0.1, inside=True),
    "largest": ops.NovoGradRule(1e-2, 0.95, 0.98, 1e-4, 0.1, largest=True, grad_averaging=False),
    "from zero": ops.NovoGradRule(1e-2, 0.9, 0.5, 1e-4, 0.1, bias_correction=False, from_zero=True),
    "all": ops.NovoGradRule(1e-2, 0.0, 0.5, 1e-3, 0.1, inside=True, largest=True, from_zero=True),
}


class Case(Rows):
    def __init__(self, device, mix, seed=0):
        super().__init__(device, mix, seed)
        self.norms = [torch.zeros((), dtype=dtype, device=device) for dtype in self.wide]

    def step(self, rule, **options):
        rows = self.gradients, self.parameters, self.averages, self.steps, self.norms
        ops.novograd(*rows, rule, copies=self.copies, **options)


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
    assert {step.item() for step in mine.steps} == {3.0}


@many
@given(
    st.floats(1e-4, 0.1),
    st.floats(0, 0.99),
    st.floats(0, 0.9999),
    st.floats(0, 0.5),
    st.tuples(*[st.booleans()] * 5),
    st.integers(0, 10_000),
)
@pytest.mark.parametrize("kernels", [True, False])
def test_equals_the_formula_in_float64(kernel_device, kernels, lr, beta1, beta2, decay, flags, done):
    correct, inside, averaging, largest, from_zero = flags
    rule = ops.NovoGradRule(lr, beta1, beta2, 1e-3, decay, correct, inside, averaging, largest, from_zero)
    generator = torch.Generator().manual_seed(done)
    sizes = (1, 130, 3 * table.CHUNK_SIZE + 1)
    rows = [[torch.rand(size, generator=generator) + 0.1 for size in sizes] for _ in range(3)]
    own = [[one.clone().to(kernel_device) for one in column] for column in rows]
    steps = [torch.tensor(float(done), device=kernel_device) for _ in sizes]
    norms = [torch.tensor(0.7, device=kernel_device) for _ in sizes]
    if kernels:
        ops.novograd(*own, steps, norms, rule)
    else:
        with references(kernel_device):
            ops.novograd(*own, steps, norms, rule)
    t = done + 1
    for index in range(len(sizes)):
        g, p, m = (column[index].double() for column in rows)
        norm = g.abs().max() if largest else g.norm()
        if done > 0 or from_zero:
            old = torch.tensor(0.7).double()
            power = 1 if largest else 2
            norm = (beta2 * old**power + (1 - beta2) * norm**power) ** (1 / power)
        c1, c2 = (1 - beta1**t, math.sqrt(1 - beta2**t)) if correct else (1.0, 1.0)
        denominator, new = norm / c2 + 1e-3, 1 - beta1 if averaging else 1
        if inside:
            m = beta1 * m + new * (g / denominator + decay * p)
            p = p - lr * m / c1
        else:
            m = beta1 * m + new * g
            p = p - lr * (m / c1 / denominator + decay * p)
        assert norms[index].item() == pytest.approx(norm.item(), rel=1e-5)
        for mine, exact in ((own[1], p), (own[2], m)):
            torch.testing.assert_close(mine[index].double().cpu(), exact, rtol=3e-6, atol=1e-5)
    assert {step.item() for step in steps} == {float(t)}


def test_an_overflow_changes_nothing(kernel_device):
    case = Case(kernel_device, "half masters")
    case.copies = [None if one is None else one.fill_(7) for one in case.copies]
    before = [one.clone() for one in case.written]
    state = ops.StepState.on(kernel_device)
    state.found_inf.fill_(1.0)
    case.step(RULES["plain"], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, case.written, strict=True))
    with references(kernel_device):
        case.step(RULES["plain"], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, case.written, strict=True))


@pytest.mark.parametrize("rule", ["plain", "largest"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 100, -1])
def test_a_bad_value_stays_in_its_tensor(kernel_device, bad, where, rule):
    case = Case(kernel_device, "fp32")
    case.gradients[6][where] = bad
    theirs = case.twin()
    case.step(RULES[rule])
    with references(kernel_device):
        theirs.step(RULES[rule])
    case.assert_near(theirs)
    assert not math.isfinite(case.norms[6].item())
    assert all(torch.isfinite(one).all() for index, one in enumerate(case.parameters) if index != 6)


def test_gradients_of_zero_leave_only_the_decay(kernel_device):
    ones = [torch.ones(70, device=kernel_device)]
    zeros = [torch.zeros(70, device=kernel_device) for _ in range(2)]
    steps, norms = ([torch.zeros((), device=kernel_device)] for _ in range(2))
    ops.novograd(zeros[:1], ones, zeros[1:], steps, norms, ops.NovoGradRule(0.5, weight_decay=0.5))
    assert torch.equal(ones[0], torch.full_like(ones[0], 0.75))


def test_two_runs_are_bit_equal(kernel_device):
    cases = [Case(kernel_device, "everything") for _ in range(2)]
    for case in cases:
        for _ in range(3):
            case.step(RULES["inside"])
    assert all(torch.equal(one, other) for one, other in zip(cases[0].written, cases[1].written, strict=True))


def test_many_tensors(kernel_device):
    parameters = [torch.full((4,), float(index), device=kernel_device) for index in range(700)]
    gradients = [torch.full_like(one, index + 1.0) for index, one in enumerate(parameters)]
    averages = [torch.zeros_like(one) for one in parameters]
    steps, norms = ([torch.zeros((), device=kernel_device) for _ in parameters] for _ in range(2))
    ops.novograd(gradients, parameters, averages, steps, norms, ops.NovoGradRule(1.0, bias_correction=False, beta1=0.0))
    expected = torch.arange(700.0).sub(0.5).unsqueeze(1).expand(700, 4)
    torch.testing.assert_close(torch.stack(parameters).cpu(), expected)
    torch.testing.assert_close(torch.stack(norms).cpu(), torch.arange(1.0, 701.0) * 2)


def test_lr_may_be_a_tensor(kernel_device):
    case = Case(kernel_device, "fp32")
    theirs, third = case.twin(), case.twin()
    rule = replace(RULES["inside"], lr=torch.tensor(0.25, device=kernel_device))
    case.step(rule)
    with references(kernel_device):
        theirs.step(rule)
    case.assert_near(theirs)
    third.step(replace(rule, lr=0.25))
    case.assert_near(third)
