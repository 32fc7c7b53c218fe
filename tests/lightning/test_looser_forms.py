"""Forms of calls, classes and arguments that Lightning accepts, and their effects."""

from __future__ import annotations

import csv
import inspect
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import fabricamp
from fabricamp import Callback, ConfigError, callbacks
from fabricamp.loggers import CSVLogger
from fabricamp.trainer.states import TrainerFn
from tests.small import Classifier, loader, quiet_trainer

# -- hyper-parameters ------------------------------------------------------------------------------------------------------------


class Saves(Classifier):
    def __init__(self, a, b):
        super().__init__()
        self.save_hyperparameters()


class TakesBack(Saves):
    def __init__(self, a, b):
        super().__init__(a, b)
        self.save_hyperparameters(ignore="b")


class TakesBackOfADict(Saves):
    def __init__(self, a, b):
        super().__init__(a, b)
        self.save_hyperparameters({"c": 3}, ignore=["a", "other"])


def test_ignore_takes_back_what_a_base_saved():
    assert dict(TakesBack(1, 2).hparams) == {"a": 1}
    assert dict(TakesBack(1, 2).hparams_initial) == {"a": 1}
    assert dict(TakesBackOfADict(1, 2).hparams) == {"b": 2, "c": 3}


# -- the stage -------------------------------------------------------------------------------------------------------------------


class Stages(fabricamp.DataModule):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def setup(self, stage):
        self.seen.append(stage)

    def teardown(self, stage):
        self.seen.append(stage)

    def train_dataloader(self):
        return loader(4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class StagesOfAModule(Classifier):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    setup = Stages.setup
    teardown = Stages.teardown


class StagesOfACallback(fabricamp.Callback):
    def __init__(self, seen):
        self.seen = seen
        self.stage = ""

    def setup(self, trainer, pl_module, stage):
        self.stage = stage
        self.seen.append(stage)

    def teardown(self, trainer, pl_module, stage):
        self.seen.append(stage)

    def state_dict(self):
        return {"stage": self.stage, "all": [("one", {self.stage: {self.stage}})], "none": self.none}

    none = [1]  # noqa: RUF012 - shared with the file


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_the_stage_is_a_member_of_the_enum_and_a_string(stage):
    seen = []
    trainer = quiet_trainer(max_epochs=1, callbacks=[StagesOfACallback(seen)])
    getattr(trainer, stage)(StagesOfAModule(seen), datamodule=Stages(seen))
    assert seen == [stage] * 6
    for one in seen:
        assert isinstance(one, str)
        assert one is TrainerFn(stage)
        assert (one.value, f"{one}", {stage: 1}[one]) == (stage, stage, 1)


def test_a_stage_in_a_callbacks_state_is_text_in_the_file(tmp_path):
    trainer = quiet_trainer(max_epochs=1, callbacks=[StagesOfACallback([])])
    trainer.fit(Classifier(), loader(4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]["StagesOfACallback"]
    assert state == {"stage": "fit", "all": [("one", {"fit": {"fit"}})], "none": [1]}
    assert type(state["stage"]) is str


# -- when to validate ------------------------------------------------------------------------------------------------------------


class Validated(Classifier):
    def __init__(self):
        super().__init__()
        self.at = []

    def on_validation_start(self):
        self.at.append(self.trainer.global_step)


def validated_at(**options):
    module = Validated()
    quiet_trainer(num_sanity_val_steps=0, **options).fit(module, loader(16), loader(4))
    return module.at


def test_an_interval_longer_than_an_epoch_is_taken_without_validation():
    assert validated_at(max_epochs=1, val_check_interval=1000, limit_val_batches=0) == []
    with pytest.raises(ConfigError, match="validation would never run"):
        validated_at(max_epochs=1, val_check_interval=1000)


def test_a_time_that_is_over_waits_for_an_epoch_to_validate(monkeypatch):
    now = iter(range(0, 10**9, 10))
    monkeypatch.setattr("fabricamp.arguments.cadence.time.monotonic", lambda: float(next(now)))
    # Each read of the clock is ten seconds later, so every check finds the interval over.
    assert validated_at(max_epochs=2, val_check_interval="00:00:00:06") == [1, 2, 3, 4, 5, 6, 7, 8]
    of_every_second = validated_at(max_epochs=4, val_check_interval="00:00:00:06", check_val_every_n_epoch=2)
    assert of_every_second == [5, 6, 7, 8, 13, 14, 15, 16]


def test_steps_with_every_second_epoch_are_still_refused():
    with pytest.raises(ConfigError, match="write both as '100 steps, 2 epochs'"):
        validated_at(val_check_interval="2 steps", check_val_every_n_epoch=2)
    with pytest.raises(ConfigError, match="check_val_every_n_epoch"):
        validated_at(val_check_interval="00:00:00:06", check_val_every_n_epoch=0)


# -- logging ---------------------------------------------------------------------------------------------------------------------


def test_log_every_0_steps_is_silent(tmp_path, caplog, capfd):
    trainer = quiet_trainer(max_epochs=1, log_every_n_steps=0, logger=CSVLogger(tmp_path))
    trainer.fit(Classifier(), loader(16), loader(4))
    with (Path(trainer.log_dir) / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert "loss" not in row
    assert row["val_loss"]
    assert set(trainer.callback_metrics) == {"loss", "val_loss"}
    assert not [record for record in caplog.records if "log_every_n_steps" in record.getMessage()]
    assert "log_every_n_steps" not in "".join(capfd.readouterr())


class Weighs(Classifier):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def validation_step(self, batch, batch_idx):
        self.log("value", float(batch_idx), batch_size=self.weight(batch_idx))


@pytest.mark.parametrize("weight", [torch.tensor, lambda index: torch.tensor([float(index)])])
def test_a_tensor_is_a_batch_size(weight):
    trainer = quiet_trainer()
    trainer.validate(Weighs(weight), loader(16), verbose=False)
    assert float(trainer.callback_metrics["value"]) == pytest.approx((1 * 1 + 2 * 2 + 3 * 3) / 6)


@pytest.mark.parametrize("weight", [torch.tensor([1, 2]), torch.tensor(0.5), torch.tensor(-1)])
def test_a_tensor_that_is_no_size_is_refused(weight):
    with pytest.raises(ConfigError, match="batch_size"):
        quiet_trainer().validate(Weighs(lambda _: weight), loader(16))


class Looks(Classifier):
    """Records the step's values at each validation, before the first flush."""

    def __init__(self):
        super().__init__()
        self.steps, self.seen = [], []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, logger=False)
        self.steps.append(loss.item())
        return loss

    def on_validation_start(self):
        shown = self.trainer.callback_metrics
        self.seen.append((float(shown["loss"]), float(shown["shown"]), float(self.trainer.logged_metrics["loss"])))
        assert "shown" not in self.trainer.logged_metrics


def test_a_steps_values_are_there_at_a_first_validation():
    module = Looks()
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=0, val_check_interval=2, log_every_n_steps=50)
    trainer.fit(module, loader(16), loader(4))
    assert module.seen == [pytest.approx((module.steps[step],) * 3) for step in (1, 3)]


def test_a_steps_values_are_there_after_a_fit_without_a_flush():
    module = Classifier()
    trainer = quiet_trainer(max_epochs=1, log_every_n_steps=0)
    trainer.fit(module, loader(16))
    assert float(trainer.logged_metrics["loss"]) == float(trainer.callback_metrics["loss"])


# -- optimizers ------------------------------------------------------------------------------------------------------------------


class Schedules(Classifier):
    def __init__(self, form):
        super().__init__(lr=1.0)
        self.form = form

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return self.form(optimizer, StepLR(optimizer, 1, gamma=0.5))


@pytest.mark.parametrize(
    ("form", "rate"),
    [
        (lambda optimizer, scheduler: ([optimizer], {"scheduler": scheduler, "interval": "step"}), 1 / 16),
        (lambda optimizer, scheduler: ([optimizer], scheduler), 1 / 2),
        (lambda optimizer, scheduler: ((optimizer,), {"scheduler": scheduler}), 1 / 2),
    ],
)
def test_a_list_of_optimizers_beside_one_scheduler(form, rate):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Schedules(form), loader(16))
    assert trainer.optimizers[0].param_groups[0]["lr"] == rate


def test_a_dict_without_a_scheduler_is_refused():
    with pytest.raises(ConfigError, match="has no usable 'scheduler'"):
        quiet_trainer(max_epochs=1).fit(Schedules(lambda optimizer, _: ([optimizer], {})), loader(16))


# -- methods of a base, set on an instance ----------------------------------------------------------------------------------------


class SetsMethodsOfItsBase(fabricamp.DataModule):
    def __init__(self):
        super().__init__()
        self.val_dataloader = super().val_dataloader
        self.transfer_batch_to_device = super().transfer_batch_to_device

    def train_dataloader(self):
        return loader(16)


class Transfers(Classifier):
    transfers = 0

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.transfers += 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def test_a_method_of_a_base_set_on_the_instance_is_not_overridden():
    module = Transfers()
    module.validation_step = super(Classifier, module).validation_step
    quiet_trainer(max_epochs=1).fit(module, datamodule=SetsMethodsOfItsBase())
    assert module.transfers == 4
    with pytest.raises(ConfigError, match="has no validation_step"):
        quiet_trainer().validate(module, loader(4))


def test_a_method_of_its_own_set_on_the_instance_is_called():
    data = SetsMethodsOfItsBase()
    data.val_dataloader = lambda: loader(4)
    module = Validated()
    quiet_trainer(max_epochs=1, num_sanity_val_steps=0).fit(module, datamodule=data)
    assert module.at == [4]


# -- constructors of callbacks ----------------------------------------------------------------------------------------------------


class Silent(fabricamp.Callback):
    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *args):
        self.batches += 1


class Mixed:
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mixed_in = True


ARGUMENTS = {
    "EarlyStopping": ("loss",),
    "GradientAccumulationScheduler": ({0: 2},),
    "OnExceptionCheckpoint": ("folder",),
    "OptunaPruning": (None, "loss"),
    "StochasticWeightAveraging": (0.1,),
    "ThroughputMonitor": (len,),
}


def test_a_callback_whose_constructor_does_not_call_the_bases():
    callback = Silent()
    quiet_trainer(max_epochs=1, callbacks=[callback]).fit(Classifier(), loader(16))
    assert callback.batches == 4


CALLBACKS = [getattr(callbacks, name) for name in callbacks.__all__]


@pytest.mark.parametrize("base", [one for one in CALLBACKS if inspect.isclass(one) and issubclass(one, Callback)])
def test_a_constructor_calls_the_next_one(base):
    mixed = type(base.__name__, (base, Mixed), {})(*ARGUMENTS.get(base.__name__, ()))
    assert mixed.mixed_in
