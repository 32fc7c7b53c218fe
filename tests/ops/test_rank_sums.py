"""Sums over ranks by the kernel are those of torch, added in the order of the ranks."""

from __future__ import annotations

import pytest
import torch

from fabricamp.ops.rank_sums import rank_sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ranks", "rank", "elements"), [(2, 0, 4096), (2, 1, 37), (3, 1, 2056), (8, 7, 9000)])
def test_the_bits_are_those_of_torch(kernel_device, dtype, ranks, rank, elements):
    generator = torch.Generator().manual_seed(ranks)
    parts = torch.randn(ranks, elements, generator=generator).to(kernel_device, dtype)
    others = torch.stack([part for other, part in enumerate(parts) if other != rank])
    for factor in (1.0, 1 / ranks):
        found = torch.full((elements,), 7.0, device=kernel_device)
        rank_sums(parts[rank].clone(), others, found, rank=rank, factor=factor)
        expected = torch.zeros_like(found)
        for part in parts:
            expected += part.float()
        assert torch.equal(found, expected * torch.tensor(factor, dtype=torch.float32))
        exact = parts.double().sum(0) * factor
        assert (found.double() - exact).abs().max() < 1e-6 * ranks
