"""Casts by the kernel and by torch have the same bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabricamp.ops.flat_casts import FlatCast, Piece
from tests.cuda_on_cpu.compiler import one_order

E4M3 = torch.float8_e4m3fn
HALVES = [torch.bfloat16, torch.float16]


def to_e4m3(tensor, scale, rounded):
    """Returns the cast that torchao makes: products in fp32, limited to the largest value."""
    product = tensor.to(rounded).float() * scale
    return product.clamp(-448.0, 448.0).to(E4M3)


def every_bf16(device):
    """Returns all values of bf16, finite or not, with small additions that the rounding takes away."""
    bits = torch.arange(2**16, dtype=torch.int32, device=device) << 16
    return (bits | torch.arange(2**16, dtype=torch.int32, device=device) % 7 * 1111).view(torch.float32)


def cast(tensor, target, *, scale=None):
    """Returns the cast of a whole tensor."""
    flat = torch.empty(tensor.numel(), dtype=target if scale is None else E4M3, device=tensor.device)
    FlatCast([Piece(0, 0, 0, tensor.numel(), scale)], tensor.dtype, target, tensor.device)([tensor], flat)
    return flat


def same(found, expected):
    """Asserts equal bytes; a NaN is a NaN, whatever its other bits."""
    number = ~expected.float().isnan()
    assert torch.equal(found.float().isnan(), ~number)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.element_size()]
    assert torch.equal(found[number].view(bits), expected[number].view(bits))


@pytest.mark.parametrize("target", HALVES)
@one_order
def test_all_values_have_torchs_bytes(kernel_device, target):
    values = every_bf16(kernel_device)
    same(cast(values, target), values.to(target))
    same(cast(values.to(target), torch.float32), values.to(target).float())


@pytest.mark.parametrize("rounded", [*HALVES, torch.float32])
@pytest.mark.parametrize("factor", [1.0, 0.37, 3e-3, 1234.5])
@one_order
def test_all_values_with_a_scale_have_torchs_bytes(kernel_device, rounded, factor):
    values = every_bf16(kernel_device)
    scale = torch.tensor([factor], device=kernel_device)
    same(cast(values, rounded, scale=scale), to_e4m3(values, scale, rounded))


@st.composite
def layouts(draw):
    """Draws tensors' sizes, and pieces that lie one after the other with gaps, in any order of the tensors."""
    sizes = draw(st.lists(st.integers(1, 9000), min_size=1, max_size=20))
    order = draw(st.permutations(range(len(sizes))))
    pieces, place = [], 0
    for number in order:
        first = draw(st.integers(0, sizes[number]))
        count = draw(st.integers(0, sizes[number] - first))
        pieces.append((number, first, place, count))
        place += count + draw(st.sampled_from([0, 0, 1, 8]))
    return sizes, pieces, place


@pytest.mark.parametrize("types", [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)])
@one_order
def test_pieces_of_any_tensors(kernel_device, types):
    source, target = types

    @settings(max_examples=40, deadline=None)
    @given(layouts(), st.integers(0, 3))
    def check(layout, shift):
        sizes, pieces, length = layout
        generator = torch.Generator().manual_seed(len(sizes))
        # Views at any element of their memory: the addresses of some are no multiples of 16.
        tensors = [torch.randn(size + shift, generator=generator).to(kernel_device, source)[shift:] for size in sizes]
        flat = torch.full((length,), 7.0, dtype=target, device=kernel_device)
        expected = flat.clone()
        for number, first, place, count in pieces:
            expected[place : place + count] = tensors[number][first : first + count].to(target)
        in_bytes = [Piece(number, first, place * target.itemsize, count) for number, first, place, count in pieces]
        FlatCast(in_bytes, source, target, kernel_device)(tensors, flat)
        assert torch.equal(flat, expected)

    check()


@one_order
def test_values_beside_bytes_in_one_launch(kernel_device):
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(size, generator=generator).to(kernel_device) for size in (4100, 37))
    scale = torch.tensor([100.0], device=kernel_device)
    flat = torch.zeros(4100 + 2 * 37, dtype=torch.uint8, device=kernel_device)
    pieces = [Piece(0, 0, 0, 4100, scale), Piece(1, 0, 4100, 37)]
    FlatCast(pieces, torch.float32, torch.bfloat16, kernel_device)([first, second], flat)
    same(flat[:4100].view(E4M3), to_e4m3(first, scale, torch.bfloat16))
    assert torch.equal(flat[4100:].view(torch.bfloat16), second.bfloat16())


@one_order
def test_new_tensors_in_a_later_call(kernel_device):
    flat = torch.zeros(3, dtype=torch.bfloat16, device=kernel_device)
    casts = FlatCast([Piece(0, 0, 0, 3)], torch.float32, torch.bfloat16, kernel_device)
    for value in (1.0, 2.0):
        casts([torch.full((3,), value, device=kernel_device)], flat)
        assert flat.tolist() == [value] * 3
