from __future__ import annotations

import functools
import pickle
from datetime import timedelta

import pytest
import torch
from torch import nn

from fabricamp.errors import ConfigError
from fabricamp.gradients.memory import GradientMemory
from fabricamp.strategies import (
    DDP,
    IN_PLACE,
    STRATEGIES,
    DDPStrategy,
    Environment,
    SingleDeviceStrategy,
    Strategy,
    strategy_from,
)
from tests.windows import summed


def average_hook(state, bucket):
    raise AssertionError("never called here")


def test_names_and_auto():
    assert isinstance(strategy_from("single", 1), Strategy)
    assert isinstance(strategy_from("ddp", 4), DDP)
    assert isinstance(strategy_from("auto", 1), Strategy)
    assert isinstance(strategy_from("auto", 2), DDP)
    assert isinstance(strategy_from("ddp", 1), DDP)
    own = DDP(static_graph=True)
    assert strategy_from(own, 2) is own
    assert {"single", "ddp"} <= set(STRATEGIES.names())


@pytest.mark.parametrize(
    ("name", "world_size", "kind"),
    [
        ("auto", 1, SingleDeviceStrategy),
        ("single", 1, SingleDeviceStrategy),
        ("single_device", 1, SingleDeviceStrategy),
        ("auto", 2, DDPStrategy),
        ("ddp", 2, DDPStrategy),
        ("ddp_spawn", 2, DDPStrategy),
        ("ddp_find_unused_parameters_true", 2, DDPStrategy),
    ],
)
def test_a_name_gives_lightnings_class(name, world_size, kind):
    strategy = strategy_from(name, world_size)
    assert type(strategy) is kind
    assert type(pickle.loads(pickle.dumps(strategy))) is kind


@pytest.mark.parametrize(
    ("value", "world_size", "words"),
    [
        ("dpp", 1, ["'dpp'", "did you mean 'ddp'", "'single'"]),
        ("single", 2, ["one process", "2", "strategy='ddp'"]),
        (Strategy(), 3, ["one process", "3"]),
        (DDP, 1, ["DDP()"]),
        (None, 1, ["None", "'auto'", "'ddp'"]),
    ],
)
def test_what_cannot_be_a_strategy_is_said(value, world_size, words):
    with pytest.raises(ConfigError) as caught:
        strategy_from(value, world_size)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb='25'"),
        ({"bucket_cap_mb": True}, "bucket_cap_mb=True"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": timedelta(seconds=-1)}, "timeout="),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"bucket_cap_mb": float("inf")}, "bucket_cap_mb=inf"),
        ({"comm_hook": functools.partial(average_hook, None)}, "partial"),
        ({"timeout": "1h"}, "timeout='1h'"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"comm_hook": 3}, "comm_hook=3"),
        ({"comm_hook": lambda state: state}, "(state, bucket)"),
        ({"static_graph": "yes"}, "static_graph='yes'"),
        ({"find_unused_parameters": 1}, "find_unused_parameters=1"),
        ({"gradient_as_bucket_view": None}, "gradient_as_bucket_view=None"),
        ({"broadcast_buffers": 0}, "broadcast_buffers=0"),
    ],
)
def test_options_are_checked_in_the_constructor(options, word):
    with pytest.raises(ConfigError) as caught:
        DDP(**options)
    assert word in str(caught.value)


def test_strategies_pickle_before_setup():
    options = {
        "find_unused_parameters": True,
        "bucket_cap_mb": 0.5,
        "comm_hook": ({"a": 1}, average_hook),
        "timeout": 90,
    }
    copy = pickle.loads(pickle.dumps(DDP(**options)))
    assert (copy.find_unused_parameters, copy.bucket_cap_mb) == (True, 0.5)
    assert copy.comm_hook == ({"a": 1}, average_hook)
    assert copy.timeout == timedelta(seconds=90)
    assert type(pickle.loads(pickle.dumps(Strategy()))) is Strategy


def test_single_keeps_everything_where_it_is():
    strategy = Strategy()
    strategy.setup_environment(Environment(), torch.device("cpu"))
    module = nn.Linear(2, 2)

    def step(batch, batch_idx):
        return batch

    assert strategy.wrap_module(module, step, automatic=True, accumulates=True) is step
    assert strategy.rewrap_module(step) is step
    assert strategy.reduce_gradients() is IN_PLACE
    assert strategy.reduce_gradients(GradientMemory(list(module.parameters()))) is IN_PLACE
    assert strategy.broadcast([1]) == [1]
    assert strategy.all_gather_object("x") == ["x"]
    assert strategy.all_gather(torch.tensor([1, 2])).tolist() == [[1, 2]]
    assert strategy.module_state(module).keys() == module.state_dict().keys()
    assert strategy.store is None
    with strategy.no_sync():
        strategy.barrier("here")
    strategy.teardown()
    assert (strategy.rank, strategy.world_size) == (0, 1)


def test_single_sums_elsewhere_are_what_the_update_reads():
    memory = summed(torch.ones(2))
    gradients = Strategy().reduce_gradients(memory)
    assert gradients.tensors is memory.flat.tensors
    assert gradients.divisor == 1.0


@pytest.mark.parametrize("op", ["mean", "sum", "min", "max"])
def test_single_reduces_to_the_same_dtypes_as_several(op):
    strategy = Strategy()
    attached = torch.ones(3, requires_grad=True) * 2
    assert not strategy.reduce(attached, op).requires_grad
    assert strategy.reduce(attached, op).tolist() == [2.0, 2.0, 2.0]
    dtype = {"mean": torch.float64, "sum": torch.int64}.get(op, torch.int32)
    assert strategy.reduce(torch.tensor(3, dtype=torch.int32), op).dtype == dtype


def test_reductions_that_do_not_exist():
    with pytest.raises(ConfigError, match="did you mean 'mean'"):
        Strategy().reduce(torch.ones(1), "meen")
    with pytest.raises(ConfigError, match="complex"):
        Strategy().reduce(torch.ones(1, dtype=torch.complex64), "max")
