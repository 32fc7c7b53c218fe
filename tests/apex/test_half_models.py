"""Models that are half before ``initialize``, which apex accepts with ``_amp_state.allow_incoming_model_not_fp32``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricamp.apex import amp
from fabricamp.errors import ConfigError
from tests.apex.amp_nets import ALL_OPTIMIZERS, loss_of, net, same, train

PARTS = {"all": lambda model: model, "one layer": lambda model: model.last, "BatchNorm": lambda model: model.norm}
FLAGS = ("allow_incoming_model_not_fp32", "hard_override")


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()
    for name in FLAGS:
        setattr(amp._amp_state, name, False)


def half_net(part):
    model = net()
    PARTS[part](model).half()
    return model


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["SGD", "Adam", "FusedAdam", "FusedLAMB"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_trains_and_keeps_its_halves(level, name, part):
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = half_net(part)
    came = {key: one.dtype for key, one in model.named_parameters()}
    optimizer = ALL_OPTIMIZERS[name](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = train(model, optimizer, [0] * 6)
    assert losses[-1] < losses[0]
    if level == "O1":  # the weights stay half
        assert {key: one.dtype for key, one in model.named_parameters()} == came
    held = {one.dtype for one in amp.master_params(optimizer)}
    if level == "O2":  # every half weight has a master, a BatchNorm's too
        assert held == {torch.float32}
        assert all(one.dtype is torch.float16 for key, one in model.named_parameters() if came[key] is torch.float16)
        assert all(one.dtype is not torch.float16 for one in model.state_dict().values())


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_each_flag_lets_it_in_and_none_does_not(level, flag, capsys):
    model = nn.Linear(4, 2).half()
    with pytest.raises(RuntimeError, match="Found param/buffer weight"):
        amp.initialize(model, opt_level=level, verbosity=0)
    setattr(amp._amp_state, flag, True)
    amp.initialize(model, opt_level=level, verbosity=1)
    assert ("Found param/buffer weight" in capsys.readouterr().out) is (flag == "hard_override")
    assert model(torch.ones(1, 4)).shape == (1, 2)


def test_bfloat16_weights_at_o1_are_refused_without_the_flag():
    with pytest.raises(ConfigError, match="bfloat16 already"):
        amp.initialize(nn.Linear(4, 2).bfloat16(), opt_level="O1", verbosity=0)


def test_o2_goes_on_from_the_values_of_its_halves():
    """The results have the same bits as with an fp32 model of these values."""
    results = []
    for comes_half in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).half()
        if not comes_half:
            model.float()
        amp._amp_state.allow_incoming_model_not_fp32 = comes_half
        optimizer = ALL_OPTIMIZERS["FusedAdam"](model.parameters())
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        train(model, optimizer, range(5))
        results.append([one.detach().clone() for one in amp.master_params(optimizer)])
        amp.shutdown()
    assert same(*results)


def test_a_half_batch_norm_at_o2_takes_what_is_loaded():
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = half_net("BatchNorm")
    optimizer = ALL_OPTIMIZERS["SGD"](model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(model, optimizer, range(2))
    weight = torch.full((8,), 0.1)  # not representable in half
    model.load_state_dict({**model.state_dict(), "norm.weight": weight})
    assert torch.equal(model.norm.weight, weight.half())
    assert torch.equal(model.state_dict()["norm.weight"], weight)
    before = next(one for one in amp.master_params(optimizer) if one.shape == (8,) and torch.equal(one, weight))
    loss = loss_of(model, 3)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert before.grad is not None
    assert before.grad.dtype is torch.float32
