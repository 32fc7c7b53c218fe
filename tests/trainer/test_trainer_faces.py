"""Lightning's arguments plugins, barebones and enable_autolog_hparams."""

from __future__ import annotations

import json
import os

import pytest
import torch

from fabricamp import Callback, ConfigError, OptLevel, Trainer
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.loggers import CSVLogger
from fabricamp.strategies import DDP, Environment
from tests.distributed.ranks import run_ranks
from tests.inside import runner
from tests.small import Classifier, loader, quiet_trainer


def test_plugins_are_a_precision_and_an_environment():
    level = OptLevel("O2", loss_scale=128.0)
    assert quiet_trainer(plugins=level).precision_plugin is level
    assert quiet_trainer(plugins=level, precision=None).precision == "O2"
    here = Environment(rank=1, local_rank=1, world_size=2, local_world_size=2, name="kubeflow")
    trainer = quiet_trainer(plugins=[level, here], devices="auto")
    assert (trainer.global_rank, trainer.world_size, trainer.strategy.name) == (1, 2, "ddp")
    assert not runner(trainer).launches
    quiet_trainer(plugins=[], max_steps=1).fit(Classifier(), loader())


def on_another_cluster():
    rank, size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)
    here = Environment(rank=rank, local_rank=rank, world_size=size, local_world_size=size, name="mine")
    module = Classifier()
    trainer = quiet_trainer(plugins=here, devices="auto", max_epochs=1)
    trainer.fit(module, loader(32))
    return trainer.global_rank, trainer.global_step, module.net[0].weight.detach()


def test_an_environment_says_which_process_this_is():
    (rank, steps, weight), (other, _, same) = run_ranks(on_another_cluster, 2)
    assert (rank, other, steps) == (0, 1, 4)
    assert torch.equal(weight, same)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plugins": [OptLevel("O1"), OptLevel("O2")]}, "two precisions"),
        ({"plugins": OptLevel("O1"), "precision": "O2"}, "precision='O2' and a precision in plugins"),
        ({"plugins": DDP()}, "plugins holds a DDP.*a strategy goes to strategy="),
        ({"plugins": Environment(world_size=2, local_world_size=2, name="mine"), "devices": 3}, "but mine started 2"),
    ],
)
def test_plugins_that_cannot_work_are_refused(options, words):
    with pytest.raises(ConfigError, match=f"(?is){words}"):
        quiet_trainer(**options)


def test_plugins_of_lightning_are_refused_by_name():
    plugins = pytest.importorskip("lightning.pytorch.plugins", reason="needs the package lightning")
    environments = pytest.importorskip("lightning.fabric.plugins.environments", reason="needs the package lightning")
    for one in (plugins.DoublePrecision(), environments.SLURMEnvironment(), plugins.TorchSyncBatchNorm()):
        with pytest.raises(ConfigError, match=f"{type(one).__name__}.*torchrun and SLURM are found by themselves"):
            quiet_trainer(plugins=[one])


class Logs(Classifier):
    def __init__(self):
        super().__init__()
        self.width = 3
        self.save_hyperparameters({"width": 3})


def test_bare_bones_train_and_nothing_else(tmp_path, caplog):
    class Counts(Callback):
        validations = 0

        def on_validation_start(self, trainer, pl_module):
            self.validations += 1

    def fit(trainer):
        torch.manual_seed(0)
        module = Logs()
        trainer.fit(module, loader(16), loader(8))
        return module

    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "default_root_dir": tmp_path}
    counts = Counts()
    trainer = Trainer(**options, barebones=True, callbacks=counts)
    module = fit(trainer)
    assert (trainer.loggers, trainer.callbacks, counts.validations) == ([], [counts], 2)
    assert (trainer.callback_metrics, trainer.validate(module, loader(8))) == ({}, [{}])
    assert list(tmp_path.iterdir()) == []
    assert "Ended" not in caplog.text
    plain = fit(quiet_trainer(max_epochs=2))
    assert all(torch.equal(one, two) for one, two in zip(module.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logger", True),
        ("enable_checkpointing", True),
        ("fast_dev_run", 2),
        ("profiler", "simple"),
        ("num_sanity_val_steps", 2),
    ],
)
def test_bare_bones_and_what_they_leave_out_contradict(name, value):
    with pytest.raises(ConfigError, match=f"barebones=True stands for {name}=.*leave one of them out"):
        Trainer(accelerator="cpu", barebones=True, **{name: value})
    with pytest.raises(ConfigError, match="callbacks holds a ModelCheckpoint, but enable_checkpointing=False"):
        Trainer(accelerator="cpu", barebones=True, callbacks=ModelCheckpoint())


@pytest.mark.parametrize("logs", [True, False])
def test_hyperparameters_go_to_loggers_where_that_is_wanted(tmp_path, logs):
    logger = CSVLogger(tmp_path, name="", version="run")
    trainer = quiet_trainer(max_steps=1, logger=logger, log_every_n_steps=1, enable_autolog_hparams=logs)
    trainer.fit(Logs(), loader())
    assert (tmp_path / "run" / "hparams.yaml").exists() == logs
    assert ("width" in json.loads((tmp_path / "run" / "run.json").read_text())["hyperparameters"]) == logs
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    assert torch.load(tmp_path / "file.ckpt", weights_only=True)["hyper_parameters"] == {"width": 3}


def test_detect_anomaly_names_the_operation_for_as_long_as_the_run():
    class Bad(Classifier):
        def training_step(self, batch, batch_idx):
            return (self.net(batch[0]) * 0).sqrt().sum()  # its gradient is 0 * inf = nan

    with (
        pytest.warns(UserWarning, match="Error detected in MulBackward0"),
        pytest.raises(RuntimeError, match="'MulBackward0' returned nan"),
    ):
        quiet_trainer(max_steps=1, detect_anomaly=True).fit(Bad(), loader())
    assert not torch.is_anomaly_enabled()
    quiet_trainer(max_steps=1).fit(Bad(), loader())


@pytest.mark.parametrize(
    ("options", "inside"),
    [
        ({"deterministic": True}, (True, False, False)),
        ({"deterministic": "warn"}, (True, True, False)),
        ({"deterministic": True, "benchmark": True}, (True, False, True)),
        ({"benchmark": True}, (False, False, True)),
        ({"benchmark": False}, (False, False, False)),
    ],
)
def test_determinism_and_benchmark_last_as_long_as_the_run(options, inside):
    def settings():
        algorithms, warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        return algorithms, warns, torch.backends.cudnn.benchmark

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append(settings())
            return super().training_step(batch, batch_idx)

    seen, before = [], settings()
    quiet_trainer(max_steps=1, **options).fit(Looks(), loader())
    assert seen == [inside]
    assert settings() == before


@pytest.mark.parametrize("inference_mode", [True, False])
def test_evaluation_is_in_inference_mode_or_without_gradients(inference_mode):
    class Looks(Classifier):
        def validation_step(self, batch, batch_idx):
            seen.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

        test_step = predict_step = validation_step

    seen = set()
    trainer, module = quiet_trainer(max_steps=1, inference_mode=inference_mode), Looks()
    trainer.fit(module, loader())
    trainer.validate(module, loader(), verbose=False)
    trainer.test(module, loader(), verbose=False)
    trainer.predict(module, loader())
    assert seen == {(inference_mode, False)}
