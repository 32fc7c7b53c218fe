"""BasePredictionWriter on two ranks: each gets its own predictions, with their samples' indices."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from fabricamp.callbacks import BasePredictionWriter
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, quiet_trainer

SAMPLES = torch.arange(7) * 10


class Repeats(Classifier):
    def predict_step(self, batch, batch_idx):
        return batch.clone()


class Notes(BasePredictionWriter):
    batches, epochs = (), ()

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches = [*self.batches, (prediction.tolist(), batch_indices)]

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epochs = [*self.epochs, ([one.tolist() for one in predictions], batch_indices)]


def on_a_rank(folder=None):
    notes = []
    shared = DistributedSampler(SAMPLES, shuffle=True, seed=3) if dist.is_initialized() else None
    for options, trainer_options in (
        ({}, {}),
        ({"shuffle": True, "num_workers": 1}, {}),
        ({"sampler": shared}, {}),
        ({}, {"use_distributed_sampler": False}),
    ):
        writer = Notes("batch_and_epoch")
        trainer = quiet_trainer(strategy="ddp", devices="auto", callbacks=[writer], **trainer_options)
        returned = trainer.predict(Repeats(), DataLoader(SAMPLES, batch_size=2, **options))
        assert len(returned) == 2 * len(writer.batches)  # the predictions of both ranks
        notes.append((writer.batches, writer.epochs))
    return notes


def test_each_rank_writes_its_own_samples():
    ranks = run_ranks(on_a_rank, 2)
    for notes in ranks:
        for batches, [(predictions, [indices])] in notes:
            assert predictions == [prediction for prediction, _ in batches]
            assert indices == [one for _, one in batches]
            assert predictions == [[10 * index for index in batch] for batch in indices]
    dealt = [[indices for _, indices in notes[0][0]] for notes in ranks]
    assert dealt == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    in_order = [[indices for _, indices in notes[3][0]] for notes in ranks]
    assert in_order == [[[0, 1], [2, 3], [4, 5], [6]]] * 2


class Files(Notes):
    def __init__(self, folder):
        super().__init__("epoch")
        self.folder = folder

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        torch.save([predictions, batch_indices], self.folder / f"{trainer.global_rank}.pt")


def test_processes_that_the_trainer_starts_write_theirs(tmp_path):
    trainer = quiet_trainer(strategy="ddp", devices=2, callbacks=[Files(tmp_path)])
    assert trainer.predict(Repeats(), DataLoader(SAMPLES, batch_size=2), return_predictions=False) is None
    for rank, expected in enumerate([[[0, 1], [4, 5]], [[2, 3], [6]]]):
        predictions, indices = torch.load(tmp_path / f"{rank}.pt")
        assert indices == [expected]
        assert [one.tolist() for one in predictions] == [[10 * index for index in batch] for batch in expected]
