"""bf16 weights with the 16 bits that they lack: every fp32 value comes back, and Adam's kernel reads and writes both."""

from __future__ import annotations

import contextlib

import pytest
import torch

from fabricamp import ops
from fabricamp.ops.remainders import joined, part_into, parted
from tests.cuda_on_cpu.compiler import references
from tests.ops.lists import tensors

# Zeros, subnormals, 1, neighbours of powers of two, the largest bf16, infinity; with both signs.
UPPERS = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x42FF, 0x7F00, 0x7F7E, 0x7F7F]
LOWER = torch.arange(0x10000, dtype=torch.int32)


def values():
    """Every low half of the bits with each of the upper halves, both infinities, and no nan."""
    uppers = torch.tensor([one - 0x10000 if one > 0x7FFF else one for half in UPPERS for one in (half, half | 0x8000)])
    bits = (uppers.to(torch.int32).unsqueeze(1) << 16) + LOWER
    infinities = torch.tensor([torch.inf, -torch.inf])
    return torch.cat([bits.flatten().view(torch.float32), infinities])


def same(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_every_value_comes_back():
    value = values()
    assert not value.isnan().any()
    weight, remainder = parted(value)
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert same(joined(weight, remainder), value)


def test_the_weight_is_rounded_as_torch_rounds_except_ties_which_go_up_in_magnitude():
    value = values()
    weight, _ = parted(value)
    differs = weight != value.bfloat16()
    ties = (value.view(torch.int32) & 0xFFFF) == 0x8000
    assert ties[differs].all()
    even = ((value.view(torch.int32) >> 16) & 1) == 0
    assert torch.equal(differs, ties & even)  # the others go up by torch's rule too
    steps = weight.view(torch.int16).int() - value.bfloat16().view(torch.int16).int()
    assert set(steps[differs].tolist()) == {1}  # one unit in the last place, away from zero


def test_values_above_the_largest_bf16_round_to_infinity_and_come_back():
    value = torch.tensor([0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF], dtype=torch.int32).view(torch.float32)
    weight, remainder = parted(value)
    assert weight.tolist() == [torch.finfo(torch.bfloat16).max, torch.inf, torch.inf]
    assert same(joined(weight, remainder), value)


def test_nan_has_one_form():
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7F808000, -1, -0x7FFFFF], dtype=torch.int32)
    weight, remainder = parted(bits.view(torch.float32))
    assert weight.isnan().all()
    assert remainder.tolist() == [0] * 5
    assert joined(weight, remainder).isnan().all()


def test_an_edited_weight_stays_within_half_a_unit_in_the_last_place():
    _, remainder = parted(values()[: 0x10000 * 2])
    for edited in (0.0, -0.0, 1.0, -3.5):
        weight = torch.full(remainder.shape, edited, dtype=torch.bfloat16)
        value = joined(weight, remainder)
        assert value.isfinite().all()
        assert (value.double() - edited).abs().max() <= abs(edited) * 2.0**-8 + 1e-40
        assert torch.equal(torch.signbit(value), torch.signbit(weight))


class Case:
    """Values of every size and layout, as fp32 masters and as weights with remainders."""

    def __init__(self, device, gradient):
        self.values = [value.float() for value in tensors(device, torch.float64, seed=3)]
        self.weights = [torch.empty_like(value, dtype=torch.bfloat16) for value in self.values]
        self.remainders = [torch.empty_like(value, dtype=torch.int16) for value in self.values]
        for one in zip(self.values, self.weights, self.remainders, strict=True):
            part_into(*one)
        self.gradients = [value.to(gradient) for value in tensors(device, torch.float64, seed=4)]

    def states(self):
        zeros = [[torch.zeros_like(value) for value in self.values] for _ in range(2)]
        return *zeros, [torch.zeros((), device=value.device) for value in self.values]

    @property
    def joined(self):
        return [joined(*pair) for pair in zip(self.weights, self.remainders, strict=True)]


RULES = [ops.AdamRule(1e-2, 0.8, 0.95, 1e-6, 0.1), ops.AdamRule(3e-3, decoupled=False, weight_decay=0.1, maximize=True)]


@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", RULES)
def test_adam_has_the_bits_of_fp32_masters(kernel_device, rule, gradient):
    case = Case(kernel_device, gradient)
    state = ops.StepState.on(kernel_device)
    state.multiplier.fill_(0.5)
    masters = [value.clone() for value in case.values]
    own, theirs = case.states(), case.states()
    for step in range(4):
        state.found_inf.fill_(float(step == 2))
        ops.adam(case.gradients, case.weights, *own, rule, copies=case.remainders, state=state, limit=2.0)
        ops.adam(case.gradients, masters, *theirs, rule, state=state, limit=2.0)
        assert all(map(same, case.joined, masters))
        for weight, master in zip(case.weights, masters, strict=True):
            assert torch.equal(weight, parted(master)[0])
    assert all(
        torch.equal(one, other)
        for mine, his in zip(own, theirs, strict=True)
        for one, other in zip(mine, his, strict=True)
    )


@pytest.mark.parametrize("way", ["kernel", "reference"])
def test_thousands_of_steps_have_the_bits_of_masters_whose_copies_are_rounded_ties_up(kernel_device, way):
    """Each gradient comes from the rounded weights, as in training."""
    generator = torch.Generator().manual_seed(0)
    target, master = (torch.randn(200, generator=generator).to(kernel_device) for _ in range(2))
    weight, remainder = parted(master)
    copy = weight.clone()
    own, theirs = ([torch.zeros_like(master) for _ in range(2)] for _ in range(2))
    counts = [torch.zeros((), device=kernel_device) for _ in range(2)]
    rule = ops.AdamRule(4e-3, weight_decay=0.001)
    with references(kernel_device) if way == "reference" else contextlib.nullcontext():
        for _ in range(2000):
            gradients = [(half.float() - target).bfloat16() for half in (weight, copy)]
            ops.adam(gradients[:1], [weight], [own[0]], [own[1]], counts[:1], rule, copies=[remainder])
            ops.adam(gradients[1:], [master], [theirs[0]], [theirs[1]], counts[1:], rule)
            copy = parted(master)[0]
    assert torch.equal(weight, copy)
    assert same(joined(weight, remainder), master)
    assert (master - target).abs().mean() < 0.05


@pytest.mark.parametrize("lr", [0.0, 1e38])
def test_kernel_and_reference_agree_on_nan_and_on_what_overflows(kernel_device, lr):
    # No zeros: what torch's operations add to them on a GPU decides on their sign.
    special = torch.tensor([torch.nan, 3.4e38, -3.4e38, 1e-45, 1.0], device=kernel_device)
    gradient = -special.sign()
    results = []
    for way in ("kernel", "reference"):
        weight, remainder = (part.to(kernel_device) for part in parted(special))
        zeros, step = torch.zeros_like(special), torch.zeros((), device=kernel_device)
        call = [[gradient], [weight], [zeros.clone()], [zeros.clone()], [step], ops.AdamRule(lr, 0.0)]
        if way == "kernel":
            ops.adam(*call, copies=[remainder])
        else:
            with references(kernel_device):
                ops.adam(*call, copies=[remainder])
        results.append((weight.view(torch.int16), remainder))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    value = joined(weight, remainder)
    assert value[0].isnan()
    assert value[1:3].isinf().all() if lr else same(value[1:], special[1:])


def test_the_kernel_reads_edited_zeros_as_the_reference_does(kernel_device):
    """An edit leaves the remainder of another value, which would carry into the sign of a zero."""
    weight = torch.tensor([0.0, -0.0, 0.0, -0.0, 1.0] * 3, dtype=torch.bfloat16, device=kernel_device)
    remainder = torch.tensor([-5, -5, 5, 5, -5] * 3, dtype=torch.int16, device=kernel_device)
    averages = [torch.full(weight.shape, 7.0, device=kernel_device)]
    ops.ema([weight], averages, 0.0, remainders=[remainder])
    assert torch.equal(averages[0], joined(weight, remainder))
    assert averages[0].isfinite().all()


def test_averages_read_the_values(kernel_device):
    case = Case(kernel_device, torch.float32)
    averages = [torch.zeros_like(value) for value in case.values]
    expected = [torch.zeros_like(value) for value in case.values]
    for decay in (0.75, torch.tensor(0.5, device=kernel_device, dtype=torch.float64)):
        ops.ema(case.weights, averages, decay, remainders=case.remainders)
        ops.ema(case.values, expected, decay)
    assert all(map(same, averages, expected))
    with references(kernel_device):
        ops.ema(case.weights, averages, 0.0, remainders=case.remainders)
    assert all(map(torch.equal, averages, case.values))
