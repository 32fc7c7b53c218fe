"""Plug-ins of third parties, as they were written against an earlier version: each of their overrides is still called, and works.

What is asserted is what their authors saw then: which of their methods were called, in which order and with what, and what came of
it.  Whatever is renamed within fabricamp, ``plugins.py`` stays as it is, and so do the expectations here.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback, CheckpointError, CudaGraph, Trainer, TrainingModule
from fabricamp.callbacks import EMA, ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint
from fabricamp.checkpoint.record import Record
from fabricamp.optimizers import FusedAdam, FusedLion
from fabricamp.precision import Clip
from fabricamp.strategies import Strategy
from tests.distributed.ranks import run_ranks
from tests.earlier_versions import plugins
from tests.small import QUIET, Classifier, data, loader, quiet_trainer

BATCHES = 5
"""Micro-batches of an epoch: two windows of two, and one that is left."""
CLIP = Clip(0.5, "norm")


class WithOptimizer(Classifier):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


class Saves(Callback):
    """Writes a checkpoint behind a micro-batch."""

    def __init__(self, path, at):
        self.path = path
        self.at = at
        self.done = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.done += 1
        if self.done == self.at:
            trainer.save_checkpoint(self.path)


def fit(module=None, *callbacks, ckpt_path=None, validates=True, **options):
    module = Classifier() if module is None else module
    given = {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "partial_window": "drop",
        "callbacks": list(callbacks),
        **options,
    }
    trainer = quiet_trainer(**given)
    trainer.fit(module, loader(4 * BATCHES), loader(8) if validates else None, ckpt_path=ckpt_path)
    return trainer, module


def assert_same_weights(module, other, *, tolerance=0.0):
    own, theirs = module.state_dict(), other.state_dict()
    assert list(own) == list(theirs)
    for name, value in own.items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)


def only(calls, *names):
    """Those of ``calls`` with these names, in their order; what fabricamp asks for besides is its own affair."""
    return [call for call in calls if call[0] in names]


def moved(module):
    return not torch.equal(module.net[0].weight, Classifier().net[0].weight)


# -- strategies -----------------------------------------------------------------------------------------------------------------

EPOCH = ("rewrap_module", "no_sync", "step", "reduce_gradients", "note_window", "share_buffers")
ONCE = ("setup_environment", "place_module", "share_module", "setup_optimizers", "wrap_module", "end_steps", "teardown")


def epoch_of(level, first=0):
    """What a strategy sees of an epoch of two windows and a dropped one, from micro-batch ``first`` on."""
    sums = level == "O2"  # half gradients are summed elsewhere, so that the last of a window is local too
    seen = [("rewrap_module",)]
    for batch_idx in range(first, BATCHES):
        closes = batch_idx % 2 == 1
        if sums or not closes:
            seen.append(("no_sync",))
        seen.append(("step", batch_idx))
        if closes:
            seen.append(("reduce_gradients", sums))
    return [*seen, ("note_window", False), ("share_buffers", "Classifier")]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_strategy_sees_every_call_of_a_fit(level, tmp_path):
    strategy = plugins.LoggedStrategy()
    saves = Saves(tmp_path / "mid.ckpt", 3)
    trainer, module = fit(None, EMA(0.5), saves, strategy=strategy, precision=level)
    assert only(strategy.calls, *ONCE) == [
        ("setup_environment", 0, 1, "cpu"),
        ("place_module", "Classifier"),
        ("share_module", "Classifier"),
        ("setup_optimizers", 1),
        ("wrap_module", True, True),
        ("end_steps",),
        ("teardown",),
    ]
    assert only(strategy.calls, *EPOCH) == epoch_of(level) * 2
    # An EMA writes into the module: before the fit, at each epoch's beginning, around each validation, and at the end.
    assert only(strategy.calls, "settle_module") == [("settle_module", "Classifier")] * 8
    assert only(strategy.calls, "module_state", "whole_gradients") == [("module_state",), ("whole_gradients",)]
    assert only(strategy.calls, "shard_module", "unshard_module") == [
        *only(strategy.calls, "shard_module"),
        ("unshard_module", True),
    ]
    assert {call[0] for call in strategy.calls} >= {
        "attach",
        "barrier",
        "broadcast",
        "on_rank_zero",
        "all_gather_object",
    }
    assert trainer.strategy is strategy
    assert trainer.strategy.optimizers == trainer.optimizers
    _, plain = fit(None, EMA(0.5), precision=level)
    assert_same_weights(module, plain)

    resumed = plugins.LoggedStrategy()
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

    strategy = plugins.LoggedStrategy()
    _, module = fit(Asks(), strategy=strategy, max_epochs=1)
    assert (module.sums[0].item(), module.sums[1].item()) == (3, 1.5)
    assert module.gathered.flatten().tolist() == [1.0, 2.0]
    assert module.agreed == (True, {"a": 1})
    seen = only(strategy.calls, "reduce", "broadcast", "all_gather", "all_gather_object")
    assert {("reduce", "sum"), ("reduce", "mean"), ("broadcast", 0), ("all_gather_object",)} <= set(seen)


def test_manual_optimization_asks_a_strategy_for_each_optimizer():
    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()

    strategy, plain = plugins.LoggedStrategy(), Manual()
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_epochs": 1, "partial_window": "step"}
    _, module = fit(Manual(), strategy=strategy, **options)
    fit(plain, **options)
    assert only(strategy.calls, "wrap_module") == [("wrap_module", False, False)]
    assert only(strategy.calls, "reduce_gradients") == [("reduce_gradients", True)] * BATCHES
    assert_same_weights(module, plain)


def test_a_strategy_that_others_join_is_told_of_each_step():
    strategy = plugins.ComesAndGoes()
    fit(strategy=strategy, validates=False, partial_window="carry", max_epochs=2)
    seen = only(strategy.calls, "join", "begin_step", "reduce_gradients", "end_steps")
    assert seen == [("join",), *[("begin_step",), ("reduce_gradients", False)] * BATCHES, ("end_steps",)]


def test_a_strategy_says_why_it_is_not_captured():
    strategy = plugins.LoggedStrategy()
    assert strategy.refuses_graph() == (
        "strategy 'logged' is not captured; give strategy='delayed_ddp', or 'single' with devices=1"
    )
    assert plugins.OwnAverage().refuses_graph().startswith("own_average is not captured")
    assert plugins.LoggedDelayedDDP().refuses_graph() == ""


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_strategy_asks_for_parameters_and_leaves_a_divisor(level):
    def half_the_rate(parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    def the_rate(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    options = {"precision": level, "gradient_clip_val": None}
    strategy = plugins.HalfGradients()
    _, module = fit(WithOptimizer(the_rate), strategy=strategy, **options)
    _, expected = fit(WithOptimizer(half_the_rate), **options)
    assert strategy.calls == [("reduce_gradients", 4, 1 if level == "O2" else 0)] * 4
    assert_same_weights(module, expected, tolerance=1e-6)
    assert moved(module)


@pytest.mark.parametrize("make", [None, FusedAdam], ids=["torch", "fused"])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_strategy_hands_over_its_own_gradients(level, make):
    strategy = plugins.OwnGradients()
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
        "logged ddp": plugins.LoggedDDP(),
        "delayed": "delayed_ddp",
        "logged delayed": plugins.LoggedDelayedDDP(),
        "own": plugins.OwnAverage(),
        "local": plugins.LocalSGD(every=2),
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
    with_memory = [("reduce_gradients", True) if call[0] == "reduce_gradients" else call for call in epoch]
    delayed = found["logged delayed"]
    assert only(delayed, "wrap_module", "no_sync", "reduce_gradients", "note_window") == wrapped + with_memory * 2
    assert only(delayed, "rewrap_module", "teardown") == [("rewrap_module",)] * 2 + [("teardown",)]
    assert ("share_module",) in delayed

    assert found["own"] == [("wrap_module", True, True), *[("reduce_gradients", True)] * 4]
    torch.testing.assert_close(trained["own"], trained["ddp"], rtol=0, atol=1e-2 if sums else 1e-6)
    assert found["local"] == [("averages",)] * BATCHES
    assert not torch.equal(trained["local"], trained["ddp"])


def test_names_come_through_entry_points(tmp_path, monkeypatch):
    """As packages register their plug-ins; in a new interpreter, since an interpreter looks for them once."""
    told = tmp_path / "earlier_plugins-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: earlier-plugins\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(
        "[fabricamp.strategies]\nearlier_logged = tests.earlier_versions.plugins:LoggedStrategy\n"
        "[fabricamp.precision]\nearlier_static = tests.earlier_versions.plugins:StaticScale\n"
        "[fabricamp.callbacks]\nearlier_hooks = tests.earlier_versions.plugins:EveryHook\n"
    )
    ((strategy, precision, names, added),) = run_ranks(by_name, 1, tmp_path, backend=None, start_method="spawn")
    assert (strategy, precision) == ("LoggedStrategy", "StaticScale")
    assert "earlier_hooks" in names
    assert added == ("LocalSGD", 8)


def by_name(folder):
    from fabricamp.callbacks.base import CALLBACKS
    from fabricamp.precision import PRECISIONS
    from fabricamp.strategies import STRATEGIES

    sys.path.insert(0, str(folder))
    STRATEGIES.add("earlier_local_sgd", plugins.LocalSGD)
    PRECISIONS.add("earlier-bf16-inputs", plugins.Bf16Inputs)
    trainer = quiet_trainer(strategy="earlier_logged", precision="earlier_static")
    added = quiet_trainer(strategy="earlier_local_sgd", precision="earlier-bf16-inputs").strategy
    kinds = type(trainer.strategy).__name__, type(trainer.precision_plugin).__name__
    return (*kinds, CALLBACKS.names(), (type(added).__name__, added.every))


# -- precisions -----------------------------------------------------------------------------------------------------------------


def test_a_precision_converts_inputs():
    seen = []

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0])
            return super().training_step(batch, batch_idx)

    fit(Looks(), precision=plugins.Bf16Inputs())
    assert len(seen) == 2 * BATCHES
    assert all(one.dtype == torch.float32 and torch.equal(one, one.bfloat16().float()) for one in seen)


PRECISION = ("forward", "backward", "step")


def window_of(*step):
    micro_batch = [("forward", 2), ("backward", 0, [])]
    return [*micro_batch, *micro_batch, ("step", CLIP, *step)]


DROPPED = [("forward", 2), ("backward", 0, [])]
VALIDATION = [("forward", 2)] * 2


@pytest.mark.parametrize("make", [None, FusedAdam], ids=["torch", "fused"])
def test_a_precision_sees_every_call_of_a_fit(make, tmp_path):
    make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    precision, saves = plugins.StaticScale(), Saves(tmp_path / "mid.ckpt", 7)
    _, module = fit(WithOptimizer(make), saves, precision=precision)
    epoch = [*window_of(False, True, False) * 2, *DROPPED, *VALIDATION]
    assert only(precision.calls, *PRECISION) == [
        ("forward", 0),
        *epoch * 2,
    ]  # configure_model comes through forward too
    assert only(precision.calls, "convert_module", "setup_optimizers", "state_dict", "full_state", "undo") == [
        ("convert_module", "WithOptimizer"),
        ("setup_optimizers", 1, True),
        ("full_state",),
        ("state_dict",),
        ("undo",),
    ]
    assert only(precision.calls, "convert_input") == [("convert_input",)] * (2 * BATCHES + 4)
    assert ("gradients",) in precision.calls
    assert not hasattr(module, "converted")
    _, plain = fit(WithOptimizer(make))
    assert_same_weights(module, plain)  # a power of two
    assert moved(module)

    resumed = plugins.StaticScale()
    _, again = fit(WithOptimizer(make), precision=resumed, ckpt_path=tmp_path / "mid.ckpt")
    assert only(resumed.calls, "load_state_dict") == [("load_state_dict", 3)]
    assert resumed.steps == 4
    assert_same_weights(again, plain)


def test_a_precision_shows_gradients_to_hooks():
    class Shown(Classifier):
        def on_before_optimizer_step(self, optimizer):
            self.shown = [one.grad.clone() for one in self.parameters()]

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def backward(self, loss, *args, **kwargs):
            loss.backward(*args, **kwargs)

    precision = plugins.StaticScale()
    _, module = fit(Shown(), precision=precision, max_epochs=1, validates=False)
    _, plain = fit(Shown(), max_epochs=1, validates=False)
    assert (
        only(precision.calls, "step") == [("step", None, True, False, True)] * 2
    )  # run and look, which returns the clip
    assert all(map(torch.equal, module.shown, plain.shown))
    assert_same_weights(module, plain)


def test_a_precision_takes_options_of_backward():
    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()

    precision = plugins.StaticScale()
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_epochs": 1, "validates": False}
    _, module = fit(Manual(), precision=precision, partial_window="step", **options)
    _, plain = fit(Manual(), partial_window="step", **options)
    assert only(precision.calls, "backward") == [("backward", 0, ["retain_graph"])] * BATCHES
    assert [call[0] for call in only(precision.calls, "step")] == ["step"] * BATCHES
    assert_same_weights(module, plain)


def test_a_precision_with_verdicts_of_its_own(caplog):
    class Overflows(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if self.global_step == 1 else loss

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]

    precision, reads = plugins.HostPrecision(), plugins.ReadsState()
    trainer, module = fit(Overflows(), reads, precision=precision)
    assert [call[1:] for call in precision.verdicts.calls if call[0] == "note_closed"] == [
        (True, False),
        (False, False),
        (True, False),
        (True, False),
    ]
    assert [call for call in precision.verdicts.calls if call[0] == "launch_close"] == [("launch_close", True)] * 4
    assert ("drain",) in precision.verdicts.calls
    assert (trainer.skipped_steps, trainer.global_step) == (1, 4)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 2**3)  # schedules follow what was applied
    assert [told for _, told, _ in reads.seen[-2:]] == [(3, 1, 1.0)] * 2
    assert "1 step was skipped" in caplog.text
    assert precision.calls == [("step", CLIP, False, False)] * 4

    _, module = fit(precision=plugins.HostPrecision())
    assert_same_weights(module, fit()[1])


def test_a_subclass_of_an_opt_level(tmp_path):
    precision, saves = plugins.LoggedLevel("O2", loss_scale="dynamic"), Saves(tmp_path / "mid.ckpt", 7)
    trainer, module = fit(WithOptimizer(FusedAdam), saves, precision=precision)
    step = ("step", CLIP, False, False)
    micro_batch = [("forward", 2), ("backward", 0)]
    epoch = [*[*micro_batch, *micro_batch, step] * 2, *micro_batch, *VALIDATION]
    assert only(precision.calls, *PRECISION) == [("forward", 0), *epoch * 2]
    assert only(precision.calls, "convert_module", "setup_optimizers", "state_dict") == [
        ("convert_module",),
        ("setup_optimizers", 1, True),
        ("state_dict",),
    ]
    # The host reads what became of a window two windows later.
    assert read_checkpoint(tmp_path / "mid.ckpt")["amp"]["told"] == [1, 0, 65536.0]
    assert_same_weights(module, fit(WithOptimizer(FusedAdam), precision="O2")[1])
    verdicts = trainer.precision_plugin.verdicts
    assert (verdicts.policy, verdicts.dynamic, verdicts.scale) == (None, True, 65536.0)
    assert trainer.skipped_steps == 0

    resumed = plugins.LoggedLevel("O2", loss_scale="dynamic")
    _, again = fit(WithOptimizer(FusedAdam), precision=resumed, ckpt_path=tmp_path / "mid.ckpt")
    assert only(resumed.calls, "load_state_dict") == [("load_state_dict", [1, 0, 65536.0])]
    assert_same_weights(again, module)


# -- callbacks ------------------------------------------------------------------------------------------------------------------

VALIDATES = [
    ("evaluation_context", "begins"),
    ("on_validation_start",),
    ("on_validation_epoch_start",),
    ("on_validation_batch_start", 0, 0),
    ("on_validation_batch_end", 0, 0),
    ("on_validation_batch_start", 1, 0),
    ("on_validation_batch_end", 1, 0),
    ("on_validation_epoch_end",),
    ("on_validation_end",),
    ("evaluation_context", "ends"),
]


def evaluated(kind, batches):
    """What a callback sees of a test or a prediction."""
    hooks = [
        hook
        for one in range(batches)
        for hook in ((f"on_{kind}_batch_start", one, 0), (f"on_{kind}_batch_end", one, 0))
    ]
    inner = [
        (f"on_{kind}_start",),
        (f"on_{kind}_epoch_start",),
        *hooks,
        (f"on_{kind}_epoch_end",),
        (f"on_{kind}_end",),
    ]
    return [
        ("setup", kind),
        ("evaluation_context", "begins"),
        *inner,
        ("evaluation_context", "ends"),
        ("teardown", kind),
    ]


def batches_seen(count):
    seen = []
    for batch_idx in range(count):
        seen.append(("on_train_batch_start", batch_idx))
        seen += [("on_before_zero_grad",)] if batch_idx % 2 == 0 else []
        seen += [("on_before_backward",), ("on_after_backward",)]
        seen += [("on_before_optimizer_step",)] if batch_idx % 2 else []
        seen.append(("on_train_batch_end", batch_idx))
    return seen


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_callback_sees_every_hook(level, tmp_path):
    callback = plugins.EveryHook()
    trainer, module = fit(None, callback, precision=level)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    seen = [call for call in callback.calls if call[0] != "state_dict"]
    epoch = [("on_train_epoch_start",), *batches_seen(BATCHES), *VALIDATES, ("on_train_epoch_end",)]
    assert seen == [
        ("setup", "fit"),
        ("on_fit_start",),
        ("on_train_start",),
        *epoch * 2,
        ("on_train_end",),
        ("on_fit_end",),
        ("teardown", "fit"),
        ("on_save_checkpoint",),
    ]
    assert_same_weights(module, fit(precision=level)[1], tolerance=1e-6 if level == "O0" else 1e-2)
    state = read_checkpoint(tmp_path / "end.ckpt")["callbacks"]
    assert state == {"EveryHook{'tag': 'own'}": {"count": 0}}

    callback.calls.clear()
    trainer.validate(module, loader(8), verbose=False)
    trainer.test(module, loader(8), verbose=False)
    trainer.predict(module, loader(4))
    assert callback.calls == [
        ("setup", "validate"),
        *VALIDATES,
        ("teardown", "validate"),
        *evaluated("test", 2),
        *evaluated("predict", 1),
    ]

    other = plugins.EveryHook("other")
    fit(None, other, precision=level, ckpt_path=tmp_path / "end.ckpt", max_epochs=3)
    begin = [
        ("setup", "fit"),
        ("on_load_checkpoint",),
        ("accepts_state_of",),
        ("load_state_dict", 0),
        ("on_fit_start",),
    ]
    assert other.calls[: len(begin)] == begin


def test_a_callback_sees_the_sanity_check_and_an_exception():
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            raise ValueError("no")

    callback = plugins.EveryHook()
    with pytest.raises(ValueError, match="no"):
        fit(Fails(), callback, num_sanity_val_steps=2)
    seen = [call[0] for call in callback.calls]
    start, end = seen.index("on_sanity_check_start"), seen.index("on_sanity_check_end")
    assert seen[start + 1 : end] == [call[0] for call in VALIDATES]
    assert seen.count("on_exception") == 1
    assert seen.index("on_exception") > seen.index("on_train_batch_start")


def test_counters_of_a_run_are_read_by_name():
    reads = plugins.ReadsState()
    trainer, _ = fit(None, reads, precision="O2", partial_window="carry")
    assert [counters for counters, _, _ in reads.seen] == [
        ((done // 2), (done - 1) % BATCHES + 1, done, done % 2, (done - 1) // BATCHES) for done in range(1, 11)
    ]
    assert [told for _, told, _ in reads.seen] == [(max(0, done // 2 - 2), 0, 65536.0) for done in range(1, 11)]
    assert {world_size for _, _, world_size in reads.seen} == {1}
    last = reads.last
    assert last.keys() == set(plugins.STATE)
    numbers = (
        "batch_idx",
        "batches_done",
        "epoch",
        "global_step",
        "open_batches",
        "closed_at",
        "validated_at",
        "validations",
    )
    assert [last[name] for name in numbers] == [5, 10, 1, 5, 0, 5, 5, 1]
    assert (last["fn"], last["stage"], last["status"]) == ("fit", "train", "running")
    assert (last["should_stop"], last["agreed"], last["stop_reason"], last["interruption"]) == (False, False, "", "")
    assert (last["epoch_ended"], last["skipped_before"], last["committed"], last["capturing"]) == (False, 0, 0, False)
    assert last["passed"] == 8  # micro-batches, at the last boundary of a step
    state = trainer.state
    assert (state.finished, state.stopped, state.fitting, state.interrupted, state.cut) == (
        True,
        True,
        False,
        False,
        False,
    )
    assert (state.closed_at, state.open_batches, state.validations) == (10, 0, 2)


def test_counters_of_a_run_are_written_by_name():
    """As a loop of one's own, or a test of a callback, puts them."""
    state = quiet_trainer().state
    for name in plugins.STATE:
        setattr(state, name, getattr(state, name))
    state.closed_at, state.open_batches, state.committed, state.passed = 4, 1, 2, 1.5
    assert (state.closed_at, state.open_batches, state.committed, state.passed) == (4, 1, 2, 1.5)


def test_a_callback_ends_a_run_by_its_state():
    trainer, _ = fit(None, plugins.StopsBy(3), partial_window="carry")
    assert (trainer.global_step, trainer.state.stop_reason) == (3, "it is enough")


def test_a_subclass_of_model_checkpoint(tmp_path):
    folder = tmp_path / "files"
    options = {"monitor": "val_loss", "filename": "{epoch}-{step}", "save_top_k": 2, "save_last": True, "mode": "max"}
    callback, log = plugins.NamedCheckpoint(folder, **options), plugins.EveryLog(tmp_path)
    trainer, _ = fit(None, callback, logger=log, enable_checkpointing=True, log_every_n_steps=1)

    def saved(step):
        return [
            ("format_checkpoint_name", None, None, step),
            ("format_checkpoint_name", "newest", None, step),
            ("state_dict",),
            ("on_save_checkpoint", step),
            ("state_dict",),
        ]

    def epoch(step):
        trained = [("on_train_batch_end", batch_idx) for batch_idx in range(BATCHES)]
        return [*trained, ("on_validation_end",), ("on_train_epoch_end",), *saved(step)]

    assert callback.calls == [("setup", "fit"), ("on_train_start",), *epoch(2), *epoch(4), ("on_train_end",)]
    files = {"run_epoch.0-step.2.ckpt", "run_epoch.1-step.4.ckpt", "run_newest.ckpt"}
    assert {one.name for one in folder.iterdir()} == callback.known_files() == files
    assert Path(callback.last_model_path).name == "run_newest.ckpt"
    scores = {Path(path).name: float(score) for path, score in callback.best_k_models.items()}
    assert max(scores, key=scores.get) == Path(callback.best_model_path).name
    assert callback.best_model_score == max(scores.values())
    assert callback.kth_value == min(scores.values())
    assert Path(callback.kth_best_model_path).name == min(scores, key=scores.get)
    assert callback.holds_at(4) >= 5
    assert callback.state_key.startswith("named NamedCheckpoint{'monitor': 'val_loss'")
    assert [call for call in log.calls if call[0] == "after_save_checkpoint"] == [
        ("after_save_checkpoint", "run_epoch.0-step.2.ckpt"),
        ("after_save_checkpoint", Path(callback.best_model_path).name),
    ]

    again = plugins.NamedCheckpoint(folder, every_n_epochs=3, **options)
    fit(None, again, enable_checkpointing=True, ckpt_path=callback.last_model_path, max_epochs=3)
    begin = [("setup", "fit"), ("accepts_state_of",), ("load_state_dict", 1), ("on_train_start",)]
    assert again.calls[: len(begin)] == begin
    assert trainer.checkpoint_callback is callback
    assert {one.name for one in folder.iterdir()} == again.known_files() >= {"run_newest.ckpt"}


def test_averages_update_when_a_subclass_says_so():
    callback = plugins.SlowEMA(0.5)
    seen = []

    class Notes(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 4:
                seen.append(pl_module.net[0].weight.detach().clone())

    _, module = fit(None, callback, Notes(), validates=False)
    assert callback.calls == [
        *[("should_update", step, None) for step in (0, 1)],
        ("should_update", None, 0),
        *[("should_update", step, None) for step in (2, 3)],
        ("should_update", None, 1),
    ]
    torch.testing.assert_close(module.net[0].weight, seen[0].lerp(seen[1], 0.5))


def test_a_finetuning_callback_thaws():
    callback = plugins.LateLayers()
    first = []

    class Looks(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            first.append(pl_module.net[0].weight.detach().clone())

    def of_those_that_train(parameters):
        return torch.optim.SGD([one for one in parameters if one.requires_grad], lr=0.1)

    trainer, module = fit(WithOptimizer(of_those_that_train), callback, Looks(), validates=False)
    assert callback.calls == [("freeze_before_training",), ("finetune_function", 0), ("finetune_function", 1)]
    assert torch.equal(first[0], Classifier().net[0].weight)
    assert moved(module)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.1, 0.01]


def test_predictions_are_written_with_their_indices():
    callback = plugins.KeepsPredictions()
    quiet_trainer(callbacks=[callback]).predict(Classifier(), loader(6), return_predictions=False)
    assert callback.calls == [
        ("write_on_batch_end", (4, 3), [0, 1, 2, 3], 0, 0),
        ("write_on_batch_end", (2, 3), [4, 5], 1, 0),
        ("write_on_epoch_end", 2, [[[0, 1, 2, 3], [4, 5]]]),
    ]


def test_a_progress_bar_shows_its_own_metrics(caplog):
    caplog.set_level("INFO", logger="fabricamp")
    bar = plugins.OwnBar()
    fit(None, bar, enable_progress_bar=True)
    assert len(bar.calls) >= 2
    assert "own 1.500" in caplog.text


# -- checkpoints ----------------------------------------------------------------------------------------------------------------


class Counter:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_sections_of_a_checkpoint():
    strategy, notebook, counter = Strategy(), plugins.Notebook(), Counter()
    notebook.lines, counter.value = ["begun"], 3
    record = Record(strategy, [notebook, plugins.Draws(0), plugins.part_of(counter), plugins.part_of(None)])
    checkpoint = record.save("notebook", "draws", "a counter")
    assert checkpoint["own"]["notebook"] == ["begun"]
    assert checkpoint["own"]["rank"] == [0]
    assert checkpoint["fabricamp_version"]
    assert record.save("notebook")["own"] == {"notebook": ["begun"]}
    assert notebook.calls == [("save",)] * 2

    other, there = plugins.Notebook(), Counter()
    loaded = Record(strategy, [other, plugins.Draws(0), plugins.part_of(there)])
    checkpoint["own"]["counter"] = {"value": 3}
    loaded.restore(checkpoint, "a.ckpt")
    assert (other.lines, there.value) == (["begun"], 3)
    assert other.calls == [("restore", "a.ckpt")]
    checkpoint["own"]["rank"] = [1]
    with pytest.raises(
        CheckpointError, match=r"a\.ckpt does not fit: its draws cannot be restored here \(ValueError: ranks"
    ):
        loaded.restore(checkpoint, "a.ckpt", "draws")
    loaded.restore(checkpoint, "a.ckpt", "notebook")
    assert len(other.calls) == 2


def sections_of_ranks():
    from fabricamp.strategies import DDP
    from fabricamp.strategies.base import Environment

    strategy = DDP()
    rank = torch.distributed.get_rank()
    strategy.setup_environment(Environment(rank=rank, local_rank=rank, world_size=2), torch.device("cpu"))
    record = Record(strategy, [plugins.Notebook(), plugins.Draws(rank)])
    checkpoint = record.save()
    draws = plugins.Draws(rank)
    draws.value = torch.zeros(2)
    Record(strategy, [draws]).restore(checkpoint, "a.ckpt")
    strategy.teardown()
    return checkpoint["own"]["rank"], draws.value.tolist()


def test_sections_of_several_ranks():
    assert run_ranks(sections_of_ranks, 2) == [([0, 1], [0.0, 0.0]), ([0, 1], [1.0, 1.0])]


# -- optimizers -----------------------------------------------------------------------------------------------------------------


def sign_steps(seen, lr, beta):
    """The formula by hand, over the gradients of ``seen``."""
    weight, average = seen[0][0].clone(), torch.zeros_like(seen[0][0])
    for _, gradient in seen:
        average = beta * average + (1 - beta) * gradient
        weight = weight - lr * average.sign()
    return weight


def test_a_rule_and_an_optimizer_over_it():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5))
    optimizer = plugins.FusedSign([weight], lr=0.1)
    seen = []
    for _ in range(3):
        weight.grad = torch.randn(5)
        seen.append((weight.detach().clone(), weight.grad.clone()))
        optimizer.step()
    torch.testing.assert_close(weight.detach(), sign_steps(seen, 0.1, 0.9))
    state = optimizer.state_dict()["state"][0]
    assert state.keys() == {"exp_avg", "steps"}
    assert state["steps"].item() == 3

    parameter, average, steps = seen[0][0].clone(), torch.zeros(5), torch.zeros(())
    plugins.third_party_sign([seen[0][1]], [parameter], [average], [steps], plugins.SignRule(0.1))
    torch.testing.assert_close(parameter, seen[1][0])


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_fused_optimizer_of_a_third_party_trains(level, tmp_path):
    saves = Saves(tmp_path / "mid.ckpt", 7)
    _, module = fit(WithOptimizer(plugins.FusedSign), saves, precision=level)
    assert moved(module)
    _, again = fit(WithOptimizer(plugins.FusedSign), precision=level, ckpt_path=tmp_path / "mid.ckpt")
    assert_same_weights(again, module)
    # Along signs alone: each weight goes a whole number of steps.
    moves = (module.net[0].weight - Classifier().net[0].weight).detach() / 1e-2
    torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-3)
    assert moves.abs().max() > 1


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_precision_updates_by_an_optimizer_with_its_own_step(level, algorithm):
    """Such a step gets a closure, so it reads clipped gradients in ``.grad``."""
    plugins.LookingRule.seen.clear()
    trainer, module = fit(
        WithOptimizer(plugins.LookingSign), precision=level, gradient_clip_algorithm=algorithm, validates=False
    )
    assert trainer.optimizers[0].calls.count(("step",)) == 4
    assert {call[0] for call in plugins.LookingRule.seen} == {"reference", "gradients"}
    assert_same_weights(
        module, fit(WithOptimizer(plugins.FusedSign), precision=level, gradient_clip_algorithm=algorithm)[1]
    )


def test_an_optimizer_alone_is_not_steered():
    plugins.LookingRule.seen.clear()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = plugins.LookingSign([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    assert only(optimizer.calls, "step", "steer", "_measure", "gather") == [
        ("step",),
        ("gather", False),
        ("_measure", None, True),
    ]
    assert plugins.LookingRule.seen == [("reference", 1, True), ("gradients", None, None, True)]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_subclass_of_a_fused_optimizer(level):
    trainer, module = fit(WithOptimizer(plugins.NoisyAdam), precision=level)
    assert trainer.optimizers[0].calls.count(("step",)) == 4
    assert_same_weights(module, fit(WithOptimizer(FusedAdam), precision=level)[1])


def test_an_optimizer_is_driven_by_hand():
    """As the docstring of FusedOptimizer has it."""
    from fabricamp import ops

    weight, plain = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer, expected = FusedLion([weight], lr=0.1), FusedLion([plain], lr=0.1)
    state, scale = ops.StepState.on(torch.device("cpu")), torch.tensor(8.0)
    plain.grad = torch.tensor([1.0, -2.0, 3.0])
    gradient = plain.grad * 8
    optimizer.gather([gradient], None)
    statistics = optimizer.statistics(scale)
    ops.finish(state, statistics, scale=scale)
    optimizer.steer(state)
    optimizer.step()
    expected.step()
    assert torch.equal(weight, plain)
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], expected.state[plain]["exp_avg"])
    optimizer.gather([gradient * math.inf], None)
    ops.finish(state, optimizer.statistics(scale), scale=scale)
    optimizer.steer(state, limit=0.1, skips=True)
    optimizer.step()
    assert torch.equal(weight, plain)  # skipped


# -- loggers, profilers and data ------------------------------------------------------------------------------------------------


def test_a_logger_of_the_recipe(tmp_path):
    logger = plugins.JsonLines(tmp_path / "log")
    fit(None, logger=logger, log_every_n_steps=2)
    logger.file.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 3]


def test_a_logger_sees_every_call(tmp_path):
    class WithHyperparameters(Classifier):
        def __init__(self, width=3):
            super().__init__()
            self.save_hyperparameters()

    log, saves = plugins.EveryLog(tmp_path), Saves(tmp_path / "mid.ckpt", 7)
    fit(WithHyperparameters(), saves, logger=log, log_every_n_steps=1)
    assert log.calls == [
        ("identity",),
        ("join", 7),
        ("log_hyperparams", {"width": 3}),
        ("begin",),
        ("log_graph",),
        ("log_metrics", 0),
        ("log_metrics", 1),
        ("log_metrics", 1),
        ("state_dict",),
        ("barrier", 3),
        ("log_metrics", 2),
        ("log_metrics", 3),
        ("log_metrics", 3),
        ("save",),
        ("finalize", "success"),
        ("close",),
    ]
    assert [sorted(row.keys() - {"epoch", "step"}) for row in log.rows] == [["loss"], ["loss"], ["val_loss"]] * 2
    again = plugins.EveryLog(tmp_path)
    fit(WithHyperparameters(), logger=again, log_every_n_steps=1, ckpt_path=tmp_path / "mid.ckpt")
    assert ("load_state_dict", 3) in again.calls


def test_a_logger_of_rows(tmp_path):
    log, saves = plugins.Tabs(tmp_path, name="tabs", version=0), Saves(tmp_path / "mid.ckpt", 7)
    fit(None, saves, logger=log, log_every_n_steps=1)
    file = Path(log.log_dir) / "metrics.tsv"
    straight = file.read_text()
    assert [line.split("\t")[0] for line in straight.splitlines()] == [f"step={step}" for step in (0, 1, 1, 2, 3, 3)]
    assert all("rounded=" in line for line in straight.splitlines())
    assert sum(call[1] for call in log.calls if call[0] == "_write") == 6
    assert only(log.calls, "log_metrics") == [("log_metrics", step) for step in (0, 1, 1, 2, 3, 3)]
    again = plugins.Tabs(tmp_path, name="tabs", version=0)
    fit(None, logger=again, log_every_n_steps=1, ckpt_path=tmp_path / "mid.ckpt")
    assert ("_take_back",) in again.calls
    assert file.read_text() == straight  # the rows behind the checkpoint were dropped, and came again


def test_a_logger_with_a_folder(tmp_path):
    log, saves = plugins.Steps(tmp_path), Saves(tmp_path / "mid.ckpt", 7)
    fit(None, saves, logger=log, log_every_n_steps=1)
    assert (tmp_path / "steps" / "version_0" / "steps.txt").read_text().splitlines() == [
        "epoch loss",
        "epoch loss",
        "epoch val_loss",
    ] * 2
    assert ("_sync",) in log.calls  # a checkpoint waits for what was logged
    assert sum(call[1] for call in log.calls if call[0] == "_append") == 6


def test_a_subclass_of_a_logger(tmp_path):
    log = plugins.Rounded(tmp_path, name="rounded")
    fit(None, logger=log, log_every_n_steps=1)
    rows = (Path(log.log_dir) / "metrics.csv").read_text().splitlines()
    assert rows[0] == "step,epoch,loss,val_loss"
    assert len(rows) == 7
    assert all(len(cell) <= 4 for row in rows[1:] for cell in row.split(","))


def test_a_profiler(tmp_path):
    profiler = plugins.Actions(tmp_path, "report")
    fit(None, profiler=profiler)
    assert profiler.calls == [("setup", "fit", None), ("watch", "Classifier"), ("teardown", "fit")]
    started = profiler.started
    assert started["run_training_batch"] == started["run_training_batch stops"] == 2 * BATCHES
    assert started["run_training_epoch"] == 2
    assert (tmp_path / "fit-report.txt").read_text() == f"{len(started)} actions\n"


def test_a_datamodule_with_a_sampler_of_its_own(tmp_path):
    digits, order = plugins.Digits(data(16)), []

    class Notes(Classifier):
        def training_step(self, batch, batch_idx):
            order.append(batch[0].clone())
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_epochs=2, num_sanity_val_steps=0)
    module = Notes()
    trainer.fit(module, datamodule=digits)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer.test(module, datamodule=digits, verbose=False)
    trainer.predict(module, datamodule=digits)
    names = [call for call in digits.calls if not call[0].endswith("transfer")]
    stages = {
        "fit": ["train_dataloader", "val_dataloader"],
        "test": ["test_dataloader"],
        "predict": ["predict_dataloader"],
    }
    at_end = {
        "fit": [("teardown", "fit"), ("state_dict",)],
        "test": [("teardown", "test")],
        "predict": [("teardown", "predict")],
    }
    assert names == [
        call
        for stage, loaders in stages.items()
        for call in [("prepare_data",), ("setup", stage), *[(one,) for one in loaders], *at_end[stage]]
    ]
    moves = only(digits.calls, "on_before_batch_transfer", "on_after_batch_transfer")
    assert moves == [("on_before_batch_transfer", 0), ("on_after_batch_transfer", 0)] * (4 * (2 + 2 + 1 + 1))
    x, _ = digits.dataset.tensors
    backwards = x.flip(0).split(4)
    assert len(order) == 8
    assert all(map(torch.equal, order, backwards + backwards))

    again = plugins.Digits(data(16))
    quiet_trainer(max_epochs=3).fit(Notes(), datamodule=again, ckpt_path=tmp_path / "end.ckpt")
    assert only(again.calls, "load_state_dict") == [("load_state_dict", True)]
    assert plugins.Digits.load_from_checkpoint(tmp_path / "end.ckpt", dataset=data(8)).hparams.batch_size == 4


# -- CUDA graphs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_strategy_under_a_graph(tmp_path):
    class Captured(plugins.LoggedStrategy):
        def refuses_graph(self):
            super().refuses_graph()
            return ""

    strategy, callback = Captured(), plugins.NamedCheckpoint(tmp_path / "own", every_n_train_steps=7)
    module = WithOptimizer(FusedAdam)
    options = {"accelerator": "gpu", "max_steps": 12, "accumulate_grad_batches": 2, "enable_checkpointing": True}
    graph = CudaGraph(warmup=3)
    trainer = Trainer(**{**QUIET, **options}, strategy=strategy, callbacks=[callback], cuda_graph=graph)
    trainer.fit(module, loader(96))
    assert ("refuses_graph",) in strategy.calls
    # Other calls hold batch numbers that refuse to be compared.
    assert {call for call in strategy.calls if call[0] == "note_window"} == {
        ("note_window", True),
        ("note_window", False),
    }
    plain = WithOptimizer(FusedAdam)
    Trainer(**{**QUIET, **options}, callbacks=[ModelCheckpoint(tmp_path / "plain", every_n_train_steps=7)]).fit(
        plain, loader(96)
    )
    assert_same_weights(module, plain)


@pytest.mark.gpu
def test_a_callback_holds_launches(tmp_path):
    callback = plugins.NamedCheckpoint(tmp_path, every_n_train_steps=7)

    class Plain(TrainingModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(8, 3)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return FusedAdam(self.parameters())

    # A class that overrides a batch hook and holds_at beside it may be launched over.
    options = {"accelerator": "gpu", "max_steps": 24, "enable_checkpointing": True, "log_every_n_steps": 50}
    Trainer(**{**QUIET, **options}, callbacks=[callback], cuda_graph=CudaGraph(warmup=3, steps=4)).fit(
        Plain(), loader(128)
    )
    assert only(callback.calls, "holds_at")
    assert [call[3] for call in only(callback.calls, "format_checkpoint_name")] == [7, 14, 21]
