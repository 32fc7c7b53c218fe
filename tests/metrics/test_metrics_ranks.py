"""self.log on several Gloo ranks: global and local values, and ranks that log different values."""

import functools
import math
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fabricamp.errors import ConfigError, DistributedError
from fabricamp.metrics import Metrics, exchange
from fabricamp.metrics.slots import Published
from fabricamp.state import RunState, Scope, TrainerFn
from fabricamp.strategies.base import Environment
from fabricamp.strategies.process_group import ProcessGroupStrategy
from tests.distributed.ranks import run_ranks
from tests.metrics.log_calls import log


class Counting(ProcessGroupStrategy):
    """Notes the objects that ranks exchange."""

    exchanged: ClassVar[list] = []

    def all_gather_object(self, value):
        self.exchanged.append(value)
        return super().all_gather_object(value)


def build(scope=Scope.TRAIN_STEP, fn=TrainerFn.FITTING):
    state = RunState()
    state.begin(fn)
    state.scope, state.batch = scope, torch.zeros(1)
    strategy = Counting()
    environment = Environment(rank=dist.get_rank(), world_size=dist.get_world_size())
    strategy.setup_environment(environment, torch.device("cpu"))
    metrics = Metrics(state, strategy)
    sunk = []
    metrics.sinks.append(lambda values, step: sunk.append((dict(values), step)))
    return metrics, state, dist.get_rank(), sunk


def callbacks(metrics):
    return dict(metrics.reduced)


# Each check runs on every rank; all of them share one start of the processes.
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def checks(names):
    by_name = {function.__name__: function for function in CHECKS}
    for name in names:
        try:
            by_name[name]()
        except BaseException as error:
            error.add_note(f"in {name}")
            raise


def all_checks(world_size):
    names = [function.__name__ for function in CHECKS]
    run_ranks(functools.partial(checks, names), world_size)


@check
def epoch_values_equal_those_of_one_process():
    """Ranks have different numbers of batches, of different sizes."""
    metrics, _, rank, _ = build()
    generator = torch.Generator().manual_seed(7)
    sizes = [5, 3, 8, 1, 4, 7, 2]
    values = torch.rand(len(sizes), generator=generator) * 100
    world = dist.get_world_size()
    mine = [index for index in range(len(sizes)) if index % world == rank and not (rank == 1 and index > 4)]
    seen = [index for index in range(len(sizes)) if not (index % world == 1 and index > 4)]
    for index in mine:
        kwargs = {"on_step": False, "on_epoch": True, "batch_size": sizes[index]}
        log(metrics, "mean", values[index], **kwargs)
        log(metrics, "float", values[index].item(), **kwargs)
        for mode in ("sum", "min", "max"):
            log(metrics, mode, values[index], reduce_fx=mode, **kwargs)
        log(metrics, "count", torch.tensor(2**30 + index), reduce_fx="sum", **kwargs)
    numbers = values.double().tolist()
    mean = sum(numbers[index] * sizes[index] for index in seen) / sum(sizes[index] for index in seen)
    result = metrics.end_train_epoch(1)
    assert result.pop("count") == sum(2**30 + index for index in seen)
    assert result == pytest.approx(
        {
            "mean": mean,
            "float": mean,
            "sum": sum(numbers[index] for index in seen),
            "min": min(numbers[index] for index in seen),
            "max": max(numbers[index] for index in seen),
        },
        rel=1e-12,
    )
    of_all = [None] * world
    dist.all_gather_object(of_all, str(callbacks(metrics)))
    assert len(set(of_all)) == 1


@check
def counts_above_what_fp32_holds_are_exact_on_every_rank():
    metrics, state, rank, _ = build()
    world = dist.get_world_size()
    counts = [2**24 + 1 + 2 * index for index in range(world)]
    for name, count in {"number": counts[rank], "tensor": torch.tensor(counts[rank])}.items():
        for mode in ("mean", "sum", "min", "max"):
            log(metrics, f"{name} {mode}", count, on_step=False, on_epoch=True, reduce_fx=mode, batch_size=3)
        log(metrics, f"{name} step", count, sync_dist=True, reduce_fx="sum")
    metrics.flush(1)
    metrics.end_train_epoch(1)
    state.scope = Scope.NOWHERE
    expected = {
        "mean": sum(counts) / world,
        "sum": sum(counts),
        "min": counts[0],
        "max": counts[-1],
        "step": sum(counts),
    }
    for view in (metrics.monitored(), metrics.callback_metrics(), metrics.logged_metrics(), metrics.reduced):
        for name in ("number", "tensor"):
            assert {key: float(view[f"{name} {key}"]) for key in expected} == expected


@check
def a_value_that_any_rank_has_logged_since_is_new_to_schedules_on_all():
    metrics, _, rank, sunk = build()
    world = dist.get_world_size()
    log(metrics, "x", torch.tensor(float(rank)))
    metrics.reduce_steps(1)
    assert metrics.take_new("x", 0) == (world - 1) / 2
    metrics.reduce_steps(2)
    assert metrics.take_new("x", 0) is None
    assert metrics.take_new("x", 1) == (world - 1) / 2
    if rank == 1:
        log(metrics, "x", 11.0)
    metrics.reduce_steps(3)
    assert metrics.take_new("x", 0) == pytest.approx((world * (world - 1) / 2 + 10) / world)
    metrics.flush(3)
    assert metrics.take_new("x", 0) is None
    assert metrics.take_new("y", 0) is None
    assert sunk == ([({"x": 0.0}, 3)] if rank == 0 else [])
    log(metrics, "x", 5.0)
    metrics.flush(4)
    assert metrics.take_new("x", 0) == 5.0


@check
def step_values_are_local_for_loggers_without_sync_dist_and_global_for_callbacks():
    metrics, _, rank, sunk = build()
    log(metrics, "own", torch.tensor(float(rank)), prog_bar=True)
    log(metrics, "shared", torch.tensor(float(rank)), sync_dist=True, prog_bar=True)
    log(metrics, "total", rank + 1, sync_dist=True, reduce_fx="sum")
    log(metrics, "most", torch.tensor(rank), sync_dist=True, reduce_fx="max")
    calls = Counting.exchanged
    calls.clear()
    metrics.flush(50)
    world = dist.get_world_size()
    mean, total = (world - 1) / 2, float(world * (world + 1) // 2)
    expected = {"own": float(rank), "shared": mean, "total": total, "most": world - 1.0}
    assert metrics.logged == expected
    assert metrics.progress_bar_metrics == {"own": float(rank), "shared": mean}
    assert callbacks(metrics) == expected | {"own": mean}
    assert sunk == ([(expected, 50)] if rank == 0 else [])
    assert calls == []


@check
def ranks_that_log_different_keys_agree_once():
    metrics, _, rank, sunk = build()
    calls = Counting.exchanged
    calls.clear()
    for step in range(3):
        if rank == 0:
            log(metrics, "first", torch.tensor(1.0), sync_dist=True)
            log(metrics, "both", torch.tensor(1.0), sync_dist=True)
        else:
            log(metrics, "both", torch.tensor(3.0), sync_dist=True)
            log(metrics, "other", 5.0, sync_dist=True, on_epoch=True, prog_bar=True)
        metrics.flush(step)
        world = dist.get_world_size()
        both = (1.0 + 3.0 * (world - 1)) / world
        expected = {"first": 1.0, "both": both, "other_step": 5.0}
        assert metrics.logged == expected
    assert metrics.end_train_epoch(3) == {"other_epoch": 5.0}
    assert len(calls) == 1
    if rank == 0:
        assert [step for _, step in sunk] == [0, 1, 2, 3]
        assert metrics.progress_bar_metrics == {"other_step": 5.0, "other_epoch": 5.0}


@check
def a_key_of_the_others_may_be_logged_here_later():
    metrics, _, rank, _ = build()
    if rank == 0:
        log(metrics, "late", torch.tensor(2.0), on_step=False, on_epoch=True)
    assert metrics.end_train_epoch(1) == {"late": 2.0}
    log(metrics, "late", torch.tensor(float(rank)), on_step=False, on_epoch=True)
    assert metrics.end_train_epoch(2) == {"late": (dist.get_world_size() - 1) / 2}


@check
def a_rank_that_did_not_log_this_time_counts_for_nothing():
    metrics, _, rank, _ = build()
    for step in range(2):
        if rank == 0 or step == 0:
            log(metrics, "mean", 100.0 if rank else 1.0, sync_dist=True)
            log(metrics, "max", 100.0 if rank else 1.0, sync_dist=True, reduce_fx="max")
        metrics.flush(step)
    assert metrics.logged == {"mean": 1.0, "max": 1.0}


@check
def a_rank_without_any_batch_takes_part():
    metrics, _, rank, _ = build(scope=Scope.EVAL_STEP)
    metrics.clear_evaluation()
    if rank == 0:
        for value in (1.0, 3.0):
            log(metrics, "acc", torch.tensor(value), on_step=True, on_epoch=True)
    assert metrics.end_evaluation(5) == {"acc_step": 3.0, "acc_epoch": 2.0}
    metrics.flush(5)
    assert metrics.evaluation_results(1) == [{"acc_step": 3.0, "acc_epoch": 2.0}]


@check
def a_rank_without_a_batch_of_a_loader_knows_whose_its_values_are():
    metrics, state, rank, _ = build(scope=Scope.EVAL_STEP)
    state.num_dataloaders = 2
    for index in range(2 if rank == 0 else 1):
        state.dataloader_idx = index
        log(metrics, f"own{index}", float(index), add_dataloader_idx=False)
    metrics.end_evaluation(5)
    assert metrics.evaluation_results(2) == [{"own0": 0.0}, {"own1": 1.0}]


@check
def nothing_logged_anywhere_is_fine():
    metrics, _, _, sunk = build()
    metrics.flush(1)
    assert metrics.end_train_epoch(1) == {}
    assert metrics.end_evaluation(1) == {}
    assert sunk == []


@check
def rank_zero_only_counts_rank_zero_alone():
    metrics, _, rank, _ = build()
    for _ in range(2):
        log(metrics, "x", torch.tensor(float(rank + 1)), on_epoch=True, rank_zero_only=True)
    metrics.flush(1)
    assert callbacks(metrics) == {"x": 1.0, "x_step": 1.0}
    assert metrics.end_train_epoch(1) == {"x_epoch": 1.0}


@check
def more_keys_than_fit_into_one_exchange_go_twice():
    metrics, _, rank, sunk = build()
    count = 200 if rank == 0 else 90
    for index in range(count):
        log(metrics, f"x{index}", torch.tensor(float(rank)), on_epoch=True, sync_dist=True)
    metrics.flush(1)
    world = dist.get_world_size()
    expected = {f"x{index}_step": (world - 1) / 2 if index < 90 else 0.0 for index in range(200)}
    assert metrics.logged == expected
    result = metrics.end_train_epoch(2)
    assert result == {f"x{index}_epoch": (world - 1) / 2 if index < 90 else 0.0 for index in range(200)}
    assert {key for values, _ in sunk for key in values} == (set(expected) | set(result) if rank == 0 else set())


@check
def values_that_are_not_finite_reach_every_rank():
    metrics, _, rank, _ = build()
    bad = math.nan if rank == 1 else 1.0
    for mode in ("mean", "sum", "min", "max"):
        log(metrics, mode, torch.tensor(bad), on_epoch=True, on_step=False, reduce_fx=mode)
    assert all(math.isnan(value) for value in metrics.end_train_epoch(1).values())


@check
def different_reductions_of_one_key_are_an_error_on_every_rank():
    metrics, _, rank, _ = build()
    log(metrics, "x", 1.0, on_step=False, on_epoch=True, reduce_fx="sum" if rank == 0 else "mean")
    with pytest.raises(DistributedError, match=r"'x'.*'sum'.*'mean'"):
        metrics.end_train_epoch(1)


@check
def torchmetrics_objects_compute_over_all_ranks_or_say_who_lacks_them():
    import torchmetrics

    metrics, _, rank, _ = build(scope=Scope.EVAL_STEP)
    mean = torchmetrics.MeanMetric()
    for epoch in range(2):
        for value in range(rank + 1):
            mean(torch.tensor(float(value + epoch)))
            log(metrics, "mean", mean)
        seen = [float(value + epoch) for other in range(dist.get_world_size()) for value in range(other + 1)]
        assert metrics.end_evaluation(1) == {"mean": pytest.approx(sum(seen) / len(seen))}
    if rank == 0:  # the other rank's object has no new values, but takes part
        mean(torch.tensor(8.0))
        log(metrics, "mean", mean)
    assert metrics.end_evaluation(2) == {"mean": 8.0}
    if rank == 0:
        log(metrics, "lonely", torchmetrics.MeanMetric())
    with pytest.raises(DistributedError, match=r"'lonely'.*\[1.*\] have not logged"):
        metrics.end_evaluation(3)
    with pytest.raises(ConfigError, match="sync_on_compute"):
        log(metrics, "local", torchmetrics.MeanMetric(sync_on_compute=False))


@check
def on_a_gpu_disagreement_is_settled_two_windows_later_at_the_same_place():
    """Has a GPU's lag, with copies that arrive at once."""

    class Event:
        def synchronize(self):
            pass

    metrics, _, rank, sunk = build()
    calls = Counting.exchanged
    calls.clear()
    start, exchange._start_copy = exchange._start_copy, lambda vector: (vector.clone(), Event())
    try:
        world = dist.get_world_size()
        for step in range(1, 8):
            metrics.poll(step)
            assert len(calls) == min(max(step - 2, 0), 2)  # flushes in flight at the agreement need an exchange each
            log(metrics, f"only{rank}", torch.tensor(float(step)), sync_dist=True)
            log(metrics, "all", torch.tensor(float(step + rank)), sync_dist=True)
            if step >= 3:
                expected = {f"only{other}": step - 2.0 for other in range(world)}
                assert metrics.logged == expected | {"all": step - 2 + (world - 1) / 2}
            metrics.flush(step)
        metrics.drain()
        assert metrics.logged["all"] == 7 + (world - 1) / 2
        if rank == 0:
            assert [step for _, step in sunk] == list(range(1, 8))
    finally:
        exchange._start_copy = start


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks(world_size):
    all_checks(world_size)


@given(
    st.lists(
        st.lists(
            st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.integers(0, 50)).filter(
                lambda part: part[2] or part[:2] == (0.0, 0.0)
            ),
            min_size=3,
            max_size=3,
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_merge_weighs_as_one_process_would(ranks):
    published = tuple(Published(mode, mode, False, mode, False, True, False) for mode in ("mean", "sum", "max"))
    rows = [
        exchange.RankValues(published, *([part[index] for part in parts] for index in (0, 2, 1))) for parts in ranks
    ]
    merged = {value.published.mode: value.reduced for value in exchange.merge(rows)}
    for index, mode in enumerate(("mean", "sum", "max")):
        present = [parts[index] for parts in ranks if parts[index][2]]
        if not present:
            assert mode not in merged
            continue
        totals = [number + device for number, device, _ in present]
        expected = {
            "mean": sum(totals) / sum(weight for *_, weight in present),
            "sum": sum(totals),
            "max": max(max(number, device) for number, device, _ in present),
        }[mode]
        assert merged[mode] == pytest.approx(expected)
