import copy
import inspect
import pickle

import pytest
import torch

from fabricamp.apex import optimizers
from fabricamp.apex._extensions import amp_C

STEPPED = [
    (optimizers.FusedAdam, torch.optim.AdamW, {"weight_decay": 0.01}),
    (optimizers.FusedLAMB, None, {}),
    (optimizers.FusedNovoGrad, None, {}),
]
ALL = [*[row[0] for row in STEPPED], optimizers.FusedSGD, optimizers.FusedAdagrad, optimizers.FusedMixedPrecisionLamb]
ids = {"ids": lambda value: value.__name__ if isinstance(value, type) else None}

SIGNATURES = {
    "FusedAdam": "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none capturable master_weights",
    "FusedLAMB": "lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging set_grad_none max_grad_norm "
    "use_nvlamb",
    "FusedMixedPrecisionLamb": "lr step bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging max_grad_norm "
    "use_nvlamb reduced_precision_dtype",
    "FusedSGD": "lr momentum dampening weight_decay nesterov wd_after_momentum materialize_master_grads set_grad_none",
    "FusedNovoGrad": "lr bias_correction betas eps weight_decay amsgrad reg_inside_moment grad_averaging norm_type init_zero "
    "set_grad_none",
    "FusedAdagrad": "lr eps weight_decay set_grad_none adagrad_w_mode",
}
DEFAULTS = {
    "FusedAdam": (1e-3, True, (0.9, 0.999), 1e-8, True, 0.0, False, True, False, False),
    "FusedLAMB": (1e-3, True, (0.9, 0.999), 1e-6, 0.01, False, True, True, True, 1.0, False),
    "FusedMixedPrecisionLamb": (1e-3, 0, True, (0.9, 0.999), 1e-6, 0.01, False, True, True, 1.0, False, None),
    "FusedSGD": (None, 0, 0, 0, False, False, True, False),
    "FusedNovoGrad": (1e-3, True, (0.9, 0.999), 1e-8, 0.0, False, False, True, 2, False, True),
    "FusedAdagrad": (1e-2, 1e-10, 0.0, True, False),
}


@pytest.fixture
def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,), (2,))]


def step(optimizer, parameters, seed=1, skip=()):
    generator = torch.Generator().manual_seed(seed)
    for place, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if place in skip else gradient
    optimizer.step()


@pytest.mark.parametrize("kind", ALL, **ids)
def test_arguments_are_apexs_in_its_order(kind):
    own = [one for one in inspect.signature(kind).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert [one.name for one in own] == ["params", *SIGNATURES[kind.__name__].split()]
    for one, default in zip(own[1:], DEFAULTS[kind.__name__], strict=True):
        assert default is None or one.default == default


@pytest.mark.parametrize("kind", ALL, **ids)
def test_is_found_where_apex_had_it(kind):
    module = {
        "FusedAdam": "fused_adam",
        "FusedLAMB": "fused_lamb",
        "FusedMixedPrecisionLamb": "fused_mixed_precision_lamb",
        "FusedSGD": "fused_sgd",
        "FusedNovoGrad": "fused_novograd",
        "FusedAdagrad": "fused_adagrad",
    }[kind.__name__]
    assert getattr(getattr(optimizers, module), kind.__name__) is kind


@pytest.mark.parametrize("kind", [row[0] for row in STEPPED], **ids)
def test_step_is_in_the_group(parameters, kind):
    optimizer = kind([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1}])
    assert "step" not in optimizer.param_groups[0]
    for number in (1, 2, 3):
        step(optimizer, parameters)
        assert [int(group["step"]) for group in optimizer.param_groups] == [number, number]
    saved = optimizer.state_dict()
    assert [group["step"] for group in saved["param_groups"]] == [3, 3]
    assert type(saved["param_groups"][0]["step"]) is int


@pytest.mark.parametrize("kind", [row[0] for row in STEPPED], **ids)
def test_step_in_the_group_follows_a_loaded_state(parameters, kind):
    optimizer = kind(parameters)
    step(optimizer, parameters)
    saved = copy.deepcopy(optimizer.state_dict())
    step(optimizer, parameters)
    optimizer.load_state_dict(saved)
    assert int(optimizer.param_groups[0]["step"]) == 1
    step(optimizer, parameters)
    assert int(optimizer.param_groups[0]["step"]) == 2
    assert copy.deepcopy(optimizer).state_dict()["param_groups"][0]["step"] == 2
    assert pickle.loads(pickle.dumps(optimizer)).state_dict()["param_groups"][0]["step"] == 2


def test_a_group_of_which_nothing_has_a_gradient_has_no_step(parameters):
    optimizer = optimizers.FusedAdam([{"params": parameters[:2]}, {"params": parameters[2:]}])
    step(optimizer, parameters, skip=(2,))
    assert "step" not in optimizer.param_groups[1]
    step(optimizer, parameters)
    assert [group["step"] for group in optimizer.state_dict()["param_groups"]] == [2, 1]


@pytest.mark.parametrize("kind", ALL, **ids)
def test_training_on_from_a_saved_state_is_the_same(parameters, kind):
    twins = [torch.nn.Parameter(one.detach().clone()) for one in parameters]
    optimizer, other = kind(parameters, lr=0.1), kind(twins, lr=0.1)
    for seed in range(3):
        step(optimizer, parameters, seed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for twin, parameter in zip(twins, parameters, strict=True):
        twin.data.copy_(parameter.data)
    for seed in range(3, 6):
        step(optimizer, parameters, seed)
        step(other, twins, seed)
    for twin, parameter in zip(twins, parameters, strict=True):
        assert torch.equal(twin, parameter)


def test_a_file_of_apexs_adam_is_taken(parameters):
    twins = [torch.nn.Parameter(one.detach().clone()) for one in parameters]
    straight, resumed = optimizers.FusedAdam(parameters, lr=0.1), optimizers.FusedAdam(twins, lr=0.1)
    for seed in range(2):
        step(straight, parameters, seed)
    saved = copy.deepcopy(straight.state_dict())
    for entry in saved["state"].values():
        del entry["step"]  # apex has it in the group only
    resumed.load_state_dict(saved)
    for twin, parameter in zip(twins, parameters, strict=True):
        twin.data.copy_(parameter.data)
    for optimizer, own in ((straight, parameters), (resumed, twins)):
        step(optimizer, own, 7)
    assert all(torch.equal(one, other) for one, other in zip(parameters, twins, strict=True))


def test_apexs_lists_of_norms_are_saved_and_taken(parameters):
    parameters[1].data = parameters[1].data.half()
    optimizer = optimizers.FusedNovoGrad(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    halves, singles = saved["param_groups"][0]["exp_avg_sq"]
    assert torch.allclose(halves, torch.tensor([5.0]).sqrt())
    assert torch.allclose(singles, torch.tensor([12.0, 2.0]).sqrt())
    for entry in saved["state"].values():
        del entry["exp_avg_norm"], entry["step"]
    optimizer.load_state_dict(saved)
    found = [optimizer.state[one]["exp_avg_norm"].item() for one in parameters]
    assert found == pytest.approx([12**0.5, 5**0.5, 2**0.5])


def test_a_fresh_novograd_takes_its_own_state():
    # NVIDIA/apex pull request 698: initialize does this round trip at O0, O2 and O3.
    optimizer = optimizers.FusedNovoGrad([torch.nn.Parameter(torch.ones(2))])
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", ALL, **ids)
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_takes_set_to_none(parameters, kind, to_none):
    optimizer = kind(parameters, lr=0.1)
    step(optimizer, parameters)
    optimizer.zero_grad(set_to_none=to_none)
    assert all((one.grad is None) if to_none else not one.grad.any() for one in parameters)


def test_attributes_that_scripts_read(parameters):
    adam = optimizers.FusedAdam(parameters)
    assert adam.multi_tensor_adam is amp_C.multi_tensor_adam
    assert adam._dummy_overflow_buf.dtype == torch.int32
    assert adam._dummy_overflow_buf.tolist() == [0]
    assert adam.adam_w_mode == 1
    assert adam.param_groups_master is None
    sgd = optimizers.FusedSGD(parameters, lr=0.1)
    assert (sgd.most_recent_scale, sgd.scale_set_by_backward) == (1.0, False)
    assert sgd.multi_tensor_sgd is amp_C.multi_tensor_sgd
    lamb = optimizers.FusedLAMB(parameters)
    assert (lamb.multi_tensor_lamb, lamb.multi_tensor_l2norm) == (amp_C.multi_tensor_lamb, amp_C.multi_tensor_l2norm)
    assert optimizers.FusedNovoGrad(parameters).multi_tensor_novograd is amp_C.multi_tensor_novograd
    assert optimizers.FusedAdagrad(parameters).multi_tensor_adagrad is amp_C.multi_tensor_adagrad


def test_masters_of_adam(parameters):
    for parameter in parameters:
        parameter.data = parameter.data.half()
    adam = optimizers.FusedAdam(parameters, capturable=True, master_weights=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    for master, parameter in zip(adam.param_groups_master[0]["params"], parameters, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(master.half(), parameter)


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.filterwarnings("error")
def test_adam_under_torchs_grad_scaler(parameters, overflow, by_hand):
    adam = optimizers.FusedAdam(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [one.detach().clone() for one in parameters]
    twins = [one.clone().requires_grad_() for one in before]
    twin = torch.optim.AdamW(twins, lr=0.1, weight_decay=0.0)
    scaler.scale(sum((one * one).sum() for one in parameters)).backward()
    if overflow:
        parameters[1].grad[0] = torch.inf
    adam.step(grad_scaler=scaler) if by_hand else scaler.step(adam)
    scaler.update()
    sum((one * one).sum() for one in twins).backward()
    twin.step()
    for parameter, old, other in zip(parameters, before, twins, strict=True):
        torch.testing.assert_close(parameter.detach(), old if overflow else other.detach())
    assert scaler.get_scale() == (4.0 if overflow else 8.0)


def test_hooks_of_a_step_run_once(parameters):
    from fabricamp.optimizers import FusedAdam

    step(FusedAdam(parameters), parameters)  # afterwards the class's step is wrapped
    adam, calls = optimizers.FusedAdam(parameters), []
    adam.register_step_post_hook(lambda *_: calls.append(1))
    step(adam, parameters)
    assert calls == [1]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda own: optimizers.FusedAdam(own, amsgrad=True), "amsgrad"),
        (lambda own: optimizers.FusedAdam(own, master_weights=True), "capturable"),
        (lambda own: optimizers.FusedAdam(own).step(scale=2.0), "closure only"),
        (lambda own: optimizers.FusedAdam(own).step(grad_scalar=None), "'grad_scalar'"),
        (lambda own: optimizers.FusedLAMB(own, amsgrad=True), "amsgrad"),
        (lambda own: optimizers.FusedNovoGrad(own, amsgrad=True), "amsgrad"),
    ],
)
def test_what_apex_refused_is_a_runtime_error(parameters, run, message):
    with pytest.raises(RuntimeError, match=message):
        run(parameters)


def test_schedulers_take_them(parameters):
    adam = optimizers.FusedAdam(parameters, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
    step(adam, parameters)
    schedule.step()
    assert adam.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms"])
def test_arguments_of_an_old_fp16_optimizer_are_refused(name):
    weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="FusedAdam.step takes a closure only"):
        optimizers.FusedAdam([weight]).step(**{name: [torch.ones(1)]})
