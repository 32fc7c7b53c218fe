"""Every form that configure_optimizers may return, and the steps of its schedulers: the learning rates equal a loop by hand."""

from __future__ import annotations

import csv
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from fabricamp import Callback, CheckpointError, ConfigError, habits
from fabricamp.callbacks import LearningRateMonitor, ProgressBar
from fabricamp.checkpoint import read_checkpoint
from fabricamp.checkpoint.plain import check_content, with_numpy, without_numpy
from fabricamp.loggers import CSVLogger
from fabricamp.precision import OptLevel
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


CYCLES = {
    "cosine": lambda o, steps: OneCycleLR(o, 0.1, steps),
    "linear": lambda o, steps: OneCycleLR(o, 0.1, steps, anneal_strategy="linear"),
    "three phases": lambda o, steps: OneCycleLR(o, 0.1, steps, three_phase=True),
    "in a chain": lambda o, steps: lr_scheduler.ChainedScheduler(
        [OneCycleLR(o, 0.1, steps), lr_scheduler.StepLR(o, 99)]
    ),
    "last in a sequence": lambda o, steps: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 1.0, 1), OneCycleLR(o, 0.1, steps - 2)], [2]
    ),
    "first in a sequence": lambda o, steps: lr_scheduler.SequentialLR(
        o, [OneCycleLR(o, 0.1, steps - 2), lr_scheduler.ConstantLR(o, 0.5, 99)], [steps - 2]
    ),
}


class Group(Callback):
    """Records the learning rate and the momentum of each step, and what ``optimizers`` has after the fit."""

    def __init__(self):
        self.seen = []

    def now(self, trainer):
        group = trainer.optimizers[0].param_groups[0]
        return float(group["lr"]), float(group["momentum"] if "momentum" in group else group["betas"][0])

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.seen.append(self.now(trainer))

    def on_fit_end(self, trainer, pl_module):
        self.after = self.now(trainer)


def cycle(make, length, optimizer=torch.optim.SGD, **options):
    """Returns a configure_optimizers with a schedule of ``length`` steps."""

    def configure(self):
        made = optimizer(self.parameters(), lr=0.1, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))
        return {"optimizer": made, "lr_scheduler": {"scheduler": make(made, length), "interval": "step", **options}}

    return configure


def fit_cycle(configure, *, epochs=1, **options):
    group = Group()
    model = type("Configured", (Classifier,), {"configure_optimizers": configure})()
    trainer = quiet_trainer(max_epochs=epochs, callbacks=[group], **options)
    trainer.fit(model, loader(5 * 4))
    return group, trainer


def cycle_by_hand(make, steps):
    """Returns the rate and momentum of each step of a loop that does not move the schedule after its last step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    schedule = make(optimizer, steps)
    seen = []
    for step in range(steps):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        if step < steps - 1:
            schedule.step()
    return seen


@pytest.mark.parametrize("name", CYCLES)
def test_a_cycle_ends_at_its_last_rate(name):
    expected = cycle_by_hand(CYCLES[name], 5)
    group, _ = fit_cycle(cycle(CYCLES[name], 5))
    assert np.asarray(group.seen) == pytest.approx(np.asarray(expected))
    assert group.after == pytest.approx(expected[-1])


@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O3", "O4", "O5", "bf16-true", "bf16-mixed", "64-true"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_cycle_ends_at_its_last_rate_at_every_level(precision, optimizer, tmp_path):
    level = OptLevel(precision, loss_scale=1.0) if precision in ("O1", "O2") else precision  # skips no step
    group, trainer = fit_cycle(cycle(CYCLES["cosine"], 5, optimizer), precision=level)
    steps = trainer.lr_scheduler_configs[0].scheduler.last_epoch
    assert steps == len(group.seen) - 1
    assert group.after == pytest.approx(group.seen[-1])
    assert group.after[0] == pytest.approx(4e-7)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    (saved,) = read_checkpoint(tmp_path / "end.ckpt")["optimizer_states"]
    assert float(saved["param_groups"][0]["lr"]) == pytest.approx(4e-7)


def test_a_cycle_by_epochs_and_every_second_step():
    group, trainer = fit_cycle(cycle(CYCLES["cosine"], 3, interval="epoch"), epochs=3)
    assert trainer.global_step == 15
    assert group.after == pytest.approx(cycle_by_hand(CYCLES["cosine"], 3)[-1])
    group, _ = fit_cycle(cycle(CYCLES["cosine"], 5, frequency=2), epochs=2)
    assert group.after == pytest.approx(cycle_by_hand(CYCLES["cosine"], 5)[-1])


@pytest.mark.parametrize(
    ("options", "epochs", "cure"),
    [
        ({}, 2, r"total_steps=self.trainer.estimated_stepping_batches, or train with max_steps=5"),
        ({"frequency": 2}, 3, r"total_steps=self.trainer.estimated_stepping_batches, or train with max_steps=10"),
        ({"interval": "epoch"}, 7, r"total_steps=self.trainer.max_epochs, or train with max_epochs=5"),
    ],
)
def test_a_run_that_goes_on_after_its_cycle_is_an_error(options, epochs, cure):
    with pytest.raises(
        ConfigError, match=rf"a OneCycleLR of 5 steps has ended, and the run goes on; build it with {cure}"
    ):
        fit_cycle(cycle(CYCLES["cosine"], 5, **options), epochs=epochs)


def test_schedules_without_an_end_move_after_the_last_step_too():
    """A longer run that resumes there goes on with the next rate."""
    makes = [
        (lr_scheduler.CosineAnnealingLR, 0.0),
        (lr_scheduler.PolynomialLR, 0.0),
        (lambda o, steps: lr_scheduler.LinearLR(o, 0.5, total_iters=steps), 0.1),
        (lr_scheduler.CosineAnnealingWarmRestarts, 0.1),
    ]
    for make, after in makes:
        group, _ = fit_cycle(cycle(make, 5))
        assert group.after[0] == pytest.approx(after)


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


class Noted(ReduceLROnPlateau):
    """Notes the values by which it steps."""

    def __init__(self, optimizer):
        super().__init__(optimizer, factor=0.5, patience=1)
        self.taken = []

    def step(self, metrics, epoch=None):
        self.taken.append(float(metrics))
        super().step(metrics)


class Improving(Classifier):
    """Logs the number of validations so far, and of the last batch with an even index; ``options`` are the scheduler's."""

    options: ClassVar[dict] = {}

    def __init__(self):
        super().__init__()
        self.validations = 0

    def training_step(self, batch, batch_idx):
        if batch_idx % 2 == 0:
            self.log("even", float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val", float(self.validations))

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.validations += 1

    def on_save_checkpoint(self, checkpoint):
        checkpoint["validations"] = self.validations

    def on_load_checkpoint(self, checkpoint):
        self.validations = checkpoint["validations"]

    def configure_optimizers(self):
        optimizer = sgd(self)
        self.scheduler = Noted(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler, "monitor": "val", **self.options}}


def values_taken(options, *, epochs=6, callbacks=(), ckpt_path=None, **trainer):
    """Returns the values by which a plateau schedule stepped in a fit of six batches an epoch."""
    module = type("Optioned", (Improving,), {"options": options})()
    quiet_trainer(max_epochs=epochs, callbacks=list(callbacks), **trainer).fit(
        module, loader(24), loader(4), ckpt_path=ckpt_path
    )
    return module.scheduler.taken


@pytest.mark.parametrize(
    ("options", "trainer", "expected"),
    {
        "every second epoch": ({"strict": False}, {"check_val_every_n_epoch": 2}, [0, 1, 2]),
        "its frequency": ({"frequency": 2}, {"check_val_every_n_epoch": 2}, [0, 1, 2]),
        "another frequency": ({"frequency": 3, "strict": False}, {"check_val_every_n_epoch": 2}, [0, 2]),
        "twice an epoch": ({}, {"val_check_interval": 0.5}, [1, 3, 5, 7, 9, 11]),
        "every ninth batch": ({"strict": False}, {"check_val_every_n_epoch": None, "val_check_interval": 9}, [0, 1, 2, 3]),
        "by steps": ({"interval": "step", "strict": False}, {}, [0, 1, 2, 3, 4]),
        "by every third step": ({"interval": "step", "frequency": 3, "strict": False}, {"val_check_interval": 0.5}, [*range(11)]),
        "a value of some steps": (
            {"interval": "step", "monitor": "even"}, {"max_epochs": 2, "log_every_n_steps": 3}, [0, 2, 4, 6, 8, 10],
        ),
        "a value of a step at an epoch's end": ({"monitor": "even"}, {"max_epochs": 3}, [4, 10, 16]),
    }.values(),
)  # fmt: skip
def test_a_plateau_counts_each_value_once(options, trainer, expected):
    trainer = {"epochs": trainer.pop("max_epochs", 6), **trainer}
    assert values_taken(options, **trainer) == expected


def test_a_plateau_without_a_validation_in_the_first_epoch_names_the_frequency():
    with pytest.raises(
        ConfigError, match=r"'val', which was not logged.*'frequency': 2 .*check_val_every_n_epoch=2.*'strict': False"
    ):
        values_taken({}, check_val_every_n_epoch=2)


def test_two_plateaus_on_one_value_each_count_it_once():
    class Two(Improving):
        def configure_optimizers(self):
            optimizer = sgd(self)
            self.often, self.seldom = Noted(optimizer), Noted(optimizer)
            common = {"monitor": "val", "strict": False}
            return [optimizer], [
                {"scheduler": self.often, **common},
                {"scheduler": self.seldom, "frequency": 3, **common},
            ]

    module = Two()
    quiet_trainer(max_epochs=6, check_val_every_n_epoch=2).fit(module, loader(24), loader(4))
    assert (module.often.taken, module.seldom.taken) == ([0, 1, 2], [0, 2])


@pytest.mark.parametrize("epoch", range(5))
def test_a_resumed_plateau_knows_which_values_it_has_counted(tmp_path, epoch):
    class Saves(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.current_epoch == epoch and batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == epoch:
                trainer.save_checkpoint(tmp_path / "end.ckpt")

    options = {"strict": False}
    straight = values_taken(options, callbacks=[Saves()], check_val_every_n_epoch=2)
    assert straight == [0, 1, 2]
    for name in ("within", "end"):
        resumed = values_taken(options, check_val_every_n_epoch=2, ckpt_path=tmp_path / f"{name}.ckpt")
        assert resumed == straight, name  # the values so far are part of the schedule's state


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


# -- numbers and arrays of NumPy


class Table:
    """A rate per step, from an array; what it computes with is in its ``__dict__``, which torch saves."""

    def __init__(self):
        self.factors = np.linspace(1, 0.1, 16, dtype=np.float32)
        self.decay = np.float32(0.9)
        self.extra = {np.int64(3): np.array(0.5), "steps": {np.int64(4)}}
        self.last = None

    def __call__(self, step):
        self.last = self.factors[: step + 1]  # an array that a new object does not have yet
        return self.last.mean() * self.decay**step * self.extra.get(step, 1.0)


def mixed(step):
    """Half of its values are NumPy's: a rate of float32 times a Python number is of float32."""
    return np.float32(0.9) if step < 5 else 0.9


NUMPY_SCHEDULES = {
    "milestones of an array": lambda o: lr_scheduler.MultiStepLR(o, milestones=np.arange(2, 10, 3), gamma=0.3),
    "milestones in a list": lambda o: lr_scheduler.MultiStepLR(o, milestones=[np.int64(4), np.int32(7)], gamma=0.3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, np.float32(0.3), 4), lr_scheduler.ExponentialLR(o, np.array(0.9))],
        milestones=np.array([5]),
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.MultiplicativeLR(o, mixed), lr_scheduler.ExponentialLR(o, np.float32(0.9))]
    ),
    "plateau": lambda o: ReduceLROnPlateau(
        o, factor=np.float32(0.7), min_lr=np.array([1e-4]), patience=0, threshold=9.0
    ),
    "array in an object": lambda o: LambdaLR(o, Table()),
    "mixed": lambda o: lr_scheduler.MultiplicativeLR(o, mixed),
    "one cycle": lambda o: OneCycleLR(o, max_lr=np.float64(0.4), total_steps=12),
    "cycles": lambda o: lr_scheduler.CyclicLR(o, np.float32(0.01), np.array(0.1), step_size_up=np.int64(3)),
}
PLATEAU = {"monitor": "loss", "strict": False}


def with_types(values):
    return [(type(value), value) for value in values]


@pytest.mark.parametrize("name", NUMPY_SCHEDULES)
@pytest.mark.parametrize("precision", ["O0", "O5"])
def test_a_schedule_with_numbers_of_numpy_resumes_with_the_straight_runs_rates(name, precision, tmp_path):
    def configure(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=np.float32(0.1), betas=np.array([0.9, 0.99]))
        schedule = {"scheduler": NUMPY_SCHEDULES[name](optimizer), "interval": "step", "frequency": np.int64(1)}
        return {"optimizer": optimizer, "lr_scheduler": {**schedule, **(PLATEAU if name == "plateau" else {})}}

    module = type("Configured", (Classifier,), {"configure_optimizers": configure})

    def run(steps, path=None):
        watcher = Rates()
        trainer = quiet_trainer(max_steps=steps, max_epochs=-1, callbacks=[watcher], precision=precision)
        model = module()
        trainer.fit(model, loader(BATCHES * 4), ckpt_path=path)
        return trainer, model, watcher.seen

    whole, straight, rates = run(11)
    first, _, before = run(6)
    first.save_checkpoint(tmp_path / "half.ckpt")
    second, resumed, after = run(11, tmp_path / "half.ckpt")
    assert len(set(map(float, rates))) > 1, "the schedule changes the rate"
    assert with_types(before + after) == with_types(rates)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    states = [repr(plain_keys(trainer.lr_scheduler_configs[0].scheduler.state_dict())) for trainer in (whole, second)]
    assert states[0] == states[1], "values and their types"
    groups = [repr(trainer.optimizers[0].state_dict()["param_groups"]) for trainer in (whole, second)]
    assert groups[0] == groups[1]


def test_rates_of_numpy_compute_as_in_a_loop_by_hand():
    """A product of two numbers of float32 is of float32, so they do not become Python's."""

    def adamw(module):
        return torch.optim.AdamW(module.parameters(), lr=np.float32(0.01), weight_decay=np.float32(0.1))

    model = type("Decays", (Classifier,), {"configure_optimizers": adamw})()
    quiet_trainer(max_epochs=1).fit(model, loader())
    by_hand = Classifier()
    optimizer = adamw(by_hand)
    for x, y in loader():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(by_hand.net(x), y).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))


def test_state_of_the_users_own_is_still_checked(tmp_path):
    class Saves(Classifier):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"milestones": {np.int64(2): 1}}

    trainer = quiet_trainer(max_steps=1)
    trainer.fit(Saves(), loader())
    with pytest.raises(CheckpointError, match=r"checkpoint\['mine'\]\['milestones'\] .*is a numpy.int64"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize("value", [np.array(["text"]), np.array([object()]), np.datetime64("2026-01-01")])
def test_what_has_no_plain_form_is_named(value, tmp_path):
    class Dated(Classifier):
        def configure_optimizers(self):
            optimizer = sgd(self)
            schedule = StepLR(optimizer, 1)
            schedule.since = value
            return [optimizer], [schedule]

    trainer = quiet_trainer(max_steps=1)
    trainer.fit(Dated(), loader())
    with pytest.raises(CheckpointError, match=r"checkpoint\['lr_schedulers'\]\[0\]\['since'\] is a numpy"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")


NUMBERS = st.one_of(
    st.integers(-100, 100),
    st.floats(width=32),
    st.integers(-100, 100).map(np.int64),
    st.integers(0, 200).map(np.uint8),
    st.floats(width=16).map(np.float16),
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.booleans().map(np.bool_),
    st.complex_numbers().map(np.complex128),
    st.lists(st.floats(width=32), max_size=3).map(lambda values: np.array(values, dtype=np.float32)),
    st.integers(0, 9).map(lambda value: np.array(value, dtype=np.int16)),
    st.integers(1, 3).map(lambda rows: np.arange(rows * 2)[::-1].reshape(rows, 2)),
)
KEYS = st.one_of(st.text(max_size=2), st.integers(-9, 9).map(np.int64), st.floats(-9, 9, width=32).map(np.float32))
STATES = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(STATES)
def test_any_state_of_numbers_is_stored_and_comes_back_with_its_types(state):
    values, notes = without_numpy(state)
    check_content([values, notes])
    assert repr(with_numpy(values, notes)) == repr(plain_keys(state))


def plain_keys(value):
    """Keys and items of sets come back as Python's, which are equal to NumPy's."""
    if isinstance(value, set):
        return {int(item) for item in value}
    if isinstance(value, dict):
        keys = [key.item() if isinstance(key, np.generic) else key for key in value]
        assert keys == list(value)
        return {key: plain_keys(item) for key, item in zip(keys, value.values(), strict=True)}
    return type(value)(map(plain_keys, value)) if type(value) in (list, tuple) else value


def test_a_run_without_numpy_has_no_notes(tmp_path):
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert "numpy" not in read_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize("name", ["max_steps", "log_every_n_steps", "check_val_every_n_epoch", "val_check_interval"])
@pytest.mark.parametrize("kind", [np.int64, np.array])
def test_a_whole_number_of_another_type_is_an_int(name, kind):
    trainer = quiet_trainer(**{name: kind(2)})
    assert (type(getattr(trainer, name)), getattr(trainer, name)) == (int, 2)
    with pytest.raises(ConfigError, match=name):
        quiet_trainer(**{name: np.bool_(True)})


@pytest.mark.parametrize("frequency", [True, np.float64(1.0), 0, "1"])
def test_a_frequency_is_a_whole_number(frequency):
    with pytest.raises(ConfigError, match="lr_scheduler frequency"):
        rates(lambda self: ([sgd(self)], [{"scheduler": halving(sgd(self)), "frequency": frequency}]))


# -- a resume at another level, where schedules move at once or two steps later

MOVES = {
    "O0": ({"precision": "O0"}, False),
    "O1": ({"precision": "O1"}, True),
    "O2": ({"precision": "O2"}, True),
    "O5": ({"precision": "O5"}, False),
    "skip": ({"precision": "O0", "nan_policy": "skip"}, True),
    "stop": ({"precision": "O0", "nan_policy": "stop"}, False),
    "a program for Lightning": ({"precision": "O1"}, False),
}
"""Options, and whether schedules wait until a step is known to be applied."""


class Counted(Classifier):
    """Counts the steps of a schedule; the loss of some steps overflows."""

    def __init__(self, overflows=()):
        super().__init__()
        self.overflows = overflows

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.global_step in self.overflows else loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 5, 0.5), "interval": "step"}]


def count_after(monkeypatch, name, steps, path=None, overflows=()):
    """Returns a Trainer after ``steps`` steps, and the steps that its schedule has made."""
    monkeypatch.setattr(habits, "_present", habits.LIGHTNING if name == "a program for Lightning" else habits.NATIVE)
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, **MOVES[name][0])
    trainer.fit(Counted(overflows), loader(80), ckpt_path=path)
    return trainer, trainer.lr_scheduler_configs[0].scheduler.last_epoch


@pytest.mark.parametrize("second", MOVES)
@pytest.mark.parametrize("first", MOVES)
def test_a_schedule_gets_the_steps_that_the_first_run_owes_it(first, second, tmp_path, monkeypatch):
    trainer, _ = count_after(monkeypatch, first, 10)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    _, count = count_after(monkeypatch, second, 18, tmp_path / "a.ckpt")
    waits = MOVES[second][1]
    # Where the statuses of the last steps go along, a schedule that waits is two steps late at the end; else it has moved at once.
    assert count == (16 if waits else 18)


def test_a_step_that_was_skipped_is_not_owed(tmp_path, monkeypatch):
    trainer, count = count_after(monkeypatch, "O1", 10, overflows=[9])
    assert (trainer.skipped_steps, count) == (1, 8)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert count_after(monkeypatch, "O0", 18, tmp_path / "a.ckpt")[1] == 17


@pytest.mark.parametrize(("second", "expected"), [("O0", 18), ("O1", 16)])
def test_a_file_that_does_not_say_whether_schedules_waited(second, expected, tmp_path, monkeypatch):
    trainer, _ = count_after(monkeypatch, "O1", 10)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del content["amp"]["schedules_follow"], content["checksum"]
    torch.save(content, tmp_path / "a.ckpt")
    assert count_after(monkeypatch, second, 18, tmp_path / "a.ckpt")[1] == expected
