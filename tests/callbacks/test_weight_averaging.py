"""Averages of the weights: which steps count, which weights are validated and saved, and resumed runs."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from fabricamp import Callback, TrainingModule
from fabricamp.callbacks import EMA, EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from fabricamp.errors import ConfigError
from fabricamp.optimizers import FusedAdam
from fabricamp.optimizers.refusals import owned_parameters
from tests.distributed.ranks import run_ranks
from tests.inside import averaged_steps, replaced_weights
from tests.small import loader, quiet_trainer


class Net(TrainingModule):
    def __init__(self, fused=False, bad=()):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.fused = fused
        self.bad = bad
        self.batches = 0
        self.validated = []
        self.raises = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.batches += 1
        return loss * float("inf") if self.batches in self.bad else loss

    def validation_step(self, batch, batch_idx):
        if self.raises:
            raise RuntimeError("in the middle of it")
        self.validated.append({name: value.clone() for name, value in self.state_dict().items()})
        self.log("val_loss", self.validated[-1]["net.0.weight"].float().sum())

    test_step = validation_step

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.01) if self.fused else torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Callback):
    """The same average, computed by hand; it waits for the device to know which steps were skipped."""

    def __init__(self, decay, every=1, start=0):
        self.decay, self.every, self.start = decay, every, start
        self.average, self.count, self.step, self.applied = {}, 0, 0, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            return
        self.step, verdicts = trainer.global_step, trainer.precision_plugin.verdicts
        applied = self.step if verdicts is None else self.step - int(verdicts.scaler.state.skipped)
        if self.step < self.start or self.step % self.every:
            return
        moved, self.applied = applied > self.applied, applied
        names = [name for name, _ in pl_module.named_parameters()]
        values = dict(zip(names, owned_parameters(trainer.optimizers[0]), strict=True))
        values |= {name: value for name, value in pl_module.named_buffers() if value.is_floating_point()}
        for name, value in values.items():
            if self.count == 0:
                self.average[name] = value.detach().clone().float()
            elif moved:
                self.average[name].lerp_(value.detach().float(), 1 - self.decay)
        self.count += moved


def fit(*callbacks, max_epochs=3, save_at=None, fused=False, bad=(), validates=False, ckpt_path=None, **options):
    torch.manual_seed(0)
    limit = {"max_epochs": max_epochs} if save_at is None else {"max_steps": save_at}
    module = Net(fused, bad)
    trainer = quiet_trainer(**limit, num_sanity_val_steps=0, callbacks=list(callbacks), **options)
    loaders = (loader(32, 4, shuffle=True), loader(8, 4)) if validates else (loader(32, 4, shuffle=True),)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer, module


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def state_of(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


PRECISIONS = ("O0", "O1", "O2", "O3", "O4", "O5")
CADENCES = ((1, 0), (3, 5))
# -- which steps count -------------------------------------------------------------------------------------------------------------

PAIRS = [("O0", 3, False, (1, 0)), ("O1", 1, True, (1, 0)), ("O2", 1, False, (3, 5)), ("O2", 3, True, (1, 0))]
PAIRS += [("O5", 1, True, (3, 5)), ("O3", 1, False, (1, 0))]


def check_average(tmp_path, precision, accumulation, fused, cadence):
    """With loss scaling some steps overflow: between updates, in a step that is due, and all steps between two updates."""
    bad = (
        (1, 4, 5, 9, 16, 17, 18)
        if precision in ("O1", "O2") and accumulation == 1
        else (2, 11)
        if precision == "O2"
        else ()
    )
    hand, ours = ByHand(0.9, *cadence), EMA(0.9, *cadence)
    options = {"precision": precision, "accumulate_grad_batches": accumulation, "fused": fused, "bad": bad}
    trainer, module = fit(ours, hand, **options)
    assert trainer.skipped_steps == len(bad)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    file = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert int(file["averaging_state"]["n_averaged"]) == hand.count > 0
    for name, average in hand.average.items():
        # A share in device memory may round once more than a number.
        torch.testing.assert_close(file["state_dict"][name], average, rtol=1e-6, atol=1e-7)
        if precision != "O3":
            assert torch.equal(module.state_dict()[name], file["state_dict"][name])
    plain, raw = fit(**options)
    assert equal(raw.state_dict(), file["current_model_state"])
    assert plain.global_step == trainer.global_step


@pytest.mark.parametrize(("precision", "accumulation", "fused", "cadence"), PAIRS)
def test_applied_steps_are_averaged_once_each(tmp_path, precision, accumulation, fused, cadence):
    check_average(tmp_path, precision, accumulation, fused, cadence)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "accumulation", "fused", "cadence"), [*itertools.product(PRECISIONS, (1, 3), (False, True), CADENCES)]
)
def test_applied_steps_are_averaged_once_each_everywhere(tmp_path, precision, accumulation, fused, cadence):
    check_average(tmp_path, precision, accumulation, fused, cadence)


def torchs(averaged, epochs=3):
    torch.manual_seed(0)
    net = Net()
    model, optimizer, batches = averaged(net), net.configure_optimizers(), loader(32, 4, shuffle=True)
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            net.training_step(batch, 0).backward()
            optimizer.step()
            model.update_parameters(net)
    return model.module


@pytest.mark.parametrize(
    ("callback", "model", "rtol"),
    [
        (EMA(0.9), {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, 0),
        (EMAWeightAveraging(decay=0.9), {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, 0),
        (WeightAveraging(), {}, 1e-5),
        (WeightAveraging(avg_fn=get_ema_avg_fn(0.8)), {"avg_fn": get_ema_avg_fn(0.8)}, 0),
        (WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)), {"multi_avg_fn": get_ema_multi_avg_fn(0.7)}, 0),
    ],
)
def test_torchs_averaged_model_gives_the_same(callback, model, rtol):
    reference = torchs(lambda net: AveragedModel(net, use_buffers=True, **model))
    _, module = fit(callback)
    for (name, value), other in zip(module.state_dict().items(), reference.state_dict().values(), strict=True):
        if value.is_floating_point():
            torch.testing.assert_close(value, other, rtol=rtol, atol=rtol / 10, msg=name)


def test_functions_of_ones_own_are_not_called_for_skipped_steps(tmp_path):
    counts = []

    def mean(average, weight, count):
        counts.append(int(count))
        return average + (weight - average) / (count + 1)

    options = {"precision": "O1", "bad": (1, 4)}
    callbacks = WeightAveraging(), WeightAveraging(avg_fn=mean)
    (_, one), (_, two) = (fit(callback, **options) for callback in callbacks)
    assert max(counts) == 21
    for first, second in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)


def test_when_to_update():
    class Epochs(WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return epoch_idx is not None and epoch_idx >= 1

    _, module = fit(Epochs())
    ends = [fit(max_epochs=epochs)[1].state_dict()["net.0.weight"] for epochs in (2, 3)]
    torch.testing.assert_close(module.state_dict()["net.0.weight"], (ends[0] + ends[1]) / 2)
    ours = EMAWeightAveraging(update_every_n_steps=3, update_starting_at_step=5, update_starting_at_epoch=2)
    assert [step for step in range(14) if ours.should_update(step_idx=step)] == [6, 9, 12]
    assert [epoch for epoch in range(4) if ours.should_update(epoch_idx=epoch)] == [2, 3]
    assert not any(EMAWeightAveraging().should_update(epoch_idx=epoch) for epoch in range(4))
    assert [step for step in range(14) if EMA(every=4, start=5).should_update(step_idx=step - 1)] == [8, 12]


# -- validated and saved weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "dtype"), [("O0", torch.float32), ("O2", torch.float16)])
def test_the_average_is_validated_and_the_weights_go_on(precision, dtype):
    hand = ByHand(0.9)
    trainer, module = fit(EMA(0.9), hand, precision=precision, validates=True)
    seen, averaged = module.validated[-1], state_of(module)
    assert seen["net.0.weight"].dtype == dtype
    for name, value in hand.average.items():
        torch.testing.assert_close(seen[name], value.to(seen[name].dtype))
        torch.testing.assert_close(averaged[name], value)
    plain = state_of(fit(precision=precision, validates=True)[1])
    assert all(torch.equal(plain[name], value) for name, value in replaced_weights(trainer.callbacks[0]).items())
    assert not torch.equal(plain["net.0.weight"], averaged["net.0.weight"])
    trainer.test(module, loader(8, 4), verbose=False)
    assert equal(module.validated[-1], seen)
    assert equal(state_of(module), averaged)


@pytest.mark.parametrize("precision", ["O0", "O2", "O3"])
def test_weights_come_back_after_a_raise(precision):
    class Raises(Callback):
        def on_validation_start(self, trainer, pl_module):
            pl_module.raises = True

    ours, plain = fit_until_raise(EMA(0.5), Raises(), precision=precision), fit(max_epochs=1, precision=precision)[1]
    assert equal(state_of(ours), state_of(plain))


def fit_until_raise(*callbacks, **options):
    torch.manual_seed(0)
    module = Net()
    trainer = quiet_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=list(callbacks), **options)
    with pytest.raises(RuntimeError, match="in the middle of it"):
        trainer.fit(module, loader(32, 4, shuffle=True), loader(8, 4))
    return module


def test_checkpoints_have_both(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_weights_only=True, save_top_k=-1)
    trainer, module = fit(EMA(0.9), checkpoint, validates=True, enable_checkpointing=True)
    file = torch.load(checkpoint.best_model_path, weights_only=True)
    validated = next(one for one in module.validated if equal(one, file["state_dict"]))
    assert file["state_dict"].keys() == file["current_model_state"].keys() == module.state_dict().keys()
    assert not equal(file["state_dict"], file["current_model_state"])
    assert torch.equal(
        file["state_dict"]["net.1.num_batches_tracked"], file["current_model_state"]["net.1.num_batches_tracked"]
    )
    assert not torch.equal(file["state_dict"]["net.1.running_mean"], file["current_model_state"]["net.1.running_mean"])
    fresh = Net.load_from_checkpoint(checkpoint.best_model_path)
    assert equal(state_of(fresh), validated)
    trainer.test(module, loader(8, 4), ckpt_path=checkpoint.best_model_path, verbose=False)
    assert equal(module.validated[-1], validated)


def test_buffers_may_stay_the_modules_own():
    _, plain = fit()
    _, module = fit(WeightAveraging(use_buffers=False))
    assert all(torch.equal(one, two) for one, two in zip(module.buffers(), plain.buffers(), strict=True))
    assert not torch.equal(module.net[0].weight, plain.net[0].weight)
    _, elsewhere = fit(WeightAveraging(torch.device("cpu"), use_buffers=False))
    assert equal(state_of(module), state_of(elsewhere))


def test_before_the_start_there_is_no_average(tmp_path):
    trainer, module = fit(EMA(0.9, start=100), validates=True)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert "current_model_state" not in torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert equal(state_of(module), state_of(fit(validates=True)[1]))


def test_what_is_frozen_is_left_alone():
    class Frozen(Net):
        def configure_optimizers(self):
            self.net[0].requires_grad_(False)
            return torch.optim.SGD(self.net[3].parameters(), lr=0.1)

    module = Frozen()
    before = module.net[0].weight.clone()
    quiet_trainer(max_epochs=1, precision="O2", callbacks=[EMA(0.5)]).fit(module, loader())
    assert torch.equal(module.net[0].weight, before)  # also the bits that half precision cannot hold


# -- resumed runs ------------------------------------------------------------------------------------------------------------------

RESUMES = [("O0", 3, False, 5), ("O1", 1, True, 11), ("O2", 1, False, 8), ("O2", 3, True, 4), ("O5", 1, True, 13)]


def check_resume(tmp_path, precision, accumulation, fused, step):
    def options():
        return {"precision": precision, "accumulate_grad_batches": accumulation, "fused": fused, "validates": True}

    straight, module = fit(EMA(0.9, every=2), **options())
    cut, _ = fit(EMA(0.9, every=2), save_at=step, **options())
    cut.save_checkpoint(tmp_path / "cut.ckpt")
    resumed, again = fit(EMA(0.9, every=2), ckpt_path=tmp_path / "cut.ckpt", **options())
    assert equal(state_of(module), state_of(again))
    assert equal(replaced_weights(straight.callbacks[0]), replaced_weights(resumed.callbacks[0]))
    assert equal(module.validated[-1], again.validated[-1])
    assert averaged_steps(straight.callbacks[0]) == averaged_steps(resumed.callbacks[0])


@pytest.mark.parametrize(("precision", "accumulation", "fused", "step"), RESUMES)
def test_a_run_goes_on_bit_for_bit(tmp_path, precision, accumulation, fused, step):
    check_resume(tmp_path, precision, accumulation, fused, step)


def test_a_run_goes_on_from_before_an_update_whose_step_is_skipped(tmp_path):
    options = {"precision": "O1"}
    straight, module = fit(EMA(0.9, every=4), bad=(7, 8), **options)
    cut, _ = fit(EMA(0.9, every=4), save_at=6, **options)
    cut.save_checkpoint(tmp_path / "cut.ckpt")
    resumed, again = fit(EMA(0.9, every=4), ckpt_path=tmp_path / "cut.ckpt", bad=(1, 2), **options)
    assert averaged_steps(straight.callbacks[0]) == averaged_steps(resumed.callbacks[0]) == 6
    assert equal(state_of(module), state_of(again))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "accumulation", "fused", "step"), [*itertools.product(PRECISIONS, (1, 3), (False, True), (3, 6, 8))]
)
def test_a_run_goes_on_bit_for_bit_everywhere(tmp_path, precision, accumulation, fused, step):
    check_resume(tmp_path, precision, accumulation, fused, step)


def ranks(strategy, precision, folder):
    options = {"strategy": strategy, "devices": "auto", "precision": precision, "validates": True, "fused": True}
    hand = ByHand(0.9)
    _, module = fit(EMA(0.9), hand, **options)
    cut, _ = fit(EMA(0.9), save_at=6, **options)
    cut.save_checkpoint(f"{folder}/cut.ckpt")
    _, again = fit(EMA(0.9), ckpt_path=f"{folder}/cut.ckpt", **options)
    names = [name for name, _ in module.named_parameters()]
    near = all(torch.allclose(module.state_dict()[name], hand.average[name], rtol=1e-6) for name in names)
    return equal(state_of(module), state_of(again)), near, state_of(module), module.validated[-1]


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "O2"), ("delayed_ddp", "O0")])
def test_ranks_have_one_average(tmp_path, strategy, precision):
    first, second = run_ranks(ranks, 2, strategy, precision, str(tmp_path))
    assert first[:2] == second[:2] == (True, True)
    assert equal(first[2], second[2])
    assert equal(first[3], second[3])  # each rank has its own running statistics, and validates with rank 0's


def test_a_second_fit_begins_a_new_average():
    callback, module = EMA(0.9), Net()
    trainer = quiet_trainer(max_epochs=1, callbacks=[callback])
    trainer.fit(module, loader())
    assert averaged_steps(callback) == 8
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    assert averaged_steps(callback) == 8
    quiet_trainer(max_epochs=1, callbacks=[callback]).fit(Net(), loader())
    assert averaged_steps(callback) == 8
    assert pickle.loads(pickle.dumps(callback))._averages is None


# -- refused arguments -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EMA(1.5), r"EMA\(decay=1.5\): give a number from 0 to 1"),
        (lambda: EMA(every=0), r"EMA\(every=0\) is not allowed; give a whole number from 1"),
        (lambda: EMA(start="x"), "start='x'.*give a whole number"),
        (lambda: EMAWeightAveraging(decay="x"), "decay='x'.*give a number"),
        (lambda: EMAWeightAveraging(avg_fn=len), "follows from decay; use WeightAveraging"),
        (lambda: WeightAveraging(avg_fn=len, multi_avg_fn=len), "got avg_fn and multi_avg_fn; give one"),
        (lambda: WeightAveraging(avg_fn=3), r"avg_fn=3\): give a function"),
        (lambda: WeightAveraging(use_bufers=False), "has no argument 'use_bufers'; did you mean 'use_buffers'"),
        (lambda: EMAWeightAveraging(update_every=2), "EMAWeightAveraging has no argument 'update_every'"),
    ],
)
def test_arguments_that_cannot_be(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_one_average_at_a_time():
    with pytest.raises(
        ConfigError, match=r"EMA is one of 2 callbacks that average the weights \(EMA, WeightAveraging\)"
    ):
        fit(EMA(), WeightAveraging())
