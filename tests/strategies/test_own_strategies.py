"""A strategy of one's own: which of its methods a fit calls, in which order, and what comes of the gradients it gives."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import DelayedDDP
from fabricamp.callbacks import EMA
from fabricamp.gradients.flat import IN_PLACE, Gradients
from fabricamp.optimizers import FusedAdam
from fabricamp.precision import Precision
from fabricamp.strategies import DDP, Membership, ProcessGroupStrategy, Strategy
from tests.distributed.ranks import run_ranks
from tests.own_parts import BATCHES, Saves, WithOptimizer, assert_same_weights, fit, moved, noting, only
from tests.small import Classifier, data, quiet_trainer

ONCE = ("setup_environment", "place_module", "share_module", "setup_optimizers", "wrap_module", "teardown")
EPOCH = ("rewrap_module", "no_sync", "reduce_gradients", "note_window", "share_buffers")
VALUES = (
    "reduce",
    "broadcast",
    "all_gather_object",
    "on_rank_zero",
    "agree",
    "barrier",
    "module_state",
    "refuses_graph",
)

NotingStrategy = noting(Strategy, *ONCE, *EPOCH, *VALUES)
NotingDDP = noting(DDP, "wrap_module", "no_sync", "reduce_gradients", "note_window", "teardown")
NotingDelayed = noting(DelayedDDP, "wrap_module", *EPOCH, "share_module", "teardown")


class ComesAndGoes(noting(Strategy, "reduce_gradients"), noting(Membership, "join", "begin_step", "end_steps")):
    """One that processes may join: it is told of each step."""

    heals = True


class HalfGradients(Strategy):
    """Divides the gradients by two, where the update divides anyway."""

    asks_for_parameters = True

    def __init__(self):
        super().__init__()
        self.calls = []

    def reduce_gradients(self, memory=None):
        self.calls.append(("reduce_gradients", len(memory.parameters), len(memory.tensors)))
        gradients = super().reduce_gradients(memory)
        return gradients._replace(divisor=gradients.divisor * 2)


class OwnGradients(Strategy):
    """Hands over tensors of its own, and a flag for each."""

    asks_for_parameters = True

    def __init__(self):
        super().__init__()
        self.calls = []

    def reduce_gradients(self, memory=None):
        self.calls.append(("reduce_gradients",))
        local = memory.local()
        parameters = memory.parameters
        found = [one.grad for one in parameters] if local is IN_PLACE else local.values()
        tensors = [None if one is None else one.clone() for one in found]
        present = torch.tensor([float(one is not None) for one in tensors])
        tensors = [torch.zeros_like(one) if own is None else own for one, own in zip(parameters, tensors, strict=True)]
        return Gradients(tensors=tensors, divisor=1.0, present=present)


class OwnAverage(ProcessGroupStrategy):
    """Averages each gradient by itself at the end of a window."""

    name = "own_average"
    asks_for_parameters = True

    def __init__(self):
        super().__init__(timeout=120)
        self.calls = []
        self.local = 0

    def wrap_module(self, module, step, *, automatic, accumulates=False):
        self.calls.append(("wrap_module", automatic, accumulates))
        self.share_module(module)
        return super().wrap_module(module, step, automatic=automatic, accumulates=accumulates)

    @contextlib.contextmanager
    def no_sync(self):
        self.local += 1
        yield

    def reduce_gradients(self, memory=None):
        self.calls.append(("reduce_gradients", memory is not None))
        if memory.tensors:
            for one in memory.tensors:
                one.copy_(self.reduce(one))
        else:
            for one in memory.parameters:
                if one.grad is not None:
                    one.grad.copy_(self.reduce(one.grad))
        return memory.local()

    def refuses_graph(self):
        return "own_average is not captured; leave cuda_graph out"


def epoch_of(level, first=0):
    """What a strategy sees of an epoch of two steps and a dropped micro-batch, from micro-batch ``first`` on."""
    sums = level == "O2"  # half gradients are summed elsewhere, so that the last of a step is local too
    seen = [("rewrap_module",)]
    for batch_idx in range(first, BATCHES):
        ends = batch_idx % 2 == 1
        if sums or not ends:
            seen.append(("no_sync",))
        if ends:
            seen.append(("reduce_gradients",))
    return [*seen, ("note_window", False), ("share_buffers",)]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_strategy_sees_every_call_of_a_fit(level, tmp_path):
    strategy = NotingStrategy()
    saves = Saves(tmp_path / "mid.ckpt", 3)
    trainer, module = fit(None, EMA(0.5), saves, strategy=strategy, precision=level)
    assert only(strategy.calls, *ONCE) == [
        ("setup_environment",),
        ("place_module",),
        ("share_module",),
        ("setup_optimizers",),
        ("wrap_module", True, True),
        ("teardown",),
    ]
    assert only(strategy.calls, *EPOCH) == epoch_of(level) * 2
    assert only(strategy.calls, "module_state") == [("module_state",)]
    assert {call[0] for call in strategy.calls} >= {"barrier", "broadcast", "on_rank_zero", "all_gather_object"}
    assert trainer.strategy is strategy
    assert trainer.strategy.optimizers == trainer.optimizers
    _, plain = fit(None, EMA(0.5), precision=level)
    assert_same_weights(module, plain)

    resumed = NotingStrategy()
    _, again = fit(None, EMA(0.5), strategy=resumed, precision=level, ckpt_path=tmp_path / "mid.ckpt")
    assert only(resumed.calls, *EPOCH) == [("note_window", True), *epoch_of(level, first=3), *epoch_of(level)]
    assert only(resumed.calls, "agree") == [("agree",)]
    assert_same_weights(again, module)


def test_a_strategy_reduces_what_is_logged_and_gathered():
    class Asks(Classifier):
        def on_train_epoch_end(self):
            strategy = self.trainer.strategy
            self.sums = strategy.reduce(torch.tensor(3), "sum"), strategy.reduce(torch.tensor(1.5))
            self.gathered = self.all_gather(torch.tensor([1.0, 2.0]))
            self.agreed = strategy.reduce_boolean_decision(decision=True), strategy.broadcast({"a": 1})

    strategy = NotingStrategy()
    _, module = fit(Asks(), strategy=strategy, max_epochs=1)
    assert (module.sums[0].item(), module.sums[1].item()) == (3, 1.5)
    assert module.gathered.flatten().tolist() == [1.0, 2.0]
    assert module.agreed == (True, {"a": 1})
    assert {("reduce", "sum"), ("reduce",), ("broadcast",), ("all_gather_object",)} <= set(strategy.calls)


def test_manual_optimization_asks_a_strategy_for_each_optimizer():
    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()

    strategy, plain = NotingStrategy(), Manual()
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_epochs": 1, "partial_window": "step"}
    _, module = fit(Manual(), strategy=strategy, **options)
    fit(plain, **options)
    assert only(strategy.calls, "wrap_module") == [("wrap_module", False, False)]
    assert only(strategy.calls, "reduce_gradients") == [("reduce_gradients",)] * BATCHES
    assert_same_weights(module, plain)


def test_a_strategy_that_others_join_is_told_of_each_step():
    strategy = ComesAndGoes()
    fit(strategy=strategy, validates=False, partial_window="carry", max_epochs=2)
    seen = only(strategy.calls, "join", "begin_step", "reduce_gradients", "end_steps")
    assert seen == [("join",), *[("begin_step",), ("reduce_gradients",)] * BATCHES, ("end_steps",)]


def test_a_strategy_says_why_it_is_not_captured():
    strategy = NotingStrategy()
    assert strategy.refuses_graph() == (
        "strategy 'noting' is not captured; give strategy='delayed_ddp', or 'single' with devices=1"
    )
    assert OwnAverage().refuses_graph().startswith("own_average is not captured")
    assert NotingDelayed().refuses_graph() == ""


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_strategy_asks_for_parameters_and_leaves_a_divisor(level):
    def half_the_rate(parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    def the_rate(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    options = {"precision": level, "gradient_clip_val": None}
    strategy = HalfGradients()
    _, module = fit(WithOptimizer(the_rate), strategy=strategy, **options)
    _, expected = fit(WithOptimizer(half_the_rate), **options)
    assert strategy.calls == [("reduce_gradients", 4, 1 if level == "O2" else 0)] * 4
    assert_same_weights(module, expected, tolerance=1e-6)
    assert moved(module)


@pytest.mark.parametrize("make", [None, FusedAdam], ids=["torch", "fused"])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_strategy_hands_over_its_own_gradients(level, make):
    strategy = OwnGradients()
    make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    _, module = fit(WithOptimizer(make), strategy=strategy, precision=level)
    _, expected = fit(WithOptimizer(make), precision=level)
    assert strategy.calls == [("reduce_gradients",)] * 4
    assert_same_weights(module, expected)
    assert moved(module)


def on_two_ranks(level):
    """What strategies saw on this rank, and the weights."""
    found = {}
    trained = {}
    for key, strategy in {
        "ddp": "ddp",
        "logged ddp": NotingDDP(),
        "delayed": "delayed_ddp",
        "logged delayed": NotingDelayed(),
        "own": OwnAverage(),
    }.items():
        module = Classifier()
        trainer = quiet_trainer(
            devices="auto",
            strategy=strategy,
            precision=level,
            accumulate_grad_batches=2,
            max_epochs=2,
            partial_window="drop",
        )
        trainer.fit(module, DataLoader(data(4 * BATCHES * 2), 4))
        trained[key] = torch.cat([one.detach().flatten() for one in module.parameters()])
        found[key] = getattr(strategy, "calls", None)
    return found, trained


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_strategies_over_a_process_group(level):
    (found, trained), (found_there, trained_there) = run_ranks(on_two_ranks, 2, level, backend=None)
    assert found == found_there
    for key in ("ddp", "logged ddp", "delayed", "logged delayed", "own"):
        assert torch.equal(trained[key], trained_there[key]), key
    sums = level == "O2"
    epoch = [call for call in epoch_of(level) if call[0] in ("no_sync", "reduce_gradients", "note_window")]
    wrapped = [("wrap_module", True, True)]
    assert torch.equal(trained["ddp"], trained["logged ddp"])
    assert only(found["logged ddp"], "wrap_module", "no_sync", "reduce_gradients", "note_window") == wrapped + epoch * 2

    assert torch.equal(trained["delayed"], trained["logged delayed"])
    delayed = found["logged delayed"]
    assert only(delayed, "wrap_module", "no_sync", "reduce_gradients", "note_window") == wrapped + epoch * 2
    assert only(delayed, "rewrap_module", "teardown") == [("rewrap_module",)] * 2 + [("teardown",)]
    assert ("share_module",) in delayed

    assert found["own"] == [("wrap_module", True, True), *[("reduce_gradients", True)] * 4]
    torch.testing.assert_close(trained["own"], trained["ddp"], rtol=0, atol=1e-2 if sums else 1e-6)


class Halving(Precision):
    name = "halving"


def test_names_come_through_entry_points(tmp_path):
    """As packages register their plug-ins; in a new interpreter, since an interpreter looks for them once."""
    told = tmp_path / "plugins-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(
        f"[fabricamp.strategies]\nadded_half = {__name__}:HalfGradients\n"
        f"[fabricamp.precision]\nadded_halving = {__name__}:Halving\n"
        f"[fabricamp.callbacks]\nadded_callback = {__name__}:Saves\n"
    )
    (found,) = run_ranks(by_name, 1, tmp_path, backend=None, start_method="spawn")
    assert found == ("HalfGradients", "Halving", True, "OwnGradients", "Halving")


def by_name(folder):
    from fabricamp.callbacks.base import CALLBACKS
    from fabricamp.precision import PRECISIONS
    from fabricamp.strategies import STRATEGIES

    sys.path.insert(0, str(folder))
    STRATEGIES.add("own_gradients", OwnGradients)
    PRECISIONS.add("own-halving", Halving)
    by_entry_point = quiet_trainer(strategy="added_half", precision="added_halving")
    by_call = quiet_trainer(strategy="own_gradients", precision="own-halving")
    kinds = [type(part).__name__ for one in (by_entry_point, by_call) for part in (one.strategy, one.precision_plugin)]
    return (*kinds[:2], "added_callback" in CALLBACKS.names(), *kinds[2:])
