"""Adam by its kernel, against the reference and float64: every dtype, size and layout in one launch."""

from __future__ import annotations

import itertools

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabricamp import ops
from tests.cuda_on_cpu.compiler import in_pairs, references
from tests.ops.lists import FLOATS, TOLERANCE, tensors

many = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RULES = [
    ops.AdamRule(1e-2),
    ops.AdamRule(1e-2, 0.8, 0.95, 1e-6, 0.1),
    ops.AdamRule(1e-2, 0.9, 0.999, 1e-8, 0.1, decoupled=False, maximize=True),
    ops.AdamRule(1e-2, 0.0, 0.5, 1e-8, 0.0, bias_correction=False),
]


class Case:
    """Parameters with their state, gradients and copies, and float64 twins."""

    def __init__(self, device, dtypes, seed=0):
        self.gradients, self.parameters, self.copies = [], [], []
        for index, (gradient, parameter, copy) in enumerate(dtypes):
            own = tensors(device, parameter, seed=seed + index)
            self.parameters += own
            self.gradients += [one.to(gradient) for one in tensors(device, parameter, seed=seed + index + 50)]
            self.copies += [None if copy is None else torch.empty_like(one, dtype=copy) for one in own]
        wide = [torch.promote_types(one.dtype, torch.float32) for one in self.parameters]
        self.averages = [torch.zeros_like(one, dtype=dtype) for one, dtype in zip(self.parameters, wide, strict=True)]
        self.squares = [torch.zeros_like(one) for one in self.averages]
        self.steps = [torch.zeros((), device=device) for _ in self.parameters]

    def twin(self):
        other = object.__new__(Case)
        for name, values in vars(self).items():
            setattr(other, name, [None if one is None else one.clone() for one in values])
        return other

    def step(self, rule, **options):
        ops.adam(
            self.gradients,
            self.parameters,
            self.averages,
            self.squares,
            self.steps,
            rule,
            copies=self.copies,
            **options,
        )

    @property
    def written(self):
        return [
            *self.parameters,
            *self.averages,
            *self.squares,
            *self.steps,
            *[one for one in self.copies if one is not None],
        ]


MIXES = {
    "fp32": [(torch.float32, torch.float32, None)],
    "half masters": [(torch.float16, torch.float32, torch.float16), (torch.float32, torch.float32, None)],
    "everything": [(one, other, None) for one, other in itertools.product(FLOATS, FLOATS)],
    "bf16 copies": [(torch.bfloat16, torch.float32, torch.bfloat16), (torch.float64, torch.float64, torch.float16)],
}


@in_pairs("mix, rule", MIXES, RULES)
def test_equals_its_reference(kernel_device, mix, rule):
    mine = Case(kernel_device, MIXES[mix])
    theirs = mine.twin()
    state = ops.StepState.on(kernel_device)
    state.multiplier.fill_(0.5)
    for limit in (None, 0.3, None):
        mine.step(rule, state=state, limit=limit)
        with references(kernel_device):
            theirs.step(rule, state=state, limit=limit)
    for one, other in zip(mine.written, theirs.written, strict=True):
        assert one.dtype == other.dtype
        tolerance = 2e-12 if one.dtype == torch.float64 else 4 * TOLERANCE[one.dtype]
        torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-12 if one.dtype == torch.float64 else tolerance)


@many
@given(
    st.floats(1e-4, 0.1),
    st.floats(0, 0.99),
    st.floats(0, 0.9999),
    st.floats(1e-8, 1e-3),
    st.floats(0, 0.5),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_equals_the_formula_in_float64(kernel_device, lr, beta1, beta2, eps, decay, decoupled, done):
    rule = ops.AdamRule(lr, beta1, beta2, eps, decay, decoupled=decoupled)
    generator = torch.Generator().manual_seed(done)
    # All values are positive: if a gradient and its weight decay cancelled, rounding errors would dominate the result.
    p, g, m, v = (torch.rand(130, generator=generator, dtype=torch.float64) + 0.1 for _ in range(4))
    own = [one.to(kernel_device, torch.float32) for one in (g, p, m, v)]
    g, p, m, v = (one.double().cpu() for one in own)
    step = torch.tensor(float(done), device=kernel_device)
    ops.adam(*([one] for one in own), [step], rule)
    if not decoupled:
        g = g + decay * p
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    t = done + 1
    update = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
    p = p - lr * (update + (decay * p if decoupled else 0))
    assert step.item() == t
    for mine, exact in zip(own[1:], (p, m, v), strict=True):
        torch.testing.assert_close(mine.double().cpu(), exact, rtol=2e-6, atol=1e-5)


def test_an_overflow_changes_nothing(kernel_device):
    case = Case(kernel_device, MIXES["half masters"])
    case.copies = [None if one is None else one.fill_(7) for one in case.copies]
    before = [one.clone() for one in case.written]
    state = ops.StepState.on(kernel_device)
    state.found_inf.fill_(1.0)
    case.step(RULES[0], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, case.written, strict=True))
    with references(kernel_device):
        case.step(RULES[0], state=state)
    assert all(torch.equal(old, new) for old, new in zip(before, case.written, strict=True))


def test_two_runs_are_bit_equal(kernel_device):
    cases = [Case(kernel_device, MIXES["everything"]) for _ in range(2)]
    for case in cases:
        for _ in range(3):
            case.step(RULES[1])
    assert all(torch.equal(one, other) for one, other in zip(cases[0].written, cases[1].written, strict=True))


def test_many_tensors_in_one_launch(kernel_device):
    parameters = [torch.full((3,), float(index), device=kernel_device) for index in range(700)]
    gradients, state = (
        [torch.ones_like(one) for one in parameters],
        [[torch.zeros_like(one) for one in parameters] for _ in "mv"],
    )
    steps = [torch.zeros((), device=kernel_device) for _ in parameters]
    ops.adam(gradients, parameters, *state, steps, ops.AdamRule(1.0))
    torch.testing.assert_close(torch.stack(parameters).cpu(), torch.arange(700.0).sub(1).unsqueeze(1).expand(700, 3))
