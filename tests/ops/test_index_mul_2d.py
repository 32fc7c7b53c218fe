"""index_mul_2d: values, first and second derivatives, equal bits in repeated runs."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ops
from fabricamp.errors import ConfigError

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_and_gradients(device, dtype, index):
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(size, 5, generator=generator).to(device, dtype) for size in (7, 40))
    where = torch.randint(0, 7, (40,), generator=generator).to(device, index)
    leaves = [one.clone().requires_grad_(), two.clone().requires_grad_()]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    made, expected = ops.index_mul_2d(*leaves, where), exact[0][where.long()] * exact[1]
    assert made.dtype == dtype
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(made.double(), expected, **tolerance)
    made.sum().backward()
    expected.sum().backward()
    for mine, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, **tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_both_derivatives(device):
    one, two = (torch.randn(size, 3, dtype=torch.float64, device=device, requires_grad=True) for size in (4, 6))
    where = torch.tensor([3, 0, 0, 1, 3, 3], device=device)

    def function(x, y):
        return ops.index_mul_2d(x, y, where)

    assert torch.autograd.gradcheck(function, (one, two))
    assert torch.autograd.gradgradcheck(function, (one, two))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gradients_have_equal_bits_where_many_rows_meet():
    one, two = torch.randn(5, 64, device="cuda").requires_grad_(), torch.randn(100_000, 64, device="cuda")
    where = torch.randint(0, 5, (100_000,), device="cuda")
    runs = [torch.autograd.grad(ops.index_mul_2d(one, two, where).square().sum(), one)[0] for _ in range(3)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in1": torch.zeros(4, 2)}, r"shapes \(4, 2\), \(6, 3\), \(6,\)"),
        ({"in1": torch.zeros(4)}, "give matrices"),
        ({"idx1": torch.zeros(5, dtype=torch.int64)}, "one index for each row of in2"),
        ({"in1": torch.zeros(4, 3, dtype=torch.float16)}, "in1 of torch.float16 and in2 of torch.float32"),
        ({"idx1": torch.zeros(6)}, "idx1 of torch.float32"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    kept = {"in1": torch.zeros(4, 3), "in2": torch.zeros(6, 3), "idx1": torch.zeros(6, dtype=torch.int64)} | change
    with pytest.raises(ConfigError, match=message):
        ops.index_mul_2d(**kept)
