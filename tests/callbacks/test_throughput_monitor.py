"""ThroughputMonitor: its values under a known clock, its counts, and that the host never waits."""

from __future__ import annotations

import math

import pytest
import torch

from fabricamp import Callback, ConfigError, CudaGraph
from fabricamp.callbacks import ThroughputMonitor, throughput_monitor
from fabricamp.callbacks.throughput_monitor import peak_flops
from fabricamp.loggers import Logger
from fabricamp.torch_private import dispatch_modes
from tests.distributed.ranks import run_ranks
from tests.inside import captured_groups, graph_update
from tests.loop.test_cuda_graph_steps import Together
from tests.small import QUIET, Classifier, Trainer, loader, quiet_trainer

FLOPS = 2 * 4 * 8 * 16 * 2 + 2 * 4 * 16 * 3 * 3
"""FLOPs of one batch of four; the first layer's input needs no gradient."""


class Recorder(Logger):
    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step):
        found = {name: value for name, value in metrics.items() if name.startswith("train")}
        if found:
            self.rows.append((step, found))


class Clock:
    """A clock that only the test advances."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(throughput_monitor.time, "perf_counter", lambda: self.now)

    def batches(self, seconds, count=12):
        for _ in range(count):
            self.now += seconds
            yield torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)


def passing(clock, seconds, validation=0.0):
    class Passing(Classifier):
        def training_step(self, batch, batch_idx):
            clock.now += seconds[batch_idx % len(seconds)]
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            clock.now += validation

    return Passing()


def fit(monitor, module, batches, *others, **options):
    recorder = Recorder()
    quiet = {"logger": recorder, "max_epochs": 1, "log_every_n_steps": 5, "num_sanity_val_steps": 0}
    quiet_trainer(**{**quiet, **options}, callbacks=[monitor]).fit(module, batches, *others)
    return recorder.rows


def test_every_value(monkeypatch):
    clock = Clock(monkeypatch)
    monitor = ThroughputMonitor(length_fn=lambda batch: batch[0].numel(), available_flops=1e5)
    module = passing(clock, [1.0, 1.0, 5.0, 1.0])  # the first batch's FLOPs are counted, so it is not timed
    rows = fit(monitor, module, list(clock.batches(0.0)))
    assert [step for step, _ in rows] == [4, 9]
    assert rows[0][1] == pytest.approx(
        {
            "train/device/batches_per_sec": 4 / 8,
            "train/device/samples_per_sec": 16 / 8,
            "train/device/items_per_sec": 128 / 8,
            "train/device/flops_per_sec": FLOPS / 2,
            "train/device/mfu": FLOPS / 2 / 1e5,
            "train/step_ms_p50": 1e3,
            "train/step_ms_p90": 5e3,
            "train/step_ms_p99": 5e3,
            "train/data_share": 0.0,
        }
    )
    assert rows[1][1]["train/device/samples_per_sec"] == 36 / 17


@pytest.mark.parametrize("renewed", [0, 1])
def test_waiting_for_data_and_validation(renewed, monkeypatch):
    clock = Clock(monkeypatch)
    batches = type("Slow", (), {"__iter__": lambda _: clock.batches(3.0), "__len__": lambda _: 12})()
    rows = fit(
        ThroughputMonitor(window_size=4),
        passing(clock, [1.0], validation=1000.0),
        batches,
        loader(8),
        val_check_interval=3,
        reload_dataloaders_every_n_epochs=renewed,
        max_epochs=2,
    )
    assert len(rows) == 4
    for _, values in rows:
        assert values["train/data_share"] == 0.75
        assert values["train/step_ms_p99"] == 4e3
        assert values["train/device/samples_per_sec"] == 1.0
        assert "train/device/items_per_sec" not in values
        assert "train/device/mfu" not in values


def test_a_loader_that_an_epoch_is_given_anew_is_looked_at_once(monkeypatch):
    clock = Clock(monkeypatch)
    batches = type("Slow", (), {"__iter__": lambda _: clock.batches(3.0), "__len__": lambda _: 12})()
    module, last = passing(clock, [1.0]), []
    module.train_dataloader = lambda: batches
    module.on_train_batch_end = lambda *_: last.append(module.trainer.is_last_batch)
    rows = fit(ThroughputMonitor(window_size=4), module, None, reload_dataloaders_every_n_epochs=1, max_epochs=3)
    assert [values["train/data_share"] for _, values in rows] == [0.75] * 7
    assert last == ([False] * 11 + [True]) * 3


def test_a_step_has_the_micro_batches_of_its_window(monkeypatch):
    clock = Clock(monkeypatch)
    monitor = ThroughputMonitor(separator="|")
    rows = fit(monitor, passing(clock, [1.0]), list(clock.batches(0.0)), accumulate_grad_batches=3, log_every_n_steps=2)
    assert [step for step, _ in rows] == [1, 3]
    assert rows[1][1]["train|step_ms_p50"] == 3e3
    assert rows[1][1]["train|device|samples_per_sec"] == 4.0
    assert rows[1][1]["train|device|flops_per_sec"] == FLOPS
    assert monitor.flops_per_batch == FLOPS


def test_steps_of_a_launch_are_timed_together_and_are_equally_long(monkeypatch):
    """The device's time of a launch is known at its end; after each of its steps the host only records an event."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr("fabricamp.engine.session.Update", Together)  # launches of four

    def logged(window):
        module = passing(clock, [1.0, 1.0, 5.0, 1.0, 3.0, 3.0, 3.0, 3.0, 4.0, 4.0])
        module.flops_per_batch = 100
        rows = fit(ThroughputMonitor(window_size=window), module, list(clock.batches(0.0, 10)), log_every_n_steps=4)
        names = ("device/batches_per_sec", "step_ms_p50", "step_ms_p90", "device/flops_per_sec")
        return [step for step, _ in rows], [[values[f"train/{name}"] for name in names] for _, values in rows]

    steps, values = logged(window=4)
    assert steps == [3, 7]
    assert values == [[4 / 8, 2e3, 2e3, 50], [4 / 12, 3e3, 3e3, 100 * (4 / 12)]]
    assert logged(window=5)[1][1] == [8 / 20, 2e3, 3e3, 40]


def test_a_module_may_know_its_flops(monkeypatch):
    clock = Clock(monkeypatch)
    module = passing(clock, [2.0])
    module.flops_per_batch = 100
    rows = fit(ThroughputMonitor(batch_size_fn=lambda batch: 7), module, list(clock.batches(0.0)))
    assert rows[0][1]["train/device/flops_per_sec"] == 50
    assert rows[0][1]["train/device/samples_per_sec"] == 3.5


def test_a_number_before_the_samples_is_no_sample(monkeypatch):
    clock = Clock(monkeypatch)
    batches = [{"temperature": torch.tensor(2.0), "samples": batch} for batch in clock.batches(0.0)]

    class Reads(Classifier):
        def training_step(self, batch, batch_idx):
            clock.now += 1.0
            return super().training_step(batch["samples"], batch_idx)

    rows = fit(ThroughputMonitor(), Reads(), batches)
    assert rows[0][1]["train/device/samples_per_sec"] == 4


def test_counting_leaves_the_bits():
    modules = [Classifier(), Classifier()]
    fit(ThroughputMonitor(), modules[0], loader())
    fit(Callback(), modules[1], loader())
    assert all(map(torch.equal, *(list(one.parameters()) for one in modules)))


def test_counting_ends_with_a_batch_that_fails_or_is_left_out():
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            raise ValueError

    with pytest.raises(ValueError):
        fit(ThroughputMonitor(), Fails(), loader())
    assert dispatch_modes() == 0

    class Skips(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    fit(ThroughputMonitor(), Skips(), loader())
    assert dispatch_modes() == 0


REFUSED = {
    "a tensor": (lambda: ThroughputMonitor(batch_size_fn=lambda batch: batch[0].sum()), "returned a Tensor"),
    "no function": (lambda: ThroughputMonitor(batch_size_fn="len"), "batch_size_fn='len'.: give a function of a batch"),
    "items": (lambda: ThroughputMonitor(length_fn=lambda batch: 1.5), r"length_fn=...\) returned a float"),
    "window": (lambda: ThroughputMonitor(window_size=0), "window_size=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case):
    make, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        fit(make(), Classifier(), loader())


def test_it_needs_a_logger_and_a_tensor():
    with pytest.raises(ConfigError, match="needs a logger"):
        quiet_trainer(max_epochs=1, callbacks=[ThroughputMonitor()]).fit(Classifier(), loader())

    class Words(Classifier):
        def training_step(self, batch, batch_idx):
            return self.net(torch.zeros(4, 8)).sum()

    with pytest.raises(ConfigError, match="finds no tensor in a batch that is a str"):
        fit(ThroughputMonitor(), Words(), ["a", "b"])


def test_peaks_are_those_of_cards(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 PCIe")
    before = torch.get_float32_matmul_precision()
    try:
        for precision, expected in (("highest", 51e12), ("high", 378e12)):
            torch.set_float32_matmul_precision(precision)
            assert peak_flops(device, torch.float32) == expected
    finally:
        torch.set_float32_matmul_precision(before)
    assert peak_flops(device, torch.bfloat16) == 756e12
    assert peak_flops(device, torch.float64) is None
    assert peak_flops(torch.device("cpu"), torch.float32) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Another Card")
    assert peak_flops(device, torch.float16) is None


def of_two_ranks():
    return fit(ThroughputMonitor(), Classifier(), loader(64), strategy="ddp", devices="auto")


def test_two_ranks_do_twice_as_much():
    rows, none = run_ranks(of_two_ranks, 2)
    assert none == []
    for _, values in rows:
        assert values["train/samples_per_sec"] == 2 * values["train/device/samples_per_sec"]
        assert values["train/device/flops_per_sec"] > 0


class Waits(Callback):
    """Makes each wait for the GPU an error from step 40 on; records whether steps are launched together."""

    launches = 0

    def holds_at(self, global_step):
        return math.inf

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("error" if trainer.global_step >= 40 else "default")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        groups = captured_groups(graph_update(trainer))
        self.launches = max(self.launches, sum(one.replays for one in groups.values()))

    def on_train_end(self, trainer, module):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("graph", [False, True, CudaGraph(steps=10)])
def test_on_a_gpu_steps_are_timed_without_a_wait(graph):
    from fabricamp.optimizers import FusedSGD

    class Slow(Classifier):
        def training_step(self, batch, batch_idx):
            torch.cuda._sleep(20_000_000)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return FusedSGD(self.parameters(), lr=0.1)

    recorder, waits = Recorder(), Waits()
    given = {**QUIET, "accelerator": "gpu", "logger": recorder, "max_steps": 100, "max_epochs": -1}
    trainer = Trainer(**given, callbacks=[waits, ThroughputMonitor()], log_every_n_steps=20, cuda_graph=graph)
    try:
        trainer.fit(Slow(), loader(400))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits.launches == (8 if isinstance(graph, CudaGraph) else 0)
    _, values = recorder.rows[-1]
    assert 5.0 < values["train/step_ms_p50"] < 60.0
    assert 0.5 < values["train/device/batches_per_sec"] * values["train/step_ms_p50"] / 1e3 < 2.0
    assert values["train/memory/peak_bytes"] > 0
    assert values["train/memory/reserved_bytes"] > 0
    assert values["train/device/flops_per_sec"] > 0
