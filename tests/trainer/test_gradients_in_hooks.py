"""What hooks, monitors and overrides see in ``.grad``, for each level and optimizer: unscaled, averaged gradients."""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fabricamp import Callback, OptLevel, TrainingModule, ops
from fabricamp.callbacks import EMA, LambdaCallback, LearningRateMonitor, ModelCheckpoint, ThroughputMonitor
from fabricamp.gradients.flat import Gradients
from fabricamp.optimizers import FusedAdam, FusedLAMB, FusedLion, FusedSGD
from fabricamp.profilers import SimpleProfiler
from fabricamp.utilities.grads import grad_norm
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer

GRADIENT = 0.5
"""Of each of the four weights, by a batch of two samples: a quarter of the sum of their values, which are 1."""
CLIPPED = 0.25
"""By a norm of 0.5; the norm of all is 1."""
LEVELS = {
    "O0": "O0",
    "O0 with a nan_policy": "O0",
    "O1": "O1",
    "O1, constant": OptLevel("O1", loss_scale=1024.0),
    "O2": "O2",
    "O2, constant": OptLevel("O2", loss_scale=1024.0),
    "O3": "O3",
    "O3, constant": OptLevel("O3", loss_scale=1024.0),
    "O4": "O4",
    "O5": "O5",
    "16-mixed": "16-mixed",
    "bf16-true": "bf16-true",
}
HAS_MASTERS = ("O2", "O5")
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "SGD, fused": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "Adam, fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "Adagrad, fused": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, fused=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=0.01),
    "FusedSGD": lambda parameters: FusedSGD(parameters, lr=0.01, momentum=0.9),
    "FusedLAMB": lambda parameters: FusedLAMB(parameters, lr=0.01, max_grad_norm=None),
    "FusedLion": lambda parameters: FusedLion(parameters, lr=0.01),
}


class Sum(TrainingModule):
    """``look`` notes by name what a hook sees in ``.grad`` of the module's weight, and of the tensor that the optimizer updates."""

    def __init__(self, optimizer="SGD"):
        super().__init__()
        self.net = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(self.net.weight)
        self.optimizer = optimizer
        self.seen = {}

    def look(self, name):
        updated = self.trainer.optimizers[0].param_groups[0]["params"][0]
        for gradient in (self.net.weight.grad, updated.grad):
            values = None if gradient is None else {round(float(value), 3) for value in gradient.flatten()}
            self.seen.setdefault(name, []).append(values)

    def training_step(self, batch, batch_idx):
        return self.net(batch).float().sum() / 4

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


class BeforeStep(Sum):
    def on_before_optimizer_step(self, optimizer):
        self.look("before")


class Clips(Sum):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.look("before")
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class Steps(Sum):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.look("clipped")
        optimizer.step(optimizer_closure)
        self.look("clipped")


class AfterStep(Sum):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.look("after")


class BeforeZeroGrad(Sum):
    def on_before_zero_grad(self, optimizer):
        if self.global_step:
            self.look("after")


class All(BeforeStep, Clips, AfterStep, BeforeZeroGrad):
    pass


HOOKS = [BeforeStep, Clips, Steps, AfterStep, BeforeZeroGrad, All]


def fit(module, level, **options):
    policy = "skip" if level == "O0 with a nan_policy" else None
    trainer = quiet_trainer(
        max_epochs=1, limit_train_batches=3, precision=copy.deepcopy(LEVELS[level]), nan_policy=policy, **options
    )
    trainer.fit(module, DataLoader(torch.ones(12, 4), batch_size=2, drop_last=True))
    return module


def expected(name, level, clip):
    if name == "after" and level.startswith(HAS_MASTERS):
        return None  # dropped by the update
    return {CLIPPED if clip and name != "before" else GRADIENT}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_unscaled_and_clipped_after_the_step(level, optimizer):
    for hooks, clip in itertools.product(HOOKS, (None, 0.5)):
        module = fit(hooks(optimizer), level, gradient_clip_val=clip)
        assert module.seen
        for name, values in module.seen.items():
            assert values == [expected(name, level, clip)] * len(values), (hooks.__name__, name, clip)


@pytest.mark.parametrize(
    "clip", [{}, {"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}]
)
@pytest.mark.parametrize("optimizer", ["FusedAdam", "FusedSGD", "FusedLAMB", "Adam, fused"])
@pytest.mark.parametrize("level", LEVELS)
def test_to_look_after_the_step_changes_no_bit(level, optimizer, clip):
    plain = fit(Sum(optimizer), level, **clip)
    looked = fit(AfterStep(optimizer), level, **clip)
    assert torch.equal(plain.net.weight, looked.net.weight)
    assert bool(plain.net.weight.any())


def launches(monkeypatch, module, level="O1", **options):
    """Returns the number of passes that wrote gradients in a fit of three steps."""
    calls = []
    scale = ops.scale
    monkeypatch.setattr(ops, "scale", lambda *arguments: (calls.append(1), scale(*arguments)))
    fit(module, level, **options)
    monkeypatch.undo()
    return len(calls)


@pytest.mark.parametrize("level", ["O0", "O1", "O3, constant", "O4"])
def test_nothing_is_written_where_no_hook_of_the_program_follows(monkeypatch, level, tmp_path):
    own = [LearningRateMonitor(), ThroughputMonitor(), EMA(0.9), ModelCheckpoint(tmp_path, every_n_train_steps=1)]
    options = {"callbacks": own, "enable_checkpointing": True, "logger": True, "default_root_dir": tmp_path}
    assert launches(monkeypatch, Sum("FusedAdam"), level, gradient_clip_val=0.5, **options) == 0


def first_of(module):
    return float(module.net.weight.grad.flatten()[0])


class LogsOnly(Sum):
    """Its hooks look at no gradient."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.log("loss", outputs["loss"] * self.weighed())

    def on_before_zero_grad(self, optimizer):
        self.count = getattr(self, "count", 0) + 1

    def weighed(self):
        return float(batch_size_of([1.0]))


def batch_size_of(batch):
    return len(batch)


class ByMethod(Sum):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note()

    def note(self):
        self.seen["after"] = self.first

    @property
    def first(self):
        return first_of(self)


class ByName(Sum):
    def on_before_zero_grad(self, optimizer):
        weights = [getattr(one, "grad") for one in self.parameters()]  # noqa: B009 - as programs do
        self.seen["after"] = None if weights[0] is None else float(weights[0].flatten()[0])


class ByNorm(Sum):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen["after"] = float(grad_norm(self, float("inf"))["grad_inf_norm_total"])


@pytest.mark.parametrize("module", [ByMethod, ByName, ByNorm])
def test_what_a_hook_reaches_counts(module):
    assert fit(module("FusedAdam"), "O1", gradient_clip_val=0.5).seen["after"] == pytest.approx(CLIPPED, rel=1e-5)


@pytest.mark.parametrize("level", ["O0", "O1", "O3, constant", "O4"])
def test_hooks_that_look_at_no_gradient_cost_nothing(monkeypatch, level):
    assert launches(monkeypatch, LogsOnly("FusedAdam"), level, gradient_clip_val=0.5) == 0


def of_a_closure():
    def look(trainer, module, *others):
        module.seen["after"] = first_of(module)

    def hook(*arguments):
        look(*arguments)

    return LambdaCallback(on_train_batch_end=hook)


class Looks(Callback):
    """A callback of the program."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.look("after")


@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": [Looks()]},
        {"callbacks": [LambdaCallback(on_train_batch_end=lambda trainer, module, *others: module.look("after"))]},
        {"callbacks": [Looks()], "profiler": SimpleProfiler()},
    ],
    ids=["callback", "LambdaCallback", "with a profiler"],
)
def test_callbacks_of_the_program_see_them_too(monkeypatch, options):
    module = Sum("FusedAdam")
    assert launches(monkeypatch, module, gradient_clip_val=0.5, **options) == 3
    assert module.seen["after"] == [{CLIPPED}] * 6


def test_a_callback_that_is_a_closure_sees_them_too():
    module = fit(Sum("FusedAdam"), "O1", gradient_clip_val=0.5, callbacks=[of_a_closure()])
    assert module.seen["after"] == pytest.approx(CLIPPED, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["FusedAdam", "Adam, fused", "Adam"])
def test_between_micro_batches_the_sums_have_their_scale(optimizer):
    module = fit(AfterStep(optimizer), "O1, constant", accumulate_grad_batches=3)
    values = [values.pop() for values in module.seen["after"][::2]]
    assert values == pytest.approx([GRADIENT * 1024 / 3, GRADIENT * 1024 * 2 / 3, GRADIENT], rel=1e-3)


class Keeps(AfterStep):
    """Clears no gradients: each step's are added to those before."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


def test_gradients_that_the_program_keeps_stay_as_backward_left_them():
    module = fit(Keeps("FusedAdam"), "O1, constant")
    assert [max(values) for values in module.seen["after"][::2]] == [GRADIENT * 1024 * number for number in (1, 2, 3)]


class ByHand(AfterStep):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class ByHandBefore(ByHand, BeforeStep):
    pass


@pytest.mark.parametrize("module", [ByHand, ByHandBefore])
@pytest.mark.parametrize("optimizer", ["FusedAdam", "FusedSGD", "Adam", "Adam, fused"])
@pytest.mark.parametrize("level", LEVELS)
def test_manual_optimization(level, optimizer, module):
    seen = fit(module(optimizer), level).seen
    for name, values in seen.items():
        assert values == [expected(name, level, None)] * len(values)


def of_two_ranks():
    wrong = []
    for level in ("O0", "O1", "O1, constant", "O3", "O4"):
        for optimizer in ("FusedAdam", "Adam, fused"):
            for clip in (None, 0.5):
                module = ByRank(optimizer)
                fit(module, level, gradient_clip_val=clip, strategy=os.environ["STRATEGY"], devices="auto")
                values = module.seen["after"]
                if values != [{CLIPPED if clip else 0.375}] * len(values):
                    wrong.append((level, optimizer, clip, values))
    return wrong


class ByRank(AfterStep):
    """Its mean gradient over two ranks is 0.375."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.global_rank) / 2


@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp"])
def test_averages_over_two_ranks(strategy, monkeypatch):
    monkeypatch.setenv("STRATEGY", strategy)
    assert run_ranks(of_two_ranks, 2, backend=None) == [[], []]


class OnOneRank(AfterStep):
    """Uses a second layer on rank 0 alone."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.other = nn.Linear(4, 1, bias=False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.other(batch).float().sum() / 4 if self.global_rank == 0 else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.look("after")
        self.seen.setdefault("other", []).append({round(float(value), 3) for value in self.other.weight.grad.flatten()})


def without_a_gradient():
    waits = []
    values = Gradients.values
    Gradients.values = lambda self: (waits.append(not (self.present is None or self.complete)), values(self))[1]
    try:
        for level in ("O0", "O1", "O4"):
            module = fit(OnOneRank("FusedAdam"), level, strategy="delayed_ddp", devices="auto")
            assert module.seen["after"] == [{GRADIENT}] * 6
            assert module.seen["other"] == [{GRADIENT / 2}] * 3
    finally:
        Gradients.values = values
    assert not any(waits)


def test_a_gradient_that_one_rank_lacks_is_averaged_without_a_wait():
    run_ranks(without_a_gradient, 2, backend=None)
