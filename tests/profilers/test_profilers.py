"""Profilers: their counts, their files, and that they cost a run without a profiler nothing."""

from __future__ import annotations

import functools
import json
import pickle
import pstats
import re
from pathlib import Path

import pytest
import torch

from fabricamp import Callback, ConfigError
from fabricamp.engine.loop import TrainingLoop
from fabricamp.loggers import CSVLogger
from fabricamp.profilers import (
    AdvancedProfiler,
    MemoryProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
)
from fabricamp.profilers.phases import PhaseClock
from fabricamp.tuner import Tuner
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


class Hooked(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pass


class Own(Classifier):
    def training_step(self, batch, batch_idx):
        with self.trainer.profiler.profile("mine"):
            return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        pass


def counts(profiler):
    return {name: len(seconds) for name, seconds in profiler.recorded_durations.items()}


@pytest.mark.parametrize(("precision", "accumulate"), [("O0", 1), ("O1", 2), ("O2", 1), ("bf16-true", 2)])
def test_the_actions_of_a_fit_are_counted_by_lightnings_names(precision, accumulate):
    profiler = SimpleProfiler()
    trainer = quiet_trainer(
        max_epochs=2,
        profiler=profiler,
        callbacks=[Hooked()],
        precision=precision,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=1,
    )
    trainer.fit(Own(), loader(16), loader(8))
    found = counts(profiler)
    assert {name: found[name] for name in found if not name.startswith("[_")} == {
        "run_training_epoch": 2,
        "run_training_batch": 8,
        "mine": 8,
        "[Callback]Hooked.on_train_batch_start": 8,
        "[LightningModule]Own.on_after_backward": 8,
        "[LightningModule]Own.optimizer_step": 8 // accumulate,
        "[Strategy]SingleDeviceStrategy.training_step": 8,
        "[Strategy]SingleDeviceStrategy.backward": 8,
        "[Strategy]SingleDeviceStrategy.validation_step": 5,
    }
    assert found["[_TrainingEpochLoop].train_dataloader_next"] >= 8


def test_the_same_numbers_come_out_with_a_profiler():
    weights = []
    for profiler in (None, "simple", PyTorchProfiler(export_to_chrome=False)):
        module = Own()
        quiet_trainer(max_epochs=2, profiler=profiler, precision="O2").fit(module, loader(16), loader(8))
        weights.append([one.tolist() for one in module.parameters()])
    assert weights[0] == weights[1] == weights[2]


def test_the_table_stands_at_the_end_of_each_run(caplog):
    trainer = quiet_trainer(max_epochs=1, profiler="simple")
    trainer.fit(Classifier(), loader(16))
    lines = caplog.messages
    assert lines[0].startswith("Profile of fit: ")
    assert lines[1].split() == ["action", "mean", "ms", "total", "s", "calls", "%", "of", "the", "time"]
    assert lines[2].startswith("run_training_epoch ")
    batches = next(line.split() for line in lines if line.startswith("run_training_batch "))
    assert batches[3] == "4"
    seconds = trainer.profiler.recorded_durations["run_training_batch"]
    assert float(batches[2]) == pytest.approx(sum(seconds), abs=6e-4)
    trainer.test(Classifier(), loader(16), verbose=False)
    assert "[Strategy]SingleDeviceStrategy.test_step" in caplog.text


def test_the_phases_of_a_batch_stand_behind_the_table():
    profiler = SimpleProfiler(filename="report")
    quiet_trainer(max_epochs=2, profiler=profiler, callbacks=[Hooked()]).fit(Own(), loader(16), loader(8))
    lines = Path("fit-report.txt").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("Training, as the host sees it: "))
    assert lines[at].endswith("ms a batch (mean of 8)")
    assert [line.split()[0] for line in lines[at + 1 :]] == ["data", "host", "forward", "backward", "update"]
    assert min(profiler.phases.breakdown("").seconds.values()) > 0


def test_a_step_by_hand_has_phases_within_it():
    class ByHand(Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.optimizers().step()

    profiler = SimpleProfiler()
    quiet_trainer(max_steps=4, profiler=profiler).fit(ByHand(), loader(16))
    found = profiler.phases.breakdown("").seconds
    assert list(found) == ["data", "host", "forward", "backward", "update"]
    assert min(found.values()) > 0


def exchanged():
    profiler = SimpleProfiler()
    trainer = quiet_trainer(max_steps=4, profiler=profiler, strategy="delayed_ddp", devices="auto")
    trainer.fit(Classifier(), loader(32))
    return list(profiler.phases.breakdown("").seconds)


def test_the_exchange_of_ranks_is_a_phase():
    assert run_ranks(exchanged, 2)[0] == ["data", "host", "forward", "backward", "exchange", "update"]


class Marks:
    """A clock that the test advances."""

    now = 0.0

    def __call__(self):
        return self.now

    def run(self, clock, action, *inner, before=0.0, behind=0.0):
        clock.start(action)
        self.now += before
        for one in inner:
            one()
        self.now += behind
        clock.stop(action)


def test_a_phase_within_another_counts_once_and_what_has_been_can_be_forgotten():
    marks = Marks()
    for graph in (False, True):
        clock = PhaseClock(marks, graph=graph)
        run = functools.partial(marks.run, clock)

        def batch(run=run):
            run("[_TrainingEpochLoop].train_dataloader_next", before=1)
            run(
                "run_training_batch",
                lambda: run("[Strategy]DDP.training_step", before=2),
                lambda: run("[Strategy]DDP.backward", lambda: run("[Callback]X.backward", before=1), before=3),
                lambda: run(
                    "[LightningModule]X.optimizer_step",
                    lambda: run("[Strategy]DDP.reduce_gradients", before=5),
                    before=7,
                ),
                before=11,
            )

        run(
            "run_training_epoch",
            batch,
            clock.restart,
            batch,
            batch,
            lambda: run("[_EvaluationLoop].run", lambda: run("[_EvaluationLoop].val_next", before=100), before=100),
            before=50,
            behind=26,
        )
        found = clock.breakdown("it")
        expected = {"data": 1, "host": 24, "forward": 2, "backward": 4, "exchange": 5, "update": 7}
        assert found == ("it", {"data": 1, "host": 13, "graph": 29} if graph else expected, 2)
    assert PhaseClock(marks).breakdown("nothing") is None


def test_a_report_in_a_file_of_the_logs():
    profiler = SimpleProfiler(filename="report", extended=False)
    trainer = quiet_trainer(max_epochs=1, profiler=profiler, logger=CSVLogger("logs"))
    trainer.fit(Classifier(), loader(16))
    trainer.predict(Classifier(), loader(16))
    head = Path(trainer.log_dir, "fit-report.txt").read_text().splitlines()[1]
    assert head.split() == ["action", "mean", "ms", "total", "s"]
    assert Path(profiler.dirpath, "predict-report.txt").exists()


def test_nothing_is_wrapped_without_one(monkeypatch):
    seen = []
    run = TrainingLoop.run

    def noted(self):
        seen.append((set(vars(self)), set(vars(self.update)), "behind" in vars(self.parts.feed), self._batch_start[0]))
        run(self)

    monkeypatch.setattr(TrainingLoop, "run", noted)
    for profiler in (None, PassThroughProfiler(), "simple"):
        trainer = quiet_trainer(max_steps=1, callbacks=[Hooked()], profiler=profiler)
        trainer.fit(Classifier(), loader())
        assert isinstance(trainer.profiler, SimpleProfiler if profiler == "simple" else PassThroughProfiler)
    for names, update, feed, hook in seen[:2]:
        assert "_run_epoch" not in names
        assert not {"run_batch", "use", "launch_update"} & update
        assert not feed
        assert hook.func.__self__.__class__ is Hooked
    assert "_run_epoch" in seen[2][0]
    assert {"run_batch", "use"} <= seen[2][1]


def test_a_profiler_of_ones_own_and_a_failing_run():
    class Mine(Profiler):
        def __init__(self):
            super().__init__()
            self.said = []

        def setup(self, stage, local_rank=None, log_dir=None):
            self.said.append((stage, local_rank))

        def start(self, action_name):
            self.said.append(action_name)

        def stop(self, action_name):
            self.said.append(f"/{action_name}")

        def teardown(self, stage):
            self.said.append("torn down")

    class Fails(Classifier):
        def on_after_backward(self):
            raise ZeroDivisionError

    profiler = Mine()
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(max_steps=1, profiler=profiler).fit(Fails(), loader())
    assert profiler.said[0] == ("fit", None)
    assert profiler.said[-3:] == ["/run_training_batch", "/run_training_epoch", "torn down"]
    opened = [one for one in profiler.said[1:-1] if not one.startswith("/")]
    assert sorted(opened) == sorted(one[1:] for one in profiler.said[1:-1] if one.startswith("/"))


def test_an_action_within_itself_and_one_that_was_not_started():
    profiler = SimpleProfiler()
    with pytest.raises(ConfigError, match="'a' is started within itself"), profiler.profile("a"), profiler.profile("a"):
        pass
    with pytest.raises(ConfigError, match="'b' is stopped and was not started"):
        profiler.stop("b")


def trace(folder):
    (file,) = Path(folder).glob("*.pt.trace.json")
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"] if "name" in event]
    return file.name, names


def test_the_trace_of_a_window_of_steps(caplog):
    trainer = quiet_trainer(max_epochs=2, profiler="pytorch", default_root_dir="run")
    trainer.fit(Classifier(), loader(32), loader(8))
    name, names = trace("run")
    assert name == "fit-trace.0.pt.trace.json"
    assert sum(one == "run_training_batch" for one in names) == 3
    assert any(one == "[module] net.2: Linear" for one in names)
    assert "aten::addmm" in names
    # The table has the twenty longest rows; on a busy machine any operation may be shorter, but not the batch that contains all.
    batches = next(line for line in caplog.messages if line.strip().startswith("run_training_batch "))
    assert batches.split()[-1] == "3"
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in trainer.model.modules())


def test_the_trace_of_a_window_that_was_chosen():
    profiler = PyTorchProfiler(
        "traces",
        "operations",
        row_limit=3,
        record_module_names=False,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=2),
        sort_by_key="count",
    )
    assert profiler.function_events is None
    quiet_trainer(max_epochs=1, profiler=profiler, precision="O1").fit(Classifier(), loader(32))
    assert "aten::addmm" in {event.name for event in profiler.function_events}
    assert profiler.__getstate__()["function_events"] is None
    files = sorted(path.name for path in Path("traces").iterdir())
    assert files == ["fit-operations.txt", "fit-trace.0.pt.trace.json", "fit-trace.1.pt.trace.json"]
    table = [line for line in Path("traces/fit-operations.txt").read_text().splitlines() if not line.startswith("-")]
    assert "# of Calls" in table[0]
    assert len(table) == 1 + 3 + 1


def test_a_whole_run_and_one_too_short_for_the_window(caplog):
    trainer = quiet_trainer(profiler=PyTorchProfiler("traces", schedule=None), max_steps=2)
    trainer.fit(Classifier(), loader())
    assert sum(one == "run_training_batch" for one in trace("traces")[1]) == 2
    caplog.clear()
    quiet_trainer(profiler=PyTorchProfiler("short"), max_steps=1).fit(Classifier(), loader())
    assert "recorded no step" in caplog.text


@pytest.mark.parametrize(
    ("profiler", "words"),
    [
        ("simpel", "did you mean 'simple'"),
        (3, "profiler=3 is not known"),
        (SimpleProfiler, "derives from fabricamp.profilers.Profiler"),
    ],
)
def test_what_is_no_profiler_is_refused(profiler, words):
    with pytest.raises(ConfigError, match=words):
        quiet_trainer(profiler=profiler)


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'cpu_time_total'"):
        PyTorchProfiler(sort_by_key="cpu_time_totals")
    with pytest.raises(ConfigError, match="is not a function"):
        PyTorchProfiler(schedule=3)
    with pytest.raises(ConfigError, match="no argument 'profil_memory'; did you mean 'profile_memory'"):
        PyTorchProfiler(profil_memory=True)


def test_a_search_is_not_counted():
    profiler = SimpleProfiler()
    trainer = quiet_trainer(max_steps=2, profiler=profiler)
    Tuner(trainer).lr_find(Classifier(), loader(), num_training=3)
    assert profiler.recorded_durations == {}
    assert trainer.profiler is profiler


def test_a_memory_of_a_gpu_is_refused_where_there_is_none():
    for profiler in ("memory", MemoryProfiler(active=None)):
        with pytest.raises(
            ConfigError, match=r"runs on 'cpu'; give accelerator='gpu', or PyTorchProfiler\(profile_memory"
        ):
            quiet_trainer(profiler=profiler)
    for wrong in ({"wait": -1}, {"active": 0}, {"max_entries": True}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.* is not allowed"):
            MemoryProfiler(**wrong)


def test_what_ends_a_run_is_told_where_the_profiler_fails_too():
    class Full(SimpleProfiler):
        def teardown(self, stage):
            raise OSError("no space left")

    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user") as caught:
        quiet_trainer(profiler=Full()).fit(Fails(), loader())
    assert "ending the profiler failed too: OSError: no space left" in caught.value.__notes__


def on_two_ranks():
    quiet_trainer(max_epochs=1, devices="auto", strategy="ddp", profiler=SimpleProfiler("reports", "report")).fit(
        Classifier(), loader(16)
    )
    profiler = SimpleProfiler()
    trainer = quiet_trainer(max_epochs=1, devices="auto", strategy="delayed_ddp", precision="O1", profiler=profiler)
    trainer.fit(Classifier(), loader(16))
    return counts(profiler)["run_training_batch"]


def test_each_rank_has_its_report():
    assert run_ranks(on_two_ranks, 2) == [2, 2]
    assert sorted(path.name for path in Path("reports").iterdir()) == ["fit-report-0.txt", "fit-report-1.txt"]


def slow_function():
    return sum(range(1000))


class Slow(Own):
    def training_step(self, batch, batch_idx):
        slow_function()
        return super().training_step(batch, batch_idx)


def test_functions_of_each_action(tmp_path):
    profiler = AdvancedProfiler(tmp_path, "report", line_count_restriction=200, dump_stats=True)
    quiet_trainer(max_epochs=1, profiler=profiler).fit(Slow(), loader(16))
    text = (tmp_path / "fit-report.txt").read_text()
    tables = {part.splitlines()[0]: part for part in re.split(r"\n\n(?=\S)", text) if "function calls" in part}
    (name,) = [one for one in tables if one.endswith(".training_step")]
    assert re.search(r"\n +4 .*\(slow_function\)", tables[name])
    assert "slow_function" not in tables["run_training_epoch"]  # counted once, where it was called
    file = re.sub(r"[^\w.-]+", "_", name)
    dumped = pstats.Stats(str(tmp_path / f"fit-{file}.prof"))
    assert any(function[2] == "slow_function" for function in dumped.stats)
    assert profiler.profiled_actions == {}


def test_an_advanced_profiler_by_name_and_out_of_order(caplog):
    caplog.set_level("INFO")
    trainer = quiet_trainer(max_steps=1, profiler="advanced")
    trainer.fit(Own(), loader(4))
    assert "run_training_batch" in caplog.text
    profiler = pickle.loads(pickle.dumps(AdvancedProfiler(line_count_restriction=3)))
    for action in ("outer", "inner"):
        profiler.start(action)
    for action in ("outer", "inner"):
        profiler.stop(action)
    with pytest.raises(ConfigError, match="'inner' is stopped and was not started"):
        profiler.stop("inner")
    assert {"outer", "inner"} <= {line.strip() for line in profiler.summary().splitlines()}
