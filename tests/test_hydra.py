"""hydra's ``instantiate`` builds every part of a run, with lists and mappings of OmegaConf, which checkpoints can hold."""

from __future__ import annotations

import importlib

import pytest
import torch
from omegaconf import OmegaConf

import fabricamp
from fabricamp import TrainingModule, callbacks, data, loggers, optimizers, profilers, strategies
from tests.small import Classifier

instantiate = pytest.importorskip("hydra.utils", reason="needs the package hydra-core").instantiate

PARTS = """
AsyncCheckpoint: {dirpath: out, every: 10 steps}
BackboneFinetuning: {unfreeze_backbone_at_epoch: 2, lambda_func: {_target_: hydra.utils.get_method, path: builtins.float}}
BatchSizeFinder: {mode: power}
CSVLogger: {save_dir: out}
CudaGraph: {warmup: 12}
DDP: {find_unused_parameters: true, timeout: {_target_: datetime.timedelta, minutes: 1}}
DelayedDDP: {allreduce_trigger_params: [net.0.weight], allreduce_dtype: {_target_: hydra.utils.get_object, path: torch.float16}}
DeviceStatsMonitor: {cpu_stats: true}
EMA: {decay: 0.99}
EMAWeightAveraging: {decay: 0.99}
EarlyStopping: {monitor: loss}
FaultTolerant: {groups: 2, group: 0, lighthouse: "http://localhost:29510"}
GradientAccumulationScheduler: {scheduling: {0: 2, 4: 4}}
JSONLinesLogger: {save_dir: out}
LambdaCallback: {on_fit_start: {_target_: hydra.utils.get_method, path: builtins.print}}
LearningRateMonitor: {logging_interval: step}
LengthGroups: {lengths: [3, 4, 5], batch_size: 2}
ModelCheckpoint: {dirpath: out, train_time_interval: {_target_: datetime.timedelta, minutes: 30}}
ModelSummary: {max_depth: 2}
OptLevel: {level: O2, cast_model_outputs: float32, loss_scale: 128}
PyTorchProfiler: {dirpath: out}
OnExceptionCheckpoint: {dirpath: out}
ResidentLoader: {_args_: [{_target_: torch.arange, _args_: [4]}], batch_size: 2}
RichModelSummary: {max_depth: 1}
Sharded: {dataset: [1, 2]}
SingleDeviceStrategy: {device: cpu}
StochasticWeightAveraging: {swa_lrs: [0.1, 0.2]}
TQDMProgressBar: {refresh_rate: 5}
TensorBoardLogger: {save_dir: out}
ThroughputMonitor: {batch_size_fn: {_target_: hydra.utils.get_method, path: builtins.len}}
Timer: {duration: {hours: 2}}
WandbLogger: {offline: true, tags: [a, b], config: {x: [1, 2]}, save_dir: out}
"""
HOMES = [fabricamp, callbacks, loggers, strategies, profilers, data]
BASES = {
    "BaseFinetuning", "BasePredictionWriter", "Callback", "CombinedLoader", "CometLogger", "DDPStrategy", "DataModule",
    "EarlyStoppingReason", "Environment", "EvalSampler", "Feed", "Gradients", "LightningDataModule",
    "LightningModule", "Logger", "MLFlowLogger", "OptunaPruning", "PassThroughProfiler", "ProcessGroupStrategy", "Profiler",
    "Strategy", "TrainSampler", "Trainer", "TrainingModule", "WeightAveraging",
}  # fmt: skip
"""Left out: base classes, objects that a run or another test makes, and classes that need a slow or missing package."""


PUBLIC = {name for one in HOMES for name in one.__all__ if isinstance(getattr(one, name, None), type)}
ERRORS = {name for name in PUBLIC if issubclass(getattr(fabricamp, name, int), Exception)}


def home_of(name):
    return next(one.__name__ for one in HOMES if name in one.__all__)


@pytest.mark.parametrize("name", sorted(PUBLIC - ERRORS - BASES))
def test_a_part(name, tmp_path, monkeypatch):
    """Classes that are not listed need no argument."""
    monkeypatch.chdir(tmp_path)
    config = OmegaConf.create({"_target_": f"{home_of(name)}.{name}", **OmegaConf.create(PARTS).get(name, {})})
    made = instantiate(config)
    assert isinstance(made, getattr(importlib.import_module(home_of(name)), name))
    assert not any(type(value).__module__.startswith("omegaconf") for value in vars(made).values())


RUN = """
data:
  _target_: fabricamp.DataModule.from_datasets
  train_dataset: {_target_: tests.small.data}
  val_dataset: [{_target_: tests.small.data}, {_target_: tests.small.data}]
  batch_size: 8
trainer:
  _target_: fabricamp.Trainer
  accelerator: cpu
  devices: 1
  max_epochs: 2
  max_time: {hours: 1}
  val_check_interval: {minutes: 5}
  enable_progress_bar: false
  enable_model_summary: false
  precision: {_target_: fabricamp.OptLevel, level: O5}
  strategy: {_target_: fabricamp.strategies.SingleDeviceStrategy}
  logger: [{_target_: fabricamp.loggers.CSVLogger, save_dir: out}]
  callbacks:
    - {_target_: fabricamp.callbacks.ModelCheckpoint, dirpath: out, save_last: true}
    - {_target_: fabricamp.callbacks.LearningRateMonitor}
"""


class Configured(Classifier):
    """Builds its optimizer from a partial, as templates do."""

    def __init__(self, optimizer, layers):
        TrainingModule.__init__(self)
        self.save_hyperparameters(ignore=["optimizer"])
        self.net = torch.nn.Sequential(torch.nn.Linear(8, layers[0]), torch.nn.ReLU(), torch.nn.Linear(layers[0], 3))
        self.make = optimizer

    def configure_optimizers(self):
        return self.make(self.parameters())


@pytest.mark.parametrize(
    "target", ["torch.optim.AdamW", *(f"fabricamp.optimizers.{one}" for one in ("FusedAdam", "FusedLAMB", "FusedLion"))]
)
def test_a_run_with_checkpoints_that_goes_on(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = OmegaConf.create(RUN)
    config.module = {
        "_target_": f"{__name__}.Configured",
        "layers": [16],
        "optimizer": {"_target_": target, "_partial_": True, "lr": 0.01, "betas": [0.8, 0.9]},
    }
    for epochs in (2, 3):
        config.trainer.max_epochs = epochs
        parts = {name: instantiate(config[name]) for name in ("data", "module", "trainer")}
        parts["trainer"].fit(parts["module"], datamodule=parts["data"], ckpt_path="auto")
    assert parts["trainer"].global_step == 12
    assert tuple(parts["trainer"].optimizers[0].param_groups[0]["betas"]) == (0.8, 0.9)


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
@pytest.mark.parametrize("collection", ["[%s, %s]", "{a: %s, b: %s}"])
def test_several_loaders(collection, mode):
    loaders = collection % ("{_target_: tests.small.loader}", "{_target_: tests.small.loader, _args_: [8]}")
    config = f"{{_target_: fabricamp.data.CombinedLoader, mode: {mode}, iterables: {loaders}}}"
    combined = instantiate(OmegaConf.create(config))
    assert len(combined) == {"min_size": 2, "sequential": 10}.get(mode, 8)
    assert type(combined.iterables) is (list if collection[0] == "[" else dict)


@pytest.mark.parametrize(
    "name", [one for one in optimizers.__all__ if one.startswith("Fused") and one != "FusedOptimizer"]
)
def test_an_optimizer(name):
    betas = {} if name in ("FusedSGD", "FusedAdagrad") else {"betas": [0.9, 0.99]}
    config = {"_target_": f"fabricamp.optimizers.{name}", "_partial_": True, "lr": 0.1, **betas}
    optimizer = instantiate(OmegaConf.create(config))(torch.nn.Linear(2, 2).parameters())
    assert type(optimizer.param_groups[0].get("betas", ())) in (list, tuple)
