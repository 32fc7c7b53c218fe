"""Adagrad by its kernel, against the reference and float64: every dtype, size and layout in one launch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabricamp import ops
from tests.cuda_on_cpu.compiler import in_pairs, references
from tests.ops.lists import FLOATS, TOLERANCE, Elsewhere, tensors

many = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RULES = {
    "plain": ops.AdagradRule(1e-2),
    "l2": ops.AdagradRule(1e-2, 1e-6, 0.1, maximize=True),
    "decoupled": ops.AdagradRule(1e-2, 1e-6, 0.1, 0.5, decoupled=True),
}
MIXES = {
    "fp32": [(torch.float32, torch.float32, None)],
    "half masters": [(torch.float16, torch.float32, torch.float16), (torch.float32, torch.float32, None)],
    "everything": [(one, other, None) for one, other in itertools.product(FLOATS, FLOATS)],
    "bf16 copies": [(torch.bfloat16, torch.float32, torch.bfloat16), (torch.float64, torch.float64, torch.float16)],
}


class Case:
    """Parameters with their state, gradients and copies."""

    def __init__(self, device, dtypes, seed=0):
        self.gradients, self.parameters, self.copies = [], [], []
        for index, (gradient, parameter, copy) in enumerate(dtypes):
            own = tensors(device, parameter, seed=seed + index)
            self.parameters += own
            self.gradients += [one.to(gradient) for one in tensors(device, parameter, seed=seed + index + 50)]
            self.copies += [None if copy is None else torch.empty_like(one, dtype=copy) for one in own]
        wide = [torch.promote_types(one.dtype, torch.float32) for one in self.parameters]
        self.sums = [torch.full_like(one, 0.1, dtype=kind) for one, kind in zip(self.parameters, wide, strict=True)]
        self.steps = [torch.zeros((), device=device) for _ in self.parameters]

    def twin(self):
        other = object.__new__(Case)
        for name, values in vars(self).items():
            setattr(other, name, [None if one is None else one.clone() for one in values])
        return other

    def step(self, rule, **options):
        ops.adagrad(self.gradients, self.parameters, self.sums, self.steps, rule, copies=self.copies, **options)

    @property
    def written(self):
        return [*self.parameters, *self.sums, *self.steps, *[one for one in self.copies if one is not None]]


@in_pairs("mix, rule", MIXES, RULES)
def test_equals_its_reference(kernel_device, mix, rule):
    mine = Case(kernel_device, MIXES[mix])
    theirs = mine.twin()
    state = ops.StepState.on(kernel_device)
    state.multiplier.fill_(0.5)
    for limit in (None, 0.3, None):
        mine.step(RULES[rule], state=state, limit=limit)
        with references(kernel_device):
            theirs.step(RULES[rule], state=state, limit=limit)
    # The last bit of half parameters may differ, and weight decay adds them to the state.
    kinds = [one.dtype for one in mine.parameters] * 3 + [one.dtype for one in mine.copies if one is not None]
    for one, other, kind in zip(mine.written, theirs.written, kinds, strict=True):
        assert one.dtype == other.dtype
        tolerance = 2e-12 if kind == torch.float64 else 4 * TOLERANCE[kind]
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert {one.item() for one in mine.steps} == {3.0}


@many
@given(
    st.floats(1e-4, 0.5),
    st.floats(1e-10, 1e-3),
    st.floats(0, 0.5),
    st.floats(0, 0.1),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_equals_the_formula_in_float64(kernel_device, lr, eps, decay, lr_decay, decoupled, done):
    rule = ops.AdagradRule(lr, eps, decay, lr_decay, decoupled=decoupled)
    generator = torch.Generator().manual_seed(done)
    p, g, h = (torch.rand(130, generator=generator, dtype=torch.float64) + 0.1 for _ in range(3))
    own = [one.to(kernel_device, torch.float32) for one in (g, p, h)]
    g, p, h = (one.double().cpu() for one in own)
    step = torch.tensor(float(done), device=kernel_device)
    ops.adagrad(*([one] for one in own), [step], rule)
    if not decoupled:
        g = g + decay * p
    h = h + g * g
    rate = lr / (1 + done * lr_decay)
    p = p - rate * (g / (h.sqrt() + eps) + (decay * p if decoupled else 0))
    assert step.item() == done + 1
    for mine, exact in zip(own[1:], (p, h), strict=True):
        torch.testing.assert_close(mine.double().cpu(), exact, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_reference_on_another_device_has_its_rates_in_float64(decoupled):
    # On a device the rate is a tensor; an fp32 tensor would reduce the precision of fp64 rows.
    rule = ops.AdagradRule(1e-2, 1e-6, 0.1, 0.3, decoupled=decoupled)
    results = []
    for kind in (torch.Tensor, Elsewhere):
        own = [torch.full((3,), 0.7, dtype=dtype) for dtype in (torch.float64, torch.float32)]
        sums, steps = [one * 0.1 for one in own], [torch.tensor(3.0).as_subclass(kind) for _ in own]
        ops.adagrad([one / 3 for one in own], own, sums, steps, rule)
        assert [one.item() for one in steps] == [4.0, 4.0]
        results.append([*own, *sums])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-15 if one.dtype == torch.float64 else 1e-7, atol=0)


def test_an_overflow_changes_nothing(kernel_device):
    case = Case(kernel_device, MIXES["half masters"])
    case.copies = [None if one is None else one.fill_(7) for one in case.copies]
    before = [one.clone() for one in case.written]
    state = ops.StepState.on(kernel_device)
    state.found_inf.fill_(1.0)
    case.step(RULES["l2"], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, case.written, strict=True))
    with references(kernel_device):
        case.step(RULES["l2"], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, case.written, strict=True))


def test_two_runs_are_bit_equal(kernel_device):
    cases = [Case(kernel_device, MIXES["everything"]) for _ in range(2)]
    for case in cases:
        for _ in range(3):
            case.step(RULES["decoupled"])
    assert all(torch.equal(one, other) for one, other in zip(cases[0].written, cases[1].written, strict=True))


def test_many_tensors_in_one_launch(kernel_device):
    parameters = [torch.full((3,), float(index), device=kernel_device) for index in range(700)]
    gradients, sums = ([make(one) for one in parameters] for make in (torch.ones_like, torch.zeros_like))
    steps = [torch.zeros((), device=kernel_device) for _ in parameters]
    ops.adagrad(gradients, parameters, sums, steps, ops.AdagradRule(1.0))
    torch.testing.assert_close(torch.stack(parameters).cpu(), torch.arange(700.0).sub(1).unsqueeze(1).expand(700, 3))
    ops.adagrad([], [], [], [], ops.AdagradRule(1.0))
