"""Lightning's own objects given to fabricamp's Trainer: the error names fabricamp's class."""

from __future__ import annotations

import pytest

import fabricamp
from fabricamp import ConfigError
from tests.inside import settings
from tests.small import Classifier, loader, quiet_trainer


def lightnings(name, module, *bases):
    """Returns a class with this name and module, as Lightning has it."""
    return type(name, bases, {"__module__": f"lightning.pytorch.{module}"})


CallbackOfTheirs = lightnings("Callback", "callbacks.callback")
EarlyStoppingOfTheirs = lightnings("EarlyStopping", "callbacks.early_stopping", CallbackOfTheirs)
DerivedOfTheirs = type("Derived", (EarlyStoppingOfTheirs,), {})
PruningOfTheirs = lightnings("ModelPruning", "callbacks.pruning", CallbackOfTheirs)
LoggerOfTheirs = lightnings("Logger", "loggers.logger")
NeptuneOfTheirs = lightnings("NeptuneLogger", "loggers.neptune", LoggerOfTheirs)
DDPOfTheirs = lightnings("DDPStrategy", "strategies.ddp")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quiet_trainer(callbacks=[EarlyStoppingOfTheirs()]),
         "EarlyStopping is Lightning's; change the import: from fabricamp.callbacks import EarlyStopping"),
        (lambda: quiet_trainer(callbacks=PruningOfTheirs()), "not offered by fabricamp: call torch.nn.utils.prune"),
        (lambda: quiet_trainer(callbacks=DerivedOfTheirs()), "derives from Lightning's EarlyStopping; change the import"),
        (lambda: quiet_trainer(logger=NeptuneOfTheirs()), "NeptuneLogger is not offered"),
        (lambda: quiet_trainer(strategy=DDPOfTheirs()), "from fabricamp.strategies import DDPStrategy"),
    ],
)  # fmt: skip
def test_the_error_says_what_it_is_called_here(call, words):
    with pytest.raises(ConfigError, match=words) as error:
        call()
    assert "0x" not in str(error.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: quiet_trainer().fit(Classifier(), datamodule=object()),
        lambda: quiet_trainer(callbacks=[object()]),
        lambda: quiet_trainer(logger=object()),
        lambda: quiet_trainer(strategy=object()),
    ],
)
def test_no_error_prints_an_address(call):
    with pytest.raises(ConfigError, match="object") as error:
        call()
    assert "0x" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "unused", "start"),
    [
        ("ddp_find_unused_parameters_true", True, "auto"),
        ("ddp_find_unused_parameters_false", False, "auto"),
        ("ddp_spawn", False, "spawn"),
        ("ddp_fork", False, "fork"),
        ("ddp_notebook", False, "fork"),
        ("ddp_notebook_find_unused_parameters_true", True, "fork"),
        ("ddp_spawn_find_unused_parameters_false", False, "spawn"),
    ],
)
def test_lightnings_names_of_ddp(name, unused, start):
    trainer = quiet_trainer(strategy=name)
    assert (trainer.strategy.name, trainer.strategy.find_unused_parameters) == ("ddp", unused)
    assert settings(trainer).start_method == start


def test_what_the_trainer_is_told_of_starting_goes_first():
    assert settings(quiet_trainer(strategy="ddp_spawn", start_method="fork")).start_method == "fork"


def test_single_device_by_name_and_class():
    from fabricamp.strategies.single_device import SingleDeviceStrategy

    quiet_trainer(strategy="single_device", max_steps=1).fit(Classifier(), loader())
    quiet_trainer(strategy=SingleDeviceStrategy(device="cpu"), max_steps=1).fit(Classifier(), loader())
    with pytest.raises(ConfigError, match=r"accelerator='cuda'"):
        quiet_trainer(strategy=SingleDeviceStrategy(device="cuda:0"), max_steps=1).fit(Classifier(), loader())


def test_ddp_strategy_takes_lightnings_arguments():
    from fabricamp.strategies.ddp import DDPStrategy

    assert DDPStrategy is fabricamp.strategies.DDPStrategy
    strategy = DDPStrategy(
        find_unused_parameters=True,
        ddp_comm_hook=lambda state, bucket: None,
        process_group_backend="gloo",
        start_method="spawn",
    )
    trainer = quiet_trainer(strategy=strategy, max_steps=1)
    assert settings(trainer).start_method == "spawn"
    assert strategy.find_unused_parameters
    assert strategy.comm_hook is not None
    for given, words in {
        "parallel_devices": "devices",
        "cluster_environment": "torchrun",
        "start_method": "popen",
    }.items():
        with pytest.raises(ConfigError, match=words):
            DDPStrategy(**{given: "x"})
    with pytest.raises(ConfigError, match="gloo"):
        quiet_trainer(strategy=DDPStrategy(process_group_backend="nccl"), max_steps=1).fit(Classifier(), loader())
    quiet_trainer(strategy=DDPStrategy(process_group_backend="gloo"), max_steps=1).fit(Classifier(), loader())
