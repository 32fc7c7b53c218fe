"""Problems that apex's users reported, by issue number, as far as no other test is named after the issue."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabricamp.apex import amp, normalization, optimizers, parallel
from fabricamp.errors import ConfigError
from tests.apex.amp_nets import ALL_OPTIMIZERS, batch, loss_of, net, same, snapshot, spoil, start, train
from tests.distributed.ranks import run_ranks


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()


# -- optimizers and schedulers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("name", ["SGD", "FusedAdam", "AdamFused"])
def test_lightning_841_a_step_that_was_skipped_is_told(level, name):
    model, optimizer = start(level, name)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert optimizer.last_step_skipped is False
    told, rates = [], []
    for index in range(4):
        optimizer.zero_grad()
        if index == 1 and level != "O0":
            spoil(optimizer, loss_of(model, index))
            optimizer.step()
        else:
            train(model, optimizer, [index])
        told.append(bool(optimizer.last_step_skipped))
        if not optimizer.last_step_skipped:
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0] / scheduler.base_lrs[0])
    assert told == [False, level != "O0", False, False]
    assert rates == ([0.5, 0.25, 0.125, 0.0625] if level == "O0" else [0.5, 0.5, 0.25, 0.125])
    amp.shutdown()
    assert not hasattr(optimizer, "last_step_skipped")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_swav_18_optimizers_in_a_tuple_are_unscaled_once(level):
    found = []
    for kind in (list, tuple):
        model = net()
        optimizer = ALL_OPTIMIZERS["SGD"](model.parameters())
        amp.initialize(model, kind([optimizer]), opt_level=level, verbosity=0, loss_scale=128.0)
        for index in range(2):
            with amp.scale_loss(loss_of(model, index), kind([optimizer])) as scaled_loss:
                scaled_loss.backward()
        found.append([one.grad.clone() for one in amp.master_params(optimizer)])
        amp.shutdown()
    assert same(*found)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_apex_310_groups_stay_the_dictionaries_that_they_were(level):
    model = net()
    optimizer = ALL_OPTIMIZERS["Adam"](model.parameters())
    groups = list(optimizer.param_groups)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer, range(2))
    assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))


def test_apex_577_state_of_torchs_adam_goes_in_and_out():
    models = [net() for _ in range(2)]
    of_torch = torch.optim.AdamW(models[0].parameters(), lr=0.01, weight_decay=0.0)
    loss_of(models[0], 0).backward()
    of_torch.step()
    models[1].load_state_dict(models[0].state_dict())
    fused = optimizers.FusedAdam(models[1].parameters(), lr=0.01)
    fused.load_state_dict(of_torch.state_dict())
    back = torch.optim.AdamW(copy.deepcopy(models[1]).parameters(), lr=0.01)
    back.load_state_dict(fused.state_dict())
    assert [int(one["step"]) for one in back.state.values()] == [1] * 6
    for model, optimizer in zip(models, (of_torch, fused), strict=True):
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_apex_766_larc_shows_the_groups_of_a_loaded_state(level):
    model = net()
    optimizer = parallel.LARC.LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is optimizer.optim.param_groups
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_apex_374_a_window_of_four_passes_is_one_of_all_their_samples(level):
    results = []
    for passes in (1, 4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = optimizers.FusedSGD(model.parameters(), lr=0.5)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        x, y = batch(0)
        for part, target in zip(x.chunk(passes), y.chunk(passes), strict=True):
            loss = nn.functional.cross_entropy(model(part), target) / passes
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        optimizer.step()
        results.append([norm.float(), *[one.float() for one in amp.master_params(optimizer)]])
        amp.shutdown()
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-2, atol=1e-3)


# -- casts -----------------------------------------------------------------------------------------------------------------------


class MakesATensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(amp.cast_to_model_type({"positions": torch.linspace(0, 1, 4)})["positions"] + x)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_apex_933_tensors_made_inside_a_forward(level):
    model = amp.initialize(MakesATensor(), opt_level=level, verbosity=0)
    expected = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}.get(level, torch.float32)
    assert amp.cast_to_model_type(torch.ones(2)).dtype is expected
    assert amp.cast_to_model_type(torch.ones(2).double()).dtype is torch.float64
    assert amp.cast_to_model_type(torch.arange(2)).dtype is torch.int64
    assert model(torch.ones(3, 4)).shape == (3, 2)
    amp.shutdown()
    assert amp.cast_to_model_type(torch.ones(2)).dtype is torch.float32


@pytest.mark.parametrize("kind", ["FusedLayerNorm", "MixedFusedLayerNorm", "FusedRMSNorm", "MixedFusedRMSNorm"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_apex_1379_norms_between_half_layers(kind, level):
    model = nn.Sequential(nn.Linear(6, 8), getattr(normalization, kind)(8), nn.Linear(8, 3))
    optimizer = optimizers.FusedAdam(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = train(model, optimizer, [0] * 5)
    assert losses[-1] < losses[0]


def test_apex_308_scripted_modules():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    with pytest.raises(ConfigError, match="O1|autocast"):
        amp.initialize(scripted, opt_level="O2", verbosity=0)
    optimizer = ALL_OPTIMIZERS["SGD"](scripted.parameters())
    amp.initialize(scripted, optimizer, opt_level="O1", verbosity=0)
    losses = train(scripted, optimizer, [0] * 5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_compiled_models_train_as_plain_ones(level):
    results = []
    for compiled in (False, True):
        model, optimizer = start(level, "FusedAdam")
        train(torch.compile(model, backend="aot_eager") if compiled else model, optimizer, range(4))
        results.append(snapshot(model, optimizer))
        amp.shutdown()
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-4)


def test_apex_1999_evaluation_keeps_nothing():
    layers = [getattr(normalization, name)(8) for name in ("FusedRMSNorm", "FusedLayerNorm")]
    alive = []
    for _ in range(3):
        with torch.no_grad():
            for layer in layers * 5:
                layer(torch.ones(2, 8))
        gc.collect()
        alive.append({id(one) for one in gc.get_objects() if type(one) is torch.Tensor})
    assert alive[2] <= alive[1]


# -- several processes -----------------------------------------------------------------------------------------------------------


def joined(counts, make):
    generator = torch.Generator().manual_seed(5)
    parts = [make(count, generator) for count in counts]
    start_of = sum(counts[: dist.get_rank()])
    return torch.cat(parts), slice(start_of, start_of + counts[dist.get_rank()])


def apex_387_batches_of_different_sizes():
    whole, mine = joined([3, 5], lambda count, g: torch.randn(count, 7, 4, 4, generator=g))
    check_batch_norm(whole, mine)


def apex_262_one_value_a_rank():
    whole, mine = joined([1, 1], lambda count, g: torch.randn(count, 7, generator=g))
    check_batch_norm(whole, mine)


def apex_1768_channels_that_are_no_power_of_two():
    for channels in (3, 24, 33):
        whole, mine = joined([1, 2], lambda count, g, c=channels: torch.randn(count, c, 60, 50, generator=g) * 3 + 5)
        check_batch_norm(whole, mine, channel_last=True)


def check_batch_norm(whole, mine, *, channel_last=False):
    channels = whole.shape[1]
    plain = nn.BatchNorm2d(channels) if whole.dim() == 4 else nn.BatchNorm1d(channels)
    layer = parallel.convert_syncbn_model(copy.deepcopy(plain), channel_last=channel_last)
    assert isinstance(layer, parallel.SyncBatchNorm)
    x = whole[mine].movedim(1, -1).contiguous() if channel_last else whole[mine]
    y = layer(x)
    y = y.movedim(-1, 1) if channel_last else y
    assert torch.allclose(y, plain(whole)[mine], atol=1e-4)
    assert torch.allclose(layer.running_mean, plain.running_mean, atol=1e-5)
    assert torch.allclose(layer.running_var, plain.running_var, rtol=1e-4)


def apex_913_evaluation_of_every_kind():
    for options in ({"channel_last": True}, {"fuse_relu": True}, {"channel_last": True, "fuse_relu": True}):
        layer = parallel.SyncBatchNorm(6, **options).eval()
        x = torch.randn(2, 3, 3, 6) if layer.channel_last else torch.randn(2, 6, 3, 3)
        assert torch.allclose(layer(x, x), (2 * x).relu() if layer.fuse_relu else 2 * x, atol=1e-4)
    assert parallel.SyncBatchNorm(6).eval()(torch.randn(4, 6)).shape == (4, 6)


class TakesTurns(nn.Module):
    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, way):
        return self.ways[way](x)


def apex_208_parameters_by_turns():
    for options in ({}, {"message_size": 1}, {"delay_allreduce": True}):
        model = parallel.DistributedDataParallel(TakesTurns(), **options)
        for way, apart in itertools.product((0, 1, 2, 0), (0, 1)):
            ways = [way, (way + apart) % 3]
            model.zero_grad()
            model(torch.ones(2, 3), ways[dist.get_rank()]).sum().backward()
            for number, layer in enumerate(model.module.ways):
                gradient = layer.weight.grad
                if number in ways:
                    assert torch.equal(gradient, torch.full((3, 3), float(ways.count(number))))
                else:
                    assert gradient is None


def apex_1178_bf16_gradients_are_averaged():
    for options in ({}, {"delay_allreduce": True}, {"allreduce_always_fp32": True}):
        model = parallel.DistributedDataParallel(nn.Linear(3, 2).bfloat16(), **options)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 3), 1.0 + dist.get_rank(), dtype=torch.bfloat16)).sum().backward()
            assert torch.equal(model.module.weight.grad, torch.full((2, 3), 1.5, dtype=torch.bfloat16))


def parameters_that_came_by_a_back_door():
    for options in ({}, {"message_size": 1}, {"delay_allreduce": True}):
        model = parallel.DistributedDataParallel(nn.Linear(3, 2), **options)
        model(torch.ones(1, 3)).sum().backward()
        model.module._parameters["weight"] = nn.Parameter(torch.ones(2, 3))
        model.needs_refresh = True
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
            assert torch.equal(model.module.weight.grad, torch.full((2, 3), 1.5))
            assert not model.needs_refresh


RANKS = [
    parameters_that_came_by_a_back_door,
    apex_387_batches_of_different_sizes,
    apex_262_one_value_a_rank,
    apex_1768_channels_that_are_no_power_of_two,
    apex_913_evaluation_of_every_kind,
    apex_208_parameters_by_turns,
    apex_1178_bf16_gradients_are_averaged,
]


@pytest.mark.parametrize("check", RANKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check):
    run_ranks(check, 2, timeout=60.0)


def test_apex_262_one_value_alone_is_refused():
    with pytest.raises(ValueError, match="one value per channel has no variance"):
        parallel.SyncBatchNorm(3)(torch.ones(1, 3))
