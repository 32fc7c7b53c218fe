"""Two ranks share a ResidentLoader: each sample is seen once, and an interrupted run resumes exactly."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from fabricamp.data import ResidentLoader
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer
from tests.trainer.test_exact_resume import BATCH, Net, Samples, Saves
from tests.trainer.test_resume import assert_equal

SIZE = 45  # one sample is repeated, and the last batch is shorter
CASES = {
    "ddp": ("ddp", 1, 5),
    "ddp within a window": ("ddp", 4, 7),
    "delayed": ("delayed_ddp", 1, 6),
    "delayed within a window": ("delayed_ddp", 4, 3),
}


def fit(case, seed, **options):
    strategy, accumulate, _ = CASES[case]
    for place in (torch.manual_seed, random.seed, np.random.seed):
        place(100 * seed + dist.get_rank())
    x, y = Samples(SIZE).data.tensors
    loader = ResidentLoader(
        x,
        y,
        torch.arange(SIZE),
        batch_size=BATCH,
        shuffle=True,
        seed=9,
        transform=lambda one: (one[0] + torch.rand(()), *one[1:]),
    )
    module = Net()
    trainer = quiet_trainer(
        strategy=strategy,
        devices="auto",
        accumulate_grad_batches=accumulate,
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=options.pop("callbacks", []),
    )
    trainer.fit(module, loader, loader, **options)
    return module


def every_case(folder):
    seen = []
    for name, case in CASES.items():
        saves = Saves("batch", case[2], folder / f"{name}.ckpt")
        straight = fit(name, 1, callbacks=[saves])
        resumed = fit(name, 2, ckpt_path=folder / f"{name}.ckpt")
        assert resumed.seen == straight.seen[saves.seen :], name
        assert_equal(resumed.state_dict(), straight.state_dict())
        seen.append(straight.seen)
    assert all(one == seen[0] for one in seen)
    return seen[0]


def test_ranks_take_their_shares_and_go_on_exactly(tmp_path):
    ranks = run_ranks(every_case, 2, tmp_path, timeout=200.0)
    for rank, seen in enumerate(ranks):
        for epoch in range(2):
            sampler = DistributedSampler(range(SIZE), 2, rank, seed=9)
            sampler.set_epoch(epoch)
            found = [index for place, indices in seen if place == epoch for index in indices]
            assert found == list(sampler)
        validated = [batch for place, batch in seen if place == "validation"]
        assert validated == [*range(6), *range(6)]
