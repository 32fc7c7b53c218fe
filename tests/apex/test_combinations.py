"""amp together with other features: interrupts, compiled and replicated models, other losses and dtypes."""

from __future__ import annotations

import importlib
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.apex import amp
from tests.apex.amp_nets import ALL_OPTIMIZERS, LEVELS, batch, loss_of, net, same, train


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()
    torch._dynamo.reset()


def trained(level, name, step, model=net, **options):
    """Returns the parameters after four calls of ``step(model, optimizer, index, backward)``; without amp if ``level`` is None."""
    torch.manual_seed(0)
    module = model()
    optimizer = ALL_OPTIMIZERS[name](module.parameters())
    if level is not None:
        amp.initialize(module, optimizer, opt_level=level, verbosity=0, **options)

    def backward(loss, reduce=lambda scaled: scaled):
        if level is None:
            reduce(loss).backward()
            return
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            reduce(scaled_loss).backward()

    for index in range(4):
        step(module, optimizer, index, backward)
    found = [one.detach().clone() for one in amp.master_params(optimizer)]
    if level is not None:
        amp.shutdown()
    return found


def agree(ones, others, level):
    tolerance = {"O0": 1e-6, "O1": 1e-2, "O2": 1e-2}.get(level, 3e-2)
    return all(
        torch.allclose(one, other.to(one.dtype), rtol=tolerance, atol=tolerance)
        for one, other in zip(ones, others, strict=True)
    )


# -- calls that do not end, and calls within calls -------------------------------------------------------------------------------


class Interrupted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.interrupts = False

    def forward(self, x):
        x = self.layer(x)
        if self.interrupts:
            raise KeyboardInterrupt
        return x


def interrupt(model):
    model.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 4))
    model.interrupts = False


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_a_forward_that_was_interrupted_leaves_the_boundary_in_order(level):
    first, second = Interrupted(), net().eval()
    amp.initialize([first, second], opt_level=level, verbosity=0)
    for again in (lambda: first(torch.ones(2, 4)), lambda: second(torch.ones(2, 6))):
        interrupt(first)
        for _ in range(2):
            assert again().dtype is torch.float32
    interrupt(first)
    amp.shutdown()
    assert torch.is_autocast_cache_enabled()
    amp.initialize(second, opt_level=level, verbosity=0)
    assert second(torch.ones(2, 6)).dtype is torch.float32


def test_a_forward_that_was_interrupted_leaves_no_old_weights():
    model = amp.initialize(Interrupted(), opt_level="O1", verbosity=0)
    interrupt(model)
    with torch.no_grad():
        before = model(torch.ones(2, 4))
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        assert torch.allclose(model(torch.ones(2, 4)), before + 5, atol=0.1)


class Tree(nn.Module):
    """Calls itself, and another model that was also given to initialize."""

    def __init__(self, other):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.others = [other]

    def forward(self, x, depth=2):
        if depth == 0:
            return self.layer(x)
        inner, other = self(x, depth - 1), self.others[0](x)
        assert inner.dtype is other.dtype is self.layer.weight.dtype
        return inner + other


def test_calls_within_calls_stay_half():
    other = nn.Linear(4, 4)
    tree = Tree(other)
    amp.initialize([tree, other], opt_level="O2", verbosity=0)
    for _ in range(2):
        assert tree(torch.ones(2, 4)).dtype is torch.float32
        assert other(torch.ones(2, 4)).dtype is torch.float32


# -- other kinds of models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_was_compiled_before_initialize(level):
    def step(model, optimizer, index, backward):
        optimizer.zero_grad()
        x, y = batch(index)
        backward(F.cross_entropy(model(x), y))
        optimizer.step()

    def compiled():
        return torch.compile(net(), backend="eager")

    found = trained(level, "FusedSGD", step, compiled)
    assert agree(found, trained(None, "FusedSGD", step), level)


@pytest.fixture
def replicas(monkeypatch):
    """Simulates torch's DataParallel on the CPU: replicas of a module, each called in its own thread."""
    replicate = importlib.import_module("torch.nn.parallel.replicate")  # its package has a function of that name
    monkeypatch.setattr(replicate, "_get_device_index", lambda device, _: device)
    monkeypatch.setattr(
        replicate,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach: [
            [one.detach() if detach else one.view_as(one) for one in tensors] for _ in devices
        ],
    )

    def call(module, x):
        outputs = {}
        copies = replicate.replicate(module, [0, 1])

        def run(place, part):
            outputs[place] = copies[place](part)

        threads = [threading.Thread(target=run, args=one) for one in enumerate(x.chunk(2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat([outputs[0], outputs[1]])

    return call


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_apex_269_replicas_of_data_parallel(level, replicas):
    def step(model, optimizer, index, backward):
        model.eval()
        optimizer.zero_grad()
        x, y = batch(index)
        out = replicas(model, x)
        assert out.dtype is torch.float32
        backward(F.cross_entropy(out, y))
        optimizer.step()

    assert agree(trained(level, "FusedSGD", step), trained(None, "FusedSGD", step), level)


class OfComplexNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64) / 4)

    def forward(self, x, z):
        assert z.is_complex()
        return ((self.layer(x).float() + z) @ self.weight.conj()).abs()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("passes", [1, 2])
def test_complex_inputs_and_weights(level, passes):
    def step(model, optimizer, index, backward):
        optimizer.zero_grad()
        for number in range(passes):
            x, y = batch(passes * index + number)
            backward(F.cross_entropy(model(x, torch.complex(x[:, :4], x[:, 2:])), y))
        assert model.weight.grad.is_complex()
        optimizer.step()

    found, expected = [trained(one, "SGD", step, OfComplexNumbers) for one in (level, None)]
    assert agree(map(torch.view_as_real, found[:1]), map(torch.view_as_real, expected[:1]), level)
    assert agree(found[1:], expected[1:], level)


# -- other losses ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["SGD", "FusedSGD"])
def test_a_loss_of_each_sample_is_reduced_inside_the_context(level, name):
    def step(model, optimizer, index, backward):
        optimizer.zero_grad()
        x, y = batch(index)
        backward(F.cross_entropy(model(x), y, reduction="none"), torch.mean)
        optimizer.step()

    assert agree(trained(level, name, step), trained(None, name, step), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["SGD", "FusedAdam", "AdamFused"])
def test_a_loss_that_reaches_no_weight_of_an_optimizer(level, name):
    models = [net(), net()]
    optimizers = [ALL_OPTIMIZERS[name](one.parameters()) for one in models]
    amp.initialize(models, optimizers, opt_level=level, verbosity=0, num_losses=2)
    train(models[1], optimizers[1], [0])
    before = [one.detach().clone() for one in models[1].parameters()]
    for optimizer in optimizers:
        optimizer.zero_grad()
    for loss_id, chosen in enumerate([optimizers, optimizers[1]]):
        with amp.scale_loss(loss_of(models[0], 1), chosen, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()
    assert all(one.grad is None for one in amp.master_params(optimizers[1]))
    optimizers[1].step()
    assert same(list(models[1].parameters()), before)
    train(models[1], optimizers[1], [1])
    assert not same(list(models[1].parameters()), before)


@pytest.mark.parametrize("bad", [0, 1])
def test_torchs_fused_sgd_over_half_weights_with_a_dynamic_scale(bad):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    amp.initialize(model, optimizer, opt_level="O3", loss_scale="dynamic", verbosity=0)
    for index in range(3):
        before = [one.detach().clone() for one in model.parameters()]
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, index), optimizer) as scaled_loss:
            (scaled_loss * (float("inf") if index == bad else 1.0)).backward()
        optimizer.step()
        assert same(list(model.parameters()), before) is (index == bad)


class Scaled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, weight):
        assert x.dtype is weight.dtype is torch.float32
        assert not torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class HalfProduct(torch.autograd.Function):
    @staticmethod
    @amp.half_function
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.casts = torch.is_autocast_enabled("cpu")
        assert x.dtype is weight.dtype
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        assert torch.is_autocast_enabled("cpu") is ctx.casts  # as in forward
        return gradient @ weight.t(), x.t() @ gradient


class WithFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.rand(8))
        self.last = nn.Parameter(torch.randn(8, 3) / 3)

    def forward(self, x):
        return HalfProduct.apply(Scaled.apply(torch.relu(self.layer(x)), self.scale), self.last)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("name", ["SGD", "FusedSGD"])
def test_apex_345_functions_with_torchs_decorators(level, name):
    def step(model, optimizer, index, backward):
        optimizer.zero_grad()
        backward(loss_of(model, index))
        optimizer.step()

    assert agree(trained(level, name, step, WithFunctions), trained(None, name, step, WithFunctions), level)
