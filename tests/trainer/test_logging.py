"""self.log through real fits: the hooks where it works, names and steps of its values, and their place in callbacks and files."""

from __future__ import annotations

import csv

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional as F

from fabricamp import Callback, ConfigError
from fabricamp.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from fabricamp.loggers import CSVLogger, Logger, TensorBoardLogger
from tests.small import Classifier, data, loader, quiet_trainer


class Memory(Logger):
    """Keeps the logged values."""

    log_dir = None

    def __init__(self):
        self.entries = []

    def log_metrics(self, metrics, step):
        self.entries.append((step, dict(metrics)))

    def curve(self, name):
        return [(step, metrics[name]) for step, metrics in self.entries if name in metrics]


def logged(module, *, epochs=2, batches=6, val=None, every=1, **options):
    memory = Memory()
    trainer = quiet_trainer(
        **{"max_epochs": epochs, "logger": memory, "log_every_n_steps": every, "num_sanity_val_steps": 0, **options}
    )
    trainer.fit(module, loader(batches * 4), val)
    return memory, trainer


def variant(**members):
    return type("Logs", (Classifier,), members)()


def stepping(**options):
    """Returns a module that logs the batch's number with these options."""

    def training_step(self, batch, batch_idx):
        self.log("value", float(batch_idx), **options)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    return variant(training_step=training_step)


def test_by_default_a_step_logs_steps():
    memory, trainer = logged(stepping())
    assert memory.curve("value") == [(step, float(step % 6)) for step in range(12)]
    assert float(trainer.callback_metrics["value"]) == 5.0


def test_the_axis_counts_steps_from_0_and_the_cadence_is_log_every_n_steps():
    memory, trainer = logged(stepping(), every=5)
    assert memory.curve("value") == [(4, 4.0), (9, 3.0)]
    assert float(trainer.callback_metrics["value"]) == 5.0
    memory, _ = logged(stepping(), every=2, accumulate_grad_batches=3, epochs=3)
    assert [step for step, _ in memory.curve("value")] == [1, 3, 5]


def test_both_makes_two_names():
    memory, trainer = logged(stepping(on_step=True, on_epoch=True, prog_bar=True), every=3)
    assert memory.curve("value_step") == [(2, 2.0), (5, 5.0), (8, 2.0), (11, 5.0)]
    assert memory.curve("value_epoch") == [(5, 2.5), (11, 2.5)]
    assert memory.curve("value") == []
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
        "value_step": 5.0,
        "value_epoch": 2.5,
        "value": 2.5,
    }
    assert trainer.progress_bar_metrics == {"value_step": 5.0, "value_epoch": 2.5}
    assert trainer.logged_metrics == {"value_step": 5.0, "value_epoch": 2.5}


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("mean", 2.5), ("sum", 15.0), ("min", 0.0), ("max", 5.0), (torch.mean, 2.5), (max, 5.0)]
)
def test_reductions(reduce_fx, expected):
    memory, trainer = logged(stepping(on_step=False, on_epoch=True, reduce_fx=reduce_fx))
    assert memory.curve("value") == [(5, expected), (11, expected)]
    assert "value" not in trainer.progress_bar_metrics


def test_logger_false_reaches_callbacks_only():
    memory, trainer = logged(stepping(on_epoch=True, logger=False))
    assert memory.entries == []
    assert float(trainer.callback_metrics["value"]) == 2.5


def test_means_are_weighted_by_the_batch_size():
    class Weighs(Classifier):
        def training_step(self, batch, batch_idx):
            self.log("own", float(batch_idx), on_step=False, on_epoch=True)
            self.log("given", float(batch_idx), on_step=False, on_epoch=True, batch_size=1 + batch_idx)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Weighs(), loader(10))  # batches of 4, 4 and 2 samples
    assert float(trainer.callback_metrics["own"]) == pytest.approx((0 * 4 + 1 * 4 + 2 * 2) / 10)
    assert float(trainer.callback_metrics["given"]) == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)


MODULE_HOOKS = {
    "training_step": "step",
    "on_train_batch_start": "step",
    "on_train_batch_end": "step",
    "on_before_zero_grad": "step",
    "on_before_backward": "step",
    "on_after_backward": "step",
    "on_before_optimizer_step": "step",
    "on_train_start": "epoch",
    "on_train_epoch_start": "epoch",
    "on_train_epoch_end": "epoch",
    "validation_step": "epoch",
    "on_validation_batch_start": "epoch",
    "on_validation_batch_end": "epoch",
    "on_validation_start": "epoch",
    "on_validation_epoch_start": "epoch",
    "on_validation_epoch_end": "epoch",
    "on_fit_start": "refused",
    "setup": "refused",
    "configure_optimizers": "refused",
    "on_validation_end": "refused",
    "on_train_end": "refused",
    "on_fit_end": "refused",
    "teardown": "refused",
}


@pytest.mark.parametrize(("hook", "cadence"), list(MODULE_HOOKS.items()))
def test_every_hook_logs_or_refuses(hook, cadence):
    def log(self, *args, **kwargs):
        self.log("here", 2.0)
        return getattr(Classifier, hook)(self, *args, **kwargs)

    module = variant(**{hook: log})
    if cadence == "refused":
        with pytest.raises(ConfigError, match=r"'here'.*training_step, validation_step"):
            logged(module, val=loader(8), epochs=1)
        return
    memory, trainer = logged(module, val=loader(8), epochs=1)
    assert float(trainer.callback_metrics["here"]) == 2.0
    steps = [step for step, _ in memory.curve("here")]
    assert steps == ([5] if cadence == "epoch" else list(range(6)))


@pytest.mark.parametrize(
    "hook",
    [
        name
        for name, cadence in MODULE_HOOKS.items()
        if cadence == "epoch" and name.endswith(("start", "end")) and "batch" not in name
    ],
)
def test_epoch_hooks_have_no_steps(hook):
    module = variant(**{hook: lambda self: self.log("here", 2.0, on_step=True)})
    with pytest.raises(ConfigError, match=r"on_step|on_epoch"):
        logged(module, val=loader(8), epochs=1)


@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end", "on_before_optimizer_step"]
)
def test_callbacks_log_through_the_module(hook):
    class Logs(Callback):
        pass

    setattr(Logs, hook, lambda self, trainer, module, *args: module.log("by_callback", 4.0))
    _, trainer = logged(Classifier(), val=loader(8), callbacks=Logs())
    assert float(trainer.callback_metrics["by_callback"]) == 4.0


def test_predict_refuses():
    module = variant(predict_step=lambda self, batch, batch_idx: self.log("x", 1.0))
    with pytest.raises(ConfigError, match="predict_step"):
        quiet_trainer().predict(module, loader(4))


def test_a_test_run_returns_what_it_logged():
    class Tests(Classifier):
        def test_step(self, batch, batch_idx):
            self.log_dict({"a": float(batch_idx), "b": torch.tensor(1.0)})
            self.log("c", float(batch_idx), on_step=True, on_epoch=True)

        def on_test_epoch_end(self):
            self.log("end", 3.0)

    assert quiet_trainer().test(Tests(), loader(12), verbose=False) == [
        {"a": 1.0, "b": 1.0, "c_step": 2.0, "c_epoch": 1.0, "end": 3.0}
    ]


class Measured(Classifier):
    """Logs torchmetrics objects, alone and in a collection, in training and in validation."""

    def __init__(self):
        super().__init__()
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

        self.train_accuracy = MulticlassAccuracy(3, average="micro")
        self.val_metrics = MetricCollection(
            {"accuracy": MulticlassAccuracy(3, average="micro"), "recall": MulticlassRecall(3)}, prefix="val_"
        )
        self.right = [0, 0]

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.train_accuracy(logits, y)
        self.log("accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.right[0] += int((logits.argmax(1) == y).sum())
        self.right[1] += len(y)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self):
        self.expected, self.right = self.right[0] / self.right[1], [0, 0]

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_metrics.update(self.net(x), y)
        self.log_dict(self.val_metrics)


@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O5"])
def test_torchmetrics_objects(precision):
    module = Measured()
    memory, trainer = logged(module, val=loader(11, seed=1), precision=precision)
    assert float(trainer.callback_metrics["accuracy_epoch"]) == pytest.approx(module.expected)
    assert [step for step, _ in memory.curve("accuracy_epoch")] == [5, 11]
    assert [step for step, _ in memory.curve("accuracy_step")] == list(range(12))
    x, y = data(11, seed=1)[:]
    by_hand = float((module.net(x).argmax(1) == y).float().mean())
    assert float(trainer.callback_metrics["val_accuracy"]) == pytest.approx(
        by_hand, abs=0.1 if precision != "O0" else 1e-6
    )
    assert "val_recall" in trainer.callback_metrics
    (again,) = trainer.validate(module, loader(11, seed=1), verbose=False)
    assert again.keys() == {"val_accuracy", "val_recall"}


# -- callbacks and files of a real run ---------------------------------------------------------------------------------


class Scored(Classifier):
    """Logs a validation score that is best in epoch 2; has a schedule by steps."""

    def validation_step(self, batch, batch_idx):
        self.log("score", [0.1, 0.3, 0.9, 0.5, 0.4, 0.2, 0.1][self.current_epoch], prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "name": "rate"}]


def test_monitors_and_files_of_a_real_run(tmp_path):
    tensorboard, table = TensorBoardLogger(tmp_path, name="tb"), CSVLogger(tmp_path, name="csv")
    stopping = EarlyStopping("score", mode="max", patience=2)
    best = ModelCheckpoint(monitor="score", mode="max", filename="{epoch}-{score:.1f}", save_last=True)
    trainer = quiet_trainer(
        max_epochs=7,
        log_every_n_steps=2,
        logger=[tensorboard, table],
        enable_checkpointing=True,
        callbacks=[stopping, best, LearningRateMonitor("step")],
    )
    trainer.fit(Scored(), loader(16), loader(4))
    assert (trainer.current_epoch, stopping.stopped_epoch, trainer.global_step) == (5, 4, 20)
    folder = tmp_path / "tb" / "version_0"
    assert trainer.log_dir == str(folder)
    assert best.best_model_path == str(folder / "checkpoints" / "epoch=2-score=0.9.ckpt")
    assert best.best_model_score == torch.tensor(0.9)

    events = EventAccumulator(str(folder))
    events.Reload()
    assert [one.step for one in events.Scalars("loss")] == list(range(1, 20, 2))
    assert [(one.step, pytest.approx(one.value)) for one in events.Scalars("score")] == list(
        zip(range(3, 20, 4), [0.1, 0.3, 0.9, 0.5, 0.4], strict=True)
    )
    assert [(one.step, one.value) for one in events.Scalars("rate")] == [
        (step, 0.5 ** (step // 2)) for step in range(1, 20, 2)
    ]
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["score"])) for row in rows if row["score"]] == list(
        zip(range(3, 20, 4), [0.1, 0.3, 0.9, 0.5, 0.4], strict=True)
    )
    assert [int(row["step"]) for row in rows if row["loss"]] == list(range(1, 20, 2))


@pytest.mark.parametrize("monitor", ["loss", "train_end", "accuracy_epoch"])
def test_training_values_are_monitored_in_their_own_epoch(monitor, tmp_path):
    class Trains(Classifier):
        def training_step(self, batch, batch_idx):
            self.log("accuracy", float(self.current_epoch), on_step=True, on_epoch=True)
            self.log("loss", float(self.current_epoch))
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_epoch_end(self):
            self.log("train_end", float(self.current_epoch))

    scores = []

    class Watches(EarlyStopping):
        def on_train_epoch_end(self, trainer, module):
            super().on_train_epoch_end(trainer, module)
            scores.append(self.best_score)

    checkpoint = ModelCheckpoint(tmp_path, monitor=monitor, mode="max", filename="{epoch}")
    logged(Trains(), epochs=3, callbacks=[Watches(monitor, mode="max"), checkpoint], enable_checkpointing=True)
    assert scores == [0.0, 1.0, 2.0]
    assert checkpoint.best_model_path.endswith("epoch=2.ckpt")


def test_a_missing_monitor_names_what_there_is():
    with pytest.raises(ConfigError, match=r"'val_los'.*val_loss"):
        logged(Classifier(), val=loader(4), callbacks=EarlyStopping("val_los"))


def test_hyperparameters_reach_the_files(tmp_path):
    class Has(Classifier):
        def __init__(self, lr=0.1, depth=3):
            super().__init__(lr)
            self.save_hyperparameters()

    quiet_trainer(max_epochs=1, logger=[TensorBoardLogger(tmp_path), CSVLogger(tmp_path, name="csv")]).fit(
        Has(), loader(4)
    )
    assert "depth: 3" in (tmp_path / "csv" / "version_0" / "hparams.yaml").read_text()
