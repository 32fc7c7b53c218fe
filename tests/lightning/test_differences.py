"""In a program written for Lightning, rows of "What stays different on purpose" follow Lightning, or a log line reports them.

Rows t of ``lightning_repros.py`` compare more of these rows with Lightning itself.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback, ConfigError, habits
from fabricamp._utils.say_once import say_once
from fabricamp.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from fabricamp.loggers import CSVLogger
from fabricamp.tuner import Tuner
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, data, loader, quiet_trainer


@pytest.fixture
def for_lightning(monkeypatch):
    monkeypatch.setattr(habits, "_present", habits.LIGHTNING)
    say_once.cache_clear()


def fit(module=None, train=None, ckpt_path=None, **options):
    trainer = quiet_trainer(**{"max_epochs": 1, **options})
    trainer.fit(module or Classifier(), train or loader(8), loader(4), ckpt_path=ckpt_path)
    return trainer


# -- as in Lightning


class Cycles(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_cycle_is_moved_after_its_last_step(for_lightning):
    trainer = fit(Cycles(), loader(20))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0188, rel=1e-2)


def test_a_cycle_stays_at_its_last_rate():
    trainer = fit(Cycles(), loader(20))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(4e-7)


class Scheduled(Classifier):
    def __init__(self, frequency=1, overflow_at=-1):
        super().__init__()
        self.frequency = frequency
        self.overflow_at = overflow_at
        self.rates = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.global_step == self.overflow_at else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": self.frequency}]


def test_a_schedules_frequency_counts_the_batches_of_an_epoch(for_lightning, monkeypatch):
    module = Scheduled(frequency=3)
    fit(module, loader(16), max_epochs=2)
    assert module.rates == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]
    monkeypatch.setattr(habits, "_present", habits.NATIVE)
    module = Scheduled(frequency=3)
    fit(module, loader(16), max_epochs=2)
    assert module.rates == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_a_resumed_run_counts_the_batches_of_its_epoch_on(for_lightning, tmp_path):
    class Cut(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    straight, resumed = Scheduled(frequency=3), Scheduled(frequency=3)
    fit(straight, loader(20), callbacks=[Cut()])
    fit(resumed, loader(20), ckpt_path=tmp_path / "a.ckpt")
    assert resumed.rates == straight.rates[2:] == [0.5, 0.5, 0.5]


def test_a_schedule_moves_with_a_step_that_is_skipped(for_lightning):
    module = Scheduled(overflow_at=1)
    trainer = fit(module, loader(24), precision="O2")
    assert trainer.skipped_steps == 1
    assert module.rates == [0.5**step for step in range(1, 7)]


def test_a_step_without_a_loss_runs(for_lightning, caplog):
    class Nothing(Classifier):
        def training_step(self, batch, batch_idx):
            self.net(batch[0])

    assert fit(Nothing()).global_step == 2
    lines = [line for line in caplog.messages if "None" in line]
    assert lines == [
        "epoch 1 ended without a step: training_step returned None for each of its batches; return the loss"
    ]


def test_natively_a_step_without_a_loss_is_refused():
    class Nothing(Classifier):
        def training_step(self, batch, batch_idx):
            self.net(batch[0])

    with pytest.raises(ConfigError, match="returns no value"):
        fit(Nothing())


# -- a log line


class Alternating(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx == 1:
            for optimizer in self.optimizers():
                optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.net[0], self.net[2])]


class Warming(Classifier):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


class Looking(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("seen", 1.0, on_step=True)


class WithBatchNorm(Classifier):
    def __init__(self):
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(16))


class Stages(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class Frozen(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda parameter: parameter.requires_grad, self.parameters()), 0.1)


def used():
    module = Alternating()
    module.net(torch.ones(1, 8)).sum().backward()
    return module


SWA = {"swa_lrs": 0.1, "swa_epoch_start": 1}

RUNS = {
    "several optimizers": (Alternating, {}, "the axis of logs count each training_step once"),
    "gradients at a validation": (Alternating, {"val_check_interval": 1}, "gradients accumulated by hand stay"),
    "optimizer_step": (Warming, {}, "Warming.optimizer_step is called after training_step"),
    "gradients before": (used, {}, "gradients from before fit are cleared"),
    "overfit": (Classifier, {"overfit_batches": 1}, "overfit_batches validates on the batches that it trains on"),
    "bf16-true": (Classifier, {"precision": "bf16-true"}, "bf16-true: after the run the module is fp32 again"),
    "workers": (Classifier, {"train": DataLoader(data(8), 4, num_workers=1)}, "workers have other random numbers"),
    "on_step": (Looking, {}, "on_step=True in an evaluation logs the last batch's value"),
    "average, late": (
        Classifier,
        {"callbacks": [EMAWeightAveraging(update_starting_at_step=1)]},
        "EMAWeightAveraging: before the first average",
    ),
    "average, buffers": (
        WithBatchNorm,
        {"callbacks": [WeightAveraging()]},
        "buffers other than running statistics are the module's",
    ),
    "average, skips": (
        Classifier,
        {"callbacks": [WeightAveraging()], "precision": "O2"},
        "a step that is skipped for overflow is not averaged",
    ),
    "SWA": (WithBatchNorm, {"callbacks": [StochasticWeightAveraging(**SWA)]}, "Lightning's epoch for it also logs"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_to_which_a_row_applies_says_so(name, for_lightning, caplog):
    module, options, words = RUNS[name]
    fit(module(), **options)
    found = [line for line in caplog.messages if words in line]
    assert len(found) == 1
    assert found[0].endswith("(fabricamp help from-lightning)")


def test_the_line_on_several_optimizers_says_which_max_steps_trains_as_long(for_lightning, caplog):
    fit(Alternating(), loader(16), max_steps=3)
    (line,) = [line for line in caplog.messages if "count each training_step once" in line]
    assert (
        "max_steps=3 makes so many training_steps here: where each steps all optimizers, write max_steps=2 to" in line
    )
    caplog.clear()
    fit(Alternating(), loader(16))
    assert "to train as long" not in caplog.text


@pytest.mark.parametrize("name", RUNS)
def test_natively_no_run_says_so(name, caplog):
    module, options, words = RUNS[name]
    fit(module(), **options)
    assert words not in caplog.text


def test_a_plain_run_says_nothing(for_lightning, caplog):
    fit(Classifier())
    assert "from-lightning.md" not in caplog.text


def test_rates_with_accumulation(for_lightning, caplog, tmp_path):
    fit(accumulate_grad_batches=2, logger=CSVLogger(tmp_path), callbacks=[LearningRateMonitor()])
    assert "LearningRateMonitor logs one row for each step" in caplog.text


def test_files_with_other_weights(for_lightning, caplog, tmp_path):
    callback = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True, every_n_train_steps=2)
    fit(enable_checkpointing=True, callbacks=[callback])
    assert "last.ckpt is always the newest checkpoint" in caplog.text
    assert "a ModelCheckpoint by steps saves after the validation" in caplog.text


def test_a_stop_that_waits(for_lightning, caplog):
    class Stops(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = True

    assert fit(Stops(), loader(16), min_steps=3).global_step == 3
    assert "steps while a stop waits for min_steps" in caplog.text


def test_a_test_of_a_checkpoint(for_lightning, caplog, tmp_path):
    callback = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer = fit(enable_checkpointing=True, callbacks=[callback], max_epochs=2)
    trainer.test(Classifier(), loader(4))
    trainer.test(Classifier(), loader(4), ckpt_path=callback.best_model_path)
    # The paths in that file are those of this training.
    assert "ModelCheckpoint keeps the paths and scores of this training" not in caplog.text
    trainer.test(Classifier(), loader(4), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert "ModelCheckpoint keeps the paths and scores of this training" in caplog.text


def test_a_resumed_run_whose_loader_draws_at_the_end_of_each_epoch(for_lightning, monkeypatch, caplog, tmp_path):
    train = DataLoader(data(8), batch_size=4, shuffle=True, generator=torch.Generator())
    words = "generator draws once more at the end of each epoch"
    for began, says in ((habits.LIGHTNING, False), (habits.NATIVE, True)):
        monkeypatch.setattr(habits, "_present", began)
        trainer = fit(train=train)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        assert words not in caplog.text
        monkeypatch.setattr(habits, "_present", habits.LIGHTNING)
        fit(train=train, max_epochs=2, ckpt_path=tmp_path / "a.ckpt")
        assert (words in caplog.text) is says


def test_a_resumed_run(for_lightning, caplog, tmp_path):
    options = {"max_epochs": 2, "enable_checkpointing": True}
    # Both layers have a bias of three zeros, which Lightning treats as the same parameter.
    callback = ModelCheckpoint(tmp_path)
    fit(Frozen(), callbacks=[Stages(), callback], **options)
    assert "goes on as if it had not been cut" not in caplog.text
    fit(Frozen(), callbacks=[Stages()], ckpt_path=callback.best_model_path, **{**options, "max_epochs": 3})
    assert "goes on as if it had not been cut" in caplog.text
    assert "Stages: the resumed run trains the parameters that were unfrozen" in caplog.text


def test_parameters_with_equal_values(for_lightning, caplog):
    layers = torch.nn.ModuleList([torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)])
    optimizer = torch.optim.SGD(layers[0].parameters(), 0.1)
    assert len(BaseFinetuning.filter_on_optimizer(optimizer, layers[1].parameters())) == 2
    assert "parameters equal in value to others" in caplog.text


def test_searches(for_lightning, caplog):
    fit(callbacks=[LearningRateFinder(num_training_steps=3)])
    Tuner(quiet_trainer(max_epochs=1)).lr_find(Classifier(), loader(8), num_training=3)
    assert "LearningRateFinder searches before the fit" in caplog.text
    assert "lr_find repeats the data until all rates are tried" in caplog.text


def several_processes():
    habits.take_up(habits.LIGHTNING)
    lines = []
    habits.say_once = lambda message, level: lines.append(message)
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy="ddp")
    trainer.fit(Classifier(), loader(8))
    trainer.predict(Classifier(), loader(8))
    return lines


def test_several_processes():
    first, second = run_ranks(several_processes, 2)
    assert first[0].startswith("several processes: an epoch's values")
    assert any(line.startswith("predict returns the predictions of all ranks") for line in first)
    assert second == []
