"""Every public name of apex can be imported from its path, and takes apex's arguments in apex's order."""

import importlib
import inspect
import sys

import pytest

import fabricamp.apex
from tests.apex.conftest import kept

_LISTS = "chunk_size, noop_flag, tensor_lists"
_NORM = "normalized_shape, eps=1e-5, elementwise_affine=True, memory_efficient=False"
_SYNC = "num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True, process_group=None, channel_last=False"
_ADAM_RULE = "lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay"
_LAMB_RULE = "lr, beta1, beta2, eps, step, bias_correction, weight_decay, grad_averaging, mode"
_RNN = "input_size, hidden_size, num_layers, bias=True, batch_first=False, dropout=0, bidirectional=False, output_size=None"

_NORM_OPTIONS = "normalized_shape, eps, memory_efficient=False"
SIGNATURES = {
    "apex": {
        "check_cudnn_version_and_warn": "global_option, required_cudnn_version",
        "deprecated_warning": "msg",
        "DeprecatedFeatureWarning": None,
        **dict.fromkeys(["amp", "fp16_utils", "optimizers", "normalization", "parallel", "contrib", "RNN", "mlp"]),
    },
    "apex._autocast_utils": {"_cast_if_autocast_enabled": "*args"},
    "apex.amp": {
        "initialize": "models, optimizers=None, enabled=True, opt_level='O1', cast_model_type=None, patch_torch_functions=None,"
        " keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, cast_model_outputs=None, num_losses=1, verbosity=1,"
        " min_loss_scale=None, max_loss_scale=2.0**24",
        "scale_loss": "loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False",
        "state_dict": "destination=None",
        "load_state_dict": "state_dict",
        "master_params": "optimizer",
        "disable_casts": "",
        "init": "enabled=True, loss_scale='dynamic', enable_caching=True, verbose=False, allow_banned=False",
        **dict.fromkeys(["half_function", "float_function", "promote_function"], "fn, /"),
        **dict.fromkeys(
            ["register_half_function", "register_float_function", "register_promote_function"], "module, name"
        ),
        **dict.fromkeys(["_amp_state", "amp", "compat", "frontend", "handle", "lists", "opt", "rnn_compat"]),
        **dict.fromkeys(["scaler", "utils", "wrap", "_initialize", "_process_optimizer"]),
    },
    "apex.amp.frontend": dict.fromkeys(
        [
            "O0",
            "O1",
            "O2",
            "O3",
            "Properties",
            "_amp_state",
            "initialize",
            "load_state_dict",
            "opt_levels",
            "state_dict",
        ]
    ),
    "apex.amp._amp_state": {
        **dict.fromkeys(["AmpState", "_amp_state"]),
        "maybe_print": "msg, rank0=False",
        "warn_or_err": "msg",
        "master_params": "optimizer",
    },
    "apex.amp.handle": {
        "AmpHandle": "loss_scale='dynamic', enable_caching=True, verbose=False",
        **dict.fromkeys(["AmpHandle.is_active", "AmpHandle._disable_casts", "AmpHandle._clear_cache"], ""),
        "AmpHandle._deactivate": "",
        "AmpHandle.wrap_optimizer": "optimizer, num_loss=1",
        "AmpHandle.scale_loss": "loss, optimizer",
        "AmpHandle._save_func": "mod, fn, func",
        "AmpHandle.remove_cache": "param",
        **dict.fromkeys(["AmpHandle.has_cache", "AmpHandle.cache", "AmpHandle.verbose"]),
        "NoOpHandle": "",
        "NoOpHandle.is_active": "",
        "NoOpHandle._deactivate": "",
        "NoOpHandle._clear_cache": "",
        "NoOpHandle.wrap_optimizer": "optimizer, num_loss=1",
        "scale_loss": "loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False",
        "disable_casts": "",
    },
    "apex.amp.opt": {
        "OptimWrapper": "optimizer, amp_handle, num_loss",
        "OptimWrapper.scale_loss": "loss",
        "OptimWrapper.step": "closure=None",
    },
    "apex.amp.scaler": {
        "LossScaler": "loss_scale, init_scale=2.0**16, scale_factor=2.0, scale_window=2000, min_loss_scale=None,"
        " max_loss_scale=2.0**24",
        "LossScaler.loss_scale": "",
        "LossScaler.unscale": "model_grads, master_grads, unused_scale, models_are_masters=False, scale_override=None",
        "LossScaler.unscale_with_stashed": "model_grads, stashed_master_grads, master_grads, scale_override=None",
        **dict.fromkeys(["LossScaler.unscale_python", "LossScaler.unscale_with_stashed_python"]),
        "LossScaler.clear_overflow_state": "",
        "LossScaler.update_scale": "",
        **dict.fromkeys(["LossScaler._loss_scale", "LossScaler._unskipped", "LossScaler._scale_seq_len"]),
        **dict.fromkeys(["LossScaler._overflow_buf", "LossScaler._min_loss_scale", "LossScaler._max_loss_scale"]),
    },
    "apex.amp.wrap": dict.fromkeys(["cached_cast", "make_cast_wrapper", "promote"]),
    "apex.amp.utils": dict.fromkeys(["casted_args", "is_fp_tensor", "is_nested", "maybe_float", "maybe_half"]),
    "apex.amp.compat": dict.fromkeys(["is_floating_point", "is_tensor_like", "scalar_python_val"]),
    "apex.amp.lists.torch_overrides": dict.fromkeys(["MODULE", "FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS"]),
    "apex.amp.lists.tensor_overrides": dict.fromkeys(["MODULE", "FP16_FUNCS", "FP32_FUNCS", "CASTS"]),
    "apex.amp.lists.functional_overrides": dict.fromkeys(["MODULE", "FP16_FUNCS", "FP32_FUNCS", "BANNED_FUNCS"]),
    "apex.parallel": {
        "DistributedDataParallel": "module, message_size=10000000, delay_allreduce=False, shared_param=None,"
        " allreduce_trigger_params=None, retain_allreduce_buffers=False, allreduce_always_fp32=False, num_allreduce_streams=1,"
        " allreduce_communicators=None, gradient_average=True, gradient_predivide_factor=1.0,"
        " gradient_average_split_factor=None, prof=False",
        "DistributedDataParallel.enable_allreduce": "",
        "DistributedDataParallel.disable_allreduce": "",
        "DistributedDataParallel.forward": "*inputs, **kwargs",
        "Reducer": "module_or_grads_list",
        "Reducer.reduce": "",
        "SyncBatchNorm": f"{_SYNC}, fuse_relu=False",
        "SyncBatchNorm.forward": "input, z=None",
        "convert_syncbn_model": "module, process_group=None, channel_last=False",
        "create_syncbn_process_group": "group_size",
        "ReduceOp": None,
    },
    "apex.parallel.LARC": {"LARC": "optimizer, trust_coefficient=0.02, clip=True, eps=1e-8"},
    "apex.parallel.optimized_sync_batchnorm": {"SyncBatchNorm": f"{_SYNC}, fuse_relu=False"},
    "apex.parallel.sync_batchnorm": {"SyncBatchNorm": _SYNC},
    "apex.parallel.distributed": {
        "flat_dist_call": "tensors, call, extra_args=None",
        "apply_flat_dist_call": "bucket, call, extra_args=None",
        "split_half_float_double": "tensors",
        "split_by_type": "tensors",
        "flatten": "bucket, /",
        "unflatten": "coalesced, bucket, /",
        "extract_tensors": "maybe_tensor, tensor_list",
        "import_flatten_impl": "",
        **dict.fromkeys(["DistributedDataParallel", "Reducer"]),
    },
    "apex.parallel.multiproc": {"main": ""},
    "apex.optimizers": {
        "FusedAdam": "params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0,"
        " amsgrad=False, set_grad_none=True, capturable=False, master_weights=False",
        "FusedAdam.step": "closure=None, grads=None, output_params=None, scale=None, grad_norms=None",
        "FusedLAMB": "params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, amsgrad=False,"
        " adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0, use_nvlamb=False",
        "FusedMixedPrecisionLamb": "params, lr=1e-3, step=0, bias_correction=True, betas=(0.9, 0.999), eps=1e-6,"
        " weight_decay=0.01, amsgrad=False, adam_w_mode=True, grad_averaging=True, max_grad_norm=1.0, use_nvlamb=False,"
        " reduced_precision_dtype=None",
        "FusedMixedPrecisionLamb.step": "closure=None, grad_scaler=None",
        "FusedSGD": "params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False, wd_after_momentum=False,"
        " materialize_master_grads=True, set_grad_none=False",
        "FusedNovoGrad": "params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False,"
        " reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False, set_grad_none=True",
        "FusedAdagrad": "params, lr=1e-2, eps=1e-10, weight_decay=0.0, set_grad_none=True, adagrad_w_mode=False",
    },
    "apex.normalization": {
        **dict.fromkeys(["FusedLayerNorm", "FusedRMSNorm"], _NORM),
        **dict.fromkeys(
            ["MixedFusedLayerNorm", "MixedFusedRMSNorm"],
            "normalized_shape, eps=1e-5, *, memory_efficient=False, **kwargs",
        ),
    },
    "apex.normalization.fused_layer_norm": {
        **dict.fromkeys(
            ["fused_layer_norm_affine", "mixed_dtype_fused_layer_norm_affine"],
            "input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False",
        ),
        **dict.fromkeys(
            ["fused_rms_norm_affine", "mixed_dtype_fused_rms_norm_affine"],
            "input, weight, normalized_shape, eps=1e-6, memory_efficient=False",
        ),
        **dict.fromkeys(
            ["fused_layer_norm", "fused_rms_norm"], "input, normalized_shape, eps=1e-6, memory_efficient=False"
        ),
        "manual_rms_norm": "input, normalized_shape, weight, eps",
        "supports_custom_op": "",
        **{
            f"Fused{kind}Function.{method}": arguments
            for kind, given in {
                "LayerNormAffine": f"input, weight, bias, {_NORM_OPTIONS}",
                "LayerNormAffineMixedDtypes": f"input, weight, bias, {_NORM_OPTIONS}",
                "LayerNorm": f"input, {_NORM_OPTIONS}",
                "RMSNormAffine": f"input, weight, {_NORM_OPTIONS}",
                "RMSNormAffineMixedDtypes": f"input, weight, {_NORM_OPTIONS}",
                "RMSNorm": f"input, {_NORM_OPTIONS}",
            }.items()
            for method, arguments in {"forward": f"ctx, {given}", "backward": None, "apply": None}.items()
        },
        **dict.fromkeys(["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]),
    },
    "apex.multi_tensor_apply": {
        "MultiTensorApply": "chunk_size",
        "MultiTensorApply.__call__": "op, noop_flag_buffer, tensor_lists, *args",
        "MultiTensorApply.check_avail": "",
        **dict.fromkeys(["MultiTensorApply.available", "MultiTensorApply.import_err", "multi_tensor_applier"]),
    },
    "amp_C": {
        "multi_tensor_scale": f"{_LISTS}, scale",
        "multi_tensor_axpby": f"{_LISTS}, a, b, arg_to_check",
        "multi_tensor_l2norm": f"{_LISTS}, per_tensor=None",
        "multi_tensor_l2norm_mp": f"{_LISTS}, per_tensor=None",
        "multi_tensor_l2norm_scale": f"{_LISTS}, scale, per_tensor",
        "multi_tensor_unscale_l2norm": f"{_LISTS}, inv_scale, per_tensor",
        "multi_tensor_sgd": f"{_LISTS}, wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale",
        "multi_tensor_adam": f"{_LISTS}, {_ADAM_RULE}",
        "multi_tensor_adam_capturable": f"{_LISTS}, {_ADAM_RULE}, inv_scale",
        "multi_tensor_adam_capturable_master": f"{_LISTS}, {_ADAM_RULE}, inv_scale",
        "multi_tensor_adagrad": f"{_LISTS}, lr, eps, mode, weight_decay",
        "multi_tensor_novograd": f"{_LISTS}, grad_norms, lr, beta1, beta2, eps, step, bias_correction, weight_decay,"
        " grad_averaging, mode, norm_type",
        "multi_tensor_lamb": f"{_LISTS}, {_LAMB_RULE}, global_grad_norm, max_grad_norm, use_nvlamb",
        "multi_tensor_lamb_mp": f"{_LISTS}, {_LAMB_RULE}, global_grad_norm, max_grad_norm, use_nvlamb, found_inf, inv_scale",
        "multi_tensor_lamb_stage1_cuda": f"{_LISTS}, per_tensor_decay, step, beta1, beta2, eps, global_grad_norm,"
        " max_global_grad_norm",
        "multi_tensor_lamb_stage2_cuda": f"{_LISTS}, per_tensor_param_norm, per_tensor_update_norm, lr, weight_decay,"
        " use_nvlamb",
        "update_scale_hysteresis": "current_scale, growth_tracker, hysteresis_tracker, found_inf, growth_factor,"
        " backoff_factor, growth_interval, hysteresis",
    },
    "apex_C": {"flatten": "tensors", "unflatten": "flat, tensors"},
    "syncbn": {
        **dict.fromkeys(["welford_mean_var", "welford_mean_var_c_last"], "input"),
        "welford_parallel": "mean, var, count, eps",
        "batchnorm_forward": "input, mean, inv_std, weight, bias",
        "batchnorm_forward_c_last": "input, z, mean, inv_std, weight, bias, fuse_relu",
        **dict.fromkeys(["reduce_bn", "reduce_bn_c_last"], "grad_output, input, mean, inv_std, weight"),
        **dict.fromkeys(
            ["batchnorm_backward", "batchnorm_backward_c_last"],
            "grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count",
        ),
        "relu_bw_c_last": "grad_output, input, z, mean, inv_std, weight, bias",
    },
    "fused_layer_norm_cuda": {
        **dict.fromkeys(["forward", "forward_affine", "forward_affine_mixed_dtypes", "backward", "backward_affine"]),
        **dict.fromkeys(["rms_forward", "rms_forward_affine", "rms_forward_affine_mixed_dtypes"]),
        **dict.fromkeys(["rms_backward", "rms_backward_affine"]),
    },
    "fast_layer_norm": {
        "ln_fwd": "x, gamma, beta, epsilon",
        "ln_bwd": "dz, x_or_z, mu, rsigma, gamma, beta, memory_efficient",
    },
    "xentropy_cuda": dict.fromkeys(["forward", "backward"]),
    "mlp_cuda": dict.fromkeys(["forward", "backward"]),
    "apex.fp16_utils": {
        "BN_convert_float": "module",
        "network_to_half": "network",
        "prep_param_lists": "model, flat_master=False",
        "model_grads_to_master_grads": "model_params, master_params, flat_master=False",
        "master_params_to_model_params": "model_params, master_params, flat_master=False",
        "tofp16": "",
        "to_python_float": "t",
        "clip_grad_norm": None,
        "convert_module": "module, dtype",
        "convert_network": "network, dtype",
        "FP16Model": "network",
        "FP16Model.forward": "*inputs",
        "FP16_Optimizer": "init_optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, dynamic_loss_args=None, verbose=True",
        "FP16_Optimizer.zero_grad": "set_grads_to_None=False",
        "FP16_Optimizer.backward": "loss, update_master_grads=True, retain_graph=False",
        "FP16_Optimizer.update_master_grads": "",
        "FP16_Optimizer.clip_master_grads": "max_norm, norm_type=2",
        "FP16_Optimizer.step": "closure=None",
        "FP16_Optimizer.inspect_master_grad_data": "",
        "FP16_Optimizer.state_dict": "",
        "FP16_Optimizer.load_state_dict": "state_dict",
        **dict.fromkeys(["FP16_Optimizer.loss_scale", "FP16_Optimizer.state", "FP16_Optimizer.param_groups"]),
        "LossScaler": "scale=1",
        "DynamicLossScaler": "init_scale=2**32, scale_factor=2.0, scale_window=1000",
    },
    "apex.mlp": {"MLP": "mlp_sizes, bias=True, activation='relu'"},
    "apex.mlp.mlp": {"MlpFunction.apply": None, "mlp_function": "bias, activation, *args"},
    "apex.fused_dense": {
        "FusedDense": "in_features, out_features, bias=True",
        "FusedDenseGeluDense": "in_features, intermediate_features, out_features, bias=True",
    },
    "apex.RNN": dict.fromkeys(["LSTM", "GRU", "ReLU", "Tanh", "mLSTM"], _RNN),
    "apex.contrib.clip_grad": {
        "clip_grad_norm_": "parameters, max_norm, norm_type=2.0, error_if_nonfinite=False",
    },
    "apex.contrib.xentropy": {"SoftmaxCrossEntropyLoss": None},
    "apex.contrib.xentropy.softmax_xentropy": {
        "SoftmaxCrossEntropyLoss.apply": "logits, labels, smoothing=0.0, padding_idx=0, half_to_float=False",
    },
    "apex.contrib.focal_loss.focal_loss": {
        "focal_loss": "cls_output, cls_targets_at_level, num_positives_sum, num_real_classes, alpha, gamma, label_smoothing=0.0",
    },
    "apex.contrib.index_mul_2d": {"index_mul_2d": "in1, in2, idx1"},
    "apex.contrib.layer_norm": {"FastLayerNorm": "hidden_size, eps=1e-5, memory_efficient=False"},
    "apex.contrib.layer_norm.layer_norm": {
        "FastLayerNormFN.apply": None,
        "FastLayerNormFN.forward": "ctx, x, gamma, beta, epsilon, memory_efficient=False",
    },
    "apex.contrib.optimizers": dict.fromkeys(["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]),
    "apex.contrib.sparsity": {
        **dict.fromkeys(["ASP.init_model_for_pruning", "ASP.init_optimizer_for_pruning", "ASP.compute_sparse_masks"]),
        **dict.fromkeys(["ASP.restore_pruned_weights", "ASP.is_sparsity_enabled", "ASP.prune_trained_model"]),
        **dict.fromkeys(["ASP.set_permutation_saving_params", "create_mask"]),
    },
    "apex.contrib.groupbn": {
        "BatchNorm2d_NHWC": "num_features, fuse_relu=False, bn_group=1, max_cta_per_sm=2, cta_launch_margin=12,"
        " multi_stream=False",
    },
}
EVERY = [(path, name, given) for path, names in SIGNATURES.items() for name, given in names.items()]
COMPILED = {path for path in SIGNATURES if not path.startswith("apex")}  # their arguments have no names in apex
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_FREE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@pytest.fixture(scope="module", autouse=True)
def _installed():
    with kept():
        fabricamp.apex.install()
        yield


def found(path, name):
    importlib.import_module(path)  # by the scripts' name, an entry of sys.modules
    value = sys.modules[path]
    for part in name.split("."):
        value = getattr(value, part)
    return value


def arguments(function, *, is_method):
    listed = list(inspect.signature(function).parameters.values())
    return listed[1:] if is_method and listed and listed[0].name == "self" else listed


@pytest.mark.parametrize(("path", "name", "given"), EVERY, ids=[f"{path}.{name}" for path, name, _ in EVERY])
def test_is_there_and_takes_apexs_arguments(path, name, given):
    value = found(path, name)
    if given is None:
        return
    asked = arguments(eval(f"lambda {given}: None"), is_method=False)
    have = arguments(value, is_method="." in name)
    positional = [one for one in asked if one.kind in _BY_PLACE]
    for place, one in enumerate(positional):
        assert have[place].kind in _BY_PLACE
        if path not in COMPILED and one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert have[place].name == one.name
        if one.default is not inspect.Parameter.empty:
            assert have[place].default == one.default
    # Additional parameters have defaults, so that apex's calls are valid.
    for one in have[len(positional) :]:
        assert one.kind in _FREE or one.default is not inspect.Parameter.empty


@pytest.mark.parametrize("module", [path for path in SIGNATURES if "." in path])
def test_a_module_is_an_attribute_of_its_package(module):
    parent, _, name = module.rpartition(".")
    importlib.import_module(module)
    assert hasattr(sys.modules[parent], name)
