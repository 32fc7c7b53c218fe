"""Attributes of the Trainer, its state, loops and strategy that code written for Lightning reads or sets."""

from __future__ import annotations

import inspect

import pytest
import torch

from fabricamp import Callback, ConfigError, OptLevel, Trainer
from fabricamp.callbacks import ModelCheckpoint, ProgressBar
from fabricamp.loggers import CSVLogger
from fabricamp.trainer.states import RunningStage, TrainerFn, TrainerStatus
from tests.inside import settings
from tests.small import QUIET, Classifier, loader, quiet_trainer


class Stages(Callback):
    """Records function, stage and status in each hook."""

    def __init__(self):
        self.seen = []

    def _note(self, trainer):
        state = trainer.state
        self.seen.append((str(state.fn), str(state.stage), str(state.status)))

    def on_sanity_check_start(self, trainer, pl_module):
        self._note(trainer)

    def on_train_start(self, trainer, pl_module):
        self._note(trainer)

    def on_validation_start(self, trainer, pl_module):
        self._note(trainer)

    def on_train_end(self, trainer, pl_module):
        self._note(trainer)

    def on_test_start(self, trainer, pl_module):
        self._note(trainer)

    def on_predict_start(self, trainer, pl_module):
        self._note(trainer)


def test_the_state_says_what_runs_in_lightnings_words():
    stages, model = Stages(), Classifier()
    trainer = quiet_trainer(max_steps=2, callbacks=[stages])
    assert (trainer.state.fn, trainer.state.stage, trainer.state.status) == (None, None, "initializing")
    trainer.fit(model, loader(8), loader(8))
    assert stages.seen == [
        ("fit", "sanity_check", "running"),
        ("fit", "sanity_check", "running"),
        ("fit", "train", "running"),
        ("fit", "validate", "running"),
        ("fit", "train", "running"),
    ]
    assert (trainer.state.fn, trainer.state.stage) == (TrainerFn.FITTING, None)
    assert trainer.state.finished
    stages.seen.clear()
    trainer.validate(model, loader(8), verbose=False)
    trainer.test(model, loader(8), verbose=False)
    trainer.predict(model, loader(8))
    assert [one[:2] for one in stages.seen] == [("validate", "validate"), ("test", "test"), ("predict", "predict")]
    assert trainer.state.fn == "predict" == TrainerFn.PREDICTING


def test_the_state_of_a_run_that_failed_is_interrupted():
    class Fails(Classifier):
        def on_train_start(self):
            raise ValueError("mine")

    trainer = quiet_trainer(max_steps=1)
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(Fails(), loader(8))
    assert trainer.state.status is TrainerStatus.INTERRUPTED
    assert trainer.state.stopped


def test_stages_know_their_loaders():
    assert RunningStage.SANITY_CHECKING.dataloader_prefix == RunningStage.VALIDATING.dataloader_prefix == "val"
    assert RunningStage.TRAINING.dataloader_prefix == "train"
    assert [one.value for one in RunningStage if one.evaluating] == ["sanity_check", "validate", "test"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, "32-true"),
        ("O0", "32-true"),
        (32, "32-true"),
        ("16-mixed", "16-mixed"),
        ("O1", "16-mixed"),
        ("bf16", "bf16-mixed"),
        ("16-true", "16-true"),
        ("bf16-true", "bf16-true"),
        (64, "64-true"),
        ("O2", "O2"),
        (OptLevel("O5"), "O5"),
    ],
)
def test_precision_is_lightnings_name(given, name):
    assert quiet_trainer(precision=given).precision == name


def test_the_module_is_the_model():
    model, trainer = Classifier(), quiet_trainer(max_steps=1, precision="O4")
    trainer.fit(model, loader(8))
    assert trainer.model is trainer.lightning_module is model
    assert isinstance(trainer.precision_plugin, OptLevel)
    assert torch.is_tensor(trainer.model.net[0].weight)


def test_a_second_fit_goes_on_to_a_later_epoch():
    trainer, model = quiet_trainer(max_epochs=1), Classifier()
    trainer.fit(model, loader(8))
    assert trainer.fit_loop.max_epochs == 1
    trainer.fit_loop.max_epochs = 3
    assert trainer.max_epochs == 3
    trainer.fit(Classifier(), loader(8))
    assert trainer.current_epoch == 3
    trainer.max_epochs = 2
    assert trainer.fit_loop.max_epochs == 2


class Extends(Callback):
    """Changes the limits of the running fit."""

    def __init__(self, **limits):
        self.limits = limits
        self.progress = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.progress.append(trainer.fit_loop.epoch_progress.current)
        for name, value in self.limits.items():
            setattr(trainer, name, value)
        self.limits = {}


@pytest.mark.parametrize(
    ("given", "set_to", "steps"),
    [
        ({"max_epochs": 1}, {"max_epochs": 3}, 6),
        ({"max_epochs": 5}, {"max_steps": 3}, 3),
        ({"max_steps": 2}, {"max_steps": -1, "max_epochs": 2}, 4),
    ],
)
def test_limits_can_be_set_in_a_running_fit(given, set_to, steps):
    extends = Extends(**set_to)
    trainer = quiet_trainer(**given, callbacks=[extends])
    trainer.fit(Classifier(), loader(8))
    assert trainer.global_step == steps
    assert [(one.ready, one.completed) for one in extends.progress[:2]] == [(1, 0), (2, 1)]


def test_what_can_be_set_is_checked_as_in_the_constructor():
    trainer = quiet_trainer()
    values = {
        "limit_train_batches": 2, "limit_val_batches": 0.5, "limit_test_batches": 1, "limit_predict_batches": 3, "min_epochs": 1,
        "min_steps": 4, "accumulate_grad_batches": 2, "log_every_n_steps": 5, "gradient_clip_val": 0.5,
        "gradient_clip_algorithm": "value", "val_check_interval": 2, "check_val_every_n_epoch": None,
    }  # fmt: skip
    for name, value in values.items():
        setattr(trainer, name, value)
    assert {name: getattr(trainer, name) for name in values} == values
    trainer.limit_train_batches = None
    assert trainer.limit_train_batches == 1.0
    for name, wrong in {
        "max_epochs": 1.5,
        "limit_train_batches": -1,
        "val_check_interval": 0,
        "gradient_clip_val": "1",
    }.items():
        with pytest.raises(ConfigError, match=name):
            setattr(trainer, name, wrong)
    seen = quiet_trainer(max_epochs=1)
    seen.limit_train_batches = 1
    seen.fit(Classifier(), loader(8))
    assert seen.global_step == 1


def test_callbacks_are_the_list_that_the_next_run_takes():
    class Counts(Callback):
        calls = 0

        def on_train_start(self, trainer, pl_module):
            self.calls += 1

    class Adds(Classifier):
        def setup(self, stage):
            if stage == "fit" and early not in self.trainer.callbacks:
                self.trainer.callbacks.append(early)

    first, added, early = Counts(), Counts(), Counts()
    trainer = quiet_trainer(max_steps=1, callbacks=[first])
    callbacks = trainer.callbacks
    callbacks.append(added)
    trainer.fit(Adds(), loader(8))
    assert trainer.callbacks is callbacks
    assert callbacks == [first, added, early]
    callbacks.remove(first)
    trainer.reset()
    trainer.fit(Adds(), loader(8))
    assert [first.calls, added.calls, early.calls] == [1, 2, 2]


def test_a_checkpoint_callback_that_is_taken_out_is_not_replaced(tmp_path):
    trainer = quiet_trainer(
        max_steps=1, callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True, default_root_dir=tmp_path
    )
    trainer.callbacks.remove(trainer.checkpoint_callback)
    trainer.fit(Classifier(), loader(8))
    assert trainer.checkpoint_callback is None
    assert not list(tmp_path.rglob("*.ckpt"))


def test_the_rest_of_the_attributes(tmp_path):
    class Sees(Classifier):
        def on_train_start(self):
            trainer, strategy = self.trainer, self.trainer.strategy
            seen.update(
                validates=trainer.enable_validation,
                max_batches=(trainer.fit_loop.max_batches, trainer.fit_loop.epoch_loop.val_loop.max_batches),
                device=strategy.root_device,
                ranks=(strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.is_global_zero),
            )

    seen = {}
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(max_steps=1, num_sanity_val_steps=0, enable_progress_bar=True)
    trainer.logger = logger
    trainer.fit(Sees(), loader(8), loader(4))
    assert seen == {
        "validates": True,
        "max_batches": (2, [1]),
        "device": torch.device("cpu"),
        "ranks": (0, 0, 0, True),
    }
    assert trainer.loggers == [logger]
    assert trainer.log_dir == str(logger.log_dir)
    trainer.logger = None
    assert trainer.logger is None
    assert trainer.device_ids == [0]
    assert isinstance(trainer.progress_bar_callback, ProgressBar)
    assert not trainer.received_sigterm
    assert trainer.num_sanity_val_steps == 0
    assert trainer.validate_loop.num_dataloaders == 1
    assert trainer.strategy.strategy_name == "single"
    assert quiet_trainer(num_sanity_val_steps=-1).num_sanity_val_steps == float("inf")


def test_none_is_the_default_of_every_argument():
    # check_val_every_n_epoch=None is a value of its own: batches are counted across epochs.
    names = [
        name for name in inspect.signature(Trainer).parameters if name not in ("unknown", "check_val_every_n_epoch")
    ]
    trainer = Trainer(**{**dict.fromkeys(names), **QUIET})
    assert settings(trainer) == settings(Trainer(**QUIET))


def test_lightnings_own_defaults_are_accepted_and_change_nothing():
    quiet_trainer(
        plugins=None, profiler=None, barebones=False, reload_dataloaders_every_n_epochs=0, model_registry=None
    )
    with pytest.raises(ConfigError, match="model_registry"):
        quiet_trainer(model_registry="here")


def test_variables_stand_for_arguments_that_are_not_given(monkeypatch):
    for name, value in {
        "MAX_EPOCHS": "7",
        "PRECISION": "16-mixed",
        "LIMIT_VAL_BATCHES": "0.5",
        "MAX_STEPS": "",
    }.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", value)
    trainer = Trainer(**QUIET)
    assert (trainer.max_epochs, trainer.precision, trainer.limit_val_batches) == (7, "16-mixed", 0.5)
    assert Trainer(**QUIET, max_epochs=2).max_epochs == 2
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "many")
    with pytest.raises(ConfigError, match="max_epochs='many'"):
        Trainer(**QUIET)


def test_the_trainer_of_a_module_can_be_set():
    class Outer(Classifier):
        def __init__(self):
            super().__init__()
            self.inner = Classifier()

    module, trainer = Outer(), quiet_trainer(max_steps=1)
    module.trainer = trainer
    assert module.trainer is module.inner.trainer is trainer
    with pytest.raises(ConfigError):
        _ = Classifier().trainer  # other modules are unchanged
    module.trainer = None
    with pytest.raises(ConfigError, match="not attached"):
        _ = module.trainer
    trainer.fit(module, loader())
    other = quiet_trainer()
    module.trainer = other
    assert module.trainer is other
    assert module.optimizers().optimizer is trainer.optimizers[0]


class OwnTable(Trainer):
    def print_results(self, results, stage):
        self.shown = [*getattr(self, "shown", ()), (stage, results)]


def test_results_are_shown_by_a_method_that_a_subclass_overrides(caplog):
    caplog.set_level("INFO")
    trainer = OwnTable(**QUIET)
    found = trainer.validate(Classifier(), loader(8))
    tested = trainer.test(Classifier(), [loader(8), loader(8)])
    trainer.test(Classifier(), loader(8), verbose=False)
    assert trainer.shown == [("validate", found), ("test", tested)]
    assert "metric" not in caplog.text
    quiet_trainer().test(Classifier(), loader(8))
    assert "metric" in caplog.text


def test_the_loops_are_not_replaced():
    trainer = quiet_trainer()
    for name in ("validate_loop", "test_loop"):
        with pytest.raises(ConfigError, match=rf"trainer.{name} shows numbers.*override Trainer.print_results"):
            setattr(trainer, name, object())
