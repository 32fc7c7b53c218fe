"""fp32 masters: their creation and visibility, and exact values through checkpoints."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fabricamp.optimizers import FusedSGD
from fabricamp.precision import OptLevel, master_weights
from fabricamp.precision.master_weights import module_parameter
from fabricamp.strategies import Sharding
from fabricamp.strategies.base import Strategy
from tests.cuda_on_cpu.compiler import kernel_device, references
from tests.windows import make_step

__all__ = ["kernel_device"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.body[2].weight
        self.register_buffer("table", torch.randn(4) * 1e-3)

    def forward(self, x):
        return self.head(self.body(x)) + self.table


def prepared(level="O2", make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), frozen=(), strategy=None):
    torch.manual_seed(0)
    net = Net()
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    precision = OptLevel(level, loss_scale=1.0)
    net.conversion = precision.convert_module(net)
    optimizer = make([p for p in net.parameters() if p.requires_grad])
    precision.setup_optimizers(net, [optimizer], strategy or Strategy())
    return net, precision, optimizer


def update(net, precision, optimizer, seed=1):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    precision.backward(precision.forward(lambda: net(x).square().mean()))
    make_step(precision, optimizer)
    optimizer.zero_grad()


def saved(net, precision):
    buffer = io.BytesIO()
    torch.save(net.conversion.full_state(net.state_dict()), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def masters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def test_masters_are_the_weights_before_conversion_in_the_same_groups():
    torch.manual_seed(0)
    original = Net().state_dict()
    net, precision, _ = prepared()
    groups = []

    def make(parameters):
        optimizer = torch.optim.SGD([{"params": list(parameters), "lr": 0.5}], lr=0.1)
        groups.extend([optimizer.param_groups[0], optimizer.param_groups[0]["params"]])
        return optimizer

    net, precision, optimizer = prepared(make=make)
    assert optimizer.param_groups[0] is groups[0]
    assert optimizer.param_groups[0]["params"] is groups[1]
    assert all(master.dtype is torch.float32 for master in masters(optimizer))
    assert all(torch.equal(original[key], value) for key, value in saved(net, precision).items())
    assert net.head.weight is net.body[2].weight
    assert len(masters(optimizer)) == len(set(map(id, masters(optimizer)))) == len(list(net.parameters()))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_half_copy_is_always_the_rounded_master(level):
    net, precision, optimizer = prepared(level)
    for seed in range(3):
        update(net, precision, optimizer, seed)
        for holder, master in zip(precision.gradients(optimizer).parameters, masters(optimizer), strict=True):
            assert torch.equal(holder, master.to(holder.dtype))
            assert (holder is master) == (holder.dtype is torch.float32)


def test_state_that_the_optimizer_has_already_moves_with_the_parameters():
    def make(parameters):
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    _net, _precision, optimizer = prepared(make=make)
    assert set(map(id, optimizer.state)) == set(map(id, masters(optimizer)))
    assert all(v.dtype is torch.float32 for s in optimizer.state.values() for v in s.values())


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.Adam(p, lr=0.01), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)]
)
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_resumed_run_equals_a_straight_one(level, make):
    if level == "O3" and "Adam" in str(type(make([nn.Parameter(torch.zeros(1))]))):
        make = lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3)  # noqa: E731
    straight = prepared(level, make)
    for seed in range(3):
        update(*straight, seed)
    weights, state, amp = saved(*straight[:2]), copy.deepcopy(straight[2].state_dict()), straight[1].state_dict()
    resumed = prepared(level, make)
    update(*resumed, 7)  # so that its state differs before the load
    resumed[0].load_state_dict(weights)
    resumed[2].load_state_dict(state)
    resumed[1].load_state_dict(amp)
    if level != "O3":
        assert all(v.dtype is torch.float32 for s in resumed[2].state.values() for v in s.values() if v.dim())
    for seed in range(3, 6):
        update(*straight, seed)
        update(*resumed, seed)
    for one, two in zip(masters(straight[2]), masters(resumed[2]), strict=True):
        assert torch.equal(one, two)
    for key, value in straight[0].state_dict().items():
        assert torch.equal(value, resumed[0].state_dict()[key])


@pytest.mark.parametrize("how", ["whole", "not strict", "submodule"])
def test_loading_refreshes_masters_with_every_bit(how):
    net, precision, optimizer = prepared(frozen=("body.0.bias",))
    torch.manual_seed(5)
    other = Net().state_dict()
    if how == "whole":
        net.load_state_dict(other)
    elif how == "not strict":
        net.load_state_dict({key: value for key, value in other.items() if key.startswith("body")}, strict=False)
    else:
        net.body.load_state_dict({key[5:]: value for key, value in other.items() if key.startswith("body")})
    now = net.conversion.full_state(net.state_dict())
    for key, value in other.items():
        loaded = how == "whole" or key.startswith("body") or key == "head.weight"  # tied to body.2.weight
        assert torch.equal(now[key], value) == (loaded or value.dtype is torch.int64), key
    for holder, master in zip(precision.gradients(optimizer).parameters, masters(optimizer), strict=True):
        assert torch.equal(holder, master.to(holder.dtype))


def test_loading_before_the_optimizers_exist_counts_too():
    torch.manual_seed(0)
    net, precision = Net(), OptLevel("O2")
    net.conversion = precision.convert_module(net)
    torch.manual_seed(5)
    other = Net().state_dict()
    net.load_state_dict(other)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    precision.setup_optimizers(net, [optimizer], Strategy())
    assert all(torch.equal(other[key], value) for key, value in saved(net, precision).items())


def test_replacing_the_parameters_is_refused():
    net, _, _ = prepared()
    with pytest.raises(ValueError, match="without assign"):
        net.load_state_dict(Net().state_dict(), assign=True)


def test_refresh_after_edits_in_place():
    net, precision, _optimizer = prepared()
    with torch.no_grad():
        net.body[0].weight.fill_(0.25)
        net.table.fill_(0.5)
    precision.refresh_masters()
    state = net.conversion.full_state(net.state_dict())
    assert state["body.0.weight"].eq(0.25).all()
    assert state["table"].eq(0.5).all()


@pytest.mark.parametrize("edits", ["through data", "with a counter"])
def test_refresh_takes_the_elements_that_were_changed_and_no_others(edits):
    net, precision, optimizer = prepared("O5", frozen=("body.0.bias",))
    update(net, precision, optimizer)
    before = saved(net, precision)
    for name in ("body.0.weight", "body.0.bias", "table"):
        tensor = net.state_dict()[name]  # shares memory with the module's own
        (tensor.data if edits == "through data" else tensor).view(-1)[1] = 0.25
    precision.refresh_masters()
    after = saved(net, precision)
    for name, value in before.items():
        if name in ("body.0.weight", "body.0.bias", "table"):
            assert after[name].view(-1)[1] == 0.25
            others = torch.arange(value.numel()) != 1
            if name == "body.0.weight":  # the others have no masters
                assert torch.equal(after[name].view(-1)[others], value.view(-1)[others])
        else:
            assert torch.equal(after[name], value)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("then", ["forward", "update", "refresh", "undo"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_edited_master_keeps_its_bits_also_if_its_half_weight_was_edited(level, then, both):
    net, precision, optimizer = prepared(level)
    update(net, precision, optimizer)
    with torch.no_grad():
        if both:
            net.body[0].weight[0, 0] = 0.25
        masters(optimizer)[0].fill_(0.1)  # no number of the half dtypes
        half = net.body[0].weight
    if then == "forward":
        precision.forward(lambda: None)
    elif then == "update":
        precision.take_edits()
    elif then == "refresh":
        precision.refresh_masters()
    else:
        net.conversion.undo()
        assert torch.equal(half, torch.full_like(half, 0.1))
        return
    assert torch.equal(half, torch.full_like(half, 0.1))
    assert torch.equal(masters(optimizer)[0], torch.full((4, 4), 0.1))


@pytest.mark.parametrize(
    ("make", "by"), [(FusedSGD, nullcontext), (FusedSGD, references), (torch.optim.SGD, nullcontext)]
)
@pytest.mark.parametrize("both", [False, True])
def test_masters_that_are_edited_between_backward_and_step_keep_their_bits(kernel_device, make, by, both):
    net = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)]).to(kernel_device)  # the second is not used
    precision = OptLevel("O5")
    precision.convert_module(net)
    optimizer = make(net.parameters(), lr=0.0)
    precision.setup_optimizers(net, [optimizer], Strategy())
    for _ in range(3):
        precision.backward(precision.forward(lambda: net[0](torch.ones(4, 4, device=kernel_device)).mean()))
        with torch.no_grad():
            for half, master in zip(net.parameters(), masters(optimizer), strict=True):
                if both:
                    half[0, 0] = 0.25
                master.fill_(0.1)  # no number of the half dtypes
        with by(kernel_device):
            make_step(precision, optimizer)
        optimizer.zero_grad()
        precision.forward(lambda: None)
        for half, master in zip(net.parameters(), masters(optimizer), strict=True):
            assert torch.equal(master, torch.full_like(master, 0.1))
            assert torch.equal(half, torch.full_like(half, 0.1))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_of_a_group_that_was_added_are_watched_too(level):
    net, precision, optimizer = prepared(level, frozen=("body.0.weight",))
    update(net, precision, optimizer)
    net.body[0].weight.requires_grad_(True)
    optimizer.add_param_group({"params": [net.body[0].weight]})
    update(net, precision, optimizer)
    with torch.no_grad():
        net.body[0].weight[0, 0] = 0.25
        masters(optimizer)[0][0] = 0.5
    precision.forward(lambda: None)
    assert masters(optimizer)[0] is not net.body[0].bias
    edited, other = module_parameter(masters(optimizer)[0]), masters(optimizer)[-1]
    assert (edited[0] == 0.5).all()  # before a forward
    assert other[0, 0] != 0.25
    precision.take_edits()
    assert other[0, 0] == 0.25


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("make", [FusedSGD, torch.optim.SGD])
def test_only_edits_are_taken_and_not_what_updates_write(kernel_device, monkeypatch, make, unused, parts):
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(4, 4) for _ in range(4 if unused else 3)]).to(kernel_device)
    precision = OptLevel("O5")
    precision.convert_module(net)
    optimizers = [make(list(net.parameters())[part::parts], lr=0.1) for part in range(parts)]
    precision.setup_optimizers(net, optimizers, Strategy())
    taken, rounded = [], []
    real_take, real_round = master_weights.take_changed, master_weights.round_to
    monkeypatch.setattr(master_weights, "take_changed", lambda *pair: taken.append(pair[0]) or real_take(*pair))
    monkeypatch.setattr(master_weights, "round_to", lambda *lists: rounded.append(lists) or real_round(*lists))

    def step(seed):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).to(kernel_device)
        precision.backward(precision.forward(lambda: net[2](net[1](net[0](x))).square().mean()))
        for optimizer in optimizers:
            make_step(precision, optimizer)
            optimizer.zero_grad()

    for seed in range(3):
        step(seed)
    assert taken == []
    assert rounded == []
    for seed in range(3):
        with torch.no_grad():
            net[1].weight[2, 3] = 0.75
        step(seed)
        assert len(taken) == seed + 1
        assert taken[-1] is net[1].weight
    halves, updated = [], []
    for optimizer in optimizers:
        halves += precision.gradients(optimizer).parameters
        updated += masters(optimizer)
    for half, master in zip(halves, updated, strict=True):
        assert torch.equal(half, master.to(half.dtype))


def test_frozen_weights_and_buffers_keep_their_bits_and_follow_edits():
    torch.manual_seed(0)
    original = Net().state_dict()
    net, precision, optimizer = prepared(frozen=("body.0.weight",))
    update(net, precision, optimizer)
    state = saved(net, precision)
    assert torch.equal(state["body.0.weight"], original["body.0.weight"])
    assert torch.equal(state["table"], original["table"])
    with torch.no_grad():
        net.table.add_(1)
    assert torch.equal(saved(net, precision)["table"], net.table.float())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_restoring_gives_masters_to_module_and_optimizer(level):
    net, precision, optimizer = prepared(level)
    update(net, precision, optimizer)
    expected, parameters = saved(net, precision), list(net.parameters())
    momenta = [optimizer.state[master]["momentum_buffer"] for master in masters(optimizer)]
    net.conversion.undo()
    assert all(torch.equal(expected[key], value) for key, value in net.state_dict().items())
    assert all(mine is theirs for mine, theirs in zip(masters(optimizer), parameters, strict=True))
    assert all(optimizer.state[p]["momentum_buffer"] is m for p, m in zip(parameters, momenta, strict=True))
    assert "zero_grad" not in optimizer.__dict__
    net(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    net.conversion = precision.convert_module(net)  # a second conversion
    net.conversion.undo()


def test_a_module_that_came_in_half_gets_fp32_masters():
    net = nn.Linear(4, 4).bfloat16()
    precision = OptLevel("O5")
    net.conversion = precision.convert_module(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    precision.setup_optimizers(net, [optimizer], Strategy())
    assert all(
        master.dtype is torch.float32 and torch.equal(master, p.float())
        for master, p in zip(masters(optimizer), net.parameters(), strict=True)
    )


def test_a_strategy_with_masters_of_its_own():
    strategy = type("Sharded", (Strategy, Sharding), {"owns_master_weights": True})()
    net, _precision, optimizer = prepared(strategy=strategy)
    assert masters(optimizer)[0] is net.body[0].weight


def test_other_levels_load_what_o2_saved():
    net, precision, optimizer = prepared()
    update(net, precision, optimizer)
    state = saved(net, precision)
    plain = Net()
    plain.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in plain.state_dict().items())


def test_double_is_double_everywhere():
    from fabricamp.precision import precision_from

    net, precision = nn.Linear(4, 1), precision_from("64-true")
    net.conversion = precision.convert_module(net)
    batch = precision.convert_input({"x": torch.randn(2, 4)})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    precision.setup_optimizers(net, [optimizer], Strategy())
    loss = precision.forward(lambda: net(batch["x"]).mean())
    precision.backward(loss)
    make_step(precision, optimizer)
    assert loss.dtype is net.weight.dtype is net.weight.grad.dtype is torch.float64
