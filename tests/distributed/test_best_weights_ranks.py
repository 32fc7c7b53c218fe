"""``validate``, ``test`` and ``predict`` without a module on two ranks load the best checkpoint, however the ranks were started."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from fabricamp.errors import MissingCheckpointError
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer
from tests.trainer.test_best_weights import Scored


class Wider(Scored):
    """Has two weights per rank when it is sharded."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))


def batches():
    return DataLoader(torch.zeros(2, 1))


def values(module):
    """Returns the weights; only rank 0 has them after a run that sharded the module."""
    return None if module.weight.is_meta else module.weight.tolist()


def best_of(kind, folder, **options):
    """Trains three epochs, the second is the best; returns the values of ``test`` and ``predict``, the final weights, the file."""
    trainer = quiet_trainer(
        max_epochs=3, enable_checkpointing=True, callbacks=kind(folder, "{epoch}", "score", save_last=True), **options
    )
    module = Wider()
    trainer.fit(module, batches())
    trained = values(module)
    tested = trainer.test(dataloaders=batches(), verbose=False)[0]["test_weight"]
    predicted = trainer.predict(dataloaders=batches())
    return trained, tested, predicted, values(module), trainer.ckpt_path


RUNS = {
    "ddp": ("ddp", ModelCheckpoint, {}),
    "beside": ("ddp", AsyncCheckpoint, {}),
    "masters": ("delayed_ddp", ModelCheckpoint, {"precision": "O5"}),
    "folders": ("fsdp", ModelCheckpoint, {}),
    "folders beside": ("fsdp", AsyncCheckpoint, {"precision": "O5"}),
}


def test_all_ranks_take_the_best(tmp_path):
    def ranks():
        return {
            name: best_of(kind, tmp_path / name, strategy=strategy, devices="auto", **options)
            for name, (strategy, kind, options) in RUNS.items()
        }

    for rank, found in enumerate(run_ranks(ranks, 2, backend=None)):
        for name, (trained, tested, predicted, kept, path) in found.items():
            whole = rank == 0 or RUNS[name][0] != "fsdp"
            assert (trained, kept) == (([3.0] * 4, [2.0] * 4) if whole else (None, None)), name
            assert (tested, predicted) == (2.0, [2.0, 2.0]), name
            assert path == str(tmp_path / name / "epoch=1.ckpt")


def test_ranks_without_a_file_all_say_so():
    def ranks():
        trainer = quiet_trainer(strategy="ddp", devices="auto", max_epochs=1)
        trainer.fit(Wider(), batches())
        with pytest.raises(MissingCheckpointError, match="has no ModelCheckpoint"):
            trainer.test(dataloaders=batches())
        return True

    assert run_ranks(ranks, 2, backend=None) == [True, True]


def test_the_weights_of_the_best_come_back_from_workers(tmp_path):
    found = best_of(ModelCheckpoint, tmp_path, devices=2, start_method="fork")
    assert found[:4] == ([3.0] * 4, 2.0, [2.0, 2.0], [2.0] * 4)


def test_before_workers_start_it_is_said_that_there_is_no_file():
    trainer = quiet_trainer(devices=2, start_method="fork", max_epochs=1)
    module = Wider()
    trainer.fit(module, batches())
    with pytest.raises(MissingCheckpointError, match=r"trainer\.predict\(module\)"):
        trainer.predict(dataloaders=batches())
