"""Complex tensors, and views that conjugate or negate their memory, in the kernels: against complex128, and the references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.gradients.memory import GradientMemory
from fabricamp.ops.layouts import elements_of
from fabricamp.optimizers import FusedSGD
from tests.cuda_on_cpu.compiler import references

many = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.lists(
    st.sampled_from([0, 1, 2, 3, 31, 32, 33, 64, 69, 200]), min_size=1, max_size=6
)  # a chunk is 64 real numbers
KINDS = st.sampled_from(
    [torch.complex64, torch.complex128, "conjugate"]
)  # one for all: each list of dtypes is compiled anew


def made(device, size, kind):
    generator = torch.Generator().manual_seed(size)
    dtype = torch.complex64 if kind == "conjugate" else kind
    value = torch.randn(size, dtype=dtype, generator=generator).to(device)
    return value.conj() if kind == "conjugate" else value


@pytest.fixture(params=["kernel", "reference"])
def each_way(request, kernel_device):
    if request.param == "kernel":
        yield kernel_device
    else:
        with references(kernel_device):
            yield kernel_device


@many
@given(SIZES, KINDS)
def test_a_complex_value_counts_by_its_absolute_value(each_way, sizes, kind):
    values = [made(each_way, size, kind) for size in sizes]
    exact = torch.stack([torch.linalg.vector_norm(one.to(torch.complex128)).cpu() for one in values])
    total, each = ops.l2norm(values)
    torch.testing.assert_close(each.cpu().double(), exact, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(total.cpu().double(), exact.norm(), rtol=1e-6, atol=1e-7)
    scale = torch.tensor(8.0, device=each_way)
    squares = ops.gradient_statistics(values, scale, 2.0).sum().cpu().double()
    torch.testing.assert_close(squares, (exact / 16).square().sum(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [complex("inf"), complex(0, float("nan")), complex(1, float("-inf"))])
@pytest.mark.parametrize("position", [0, 31, 32, 68])
def test_a_bad_part_is_found_in_its_gradient(each_way, bad, position):
    gradients = [torch.ones(size, dtype=torch.complex64, device=each_way) for size in (3, 69, 2)]
    gradients[1][position] = bad
    statistics = ops.gradient_statistics(gradients, torch.ones((), device=each_way))
    (found,) = torch.isfinite(statistics).logical_not().nonzero().flatten().tolist()
    assert ops.place_of_statistic(list(map(elements_of, gradients)), found, each_way) == 1


@many
@given(SIZES, KINDS)
def test_scale_and_sums(each_way, sizes, kind):
    sources = [made(each_way, size, kind) for size in sizes]
    wide = [one.to(torch.complex128) for one in sources]
    out = [torch.zeros(one.shape, dtype=one.dtype, device=each_way) for one in sources]
    ops.scale(sources, out, torch.tensor(0.375, device=each_way))
    ops.accumulate(sources, out, 2.0)
    ops.ema(sources, out, 0.25)
    for one, exact in zip(out, wide, strict=True):
        expected = 0.25 * 2.375 * exact + 0.75 * exact
        torch.testing.assert_close(one.to(torch.complex128), expected, rtol=1e-5, atol=1e-6)


def test_a_conjugate_at_the_address_of_another_tensor(each_way):
    """Gradients come back at the same address, with the same shape and dtype, and may be conjugates from then on."""
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.complex64, device=each_way))
    memory = GradientMemory([parameter], sums=True)
    value = torch.full((5,), 1 + 2j, dtype=torch.complex64, device=each_way)
    for gradient in (value, value.conj(), value.conj(), value):
        parameter.grad = gradient
        memory.add()
    assert memory.local().tensors[0].tolist() == [4 + 0j] * 5


def test_a_conjugate_is_read_as_one_after_its_base(each_way):
    value = torch.full((5,), 1 + 2j, dtype=torch.complex64, device=each_way)
    out = torch.zeros_like(value)
    for source in (value, value.conj(), value):
        ops.scale([source], [out], torch.ones((), device=each_way))
        assert out.tolist() == source.tolist()


def test_real_and_complex_rows_stand_in_one_table(each_way):
    values = [
        torch.full((40,), 3.0, device=each_way),
        torch.full((33,), 3 + 4j, dtype=torch.complex64, device=each_way),
    ]
    assert ops.l2norm(values)[1].square().tolist() == pytest.approx([9 * 40, 25 * 33])
    ops.scale(values, values, 2.0)
    assert values[0].tolist() == [6.0] * 40
    assert values[1].tolist() == [6 + 8j] * 33


def test_a_limit_of_complex_values_is_refused(each_way):
    value = torch.ones(2, dtype=torch.complex64, device=each_way)
    with pytest.raises(ConfigError, match="clip them by their norm"):
        ops.scale([value], [value], 1.0, 0.5)


def test_a_row_of_real_and_complex_tensors_is_refused(kernel_device):
    complex_one = torch.ones(2, dtype=torch.complex64, device=kernel_device)
    with pytest.raises(ValueError, match="row 0 of a table has complex and real tensors"):
        ops.scale([complex_one], [torch.ones(2, device=kernel_device)], 1.0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_the_gradient_of_an_imaginary_part_may_be_a_negated_view(kernel_device, shape):
    """Autograd's gradient of one element that only enters as an imaginary part; fused optimizers read its memory."""
    weight = nn.Parameter(torch.ones(shape, device=kernel_device))
    other = nn.Parameter(torch.ones(shape, device=kernel_device))
    optimizer = FusedSGD([weight, other], lr=1.0)
    for step in range(4):
        weight.grad = other.grad = None
        if step % 2:
            (3 * weight + other).sum().backward()
        else:
            (torch.complex(torch.zeros_like(weight), weight).conj() * (1 + 3j)).imag.sum().backward()
            other.sum().backward()
            assert weight.grad.is_neg()
        before, gradient = weight.item(), weight.grad.item()
        optimizer.step()
        assert weight.item() == before - gradient
