"""Mistakes that would otherwise go unnoticed are found before the first batch, or reported when they show."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback, ConfigError, DataModule, TrainingModule
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.engine.checks.model_checks import misspelt_hooks, returns_nothing, unknown_hooks
from tests.small import Classifier, loader, quiet_trainer


def variant(**members):
    return type("Variant", (Classifier,), members)()


def fit(module, *callbacks, **options):
    trainer = quiet_trainer(callbacks=list(callbacks), **{"max_epochs": 1, **options})
    trainer.fit(module, loader(8))
    return trainer


def forgets(self, batch, batch_idx):
    self.log("loss", self.net(batch[0]).mean())


def returns_in_a_branch(self, batch, batch_idx):
    if batch_idx:
        with contextlib.suppress(ValueError):
            return self.net(batch[0]).mean()
    return None


def returns_a_choice(self, batch, batch_idx):
    return self.net(batch[0]).mean() if batch_idx else None


def returns_none_early(self, batch, batch_idx):
    with torch.no_grad():
        if batch_idx:
            return
    self.log("loss", 1.0)


def raises(self, batch, batch_idx):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("step", "nothing"),
    [
        (forgets, True),
        (returns_none_early, True),
        (returns_in_a_branch, False),
        (returns_a_choice, False),
        (raises, False),
        (len, False),
    ],
)
def test_a_step_is_known_to_return_nothing_where_no_path_has_a_value(step, nothing):
    assert returns_nothing(step) is nothing


def test_a_training_step_without_a_value_is_an_error_under_automatic_optimization_only(caplog):
    with pytest.raises(ConfigError, match=r"Variant.training_step returns no value.*'return loss'"):
        fit(variant(training_step=forgets))
    fit(variant(training_step=forgets, automatic_optimization=False))
    assert "epoch 1 ended without a step: training_step called no optimizer's step" in caplog.text


class Skipping(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        return -1


def test_an_epoch_without_a_step_says_why_once(caplog):
    fit(variant(training_step=lambda self, batch, batch_idx: [None][0]), max_epochs=3)
    assert caplog.text.count("ended without a step: training_step returned None for each of its batches") == 1
    fit(Classifier(), Skipping())
    assert "epoch 1 ended without a step: on_train_batch_start returned -1" in caplog.text
    caplog.clear()
    fit(Classifier())
    assert caplog.text == ""


class EarlySteps(Classifier):
    """Only the first three batches of the first epoch have a loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.current_epoch == 0 and batch_idx < 3 else None


class SavesAtTheCut(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 0 and batch_idx == 3:
            trainer.save_checkpoint(self.path)


def test_an_epoch_whose_steps_lie_before_the_cut_is_not_one_without_a_step(tmp_path, caplog):
    path = tmp_path / "cut.ckpt"
    quiet_trainer(max_epochs=1, callbacks=[SavesAtTheCut(path)]).fit(EarlySteps(), loader(32))
    assert "ended without a step" not in caplog.text
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(EarlySteps(), loader(32), ckpt_path=path)
    assert trainer.global_step == 16  # steps without a loss count
    assert "epoch 1 ended without a step" not in caplog.text
    assert caplog.text.count("epoch 2 ended without a step") == 1  # this run made that epoch from its first batch


def test_a_fit_without_an_optimizer_is_told_of_under_automatic_optimization_only(caplog):
    fit(variant(configure_optimizers=lambda self: None))
    assert caplog.text.count("Variant.configure_optimizers returned no optimizer: no weight will change") == 1
    caplog.clear()
    fit(variant(configure_optimizers=lambda self: None, training_step=forgets, automatic_optimization=False))
    assert "returned no optimizer" not in caplog.text


class Misspelt(Callback):
    def on_train_epoch_ends(self, trainer, module):
        raise AssertionError

    def on_train_batch_end(self, *arguments):
        self.on_train_batch_ended()

    def on_train_batch_ended(self):
        """A helper with a similar name; the hook itself is defined too."""


def test_a_misspelt_hook_is_told_of(caplog):
    helper = {"training_step": Classifier.training_step, "train_step": lambda self: None}
    module = variant(validaton_step=lambda self, batch, batch_idx: None, **helper)
    fit(module, Misspelt())
    assert [record.getMessage() for record in caplog.records] == [
        "Variant.validaton_step is not a hook; did you mean 'validation_step'?",
        "Misspelt.on_train_epoch_ends is not a hook; did you mean 'on_train_epoch_end'?",
    ]
    data = type("Data", (DataModule,), {"trian_dataloader": lambda self: None})()
    assert list(misspelt_hooks(data, DataModule)) == [("trian_dataloader", "train_dataloader")]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("val_step", "validation_step"),
        ("valid_step", "validation_step"),
        ("validate_step", "validation_step"),
        ("eval_step", "validation_step"),
        ("train_step", "training_step"),
        ("testing_step", "test_step"),
        ("prediction_step", "predict_step"),
        ("configure_optimizer", "configure_optimizers"),
        ("configure_optim", "configure_optimizers"),
        ("on_val_epoch_end", "on_validation_epoch_end"),
        ("on_training_batch_end", "on_train_batch_end"),
        ("train_loader", "train_dataloader"),
        ("validation_dataloader", "val_dataloader"),
        ("test_dataloaders", "test_dataloader"),
        ("on_train_epoch_finish", "on_train_epoch_end"),
        ("on_validation_begin", "on_validation_start"),
    ],
)
def test_another_word_for_a_hook_is_told_of(given, meant):
    bare = type("Bare", (TrainingModule,), {given: lambda self, *arguments: None})()
    assert list(misspelt_hooks(bare, TrainingModule)) == [(given, meant)]


@pytest.mark.parametrize(
    "name", ["val", "optimizer", "test_accuracy", "train_net", "step", "on_the_way", "loader", "eval_all"]
)
def test_a_method_of_ones_own_is_not(name):
    bare = type("Bare", (TrainingModule,), {name: lambda self, *arguments: None})()
    assert list(misspelt_hooks(bare, TrainingModule)) == []


class Listens(Callback):
    """Has methods ``on_...`` that are called: by itself, by name, by another part, and one that nothing calls."""

    def on_fit_start(self, trainer, module):
        self.on_something()
        getattr(self, "on_" + "x", None)
        trainer.listeners = {"later": lambda: self.on_demand(), "named": "on_named"}  # noqa: PLW0108

    def on_something(self):
        """Called by a hook."""

    def on_demand(self):
        """Called by a function within a hook."""

    def on_named(self):
        """Called by name."""

    def on_reward(self, value):
        """Called by the module."""

    def on_every_full_moon(self, trainer, module):
        raise AssertionError


def test_a_method_on_something_that_nothing_calls_is_told_of(caplog):
    def step(self, batch, batch_idx):
        if batch_idx < 0:
            self.trainer.callbacks[0].on_reward(1.0)
        return self.net(batch[0]).mean()

    fit(variant(training_step=step), Listens())
    assert caplog.messages == [
        'Listens.on_every_full_moon is not a hook, and nothing here calls it (help("fabricamp.hooks") lists the hooks)'
    ]


def test_what_is_missing_names_what_was_meant_for_it():
    def without(**methods):
        names = ("training_step", "configure_optimizers", "forward")
        kept = {
            name: vars(Classifier).get(name, Classifier.training_step) for name in names if name not in methods.values()
        }
        given = {name: lambda self, *arguments: None for name in methods}
        return type("Bare", (TrainingModule,), {**kept, **given})()

    def message(call):
        with pytest.raises(ConfigError) as raised:
            call()
        return str(raised.value)

    trainer = quiet_trainer(max_epochs=1)
    said = message(lambda: trainer.fit(without(configure_optimizer="configure_optimizers"), loader(8)))
    assert "has no configure_optimizers, which fit needs; rename configure_optimizer to configure_optimizers" in said
    said = message(lambda: trainer.fit(without(train_step="training_step"), loader(8)))
    assert "has no training_step, which fit needs; rename train_step to training_step" in said
    said = message(lambda: trainer.validate(without(val_step="validation_step"), loader(8)))
    assert "has no validation_step, which validate needs; rename val_step to validation_step" in said


def test_a_forgotten_call_of_the_base_is_named():
    class Forgets(Classifier):
        def __init__(self, value):
            self.value = value

    class SaysTorch(TrainingModule):
        def __setattr__(self, name, value):
            raise AttributeError("of its own")

    for value in (torch.nn.Linear(1, 1), torch.nn.Parameter(torch.ones(1))):
        with pytest.raises(ConfigError, match=r"Forgets sets 'value' before .*call super\(\).__init__\(\) first"):
            Forgets(value)
    with pytest.raises(ConfigError, match=r"Forgets.__init__ does not call super\(\).__init__\(\)"):
        quiet_trainer(max_epochs=1).fit(Forgets(3), loader(8))
    with pytest.raises(AttributeError, match="of its own"):
        SaysTorch().lr = 3


def test_a_hook_that_lightning_2_calls_no_more_is_told_of():
    old = {"on_epoch_end": "on_train_epoch_end", "on_keyboard_interrupt": "on_exception", "on_init_end": "setup"}
    callback = type("Old", (Callback,), {name: lambda *arguments: None for name in old})()
    assert dict(misspelt_hooks(callback, Callback)) == old
    both = type("Both", (Callback,), {name: lambda *arguments: None for name in ("on_epoch_end", "on_train_epoch_end")})
    assert list(misspelt_hooks(both(), Callback)) == []


def test_no_hook_of_the_package_is_taken_for_a_misspelt_one():
    from fabricamp import callbacks

    named = [getattr(callbacks, name) for name in callbacks.__all__]
    kinds = [one for one in named if isinstance(one, type) and issubclass(one, Callback)]
    assert len(kinds) > 5
    for kind in kinds:
        assert list(misspelt_hooks(kind.__new__(kind), Callback)) == []
        assert list(unknown_hooks(kind.__new__(kind), Callback, ())) == []


def one_cycle(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    steps = int(self.trainer.estimated_stepping_batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_one_cycle_run_cannot_be_resumed_with_more_epochs(tmp_path):
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    fit(variant(configure_optimizers=one_cycle), ModelCheckpoint(tmp_path, filename="end"), max_epochs=2, **options)

    def resume(**more):
        trainer = quiet_trainer(**options, **more)
        trainer.fit(variant(configure_optimizers=one_cycle), loader(8), ckpt_path=tmp_path / "end.ckpt")
        return trainer

    with pytest.raises(ConfigError, match=r"end\.ckpt holds a OneCycleLR of 4 steps, but the run is to make 6"):
        resume(max_epochs=3)
    assert resume(max_epochs=2).global_step == 4
    with pytest.raises(ConfigError, match=r"end\.ckpt has 2 finished epochs, more than max_epochs=1"):
        resume(max_epochs=1)


def test_a_step_that_wants_an_iterator_and_a_prediction_without_forward():
    with pytest.raises(ConfigError, match="takes dataloader_iter, but it gets batches"):
        fit(variant(training_step=lambda self, dataloader_iter: next(dataloader_iter)))
    with pytest.raises(ConfigError, match="has no predict_step, which predict needs; write one, or forward"):
        quiet_trainer().predict(TrainingModule(), DataLoader(torch.ones(2, 1)))


@pytest.mark.parametrize("what", ["epochs", "steps"])
def test_a_least_above_the_most(what):
    with pytest.raises(ConfigError, match=f"min_{what}=3 is above max_{what}=1; lower it"):
        quiet_trainer(**{f"min_{what}": 3, f"max_{what}": 1})


def test_a_flag_of_log_that_is_none():
    def step(self, batch, batch_idx):
        self.log("loss", 1.0, on_epoch="yes")
        return self.net(batch[0]).mean()

    with pytest.raises(ConfigError, match=r"self.log\('loss', on_epoch='yes'\): give True or False"):
        fit(variant(training_step=step))


@pytest.mark.parametrize("precision", ["O0", "O1", "O4"])
def test_a_layer_that_makes_its_weights_later_is_refused_until_it_has_them(precision):
    class Lazy(Classifier):
        def __init__(self, *, ready):
            super().__init__()
            self.late = torch.nn.LazyLinear(2)
            if ready:
                with torch.no_grad():
                    self.late(torch.zeros(1, 2))

    with pytest.raises(ConfigError, match=r"'late' \(LazyLinear\) has no weights before its first forward"):
        quiet_trainer(max_steps=1, precision=precision).fit(Lazy(ready=False), loader())
    quiet_trainer(max_steps=1, precision=precision).fit(Lazy(ready=True), loader())
