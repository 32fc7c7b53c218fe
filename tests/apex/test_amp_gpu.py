"""amp on GPUs: the same results as on CPUs, and no wait of the host if the optimizer can skip a step on the device."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import ops
from fabricamp.apex import amp, normalization
from fabricamp.optimizers import FusedAdam
from tests.apex.amp_nets import ALL_OPTIMIZERS, LEVELS, batch, loss_of, net, same, snapshot, spoil, start, train

pytestmark = pytest.mark.gpu
MESSAGE = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
ON_DEVICE = ["FusedAdam", "FusedLAMB", "FusedSGD", "AdamFused"]


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    torch.cuda.set_sync_debug_mode("default")
    amp.shutdown()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_learns_as_on_cpu(level, name):
    model, optimizer = start(level, name, device="cuda")
    losses = train(model, optimizer, range(10))
    amp.shutdown()
    model, optimizer = start("O0", name)
    expected = train(model, optimizer, range(10))
    steps = 2 if level == "O3" else 10
    assert losses[:steps] == pytest.approx(expected[:steps], rel={"O0": 1e-4, "O3": 0.1}.get(level, 0.03))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ON_DEVICE)
def test_no_wait_in_a_step(level, name):
    model, optimizer = start(level, name, device="cuda")
    batches = [batch(index, "cuda") for index in range(8)]
    for index, (x, y) in enumerate(batches):
        if index == 4:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 8}}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["SGD", *ON_DEVICE])
def test_an_overflow_is_left_out_and_told_of(level, name, capsys):
    model, optimizer = start(level, name, device="cuda")
    train(model, optimizer, range(2))
    amp._amp_state.verbosity = 1
    weights = [one.detach().clone() for one in amp.master_params(optimizer)]
    optimizer.zero_grad()
    spoil(optimizer, loss_of(model, 2))
    optimizer.step()
    assert same(weights, list(amp.master_params(optimizer)))
    assert (MESSAGE in capsys.readouterr().out) is (name == "SGD")
    train(model, optimizer, range(3))
    assert not same(weights, list(amp.master_params(optimizer)))
    assert (MESSAGE in capsys.readouterr().out) is (name != "SGD")


@pytest.mark.parametrize("name", ["SGD", "Adam", "FusedAdam", "FusedLAMB"])
@pytest.mark.parametrize("level", LEVELS)
def test_exact_resume(level, name):
    model, optimizer = start(level, name, device="cuda")
    train(model, optimizer, range(10))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, "file.pt")
    train(model, optimizer, range(10, 20))
    expected, scale = snapshot(model, optimizer), amp.state_dict()
    amp.shutdown()
    model, optimizer = start(level, name, seed=3, device="cuda")
    file = torch.load("file.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(file["model"])
    optimizer.load_state_dict(file["optimizer"])
    amp.load_state_dict(file["amp"])
    train(model, optimizer, range(10, 20))
    assert same(snapshot(model, optimizer), expected)
    assert amp.state_dict() == scale


def test_passes_add_up_in_fp32():
    model, optimizer = start("O2", "FusedAdam", device="cuda")
    expected = [torch.zeros_like(one) for one in amp.master_params(optimizer)]
    for index in range(3):
        gradients = torch.autograd.grad(loss_of(model, index), list(model.parameters()))
        expected = [one + other.float() for one, other in zip(expected, gradients, strict=True)]
        with amp.scale_loss(loss_of(model, index), optimizer) as scaled_loss:
            scaled_loss.backward()
    for master, one in zip(amp.master_params(optimizer), expected, strict=True):
        assert torch.allclose(master.grad, one, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("level", LEVELS)
def test_apex_102_recurrent_layers(kind, level):
    model = kind(4, 5, batch_first=True).cuda()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(2, 3, 4, device="cuda"))[0].float().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert all(torch.isfinite(one).all() for one in model.parameters())


def test_apex_1017_binary_cross_entropy_on_fp32_values():
    model = nn.Linear(4, 1).cuda()
    amp.initialize(model, opt_level="O1", verbosity=0)
    probabilities = torch.sigmoid(model(torch.ones(3, 4, device="cuda")))
    with pytest.raises(NotImplementedError):
        nn.BCELoss()(probabilities, torch.ones(3, 1, device="cuda"))
    loss = nn.BCELoss()(probabilities.float(), torch.ones(3, 1, device="cuda"))
    loss.backward()
    assert torch.isfinite(loss)


def test_a_model_that_moves_after_initialize():
    model = net()
    optimizer = ALL_OPTIMIZERS["SGD"](model.parameters())
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    model.cuda()
    with pytest.raises(RuntimeError, match=r"model\.cuda\(\) before amp\.initialize"):
        spoil(optimizer, loss_of(model, 0))


def test_apex_439_twenty_runs_leave_memory_flat():
    sizes = []
    for index in range(20):
        model, optimizer = start(LEVELS[index % 4], list(ALL_OPTIMIZERS)[index % 6], device="cuda")
        train(model, optimizer, range(2))
        amp.shutdown()
        del model, optimizer
        gc.collect()
        sizes.append(torch.cuda.memory_allocated())
    # A limited number of address tables stays cached.
    assert sizes[-1] <= sizes[7] + 2**20, sizes


class Split(nn.Module):
    """A model on two devices, as in apex#319."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8).to("cuda:0")
        self.last = nn.Linear(8, 3).to("cuda:1")

    def forward(self, x):
        return self.last(torch.relu(self.first(x)).to("cuda:1"))


@pytest.mark.gpu2
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["SGD", "FusedAdam", "FusedSGD"])
def test_apex_319_a_model_on_two_devices(level, name):
    losses = {}
    for kind in ("split", "plain"):
        torch.manual_seed(0)
        model = Split()
        optimizer = ALL_OPTIMIZERS[name](model.parameters())
        if kind == "split":
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        losses[kind] = []
        for index in range(6):
            x, y = batch(index, "cuda:0")
            loss = F.cross_entropy(model(x), y.to("cuda:1"))
            optimizer.zero_grad()
            if kind == "split":
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            optimizer.step()
            losses[kind].append(loss.item())
        amp.shutdown()
    steps = 2 if level == "O3" else 6
    assert losses["split"][:steps] == pytest.approx(losses["plain"][:steps], rel=1e-4 if level == "O0" else 0.05)


@pytest.mark.gpu2
@pytest.mark.parametrize("level", LEVELS)
def test_apex_269_data_parallel_around_an_initialized_model(level):
    losses = {}
    for chosen in (level, None):
        model = net(device="cuda:0")
        optimizer = ALL_OPTIMIZERS["FusedSGD"](model.parameters())
        if chosen:
            amp.initialize(model, optimizer, opt_level=chosen, verbosity=0)
        wrapped = nn.DataParallel(model, device_ids=[0, 1])
        losses[chosen] = []
        for index in range(6):
            x, y = batch(index, "cuda:0")
            loss = F.cross_entropy(wrapped(x), y)
            optimizer.zero_grad()
            if chosen:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            optimizer.step()
            losses[chosen].append(loss.item())
        amp.shutdown()
    steps = 2 if level == "O3" else 6
    assert losses[level][:steps] == pytest.approx(losses[None][:steps], rel=1e-4 if level == "O0" else 0.05)


@pytest.mark.parametrize("runner", ["cupy", "torch"])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_apex_1999_evaluation_keeps_no_memory(runner, without):
    names = ("FusedRMSNorm", "FusedLayerNorm", "MixedFusedRMSNorm", "MixedFusedLayerNorm")
    layers = [getattr(normalization, name)(64).cuda() for name in names]
    x = torch.ones(8, 64, device="cuda")
    sizes = []
    with without(), ops.dispatch.always(runner):
        for _ in range(4):
            for layer in layers * 10:
                layer(x)
            gc.collect()
            sizes.append(torch.cuda.memory_allocated())
    assert sizes[-1] <= sizes[1], sizes  # the first round may allocate memory that kernels share


def test_apex_550_cupy_is_for_the_cuda_that_torch_has():
    cupy = pytest.importorskip("cupy", reason="needs the package cupy")
    assert cupy.cuda.runtime.runtimeGetVersion() // 1000 == int(torch.version.cuda.partition(".")[0])
    assert ops.backend("cuda")["adam"].name == "cupy"
