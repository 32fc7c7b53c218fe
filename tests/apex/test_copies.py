"""Copies of models and optimizers under amp, averages of weights, and weights that the script itself changes."""

from __future__ import annotations

import copy

import pytest
import torch

from fabricamp._utils.say_once import say_once
from fabricamp.apex import amp
from tests.apex.amp_nets import ALL_OPTIMIZERS, LEVELS, net, same, start, train


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()


# -- copies ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", ["SGD", "FusedSGD"])
def test_a_new_optimizer_for_a_copy_has_masters_too(level, name, caplog):
    model, _ = start(level)
    other = copy.deepcopy(model)
    optimizer = ALL_OPTIMIZERS[name](other.parameters())
    optimizer.param_groups[0]["lr"] = 1e-6  # updates that are too small for half weights
    before = [one.detach().float() for one in other.parameters()]
    train(other, optimizer, range(3))
    moved = [one - past for one, past in zip(amp.master_params(optimizer), before, strict=True)]
    assert all(one.dtype is torch.float32 for one in amp.master_params(optimizer))
    assert moved[-1].abs().max() > 0
    assert caplog.text.count("built after amp.initialize") == 1


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
def test_a_copy_of_an_optimizer_of_a_half_model_is_refused(level, name):
    model, optimizer = start(level, name)
    train(model, optimizer, [0])
    other, optimizer_of_other = copy.deepcopy((model, optimizer))
    with pytest.raises(RuntimeError, match="Build both again"):
        train(other, optimizer_of_other, [1])
    for _ in range(2):
        assert len(copy.deepcopy(optimizer).param_groups) == 1
    train(model, optimizer, [1])


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_a_copy_of_model_and_optimizer_trains_as_they_do(level):
    model, optimizer = start(level)
    train(model, optimizer, [0])
    other, optimizer_of_other = copy.deepcopy((model, optimizer))
    train(other, optimizer_of_other, [1])
    assert not same(list(other.parameters()), list(model.parameters()))
    train(model, optimizer, [1])
    assert same(list(other.parameters()), list(model.parameters()))


# -- averages of the weights -----------------------------------------------------------------------------------------------------


def averaged(average, model):
    for name, value in average.state_dict().items():
        if value.is_floating_point():
            value.copy_(0.999 * value + 0.001 * model.state_dict()[name])


@pytest.mark.parametrize("level", LEVELS)
def test_an_average_in_a_copy_of_before_initialize_is_that_of_the_masters(level, caplog):
    model = net()
    average, expected = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = ALL_OPTIMIZERS["FusedSGD"](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for index in range(3):
        train(model, optimizer, [index])
        averaged(average, model)
        with torch.no_grad():
            for mean, master in zip(expected.parameters(), amp.master_params(optimizer), strict=True):
                mean.copy_(0.999 * mean + 0.001 * master.float())
    assert same(list(average.parameters()), list(expected.parameters()))
    assert caplog.text == ""
    model.load_state_dict(average.state_dict())  # to evaluate it
    assert same(
        [model.state_dict()["last.bias"]], [average.last.bias if level != "O3" else average.last.bias.half().float()]
    )


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_an_average_that_goes_nowhere_is_told(level, caplog):
    say_once.cache_clear()
    model, optimizer = start(level)
    average = copy.deepcopy(model)
    for index in range(3):
        train(model, optimizer, [index])
        average.state_dict()
        assert caplog.text == ""
    averaged(average, model)
    for _ in range(2):
        average.state_dict()
    assert caplog.text.count("does not change the model") == 1


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_weights_that_the_script_clips_stay_so(level):
    model, optimizer = start(level)
    for index in range(3):
        train(model, optimizer, [index])
        for one in amp.master_params(optimizer):
            one.data.clamp_(-0.0625, 0.0625)
        optimizer._master_params_to_model_params()
        assert all(one.abs().max() <= 0.0625 for one in [*amp.master_params(optimizer), *model.parameters()])
