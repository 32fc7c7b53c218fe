"""Metrics of a torchmetrics collection that compute several values: their names, and epochs, ranks and resumed runs."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from fabricamp import Callback, ConfigError
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer

CLASSES = 3
LABELS = ["x", "y", "z"]


def accuracy(average="macro"):
    return MulticlassAccuracy(CLASSES, average=average)


def classwise(**options):
    return ClasswiseWrapper(accuracy("none"), labels=LABELS, **options)


COLLECTIONS = {
    "classwise": lambda: MetricCollection({"all": accuracy("micro"), "each": classwise()}),
    "the wrapper first": lambda: MetricCollection({"each": classwise(), "of all": accuracy()}),
    "without groups": lambda: MetricCollection({"all": accuracy(), "each": classwise()}, compute_groups=False),
    "prefixes": lambda: MetricCollection(
        {"each": classwise(prefix="is_", postfix="_right")}, prefix="a/", postfix="/b"
    ),
    "equal names": lambda: MetricCollection(
        {"one": ClasswiseWrapper(accuracy("none")), "two": ClasswiseWrapper(accuracy("none"))}, prefix="a/"
    ),
    "extremes": lambda: MetricCollection({"range": MinMaxMetric(accuracy()), "recall": MulticlassRecall(CLASSES)}),
    "both": lambda: MetricCollection({"range": MinMaxMetric(accuracy()), "each": classwise(), "all": accuracy()}),
    "nested": lambda: MetricCollection(
        [MetricCollection({"each": classwise()}, postfix="_in"), MulticlassRecall(CLASSES)], prefix="p_"
    ),
}


class Collected(Classifier):
    """Logs a collection of training and one of validation, and keeps what callbacks see of both at the end of each epoch."""

    def __init__(self, kind):
        super().__init__()
        self.train_metrics = COLLECTIONS[kind]().clone(prefix="train/")
        self.val_metrics = COLLECTIONS[kind]()
        self.seen = []

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        self.train_metrics.update(scores, batch[1])
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        return torch.nn.functional.cross_entropy(scores, batch[1])

    def validation_step(self, batch, batch_idx):
        self.val_metrics.update(self.net(batch[0]), batch[1])
        self.log_dict(self.val_metrics)

    def on_train_epoch_end(self):
        self.seen.append(numbers(self.trainer.callback_metrics))


class ByHand(Collected):
    """Computes and resets the collections itself."""

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        self.train_metrics.update(scores, batch[1])
        return torch.nn.functional.cross_entropy(scores, batch[1])

    def validation_step(self, batch, batch_idx):
        self.val_metrics.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.of_validation = numbers(self.val_metrics.compute())
        self.val_metrics.reset()

    def on_train_epoch_end(self):
        self.seen.append({**self.of_validation, **numbers(self.train_metrics.compute())})
        self.train_metrics.reset()


def numbers(values):
    return {key: float(value) for key, value in values.items()}


def fit(module, *callbacks, epochs=3, ckpt_path=None, **options):
    quiet = {"num_sanity_val_steps": 0, "max_epochs": epochs, "callbacks": list(callbacks), **options}
    trainer = quiet_trainer(**quiet)
    trainer.fit(module, loader(24, shuffle=False), loader(16, seed=1), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("kind", COLLECTIONS)
@pytest.mark.filterwarnings(
    "ignore:The ``compute`` method of metric:UserWarning"
)  # torchmetrics', of wrapped members of a group
def test_each_value_has_the_name_that_the_collection_gives_it(kind):
    module, by_hand = Collected(kind), ByHand(kind)
    trainer = fit(module)
    fit(by_hand)
    assert len(module.seen) == 3
    assert module.seen == by_hand.seen
    assert numbers(trainer.logged_metrics) == module.seen[-1]


def results(kind, ckpt_path=None, callbacks=(), **options):
    module = Collected(kind)
    fit(module, *callbacks, ckpt_path=ckpt_path, **options)
    return module.seen


class Saves(Callback):
    """Writes a checkpoint at places of the second epoch."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, trainer, name):
        if trainer.current_epoch == 1 and not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{name}.ckpt")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx in (0, 3):
            self.save(trainer, f"batch {batch_idx}")

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        if batch_idx in (0, 1):
            self.save(trainer, f"validation {batch_idx}")

    def on_validation_end(self, trainer, module):
        self.save(trainer, "after validation")

    def on_train_epoch_end(self, trainer, module):
        self.save(trainer, "epoch end")


@pytest.mark.parametrize("kind", ["classwise", "the wrapper first", "without groups", "extremes", "both"])
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
def test_a_resumed_run_has_the_values_of_one_that_was_not_cut(kind, tmp_path):
    straight = results(kind, callbacks=[Saves(tmp_path)])
    files = sorted(tmp_path.iterdir())
    assert len(files) == 6
    for file in files:
        assert results(kind, ckpt_path=file) == straight[1:], file.name


def on_two_ranks(kind, folder):
    ranks = {"devices": 2, "strategy": "ddp"}
    straight = results(kind, callbacks=[Saves(folder)], **ranks)
    resumed = {file.name: results(kind, ckpt_path=file, **ranks) for file in sorted(folder.iterdir())}
    return straight, resumed


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
def test_ranks_compute_over_the_samples_of_all_also_in_a_resumed_run(tmp_path):
    by_hand = ByHand("both")
    quiet_trainer(num_sanity_val_steps=0, max_epochs=3).fit(by_hand, loader(24, batch_size=8), loader(16, seed=1))
    first, second = run_ranks(on_two_ranks, 2, "both", tmp_path)
    assert first == second
    straight, resumed = first
    for seen, expected in zip(straight, by_hand.seen, strict=True):
        assert seen == pytest.approx(expected, abs=1e-6)
    assert len(resumed) >= 4
    assert resumed == dict.fromkeys(resumed, straight[1:])


class AddsInAHook(Collected):
    """Updates and logs again at the end of the training epoch, when the values were computed once."""

    def on_train_epoch_end(self):
        self.train_metrics.update(torch.eye(CLASSES).roll(1, 0), torch.arange(CLASSES))
        self.log_dict(self.train_metrics)

    def on_train_end(self):
        self.seen.append(numbers(self.trainer.callback_metrics))


@pytest.mark.parametrize("kind", ["without groups", "extremes"])
def test_updates_of_the_last_hook_count(kind):
    module = AddsInAHook(kind)
    with pytest.raises(ConfigError, match=r"train/.*would both be"):
        fit(module, epochs=1)

    class Updates(AddsInAHook):
        def on_train_epoch_end(self):
            self.train_metrics.update(torch.eye(CLASSES).roll(1, 0), torch.arange(CLASSES))

    class Hand(ByHand):
        def on_train_epoch_end(self):
            self.before = self.train_metrics.compute()
            self.train_metrics.update(torch.eye(CLASSES).roll(1, 0), torch.arange(CLASSES))
            super().on_train_epoch_end()

    module, by_hand = Updates(kind), Hand(kind)
    fit(module, epochs=1)
    fit(by_hand, epochs=1)
    assert module.seen == by_hand.seen
    assert numbers(by_hand.before) != {key: value for key, value in by_hand.seen[0].items() if key.startswith("train/")}


REFUSED = {
    "by itself": (lambda self: self.log("each", self.wrapper), "ClasswiseWrapper, which computes a dict; put it into"),
    "in a plain dict": (lambda self: self.log_dict({"each": self.wrapper}), "MetricCollection"),
    "names that are taken": (
        lambda self: (self.log("multiclassaccuracy_x", 1.0), self.log_dict(self.collection)),
        "'each' computes multiclassaccuracy_x, and another value has such a name too",
    ),
    "one name in two collections": (
        lambda self: (self.log_dict(self.collection), self.log_dict(self.other)),
        "'other' computes multiclassaccuracy_x, .*prefix",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_name_of_its_own_is_refused(case):
    log, message = REFUSED[case]

    class Refused(Classifier):
        def __init__(self):
            super().__init__()
            self.wrapper = classwise()
            self.collection = MetricCollection({"each": classwise()})
            self.other = MetricCollection({"other": classwise()})

        def validation_step(self, batch, batch_idx):
            for metric in (self.wrapper, self.collection, self.other):
                metric.update(self.net(batch[0]), batch[1])
            log(self)

    with pytest.raises(ConfigError, match=message):
        quiet_trainer(max_epochs=1, num_sanity_val_steps=0).fit(Refused(), loader(8), loader(8))


@pytest.mark.parametrize("kind", ["classwise", "extremes"])
def test_steps_are_logged_by_the_dict_that_the_collection_returns(kind):
    class Steps(Collected):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.train_metrics(self.net(batch[0]), batch[1])
            self.log_dict(self.train_metrics)
            return loss

    class Works(Steps):
        def training_step(self, batch, batch_idx):
            scores = self.net(batch[0])
            values = self.train_metrics(scores, batch[1])
            self.log_dict({f"step/{key}": value for key, value in values.items()})
            self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
            return torch.nn.functional.cross_entropy(scores, batch[1])

    Steps.training_step = lambda self, batch, batch_idx: (
        self.train_metrics(self.net(batch[0]), batch[1]), self.log_dict(self.train_metrics)
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"which has no single value of a step; .*self\.log_dict\(self\.metrics\(\.\.\.\)\)"
    ):
        fit(Steps(kind), epochs=1)
    trainer = fit(Works(kind), epochs=1)
    assert any(key.startswith("step/") for key in trainer.callback_metrics)


def test_a_copy_on_one_rank_that_is_not_shared_is_refused_also_within_a_wrapper():
    def local():
        collection = MetricCollection(
            {"each": ClasswiseWrapper(MulticlassAccuracy(3, average="none", sync_on_compute=False))}
        )

        class Local(Collected):
            def __init__(self):
                super().__init__("classwise")
                self.val_metrics = collection

        with pytest.raises(ConfigError, match="sync_on_compute=False"):
            fit(Local(), epochs=1, devices=2, strategy="ddp")

    run_ranks(local, 2)
