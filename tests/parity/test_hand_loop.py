"""After 200 steps the Trainer's weights equal those of a hand-written loop, bit for bit."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from fabricamp import TrainingModule, seed_everything
from tests.distributed.ranks import run_ranks
from tests.small import data, quiet_trainer

STEPS = 200
BATCH = 4
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adam_fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
}


class Net(TrainingModule):
    """Dropout and BatchNorm: random numbers and buffers have to agree as well."""

    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 3),
        )
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


def hand_written(net, optimizer, batches_of_epoch, accumulate, clip, steps):
    """Trains with the loss divided by the number of micro-batches, torch's clipping, and the rest of an epoch as its own step."""
    step = 0
    for epoch in itertools.count():
        batches = batches_of_epoch(epoch)
        for index, (x, y) in enumerate(batches):
            ends = (index + 1) % accumulate == 0 or index + 1 == len(batches)
            if index % accumulate == 0:
                optimizer.zero_grad()
            if ends or not hasattr(net, "no_sync"):
                (F.cross_entropy(net(x), y) / accumulate).backward()
            else:
                with net.no_sync():
                    (F.cross_entropy(net(x), y) / accumulate).backward()
            if ends:
                if clip:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                step += 1
                if step == steps:
                    return


def differences(module, twin):
    return [name for name, value in module.state_dict().items() if not torch.equal(value, twin.state_dict()[name])]


BUFFERS = ["net.1.running_mean", "net.1.running_var"]
"""Buffers that torch's wrapper broadcasts from rank 0 before a step, and delayed_ddp after it."""


def both_loops(strategy, optimizer, accumulate, clip, rank=0, world_size=1, steps=STEPS):
    seed_everything(7, verbose=False)
    dataset = data(46)
    module = Net(optimizer)
    twin = copy.deepcopy(module)
    loader = DataLoader(dataset, BATCH, shuffle=True)
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy,
        devices="auto",
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        log_every_n_steps=10,
    )
    trainer.fit(module, loader)
    assert trainer.global_step == steps

    torch.manual_seed(11)
    net = DistributedDataParallel(twin.net) if world_size > 1 else twin.net
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=7)
    shared = DataLoader(dataset, BATCH, sampler=sampler)

    def batches_of_epoch(epoch):
        if world_size == 1:
            return loader
        sampler.set_epoch(epoch)
        return shared

    hand_written(net, OPTIMIZERS[optimizer](net.parameters()), batches_of_epoch, accumulate, clip, steps)
    return differences(module, twin)


PAIRS = [("sgd", 1, None), ("sgd", 4, 0.1), ("adamw", 1, 0.1), ("adamw", 4, None)]
"""Combinations of optimizer, accumulation and clipping, in which each pair of two options occurs."""


@pytest.mark.parametrize(("optimizer", "accumulate", "clip"), [*PAIRS, ("adam_fused", 1, None), ("adam_fused", 4, 0.1)])
def test_single(optimizer, accumulate, clip):
    """The loader is a plain shuffled one: its order comes from the same generator as dropout."""
    assert both_loops("single", optimizer, accumulate, clip) == []


def several_combinations(strategy, combinations, rank_of, steps):
    place = rank_of()
    return {combination: both_loops(strategy, *combination, *place, steps) for combination in combinations}


def place():
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


@pytest.mark.parametrize(
    ("strategy", "combinations"),
    [
        ("ddp", PAIRS),
        ("delayed_ddp", [("sgd", 1, None), ("adamw", 4, 0.1)]),
    ],
    ids=["ddp", "delayed_ddp"],
)
@pytest.mark.parametrize("steps", [60, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_on_two_ranks(strategy, combinations, steps):
    """Trains ten epochs, or thirty with four micro-batches per step; differences would appear in the first epochs."""
    first, second = run_ranks(several_combinations, 2, strategy, combinations, place, steps, timeout=240.0)
    assert first == {combination: [] for combination in combinations}
    assert second == {one: BUFFERS if strategy == "delayed_ddp" else [] for one in combinations}
