"""SGD by its kernel, against the reference and float64: every dtype, size and layout in one launch."""

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
    "plain": ops.SgdRule(1e-2),
    "decay": ops.SgdRule(1e-2, weight_decay=0.1, maximize=True),
    "momentum": ops.SgdRule(1e-2, 0.9, 0.0, 0.1),
    "dampening": ops.SgdRule(1e-2, 0.8, 0.3, 0.1, maximize=True),
    "nesterov": ops.SgdRule(1e-2, 0.9, 0.0, 0.1, nesterov=True),
    "decay after nesterov": ops.SgdRule(1e-2, 0.9, 0.5, 0.1, nesterov=True, decay_after_momentum=True),
    "decay after momentum": ops.SgdRule(1e-2, 0.9, 0.5, 0.1, decay_after_momentum=True),
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
        self.buffers = [torch.zeros_like(one, dtype=dtype) for one, dtype in zip(self.parameters, wide, strict=True)]
        self.filled = [torch.zeros((), device=device) for _ in self.parameters]

    def twin(self):
        other = object.__new__(Case)
        for name, values in vars(self).items():
            setattr(other, name, [None if one is None else one.clone() for one in values])
        return other

    def step(self, rule, **options):
        ops.sgd(self.gradients, self.parameters, self.buffers, self.filled, rule, copies=self.copies, **options)

    @property
    def written(self):
        copies = [one for one in self.copies if one is not None]
        return [*self.parameters, *[one for one in self.buffers if one is not None], *self.filled, *copies]


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
    assert {one.item() for one in mine.filled} == {float(RULES[rule].momentum != 0)}


@many
@given(
    st.floats(1e-4, 0.5),
    st.sampled_from([0.0, 0.5, 0.99]),
    st.floats(0, 0.9),
    st.floats(0, 0.5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_equals_the_formula_in_float64(kernel_device, lr, momentum, dampening, decay, nesterov, after, first, seed):
    rule = ops.SgdRule(lr, momentum, dampening, decay, nesterov=nesterov, decay_after_momentum=after)
    generator = torch.Generator().manual_seed(seed)
    p, g, b = (torch.rand(130, generator=generator, dtype=torch.float64) + 0.1 for _ in range(3))
    own = [one.to(kernel_device, torch.float32) for one in (g, p, torch.zeros_like(b) if first else b)]
    g, p, b = (one.double().cpu() for one in own)
    filled = torch.tensor(0.0 if first else 1.0, device=kernel_device)
    ops.sgd(*([one] for one in own), [filled], rule)
    if not after:
        g = g + decay * p
    if momentum:
        b = g if first else momentum * b + (1 - dampening) * g
        g = g + momentum * b if nesterov else b
    if after:
        g = g + decay * p
    for mine, exact in zip(own[1:], (p - lr * g, b), strict=True):
        torch.testing.assert_close(mine.double().cpu(), exact, rtol=2e-6, atol=1e-6)
    assert filled.item() == float(momentum != 0 or not first)


def test_the_reference_on_another_device_dampens_in_float64():
    # On a device the share is a tensor; an fp32 tensor would reduce the precision of fp64 rows.
    own = [torch.full((3,), 0.7, dtype=dtype) for dtype in (torch.float64, torch.float32)]
    filled = [torch.ones(()).as_subclass(Elsewhere), torch.zeros(()).as_subclass(Elsewhere)]
    buffers = [torch.full_like(one, 0.3) for one in own]
    ops.sgd([one / 3 for one in own], own, buffers, filled, ops.SgdRule(1e-2, 0.8, 0.3))
    for buffer, value, share in zip(buffers, (0.7, torch.tensor(0.7).item()), (0.7, 1.0), strict=True):
        exact = torch.full((3,), 0.8 * 0.3 + share * value / 3, dtype=torch.float64)
        tolerance = 1e-15 if buffer.dtype == torch.float64 else 1e-7
        torch.testing.assert_close(buffer.double(), exact, rtol=tolerance, atol=0)
    assert [one.item() for one in filled] == [1.0, 1.0]


def test_each_buffer_has_a_first_gradient_of_its_own(kernel_device):
    # A buffer's first gradient is not dampened, whatever the group's other rows have received; all chunks of a row agree on it.
    rule = ops.SgdRule(1.0, 0.5, 0.5)
    case = Case(kernel_device, MIXES["fp32"])
    case.parameters, case.gradients, case.copies = (
        [torch.zeros(200, device=kernel_device) for _ in range(4)],
        [torch.ones(200, device=kernel_device) for _ in range(4)],
        [None] * 4,
    )
    case.buffers = [torch.zeros(200, device=kernel_device) for _ in range(4)]
    case.filled = [torch.tensor(float(index % 2), device=kernel_device) for index in range(4)]
    twin = case.twin()
    case.step(rule)
    with references(kernel_device):
        twin.step(rule)
    for one in (case, twin):
        assert [buffer.unique().tolist() for buffer in one.buffers] == [[1.0], [0.5], [1.0], [0.5]]
        assert [flag.item() for flag in one.filled] == [1.0] * 4


@pytest.mark.parametrize("runs", ["kernel", "reference"])
@pytest.mark.parametrize("rule", [ops.SgdRule(0.1, 0.9, nesterov=True), ops.SgdRule(0.1, 0.9, maximize=True)])
def test_gradients_stay_as_they_are(kernel_device, rule, runs):
    case = Case(kernel_device, MIXES["fp32"])
    before = [one.clone() for one in case.gradients]
    if runs == "kernel":
        case.step(rule)
    else:
        with references(kernel_device):
            case.step(rule)
    assert all(torch.equal(old, new) for old, new in zip(before, case.gradients, strict=True))


def test_without_momentum_buffers_may_be_missing_and_are_left_alone(kernel_device):
    case = Case(kernel_device, MIXES["fp32"])
    case.buffers = [None if index % 2 else one.fill_(7) for index, one in enumerate(case.buffers)]
    twin = case.twin()
    case.step(RULES["decay"])
    with references(kernel_device):
        twin.step(RULES["decay"])
    assert all(one is None or one.eq(7).all() for one in (*case.buffers, *twin.buffers))
    for one, other in zip(case.parameters, twin.parameters, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rule", ["plain", "dampening"])
def test_an_overflow_changes_nothing(kernel_device, rule):
    case = Case(kernel_device, MIXES["half masters"])
    case.copies = [None if one is None else one.fill_(7) for one in case.copies]
    before = [one.clone() for one in case.written]
    state = ops.StepState.on(kernel_device)
    state.found_inf.fill_(1.0)
    case.step(RULES[rule], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, case.written, strict=True))
    with references(kernel_device):
        case.step(RULES[rule], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, case.written, strict=True))


def test_two_runs_are_bit_equal(kernel_device):
    cases = [Case(kernel_device, MIXES["everything"]) for _ in range(2)]
    for case in cases:
        for _ in range(3):
            case.step(RULES["nesterov"])
    assert all(torch.equal(one, other) for one, other in zip(cases[0].written, cases[1].written, strict=True))


def test_many_tensors_in_one_launch(kernel_device):
    parameters = [torch.full((3,), float(index), device=kernel_device) for index in range(700)]
    gradients, buffers = ([make(one) for one in parameters] for make in (torch.ones_like, torch.zeros_like))
    filled = [torch.zeros((), device=kernel_device) for _ in parameters]
    ops.sgd(gradients, parameters, buffers, filled, ops.SgdRule(1.0, 0.9))
    assert torch.equal(torch.stack(parameters).cpu(), torch.arange(700.0).sub(1).unsqueeze(1).expand(700, 3))
    ops.sgd([], [], [], [], ops.SgdRule(1.0))
