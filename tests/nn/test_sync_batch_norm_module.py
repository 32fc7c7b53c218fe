"""SyncBatchNorm as a module in one process: a replacement for BatchNorm in every mode, both conversions, compilation."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.nn import SyncBatchNorm, convert_syncbn_model, revert_syncbn_model
from fabricamp.ops import peer_memory
from fabricamp.ops.batch_norm.exchange import exchange_on

SHAPES = {
    (4, 6): nn.BatchNorm1d,
    (4, 6, 5): nn.BatchNorm1d,
    (3, 6, 4, 5): nn.BatchNorm2d,
    (2, 6, 3, 4, 2): nn.BatchNorm3d,
}
OPTIONS = list(itertools.product([0.1, None], [True, False], [True, False]))


def pair(kind, momentum=0.1, affine=True, track_running_stats=True, **options):
    """Returns a BatchNorm and a SyncBatchNorm with the same parameters."""
    theirs = kind(6, 1e-3, momentum, affine, track_running_stats)
    ours = SyncBatchNorm(6, 1e-3, momentum, affine, track_running_stats, **options)
    if affine:
        with torch.no_grad():
            theirs.weight.uniform_(0.5, 2)
            theirs.bias.normal_()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(layer, x, *more):
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(leaf, *more)
    y.mul(torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return [y.detach(), leaf.grad, *[one.grad for one in layer.parameters()], *[one.clone() for one in layer.buffers()]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("momentum", "affine", "track"), OPTIONS)
def test_is_batchnorm_in_training_and_evaluation(shape, momentum, affine, track):
    theirs, ours = pair(SHAPES[shape], momentum, affine, track)
    for mode in (True, True, False, True):
        x = torch.randn(shape) * 2 + 1
        for found, expected in zip(run(ours.train(mode), x), run(theirs.train(mode), x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("relu", "residual", "channel_last"), list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("track", [True, False])
def test_relu_residual_and_the_place_of_channels(training, relu, residual, channel_last, track):
    theirs, ours = pair(nn.BatchNorm2d, track_running_stats=track, fuse_relu=relu, channel_last=channel_last)
    x, z, dy = torch.randn(3, 3, 6, 4, 5)
    outcomes = []
    for layer, moves in ((theirs, False), (ours, channel_last)):
        layer.train(training)
        leaf, extra = (one.clone().requires_grad_() for one in (x, z))
        given = [one.movedim(1, -1) if moves else one for one in (leaf, extra)]
        if layer is ours:
            y = layer(*given) if residual else layer(given[0])
        else:
            y = layer(given[0]) + given[1] if residual else layer(given[0])
            y = y.relu() if relu else y
        y.backward(dy.movedim(1, -1) if moves else dy)
        y = y.movedim(-1, 1) if moves else y
        outcomes.append([y.detach(), leaf.grad, extra.grad if residual else y.detach(), layer.weight.grad])
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mixed", [True, False])
def test_kinds_of_input_and_parameters(dtype, mixed):
    """Tests half inputs with fp32 parameters, and one dtype for all; the output has the input's dtype."""
    if dtype is torch.float64 and mixed:
        pytest.skip("fp64 inputs take fp64 parameters")
    theirs, ours = pair(nn.BatchNorm2d)
    ours = ours if mixed else ours.to(dtype)
    x = torch.randn(3, 6, 4, 5).to(dtype)
    y = ours(x)
    assert y.dtype == dtype
    near = 1e-5 if dtype is torch.float64 else 4e-2
    torch.testing.assert_close(y.float(), theirs(x.float()), rtol=near, atol=near)
    torch.testing.assert_close(ours.running_var.float(), theirs.running_var, rtol=near, atol=near)
    y.sum().backward()
    assert ours.weight.grad.dtype == ours.running_mean.dtype == (torch.float32 if mixed else dtype)
    ours.eval()
    assert ours(x).dtype == dtype


def test_running_values_that_are_switched_off_stay_as_they_are():
    """As in a forward for adversarial examples: it uses the batch's statistics and leaves the running ones unchanged."""
    theirs, ours = pair(nn.BatchNorm2d)
    for tracked, mode in ((True, True), (False, True), (False, False), (True, True)):
        theirs.track_running_stats = ours.track_running_stats = tracked
        x = torch.randn(3, 6, 4, 5) * 2 + 1
        for found, expected in zip(run(ours.train(mode), x), run(theirs.train(mode), x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for name in ("weight", "bias"):
        layers = pair(nn.BatchNorm2d)
        for layer in layers:
            setattr(layer, name, None)
        for found, expected in zip(*[run(layer, x) for layer in layers], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_memory_formats_are_kept():
    layer = SyncBatchNorm(6)
    x = torch.randn(3, 6, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def test_copies_and_pickles():
    layer = SyncBatchNorm(6, fuse_relu=True, exchange="collective")
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        x = torch.randn(5, 6)
        assert torch.equal(twin(x), layer(x))
        assert twin._exchange is not layer._exchange
        assert twin._exchange.choice == "collective"
        layer.load_state_dict(twin.state_dict())
    assert "fuse_relu=True" in repr(layer)
    assert layer.exchanges == {"cpu": "alone: torch.distributed is not initialised"}


def test_the_exchange_is_told_and_can_be_chosen(monkeypatch):
    monkeypatch.delenv("FABRICAMP_SYNCBN_EXCHANGE", raising=False)
    assert "by a collective: there are no kernels for cpu" in str(ops.backend("cpu")["sync_batch_norm"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(peer_memory, "runs_kernels", lambda device: True)
    reached = []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: reached.append(pair) or len(reached) > 1)
    assert "do not reach each other" in exchange_on(torch.device("cuda"))
    assert "by peer memory where they share a link" in exchange_on(torch.device("cuda", 1))
    assert reached == [(0, 1), (1, 0)]
    monkeypatch.setenv("FABRICAMP_SYNCBN_EXCHANGE", "collective")
    assert "by collective, as FABRICAMP_SYNCBN_EXCHANGE asks" in str(ops.backend("cpu")["sync_batch_norm"])


WITHOUT_BIAS = {"bias": False} if "bias" in inspect.signature(nn.BatchNorm1d).parameters else {}  # torch 2.11 lacks it


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.InstanceNorm2d(3), nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.shared = self.again = nn.BatchNorm2d(6, momentum=None)
        self.rows = nn.BatchNorm1d(6, affine=False)
        self.without = nn.BatchNorm1d(6, track_running_stats=False, **WITHOUT_BIAS)
        self.own = SyncBatchNorm(6, fuse_relu=True)

    def forward(self, x):
        x = self.again(self.shared(self.body(x))).mean((2, 3))
        return self.own(self.without(self.rows(x)))


def test_conversion_keeps_everything():
    torch.manual_seed(0)
    net = Net()
    twin = copy.deepcopy(net)
    net.body[2].weight.requires_grad_(requires_grad=False)
    net.rows.eval()
    twin.rows.eval()
    optimizer = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.1)
    calls = []
    handle = net.shared.register_forward_hook(lambda *_: calls.append("forward"))
    net.shared.register_forward_pre_hook(lambda *_: calls.append("before"))
    net.shared.register_state_dict_post_hook(lambda *_: calls.append("state"))
    behind = []
    net.rows.register_full_backward_hook(lambda module, *_: behind.append(type(module)))
    net.rows.note = "kept"
    own, before, modules = net.own, list(net.parameters()), dict(net.named_modules())
    assert convert_syncbn_model(net) is net
    assert [type(layer).__name__ for layer in (net.body[2], net.shared, net.rows, net.without, net.body[0])] == [
        *["SyncBatchNorm"] * 4,
        "InstanceNorm2d",
    ]
    assert net.own is own
    assert net.shared is net.again
    assert all(one is other for one, other in zip(net.parameters(), before, strict=True))
    assert not net.body[2].weight.requires_grad
    assert not net.rows.training
    assert (net.without.bias is None) == bool(WITHOUT_BIAS)
    assert net.state_dict().keys() == twin.state_dict().keys()
    assert calls == ["state"] * 2  # once per layer
    for _ in range(2):
        x = torch.randn(4, 3, 6, 6)
        torch.testing.assert_close(net(x), twin(x), rtol=1e-4, atol=1e-5)
    net(x).sum().backward()
    optimizer.step()
    assert behind == [SyncBatchNorm]
    assert net.rows.note == "kept"
    assert calls[2:8] == ["before", "forward"] * 3
    handle.remove()
    calls.clear()
    net(x)
    assert "forward" not in calls
    net.half()
    net.eval()
    with pytest.raises(ConfigError, match="fuse_relu"):
        revert_syncbn_model(net)
    net.own.fuse_relu = False
    revert_syncbn_model(net)
    for name, module in net.named_modules():
        if name != "own":
            assert module is modules[name]
            assert not module.training
    assert type(net.own).__name__ == "_UncheckedBatchNorm"
    assert net.shared.weight.dtype == torch.float16
    assert all(one is other for one, other in zip(net.parameters(), before, strict=True))
    assert not any(isinstance(one, SyncBatchNorm) for one in net.modules())
    net.float().train()(x)


def test_a_bare_layer_is_converted_and_back():
    layer = nn.BatchNorm3d(6, eps=0.5)
    converted = convert_syncbn_model(layer)
    assert isinstance(converted, SyncBatchNorm)
    assert converted.eps == 0.5
    assert revert_syncbn_model(copy.deepcopy(converted)).eps == 0.5
    assert revert_syncbn_model(converted) is layer
    last = convert_syncbn_model(nn.BatchNorm2d(6), channel_last=True)
    assert last(torch.randn(2, 4, 5, 6)).shape == (2, 4, 5, 6)
    on_meta = convert_syncbn_model(nn.BatchNorm2d(6, device="meta", dtype=torch.bfloat16))
    assert (on_meta.weight.device.type, on_meta.weight.dtype) == ("meta", torch.bfloat16)
    # Reverts only layers chosen by the caller.
    both = convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6)))
    revert_syncbn_model(both, [both[1]])
    assert [type(one) for one in both] == [SyncBatchNorm, nn.BatchNorm1d]
    theirs = convert_syncbn_model(nn.SyncBatchNorm(6))
    assert isinstance(revert_syncbn_model(theirs), nn.SyncBatchNorm)


class Activated(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class Narrow(nn.BatchNorm2d):
    def _check_input_dim(self, x):
        assert x.shape[0] < 100


def test_layers_that_do_more_than_normalise_are_not_converted():
    """Their other work would silently be lost."""
    replaced, parametrized = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
    replaced.forward = torch.relu
    parametrize.register_parametrization(parametrized, "weight", nn.Softplus())
    for layer, words in (
        (Activated(6), "Activated overrides forward"),
        (replaced, "BatchNorm2d overrides forward"),
        (parametrized, "ParametrizedBatchNorm2d has submodules .parametrizations."),
    ):
        with pytest.raises(ConfigError, match=words):
            convert_syncbn_model(nn.Sequential(nn.Conv2d(3, 6, 1), layer))
    assert isinstance(convert_syncbn_model(Narrow(6)), SyncBatchNorm)
    parametrize.remove_parametrizations(parametrized, "weight")
    assert isinstance(convert_syncbn_model(parametrized), SyncBatchNorm)


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="LazyBatchNorm1d has no number of channels"):
        convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.raises(ConfigError, match="did you mean 'peer'"):
        SyncBatchNorm(6, exchange="pear")
    with pytest.raises(ConfigError, match="process_group=2 is not a process group"):
        SyncBatchNorm(6, process_group=2)
    with pytest.raises(ConfigError, match="one module, not a list"):
        convert_syncbn_model([nn.BatchNorm1d(6)])
    for mode in (True, False):
        with pytest.raises(ConfigError, match="1 dimensions"):
            SyncBatchNorm(6).train(mode)(torch.zeros(6))
        for z in (torch.zeros(3, 6).half(), torch.zeros(1, 6)):
            with pytest.raises(ConfigError, match="the residual z"):
                SyncBatchNorm(6).train(mode)(torch.zeros(3, 6), z)
    with pytest.raises(ConfigError, match="has 6 channels, but the input"):
        SyncBatchNorm(6)(torch.zeros(2, 5, 6))
    with pytest.raises(ConfigError, match="one value per channel has no variance"):
        SyncBatchNorm(6)(torch.zeros(1, 6))
    with pytest.raises(ConfigError, match="is on cpu and its parameters or running values on meta; move the module"):
        SyncBatchNorm(6, device="meta")(torch.zeros(2, 6))
    SyncBatchNorm(6).eval()(torch.zeros(1, 6))
    layer = SyncBatchNorm(6)
    x = torch.randn(4, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="SyncBatchNorm has no second derivative"):
        gradient.square().sum().backward()


def test_compiled_without_a_break():
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = convert_syncbn_model(Net())
    twin = copy.deepcopy(net)
    step = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for mode in (True, True, False):
        x = torch.randn(4, 3, 6, 6)
        outcomes = []
        for model, call in ((net, net), (twin, step)):
            model.train(mode)
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.square().sum().backward()
            outcomes.append((y.detach(), leaf.grad))
        torch.testing.assert_close(*outcomes)
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_operator_is_what_it_promises(channels_last):
    layer = SyncBatchNorm(6)
    x, z = (torch.randn(3, 6, 4, 5) for _ in range(2))
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    given = (x.requires_grad_(), z.requires_grad_(), layer.weight, layer.bias, 1e-5, True, False, layer._exchange.key)
    torch.library.opcheck(
        torch.ops.fabricamp.sync_batch_norm.default, given, test_utils=("test_schema", "test_faketensor")
    )
