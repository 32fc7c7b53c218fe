"""Decisions about a CUDA graph of the step, without a GPU: options, batches, effects of Python code, logged values."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fabricamp import Callback, ConfigError, CudaGraph, OptLevel
from fabricamp.cuda_graph import as_cuda_graph
from fabricamp.engine.graph import capture_errors, memory_budget, memory_pool
from fabricamp.engine.graph.batches import BatchIndex, Role, copied, signature, tensors_of
from fabricamp.engine.graph.cache import GraphCache
from fabricamp.engine.graph.capture import AccumulationGradients
from fabricamp.engine.graph.capture_consensus import CaptureConsensus, Stage
from fabricamp.engine.graph.captured import (
    hyperparameter_upload,
    kept_gradient,
    same_parameters,
    without_collection,
)
from fabricamp.engine.graph.evaluation import GraphEvaluation
from fabricamp.engine.graph.fallback import EagerFallback
from fabricamp.engine.graph.host_effects import (
    AttributeSnapshot,
    CapturedConstantsGuard,
    LogWatch,
    generators_of,
    host_generators,
)
from fabricamp.engine.graph.memory_pool import GraphPool
from fabricamp.engine.graph.optimizer_place import OptimizerPlace
from fabricamp.engine.graph.refusals import graph_refusal, group_refusal, reason_outside, said_of_outside, step_hooks
from fabricamp.engine.graph.seen_batches import SeenBatches
from fabricamp.engine.graph.warmup import Warmup
from fabricamp.engine.run_context import gathered
from fabricamp.errors import NotCapturableError
from fabricamp.gradients.memory import GradientMemory
from fabricamp.metrics import Metrics
from fabricamp.metrics.replay import MetricStates
from fabricamp.optimizers import LARC, FusedAdam, FusedSGD
from fabricamp.precision import OptimizerStep
from fabricamp.state import RunState, Scope
from fabricamp.strategies import DDP, FSDP, DelayedDDP, Environment
from fabricamp.strategies.base import Strategy
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer

# -- options ----------------------------------------------------------------------------------------------------------------------


def test_copies_of_outputs():
    one = torch.ones(2)
    given = {"loss": one, "more": [one, ("word", {"deep": one})], "count": 3}
    made = copied(given)
    assert torch.equal(made["more"][1][1].pop("deep"), one)
    assert made["loss"] is not one
    assert made["loss"].data_ptr() != one.data_ptr()
    assert (made["more"][1], made["count"], list(given["more"][1][1])) == (("word", {}), 3, ["deep"])


def test_options():
    assert as_cuda_graph(None) is None
    assert as_cuda_graph(False) is None
    assert as_cuda_graph(True) == CudaGraph()
    assert as_cuda_graph("auto") == CudaGraph(required=False)
    assert as_cuda_graph(CudaGraph(warmup=5)).warmup == 5
    for wrong in (1, "always", [True]):
        with pytest.raises(ConfigError, match="allowed: True, False, 'auto'"):
            as_cuda_graph(wrong)
    for wrong in (
        {"warmup": 2},
        {"shapes": 0},
        {"check_every": -1},
        {"warmup": True},
        {"required": None},
        {"compare": 0},
    ):
        with pytest.raises(ConfigError, match=f"CudaGraph\\({next(iter(wrong))}="):
            CudaGraph(**wrong)
    with pytest.raises(ConfigError, match="CudaGraph has no argument 'warm_up'; did you mean 'warmup'"):
        CudaGraph(warm_up=3)
    with pytest.raises(
        ConfigError, match=r"CudaGraph\(compare=False, check_every=5\) is not allowed: check_every repeats"
    ):
        CudaGraph(compare=False, check_every=5)
    assert not CudaGraph(compare=False, steps=4).one_by_one().compare


def test_refused_by_the_constructor_and_eager_where_it_may_be(caplog):
    with pytest.raises(ConfigError, match="needs a CUDA GPU, and this run is on 'cpu'"):
        quiet_trainer(cuda_graph=True)
    weights = []
    for graph in (False, "auto"):
        module = Classifier()
        shows = {"enable_model_summary": True, "enable_progress_bar": True}
        quiet_trainer(cuda_graph=graph, max_epochs=1, **shows).fit(module, loader())
        weights.append([one.clone() for one in module.parameters()])
    assert all(map(torch.equal, *weights))
    assert caplog.text.count("cuda_graph='auto' runs eagerly: a CUDA graph needs a CUDA GPU") == 1
    assert ["eager" in line for line in caplog.messages if line.startswith("epoch")] == [False, True]


class Own(Strategy):
    name = "own"


STRATEGIES = {
    "single": Strategy,
    "ddp": DDP,
    "ddp that searches": partial(DDP, find_unused_parameters=True),
    "delayed_ddp": DelayedDDP,
    "fsdp": FSDP,
    "fsdp that offloads": partial(FSDP, offload=True),
    "fsdp that splits layers": partial(FSDP, parallelize=print, tensor_parallel=2),
    "fsdp with larger shards": partial(FSDP, reshard_after_forward=2),
    "own": Own,
}


class Parts:
    """The parts of a fit on a GPU that the refusals read."""

    def __init__(
        self,
        optimizer,
        *,
        callbacks=(),
        accumulate=1,
        strategy="single",
        schedulers=(),
        manual=False,
        precision=None,
        detect_anomaly=False,
    ):
        self.module = Classifier()
        self.module.automatic_optimization = not manual
        self.strategy = STRATEGIES[strategy]()
        self.strategy.device = torch.device("cuda")
        self.precision = precision or OptLevel("O0")
        self.optimizers = [optimizer(self.module.parameters())]
        self.optimizer_steps = [self.precision.step_of(self.optimizers[0], self.strategy, None)]
        self.schedulers = list(schedulers)
        settings = SimpleNamespace(most_accumulated=accumulate, detect_anomaly=detect_anomaly, cuda_graph=CudaGraph())
        self.settings = settings
        self._callbacks = callbacks

    def hooks(self, name):
        return [getattr(one, name) for one in self._callbacks if name in type(one).__dict__]


class Middle(Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        """Looks."""


class OwnStep(OptimizerStep):
    def run(self, loss):
        super().run(loss)


class OfOwnSteps(OptLevel):
    def step_of(self, optimizer, strategy, clip):
        return OwnStep(self, optimizer, strategy, clip)


@pytest.mark.parametrize(
    ("optimizer", "options", "words"),
    [
        (FusedAdam, {}, ""),
        (lambda parameters: LARC(FusedSGD(parameters, lr=0.1)), {}, ""),
        (torch.optim.AdamW, {"schedulers": [1]}, ""),
        (torch.optim.AdamW, {"precision": OfOwnSteps("O2")}, "OfOwnSteps has a step of its own, so AdamW cannot"),
        (FusedAdam, {"precision": OfOwnSteps("O2")}, ""),
        (torch.optim.LBFGS, {}, "LBFGS runs the forward itself"),
        (FusedAdam, {"callbacks": [Middle()]}, "on_before_optimizer_step runs in the middle"),
        (FusedAdam, {"accumulate": 2}, ""),
        (FusedAdam, {"strategy": "delayed_ddp", "accumulate": 2}, ""),
        (FusedAdam, {"strategy": "ddp"}, ""),
        (FusedAdam, {"strategy": "ddp", "accumulate": 2}, ""),
        (FusedAdam, {"strategy": "own"}, "strategy 'own' is not captured; give strategy='delayed_ddp'"),
        (FusedAdam, {"strategy": "fsdp"}, ""),
        (FusedAdam, {"strategy": "fsdp", "accumulate": 2}, "accumulation is not captured with strategy 'fsdp'"),
        (FusedAdam, {"strategy": "fsdp that offloads"}, "FSDP(offload=True) updates in host memory"),
        (FusedAdam, {"strategy": "fsdp that splits layers"}, "steps of layers that are split are not captured"),
        (FusedAdam, {"strategy": "fsdp with larger shards"}, "steps of FSDP(reshard_after_forward=2) are not captured"),
        (FusedAdam, {"strategy": "ddp that searches"}, "DDP(find_unused_parameters=True) searches on the host"),
        (FusedAdam, {"detect_anomaly": True}, "detect_anomaly=True reads each operation's result on the host"),
        (FusedAdam, {"manual": True}, "manual optimization is not captured"),
    ],
)
def test_what_is_refused_before_the_first_batch(optimizer, options, words):
    reason = graph_refusal(Parts(optimizer, **options))
    assert reason.startswith(words) if words else not reason


CAPTURABLE = {"capturable": True}
SCHEDULED = {"schedulers": [1]}


def skipping(level="O2"):
    """Returns a precision that may skip steps."""
    precision = OptLevel(level)
    precision.take_nan_policy("skip")
    precision.verdicts = precision.verdicts or SimpleNamespace(launch_end=lambda loss: None)
    return precision


@pytest.mark.parametrize(
    ("optimizer", "given", "options", "words"),
    [
        (FusedAdam, {}, SCHEDULED, ""),
        (torch.optim.AdamW, CAPTURABLE, {}, ""),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1), **CAPTURABLE}, SCHEDULED, ""),
        (torch.optim.AdamW, {"fused": True, **CAPTURABLE}, {"precision": skipping()}, ""),
        (torch.optim.AdamW, {}, {}, "it reads numbers on the host"),
        (torch.optim.AdamW, {"fused": True}, {}, "it reads numbers on the host"),
        (torch.optim.SGD, {"momentum": 0.9}, {}, ""),
        (torch.optim.SGD, {"momentum": 0.9, "lr": torch.tensor(0.1), "fused": True}, SCHEDULED, ""),
        (torch.optim.SGD, {"momentum": 0.9, "lr": torch.tensor(0.1)}, {}, "it reads its lr tensor on the host"),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}, {"precision": skipping()}, ""),
        (
            torch.optim.SGD,
            {"momentum": 0.9, "dampening": 0.1, "fused": True},
            {"precision": skipping()},
            "precision 'O2' may skip a step, and the host has to decide",
        ),
        (torch.optim.SGD, {"momentum": 0.9}, SCHEDULED, "its lr is a number, which a schedule changes"),
        (torch.optim.Adagrad, {}, {}, "it reads numbers on the host"),
        (lambda own: LARC(torch.optim.SGD(own, lr=0.1)), {}, {}, "it reads numbers on the host"),
        (torch.optim.AdamW, CAPTURABLE, SCHEDULED, "its lr is a number, which a schedule changes"),
        (torch.optim.RMSprop, CAPTURABLE, {"precision": skipping()}, "precision 'O2' may skip a step"),
        (torch.optim.AdamW, CAPTURABLE, {"precision": skipping("O0")}, "precision 'O0' may skip a step"),
    ],
)
def test_which_optimizers_step_outside_of_the_graph(optimizer, given, options, words):
    """And what that means for several steps in one launch."""
    parts = Parts(lambda parameters: optimizer(parameters, **given), **options)
    reason = reason_outside(parts)
    assert reason.startswith(words) if words else not reason
    name = type(parts.optimizers[0]).__name__
    if words:
        parts.feed = SimpleNamespace(length=10, hooks_between=False)
        together = group_refusal(parts, [])
        assert (
            together
            == f"{name}.step runs after each replay, outside of the graph: {reason}; take FusedAdam or FusedSGD"
        )
    line = said_of_outside(parts.optimizers[0], reason)
    assert f"{name}.step runs after each replay, outside of the graph: {reason}. The host launches the update" in line


def test_a_graph_whose_optimizer_steps_outside_notices_other_parameters_and_not_other_numbers():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    may_replay = same_parameters(optimizer)
    optimizer.param_groups[0].update(lr=0.3, betas=(0.5, 0.9))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert may_replay()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert not may_replay()


def test_an_lr_tensor_on_another_device_and_step_hooks_are_read_on_the_host():
    """torch reads a CPU tensor on the host though the parameters are on a GPU; here the parameters are on the meta device."""
    parts = Parts(lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.1), fused=True))
    assert reason_outside(parts) == ""
    parts.optimizers[0].param_groups[0]["params"] = [nn.Parameter(torch.ones(2, device="meta"))]
    assert reason_outside(parts).startswith("it reads its lr tensor on the host")
    parts = Parts(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert reason_outside(parts) == ""
    parts.optimizers[0].register_step_post_hook(lambda *_: None)
    assert reason_outside(parts).startswith("its step hooks run on the host")


@pytest.mark.parametrize(
    ("name", "value", "change"),
    [
        ("lr", np.float32(0.1), lambda value: np.float32(0.2)),
        ("lr", np.array(0.1), lambda value: np.array(0.2)),
        ("betas", np.array([0.9, 0.99]), lambda value: value.__setitem__(0, 0.5) or value),
        ("betas", np.array([0.9, 0.99]), lambda value: np.array([0.5, 0.99])),
        ("betas", [0.9, 0.99], lambda value: [0.5, 0.99]),
        ("betas", [0.9, 0.99], lambda value: value.__setitem__(0, 0.5) or value),
        ("eps", torch.tensor(0.1), lambda value: value.fill_(0.2)),
        ("foreach", None, lambda value: True),
    ],
)
def test_every_number_that_a_captured_optimizer_reads_on_the_host_counts(name, value, change):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
    group = optimizer.param_groups[0]
    group["params"] = [nn.Parameter(torch.ones(2, device="meta"))]  # in place of a GPU
    group[name] = value
    may_replay = hyperparameter_upload(optimizer)
    assert may_replay()
    group[name] = change(group[name])
    assert not may_replay()


class PoolOf(GraphPool):
    """A pool whose segments are given, as torch lists them."""

    def __init__(self):
        super().__init__(SimpleNamespace(device=torch.device("cpu"), cuda_stream=7))
        self.blocks = []
        self._of_graphs = self._allocated()

    def _segments(self):
        return [
            {
                "stream": stream,
                "total_size": size,
                "blocks": [{"address": address, "size": size, "state": "active_allocated"}],
            }
            for stream, address, size in self.blocks
        ]


def test_the_product_for_workspaces_draws_no_numbers_and_may_run_anywhere():
    """A run may be within no_grad or autocast, and its random numbers are those of a run without a graph."""
    before = torch.get_rng_state()
    for context in (torch.inference_mode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            memory_pool._make_workspaces(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_of_a_stream_that_a_captured_step_forks_is_found():
    pool = PoolOf()
    pool.blocks = [(8, 1000, 16)]
    assert pool.reclaim()  # no capture has used stream 8
    pool = PoolOf()
    pool.blocks = [(8, 500, 16)]
    pool.note_capture()
    pool.blocks = [(8, 1000, 16)]
    assert not pool.reclaim()


def test_a_larger_tensor_at_the_address_of_a_freed_one_is_found():
    pool = PoolOf()
    pool.blocks = [(7, 1000, 16)]
    pool._of_graphs = pool._allocated()
    assert pool.reclaim()
    pool._of_graphs = pool._allocated()
    pool.blocks = [(7, 1000, 64)]
    assert not pool.reclaim()


def test_state_that_is_a_gradient_itself_is_found():
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.step()
    handed = [(parameter, parameter.grad)]
    assert not kept_gradient(optimizer, handed)
    optimizer.state[parameter]["last"] = parameter.grad[2:]
    assert kept_gradient(optimizer, handed) == "last"
    assert not kept_gradient(optimizer, [(parameter, None)])


# -- accumulations -----------------------------------------------------------------------------------------------------------------


def test_gradients_of_an_accumulation_have_an_address_each():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    gradients = AccumulationGradients(module)
    assert gradients.settle() == [None] * 4
    module(torch.ones(1, 3)).sum().backward()
    own = [one.grad.clone() for one in module.parameters()]
    fixed = gradients.settle()
    assert all(
        one.grad is address and torch.equal(address, was)
        for one, address, was in zip(module.parameters(), fixed, own, strict=True)
    )
    assert gradients.prepare(fixed)
    module[0].weight.grad = torch.full((3, 3), 7.0)
    assert gradients.prepare(fixed)
    assert module[0].weight.grad is fixed[0]
    assert fixed[0].eq(7).all()
    module[1].weight.grad = None
    assert not gradients.prepare(fixed)
    module.zero_grad()
    assert gradients.prepare([None] * 4)
    assert not gradients.prepare(fixed)


def test_views_of_what_was_exchanged_stay_at_the_end_of_an_accumulation():
    module = nn.Linear(3, 2)
    gradients, bucket = AccumulationGradients(module), torch.ones(8)
    module.weight.grad, module.bias.grad = bucket[:6].view(2, 3), torch.ones(2)
    weight, bias = gradients.settle(closes=True)
    assert weight.data_ptr() == bucket.data_ptr()
    assert bias is module.bias.grad
    assert not bias._is_view()
    assert gradients.settle()[0].data_ptr() != bucket.data_ptr()


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_within_a_capture(enabled):
    class Loop:
        def __init__(self):
            self.itself = self

    before, threshold = gc.isenabled(), gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(ValueError), without_collection():
            gone = weakref.ref(Loop())
            assert len([[] for _ in range(5000)]) == 5000
            assert gone() is not None
            raise ValueError("of a step")
        assert gc.isenabled() == enabled
    finally:
        gc.set_threshold(*threshold)
        (gc.enable if before else gc.disable)()


def test_generators_of_parts_are_known_to_graphs():
    module = nn.Sequential(nn.Linear(1, 1))
    module.own = module[0].same = torch.Generator()
    assert generators_of(module) == []  # of a GPU


def test_presence_follows_sums_and_replays():
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    memory = GradientMemory(weights, sums=True)
    before = memory.presence
    weights[1].grad = torch.ones(2)
    memory.add()
    after = memory.presence
    assert (before.parameters, after.parameters) == ((False,) * 3, (False, True, False))
    memory.clear()
    assert memory.presence == before
    memory.presence = after
    assert [one is None for one in memory.local().tensors] == [True, False, True]


def warming(*, shapes=2, eager_steps=0):
    """Returns a warm-up of three batches, the graphs that it asks for, and what it says."""
    said = []
    options = CudaGraph(warmup=3, shapes=shapes)
    graphs = GraphCache(
        SimpleNamespace(device=torch.device("cpu"), cuda_stream=0), RunState(), None, sums=False, say=said.append
    )
    seen = SeenBatches("training_step", options, said.append)
    warmup = Warmup(options, SimpleNamespace(eager_steps=eager_steps), graphs, seen)
    graphs.on_drop = warmup.begin_again
    return warmup, graphs, said


ALONE = Role(1, opens=True, closes=True)


def test_a_batch_is_captured_after_enough_eager_ones_of_its_shape_and_role():
    warmup, graphs, _ = warming()
    first, last = Role(2, opens=True, closes=False), Role(2, opens=False, closes=True)
    batch = torch.zeros(2)
    assert warmup.count(("a", first), batch, batch) == 1
    assert warmup.count(("a", last), batch, batch) == 1
    assert not warmup.is_over(("a", first))  # once is too few for a role, however many its shape has
    assert warmup.count(("a", first), batch, batch) == 2
    assert warmup.is_over(("a", first))
    assert not warmup.is_over(("a", last))
    graphs.steps["a", first] = None
    assert not warmup.is_over(("a", first))
    graphs.steps.clear()
    warmup.leave_out(("a", first))
    assert not warmup.is_over(("a", first))
    graphs.drop()
    assert not warmup.is_over(("a", first))  # each role runs eagerly again
    for _ in range(2):
        warmup.count(("a", first), batch, batch)
    assert warmup.is_over(("a", first))
    warmup.begin()
    assert not warmup.is_over(("a", first))


def test_a_strategy_may_ask_for_eager_steps_and_only_some_shapes_get_graphs():
    warmup, graphs, said = warming(shapes=1, eager_steps=3)
    batch = torch.zeros(2)
    for _ in range(2):
        warmup.count(("a", ALONE), batch, batch)
    assert not warmup.is_over(("a", ALONE))
    warmup.count(("a", ALONE), batch, batch)
    assert warmup.is_over(("a", ALONE))
    graphs.steps["a", ALONE] = None
    for _ in range(3):
        assert not said
        warmup.count(("b", ALONE), batch, batch)
    assert "CudaGraph(shapes=1) allows no further graph" in said[0]
    assert not warmup.is_over(("b", ALONE))


def test_a_loss_weight_that_is_a_number_may_not_change():
    warmup, graphs, _ = warming()
    key = ("a", ALONE)
    assert [warmup.changing_weight(key, one) for one in (4.0, 4.0)] == ["", ""]
    assert "a number that differs between batches of one shape" in warmup.changing_weight(key, 5.0)
    graphs.drop()
    assert warmup.changing_weight(key, 5.0) == ""


def test_graphs_whose_lent_memory_is_kept_are_dropped_and_lend_none_again():
    _, graphs, said = warming()
    assert graphs.lends_to(ALONE)
    assert not graphs.lends_to(Role(2, opens=True, closes=True))
    graphs.pool = PoolOf()
    graphs.pool.blocks = [(7, 1000, 16)]
    assert graphs.reclaim()  # before the first capture nothing is lent
    graphs.steps["a", ALONE] = None
    graphs.pool = PoolOf()
    graphs.pool.blocks = [(7, 1000, 16)]
    graphs.stream.synchronize = lambda: said.append("waits")
    assert not graphs.reclaim()
    assert (graphs.steps, graphs.lends_to(ALONE), said[1:]) == ({}, False, ["waits"])
    assert "a tensor of an eager step is kept in the graphs' memory" in said[0]


@pytest.mark.parametrize("required", [True, False])
def test_giving_up_is_an_error_where_a_graph_is_required(required, caplog):
    dropped = []
    fallback = EagerFallback(CudaGraph(required=required), Strategy(), lambda: dropped.append(1), "test_step")
    error = ValueError("cause")
    if required:
        with pytest.raises(ConfigError, match="cuda_graph: it waits; or give cuda_graph='auto'") as caught:
            fallback.give_up("it waits", error)
        assert caught.value.__cause__ is error
        assert (fallback.why, dropped) == ("", [])
    else:
        fallback.give_up("it waits", error)
        assert (fallback.why, dropped) == ("it waits", [1])
        assert caplog.messages == ["cuda_graph='auto' runs test_step eagerly: it waits"]


def meeting(stages):
    strategy = DDP()
    environment = Environment(rank=int(os.environ["RANK"]), world_size=2)
    strategy.setup_environment(environment, torch.device("cpu"))
    consensus = CaptureConsensus(strategy, warmup=3)
    found = []
    for stage in stages[environment.rank]:
        found.append((consensus.all_ready(stage, 2), consensus.ended))
        if consensus.ended:
            break
    agreed = [consensus.all(flag) for flag in (True, environment.rank == 0)]
    role = Role(1, opens=True, closes=True)
    checked = [consensus.should_check(3, role, replays=number > 4 or environment.rank == 0) for number in range(9)]
    consensus.ended = False
    checked.append(consensus.should_check(1, role, replays=True))
    strategy.teardown()
    return found, agreed, checked


def test_ranks_capture_at_the_same_batch_and_stop_asking():
    eager, ready, replay = Stage.EAGER, Stage.READY, Stage.REPLAY
    first = [eager, ready, ready, replay, replay, replay, replay]
    second = [eager, eager, ready, replay, ready, *[replay] * 3]
    expected = [(False, False), (False, False), (True, False), *[(False, False)] * 2]
    apart = [[replay, *[ready, replay] * 120], [eager] * 241]
    for found, agreed, checked in run_ranks(meeting, 2, [[*first, replay], second], backend=None):
        assert found == [*expected, (False, False), (False, False), (False, True)]
        assert agreed == [True, False]
        assert checked == [
            number in (5, 8) for number in range(10)
        ]  # the first of each three was not a replay on one of the ranks
    for found, *_ in run_ranks(meeting, 2, apart, backend=None):
        assert len(found) == 8 * (3 + 12 * 2)
        assert found[-1] == (False, True)


# -- memory -----------------------------------------------------------------------------------------------------------------------


class Moment:
    """Replaces an event of the GPU: each is 250 ms after the one before it."""

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 250.0


class Card:
    """Replaces the GPU memory sizes that torch reports."""

    def __init__(self, monkeypatch):
        self.allocated = self.peak = self.free = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "Event", Moment)
        monkeypatch.setattr(memory_budget, "free_memory", lambda device: self.free)

    def reset(self, device):
        self.peak = self.allocated

    def step(self, size):
        self.peak = max(self.peak, self.allocated + size)
        return size


@pytest.mark.parametrize(
    ("required", "options", "enough"),
    [
        (True, {}, 100),
        (True, {"kept": 10}, 110),
        (True, {"kept": 10, "shared": 40}, 70),
        (True, {"shared": 200}, 0),
        (True, {"shapes": 2}, 400),
        (False, {}, 400),
        (False, {"kept": 10, "shared": 40, "shapes": 1}, 370),
        (False, {"lends": True}, 300),
        (False, {"lends": True, "kept": 10, "shared": 250}, 50),
        (True, {"lends": True}, 100),
        (True, {"lends": True, "shapes": 2, "shared": 40}, 260),
    ],
)
def test_room_for_a_graph_and_for_steps_beside_it(required, options, enough, monkeypatch):
    card, state = Card(monkeypatch), RunState()
    card.allocated, card.peak = 1000, 5000
    one = memory_budget.GraphMemoryBudget(torch.device("cuda", 0), state, required=required)
    assert one.measured("small", lambda: card.step(100)) == 100
    assert one.measured("large", lambda: card.step(300)) == 300
    assert (one.eager_bytes("small"), one.eager_bytes("large"), one.eager_bytes("unseen")) == (100, 300, 0)
    assert state.peak_bytes == 5000
    card.free = enough
    one.check("small", **options)
    assert one.free() == enough
    assert (one.eager_seconds("small"), one.eager_seconds("unseen")) == (0.25, 0.0)
    with one.left_out_of_peaks():
        card.step(7000)
    assert (state.peak_bytes, card.peak) == (5000, 1000)
    if not enough:
        return
    card.free = enough - 1
    with pytest.raises(
        memory_budget.GraphMemoryError, match=rf"and {enough - 1} bytes \(0.00 GiB\) of cuda:0 are free"
    ) as caught:
        one.check("small", **options)
    assert ("CudaGraph(shapes=" in str(caught.value)) is ("shapes" in options)


# -- batches ----------------------------------------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.builds(torch.zeros, st.lists(st.integers(0, 3), max_size=3)),
    st.integers(),
    st.text(max_size=3),
    st.none(),
)
BATCHES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(BATCHES)
def test_copies_have_the_signature_and_the_tensors(batch):
    twin = copied(batch)
    assert signature(twin) == signature(batch)
    assert hash(signature(twin)) == hash(signature(batch))
    for own, other in zip(tensors_of(batch), tensors_of(twin), strict=True):
        assert own is not other
        assert torch.equal(own, other)


def test_other_batches_have_other_signatures():
    batches = [
        (torch.zeros(2), torch.zeros(2)),
        [torch.zeros(2), torch.zeros(2)],
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        {"a": torch.zeros(2), "b": torch.zeros(2)},
        (torch.zeros(2), torch.zeros(2), 1),
        (torch.zeros(2), torch.zeros(2), True),
    ]
    assert len({signature(batch) for batch in batches}) == len(batches)
    with pytest.raises(NotCapturableError, match="holds a SimpleNamespace"):
        signature((torch.zeros(2), SimpleNamespace(x=torch.zeros(2))))


@pytest.mark.parametrize(
    "use",
    [
        lambda index: index % 2,
        lambda index: 2 * index,
        lambda index: index == 0,
        lambda index: index > 3,
        lambda index: [1, 2][index],
        range,
        lambda index: f"{index}",
        lambda index: {index: 1},
        lambda index: 1 if index else 0,
        lambda index: torch.tensor(int(index)),
        lambda index: -index,
    ],
)
def test_an_index_may_be_passed_on_and_not_used(use):
    held = (BatchIndex(), {"index": BatchIndex()})
    with pytest.raises(NotCapturableError, match="training_step uses batch_idx"):
        use(held[0])


def test_no_tensor_takes_it_as_an_index():
    with pytest.raises((NotCapturableError, TypeError, IndexError)):
        torch.zeros(3)[BatchIndex()]


# -- effects of Python code -------------------------------------------------------------------------------------------------------


class Owner(nn.Module):
    temperature = 1.0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.number, self.text, self.nan, self.nothing = 1, "a", float("nan"), None
        self.items, self.table, self.names = [1, [2]], {"a": {"b": []}}, {1, 2}
        self.tensor, self.pair = torch.zeros(2), (1, (2, 3))


EFFECTS = {
    "number": lambda one: setattr(one, "number", 2),
    "text": lambda one: setattr(one, "text", "b"),
    "nothing": lambda one: setattr(one, "nothing", 0),
    "items": lambda one: one.items[1].append(3),
    "table": lambda one: one.table["a"]["b"].append(torch.zeros(1)),
    "names": lambda one: one.names.add(3),
    "tensor": lambda one: setattr(one, "tensor", one.tensor + 1),
    "new": lambda one: setattr(one, "new", 1),
    "text gone": lambda one: delattr(one, "text"),
    "_buffers": lambda one: setattr(one, "count", one.count + 1),
    "_parameters": lambda one: setattr(one.layer, "bias", nn.Parameter(torch.zeros(2))),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_are_named(name):
    owner = Owner()
    before = AttributeSnapshot(owner.modules())
    assert before.changed() is None
    owner.count.add_(1)
    owner.layer.weight.data.add_(1)  # on the device, so a replay repeats it
    assert before.changed() is None
    EFFECTS[name](owner)
    effect = before.changed()
    assert effect.name == name.partition(" ")[0]
    assert str(effect) == f"{type(effect.owner).__name__}.{effect.name}"


CHANGES = {
    "a number": (lambda one: setattr(one, "number", 2), "number"),
    "one of a layer": (lambda one: setattr(one.layer, "in_features", 3), "in_features"),
    "a mode": (lambda one: one.eval(), "training"),
    "a hyper-parameter": (lambda one: one.hparams.update(lr=0.2), "lr"),
    "one that is gone": (lambda one: delattr(one, "text"), "text"),
    "one that hides its class's": (lambda one: setattr(one, "temperature", 0.5), "temperature"),
    "one of a class": (lambda one: setattr(type(one), "temperature", 0.5), "temperature"),
    "one of a tuple": (lambda one: setattr(one, "pair", (1, (2, 4))), "pair"),
    "a loose tensor": (lambda one: setattr(one, "tensor", torch.zeros(2)), "tensor"),
    "frozen": (lambda one: one.layer.weight.requires_grad_(False), ""),
    "other memory": (lambda one: setattr(one.layer.weight, "data", torch.zeros(2, 2)), ""),
    "another parameter": (lambda one: setattr(one.layer, "bias", nn.Parameter(torch.zeros(2))), ""),
    "another layer": (lambda one: setattr(one, "layer", nn.Linear(2, 2)), ""),
    "one layer more": (lambda one: setattr(one, "more", nn.Linear(2, 2)), ""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_graph_has_as_constants(name):
    owner = type("Own", (Owner,), {})()  # a class of its own, which a change may change
    owner.hparams = {"lr": 0.1}
    constants = CapturedConstantsGuard(owner, owner.hparams)
    owner.count.add_(1)
    assert constants.are_unchanged()
    assert constants.changed() == ""
    change, named = CHANGES[name]
    change(owner)
    assert not constants.are_unchanged()
    assert constants.changed() == named


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_draws_on_the_host_are_seen(draw):
    before = host_generators()
    assert host_generators() == before
    draw()
    assert len([name for name, state in host_generators().items() if state != before[name]]) == 1


# -- logged values ----------------------------------------------------------------------------------------------------------------


def metrics():
    state = RunState()
    state.scope = Scope.TRAIN_STEP
    state.batch = torch.zeros(4)
    one = Metrics(state, Strategy())
    one.reads_cpu_tensors = False  # as on a GPU
    return one


def call(name, **options):
    from fabricamp.metrics.slots import Arguments

    return tuple(Arguments(name, **options))


def test_what_metrics_count_is_no_effect_and_what_they_list_is_one():
    module = nn.Module()
    module.error, module.listed = torchmetrics.MeanSquaredError(), torchmetrics.CatMetric()
    for one in (module.error, module.listed):  # the first update may set more attributes
        one.update(*[torch.ones(3)] * (2 if one is module.error else 1))
    attributes, constants = AttributeSnapshot(module.modules()), CapturedConstantsGuard(module, {})
    module.error.update(torch.ones(3), torch.zeros(3))
    assert attributes.changed() is None
    assert constants.are_unchanged()
    module.listed.update(torch.ones(3))
    assert str(attributes.changed()) == "CatMetric.value"


HYPERPARAMETER_CHANGES = {
    "another number": lambda one: one.param_groups[0].update(weight_decay=0.1),
    "another word": lambda one: one.param_groups[0].update(amsgrad="no"),
    "a further group": lambda one: one.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "a parameter less": lambda one: one.param_groups[0]["params"].pop(),
    "a parameter more": lambda one: one.param_groups[0]["params"].append(nn.Parameter(torch.ones(1))),
    "another parameter in the same memory": lambda one: one.param_groups[0].update(
        params=[nn.Parameter(one.param_groups[0]["params"][0].data)]
    ),
    "other memory": lambda one: setattr(one.param_groups[0]["params"][0], "data", torch.ones(2)),
    "another tensor": lambda one: one.param_groups[0].update(lr=torch.tensor(0.1)),
    "a loaded state": lambda one: one.load_state_dict(copy.deepcopy(one.state_dict())),
}


@pytest.mark.parametrize("name", HYPERPARAMETER_CHANGES)
def test_what_a_graph_has_of_an_optimizer_that_is_not_fused(name):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1), capturable=True)
    may_replay = hyperparameter_upload(optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.2)
    assert may_replay()
    HYPERPARAMETER_CHANGES[name](optimizer)
    assert not may_replay()


STATE_CHANGES = {
    "another tensor": lambda one, entry: entry.update(momentum_buffer=torch.zeros(2)),
    "other memory": lambda one, entry: setattr(entry["momentum_buffer"], "data", torch.zeros(2)),
    "no state": lambda one, entry: one.state.clear(),
}


@pytest.mark.parametrize("name", STATE_CHANGES)
def test_state_that_a_hook_replaces_is_found_before_a_replay(name):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    optimizer.step()
    may_replay = hyperparameter_upload(optimizer)
    optimizer.step()  # in place, as a replay does
    assert may_replay()
    STATE_CHANGES[name](optimizer, optimizer.state[parameter])
    assert not may_replay()


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, LARC])
def test_step_hooks_that_come_or_go_count(wrap):
    inner = FusedSGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer = wrap(inner)
    registered = []
    for register in (
        inner.register_step_pre_hook,
        inner.register_step_post_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_post_hook,
    ):
        constants = CapturedConstantsGuard(nn.Linear(2, 2), {}, step_hooks(optimizer))
        assert constants.are_unchanged()
        registered.append(register(lambda *_: None))
        assert not constants.are_unchanged()
    for hook in registered:
        constants = CapturedConstantsGuard(nn.Linear(2, 2), {}, step_hooks(optimizer))
        hook.remove()
        assert not constants.are_unchanged()


def test_an_optimizer_goes_outside_of_the_graph_once_it_has_step_hooks():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    said = []
    told = []
    own = OfOwnSteps("O0")
    (plain, overridden) = (each.step_of(optimizer, Strategy(), None) for each in (OptLevel("O0"), own))
    parts = SimpleNamespace(precision=own, optimizers=[optimizer], optimizer_steps=[plain], schedulers=[])
    fallback = EagerFallback(CudaGraph(), Strategy(), drop=lambda: None)
    place = OptimizerPlace(parts, fallback, said.append)
    place.before_outside = told.append
    place.look_again()
    place.look_before_capture()
    assert not place.outside
    optimizer.register_step_post_hook(lambda *_: None)
    parts.optimizer_steps = [overridden]
    refusal = "OfOwnSteps has a step of its own, so SGD cannot step by itself after a replay"
    with pytest.raises(ConfigError, match=refusal):
        place.look_again()
    with pytest.raises(NotCapturableError, match=refusal):
        place.look_before_capture()
    assert (place.outside, told) == (False, [])
    parts.optimizer_steps = [plain]
    place.look_again()
    assert place.outside
    assert told[0].startswith("its step hooks run on the host")
    assert told[0] in said[0]
    place.look_again()
    place.look_before_capture()
    assert len(said) == 1


@pytest.mark.parametrize("beside", ["_OWN_FOLDER", "_TORCHS_FOLDER"])
def test_code_in_a_folder_whose_name_begins_as_ours_is_the_users(beside, monkeypatch):
    monkeypatch.setattr(capture_errors, "_LIBRARIES", ())  # torch's folder is beside those of other libraries
    folder = getattr(capture_errors, beside).rstrip(os.sep)
    users = f"{folder}-runs{os.sep}train.py"
    names = {}
    words = "raise RuntimeError('operation not permitted when stream is capturing')"
    exec(compile(f"def fail(): {words}", f"{folder}{os.sep}engine.py", "exec"), names)
    with pytest.raises(NotCapturableError) as caught, capture_errors.explained_errors():
        exec(compile("fail()", users, "exec"), names)
    assert f" at {users}:1" in str(caught.value)


@pytest.mark.parametrize("value", [1.0, 2, torch.tensor(1.0)])
def test_numbers_in_a_watched_step_are_refused(value):
    watch = LogWatch(metrics(), "training_step")
    with pytest.raises(NotCapturableError, match=r"self.log\('loss', ...\) with a"):
        watch.keep(call("loss"), value)
    watch.muted = False
    assert watch.due == metrics().due


@pytest.mark.parametrize(
    ("graph", "scope", "gathers"),
    [(None, Scope.EVAL_STEP, 2), (None, Scope.TRAIN_STEP, 1), (CudaGraph(), Scope.EVAL_STEP, 1)],
)
def test_shapes_that_are_gathered_are_compared_but_where_a_step_may_not_wait(graph, scope, gathers):
    asked = []
    strategy = SimpleNamespace(world_size=2, all_gather=lambda one: asked.append(one) or torch.stack([one, one]))
    runner = SimpleNamespace(session=SimpleNamespace(settings=SimpleNamespace(cuda_graph=graph)))
    trainer = SimpleNamespace(
        strategy=strategy, state=SimpleNamespace(user_call=SimpleNamespace(scope=scope)), _runner=runner
    )
    assert gathered(trainer, torch.ones(3)).shape == (2, 3)
    assert len(asked) == gathers


class WrongReplay:
    """A graph whose replay changes nothing and returns zeros; its capture has counted one batch."""

    def __init__(self, states, seen):
        self.metric_states = states
        self.generators = SimpleNamespace(states=list, put_back=lambda states: None)
        self.outputs = torch.zeros(1)
        self.written = {"seen": seen}

    def launch(self, batch):
        pass

    def after_replay(self, *, first):
        if not first:
            self.metric_states.repeat()
        return self.outputs.clone()


@pytest.mark.parametrize("first", [True, False])
def test_a_wrong_replay_of_an_evaluation_counts_its_batch_once(first):
    class Measured(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

    module = Measured()
    module.mean.update(torch.tensor(1.0))
    states = MetricStates(module)
    module.mean.update(torch.tensor(2.0))  # the captured batch
    states.rebind_in_capture()
    states.record()
    counted = module.mean.update_count

    seen = torch.zeros(())

    def forward(batch):
        module.mean.update(torch.tensor(3.0))
        seen.add_(1)
        return torch.ones(1)

    evaluation = object.__new__(GraphEvaluation)
    evaluation._options = CudaGraph()
    evaluation._memory_budget = SimpleNamespace(free=lambda: 2**30, eager_bytes=lambda key: 0)
    evaluation._table = SimpleNamespace(bank=torch.zeros(4, dtype=torch.float64), cells={})
    evaluation._step = "validation_step"
    evaluation._forward = forward
    reasons = []
    evaluation._fallback = SimpleNamespace(give_up=reasons.append)
    outputs = evaluation._run_checked(WrongReplay(states, seen), "key", (None,), first=first)
    assert len(reasons) == 1
    assert torch.equal(outputs, torch.ones(1))
    assert seen.item() == 1
    assert module.mean.update_count == (counted if first else counted + 1)
