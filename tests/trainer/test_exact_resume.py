"""An interrupted and resumed run equals an uninterrupted one bit for bit: weights, optimizer, logged values, data, generators."""

from __future__ import annotations

import csv
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from fabricamp import Callback, TrainingModule
from fabricamp.data import CombinedLoader, ResidentLoader
from fabricamp.loggers import CSVLogger
from fabricamp.precision import OptLevel
from fabricamp.rng import isolate_rng
from tests.small import data, quiet_trainer
from tests.trainer.test_resume import LEVELS, Overflow, assert_equal

SIZE, BATCH = 24, 4


@pytest.fixture(autouse=True)
def _own_generators():
    with isolate_rng():
        yield


class Samples(Dataset):
    """Returns features, a class and the sample's index; ``draws`` adds noise from all three generators."""

    def __init__(self, size=SIZE, *, draws=False, seed=0):
        self.data = data(size, seed=seed)
        self.draws = draws

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        if self.draws:
            x = x + torch.rand(()) + random.random() + float(np.random.rand())
        return x, y, index


class Stream(IterableDataset):
    """A stream that shuffles with its own generator, and has a state_dict with its position."""

    def __init__(self, size=SIZE, *, draws=False):
        self.samples = Samples(size, draws=draws)
        self.generator = np.random.default_rng(5)  # its state is a few numbers, which are copied for every batch
        self.order = []

    def __iter__(self):
        if not self.order:
            self.order = list(range(len(self.samples)))
            self.generator.shuffle(self.order)
        while self.order:
            yield self.samples[self.order.pop(0)]

    def state_dict(self):
        return {"order": self.order, "generator": self.generator.bit_generator.state}

    def load_state_dict(self, state):
        self.generator.bit_generator.state = state["generator"]
        self.order = list(state["order"])


class OwnLoader:
    """A loader of a user's own class with a length, which keeps its position."""

    def __init__(self, size=SIZE):
        self.samples, self.next = Samples(size), 0

    def __len__(self):
        return len(self.samples) // BATCH

    def __iter__(self):
        first, self.next = self.next, 0
        for batch in range(first, len(self)):
            self.given = batch + 1
            yield torch.utils.data.default_collate([self.samples[batch * BATCH + i] for i in range(BATCH)])

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.next = state["given"]


def shuffled(dataset, **options):
    return DataLoader(dataset, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3), **options)


def torchdatas(**options):
    kind = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the package torchdata").StatefulDataLoader
    return kind(Samples(), BATCH, shuffle=True, **options)


def resident(size=SIZE):
    """Returns a ResidentLoader with a transform that draws random numbers."""
    x, y = Samples(size).data.tensors
    return ResidentLoader(
        x,
        y,
        torch.arange(size),
        batch_size=BATCH,
        shuffle=True,
        transform=lambda one: (one[0] + torch.rand(()), *one[1:]),
    )


DATA = {
    "resident": resident,
    "resident beside a stream": lambda: {"a": DataLoader(Stream(), BATCH), "b": resident(8)},
    "shuffled": lambda: DataLoader(Samples(), BATCH, shuffle=True),
    "in order": lambda: DataLoader(Samples(), BATCH),
    "drawing in the main process": lambda: shuffled(Samples(draws=True)),
    "drawing in workers": lambda: shuffled(Samples(draws=True), num_workers=2),
    "a stream": lambda: DataLoader(Stream(), BATCH),
    "a stream that draws": lambda: DataLoader(Stream(draws=True), BATCH),
    "an own loader": OwnLoader,
    "torchdata's loader": lambda: torchdatas(generator=torch.Generator().manual_seed(3)),
    "torchdata's loader with workers": lambda: torchdatas(num_workers=2),
    "a sampler of its own": lambda: DataLoader(
        Samples(draws=True), BATCH, sampler=WeightedRandomSampler(torch.arange(1.0, SIZE + 1), SIZE)
    ),
    "a sampler with a generator": lambda: DataLoader(
        Samples(), BATCH, sampler=RandomSampler(Samples(), True, SIZE, torch.Generator().manual_seed(1))
    ),
    "two loaders": lambda: {"a": shuffled(Samples()), "b": DataLoader(Samples(8, seed=1), BATCH, shuffle=True)},
    "in turn": lambda: CombinedLoader([shuffled(Samples(12)), shuffled(Samples(12, seed=1))], "sequential"),
    "a stream and a loader": lambda: {"a": DataLoader(Stream(), BATCH), "b": shuffled(Samples(8, seed=1))},
    "one that ends": lambda: CombinedLoader({"a": shuffled(Samples()), "b": shuffled(Samples(8, seed=1))}, "max_size"),
}


class Net(TrainingModule):
    """Has BatchNorm, dropout, random numbers of every kind in its step, a schedule, and values logged in all ways."""

    def __init__(self):
        super().__init__()
        with isolate_rng():
            torch.manual_seed(1)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3)
            )
        with isolate_rng():
            self.seldom = torch.nn.Linear(8, 3)
            torch.nn.init.ones_(self.seldom.weight)
            torch.nn.init.zeros_(self.seldom.bias)
        self.seen = []

    def training_step(self, batch, batch_idx):
        parts = [one for one in batch.values() if one is not None] if isinstance(batch, dict) else [batch]
        loss = sum(self._loss(*part) for part in parts) * random.uniform(0.9, 1.1) * float(np.random.uniform(0.9, 1.1))
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=BATCH)
        self.log("count", 1.0, reduce_fx="sum", on_step=False, on_epoch=True, batch_size=BATCH)
        self.log("least", loss.detach(), reduce_fx="min", on_step=False, on_epoch=True, batch_size=BATCH)
        if batch_idx % 3 == 0 or dist.is_initialized():  # a parameter without a gradient in some micro-batches
            loss = loss + 0.1 * self.seldom(parts[0][0]).square().mean()
        if batch_idx < 2:
            self.log("first", batch_idx + 1.0, on_step=False, on_epoch=True, batch_size=BATCH)
        return loss

    def _loss(self, x, y, index):
        self.seen.append((self.current_epoch, index.tolist()))
        return F.cross_entropy(self.net(x), y)

    def on_train_epoch_start(self):
        self.log("start", torch.rand(()).item(), on_epoch=True, reduce_fx="sum")

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        loss = F.cross_entropy(self.net(x + 0.1 * torch.rand_like(x)), y)
        self.seen.append(("validation", batch_idx))
        self.log("val_loss", loss, batch_size=BATCH)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


class Saves(Callback):
    """Writes a checkpoint in one hook, when ``batches`` are done and (in validation) at its batch 1."""

    def __init__(self, hook, batches, path):
        self.hook, self.batches, self.path = hook, batches, path
        self.seen = self.rows = None

    def _save(self, trainer, module):
        if trainer.state.batches_done == self.batches and self.seen is None:
            self.seen = len(module.seen)
            self.rows = trainer.loggers[0].state_dict()["rows"] if trainer.loggers else None
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.hook == "batch":
            self._save(trainer, module)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        if self.hook == "validation" and batch_idx == 1:
            self._save(trainer, module)

    def on_validation_end(self, trainer, module):
        if self.hook == "validated":
            self._save(trainer, module)

    def on_train_epoch_end(self, trainer, module):
        if self.hook == "epoch":
            self._save(trainer, module)

    monitors = True


def fit(folder, make, *, seed, callbacks=(), ckpt_path=None, module=None, **options):
    """Runs a fit with all objects created anew, and other generator states for each ``seed``."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    module = module or Net()
    given = {
        "max_steps": 15,
        "max_epochs": -1,
        "val_check_interval": 0.5,
        "num_sanity_val_steps": 1,
        "log_every_n_steps": 2,
    }
    trainer = quiet_trainer(
        **{**given, **options},
        callbacks=list(callbacks),
        logger=CSVLogger(folder, name=None, version=f"run{seed}", flush_logs_every_n_steps=1000),
    )
    trainer.fit(module, make(), DataLoader(Samples(8, seed=2), BATCH), ckpt_path=ckpt_path)
    with (folder / f"run{seed}" / "metrics.csv").open() as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    return module, trainer, rows


def content(trainer, path):
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)
    for position in state["data"]["position"]:
        position.pop("at_pass_start", None)  # where the pass began does not matter once it is over
    state.pop("callbacks")
    for own in ("loggers", "checksum"):  # each run has its own log
        state.pop(own)
    state["loops"]["fit"].pop("loggers_at_end")
    return state


def assert_exact(tmp_path, make, *cuts, **options):
    """Runs uninterrupted with a checkpoint at each cut (hook, batches), and resumes from each; compares everything."""
    saving = [Saves(hook, batches, tmp_path / f"{hook}-{batches}.ckpt") for hook, batches in cuts]
    before = options.pop("before", list)
    straight, whole, rows = fit(tmp_path, make, seed=1, callbacks=[*before(), *saving], **options)
    end = content(whole, tmp_path / "whole.ckpt")
    for seed, saves in enumerate(saving, 2):
        cut = f"cut at {saves.hook} {saves.batches}"
        assert saves.seen is not None, f"{cut}: nothing was saved"
        second, resumed, resumed_rows = fit(
            tmp_path, make, seed=seed, callbacks=before(), ckpt_path=saves.path, **options
        )
        behind = straight.seen[saves.seen :]
        if saves.hook == "validation":  # the resumed run repeats the validation from its beginning
            behind = [("validation", 0), ("validation", 1), *behind]
        assert second.seen == behind, cut
        assert resumed_rows == rows[saves.rows :], cut
        assert len(resumed_rows) > 2, cut
        assert_equal(
            {key: float(value) for key, value in resumed.callback_metrics.items()},
            {key: float(value) for key, value in whole.callback_metrics.items()},
        )
        assert_equal(content(resumed, tmp_path / "resumed.ckpt"), end)


CUTS = {
    "after a step": ("batch", 8, 1),
    "at a flush": ("batch", 10, 1),
    "at the epoch's last batch": ("batch", 12, 1),
    "within a window": ("batch", 8, 3),
    "within a window, flushed before": ("batch", 13, 3),
    "at a window's end": ("batch", 9, 3),
    "within a validation": ("validation", 9, 2),
    "within a validation at the epoch's end": ("validation", 12, 2),
    "after a validation": ("validated", 9, 2),
    "after the epoch's last validation": ("validated", 12, 2),
    "at the epoch's end": ("epoch", 12, 4),
}


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
def test_wherever_the_cut_is(accumulate, tmp_path):
    cuts = [(hook, batches) for hook, batches, accumulated in CUTS.values() if accumulated == accumulate]
    assert cuts
    assert_exact(tmp_path, DATA["shuffled"], *cuts, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize(("steps", "done"), [(8, 8), (9, 9), (12, 12)])
def test_a_run_that_came_to_its_end_goes_on(steps, done, tmp_path):
    """The file is saved after fit; values that the end of a run publishes or clears are saved as of the end of training."""
    straight, whole, rows = fit(tmp_path, DATA["shuffled"], seed=1)
    _, first, _ = fit(tmp_path, DATA["shuffled"], seed=1, max_steps=steps)
    first.save_checkpoint(tmp_path / "cut.ckpt")
    second, resumed, resumed_rows = fit(tmp_path, DATA["shuffled"], seed=2, ckpt_path=tmp_path / "cut.ckpt")
    trained = [place for place in straight.seen if place[0] != "validation"]
    behind = straight.seen[straight.seen.index(trained[done]) :]
    assert second.seen == behind
    assert resumed_rows == rows[len(rows) - len(resumed_rows) :]
    assert [float(row["loss_step"]) for row in resumed_rows if "loss_step" in row] == [
        float(row["loss_step"]) for row in rows if "loss_step" in row and int(row["step"]) >= steps
    ]
    assert_equal(content(resumed, tmp_path / "resumed.ckpt"), content(whole, tmp_path / "whole.ckpt"))


@pytest.mark.parametrize("precision", LEVELS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_level(precision, accumulate, tmp_path):
    overflow = [Overflow(1, 4)] if precision in {"O1", "O2"} else []
    assert_exact(
        tmp_path,
        DATA["shuffled"],
        ("batch", 11),
        precision=precision,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        before=lambda: list(overflow),
        max_steps=18 // accumulate,
    )


@pytest.mark.parametrize("kind", DATA)
def test_every_kind_of_data(kind, tmp_path):
    options = {"per_sample_seed": True} if kind == "drawing in workers" else {}
    # The length of a stream is unknown, so the validation runs at its end.
    options["val_check_interval"] = 1.0 if "stream" in kind else 0.5
    within = (8, 11)[list(DATA).index(kind) % 2]
    assert_exact(tmp_path, DATA[kind], ("batch", within), ("epoch", 6), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("cut", ["at a flush", "within a window", "within a validation"])
@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O5"])
def test_on_a_gpu(precision, cut, tmp_path):
    hook, batches, accumulate = CUTS[cut]
    options = {
        "accelerator": "gpu",
        "deterministic": True,
        "precision": precision,
        "accumulate_grad_batches": accumulate,
    }
    # On a GPU a batch is prefetched, which consumes random numbers early.
    assert_exact(tmp_path, DATA["drawing in the main process"], (hook, batches), **options)


class Tallies(Net):
    """Has a logged torchmetrics object, one computed by hand at the epoch's end, and one for validation."""

    def __init__(self):
        import torchmetrics

        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.losses = torchmetrics.CatMetric()
        self.group = torchmetrics.MetricCollection(
            [torchmetrics.classification.MulticlassPrecision(3), torchmetrics.classification.MulticlassRecall(3)]
        )
        self.validated = torchmetrics.SumMetric()

    def _loss(self, x, y, index):
        self.seen.append((self.current_epoch, index.tolist()))
        scores = self.net(x)
        loss = F.cross_entropy(scores, y)
        self.accuracy(scores, y)
        self.losses.update(loss.detach())
        self.group.update(scores, y)
        self.log("accuracy", self.accuracy, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("by_hand", self.losses.compute().mean())
        self.log_dict({key: float(value) for key, value in self.group.compute().items()})
        self.losses.reset()
        self.group.reset()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.validated.update(float(batch[0].sum()))

    def on_validation_epoch_end(self):
        self.log("validated", self.validated.compute())
        self.validated.reset()


@pytest.mark.parametrize(
    "cuts", [["after a step"], ["within a validation", "after a validation"], ["at the epoch's end"]], ids=", ".join
)
def test_torchmetrics_objects(cuts, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.trainer.test_exact_resume.Net", Tallies)
    accumulate = CUTS[cuts[0]][2]  # those of one run have the same
    places = [CUTS[cut][:2] for cut in cuts]
    assert_exact(tmp_path, DATA["shuffled"], *places, accumulate_grad_batches=accumulate)


class Alternating(Net):
    """Steps two optimizers in turn by hand; the gradients of the waiting one stay from one step to the next."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self._loss(*batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.manual_backward(loss / 2)
        for turn, optimizer in enumerate(self.optimizers()):
            if batch_idx % 2 == turn:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.AdamW(self.net[index].parameters(), lr=0.01, eps=1e-4) for index in (0, 3)]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("batches", [8, 9])
def test_gradients_that_wait_under_manual_optimization(batches, level, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.trainer.test_exact_resume.Net", Alternating)
    # Under a scale that may move between the steps of the two optimizers, the sums would be refused.
    precision = level if level == "O0" else OptLevel(level, loss_scale=256.0)
    assert_exact(tmp_path, DATA["shuffled"], ("batch", batches), precision=precision)


class Silent(Net):
    """The last micro-batch of each accumulation has no loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 2 else loss


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_a_window_that_nothing_is_added_to_any_more(precision, accumulate, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.trainer.test_exact_resume.Net", Silent)
    options = {"precision": precision, "accumulate_grad_batches": accumulate}
    assert_exact(tmp_path, DATA["shuffled"], ("batch", 11), **options, max_steps=8 if accumulate == 3 else 14)
