"""DeviceStatsMonitor: names, steps and hooks of its rows, requirements and cost."""

from __future__ import annotations

import importlib.util
import sys

import psutil
import pytest
import torch

from fabricamp.callbacks import DeviceStatsMonitor, device_stats_monitor
from fabricamp.errors import ConfigError
from fabricamp.loggers import Logger
from tests.small import Classifier, loader, quiet_trainer

CPU = ("cpu_percent", "cpu_swap_percent", "cpu_vm_percent")


class Recorder(Logger):
    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step):
        found = {name: value for name, value in metrics.items() if "DeviceStatsMonitor" in name}
        if found:
            self.rows.append((step, found))


class Evaluated(Classifier):
    def test_step(self, batch, batch_idx):
        pass


def trainer_with(monitor, **options):
    recorder = Recorder()
    return recorder, quiet_trainer(**{"logger": recorder, "callbacks": [monitor], "log_every_n_steps": 3, **options})


def moments(recorder):
    """Returns step and hook of each row so far, and clears the rows."""
    rows, recorder.rows = recorder.rows, []
    for _, values in rows:
        hooks = {name.split("/")[0] for name in values}
        assert len(hooks) == 1
        assert sorted(name.split("/")[1] for name in values) == list(CPU)
        assert all(0.0 <= value <= 100.0 * (psutil.cpu_count() or 1) for value in values.values())
    return [(step, next(iter(values)).split("/")[0].removeprefix("DeviceStatsMonitor.on_")) for step, values in rows]


def pair(step, stage):
    return [(step, f"{stage}_batch_start"), (step, f"{stage}_batch_end")]


def test_moments_are_lightnings():
    """Compares with the rows of Lightning 2.6.0 for 8 training and 4 validation batches an epoch."""
    recorder, trainer = trainer_with(DeviceStatsMonitor(), max_epochs=2, num_sanity_val_steps=3)
    module = Evaluated()
    trainer.fit(module, loader(32), loader(16))
    assert moments(recorder) == [
        *pair(0, "validation"),
        *pair(2, "train"),
        *pair(5, "train"),
        *pair(7, "validation"),
        *pair(8, "train"),
        *pair(11, "train"),
        *pair(14, "train"),
        *pair(15, "validation"),
    ]
    trainer.validate(module, loader(16), verbose=False)
    assert moments(recorder) == pair(16, "validation")
    trainer.test(module, loader(16), verbose=False)
    assert moments(recorder) == pair(16, "test")


def test_each_batch_of_a_logged_step():
    recorder, trainer = trainer_with(
        DeviceStatsMonitor(), max_epochs=1, accumulate_grad_batches=2, num_sanity_val_steps=0
    )
    trainer.fit(Evaluated(), loader(32), loader(16))
    assert moments(recorder) == [*pair(2, "train"), *pair(2, "train"), *pair(3, "validation")]


def test_other_steps_ask_nothing(monkeypatch):
    asked = []
    real = device_stats_monitor.read_cpu
    monkeypatch.setattr(device_stats_monitor, "read_cpu", lambda: asked.append(1) or real())
    recorder, trainer = trainer_with(DeviceStatsMonitor(), max_steps=8)
    trainer.fit(Classifier(), loader())
    assert len(asked) == 1 + len(recorder.rows) == 5  # one more: psutil needs a first call to measure from
    recorder, trainer = trainer_with(DeviceStatsMonitor(cpu_stats=False), max_steps=8)
    trainer.fit(Classifier(), loader())
    assert recorder.rows == []
    assert len(asked) == 5


def test_a_gpu_has_the_allocators_numbers_by_their_names():
    made_up = {"allocated_bytes.all.current": 512, "num_ooms": 0}
    assert device_stats_monitor.named(made_up, "DeviceStatsMonitor", "on_train_batch_end") == {
        "DeviceStatsMonitor.on_train_batch_end/allocated_bytes.all.current": 512,
        "DeviceStatsMonitor.on_train_batch_end/num_ooms": 0,
    }
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert [device_stats_monitor.wants_cpu(gpu, one) for one in (None, True, False)] == [False, True, False]
    assert [device_stats_monitor.wants_cpu(cpu, one) for one in (None, True, False)] == [True, True, False]


@pytest.mark.gpu
def test_on_a_gpu():
    recorder, trainer = trainer_with(DeviceStatsMonitor(cpu_stats=True), accelerator="gpu", max_steps=3)
    trainer.fit(Classifier(), loader())
    assert [step for step, _ in recorder.rows] == [2, 2]
    for _, values in recorder.rows:
        names = {name.split("/")[1] for name in values}
        assert names == {*torch.cuda.memory_stats(), *CPU}
    assert recorder.rows[0][1]["DeviceStatsMonitor.on_train_batch_start/allocated_bytes.all.current"] > 0


def test_a_subclass_has_its_own_name():
    class Mine(DeviceStatsMonitor):
        pass

    recorder, trainer = trainer_with(Mine(), max_steps=3)
    seen = []
    recorder.log_metrics = lambda metrics, step: seen.extend(metrics)
    trainer.fit(Classifier(), loader())
    assert any(name.endswith("Mine.on_train_batch_end/cpu_percent") for name in seen)


def without_psutil(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "psutil" else real(name, *rest)
    )
    monkeypatch.setitem(sys.modules, "psutil", None)  # makes its import fail


def test_psutil_is_asked_for_where_it_is_needed(monkeypatch):
    without_psutil(monkeypatch)
    _, trainer = trainer_with(DeviceStatsMonitor(), max_steps=3)
    with pytest.raises(ConfigError, match=r"DeviceStatsMonitor\(cpu_stats=None\).*psutil.*pip install psutil, or give"):
        trainer.fit(Classifier(), loader())
    _, trainer = trainer_with(DeviceStatsMonitor(), max_steps=3)
    assert len(trainer.predict(Classifier(), loader())) == 8
    recorder, trainer = trainer_with(DeviceStatsMonitor(cpu_stats=False), max_steps=3)
    trainer.fit(Classifier(), loader())
    assert recorder.rows == []


def test_a_logger_is_asked_for():
    _, trainer = trainer_with(DeviceStatsMonitor(), logger=False, max_steps=3)
    with pytest.raises(ConfigError, match="DeviceStatsMonitor needs a logger"):
        trainer.fit(Classifier(), loader())
    assert trainer.test(Evaluated(), loader(), verbose=False) == [{}]
    _, trainer = trainer_with(DeviceStatsMonitor(), logger=False, fast_dev_run=True)
    trainer.fit(Classifier(), loader())


def test_another_argument_is_refused():
    with pytest.raises(ConfigError, match="DeviceStatsMonitor has no argument 'gpu_stats'; did you mean 'cpu_stats'"):
        DeviceStatsMonitor(gpu_stats=True)
