"""Stochastic rounding of bf16 states: its bits, their expectation, and Adam's kernel beside the reference."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ops
from fabricamp.ops.draws import Source, key_of, round_into, rounded, words
from tests.cuda_on_cpu.compiler import references
from tests.ops.lists import tensors

KEY = key_of("layer.weight", 3)
EXACT = ops.AdamRule(0.0, 0.0, 0.0)  # the averages are the gradient and its square


def halves(step, count=1 << 16, key=KEY):
    word = words(Source(key), torch.tensor(float(step)), torch.empty(count))
    return word >> 16, word & 0xFFFF


def correlation(one, other):
    one, other = (each.double() - 32767.5 for each in (one, other))
    return ((one * other).mean() / (65536.0**2 / 12)).abs().item()


@pytest.mark.parametrize("moment", [0, 1])
def test_bits_are_uniform(moment):
    bits = halves(1, 1 << 18)[moment]
    assert 0 <= bits.min() <= bits.max() < 65536
    counts = torch.bincount(bits >> 8, minlength=256).double()
    chi_square = ((counts - 1024) ** 2 / 1024).sum()
    assert 150 < chi_square < 380  # 255 degrees of freedom
    for position in range(16):
        share = ((bits >> position) & 1).double().mean()
        assert abs(share - 0.5) < 0.005


def test_moments_steps_neighbours_and_parameters_are_not_alike():
    first, second = halves(1)
    later, _ = halves(2)
    other, _ = halves(1, key=key_of("layer.bias", 3))
    seeded, _ = halves(1, key=key_of("layer.weight", 4))
    pairs = [
        (first, second),
        (first, later),
        (first, other),
        (first, seeded),
        (first[1:], first[:-1]),
        (first[256:], first[:-256]),
    ]
    assert all(correlation(*pair) < 0.02 for pair in pairs)


def test_a_row_begins_at_its_first_element():
    like, step = torch.empty(1000), torch.tensor(5.0)
    whole = words(Source(KEY), step, like)
    assert torch.equal(words(Source(KEY, 300), step, like[300:]), whole[300:])
    far = words(Source(KEY, 2**32 - 5), step, like)
    assert torch.equal(far[5:], words(Source(KEY, 2**32), step, like[5:]))
    assert not torch.equal(far[5:], whole[: len(far) - 5])


@pytest.mark.parametrize("value", [1.001, -3.7e-5, 1e30, 2.0, 6e-41, 0.0])
def test_the_expectation_is_the_value(value):
    values = torch.full((1 << 16,), value)
    bits = torch.arange(1 << 16)  # each once
    result = rounded(values, bits).double()
    assert len(set(result.tolist())) <= 2
    assert result.mean().item() == pytest.approx(values[0].double().item(), rel=1e-12, abs=1e-60)


def test_what_is_not_finite_stays_so():
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    values.view(torch.int32)[0] = 0x7FFFFFFF
    result = rounded(values, torch.full((4,), 0xFFFF))
    assert result[0].isnan()
    assert result[1:3].tolist() == [torch.inf, -torch.inf]
    assert torch.signbit(result[3])


class Case:
    def __init__(self, device, parameter=torch.float32):
        self.gradients = [one.float() for one in tensors(device, torch.float64, seed=4)]
        self.parameters = [torch.zeros_like(one, dtype=parameter) for one in self.gradients]
        self.states = [[torch.zeros_like(one, dtype=torch.bfloat16) for one in self.gradients] for _ in range(2)]
        self.steps = [torch.zeros((), device=device) for _ in self.gradients]
        self.sources = [Source(key_of(str(number), 0), 7 * number) for number in range(len(self.gradients))]

    def step(self, rule=EXACT, **options):
        ops.adam(self.gradients, self.parameters, *self.states, self.steps, rule, sources=self.sources, **options)


@pytest.mark.parametrize("parameter", [torch.float32, torch.bfloat16])
def test_the_kernel_draws_as_the_reference(kernel_device, parameter):
    mine, theirs = Case(kernel_device, parameter), Case(kernel_device, parameter)
    state = ops.StepState.on(kernel_device)
    seen = []
    for step in range(4):
        state.found_inf.fill_(float(step == 2))
        mine.step(state=state)
        with references(kernel_device):
            theirs.step(state=state)
        for one, other in zip(mine.states, theirs.states, strict=True):
            assert all(map(torch.equal, one, other))
        seen.append([one.clone() for one in mine.states[0]])
    assert not all(map(torch.equal, seen[0], seen[1]))
    assert all(map(torch.equal, seen[1], seen[2]))  # a skipped step draws nothing
    assert not all(map(torch.equal, seen[1], seen[3]))
    assert {step.item() for step in mine.steps} == {3.0}


def test_shards_have_the_states_of_the_whole(kernel_device):
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(12, 30, generator=generator).to(kernel_device)
    results = []
    for parts in ([12], [5, 5, 2]):
        pieces = list(gradient.split(parts))
        firsts = [30 * sum(parts[:number]) for number in range(len(parts))]
        parameters, *states = (
            [torch.zeros_like(one, dtype=kind) for one in pieces] for kind in (torch.float32, *[torch.bfloat16] * 2)
        )
        steps = [torch.zeros((), device=kernel_device) for _ in pieces]
        for _ in range(3):
            ops.adam(
                pieces, parameters, *states, steps, ops.AdamRule(0.01), sources=[Source(KEY, first) for first in firsts]
            )
        results.append([torch.cat(column) for column in (parameters, *states)])
    assert all(map(torch.equal, *results))


def test_states_follow_fp32_ones_over_many_steps(kernel_device):
    """The squares move by less than half a unit of bf16 in a step: rounded to nearest they would stay where they are."""
    device = kernel_device
    gradient = torch.full((4096,), 0.1, device=device)
    drawn = [torch.full_like(gradient, 1.0, dtype=torch.bfloat16) for _ in range(2)]
    nearest = [one.clone() for one in drawn]
    exact = [one.float() for one in drawn]
    rule = ops.AdamRule(0.0, 0.9, 0.999)
    for own, sources in ((drawn, [Source(KEY)]), (nearest, None), (exact, None)):
        parameter, step = [torch.zeros_like(gradient)], [torch.zeros((), device=device)]
        with references(device):
            for _ in range(300):
                ops.adam([gradient], parameter, [own[0]], [own[1]], step, rule, sources=sources)
    assert exact[1][0] < 0.8
    assert nearest[1][0] == 1.0
    assert drawn[1].float().mean().item() == pytest.approx(exact[1][0].item(), rel=2e-3)
    assert drawn[0].float().mean().item() == pytest.approx(exact[0][0].item(), rel=2e-3)


def test_a_state_is_rounded_into_its_own_layout():
    value = torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last)
    results = []
    for like in (value, value.contiguous()):
        state = torch.zeros_like(like, dtype=torch.bfloat16)
        round_into(like, state, Source(KEY), torch.tensor(1.0), 0, like)
        results.append(state)
    assert results[0].stride() == value.stride()
    flat = torch.as_strided(value, (value.numel(),), (1,))
    expected = torch.zeros_like(flat, dtype=torch.bfloat16)
    round_into(flat, expected, Source(KEY), torch.tensor(1.0), 0, flat)
    assert torch.equal(torch.as_strided(results[0], (value.numel(),), (1,)), expected)
