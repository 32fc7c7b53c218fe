"""validate, test and predict on several ranks return the results of one process, however the samples divide."""

from __future__ import annotations

import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fabricamp.errors import ConfigError, DistributedError
from fabricamp.strategies import DDP
from tests.distributed.ranks import run_ranks
from tests.inside import runner
from tests.small import Classifier, loader, quiet_trainer

# (samples, batch size): uneven shares, fewer samples than ranks, batches that do not divide, one sample.
SIZES = [(7, 2), (2, 1), (1, 4), (13, 4)]


class Measured(Classifier):
    """Logs a float mean, integers, an extreme value, and a different name on each rank."""

    def _measure(self, batch, prefix):
        x, y = batch
        scores = self.net(x)
        hits = scores.argmax(dim=1) == y
        self.log(f"{prefix}_loss", torch.nn.functional.cross_entropy(scores, y))
        self.log(f"{prefix}_accuracy", hits.float().mean())
        self.log(f"{prefix}_hits", hits.sum(), reduce_fx="sum")
        self.log(f"{prefix}_seen", len(y), reduce_fx="sum")
        self.log(f"{prefix}_largest", y.max(), reduce_fx="max")

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self._measure(batch, "val")

    def test_step(self, batch, batch_idx):
        self._measure(batch, "test")

    def predict_step(self, batch, batch_idx):
        return batch[0].sum(dim=1)


def evaluated(**options):
    """Returns the results of every entry point for every size."""
    results = []
    for samples, batch_size in SIZES:
        trainer = quiet_trainer(**options)
        module = Measured()
        trained = loader(samples, batch_size)
        values = trainer.validate(module, trained, verbose=False)[0] | trainer.test(module, trained, verbose=False)[0]
        if samples == 7:
            several = trainer.validate(module, [trained, loader(5, 2)], verbose=False)
            values |= {f"{index}/{name}": value for index, one in enumerate(several) for name, value in one.items()}
        watched = {name: value.item() for name, value in trainer.callback_metrics.items()}
        predictions = torch.cat(trainer.predict(module, trained))  # in the order of the samples
        assert trainer.predict(module, trained, return_predictions=False) is None
        results.append((values, watched, predictions))
    return results


class OddNames(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("common", float(len(batch[0])), reduce_fx="sum")
        self.log(f"rank_{self.global_rank}", float(self.global_rank + 1))
        if self.global_rank == 1 and batch_idx == 0:
            self.log("rarely", 4.0)


class NoneOnRankOne(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 else loss


def error_of(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def on_every_rank():
    rank = dist.get_rank()
    options = {"strategy": "ddp", "devices": "auto"}
    results = evaluated(**options)
    odd = quiet_trainer(**options).validate(OddNames(), loader(7, 2), verbose=False)[0]
    # Loaders that cannot be sharded: different lengths, different seeds, no loader on one rank.
    messages = [
        error_of(quiet_trainer(**options, max_epochs=1, use_distributed_sampler=False).fit, Classifier(), loader(8 + 8 * rank)),
        error_of(quiet_trainer(**options, max_epochs=1).fit, Classifier(), loader(8 + 8 * rank)),
        error_of(with_seed, rank, quiet_trainer(**options, max_epochs=1).fit, Classifier(), loader(8, 2, shuffle=True)),
        error_of(quiet_trainer(**options, max_epochs=1).fit, Classifier() if rank == 0 else Wider(), loader()),
    ]  # fmt: skip
    return results, odd, messages


def with_seed(seed, function, *arguments):
    with mock.patch.dict(os.environ, {"FABRICAMP_GLOBAL_SEED": str(seed)}):
        function(*arguments)


class Wider(Classifier):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    return run_ranks(on_every_rank, request.param)


def test_values_and_predictions_are_those_of_one_process(ranks):
    alone = evaluated()
    for results, _, _ in ranks:
        for (samples, _), (values, watched, predictions), (expected, expected_watched, every) in zip(
            SIZES, results, alone, strict=True
        ):
            assert values.keys() == expected.keys()
            assert values["val_seen"] == samples
            assert watched.keys() == expected_watched.keys()
            for name, value in values.items():
                whole = name.endswith(("hits", "seen", "largest"))
                assert value == expected[name] if whole else value == pytest.approx(expected[name], abs=1e-6), name
            for name, value in watched.items():
                assert value == pytest.approx(expected_watched[name], abs=1e-6)
            assert torch.equal(predictions, every)


def test_names_that_only_some_ranks_log(ranks):
    expected = {"common": 7.0, "rarely": 4.0} | {f"rank_{rank}": rank + 1.0 for rank in range(len(ranks))}
    assert [odd for _, odd, _ in ranks] == [expected] * len(ranks)


def test_what_ranks_do_not_agree_on_is_named_on_all_of_them(ranks):
    for _, _, (lengths, sizes, seeds, modules) in ranks:
        assert "DistributedError: train_dataloaders has different numbers of batches on the ranks" in lengths
        assert "rank 0: 2, rank 1: 4" in lengths
        assert "DistributedError: train_dataloaders" in sizes
        assert "different datasets or seeds" in seeds
        assert "DistributedError: ranks 0 and 1 built different modules" in modules


def fit_without_a_loss():
    quiet_trainer(strategy="ddp", devices="auto", max_epochs=1).fit(NoneOnRankOne(), loader())


class RaisesOnRankOne(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 2:
            raise ValueError("rank one is unwell")
        return super().training_step(batch, batch_idx)


def fit_and_raise():
    quiet_trainer(strategy="ddp", devices="auto", max_epochs=1).fit(RaisesOnRankOne(), loader())


def test_a_rank_that_fails_ends_all_of_them():
    with pytest.raises(AssertionError, match="training_step returned None on rank 1"):
        run_ranks(fit_without_a_loss, 2)
    with pytest.raises(AssertionError, match="rank one is unwell"):
        run_ranks(fit_and_raise, 2)
    # Ranks started by the Trainer: the caller can catch the error of the rank that failed first.
    trainer = quiet_trainer(devices=2, strategy="ddp", max_epochs=1)
    with pytest.raises(DistributedError, match=r"rank 1 ended(.|\n)*ValueError: rank one is unwell"):
        trainer.fit(RaisesOnRankOne(), loader())
    with pytest.raises(ConfigError, match="training_step returned None on rank 1"):
        quiet_trainer(devices=2, strategy="ddp", max_epochs=1).fit(NoneOnRankOne(), loader())


def log_once(folder):
    """Returns all messages of torch and fabricamp in a fit with validation, with their process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(strategy="ddp", devices="auto", max_epochs=2, accumulate_grad_batches=2)
        trainer.fit(Measured(), loader(), loader(7, 2))
        trainer.save_checkpoint(folder / "one.ckpt")
        trainer.predict(Measured(), loader(7, 2))
        trainer.strategy.setup_environment(runner(trainer).environment, torch.device("cpu"))
        gathered = trainer.strategy.all_gather(torch.tensor([dist.get_rank()]))
    assert gathered.flatten().tolist() == list(range(dist.get_world_size()))
    return [f"{one.category.__name__}: {one.message} ({one.filename})" for one in caught]


def test_our_calls_give_no_warnings(tmp_path):
    assert run_ranks(log_once, 2, tmp_path) == [[], []]


class Judged(Measured):
    """Keeps BatchNorm's running mean in the validation and after it."""

    def __init__(self):
        super().__init__()
        self.net.append(torch.nn.BatchNorm1d(3))
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.net[-1].running_mean.clone())


def means_of_validations(strategy, options):
    module = Judged()
    trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=2, **options)
    trainer.fit(module, loader(24, 2, shuffle=True), loader(4, 2))
    return module.seen


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4, "val_check_interval": 3}])
@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp"])
def test_a_validation_judges_the_buffers_that_a_checkpoint_has(strategy, options):
    first, second = run_ranks(means_of_validations, 2, strategy, options, backend=None)
    assert len(first) == len(second) >= 2
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_buffers_stay_a_ranks_own_where_they_are_not_broadcast():
    first, second = run_ranks(means_of_validations, 2, DDP(broadcast_buffers=False), {}, backend=None)
    assert not torch.equal(first[-1], second[-1])


def save_after_the_run(folder, strategy):
    """Saves twice after a fit, whose process group is gone, and goes on from the file."""
    trainer = quiet_trainer(strategy=strategy, devices="auto", max_epochs=1)
    trainer.fit(Measured(), loader())
    for name in ("weights.ckpt", "last.ckpt"):
        trainer.save_checkpoint(folder / name, weights_only=name == "weights.ckpt")
        assert not dist.is_initialized()
    resumed = quiet_trainer(strategy=strategy, devices="auto", max_epochs=2)
    resumed.fit(Measured(), loader(), ckpt_path=folder / "last.ckpt")
    return resumed.global_step / trainer.global_step


@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp"])
def test_a_checkpoint_is_saved_after_the_run(strategy, tmp_path):
    assert run_ranks(save_after_the_run, 2, tmp_path, strategy, backend=None) == [2, 2]
