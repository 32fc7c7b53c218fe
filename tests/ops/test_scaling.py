"""Finish and the scaler's rule by their kernels, against the references, word by word of the state."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabricamp import ops
from tests.cuda_on_cpu.compiler import references

many = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FLAGS = ("finite", "found_inf", "bad_chunk")


def rule(device, **options):
    """Returns a rule with a ring and a mirror of the ring, as on a GPU."""
    shape = 4, ops.StepState.WORDS
    moves = {"growth_factor": 2.0, "backoff_factor": 0.5, "minimum": 2.0**-14, "maximum": 2.0**24, "hysteresis": 1}
    places = {
        "ring": torch.zeros(shape, dtype=torch.int32, device=device),
        "mirror": torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda"),
    }
    return ops.ScaleRule(**{**moves, **places, **options})


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
    st.booleans(),
)
def test_update_scale_equals_its_reference_word_for_word(
    kernel_device, windows, interval, minimum, maximum, hysteresis, sticky
):
    states = [ops.StepState.on(kernel_device, scale=2.0**16, hysteresis=hysteresis) for _ in range(2)]
    rules = [
        rule(
            kernel_device,
            growth_interval=interval,
            minimum=minimum,
            maximum=maximum,
            hysteresis=hysteresis,
            sticky=sticky,
        )
        for _ in range(2)
    ]
    for index, finite in enumerate(windows):
        loss = torch.tensor(float(index), device=kernel_device)
        for state in states:
            state.finite.mul_(finite)
            state.bad_chunk.fill_(-1 if finite else index)
        ops.update_scale(states[0], rules[0], loss=loss)
        with references(kernel_device):
            ops.update_scale(states[1], rules[1], loss=loss)
        assert torch.equal(states[0].words, states[1].words)
        if kernel_device.type == "cuda":
            torch.cuda.synchronize()
        for one in (rules[0].mirror, rules[1].ring, rules[1].mirror):
            assert torch.equal(rules[0].ring.cpu(), one.cpu())


@many
@given(
    st.lists(st.sampled_from([1.0, math.inf, math.nan]), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from([None, 0.5]),
    st.integers(1, 2),
)
def test_a_step_that_ends_its_window_leaves_what_two_launches_leave(
    kernel_device, windows, sticky, max_norm, hysteresis
):
    states = [ops.StepState.on(kernel_device, scale=8.0, hysteresis=hysteresis) for _ in range(3)]
    rules = [rule(kernel_device, growth_interval=2, hysteresis=hysteresis, sticky=sticky) for _ in range(3)]
    for index, value in enumerate(windows):
        partial = torch.tensor([2.0, value, 3.0], device=kernel_device)
        loss = torch.tensor(float(index), device=kernel_device)
        options = {"max_norm": max_norm, "origin": 5, "sticky": sticky}
        ops.finish(states[0], partial, scale=states[0].scale, **options)
        ops.update_scale(states[0], rules[0], loss=loss)
        ops.finish(states[1], partial, scale=states[1].scale, ending=rules[1], loss=loss, **options)
        with references(kernel_device):
            ops.finish(states[2], partial, scale=states[2].scale, ending=rules[2], loss=loss, **options)
        assert torch.equal(states[0].words, states[1].words)
        assert torch.equal(rules[0].ring, rules[1].ring)
        for name in ("found_inf", "scale", "applied", "skipped", "streak", "first_chunk", "first_window", "finite"):
            assert getattr(states[1], name).item() == getattr(states[2], name).item(), name
        torch.testing.assert_close(states[1].multiplier, states[2].multiplier, equal_nan=True)


def test_sticky_skips_go_on_whatever_comes_and_leave_the_scale(kernel_device):
    state, ending = ops.StepState.on(kernel_device, scale=8.0), rule(kernel_device, growth_interval=1, sticky=True)
    seen = []
    for value in (1.0, math.inf, 1.0, math.nan, 1.0):
        partial = torch.tensor([value], device=kernel_device)
        ops.finish(state, partial, scale=state.scale, sticky=True, ending=ending)
        seen.append((state.found_inf.item(), state.scale.item(), state.applied.item(), state.skipped.item()))
    assert seen == [(0.0, 16.0, 1, 0), (1.0, 8.0, 1, 1), (1.0, 8.0, 1, 2), (1.0, 8.0, 1, 3), (1.0, 8.0, 1, 4)]
    assert (state.streak.item(), state.first_window.item(), state.first_chunk.item()) == (4, 1, 0)


@pytest.mark.parametrize("sticky", [False, True])
def test_within_a_window_too_a_sticky_skip_goes_on(kernel_device, sticky):
    found = []
    for reference in (False, True):
        state = ops.StepState.on(kernel_device)
        with references(kernel_device) if reference else contextlib.nullcontext():
            for value in (1.0, math.inf, 1.0):
                partial = torch.tensor([value], device=kernel_device)
                ops.finish(state, partial, scale=state.scale, sticky=sticky)
                found.append(state.found_inf.item())
    assert found == [0.0, 1.0, float(sticky)] * 2


def test_the_first_overflow_of_a_run_is_kept(kernel_device):
    state = ops.StepState.on(kernel_device, scale=8.0)
    ending = rule(kernel_device, growth_interval=9, minimum=1.0, maximum=8.0)
    for finite, loss, chunk in ((1, 0.5, -1), (0, 1.5, 4), (0, 2.5, 2), (1, 3.5, -1), (0, 4.5, 9)):
        state.finite.fill_(finite)
        state.bad_chunk.fill_(chunk)
        ops.update_scale(state, ending, loss=torch.tensor(loss, device=kernel_device))
        if loss == 2.5:
            found = state.streak, state.first_window, state.first_loss, state.first_scale, state.first_chunk
            assert [one.item() for one in found] == [2, 1, 1.5, 8.0, 4]
    assert (state.streak.item(), state.first_window.item(), state.first_scale.item()) == (1, 4, 2.0)
