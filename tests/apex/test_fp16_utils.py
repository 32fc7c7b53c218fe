"""``apex.fp16_utils``: conversions, lists of masters, FP16_Optimizer."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.apex import amp, fp16_utils
from fabricamp.apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, FP16Model, LossScaler
from tests.apex.amp_nets import Net, batch, net, same

HALF = torch.float16


def loss_of(model, index):
    x, y = batch(index)
    return F.cross_entropy(model(x.half()).float(), y)


class HalfNet(Net):
    """As scripts of that time wrote it: BatchNorm sees fp32, the rest half."""

    def encode(self, x):
        return torch.relu(self.norm(self.first(x).float())).half()


def start(make=None, **options):
    model = HalfNet()
    model.load_state_dict(net().state_dict())
    model = fp16_utils.convert_network(model, HALF)
    make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    return model, FP16_Optimizer(make(model.parameters()), verbose=False, **options)


def train(model, optimizer, steps):
    losses = []
    for index in steps:
        loss = loss_of(model, index)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_star_import_has_all_names():
    names = {}
    exec("from fabricamp.apex.fp16_utils import *", names)
    assert names["to_python_float"](torch.tensor([3.0])) == 3.0
    assert names["to_python_float"]([2.0]) == 2.0
    assert names["clip_grad_norm"] is torch.nn.utils.clip_grad_norm_
    assert {"network_to_half", "prep_param_lists", "FP16_Optimizer", "BN_convert_float"} <= set(names)


def test_network_to_half():
    model = fp16_utils.network_to_half(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False)))
    assert model[1][0].weight.dtype is HALF
    norm = nn.BatchNorm1d(4)
    assert fp16_utils.network_to_half(norm)[1] is norm
    assert norm.weight.dtype is norm.running_mean.dtype is torch.float32
    assert model[0](torch.ones(2, 6)).dtype is HALF
    assert model(torch.ones(2, 6)).dtype is HALF


def test_convert_network_and_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False), nn.GRU(2, 2))
    model[0].weight.grad = torch.ones(2, 2)
    assert fp16_utils.convert_network(model, HALF) is model
    dtypes = [next(iter(one.state_dict().values())).dtype for one in model]
    assert dtypes == [HALF, torch.float32, HALF, HALF]
    assert model[0].weight.grad.dtype is HALF
    fp16_utils.convert_module(model, torch.float32)  # has nothing of its own
    assert model[0].weight.dtype is HALF
    wrapped = FP16Model(nn.Linear(3, 2))
    assert wrapped(torch.ones(1, 3)).dtype is HALF


@pytest.mark.parametrize("flat", [False, True])
def test_lists_of_masters(flat):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).half()
    model[0].bias.requires_grad_(False)
    parameters, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert len(parameters) == 3
    assert len(masters) == (1 if flat else 3)
    assert all(one.dtype is torch.float32 and one.requires_grad for one in masters)
    model(torch.ones(2, 3).half()).sum().backward()
    fp16_utils.model_grads_to_master_grads(parameters, masters, flat_master=flat)
    gradients = torch.cat([one.grad.reshape(-1) for one in masters])
    assert torch.equal(gradients, torch.cat([one.grad.reshape(-1) for one in parameters]).float())
    before = torch.cat([one.detach().reshape(-1) for one in masters])
    torch.optim.SGD(masters, lr=0.5).step()
    fp16_utils.master_params_to_model_params(parameters, masters, flat_master=flat)
    expected = (before - 0.5 * gradients).half()
    assert torch.equal(torch.cat([one.detach().reshape(-1) for one in parameters]), expected)


def test_lists_where_some_have_no_gradient():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).half()
    parameters, masters = fp16_utils.prep_param_lists(model)
    model[0](torch.ones(1, 2).half()).sum().backward()
    fp16_utils.model_grads_to_master_grads(parameters, masters)
    assert [one.grad is None for one in masters] == [False, False, True, True]
    _, (flat,) = fp16_utils.prep_param_lists(model, flat_master=True)
    fp16_utils.model_grads_to_master_grads(parameters, [flat], flat_master=True)
    assert not flat.grad[6:].any()
    model[0].float()
    with pytest.raises(ValueError, match="one dtype"):
        fp16_utils.prep_param_lists(model, flat_master=True)


def test_scalers():
    scaler = LossScaler(8)
    weight = nn.Parameter(torch.ones(2))
    scaler.backward(weight.sum())
    assert torch.equal(weight.grad, torch.full((2,), 8.0))
    assert scaler.scale_gradient(None, (torch.ones(1),), None)[0].item() == 8.0
    weight.grad[0] = float("inf")
    assert scaler.has_overflow([weight]) is False
    scaler = DynamicLossScaler(init_scale=8.0, scale_window=3)
    assert scaler.has_overflow([weight]) is True
    weight.grad[0] = 1.0
    assert scaler.has_overflow([weight]) is False
    assert scaler.has_overflow([nn.Parameter(torch.ones(1))]) is False
    scales = []
    for overflow in (True, False, False, False, True, True, True, True, False, False, False):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [4, 4, 4, 8, 4, 2, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    "options",
    [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**12}}],
)
def test_learns_as_amp_does_at_o2(options):
    model, optimizer = start(**options)
    losses = train(model, optimizer, range(20))
    twin = net()
    plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    amp.initialize(twin, plain, opt_level="O2", loss_scale=128.0, verbosity=0)
    for index in range(20):
        x, y = batch(index)
        loss = F.cross_entropy(twin(x), y)
        plain.zero_grad()
        with amp.scale_loss(loss, plain) as scaled_loss:
            scaled_loss.backward()
        plain.step()
        assert losses[index] == pytest.approx(loss.item(), rel=0.02)
    amp.shutdown()


def test_overflow(capsys):
    model, optimizer = start(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**10})
    optimizer.verbose = True
    before = [one.detach().clone() for group in optimizer.param_groups for one in group["params"]]
    optimizer.backward(loss_of(model, 0) * float("inf"))
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert same(before, [one for group in optimizer.param_groups for one in group["params"]])
    assert "OVERFLOW! Skipping step. Attempted loss scale: 1024.0, reducing to 512.0" in capsys.readouterr().out
    train(model, optimizer, range(2))
    assert not optimizer.overflow
    assert optimizer.loss_scale == 512.0
    optimizer.loss_scale = 4.0
    assert optimizer.loss_scaler.loss_scale == 4.0


def test_masters_and_groups():
    model, optimizer = start(static_loss_scale=16.0)
    halves = [model.first.weight, model.first.bias, model.last.weight, model.last.bias]
    assert [[id(one) for one in group] for group in optimizer.fp16_groups] == [[id(one) for one in halves]]
    assert [[one.dtype for one in group] for group in optimizer.fp32_from_fp16_groups] == [[torch.float32] * 4]
    assert [len(group) for group in optimizer.fp32_from_fp32_groups] == [2]
    assert optimizer.state is optimizer.optimizer.state
    loss = loss_of(model, 0)
    expected = torch.autograd.grad(loss, halves[-1], retain_graph=True)[0]
    optimizer.zero_grad()
    optimizer.backward(loss, update_master_grads=False)
    assert optimizer.fp32_from_fp16_groups[0][-1].grad is None
    optimizer.update_master_grads()
    assert torch.allclose(optimizer.fp32_from_fp16_groups[0][-1].grad, expected.float(), atol=1e-3)
    assert optimizer.inspect_master_grad_data()[0][0].shape == (8, 6)
    assert float(optimizer.clip_master_grads(1e-3)) > 1e-3
    optimizer.zero_grad(set_grads_to_None=True)
    assert all(one.grad is None for one in model.parameters())
    extra = nn.Parameter(torch.ones(2).half())
    optimizer.add_param_group({"params": [extra]})
    assert optimizer.param_groups[1]["params"][0].dtype is torch.float32


@pytest.mark.parametrize("dynamic", [False, True])
def test_closures(dynamic):
    make = lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=3)  # noqa: E731
    options = {"dynamic_loss_args": {"init_scale": 2.0**24}} if dynamic else {"static_loss_scale": 64.0}
    model, optimizer = start(make, dynamic_loss_scale=dynamic, **options)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        optimizer.backward(loss)
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(4)]
    assert losses[-1] < losses[0]
    if dynamic:
        assert optimizer.loss_scale < 2.0**24


def test_exact_resume_and_no_pickles():
    model, optimizer = start(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**10, "scale_window": 3})
    train(model, optimizer, range(5))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    train(model, optimizer, range(5, 10))
    file = torch.load("checkpoint.pt", weights_only=True)
    again, other = start(dynamic_loss_scale=True)
    again.load_state_dict(file["model"])
    other.load_state_dict(file["optimizer"])
    train(again, other, range(5, 10))
    for one, two in zip(other.fp32_from_fp16_groups[0], optimizer.fp32_from_fp16_groups[0], strict=True):
        assert torch.equal(one, two)
    assert vars(other.loss_scaler) == vars(optimizer.loss_scaler)
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(optimizer)
    file["optimizer"]["loss_scaler"] = other.loss_scaler  # as apex saved it
    other.load_state_dict(file["optimizer"])
    file["optimizer"]["fp32_from_fp16"] = [[]]
    with pytest.raises(RuntimeError, match="half weights"):
        other.load_state_dict(file["optimizer"])


def test_schedulers_take_it():
    model, optimizer = start(static_loss_scale=8.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, range(1))
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.025


def test_amp_refuses_it():
    _, optimizer = start()
    with pytest.raises(RuntimeError, match="FP16_Optimizer"):
        amp.initialize(net(), optimizer, opt_level="O2", verbosity=0)
