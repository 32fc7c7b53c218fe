"""Stochastic weight averaging: schedule, average and BatchNorm statistics equal a loop by hand; resumed runs."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import SWALR, AveragedModel

from fabricamp import Callback, TrainingModule
from fabricamp.callbacks import EMA, StochasticWeightAveraging
from fabricamp.errors import ConfigError
from fabricamp.optimizers import FusedAdam
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer


class Net(TrainingModule):
    def __init__(self, fused=False, schedules=1):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.fused = fused
        self.schedules = schedules

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = FusedAdam(self.parameters(), lr=0.1) if self.fused else torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [ExponentialLR(optimizer, 0.9) for _ in range(self.schedules)]


class Rates(Callback):
    def __init__(self):
        self.rates = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def swa(**options):
    return StochasticWeightAveraging(**{"swa_lrs": 0.03, "swa_epoch_start": 2, "annealing_epochs": 2, **options})


def fit(*callbacks, max_epochs=4, fused=False, schedules=1, ckpt_path=None, **options):
    torch.manual_seed(0)
    module = Net(fused, schedules)
    trainer = quiet_trainer(max_epochs=max_epochs, callbacks=list(callbacks), **options)
    trainer.fit(module, loader(32, 4, shuffle=True), ckpt_path=ckpt_path)
    return trainer, module


def equal(one, two):
    return all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))


@pytest.mark.parametrize(("strategy", "schedules"), [("cos", 1), ("linear", 0)])
def test_a_loop_by_hand_gives_the_same(strategy, schedules):
    torch.manual_seed(0)
    net, batches, rates = Net(schedules=schedules), loader(32, 4, shuffle=True), []
    (optimizer,), schedulers = net.configure_optimizers()
    average = AveragedModel(net)
    for epoch in range(4):
        if epoch == 1:
            optimizer.param_groups[0]["initial_lr"] = 0.03
            schedulers = [SWALR(optimizer, 0.03, 2, strategy, last_epoch=4 if strategy == "cos" else -1)]
        if epoch >= 1:
            average.update_parameters(net)
        rates.append(optimizer.param_groups[0]["lr"])
        for batch in batches:
            optimizer.zero_grad()
            net.training_step(batch, 0).backward()
            optimizer.step()
        for one in schedulers:
            one.step()
    net.load_state_dict(average.module.state_dict())
    torch.optim.swa_utils.update_bn([x for x, _ in batches], net.net)
    seen = Rates()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "error", ".*lr_scheduler.step"
        )  # torch warns unless an optimizer step comes before the first schedule step
        trainer, module = fit(swa(annealing_strategy=strategy), seen, schedules=schedules)
    assert seen.rates == rates
    for name, value in net.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, msg=name)
    assert module.net[1].momentum == 0.1
    assert isinstance(module.lr_schedulers(), SWALR)
    assert (trainer.current_epoch, trainer.global_step) == (4, 32)


def test_a_function_of_ones_own_and_a_share_of_the_epochs():
    counts = []

    def last(average, weight, count):
        counts.append(int(count))
        return weight

    one, two = swa(swa_epoch_start=0.5, avg_fn=last), swa(swa_epoch_start=1.0, avg_fn=None, device=None)
    (_, first), (_, second) = fit(one, schedules=0), fit(two, schedules=0)
    assert (one.swa_start, one.swa_end, two.swa_start) == (1, 3, 3)
    assert set(counts) == {1, 2}
    assert not equal(first, second)  # the learning rates on the way differ


PRECISIONS = ("O0", "O1", "O2", "O3", "O4", "O5")
PAIRS = [("O0", 3, False, 5), ("O2", 1, True, 17), ("O5", 3, True, 8), ("O1", 1, False, 24)]


def check_resume(tmp_path, precision, accumulation, fused, step):
    options = {"precision": precision, "accumulate_grad_batches": accumulation, "fused": fused}
    _, straight = fit(swa(), **options)
    torch.manual_seed(0)
    cut = quiet_trainer(
        max_epochs=4, callbacks=[swa(), Stops(step)], precision=precision, accumulate_grad_batches=accumulation
    )
    cut.fit(Net(fused), loader(32, 4, shuffle=True))
    cut.save_checkpoint(tmp_path / "cut.ckpt")
    file = torch.load(tmp_path / "cut.ckpt", weights_only=True)
    if cut.current_epoch >= 1:
        average = file["callbacks"]["StochasticWeightAveraging"]["average_model_state"]
        assert average.keys() == file["state_dict"].keys()
        assert not torch.equal(average["net.0.weight"], file["state_dict"]["net.0.weight"])
    resumed, module = fit(swa(), ckpt_path=tmp_path / "cut.ckpt", **options)
    assert equal(straight, module)
    assert isinstance(resumed.lr_scheduler_configs[0].scheduler, SWALR)


class Stops(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step >= self.step


@pytest.mark.parametrize(("precision", "accumulation", "fused", "step"), PAIRS)
def test_a_run_goes_on_bit_for_bit(tmp_path, precision, accumulation, fused, step):
    check_resume(tmp_path, precision, accumulation, fused, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "accumulation", "fused", "step"), [*itertools.product(PRECISIONS, (1, 3), (False, True), (2, 7, 9))]
)
def test_a_run_goes_on_bit_for_bit_everywhere(tmp_path, precision, accumulation, fused, step):
    check_resume(tmp_path, precision, accumulation, fused, step)


def test_a_run_that_ends_before_leaves_the_weights():
    trainer, module = fit(swa(), Stops(20))
    assert trainer.global_step == 20
    assert module.net[1].num_batches_tracked == 20


@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_without_max_epochs_the_run_ends_with_the_average(strategy):
    starts = []

    class Starts(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            starts.append(pl_module.net[0].weight.detach().clone())

    _, module = fit(swa(annealing_strategy=strategy), Starts(), max_epochs=-1, max_steps=4 * 8)
    torch.testing.assert_close(module.net[0].weight, torch.stack(starts[1:]).mean(0))
    assert len(starts) == 4


def test_the_pass_for_batchnorm_logs_nothing():
    class Losses(Callback):
        def on_fit_end(self, trainer, pl_module):
            self.loss = trainer.progress_bar_metrics["loss"]

        def on_train_epoch_end(self, trainer, pl_module):
            self.last = trainer.progress_bar_metrics["loss"]

    losses = Losses()
    trainer, module = fit(swa(), losses)
    assert losses.loss == losses.last
    assert trainer.global_step == 32
    assert module.net[1].num_batches_tracked == 8  # only the batches of the final pass


def test_frozen_statistics_stay():
    class Frozen(Net):
        def on_train_start(self):
            self.net[1].eval()

    module = Frozen()
    module.net[1].running_var.fill_(2.0)
    quiet_trainer(max_epochs=4, callbacks=[swa()]).fit(module, loader())
    assert torch.equal(module.net[1].running_var, torch.full((16,), 2.0))


def ranks(strategy, precision, folder):
    options = {"strategy": strategy, "devices": "auto", "precision": precision}
    _, straight = fit(swa(), **options)
    cut, _ = fit(swa(), Stops(10), **options)
    cut.save_checkpoint(f"{folder}/cut.ckpt")
    _, module = fit(swa(), ckpt_path=f"{folder}/cut.ckpt", **options)
    return equal(straight, module), [value.detach() for value in straight.state_dict().values()]


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "O0"), ("delayed_ddp", "O2")])
def test_ranks_have_one_average(tmp_path, strategy, precision):
    (one, first), (two, second) = run_ranks(ranks, 2, strategy, precision, str(tmp_path))
    assert one
    assert two
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"swa_lrs": 0.0}, r"swa_lrs=0.0\): give a number above 0"),
        ({"swa_lrs": [0.1, "x"]}, "swa_lrs='x'.*give a number"),
        ({"swa_epoch_start": 0}, r"swa_epoch_start=0\): give a whole number from 1"),
        ({"swa_epoch_start": 1.5}, "share .* from 0.0 to 1.0"),
        ({"annealing_epochs": -1}, "a whole number from 0"),
        ({"annealing_strategy": "exp"}, "'cos' or 'linear'"),
        ({"avg_fn": 3}, "a function or None"),
    ],
)
def test_arguments_that_cannot_be(options, words):
    with pytest.raises(ConfigError, match=words):
        swa(**options)


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="cannot work with 2 schedules"):
        fit(swa(), schedules=2)
    with pytest.raises(ConfigError, match=r"swa_epoch_start=0.5, a share of max_epochs=-1: give a whole number"):
        fit(swa(swa_epoch_start=0.5), max_epochs=-1, max_steps=3)
    with pytest.raises(ConfigError, match="for 1 groups of parameters"):
        fit(swa(swa_lrs=[0.1, 0.2]))
    with pytest.raises(ConfigError, match="2 callbacks that average"):
        fit(swa(), EMA())
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="cannot work with manual optimization"):
        quiet_trainer(max_epochs=4, callbacks=[swa()]).fit(module, loader())
