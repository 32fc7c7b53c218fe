"""Runs configurations of a fit and tells each outcome bit by bit: what ``two_trees_bits.py`` starts in each tree.

    PYTHONPATH=TREE python tests/tools/configured_fit.py < configurations.jsonl > outcomes.jsonl

A line is a configuration and a folder for its files; of several ranks, each is such a process, with torchrun's variables.
A configuration is a dict of names; the tables below say what each name stands for.  An outcome is a dict of short digests: weights,
optimizers, schedules, counters, logged values, the calls of hooks, and each file that the fit wrote.  A fit that is refused has its
error as the outcome.  Nothing is imported but the package of the tree, torch and the standard library.
"""

from __future__ import annotations

import copy
import csv
import hashlib
import json
import logging
import os
import re
import struct
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
from torch.distributed import checkpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import fabricamp
from fabricamp import Callback, Trainer, TrainingModule, callbacks, optimizers
from fabricamp.compilation import Compile
from fabricamp.loggers import CSVLogger, JSONLinesLogger
from fabricamp.precision import OptLevel
from fabricamp.strategies import DDP, FSDP, DelayedDDP

SAMPLES, FEATURES, CLASSES, BATCH = 36, 8, 3, 4
EPOCHS = 3
MIDDLE = 7
"""The step whose checkpoint a resumed run begins with."""

# -- data --------------------------------------------------------------------------------------------------------------------------


def _data(samples=SAMPLES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=generator))


class Stream(IterableDataset):
    """The samples in order; ranks share them."""

    def __init__(self, samples=SAMPLES):
        self._samples = list(_data(samples))

    def __iter__(self):
        yield from self._samples[int(os.environ.get("RANK", "0")) :: int(os.environ.get("WORLD_SIZE", "1"))]


class OwnPosition:
    """A loader that keeps its own position."""

    def __init__(self):
        self._batches = list(DataLoader(_data(), BATCH))
        self._first = 0
        self._next = 0

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        first, self._first = self._first, 0
        for place in range(first, len(self._batches)):
            self._next = place + 1
            yield self._batches[place]
        self._next = 0

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._first = state["next"]


LOADERS = {
    "in order": lambda: DataLoader(_data(), BATCH),
    "shuffled": lambda: DataLoader(_data(), BATCH, shuffle=True),
    "drop_last": lambda: DataLoader(_data(38), BATCH, shuffle=True, drop_last=True),
    "short last": lambda: DataLoader(_data(38), BATCH),
    "own generator": lambda: DataLoader(_data(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "replacement": lambda: DataLoader(_data(), BATCH, sampler=RandomSampler(_data(), replacement=True, num_samples=32)),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "own position": OwnPosition,
    "dict": lambda: {"a": DataLoader(_data(), BATCH, shuffle=True), "b": DataLoader(_data(20, seed=1), BATCH)},
    "combined": lambda: fabricamp.utilities.CombinedLoader(
        [DataLoader(_data(), BATCH), DataLoader(_data(24, seed=1), BATCH, shuffle=True)], "min_size"
    ),
}


def _pair(batch):
    """Returns inputs and classes of a batch of any of the loaders."""
    if isinstance(batch, dict):
        batch = batch["a"]
    elif isinstance(batch[0], (list, tuple)):
        batch = batch[0]
    return batch


# -- modules -----------------------------------------------------------------------------------------------------------------------

NETS = {
    "plain": lambda: torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES)),
    "batch norm": lambda: torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES)
    ),
    "dropout": lambda: torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16), torch.nn.LayerNorm(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, CLASSES)
    ),
    "frozen": lambda: torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16).requires_grad_(False), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES)
    ),
}
OPTIMIZERS = {
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=0.02, weight_decay=0.01),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, lr=0.02),
    "FusedLion": lambda p: optimizers.FusedLion(p, lr=0.003),
    "FusedNovoGrad": lambda p: optimizers.FusedNovoGrad(p, lr=0.02),
    "FusedAdagrad": lambda p: optimizers.FusedAdagrad(p, lr=0.02),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.005),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}
SCHEDULES = {
    "none": None,
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "OneCycleLR": lambda o: {"scheduler": torch.optim.lr_scheduler.OneCycleLR(o, 0.05, 200), "interval": "step"},
    "LambdaLR": lambda o: {
        "scheduler": torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        "interval": "step",
        "frequency": 2,
    },
    "plateau": lambda o: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
        "monitor": "val_loss",
        "strict": False,
    },
}


class Net(TrainingModule):
    """A classifier whose data overflow in one batch where the configuration says so."""

    def __init__(self, asked):
        super().__init__()
        self.asked = asked
        torch.manual_seed(11)
        self.net = NETS[asked["net"]]()
        if asked["optimization"].startswith("manual"):
            self.automatic_optimization = False
            self.other = torch.nn.Linear(FEATURES, CLASSES)

    def _loss(self, net, batch):
        x, y = _pair(batch)
        return F.cross_entropy(net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self._loss(self.net, batch)
        if self.asked["overflow"] == "one batch" and batch_idx == 4 and self.current_epoch == 1:
            loss = loss * torch.inf
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("batch", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")
        if self.automatic_optimization:
            return loss
        one, two = self.optimizers()
        one.zero_grad()
        self.manual_backward(loss)
        if self.asked["optimization"] == "manual, clipped":
            self.clip_gradients(one, 0.5, "norm")
        one.step()
        if batch_idx % 2:
            two.zero_grad()
            self.manual_backward(self._loss(self.other, batch))
            two.step()
        return None

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(self.net, batch))

    def configure_optimizers(self):
        make = OPTIMIZERS[self.asked["optimizer"]]
        if not self.automatic_optimization:
            return make(self.net.parameters()), torch.optim.Adam(self.other.parameters(), lr=0.02)
        optimizer = make([each for each in self.net.parameters() if each.requires_grad])
        schedule = SCHEDULES[self.asked["schedule"]]
        return optimizer if schedule is None else ([optimizer], [schedule(optimizer)])


class Looking(Net):
    """Looks at gradients in a hook."""

    def on_before_optimizer_step(self, optimizer):
        norms = [each.grad.norm() for each in self.net.parameters() if each.grad is not None]
        self.log("seen_norm", torch.stack(norms or [torch.zeros(())]).norm().float())


class OwnClipping(Net):
    """Clips by itself."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.3, "norm")


class OwnStep(Net):
    """Steps by itself."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


MODULES = {
    "automatic": Net, "gradients seen": Looking, "own clipping": OwnClipping, "own step": OwnStep,
    "manual": Net, "manual, clipped": Net,
}  # fmt: skip

# -- parts of the Trainer ----------------------------------------------------------------------------------------------------------

PRECISIONS = {
    **{
        name: lambda name=name: name
        for name in ("O0", "O1", "O2", "O3", "O4", "O5", "16-mixed", "bf16-true", "64-true")
    },
    "O1, 64": lambda: OptLevel("O1", loss_scale=64.0),
    "O2, growing": lambda: OptLevel("O2", scale_window=3, max_loss_scale=2.0**12),
    "O1, several scales": lambda: OptLevel("O1", min_loss_scale=16.0, scale_window=2, num_losses=2),
    "O3, bf16": lambda: OptLevel("O3", cast_model_type="bfloat16", cast_model_outputs="float32"),
    "O5, no masters": lambda: OptLevel("O5", master_weights=False),
    "O2, all half": lambda: OptLevel("O2", loss_scale=128.0, keep_batchnorm_fp32=False),
}


def _hook(state, bucket):
    """torch's own average, as a hook of the user."""
    mean = bucket.buffer().div_(torch.distributed.get_world_size())
    return torch.distributed.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])


STRATEGIES = {
    "single": (1, lambda: "single"),
    "ddp": (2, lambda: "ddp"),
    "ddp, views": (2, lambda: DDP(gradient_as_bucket_view=True, bucket_cap_mb=0.001)),
    "ddp, static": (2, lambda: DDP(static_graph=True)),
    "ddp, unused": (2, lambda: DDP(find_unused_parameters=True, broadcast_buffers=False)),
    "ddp, hook": (2, lambda: DDP(comm_hook=_hook)),
    "delayed_ddp": (2, lambda: "delayed_ddp"),
    "delayed_ddp, overlapped": (2, lambda: DelayedDDP(message_size=64)),
    "delayed_ddp, predivided": (2, lambda: DelayedDDP(gradient_predivide_factor=1.5)),
    "delayed_ddp, fp32": (2, lambda: DelayedDDP(allreduce_always_fp32=True, gradient_predivide_factor=2.0)),
    "delayed_ddp, at the end": (2, lambda: DelayedDDP(delay_allreduce=True, retain_allreduce_buffers=True)),
    "delayed_ddp, sums": (2, lambda: DelayedDDP(gradient_average=False, broadcast_buffers=False)),
    "delayed_ddp, bf16": (2, lambda: DelayedDDP(allreduce_dtype=torch.bfloat16)),
    "fsdp": (2, lambda: "fsdp"),
    "fsdp, units": (2, lambda: FSDP([torch.nn.Linear])),
    "fsdp, zero2": (2, lambda: FSDP(reshard_after_forward="zero2")),
    "one rank of delayed_ddp": (1, lambda: "delayed_ddp"),
    "one rank of fsdp": (1, lambda: "fsdp"),
}
AVERAGES = {
    "none": list,
    "EMA": lambda: [callbacks.EMA(0.8)],
    "EMA, later": lambda: [callbacks.EMA(0.9, every=2, start=4)],
    "EMAWeightAveraging": lambda: [callbacks.EMAWeightAveraging(decay=0.8, use_buffers=True)],
    "WeightAveraging": lambda: [callbacks.WeightAveraging(use_buffers=False)],
    "SWA": lambda: [callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)],
}
OTHERS = {
    "none": list,
    "LearningRateMonitor": lambda: [callbacks.LearningRateMonitor()],
    "GradientMonitor": lambda: [callbacks.GradientMonitor()],
    "EarlyStopping": lambda: [callbacks.EarlyStopping("val_loss", patience=1, strict=False)],
    "GradientAccumulationScheduler": lambda: [callbacks.GradientAccumulationScheduler({0: 1, 1: 2})],
    "AmpState": lambda: [callbacks.AmpState()],
}
SAVERS = {
    "default": callbacks.ModelCheckpoint,
    "best two": lambda: callbacks.ModelCheckpoint(monitor="loss_epoch", save_top_k=2, save_last=True),
    "each third step": lambda: callbacks.ModelCheckpoint(every_n_train_steps=3, save_top_k=-1),
    "asynchronous": lambda: callbacks.AsyncCheckpoint(every="4 steps", save_last="link"),
    "weights": lambda: callbacks.ModelCheckpoint(save_weights_only=True),
    "named": lambda: callbacks.ModelCheckpoint(
        filename="{epoch}-{loss_epoch:.2f}",
        monitor="loss_epoch",
        mode="max",
        save_on_train_epoch_end=True,
        every_n_epochs=2,
    ),
    "trained alone": lambda: callbacks.ModelCheckpoint(
        trainable_only=True, enable_version_counter=False, save_last=True
    ),
}
CLIPS = {
    "none": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
}
VALIDATIONS = {
    "each epoch": {},
    "half": {"val_check_interval": 0.5},
    "each third batch": {"val_check_interval": 3},
    "across epochs": {"val_check_interval": 5, "check_val_every_n_epoch": None},
    "second epoch": {"check_val_every_n_epoch": 2},
    "never": {"limit_val_batches": 0},
}
LIMITS = {
    "whole": {},
    "some batches": {"limit_train_batches": 5},
    "a fraction": {"limit_train_batches": 0.7},
    "steps": {"max_steps": 11, "max_epochs": -1},
    "overfit": {"overfit_batches": 3},
}
TRAINERS = {
    "default": {},
    "sync_batchnorm": {"sync_batchnorm": True},
    "no inference mode": {"inference_mode": False},
    "anomaly": {"detect_anomaly": True},
    "deterministic": {"deterministic": True},
    "seeds of samples": {"per_sample_seed": True},
    "all samples": {"use_distributed_sampler": False},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1},
    "no sanity check": {"num_sanity_val_steps": 0},
    "profiler": {"profiler": "simple"},
    "barebones": {"barebones": True},
    "trial": {"fast_dev_run": 3},
    "channels_last": {"performance": {"channels_last": True}},
    "objects": {"checkpoint_objects": True},
    "compiled": {"compile": "modules"},
    "at least": {"min_epochs": 1, "min_steps": 3, "max_time": {"hours": 2}},
    "no prefetch": {"prefetch_batches": 0, "benchmark": True},
    "several prefetched": {"prefetch_batches": 2, "enable_autolog_hparams": False},
    "a validation batch": {"limit_val_batches": 1},
    "other world": {"on_world_change": "keep_global_batch"},
}
COLUMNS = {
    "precision": list(PRECISIONS),
    "strategy": list(STRATEGIES),
    "optimizer": list(OPTIMIZERS),
    "schedule": list(SCHEDULES),
    "optimization": list(MODULES),
    "net": list(NETS),
    "overflow": ["none", "one batch"],
    "clip": list(CLIPS),
    "accumulate_grad_batches": [1, 2, 3],
    "partial_window": ["step", "carry", "drop"],
    "loader": list(LOADERS),
    "average": list(AVERAGES),
    "other callback": list(OTHERS),
    "saver": list(SAVERS),
    "validation": list(VALIDATIONS),
    "limit": list(LIMITS),
    "log_every_n_steps": [1, 2, 50],
    "nan_policy": [None, "skip", "stop"],
    "trainer": list(TRAINERS),
    "resume": ["never", "from the middle", "from the last"],
}
"""What a configuration has, and the values it is drawn from."""


def neutral(asked):
    """Returns the configuration with those values neutral that would have it refused before the first batch."""
    asked = dict(asked)
    if asked["optimizer"] == "LBFGS":
        asked |= {"accumulate_grad_batches": 1, "average": "none", "nan_policy": None, "optimization": "automatic"}
        asked |= {"other callback": "none", "clip": "none"}
        asked["precision"] = {"O1": "O4", "O2": "O5", "16-mixed": "O4"}.get(asked["precision"], asked["precision"])
        if "growing" in asked["precision"]:
            asked["precision"] = "O0"
    if asked["optimization"].startswith("manual"):
        asked |= {"accumulate_grad_batches": 1, "clip": "none", "schedule": "none", "overflow": "none"}
        asked |= {"other callback": "none", "average": "none", "partial_window": "step"}
        if asked["strategy"] in ("ddp, static", "fsdp", "fsdp, zero2", "fsdp, units"):
            asked["strategy"] = "ddp"
        if asked["strategy"] == "one rank of fsdp":
            asked["strategy"] = "single"
        if asked["strategy"] == "delayed_ddp, overlapped":
            asked["strategy"] = "delayed_ddp, sums"
        if asked["trainer"] == "other world":
            asked["trainer"] = "default"
    if asked["trainer"] in ("barebones", "trial"):
        asked |= {"resume": "never", "other callback": "none", "average": "none"}
    if asked["other callback"] == "GradientAccumulationScheduler":
        asked["accumulate_grad_batches"] = 1
    if asked["other callback"] == "AmpState" and "fsdp" in asked["strategy"]:
        asked["other callback"] = "none"
    if asked["saver"] == "trained alone":
        asked["average"] = "none"
    if asked["loader"] == "stream" and asked["limit"] == "a fraction":
        asked["limit"] = "some batches"
    if asked["optimizer"] == "FusedAdagrad" and asked["schedule"] == "OneCycleLR":  # it cycles a momentum
        asked["schedule"] = "LambdaLR"
    if asked["saver"] == "weights":
        asked["resume"] = "never"
    if asked["average"] != "none" and asked["optimizer"] == "LBFGS":
        asked["average"] = "none"
    return asked


class Hooks(Callback):
    """Writes down the calls of hooks on this process."""

    def __init__(self):
        self.calls = []


def _written_down(name):
    def hook(self, trainer, *_, **__):
        self.calls.append((name, trainer.global_step, trainer.current_epoch))

    return hook


for _name in ("fit_start", "train_start", "train_epoch_start", "train_batch_start", "before_zero_grad", "before_optimizer_step",
              "train_batch_end", "train_epoch_end", "validation_start", "validation_batch_end", "validation_end", "save_checkpoint",
              "load_checkpoint", "train_end", "fit_end"):  # fmt: skip
    setattr(Hooks, f"on_{_name}", _written_down(f"on_{_name}"))


class _SaveMiddle(Callback):
    """Writes the checkpoint that a resumed run begins with."""

    def __init__(self, path):
        self._path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == MIDDLE and not self._path.exists():
            trainer.save_checkpoint(self._path)


# -- one configuration -------------------------------------------------------------------------------------------------------------


def _trainer(asked, root, more):
    ranks, strategy = STRATEGIES[asked["strategy"]]
    options = {
        "accelerator": "cpu", "devices": ranks, "strategy": strategy(),
        "precision": PRECISIONS[asked["precision"]](), "max_epochs": EPOCHS, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": root, "log_every_n_steps": asked["log_every_n_steps"],
        "accumulate_grad_batches": asked["accumulate_grad_batches"], "partial_window": asked["partial_window"],
        "nan_policy": asked["nan_policy"], "num_sanity_val_steps": 1,
    }  # fmt: skip
    options |= CLIPS[asked["clip"]] | VALIDATIONS[asked["validation"]] | LIMITS[asked["limit"]]
    options |= copy.deepcopy(TRAINERS[asked["trainer"]])
    if asked["trainer"] == "compiled":
        options["compile"] = Compile("modules", backend="eager")
    if asked["trainer"] == "barebones":
        for name in ("enable_progress_bar", "enable_model_summary", "log_every_n_steps", "num_sanity_val_steps"):
            del options[name]
        return Trainer(**options, callbacks=more)
    parts = [*AVERAGES[asked["average"]](), *OTHERS[asked["other callback"]](), SAVERS[asked["saver"]](), *more]
    loggers = [CSVLogger(root, "csv"), JSONLinesLogger(root, "json")]
    return Trainer(**options, callbacks=parts, logger=loggers)


def _fit(asked, root, more, ckpt_path=None):
    """Returns the outcome of one fit in the folder ``root``."""
    fabricamp.seed_everything(3)
    module = MODULES[asked["optimization"]](asked)
    try:
        trainer = _trainer(asked, root, more)
    except fabricamp.errors.FabricampError as error:
        return {"end": _without_paths(f"{type(error).__name__} of the Trainer: {error}")}
    try:
        trainer.fit(module, LOADERS[asked["loader"]](), DataLoader(_data(10, seed=2), BATCH), ckpt_path=ckpt_path)
        end = "ended"
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1].name
        end = _without_paths(f"{type(error).__name__} in {where}: {error}")
    outcome = {"end": end, "weights": digest(module.state_dict())}
    outcome["counters"] = [trainer.global_step, trainer.current_epoch, trainer.skipped_steps]
    outcome["metrics"] = digest(dict(trainer.callback_metrics))
    outcome["optimizers"] = digest([each.state_dict() for each in trainer.optimizers])
    outcome["hooks"] = [digest(each.calls) for each in more if isinstance(each, Hooks)]
    # Rank 0 writes the files, and another rank may see one of them early or late.
    ended = root.with_name(f"{root.name} ended")
    if os.environ.get("RANK", "0") == "0":
        outcome["files"] = _files(root)
        ended.touch()
    while not ended.exists():
        time.sleep(0.01)
    return outcome


def outcome_of(asked, base):
    """Returns the outcome of a configuration: of its fit, and of the one that is resumed."""
    middle = base / "middle.ckpt"
    more = [] if asked["trainer"] == "barebones" else [Hooks(), _SaveMiddle(middle)]
    found = {"straight": _fit(asked, base / "a", more)}
    begin = None
    if asked["resume"] == "from the middle" and middle.exists():
        begin = middle
    elif asked["resume"] == "from the last":
        written = sorted((base / "a").rglob("*.ckpt"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        begin = written[-1] if written else None
    if begin is not None:
        found["resumed"] = _fit(asked | {"limit": "whole"}, base / "b", [Hooks()], begin)
    return found


# -- digests -----------------------------------------------------------------------------------------------------------------------

_TIMED = re.compile(
    r"written_by|checksum|attempt|bytes|time|date|seconds|version|path|pid|host|duration|_per_sec|digest|created|run_id",
    re.IGNORECASE,
)
"""Keys whose values differ between two runs of one tree, or name the tree."""


def digest(value):
    """Returns a short digest of a nested value; tensors by dtype, shape and bits, keys that tell a time or a place left out."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()[:16]


def _settled(key, value):
    """Returns a value without what depends on how far the background had come."""
    if str(key).startswith("AsyncCheckpoint"):
        return {name: each for name, each in value.items() if name != "files"}
    return value


def _feed(found, value):
    if isinstance(value, torch.Tensor):
        whole = value.to_local() if hasattr(value, "to_local") else value  # of a shard this rank's part
        found.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
        if whole.is_meta:  # its values are in a shard's file
            return
        plain = whole.detach().cpu().contiguous()
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    elif isinstance(value, dict):
        for key in sorted(value, key=lambda key: _without_paths(str(key))):
            if not _TIMED.search(str(key)):
                found.update(f"<{_without_paths(str(key))}>".encode())
                _feed(found, _settled(key, value[key]))
    elif isinstance(value, (list, tuple)):
        found.update(f"[{len(value)}".encode())
        for each in value:
            _feed(found, each)
    elif isinstance(value, float):
        found.update(struct.pack("<d", value))
    else:
        found.update(_without_paths(repr(value)).encode())


def _without_paths(text):
    return re.sub(r"0x[0-9a-f]+", "0x", re.sub(r"/[^\s'\"]*bits[^\s'\":,;)]*", "PATH", text))


def _files(root):
    """Returns a digest of each file below ``root`` by its relative path."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_dir() or ".ckpt/" in name:
            continue
        if path.suffix == ".ckpt":
            found[name] = {key: digest(value) for key, value in _read(path).items() if not _TIMED.search(key)}
        elif path.suffix == ".csv":
            with path.open(newline="") as file:
                rows = [{k: v for k, v in row.items() if not _TIMED.search(str(k))} for row in csv.DictReader(file)]
            found[name] = digest(rows)
        elif path.suffix == ".jsonl":
            found[name] = digest([json.loads(line) for line in path.read_text().splitlines()])
        else:
            found[name] = "there"
    for path in sorted(root.rglob("*.ckpt")):
        if path.is_dir():
            state = torch.load(path / "state.pt", weights_only=True)
            content = {key: digest(each) for key, each in state.items() if key != "shards" and not _TIMED.search(key)}
            content["shards"] = [digest(_whole(each)) for each in sorted(path.glob("shards-*"))]
            found[str(path.relative_to(root))] = content
    return found


def _whole(shards):
    """Returns the tensors that the ranks have written to the folder ``shards``, joined."""
    reader = checkpoint.FileSystemReader(shards)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in stored.items()}
    checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _read(path):
    return torch.load(path, map_location="cpu", weights_only=False)


def main():
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    # What a fit prints is not an answer.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for line in sys.stdin:
        asked, base = json.loads(line)
        print(json.dumps(outcome_of(asked, Path(base))), file=answers, flush=True)


if __name__ == "__main__":
    main()
