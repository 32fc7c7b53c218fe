"""DelayedDDP over real Gloo processes: many checks per spawn, each against torch's own wrapper or the joined batch."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import re

import pytest
import torch
import torch._dynamo  # torch's wrapper imports it; here once, before ranks are forked, and not in each rank
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fabricamp.errors import ConfigError, DistributedError
from fabricamp.gradients.buckets import Piece, plan_messages
from fabricamp.gradients.flat import FlatGradients, Transport
from fabricamp.gradients.memory import GradientMemory
from fabricamp.precision.torch_updates import write_gradients
from fabricamp.strategies import IN_PLACE, DelayedDDP, Environment
from tests.distributed.ranks import run_ranks
from tests.strategies.test_ddp import (
    Net,
    Pair,
    assert_equal,
    assert_same_everywhere,
    batch_of,
    gradients_of,
    train_pair,
)
from tests.windows import summed

CPU = torch.device("cpu")
HALF = (torch.float16, torch.bfloat16)


def started(**options):
    strategy = DelayedDDP(**options)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    strategy.setup_environment(Environment(rank=rank, local_rank=rank, world_size=world_size), CPU)
    return strategy


class Optimizer:
    """An object with the attributes that ``write_gradients`` reads."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]


def reduced(strategy, module):
    """Averages the module's gradients into ``.grad``, as full precision does; returns the result of ``reduce_gradients``."""
    parameters = list(module.parameters())
    gradients = strategy.reduce_gradients(GradientMemory(parameters))
    write_gradients(Optimizer(parameters), gradients)
    return gradients


@contextlib.contextmanager
def warnings_of_fabricamp():
    told, handler = [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("fabricamp").addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger("fabricamp").removeHandler(handler)


def assert_near(first, second, world_size):
    """Compares bit for bit with two ranks, which have only one order of addition; more ranks may round differently."""
    if world_size == 2:
        assert_equal(first, second)
        return
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


# -- automatic optimization --------------------------------------------------------------------------------------------


def check_against_torch(options, accumulate=1):
    """Compares six steps of SGD with BatchNorm with torch's wrapper around a module with the same forward."""
    strategy = started(**options)
    ours = Net(seed=strategy.rank)  # rank 0's weights have to win
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    step = strategy.wrap_module(ours, ours.training_step, automatic=True, accumulates=accumulate > 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)]
    for window in range(6):
        for optimizer in optimizers:
            # With zeroed gradients that stay, autograd adds in place, into the flat memory.
            optimizer.zero_grad(set_to_none=window < 4)
        for micro in range(accumulate):
            batch = batch_of(strategy.rank, window * accumulate + micro)
            local = micro < accumulate - 1
            with strategy.no_sync() if local else contextlib.nullcontext():
                (step(batch, micro) / accumulate).backward()
            with theirs.no_sync() if local else contextlib.nullcontext():
                (theirs(batch).square().mean() / accumulate).backward()
        gradients = reduced(strategy, ours)
        assert gradients is IN_PLACE or gradients.complete
        assert_near(gradients_of(ours), gradients_of(theirs), strategy.world_size)
        for optimizer in optimizers:
            optimizer.step()
        theirs.module.load_state_dict(ours.state_dict())
    assert_same_everywhere(strategy, ours.parameters())
    assert ours.automatic_calls == 6 * accumulate
    strategy.teardown()


def check_half():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for options in ({}, {"message_size": 20}, {"gradient_predivide_factor": 1.0}):
            strategy = started(**options)
            ours, theirs = Net().to(dtype), DistributedDataParallel(Net().to(dtype))
            step = strategy.wrap_module(ours, ours.training_step, automatic=True)
            for index in range(3):
                for model in (ours, theirs):
                    model.zero_grad()
                batch = batch_of(strategy.rank, index).to(dtype)
                step(batch, 0).backward()
                theirs(batch).square().mean().backward()
                reduced(strategy, ours)
                if strategy.world_size == 2 and "gradient_predivide_factor" not in options:
                    assert_equal(gradients_of(ours), gradients_of(theirs))
                for one, other in zip(gradients_of(ours), gradients_of(theirs), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
            strategy.teardown()


def check_dtypes_on_the_way():
    """Gradients exchanged in another dtype are averages of the rounded values."""
    for options, sent in (
        ({"allreduce_dtype": torch.float16}, torch.float16),
        ({"allreduce_dtype": torch.bfloat16, "message_size": 7}, torch.bfloat16),
        ({"allreduce_always_fp32": True}, torch.float32),
        ({"allreduce_dtype": torch.float16, "retain_allreduce_buffers": True}, torch.float16),
    ):
        for own in (torch.float32, torch.float16, torch.float64):
            strategy = started(**options)
            module = nn.ParameterList(
                [nn.Parameter(torch.zeros(33, dtype=own)), nn.Parameter(torch.zeros(2, dtype=own))]
            )
            strategy.wrap_module(module, len, automatic=True)
            value = torch.linspace(-1, 1, 33) * (strategy.rank + 1)
            for parameter in module:
                parameter.grad = value[: len(parameter)].to(own)
            gradients = strategy.reduce_gradients(GradientMemory(list(module)))
            if not strategy.retain_allreduce_buffers:
                assert {one.dtype for one in gradients.tensors} == {own if own is torch.float64 else sent}
            write_gradients(Optimizer(module), gradients)
            mean = torch.linspace(-1, 1, 33) * (strategy.world_size + 1) / 2
            for parameter in module:
                assert parameter.grad.dtype is own
                tolerance = 2e-2 if torch.bfloat16 in (sent, own) else 2e-3
                torch.testing.assert_close(
                    parameter.grad.float(), mean[: len(parameter)], rtol=tolerance, atol=tolerance
                )
            strategy.teardown()


def check_division():
    """Tests sums instead of averages, predivision, and half gradients that only predivision keeps finite."""
    for options, expected in (
        ({"gradient_average": False}, 3.0),
        ({"gradient_average": False, "gradient_predivide_factor": 4.0}, 0.75),
        ({"gradient_predivide_factor": 4.0}, 1.5),
    ):
        for dtype in (torch.float32, torch.float16):
            strategy = started(**options)
            module = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=dtype))])
            strategy.wrap_module(module, len, automatic=False)
            module[0].grad = torch.full((3,), 1.0 + min(strategy.rank, 1), dtype=dtype)
            extra = 2.0 * max(strategy.world_size - 2, 0) / 3.0  # a third rank has 2 as well
            share = 2 / strategy.world_size if strategy.transport.average else 1.0
            reduced(strategy, module)
            assert module[0].grad[0].item() == pytest.approx(expected * (1 + extra) * share, rel=1e-3)
            strategy.teardown()
    for predivide, finite in ((None, True), (1.0, False)):
        strategy = started(gradient_predivide_factor=predivide)
        module = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.float16))])
        strategy.wrap_module(module, len, automatic=False)
        module[0].grad = torch.full((3,), 60000.0, dtype=torch.float16)
        assert torch.isfinite(strategy.reduce_gradients(GradientMemory(list(module))).tensors[0]).all().item() == finite
        strategy.teardown()


def check_where_gradients_are():
    """Gradients are in one flat tensor per dtype, at the same address each time; ``.grad`` changes only if asked for."""
    for retain in (False, True):
        strategy = started(retain_allreduce_buffers=retain)
        net = Net()
        net.last.double()
        step = strategy.wrap_module(net, lambda batch: net.last(net.first(batch).double()).sum(), automatic=True)
        places = set()
        for index in range(3):
            net.zero_grad()
            step(batch_of(strategy.rank, index)).backward()
            local = net.first.weight.grad
            gradients = strategy.reduce_gradients(GradientMemory(list(net.parameters())))
            if retain:
                assert gradients is IN_PLACE
                flat = {one.untyped_storage().data_ptr() for one in strategy.allreduce_buffers}
                assert {p.grad.untyped_storage().data_ptr() for p in net.parameters() if p.grad is not None} == flat
            else:
                assert net.first.weight.grad is local
                places.add(id(gradients.tensors))
                assert len({one.untyped_storage().data_ptr() for one in gradients.tensors}) == 2
                assert all(one.data_ptr() % 16 == 0 for one in gradients.tensors)
                assert strategy.allreduce_buffers == []
        assert len(places) == (0 if retain else 1)
        strategy.teardown()


def check_unused(options):
    """A gradient missing on all ranks is not changed; missing on some it counts as zeros, with one warning that names it."""
    strategy = started(**options)
    net, joined = Net(), Net()
    for model in (net, joined):
        model.norm.eval()
    step = strategy.wrap_module(net, net.training_step, automatic=True)
    world = range(strategy.world_size)
    with warnings_of_fabricamp() as told:
        for window, skipping in enumerate([[], [*world], [0], [], [1], [*world], [0]]):
            net.zero_grad()
            net.skip = strategy.rank in skipping
            step(batch_of(strategy.rank, window), 0).backward()
            gradients = strategy.reduce_gradients(GradientMemory(list(net.parameters())))
            assert gradients.complete == (strategy.rank not in skipping)
            present = gradients.present.ne(0).tolist()
            assert present == [True] * 4 + [len(skipping) < strategy.world_size] * 2
            write_gradients(Optimizer(net.parameters()), gradients)
            joined.zero_grad()
            for rank in world:
                joined.skip = rank in skipping
                (joined.training_step(batch_of(rank, window), 0) / strategy.world_size).backward()
            for one, other in zip(gradients_of(net), gradients_of(joined), strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.allclose(one, other, atol=1e-6)
    first_two = told if strategy.rank < 2 else ["last.weight, last.bias"]
    assert len(first_two) == 1
    assert "last.weight, last.bias" in first_two[0]
    assert strategy.rank < 2 or len(told) <= 1
    strategy.teardown()


def check_buffers_elsewhere():
    """fp32 sums are averaged in place, exchanged in fp32 or half precision; the update divides."""
    for options, exact in (
        ({}, True),
        ({"allreduce_dtype": torch.float16}, False),
        ({"gradient_predivide_factor": 2.0}, True),
    ):
        strategy = started(**options)
        net = Net()
        strategy.wrap_module(net, net.training_step, automatic=True, accumulates=True)
        for window in range(3):
            memory = summed(
                torch.full((40,), float(strategy.rank + window)), torch.full((3,), 1.0, dtype=torch.float64)
            )
            gradients = strategy.reduce_gradients(memory)
            sums = memory.flat.tensors
            assert gradients.tensors is sums
            assert gradients.divisor == (strategy.world_size if exact else 1.0)
            mean = (strategy.world_size - 1) / 2 + window
            torch.testing.assert_close(sums[0] / gradients.divisor, torch.full((40,), mean), rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(sums[1] / gradients.divisor, torch.ones(3, dtype=torch.float64))
        strategy.teardown()


def check_module_buffers():
    """After each exchange all ranks have rank 0's buffers; micro-batches in between change each rank's buffers."""
    for options in ({}, {"message_size": 1}, {"broadcast_buffers": False}):
        strategy = started(**options)
        net = Net(seed=strategy.rank)
        net.norm.running_mean.fill_(strategy.rank)
        step = strategy.wrap_module(net, net.training_step, automatic=True)
        assert net.norm.running_mean.eq(0).all()
        for window in range(3):
            for micro in range(2):
                step(batch_of(strategy.rank, 2 * window + micro), 0).backward()
                means = strategy.all_gather(net.norm.running_mean)
                assert not torch.equal(means[0], means[1])
            strategy.reduce_gradients(GradientMemory(list(net.parameters())))
            means = strategy.all_gather(net.norm.running_mean)
            assert torch.equal(means[0], means[1]) == strategy.broadcast_buffers
        strategy.teardown()


def check_freezing(options):
    """Freezing works at an epoch's start, and frozen gradients are not exchanged; in its middle an error names the parameters."""
    strategy = started(**options)
    net = Net()
    net.last.requires_grad_(requires_grad=False)
    step = strategy.wrap_module(net, net.training_step, automatic=True)
    assert strategy.rewrap_module(step) is step

    def window(index):
        net.zero_grad()
        step(batch_of(strategy.rank, index), 0).backward()
        return reduced(strategy, net)

    for index in range(3):
        gradients = window(index)
        assert [one is None for one in gradients.tensors] == [False] * 4 + [True] * 2
    net.last.requires_grad_(requires_grad=True)
    net.first.requires_grad_(requires_grad=False)
    assert strategy.rewrap_module(step) is step
    for index in range(3):
        window(index)
        assert_same_everywhere(strategy, [net.last.weight.grad])
        assert net.first.weight.grad is None
    # Frozen in the middle of an epoch: missing from then on.  Unfrozen: an error before the update.
    net.last.bias.requires_grad_(requires_grad=False)
    window(4)
    assert net.last.bias.grad is None
    net.first.requires_grad_(requires_grad=True)
    step(batch_of(strategy.rank, 3), 0).backward()
    with pytest.raises(DistributedError, match=r"first\.weight, first\.bias got requires_grad=True in the middle"):
        reduced(strategy, net)
    net.first.requires_grad_(requires_grad=strategy.rank == 0)
    with pytest.raises(DistributedError, match=r"different modules.*frozen"):
        strategy.rewrap_module(step)
    strategy.teardown()


def check_added_parameters(options):
    strategy = started(**options)
    net = Net()
    step = strategy.wrap_module(net, net.training_step, automatic=True)
    parameters = list(net.first.parameters())
    for index in range(6):
        if index == 3:
            net.extra = nn.Linear(3, 3)
            net.forward = lambda x: net.extra(Net.forward(net, x))
            parameters += [*net.last.parameters(), *net.extra.parameters()]
        net.zero_grad()
        step(batch_of(strategy.rank, index), 0).backward()
        expected = [strategy.reduce(one.grad, "mean") for one in parameters]
        gradients = strategy.reduce_gradients(GradientMemory(parameters))
        write_gradients(Optimizer(parameters), gradients)
        for one, mean in zip(parameters, expected, strict=True):
            torch.testing.assert_close(one.grad, mean)
    strategy.teardown()


def check_shared_weights():
    for options in ({}, {"message_size": 4}):
        strategy = started(**options)
        ours = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        ours[2].weight = ours[0].weight
        theirs = DistributedDataParallel(copy.deepcopy(ours))
        step = strategy.wrap_module(ours, lambda batch: ours(batch).square().mean(), automatic=True)
        for index in range(4):
            ours.zero_grad()
            theirs.zero_grad()
            step(batch_of(strategy.rank, index)).backward()
            theirs(batch_of(strategy.rank, index)).square().mean().backward()
            reduced(strategy, ours)
            if index == 0:
                theirs.module.load_state_dict(ours.state_dict())
                continue
            assert_near(gradients_of(ours), gradients_of(theirs), strategy.world_size)
        strategy.teardown()


OVERLAPPED = {
    "each": {"message_size": 1},
    "some": {"message_size": 20},
    "one": {"message_size": 10**6},
    "triggers": {"allreduce_trigger_params": ["norm.weight", "last.bias"]},
    "streams": {"message_size": 1, "num_allreduce_streams": 3},
}


def automatic_checks():
    check_against_torch({})
    check_against_torch({}, 3)
    check_against_torch({"retain_allreduce_buffers": True})
    check_against_torch({"prof": True, "gradient_predivide_factor": 1.0})
    check_half()
    check_dtypes_on_the_way()
    check_division()
    check_where_gradients_are()
    check_buffers_elsewhere()
    check_module_buffers()
    check_shared_weights()
    for options in ({}, {"message_size": 1}):
        check_unused(options)
        check_freezing(options)
        check_added_parameters(options)


def overlapped_checks():
    for options in OVERLAPPED.values():
        check_against_torch(options)
    check_against_torch(OVERLAPPED["some"], 2)
    check_against_torch({**OVERLAPPED["some"], "retain_allreduce_buffers": True})
    check_communicators()
    check_that_messages_leave_early()
    check_that_messages_leave_early_behind_local_ones()
    check_late_gradients()


def check_communicators():
    groups = [dist.new_group(), dist.new_group()]
    check_against_torch(
        {"message_size": 1, "num_allreduce_streams": 2, "allreduce_communicators": (groups, [None, None])}
    )


class Watched(nn.Module):
    """Records the number of sent messages just before the gradient of its first layer is computed."""

    def __init__(self, strategy):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
        self.strategy = strategy
        self.seen = []

    def training_step(self, batch):
        hidden = self.layers[0](batch)
        hidden.register_hook(lambda _: self.seen.append(len(self.strategy._overlap.flat._rank_sums._works)))
        return self.layers[1:](hidden).square().mean()


def check_that_messages_leave_early():
    """After the first step, which learns the order, all messages except the first layer's are sent before backward ends."""
    strategy = started(message_size=30)
    module = Watched(strategy)
    step = strategy.wrap_module(module, module.training_step, automatic=True)
    for index in range(4):
        module.zero_grad()
        loss = step(batch_of(strategy.rank, index))
        if index:
            loss.backward()
            assert len(strategy._overlap._handles) == (5 if index > 1 else 8)
        else:
            with pytest.raises(AttributeError):
                loss.backward()
            module.zero_grad()
            loss = module.layers(batch_of(strategy.rank, index)).square().mean()
            loss.backward()
        reduced(strategy, module)
        assert index < 2 or strategy._overlap.behind == 0
    assert module.seen == [0, 3, 3]
    strategy.teardown()


def check_that_messages_leave_early_behind_local_ones():
    """With accumulation, gradients from earlier micro-batches do not count as ready."""
    strategy = started(message_size=30)
    module = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    step = strategy.wrap_module(module, lambda batch: module(batch).square().mean(), automatic=True, accumulates=True)
    behind = []
    for window in range(6):
        module.zero_grad()
        expected = []
        for micro in range(2):
            batch = batch_of(strategy.rank, 2 * window + micro)
            expected += torch.autograd.grad(module(batch).square().mean(), list(module.parameters()))
            with strategy.no_sync() if micro == 0 else contextlib.nullcontext():
                step(batch).backward()
        reduced(strategy, module)
        behind.append(strategy._overlap.behind)
        for parameter, one, other in zip(module.parameters(), expected[:8], expected[8:], strict=True):
            mean = strategy.reduce(one + other, "mean")
            torch.testing.assert_close(parameter.grad, mean, rtol=1e-5, atol=1e-6)
    assert behind[-2:] == [0, 0]
    strategy.teardown()


def check_late_gradients():
    """A gradient that changes after its message was sent raises an error, and never makes a wrong update."""
    changes = (
        lambda weight: weight.grad.mul_(2),
        lambda weight: setattr(weight, "grad", weight.grad * 2),
        lambda weight: setattr(weight, "grad", None),
    )
    for change in changes:
        strategy = started(message_size=1)
        net = Net()
        step = strategy.wrap_module(net, net.training_step, automatic=True)
        for index in range(3):
            net.zero_grad()
            step(batch_of(strategy.rank, index), 0).backward()
            if index == 2:
                change(net.last.weight)
                shape = re.escape(str(tuple(net.last.weight.shape)))
                with pytest.raises(DistributedError, match=rf"shape {shape} was changed after its message was sent"):
                    reduced(strategy, net)
            else:
                reduced(strategy, net)
        strategy.teardown()


def test_automatic_optimization():
    run_ranks(automatic_checks, 3)  # the code distinguishes one rank from several, and nothing else


def test_overlapped():
    run_ranks(overlapped_checks, 3)  # the code distinguishes one rank from several, and nothing else


# -- manual optimization -----------------------------------------------------------------------------------------------


def check_two_optimizers():
    strategy = started()
    pair, joined = Pair(strategy.rank), Pair(0)
    assert strategy.wrap_module(pair, pair.forward, automatic=False) == pair.forward
    assert_equal(list(pair.parameters()), list(joined.parameters()))
    ranks = range(strategy.world_size)

    def reduce(parameters):
        write_gradients(Optimizer(parameters), strategy.reduce_gradients(GradientMemory(parameters)))

    ours = train_pair(pair, lambda index: batch_of(strategy.rank, index), reduce)
    expected = train_pair(
        joined, lambda index: torch.cat([batch_of(rank, index) for rank in ranks]), lambda parameters: None
    )
    for window, wanted in zip(ours, expected, strict=True):
        for one, other in zip(window, wanted, strict=True):
            assert torch.allclose(one, other, atol=1e-6)
    assert_same_everywhere(strategy, pair.parameters())
    strategy.teardown()


def check_mixed_tensors():
    """Mixes dtypes, layouts and sizes; gradients have other strides than their parameters."""
    strategy = started()
    parameters = [
        nn.Parameter(torch.zeros(3, 4)),
        nn.Parameter(torch.zeros((), dtype=torch.float64)),
        nn.Parameter(torch.zeros(5, dtype=torch.float16)),
        nn.Parameter(torch.zeros(0)),
        nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
        nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(40, 2)[:, 0]),
        nn.Parameter(torch.zeros(6).expand(2, 6)),
    ]
    strategy.wrap_module(nn.ParameterList(parameters[:-1]), len, automatic=False)
    for _ in range(2):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.arange(parameter.numel()).view(parameter.shape).to(parameter.dtype) * strategy.rank
            if index in (0, 5):
                parameter.grad = parameter.grad.transpose(0, 1).contiguous().transpose(0, 1)
        mean = (strategy.world_size - 1) / 2
        expected = [torch.arange(one.numel()).view(one.shape) * mean for one in parameters]
        write_gradients(Optimizer(parameters), strategy.reduce_gradients(GradientMemory(parameters)))
        for parameter, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.grad, wanted.to(parameter.dtype), rtol=1e-2, atol=1e-2)
        assert parameters[5].grad.stride() == parameters[5].stride()
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        strategy.reduce_gradients(GradientMemory(list(embedding.parameters())))
    strategy.teardown()


def check_different_modules():
    odd = dist.get_rank() == 1
    cases = [
        (Net(width=6 + odd), r"'first.weight \(6, 5\) torch.float32', rank 1 has 'first.weight \(7, 5\)"),
        (nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(1 + odd)]), "nothing more, rank 1"),
        (nn.Linear(2, 2).to(torch.float64 if odd else torch.float32), "float32.*float64"),
    ]
    for module, words in cases:
        strategy = started()
        with pytest.raises(DistributedError, match=f"ranks 0 and 1 built different modules.*{words}"):
            strategy.wrap_module(module, module.forward, automatic=True)
        strategy.teardown()


def check_without_arguments():
    """Without arguments all gradients of the module are averaged into ``.grad``, for a user's own loop."""
    strategy = started()
    net = Net()
    net.skip = strategy.rank == 0
    step = strategy.wrap_module(net, net.training_step, automatic=True)
    step(batch_of(strategy.rank, 0), 0).backward()
    assert strategy.reduce_gradients() is IN_PLACE
    assert_same_everywhere(strategy, gradients_of(net))
    strategy.teardown()


def check_switched_off():
    """Parameters that manual optimization has toggled off at the moment are exchanged, too."""
    strategy = started()
    net = nn.Linear(2, 2)
    strategy.wrap_module(net, net.forward, automatic=False)
    for rounds in range(2):
        net.weight.grad, net.bias.grad = torch.full((2, 2), float(strategy.rank)), torch.full((2,), float(rounds))
        net.requires_grad_(requires_grad=rounds == 1)
        gradients = strategy.reduce_gradients(GradientMemory(list(net.parameters())))
        assert gradients.tensors[0].eq((strategy.world_size - 1) / 2).all()
        assert gradients.tensors[1].eq(rounds).all()
    strategy.teardown()


def check_manual_buffers():
    """Each training_step starts with rank 0's buffers."""
    strategy = started()
    net = Net()
    step = strategy.wrap_module(net, net.training_step, automatic=False)
    net.norm.running_mean.fill_(strategy.rank + 1)
    net.norm.eval()
    step(batch_of(strategy.rank, 0), 0)
    assert net.norm.running_mean.eq(1).all()
    strategy.teardown()


def manual_checks():
    check_two_optimizers()
    check_switched_off()
    check_manual_buffers()
    check_mixed_tensors()
    check_different_modules()
    check_without_arguments()


def test_manual_optimization():
    run_ranks(manual_checks, 3)  # the code distinguishes one rank from several, and nothing else


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
tensors = st.tuples(
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 7),
    st.sampled_from([True, True, False]),
)
transports = st.builds(
    Transport,
    dtype=st.sampled_from([None, torch.float16, torch.bfloat16, torch.float32]),
    predivide=st.sampled_from([None, 1.0, 3.0]),
)


def average_property():
    world_size, rank = dist.get_world_size(), dist.get_rank()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.lists(tensors, max_size=8), transports, st.sampled_from([1, 5, 40, float("inf")]), st.data())
    def check(drawn, transport, message_size, data):
        parameters = [
            nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trained) for shape, dtype, _, trained in drawn
        ]
        triggers = data.draw(st.sets(st.integers(0, max(len(drawn) - 1, 0)), max_size=2)) if drawn else set()
        flat = FlatGradients(parameters, transport, world_size, message_size=message_size, triggers=triggers)
        for round_number in range(1, 3):
            for parameter, (_, _, holders, trained) in zip(parameters, drawn, strict=True):
                holds = trained and holders >> rank & 1
                parameter.grad = torch.full_like(parameter, 12.0 * round_number * (rank + 1)) if holds else None
            gradients = flat.exchange()
            flat.write_back(gradients)
            for parameter, (_, _, holders, trained) in zip(parameters, drawn, strict=True):
                holding = [other for other in range(world_size) if trained and holders >> other & 1]
                assert (parameter.grad is None) == (not holding)
                if holding:
                    mean = 12.0 * round_number * sum(other + 1 for other in holding) / world_size
                    assert torch.allclose(parameter.grad, torch.full_like(parameter, mean), rtol=3e-2)
                    assert parameter.grad.dtype == parameter.dtype

    check()


def test_averages_of_any_parameters():
    run_ranks(average_property, 3)


# -- in one process ----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab")), max_size=12), st.integers(1, 30))
def test_messages_hold_each_piece_once_and_close_when_full(drawn, elements):
    pieces = [Piece(size, kind) for size, kind in drawn]
    plan = plan_messages(pieces, elements)
    assert sorted(index for bucket in plan for index in bucket.indices) == list(range(len(pieces)))
    closed = [bucket for bucket in plan if bucket.elements >= elements]
    assert plan[: len(closed)] == closed
    assert len(plan) - len(closed) <= len({kind for _, kind in drawn})
    ends = [bucket.indices[-1] for bucket in closed]
    assert ends == sorted(ends)
    for bucket in plan:
        assert len({pieces[index].kind for index in bucket.indices}) == 1
        assert sum(bucket.lengths[:-1]) < elements
        assert list(bucket.indices) == sorted(bucket.indices)


def test_triggers_alone_close_messages():
    pieces = [Piece(100, "a")] * 5
    assert [bucket.indices for bucket in plan_messages(pieces, 1, {1, 3})] == [(0, 1), (2, 3), (4,)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"message_size": 10, "delay_allreduce": True}, "give one of them"),
        ({"allreduce_trigger_params": ["a"], "delay_allreduce": True}, "give one of them"),
        ({"delay_allreduce": False}, "10_000_000"),
        ({"delay_allreduce": 1}, "delay_allreduce=1"),
        ({"message_size": 0}, "message_size=0"),
        ({"message_size": 2.5}, r"message_size=2\.5"),
        ({"message_size": True}, "message_size=True"),
        ({"num_allreduce_streams": 2}, "message_size or allreduce_trigger_params too"),
        ({"num_allreduce_streams": 0, "message_size": 1}, "num_allreduce_streams=0"),
        ({"message_size": 1, "allreduce_communicators": ([None], [])}, "num_allreduce_streams=1 of each"),
        ({"message_size": 1, "allreduce_communicators": 3}, "process groups, streams"),
        ({"allreduce_trigger_params": []}, "not empty"),
        ({"allreduce_trigger_params": "first.weight"}, "a list of parameters"),
        ({"allreduce_dtype": torch.float64}, "torch.float64"),
        ({"allreduce_dtype": "fp16"}, "'fp16'"),
        ({"allreduce_dtype": []}, r"allreduce_dtype=\[\]"),
        ({"allreduce_dtype": torch.float16, "allreduce_always_fp32": True}, "contradict"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor=0"),
        ({"gradient_predivide_factor": float("inf")}, "gradient_predivide_factor=inf"),
        ({"gradient_average": "yes"}, "gradient_average='yes'"),
        ({"prof": None}, "prof=None"),
        ({"timeout": 0}, "timeout=0"),
    ],
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(ConfigError, match=words):
        DelayedDDP(**options)


def test_options_survive_pickling():
    options = {"message_size": 7, "allreduce_dtype": torch.float16, "timeout": 60}
    again = pickle.loads(pickle.dumps(DelayedDDP(**options)))
    assert (again.message_size, again.transport.dtype, again.timeout.total_seconds()) == (7, torch.float16, 60)
    assert not again.delay_allreduce


def test_one_process_is_enough():
    strategy = DelayedDDP(message_size=1)
    strategy.setup_environment(Environment(), CPU)
    try:
        net, alone = Net(), Net()
        step = strategy.wrap_module(net, net.training_step, automatic=True)
        step(batch_of(0, 0), 0).backward()
        alone.training_step(batch_of(0, 0), 0).backward()
        assert strategy.reduce_gradients(GradientMemory(list(net.parameters()))) is IN_PLACE
        assert_equal(gradients_of(net), gradients_of(alone))
        sums = summed(torch.ones(2))
        assert strategy.reduce_gradients(sums).tensors is sums.flat.tensors
        with pytest.raises(ConfigError, match="automatic_optimization=False"):
            strategy.wrap_module(net, net.training_step, automatic=False)
    finally:
        strategy.teardown()
    assert not dist.is_initialized()


def test_triggers_have_to_be_of_the_module():
    for triggers, words in (
        (["first.weihgt"], "did you mean 'first.weight'"),
        ([torch.zeros(1)], "not a parameter of Net"),
    ):
        strategy = DelayedDDP(allreduce_trigger_params=triggers)
        strategy.setup_environment(Environment(), CPU)
        net = Net()
        with pytest.raises(ConfigError, match=words):
            strategy.wrap_module(net, net.training_step, automatic=True)
        strategy.teardown()
