"""Writes pickles of what users pickle, and beside each what it held: ``python -m tests.earlier_versions.write_pickles FILE``.

``92a6732.pickle`` was written so at that commit.  It is a dict of zlib-compressed pickles by name; each is a pair of an object
and plain values of it (tensors, numbers, strings).  ``92a6732.json`` has what a loaded Trainer has to say of its last run.

A later version may write a file of its own with it; those of earlier ones are never written anew.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import warnings
import zlib
from pathlib import Path

import torch

from fabricamp import Callback, CudaGraph, OptLevel, errors
from fabricamp import callbacks as cb
from fabricamp import loggers as lg
from fabricamp import nn as fnn
from fabricamp import profilers as pf
from fabricamp import strategies as st
from fabricamp.data import (
    CombinedLoader,
    DataModule,
    EvalSampler,
    LengthGroups,
    ResidentLoader,
    Sharded,
    TrainSampler,
)
from fabricamp.data.orders import SeededOrder
from fabricamp.data.seeding import SeededDataset
from fabricamp.gradients.flat import IN_PLACE, Gradients, Transport
from fabricamp.optimizers import (
    LARC,
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLion,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
    UnsupportedError,
)
from fabricamp.precision import Clip, Precision, Verdict, precision_from
from tests.earlier_versions import modules, plugins
from tests.small import data, quiet_trainer

FOLDER = Path("/tmp/fabricamp-92a6732")  # what the pickles name; it need not be there when they are read
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true")
TRAINED_LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "bf16-true", "64-true")
OPTIMIZERS = {
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=0.1, weight_decay=0.01),
    "FusedSGD": lambda parameters: FusedSGD(parameters, lr=0.1, momentum=0.9),
    "FusedLAMB": lambda parameters: FusedLAMB(parameters, lr=0.1),
    "FusedNovoGrad": lambda parameters: FusedNovoGrad(parameters, lr=0.1),
    "FusedAdagrad": lambda parameters: FusedAdagrad(parameters, lr=0.1),
    "FusedLion": lambda parameters: FusedLion(parameters, lr=0.1),
    "FusedMixedPrecisionLamb": lambda parameters: FusedMixedPrecisionLamb(parameters, lr=0.1),
    "LARC": lambda parameters: LARC(FusedSGD(parameters, lr=0.1, momentum=0.9)),
    "third party": lambda parameters: plugins.FusedSign(parameters, lr=0.1),
}
GRADIENTS = [torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([-1.0, 2.0])]


def loaded(one):
    """A copy as a pickle brings it: what it has forgotten then is not what a later version has to know."""
    return pickle.loads(pickle.dumps(one))


def plain_state(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class During(Callback):
    """Takes what is there in the middle of a window."""

    def __init__(self, level, taken):
        self.level = level
        self.taken = taken

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.state.batches_done != 3:
            return
        self.taken[f"module during {self.level}"] = pickle.dumps((pl_module, plain_state(pl_module)))
        optimizer = trainer.optimizers[0]
        self.taken[f"optimizer during {self.level}"] = pickle.dumps((optimizer, described_optimizer(optimizer)))


def described_optimizer(optimizer):
    state = optimizer.state_dict()
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return {
        "parameters": [one.detach().clone() for one in parameters],
        "lr": optimizer.param_groups[0]["lr"],
        "state": {
            index: {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
            for index, entry in state["state"].items()
        },
    }


def described_precision(precision):
    verdicts = precision.verdicts
    scale = None if verdicts is None else float(verdicts.scale)
    return {"name": precision.name, "scale": scale, "state": list(precision.state_dict())}


def fit(module, *callbacks, **options):
    given = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "log_every_n_steps": 1, **options}
    trainer = quiet_trainer(num_sanity_val_steps=0, default_root_dir=FOLDER, callbacks=list(callbacks), **given)
    trainer.fit(module, *modules.loaders())
    return trainer


def told_by(trainer):
    """What a Trainer says of its last run."""
    state = trainer.state
    return {
        "current_epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "skipped_steps": trainer.skipped_steps,
        "world_size": trainer.world_size,
        "global_rank": trainer.global_rank,
        "is_global_zero": trainer.is_global_zero,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "log_every_n_steps": trainer.log_every_n_steps,
        "default_root_dir": trainer.default_root_dir,
        "should_stop": trainer.should_stop,
        "interrupted": trainer.interrupted,
        "precision": trainer.precision,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "logged": {key: float(value) for key, value in trainer.logged_metrics.items()},
        "shown": {key: float(value) for key, value in trainer.progress_bar_metrics.items()},
        "callbacks": [type(one).__name__ for one in trainer.callbacks],
        "loggers": [type(one).__name__ for one in trainer.loggers],
        "strategy": trainer.strategy.name,
        "level": trainer.precision_plugin.name,
        "status": str(state.status),
        "fn": str(state.fn),
        "stage": None if state.stage is None else str(state.stage),
        "state": {
            "epoch": state.epoch,
            "global_step": state.global_step,
            "batch_idx": state.batch_idx,
            "batches_done": state.batches_done,
            "open_batches": state.open_batches,
            "closed_at": state.closed_at,
            "committed": state.committed,
            "passed": state.passed,
            "validated_at": state.validated_at,
            "validations": state.validations,
            "skipped_before": state.skipped_before,
            "stop_reason": state.stop_reason,
            "finished": state.finished,
            "stopped": state.stopped,
            "fitting": state.fitting,
        },
        "checkpoint": trainer.checkpoint_callback and Path(trainer.checkpoint_callback.best_model_path).name,
    }


def of_modules(found):
    for name, make in {
        "Small": modules.Small,
        "Normed": modules.Normed,
        "Hyper": modules.Hyper,
        "Named": modules.Named,
    }.items():
        module = make()
        found[f"module {name} before"] = pickle.dumps((module, plain_state(module)))
    for level in TRAINED_LEVELS:
        module = modules.Small()
        trainer = fit(module, During(level, found) if level in ("O0", "O2") else Callback(), precision=level)
        found[f"module after {level}"] = pickle.dumps((module, plain_state(module)))
        found[f"precision after {level}"] = pickle.dumps(
            (trainer.precision_plugin, described_precision(loaded(trainer.precision_plugin)))
        )
        optimizer = trainer.optimizers[0]
        found[f"optimizer after {level}"] = pickle.dumps((optimizer, described_optimizer(optimizer)))
    for name in ("Normed", "Hyper", "Named", "Manual"):
        module = getattr(modules, name)()
        options = {"accumulate_grad_batches": 1, "gradient_clip_val": None} if name == "Manual" else {}
        fit(module, precision="O2" if name == "Normed" else "O0", **options)
        found[f"module {name} after"] = pickle.dumps((module, plain_state(module)))
    module = modules.Hyper(5, rates=(0.5,), other={"a": [1, 2]})
    found["hyper-parameters"] = pickle.dumps((module.hparams, dict(module.hparams)))


def of_trainers(found):
    told = {}
    for name, options in {
        "trainer O0": {},
        "trainer O2": {"precision": "O2", "gradient_clip_algorithm": "value"},
        "trainer static": {"precision": plugins.LoggedLevel("O2", loss_scale=128.0)},
        "trainer ddp": {"strategy": "ddp"},
        "trainer delayed": {"strategy": st.DelayedDDP(), "precision": "O5", "nan_policy": "skip"},
        "trainer third party": {"strategy": plugins.LoggedStrategy(), "precision": plugins.StaticScale()},
    }.items():
        trainer = fit(
            modules.Small(), cb.ModelCheckpoint(FOLDER / name, monitor="val_loss"), **options, enable_checkpointing=True
        )
        found[name] = pickle.dumps((trainer, None))
        told[name] = told_by(loaded(trainer))
        found[f"state of {name}"] = pickle.dumps((trainer.state, told[name]["state"]))
    fresh = quiet_trainer(max_epochs=3, precision="O1", cuda_graph="auto")
    found["trainer before"] = pickle.dumps((fresh, None))
    told["trainer before"] = {
        "current_epoch": 0,
        "global_step": 0,
        "max_epochs": 3,
        "level": "O1",
        "status": "initializing",
    }
    return told


def of_callbacks(found):
    def add(name, callback, *described):
        copied = loaded(callback)
        values = {one: getattr(copied, one) for one in described}
        state = copied.state_dict()
        found[f"callback {name}"] = pickle.dumps(
            (callback, {"values": values, "state": state, "key": callback.state_key})
        )

    checkpoint = cb.ModelCheckpoint(FOLDER / "files", monitor="val_loss", save_top_k=2, save_last=True)
    named = plugins.NamedCheckpoint(FOLDER / "named", monitor="val_loss", save_last="link")
    paths = (
        "best_model_path",
        "best_model_score",
        "best_k_models",
        "kth_best_model_path",
        "kth_value",
        "last_model_path",
    )
    fit(modules.Small(), checkpoint, named, enable_checkpointing=True)
    add("ModelCheckpoint", checkpoint, *paths, "dirpath", "monitor", "mode", "save_top_k", "every_n_epochs")
    add("of a third party", named, *paths)
    asynchronous = cb.AsyncCheckpoint(FOLDER / "async", every="1 steps")
    fit(modules.Small(), asynchronous, enable_checkpointing=True)
    add("AsyncCheckpoint", asynchronous, *paths[:1], "dirpath", "every")
    stopping = cb.EarlyStopping("val_loss", patience=3)
    fit(modules.Small(), stopping)
    add(
        "EarlyStopping", stopping, "best_score", "wait_count", "stopped_epoch", "patience", "monitor", "stopping_reason"
    )
    for name, callback in {
        "EMA": cb.EMA(0.9),
        "EMAWeightAveraging": cb.EMAWeightAveraging(decay=0.9),
        "WeightAveraging": cb.WeightAveraging(avg_fn=modules.mean_of),
        "StochasticWeightAveraging": cb.StochasticWeightAveraging(swa_lrs=0.05),
        "Timer": cb.Timer(duration="01:00:00:00"),
        "GradientAccumulationScheduler": cb.GradientAccumulationScheduler({0: 2, 1: 1}),
        "DivergenceCheck": cb.DivergenceCheck(),
        "AmpState": cb.AmpState(),
        "ProgressBar": cb.ProgressBar(),
        "RichProgressBar": cb.RichProgressBar(),
        "TQDMProgressBar": cb.TQDMProgressBar(),
        "ModelSummary": cb.ModelSummary(),
        "RichModelSummary": cb.RichModelSummary(),
        "LambdaCallback": cb.LambdaCallback(on_train_start=modules.announce),
        "ReadsState": plugins.EveryHook(),
    }.items():
        accumulates = {"accumulate_grad_batches": 1} if name == "GradientAccumulationScheduler" else {}
        fit(modules.Small(), callback, precision="O2" if name in ("EMA", "AmpState") else "O0", **accumulates)
        add(name, callback)
    thaws, finetuning = modules.Thaws(), cb.BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    fit(modules.Backboned(), finetuning)
    add("BackboneFinetuning", finetuning)
    add("BaseFinetuning", thaws)
    for name in ("DeviceStatsMonitor", "GradientMonitor", "LearningRateMonitor", "ThroughputMonitor"):
        callback = getattr(cb, name)()
        fit(modules.Small(), callback, logger=lg.CSVLogger(FOLDER))
        add(name, callback)
    writes = modules.Writes("batch")
    quiet_trainer(callbacks=[writes], default_root_dir=FOLDER)
    add("BasePredictionWriter", writes)
    for name in ("BatchSizeFinder", "LearningRateFinder", "Callback"):
        add(name, getattr(cb, name)())


def of_loggers(found):
    for kind in ("CSVLogger", "JSONLinesLogger", "TensorBoardLogger"):
        for when in ("before", "after"):
            logger = getattr(lg, kind)(FOLDER / "logs", name=kind, version=0, prefix="own")
            if when == "after":
                fit(modules.Hyper(), logger=logger)
            described = {
                "name": logger.name,
                "version": logger.version,
                "log_dir": logger.log_dir,
                "save_dir": logger.save_dir,
            }
            found[f"logger {kind} {when}"] = pickle.dumps((logger, described))
    for logger in (lg.MLFlowLogger(tracking_uri=f"file:{FOLDER}/mlruns"), lg.WandbLogger(offline=True), lg.Logger()):
        described = {"name": logger.name} if type(logger) is not lg.WandbLogger else {}
        found[f"logger {type(logger).__name__} before"] = pickle.dumps((logger, described))
    tabs = plugins.Tabs(FOLDER / "logs", name="tabs", version=0)
    fit(modules.Small(), logger=tabs)
    found["logger of a third party"] = pickle.dumps((tabs, {"name": "tabs", "version": 0, "log_dir": tabs.log_dir}))
    for kind in ("Profiler", "PassThroughProfiler", "PyTorchProfiler", "MemoryProfiler"):
        profiler = getattr(pf, kind)()
        found[f"profiler {kind}"] = pickle.dumps(
            (profiler, {"filename": profiler.filename, "dirpath": profiler.dirpath})
        )


def of_strategies(found):
    made = {
        "Strategy": st.Strategy(),
        "SingleDeviceStrategy": st.SingleDeviceStrategy("cpu"),
        "ProcessGroupStrategy": st.ProcessGroupStrategy(timeout=60),
        "DDP": st.DDP(bucket_cap_mb=13, timeout=60),
        "DDPStrategy": st.DDPStrategy(find_unused_parameters=True),
        "DelayedDDP": st.DelayedDDP(message_size=1000, allreduce_dtype=torch.bfloat16),
        "FSDP": st.FSDP(),
        "FaultTolerant": st.FaultTolerant(groups=2, group=1, lighthouse="http://localhost:1"),
        "third party": plugins.LocalSGD(every=3),
    }
    for name, strategy in made.items():
        found[f"strategy {name} before"] = pickle.dumps((strategy, described_strategy(loaded(strategy))))
    for name, strategy in {
        "Strategy": st.Strategy(),
        "DDP": st.DDP(),
        "DelayedDDP": st.DelayedDDP(),
        "third party": plugins.LoggedStrategy(),
    }.items():
        fit(modules.Small(), strategy=strategy)
        found[f"strategy {name} after"] = pickle.dumps((strategy, described_strategy(loaded(strategy))))


def described_strategy(strategy):
    names = (
        "name",
        "world_size",
        "rank",
        "local_rank",
        "is_global_zero",
        "distributed",
        "averages_gradients",
        "timeout",
    )
    return {name: getattr(strategy, name) for name in names}


def of_precisions(found):
    for level in LEVELS:
        precision = precision_from(level)
        found[f"precision {level} before"] = pickle.dumps((precision, described_precision(precision)))
    for name, precision in {
        "base": Precision(),
        "static": OptLevel("O2", loss_scale=128.0, keep_batchnorm_fp32=False),
        "several": OptLevel("O1", num_losses=2),
        "policy": precision_from("O0", "stop"),
        "third party": plugins.LoggedLevel("O3"),
    }.items():
        found[f"precision {name} before"] = pickle.dumps((precision, described_precision(precision)))


def of_optimizers(found):
    for name, make in OPTIMIZERS.items():
        half = name == "FusedMixedPrecisionLamb"
        parameters = [torch.nn.Parameter(one.sign().to(torch.bfloat16 if half else torch.float32)) for one in GRADIENTS]
        optimizer = make(parameters)
        for _ in range(2):
            for parameter, gradient in zip(parameters, GRADIENTS, strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
        found[f"fused {name}"] = pickle.dumps((optimizer, described_optimizer(optimizer)))
        found[f"state of {name}"] = pickle.dumps((optimizer.state, described_optimizer(optimizer)["state"]))


def of_layers(found):
    for name, layer in {
        "FusedLayerNorm": fnn.FusedLayerNorm(3),
        "FusedRMSNorm": fnn.FusedRMSNorm((3,), elementwise_affine=False),
        "MixedFusedLayerNorm": fnn.MixedFusedLayerNorm(3),
        "MixedFusedRMSNorm": fnn.MixedFusedRMSNorm(3),
        "SyncBatchNorm": fnn.SyncBatchNorm(3, fuse_relu=True),
        "SoftmaxCrossEntropyLoss": fnn.SoftmaxCrossEntropyLoss(),
        "converted": fnn.convert_syncbn_model(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))),
    }.items():
        found[f"layer {name}"] = pickle.dumps((layer, plain_state(layer)))


def of_data(found):
    groups, resident = LengthGroups([3, 9, 4, 8], batch_size=2), ResidentLoader(torch.arange(6.0), batch_size=4)
    shuffled = ResidentLoader(torch.arange(6.0), batch_size=4, shuffle=True, seed=3)
    shuffled.set_epoch(2)
    sampler = TrainSampler(SeededOrder(7, shuffle=True, seed=5), rank=1, world_size=2)
    evaluation = EvalSampler(7, rank=1, world_size=2)
    streams = Sharded(modules.Stream())
    streams.share_out(1, 3, train=False)
    seeded = SeededDataset(modules.Squares())
    trainer = quiet_trainer(max_epochs=1, default_root_dir=FOLDER)
    trainer.fit(modules.Small(), torch.utils.data.DataLoader(data(7), 2, shuffle=True))
    wired = trainer.train_dataloader
    found["data LengthGroups"] = pickle.dumps((groups, list(groups)))
    found["data ResidentLoader"] = pickle.dumps((resident, list(resident)))
    found["data ResidentLoader shuffled"] = pickle.dumps((shuffled, list(shuffled)))
    found["data TrainSampler"] = pickle.dumps((sampler, list(sampler)))
    found["data EvalSampler"] = pickle.dumps((evaluation, list(evaluation)))
    found["data Sharded"] = pickle.dumps((streams, list(streams)))
    found["data SeededDataset"] = pickle.dumps((seeded, [(index * index) for index in range(6)]))
    found["data CombinedLoader"] = pickle.dumps((CombinedLoader({"a": [1, 2], "b": [3]}), [({"a": 1, "b": 3}, 0, 0)]))
    found["data wired loader"] = pickle.dumps((wired, len(wired)))
    found["data module"] = pickle.dumps((modules.Data(2), {"batch_size": 2}))
    found["data module by Lightning's name"] = pickle.dumps((modules.NamedData(), {}))
    found["data module of loaders"] = pickle.dumps((DataModule(), {}))
    digits = plugins.Digits(data(8))
    quiet_trainer(default_root_dir=FOLDER, max_epochs=1).fit(modules.Small(), datamodule=digits)
    digits.trainer = None
    found["data module of a third party"] = pickle.dumps((digits, {"batch_size": 4}))


def of_values(found):
    values = {
        "Clip": (Clip(0.5, "value"), [0.5, "value"]),
        "Verdict": (Verdict(True, 2.0, 0.5, 3, 1), [True, 2.0, 0.5, 3, 1, False]),
        "Gradients": (Gradients(divisor=2.0), [None, 2.0, None, False, None]),
        "IN_PLACE": (IN_PLACE, [None, 1.0, None, False, None]),
    }
    for name, (value, described) in values.items():
        found[f"tuple {name}"] = pickle.dumps((value, described))
    found["options CudaGraph"] = pickle.dumps((CudaGraph(warmup=5, steps=2), {"warmup": 5, "steps": 2, "shapes": 4}))
    found["options Transport"] = pickle.dumps((Transport(always_fp32=True), {"always_fp32": True, "average": True}))
    environment = st.Environment(rank=1, world_size=2)
    found["options Environment"] = pickle.dumps((environment, {"rank": 1, "world_size": 2, "name": "single"}))
    for kind in (
        errors.FabricampError,
        errors.ConfigError,
        errors.UnknownArgumentError,
        errors.DistributedError,
        errors.CheckpointError,
        errors.NonFiniteError,
        UnsupportedError,
    ):
        found[f"error {kind.__name__}"] = pickle.dumps((kind("what was given"), [kind.__name__, "what was given"]))


def write(path):
    found = {}
    shutil.rmtree(FOLDER, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_modules(found)
        told = of_trainers(found)
        for add in (
            of_callbacks,
            of_loggers,
            of_strategies,
            of_precisions,
            of_optimizers,
            of_layers,
            of_data,
            of_values,
        ):
            add(found)
    shutil.rmtree(FOLDER, ignore_errors=True)
    with Path(path).open("wb") as file:
        pickle.dump({name: zlib.compress(value, 9) for name, value in found.items()}, file, protocol=4)
    Path(path).with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    print(f"{len(found)} pickles, {Path(path).stat().st_size} bytes")


if __name__ == "__main__":
    write(sys.argv[1])
