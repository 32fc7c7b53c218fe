"""Hooks and a profiler's range around a step, as in torch; without hooks and profiler a step does none of this."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fabricamp.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLion,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
    base,
)

KINDS = [FusedAdagrad, FusedAdam, FusedLAMB, FusedLion, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD]


def build(kind):
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return kind([weight], lr=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_each_hook_runs_once_a_step(kind):
    optimizer = build(kind)
    optimizer.step()
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before all")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after all")),
    ]
    try:
        optimizer.step()
        own = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["before all", "after all", "before all", "before", "after", "after all"]
    seen.clear()
    own.remove()
    optimizer.step()
    assert seen == ["after"]


def test_one_kind_of_hook_is_enough():
    optimizer, seen = build(FusedAdam), []
    for register in (
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
    ):
        handle = register(lambda *_: seen.append(1))
        optimizer.step()
        handle.remove()
        optimizer.step()
        assert seen == [1]
        seen.clear()


def test_a_hook_may_bring_a_closure():
    optimizer = build(FusedAdam)
    optimizer.register_step_pre_hook(lambda *_: ((optimizer, lambda: 7.0), {}))
    assert optimizer.step() == 7.0


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_wrapper_is_passed_by_where_nobody_asked(kind, monkeypatch):
    optimizer = build(kind)
    calls = []
    monkeypatch.setattr(kind, "_optimizer_step_code", lambda _: calls.append("wrapped"), raising=True)
    optimizer.step()
    assert calls == []
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert calls == ["wrapped"]
    assert f"Optimizer.step#{kind.__name__}.step" in {event.key for event in profile.key_averages()}
    optimizer.step()
    assert calls == ["wrapped"]


def test_copies_pickles_subclasses_and_schedulers():
    class Mine(FusedAdam):
        pass

    for optimizer in (build(Mine), copy.deepcopy(build(FusedSGD)), pickle.loads(pickle.dumps(build(FusedAdam)))):
        before = type(optimizer).step
        base.let_hooks_idle(type(optimizer))
        assert type(optimizer).step is before
        seen = []
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the scheduler's warning that the optimizer has not stepped
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            scheduler.step()
        assert seen == [1]
