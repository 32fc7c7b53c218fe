"""A stand-in for the Trainer: the public attributes that callbacks read, real checkpoint files, real loggers where given."""

from __future__ import annotations

import copy

import pytest
import torch

from fabricamp.callbacks import ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint, write_checkpoint
from fabricamp.errors import CheckpointError
from fabricamp.loggers.logger_collection import LoggerCollection
from fabricamp.state import RunState, TrainerFn
from fabricamp.strategies.base import Strategy


class RecordingStrategy(Strategy):
    def __init__(self):
        super().__init__()
        self.broadcasts = 0

    def broadcast(self, value, source=0):
        self.broadcasts += 1
        return copy.deepcopy(value)  # a receiver never gets the sender's own object


class StandInTrainer:
    """Runs nothing by itself; a test advances it and calls its hooks."""

    def __init__(self, root, *callbacks):
        self.state = RunState()
        self.state.begin(TrainerFn.FITTING)
        self.strategy = RecordingStrategy()
        self.callbacks = list(callbacks)
        self.loggers = []
        self.lr_scheduler_configs = []
        self.optimizers = []
        self.callback_metrics = {}
        self.num_val_batches = [4]
        self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1
        self.log_every_n_steps = 10
        self.fast_dev_run = False
        self.is_global_zero = True
        self.global_rank = 0
        self.world_size = 1
        self.default_root_dir = self.root_folder = str(root)
        self.log_dir = self.log_folder = None
        self.ckpt_path = None
        self.saved = []
        self.failure = None

    def reduce_step_metrics(self):
        """Does nothing: values that a test puts into callback_metrics are visible at once."""

    @property
    def monitored_metrics(self):
        return self.callback_metrics

    @property
    def delivery(self):
        return LoggerCollection(self.loggers)

    @property
    def global_step(self):
        return self.state.global_step

    @property
    def current_epoch(self):
        return self.state.epoch

    def stop(self, reason):
        self.state.stop(reason)

    def save_checkpoint(self, path, weights_only=False, write=write_checkpoint):
        self.saved.append((path, weights_only))
        if self.failure:
            raise CheckpointError(self.failure)
        states = {one.state_key: one.state_dict() for one in self.callbacks}
        checkpoint = {"state_dict": {}, "global_step": self.global_step, "callbacks": states}
        for one in self.callbacks:
            one.on_save_checkpoint(self, None, checkpoint)
        write(path, checkpoint)

    # -- the work of the loop

    def start(self):
        for one in self.callbacks:
            one.setup(self, None, "fit")
            one.on_train_start(self, None)
        return self

    def resume(self, path):
        checkpoint = read_checkpoint(path)
        self.ckpt_path = str(path)
        self.state.global_step = checkpoint["global_step"]
        for one in self.callbacks:
            one.setup(self, None, "fit")
            one.load_state_dict(checkpoint["callbacks"][one.state_key])
            one.on_train_start(self, None)
        return self

    def step(self, micro_batches=1):
        for index in range(micro_batches):
            for one in self.callbacks:
                one.on_train_batch_start(self, None, None, index)
            if index == micro_batches - 1:
                self.state.global_step += 1
            for one in self.callbacks:
                one.on_train_batch_end(self, None, None, None, index)

    def epoch(self, steps=1, train=None, **validation):
        """Runs ``steps`` steps, a validation with the metrics ``validation``, and the epoch's end with the metrics ``train``."""
        for one in self.callbacks:
            one.on_train_epoch_start(self, None)
        for _ in range(steps):
            self.step()
        self.validate(**validation)
        self.callback_metrics.update({name: torch.tensor(value) for name, value in (train or {}).items()})
        for one in self.callbacks:
            one.on_train_epoch_end(self, None)
        self.state.epoch += 1

    def validate(self, **metrics):
        if sum(self.num_val_batches):
            self.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
            for one in self.callbacks:
                one.on_validation_end(self, None)

    def interrupt(self, error=None):
        for one in self.callbacks:
            one.on_exception(self, None, error or KeyboardInterrupt())


@pytest.fixture
def make_trainer(tmp_path):
    return lambda *callbacks: StandInTrainer(tmp_path, *callbacks)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "files"


@pytest.fixture
def make(folder):
    return lambda **options: ModelCheckpoint(dirpath=folder, **options)
