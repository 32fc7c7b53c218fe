"""Every form that configure_optimizers may return, and the steps of its schedulers: the learning rates equal a loop by hand."""

from __future__ import annotations

import csv

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from fabricamp import Callback, ConfigError
from fabricamp.callbacks import LearningRateMonitor, ProgressBar
from fabricamp.loggers import CSVLogger
from tests.small import Classifier, loader, quiet_trainer

BATCHES = 4


class Rates(Callback):
    """Records the learning rate of each step."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.seen.append(optimizer.param_groups[0]["lr"])


def rates(configure, *, epochs=3, batches=BATCHES, module=Classifier, fit=(), **options):
    """Returns the learning rates of a fit with ``configure`` as configure_optimizers."""
    watcher = Rates()
    model = type("Configured", (module,), {"configure_optimizers": configure})()
    trainer = quiet_trainer(max_epochs=epochs, callbacks=[watcher], **options)
    trainer.fit(model, loader(batches * 4), *fit)
    return watcher.seen


def sgd(module, lr=1.0):
    return torch.optim.SGD(module.parameters(), lr=lr)


def halving(optimizer):
    return StepLR(optimizer, 1, 0.5)


def by_hand(every, steps=12):
    """Returns rates that are halved after every ``every`` steps."""
    return [0.5 ** (step // every) for step in range(steps)]


def as_list(self):
    return [sgd(self)]


def as_pair(self):
    optimizer = sgd(self)
    return [optimizer], [halving(optimizer)]


def as_pair_of_dicts(self):
    optimizer = sgd(self)
    return [optimizer], [{"scheduler": halving(optimizer), "interval": "step"}]


def as_pair_without_schedulers(self):
    return [sgd(self)], []


def as_dict(self):
    return {"optimizer": sgd(self)}


def as_dict_with_scheduler(self):
    optimizer = sgd(self)
    return {"optimizer": optimizer, "lr_scheduler": halving(optimizer)}


def as_dict_with_options(self):
    optimizer = sgd(self)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": halving(optimizer), "interval": "step", "frequency": 3, "name": "half"},
    }


def as_list_of_dicts(self):
    return [as_dict_with_scheduler(self)]


def as_tuple_of_dicts(self):
    return (as_dict_with_options(self),)


@pytest.mark.parametrize(
    ("configure", "expected"),
    [
        (sgd, by_hand(99)),
        (as_list, by_hand(99)),
        (as_dict, by_hand(99)),
        (as_pair_without_schedulers, by_hand(99)),
        (as_pair, by_hand(BATCHES)),
        (as_pair_of_dicts, by_hand(1)),
        (as_dict_with_scheduler, by_hand(BATCHES)),
        (as_dict_with_options, by_hand(3)),
        (as_list_of_dicts, by_hand(BATCHES)),
        (as_tuple_of_dicts, by_hand(3)),
    ],
)
def test_forms(configure, expected):
    assert rates(configure) == expected


def with_scheduler(make, **options):
    def configure(self):
        optimizer = sgd(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **options}}

    return configure


@pytest.mark.parametrize(
    ("options", "accumulate", "expected"),
    [
        ({"interval": "epoch", "frequency": 2}, 1, by_hand(2 * BATCHES)),
        ({"interval": "step", "frequency": 2}, 1, by_hand(2)),
        ({"interval": "step"}, 3, by_hand(1, 6)),
        ({"interval": "epoch"}, 3, by_hand(2, 6)),
    ],
)
def test_intervals_count_updates_and_epochs(options, accumulate, expected):
    assert rates(with_scheduler(halving, **options), accumulate_grad_batches=accumulate) == expected


def test_a_scheduler_that_needs_the_number_of_steps():
    def configure(self):
        optimizer = sgd(self)
        scheduler = OneCycleLR(optimizer, 1.0, total_steps=self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = OneCycleLR(optimizer, 1.0, total_steps=6)
    expected = []
    for _ in range(6):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(configure, accumulate_grad_batches=3) == expected


def test_two_schedulers_of_one_optimizer():
    def configure(self):
        optimizer = sgd(self)
        by_epoch = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.5)
        by_step = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.1)
        return [optimizer], [by_epoch, {"scheduler": by_step, "interval": "step"}]

    assert rates(configure, epochs=2) == pytest.approx([0.1**step * 0.5 ** (step // BATCHES) for step in range(8)])


class Plateaus(Classifier):
    """Logs values that never improve, under every name."""

    def training_step(self, batch, batch_idx):
        self.log("flat", 1.0, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("flat_at_end", 1.0)

    def validation_step(self, batch, batch_idx):
        self.log("val_flat", 1.0)


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


@pytest.mark.parametrize("monitor", ["flat", "flat_epoch", "flat_at_end", "val_flat"])
def test_a_plateau_by_epoch_watches_values_of_the_same_epoch(monitor):
    # The first value is the best so far, and no later value is better.
    seen = rates(with_scheduler(plateau, monitor=monitor), epochs=4, module=Plateaus, fit=(loader(4),))
    assert seen == [1.0] * 8 + [0.5] * 4 + [0.25] * 4


def test_a_plateau_by_step_watches_the_value_of_that_step():
    seen = rates(with_scheduler(plateau, monitor="flat_step", interval="step", frequency=2), module=Plateaus, epochs=2)
    assert seen == [1.0] * 4 + [0.5] * 2 + [0.25] * 2


def test_the_monitor_may_stand_beside_the_scheduler():
    def configure(self):
        optimizer = sgd(self)
        return {"optimizer": optimizer, "lr_scheduler": plateau(optimizer), "monitor": "flat"}

    assert rates(configure, module=Plateaus) == [1.0] * 8 + [0.5] * 4


def test_a_plateau_without_its_value():
    with pytest.raises(ConfigError, match=r"'missing'.*flat"):
        rates(with_scheduler(plateau, monitor="missing"), module=Plateaus)
    assert rates(with_scheduler(plateau, monitor="missing", strict=False), module=Plateaus) == [1.0] * 12


def test_lr_scheduler_step_may_be_overridden():
    calls = []

    class Own(Plateaus):
        def lr_scheduler_step(self, scheduler, metric):
            calls.append((type(scheduler).__name__, None if metric is None else float(metric)))
            super().lr_scheduler_step(scheduler, metric)

        def configure_optimizers(self):
            optimizer = sgd(self)
            return [optimizer], [halving(optimizer), {"scheduler": plateau(optimizer), "monitor": "flat"}]

    quiet_trainer(max_epochs=2).fit(Own(), loader(8))
    assert calls == [("StepLR", None), ("ReduceLROnPlateau", 1.0)] * 2


def test_a_scheduler_of_ones_own_class():
    class Own:
        def __init__(self, optimizer):
            self.optimizer, self.values = optimizer, []

        def step(self, value=None):
            self.values.append(value)

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    found = []

    def configure(self):
        optimizer = sgd(self)
        found.append(Own(optimizer))
        return [optimizer], [{"scheduler": found[0], "monitor": "flat", "reduce_on_plateau": True}]

    rates(configure, module=Plateaus)
    assert [float(value) for value in found[0].values] == [1.0, 1.0, 1.0]


def test_no_optimizer_at_all():
    module = type("Still", (Classifier,), {"configure_optimizers": lambda self: None})()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, loader(16))
    assert trainer.global_step == 4
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_lr_schedulers_under_manual_optimization_are_the_users():
    class Manual(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.rates = []

        def training_step(self, batch, batch_idx):
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            self.rates.append(optimizer.param_groups[0]["lr"])
            if batch_idx % 2:
                scheduler.step()

        configure_optimizers = as_pair_of_dicts

    module = Manual()
    quiet_trainer(max_epochs=1).fit(module, loader(24))
    assert module.rates == by_hand(2, 6)


def test_a_skipped_rest_of_an_epoch_ends_the_epoch_for_its_schedulers():
    class Skips(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    assert rates(as_pair, module=Skips) == by_hand(2, 6)


def test_the_lambda_is_asked_for_the_next_step_only():
    asked = []

    def configure(self):
        optimizer = sgd(self)
        return [optimizer], [
            {"scheduler": LambdaLR(optimizer, lambda step: asked.append(step) or 1.0), "interval": "step"}
        ]

    rates(configure, epochs=1)
    assert asked == [0, 1, 2, 3, 4]


class Halves:
    """A user's schedule without ``step()`` and without an optimizer attribute."""

    def __init__(self):
        self.epochs = 0


class HalvesAndRemembers(Halves):
    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.epochs = state_dict["epochs"]


class Stepped(Classifier):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.epochs += 1
        for group in self.optimizers().param_groups:
            group["lr"] = 0.5**scheduler.epochs


@pytest.mark.parametrize("kind", [Halves, HalvesAndRemembers])
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_scheduler_is_any_object_where_the_module_steps_it(kind, interval, tmp_path):
    def configure(self):
        return {"optimizer": sgd(self), "lr_scheduler": {"scheduler": kind(), "interval": interval}}

    every = BATCHES if interval == "epoch" else 1
    logger = CSVLogger(tmp_path, version=0)
    assert rates(configure, epochs=2, module=Stepped) == by_hand(every, 8)
    watcher = Rates()
    options = {"callbacks": [watcher, LearningRateMonitor(), ProgressBar()], "logger": logger, "log_every_n_steps": 1}
    trainer = quiet_trainer(max_epochs=2, **options)
    model = type("Configured", (Stepped,), {"configure_optimizers": configure})
    trainer.fit(model(), loader(BATCHES * 4))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    assert watcher.seen == by_hand(every, 8)
    rows = csv.DictReader((tmp_path / "fabricamp_logs/version_0/metrics.csv").read_text().splitlines())
    logged = [float(row["lr-SGD"]) for row in rows if row["lr-SGD"]]
    assert set(logged) == set(by_hand(every, 8))

    resumed = Rates()
    quiet_trainer(max_epochs=3, callbacks=[resumed]).fit(model(), loader(BATCHES * 4), ckpt_path=tmp_path / "two.ckpt")
    ended = by_hand(every, 9)[8]  # from the optimizer's state
    after = ended if interval == "epoch" else (ended / 2 if kind is HalvesAndRemembers else 0.5)
    assert resumed.seen[:2] == [ended, after]


def test_without_a_step_of_the_modules_own_the_error_says_what_to_write():
    def configure(self):
        return [sgd(self)], [Halves()]

    with pytest.raises(ConfigError, match=r"give an object with step\(\), or write lr_scheduler_step"):
        rates(configure)
    for wrong in (StepLR, None):
        with pytest.raises(ConfigError, match="no usable 'scheduler'"):
            rates(lambda self, wrong=wrong: ([sgd(self)], [{"scheduler": wrong}]), module=Stepped)
