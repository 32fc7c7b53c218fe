"""Every public part can be deep-copied and pickled, before a run, within one and after it: a copy holds the same and goes on.

Not here: the optimizers, whose own tests have it.
"""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fabricamp import (
    Activations,
    Callback,
    Compile,
    ConfigError,
    CudaGraph,
    DataModule,
    LightningModule,
    Trainer,
    TrainingModule,
    errors,
)
from fabricamp import callbacks as cb
from fabricamp import data as fdata
from fabricamp import loggers as lg
from fabricamp import nn as fnn
from fabricamp import precision as pr
from fabricamp import profilers as pf
from fabricamp import strategies as st
from fabricamp.data.orders import SeededOrder
from fabricamp.data.sample_seeds import SeededDataset
from fabricamp.gradients.flat import IN_PLACE, Gradients, Transport
from fabricamp.optimizers import FusedAdam, UnsupportedError
from tests.small import data, quiet_trainer

WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one))}
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "bf16-true", "64-true")

each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def each(table):
    return pytest.mark.parametrize("name", table)


class Small(TrainingModule):
    """A linear layer, Adam with a schedule; logs ``loss`` and ``val_loss``."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = FusedAdam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Normed(Small):
    def __init__(self):
        super().__init__()
        norms = fnn.SyncBatchNorm(4), fnn.FusedLayerNorm(4)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 4), *norms, torch.nn.Linear(4, 3))


class Hyper(Small):
    def __init__(self, width=4, rates=(0.1, 0.2), **others):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 3))


class Named(LightningModule):
    """By Lightning's name."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)
        self.example_input_array = torch.zeros(1, 8)

    training_step = Small.training_step
    validation_step = Small.validation_step
    configure_optimizers = Small.configure_optimizers


class Manual(Small):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.step()


class Backboned(Small):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return super().training_step((self.backbone(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self):
        return FusedAdam(self.net.parameters(), lr=0.01)


class Thaws(cb.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


class Writes(cb.BasePredictionWriter):
    def write_on_batch_end(self, *_):
        raise AssertionError


class Squares(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index * index, torch.rand(()).item()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


class Own(DataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(data(16), self.hparams.batch_size)


def announce(*_):
    pass


def mean_of(average, value, count):
    return average + (value - average) / (count + 1)


def loaders():
    return DataLoader(data(16), 4), DataLoader(data(8, seed=1), 4)


def fit(module, *callbacks, **options):
    manual = not module.automatic_optimization
    given = {"accumulate_grad_batches": 1 if manual else 2, "gradient_clip_val": None if manual else 0.5}
    given |= {
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "callbacks": list(callbacks),
        **options,
    }
    trainer = quiet_trainer(**given)
    trainer.fit(module, *loaders())
    return trainer


def state_of(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_equal(value, expected):
    torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


def assert_moved(module, before):
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    assert all(value.isfinite().all() for value in after.values())


# -- modules --------------------------------------------------------------------------------------------------------------------

MODULES = {one.__name__: one for one in (Small, Normed, Hyper, Named, Manual)}


@each_way
@each(MODULES)
def test_a_module(name, way):
    module = MODULES[name]()
    for _ in range(2):  # before a fit, and after one
        before = state_of(module)
        copied = way(module)
        assert type(copied) is type(module)
        assert_equal(state_of(copied), before)
        assert dict(copied.hparams) == dict(module.hparams)
        with pytest.raises(ConfigError, match="is not attached to a Trainer"):
            _ = copied.trainer
        fit(copied)
        assert_moved(copied, before)
        assert_equal(state_of(module), before)
        fit(module)


@each_way
@each(LEVELS)
def test_a_module_and_its_optimizer_in_the_middle_of_a_step(name, way):
    taken = []

    class Takes(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.state.batches_done == 3:
                taken.append((way(pl_module), state_of(pl_module), way(trainer.optimizers[0])))

    module = Small()
    fit(module, Takes(), precision=name)
    ((copied, before, optimizer),) = taken
    assert_equal(state_of(copied), before)
    with pytest.raises(ConfigError, match="is not attached to a Trainer"):
        _ = copied.trainer
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    weights = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
    trained = state_of(module)
    optimizer.step()
    now = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    assert not any(map(torch.equal, now, weights))
    assert_equal(state_of(module), trained)
    half = any(value.dtype in (torch.float16, torch.bfloat16) for value in before.values())
    fit(copied, precision="bf16-true" if half else name)
    assert_moved(copied, before)


# -- trainers -------------------------------------------------------------------------------------------------------------------

TRAINERS = {
    "O0": {},
    "O2": {"precision": "O2", "gradient_clip_algorithm": "value"},
    "static": {"precision": pr.OptLevel("O2", loss_scale=128.0)},
    "ddp": {"strategy": "ddp"},
    "delayed": {"strategy": "delayed_ddp", "precision": "O5", "nan_policy": "skip"},
    "options": {"compile": {"fullgraph": True, "part": "modules", "backend": "eager"}, "cuda_graph": "auto"},
}


def told_by(trainer):
    """What a Trainer says of its last run."""
    names = (
        "current_epoch",
        "global_step",
        "max_epochs",
        "skipped_steps",
        "world_size",
        "precision",
        "default_root_dir",
    )
    state = ("status", "fn", "batches_done", "closed_at", "validations", "stop_reason", "finished")
    kinds = [type(one).__name__ for one in (trainer.strategy, trainer.precision_plugin, *trainer.callbacks)]
    values = [getattr(trainer, name) for name in names], [str(getattr(trainer.state, name)) for name in state]
    best = trainer.checkpoint_callback and trainer.checkpoint_callback.best_model_path
    return json.loads(json.dumps([*values, kinds, trainer.num_training_batches, best]))


@each_way
@each(TRAINERS)
def test_a_trainer(name, way, tmp_path):
    options = {**copy.deepcopy(TRAINERS[name]), "enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer = quiet_trainer(callbacks=[cb.ModelCheckpoint(tmp_path, monitor="val_loss")], max_epochs=1, **options)
    first = way(trainer)
    first.fit(Small(), *loaders())
    assert (trainer.global_step, first.global_step) == (0, 4)
    again = way(first)
    assert isinstance(again, Trainer)
    assert told_by(again) == told_by(first)
    again.fit_loop.max_epochs = 3
    module = Small()
    before = state_of(module)
    again.fit(module, *loaders())
    assert (again.current_epoch, again.global_step, first.global_step) == (3, 12, 4)
    assert_moved(module, before)
    assert again.validate(module, loaders()[1], verbose=False)[0].keys() == {"val_loss"}


# -- callbacks ------------------------------------------------------------------------------------------------------------------

CALLBACKS = {
    "AmpState": lambda _: cb.AmpState(),
    "AsyncCheckpoint": lambda folder: cb.AsyncCheckpoint(folder, every="1 steps"),
    "BackboneFinetuning": lambda _: cb.BackboneFinetuning(unfreeze_backbone_at_epoch=1),
    "BaseFinetuning": lambda _: Thaws(),
    "BasePredictionWriter": lambda _: Writes("batch"),
    "BatchSizeFinder": lambda _: cb.BatchSizeFinder(max_trials=1),
    "Callback": lambda _: cb.Callback(),
    "Checkpoint": lambda _: cb.Checkpoint(),
    "DeviceStatsMonitor": lambda _: cb.DeviceStatsMonitor(),
    "DivergenceCheck": lambda _: cb.DivergenceCheck(),
    "EMA": lambda _: cb.EMA(0.9),
    "EMAWeightAveraging": lambda _: cb.EMAWeightAveraging(decay=0.9),
    "EarlyStopping": lambda _: cb.EarlyStopping("val_loss", patience=9),
    "GradientAccumulationScheduler": lambda _: cb.GradientAccumulationScheduler({0: 2, 1: 1}),
    "GradientMonitor": lambda _: cb.GradientMonitor(),
    "LambdaCallback": lambda _: cb.LambdaCallback(on_train_start=announce),
    "LearningRateFinder": lambda _: cb.LearningRateFinder(num_training_steps=3),
    "LearningRateMonitor": lambda _: cb.LearningRateMonitor(),
    "ModelCheckpoint": lambda folder: cb.ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True),
    "ModelSummary": lambda _: cb.ModelSummary(),
    "OnExceptionCheckpoint": cb.OnExceptionCheckpoint,
    "ProgressBar": lambda _: cb.ProgressBar(),
    "RichModelSummary": lambda _: cb.RichModelSummary(),
    "RichProgressBar": lambda _: cb.RichProgressBar(),
    "StochasticWeightAveraging": lambda _: cb.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
    "TQDMProgressBar": lambda _: cb.TQDMProgressBar(process_position=1),
    "ThroughputMonitor": lambda _: cb.ThroughputMonitor(),
    "Timer": lambda _: cb.Timer(duration="01:00:00:00"),
    "WeightAveraging": lambda _: cb.WeightAveraging(avg_fn=mean_of),
}
FILES = ("best_k_models", "best_model_path", "best_model_score", "kth_value", "last_model_path", "dirpath", "state_key")


def shown(callback):
    """The values that two equal callbacks have in common: seconds go on, and averages belong to the run and its checkpoints."""
    averages = isinstance(callback, cb.WeightAveraging | cb.StochasticWeightAveraging)
    state = {key: value for key, value in callback.state_dict().items() if key != "time_elapsed" and not averages}
    return str([type(callback), callback.state_key, state, *(getattr(callback, name, None) for name in FILES)])


@each_way
@each(CALLBACKS)
def test_a_callback(name, way, tmp_path):
    module = Backboned if "Finetuning" in name else Small
    schedules = name == "GradientAccumulationScheduler"
    options = {
        "accumulate_grad_batches": 1 if schedules else 2,
        "enable_checkpointing": "Checkpoint" in name,
        "enable_progress_bar": "Bar" in name,
        "precision": "O2" if name in ("AmpState", "EMA") else "O0",
    }
    callback = CALLBACKS[name](tmp_path / "files")
    for _ in range(2):  # before a fit, and after one
        copied = way(callback)
        assert shown(copied) == shown(callback)
        if "Finder" in name:  # these want a module and data of their own
            continue
        before = shown(callback)
        fit(module(), copied, logger=lg.CSVLogger(tmp_path), default_root_dir=tmp_path, **options)
        assert shown(callback) == before  # the copy's run is its own
        callback = way(copied)
        assert shown(callback) == shown(copied)


# -- loggers and profilers ------------------------------------------------------------------------------------------------------

LOGGERS = {
    "CSVLogger": ("metrics.csv", {}),
    "JSONLinesLogger": ("metrics.jsonl", {}),
    "TensorBoardLogger": ("events.*", {}),
}


@each_way
@each(LOGGERS)
def test_a_logger_writes_on(name, way, tmp_path):
    logger = getattr(lg, name)(tmp_path, name="own", version=0, prefix="p")
    for _ in range(2):
        logger = way(logger)
        assert (logger.name, logger.version, Path(logger.log_dir)) == ("own", 0, tmp_path / "own" / "version_0")
        (before,) = [one.stat().st_size for one in Path(logger.log_dir).glob(LOGGERS[name][0])] or [0]
        fit(Hyper(), logger=logger)
        sizes = [one.stat().st_size for one in Path(logger.log_dir).glob(LOGGERS[name][0])]
        assert sum(sizes) > before
        assert sum(sizes) > 100


OTHER_LOGGERS = {
    "CometLogger": lambda folder: lg.CometLogger(offline_directory=str(folder), online=False, api_key="key"),
    "Logger": lambda _: lg.Logger(),
    "MLFlowLogger": lambda folder: lg.MLFlowLogger("own", tracking_uri=f"file:{folder}/mlruns"),
    "WandbLogger": lambda folder: lg.WandbLogger("own", save_dir=folder, offline=True),
}


@each_way
@each(OTHER_LOGGERS)
def test_a_logger_of_a_service(name, way, tmp_path):
    logger = OTHER_LOGGERS[name](tmp_path)
    copied = way(logger)
    assert type(copied) is type(logger)
    assert (copied.name, copied.save_dir) == (logger.name, logger.save_dir)


PROFILERS = (
    "AdvancedProfiler",
    "MemoryProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
)


@each_way
@each(PROFILERS)
def test_a_profiler(name, way, tmp_path):
    options = {} if name == "PassThroughProfiler" else {"dirpath": tmp_path}
    options |= {} if name in ("MemoryProfiler", "PassThroughProfiler") else {"filename": "report"}
    profiler = getattr(pf, name)(**options)
    copied = way(profiler)
    assert (type(copied), copied.filename, copied.dirpath) == (type(profiler), profiler.filename, profiler.dirpath)
    if name not in ("MemoryProfiler", "PyTorchProfiler"):
        fit(Small(), profiler=copied)
        fit(Small(), profiler=way(copied))


# -- strategies and precisions --------------------------------------------------------------------------------------------------

STRATEGIES = {
    "Strategy": st.Strategy,
    "SingleDeviceStrategy": lambda: st.SingleDeviceStrategy("cpu"),
    "ProcessGroupStrategy": lambda: st.ProcessGroupStrategy(timeout=60),
    "DDP": lambda: st.DDP(bucket_cap_mb=13, timeout=60),
    "DDPStrategy": lambda: st.DDPStrategy(find_unused_parameters=True),
    "DelayedDDP": lambda: st.DelayedDDP(message_size=1000, allreduce_dtype=torch.bfloat16),
    "FSDP": st.FSDP,
    "FaultTolerant": lambda: st.FaultTolerant(groups=2, group=1, lighthouse="http://localhost:1"),
}


def options_of(strategy):
    names = ("name", "world_size", "rank", "distributed", "averages_gradients", "timeout", "sharding", "membership")
    values = {name: getattr(strategy, name) for name in names}
    values |= {"sharding": strategy.sharding.shards, "membership": strategy.membership.heals}
    plain = {key: value for key, value in vars(strategy).items() if isinstance(value, bool | float | str | torch.dtype)}
    return values | plain


@each_way
@each(STRATEGIES)
def test_a_strategy(name, way):
    strategy = STRATEGIES[name]()
    copied = way(strategy)
    assert type(copied) is type(strategy)
    assert options_of(copied) == options_of(strategy)
    assert copied.refuses_graph() == strategy.refuses_graph()
    if name in ("ProcessGroupStrategy", "FSDP", "FaultTolerant"):
        return  # these take several processes
    for _ in range(2):
        module = Small()
        before = state_of(module)
        fit(module, strategy=copied)
        assert_moved(module, before)
        copied = way(copied)
        assert options_of(copied) == options_of(strategy)
        assert copied.lightning_module is None


PRECISIONS = {
    **{name: (lambda name=name: pr.precision_from(name)) for name in (*LEVELS, "16-mixed", "bf16-mixed", "32-true")},
    "base": pr.Precision,
    "static": lambda: pr.OptLevel("O2", loss_scale=128.0, keep_batchnorm_fp32=False),
    "several": lambda: pr.OptLevel("O1", num_losses=2),
    "policy": lambda: pr.precision_from("O0", "stop"),
}


@each_way
@each(PRECISIONS)
def test_a_precision(name, way):
    precision = PRECISIONS[name]()
    copied = way(precision)
    for _ in range(2):
        assert (type(copied), copied.name) == (type(precision), precision.name)
        assert getattr(copied, "level", None) == getattr(precision, "level", None)
        assert copied.verdicts is None or copied.verdicts is not precision.verdicts
        module = Small()
        before = state_of(module)
        trainer = fit(module, precision=copied)
        assert trainer.precision_plugin is copied
        assert_moved(module, before)
        copied = way(copied)


# -- layers, data and values ----------------------------------------------------------------------------------------------------

LAYERS = {
    "FusedLayerNorm": lambda: fnn.FusedLayerNorm(3),
    "FusedRMSNorm": lambda: fnn.FusedRMSNorm((3,), elementwise_affine=False),
    "MixedFusedLayerNorm": lambda: fnn.MixedFusedLayerNorm(3),
    "MixedFusedRMSNorm": lambda: fnn.MixedFusedRMSNorm(3),
    "SyncBatchNorm": lambda: fnn.SyncBatchNorm(3, fuse_relu=True),
    "SoftmaxCrossEntropyLoss": fnn.SoftmaxCrossEntropyLoss,
    "FusedLinearCrossEntropy": lambda: fnn.FusedLinearCrossEntropy(3, 5, z_loss=0.1),
    "converted": lambda: fnn.convert_syncbn_model(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))),
}


@each_way
@each(LAYERS)
def test_a_layer(name, way):
    layer = LAYERS[name]()
    copied = way(layer)
    assert_equal(state_of(copied), state_of(layer))
    x = torch.tensor([[1.0, 2.0, 4.0], [0.0, -1.0, 1.0]])
    given = (x, torch.tensor([0, 2])) if "CrossEntropy" in name else (x,)
    assert torch.equal(copied(*given), layer(*given))
    assert torch.equal(way(layer)(*given), layer(*given))


def shuffled():
    loader = fdata.ResidentLoader(torch.arange(6.0), batch_size=4, shuffle=True, seed=3)
    loader.set_epoch(2)
    return loader


def shared():
    streams = fdata.Sharded(Stream())
    streams.share_out(1, 3, train=False)
    return streams


DATA = {
    "LengthGroups": lambda: fdata.LengthGroups([3, 9, 4, 8], batch_size=2),
    "ResidentLoader": lambda: fdata.ResidentLoader(torch.arange(6.0), batch_size=4),
    "ResidentLoader shuffled": shuffled,
    "TrainSampler": lambda: fdata.TrainSampler(SeededOrder(7, shuffle=True, seed=5), rank=1, world_size=2),
    "EvalSampler": lambda: fdata.EvalSampler(7, rank=1, world_size=2),
    "Sharded": shared,
    "CombinedLoader": lambda: fdata.CombinedLoader({"a": [1, 2], "b": [3]}),
}


@each_way
@each(DATA)
def test_data_comes_in_its_order(name, way):
    loader = DATA[name]()
    copied = way(loader)
    first, second = ([str(one) for one in each_loader] for each_loader in (loader, copied))
    assert first == second
    assert first


@each_way
def test_a_dataset_with_seeds_draws_again(way):
    dataset = SeededDataset(Squares())
    copied = way(dataset)
    assert [copied[(0, 3), index] for index in range(6)] == [dataset[(0, 3), index] for index in range(6)]
    assert copied[(0, 3), 1] != copied[(0, 4), 1]


@each_way
def test_a_loader_and_a_data_module_of_a_run(way):
    digits = Own(2)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Small(), DataLoader(data(7), 2, shuffle=True))
    wired = way(trainer.train_dataloader)
    assert len(list(wired)) == len(wired) == 4
    trainer.fit(Small(), datamodule=digits)
    copied = way(digits)
    assert dict(copied.hparams) == {"batch_size": 2}
    other = quiet_trainer(max_epochs=1)
    other.fit(Small(), datamodule=copied)
    assert other.global_step == 8
    assert digits.trainer is trainer


VALUES = [
    pr.Clip(0.5, "value"),
    pr.StepStatus(True, 2.0, 0.5, 3, 1),
    Gradients(divisor=2.0),
    IN_PLACE,
    CudaGraph(warmup=5, steps=2, hook_entries=[2]),
    Compile("modules", fullgraph=True),
    Activations([torch.nn.Linear, "net.head"], save="inputs", offload=0.5),
    Transport(always_fp32=True),
    st.Environment(rank=1, world_size=2),
]
ERRORS = [
    errors.FabricampError,
    errors.ConfigError,
    errors.UnknownArgumentError,
    errors.DistributedError,
    errors.CheckpointError,
    errors.NonFiniteError,
    UnsupportedError,
]


@each_way
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value(value, way):
    assert way(value) == value
    assert type(way(value)) is type(value)


@each_way
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error(kind, way):
    error = way(kind("what was given"))
    assert (type(error), str(error)) == (kind, "what was given")


NOT_COPIED = {
    "EarlyStoppingReason",  # an enum
    "OptunaPruning",  # holds a trial, which is in its study
    "Feed", "OptimizerStep",  # a run's
    "Environment", "Gradients", "DataModule", "StepStatus", "Clip",  # above, by their own tests
    "Membership", "Sharding",  # bases
    "Conversion", "Float8", "OptLevel", "Precision",
    "UnsupportedError",
}  # fmt: skip


@pytest.mark.parametrize(
    ("room", "table"),
    [
        (cb, CALLBACKS),
        (st, STRATEGIES),
        (lg, {**LOGGERS, **OTHER_LOGGERS}),
        (pf, PROFILERS),
        (fnn, LAYERS),
        (fdata, DATA),
        (pr, ()),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_every_public_class_is_here(room, table):
    names = [name for name in room.__all__ if inspect.isclass(getattr(room, name))]
    assert [name for name in names if name not in table and name not in NOT_COPIED] == []
