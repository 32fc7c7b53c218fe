"""Non-finite gradients: updates stop at once and stay stopped, and the parameter is named, with any optimizer and level."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.errors import ConfigError
from fabricamp.ops import bridge
from fabricamp.optimizers import LARC, FusedAdam, FusedLAMB, FusedSGD
from fabricamp.precision import Clip, OptLevel, Precision, precision_from
from fabricamp.precision.loss_scaler import LAG, PATIENCE, SLOTS, LossScaler
from fabricamp.strategies.base import Strategy
from tests.cuda_on_cpu.compiler import kernel_device
from tests.pairs import pairs
from tests.windows import add_up, end_step, make_step

__all__ = ["kernel_device"]

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "64-true")
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam_fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-4, fused=True),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, foreach=True),
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=0.01, eps=1e-4),
    "FusedSGD": lambda parameters: FusedSGD(parameters, lr=0.1, momentum=0.9),
    "FusedLAMB": lambda parameters: FusedLAMB(parameters, lr=0.01, eps=1e-4, max_grad_norm=0.05),
    "LARC": lambda parameters: LARC(FusedSGD(parameters, lr=0.1, momentum=0.9)),
}
STICKY = ("stop", "raise")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 40, bias=False), nn.LayerNorm(40), nn.Linear(40, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x)))).float()


class Run:
    """Trains one module under one policy, one accumulation step per call."""

    def __init__(self, level, policy, make, accumulate=1, device="cpu", **options):
        torch.manual_seed(0)
        self.module = Net().to(device)
        self.device = device
        precision = OptLevel(level, **options) if options else level
        self.precision = precision_from(precision, policy)
        if self.precision.name in ("O1", "O2") and not options:
            self.precision = precision_from(OptLevel(level, max_loss_scale=2.0**8), policy)
        self.accumulate = accumulate
        self.precision.convert_module(self.module)
        self.optimizers = [make(self.module.parameters())]
        self.precision.setup_optimizers(self.module, self.optimizers, Strategy(), accumulates=accumulate > 1)
        self.windows = 0
        self.told = []

    def window(self, spoil=None, clip=None, look=False, merged=True):
        optimizer = self.optimizers[0]
        optimizer.zero_grad()
        for part in range(self.accumulate):
            generator = torch.Generator().manual_seed(self.windows * 10 + part)
            x = torch.randn(8, 6, generator=generator).to(self.device)
            y = torch.randint(0, 3, (8,), generator=generator).to(self.device)
            batch = self.precision.convert_input({"x": x})
            loss = self.precision.forward(lambda x: F.cross_entropy(self.module(x), y), batch["x"])
            self.precision.backward(loss / self.accumulate)
            for name in [spoil] if isinstance(spoil, str) else spoil or ():
                gradient = dict(self.module.named_parameters())[name].grad.view(-1)
                gradient[-1] = float("nan")
            add_up(self.precision, *self.optimizers)
        if look:
            make_step(self.precision, optimizer, look=lambda: clip)
        else:
            make_step(self.precision, optimizer, clip=clip, loss=loss if merged else None)
        self.told.append(end_step(self.precision, None if merged and not look else loss))
        self.windows += 1

    def state(self):
        """Weights, masters and optimizer state."""
        updated = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        kept = [self.optimizers[0].state.get(p, {}) for p in updated]
        values = [value for one in kept for value in one.values() if isinstance(value, torch.Tensor)]
        return [one.detach().clone() for one in [*self.module.parameters(), *updated, *values]]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(("level", "optimizer", "accumulate"), pairs(LEVELS, OPTIMIZERS, [1, 2]))
def test_from_the_first_bad_window_on_nothing_is_updated(level, optimizer, accumulate):
    for options in ({"clip": Clip(0.5)}, {"look": True}, {"merged": False}):
        run = Run(level, "raise", OPTIMIZERS[optimizer], accumulate)
        for _ in range(2):
            run.window(**options)
        before = run.state()
        run.window("norm.weight", **options)
        for _ in range(3):
            run.window(**options)
        assert same(before, run.state())
        told = [*run.told[LAG:], *run.precision.verdicts.drain()]
        assert [verdict.applied for verdict in told] == [True, True, False, False, False, False]
        assert [verdict.ends_run for verdict in told] == [False, False, True, True, True, True]


@pytest.mark.parametrize(
    ("level", "optimizer", "clip"), pairs(LEVELS, OPTIMIZERS, [None, Clip(0.05), Clip(0.01, "value")])
)
def test_a_policy_changes_no_bit_of_what_is_finite(level, optimizer, clip):
    results = []
    for policy in (None, "skip", "stop"):
        run = Run(level, policy, OPTIMIZERS[optimizer])
        for _ in range(4):
            run.window(clip=clip)
        results.append(run.state())
    for other in results[1:]:
        if optimizer == "FusedLAMB":  # uses the norm of the statistics, if there are any
            torch.testing.assert_close(results[0], other, rtol=1e-5, atol=1e-6)
        else:
            assert same(results[0], other)


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_skip_without_a_dynamic_scale(level):
    run = Run(level, "skip", OPTIMIZERS["FusedSGD"])
    for bad in (False, True, False, False):
        before = run.state()
        run.window("last.weight" if bad else None)
        assert same(before, run.state()) == bad
    assert [one.skipped_steps for one in run.precision.verdicts.drain()] == [1, 1]
    verdicts = run.precision.verdicts
    assert (verdicts.scale, verdicts.schedules_follow) == (1.0, True)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam_fused", "FusedAdam", "LARC"])
def test_the_parameters_of_the_first_bad_window_are_named_and_none_of_later_ones(kernel_device, level, optimizer):
    run = Run(level, "raise", OPTIMIZERS[optimizer], device=kernel_device)
    run.window()
    run.window(["norm.bias", "last.weight"])
    run.window("first.weight")
    run.window("last.bias")
    # The kernels of a fused optimizer write the statistics of each step to the same memory.
    overwritten = optimizer == "FusedAdam"
    explanation = run.precision.verdicts.explain(run.windows)
    expected = "norm.bias" if overwritten else "norm.bias, last.weight"
    assert f"the gradients of {expected} were not finite at step 1 (loss" in explanation
    assert ("it is not known if others were not finite too" in explanation) == overwritten


@pytest.mark.parametrize("optimizer", ["sgd", "FusedAdam"])
def test_more_than_five_parameters_are_counted(kernel_device, optimizer):
    module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]).to(kernel_device)
    precision = precision_from("O0", "raise")
    precision.convert_module(module)
    fitted = OPTIMIZERS[optimizer](module.parameters())
    precision.setup_optimizers(module, [fitted], Strategy())
    loss = module(torch.ones(1, 2, device=kernel_device)).sum() * float("nan")
    precision.backward(loss)
    make_step(precision, fitted, loss=loss)
    end_step(precision)
    named = "0.weight, 0.bias, 1.weight, 1.bias, 2.weight and 3 more"
    assert f"of {named} were not finite at step 0 (loss nan, loss scale 1)" in precision.verdicts.explain(1)


def test_an_overflow_of_many_steps_ago_is_named_by_its_first_parameter(kernel_device):
    run = Run("O0", "raise", OPTIMIZERS["sgd"], device=kernel_device)
    run.window(["norm.bias", "last.weight"])
    for _ in range(SLOTS):
        run.window("first.weight")
    explanation = run.precision.verdicts.explain(run.windows)
    assert "the gradients of norm.bias were not finite at step 0 (loss" in explanation
    assert "it is not known if others were not finite too" in explanation


def test_names_follow_gradients_that_come_and_go(kernel_device):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(2, 70), nn.Linear(2, 70)

    for make in (OPTIMIZERS["sgd"], OPTIMIZERS["FusedAdam"]):
        module, precision = Heads().to(kernel_device), precision_from("O0", "stop")
        precision.convert_module(module)
        optimizer = make(module.parameters())
        precision.setup_optimizers(module, [optimizer], Strategy())
        for window in range(5):  # the last one is of other gradients
            optimizer.zero_grad()
            head = (module.left, module.right)[window % 2]
            loss = head(torch.ones(2, device=kernel_device)).sum()
            precision.backward(loss)
            if window == 3:
                head.bias.grad[-1] = float("inf")
            make_step(precision, optimizer, loss=loss)
            end_step(precision)
        assert [one.ends_run for one in precision.verdicts.drain()] == [True, True]
        assert precision.verdicts.explain(5).startswith("the gradients of right.bias were not finite at step 3")


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", ["sgd", "FusedAdam"])
def test_several_optimizers_stop_together_and_have_numbers_of_their_own(kernel_device, level, kind):
    torch.manual_seed(0)
    module = Net().to(kernel_device)
    precision = precision_from(level if level == "O0" else OptLevel(level, max_loss_scale=4.0), "stop")
    precision.convert_module(module)
    rest = [*module.norm.parameters(), *module.last.parameters()]
    optimizers = [OPTIMIZERS[kind](parameters) for parameters in ([module.first.weight], rest)]
    precision.setup_optimizers(module, optimizers, Strategy())
    weights = []
    for window in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = precision.forward(lambda: module(torch.ones(4, 6, device=kernel_device)).square().mean())
        precision.backward(loss)
        if window == 1:
            module.last.bias.grad[0] = float("inf")
        for optimizer in reversed(optimizers):  # the bad one is first
            make_step(precision, optimizer)
        end_step(precision, loss.detach())
        weights.append([p.detach().clone() for p in module.parameters()])
    assert same(weights[1], weights[0])
    assert same(weights[3], weights[0])
    assert "of last.bias were" in precision.verdicts.explain(4)


def test_a_step_and_the_end_of_its_window_are_one_launch(kernel_device, monkeypatch):
    launched = []
    real = bridge.COMPILERS[kernel_device.type]

    def spy(text, function, device):
        run = real(text, function, device)

        def launch(*arguments):
            launched.append(function)
            run(*arguments)

        return launch

    monkeypatch.setitem(bridge.COMPILERS, kernel_device.type, spy)
    bridge.kernel.cache_clear()
    run = Run("O2", None, OPTIMIZERS["FusedAdam"], device=kernel_device)
    for merged, expected in ((True, []), (False, ["update_scale"])):
        launched.clear()
        run.window(clip=Clip(1.0), merged=merged)
        assert launched == ["sum_squares", "finish", "adam", *expected]
    bridge.kernel.cache_clear()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", ["sgd", "FusedAdam", "FusedLAMB"])
def test_one_launch_and_two_decide_the_same(kernel_device, level, optimizer):
    runs = [Run(level, None, OPTIMIZERS[optimizer], device=kernel_device, scale_window=2) for _ in range(2)]
    for merged, run in zip((True, False), runs, strict=True):
        for bad in (False, False, True, False, True, True, False):
            run.window("last.weight" if bad else None, merged=merged, clip=Clip(0.1))
    assert repr(runs[0].told) == repr(runs[1].told)
    assert repr(runs[0].precision.verdicts.drain()) == repr(runs[1].precision.verdicts.drain())
    assert same(runs[0].state(), runs[1].state())


@pytest.mark.parametrize("floor", [2.0**-14, 2.0, 0.1])
def test_twenty_skips_at_the_floor_end_a_run_resumed_or_not(floor):
    def closes(scaler, count):
        for _ in range(count):
            scaler.state.finite.zero_()
            verdict = scaler.end_step(torch.tensor(1.0))
        return verdict

    scaler = LossScaler(minimum=floor, maximum=4 * floor)
    closes(scaler, 12)
    scaler.end_step(torch.tensor(0.0))  # applied: the count begins anew
    assert not closes(scaler, PATIENCE + LAG - 1).ends_run
    assert [verdict.ends_run for verdict in scaler.pending()] == [True, True]
    scaler = LossScaler(minimum=floor, maximum=4 * floor)
    closes(scaler, 13)  # at four times the floor, at twice, then at the floor
    buffer = io.BytesIO()
    torch.save(scaler.state_dict(), buffer)
    buffer.seek(0)
    resumed = LossScaler(minimum=floor, maximum=4 * floor)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    for one in (scaler, resumed):
        assert not closes(one, 2 + PATIENCE - 1 + LAG - 13).ends_run
        assert [verdict.ends_run for verdict in one.pending()] == [True, True]
        assert closes(one, 1).ends_run
        assert (one.overflow.step, one.overflow.scale) == (0, pytest.approx(4 * floor))


@pytest.mark.parametrize("policy", STICKY)
def test_a_state_saved_before_the_host_knew_ends_the_resumed_run_too(policy):
    def scaler():
        return LossScaler(minimum=1.0, maximum=1.0, sticky=True)

    first = scaler()
    for finite in (1, 1, 0):
        first.state.finite.fill_(finite)
        verdict = first.end_step(torch.tensor(0.5))
    assert verdict.applied
    second = scaler()
    second.load_state_dict(first.state_dict())
    assert second.state.streak.item() == 1
    for _ in range(LAG):
        verdict = second.end_step(torch.tensor(0.5))
    assert verdict.ends_run
    assert second.overflow.step == 2


def test_a_settled_state_starts_afresh():
    first = LossScaler(sticky=True)
    for _ in range(3):
        first.state.finite.zero_()
        first.end_step(None)
    first.settle()
    second = LossScaler(sticky=True)
    second.load_state_dict(first.state_dict())
    verdicts = [second.end_step(torch.tensor(0.0)) for _ in range(LAG + 1)] + second.pending()
    assert [(one.applied, one.ends_run) for one in verdicts] == [(False, False)] * 2 + [(True, False)] * 3
    second.state.finite.zero_()
    second.end_step(None)
    assert [one.ends_run for one in second.pending()] == [False, True]


def test_skips_of_another_policy_do_not_stick():
    skipping = LossScaler()
    for _ in range(3):
        skipping.state.finite.zero_()
        skipping.end_step(None)
    sticky = LossScaler(sticky=True)
    sticky.load_state_dict(skipping.state_dict())
    assert sticky.state.streak.item() == 0
    assert [sticky.end_step(None).ends_run for _ in range(3)] == [False] * 3


def test_a_constant_scale_of_a_policy_is_not_carried_to_a_level_that_moves_it():
    run = Run("O5", "skip", OPTIMIZERS["sgd"])
    run.window()
    dynamic = OptLevel("O2")
    dynamic.convert_module(Net())
    dynamic.load_state_dict(run.precision.state_dict())
    assert dynamic.verdicts.scale == 2.0**16
    static = precision_from("O0", "skip")
    static.convert_module(Net())
    static.load_state_dict(dynamic.state_dict())
    assert static.verdicts.scale == 1.0
    static.load_state_dict(run.precision.state_dict())
    assert static.verdicts.applied_steps == 0
    assert static.verdicts.scaler.steps == 1


def test_sparse_gradients_are_looked_at_and_named(kernel_device):
    for level in ("O0", "O1"):
        module = nn.ModuleDict({"a": nn.Embedding(10, 4, sparse=True), "b": nn.Embedding(10, 40, sparse=True)})
        module.to(kernel_device)
        precision = precision_from(level, "stop")
        precision.convert_module(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        precision.setup_optimizers(module, [optimizer], Strategy())
        before = [p.detach().clone() for p in module.parameters()]
        index = torch.tensor([1, 1, 7], device=kernel_device)
        loss = precision.forward(lambda: module["a"](index).sum() + (module["b"](index) * float("inf")).sum())
        precision.backward(loss)
        make_step(precision, optimizer, loss=loss)
        end_step(precision)
        assert same(before, [p.detach() for p in module.parameters()])
        assert "of b.weight were not finite at step 0 (loss" in precision.verdicts.explain(1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_complex_gradients_are_looked_at_and_named(kernel_device, level):
    """Their statistics have two numbers per element, so that a later parameter is found behind them."""
    module = nn.ParameterDict({name: torch.ones(100, dtype=torch.complex64) for name in "abc"})
    module.to(kernel_device)
    precision = precision_from(level, "stop")
    precision.convert_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    precision.setup_optimizers(module, [optimizer], Strategy())
    before = [p.detach().clone() for p in module.parameters()]
    bad = torch.ones(100, device=kernel_device)
    bad[-1] = float("inf")
    loss = precision.forward(lambda: module["a"].real.sum() + (module["b"].imag * bad).sum() + module["c"].real.sum())
    precision.backward(loss)
    make_step(precision, optimizer, loss=loss)
    end_step(precision)
    assert same(before, [p.detach() for p in module.parameters()])
    assert "of b were not finite at step 0 (loss" in precision.verdicts.explain(1)


def test_what_cannot_work_is_refused_by_name():
    module, precision = Net(), precision_from("O0", "raise")
    precision.convert_module(module)
    with pytest.raises(ConfigError, match="LBFGS.*nan_policy"):
        precision.setup_optimizers(module, [torch.optim.LBFGS(module.parameters())], Strategy())

    class Own(Precision):
        pass

    with pytest.raises(ConfigError, match="nan_policy='stop' with Own"):
        precision_from(Own(), "stop")
    assert type(precision_from("O0")) is Precision
    again = precision_from(precision)
    again.convert_module(Net())
    assert again.verdicts is None
