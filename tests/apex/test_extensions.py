"""The extension modules, pass by pass, against torch's own operations and autograd."""

import pytest
import torch
from torch.nn import functional as F

from fabricamp.apex._extensions import fused_layer_norm_cuda, syncbn, xentropy_cuda
from fabricamp.apex.contrib.xentropy import SoftmaxCrossEntropyLoss

HALF, FULL = torch.float16, torch.float32


def close(found, expected, dtype=FULL, **tolerances):
    tolerances = tolerances or ({"rtol": 1e-5, "atol": 1e-5} if dtype is FULL else {"rtol": 2e-3, "atol": 2e-3})
    torch.testing.assert_close(found.float(), expected.float(), **tolerances)


# -- xentropy -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_rows(dtype, smoothing):
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 11).to(dtype).requires_grad_(), torch.tensor([3, 0, 10, 5, 0, 1, 2])
    twin = logits.detach().float().clone().requires_grad_()
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 0, dtype is HALF)
    expected = F.cross_entropy(twin, labels, ignore_index=0, reduction="none", label_smoothing=smoothing)
    assert losses.dtype == FULL
    close(losses, expected, dtype)
    assert losses[1] == losses[4] == 0
    weights = torch.arange(7.0)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    assert logits.grad.dtype == dtype
    close(logits.grad, twin.grad, dtype)


def test_cross_entropy_is_of_the_logits_dtype_unless_asked():
    logits, labels = torch.zeros(2, 4, dtype=HALF), torch.tensor([1, 2])
    assert SoftmaxCrossEntropyLoss.apply(logits, labels).dtype == HALF
    assert SoftmaxCrossEntropyLoss()(logits, labels, half_to_float=True).dtype == FULL


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_xentropy_cuda(dtype, smoothing):
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 11).to(dtype), torch.tensor([3, 0, 10, 5, 0, 1, 2])
    losses, totals = xentropy_cuda.forward(logits, labels, smoothing, True)
    twin = logits.float().clone().requires_grad_()
    expected = F.cross_entropy(twin, labels, reduction="none", label_smoothing=smoothing)
    close(losses, expected, dtype)
    close(totals, twin.logsumexp(1), dtype)
    weights = torch.arange(7.0)
    (expected * weights).sum().backward()
    found = xentropy_cuda.backward(weights, logits, totals, labels, smoothing)
    assert found.dtype == dtype
    close(found, twin.grad, dtype, rtol=4e-3, atol=4e-3)
    assert xentropy_cuda.forward(logits, labels, smoothing, False)[0].dtype == dtype


# -- syncbn ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_syncbn_of_two_ranks_is_batch_norm_of_both_batches(channel_last, dtype):
    torch.manual_seed(0)
    move = (lambda x: x.movedim(1, -1).contiguous()) if channel_last else (lambda x: x)
    name = (lambda one: getattr(syncbn, f"{one}_c_last")) if channel_last else (lambda one: getattr(syncbn, one))
    whole, above = torch.randn(5, 3, 4, 2).to(dtype), torch.randn(5, 3, 4, 2).to(dtype)
    weight, bias = torch.randn(3), torch.randn(3)
    twin, twin_weight, twin_bias = (one.float().clone().requires_grad_() for one in (whole, weight, bias))
    expected = F.batch_norm(twin, None, None, twin_weight, twin_bias, training=True, eps=1e-3)
    expected.backward(above.float())

    ranks, gradients = [move(one) for one in whole.split([2, 3])], [move(one) for one in above.split([2, 3])]
    means, variances = zip(*[name("welford_mean_var")(one) for one in ranks], strict=True)
    assert means[0].dtype == FULL
    count = torch.tensor([16, 24], dtype=torch.int32)
    mean, variance, inverse = syncbn.welford_parallel(torch.stack(means), torch.stack(variances), count, 1e-3)
    close(mean, whole.float().mean((0, 2, 3)))
    close(variance, whole.float().var((0, 2, 3)))

    outputs, sums = [], []
    for x, dy in zip(ranks, gradients, strict=True):
        if channel_last:
            outputs.append(syncbn.batchnorm_forward_c_last(x, None, mean, inverse, weight, bias, False))
        else:
            outputs.append(syncbn.batchnorm_forward(x, mean, inverse, weight, bias))
        sums.append(name("reduce_bn")(dy, x, mean, inverse, weight))
    assert outputs[0].dtype == dtype
    close(torch.cat(outputs), move(expected.detach()), dtype)
    sum_dy, sum_dy_xmu, of_weight, of_bias = (sum(one) for one in zip(*sums, strict=True))
    close(of_weight, twin_weight.grad, dtype, rtol=2e-3, atol=2e-3)
    close(of_bias, twin_bias.grad, dtype)
    found = [
        name("batchnorm_backward")(dy, x, mean, inverse, weight, sum_dy, sum_dy_xmu, count)
        for x, dy in zip(ranks, gradients, strict=True)
    ]
    assert found[0].dtype == dtype
    close(torch.cat(found), move(twin.grad), dtype)


def test_syncbn_adds_and_cuts():
    torch.manual_seed(0)
    x, z, mean, inverse = torch.randn(4, 2, 3), torch.randn(4, 2, 3), torch.randn(3), torch.rand(3)
    value = (x - mean) * inverse + z
    close(syncbn.batchnorm_forward_c_last(x, z, mean, inverse, None, None, True), value.relu())
    above = torch.randn(4, 2, 3)
    assert torch.equal(syncbn.relu_bw_c_last(above, x, z, mean, inverse, None, None), above * (value > 0))
    assert syncbn.reduce_bn_c_last(above, x, mean, inverse, None)[2:] == (None, None)


# -- layer norm -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("efficient", [False, True])
def test_layer_norm_cuda(dtype, efficient):
    torch.manual_seed(0)
    x, above = torch.randn(6, 2, 5).to(dtype), torch.randn(6, 2, 5).to(dtype)
    weight, bias = (torch.rand(2, 5) + 0.5).to(dtype), torch.randn(2, 5).to(dtype)
    leaves = [one.float().clone().requires_grad_() for one in (x, weight, bias)]
    expected = F.layer_norm(leaves[0], (2, 5), *leaves[1:], 1e-5)
    expected.backward(above.float())
    output, mean, inverse = fused_layer_norm_cuda.forward_affine(x, (2, 5), weight, bias, 1e-5)
    close(output, expected, dtype, rtol=4e-3 if dtype is HALF else 1e-5, atol=4e-3 if dtype is HALF else 1e-5)
    kept = output if efficient else x
    found = fused_layer_norm_cuda.backward_affine(above, mean, inverse, kept, (2, 5), weight, bias, 1e-5, efficient)
    for one, leaf in zip(found, leaves, strict=True):
        assert one.dtype == dtype
        close(one, leaf.grad, dtype, **({"rtol": 2e-2, "atol": 2e-2} if dtype is HALF else {}))
    plain = [x.float().clone().requires_grad_()]
    F.layer_norm(plain[0], (2, 5), eps=1e-5).backward(above.float())
    output, mean, inverse = fused_layer_norm_cuda.forward(x, (2, 5), 1e-5)
    kept = output if efficient else x
    of_input = fused_layer_norm_cuda.backward(above, mean, inverse, kept, (2, 5), 1e-5, efficient)
    close(of_input, plain[0].grad, dtype, **({"rtol": 1e-2, "atol": 1e-2} if dtype is HALF else {}))


@pytest.mark.parametrize("efficient", [False, True])
def test_rms_norm_cuda(efficient):
    torch.manual_seed(0)
    x, above, weight = torch.randn(6, 2, 5), torch.randn(6, 2, 5), torch.rand(2, 5) + 0.5
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    F.rms_norm(leaves[0], (2, 5), leaves[1], 1e-5).backward(above)
    output, inverse = fused_layer_norm_cuda.rms_forward_affine(x, (2, 5), weight, 1e-5)
    kept = output if efficient else x
    found = fused_layer_norm_cuda.rms_backward_affine(above, inverse, kept, (2, 5), weight, 1e-5, efficient)
    for one, leaf in zip(found, leaves, strict=True):
        close(one, leaf.grad)
    plain = x.clone().requires_grad_()
    F.rms_norm(plain, (2, 5), eps=1e-5).backward(above)
    output, inverse = fused_layer_norm_cuda.rms_forward(x, (2, 5), 1e-5)
    kept = output if efficient else x
    close(fused_layer_norm_cuda.rms_backward(above, inverse, kept, (2, 5), 1e-5, efficient), plain.grad)


def test_mixed_dtypes_give_the_weights():
    x, weight = torch.randn(3, 4), torch.ones(4, dtype=HALF)
    output, mean, inverse = fused_layer_norm_cuda.forward_affine_mixed_dtypes(x, (4,), weight, weight, 1e-5)
    assert (output.dtype, mean.dtype, inverse.dtype, mean.shape) == (HALF, FULL, FULL, (3,))
    assert fused_layer_norm_cuda.rms_forward_affine_mixed_dtypes(x, (4,), weight, 1e-5)[0].dtype == HALF
