"""Scale, axpby, copy_cast and accumulate by their kernels, against float64 and the references."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ops
from fabricamp.ops.tensors import note_differences
from tests.cuda_on_cpu.compiler import references
from tests.ops.lists import FLOATS, all_pairs, assert_near, tensors


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_scale_of_all_pairs_of_dtypes(kernel_device, on_device, limit):
    sources, destinations = all_pairs(kernel_device)
    factor = 0.375
    ops.scale(sources, destinations, torch.tensor(factor, device=kernel_device) if on_device else factor, limit)
    for source, destination in zip(sources, destinations, strict=True):
        exact = source.double() * factor
        assert_near(destination, exact if limit is None else exact.clamp(-limit, limit))


@pytest.mark.parametrize("dtype", FLOATS)
def test_scale_of_all_layouts_in_place(kernel_device, dtype):
    values = tensors(kernel_device, dtype)
    exact = [value.double() * 3 for value in values]
    ops.scale(values, values, 3.0)
    for mine, expected in zip(values, exact, strict=True):
        assert_near(mine, expected)


def test_scale_between_layouts(kernel_device):
    sources = [one for one in tensors(kernel_device) if one.dim() == 4]
    destinations = [torch.zeros(one.shape, device=kernel_device) for one in sources]
    ops.scale(sources, destinations, 2.0)
    assert all(torch.equal(one * 2, other) for one, other in zip(sources, destinations, strict=True))


def test_scale_keeps_nan_under_a_limit_and_computes_in_fp32(kernel_device):
    source = torch.tensor([float("nan"), float("inf"), 2.0**15], dtype=torch.float16, device=kernel_device)
    out = torch.empty(3, device=kernel_device)
    ops.scale([source], [out], 2.0**-30, 1.0)
    assert out.isnan().tolist() == [True, False, False]
    assert out[1:].tolist() == [1.0, 2.0**-15]


def test_strides_that_skip_memory_leave_it_alone(kernel_device):
    base = torch.ones(10, device=kernel_device)
    ops.scale([base[::2]], [base[::2]], 5.0)
    assert base.tolist() == [5.0, 1.0] * 5


@pytest.mark.parametrize("on_device", [True, False])
def test_axpby_of_all_pairs_of_dtypes(kernel_device, on_device):
    x, y = all_pairs(kernel_device)
    alpha, beta = (torch.tensor(v, device=kernel_device) if on_device else v for v in (0.5, -1.25))
    exact = [0.5 * one.double() - 1.25 * other.double() for one, other in zip(x, y, strict=True)]
    out = [torch.empty(77, device=kernel_device) for _ in x]
    ops.axpby(alpha, x, beta, y, out)
    for mine, expected in zip(out, exact, strict=True):
        torch.testing.assert_close(mine.double(), expected, rtol=1e-5, atol=1e-5)
    ops.axpby(alpha, x, beta, y, y)
    for mine, expected in zip(y, exact, strict=True):
        assert_near(mine, expected, factor=10)


@pytest.mark.parametrize("multiplier", [None, 0.25])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_accumulate_equals_its_reference(kernel_device, dtype, multiplier):
    gradients = [one for one in tensors(kernel_device, dtype) if one.is_contiguous()]
    flat = torch.ones(sum(one.numel() for one in gradients), device=kernel_device)
    twin = flat.clone()
    factor = None if multiplier is None else torch.tensor(multiplier, device=kernel_device)
    lengths = [one.numel() for one in gradients]
    views, others = (
        [piece.view(one.shape) for piece, one in zip(whole.split(lengths), gradients, strict=True)]
        for whole in (flat, twin)
    )
    ops.accumulate(gradients, views, factor)
    with references(kernel_device):
        ops.accumulate(gradients, others, factor)
    assert torch.equal(flat, twin)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copy_cast_rounds_as_torch_does(kernel_device, dtype):
    special = torch.tensor([0.0, -0.0, 65504.0, 65519.0, 65520.0, 1e-8, 6e-8, 1e-5, float("inf"), float("nan"), 1e38])
    masters = [special.to(kernel_device), *tensors(kernel_device), *tensors(kernel_device, scale=1e-6)]
    halves = [torch.empty_like(one, dtype=dtype) for one in masters]
    ops.copy_cast(masters, halves)
    for half, master in zip(halves, masters, strict=True):
        torch.testing.assert_close(half, master.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_differences_are_noted_by_row(kernel_device, dtype):
    special = torch.tensor([0.0, -0.0, 65504.0, 65520.0, 1e-8, 6e-8, float("inf"), float("nan"), 1e38])
    masters = [special.to(kernel_device), *tensors(kernel_device), torch.zeros(0, device=kernel_device)]
    rounded = [one.to(dtype) for one in masters]
    on_gpu = kernel_device.type == "cuda"
    flags = torch.zeros(len(masters), dtype=torch.int32, device="cpu", pin_memory=on_gpu)

    def noted(values):
        note_differences(masters, values, flags)
        if on_gpu:
            torch.cuda.synchronize()
        return flags.tolist()

    assert noted(rounded) == [0] * len(masters)
    for row, master in enumerate(masters):
        for element in {0, master.numel() - 1} if master.numel() else ():
            place = tuple(map(int, torch.unravel_index(torch.tensor(element), master.shape)))
            edited = [one.clone() for one in rounded]
            edited[row][place] = 2.5
            assert noted(edited) == [int(index == row) for index in range(len(masters))]
            assert noted(rounded) == [int(index == row) for index in range(len(masters))]
            flags.zero_()
    note_differences([], [], flags[:0])
