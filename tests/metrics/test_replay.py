"""What a step does for ``self.log`` and torchmetrics objects is repeated for a replay; the tests do the graph's part."""

from __future__ import annotations

import torch
import torchmetrics
from torch import nn

from fabricamp.metrics import Metrics
from fabricamp.metrics.replay import LogReplay, MetricStates
from fabricamp.metrics.slots import Arguments, MetricTable
from fabricamp.state import RunState, Scope
from fabricamp.strategies.base import Strategy


def metrics():
    state = RunState()
    state.scope = Scope.TRAIN_STEP
    state.batch = torch.zeros(4)
    one = Metrics(state, Strategy())
    one.reads_cpu_tensors = False  # as on a GPU
    return one


def call(name, **options):
    return tuple(Arguments(name, **options))


def log(one, value):
    one.keep(call("loss", on_step=True, on_epoch=True), torch.tensor(value))
    one.keep(call("largest", on_step=False, on_epoch=True, reduce_fx="max"), torch.tensor(value))


def weights(one):
    return {key: (cell.weight, cell.number) for key, cell in one.table(MetricTable.TRAINING).cells.items()}


def test_a_log_replay_gives_the_weights_of_an_eager_step():
    eager, replayed = metrics(), metrics()
    for one in (eager, replayed):
        log(one, 1.0)
        one.keep(call("before"), torch.tensor(1.0))
    log_replay = LogReplay(replayed)
    log(replayed, 2.0)
    log_replay.record()
    log(eager, 2.0)
    assert weights(eager) == weights(replayed)
    for _ in range(3):
        log_replay.repeat()
        log(eager, 2.0)
    assert weights(eager) == weights(replayed)
    assert log_replay.is_valid()
    replayed.table(MetricTable.TRAINING).widen(1000)
    assert not log_replay.is_valid()


def test_a_log_replay_sets_the_weight_of_a_torchmetrics_object_again():
    one, metric = metrics(), torchmetrics.MeanMetric()
    for _ in range(2):
        metric.update(torch.ones(2))
        log_replay = LogReplay(one)
        one.keep(call("mean", on_epoch=True, on_step=False), metric)
        log_replay.record()
    one.table(MetricTable.TRAINING).clear_epoch()
    log_replay.repeat()
    (cell,) = one.table(MetricTable.TRAINING).cells.values()
    assert cell.weight == 1


def test_states_of_metrics_stay_in_their_places():
    """Tests a capture, a replay, a reset and an eager update; the test itself does the graph's part."""
    module = nn.Module()
    module.error, module.listed = torchmetrics.MeanSquaredError(), torchmetrics.CatMetric()
    module.error.update(torch.ones(3), torch.zeros(3))
    states = MetricStates(module)
    places = [module.error.sum_squared_error, module.error.total]
    module.error.update(torch.ones(2), torch.zeros(2))
    states.rebind_in_capture()
    states.record()
    assert [module.error.sum_squared_error, module.error.total][0] is places[0]
    assert [one.item() for one in places] == [5, 5]
    before = states.copy()
    module.error.reset()
    module.error.update(torch.full((1,), 2.0), torch.zeros(1))
    assert states.difference(before) == "the state 'sum_squared_error' of a MeanSquaredError"
    assert states.rebind()
    assert [one.item() for one in places] == [4, 1]
    assert module.error.total is places[1]
    states.repeat()
    assert module.error.update_count == 2
    assert module.error.compute() == 4
    states.repeat()
    assert module.error._computed is None
    states.put_back(before)
    assert module.error.update_count == 2
    assert states.difference(before) == ""
    module.error.to(torch.float64)
    module.error.set_dtype(torch.float64)
    assert not states.rebind()


def test_a_log_replay_forgets_a_step_that_did_not_run():
    one = metrics()
    log(one, 1.0)
    before = weights(one)
    log_replay = LogReplay(one)
    log(one, 2.0)
    one.keep(call("new", on_epoch=True), torch.tensor(1.0))
    log_replay.undo()
    after = weights(one)
    assert {key: after[key] for key in before} == before
    assert {weight for key, (weight, _) in after.items() if key not in before} == {0}
