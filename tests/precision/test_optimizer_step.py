"""Every level compared with a hand-written loop: the same weights with any optimizer, clipping and accumulation."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.errors import ConfigError
from fabricamp.gradients.flat import IN_PLACE
from fabricamp.optimizers import FusedAdam
from fabricamp.precision import Clip, OptimizerStep, OptLevel, Precision, precision_from
from fabricamp.strategies.base import Strategy
from tests.pairs import pairs
from tests.windows import add_up, end_step, make_step

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam_fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
}
CLIPS = {"none": None, "norm": Clip(0.05), "value": Clip(0.01, "value")}
WINDOWS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)  # the gradient of a bias before BatchNorm is only rounding error
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)


def task() -> Task:
    torch.manual_seed(0)
    return Task()


def batches(count: int):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(count)
    ]


def start(precision, module, make_optimizer, accumulate=1, strategy=None):
    precision.convert_module(module)
    optimizer = make_optimizer(module.parameters())
    precision.setup_optimizers(module, [optimizer], strategy or Strategy(), accumulates=accumulate > 1)
    return optimizer


def window(precision, module, optimizer, micro_batches, clip=None, spoil=None, look=None):
    """Runs one accumulation step, in the loop's order of calls."""
    loss = None
    for index, batch in enumerate(micro_batches):
        loss = precision.forward(module.training_step, precision.convert_input(batch))
        assert loss.dtype is torch.float32
        if index == 0:
            optimizer.zero_grad()
        precision.backward(loss / len(micro_batches))
        if spoil is not None:
            spoil(module)
        add_up(precision, optimizer)

    def seen():
        look(module, optimizer)
        return clip

    make_step(precision, optimizer, clip=clip, look=None if look is None else seen)
    return end_step(precision, loss.detach())


def train(precision, module, make_optimizer, clip=None, accumulate=1):
    optimizer = start(precision, module, make_optimizer, accumulate)
    data = batches(WINDOWS * accumulate)
    for index in range(WINDOWS):
        window(precision, module, optimizer, data[index * accumulate : (index + 1) * accumulate], clip)
    return optimizer


def reference(level: str, make_optimizer, clip, accumulate):
    """Does the same in plain torch: half copies, fp32 masters, fp32 sums of half gradients, and no scaling where it cancels."""
    module = task()
    dtype = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}.get(level)
    autocast = {"O1": torch.float16, "O4": torch.bfloat16}.get(level)
    scale = 2.0**16 if level in {"O1", "O2"} else 1.0
    keep = level in {"O2", "O5"}
    parameters = list(module.parameters())
    full = [nn.Parameter(p.detach().clone()) for p in parameters]
    if dtype is not None:
        for child in (module.net.first, module.net.last, *([] if keep else [module.net.norm])):
            child.to(dtype)
    masters = full if keep else parameters
    optimizer = make_optimizer(masters)
    data = batches(WINDOWS * accumulate)
    for index in range(WINDOWS):
        sums = [torch.zeros_like(m) for m in masters]
        module.zero_grad()
        for x, y in data[index * accumulate : (index + 1) * accumulate]:
            if autocast is not None:
                with torch.autocast("cpu", autocast):
                    loss = F.cross_entropy(module.net(x), y)
            else:
                loss = F.cross_entropy(module.net(x if dtype is None else x.to(dtype)).float(), y)
            (loss / accumulate * scale).backward()
            if keep:
                for total, p in zip(sums, parameters, strict=True):
                    total.add_(p.grad.float())
                    p.grad = None
        for total, m, p in zip(sums, masters, parameters, strict=True):
            m.grad = (total if keep else p.grad.float()).div_(scale).to(m.dtype)
        if clip is not None and clip.algorithm == "norm" and level in {"O0", "O4"}:
            nn.utils.clip_grad_norm_(masters, clip.value)
        elif clip is not None and clip.algorithm == "norm":
            norm = torch.sqrt(sum(m.grad.double().square().sum() for m in masters))
            coefficient = min(1.0, clip.value / (norm.item() + 1e-6))
            for m in masters:
                m.grad = (m.grad.float() * coefficient).to(m.dtype)
        elif clip is not None:
            nn.utils.clip_grad_value_(masters, clip.value)
        optimizer.step()
        if keep:
            for m, p in zip(masters, parameters, strict=True):
                p.data.copy_(m)
    return module, masters


UPDATES = [
    (level, optimizer)
    for level in ("O0", "O1", "O2", "O3", "O4", "O5")
    for optimizer in OPTIMIZERS
    if level != "O3" or optimizer == "sgd"  # Adam's eps of 1e-8 is 0 in half
]


@pytest.mark.parametrize(("update", "clip", "accumulate"), pairs(UPDATES, CLIPS, [1, 3]))
def test_equals_a_loop_by_hand(update, clip, accumulate):
    level, optimizer = update
    make, limit = OPTIMIZERS[optimizer], CLIPS[clip]
    module, precision = task(), OptLevel(level)
    updated = [p for g in train(precision, module, make, limit, accumulate).param_groups for p in g["params"]]
    expected, masters = reference(level, make, limit, accumulate)
    exact = clip != "norm" or level in {"O0", "O4"}
    for mine, theirs in zip([*updated, *module.parameters()], [*masters, *expected.parameters()], strict=True):
        assert mine.dtype == theirs.dtype
        if exact:
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, rtol=2e-3 if mine.dtype != torch.float32 else 1e-5, atol=1e-5)


def overflow(module) -> None:
    next(module.parameters()).grad.view(-1)[3] = float("inf")


def snapshot(module, optimizer):
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    state = [v for p in updated for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
    return [tensor.detach().clone() for tensor in [*module.parameters(), *updated, *state]]


def test_nothing_surrounds_the_optimizer_s_step_in_full_precision_without_clipping_and_exchange():
    calls = []
    optimizer = torch.optim.SGD(task().parameters(), lr=0.1)
    optimizer.step = lambda: calls.append("optimizer")
    step = Precision().step_of(optimizer, Strategy(), None)
    step.exchange = None  # not called
    step.run(None)
    assert calls == ["optimizer"]


def test_an_overridden_exchange_is_called_where_nothing_else_surrounds_the_optimizer_s_step():
    class Halves(OptimizerStep):
        def exchange(self):
            return super().exchange()._replace(divisor=2.0)

    weight = nn.Parameter(torch.ones(1))
    step = Halves(Precision(), torch.optim.SGD([weight], lr=1.0), Strategy(), None)
    weight.grad = torch.ones(1)
    step.run(None)
    assert weight.item() == 0.5


@pytest.mark.parametrize("name", ["step", "plan", "prepare_step", "step_prepared", "splits_steps"])
@pytest.mark.parametrize("base", [Precision, OptLevel])
def test_a_method_by_which_earlier_versions_made_steps_is_refused_when_the_precision_is_made(base, name):
    words = rf"{name} .*is called by nobody: .* step_of\(optimizer, strategy, clip\), which returns an OptimizerStep"
    with pytest.raises(ConfigError, match=rf"Own\.{words}"):
        type("Own", (base,), {name: lambda self, *_: None})
    mixin = type("Mixin", (), {name: lambda self, *_: None})
    with pytest.raises(ConfigError, match=rf"Own\.{words}"):
        type("Own", (mixin, base), {})
    with pytest.raises(ConfigError, match=f"{name} of a {base.__name__} is called by nobody"):
        setattr(base(), name, None)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_skipped_and_told_two_windows_later(level, optimizer, accumulate, seen):
    module, precision = task(), OptLevel(level)
    stepped = start(precision, module, OPTIMIZERS[optimizer], accumulate)
    data, told = batches(6 * accumulate), []
    for index in range(6):
        micro, bad = data[index * accumulate : (index + 1) * accumulate], index == 2
        before = snapshot(module, stepped)
        told.append(
            window(
                precision,
                module,
                stepped,
                micro,
                Clip(1.0),
                overflow if bad else None,
                (lambda *_: None) if seen else None,
            )
        )
        after = snapshot(module, stepped)
        same = (
            [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
            if len(before) == len(after)
            else [False]
        )
        assert all(same) if bad else not all(same)
    assert told[:2] == [None, None]
    assert [verdict.applied for verdict in told[2:]] == [True, True, False, True]
    assert [verdict.scale for verdict in told[2:]] == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    assert [(v.applied_steps, v.skipped_steps) for v in told[2:]] == [(1, 0), (2, 0), (2, 1), (3, 1)]
    verdicts = precision.verdicts
    assert (verdicts.applied_steps, verdicts.skipped_steps, verdicts.scale) == (3, 1, 2.0**15)
    pending = verdicts.drain()
    assert [(v.applied_steps, v.skipped_steps) for v in pending] == [(4, 1), (5, 1)]
    assert verdicts.applied_steps == 5
    assert window(precision, module, stepped, data[:accumulate]) == pending[0]


def test_fused_sgd_survives_an_overflow_in_its_first_step():
    # torch leaves the momentum buffers of a skipped first step uninitialised.
    weights = []
    for spoiled in (True, False):
        module, precision = task(), OptLevel("O1")
        optimizer = start(precision, module, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True))
        data = batches(3)
        if spoiled:
            window(precision, module, optimizer, data[:1], spoil=overflow)
            module.load_state_dict(task().state_dict())  # restores BatchNorm's statistics after the batch
            precision.verdicts.scaler.state.scale.fill_(2.0**16)
        for batch in data[1:]:
            window(precision, module, optimizer, [batch])
        weights.append(snapshot(module, optimizer))
    for skipped, never in zip(*weights, strict=True):
        assert torch.equal(skipped, never)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fused_sgd_updates_half_weights(dtype):
    # torch's fused SGD does not, on CPU.
    module, precision = nn.Linear(32, 32), OptLevel("O3", cast_model_type=dtype)
    optimizer = start(precision, module, lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, fused=True))
    optimizer.load_state_dict({**optimizer.state_dict()})  # brings the option back
    before = module.weight.detach().clone()
    precision.backward(precision.forward(lambda: module(torch.ones(1, 32)).sum()))
    make_step(precision, optimizer)
    torch.testing.assert_close(module.weight, before - 0.5)


def test_fused_sgd_with_dampening_asks_the_host_until_its_buffers_are_there(monkeypatch):
    module, precision = task(), OptLevel("O1")
    optimizer = start(precision, module, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, fused=True))
    reads = count_host_reads(monkeypatch)
    counts = []
    for batch in batches(3):
        reads.clear()
        window(precision, module, optimizer, [batch])
        counts.append(len(reads))
    assert counts == [1, 0, 0]


def count_host_reads(monkeypatch):
    reads = []
    for name in ("item", "__bool__", "__float__", "__int__", "__index__", "tolist", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _original=original, _name=name, **kwargs):
            reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return reads


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_nothing_is_read_by_the_host(monkeypatch, level, name, accumulate):
    module, precision = task(), OptLevel(level)
    optimizer = start(precision, module, lambda p: getattr(torch.optim, name)(p, lr=0.01, fused=True), accumulate)
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        pytest.skip("this torch does not say that its fused Adagrad can skip")
    data = batches(4 * accumulate)
    window(precision, module, optimizer, data[:accumulate])
    reads = count_host_reads(monkeypatch)
    for index in range(1, 4):
        window(precision, module, optimizer, data[index * accumulate : (index + 1) * accumulate], Clip(1.0))
    assert reads == []


def test_the_one_wait_is_told_once_with_its_cure(monkeypatch, caplog):
    module, precision = task(), OptLevel("O1")
    optimizer = start(precision, module, OPTIMIZERS["sgd"])
    reads = count_host_reads(monkeypatch)
    window(precision, module, optimizer, [batches(1)[0]])
    assert caplog.messages == []  # on CPU nothing is waited for
    precision._shared.strategy.device = torch.device("cuda")
    for batch in batches(3):
        window(precision, module, optimizer, [batch])
    assert reads.count("item") == 4
    assert len(caplog.messages) == 1
    assert "fused=True" in caplog.text


def test_an_overridden_step_runs_only_when_finite():
    module, precision = task(), OptLevel("O2")
    optimizer = start(precision, module, OPTIMIZERS["adam_fused"])
    calls = []

    def run() -> None:
        calls.append(1)
        optimizer.step()

    for index, batch in enumerate(batches(3)):
        loss = precision.forward(module.training_step, batch)
        optimizer.zero_grad()
        precision.backward(loss)
        if index == 1:
            overflow(module)
        make_step(precision, optimizer, run=run)
        end_step(precision, loss)
    assert len(calls) == 2


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("clip", CLIPS)
def test_looking_at_gradients_changes_nothing_and_shows_unscaled_ones(level, clip):
    weights, shown = [], {}
    for look in (None, lambda module, _: shown.update({n: p.grad.clone() for n, p in module.named_parameters()})):
        module, precision = task(), OptLevel(level, loss_scale="dynamic")
        optimizer = start(precision, module, OPTIMIZERS["sgd"])
        for batch in batches(3):
            window(precision, module, optimizer, [batch], CLIPS[clip], look=look)
        weights.append(snapshot(module, optimizer))
    exact = clip != "norm" and level != "O3"
    for plain, looked in zip(*weights, strict=True):
        torch.testing.assert_close(plain, looked, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-3)
    assert all(gradient.abs().max() < 10 for gradient in shown.values())  # the scale is 65536


@pytest.mark.parametrize("how", ["parameters", "optimizer", "replaced"])
def test_edits_of_shown_gradients_count(how):
    def halve(module, optimizer):
        for p in (
            module.parameters() if how != "optimizer" else [p for g in optimizer.param_groups for p in g["params"]]
        ):
            if how == "replaced":
                p.grad = p.grad * 0.5
            else:
                p.grad.mul_(0.5)

    weights = []
    for rate, look in ((0.05, None), (0.1, halve)):
        module, precision = task(), OptLevel("O2")
        optimizer = start(precision, module, lambda p, rate=rate: torch.optim.SGD(p, lr=rate))
        for batch in batches(3):
            window(precision, module, optimizer, [batch], look=look)
        weights.append(snapshot(module, optimizer))
    for expected, edited in zip(*weights, strict=True):
        assert torch.equal(expected, edited)


def test_sums_keep_what_half_would_lose():
    # 2048 + 1 = 2048 in half; the weight's gradient is the sum of the inputs.
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 0.5)
    precision = OptLevel("O2", loss_scale=1.0)
    optimizer = start(precision, module, lambda p: torch.optim.SGD(p, lr=1.0), accumulate=3)
    optimizer.zero_grad()
    for value in (2048.0, 1.0, 1.0):
        loss = precision.forward(lambda x: module(x).sum(), torch.tensor([[value]]))
        precision.backward(loss)
        add_up(precision, optimizer)
    make_step(precision, optimizer)
    assert optimizer.param_groups[0]["params"][0].item() == 0.5 - 2050


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_several_losses_have_a_scale_each(level):
    module, precision = task(), OptLevel(level, num_losses=2)
    optimizer = start(precision, module, OPTIMIZERS["adam_fused"])
    data = batches(8)
    for index in range(4):
        optimizer.zero_grad()
        for loss_id in (0, 1):
            loss = precision.forward(module.training_step, data[2 * index + loss_id])
            precision.backward(loss * (float("inf") if (index, loss_id) == (1, 1) else 1.0), loss_id)
        before = snapshot(module, optimizer)
        make_step(precision, optimizer)
        after = snapshot(module, optimizer)
        assert (len(before) == len(after) and all(map(torch.equal, before, after))) == (index == 1)
        verdict = end_step(precision, loss)
    assert [state.scale.item() for state in precision.verdicts.scaler.losses] == [2.0**16, 2.0**15]
    assert not verdict.applied
    assert precision.state_dict()["scaler"]["scalers"][1]["skipped"].item() == 1


def test_several_losses_add_up():
    weights = []
    for losses in (1, 2):
        module, precision = task(), OptLevel("O2", num_losses=losses, loss_scale="dynamic")
        optimizer = start(precision, module, OPTIMIZERS["sgd"], accumulate=2 if losses == 1 else 1)
        for pair in (batches(2), batches(4)[2:]):
            optimizer.zero_grad()
            for loss_id, batch in enumerate(pair):
                precision.backward(precision.forward(module.training_step, batch), loss_id if losses == 2 else 0)
                if losses == 1:
                    add_up(precision, optimizer)
            make_step(precision, optimizer)
        weights.append(snapshot(module, optimizer))
    for one, two in zip(*weights, strict=True):
        assert torch.equal(one, two)


def test_a_loss_id_too_many_is_named():
    module, precision = task(), OptLevel("O1")
    start(precision, module, OPTIMIZERS["sgd"])
    with pytest.raises(ValueError, match="num_losses=2"):
        precision.backward(precision.forward(module.training_step, batches(1)[0]), loss_id=1)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_divisor_of_a_strategy_is_part_of_the_multiplier(level):
    from fabricamp.gradients.flat import Gradients

    weights = []
    for divisor, rate in ((1.0, 0.05), (2.0, 0.1)):
        module, precision = task(), OptLevel(level)
        optimizer = start(precision, module, lambda p, rate=rate: torch.optim.SGD(p, lr=rate))
        precision.backward(precision.forward(module.training_step, precision.convert_input(batches(1)[0])))
        tensors = [holder.grad for holder in precision.gradients(optimizer).parameters]
        make_step(precision, optimizer, Gradients(tensors=tensors, divisor=divisor))
        weights.append(snapshot(module, optimizer))
    for one, two in zip(*weights, strict=True):
        torch.testing.assert_close(one, two)


def test_full_precision_takes_gradients_from_a_strategy_too():
    from fabricamp.gradients.flat import Gradients

    weights = []
    for divisor, rate in ((1.0, 0.05), (2.0, 0.1)):
        module, precision = task(), precision_from("O0")
        optimizer = start(precision, module, lambda p, rate=rate: torch.optim.SGD(p, lr=rate))
        precision.backward(precision.forward(module.training_step, batches(1)[0]))
        gradients = Gradients(tensors=[p.grad.clone() for p in module.parameters()], divisor=divisor)
        module.zero_grad()
        make_step(precision, optimizer, gradients, look=(lambda: None) if divisor == 2.0 else None)
        weights.append(snapshot(module, optimizer))
    for one, two in zip(*weights, strict=True):
        assert torch.equal(one, two)


def test_sparse_gradients():
    for level in ("O1", "O2", "O3"):
        module, precision = nn.Embedding(10, 4, sparse=True), OptLevel(level, loss_scale="dynamic")
        optimizer = start(precision, module, lambda p: torch.optim.SGD(p, lr=1.0))
        before = module.weight.detach().float().clone()
        loss = precision.forward(lambda index: module(index).sum() / 8, torch.tensor([1, 1, 7]))
        precision.backward(loss)
        make_step(precision, optimizer, clip=Clip(100.0))
        moved = before - module.weight.detach().float()
        expected = torch.zeros(10, 4)
        expected[1], expected[7] = 2 / 8, 1 / 8
        torch.testing.assert_close(moved, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "make", [partial(torch.optim.SGD, lr=10.0), partial(FusedAdam, lr=0.1)], ids=["SGD", "FusedAdam"]
)
def test_manual_optimization_inside_the_step(make):
    # Backward and updates within the step run outside autocast, and clear autocast's cache.
    module, precision = task(), OptLevel("O1")
    optimizer = start(precision, module, make)
    x = batches(1)[0][0]
    seen = []

    def training_step() -> None:
        first = module.net(x)
        precision.backward(first.float().square().mean())
        make_step(precision, optimizer)
        seen.append((first.detach(), module.net(x).detach(), torch.is_autocast_enabled("cpu")))

    precision.forward(training_step)
    first, second, enabled = seen[0]
    assert enabled
    assert not torch.equal(first, second)
    fresh = copy.deepcopy(module)
    with torch.autocast("cpu", torch.float16):
        torch.testing.assert_close(second, fresh.net(x))


def test_zero_grad_reaches_half_weights_and_sums():
    for accumulate in (1, 2):
        module, precision = task(), OptLevel("O2")
        optimizer = start(precision, module, OPTIMIZERS["sgd"], accumulate)
        precision.backward(precision.forward(module.training_step, batches(1)[0]))
        if accumulate == 2:
            add_up(precision, optimizer)
        optimizer.zero_grad()
        assert all(p.grad is None for p in module.parameters())
        before = snapshot(module, optimizer)
        make_step(precision, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, snapshot(module, optimizer), strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_added_and_unfrozen_later(accumulate):
    module, precision = task(), OptLevel("O2")
    module.net.first.requires_grad_(False)
    conversion = precision.convert_module(module)
    optimizer = torch.optim.SGD(module.net.last.parameters(), lr=0.1, momentum=0.9)
    precision.setup_optimizers(module, [optimizer], Strategy(), accumulates=accumulate > 1)
    held = precision.gradients(optimizer)
    data = batches(4 * accumulate)
    window(precision, module, optimizer, data[:accumulate])
    frozen = module.net.first.weight.clone()
    assert conversion.full_state(module.state_dict())["net.first.weight"].equal(task().net.first.weight)
    module.net.first.requires_grad_(True)
    optimizer.add_param_group({"params": [*module.net.first.parameters(), *module.net.norm.parameters()], "lr": 0.5})
    for index in (1, 2, 3):
        window(precision, module, optimizer, data[index * accumulate : (index + 1) * accumulate])
    assert precision.gradients(optimizer) is held
    assert (held.flat is not None) == (accumulate > 1)
    assert not torch.equal(frozen, module.net.first.weight)
    masters = [p for g in optimizer.param_groups for p in g["params"]]
    assert all(
        torch.equal(m.to(h.dtype), h) for m, h in zip(masters, precision.gradients(optimizer).parameters, strict=True)
    )


def test_a_closure_is_refused_where_it_cannot_work():
    for level in (OptLevel("O1"), OptLevel("O2"), OptLevel("O1", loss_scale=8.0)):
        module = task()
        with pytest.raises(ValueError, match="LBFGS"):
            start(level, module, torch.optim.LBFGS)
    start(OptLevel("O4"), task(), torch.optim.LBFGS)


def test_an_unknown_optimizer_is_named():
    module, precision = task(), OptLevel("O2")
    start(precision, module, OPTIMIZERS["sgd"])
    with pytest.raises(ValueError, match="configure_optimizers"):
        make_step(precision, torch.optim.Adagrad([nn.Parameter(torch.zeros(1))]))


class TwoRanks(Strategy):
    """Simulates a strategy of two ranks: the other rank has a gradient for every parameter."""

    distributed = True
    world_size = 2

    def reduce_gradients(self, memory=None):
        from fabricamp.gradients.flat import Gradients

        for tensor in memory.tensors:
            tensor.div_(2)
        memory.flat.flags.add_(0.5)
        return Gradients(memory.flat.tensors, present=memory.flat.take_flags())


def test_ranks_that_reached_different_parameters_update_the_same_ones():
    module, precision, strategy = task(), OptLevel("O2"), TwoRanks()
    optimizer = start(
        precision, module, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), accumulate=2, strategy=strategy
    )
    before = module.net.last.bias.clone()
    precision.backward(precision.forward(lambda: module.net.first(batches(1)[0][0]).mean()))
    add_up(precision, optimizer)
    precision.step_of(optimizer, strategy, None).run(None)
    assert not torch.equal(before, module.net.last.bias)
    precision.backward(precision.forward(lambda: module.net.first(batches(1)[0][0]).mean()))
    add_up(precision, optimizer)
    step = precision.step_of(optimizer, strategy, None)
    step.reduce = lambda _: IN_PLACE
    with pytest.raises(ValueError, match=r"reduce_gradients\(precision.gradients"):
        step.run(None)
