import inspect
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fabricamp import optimizers
from fabricamp.apex import normalization, parallel
from fabricamp.apex.contrib.groupbn import BatchNorm2d_NHWC
from fabricamp.apex.contrib.layer_norm import FastLayerNorm
from fabricamp.apex.contrib.layer_norm.layer_norm import FastLayerNormFN
from fabricamp.apex.normalization import fused_layer_norm as functions
from tests.distributed.ranks import run_ranks

HALF = torch.float16


@pytest.mark.parametrize("name", ["FusedLayerNorm", "MixedFusedLayerNorm", "FusedRMSNorm", "MixedFusedRMSNorm"])
def test_modules_take_apexs_arguments(name):
    kind = getattr(normalization, name)
    layer = kind((2, 5), 1e-3, memory_efficient=True)
    output = layer(torch.randn(3, 2, 5))
    assert output.shape == (3, 2, 5)
    assert layer(torch.randn(3, 2, 5, dtype=HALF)).dtype == (torch.float32 if "Mixed" in name else HALF)
    if "Mixed" in name:
        with pytest.raises(RuntimeError, match="elementwise_affine=False"):
            kind(5, elementwise_affine=False)
    else:
        assert kind(5, 1e-5, False).weight is None
    assert inspect.signature(kind).parameters["eps"].default == 1e-5


def test_functions_and_classes_agree():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 5), torch.randn(5), torch.randn(5)
    layer, rms = F.layer_norm(x, (5,), weight, bias, 1e-6), F.rms_norm(x, (5,), weight, 1e-6)
    for given in (
        functions.fused_layer_norm_affine(x, weight, bias, (5,)),
        functions.mixed_dtype_fused_layer_norm_affine(x, weight, bias, 5),
        functions.FusedLayerNormAffineFunction.apply(x, weight, bias, (5,), 1e-6),
        functions.FusedLayerNormAffineMixedDtypesFunction.apply(x, weight, bias, (5,), 1e-6, True),
        FastLayerNormFN.apply(x, weight, bias, 1e-6),
    ):
        torch.testing.assert_close(given, layer)
    for given in (
        functions.fused_rms_norm_affine(x, weight, (5,)),
        functions.mixed_dtype_fused_rms_norm_affine(x, weight, (5,)),
        functions.FusedRMSNormAffineFunction.apply(x, weight, (5,), 1e-6),
        functions.FusedRMSNormAffineMixedDtypesFunction.apply(x, weight, (5,), 1e-6),
        functions.manual_rms_norm(x, (5,), weight, 1e-6),
    ):
        torch.testing.assert_close(given, rms)
    torch.testing.assert_close(functions.FusedLayerNormFunction.apply(x, (5,), 1e-6), F.layer_norm(x, (5,), eps=1e-6))
    torch.testing.assert_close(functions.FusedRMSNormFunction.apply(x, (5,), 1e-6), F.rms_norm(x, (5,), eps=1e-6))
    torch.testing.assert_close(functions.fused_layer_norm(x, (5,)), functions.fused_layer_norm(x, 5, 1e-6))
    torch.testing.assert_close(functions.fused_rms_norm(x, (5,)), functions.FusedRMSNormFunction.apply(x, (5,), 1e-6))
    assert functions.supports_custom_op()


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_passes_one_by_one(memory_efficient):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((3, 5), 5, 5))
    for kind, tensors, options in (
        (functions.FusedLayerNormAffineFunction, (x, weight, bias), ((5,), 1e-6)),
        (functions.FusedRMSNormAffineMixedDtypesFunction, (x, weight), ((5,), 1e-6)),
        (functions.FusedLayerNormFunction, (x,), ((5,), 1e-6)),
        (FastLayerNormFN, (x, weight, bias), (1e-6,)),
    ):
        context, output = types.SimpleNamespace(), kind.apply(*tensors, *options)
        passed = kind.forward(context, *tensors, *options, memory_efficient=memory_efficient)
        torch.testing.assert_close(passed, output)
        assert not passed.requires_grad
        gradients = kind.backward(context, torch.ones_like(passed))
        expected = torch.autograd.grad(output.sum(), tensors)
        torch.testing.assert_close(gradients[: len(tensors)], expected, atol=1e-5, rtol=1e-5)
        assert gradients[len(tensors) :] == (None,) * (len(options) + 1)
        names = list(inspect.signature(kind.forward).parameters)
        assert (names[0], names[-1]) == ("ctx", "memory_efficient")


def test_fast_layer_norm():
    layer = FastLayerNorm(5, eps=1e-3)
    x = torch.randn(3, 5)
    torch.testing.assert_close(layer(x), F.layer_norm(x, (5,), eps=1e-3))
    assert layer.epsilon == 1e-3
    assert sorted(layer.state_dict()) == ["bias", "weight"]


def test_names_of_apex_parallel():
    from fabricamp.apex.parallel import optimized_sync_batchnorm, sync_batchnorm
    from fabricamp.apex.parallel.LARC import LARC

    assert sync_batchnorm.SyncBatchNorm is optimized_sync_batchnorm.SyncBatchNorm is parallel.SyncBatchNorm
    assert issubclass(LARC, optimizers.LARC)
    assert parallel.LARC.LARC is LARC
    assert parallel.ReduceOp is dist.ReduceOp
    for kind, expected in SIGNATURES.items():
        names = list(inspect.signature(getattr(parallel, kind)).parameters)
        assert " ".join(names).startswith(expected)


SIGNATURES = {
    "DistributedDataParallel": "module message_size delay_allreduce shared_param allreduce_trigger_params "
    "retain_allreduce_buffers allreduce_always_fp32 num_allreduce_streams allreduce_communicators gradient_average "
    "gradient_predivide_factor gradient_average_split_factor prof",
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats process_group channel_last fuse_relu",
    "convert_syncbn_model": "module process_group channel_last",
    "create_syncbn_process_group": "group_size",
}


def test_group_batch_norm_alone():
    torch.manual_seed(0)
    layer, twin = BatchNorm2d_NHWC(3, fuse_relu=True), nn.BatchNorm2d(3)
    x, z = torch.randn(4, 2, 2, 3), torch.randn(4, 2, 2, 3)
    expected = (twin(x.movedim(-1, 1)).movedim(1, -1) + z).relu()
    torch.testing.assert_close(layer(x, z), expected)
    torch.testing.assert_close(layer.running_mean, twin.running_mean)
    layer.eval()
    twin.eval()
    torch.testing.assert_close(layer(x, z), (twin(x.movedim(-1, 1)).movedim(1, -1) + z).relu())


def _over_groups():
    x = torch.randn(4, 2, 2, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    return x, [BatchNorm2d_NHWC(3, bn_group=size)(x).detach() for size in (1, 2)]


def test_group_batch_norm_over_two_ranks():
    (x, (alone, together)), (y, (other_alone, other_together)) = run_ranks(_over_groups, 2)

    def batch_norm(one):
        return nn.BatchNorm2d(3)(one.movedim(-1, 1)).movedim(1, -1).detach()

    torch.testing.assert_close(alone, batch_norm(x))
    torch.testing.assert_close(other_alone, batch_norm(y))
    torch.testing.assert_close(torch.cat([together, other_together]), batch_norm(torch.cat([x, y])))
