"""Details that scripts for Lightning rely on, in addition to the programs here: order of calls, arguments, restored states."""

from __future__ import annotations

import csv
import functools
import json

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import fabricamp
from fabricamp import ConfigError
from fabricamp.callbacks import ModelCheckpoint
from tests.small import Classifier, loader, quiet_trainer


class Data(fabricamp.LightningDataModule):
    """Has two training batches and one for each other stage; ``calls`` records the calls here and in the other objects."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self.train_set = None

    def setup(self, stage):
        self.calls.append("data")
        self.train_set = list(loader(8))

    def teardown(self, stage):
        self.calls.append("data")

    def train_dataloader(self):
        return self.train_set

    def val_dataloader(self):
        return loader(2)

    test_dataloader = val_dataloader

    def state_dict(self):
        return {"of": "data"}

    def load_state_dict(self, state_dict):
        self.calls.append(state_dict)


class Notes(fabricamp.Callback):
    """Records the arguments of its calls."""

    def __init__(self, calls, number=0):
        self.calls, self.number, self.batches = calls, number, 0

    @property
    def state_key(self):
        return self._generate_state_key(number=self.number)

    def setup(self, trainer, pl_module, stage):
        assert trainer.datamodule.train_set is not None
        self.calls.append("callback")

    def teardown(self, trainer, pl_module, stage):
        self.calls.append("callback")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches, "number": self.number}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]
        self.calls.append(state_dict)


class Module(Classifier):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def setup(self, stage):
        self.calls.append("module")

    teardown = setup


def test_a_test_of_a_checkpoint_gives_data_and_callbacks_their_state(tmp_path):
    calls = []
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=-1)
    callbacks = [Notes(calls, 1), Notes(calls, 2), checkpoint]
    trainer = quiet_trainer(max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Module(calls), datamodule=Data(calls))
    first, last = sorted(tmp_path.iterdir())
    assert calls == ["data", "callback", "callback", "module"] * 2

    calls.clear()
    trainer.test(ckpt_path=first, datamodule=Data(calls), verbose=False)
    states = [{"of": "data"}, {"batches": 2, "number": 1}, {"batches": 2, "number": 2}]
    assert calls == ["data", "callback", "callback", "module", *states, "data", "callback", "callback", "module"]
    assert checkpoint.last_model_path == ""
    assert checkpoint.best_model_path == str(last)  # the training's file, because a test run writes none


def any_arguments(step):
    @functools.wraps(step)
    def call(*args, **kwargs):
        return step(*args, **kwargs)

    del call.__wrapped__
    return call


@pytest.mark.parametrize("loaders", [1, 2])
def test_a_decorated_step_gets_the_number_of_its_loader(loaders):
    class Decorated(Classifier):
        @any_arguments
        def validation_step(self, *args):
            seen.append(args[1:])

    seen = []
    quiet_trainer().validate(Decorated(), [loader(2)] * loaders, verbose=False)
    assert seen == [[(0,)], [(0, 0), (0, 1)]][loaders - 1]


def test_without_batches_to_validate_on_there_is_no_sanity_check():
    class Checks(fabricamp.Callback):
        def on_sanity_check_start(self, trainer, pl_module):
            raise AssertionError

        on_sanity_check_end = on_sanity_check_start

    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0, num_sanity_val_steps=2, callbacks=[Checks()])
    trainer.fit(Classifier(), loader(4), loader(2))


def test_clipping_is_asked_for_by_keywords():
    class Clips(Classifier):
        def configure_gradient_clipping(self, optimizer, **limits):
            seen.append(limits)

    seen = []
    quiet_trainer(max_steps=1, gradient_clip_val=0.5).fit(Clips(), loader(2))
    assert seen == [{"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}]


def test_an_optimizer_of_the_module_is_one_for_torch_too():
    class ByHand(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def on_train_start(self):
            self.schedule = StepLR(self.optimizers(), 1, gamma=0.5)

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            assert isinstance(optimizer, torch.optim.SGD)
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()
            self.schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    rates = []
    trainer = quiet_trainer(max_steps=2)
    trainer.fit(ByHand(), loader(4))
    assert (rates, trainer.global_step) == ([0.5, 0.25], 2)


class Logs(fabricamp.Callback):
    """Logs through the module that it keeps during a run."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("at", float(batch_idx), on_epoch=True)

    def on_validation_epoch_end(self, trainer, pl_module):
        self.log_dict({"of_callback": 3.0})


class HasItsOwn(Logs):
    def __init__(self):
        self.log = lambda *_, **__: None
        self.log_dict = lambda values: values


def test_callbacks_log_as_their_module_does():
    logs, silent = Logs(), HasItsOwn()
    trainer = quiet_trainer(max_epochs=1, callbacks=[silent])
    trainer.fit(Classifier(), loader(12), loader(4))
    assert not {"at", "of_callback"} & {*trainer.callback_metrics}
    assert {*vars(silent)} == {"log", "log_dict"}

    trainer = quiet_trainer(max_epochs=1, callbacks=[logs])
    trainer.fit(Classifier(), loader(12), loader(4))
    assert {name: float(trainer.callback_metrics[name]) for name in ("at_step", "at_epoch", "of_callback")} == {
        "at_step": 2.0,
        "at_epoch": 1.0,
        "of_callback": 3.0,
    }
    assert not vars(logs)  # otherwise each copy of the callback would contain the module and its weights


def test_the_module_has_its_trainer_when_it_is_asked_for_callbacks():
    class Asks(Classifier):
        def configure_callbacks(self):
            return [fabricamp.callbacks.EarlyStopping("loss", patience=self.trainer.max_epochs)]

    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(Asks(), loader(4))
    assert trainer.early_stopping_callback.patience == 2


def test_each_hook_that_moves_a_batch_is_the_datas_or_the_modules():
    class Moves(Classifier):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            calls.append("module moves")
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            raise AssertionError

    class AfterIt(fabricamp.LightningDataModule):
        def train_dataloader(self):
            return loader(4)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            calls.append("data after it")
            return batch

    calls = []
    quiet_trainer(max_epochs=1).fit(Moves(), datamodule=AfterIt())
    assert calls == ["module moves", "data after it"]


@pytest.mark.parametrize("kind", [fabricamp.loggers.CSVLogger, fabricamp.loggers.JSONLinesLogger])
def test_values_by_hand_may_be_tensors_and_need_no_step(kind, tmp_path):
    logger = kind(tmp_path)
    logger.log_metrics({"first": torch.tensor(2.0)})
    logger.log_metrics({"flag": True, "mean": torch.tensor([0.5])}, step=7)
    logger.log_metrics({"again": 3})
    logger.close()
    rows = read_values(logger)
    assert rows == [{"step": 0, "first": 2.0}, {"step": 7, "flag": 1.0, "mean": 0.5}, {"step": 7, "again": 3.0}]


def read_values(logger):
    """Returns the rows of the file without empty values."""
    text = logger.metrics_file.read_text()
    if logger.FILE.endswith("jsonl"):
        found = [{**json.loads(line), "time": None} for line in text.splitlines()]
    else:
        found = csv.DictReader(text.splitlines())
    return [{name: float(value) for name, value in row.items() if value not in ("", None)} for row in found]


def test_a_summary_by_hand():
    summary = fabricamp.utilities.model_summary.ModelSummary(Classifier(), max_depth=-1)
    assert (summary.total_parameters, summary.trainable_parameters) == (8 * 16 + 16 + 16 * 3 + 3,) * 2
    assert "net.0" in str(summary)


def test_the_loaders_of_another_run_are_nobodys():
    class Asks(Classifier):
        def configure_optimizers(self):
            self.trainer.fit_loop.setup_data()
            seen.append(len(self.trainer.train_dataloader.dataset))
            return super().configure_optimizers()

        def setup(self, stage):
            names = ("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders")
            seen.append([stage, *(getattr(self.trainer, name) is not None for name in names)])

    class SetUpByStage(fabricamp.LightningDataModule):
        def setup(self, stage):
            setattr(self, stage, loader(8))

        def train_dataloader(self):
            return self.fit

        def val_dataloader(self):
            return self.fit

        def test_dataloader(self):
            return self.test

    seen = []
    trainer, module = quiet_trainer(max_epochs=1), Asks()
    trainer.fit(module, datamodule=SetUpByStage())
    trainer.test(module, datamodule=SetUpByStage(), verbose=False)
    assert seen == [["fit", True, True, False, False], 8, ["test", False, False, True, False]]


def test_what_was_predicted_so_far_is_there_where_it_is_kept():
    class Looks(Classifier):
        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return batch_idx

        def on_predict_epoch_end(self):
            seen.append(self.trainer.predict_loop.predictions)

    seen = []
    for loaders, options in ((loader(8), {}), ([loader(8), loader(4)], {}), (loader(8), {"return_predictions": False})):
        quiet_trainer().predict(Looks(), loaders, **options)
    assert seen == [[0, 1], [[0, 1], [0]], []]


def test_the_sanity_check_is_an_evaluation():
    class Asks(Classifier):
        def validation_step(self, batch, batch_idx):
            seen.append((self.trainer.sanity_checking, self.trainer.validating, self.trainer.evaluating))

        def training_step(self, batch, batch_idx):
            assert not self.trainer.evaluating
            return super().training_step(batch, batch_idx)

    seen = []
    quiet_trainer(max_epochs=1, num_sanity_val_steps=1).fit(Asks(), loader(4), loader(4))
    assert seen == [(True, False, True), (False, True, True)]


def test_a_validation_within_the_epoch_leaves_the_number_of_the_batch():
    class Numbers(Classifier):
        def training_step(self, batch, batch_idx):
            loop = self.trainer.fit_loop
            seen.append((batch_idx, loop.batch_idx, loop.total_batch_idx, loop.epoch_loop.batch_progress.current.ready))
            return super().training_step(batch, batch_idx)

    seen = []
    quiet_trainer(max_epochs=2, val_check_interval=2).fit(Numbers(), loader(16), loader(4))
    assert seen == [(index, index, 4 * epoch + index, index + 1) for epoch in range(2) for index in range(4)]


@pytest.mark.parametrize("of_data", [2, 3])
def test_one_name_with_two_values_is_told_before_a_logger_shows_one(of_data, tmp_path):
    class Keeps(Classifier):
        def __init__(self, batch_size=3):
            super().__init__()
            self.save_hyperparameters()

    class KeepsToo(fabricamp.LightningDataModule):
        def __init__(self, batch_size):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return loader(4)

    trainer = quiet_trainer(max_steps=1, logger=fabricamp.loggers.CSVLogger(tmp_path))
    if of_data == 3:
        trainer.fit(Keeps(), datamodule=KeepsToo(of_data))
        return
    with pytest.raises(ConfigError, match=r"Keeps and .*same names: batch_size\. .*ignore=\['batch_size'\]"):
        trainer.fit(Keeps(), datamodule=KeepsToo(of_data))


@pytest.mark.parametrize("kind", [ModelCheckpoint, fabricamp.callbacks.AsyncCheckpoint])
@pytest.mark.parametrize("save_last", [False, True, "link"])
def test_a_run_that_ends_before_a_checkpoint_is_due_leaves_the_last_one(kind, save_last, tmp_path):
    checkpoint = kind(tmp_path, save_last=save_last, every_n_train_steps=100)
    trainer = quiet_trainer(max_epochs=1, callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(Classifier(), loader(12))
    assert (tmp_path / "last.ckpt").exists() is bool(save_last)
    if save_last:
        assert checkpoint.last_model_path == str(tmp_path / "last.ckpt")
        assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3
    else:
        assert list(tmp_path.iterdir()) == []
