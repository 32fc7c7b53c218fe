"""ResidentLoader: its batches, orders and shares, the arguments it refuses, and that the host never waits."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fabricamp import Callback, ConfigError, CudaGraph, Trainer, seed_everything
from fabricamp.callbacks import BasePredictionWriter
from fabricamp.data import EvalSampler, ResidentLoader, move_to_device, set_epoch, wire_loader
from fabricamp.optimizers import FusedSGD
from tests.small import Classifier, data, quiet_trainer
from tests.trainer.test_exact_resume import assert_exact, resident


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Both:
    x: torch.Tensor
    y: torch.Tensor


X, Y = torch.arange(14.0).view(7, 2), torch.arange(7)
FORMS = {
    "tensor": ((X,), lambda batch: batch),
    "tensors": ((X, Y), lambda batch: batch[0]),
    "tuple": (((X, Y),), lambda batch: batch[0]),
    "list": (([X, Y],), lambda batch: batch[0]),
    "dict": (({"x": X, "y": Y},), lambda batch: batch["x"]),
    "nested": (({"in": (X, {"y": Y})},), lambda batch: batch["in"][0]),
    "named": ((Pair(X, Y),), lambda batch: batch.x),
    "data class": ((Both(X, Y),), lambda batch: batch.x),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_has_the_form_of_the_data(form):
    given, x_of = FORMS[form]
    batches = list(ResidentLoader(*given, batch_size=3))
    assert type(batches[0]) is type(given[0] if len(given) == 1 else given)
    assert torch.equal(torch.cat([x_of(batch) for batch in batches]), X)
    assert [len(x_of(batch)) for batch in batches] == [3, 3, 1]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_its_length_is_that_of_a_data_loader(size, drop_last):
    loader = ResidentLoader(X, batch_size=size, drop_last=drop_last)
    other = DataLoader(X, batch_size=size, drop_last=drop_last)
    assert len(loader) == len(other) == len(list(loader))
    assert all(map(torch.equal, loader, other))


def test_an_edit_of_a_batch_leaves_the_data_alone():
    for (batch,) in (ResidentLoader((X,), batch_size=7), ResidentLoader((X,), batch_size=7, shuffle=True)):
        batch[0].zero_()
    assert X.sum() == 91


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_order_is_that_of_the_distributed_sampler(world_size, epoch):
    for rank in range(world_size):
        sampler = DistributedSampler(TensorDataset(Y), world_size, rank, seed=5)
        sampler.set_epoch(epoch)
        loader = ResidentLoader(Y, batch_size=2, shuffle=True)
        wired = wire_loader(loader, train=True, rank=rank, world_size=world_size, seed=5)
        set_epoch(wired, epoch)
        assert torch.cat(list(wired)).tolist() == list(sampler)
        assert len(wired) == len(list(wired))
        own = ResidentLoader(Y, batch_size=2, shuffle=True, seed=5)
        own.set_epoch(epoch)
        wired = wire_loader(own, train=True, rank=rank, world_size=world_size, seed=77)
        set_epoch(wired, epoch)
        assert torch.cat(list(wired)).tolist() == list(sampler)


@pytest.mark.parametrize("world_size", [1, 2, 9])
def test_evaluation_reads_each_sample_once_in_order(world_size):
    for rank in range(world_size):
        loader = ResidentLoader(Y, batch_size=2, shuffle=True)
        wired = wire_loader(loader, train=False, rank=rank, world_size=world_size, seed=5)
        found = torch.cat([*wired, torch.empty(0, dtype=torch.int64)]).tolist()
        assert found == list(EvalSampler(7, rank=rank, world_size=world_size)) == list(range(rank, 7, world_size))


def test_overfitting_reads_in_order_and_unshared_ranks_read_all():
    options = {"train": True, "rank": 1, "world_size": 2, "seed": 5}
    loader = ResidentLoader(Y, batch_size=2, shuffle=True)
    assert torch.cat(list(wire_loader(loader, overfit=2, **options))).tolist() == [1, 3, 5, 0]
    whole = wire_loader(loader, distributed_sampler=False, **options)
    assert sorted(torch.cat(list(whole)).tolist()) == list(range(7))


REFUSED = {
    "nothing": (lambda: ResidentLoader(batch_size=1), "no tensor"),
    "empty dict": (lambda: ResidentLoader({}, batch_size=1), "no tensor"),
    "sizes": (lambda: ResidentLoader(X, Y[:3], batch_size=1), r"\[7, 3\] samples"),
    "a batch size among the data": (lambda: ResidentLoader(X, 3, batch_size=1), "int among its data"),
    "data set": (lambda: ResidentLoader(TensorDataset(X), batch_size=1), r"give \*dataset.tensors"),
    "array": (lambda: ResidentLoader(np.zeros(3), batch_size=1), "torch.as_tensor"),
    "word": (lambda: ResidentLoader({"x": X, "name": "a"}, batch_size=1), "str among its data"),
    "scalar": (lambda: ResidentLoader(torch.tensor(1.0), batch_size=1), "without dimensions"),
    "gradient": (lambda: ResidentLoader(X.clone().requires_grad_(), batch_size=1), r"tensor.detach\(\)"),
    "sparse": (lambda: ResidentLoader(X.to_sparse(), batch_size=1), "give a dense one"),
    "batch size": (lambda: ResidentLoader(X, batch_size=0), "batch_size=0 is not allowed"),
    "flag": (lambda: ResidentLoader(X, batch_size=True), "batch_size=True is not allowed"),
    "seed": (lambda: ResidentLoader(X, batch_size=1, seed=-1), "seed=-1 is not allowed"),
    "transform": (lambda: ResidentLoader(X, batch_size=1, transform=3), "transform=3 is not a function"),
    "misspelt": (lambda: ResidentLoader(X, batch_size=1, shuffles=True), "shuffle"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case):
    make, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        make()


def test_seeds_of_samples_are_refused():
    loader = ResidentLoader(*data().tensors, batch_size=4)
    with pytest.raises(ConfigError, match="per_sample_seed=True seeds the samples of a dataset"):
        quiet_trainer(max_steps=1, per_sample_seed=True).fit(Classifier(), loader)


def test_a_fit_takes_the_samples_that_two_ranks_would_and_evaluates():
    """Compares with a DataLoader in the same order: weights and values have the same bits."""

    def fit(make):
        seed_everything(3)
        module = Classifier()
        trainer = quiet_trainer(max_epochs=3, limit_val_batches=3)
        trainer.fit(module, make(True), make(False))
        return module, trainer.callback_metrics, trainer.test(module, make(False), verbose=False)

    def other(shuffle):
        sampler = DistributedSampler(data(), 1, 0, seed=3) if shuffle else None
        return DataLoader(data(), batch_size=5, sampler=sampler)

    tensors = data().tensors
    module, metrics, tested = fit(lambda shuffle: ResidentLoader(*tensors, batch_size=5, shuffle=shuffle))
    hand, expected, tested_by_hand = fit(other)
    assert all(map(torch.equal, module.parameters(), hand.parameters()))
    assert metrics == expected
    assert tested == tested_by_hand


def test_a_prediction_writer_gets_the_indices():
    written = []

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            written.append(batch_indices)

    trainer = quiet_trainer(callbacks=[Writer("batch")])
    trainer.predict(Classifier(), ResidentLoader(*data(7).tensors, batch_size=3), return_predictions=False)
    assert written == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("done", [8, 9])
def test_a_run_cut_within_a_window_goes_on_exactly(done, tmp_path):
    assert_exact(tmp_path, resident, ("batch", done), accumulate_grad_batches=4, precision="O4")


def test_it_goes_on_at_its_sample_with_another_batch_size(tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "cut.ckpt")

    def fit(size, **options):
        seen = []

        class Seeing(Classifier):
            def training_step(self, batch, batch_idx):
                seen.extend(batch["index"].tolist())
                return super().training_step((batch["x"], batch["y"]), batch_idx)

        x, y = data().tensors
        loader = ResidentLoader({"x": x, "y": y, "index": torch.arange(32)}, batch_size=size, shuffle=True)
        quiet_trainer(max_epochs=2, callbacks=options.pop("callbacks", [])).fit(Seeing(), loader, **options)
        return seen

    straight = fit(4, callbacks=[Save()])
    assert fit(10, ckpt_path=tmp_path / "cut.ckpt") == straight[12:]


def test_data_that_do_not_fit_are_refused(monkeypatch):
    loader = ResidentLoader(X, Y, batch_size=2)
    full = Mock(side_effect=torch.OutOfMemoryError)
    monkeypatch.setattr("fabricamp.data.resident.move_to_device", full)
    with pytest.raises(ConfigError, match="GiB of data do not fit on meta"):
        wire_loader(loader, train=True, rank=0, world_size=1, seed=0, device=torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnAGpu:
    """Batches are gathered on the GPU; nothing else is allocated, and the host does not wait."""

    device = torch.device("cuda", 0) if torch.cuda.is_available() else None

    def wired(self, loader):
        wired = wire_loader(loader, train=True, rank=0, world_size=1, seed=3, device=self.device)
        set_epoch(wired, 1)
        return wired

    def test_the_same_batches_as_on_the_cpu(self):
        loader = ResidentLoader({"x": X, "y": Y}, batch_size=2, shuffle=True, seed=3)
        loader.set_epoch(1)
        for batch, expected in zip(self.wired(loader), loader, strict=True):
            assert batch["x"].is_cuda
            assert torch.equal(batch["x"].cpu(), expected["x"])
            assert torch.equal(batch["y"].cpu(), expected["y"])

    def test_the_data_come_once(self):
        loader = ResidentLoader(torch.zeros(1 << 20), batch_size=2)
        self.wired(loader)
        before = torch.cuda.memory_allocated()
        self.wired(loader)
        assert torch.cuda.memory_allocated() == before

    def test_the_host_never_waits_and_only_the_gather_allocates(self):
        loader = self.wired(ResidentLoader(torch.rand(640, 8), torch.arange(640), batch_size=10, shuffle=True))
        list(loader)
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        busy = torch.cuda.current_stream().record_event()
        torch.cuda.set_sync_debug_mode("error")
        try:
            batches = iter(loader)
            kept = [next(batches)]
            count = torch.cuda.memory_stats()["allocation.all.allocated"]
            kept += batches
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == count + 2 * 63
            assert not busy.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sorted(torch.cat([y for _, y in kept]).tolist()) == list(range(640))

    @pytest.mark.parametrize("graph", [False, CudaGraph(warmup=3)])
    def test_a_fit_has_the_bits_of_the_same_batches_from_a_list(self, graph):
        tensors = data(64).tensors
        on_cpu = ResidentLoader(*tensors, batch_size=8, shuffle=True, seed=3)

        class Fused(Classifier):
            def configure_optimizers(self):
                return FusedSGD(self.parameters(), lr=0.1, momentum=0.9)

        def fit(loader):
            module = Fused()
            options = {"accelerator": "gpu", "devices": 1, "logger": False, "enable_checkpointing": False}
            quiet = {"enable_progress_bar": False, "enable_model_summary": False}
            Trainer(max_epochs=1, precision="O1", cuda_graph=graph, **options, **quiet).fit(module, loader)
            return list(module.parameters())

        expected = fit([move_to_device(one, self.device) for one in on_cpu])
        assert all(map(torch.equal, fit(on_cpu), expected))
