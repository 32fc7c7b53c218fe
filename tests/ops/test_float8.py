"""Casts to FP8 by the kernel and by torch have the same bytes."""

from __future__ import annotations

import pytest
import torch

from fabricamp.ops import float8
from fabricamp.ops.float8 import to_float8
from tests.cuda_on_cpu.compiler import one_order

E4M3 = torch.float8_e4m3fn


def by_torch(tensor, scale, rounded):
    """Returns the cast that torchao makes: products in fp32, limited to the largest value."""
    product = tensor.to(rounded).float() * scale
    return product.clamp(-448.0, 448.0).to(E4M3)


def launches(monkeypatch):
    """Returns the list of elements of each launch."""
    seen, real = [], float8.kernel

    def spied(*arguments):
        run = real(*arguments)

        class Spy:
            def launch(self, blocks, threads, *numbers):
                seen.append(numbers[-1])
                run.launch(blocks, threads, *numbers)

        return Spy()

    monkeypatch.setattr(float8, "kernel", spied)
    return seen


def every_bf16(device):
    """Returns all values of bf16, finite or not, with small additions that the rounding takes away."""
    bits = torch.arange(2**16, dtype=torch.int32, device=device) << 16
    return (bits | torch.arange(2**16, dtype=torch.int32, device=device) % 7 * 1111).view(torch.float32)


@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("factor", [1.0, 0.37, 3e-3, 1234.5])
@one_order
def test_all_bf16_values_have_torchs_bytes(kernel_device, rounded, factor, monkeypatch):
    seen = launches(monkeypatch)
    values = every_bf16(kernel_device)
    scale = torch.tensor([factor], device=kernel_device)
    found = to_float8(values, scale, E4M3, rounded).view(torch.uint8)
    expected = by_torch(values, scale, rounded)
    # A NaN has a sign, which is of no use.
    number = ~expected.float().isnan()
    assert torch.equal(found.view(E4M3).float().isnan(), ~number)
    assert torch.equal(found[number], expected.view(torch.uint8)[number])
    assert seen == [2**16]


@pytest.mark.parametrize("shape", [(16, 16), (32, 272), (4096, 1), (16,)])
def test_any_number_of_blocks(kernel_device, shape, monkeypatch):
    seen = launches(monkeypatch)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    scale = torch.tensor([100.0], device=kernel_device)
    found = to_float8(values, scale, E4M3, torch.bfloat16)
    assert found.shape == values.shape
    assert torch.equal(found.view(torch.uint8), by_torch(values, scale, torch.bfloat16).view(torch.uint8))
    assert seen == [values.numel()]


@one_order
@pytest.mark.parametrize("kind", ["unaligned", "few", "none", "half", "transposed", "e5m2"])
def test_what_the_kernel_cannot_cast_torch_does(kernel_device, kind, monkeypatch):
    seen = launches(monkeypatch)
    base = torch.randn(513, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    values = {
        "unaligned": base[1:],
        "few": base[:10],
        "none": base[:0],
        "half": base[:512].bfloat16(),
        "transposed": base[:512].view(16, 32).t(),
        "e5m2": base[:512],
    }[kind]
    dtype = torch.float8_e5m2 if kind == "e5m2" else E4M3
    scale = torch.tensor([10.0], device=kernel_device)
    found = to_float8(values, scale, dtype, torch.bfloat16)
    expected = (values.bfloat16().float() * scale).to(dtype)
    assert torch.equal(found.float(), expected.float())
    assert not seen
