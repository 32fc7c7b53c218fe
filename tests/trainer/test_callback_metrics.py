"""trainer.callback_metrics and logged_metrics have Lightning's content in every hook."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.nn import functional as F
from torchmetrics import MeanMetric, SumMetric

from fabricamp import Callback
from fabricamp.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from fabricamp.loggers import CSVLogger
from tests.small import Classifier, loader, quiet_trainer


class Counts(Classifier):
    """Logs known numbers, and records the metrics in its hooks."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, moment):
        self.seen.append((moment, {key: float(value) for key, value in self.trainer.callback_metrics.items()}))

    def at(self, moment):
        return [values for name, values in self.seen if name == moment]

    def training_step(self, batch, batch_idx):
        number = self.current_epoch * 10.0 + batch_idx
        self.log("now", number)
        self.log("both", number, on_step=True, on_epoch=True)
        self.log("epoch", torch.tensor(number), on_step=False, on_epoch=True)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val", 100.0 + self.current_epoch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note("batch")

    def on_train_epoch_end(self):
        self.note("train epoch")

    def on_validation_epoch_end(self):
        self.note("validation")


def fit(module, *callbacks, val=True, batches=3, **options):
    given = {"max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": list(callbacks), **options}
    trainer = quiet_trainer(**given)
    trainer.fit(module, loader(batches * 4), loader(8) if val else None)
    return trainer


def test_a_step_shows_its_own_values_whether_they_are_flushed_or_not():
    module = Counts()
    fit(module, log_every_n_steps=2, val=False)
    assert [values["now"] for values in module.at("batch")] == [0, 1, 2, 10, 11, 12]
    assert [values["both"] for values in module.at("batch")] == [0, 1, 2, 10, 11, 12]
    assert [values["both_step"] for values in module.at("batch")] == [0, 1, 2, 10, 11, 12]
    assert "epoch" not in module.at("batch")[2]
    assert module.at("batch")[3]["epoch"] == 1


def test_a_value_that_is_logged_now_and_then_stays_what_it_was():
    class Rarely(Counts):
        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.log("rarely", torch.tensor(7.0))
            return F.cross_entropy(self.net(batch[0]), batch[1])

    module = Rarely()
    fit(module, log_every_n_steps=1, val=False, max_epochs=1)
    assert module.at("batch") == [{"rarely": 7.0}] * 3


def test_the_hooks_at_an_epochs_end_see_that_epochs_values():
    module = Counts()
    fit(module)
    assert [values["both"] for values in module.at("train epoch")] == [1, 11]
    assert [values["both_epoch"] for values in module.at("train epoch")] == [1, 11]
    assert [values["both_step"] for values in module.at("train epoch")] == [2, 12]
    assert [values["epoch"] for values in module.at("train epoch")] == [1, 11]
    assert [values["val"] for values in module.at("train epoch")] == [100, 101]
    assert [values["val"] for values in module.at("validation")] == [100, 101]


def test_each_micro_batch_of_a_window_shows_its_own():
    module = Counts()
    fit(module, val=False, max_epochs=1, batches=5, accumulate_grad_batches=2)
    assert [values["now"] for values in module.at("batch")] == [0, 1, 2, 3, 4]


def test_tensors_are_new_ones_of_lightnings_dtype():
    kept = {}

    class Kinds(Counts):
        def training_step(self, batch, batch_idx):
            self.log("number", 1)
            self.log("whole", torch.tensor(2))
            self.log("half", torch.tensor(0.5, dtype=torch.bfloat16))
            self.log("double", torch.tensor(1 + 2**-40, dtype=torch.float64), on_step=True, on_epoch=True)
            self.log("seen", batch_idx)
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            kept[batch_idx] = self.trainer.callback_metrics["seen"]
            assert self.trainer.callback_metrics["seen"] is not kept[batch_idx]
            self.logged = dict(self.trainer.logged_metrics)

    module = Kinds()
    trainer = fit(module, val=False, max_epochs=1)
    assert {key: value.dtype for key, value in trainer.callback_metrics.items()} == {
        "number": torch.float32,
        "whole": torch.float32,
        "half": torch.float32,
        "double": torch.float64,
        "double_step": torch.float64,
        "double_epoch": torch.float64,
        "seen": torch.float32,
    }
    assert trainer.callback_metrics["double"] == torch.tensor(1 + 2**-40, dtype=torch.float64)
    assert kept == {0: 0.0, 1: 1.0, 2: 2.0}
    assert module.logged == {"number": 1.0, "whole": 2.0, "half": 0.5, "double_step": 1 + 2**-40, "seen": 2.0}
    assert all(isinstance(value, torch.Tensor) for value in trainer.logged_metrics.values())


def test_several_loaders_and_what_a_hook_logs_itself():
    class Several(Counts):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val", 100.0 * dataloader_idx + batch_idx)

        def on_validation_epoch_end(self):
            known = self.trainer.callback_metrics
            self.log("sum", known["val/dataloader_idx_0"] + known["val/dataloader_idx_1"])
            self.note("validation")

    module = Several()
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, loader(8), [loader(8), loader(16)])
    (seen,) = module.at("validation")
    assert seen.items() >= {"val/dataloader_idx_0": 0.5, "val/dataloader_idx_1": 101.5, "sum": 102.0}.items()
    assert trainer.callback_metrics["sum"] == 102.0


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_a_hook_sees_what_it_has_logged_so_far(reduce_fx):
    class Twice(Counts):
        def on_train_epoch_end(self):
            for value in (1.0, torch.tensor(3.0)):
                self.log("x", value, reduce_fx=reduce_fx)
            self.note("train epoch")

    module = Twice()
    trainer = fit(module, max_epochs=1)
    expected = {"mean": 2.0, "sum": 4.0, "min": 1.0, "max": 3.0}[reduce_fx]
    assert module.at("train epoch")[0]["x"] == expected == trainer.callback_metrics["x"]


def test_metric_objects_are_computed_before_the_hooks_and_again_where_these_add_to_them():
    class Objects(Counts):
        def __init__(self):
            super().__init__()
            self.kept, self.added, self.reset = MeanMetric(), SumMetric(), SumMetric()

        def training_step(self, batch, batch_idx):
            for metric in (self.kept, self.added, self.reset):
                metric.update(float(batch_idx))
                self.log(next(name for name, one in self.named_children() if one is metric), metric, on_epoch=True)
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_epoch_end(self):
            self.note("train epoch")
            self.added.update(10.0)
            self.reset.reset()  # as many modules do; the epoch's value is computed before this hook

    module = Objects()
    module.log = lambda name, value, **flags: Classifier.log(module, name, value, on_step=False, **flags)
    trainer = fit(module, val=False)
    assert module.at("train epoch")[0] == {"kept": 1.0, "added": 3.0, "reset": 3.0}
    assert trainer.callback_metrics == {"kept": 1.0, "added": 13.0, "reset": 3.0}


def test_the_sanity_checks_values_are_seen_in_it_and_gone_behind_it():
    class Sanity(Counts):
        def on_validation_end(self):
            self.note("validation end")

        def on_sanity_check_end(self):
            self.note("sanity end")

        def on_train_start(self):
            self.note("train start")

    module = Sanity()
    trainer = fit(module, num_sanity_val_steps=1)
    assert module.seen[:4] == [
        ("validation", {"val": 100.0}),
        ("validation end", {"val": 100.0}),
        ("sanity end", {"val": 100.0}),
        ("train start", {}),
    ]
    assert trainer.callback_metrics["val"] == 101.0


def test_the_sanity_checks_values_of_several_loaders_are_seen_in_it():
    class Several(Counts):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("val", 100.0 + dataloader_idx)

        def on_train_start(self):
            self.note("train start")

    module = Several()
    quiet_trainer(max_epochs=1, num_sanity_val_steps=1).fit(module, loader(8), [loader(8), loader(8)])
    assert module.seen[:2] == [
        ("validation", {"val/dataloader_idx_0": 100.0, "val/dataloader_idx_1": 101.0}),
        ("train start", {}),
    ]


class Decides(Counts):
    """Logs the monitored values in the hooks of an epoch's end."""

    scores = (3.0, 1.0, 2.0, 2.0, 2.0, 2.0)

    def on_validation_epoch_end(self):
        self.log("at_validation", self.scores[self.current_epoch])

    def on_train_epoch_end(self):
        self.log("at_epoch", self.scores[self.current_epoch])


class Plateau(Decides):
    monitor = ""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.monitor}}


@pytest.mark.parametrize("monitor", ["at_validation", "at_epoch"])
def test_monitors_decide_by_what_the_hooks_logged(tmp_path, monitor):
    stopping = EarlyStopping(monitor, patience=2)
    best = ModelCheckpoint(tmp_path, filename="{epoch}", monitor=monitor)
    module = Plateau()
    module.monitor = monitor
    trainer = fit(module, stopping, best, max_epochs=6, enable_checkpointing=True)
    assert stopping.stopped_epoch == 3
    assert best.best_model_path == str(tmp_path / "epoch=1.ckpt")
    assert best.best_model_score == 1.0
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("put", ["logged", "put in as a number"])
def test_monitors_decide_by_the_last_digit_of_a_large_count(tmp_path, put):
    class Counted(Plateau):
        monitor = "tokens"
        counts = (2**24 + 2, 2**24 + 1, 2**24 + 1, 2**24, 2**24, 2**24)

        def on_validation_epoch_end(self):
            count = self.counts[self.current_epoch]
            if put == "logged":
                self.log("tokens", count)
            else:
                self.trainer.callback_metrics["tokens"] = count

        def configure_optimizers(self):
            configured = super().configure_optimizers()
            configured["lr_scheduler"]["scheduler"].threshold_mode = "abs"
            return configured

    stopping = EarlyStopping("tokens", patience=2)
    best = ModelCheckpoint(tmp_path, filename="{epoch}-{tokens:.0f}", monitor="tokens")
    second = ModelCheckpoint(tmp_path / "top", filename="{epoch}", monitor="tokens", save_top_k=2)
    trainer = fit(Counted(), stopping, best, second, max_epochs=6, enable_checkpointing=True)
    assert stopping.stopped_epoch == 5
    assert float(stopping.best_score) == 2**24
    assert best.best_model_path == str(tmp_path / f"epoch=3-tokens={2**24}.ckpt")
    assert list(map(float, second.best_k_models.values())) == [2**24, 2**24]
    assert float(second.kth_value) == float(second.best_model_score) == 2**24
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert rate == pytest.approx(0.1 * 0.1)  # one bad value is allowed: the third, then the fifth and sixth are


def test_the_scores_of_kept_files_have_every_digit(tmp_path):
    class Counted(Counts):
        def on_validation_epoch_end(self):
            self.log("tokens", 2**24 + 1 + 2 * self.current_epoch)

    best = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="tokens", save_top_k=2)
    stopping = EarlyStopping("tokens", patience=5)
    fit(Counted(), best, stopping, max_epochs=3, enable_checkpointing=True)
    assert float(best.best_model_score) == float(stopping.best_score) == 2**24 + 1
    assert [float(score) for score in best.best_k_models.values()] == [2**24 + 1, 2**24 + 3]
    assert float(best.kth_value) == 2**24 + 3
    assert float(best.current_score) == 2**24 + 3


def test_what_a_callback_puts_in_stays_and_can_be_monitored(tmp_path):
    class Puts(Callback):
        def on_validation_epoch_end(self, trainer, module):
            trainer.callback_metrics["own"] = torch.tensor(Decides.scores[trainer.current_epoch])

    stopping = EarlyStopping("own", patience=2)
    trainer = fit(Counts(), Puts(), stopping, max_epochs=6)
    assert stopping.stopped_epoch == 3
    assert trainer.callback_metrics["own"] == 2.0


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_learning_rates_can_be_monitored_and_a_resumed_run_knows_them(tmp_path, interval):
    class Falls(Counts):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def run(folder, **options):
        best = ModelCheckpoint(
            tmp_path / folder, filename="{step}-{lr-SGD:.5f}", monitor="lr-SGD", every_n_train_steps=3, save_top_k=-1
        )
        trainer = quiet_trainer(
            max_epochs=2,
            log_every_n_steps=2,
            enable_checkpointing=True,
            logger=CSVLogger(tmp_path / folder),
            callbacks=[LearningRateMonitor(interval), best],
            **{key: value for key, value in options.items() if key != "ckpt_path"},
        )
        trainer.fit(Falls(), loader(20), ckpt_path=options.get("ckpt_path"))
        return trainer, {path.name for path in (tmp_path / folder).glob("*.ckpt")}

    whole, files = run("whole")
    rates = {"step": (3, 0.05, 6, 0.00313, 9, 0.00078), "epoch": (3, 0.1, 6, 0.00313, 9, 0.00313)}[interval]
    assert files == {f"step={step}-lr-SGD={rate:.5f}.ckpt" for step, rate in zip(rates[::2], rates[1::2], strict=True)}
    cut, early = run("cut", max_steps=8)
    cut.save_checkpoint(tmp_path / "cut.ckpt")
    resumed, late = run("resumed", ckpt_path=tmp_path / "cut.ckpt")
    assert early | late == files
    assert resumed.callback_metrics == whole.callback_metrics


def test_optimizers_outlive_their_fit():
    module = Counts()
    trainer = fit(module, batches=2)
    optimizers = trainer.optimizers
    assert len(optimizers) == 1
    trainer.validate(module, loader(8), verbose=False)
    assert trainer.optimizers == optimizers


class Looks(Callback):
    """Records the metrics at the setup of a run, and at its start."""

    def __init__(self):
        self.seen = {}

    def note(self, moment, trainer):
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen[moment] = values, {name: float(value) for name, value in trainer.logged_metrics.items()}

    def setup(self, trainer, pl_module, stage):
        self.note(f"setup of {stage}", trainer)

    def on_fit_start(self, trainer, pl_module):
        self.note("start of fit", trainer)

    def on_test_start(self, trainer, pl_module):
        self.note("start of test", trainer)


class Doubles(Classifier):
    """Logs a value in float64 in training, and in float32 in a test."""

    def training_step(self, batch, batch_idx):
        self.log("exact", torch.tensor(0.1, dtype=torch.float64))
        return super().training_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.log("exact", torch.tensor(0.2))


@pytest.mark.parametrize("copied", [False, True], ids=["", "copied"])
def test_a_run_is_set_up_by_the_values_of_the_run_before(copied, tmp_path):
    looks = Looks()
    trainer = quiet_trainer(max_steps=3, log_every_n_steps=1, callbacks=[looks], logger=CSVLogger(tmp_path))
    trainer.fit(Doubles(), loader())
    assert looks.seen == {"setup of fit": ({}, {}), "start of fit": ({}, {})}
    trainer.callback_metrics["mine"] = 7.0
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    assert fitted.keys() == {"exact", "loss", "mine"}
    assert "exact" in logged
    if copied:  # as for a spawned worker
        trainer = pickle.loads(pickle.dumps(trainer))
        looks = next(one for one in trainer.callbacks if isinstance(one, Looks))
    trainer.test(Doubles(), loader(), verbose=False)
    assert looks.seen["setup of test"] == (fitted, logged)
    assert looks.seen["start of test"] == ({}, {})
    assert {name: value.dtype for name, value in trainer.callback_metrics.items()} == {"exact": torch.float32}

    trainer.fit_loop.max_steps = 6
    trainer.fit(Doubles(), loader())
    assert looks.seen["setup of fit"][0] == {"exact": pytest.approx(0.2)}
    assert looks.seen["start of fit"] == ({}, {})


class SameName(Classifier):
    """Logs one name in each step, and again at the epoch's end."""

    def __init__(self):
        super().__init__()
        self.bar = []

    def training_step(self, batch, batch_idx):
        self.log("x", 100.0 + self.current_epoch * 10 + batch_idx, prog_bar=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self):
        self.bar.append(dict(self.trainer.progress_bar_metrics))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.bar.append(dict(self.trainer.progress_bar_metrics))

    def on_train_epoch_end(self):
        self.log("x", 1.0 + self.current_epoch, prog_bar=True)


def test_the_bar_shows_a_steps_value_until_the_epoch_has_one_of_that_name():
    module = SameName()
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(module, loader(8))
    assert [values.get("x") for values in module.bar] == [None, 100.0, 101.0, 1.0, 110.0, 111.0]
    assert trainer.progress_bar_metrics["x"] == 2.0
