"""Finish and the scaler's rule by their kernels, against the references, word for word."""

from __future__ import annotations

import math

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabricamp import ops
from tests.cuda_on_cpu.compiler import references

many = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FLAGS = ("finite", "found_inf", "bad_chunk")


@many
@given(
    st.lists(st.floats(0, 1e3, width=32), min_size=0, max_size=1100),
    st.sampled_from([1.0, 1024.0, 3.0]),
    st.sampled_from([1.0, 4.0]),
    st.sampled_from([None, 0.5, 1e6]),
    st.sets(st.integers(0, 1099), max_size=2),
)
def test_finish(kernel_device, sums, scale, divisor, max_norm, bad):
    for index in bad:
        if index < len(sums):
            sums[index] = math.nan if index % 2 else math.inf
    states = [ops.StepState.on(kernel_device, scale=scale) for _ in range(2)]
    partial = torch.tensor(sums, device=kernel_device)
    options = {"scale": states[0].scale, "divisor": divisor, "max_norm": max_norm, "origin": 7}
    ops.finish(states[0], partial, **options)
    with references(kernel_device):
        ops.finish(states[1], partial, **options)
    for name in FLAGS:
        assert getattr(states[0], name).item() == getattr(states[1], name).item(), name
    for name in ("norm", "multiplier"):
        torch.testing.assert_close(getattr(states[0], name), getattr(states[1], name), equal_nan=True)


def test_the_window_and_its_lowest_chunk_survive_a_finite_step(kernel_device):
    state = ops.StepState.on(kernel_device)
    scale = torch.ones((), device=kernel_device)
    for sums in ([1.0, math.inf, math.nan], [1.0], [math.inf]):
        ops.finish(state, torch.tensor(sums, device=kernel_device), scale=scale)
    assert (state.finite.item(), state.found_inf.item(), state.bad_chunk.item()) == (0, 1.0, 1)


@many
@given(
    st.lists(st.booleans(), max_size=14),
    st.integers(1, 4),
    st.sampled_from([2.0**-14, 2.0**14]),
    st.sampled_from([2.0**16, 2.0**17, 2.0**24]),
    st.integers(1, 3),
)
def test_update_scale_equals_its_reference_word_for_word(
    kernel_device, windows, interval, minimum, maximum, hysteresis
):
    states = [ops.StepState.on(kernel_device, scale=2.0**16, hysteresis=hysteresis) for _ in range(2)]
    rings = [torch.zeros(4, ops.StepState.WORDS, dtype=torch.int32, device=kernel_device) for _ in range(2)]
    rule = {
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": interval,
        "minimum": minimum,
        "maximum": maximum,
        "hysteresis": hysteresis,
    }
    for index, finite in enumerate(windows):
        loss = torch.tensor(float(index), device=kernel_device)
        for state in states:
            state.finite.mul_(finite)
            state.bad_chunk.fill_(-1 if finite else index)
        ops.update_scale(states[0], **rule, loss=loss, ring=rings[0])
        with references(kernel_device):
            ops.update_scale(states[1], **rule, loss=loss, ring=rings[1])
        assert torch.equal(states[0].words, states[1].words)
        assert torch.equal(rings[0], rings[1])


def test_the_first_overflow_of_a_run_is_kept(kernel_device):
    state = ops.StepState.on(kernel_device, scale=8.0)
    rule = {
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 9,
        "minimum": 1.0,
        "maximum": 8.0,
        "hysteresis": 1,
    }
    for finite, loss, chunk in ((1, 0.5, -1), (0, 1.5, 4), (0, 2.5, 2), (1, 3.5, -1), (0, 4.5, 9)):
        state.finite.fill_(finite)
        state.bad_chunk.fill_(chunk)
        ops.update_scale(state, **rule, loss=torch.tensor(loss, device=kernel_device))
        if loss == 2.5:
            found = state.streak, state.first_window, state.first_loss, state.first_scale, state.first_chunk
            assert [one.item() for one in found] == [2, 1, 1.5, 8.0, 4]
    assert (state.streak.item(), state.first_window.item(), state.first_scale.item()) == (1, 4, 2.0)
