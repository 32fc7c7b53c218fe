"""A Loop on two ranks: the bits of the Trainer's steps under each strategy, exchanges, resumes."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ConfigError
from tests.distributed.ranks import import_compiler, run_ranks
from tests.own_loop.same import by_loop, by_trainer, difference, prepared
from tests.pairs import pairs

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
CLIPS = [None, 0.5]
MATRIX = [
    *(("ddp", *row) for row in pairs(LEVELS, ["sgd", "fused_adam"], [1, 3], CLIPS)),
    *(("delayed_ddp", *row) for row in pairs(LEVELS, ["adamw", "fused_sgd"], [1, 3], CLIPS)),
    *(("fsdp", *row) for row in pairs(["O0", "O2", "O4", "O5"], ["adamw", "fused_adam"], [1, 3], CLIPS)),
]


def on_two_ranks():
    problems = []
    for strategy, level, optimizer, accumulate, clip in MATRIX:
        options = {
            "strategy": strategy,
            "devices": "auto",
            "precision": level,
            "accumulate_grad_batches": accumulate,
            "gradient_clip_val": clip,
        }
        if found := difference(by_trainer(optimizer, **options), by_loop(optimizer, **options)):
            problems.append((strategy, level, optimizer, accumulate, clip, found))
    run, model, _, train = prepared("sgd", strategy="fsdp", devices="auto")
    with run, pytest.raises(ConfigError, match="strategy='fsdp' gathers the weights"):
        run.forward(model, next(iter(train))[0])
    run, _, _, _ = prepared("sgd", strategy="ddp", devices="auto")
    with run:
        own = torch.tensor([float(run.rank)])
        assert run.all_reduce(own).item() == 0.5
        assert run.all_gather(own).tolist() == [[0.0], [1.0]]
        assert run.broadcast(f"of {run.rank}", src=1) == "of 1"
        assert (run.world_size, run.local_rank, run.is_global_zero) == (2, run.rank, run.rank == 0)
        run.barrier()
    return problems


def test_steps_on_two_ranks_have_the_trainers_bits():
    import_compiler()
    assert run_ranks(on_two_ranks, 2) == [[], []]
