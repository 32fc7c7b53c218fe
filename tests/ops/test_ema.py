"""Moving averages by their kernel, against float64 and the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabricamp import ops
from tests.cuda_on_cpu.compiler import references
from tests.ops.lists import FLOATS, all_pairs, assert_near, tensors

many = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("runs", ["kernel", "reference"])
@pytest.mark.parametrize("kind", [float, torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.25, 0.75])
def test_all_pairs_of_dtypes(kernel_device, decay, kind, runs):
    parameters, averages = all_pairs(kernel_device)
    exact = [decay * a.double() + (1 - decay) * p.double() for p, a in zip(parameters, averages, strict=True)]
    given_decay = decay if kind is float else torch.tensor(decay, dtype=kind, device=kernel_device)
    if runs == "kernel":
        ops.ema(parameters, averages, given_decay)
    else:
        with references(kernel_device):
            ops.ema(parameters, averages, given_decay)
    for mine, value in zip(averages, exact, strict=True):
        assert_near(mine, value, factor=2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_layouts(kernel_device, dtype):
    parameters, averages = tensors(kernel_device, dtype), tensors(kernel_device, seed=1)
    exact = [0.9 * a.double() + 0.1 * p.double() for p, a in zip(parameters, averages, strict=True)]
    ops.ema(parameters, averages, 0.9)
    for mine, value in zip(averages, exact, strict=True):
        assert_near(mine, value, factor=3)


@many
@given(st.floats(0, 1), st.integers(1, 200), st.integers(0, 99))
def test_equals_the_formula_in_float64(kernel_device, decay, size, seed):
    generator = torch.Generator().manual_seed(seed)
    parameter, average = (torch.randn(size, generator=generator).to(kernel_device) for _ in range(2))
    exact = decay * average.double() + (1 - decay) * parameter.double()
    twin = average.clone()
    ops.ema([parameter], [average], decay)
    with references(kernel_device):
        ops.ema([parameter], [twin], decay)
    torch.testing.assert_close(average.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(average, twin, rtol=1e-6, atol=1e-6)


def test_the_ends_are_exact(kernel_device):
    parameter, average = torch.randn(99).to(kernel_device), torch.randn(99).to(kernel_device)
    before = average.clone()
    ops.ema([parameter], [average], 1.0)
    assert torch.equal(average, before)
    ops.ema([parameter], [average], 0.0)
    assert torch.equal(average, parameter)
    ops.ema([], [], 0.5)


def test_a_decay_near_one_moves_half_parameters_averages(kernel_device):
    # 1 - 0.9999 in half would be 0.0001 +- 5 %, and the average would not move at all.
    parameter = torch.ones(70, dtype=torch.float16, device=kernel_device)
    average = torch.zeros(70, device=kernel_device)
    decay = torch.tensor(0.9999, dtype=torch.float64, device=kernel_device)
    for _ in range(100):
        ops.ema([parameter], [average], decay)
    torch.testing.assert_close(average.cpu(), torch.full((70,), 1 - 0.9999**100), rtol=1e-5, atol=0)


@pytest.mark.parametrize("runs", ["kernel", "reference"])
def test_a_skipped_step_moves_nothing(kernel_device, runs):
    parameters, averages = tensors(kernel_device), tensors(kernel_device, seed=1)
    before = [one.clone() for one in averages]
    state = ops.StepState.on(kernel_device)
    state.found_inf.fill_(1.0)

    def move():
        if runs == "kernel":
            ops.ema(parameters, averages, 0.5, state=state)
        else:
            with references(kernel_device):
                ops.ema(parameters, averages, 0.5, state=state)
        return [torch.equal(old, new) for old, new in zip(before, averages, strict=True)]

    assert all(move())
    state.found_inf.zero_()
    assert move() == [one.numel() == 0 for one in averages]


@pytest.mark.gpu
def test_a_captured_average_follows_another_decay():
    device = torch.device("cuda")
    parameter, average = torch.ones(1000, device=device), torch.zeros(1000, device=device)
    decay = torch.tensor(0.5, dtype=torch.float64, device=device)
    ops.ema([parameter], [average], decay)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.ema([parameter], [average], decay)
    decay.fill_(0.25)
    graph.replay()
    torch.testing.assert_close(average.cpu(), torch.full((1000,), 1 - 0.5 * 0.25))
