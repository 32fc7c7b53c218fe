"""O1's casts: on after ``initialize``, off where they would do harm, never with stale weights; and users' registered functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.apex import amp
from tests.apex.amp_nets import Net, batch, loss_of, net, start, train


@pytest.fixture(autouse=True)
def _shut_down(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: False
    )  # amp.init turns on the casts of GPUs if there is one
    yield
    amp.shutdown()
    amp.amp._registry.clear()


def half(function):
    """Returns whether a matrix product is half."""
    x = torch.ones(2, 2)
    return function(x, x).dtype is torch.float16


def test_on_after_initialize_and_off_after_shutdown():
    assert not half(torch.mm)
    start("O1")
    assert half(torch.mm)
    assert amp._amp_state.handle.is_active()
    amp.shutdown()
    assert not half(torch.mm)
    start("O4")
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16


def test_off_inside_step_and_backward():
    seen = {}

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen["step"] = half(torch.mm)
            return super().step(closure)

    model = net()
    optimizer = Watched(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    model.last.bias.register_hook(lambda gradient: seen.update(backward=half(torch.mm)))
    train(model, optimizer, [0])
    assert seen == {"step": False, "backward": False}
    assert half(torch.mm)


def test_disable_casts_nests_and_survives_an_error():
    with amp.disable_casts():
        assert not half(torch.mm)
    start("O1")

    def fail():
        with amp.disable_casts():
            with amp.disable_casts():
                assert not half(torch.mm)
            assert not half(torch.mm)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert half(torch.mm)
    start("O2", seed=1)
    with amp.disable_casts():
        pass


@pytest.mark.parametrize("how", ["load_state_dict", "in place", "step"])
def test_apex_796_weights_that_changed_are_used(how):
    model, optimizer = start("O1")
    model.eval()
    x, _ = batch(0)
    with torch.no_grad():
        before = model(x)
        if how == "load_state_dict":
            model.load_state_dict(net(7).state_dict())
        elif how == "in place":
            model.last.bias.data += 1  # an average that is swapped in
        else:
            with torch.enable_grad(), amp.scale_loss(model(x).float().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        after = model(x)
    assert not torch.equal(before, after)
    with amp.disable_casts():
        assert torch.allclose(after.float(), model(x), atol=1e-2)


@pytest.mark.parametrize("part", ["forward", "encode"])
def test_training_behind_an_evaluation_has_all_gradients(part):
    model, optimizer = start("O1")
    with torch.no_grad():
        getattr(model, part)(batch(0)[0])
        model(batch(0)[0])
    loss = loss_of(model, 0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_used_several_times_are_cast_once():
    """Tied weights and cells in a loop, with which apex fails on current torch."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.RNNCell(4, 4)
            self.kept = []

        def forward(self, x):
            self.kept.append(torch.is_autocast_cache_enabled())
            h = x
            for _ in range(3):
                h = self.cell(x, h)
            return h @ self.cell.weight_hh.T

    model = Loop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
    with amp.scale_loss(model(torch.ones(2, 4)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert model.kept == [True]
    assert not torch.is_autocast_cache_enabled()
    gradients = [one.grad.clone() for one in model.parameters()]
    with amp.disable_casts():
        expected = torch.autograd.grad(model(torch.ones(2, 4)).sum(), list(model.parameters()))
    assert all(torch.allclose(one, two, rtol=1e-2, atol=1e-2) for one, two in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_apex_102_recurrent_layers(kind):
    model = kind(4, 5, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for level in ("O1", "O2", "O3"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        before = [one.detach().clone() for one in model.parameters()]
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(2, 3, 4))[0].float().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        after = list(model.parameters())
        assert all(one.isfinite().all() for one in after)
        assert not any(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_an_lstm_on_cpu_is_refused_at_o1():
    with pytest.raises(ValueError, match="LSTM"):
        amp.initialize(nn.LSTM(2, 2), opt_level="O1", verbosity=0)


def test_apex_505_types_are_promoted_as_torch_does():
    start("O1")
    wide, narrow = torch.ones(2, dtype=torch.float64), torch.ones(2)
    assert (wide + narrow).dtype is torch.float64
    assert torch.mm(torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)).dtype is torch.float64


@pytest.mark.parametrize("allowed", [False, True])
def test_apex_1017_binary_cross_entropy(allowed):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    original = F.binary_cross_entropy
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, allow_banned=allowed)
    probabilities = torch.sigmoid(model(torch.ones(3, 4)))
    assert probabilities.dtype is torch.float16
    if allowed:
        assert nn.BCELoss()(probabilities, torch.ones(3, 1)).dtype is torch.float32
    else:
        with pytest.raises(NotImplementedError, match="register_float_function"):
            nn.BCELoss()(probabilities, torch.ones(3, 1))
    assert nn.BCELoss()(probabilities.float(), torch.ones(3, 1)).dtype is torch.float32
    amp.shutdown()
    assert F.binary_cross_entropy is original


def test_apex_1017_with_a_registered_sigmoid():
    original = torch.sigmoid
    amp.register_float_function(torch, "sigmoid")
    assert torch.sigmoid is original  # from the next initialize on
    model = nn.Linear(4, 1)
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert nn.BCELoss()(torch.sigmoid(model(torch.ones(3, 4))), torch.ones(3, 1)).dtype is torch.float32
    amp.shutdown()
    assert torch.sigmoid is original
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert torch.sigmoid is original  # a registration is for one initialize only


def test_registered_functions_and_their_errors():
    class Mine:
        @staticmethod
        def product(x, y):
            return x * y

        @staticmethod
        def total(x):
            return x + 1

        @staticmethod
        def both(x, y):
            return x.dtype, y.dtype

    product = Mine.product
    amp.register_half_function(Mine, "product")
    amp.register_float_function(Mine, "total")
    amp.register_promote_function(Mine, "both")
    with pytest.raises(ValueError, match="No function named nothing in module torch"):
        amp.register_half_function(torch, "nothing")
    x, y = torch.ones(2), torch.ones(2).half()
    start("O1")
    assert Mine.product(x, y=x).dtype is torch.float16
    assert Mine.total(y).dtype is torch.float32
    assert Mine.both(x, y) == (torch.float32, torch.float32)
    with amp.disable_casts():
        assert Mine.product(x, x).dtype is torch.float32
    amp.shutdown()
    assert Mine.product is product


def test_apex_345_decorators_of_custom_functions():
    class Double(torch.autograd.Function):
        @staticmethod
        @amp.float_function
        def forward(ctx, x):
            assert x.dtype is torch.float32
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    @amp.half_function
    def product(x, pair):
        return x.dtype, pair[0].dtype

    @amp.promote_function
    def widest(x, y):
        return x.dtype, y.dtype

    x, y = torch.ones(2, requires_grad=True), torch.ones(2).half()
    assert product(x, [x]) == (torch.float32, torch.float32)  # casts are off
    start("O1")
    Double.apply(y.requires_grad_()).sum().backward()
    assert y.grad.dtype is torch.float16
    assert product(x, [x]) == (torch.float16, torch.float16)
    assert widest(x, y) == (torch.float32, torch.float32)


def test_apex_215_gradient_penalty():
    model, optimizer = start("O1", loss_scale=128.0)
    x, _ = batch(0)
    x.requires_grad_()
    output = model(x).float().sum()
    (gradient,) = torch.autograd.grad(output, x, create_graph=True)
    optimizer.zero_grad()
    with amp.scale_loss(gradient.pow(2).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert model.first.weight.grad.abs().sum() > 0
    optimizer.step()


def test_apex_656_lists_can_be_edited():
    lists = amp.lists.functional_overrides
    assert "linear" in lists.FP16_FUNCS
    assert "softmax" in amp.lists.torch_overrides.CASTS or "softmax" in lists.FP32_FUNCS
    assert amp.lists.tensor_overrides.MODULE is torch.Tensor
    x, weight = torch.ones(2, 2), torch.nn.Parameter(torch.ones(2, 2))
    lists.FP32_FUNCS.append("relu")
    lists.FP16_FUNCS.remove("linear")
    try:
        start("O1")
        assert F.relu(x.half()).dtype is torch.float32
        assert F.linear(x, weight).dtype is torch.float32
        assert torch.mm(x, weight).dtype is torch.float16
        amp.shutdown()
        assert F.relu(x.half()).dtype is torch.float16
        lists.FP32_FUNCS.append("linear")  # from one list to the other
        start("O1")
        assert F.linear(x.half(), weight).dtype is torch.float32
    finally:
        lists.FP32_FUNCS[:] = [name for name in lists.FP32_FUNCS if name not in ("relu", "linear")]
        lists.FP16_FUNCS.append("linear")
    start("O1")
    assert F.linear(x, weight).dtype is torch.float16


def test_verbosity_2_prints_the_lists(capsys):
    model = net()
    amp.initialize(model, opt_level="O1", verbosity=2)
    assert "conv2d" in capsys.readouterr().out


# -- the old interface -----------------------------------------------------------------------------------------------------------


def test_the_old_handle():
    handle = amp.init(loss_scale=128.0)
    assert handle.is_active()
    assert handle.has_cache
    assert half(torch.mm)
    with handle._disable_casts():
        assert not half(torch.mm)
    with pytest.raises(RuntimeError, match="no longer supported"):
        handle.scale_loss(None, None)
    handle._clear_cache()
    handle._deactivate()
    assert not handle.is_active()
    assert not half(torch.mm)
    handle._deactivate()


def test_the_old_handle_not_enabled():
    handle = amp.init(enabled=False)
    assert not handle.is_active()
    assert not half(torch.mm)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(net().parameters(), lr=0.1))
    loss = torch.zeros(())
    with optimizer.scale_loss(loss) as scaled_loss:
        assert scaled_loss is loss


def test_the_old_optimizer():
    handle = amp.init()
    model = Net()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_loss=2)
    for bad in (False, True):
        before = model.last.bias.detach().clone()
        optimizer.zero_grad()
        for index in range(2):
            with optimizer.scale_loss(loss_of(model, index)) as scaled_loss:
                (scaled_loss * (float("inf") if bad and index else 1.0)).backward()
        with pytest.raises(RuntimeError, match="num_loss=2"):
            optimizer.scale_loss(torch.zeros(())).__enter__()
        optimizer.step()
        assert torch.equal(before, model.last.bias) is bad
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)
