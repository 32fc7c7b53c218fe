"""LAMB by its kernels, against the reference and float64: every dtype, size and layout in one table."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabricamp import ops
from fabricamp.ops import table
from fabricamp.ops.lamb import launch_norm
from fabricamp.ops.table import Table
from tests.cuda_on_cpu.compiler import in_pairs, references
from tests.ops.rows import MIXES, Rows

many = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RULES = {
    "plain": ops.LambRule(1e-2),
    "clipped": ops.LambRule(1e-2, 0.8, 0.95, 1e-6, 0.1, max_norm=0.5),
    "l2": ops.LambRule(1e-2, 0.9, 0.99, 1e-3, 0.1, decoupled=False, grad_averaging=False),
    "no decay": ops.LambRule(1e-2, 0.0, 0.5, 1e-3, 0.0, bias_correction=False),
    "nvlamb": ops.LambRule(1e-2, weight_decay=0.0, nvlamb=True, max_norm=1e9),
}


class Case(Rows):
    def __init__(self, device, mix, seed=0):
        super().__init__(device, mix, seed)
        self.squares = self.zeros()

    def step(self, rule, **options):
        rows = self.gradients, self.parameters, self.averages, self.squares, self.steps
        ops.lamb(*rows, rule, copies=self.copies, **options)


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
    mine.assert_near(
        theirs, fp64=1e-8 if rule == "clipped" else 2e-12
    )  # the norm of fp32 gradients is only exact to fp32
    assert {step.item() for step in mine.steps} == {3.0}


@many
@given(
    st.floats(1e-4, 0.1),
    st.floats(0, 0.99),
    st.floats(0, 0.9999),
    st.floats(0, 0.5),
    st.sampled_from([0.0, 0.5, 3.0, 1e6]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10_000),
)
@pytest.mark.parametrize("kernels", [True, False])
def test_equals_the_formula_in_float64(
    kernel_device, kernels, lr, beta1, beta2, decay, most, decoupled, averaging, nvlamb, done
):
    rule = ops.LambRule(
        lr, beta1, beta2, 1e-3, decay, decoupled=decoupled, grad_averaging=averaging, max_norm=most, nvlamb=nvlamb
    )
    generator = torch.Generator().manual_seed(done)
    sizes = (1, 130, 3 * table.CHUNK_SIZE + 1)
    # All values are positive: if a gradient and its weight decay cancelled, rounding errors would dominate the result.
    rows = [[torch.rand(size, generator=generator) + 0.1 for size in sizes] for _ in range(4)]
    own = [[one.clone().to(kernel_device) for one in column] for column in rows]
    steps = [torch.tensor(float(done), device=kernel_device) for _ in sizes]
    if kernels:
        ops.lamb(*own, steps, rule)
    else:
        with references(kernel_device):
            ops.lamb(*own, steps, rule)
    norm = math.sqrt(sum(g.double().square().sum().item() for g in rows[0]))
    t = done + 1
    for index in range(len(sizes)):
        g, p, m, v = (column[index].double() for column in rows)
        if 0 < most < norm:
            g = g / (norm / most)
        if not decoupled:
            g = g + decay * p
        m, v = beta1 * m + (1 - beta1 if averaging else 1) * g, beta2 * v + (1 - beta2) * g * g
        u = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + 1e-3)
        u = u + (decay * p if decoupled else 0)
        ratio = p.norm() / u.norm() if nvlamb or decay != 0 else 1.0
        for mine, exact in zip((own[1], own[2], own[3]), (p - lr * ratio * u, m, v), strict=True):
            torch.testing.assert_close(mine[index].double().cpu(), exact, rtol=3e-6, atol=1e-5)
    assert {step.item() for step in steps} == {float(t)}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_a_norm_is_zero_the_step_is_lr(kernel_device, dtype, kernels):
    zero, two = (torch.full((70,), value, device=kernel_device, dtype=dtype) for value in (0.0, 2.0))
    rows = [[one.clone() for one in column] for column in ((two, zero), (zero, two), (zero, zero), (zero, zero))]
    steps = [torch.zeros((), device=kernel_device) for _ in range(2)]
    with contextlib.nullcontext() if kernels else references(kernel_device):
        ops.lamb(*rows, steps, ops.LambRule(0.5, eps=0.0625, weight_decay=0.0, nvlamb=True))
    torch.testing.assert_close(rows[1][0], torch.full_like(zero, -0.5 * 2 / 2.0625), rtol=1e-6, atol=0)
    assert torch.equal(rows[1][1], two)


def test_an_overflow_changes_nothing(kernel_device):
    case = Case(kernel_device, "half masters")
    case.copies = [None if one is None else one.fill_(7) for one in case.copies]
    before = [one.clone() for one in case.written]
    state = ops.StepState.on(kernel_device)
    state.found_inf.fill_(1.0)
    case.step(RULES["clipped"], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, case.written, strict=True))
    with references(kernel_device):
        case.step(RULES["clipped"], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, case.written, strict=True))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 100, -1])
def test_a_bad_value_stays_in_its_tensor_unless_it_clips(kernel_device, bad, where):
    for rule in (RULES["plain"], RULES["clipped"]):
        case = Case(kernel_device, "fp32")
        case.gradients[6][where] = bad
        theirs = case.twin()
        case.step(rule)
        with references(kernel_device):
            theirs.step(rule)
        case.assert_near(theirs)
        assert not torch.isfinite(case.parameters[6]).any()
        assert all(torch.isfinite(one).all() for index, one in enumerate(case.parameters) if index != 6)


def test_two_runs_are_bit_equal(kernel_device):
    cases = [Case(kernel_device, "everything") for _ in range(2)]
    for case in cases:
        for _ in range(3):
            case.step(RULES["clipped"])
    assert all(torch.equal(one, other) for one, other in zip(cases[0].written, cases[1].written, strict=True))


def test_many_tensors(kernel_device):
    parameters = [torch.full((3,), index + 1.0, device=kernel_device) for index in range(700)]
    gradients = [torch.ones_like(one) for one in parameters]
    moments = [[torch.zeros_like(one) for one in parameters] for _ in "mv"]
    steps = [torch.zeros((), device=kernel_device) for _ in parameters]
    ops.lamb(gradients, parameters, *moments, steps, ops.LambRule(0.5, weight_decay=0.0, nvlamb=True))
    expected = torch.arange(1.0, 701.0).mul(0.5).unsqueeze(1).expand(700, 3)
    torch.testing.assert_close(torch.stack(parameters).cpu(), expected)


def test_lr_may_be_a_tensor(kernel_device):
    case = Case(kernel_device, "fp32")
    theirs = case.twin()
    lr = torch.tensor(0.25, device=kernel_device)
    case.step(replace(RULES["plain"], lr=lr))
    with references(kernel_device):
        theirs.step(replace(RULES["plain"], lr=lr))
    case.assert_near(theirs)
    theirs = Case(kernel_device, "fp32")
    theirs.step(replace(RULES["plain"], lr=0.25))
    case.assert_near(theirs)


def test_a_measured_norm_need_not_be_measured_again(kernel_device):
    gradients = [torch.randn(size, device=kernel_device) * 8 for size in (3, 200)]
    zeros = [torch.zeros_like(one) for one in gradients]
    rows = Table([gradients, zeros, zeros, zeros, [None, None]], device=kernel_device)
    state = ops.StepState.on(kernel_device, scale=4.0)
    statistics = ops.gradient_statistics(gradients, state.scale, 2.0)
    ops.finish(state, statistics, scale=state.scale, divisor=2.0, max_norm=0.5)
    assert state.norm > 1
    for limit, measured in ((None, None), (None, (state.scale, 2.0)), (1e9, None)):
        norm = launch_norm(rows, ops.Steering(state, limit), measured)
        assert norm.dtype == torch.float64
        assert norm.item() == pytest.approx(0.5, rel=1e-5)
    assert launch_norm(rows, ops.Steering(state, 1e-3)).item() == pytest.approx(1e-3 * 203**0.5, rel=0.2)
    assert launch_norm(rows, ops.Steering()).item() == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-5)
