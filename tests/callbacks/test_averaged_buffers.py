"""Averages and buffers: which are averaged, and that all others are the newest in validation, in checkpoints and after the fit."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import Callback, TrainingModule
from fabricamp.callbacks import EMA, EMAWeightAveraging, WeightAveraging
from fabricamp.errors import ConfigError
from fabricamp.nn import SyncBatchNorm
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer


class OwnNorm(nn.Module):
    """A norm of a user's, whose step puts new tensors in the place of its statistics."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(16))
        self.register_buffer("running_var", torch.ones(16))

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var = x.mean(0), x.var(0)
            self.running_mean = self.running_mean.lerp(mean.detach().to(self.running_mean), 0.1)
            self.running_var = self.running_var.lerp(var.detach().to(self.running_var), 0.1)
        return ((x - mean) / (var + 1e-3).sqrt()).to(x.dtype)


class Alone(nn.Module):
    """A buffer with the name of a statistic in a module that has not both."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))


STATISTICS = {"bn.running_mean", "bn.running_var", "sync.running_mean", "sync.running_var"}
STATISTICS |= {"own.running_mean", "own.running_var"}


class Net(TrainingModule):
    """Has a buffer of each kind that an average would spoil, each with its own way to change; ``bad``: batches that overflow."""

    def __init__(self, bad=(), spectral=True):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
            if spectral:
                nn.utils.parametrizations.spectral_norm(self.first)
                nn.utils.spectral_norm(self.second)
        self.bn = nn.BatchNorm1d(16)
        self.sync = SyncBatchNorm(16)
        self.own = OwnNorm()
        self.alone = Alone()
        self.register_buffer("causal", torch.triu(torch.full((3, 3), -math.inf), 1))
        self.register_buffer("kept", torch.ones(16))
        self.register_buffer("rows", F.normalize(torch.eye(4)))
        self.register_buffer("counter", torch.zeros(()))
        self.register_buffer("whole", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.bad = bad
        self.seen = []

    def forward(self, x):
        x = self.sync(self.bn(self.first(x)))
        return self.last(self.own(self.second(x)) * self.kept) @ self.causal.to(x.dtype).softmax(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        step = int(self.whole)
        self.kept[step % 16] = 1 - self.kept[step % 16]
        angle = torch.tensor(float(step))
        self.rows[0] = torch.stack([angle.cos(), angle.sin(), 0 * angle, 0 * angle])
        self.alone.running_mean.fill_(step)
        self.counter += 1
        self.whole += 1
        return F.cross_entropy(self(x * 1e30 if step in self.bad else x), y)

    def validation_step(self, batch, batch_idx):
        self.seen.append(buffers_of(self))
        assert bool(self(batch[0]).isfinite().all())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def buffers_of(module):
    return {name: value.clone() for name, value in module.named_buffers() if name in module.state_dict()}


class ByHand(Callback):
    """The buffers after each step, and their exponential average over applied steps."""

    def __init__(self, decay):
        self.decay = decay
        self.newest = []
        self.average = {}
        self.skipped = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.newest.append(buffers_of(pl_module))
        verdicts = trainer.precision_plugin.verdicts
        skipped = 0 if verdicts is None else int(verdicts.scaler.state.skipped)
        is_skipped, self.skipped = skipped > self.skipped, skipped
        for name, value in self.newest[-1].items():
            if name in self.average and not is_skipped:
                self.average[name].lerp_(value.float(), 1 - self.decay)
            elif name not in self.average:
                self.average[name] = value.to(torch.float32, copy=True)


def fit(*callbacks, module=None, ckpt_path=None, **options):
    torch.manual_seed(0)
    module = Net() if module is None else module
    limit = {} if "max_steps" in options else {"max_epochs": 2}
    trainer = quiet_trainer(num_sanity_val_steps=0, callbacks=list(callbacks), **limit, **options)
    trainer.fit(module, loader(32, 4, shuffle=True), loader(8, 8), ckpt_path=ckpt_path)
    return trainer, module


def same(one, two):
    """Whether two dicts of tensors hold the same names and values; nan equals nan."""
    return one.keys() == two.keys() and all(
        torch.equal(one[name].nan_to_num(7), two[name].nan_to_num(7)) for name in one
    )


def without(buffers, names):
    return {name: value for name, value in buffers.items() if name not in names}


def rounded(average, value, count):
    """An average of equal values that rounds them."""
    return 0.9 * average + 0.1 * value


AVERAGES = {
    "EMA": functools.partial(EMA, 0.9),
    "EMAWeightAveraging": functools.partial(EMAWeightAveraging, decay=0.9),
    "avg_fn": functools.partial(WeightAveraging, avg_fn=rounded),
}


@pytest.mark.parametrize(
    ("average", "precision"),
    [("EMA", "O0"), ("EMA", "O2"), ("EMA", "O3"), ("EMA", "O5"), ("EMAWeightAveraging", "O0"), ("avg_fn", "O2")],
)
def test_running_statistics_alone_are_averaged(tmp_path, average, precision):
    hand = ByHand(0.9)
    trainer, module = fit(AVERAGES[average](), hand, precision=precision)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    file = torch.load(tmp_path / "end.ckpt", weights_only=True)
    for newest, seen in zip((hand.newest[7], hand.newest[15]), module.seen, strict=True):
        assert same(without(seen, STATISTICS), without(newest, STATISTICS))
    for state in (buffers_of(module), file["state_dict"], file["current_model_state"]):
        for name, value in without(hand.newest[-1], STATISTICS).items():
            assert torch.equal(state[name], value.to(state[name].dtype)), name
    for name in STATISTICS:
        seen = module.seen[-1][name]
        torch.testing.assert_close(seen, hand.average[name].to(seen.dtype))
        assert not torch.equal(seen, hand.newest[-1][name])
        assert torch.equal(file["current_model_state"][name], hand.newest[-1][name])


@pytest.mark.parametrize("average", [EMA(0.9), WeightAveraging(device="cpu")], ids=["EMA", "WeightAveraging"])
@pytest.mark.parametrize("kind", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_vectors_of_spectral_norm_keep_their_length(kind, average):
    class Turning(TrainingModule):
        """Each epoch pulls another direction, so that the first singular vector moves."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = kind(nn.Linear(8, 8, bias=False))
            self.lengths = []

        def training_step(self, batch, batch_idx):
            direction = torch.eye(8)[self.current_epoch]
            return -10 * (self.net(direction[None]) @ direction).sum()

        def validation_step(self, batch, batch_idx):
            self.lengths += [float(value.norm()) for value in self.net.buffers()]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    _, module = fit(average, module=Turning())
    assert len(module.lengths) == 4
    assert module.lengths == pytest.approx([1] * 4, abs=1e-5)


# -- use_buffers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [EMA, functools.partial(EMAWeightAveraging, None)])
def test_named_buffers_are_averaged_too(average):
    hand = ByHand(0.9)
    _, module = fit(average(decay=0.9, use_buffers=["rows", "alone.running_mean"]), hand)
    averaged = {*STATISTICS, "rows", "alone.running_mean"}
    for name in averaged:
        torch.testing.assert_close(module.seen[-1][name], hand.average[name])
    assert same(without(module.seen[-1], averaged), without(hand.newest[-1], averaged))


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_all_floating_buffers_are_averaged_on_demand(average, precision):
    class Masked(Net):
        """Constants that a rounded sum would change, and an element that is finite from step 4 to 11 only."""

        def __init__(self):
            super().__init__()
            self.register_buffer("constants", torch.rand(64, generator=torch.Generator().manual_seed(1)))
            self.register_buffer("opened", torch.tensor([-math.inf, 1.0]))

        def training_step(self, batch, batch_idx):
            if int(self.whole) in (4, 12):
                self.opened[0] = 2.0 if int(self.whole) == 4 else -math.inf
            return super().training_step(batch, batch_idx)

    hand = ByHand(0.9)
    _, module = fit(AVERAGES[average](use_buffers=True), hand, module=Masked(), precision=precision)
    constant = ("constants", "causal")
    for seen in module.seen:
        for name in constant:
            assert torch.equal(seen[name], hand.newest[0][name]), name
    assert module.seen[0]["opened"][0] == 2.0
    assert module.seen[1]["opened"].tolist() == [-math.inf, 1.0]
    for name in ("kept", "rows", "counter", "alone.running_mean", *STATISTICS):
        seen = module.seen[-1][name]
        torch.testing.assert_close(seen, hand.average[name].to(seen.dtype))
    assert torch.equal(module.whole, hand.newest[-1]["whole"])


def test_without_buffers_all_stay_the_modules():
    hand = ByHand(0.9)
    _, module = fit(EMA(0.9, use_buffers=False), hand)
    assert same(module.seen[-1], hand.newest[-1])
    assert same(buffers_of(module), hand.newest[-1])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["causl"], "no floating-point buffer 'causl'; did you mean 'causal'"),
        (["whole"], r"no floating-point buffer 'whole'.*known: .*counter"),
        (["passing"], "no floating-point buffer 'passing'"),
        (["last.weight"], "no floating-point buffer 'last.weight'"),
    ],
)
def test_names_of_no_buffer_that_can_be_averaged(names, words):
    with pytest.raises(ConfigError, match=rf"EMA\(use_buffers=.*{words}"):
        fit(EMA(use_buffers=names))


@pytest.mark.parametrize("given", ["causal", 1, {"causal": True}])
def test_what_names_no_buffers(given):
    with pytest.raises(ConfigError, match=r"EMA\(use_buffers=.*: give a list of buffers' names, True, False or None"):
        EMA(use_buffers=given)


@pytest.mark.parametrize(
    ("use_buffers", "words"),
    [
        (
            None,
            "the buffers bn.running_mean, bn.running_var, sync.running_mean and 3 more; other buffers stay the module's: causal,",
        ),
        (["rows"], "the buffers rows, bn.running_mean, bn.running_var and 4 more; other buffers stay"),
        (False, "EMA averages 10 parameters; other buffers stay the module's: causal, kept, rows and 16 more"),
    ],
)
def test_a_line_says_what_is_averaged(use_buffers, words, caplog):
    fit(EMA(use_buffers=use_buffers))
    (line,) = [line for line in caplog.messages if line.startswith("EMA averages 10 parameters")]
    assert words in line


# -- steps that overflow -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*AVERAGES.values(), lambda: EMA(0.9, every=3)], ids=[*AVERAGES, "every 3"])
def test_statistics_that_overflowed_stay_out(tmp_path, make, caplog):
    """Batch 9 overflows in the forward: its step is skipped, and the module's own statistics are lost from then on."""
    hand = ByHand(0.9)
    trainer, module = fit(make(), hand, module=Net(bad=(9,)), precision="O2")
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert trainer.skipped_steps >= 1
    assert not bool(hand.newest[-1]["bn.running_var"].isfinite().all())
    state = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
    for buffers in (*module.seen, buffers_of(module), state):
        assert all(bool(buffers[name].isfinite().all()) for name in STATISTICS)
    assert caplog.text.count("are inf or nan since a forward that overflowed") == 1


@pytest.mark.parametrize("average", AVERAGES)
def test_a_skipped_step_moves_no_buffers_average(average):
    class Widest(Net):
        """Holds the largest input of the last step alone: inf in the step that is skipped."""

        def __init__(self):
            super().__init__(bad=(9,))
            self.register_buffer("widest", torch.zeros(()))

        def forward(self, x):
            self.widest.copy_(x.detach().abs().max())
            return super().forward(x)

    hand = ByHand(0.9)
    _, module = fit(AVERAGES[average](use_buffers=["widest"]), hand, module=Widest(), precision="O2")
    assert math.isinf(hand.newest[9]["widest"])
    torch.testing.assert_close(module.seen[-1]["widest"], hand.average["widest"].half())


def test_a_start_with_lost_statistics_recovers():
    class Again(Net):
        """Its own statistics are not finite before the first step, and are set again."""

        def on_train_start(self):
            self.bn.running_mean.fill_(math.nan)

        def training_step(self, batch, batch_idx):
            if self.global_step == 3:
                self.bn.reset_running_stats()
            return super().training_step(batch, batch_idx)

    _, module = fit(EMA(0.9), module=Again())
    assert bool(module.seen[0]["bn.running_mean"].isfinite().all())


# -- resumed runs and ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_averages_of_other_buffers_in_a_file_are_left_out(tmp_path, precision):
    """As in files of 0.2.0, whose averages hold all floating-point buffers."""
    _, module = fit(EMA(0.9), precision=precision)
    cut, _ = fit(EMA(0.9), precision=precision, max_steps=11)
    cut.save_checkpoint(tmp_path / "cut.ckpt")
    file = torch.load(tmp_path / "cut.ckpt", weights_only=True)
    spoilt = [name for name, value in without(buffers_of(Net()), STATISTICS).items() if value.is_floating_point()]
    for name in spoilt:
        file["state_dict"][name] = torch.full_like(file["state_dict"][name], math.nan)
    del file["checksum"]
    torch.save(file, tmp_path / "cut.ckpt")
    _, again = fit(EMA(0.9), precision=precision, ckpt_path=tmp_path / "cut.ckpt")
    assert same(buffers_of(module), buffers_of(again))
    assert same(dict(module.named_parameters()), dict(again.named_parameters()))
    assert same(module.seen[-1], again.seen[-1])
    fresh = Net()
    evaluator = quiet_trainer(callbacks=[EMA(0.9)], precision=precision)
    evaluator.validate(fresh, loader(8, 8), ckpt_path=tmp_path / "cut.ckpt", verbose=False, weights_only=True)
    for name in spoilt:
        assert torch.equal(fresh.seen[0][name].float(), file["current_model_state"][name].float()), name
    for name in STATISTICS:
        assert torch.equal(fresh.seen[0][name].float(), file["state_dict"][name].float()), name


def on_ranks(strategy, precision):
    hand = ByHand(0.9)
    module = Net(spectral=strategy != "fsdp")  # torch's does not run with the dtypes of FSDP
    fit(EMA(0.9), hand, module=module, strategy=strategy, devices="auto", precision=precision)
    return module.seen[-1], hand.newest[-1], hand.average


@pytest.mark.parametrize(("strategy", "precision"), [("delayed_ddp", "O2"), ("ddp", "O0"), ("fsdp", "O4")])
def test_ranks_validate_with_one_set_of_buffers(strategy, precision):
    (first, newest, average), (second, _, _) = run_ranks(on_ranks, 2, strategy, precision)
    assert same(first, second)
    assert same(without(first, STATISTICS), without(newest, STATISTICS))
    for name in STATISTICS:
        torch.testing.assert_close(first[name], average[name].to(first[name].dtype))
