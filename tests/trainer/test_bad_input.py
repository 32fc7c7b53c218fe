"""Modules, optimizers, data and checkpoints that cannot work: one clear error each, before training if possible."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from fabricamp import DDP, FSDP, CheckpointError, Compile, ConfigError, CudaGraph, DataModule, TrainingModule
from fabricamp.callbacks import EMA, DivergenceCheck, EarlyStopping, GradientMonitor
from fabricamp.data import LengthGroups
from tests.small import Classifier, data, loader, quiet_trainer


def fit(module, *args, **options):
    quiet_trainer(**{"max_epochs": 1, **options}).fit(module, *(args or (loader(),)))


def variant(**members):
    return type("Variant", (Classifier,), members)()


class Untrained(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)


def test_a_plain_module():
    with pytest.raises(ConfigError, match="TrainingModule"):
        fit(torch.nn.Linear(1, 1))


def test_no_training_step():
    with pytest.raises(ConfigError, match="no training_step"):
        fit(Untrained())


def test_no_validation_step():
    with pytest.raises(ConfigError, match="no validation_step"):
        quiet_trainer().validate(Untrained(), loader())


def test_no_configure_optimizers():
    module = type("Half", (Untrained,), {"training_step": Classifier.training_step})()
    with pytest.raises(ConfigError, match="no configure_optimizers"):
        fit(module)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda module, x: module.net(x), "scalar"),
        (lambda module, x: module.net(x).mean().detach(), "no graph"),
        (lambda module, x: torch.ones(()), "no graph"),
        (lambda module, x: 3.0, "float"),
        (lambda module, x: {"los": module.net(x).mean()}, "'loss'"),
        (lambda module, x: [module.net(x).mean()], "list"),
    ],
)
def test_a_loss_that_is_none(loss, message):
    with pytest.raises(ConfigError, match=message):
        fit(variant(training_step=lambda self, batch, batch_idx: loss(self, batch[0])))


def test_a_training_step_with_other_arguments():
    with pytest.raises(ConfigError, match="batch, batch_idx"):
        fit(variant(training_step=lambda self, a, b, c: a))


def test_an_optimizer_over_another_modules_parameters():
    other = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="not parameters of Variant"):
        fit(variant(configure_optimizers=lambda self: torch.optim.SGD(other.parameters(), lr=0.1)))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda optimizer, scheduler: "sgd", "str"),
        (lambda optimizer, scheduler: {"optimiser": optimizer}, "did you mean 'optimizer'"),
        (lambda optimizer, scheduler: {"lr_scheduler": scheduler}, "'lr_scheduler'|without 'optimizer'"),
        (
            lambda optimizer, scheduler: {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "intervall": "step"},
            },
            "interval",
        ),
        (
            lambda optimizer, scheduler: {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "batch"},
            },
            "'batch'",
        ),
        (
            lambda optimizer, scheduler: {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "frequency": 0},
            },
            "frequency",
        ),
        (lambda optimizer, scheduler: [optimizer, scheduler], "LambdaLR"),
        (
            lambda optimizer, scheduler: {"optimizer": optimizer, "lr_scheduler": type(scheduler)},
            r"LambdaLR.*an object with step",
        ),
        (lambda optimizer, scheduler: ([type(optimizer)], []), "type"),
        (lambda optimizer, scheduler: [optimizer, optimizer], "twice"),
        (
            lambda optimizer, scheduler: {
                "optimizer": optimizer,
                "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            },
            "monitor",
        ),
    ],
)
def test_forms_of_configure_optimizers_that_are_none(returned, message):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return returned(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))

    with pytest.raises(ConfigError, match=message):
        fit(variant(configure_optimizers=configure_optimizers))


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("empty", [[], DataLoader(data(0), 4), 5, None])
def test_nothing_to_train_on(empty):
    with pytest.raises(ConfigError, match="train"):
        fit(Classifier(), empty)


WITHOUT = "; to go without validation: limit_val_batches=0, or leave the loader out"


def test_an_empty_validation_loader_says_how_to_go_without_one():
    empty = DataLoader(data(0), 4)
    with pytest.raises(ConfigError) as told:
        quiet_trainer(max_epochs=1).fit(Classifier(), loader(8), empty)
    assert str(told.value).startswith("val_dataloaders: DataLoader over TensorDataset has no batches")
    assert str(told.value).endswith(WITHOUT)
    with pytest.raises(
        ConfigError, match=r"CombinedLoader\[1\].* has no batches.*; or leave it out of the collection$"
    ):
        quiet_trainer(max_epochs=1).fit(Classifier(), loader(8), [loader(8), empty])
    for options in ({"limit_val_batches": 0}, {}):
        given = [empty] if options else []
        quiet_trainer(max_epochs=1, **options).fit(Classifier(), loader(8), *given)
    with pytest.raises(ConfigError) as told:
        quiet_trainer().validate(Classifier(), empty)
    assert str(told.value).startswith("dataloaders: ")
    assert "to go without" not in str(told.value)


def test_an_iterable_without_a_batch():
    with pytest.raises(ConfigError, match="gave no batch"):
        fit(Classifier(), DataLoader(Nothing(), 4))


def test_an_evaluation_loader_without_a_batch_is_told_once(caplog):
    with caplog.at_level(logging.WARNING, "fabricamp"):
        trainer = quiet_trainer(max_epochs=2)
        trainer.fit(Classifier(), loader(8), [loader(8), DataLoader(Nothing(), 4)])
        assert trainer.test(Classifier(), DataLoader(Nothing(), 4), verbose=False) == [{}]
    cure = "gave no batch, so it has no values; check the data set and the batch size"
    of_fit, of_test = caplog.messages
    assert of_fit.startswith(f"validation loader 2 of 2 {cure}")
    assert of_fit.endswith(WITHOUT)
    assert of_test.startswith(f"test loader {cure}")
    assert "to go without" not in of_test


def test_an_empty_validation_is_told_before_a_monitor_misses_its_value(caplog):
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=0, callbacks=[EarlyStopping("val_loss")])
    with caplog.at_level(logging.WARNING, "fabricamp"), pytest.raises(ConfigError, match="val_loss"):
        trainer.fit(Classifier(), loader(8), DataLoader(Nothing(), 4))
    assert caplog.messages[0].startswith("validation loader gave no batch")


def test_nothing_to_test_on():
    with pytest.raises(ConfigError, match="nothing to test"):
        quiet_trainer().test(Classifier())


def test_loaders_and_a_datamodule():
    with pytest.raises(ConfigError, match="one of them"):
        quiet_trainer(max_epochs=1).fit(Classifier(), loader(), datamodule=DataModule())


class Empty(DataModule):
    """Has a loader that the run does not need, or a method that returns None."""

    def test_dataloader(self):
        return None


def test_a_datamodule_without_the_loader_and_one_that_returns_none():
    with pytest.raises(
        ConfigError, match="write Empty.train_dataloader, or pass train_dataloaders in place of the data"
    ):
        quiet_trainer(max_epochs=1).fit(Classifier(), datamodule=Empty())
    with pytest.raises(ConfigError, match=r"Empty.test_dataloader\(\) returned no loader; return one"):
        quiet_trainer().test(Classifier(), datamodule=Empty())
    with pytest.raises(ConfigError, match="pass dataloaders or a datamodule, or write Classifier.predict_dataloader"):
        quiet_trainer().predict(Classifier())


def test_a_loader_and_a_class_as_a_datamodule():
    with pytest.raises(ConfigError, match="fit got DataLoader as datamodule; .* a loader as train_dataloaders"):
        quiet_trainer(max_epochs=1).fit(Classifier(), datamodule=loader())
    with pytest.raises(ConfigError, match="test got the class DataModule.* an instance of a DataModule"):
        quiet_trainer().test(Classifier(), datamodule=DataModule)


def test_a_validation_interval_beyond_the_epoch():
    with pytest.raises(ConfigError, match="val_check_interval=100"):
        quiet_trainer(max_epochs=1, val_check_interval=100).fit(Classifier(), loader(), loader())


def test_a_checkpoint_of_another_model(tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = variant(__init__=lambda self: (Classifier.__init__(self), setattr(self, "extra", torch.nn.Linear(2, 2)))[0])
    with pytest.raises(CheckpointError, match="does not fit the model.*missing extra.bias, extra.weight"):
        quiet_trainer(max_epochs=1).fit(other, loader(), ckpt_path=tmp_path / "a.ckpt")
    wider = variant(
        __init__=lambda self: (
            Classifier.__init__(self),
            setattr(self, "net", torch.nn.Sequential(torch.nn.Linear(8, 5))),
        )[0]
    )
    with pytest.raises(CheckpointError, match=r"other shape net.0.bias: \(16,\) in the file, \(5,\) here"):
        quiet_trainer().validate(wider, loader(), ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize("path", ["nowhere.ckpt", "best", "last"])
def test_a_checkpoint_that_is_not_there(path):
    with pytest.raises(CheckpointError, match=path):
        quiet_trainer(max_epochs=1).fit(Classifier(), loader(), ckpt_path=path)


def test_weights_alone_do_not_continue_a_fit(tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match="weights only"):
        quiet_trainer(max_epochs=2).fit(Classifier(), loader(), ckpt_path=tmp_path / "weights.ckpt")
    assert quiet_trainer().validate(Classifier(), loader(), ckpt_path=tmp_path / "weights.ckpt")


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"precision": "O1"}, {"precision": "O2"}])
def test_an_optimizer_that_calls_the_forward_itself_refuses_what_it_cannot(options):
    module = variant(configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters()))
    with pytest.raises(ConfigError, match="LBFGS"):
        fit(module, **options)


def test_a_module_outside_a_trainer():
    module = Classifier()
    with pytest.raises(ConfigError, match="not attached"):
        module.trainer  # noqa: B018
    module.log("x", 1.0)  # outside a run
    assert (module.global_step, module.current_epoch, module.global_rank) == (0, 0, 0)


FLAGS = {
    "static_graph": DDP,
    "offload": FSDP,
    "required": CudaGraph,
    "evaluation": Compile,
    "per_parameter": GradientMonitor,
}
COUNTS = {"replicate": FSDP, "steps": CudaGraph, "every": EMA, "every_n_steps": DivergenceCheck, "group": LengthGroups}


@pytest.mark.parametrize("value", [1, "yes", None])
@pytest.mark.parametrize("name", FLAGS)
def test_one_sentence_for_a_flag(name, value):
    given = rf"{FLAGS[name].__name__}\({name}={value!r}\)"
    with pytest.raises(ConfigError, match=rf"^{given} is not allowed; give True or False$"):
        FLAGS[name](**{name: value})


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
@pytest.mark.parametrize("name", COUNTS)
def test_one_sentence_for_a_count(name, value):
    needed = {"lengths": [1], "batch_size": 1} if name == "group" else {}
    given = re.escape(f"{COUNTS[name].__name__}({name}={value!r})")
    with pytest.raises(ConfigError, match=rf"^{given} is not allowed; give a whole number from 1$"):
        COUNTS[name](**needed, **{name: value})


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_of_numpy_s_is_a_whole_number(name):
    needed = {"lengths": [1], "batch_size": 1} if name == "group" else {}
    made = COUNTS[name](**needed, **{name: np.int64(1)})
    assert type(vars(made)["_group" if name == "group" else name]) is int
