"""Lists of tensors with sizes and layouts that are difficult for kernels."""

from __future__ import annotations

import torch

from fabricamp.ops import table

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6, torch.float64: 1e-6}


def sizes() -> list[int]:
    """Returns sizes: one element, odd numbers, about one chunk, several chunks, no elements."""
    chunk = table.CHUNK_SIZE
    return [1, 7, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 5, 0, 2]


def tensors(device, dtype=torch.float32, *, seed=0, scale=1.0) -> list[torch.Tensor]:
    """Tensors of all sizes and layouts: aligned, unaligned, strided, transposed, channels_last."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device, dtype)

    made = [make(size) for size in sizes()]
    made += [make(201)[1:], make(90)[::2], make(9, 11).t(), make(2, 3, 5, 4).to(memory_format=torch.channels_last)]
    made += [make(6, 8)[:, 1:5], make()]
    return made


def all_pairs(device, *, seed=0):
    """One pair of tensors for each pair of dtypes."""
    pairs = [(one, other) for one in FLOATS for other in FLOATS]
    generator = torch.Generator().manual_seed(seed)
    first = [torch.randn(77, generator=generator, dtype=torch.float64).to(device, one) for one, _ in pairs]
    second = [torch.randn(77, generator=generator, dtype=torch.float64).to(device, other) for _, other in pairs]
    return first, second


class Elsewhere(torch.Tensor):
    """A CPU tensor with a CUDA ``device``, so that references must not read its values on the host."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


def assert_near(mine: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None, factor: float = 1.0) -> None:
    tolerance = TOLERANCE[dtype or mine.dtype] * factor
    torch.testing.assert_close(
        mine.double().cpu(), exact.double().cpu(), rtol=tolerance, atol=tolerance * 1e-1, equal_nan=True
    )
