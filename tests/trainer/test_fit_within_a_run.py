"""A Trainer's fit within one of its own runs is refused; what else hooks may run leaves the fit around it as it is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from fabricamp import Callback, ConfigError, DataModule
from fabricamp.callbacks import LearningRateFinder
from fabricamp.tuner import Tuner
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer

WORDS = r"fit was called within {} of the same Trainer .*; call it when {} has returned, or make another Trainer"


FIT_HOOKS = [
    "setup", "on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
    "on_before_zero_grad", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_validation_batch_end",
    "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown",
]  # fmt: skip


def with_hook(hook):
    """Returns a callback class that overrides ``hook``: the Trainer calls what a class overrides."""

    def call(self, trainer, module, *args, **kwargs):
        trainer.fit(Classifier(), loader(8))

    return type("Again", (Callback,), {hook: call})()


@pytest.mark.parametrize("hook", FIT_HOOKS)
def test_within_each_hook_of_a_fit(hook):
    trainer = quiet_trainer(max_epochs=1, callbacks=with_hook(hook))
    with pytest.raises(ConfigError, match=WORDS.format("fit", "fit")):
        trainer.fit(Classifier(), loader(8), loader(4))


@pytest.mark.parametrize("place", ["training_step", "configure_optimizers", "configure_callbacks", "train_dataloader"])
def test_within_the_modules_methods(place):
    class Module(Classifier):
        def call(self, *args):
            self.trainer.fit(Classifier(), loader(8))
            return self.net[0].weight.sum()

        def train_dataloader(self):
            return loader(8)

    setattr(Module, place, Module.call)
    with pytest.raises(ConfigError, match=WORDS.format("fit", "fit")):
        quiet_trainer(max_epochs=1).fit(Module())


def test_within_a_datamodules_methods():
    class Data(DataModule):
        def setup(self, stage):
            self.trainer.fit(Classifier(), loader(8))

    with pytest.raises(ConfigError, match=WORDS.format("fit", "fit")):
        quiet_trainer(max_epochs=1).fit(Classifier(), datamodule=Data())


@pytest.mark.parametrize(
    ("entry", "hook"),
    [
        ("validate", "on_validation_batch_end"),
        ("test", "on_test_end"),
        ("predict", "on_predict_start"),
        ("test", "teardown"),
    ],
)
def test_within_an_evaluation(entry, hook):
    trainer = quiet_trainer(max_epochs=1, callbacks=with_hook(hook))
    with pytest.raises(ConfigError, match=WORDS.format(entry, entry)):
        getattr(trainer, entry)(Classifier(), loader(4))


def test_within_an_evaluation_or_a_search_that_a_hook_runs():
    class Search(Callback):
        def on_train_start(self, trainer, module):
            with pytest.raises(ConfigError, match=WORDS.format("validate", "validate")):
                trainer.validate(Calls(), loader(4), verbose=False)
            with pytest.raises(ConfigError, match=WORDS.format("fit", "fit")):
                Tuner(trainer).lr_find(Calls(), loader(24), num_training=3)
            with pytest.raises(ConfigError, match=WORDS.format("fit", "fit")):
                trainer.fit(Classifier(), loader(4))

    class Calls(Classifier):
        def validation_step(self, batch, batch_idx):
            self.trainer.fit(Classifier(), loader(8))
            return self.net[0].weight.sum()

        training_step = validation_step

    trainer = quiet_trainer(max_epochs=1, callbacks=Search())
    trainer.fit(Classifier(), loader(8))
    assert trainer.global_step == 2


def test_after_a_run_that_was_refused_it_fits():
    trainer = quiet_trainer(max_epochs=1, callbacks=with_hook("on_train_start"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="of the same Trainer"):
            trainer.fit(Classifier(), loader(8))
    trainer.callbacks.clear()
    trainer.fit(Classifier(), loader(8))
    assert trainer.global_step == 2


def test_a_copy_made_within_a_run_fits():
    class Copies(Callback):
        def on_train_start(self, trainer, module):
            if not copies:
                copies.extend((copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer.strategy))))

    copies = []
    trainer = quiet_trainer(max_epochs=1)
    trainer.callbacks.append(Copies())
    trainer.fit(Classifier(), loader(8))
    copies[0].callbacks.clear()
    copies[0].fit(Classifier(), loader(8))


def weights_after_fit(ranks=1, **inner):
    """Returns the weights of a fit in which each hook of ``inner`` once calls its function, and what the functions returned."""
    found = {}

    def hook_of(name, function):
        def call(self, trainer, module, *args):
            if name not in found and trainer.global_step >= 2:
                found[name] = function(trainer, module)

        return call

    torch.manual_seed(0)
    module = Classifier()
    own = type("Inner", (Callback,), {name: hook_of(name, function) for name, function in inner.items()})()
    options = {"devices": "auto", "strategy": "ddp"} if ranks > 1 else {}
    trainer = quiet_trainer(max_epochs=2, callbacks=own, **options)
    trainer.fit(module, loader(24), loader(8))
    assert trainer.global_step == 12 // ranks
    assert found.keys() == inner.keys()
    return {name: value.clone() for name, value in module.state_dict().items()}


def other_fit(trainer, module):
    other = quiet_trainer(max_epochs=1)
    other.fit(Classifier(seed=1), loader(8))
    assert other.global_step == 2


def evaluations(trainer, module):
    assert trainer.validate(module, loader(8), verbose=False)[0].keys() == {"val_loss"}
    assert trainer.test(module, loader(8), verbose=False)[0].keys() == {"test_loss"}
    assert len(trainer.predict(module, loader(8))) == 2


def search(trainer, module):
    assert len(Tuner(trainer).lr_find(module, loader(24), num_training=4).results["lr"]) == 4


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_fit_end"])
@pytest.mark.parametrize("inner", [other_fit, evaluations, search])
def test_what_hooks_may_run_leaves_the_fit_as_it_is(inner, hook):
    plain, around = weights_after_fit(), weights_after_fit(**{hook: inner})
    assert all(torch.equal(plain[name], around[name]) for name in plain)


def test_a_fit_may_begin_with_a_search():
    trainer = quiet_trainer(max_epochs=1, callbacks=LearningRateFinder(num_training_steps=4))
    trainer.fit(Classifier(), loader(24))
    assert trainer.global_step == 6


def on_ranks():
    trainer = quiet_trainer(max_epochs=1, devices="auto", strategy="ddp", callbacks=with_hook("on_train_batch_end"))
    with pytest.raises(ConfigError, match=WORDS.format("fit", "fit")):
        trainer.fit(Classifier(), loader(16))
    return True


def test_on_ranks():
    assert run_ranks(on_ranks, 2) == [True, True]
