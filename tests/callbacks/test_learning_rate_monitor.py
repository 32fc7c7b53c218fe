"""LearningRateMonitor: names, steps of its rows, and cost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fabricamp import Callback
from fabricamp.callbacks import LearningRateMonitor
from fabricamp.errors import ConfigError
from fabricamp.loggers import CSVLogger, Logger
from tests.small import Classifier, loader, quiet_trainer


class Recorder(Logger):
    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))


def adam(groups=1, **options):
    parts = [{"params": [torch.nn.Parameter(torch.zeros(1))], **options} for _ in range(groups)]
    return torch.optim.Adam(parts, lr=0.5)


def schedule(optimizer, interval="epoch", name=None):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return SimpleNamespace(scheduler=scheduler, interval=interval, name=name, frequency=1)


@pytest.fixture
def start(make_trainer):
    def start_with(monitor, optimizers, configs=()):
        trainer = make_trainer(monitor)
        trainer.loggers = [Recorder()]
        trainer.optimizers, trainer.lr_scheduler_configs = list(optimizers), list(configs)
        return trainer.start()

    return start_with


def logged(trainer):
    return trainer.loggers[0].rows


def test_steps_are_those_of_the_flushes_and_values_those_of_that_step(start):
    optimizer = adam()
    config = schedule(optimizer, "step")
    trainer = start(LearningRateMonitor(), [optimizer], [config])
    for _ in range(21):
        trainer.step(micro_batches=2)
        optimizer.step()
        config.scheduler.step()
    assert [step for step, _ in logged(trainer)] == [9, 19]
    assert logged(trainer)[0][1] == {"lr-Adam": 0.5 * 0.5**9}


def test_a_run_that_goes_on_within_a_window_has_logged_its_step(tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "cut.ckpt")

    def rows(*callbacks, **options):
        trainer = quiet_trainer(
            max_epochs=1,
            log_every_n_steps=1,
            accumulate_grad_batches=2,
            logger=CSVLogger(tmp_path, version=0),
            callbacks=[LearningRateMonitor(), *callbacks],
        )
        trainer.fit(Classifier(), loader(24), **options)
        return (tmp_path / "fabricamp_logs" / "version_0" / "metrics.csv").read_text()

    straight = rows(Save())
    assert rows(ckpt_path=tmp_path / "cut.ckpt") == straight


def test_epochs(start):
    optimizer = adam()
    trainer = start(LearningRateMonitor(), [optimizer], [schedule(optimizer)])
    for _ in range(2):
        trainer.epoch(steps=15)
    assert [step for step, _ in logged(trainer)] == [0, 15]


@pytest.mark.parametrize(("interval", "steps"), [("step", [9, 19]), ("epoch", [0, 12]), (None, [0, 9, 12, 19])])
def test_an_optimizer_without_scheduler(start, interval, steps):
    trainer = start(LearningRateMonitor(interval), [adam()])
    for _ in range(2):
        trainer.epoch(steps=12)
    assert [step for step, _ in logged(trainer)] == steps


def test_a_schedule_that_is_put_in_on_the_way_is_logged_by_its_own_interval(start):
    optimizer = adam()
    trainer = start(LearningRateMonitor(), [optimizer], [schedule(optimizer, "step", name="steps")])
    trainer.epoch(steps=12)
    trainer.lr_scheduler_configs[:] = [schedule(optimizer, "epoch")]  # as StochasticWeightAveraging does
    trainer.epoch(steps=12)
    assert [(step, *values) for step, values in logged(trainer)] == [(9, "steps"), (12, "lr-Adam")]


def test_names(start):
    first, second, named, bare = adam(), adam(2), adam(), adam()
    second.param_groups[1]["name"] = "head"
    configs = [schedule(first), schedule(second), schedule(named, name="mine")]
    monitor = LearningRateMonitor("epoch", log_key_prefix="o/")
    start(monitor, [first, second, named, bare], configs).epoch(steps=0)
    assert list(monitor.last_values) == ["o/lr-Adam", "o/lr-Adam-1/pg1", "o/lr-Adam-1/head", "o/mine", "o/lr-Adam-2"]


def test_momentum_and_weight_decay(start):
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.8, weight_decay=0.01)
    trainer = start(LearningRateMonitor("epoch", log_momentum=True, log_weight_decay=True), [sgd, adam()])
    trainer.epoch(steps=0)
    assert logged(trainer)[0][1] == {
        "lr-SGD": 0.1,
        "lr-SGD-momentum": 0.8,
        "lr-SGD-weight_decay": 0.01,
        "lr-Adam": 0.5,
        "lr-Adam-momentum": 0.9,
        "lr-Adam-weight_decay": 0,
    }


def test_a_learning_rate_on_the_device_is_read_only_where_it_is_logged(start, monkeypatch):
    optimizer = adam()
    trainer = start(LearningRateMonitor(), [optimizer])
    reads = []

    class Watched(float):
        def __float__(self):
            reads.append(trainer.global_step)
            return 0.25

    optimizer.param_groups[0]["lr"] = Watched()
    for _ in range(25):
        trainer.step()
    assert reads == [9, 19]
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
    for _ in range(5):
        trainer.step()
    assert logged(trainer)[-1] == (29, {"lr-Adam": 0.125})


def test_nobody_to_log_to_is_an_error(make_trainer):
    trainer = make_trainer(LearningRateMonitor())
    with pytest.raises(ConfigError, match="needs a logger"):
        trainer.start()
    trainer.fast_dev_run = True
    trainer.start()


def test_only_rank_0_logs(start):
    trainer = start(LearningRateMonitor(), [adam()])
    trainer.is_global_zero = False
    for _ in range(12):
        trainer.step()
    assert logged(trainer) == []


def test_groups_of_one_name_are_refused(start):
    with pytest.raises(ConfigError, match="share the name a"):
        start(LearningRateMonitor(), [adam(2, name="a")])


def test_a_wrong_interval_is_refused():
    with pytest.raises(ConfigError, match="'steps'"):
        LearningRateMonitor("steps")
    with pytest.raises(ConfigError, match="log_momentum='no'.*True or False"):
        LearningRateMonitor(log_momentum="no")


@pytest.mark.parametrize(
    ("interval", "every", "rows"),
    [
        (None, 2, [0, 1, 3, 4, 5, 7]),
        (None, 3, [0, 2, 4, 5]),
        (None, 50, [0, 4]),
        ("step", 2, [1, 3, 5, 7]),
        ("epoch", 2, [0, 4]),
    ],
)
def test_without_a_scheduler_the_rows_are_lightnings(interval, every, rows):
    """The rows have the steps of Lightning 2.6; without an interval both epochs and steps are logged."""
    recorder = Recorder()
    quiet_trainer(
        max_epochs=2,
        log_every_n_steps=every,
        logger=recorder,
        callbacks=LearningRateMonitor(interval),
        limit_train_batches=4,
    ).fit(Classifier(), loader())
    assert [step for step, values in recorder.rows if "lr-SGD" in values] == rows


def test_what_was_logged_is_there_under_lightning_s_names(tmp_path):
    monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    trainer = quiet_trainer(max_epochs=1, callbacks=monitor, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    trainer.fit(Classifier(), loader(12))
    assert monitor.lrs == {"lr-SGD": [0.1] * 3}
    assert monitor.last_momentum_values == {"lr-SGD-momentum": 0.9}


def test_lightnings_names_are_there_before_the_first_row(tmp_path):
    class Groups(Classifier):
        def configure_optimizers(self):
            first, second = self.net[0].parameters(), self.net[2].parameters()
            return torch.optim.SGD([{"params": first}, {"params": second, "name": "head"}], lr=0.1)

    monitor = LearningRateMonitor("step")
    logger = CSVLogger(tmp_path)
    quiet_trainer(max_epochs=1, callbacks=monitor, logger=logger, log_every_n_steps=50).fit(Groups(), loader(12))
    assert monitor.lrs == {"lr-SGD/pg1": [], "lr-SGD/head": []}
    assert monitor.last_momentum_values == {"lr-SGD/pg1-momentum": None, "lr-SGD/head-momentum": None}
