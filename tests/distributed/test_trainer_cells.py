"""Combinations that no other test has, on two ranks: a resumed run has the bits of an uninterrupted one.

Manual optimization with two optimizers, clipping and schedules at every kind of level; other kinds of data, interrupted within an
accumulation.
"""

from __future__ import annotations

import logging
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from fabricamp import Callback, TrainingModule
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer
from tests.trainer.test_exact_resume import DATA, Net

CELLS = [
    ("O0", None),
    ("O0", ("norm", 0.5)),
    ("O1", ("value", 0.02)),
    ("O2", ("norm", 0.5)),
    ("O3", ("norm", 0.5)),
    ("O5", ("value", 0.02)),
    ("bf16-true", None),
    ("64-true", ("norm", 0.5)),
]
KINDS = ["a stream", "an own loader", "a sampler with a generator", "two loaders", "in turn", "one that ends"]


class TwoOptimizers(TrainingModule):
    """Two optimizers with separate layers and schedules, which the module steps itself."""

    def __init__(self, clip):
        super().__init__()
        self.automatic_optimization = False
        self.one = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3)
        )
        self.two = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
        self.clip = clip

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer, net in zip(self.optimizers(), (self.one, self.two), strict=True):
            with self.toggled_optimizer(optimizer):
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(net(x), y))
                if self.clip is not None:
                    self.clip_gradients(optimizer, self.clip[1], self.clip[0])
                optimizer.step()
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self):
        one = torch.optim.AdamW(self.one.parameters(), lr=0.01, eps=1e-3)
        two = torch.optim.SGD(self.two.parameters(), lr=0.05, momentum=0.9)
        return [one, two], [torch.optim.lr_scheduler.StepLR(one, 2, 0.7), torch.optim.lr_scheduler.StepLR(two, 3, 0.7)]


class Saves(Callback):
    """Writes a checkpoint after a number of batches."""

    def __init__(self, batches, path):
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.state.batches_done == self.batches:
            trainer.save_checkpoint(self.path)


def differences(make_module, make_loader, folder, batches, **options):
    """Returns the weights and optimizer states that differ between a run resumed after ``batches`` and the uninterrupted run."""

    def fitted(seed, callbacks=(), ckpt_path=None):
        for generator in (torch.manual_seed, random.seed, np.random.seed):
            generator(seed + 100 * dist.get_rank())
        module = make_module()
        trainer = quiet_trainer(devices="auto", callbacks=list(callbacks), **options)
        trainer.fit(module, make_loader(), ckpt_path=ckpt_path)
        states = [state for one in trainer.optimizers for state in one.state_dict()["state"].values()]
        flat = {f"{index}.{name}": value for index, state in enumerate(states) for name, value in state.items()}
        rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
        return {**module.state_dict(), **flat, "rates": torch.tensor(rates), "step": torch.tensor(trainer.global_step)}

    path = folder / "cut.ckpt"
    straight = fitted(1, [Saves(batches, path)])
    resumed = fitted(2, ckpt_path=path)
    return [
        name
        for name, value in straight.items()
        if not torch.equal(torch.as_tensor(value), torch.as_tensor(resumed[name]))
    ]


def with_two_optimizers(strategy, folder):
    warnings.simplefilter("ignore")
    problems = {}
    for level, clip in CELLS:
        options = {"precision": level, "strategy": strategy, "max_epochs": 2}
        found = differences(partial(TwoOptimizers, clip), partial(loader, 32, shuffle=True), folder, 5, **options)
        if found:
            problems[level, clip] = found
    return problems


def with_other_kinds_of_data(strategy, folder):
    logging.getLogger("fabricamp").setLevel(logging.ERROR)
    options = {"strategy": strategy, "accumulate_grad_batches": 3, "max_steps": 4}
    found = {}
    for kind in KINDS:
        # Every rank reads the complete stream.
        shares = {"use_distributed_sampler": False} if kind == "a stream" else {}
        found[kind] = differences(Net, DATA[kind], folder, 4, **options, **shares)
    return {kind: one for kind, one in found.items() if one}


@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp"])
@pytest.mark.parametrize("cells", [with_two_optimizers, with_other_kinds_of_data])
def test_a_resumed_run_has_the_bits_of_the_straight_one(cells, strategy, tmp_path):
    assert run_ranks(cells, 2, strategy, tmp_path, timeout=200.0) == [{}, {}]
