"""Limits of training, the share of the data that it uses, and the times of validation."""

from __future__ import annotations

import datetime as dt
import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from fabricamp import Callback, ConfigError, Trainer, TrainingModule
from fabricamp.callbacks import EarlyStopping, ModelCheckpoint
from fabricamp.loggers.logger import DummyLogger
from tests.small import Classifier, data, loader, quiet_trainer


class Diary(Classifier):
    """Records the calls: ``t`` a training step, ``s`` an update, ``v`` a validation step, ``|`` an epoch's end."""

    def __init__(self):
        super().__init__()
        self.notes = ""

    def training_step(self, batch, batch_idx):
        self.notes += "t"
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.notes += "s"

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.notes += "v"
        self.log("val_loss", 1.0)

    def on_train_epoch_end(self):
        self.notes += "|"


def diary(*, batches=4, val=None, **options):
    module = Diary()
    trainer = quiet_trainer(**{"num_sanity_val_steps": 0, **options})
    trainer.fit(module, loader(batches * 4), val)
    return module.notes, trainer


@pytest.mark.parametrize(
    ("options", "expected", "epoch", "step"),
    [
        ({"max_epochs": 2}, "tstststs|tstststs|", 2, 8),
        ({"max_epochs": 0}, "", 0, 0),
        ({"max_steps": 0}, "", 0, 0),
        ({"max_steps": 6}, "tstststs|tsts|", 1, 6),
        ({"max_steps": 4}, "tstststs|", 1, 4),
        ({"max_epochs": -1, "max_steps": 5}, "tstststs|ts|", 1, 5),
        ({"max_epochs": 1, "max_steps": 9}, "tstststs|", 1, 4),
        ({"max_epochs": 1, "accumulate_grad_batches": 3}, "tttsts|", 1, 2),
        ({"max_epochs": 1, "accumulate_grad_batches": 9}, "tttts|", 1, 1),
        ({"max_steps": 3, "accumulate_grad_batches": 3}, "tttsts|ttts|", 1, 3),
        ({"max_epochs": 1, "limit_train_batches": 3}, "tststs|", 1, 3),
        ({"max_epochs": 1, "limit_train_batches": 99}, "tstststs|", 1, 4),
        ({"max_epochs": 1, "limit_train_batches": 0.5}, "tsts|", 1, 2),
        ({"max_epochs": 1, "limit_train_batches": 3, "accumulate_grad_batches": 2}, "ttsts|", 1, 2),
        ({"max_epochs": 2, "overfit_batches": 1}, "ts|ts|", 2, 2),
    ],
)
def test_train_limits(options, expected, epoch, step):
    notes, trainer = diary(**options)
    assert notes == expected
    assert (trainer.current_epoch, trainer.global_step) == (epoch, step)


@pytest.mark.parametrize("limit", [0, 0.0])
def test_no_training_batches_is_no_training(limit):
    notes, trainer = diary(max_epochs=3, limit_train_batches=limit, val=loader(4))
    assert notes == ""
    assert (trainer.current_epoch, trainer.global_step) == (0, 0)


@settings(max_examples=25, deadline=None)
@given(batches=st.integers(1, 7), accumulate=st.integers(1, 4), epochs=st.integers(1, 3), steps=st.integers(1, 12))
def test_windows_do_not_cross_epochs_and_end_at_max_steps(batches, accumulate, epochs, steps):
    notes, trainer = diary(batches=batches, accumulate_grad_batches=accumulate, max_epochs=epochs, max_steps=steps)
    per_epoch = math.ceil(batches / accumulate)
    assert trainer.global_step == notes.count("s") == min(steps, epochs * per_epoch)
    assert trainer.estimated_stepping_batches == trainer.global_step
    whole = (
        "".join("t" + "s" * ((index + 1) % accumulate == 0 or index + 1 == batches) for index in range(batches)) + "|"
    )
    assert (whole * epochs).startswith(notes.rstrip("|"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "tstststsv|tstststsv|"),
        ({"limit_val_batches": 0}, "tstststs|tstststs|"),
        ({"val_check_interval": 2}, "tstsvtstsv|tstsvtstsv|"),
        ({"val_check_interval": 3}, "tststsvts|tststsvts|"),
        ({"val_check_interval": 0.25}, "tsvtsvtsvtsv|tsvtsvtsvtsv|"),
        ({"val_check_interval": 0.5}, "tstsvtstsv|tstsvtstsv|"),
        ({"val_check_interval": 0.75}, "tststsvts|tststsvts|"),
        ({"check_val_every_n_epoch": 2}, "tstststs|tstststsv|"),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 2}, "tstststs|tstsvtstsv|"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 3}, "tststsvts|tstsvtsts|"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 6}, "tstststs|tstsvtsts|"),
        ({"accumulate_grad_batches": 3}, "tttstsv|tttstsv|"),
        ({"accumulate_grad_batches": 3, "val_check_interval": 2}, "ttvtstsv|ttvtstsv|"),
        ({"overfit_batches": 2}, "tstsv|tstsv|"),
        ({"max_steps": 5}, "tstststsv|ts|"),
    ],
)
def test_validation_cadence(options, expected):
    notes, _ = diary(max_epochs=2, val=loader(4), **options)
    # With overfit_batches validation sees the training batches.
    assert notes.replace("vv", "v") == expected


def test_without_a_validation_step_nothing_is_validated_and_checkpoints_do_not_wait_for_it(caplog):
    class Blind(Diary):
        validation_step = TrainingModule.validation_step

    module = Blind()
    trainer = quiet_trainer(max_epochs=1, check_val_every_n_epoch=2, enable_checkpointing=True)
    trainer.fit(module, loader(4), loader(8))
    assert module.notes == "ts|"
    assert trainer.num_val_batches == []
    assert trainer.checkpoint_callback.best_model_path
    assert caplog.messages == ["val_dataloaders are given, but Blind has no validation_step: nothing is validated"]


def test_validation_amid_a_window_keeps_its_gradients():
    plain, validating = Diary(), Diary()
    for module, interval in ((plain, 1.0), (validating, 1)):
        quiet_trainer(max_epochs=2, accumulate_grad_batches=3, val_check_interval=interval).fit(
            module, loader(16), loader(4)
        )
    for a, b in zip(plain.parameters(), validating.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("limit", "batches"), [(1, 1), (1.0, 3), (0.67, 2), (9, 3)])
def test_limits_of_evaluation(limit, batches):
    module = Diary()
    trainer = quiet_trainer(
        max_epochs=1,
        num_sanity_val_steps=0,
        limit_val_batches=limit,
        limit_test_batches=limit,
        limit_predict_batches=limit,
    )
    trainer.fit(module, loader(4), loader(12))
    assert module.notes == "ts" + "v" * batches + "|"
    assert trainer.num_val_batches == [batches]
    trainer.validate(module, loader(12), verbose=False)
    assert module.notes.count("v") == 2 * batches
    assert len(trainer.predict(module, loader(12))) == batches
    assert trainer.test(Classifier(), loader(12), verbose=False)[0].keys() == {"test_loss"}


@pytest.mark.parametrize(("steps", "expected"), [(0, ""), (2, "vv"), (-1, "vvv"), (1, "v")])
def test_sanity_check(steps, expected):
    notes, trainer = diary(max_epochs=0, num_sanity_val_steps=steps, val=loader(12))
    assert notes == expected
    assert trainer.num_sanity_val_batches == [len(expected)]
    assert "val_loss" not in trainer.callback_metrics


def test_the_sanity_check_leaves_no_trace():
    from torchmetrics import MeanMetric

    class Draws(Diary):
        def __init__(self):
            super().__init__()
            self.mean = MeanMetric()
            self.noise = []

        def training_step(self, batch, batch_idx):
            self.noise.append(float(torch.rand(())))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            torch.rand(5)
            self.mean.update(100.0 if self.trainer.sanity_checking else 1.0)
            self.log("mean", self.mean)

    results = []
    for steps in (0, 2):
        torch.manual_seed(5)
        module = Draws()
        trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=steps)
        trainer.fit(module, loader(16, shuffle=True), DataLoader(data(8), 4, shuffle=True))
        results.append((module.noise, float(trainer.callback_metrics["mean"]), module.net[0].weight.detach().clone()))
        assert module.training
    assert results[0][:2] == results[1][:2]
    assert results[0][1] == 1.0
    assert torch.equal(results[0][2], results[1][2])


# -- stop requests -----------------------------------------------------------------------------------------------------


class StopsAt(Callback):
    def __init__(self, hook, when):
        self.when = when
        setattr(self, hook, self.stop)

    def stop(self, trainer, *args):
        if trainer.global_step >= self.when:
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("hook", "when", "options", "expected"),
    [
        ("on_train_batch_end", 2, {}, "tsts|"),
        ("on_train_batch_start", 1, {}, "tsts|"),
        ("on_train_batch_end", 2, {"min_steps": 3}, "tststs|"),
        ("on_train_batch_end", 2, {"min_steps": 6}, "tstststs|tsts|"),
        ("on_train_batch_end", 2, {"min_epochs": 1}, "tstststs|"),
        ("on_train_batch_end", 2, {"min_epochs": 2}, "tstststs|tstststs|"),
        ("on_train_batch_end", 2, {"min_epochs": 1, "min_steps": 5}, "tstststs|ts|"),
        ("on_train_batch_end", 2, {"min_epochs": 2, "max_epochs": 2}, "tstststs|tstststs|"),
        ("on_train_epoch_end", 1, {}, "tstststs|"),
        ("on_train_epoch_start", 4, {}, "tstststs|ts|"),
        ("on_train_start", 0, {}, ""),
        ("on_train_batch_end", 1, {"accumulate_grad_batches": 2}, "tts|"),
        ("on_before_backward", 0, {"accumulate_grad_batches": 2}, "tts|"),
    ],
)
def test_should_stop(hook, when, options, expected):
    notes, trainer = diary(**{"max_epochs": 3, "callbacks": StopsAt(hook, when), **options})
    assert notes == expected
    assert trainer.should_stop
    assert not trainer.interrupted


def test_should_stop_in_validation_ends_the_epoch_there():
    notes, _ = diary(max_epochs=3, val=loader(4), val_check_interval=2, callbacks=StopsAt("on_validation_end", 0))
    assert notes == "tstsv|"


def test_the_module_may_stop_and_take_it_back():
    class Stops(Diary):
        def training_step(self, batch, batch_idx):
            self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = batch_idx == 2

    module = Stops()
    quiet_trainer(max_epochs=3).fit(module, loader(16))
    assert module.notes == "tststs|"


@pytest.mark.parametrize("max_time", ["00:00:00:00", dt.timedelta(0), {"seconds": 0}])
def test_no_time_is_one_step(max_time):
    notes, trainer = diary(max_time=max_time)
    assert notes == "ts|"
    assert trainer.max_epochs == -1
    assert not trainer.interrupted


def test_max_time_waits_for_min_epochs_and_ends_in_time():
    notes, _ = diary(max_time={"seconds": 0}, min_epochs=1)
    assert notes == "tstststs|"
    start = time.monotonic()
    notes, _ = diary(max_time={"milliseconds": 200})
    assert time.monotonic() - start >= 0.2
    assert notes.count("|") > 0


# -- trial runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "batches"), [(True, 1), (3, 3)])
def test_a_trial_run_leaves_no_files(value, batches, tmp_path):
    class Scheduled(Diary):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    module = Scheduled()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        fast_dev_run=value,
        max_epochs=20,
        max_steps=100,
        check_val_every_n_epoch=5,
        val_check_interval=1000,
        enable_progress_bar=False,
        callbacks=[EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss", every_n_train_steps=1)],
    )
    trainer.fit(module, loader(40), loader(40))
    assert module.notes == "ts" * batches + "v" * batches + "|"
    trainer.validate(module, loader(40), verbose=False)
    trainer.test(module, loader(40), verbose=False)
    assert len(trainer.predict(module, loader(40))) == batches
    assert (
        [type(one) for one in trainer.loggers],
        trainer.checkpoint_callback.best_model_path,
        trainer.max_epochs,
    ) == (
        [DummyLogger],
        "",
        1,
    )
    assert list(tmp_path.iterdir()) == []


# -- one Trainer used again --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["O0", "O1", "O2"])
def test_after_a_reset_a_fit_begins_anew(precision):
    class Scheduled(Diary):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]

    trainer = quiet_trainer(max_epochs=2, precision=precision)
    fresh = Scheduled()
    quiet_trainer(max_epochs=2, precision=precision).fit(fresh, loader(16))
    trainer.validate(Diary(), loader(4), verbose=False)
    for _ in range(2):
        module = Scheduled()
        trainer.reset()
        trainer.fit(module, loader(16))
        assert module.notes == fresh.notes
        assert (trainer.current_epoch, trainer.global_step, trainer.skipped_steps) == (2, 8, 0)
        for a, b in zip(module.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(a, b)
        assert trainer.validate(module, loader(4), verbose=False) == [{"val_loss": 1.0}]


# -- loaders of all kinds ----------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter([data(4)[:] for _ in range(self.batches)])


@pytest.mark.parametrize(
    "make", [lambda: DataLoader(Stream(3), batch_size=None), lambda: [data(4)[:]] * 3, lambda: Stream(3)]
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_loaders_of_any_kind(make, accumulate):
    module = Diary()
    quiet_trainer(max_epochs=2, accumulate_grad_batches=accumulate, num_sanity_val_steps=0).fit(module, make(), make())
    assert module.notes == {1: "tststsvvv|" * 2, 2: "ttstsvvv|" * 2}[accumulate]


def test_a_loader_of_unknown_length():
    module = Diary()
    trainer = quiet_trainer(max_epochs=1, val_check_interval=2, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(Stream(3), batch_size=None), loader(4))
    assert module.notes == "tstsvts|"
    assert trainer.num_training_batches == math.inf
    assert trainer.estimated_stepping_batches == math.inf
    with pytest.raises(ConfigError, match=r"val_check_interval=0.5"):
        quiet_trainer(max_epochs=1, val_check_interval=0.5).fit(
            module, DataLoader(Stream(3), batch_size=None), loader(4)
        )
    with pytest.raises(ConfigError, match=r"limit_train_batches=0.5"):
        quiet_trainer(max_epochs=1, limit_train_batches=0.5).fit(module, DataLoader(Stream(3), batch_size=None))


def test_a_generator_is_one_epoch():
    module = Diary()
    batches = (data(4)[:] for _ in range(3))
    quiet_trainer(max_epochs=1).fit(module, batches)
    assert module.notes == "tststs|"
    with pytest.raises(ConfigError, match=r"used up|iterated"):
        quiet_trainer(max_epochs=2).fit(Diary(), (data(4)[:] for _ in range(3)))
    endless = (data(4)[:] for _ in iter(int, 1))
    quiet_trainer(max_steps=5).fit(Diary(), endless)


@pytest.mark.parametrize("form", [dict, list, tuple])
def test_several_train_loaders_at_once(form):
    seen = []

    class Both(Classifier):
        def training_step(self, batch, batch_idx):
            one, two = batch.values() if form is dict else batch
            seen.append((type(batch), len(one[0]), len(two[0])))
            self.log("size", 1.0, on_step=False, on_epoch=True)
            return super().training_step(one, batch_idx) + super().training_step(two, batch_idx)

    loaders = {"a": loader(16), "b": loader(8, 2)}
    quiet_trainer(max_epochs=1).fit(Both(), loaders if form is dict else form(loaders.values()))
    assert seen == [(dict if form is dict else seen[0][0], 4, 2)] * 4


def test_several_validation_loaders():
    class Indexed(Diary):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.notes += str(dataloader_idx)
            self.log("value", float(dataloader_idx))
            self.log("all", float(dataloader_idx), add_dataloader_idx=False) if dataloader_idx == 1 else None

        def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
            assert str(dataloader_idx) == self.notes[-1]

    module = Indexed()
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=1, limit_val_batches=2)
    trainer.fit(module, loader(4), [loader(12), loader(4)])
    assert module.notes == "01ts001|"
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "loss"}
    assert metrics == {"value/dataloader_idx_0": 0.0, "value/dataloader_idx_1": 1.0, "all": 1.0}
    first, second = trainer.validate(module, [loader(12), loader(4)], verbose=False)
    assert first == {"value/dataloader_idx_0": 0.0}
    assert second == {"value/dataloader_idx_1": 1.0, "all": 1.0}
    assert [len(one) for one in trainer.predict(module, [loader(12), loader(8)])] == [3, 2]


def test_hooks_without_a_loader_index_do_with_one_loader():
    class Short(Diary):
        def on_validation_batch_start(self, batch, batch_idx):
            self.notes += "<"

        def on_validation_batch_end(self, outputs, batch, batch_idx):
            self.notes += ">"

    class ShortCallback(Callback):
        def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
            module.notes += "c"

    module = Short()
    quiet_trainer(max_epochs=1, num_sanity_val_steps=0, callbacks=ShortCallback()).fit(module, loader(4), loader(8))
    assert module.notes == "ts<vc><vc>|"


@pytest.mark.parametrize(
    "arguments",
    [
        "self, batch",
        "self, batch, batch_idx",
        "self, batch, batch_idx=None, extra=None",
        "self, *args",
        "self, batch, *args, **kwargs",
    ],
)
def test_training_step_takes_what_it_names(arguments):
    namespace = {"Classifier": Classifier}
    batch = "args[0]" if arguments == "self, *args" else "batch"
    exec(f"def training_step({arguments}): return Classifier.training_step(self, {batch}, 0)", namespace)
    module = type("Named", (Classifier,), {"training_step": namespace["training_step"]})()
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, loader(8))
    assert trainer.global_step == 2


def test_a_batch_without_a_loss_is_left_out():
    class Picky(Diary):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (1, 3) else loss

    module = Picky()
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, loader(16))
    assert (module.notes, trainer.global_step) == ("tsttst|", 4)
    module = Picky()
    quiet_trainer(max_epochs=1, accumulate_grad_batches=2).fit(module, loader(16))
    assert module.notes == "ttstts|"


def test_a_window_that_was_begun_is_dropped_with_the_rest_of_the_epoch():
    class Skips(Diary):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 and self.current_epoch == 0 else None

    class Short(Diary):
        def train_dataloader(self):
            return [data(16)[start : start + 4] for start in range(0, 8, 4)] * 2

    module = Skips()
    trainer = quiet_trainer(max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(module, loader(16))
    assert module.notes == "ttst|ttstts|"
    assert (trainer.current_epoch, trainer.global_step) == (2, 3)
    twin = Diary()
    batches = [data(16)[start : start + 4] for start in (0, 4, 0, 4, 8, 12)]
    quiet_trainer(max_epochs=1, accumulate_grad_batches=2).fit(twin, batches)
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
