"""A rule and a fused optimizer of one's own: how a precision steers it, and that an optimizer is driven by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fabricamp.ops import Rule, Steering
from fabricamp.ops.rules import function_of
from fabricamp.optimizers import FusedAdam, FusedLion, FusedOptimizer
from tests.own_parts import Saves, WithOptimizer, assert_same_weights, fit, moved, only
from tests.small import Classifier


@dataclass
class SignRule(Rule):
    """Along the sign of a momentum."""

    kernel = "third_party_sign"
    states = ("exp_avg",)
    cells = ("steps",)

    lr: float
    beta: float = 0.9

    def scalars(self):
        return (self.lr, self.beta)

    def step(self, gradients, parameters, states, cells):
        (averages,), (steps,) = states, cells
        torch._foreach_mul_(averages, self.beta)
        torch._foreach_add_(averages, gradients, alpha=1 - self.beta)
        for parameter, average, count in zip(parameters, averages, steps, strict=True):
            count.add_(1)
            parameter.add_(average.sign(), alpha=-float(self.lr))


third_party_sign = function_of(SignRule)


class FusedSign(FusedOptimizer):
    """An optimizer over :class:`SignRule`."""

    rule = SignRule

    def __init__(self, params, lr=1e-2, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    def _rule(self, group):
        return SignRule(group["lr"], group["beta"])


class LookingRule(SignRule):
    """Looks at what an update is made by."""

    seen: ClassVar = []

    def gradients(self, rows, parameters, steering):
        multiplier = None if steering.state is None else float(steering.state.multiplier)
        LookingRule.seen.append(("gradients", multiplier, steering.limit, steering.skips))
        return super().gradients(rows, parameters, steering)

    def measure(self, rows, steering):
        LookingRule.seen.append(("measure",))
        return super().measure(rows, steering)

    def reference(self, rows, steering):
        assert isinstance(steering, Steering)
        LookingRule.seen.append(("reference", len(rows.parameters), steering.norm is not None))
        super().reference(rows, Steering(steering.state, steering.limit, steering.skips, norm=steering.norm))


class LookingSign(FusedSign):
    """Notes how a Precision steers it."""

    rule = LookingRule

    def __init__(self, params, lr=1e-2, beta=0.9):
        self.calls = []
        super().__init__(params, lr, beta)

    def _rule(self, group):
        return LookingRule(group["lr"], group["beta"])

    def _measure(self, steering):
        self.calls.append(("_measure", steering.limit, steering.skips))
        return {
            **super()._measure(steering),
            **{part: torch.ones((), dtype=torch.float64) for part in [torch.device("cpu")]},
        }

    def gather(self, gradients=None, *options, **named):
        self.calls.append(("gather", gradients is not None))
        super().gather(gradients, *options, **named)

    def statistics(self, scale, divisor=1.0):
        self.calls.append(("statistics", divisor))
        return super().statistics(scale, divisor)

    def steer(self, state, *, limit=None, skips=True):
        self.calls.append(("steer", state is not None, limit, skips))
        super().steer(state, limit=limit, skips=skips)

    def step(self, closure=None):
        self.calls.append(("step",))
        return super().step(closure)

    def zero_grad(self, set_to_none=None):
        self.calls.append(("zero_grad",))
        super().zero_grad(set_to_none)


class NoisyAdam(FusedAdam):
    """A subclass of one of fabricamp's own."""

    def __init__(self, params, **options):
        self.calls = []
        super().__init__(params, **options)

    def steer(self, state, *, limit=None, skips=True):
        self.calls.append(("steer", limit, skips))
        super().steer(state, limit=limit, skips=skips)

    def step(self, closure=None):
        self.calls.append(("step",))
        return super().step(closure)


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
    optimizer = FusedSign([weight], lr=0.1)
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
    third_party_sign([seen[0][1]], [parameter], [average], [steps], SignRule(0.1))
    torch.testing.assert_close(parameter, seen[1][0])


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_fused_optimizer_of_a_third_party_trains(level, tmp_path):
    saves = Saves(tmp_path / "mid.ckpt", 7)
    _, module = fit(WithOptimizer(FusedSign), saves, precision=level)
    assert moved(module)
    _, again = fit(WithOptimizer(FusedSign), precision=level, ckpt_path=tmp_path / "mid.ckpt")
    assert_same_weights(again, module)
    # Along signs alone: each weight goes a whole number of steps.
    moves = (module.net[0].weight - Classifier().net[0].weight).detach() / 1e-2
    torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-3)
    assert moves.abs().max() > 1


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_precision_updates_by_an_optimizer_with_its_own_step(level, algorithm):
    """Such a step gets a closure, so it reads clipped gradients in ``.grad``."""
    LookingRule.seen.clear()
    trainer, module = fit(
        WithOptimizer(LookingSign), precision=level, gradient_clip_algorithm=algorithm, validates=False
    )
    assert trainer.optimizers[0].calls.count(("step",)) == 4
    assert {call[0] for call in LookingRule.seen} == {"reference", "gradients"}
    assert_same_weights(module, fit(WithOptimizer(FusedSign), precision=level, gradient_clip_algorithm=algorithm)[1])


def test_an_optimizer_alone_is_not_steered():
    LookingRule.seen.clear()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = LookingSign([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    assert only(optimizer.calls, "step", "steer", "_measure", "gather") == [
        ("step",),
        ("gather", False),
        ("_measure", None, True),
    ]
    assert LookingRule.seen == [("reference", 1, True), ("gradients", None, None, True)]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_subclass_of_a_fused_optimizer(level):
    trainer, module = fit(WithOptimizer(NoisyAdam), precision=level)
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
    infinite = gradient * math.inf
    optimizer.gather([infinite], None)
    ops.finish(state, optimizer.statistics(scale), scale=scale)
    optimizer.steer(state, limit=0.1, skips=True)
    optimizer.step()
    assert torch.equal(weight, plain)  # skipped
