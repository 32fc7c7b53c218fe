"""Lists of tensors for the functions of amp_C, and a fixture for both of their implementations."""

import pytest
import torch

from fabricamp.ops import bridge, table
from tests.cuda_on_cpu.compiler import compiler

__all__ = ["BF16", "DOUBLE", "FULL", "HALF", "SHAPES", "close", "copies", "device", "flag", "same", "tensors"]

SHAPES = [(5,), (3, 4), (1,), (2, 3, 2)]
HALF, BF16, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(params=["torch", "kernels"])
def device(request, monkeypatch):
    """Runs a test with both implementations: torch's operations, and the kernels compiled for the CPU."""
    if request.param == "torch":
        yield
        return
    monkeypatch.setitem(bridge.COMPILERS, "cpu", compiler(False))
    monkeypatch.setattr(table, "_tables", {})
    monkeypatch.setattr(table, "CHUNK_SIZE", 64)
    monkeypatch.setattr(table, "THREADS", 64)
    bridge.kernel.cache_clear()
    yield
    bridge.kernel.cache_clear()


@pytest.fixture
def flag():
    return torch.zeros(1, dtype=torch.int32)


def tensors(seed, dtype=FULL):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def copies(lists):
    return [[one.clone() for one in tensors] for tensors in lists]


def close(found, expected, **tolerances):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), **(tolerances or {"rtol": 2e-5, "atol": 2e-6}))


def same(found, expected):
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
