"""Copies of small tensors by their kernel and by torch have the same bits, for any dtype, size, memory order and address."""

from __future__ import annotations

import pytest
import torch

from fabricamp.ops.copies import Copies
from tests.cuda_on_cpu.compiler import one_order

SHAPES = [
    [(4, 32), (4,)],
    [(5, 7, 3)],
    [(), (0, 3), (257,), (3, 3)],
    [(8192,), (4096,)],
]


def numbers(shape, dtype, device, seed=0):
    """Returns a tensor of random bits, including NaNs."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape).to(device)


def same_bits(one, other):
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def spied(monkeypatch):
    """Returns the list of the copies that torch made in place of the kernel."""
    copied, real = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *a, **k: (copied.append(len(a[0])), real(*a, **k))[1])
    return copied


@pytest.mark.parametrize("shapes", SHAPES)
def test_bits_arrive_in_one_launch(kernel_device, shapes, monkeypatch):
    dtypes = [torch.float32, torch.int64, torch.float16, torch.int8]
    kinds = list(zip(shapes, dtypes, strict=False))
    targets = [torch.zeros(shape, dtype=dtype, device=kernel_device) for shape, dtype in kinds]
    copies = Copies(targets)
    by_torch = spied(monkeypatch)
    for seed in range(2):
        sources = [numbers(shape, dtype, kernel_device, seed) for shape, dtype in kinds]
        copies(sources)
        assert all(map(same_bits, targets, sources))
    assert not by_torch


@one_order
def test_what_the_kernel_cannot_copy_torch_does(kernel_device, monkeypatch):
    x = torch.zeros(2, 3, 4, 5, device=kernel_device).to(memory_format=torch.channels_last)
    copies = Copies([x])
    by_torch = spied(monkeypatch)
    same, other = numbers(x.shape, torch.float32, kernel_device), numbers(x.shape, torch.float32, kernel_device, 1)
    copies([same.to(memory_format=torch.channels_last)])
    assert not by_torch
    assert same_bits(x, same)
    copies([other])  # another memory order
    assert same_bits(x, other)
    copies([same.double().nan_to_num()])  # another dtype
    copies([torch.nn.Parameter(other)])
    assert same_bits(x, other)
    assert by_torch == [1, 1, 1]
    with pytest.raises(RuntimeError, match="size"):
        copies([torch.ones(2, 3, 4, 4, device=kernel_device)])


@one_order
@pytest.mark.parametrize("kind", ["many", "large", "woven"])
def test_targets_that_are_torchs(kernel_device, kind, monkeypatch):
    base = torch.zeros(1 << 15, device=kernel_device)
    targets = {"many": list(base[:10].split(2)), "large": [base], "woven": [base[: 1 << 14 : 2]]}[kind]
    copies = Copies(targets)
    by_torch = spied(monkeypatch)
    copies([torch.full_like(one, 2.0) for one in targets])
    assert len(by_torch) == 1
    assert all(bool((one == 2).all()) for one in targets)


def test_a_place_that_is_not_aligned(kernel_device):
    for offset in (1, 4, 16):
        base = torch.zeros(300, dtype=torch.uint8, device=kernel_device)
        target = base[offset : offset + 200]
        source = numbers((217,), torch.uint8, kernel_device)[17:]
        Copies([target])([source])
        assert same_bits(target, source)
        assert not base[:offset].any()
        assert not base[offset + 200 :].any()
