"""self.log in one process: names, values, cadences, errors."""

import dataclasses
import math
import warnings
import weakref
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.metrics import Metrics, exchange
from fabricamp.metrics.slots import MetricTable
from fabricamp.state import RunningStage, RunState, Scope, TrainerFn
from fabricamp.strategies.base import Strategy
from tests.metrics.log_calls import log


class Run:
    """A Metrics with the loop's state, and the values that the loggers got."""

    def __init__(self, scope=Scope.TRAIN_STEP, stage=RunningStage.TRAINING, batch=None):
        self.state = RunState()
        self.state.begin(TrainerFn.FITTING)
        self.state.stage, self.state.scope, self.state.batch = stage, scope, batch
        self.metrics = Metrics(self.state, Strategy())
        self.sunk = []
        self.metrics.sinks.append(lambda values, step: self.sunk.append((dict(values), step)))

    def log(self, *args, **kwargs):
        log(self.metrics, *args, **kwargs)


@pytest.fixture
def run():
    return Run(batch=torch.zeros(4, 2))


def plain(metrics):
    return dict(metrics.reduced)


# -- cadences and names ------------------------------------------------------------------------------------------------------


def test_a_training_step_logs_for_steps_by_default_and_a_flush_delivers_the_latest_value(run):
    for value in (1.0, 2.0, 3.0):
        run.log("loss", torch.tensor(value))
    assert run.metrics.logged == {}
    run.metrics.flush(50)
    assert run.sunk == [({"loss": 3.0}, 50)]
    assert run.metrics.logged == {"loss": 3.0}
    assert plain(run.metrics) == {"loss": 3.0}
    assert run.metrics.progress_bar_metrics == {}
    assert run.metrics.end_train_epoch(50) == {}


def test_a_flush_delivers_what_is_new_only(run):
    run.log("a", torch.tensor(1.0))
    run.log("b", 7)
    run.metrics.flush(1)
    run.metrics.flush(2)
    run.log("b", 8)
    run.metrics.flush(3)
    assert run.sunk == [({"a": 1.0, "b": 7.0}, 1), ({"b": 8.0}, 3)]
    assert run.metrics.logged == {"a": 1.0, "b": 8.0}


def test_both_cadences_fork_the_name_and_the_plain_key_is_the_last_published(run):
    run.log("x", torch.tensor(2.0), on_step=True, on_epoch=True, prog_bar=True)
    run.log("x", torch.tensor(4.0), on_step=True, on_epoch=True, prog_bar=True)
    run.metrics.flush(2)
    assert plain(run.metrics) == {"x": 4.0, "x_step": 4.0}
    assert run.metrics.progress_bar_metrics == {"x_step": 4.0}
    assert run.metrics.end_train_epoch(3) == {"x_epoch": 3.0}
    assert plain(run.metrics) == {"x": 3.0, "x_step": 4.0, "x_epoch": 3.0}
    assert run.metrics.progress_bar_metrics == {"x_step": 4.0, "x_epoch": 3.0}
    assert run.sunk == [({"x_step": 4.0}, 2), ({"x_epoch": 3.0}, 3)]


def test_logger_false_keeps_a_value_from_the_loggers_only(run):
    run.log("x", 1.0, logger=False, prog_bar=True)
    run.log("y", 1.0, logger=None)
    run.metrics.flush(1)
    assert run.sunk == [({"y": 1.0}, 1)]
    assert run.metrics.progress_bar_metrics == {"x": 1.0}
    assert set(run.metrics.callback_metrics()) == {"x", "y"}


def test_step_values_of_an_epoch_too_short_for_a_flush_can_be_monitored_and_are_flushed_later(run):
    run.log("loss", torch.tensor(5.0))
    assert run.metrics.end_train_epoch(3) == {}
    assert plain(run.metrics) == {"loss": 5.0}
    assert run.sunk == []
    run.metrics.flush(4)
    assert run.sunk == [({"loss": 5.0}, 4)]


def test_evaluation_logs_for_the_epoch_by_default_and_starts_anew(run):
    run.state.scope = Scope.EVAL_STEP
    for expected in (2.0, 20.0):
        run.metrics.clear_evaluation()
        run.log("acc", torch.tensor(expected - 1))
        run.log("acc", torch.tensor(expected + 1))
        run.metrics.flush(1)
        assert run.metrics.end_evaluation(7) == {"acc": expected}
        assert run.sunk.pop() == ({"acc": expected}, 7)
        assert plain(run.metrics) == {"acc": expected}
    run.log("acc", torch.tensor(99.0))
    run.metrics.clear_evaluation()
    assert run.metrics.end_evaluation(7) == {}
    assert run.metrics.evaluation_results(1) == [{}]


def test_evaluation_with_both_cadences_publishes_the_last_step_value_at_its_end(run):
    run.state.scope = Scope.EVAL_STEP
    run.log("acc", torch.tensor(1.0), on_step=True, on_epoch=True)
    run.log("acc", torch.tensor(3.0), on_step=True, on_epoch=True)
    assert run.metrics.end_evaluation(9) == {"acc_step": 3.0, "acc_epoch": 2.0}
    assert plain(run.metrics) == {"acc": 2.0, "acc_epoch": 2.0}


def test_each_of_several_dataloaders_has_keys_of_its_own(run):
    run.state.scope, run.state.num_dataloaders = Scope.EVAL_STEP, 2
    for _ in range(2):
        run.metrics.clear_evaluation()
        for index in range(2):
            run.state.dataloader_idx = index
            for _ in range(2):
                run.log("acc", torch.tensor(float(index)))
                run.log("both", float(index), on_step=True)
                run.log(f"own{index}", 5.0, add_dataloader_idx=False)
        run.state.scope = Scope.EVAL_EPOCH
        run.log("total", 1.0)
        values = run.metrics.end_evaluation(1)
        run.state.scope = Scope.EVAL_STEP
        own = [
            {f"acc/dataloader_idx_{index}": float(index)}
            | {f"both_{fork}/dataloader_idx_{index}": float(index) for fork in ("step", "epoch")}
            for index in range(2)
        ]
        for index in range(2):
            own[index] |= {f"own{index}": 5.0}
        assert values == own[0] | own[1] | {"total": 1.0}
        assert run.metrics.evaluation_results(2) == [own[0] | {"total": 1.0}, own[1] | {"total": 1.0}]


def test_a_name_may_be_of_another_dataloader_in_the_next_evaluation(run):
    run.state.scope, run.state.num_dataloaders = Scope.EVAL_STEP, 2
    for index in (0, 1, 0):
        run.metrics.clear_evaluation()
        run.state.dataloader_idx = index
        run.log("hard", 2.0, on_step=True, on_epoch=True, add_dataloader_idx=False)
        run.metrics.end_evaluation(1)
        expected = [{}, {}]
        expected[index] = {"hard_step": 2.0, "hard_epoch": 2.0}
        assert run.metrics.evaluation_results(2) == expected


def test_one_key_from_two_dataloaders_is_an_error(run):
    run.state.scope, run.state.num_dataloaders = Scope.EVAL_STEP, 2
    run.log("acc", 1.0, add_dataloader_idx=False)
    run.state.dataloader_idx = 1
    with pytest.raises(ConfigError, match="dataloaders 0 and 1"):
        run.log("acc", 1.0, add_dataloader_idx=False)


def test_the_sanity_check_shows_callbacks_its_values_and_leaves_nothing(run):
    run.state.stage, run.state.scope = RunningStage.SANITY_CHECKING, Scope.EVAL_STEP
    run.log("acc", torch.tensor(100.0), prog_bar=True)
    assert run.metrics.end_evaluation(0) == {}
    assert run.metrics.callback_metrics() == {"acc": 100.0}
    run.metrics.forget()
    assert (run.sunk, plain(run.metrics), run.metrics.progress_bar_metrics) == ([], {}, {})
    assert (run.metrics.callback_metrics(), run.metrics.logged_metrics()) == ({}, {})
    run.state.stage = RunningStage.TRAINING
    run.metrics.clear_evaluation()
    run.log("acc", torch.tensor(1.0), prog_bar=True)
    assert run.metrics.end_evaluation(0) == {"acc": 1.0}


def test_training_and_evaluation_may_use_one_name_and_hooks_another_cadence(run):
    run.log("loss", torch.tensor(1.0))
    run.state.scope = Scope.EVAL_STEP
    run.log("loss", torch.tensor(2.0))
    assert run.metrics.end_evaluation(1) == {"loss": 2.0}
    run.state.scope = Scope.TRAIN_EPOCH
    run.log("loss", torch.tensor(3.0))
    assert run.metrics.end_train_epoch(1) == {"loss": 3.0}


def test_muted_keeps_nothing(run):
    run.log("loss", 1.0)
    run.metrics.muted = True
    run.log("loss", 2.0)
    run.metrics.muted = False
    run.metrics.flush(1)
    assert run.metrics.logged == {"loss": 1.0}


# -- values ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(-1e6, 1e6, width=32),
            st.integers(1, 300),
            st.sampled_from(["float32", "float64", "bfloat16", "number"]),
        ),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from(["mean", "sum", "min", "max"]),
)
def test_epoch_values_are_those_of_fp64_arithmetic(entries, mode):
    run = Run()
    seen, weights = [], []
    for value, weight, kind in entries:
        logged = value if kind == "number" else torch.tensor(value, dtype=getattr(torch, kind))
        seen.append(float(logged))
        weights.append(weight)
        run.log("x", logged, on_step=False, on_epoch=True, reduce_fx=mode, batch_size=weight)
    expected = {
        "mean": math.fsum(value * weight for value, weight in zip(seen, weights, strict=True)) / sum(weights),
        "sum": math.fsum(seen),
        "min": min(seen),
        "max": max(seen),
    }[mode]
    assert run.metrics.end_train_epoch(1)["x"] == pytest.approx(expected, rel=1e-12, abs=1e-8)


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(1, 64)), min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_counts_are_exact(entries):
    run = Run()
    for correct, size in entries:
        run.log("correct", torch.tensor(correct), on_step=False, on_epoch=True, reduce_fx="sum", batch_size=size)
        run.log("big", torch.tensor(2**40 + correct), on_step=False, on_epoch=True, reduce_fx=torch.sum)
    values = run.metrics.end_train_epoch(1)
    assert values["correct"] == sum(correct for correct, _ in entries)
    assert values["big"] == sum(2**40 + correct for correct, _ in entries)


KINDS = {
    "int": int,
    "float": float,
    "int32": lambda count: torch.tensor(count, dtype=torch.int32),
    "int64": torch.tensor,
    "float64": lambda count: torch.tensor(count, dtype=torch.float64),
}


def shown(run):
    """Returns the values of ``x`` that monitors, callbacks, loggers and the bar get."""
    metrics = run.metrics
    views = (metrics.monitored(), metrics.callback_metrics(), metrics.logged_metrics(), metrics.progress_snapshot())
    return [float(view["x"]) for view in views]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("mode", ["mean", "sum", "min", "max"])
def test_counts_above_what_fp32_holds_are_exact_wherever_they_are_shown(run, mode, kind, on_device):
    run.metrics.reads_cpu_tensors = not on_device
    counts = [2**24 + 1, 2**24 + 4, 2**24 + 2]
    for count in counts:
        run.log("x", KINDS[kind](count), on_step=False, on_epoch=True, prog_bar=True, reduce_fx=mode, batch_size=2)
    expected = {"mean": sum(counts) / 3, "sum": sum(counts), "min": min(counts), "max": max(counts)}[mode]
    run.state.scope = Scope.TRAIN_EPOCH
    assert run.metrics.end_train_epoch(1) == {"x": expected}
    assert shown(run) == [expected] * 4


def test_a_look_at_numbers_sees_what_the_host_has_and_reads_no_tensor(run):
    seen = []
    run.metrics.watch = lambda name, value, step, training: seen.append((name, value, step, training))
    run.log("a", torch.tensor(1.0), on_epoch=True)
    run.log("least", 2.0, on_step=False, on_epoch=True, reduce_fx="min")
    run.metrics.reads_cpu_tensors = False  # as of a GPU
    for mode in ("min", "max"):
        run.log(f"{mode}_loss", torch.tensor(3.0), on_step=False, on_epoch=True, reduce_fx=mode)
    run.log("b", torch.tensor(1.0))
    run.metrics.look_at_numbers(5)
    assert seen == [("a", 1.0, 5, True), ("a", 4.0, 5, True)]  # of the step, and the sum over its samples


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_steps_count_is_exact_within_the_step_and_after_it(run, kind, on_device):
    run.metrics.reads_cpu_tensors = not on_device
    run.log("x", KINDS[kind](3), prog_bar=True)
    run.log("x", KINDS[kind](2**24 + 1), prog_bar=True)
    assert run.metrics.callback_metrics()["x"] == 2**24 + 1
    run.metrics.flush(1)
    run.state.scope = Scope.NOWHERE
    assert shown(run) == [2**24 + 1] * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_a_hook_finds_the_count_that_it_has_logged(run, mode, kind, on_device):
    run.metrics.reads_cpu_tensors = not on_device
    run.state.scope = Scope.TRAIN_EPOCH
    run.log("x", KINDS[kind](2**24 + 1), reduce_fx=mode)
    assert run.metrics.callback_metrics()["x"] == 2**24 + 1


def test_values_that_fp32_holds_and_fractions_stay_fp32(run):
    values = {"small": 7, "count": torch.tensor(2**24), "even": 2**24 + 2, "loss": torch.tensor(3.7e9), "third": 1 / 3}
    for name, value in values.items():
        run.log(name, value)
    run.log("mean", torch.tensor(1 / 3), on_step=False, on_epoch=True)
    run.log("mean", torch.tensor(2 / 3), on_step=False, on_epoch=True)
    within = run.metrics.callback_metrics()
    assert {name: within[name].dtype for name in values} == dict.fromkeys(values, torch.float32)
    run.metrics.flush(1)
    run.metrics.end_train_epoch(1)
    for view in (run.metrics.monitored(), run.metrics.callback_metrics(), run.metrics.logged_metrics()):
        assert {value.dtype for value in view.values()} == {torch.float32}


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_are_shown_in_fp32(run, bad):
    run.log("x", bad)
    run.metrics.flush(1)
    for view in (run.metrics.monitored(), run.metrics.callback_metrics(), run.metrics.logged_metrics()):
        assert view["x"].dtype is torch.float32
        assert str(float(view["x"])) == str(bad)


@given(st.lists(st.integers(-(2**45), 2**45), min_size=1, max_size=20), st.sampled_from(["sum", "min", "max"]))
@settings(max_examples=30, deadline=None)
def test_monitors_decide_by_every_digit_of_a_count(counts, mode):
    run = Run()
    for count in counts:
        run.log("x", count, on_step=False, on_epoch=True, reduce_fx=mode)
    run.metrics.end_train_epoch(1)
    expected = {"sum": sum, "min": min, "max": max}[mode](counts)
    assert int(run.metrics.monitored()["x"]) == expected
    again = Run()
    again.metrics.take_published(run.metrics.published(), run.metrics.published())
    assert int(again.metrics.monitored()["x"]) == expected


@pytest.mark.parametrize("mode", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("as_number", [True, False])
def test_values_that_are_not_finite_pass_through(mode, bad, as_number):
    run = Run()
    for value in (1.0, bad, 2.0):
        given = value if as_number else torch.tensor(value)
        run.log("x", given, on_step=False, on_epoch=True, reduce_fx=mode, batch_size=3)
    run.log("y", bad)
    run.metrics.flush(1)
    assert str(run.metrics.logged["y"]) == str(bad)
    expected = {"min": min(1.0, bad), "max": max(2.0, bad)}.get(mode, bad) if not math.isnan(bad) else bad
    assert str(run.metrics.end_train_epoch(1)["x"]) == str(expected)


def test_a_value_may_change_after_the_call(run):
    parameter = torch.nn.Parameter(torch.tensor(1.0))
    loss = parameter * 2
    run.log("temperature", parameter)
    run.log("loss", loss)
    run.log("both", loss, on_epoch=True)
    with torch.no_grad():
        parameter.mul_(50)
        loss.mul_(50)
    run.metrics.flush(1)
    assert run.metrics.logged == {"temperature": 1.0, "loss": 2.0, "both_step": 2.0}
    assert run.metrics.end_train_epoch(1) == {"both_epoch": 2.0}


def test_no_graph_is_kept(run):
    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor

    saved = []

    def pack(tensor):
        holder = Saved(tensor)
        saved.append(weakref.ref(holder))
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        leaf = torch.ones(3, requires_grad=True)
        loss = (leaf * leaf).sum()
    run.log("x", loss, on_step=True, on_epoch=True, enable_graph=True)
    assert saved[0]() is not None
    del loss
    assert saved[0]() is None


def test_every_kind_of_scalar_is_taken(run):
    import numpy as np

    values = {
        "int": 3, "bool": True, "float": 0.5, "numpy": np.float32(0.25), "shape1": torch.tensor([1.5]),
        "shape11": torch.tensor([[2.5]]), "flag": torch.tensor(True), "half": torch.tensor(0.5, dtype=torch.half),
        "parameter": torch.nn.Parameter(torch.tensor(4.0)),
    }  # fmt: skip
    for name, value in values.items():
        run.log(name, value, on_step=True, on_epoch=True)
    run.metrics.flush(1)
    expected = {name: float(value.detach() if name == "parameter" else value) for name, value in values.items()}
    assert run.metrics.logged == {f"{name}_step": value for name, value in expected.items()}
    assert run.metrics.end_train_epoch(1) == {f"{name}_epoch": value for name, value in expected.items()}


def test_inference_mode_and_training_share_no_trouble(run):
    run.state.scope = Scope.EVAL_STEP
    for _ in range(2):
        with torch.inference_mode():
            run.metrics.clear_evaluation()
            for index in range(70):
                run.log(f"acc{index}", torch.tensor(float(index)) + 1, reduce_fx="mean" if index else "min")
        values = run.metrics.end_evaluation(1)
        assert values["acc0"] == 1.0
        assert values["acc69"] == 70.0
    assert not run.metrics.callback_metrics()["acc0"].is_inference()
    with torch.inference_mode():
        run.log("acc1", torch.tensor(3.0))
        run.metrics.end_evaluation(1)
    assert not run.metrics.callback_metrics()["acc1"].is_inference()


def test_many_keys_keep_their_values_while_the_vector_grows(run):
    for index in range(300):
        run.log(f"x{index}", torch.tensor(float(index)), on_step=True, on_epoch=True)
    run.metrics.flush(1)
    assert run.metrics.logged == {f"x{index}_step": float(index) for index in range(300)}
    assert run.metrics.end_train_epoch(1) == {f"x{index}_epoch": float(index) for index in range(300)}


def test_slots_are_reused(run):
    for step in range(50):
        run.log("loss", torch.tensor(1.0), on_step=True, on_epoch=True)
        run.metrics.flush(step)
        run.metrics.end_train_epoch(step)
    table = run.metrics.table(MetricTable.TRAINING)
    assert (len(table.slots), len(table.cells), len(table.bank)) == (1, 2, 64)


# -- batch sizes -------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


@dataclasses.dataclass
class Sample:
    label: str
    image: Tensor


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 2),
        (torch.zeros(3), torch.zeros(9)),
        [{"name": ["a"], "x": torch.zeros(3)}, torch.zeros(9)],
        Pair(torch.zeros(3), torch.zeros(9)),
        Sample("a", torch.zeros(3)),
        {"meta": "text", "nested": ([], torch.zeros(3, 1))},
        {"temperature": torch.tensor(2.0), "x": torch.zeros(3)},
        (torch.tensor(True), torch.zeros(3, 2)),
        [torch.tensor(7), {"nested": (torch.tensor(1.0), torch.zeros(3))}],
        Pair(torch.tensor(0.5), torch.zeros(3)),
        Sample(torch.tensor(1), torch.zeros(3)),
    ],
)
def test_the_batch_size_is_the_length_of_the_first_tensor_with_a_dimension(run, batch):
    run.state.batch = batch
    run.log("x", torch.tensor(1.0), on_epoch=True)
    run.state.batch = torch.tensor(5.0)
    run.log("x", torch.tensor(5.0), on_epoch=True)
    assert run.metrics.end_train_epoch(1) == {"x_epoch": 2.0}


def test_a_batch_whose_tensors_are_not_equally_long_is_told_of(run, caplog):
    run.state.batch = [torch.zeros(3), torch.zeros(3, 2), torch.tensor(1.0)]
    run.log("even", torch.tensor(1.0), on_epoch=True)
    run.state.batch = [torch.tensor(1.0), torch.zeros(3)]
    run.log("a number first", torch.tensor(1.0), on_epoch=True)
    run.state.batch = [torch.zeros(3), torch.zeros(9)]
    run.log("uneven, given", torch.tensor(1.0), on_epoch=True, batch_size=9)
    run.log("uneven, a sum", torch.tensor(1.0), on_epoch=True, reduce_fx="sum")
    assert caplog.text == ""
    for _ in range(2):
        run.log("uneven", torch.tensor(1.0), on_epoch=True)
    run.state.batch = [torch.tensor(1.0), torch.zeros(3), torch.zeros(9)]
    run.log("uneven after a number", torch.tensor(1.0), on_epoch=True)
    assert "self.log('uneven after a number', on_epoch=True)" in caplog.text
    assert caplog.text.count("self.log('uneven', on_epoch=True) weighs each value") == 1


def test_a_batch_without_tensors_is_asked_about_only_where_it_matters(run):
    run.state.batch = ["a", "b"]
    run.log("step", torch.tensor(1.0))
    run.log("sum", torch.tensor(1.0), on_epoch=True, reduce_fx="sum")
    run.log("given", torch.tensor(1.0), on_epoch=True, batch_size=2)
    with pytest.raises(ConfigError, match=r"'x'.*batch \(list\).*pass batch_size="):
        run.log("x", torch.tensor(1.0), on_epoch=True)
    run.state.scope = Scope.TRAIN_EPOCH
    run.log("whole", torch.tensor(1.0))
    assert run.metrics.end_train_epoch(1)["whole"] == 1.0


@pytest.mark.parametrize("wrong", [-1, 2.5, "4", torch.tensor([4, 4])])
def test_a_batch_size_is_a_count(run, wrong):
    with pytest.raises(ConfigError, match="batch_size"):
        run.log("x", 1.0, on_epoch=True, batch_size=wrong)


def test_an_empty_batch_counts_for_nothing(run):
    run.log("x", torch.tensor(math.nan), on_step=False, on_epoch=True, batch_size=0)
    assert run.metrics.end_train_epoch(1) == {}
    run.log("x", torch.tensor(math.nan), on_step=False, on_epoch=True, batch_size=0)
    run.log("x", torch.tensor(2.0), on_step=False, on_epoch=True, batch_size=1)
    assert run.metrics.end_train_epoch(1) == {"x": 2.0}


# -- errors ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "args", "kwargs", "message"),
    [
        (Scope.TRAIN_STEP, ("x", torch.zeros(2, 3)), {}, r"'x'.*shape \(2, 3\)"),
        (Scope.TRAIN_STEP, ("x", torch.zeros(0)), {}, r"shape \(0,\)"),
        (Scope.TRAIN_STEP, ("x", torch.tensor(1j)), {}, "complex"),
        (Scope.TRAIN_STEP, ("x", {"a": 1.0}), {}, "log_dict"),
        (Scope.TRAIN_STEP, ("x", "text"), {}, "given a str"),
        (Scope.TRAIN_STEP, ("x", None), {}, "given a NoneType"),
        (Scope.TRAIN_STEP, ("", 1.0), {}, "name"),
        (Scope.TRAIN_STEP, (["x"], 1.0), {}, "name"),
        (Scope.TRAIN_STEP, ("x/dataloader_idx_0", 1.0), {}, "leave it out"),
        (Scope.TRAIN_STEP, ("x", 1.0), {"reduce_fx": "maen"}, "did you mean 'mean'"),
        (Scope.TRAIN_STEP, ("x", 1.0), {"reduce_fx": ["mean"]}, "reduce_fx"),
        (Scope.TRAIN_STEP, ("x", 1.0), {"reduce_fx": torch.median}, "torchmetrics.Metric"),
        (Scope.TRAIN_STEP, ("x", 1.0), {"sync_dist_group": "gloo"}, "sync_dist_group"),
        (
            Scope.TRAIN_STEP,
            ("x", 1.0),
            {"on_step": False},
            r"^self\.log\('x', \.\.\., on_step=False\) in .*record nothing",
        ),
        (Scope.TRAIN_EPOCH, ("x", 1.0), {"on_step": True}, "no step"),
        (Scope.EVAL_EPOCH, ("x", 1.0), {"on_step": True}, "no step"),
        (Scope.EVAL_EPOCH, ("x", 1.0), {"on_epoch": False}, "record nothing"),
        (Scope.NOWHERE, ("x", 1.0), {}, "outside the epochs"),
        (Scope.PREDICT, ("x", 1.0), {}, "predict_step"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(run, scope, args, kwargs, message):
    run.state.scope = scope
    with pytest.raises(ConfigError, match=message):
        run.log(*args, **kwargs)
    assert not any(run.metrics.table(name).slots for name in (MetricTable.TRAINING, MetricTable.EVALUATION))


def test_a_shape_that_is_wrong_later_is_found_too(run):
    run.log("x", torch.tensor(1.0))
    with pytest.raises(ConfigError, match=r"shape \(3,\)"):
        run.log("x", torch.zeros(3))


def test_the_same_key_with_other_flags_names_both_calls(run):
    run.log("x", 1.0, prog_bar=True)
    with pytest.raises(
        ConfigError, match=r"self\.log\('x', \.\.\., prog_bar=True\) and self\.log\('x', \.\.\.\);.*two names"
    ):
        run.log("x", 1.0)


def test_two_slots_cannot_publish_one_key(run):
    run.log("x", 1.0, on_step=True, on_epoch=True)
    with pytest.raises(ConfigError, match=r"'x'.*'x_step'.*another name"):
        run.log("x_step", 1.0)
    run.state.scope = Scope.EVAL_STEP
    run.log("acc", 1.0)
    run.state.scope = Scope.EVAL_EPOCH
    with pytest.raises(ConfigError, match=r"validation_step.*evaluation epoch hook.*another name"):
        run.log("acc", 1.0)


# -- torchmetrics ------------------------------------------------------------------------------------------------------------


def test_torchmetrics_objects_compute_and_reset_at_the_epoch_end(run):
    from torchmetrics.classification import MulticlassAccuracy

    accuracy = MulticlassAccuracy(num_classes=3, average="micro")
    for _ in range(2):
        for predicted, label in (([0, 1], [0, 1]), ([2, 2, 2, 2], [0, 1, 2, 0])):
            accuracy(torch.tensor(predicted), torch.tensor(label))
            run.log("acc", accuracy, on_step=True, on_epoch=True)
        run.metrics.flush(3)
        assert run.metrics.logged["acc_step"] == 0.25
        assert run.metrics.end_train_epoch(4) == {"acc_epoch": 0.5}
        assert accuracy._update_count == 0


def test_torchmetrics_objects_in_evaluation_and_their_errors(run):
    import torchmetrics

    run.state.scope = Scope.EVAL_STEP
    mean, other = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
    mean.update(torch.tensor([1.0, 3.0]))
    run.log("mean", mean)
    with pytest.raises(ConfigError, match="one MeanMetric object"):
        run.log("mean", other)
    with pytest.raises(ConfigError, match="one MeanMetric object"):
        run.log("mean", torch.tensor(1.0))
    with pytest.raises(ConfigError, match="one MeanMetric object"):
        run.log("mean", 1.0)
    run.log("plain", 1.0)
    with pytest.raises(ConfigError, match="tensors or numbers"):
        run.log("plain", mean)
    with pytest.raises(ConfigError, match="only its update"):
        run.log("forward", other, on_step=True)
    assert run.metrics.end_evaluation(1) == {"mean": 2.0, "plain": 1.0}


def test_a_torchmetrics_object_of_an_evaluation_that_broke_off_starts_anew(run):
    import torchmetrics

    run.state.scope = Scope.EVAL_STEP
    mean = torchmetrics.MeanMetric()
    for value in (100.0, 2.0):
        run.metrics.clear_evaluation()
        mean.update(torch.tensor(value))
        run.log("mean", mean)
    assert run.metrics.end_evaluation(1) == {"mean": 2.0}


def test_a_torchmetrics_object_reset_in_inference_mode_can_be_used_in_training(run):
    import torchmetrics

    run.state.scope = Scope.EVAL_STEP
    mean = torchmetrics.MeanMetric()
    with torch.inference_mode():
        mean.update(torch.tensor(5.0))
        run.log("mean", mean)
        assert run.metrics.end_evaluation(1) == {"mean": 5.0}
    mean.mean_value.add_(1.0)


def test_a_torchmetrics_object_whose_value_is_no_scalar_is_named(run):
    from torchmetrics.classification import MulticlassConfusionMatrix

    matrix = MulticlassConfusionMatrix(num_classes=2)
    matrix.update(torch.tensor([0, 1]), torch.tensor([0, 1]))
    run.log("matrix", matrix, on_step=False, on_epoch=True)
    with pytest.raises(ConfigError, match=r"'matrix'.*\(2, 2\)"):
        run.metrics.end_train_epoch(1)


# -- when the host reads -----------------------------------------------------------------------------------------------------


def test_logging_reads_nothing_on_the_host(run, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a host read")

    run.metrics.reads_cpu_tensors = False  # CPU tensors are treated like tensors on a GPU
    loss = torch.ones((), requires_grad=True) * 2
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        for mode in ("mean", "sum", "min", "max"):
            for scope in (Scope.TRAIN_STEP, Scope.EVAL_STEP):
                run.state.scope = scope
                for _ in range(2):
                    run.log(mode, loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True, reduce_fx=mode)
        run.metrics.poll(3)
    run.metrics.flush(4)
    assert run.metrics.logged["mean_step"] == 2.0


class Event:
    """Replaces a CUDA event, and records whether the host waited for it."""

    waits = 0

    def synchronize(self):
        Event.waits += 1


def test_on_a_gpu_a_flush_is_delivered_exactly_two_windows_later(run, monkeypatch):
    monkeypatch.setattr(exchange, "_start_copy", lambda vector: (vector.clone(), Event()))
    Event.waits = 0
    seen = []
    for step in range(1, 8):
        run.log("loss", torch.tensor(float(step)))
        run.metrics.poll(step)
        seen.append(run.metrics.logged.get("loss"))
        if step in (2, 3, 5):
            run.metrics.flush(step)
            assert Event.waits == len(run.sunk)
    assert seen == [None, None, None, 2.0, 3.0, 3.0, 5.0]
    assert run.sunk == [({"loss": 2.0}, 2), ({"loss": 3.0}, 3), ({"loss": 5.0}, 5)]
    run.metrics.flush(7)
    run.metrics.drain()
    assert run.sunk[-1] == ({"loss": 7.0}, 7)
    run.metrics.poll(1000)
    assert len(run.sunk) == 4


def test_an_epoch_end_never_lets_an_older_flush_overwrite_its_values(run, monkeypatch):
    monkeypatch.setattr(exchange, "_start_copy", lambda vector: (vector.clone(), Event()))
    run.log("x", torch.tensor(1.0), on_epoch=True)
    run.metrics.flush(1)
    run.log("x", torch.tensor(3.0), on_epoch=True)
    run.metrics.end_train_epoch(2)
    run.metrics.poll(10)
    assert plain(run.metrics) == {"x": 2.0, "x_step": 3.0, "x_epoch": 2.0}
    assert [step for _, step in run.sunk] == [1, 2]


# -- torch.compile -----------------------------------------------------------------------------------------------------------


def test_a_compiled_step_logs_outside_of_its_graphs(run):
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    @torch.compile(backend=counter)
    def step(value):
        loss = (value * 2).sum()
        run.log("loss", loss, on_step=True, on_epoch=True)
        return loss * 3

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in range(8):
            assert step(torch.full((2,), float(value))) == 12 * value
    assert counter.frame_count <= 4
    run.metrics.flush(8)
    assert run.metrics.logged == {"loss_step": 28.0}
    assert run.metrics.end_train_epoch(8) == {"loss_epoch": 14.0}


# -- values for the progress bar ---------------------------------------------------------------------------------------------


def test_the_bar_sees_a_steps_value_at_once_and_neither_loggers_nor_checkpoints_notice(run):
    for value in (1.0, 2.0):
        run.log("loss", torch.tensor(value), prog_bar=True)
        run.log("other", torch.tensor(value))
        assert run.metrics.progress_snapshot() == {"loss": value}
    assert (run.sunk, run.metrics.progress_bar_metrics, plain(run.metrics)) == ([], {}, {})
    run.metrics.flush(2)
    assert run.metrics.progress_snapshot() == {"loss": 2.0}
    assert run.sunk == [({"loss": 2.0, "other": 2.0}, 2)]


class Device:
    """Copies from a simulated GPU, which arrive when the test says so."""

    def __init__(self, monkeypatch):
        self.done = False
        monkeypatch.setattr(exchange, "_start_copy", lambda vector: (vector.clone(), self))

    def query(self):
        return self.done

    def synchronize(self):
        self.waits += 1

    waits = 0


def test_on_a_gpu_the_bar_sees_the_values_of_the_look_before_and_never_waits(run, monkeypatch):
    device, run.metrics.reads_cpu_tensors = Device(monkeypatch), False
    for value, done, seen in ((1.0, False, {}), (2.0, False, {}), (3.0, True, 1.0), (4.0, True, 3.0)):
        run.log("loss", torch.tensor(value), prog_bar=True)
        device.done = done
        assert run.metrics.progress_snapshot() == ({"loss": seen} if seen else {})
    assert device.waits == 0


def test_at_an_epochs_end_the_bar_shows_its_last_steps_own_values(run, monkeypatch):
    Device(monkeypatch).done = True
    run.metrics.reads_cpu_tensors = False
    for value in (1.0, 2.0, 3.0):
        run.log("x", torch.tensor(value), on_step=True, on_epoch=True, prog_bar=True)
        run.metrics.progress_snapshot()
    run.metrics.end_train_epoch(3)
    assert run.metrics.progress_snapshot() == {"x_step": 3.0, "x_epoch": 2.0}
    assert run.sunk == [({"x_epoch": 2.0}, 3)], "a step's values go to the loggers with a flush"
