"""Tuner.lr_find: its result, and that it changes only the learning rate."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fabricamp import ConfigError, seed_everything
from fabricamp.callbacks import LearningRateFinder, ModelCheckpoint
from fabricamp.loggers import CSVLogger
from fabricamp.tuner import Tuner
from fabricamp.tuner.lr_finder import LRFinder
from tests.distributed.ranks import run_ranks
from tests.inside import settings
from tests.small import Classifier, loader, quiet_trainer
from tests.tuner.modules import Tried, content

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5", "16-mixed", "bf16-true", "64-true"]


def drawn():
    return random.random(), np.random.rand(), torch.rand(1).item()


def files():
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def everything(trainer, module):
    return {
        "module": content(module),
        "trainer": repr(settings(trainer)) + repr(trainer) + repr(trainer.callback_metrics),
        "callbacks": [(id(one), one.state_dict()) for one in trainer.callbacks],
        "loggers": [id(one) for one in trainer.loggers],
        "folder": (trainer.log_dir, trainer.ckpt_path, trainer.precision_plugin, trainer.skipped_steps),
    }


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("fitted", [False, True])
def test_only_the_rate_is_changed(fails, fitted):
    seed_everything(1)
    trainer = quiet_trainer(
        max_steps=3,
        logger=CSVLogger("logs"),
        callbacks=[ModelCheckpoint("kept", save_top_k=-1, every_n_train_steps=1)],
        enable_checkpointing=True,
        precision="O2",
    )
    module = Tried()
    if fitted:
        trainer.fit(module)
    seed_everything(2)
    before, written, expected = everything(trainer, module), files(), drawn()
    seed_everything(2)
    if fails:
        module.counts["raises at"] = 5
        module.on_train_batch_end = lambda *_: 1 / 0 if module.counts["steps"] % 50 == 9 else None
        before = everything(trainer, module)
        with pytest.raises(ZeroDivisionError):
            Tuner(trainer).lr_find(module, num_training=20)
    else:
        finder = Tuner(trainer).lr_find(module, num_training=20, early_stop_threshold=None, update_attr=False)
        assert len(finder.results["loss"]) == 20
    assert everything(trainer, module) == before
    assert files() == written
    assert drawn() == expected


def test_a_fit_behind_it_is_the_fit_without_it():
    def weights(search):
        seed_everything(7)
        module, trainer = Tried(), quiet_trainer(max_epochs=2)
        if search:
            Tuner(trainer).lr_find(module, update_attr=False)
        trainer.fit(module)
        return trainer.global_step, content(module)["tensors"]

    assert weights(search=True) == weights(search=False)


def test_sets_the_rate_where_the_module_keeps_it_and_draws_the_curve(caplog):
    seed_everything(1)
    module, trainer = Tried(), quiet_trainer(max_steps=2, enable_model_summary=True)
    finder = Tuner(trainer).lr_find(module, min_lr=1e-4, max_lr=1.0, num_training=30, early_stop_threshold=None)
    assert module.hparams.lr == finder.suggestion()
    assert finder.results["lr"][0] == 1e-4
    assert finder.results["lr"][-1] == pytest.approx(1.0)
    assert f"30 learning rates from 0.0001 to 1, suggestion {finder.suggestion():.3g}" in caplog.text
    picture = str(finder).splitlines()
    assert sum(line.count("*") + line.count("O") for line in picture[:-1]) == 30
    assert picture[-1].endswith(f"suggestion O: {finder.suggestion():.4g}")
    trainer.fit(module)
    assert trainer.optimizers[0].param_groups[0]["lr"] == finder.suggestion()


def test_the_curve_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib").use("Agg")
    finder = LRFinder("exponential", 0.001, 1.0, num_training=20)
    finder.results = {"lr": [1.4**k for k in range(20)], "loss": [3 - math.tanh(k - 13) for k in range(20)]}
    figure = finder.plot(suggest=True)
    figure.savefig(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert axes.lines[1].get_xdata() == [finder.suggestion()]
    assert finder.plot(ax=axes) is figure


def test_without_matplotlib_the_picture_is_refused_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib.*print\(finder\)"):
        LRFinder("linear", 0.1, 1.0, num_training=2).plot()


def test_a_rate_for_each_step_of_several_batches_and_groups():
    class Groups(Classifier):
        def configure_optimizers(self):
            rates = self.rates = []
            groups = [
                {"params": self.net[0].parameters()},
                {"params": self.net[2].parameters(), "lr": torch.tensor(3.0)},
            ]
            optimizer = torch.optim.SGD(groups, lr=0.5)
            optimizer.register_step_pre_hook(
                lambda one, *_: rates.append([float(group["lr"]) for group in one.param_groups])
            )
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)]

    rates = []
    module = Groups()
    module.on_train_end = lambda: rates.extend(module.rates)
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=3)
    finder = Tuner(trainer).lr_find(module, loader(), min_lr=0.1, max_lr=0.5, num_training=5, mode="linear")
    assert finder.results["lr"] == pytest.approx([0.1, 0.26, 0.34, 0.42, 0.5])
    assert rates == [pytest.approx([rate, rate]) for rate in finder.results["lr"]]


@pytest.mark.filterwarnings("ignore:Encountered `nan` values")  # torchmetrics warns about the intended nan loss
def test_a_loss_that_grows_or_is_no_number_ends_it():
    trainer = quiet_trainer()
    finder = Tuner(trainer).lr_find(Tried(), min_lr=1e-3, max_lr=1e6, num_training=60)
    assert 5 < len(finder.results["loss"]) < 60
    assert not finder.results["loss"][-1] <= 4 * min(finder.results["loss"][:-1])
    raising = quiet_trainer(nan_policy="raise")
    finder = Tuner(raising).lr_find(Tried(), min_lr=1e-3, max_lr=1e30, num_training=60, early_stop_threshold=None)
    assert len(finder.results["lr"]) == len(finder.results["loss"]) < 60
    assert finder.suggestion() is not None


class TwoOptimizers(Tried):
    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.SGD(self.net[4].parameters(), 0.1)]


class NoOptimizer(Tried):
    def configure_optimizers(self):
        return None


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (TwoOptimizers, {}, "configure_optimizers of TwoOptimizers returned 2"),
        (NoOptimizer, {}, "configure_optimizers of NoOptimizer returned 0"),
        (Tried, {"method": "validate"}, "only 'fit'"),
        (Tried, {"mode": "exponental"}, "did you mean 'exponential'"),
        (Tried, {"min_lr": 1.0, "max_lr": 0.1}, "the smaller one as min_lr"),
        (Tried, {"num_training": 0}, "give 1 or more"),
        (Tried, {"num_training": "many"}, "num_training_steps='many'.*a whole number"),
        (Tried, {"min_lr": "1e-5"}, "min_lr='1e-5'.*a number"),
        (Tried, {"attr_name": "rate"}, "no 'rate' that lr_find could set"),
        (Tried, {"dataloaders": []}, "takes train_dataloaders"),
    ],
)
def test_what_cannot_work_is_refused_by_name(module, options, words):
    with pytest.raises(ConfigError, match=words):
        Tuner(quiet_trainer()).lr_find(module(), **options)


def test_parameters_without_a_shape_are_refused():
    module = Tried()
    module.late = torch.nn.LazyLinear(3)
    with pytest.raises(ConfigError, match="late.weight has no shape yet"):
        Tuner(quiet_trainer()).lr_find(module)


def test_a_trial_run_has_no_search():
    module = Tried()
    assert Tuner(quiet_trainer(fast_dev_run=True)).lr_find(module) is None
    assert module.hparams.lr == 0.1


def test_the_callback_searches_before_the_fit_and_a_resumed_run_has_its_rate(tmp_path):
    def fit(module, ckpt_path=None, **options):
        seed_everything(1)
        finder = LearningRateFinder(1e-4, 1.0, 30)
        trainer = quiet_trainer(callbacks=[finder], **options)
        trainer.fit(module, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "file.ckpt")
        return finder, trainer

    straight, module = Tried(), Tried()
    fit(straight, max_steps=6)
    finder, trainer = fit(module, max_steps=3)
    assert module.hparams.lr == finder.optimal_lr.suggestion() == trainer.optimizers[0].param_groups[0]["lr"]
    resumed = Tried()
    finder, trainer = fit(resumed, tmp_path / "file.ckpt", max_steps=6)
    assert finder.optimal_lr is None  # no second search
    assert resumed.hparams.lr == straight.hparams.lr
    assert [one.tolist() for one in resumed.parameters()] == [one.tolist() for one in straight.parameters()]


def test_within_a_fit_the_search_is_refused_with_another_way():
    class Milestones(LearningRateFinder):
        def on_fit_start(self, *args):
            return

        def on_train_epoch_start(self, trainer, pl_module):
            self.lr_find(trainer, pl_module)

    with pytest.raises(ConfigError, match="a search would change that run; end the fit .* and fit again"):
        quiet_trainer(callbacks=[Milestones()], max_steps=2).fit(Tried())


def found_with(level, strategy):
    seed_everything(4, verbose=False)
    trainer = quiet_trainer(precision=level, strategy=strategy, devices="auto", max_steps=2)
    module = Tried()
    before = content(module)
    finder = Tuner(trainer).lr_find(module, min_lr=1e-4, max_lr=0.5, num_training=14, update_attr=False)
    assert content(module) == before, (level, strategy)
    assert len(finder.results["loss"]) >= 12, (level, strategy)
    trainer.fit(module)
    return finder.results, finder.suggestion(), [one.double().sum().item() for one in module.parameters()]


@pytest.mark.parametrize("level", LEVELS)
def test_every_precision(level):
    losses = found_with(level, "single")[0]["loss"]
    assert losses == pytest.approx(found_with("O0", "single")[0]["loss"], rel=0.05)


def on_two_ranks():
    cells = zip(LEVELS, ["ddp", "delayed_ddp"] * 5, strict=False)
    found = [found_with(level, strategy) for level, strategy in cells]
    return dist.get_rank(), found


def test_precisions_with_both_strategies_on_two_ranks():
    (_, first), (_, second) = run_ranks(on_two_ranks, 2)
    assert first == second


def test_workers_that_the_trainer_starts_send_back_what_they_found():
    module = Tried()
    before = content(module)
    trainer = quiet_trainer(devices=2, strategy="ddp", start_method="fork")
    finder = Tuner(trainer).lr_find(module, min_lr=1e-4, max_lr=0.5, num_training=14)
    assert module.hparams.lr == finder.suggestion()
    module.hparams.lr = 0.1
    assert content(module) == before


def test_the_module_stays_attached():
    module, trainer = Tried(), quiet_trainer(max_steps=3)
    Tuner(trainer).lr_find(module, num_training=5)
    assert module.trainer is trainer
