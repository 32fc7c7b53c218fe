import importlib

import pytest
import torch

import fabricamp.apex
from fabricamp import ops
from fabricamp.apex.contrib import optimizers
from fabricamp.errors import ConfigError

PATHS = {
    "contrib.clip_grad": "clip_grad_norm_",
    "contrib.clip_grad.clip_grad": "clip_grad_norm_",
    "contrib.focal_loss.focal_loss": "FocalLoss focal_loss",
    "contrib.groupbn": "BatchNorm2d_NHWC",
    "contrib.groupbn.batch_norm": "BatchNorm2d_NHWC",
    "contrib.index_mul_2d": "index_mul_2d",
    "contrib.layer_norm": "FastLayerNorm",
    "contrib.layer_norm.layer_norm": "FastLayerNorm FastLayerNormFN",
    "contrib.optimizers": "FP16_Optimizer FusedAdam FusedLAMB FusedSGD",
    "contrib.optimizers.fp16_optimizer": "FP16_Optimizer",
    "contrib.optimizers.fused_adam": "FusedAdam",
    "contrib.optimizers.fused_lamb": "FusedLAMB",
    "contrib.optimizers.fused_sgd": "FusedSGD",
    "contrib.sparsity": "ASP create_mask",
    "contrib.sparsity.asp": "ASP",
    "contrib.sparsity.sparse_masklib": "create_mask",
    "contrib.xentropy": "SoftmaxCrossEntropyLoss",
    "contrib.xentropy.softmax_xentropy": "SoftmaxCrossEntropyLoss",
    "fp16_utils": "FP16_Optimizer FP16Model to_python_float network_to_half prep_param_lists",
    "fused_dense": "FusedDense FusedDenseGeluDense",
    "mlp": "MLP",
    "mlp.mlp": "MLP MlpFunction mlp_function",
    "multi_tensor_apply": "MultiTensorApply multi_tensor_applier",
    "multi_tensor_apply.multi_tensor_apply": "MultiTensorApply",
    "normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    "normalization.fused_layer_norm": "fused_layer_norm_affine manual_rms_norm FusedRMSNormFunction FusedLayerNorm",
    "parallel": "DistributedDataParallel Reducer SyncBatchNorm ReduceOp convert_syncbn_model create_syncbn_process_group",
    "parallel.LARC": "LARC",
    "parallel.distributed": "DistributedDataParallel Reducer flat_dist_call flatten unflatten extract_tensors",
    "RNN": "LSTM GRU ReLU Tanh mLSTM",
}


@pytest.mark.parametrize("path", PATHS)
def test_names_are_where_scripts_import_them_from(path):
    module = importlib.import_module(f"fabricamp.apex.{path}")
    for name in PATHS[path].split():
        assert callable(getattr(module, name)) or name == "multi_tensor_applier"


def test_losses_and_index_mul_are_fabricamps():
    from fabricamp.apex.contrib.focal_loss.focal_loss import FocalLoss, focal_loss
    from fabricamp.apex.contrib.index_mul_2d import index_mul_2d

    assert focal_loss is ops.focal_loss
    assert FocalLoss.apply is ops.focal_loss
    assert index_mul_2d is ops.index_mul_2d


# -- the old FusedAdam ----------------------------------------------------------------------------------------------------------


def adams(decay=0.0, **options):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(5))]
    twins = [torch.nn.Parameter(one.detach().clone()) for one in parameters]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    old = optimizers.FusedAdam(groups, lr=0.1, weight_decay=decay, **options)
    return parameters, twins, old, torch.optim.AdamW(twins, lr=0.1, weight_decay=decay)


@pytest.mark.parametrize("nested", [False, True])
def test_old_adam_takes_gradients_a_scale_and_half_parameters(nested):
    parameters, twins, old, twin = adams(decay=0.01)
    halves = [one.detach().half() for one in parameters]
    for step in range(3):
        torch.manual_seed(step)
        gradients = [torch.randn_like(one).half() for one in twins]
        for one, gradient in zip(twins, gradients, strict=True):
            one.grad = gradient.float()
        twin.step()
        scaled = [one * 8 for one in gradients]
        given = [[one] for one in scaled], [[one] for one in halves]
        old.step(grads=given[0] if nested else scaled, output_params=given[1] if nested else halves, scale=8.0)
    for parameter, one, half in zip(parameters, twins, halves, strict=True):
        torch.testing.assert_close(parameter.detach(), one.detach())
        assert torch.equal(half, parameter.detach().half())


def test_old_adam_reads_grad_by_itself():
    parameters, twins, old, twin = adams()
    for one in (*parameters, *twins):
        one.grad = torch.ones_like(one)
    assert old.step(lambda: 5) == 5
    twin.step()
    for parameter, one in zip(parameters, twins, strict=True):
        torch.testing.assert_close(parameter.detach(), one.detach())


def test_old_adam_clips_by_the_norms_that_it_is_given():
    parameters, twins, old, twin = adams(max_grad_norm=0.5)
    gradients = [torch.full_like(one, 4.0).detach() for one in parameters]
    for one in twins:
        one.grad = torch.full_like(one, 0.5) / one.numel() ** 0.5  # of norm 0.5
    twin.step()
    twin.step()
    norms = [one.norm() for one in gradients]
    for _ in range(2):
        old.step(grads=gradients, scale=2.0, grad_norms=norms)
    for parameter, one in zip(parameters, twins, strict=True):
        torch.testing.assert_close(parameter.detach(), one.detach(), rtol=1e-4, atol=1e-5)
    moment = old.state[parameters[0]]["exp_avg"]
    torch.testing.assert_close(moment, torch.full_like(moment, 0.19 * 0.5 / 12**0.5), rtol=1e-4, atol=0.0)


def test_old_adam_says_what_it_cannot():
    with pytest.raises(ConfigError, match="eps_inside_sqrt"):
        optimizers.FusedAdam([torch.nn.Parameter(torch.ones(1))], eps_inside_sqrt=True)
    parameters, _, old, _ = adams()
    with pytest.raises(ConfigError, match="got 1 tensors for 2 parameters"):
        old.step(grads=[parameters[0].detach()])


@pytest.mark.parametrize("dynamic", [False, True])
def test_fp16_optimizer_around_the_old_adam(dynamic):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).half()
    old = optimizers.FusedAdam(model.parameters(), lr=0.05)
    optimizer = optimizers.FP16_Optimizer(old, static_loss_scale=64.0, dynamic_loss_scale=dynamic, verbose=False)
    found = []
    for _ in range(40):
        loss = (model(torch.ones(2, 4).half()).float() - 1).square().mean()
        optimizer.zero_grad()
        assert all(one.grad is None for one in model.parameters())
        optimizer.backward(loss)
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < 0.1 * found[0]
    assert model.weight.dtype == torch.float16


@pytest.mark.parametrize("name", ["DistributedFusedAdam", "DistributedFusedLAMB"])
def test_sharded_optimizers_are_torchs(name):
    with pytest.raises(AttributeError, match="ZeroRedundancyOptimizer"):
        getattr(optimizers, name)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = optimizers.nonsense
    assert fabricamp.apex.contrib
