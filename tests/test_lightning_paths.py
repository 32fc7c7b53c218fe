"""Lightning's names and paths: their content, completion, and the errors for names that are not offered."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import fabricamp
from fabricamp import ConfigError, profilers
from fabricamp.arguments.migration import not_offered
from fabricamp.callbacks import LearningRateMonitor, ModelCheckpoint, ModelSummary, ProgressBar, model_summary
from fabricamp.checkpoint.hyperparameters import Hyperparameters, HyperparametersMixin
from fabricamp.data import CombinedLoader
from fabricamp.engine.optimizer_setup import ManagedOptimizer, SchedulerConfig
from fabricamp.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from fabricamp.state import RunState
from fabricamp.strategies import Strategy
from fabricamp.tuner import Tuner
from tests.small import Classifier, loader, quiet_trainer

HOLDS = {
    "LightningModule": fabricamp.TrainingModule,
    "LightningDataModule": fabricamp.DataModule,
    "callbacks.callback.Callback": fabricamp.Callback,
    "callbacks.early_stopping.EarlyStopping": fabricamp.callbacks.EarlyStopping,
    "callbacks.batch_size_finder.BatchSizeFinder": fabricamp.callbacks.BatchSizeFinder,
    "callbacks.lambda_function.LambdaCallback": fabricamp.callbacks.LambdaCallback,
    "callbacks.timer.Timer": fabricamp.callbacks.Timer,
    "callbacks.lr_finder.LearningRateFinder": fabricamp.callbacks.LearningRateFinder,
    "callbacks.finetuning.BackboneFinetuning": fabricamp.callbacks.BackboneFinetuning,
    "callbacks.lr_monitor.LearningRateMonitor": LearningRateMonitor,
    "callbacks.model_checkpoint.ModelCheckpoint": ModelCheckpoint,
    "callbacks.model_summary.ModelSummary": ModelSummary,
    "callbacks.progress.ProgressBar": ProgressBar,
    "callbacks.progress.progress_bar.ProgressBar": ProgressBar,
    "callbacks.rich_model_summary.RichModelSummary": ModelSummary,
    "callbacks.stochastic_weight_avg.StochasticWeightAveraging": fabricamp.callbacks.StochasticWeightAveraging,
    "callbacks.weight_averaging.WeightAveraging": fabricamp.callbacks.WeightAveraging,
    "core.LightningModule": fabricamp.TrainingModule,
    "core.datamodule.LightningDataModule": fabricamp.DataModule,
    "core.mixins.HyperparametersMixin": HyperparametersMixin,
    "core.mixins.hparams_mixin.HyperparametersMixin": HyperparametersMixin,
    "core.module.LightningModule": fabricamp.TrainingModule,
    "core.optimizer.LightningOptimizer": ManagedOptimizer,
    "loggers.csv_logs.CSVLogger": CSVLogger,
    "loggers.logger.Logger": Logger,
    "loggers.mlflow.MLFlowLogger": MLFlowLogger,
    "loggers.tensorboard.TensorBoardLogger": TensorBoardLogger,
    "loggers.comet.CometLogger": CometLogger,
    "loggers.wandb.WandbLogger": WandbLogger,
    "profilers.base.PassThroughProfiler": profilers.PassThroughProfiler,
    "profilers.profiler.Profiler": profilers.Profiler,
    "profilers.pytorch.PyTorchProfiler": profilers.PyTorchProfiler,
    "profilers.simple.SimpleProfiler": profilers.SimpleProfiler,
    "strategies.strategy.Strategy": Strategy,
    "trainer.Trainer": fabricamp.Trainer,
    "trainer.trainer.Trainer": fabricamp.Trainer,
    "trainer.states.TrainerState": RunState,
    "tuner.tuning.Tuner": Tuner,
    "utilities.AttributeDict": Hyperparameters,
    "utilities.combined_loader.CombinedLoader": CombinedLoader,
    "utilities.exceptions.MisconfigurationException": ConfigError,
    "utilities.model_summary.summarize": model_summary.summarize,
    "utilities.types.LRSchedulerConfig": SchedulerConfig,
}


@pytest.mark.parametrize("name", HOLDS)
def test_a_path_of_lightnings_holds_ours(name):
    *path, last = name.split(".")
    assert getattr(importlib.import_module(".".join(["fabricamp", *path])), last) is HOLDS[name]


@pytest.mark.parametrize(
    "path",
    ["callbacks.timer", "loggers.csv_logs", "profilers.simple", "strategies.ddp", "utilities.seed", "trainer.states"],
)
def test_a_module_below_a_package_needs_no_import_of_its_own(path, monkeypatch):
    package, name = path.split(".")
    module = importlib.import_module(f"fabricamp.{path}")
    monkeypatch.delattr(getattr(fabricamp, package), name)  # as in a process that has not imported it
    assert getattr(getattr(fabricamp, package), name) is module
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = getattr(fabricamp, package).nothing


@pytest.mark.parametrize("bar", ["RichProgressBar", "TQDMProgressBar"])
def test_bars_by_lightnings_names_take_its_arguments(bar, caplog):
    kind = getattr(fabricamp.callbacks, bar)
    assert issubclass(kind, ProgressBar)
    quiet_trainer(max_epochs=1, callbacks=[kind(refresh_rate=10, leave=True)]).fit(Classifier(), loader())
    assert "epoch 1/1" in caplog.text
    caplog.clear()
    quiet_trainer(max_epochs=1, callbacks=[kind(refresh_rate=0)]).fit(Classifier(), loader())
    assert caplog.messages == []


@pytest.mark.parametrize("bar", ["RichProgressBar", "TQDMProgressBar"])
def test_a_subclass_of_a_bar_chooses_what_stands_beside_it(bar, caplog):
    class Mine(getattr(fabricamp.callbacks, bar)):
        def get_metrics(self, trainer, pl_module):
            items = super().get_metrics(trainer, pl_module)
            versions.append(items.pop("v_num"))
            return {**items, "mine": 3, "note": "fine"}

        def init_train_tqdm(self):
            raise AssertionError

        configure_columns = init_train_tqdm

    versions = []
    logger = CSVLogger("logs", version="as-it-is")
    quiet_trainer(max_epochs=1, callbacks=[Mine()], logger=logger).fit(Classifier(), loader())
    assert "mine 3  note fine" in caplog.text
    assert versions[-1] == "t-is"
    assert "is not called: neither tqdm nor rich draws the bar" in caplog.text


@pytest.mark.parametrize(
    ("statement", "cure"),
    [
        ("import fabricamp.serve", "torch.export"),
        ("from fabricamp.fabric.utilities.rank_zero import rank_zero_only", "fabricamp.utilities"),
        ("from fabricamp.loggers import NeptuneLogger", "write a Logger"),
        ("from fabricamp.loggers.neptune import NeptuneLogger", "write a Logger"),
        ("from fabricamp.loggers.litlogger import LitLogger", "write a Logger"),
        ("from fabricamp.callbacks import SpikeDetection", "nan_policy"),
        ("from fabricamp.callbacks.spike import SpikeDetection", "nan_policy"),
        ("from fabricamp.utilities.cli import LightningCLI", "fabricamp fit"),
        ("from fabricamp.strategies import FSDPStrategy", "strategy='fsdp'"),
    ],
)
def test_an_import_of_what_is_not_offered_says_what_to_do(statement, cure):
    with pytest.raises(ImportError, match=f"(?s)Lightning's .*{cure}"):
        exec(statement)


def test_asking_for_what_is_not_offered_raises_nothing():
    assert importlib.util.find_spec("fabricamp.serve") is None
    assert not hasattr(fabricamp.callbacks, "SpikeDetection")
    with pytest.raises(AttributeError, match="nan_policy"):
        _ = fabricamp.callbacks.SpikeDetection
    with pytest.raises(AttributeError, match="fabricamp fit config.yaml"):
        _ = fabricamp.LightningCLI
    with pytest.raises(AttributeError, match="did you mean 'ModelCheckpoint'"):
        _ = fabricamp.callbacks.ModelChekpoint


def test_entry_points_take_the_model_by_name():
    trainer, model = quiet_trainer(max_steps=2), Classifier()
    trainer.fit(model=model, train_dataloaders=loader(), weights_only=False)
    assert trainer.global_step == 2
    assert trainer.validate(model=model, dataloaders=loader(), verbose=False)
    assert trainer.test(model=model, dataloaders=loader(), verbose=False)
    assert len(trainer.predict(model=model, dataloaders=loader(), return_predictions=None)) == 8


@pytest.mark.parametrize(
    ("entry", "name", "cure"),
    [
        ("fit", "module", "give model="),
        ("fit", "train_dataloader", "give train_dataloaders="),
        ("fit", "train_loader", "give train_dataloaders="),
        ("fit", "val_dataloader", "give val_dataloaders="),
        ("fit", "datamodul", "did you mean 'datamodule'"),
        ("test", "test_dataloaders", "give dataloaders="),
        ("validate", "val_dataloaders", "give dataloaders="),
        ("predict", "dataloader", "give dataloaders="),
    ],
)
def test_another_argument_is_refused_with_its_cure(entry, name, cure):
    with pytest.raises(ConfigError, match=f"{entry}.*{name}.*{cure}"):
        getattr(quiet_trainer(), entry)(Classifier(), **{name: False})


def test_hooks_take_the_module_by_any_name():
    class Notes(fabricamp.Callback):
        def on_train_start(self, trainer, pl_module):
            self.seen = pl_module

    class Others(fabricamp.Callback):
        def on_train_start(self, trainer, module):
            self.seen = module

    notes, others, model = Notes(), Others(), Classifier()
    quiet_trainer(max_steps=1, callbacks=[notes, others]).fit(model, loader())
    assert notes.seen is model
    assert others.seen is model


def test_hooks_of_ours_name_the_module_as_lightnings_do():
    """``super().on_train_start(trainer=trainer, pl_module=pl_module)``."""
    kinds = [fabricamp.Callback, *(getattr(fabricamp.callbacks, name) for name in fabricamp.callbacks.__all__)]
    for kind in kinds:
        for name in ("setup", "get_metrics", *(name for name in dir(kind) if name.startswith("on_"))):
            if hasattr(kind, name):
                assert list(inspect.signature(getattr(kind, name)).parameters)[1:3] == ["trainer", "pl_module"], name


PAGE = (Path(__file__).parents[1] / "docs" / "from-lightning.md").read_text()


def not_offered_on_the_page():
    section = PAGE[PAGE.index("## What is not offered") :].split("\n## ")[0]
    cells = [
        line.split("|")[1] for line in section.splitlines() if line.startswith("| ") and "Lightning's |" not in line
    ]
    names = []
    for cell in cells:
        part = ""
        for name in re.findall(r"`([^`]+)`", cell):
            if "(" in name or part == "Trainer":  # an argument of the Trainer
                part = "Trainer"
                continue
            part = name.rpartition(".")[0] if "." in name else "" if name in not_offered() else part
            names.append(name if "." in name or not part else f"{part}.{name}")
    return names


def test_the_page_names_what_is_not_offered_and_nothing_else():
    assert sorted(not_offered_on_the_page()) == sorted(not_offered())
