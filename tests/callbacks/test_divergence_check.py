"""DivergenceCheck detects ranks that diverge, and names the rank and the first parameter that differs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fabricamp.callbacks import DivergenceCheck
from fabricamp.callbacks.divergence_check import _checksums
from fabricamp.errors import ConfigError, DistributedError
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


class Drifting(Classifier):
    """One rank changes the last bits of two weights after its fourth step."""

    def __init__(self, odd_rank):
        super().__init__()
        self.odd_rank = odd_rank

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == self.odd_rank:
            with torch.no_grad():
                for weight in (self.net[2].weight, self.net[2].bias):
                    weight[-1].view(torch.int32).bitwise_xor_(1)


def fit(odd_rank, precision, **options):
    trainer = quiet_trainer(
        devices="auto", strategy="ddp", max_epochs=2, precision=precision, callbacks=[DivergenceCheck(**options)]
    )
    message = ""
    try:
        trainer.fit(Drifting(odd_rank), loader(64, 4))
    except DistributedError as error:
        message = str(error)
    return trainer.global_step, message


def drift():
    size = dist.get_world_size()
    return [
        fit(None, "O0", every_n_steps=1),
        fit(None, "O2", every_n_steps=2),
        fit(0, "O0", every_n_steps=1000),
        fit(size - 1, "O0", every_n_steps=3),
        fit(0, "O0", every_n_steps=2),
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_who_differs_and_where(world_size):
    everyone = run_ranks(drift, world_size)
    assert all(seen == everyone[0] for seen in everyone)
    same, half, seldom, last, first = everyone[0]
    steps = 2 * -(-64 // (4 * world_size))
    assert same == half == seldom == (steps, "")
    assert last[0] == 6
    assert (
        f"after step 6 the parameters of rank {world_size - 1} differ from those of rank 0: net.2.weight is the first"
        in last[1]
    )
    assert first[0] == 6
    # Two ranks have no majority, so rank 0 is the reference.
    odd, usual = (1, 0) if world_size == 2 else (0, 1)
    assert f"after step 6 the parameters of rank {odd} differ from those of rank {usual}: net.2.weight" in first[1]
    assert "the first of 2 that differ (of 4)" in first[1]


def test_every_dtype_and_layout_has_its_bits_summed():
    values = torch.arange(12.0).reshape(3, 4)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2):
        given = values.to(dtype)
        changed = given.clone()
        changed[1, 2] = 7
        sums = _checksums([given, given.t(), given.t().contiguous(), changed]).tolist()
        assert sums[0] == sums[1] == sums[2] != sums[3], dtype
    assert _checksums([torch.zeros(1), -torch.zeros(1), torch.empty(0)]).tolist() == [0, -(2**31), 0]


def test_one_process_checks_nothing_and_arguments_are_checked():
    quiet_trainer(max_epochs=1, callbacks=[DivergenceCheck(every_n_steps=1)]).fit(Classifier(), loader())
    for wrong in (0, -1, 1.5, True, "100"):
        with pytest.raises(ConfigError, match=r"DivergenceCheck\(every_n_steps="):
            DivergenceCheck(every_n_steps=wrong)
