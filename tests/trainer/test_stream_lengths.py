"""The length of an epoch over a stream with a ``len()``: a limit without workers; with workers, its samples decide."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fabricamp import TrainingModule
from fabricamp.data import CombinedLoader, Feed, most_batches
from fabricamp.data.lengths import limit_batches
from fabricamp.errors import ConfigError
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer


class Stream(IterableDataset):
    """Numbers from 0 on, shared by all workers of all ranks; says ``said`` samples."""

    def __init__(self, size, said, ranks=1):
        self.size, self.said, self.ranks = size, said, ranks

    def __len__(self):
        return self.said

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank = int(os.environ.get("RANK", "0")) if self.ranks > 1 else 0
        for number in range(rank * workers + worker, self.size, self.ranks * workers):
            yield torch.tensor([float(number)])


def loader(size, said, *, batch_size=4, num_workers=0, ranks=1, **options):
    return DataLoader(Stream(size, said, ranks), batch_size=batch_size, num_workers=num_workers, **options)


def by_hand(batches):
    """Returns the numbers of each batch of a plain loop."""
    return [batch.flatten().tolist() for batch in batches]


def plain(size, **options):
    return by_hand(loader(size, size, **options))


class Seen(TrainingModule):
    """Notes batches, micro-batches of each step, learning rates after each epoch, and the places of validations."""

    def __init__(self, schedule=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.schedule = schedule
        self.seen, self.steps, self.rates, self.validated, self.evaluated = [], [], [], [], []
        self.open = 0

    def training_step(self, batch, batch_idx):
        self.open += 1
        self.seen.append(batch.flatten().tolist())
        return (self.weight * batch).sum()

    def on_before_optimizer_step(self, optimizer):
        self.steps.append(self.open)
        self.open = 0

    def on_train_epoch_end(self):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def on_validation_start(self):
        self.validated.append((self.current_epoch, self.trainer.state.batch_idx))

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(batch.flatten().tolist())

    def test_step(self, batch, batch_idx):
        self.evaluated.append(batch.flatten().tolist())

    def predict_step(self, batch, batch_idx):
        return batch.flatten().tolist()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        if self.schedule is not None:
            return [optimizer], [{"scheduler": self.schedule(optimizer, self.trainer), "interval": "step"}]
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(train, module=None, *, epochs=2, ckpt_path=None, **options):
    module = module or Seen()
    trainer = quiet_trainer(max_epochs=epochs, num_sanity_val_steps=0, **options)
    trainer.fit(module, train, [torch.zeros(1)], ckpt_path=ckpt_path)
    return module, trainer


def told(caplog):
    return [record.message for record in caplog.records if "by its len()" in record.message]


SHORT = {"num_workers": 3}
"""26 samples for three workers: 9, 9 and 8, so that eight batches of up to four come, and torch says seven."""


def test_all_samples_of_workers_come(caplog):
    whole = plain(26, **SHORT)
    assert [len(batch) for batch in whole] == [4, 4, 4, 4, 4, 4, 1, 1]
    module, trainer = fit(loader(26, 26, **SHORT), accumulate_grad_batches=3)
    assert module.seen == 2 * whole
    assert module.steps == [3, 3, 2, 3, 3, 2]
    assert module.rates == [0.5, 0.25]
    assert module.validated == [(0, 8), (1, 8)]
    assert (trainer.num_training_batches, trainer.estimated_stepping_batches) == (8, 6)
    assert told(caplog) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_ends_early_is_told_once(workers, caplog):
    """With workers, the estimate of the steps is an upper bound."""
    module, trainer = fit(loader(28, 40, num_workers=workers), accumulate_grad_batches=4)
    whole = plain(28, num_workers=workers)
    assert module.seen == 2 * whole
    assert module.steps == 2 * [4, len(whole) - 4]
    assert module.validated == [(0, len(whole)), (1, len(whole))]
    assert module.rates == [0.5, 0.25]
    assert trainer.estimated_stepping_batches == 2 * 3
    (message,) = told(caplog)
    assert f"Stream says 10 batches of 40 samples by its len(), and gave {len(whole)} batches of 28 samples" in message
    assert "ends there with the stream" in message


def test_without_workers_the_length_is_a_limit(caplog):
    module, _ = fit(loader(10**9, 20))
    assert module.seen == 2 * plain(20)
    assert module.validated == [(0, 5), (1, 5)]
    assert told(caplog) == []


@pytest.mark.parametrize("size", [28, 10**9])
def test_what_workers_leave_out_is_told_once(size, caplog):
    module, _ = fit(loader(size, 20, num_workers=2))
    assert [len(batch) for batch in module.seen] == 10 * [4]
    assert module.validated == [(0, 5), (1, 5)]
    (message,) = told(caplog)
    assert "Stream says 5 batches of 20 samples by its len(), and gave 5 batches of 20 samples" in message
    assert "the stream goes on: the rest is left out" in message


def test_samples_that_do_not_show_end_at_the_most_batches():
    """A batch of packed samples; never later than the length that torch says, and a batch for each worker."""

    def pack(samples):
        return torch.cat([sample.repeat(3) for sample in samples])

    exact = loader(26, 26, collate_fn=pack, **SHORT)
    assert len([*Feed(exact)]) == 8
    endless = loader(10**9, 26, collate_fn=pack, **SHORT)
    assert len([*Feed(endless)]) == most_batches(endless) == 8 <= len(endless) + 3


def test_the_most_batches():
    assert most_batches(loader(26, 26)) == 7
    assert most_batches(loader(26, 26, num_workers=1)) == 7
    assert most_batches(loader(26, 26, **SHORT)) == 8
    assert most_batches(loader(26, 26, batch_size=1, **SHORT)) == 26
    assert most_batches(loader(26, 26, batch_size=None, **SHORT)) == 26
    assert most_batches(loader(26, 26, drop_last=True, **SHORT)) == 6

    class Own(DataLoader):
        def __len__(self):
            return 10

    assert most_batches(Own(Stream(26, 26), 4, num_workers=3)) == 13
    for mode, number in (("min_size", 5), ("max_size", 8), ("max_size_cycle", 8), ("sequential", 13)):
        assert most_batches(CombinedLoader([loader(26, 26, **SHORT), list(range(5))], mode)) == number
    assert [limit_batches(7, limit, "limit", most=8) for limit in (1.0, 0.5, 5, 8, 9, 0.0)] == [8, 3, 5, 8, 8, 0]


def test_incomplete_batches_that_workers_drop(caplog):
    module, _ = fit(loader(26, 26, drop_last=True, **SHORT))
    assert module.seen == 2 * plain(26, drop_last=True, **SHORT)
    assert len(module.validated) == 2
    assert told(caplog) == []


@pytest.mark.parametrize(("limit", "batches"), [(0.5, 3), (3, 3), (7, 7), (8, 8), (100, 8)])
def test_limits(limit, batches):
    module, trainer = fit(loader(26, 26, **SHORT), limit_train_batches=limit, epochs=1)
    assert module.seen == plain(26, **SHORT)[:batches]
    assert module.validated == [(0, batches)]
    assert trainer.num_training_batches == batches


@pytest.mark.parametrize(
    ("size", "said", "workers", "interval", "places"),
    [
        (26, 26, 3, 0.5, [4, 8]),
        (26, 26, 3, 3, [3, 6]),
        (28, 40, 0, 0.5, [5, 7]),  # of ten batches
        (28, 40, 0, 0.25, [2, 4, 6, 7]),
        (28, 40, 0, 3, [3, 6]),
        (28, 40, 0, 9, [7]),
        (28, 28, 0, 0.5, [3, 6]),  # as with any other loader of seven batches
    ],
)
def test_validations_within_an_epoch(size, said, workers, interval, places):
    module, _ = fit(loader(size, said, num_workers=workers), val_check_interval=interval)
    assert module.validated == [(epoch, place) for epoch in range(2) for place in places]


@pytest.mark.parametrize(("size", "said"), [(26, 26), (22, 26)])
def test_a_schedule_over_the_whole_run(size, said):
    def schedule(optimizer, trainer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=trainer.estimated_stepping_batches)

    module, trainer = fit(loader(size, said, **SHORT), Seen(schedule))
    assert (
        len(module.seen) == 2 * len(plain(size, **SHORT)) == trainer.global_step <= trainer.estimated_stepping_batches
    )


class Saves(Seen):
    """Saves in the training step of a batch, or when it is done."""

    def __init__(self, folder, hook, batch):
        super().__init__()
        self.file, self.hook, self.batch = folder / "cut.ckpt", hook, batch

    def training_step(self, batch, batch_idx):
        if self.hook == "training_step" and (self.current_epoch, batch_idx) == (0, self.batch):
            self.trainer.save_checkpoint(self.file)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.hook == "on_train_batch_end" and (self.current_epoch, batch_idx) == (0, self.batch):
            self.trainer.save_checkpoint(self.file)


@pytest.mark.parametrize("said", [26, 20])  # ends with the stream, or after five batches of 20 samples
@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_end"])
def test_a_resume_at_the_last_batch(hook, said, tmp_path):
    batches = 8 if said == 26 else 5
    straight, _ = fit(loader(26, said, **SHORT), Saves(tmp_path, hook, batches - 1))
    assert len(straight.seen) == 2 * batches
    done = batches - (hook == "training_step")
    resumed, trainer = fit(loader(26, said, **SHORT), ckpt_path=straight.file)
    assert resumed.seen == straight.seen[done:]
    assert resumed.validated == straight.validated
    assert resumed.rates == straight.rates
    assert trainer.global_step == 2 * batches


def test_an_own_position_keeps_the_number_of_samples(tmp_path):
    """The epochs of an endless stream end at the same batch in a resumed run; the next ones begin as in the uninterrupted run."""
    kind = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the package torchdata").StatefulDataLoader

    def make():
        return kind(Stream(10**9, 20), batch_size=4, num_workers=2)

    straight, _ = fit(make(), Saves(tmp_path, "training_step", 3))
    assert len(straight.seen) == 10
    assert fit(make(), ckpt_path=straight.file)[0].seen == straight.seen[3:]
    again, _ = fit(make(), Saves(tmp_path, "on_train_batch_end", 4))
    assert fit(make(), ckpt_path=again.file)[0].seen == straight.seen[5:]


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_evaluations(name):
    module, trainer = Seen(), quiet_trainer()
    returned = getattr(trainer, name)(module, loader(26, 26, **SHORT))
    seen = returned if name == "predict" else module.evaluated
    assert seen == plain(26, **SHORT)
    assert getattr(trainer, f"num_{'val' if name == 'validate' else name}_batches") == [8]
    limited = quiet_trainer(**{f"limit_{'val' if name == 'validate' else name}_batches": 0.5})
    module = Seen()
    returned = getattr(limited, name)(module, loader(26, 26, **SHORT))
    assert len(returned if name == "predict" else module.evaluated) == 3


@pytest.mark.parametrize("size", [26, 10**9])
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
@pytest.mark.parametrize("other", [3, 12])
def test_beside_another_loader(other, mode, size):
    """As many samples come as the stream says, unless another loader decides; an endless stream goes on beside a longer loader."""
    own = len(plain(26, **SHORT)) if size == 26 else 7  # 28 samples in full batches
    combined = CombinedLoader((loader(size, 26, **SHORT), [torch.zeros(1)] * other), mode)
    feed = Feed(combined, limit=most_batches(combined))
    for _ in range(2):
        flags = [(batch, feed.last) for batch in feed]
        assert len(flags) == (min if mode == "min_size" else max)(own, other)
        assert [last for _, last in flags] == [False] * (len(flags) - 1) + [True]
        streamed = [batch[0] for batch, _ in flags[:own]]
        assert sum(map(len, streamed)) == (26 if size == 26 else 28) or len(flags) < own


@pytest.mark.parametrize("size", [26, 10**9])
def test_before_another_loader(size, tmp_path):
    own = len(plain(26, **SHORT)) if size == 26 else 7

    def make():
        return CombinedLoader([loader(size, 26, **SHORT), [torch.zeros(1)] * 3], "sequential")

    straight, _ = fit(make(), Saves(tmp_path, "training_step", own + 1))
    assert [len(batch) for batch in straight.seen[own : own + 3]] == [1, 1, 1]
    assert len(straight.seen) == 2 * (own + 3)
    assert straight.validated == [(0, own + 3), (1, own + 3)]
    resumed, _ = fit(make(), ckpt_path=straight.file)
    assert resumed.seen == straight.seen[own + 1 :]
    assert resumed.validated == straight.validated


def test_another_class_of_loader_has_to_keep_its_length():
    class Own:
        def __len__(self):
            return 5

        def __iter__(self):
            return iter([torch.zeros(1)] * 2)

    with pytest.raises(ConfigError, match="Own announced 5 batches by its len.* but ended after 2"):
        fit(Own())


def on_ranks(total, said):
    os.environ["RANK"] = str(dist.get_rank())
    module, trainer = (
        Seen(),
        quiet_trainer(max_epochs=2, num_sanity_val_steps=0, strategy="ddp", devices="auto", accumulate_grad_batches=3),
    )
    trainer.fit(module, loader(total, said, num_workers=2, ranks=2), [torch.zeros(1)])
    return module.seen, module.steps, module.validated, trainer.global_step


def ends_on_ranks():
    return [on_ranks(52, 26), on_ranks(51, 26)]


def test_two_ranks_end_together():
    """Even shares have eight batches on each rank; of 51 samples, rank 1 has seven batches, and rank 0 leaves out its eighth."""
    ranks = run_ranks(ends_on_ranks, 2)
    for even, uneven in ranks:
        seen, steps, validated, count = even
        assert sum(map(len, seen)) == 2 * 26
        assert (steps, validated, count) == ([3, 3, 2] * 2, [(0, 8), (1, 8)], 6)
        seen, steps, validated, count = uneven
        assert sum(map(len, seen)) == 2 * 25
        assert (steps, validated, count) == ([3, 3, 1] * 2, [(0, 7), (1, 7)], 6)
