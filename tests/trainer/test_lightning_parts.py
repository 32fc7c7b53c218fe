"""Lightning's accelerator, strategy and loop counters of a Trainer."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from fabricamp import Callback, ConfigError
from fabricamp.accelerators import CPUAccelerator, CUDAAccelerator, find_usable_cuda_devices
from fabricamp.accelerators.cpu import CPUAccelerator as SameAccelerator
from fabricamp.strategies import SingleDeviceStrategy
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


class Counts(Callback):
    """Records the loops' counters in each hook; the expected values are from the same callback in Lightning 2.6.0."""

    def __init__(self):
        self.seen = []

    def note(self, trainer, name):
        loop = trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        ready, done = progress.current.ready, progress.total.processed
        self.seen.append((name, loop.batch_idx, loop.total_batch_idx, ready, done))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.note(trainer, "start")

    def on_before_backward(self, trainer, pl_module, loss):
        self.note(trainer, "backward")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.note(trainer, "end")

    def on_validation_start(self, trainer, pl_module):
        self.note(trainer, "validation")

    def on_train_epoch_end(self, trainer, pl_module):
        self.note(trainer, "epoch end")


def test_counters_of_the_loops_are_lightnings():
    counts = Counts()
    trainer = quiet_trainer(
        max_epochs=2, limit_train_batches=2, limit_val_batches=1, num_sanity_val_steps=0, callbacks=[counts]
    )
    assert trainer.fit_loop.total_batch_idx == -1
    trainer.fit(Classifier(), loader(), loader())
    assert counts.seen == [
        (name, batch, total, batch + 1, total + (name not in ("start", "backward")))
        for epoch in range(2)
        for batch, total in ((0, 2 * epoch), (1, 2 * epoch + 1))
        for name in (["start", "backward", "end"] + (["validation", "epoch end"] if batch else []))
    ]
    assert trainer.fit_loop.total_batch_idx == 3


def test_the_accelerator_is_an_object():
    trainer = quiet_trainer()
    assert type(trainer.accelerator) is CPUAccelerator is SameAccelerator
    assert CPUAccelerator.is_available()
    assert CPUAccelerator.auto_device_count() == 1
    assert CUDAAccelerator.auto_device_count() == torch.cuda.device_count()
    assert CUDAAccelerator.is_available() == (torch.cuda.device_count() > 0)
    assert trainer.distributed_sampler_kwargs == {}
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"num_devices=2\) found 0 of 0 GPUs"):
            find_usable_cuda_devices(2)


def test_the_strategy_knows_the_run():
    trainer, module = quiet_trainer(max_steps=1), Classifier()
    assert (trainer.strategy.model, trainer.strategy.optimizers, trainer.strategy.precision_plugin) == (None, [], None)
    trainer.fit(module, loader())
    strategy = trainer.strategy
    assert strategy.lightning_module is strategy.model is module
    assert strategy.optimizers == trainer.optimizers
    assert strategy.precision_plugin is trainer.precision_plugin
    for copied in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert type(copied) is SingleDeviceStrategy
        assert copied.lightning_module is None
    assert strategy.reduce(torch.tensor(2.0), reduce_op="sum") == 2
    assert strategy.broadcast(1, src=0) == 1


def decisions():
    trainer = quiet_trainer(devices=2, strategy="ddp", max_steps=1)
    trainer.fit(Classifier(), loader(), None)
    strategy, rank = trainer.strategy, trainer.global_rank
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank}
    return [
        strategy.reduce_boolean_decision(decision, all=every)
        for decision in (rank == 1, True, False)
        for every in (True, False)
    ]


def test_ranks_decide_together():
    assert run_ranks(decisions, 2) == [[False, True, True, True, False, False]] * 2
