"""Sums of squares by the kernel, against float64 and the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabricamp import ops
from fabricamp.ops import table
from fabricamp.ops.bridge import runs_kernels
from tests.cuda_on_cpu.compiler import references
from tests.ops.lists import FLOATS, assert_near, tensors

many = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def exact_norms(values):
    return torch.stack([torch.linalg.vector_norm(value.double()).cpu() for value in values])


@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_of_all_sizes_and_layouts(kernel_device, dtype):
    assert runs_kernels(kernel_device)
    values = tensors(kernel_device, dtype)
    total, each = ops.l2norm(values)
    assert_near(each, exact_norms(values), torch.float32)
    assert_near(total, torch.linalg.vector_norm(exact_norms(values)), torch.float32)


def test_norms_of_all_dtypes_in_one_launch_twice_bit_equal(kernel_device):
    values = [tensor for dtype in FLOATS for tensor in tensors(kernel_device, dtype)]
    total, each = ops.l2norm(values)
    again, each_again = ops.l2norm(values)
    assert_near(each, exact_norms(values), torch.float32)
    assert torch.equal(total, again)
    assert torch.equal(each, each_again)


@many
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.sampled_from([1.0, 2.0**16, 3.0]), st.integers(1, 8))
def test_gradient_statistics(kernel_device, sizes, scale, divisor):
    generator = torch.Generator().manual_seed(sum(sizes))
    gradients = [torch.randn(size, generator=generator).to(kernel_device) * scale for size in sizes]
    mine = ops.gradient_statistics(gradients, torch.tensor(scale, device=kernel_device), float(divisor))
    exact = sum((gradient.double() / (scale * divisor)).square().sum().cpu() for gradient in gradients)
    assert_near(mine.double().sum(), torch.as_tensor(exact), torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["first", "middle", "last", "tail"])
def test_one_bad_value_shows_in_its_chunk_alone(kernel_device, dtype, bad, where):
    chunk = table.CHUNK_SIZE
    gradients = [torch.ones(3 * chunk + 5, dtype=dtype, device=kernel_device) for _ in range(3)]
    tensor, position, expected = {
        "first": (0, 0, 0),
        "middle": (1, chunk + 33, 5),
        "last": (2, 3 * chunk - 1, 10),
        "tail": (2, 3 * chunk + 4, 11),
    }[where]
    gradients[tensor][position] = bad
    mine = ops.gradient_statistics(gradients, torch.ones((), device=kernel_device))
    assert torch.isfinite(mine).logical_not().nonzero().flatten().tolist() == [expected]


def test_large_half_gradients_do_not_overflow(kernel_device):
    gradients = [torch.full((1000,), 60000.0, dtype=torch.float16, device=kernel_device)]
    assert torch.isfinite(ops.gradient_statistics(gradients, torch.ones((), device=kernel_device))).all()


@many
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.data())
def test_the_place_of_a_bad_statistic(kernel_device, sizes, data):
    filled = [place for place, size in enumerate(sizes) if size]
    if not filled:
        return
    bad = data.draw(st.sampled_from(filled))
    gradients = [torch.ones(size, device=kernel_device) for size in sizes]
    gradients[bad][-1] = float("nan")
    statistics = ops.gradient_statistics(gradients, torch.ones((), device=kernel_device))
    (index,) = torch.isfinite(statistics).logical_not().nonzero().view(-1).tolist()
    assert ops.place_of_statistic(sizes, index, kernel_device) == bad
    assert ops.place_of_statistic(sizes, len(statistics), kernel_device) is None
    with references(kernel_device):
        statistics = ops.gradient_statistics(gradients, torch.ones((), device=kernel_device))
        assert ops.place_of_statistic(sizes, int(statistics.isnan().nonzero()), kernel_device) == bad


def test_a_divisor_may_be_an_int(kernel_device):
    # 2 and 2.0 are the same key of a dict, so a cached conversion of one must not be used for the other.
    gradients, scale = [torch.ones(70, device=kernel_device)], torch.tensor(4.0, device=kernel_device)
    for divisor in (2, 2.0, 5.0, 5, True):
        mine = ops.gradient_statistics(gradients, scale, divisor)
        assert_near(mine.double().sum(), torch.tensor(70 / (4.0 * divisor) ** 2), torch.float32)


def test_an_answer_stays_what_it_was(kernel_device):
    gradients, scale = [torch.ones(70, device=kernel_device)], torch.ones((), device=kernel_device)
    first = ops.gradient_statistics(gradients, scale)
    before = first.clone()
    gradients[0].fill_(3.0)
    second = ops.gradient_statistics(gradients, scale)
    assert torch.equal(first, before)
    assert_near(second.double().sum(), torch.tensor(630.0), torch.float32)
