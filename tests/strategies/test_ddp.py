"""DDP over real Gloo processes: many checks per spawn, each against torch's own wrapper or the joined batch."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch._dynamo  # torch's wrapper imports it; here once, before ranks are forked, and not in each rank
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fabricamp.errors import ConfigError, DistributedError
from fabricamp.gradients.flat import FlatGradients, Transport
from fabricamp.gradients.memory import GradientMemory
from fabricamp.strategies import DDP, IN_PLACE, Environment
from fabricamp.strategies.exchange import Exchange, elements_of
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer
from tests.windows import summed

CPU = torch.device("cpu")


class Net(nn.Module):
    """Has two layers and BatchNorm's buffers; ``skip`` leaves the last layer out of the loss."""

    def __init__(self, seed=0, width=6):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 3)
        self.skip = False
        self.automatic_calls = 0

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x)))
        return hidden if self.skip else self.last(hidden)

    def training_step(self, batch, batch_idx):
        self.automatic_calls += 1
        return self(batch).square().mean() + 0 * batch_idx


def started(**options):
    strategy = DDP(**options)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    strategy.setup_environment(Environment(rank=rank, local_rank=rank, world_size=world_size), CPU)
    return strategy


def batch_of(rank, index, size=4):
    return torch.randn(size, 5, generator=torch.Generator().manual_seed(100 * rank + index))


def gradients_of(module):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def assert_equal(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def assert_same_everywhere(strategy, tensors):
    for tensor in tensors:
        everyone = strategy.all_gather(tensor)
        assert all(torch.equal(everyone[0], one) for one in everyone)


# -- automatic optimization --------------------------------------------------------------------------------------------


def check_bitwise(options, torch_options, accumulate):
    """Compares six steps of SGD with BatchNorm with torch's wrapper around a module with the same forward."""
    strategy = started(**options)
    ours = Net(seed=strategy.rank)  # rank 0's weights have to win
    theirs = DistributedDataParallel(copy.deepcopy(ours), **torch_options)
    step = strategy.wrap_module(ours, ours.training_step, automatic=True, accumulates=accumulate > 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)]
    for window in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(accumulate):
            batch = batch_of(strategy.rank, window * accumulate + micro)
            local = micro < accumulate - 1
            with strategy.no_sync() if local else contextlib.nullcontext():
                (step(batch, micro) / accumulate).backward()
            with theirs.no_sync() if local else contextlib.nullcontext():
                (theirs(batch).square().mean() / accumulate).backward()
        assert strategy.reduce_gradients() is IN_PLACE
        assert_equal(gradients_of(ours), gradients_of(theirs))
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(list(ours.state_dict().values()), list(theirs.module.state_dict().values()))
    assert_same_everywhere(strategy, ours.parameters())
    assert ours.automatic_calls == 6 * accumulate
    strategy.teardown()


def automatic_checks():
    check_bitwise({}, {}, 1)
    check_bitwise({}, {}, 3)
    check_bitwise({"bucket_cap_mb": 0.0001}, {"bucket_cap_mb": 0.0001}, 2)
    check_bitwise({"static_graph": True}, {"static_graph": True}, 1)
    check_bitwise({"find_unused_parameters": True}, {"find_unused_parameters": True}, 2)
    check_bucket_views()
    check_bitwise({"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": True}, 2)
    check_sharing()
    check_names()
    check_hook()
    check_unused_found()
    check_always_local()
    check_buffers_of_each_rank()
    check_refusals()
    check_freezing()
    check_wrapping_twice()
    check_half()


def check_sharing():
    """Weights are shared before the conversion, so all ranks take their masters from rank 0's fp32 weights."""
    strategy = started()
    net = Net(seed=strategy.rank)
    net.norm.running_var.fill_(strategy.rank)
    strategy.share_module(net)
    assert_equal(list(net.parameters()), list(Net(seed=0).parameters()))
    assert net.norm.running_var.eq(0).all()
    strategy.teardown()


def check_names():
    strategy = started()
    net = Net()
    before = list(net.state_dict())
    forward = net.forward
    strategy.wrap_module(net, net.training_step, automatic=True)
    assert list(net.state_dict()) == before
    assert list(strategy.module_state(net)) == before
    assert net.forward == forward
    assert type(copy.deepcopy(net)) is Net
    strategy.teardown()


def check_hook():
    strategy = started(comm_hook=fp16_compress_hook)
    ours, theirs = Net(), DistributedDataParallel(Net())
    theirs.register_comm_hook(None, fp16_compress_hook)
    step = strategy.wrap_module(ours, ours.training_step, automatic=True)
    batch = batch_of(strategy.rank, 0)
    step(batch, 0).backward()
    theirs(batch).square().mean().backward()
    strategy.reduce_gradients()
    assert_equal(gradients_of(ours), gradients_of(theirs))
    strategy.teardown()


def check_bucket_views():
    for views in (True, False):
        strategy = started(gradient_as_bucket_view=views)
        net = Net()
        step = strategy.wrap_module(net, net.training_step, automatic=True)
        step(batch_of(strategy.rank, 0), 0).backward()
        assert (net.first.weight.grad.untyped_storage().size() > 4 * net.first.weight.numel()) == views
        strategy.teardown()


def check_unused_found():
    strategy = started(find_unused_parameters=True)
    net = Net()
    step = strategy.wrap_module(net, net.training_step, automatic=True)
    for skip in (False, True, False):
        net.zero_grad()
        net.skip = skip
        step(batch_of(strategy.rank, 0), 0).backward()
        assert strategy.reduce_gradients() is IN_PLACE
        assert (net.last.weight.grad is None) == skip
        assert_same_everywhere(strategy, [net.first.weight.grad])
    strategy.teardown()


def check_always_local():
    """With sums in a separate memory every micro-batch is local, and buffers are still broadcast at the start of each step."""
    for options in ({}, {"find_unused_parameters": True}):
        strategy = started(**options)
        ours, local = Net(), Net()
        step = strategy.wrap_module(ours, ours.training_step, automatic=True, accumulates=True)
        for window in range(4):
            memory = GradientMemory(list(ours.parameters()), sums=True)
            expected = [torch.zeros_like(parameter) for parameter in ours.parameters()]
            strategy_buffers = [buffer.clone() for buffer in local.buffers()]
            strategy_buffers = strategy.broadcast(strategy_buffers)
            for buffer, first in zip(local.buffers(), strategy_buffers, strict=True):
                buffer.copy_(first)
            for micro in range(2):
                for model, run in ((ours, step), (local, local.training_step)):
                    model.zero_grad()
                    with strategy.no_sync():
                        run(batch_of(strategy.rank, 2 * window + micro), 0).backward()
                for own, parameter in zip(expected, local.parameters(), strict=True):
                    own.add_(parameter.grad)
                memory.add()
            gradients = strategy.reduce_gradients(memory)
            assert gradients.tensors is memory.flat.tensors
            assert gradients.divisor == 1.0
            assert all(flag != 0 for flag in gradients.present)
            for total, mean in zip(expected, gradients.tensors, strict=True):
                assert torch.allclose(strategy.reduce(total, "mean"), mean, atol=1e-7)
            assert_equal(list(ours.buffers()), list(local.buffers()))
        strategy.teardown()


def check_buffers_of_each_rank():
    strategy = started(broadcast_buffers=False)
    net = Net()
    net.norm.running_mean.fill_(strategy.rank)
    step = strategy.wrap_module(net, net.training_step, automatic=True)
    assert net.norm.running_mean.eq(0).all()
    alone = copy.deepcopy(net)
    for index in range(3):
        step(batch_of(strategy.rank, index), 0).backward()
        alone(batch_of(strategy.rank, index))
    assert torch.equal(net.norm.running_mean, alone.norm.running_mean)
    strategy.teardown()


def check_refusals():
    strategy = started(static_graph=True)
    net = Net()
    with pytest.raises(ConfigError, match=r"static_graph=True.*accumulate_grad_batches"):
        strategy.wrap_module(net, net.training_step, automatic=True, accumulates=True)
    strategy.wrap_module(net, net.training_step, automatic=True)
    with pytest.raises(ConfigError, match="accumulate_grad_batches"):
        strategy.no_sync()
    strategy.teardown()
    for options in ({"static_graph": True}, {"comm_hook": fp16_compress_hook}):
        strategy = started(**options)
        with pytest.raises(ConfigError, match=f"{next(iter(options))}.*automatic_optimization=False"):
            strategy.wrap_module(net, net.training_step, automatic=False)
    strategy = started()
    for module, words in (
        (Net().requires_grad_(requires_grad=False), "Net has no parameter with requires_grad=True"),
        (nn.Sequential(nn.LazyLinear(3)), "0.weight, 0.bias have no shape"),
    ):
        with pytest.raises(ConfigError, match=words):
            strategy.wrap_module(module, module.forward, automatic=True)


def check_freezing():
    """Freezing and unfreezing work at an epoch's start; in its middle an error names the parameters before the update."""
    strategy = started()
    net = Net()
    net.last.requires_grad_(requires_grad=False)
    step = strategy.wrap_module(net, net.training_step, automatic=True)
    assert strategy.rewrap_module(step) is step
    step(batch_of(strategy.rank, 0), 0).backward()
    strategy.reduce_gradients()

    net.zero_grad()
    with strategy.no_sync():  # a micro-batch of an accumulation that continues in the next epoch
        step(batch_of(strategy.rank, 1), 0).backward()
    mean = strategy.reduce(net.first.weight.grad)
    net.last.requires_grad_(requires_grad=True)
    net.first.requires_grad_(requires_grad=False)
    step = strategy.rewrap_module(step)
    assert torch.equal(net.first.weight.grad, mean)
    net.zero_grad()
    assert strategy.rewrap_module(step) is step
    for index in range(2):
        net.zero_grad()
        step(batch_of(strategy.rank, index), 0).backward()
        strategy.reduce_gradients()
        assert_same_everywhere(strategy, [net.last.weight.grad])
        assert net.first.weight.grad is None

    net.first.requires_grad_(requires_grad=True)
    step(batch_of(strategy.rank, 3), 0).backward()
    with pytest.raises(DistributedError, match=r"first\.weight, first\.bias got requires_grad=True in the middle"):
        strategy.reduce_gradients()
    net.first.requires_grad_(requires_grad=False)
    net.last.bias.requires_grad_(requires_grad=False)
    step(batch_of(strategy.rank, 3), 0).backward()
    with pytest.raises(DistributedError, match=r"last\.bias got requires_grad=False in the middle"):
        strategy.reduce_gradients()

    net.first.requires_grad_(requires_grad=strategy.rank == 0)
    with pytest.raises(DistributedError, match=r"different modules.*frozen"):
        strategy.rewrap_module(step)
    strategy.teardown()


def check_wrapping_twice():
    strategy = started()
    ours, theirs = Net(), DistributedDataParallel(Net())
    steps = []
    for _ in range(3):
        # This wrapper is left in the middle of an exchange, and is still alive when the next one is made.
        step = strategy.wrap_module(ours, ours.training_step, automatic=True)
        steps.append(step)
        ours.skip = True
        step(batch_of(strategy.rank, 0), 0).backward()
        with pytest.raises(DistributedError, match="find_unused_parameters"):
            strategy.reduce_gradients()
    ours.skip = False
    ours.load_state_dict(theirs.module.state_dict())
    step = strategy.wrap_module(ours, ours.training_step, automatic=True)
    for index in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        step(batch_of(strategy.rank, index), 0).backward()
        theirs(batch_of(strategy.rank, index)).square().mean().backward()
        strategy.reduce_gradients()
        assert_equal(gradients_of(ours), gradients_of(theirs))
    strategy.teardown()


def check_half():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        strategy = started()
        ours, theirs = Net().to(dtype), DistributedDataParallel(Net().to(dtype))
        step = strategy.wrap_module(ours, ours.training_step, automatic=True)
        batch = batch_of(strategy.rank, 0).to(dtype)
        step(batch, 0).backward()
        theirs(batch).square().mean().backward()
        strategy.reduce_gradients()
        assert_equal(gradients_of(ours), gradients_of(theirs))
        strategy.teardown()


def test_automatic_optimization():
    run_ranks(automatic_checks, 3)  # the code distinguishes one rank from several, and nothing else


def unused_by_all():
    strategy = started()
    net = Net()
    net.skip = True
    step = strategy.wrap_module(net, net.training_step, automatic=True)
    step(batch_of(strategy.rank, 0), 0).backward()
    with pytest.raises(DistributedError) as caught:
        strategy.reduce_gradients()
    return str(caught.value)


def test_the_unused_parameter_error_comes_before_the_update_and_names_them():
    for rank, message in enumerate(run_ranks(unused_by_all, 2)):
        assert message.startswith(
            f"rank {rank}: backward gave no gradient to 2 of 6 parameters: last.weight, last.bias;"
        )
        assert "find_unused_parameters=True" in message


# -- manual optimization -----------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Has two networks with an optimizer each, as in a GAN; the second loss depends on the first network."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.maker = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
        self.judge = nn.Linear(4, 1).double()

    def losses(self, x):
        yield self.judge(self.maker(x).detach().double()).square().mean()
        yield (self.judge(self.maker(x).double()) - 1).square().mean()


def train_pair(pair, batch, reduce):
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.5, momentum=0.5) for part in (pair.judge, pair.maker)]
    history = []
    for index in range(3):
        for part, optimizer, loss in zip((pair.judge, pair.maker), optimizers, pair.losses(batch(index)), strict=True):
            optimizer.zero_grad()
            loss.backward(inputs=list(part.parameters()))
            reduce(list(part.parameters()))
            history.append(gradients_of(part))
            optimizer.step()
    return history


def check_two_optimizers():
    strategy = started(bucket_cap_mb=0.00005)
    pair, joined = Pair(strategy.rank), Pair(0)
    assert strategy.wrap_module(pair, pair.forward, automatic=False) == pair.forward
    assert_equal(list(pair.parameters()), list(joined.parameters()))
    ranks = range(strategy.world_size)
    ours = train_pair(
        pair, lambda index: batch_of(strategy.rank, index), lambda own: strategy.reduce_gradients(GradientMemory(own))
    )
    expected = train_pair(
        joined, lambda index: torch.cat([batch_of(rank, index) for rank in ranks]), lambda parameters: None
    )
    for window, wanted in zip(ours, expected, strict=True):
        for one, other in zip(window, wanted, strict=True):
            assert torch.allclose(one, other, atol=1e-6)
    assert_same_everywhere(strategy, pair.parameters())
    strategy.teardown()


def check_presence():
    """A gradient missing on some ranks counts as zeros there; missing on all it stays None; no gradient tensor is replaced."""
    strategy = started()
    net = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("all", "some", "none", "late")})
    strategy.wrap_module(net, net.forward, automatic=False)
    net["all"].grad = torch.full((2,), float(strategy.rank))
    own = net["all"].grad
    if strategy.rank == 1:
        net["some"].grad = torch.tensor([3.0, float("nan")])
    if strategy.rank == strategy.world_size - 1:
        net["late"].grad = torch.zeros(2)
    assert strategy.reduce_gradients(GradientMemory(list(net.parameters()))) is IN_PLACE
    mean = sum(range(strategy.world_size)) / strategy.world_size
    assert net["all"].grad is own
    assert torch.allclose(own, torch.full((2,), mean))
    assert net["some"].grad[0].item() == pytest.approx(3 / strategy.world_size)
    assert net["some"].grad[1].isnan()
    assert net["late"].grad.tolist() == [0.0, 0.0]
    assert net["none"].grad is None
    strategy.teardown()


def check_mixed_tensors():
    """Mixes dtypes, layouts and sizes."""
    strategy = started(bucket_cap_mb=0.0001)
    parameters = [
        nn.Parameter(torch.zeros(3, 4)),
        nn.Parameter(torch.zeros((), dtype=torch.float64)),
        nn.Parameter(torch.zeros(5, dtype=torch.float16)),
        nn.Parameter(torch.zeros(0)),
        nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
        nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(40)),
    ]
    strategy.wrap_module(nn.ParameterList(parameters), len, automatic=False)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0 * strategy.rank)
        parameters[0].grad = torch.full((4, 3), 2.0 * strategy.rank).t()
        strategy.reduce_gradients(GradientMemory(parameters))
        for parameter in parameters:
            assert parameter.grad.dtype == parameter.dtype
            assert torch.allclose(parameter.grad, torch.full_like(parameter, strategy.world_size - 1), rtol=1e-2)
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        strategy.reduce_gradients(GradientMemory(list(embedding.parameters())))
    strategy.teardown()


def check_manual_buffers():
    """Each step starts with rank 0's buffers, as under torch's wrapper; broadcast_buffers=False does not change them."""
    for broadcasts in (True, False):
        strategy = started(broadcast_buffers=broadcasts)
        net = Net(seed=strategy.rank)
        net.norm.running_mean.fill_(strategy.rank)
        step = strategy.wrap_module(net, net.training_step, automatic=False)
        assert net.norm.running_mean.eq(0).all()
        net.norm.running_mean.fill_(strategy.rank + 1)
        net.norm.eval()
        step(batch_of(strategy.rank, 0), 0)
        assert net.norm.running_mean.eq(1 if broadcasts else strategy.rank + 1).all()
        with strategy.no_sync():
            assert strategy.rewrap_module(step) is step
        strategy.teardown()


def check_different_modules():
    cases = [
        (
            Net(width=6 + (dist.get_rank() == 1)),
            r"'first.weight \(6, 5\) torch.float32', rank 1 has 'first.weight \(7, 5\)",
        ),
        (
            nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(1 + (dist.get_rank() == 1))]),
            "nothing more, rank 1",
        ),
        (nn.Sequential(nn.Linear(2, 2, bias=dist.get_rank() != 1)), "'0.bias.*rank 1 has nothing more"),
        (nn.BatchNorm1d(2, track_running_stats=dist.get_rank() != 1), "buffer running_mean"),
        (nn.Linear(2, 2).to(torch.float64 if dist.get_rank() == 1 else torch.float32), "float32.*float64"),
    ]
    for automatic in (True, False):
        for module, words in cases:
            strategy = started()
            with pytest.raises(DistributedError, match=f"ranks 0 and 1 built different modules.*{words}"):
                strategy.wrap_module(module, module.forward, automatic=automatic)
            strategy.teardown()


def manual_checks():
    check_two_optimizers()
    check_presence()
    check_mixed_tensors()
    check_manual_buffers()
    check_different_modules()


def test_manual_optimization():
    run_ranks(manual_checks, 3)  # the code distinguishes one rank from several, and nothing else


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
tensors = st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES), st.integers(0, 7))


def average_property():
    world_size, rank = dist.get_world_size(), dist.get_rank()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.lists(tensors, max_size=8), st.floats(0.00001, 0.001))
    def check(drawn, megabytes):
        exchange = Exchange(world_size, megabytes)
        size = elements_of(megabytes)
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype, _ in drawn]
        for parameter, (_, _, holders) in zip(parameters, drawn, strict=True):
            if holders >> rank & 1:
                parameter.grad = torch.full_like(parameter, 12.0 * (rank + 1))
        flat = FlatGradients(parameters, Transport(), world_size, message_size=size, frozen=())
        flat.copy_back(flat.exchange())
        for parameter, (_, _, holders) in zip(parameters, drawn, strict=True):
            holding = [other for other in range(world_size) if holders >> other & 1]
            assert (parameter.grad is None) == (not holding)
            if holding:
                mean = 12.0 * sum(other + 1 for other in holding) / world_size
                assert torch.allclose(parameter.grad, torch.full_like(parameter, mean), rtol=2e-2)
        values = [torch.full(shape, float(rank), dtype=dtype).mT for shape, dtype, _ in drawn if len(shape) > 1]
        values += [torch.full(shape, float(rank), dtype=dtype) for shape, dtype, _ in drawn]
        exchange.average(values)
        for value in values:
            assert torch.allclose(value, torch.full_like(value, (world_size - 1) / 2), rtol=2e-2)

    check()


def test_averages_of_any_shapes_and_dtypes():
    run_ranks(average_property, 3)


def test_one_process_is_enough():
    strategy = DDP()
    strategy.setup_environment(Environment(), CPU)
    try:
        net, alone = Net(), Net()
        step = strategy.wrap_module(net, net.training_step, automatic=True)
        step(batch_of(0, 0), 0).backward()
        alone.training_step(batch_of(0, 0), 0).backward()
        assert strategy.reduce_gradients() is IN_PLACE
        assert_equal(gradients_of(net), gradients_of(alone))
        assert strategy.reduce_gradients(summed(torch.ones(2))).tensors[0].tolist() == [1.0, 1.0]
        strategy.wrap_module(net, net.training_step, automatic=False)
        assert strategy.reduce_gradients(GradientMemory(list(net.parameters()))) is IN_PLACE
        assert_equal(gradients_of(net), gradients_of(alone))
    finally:
        strategy.teardown()
    assert not dist.is_initialized()


class Marked(Classifier):
    """Has a buffer that each rank increments differently; records its value in each step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mark", torch.zeros(()))
        self.found = []

    def training_step(self, batch, batch_idx):
        self.found.append(self.mark.item())
        self.mark += 1 + self.global_rank
        return super().training_step(batch, batch_idx)


def drops_windows():
    module = Marked()
    trainer = quiet_trainer(
        strategy="ddp", devices="auto", max_epochs=2, accumulate_grad_batches=2, partial_window="drop"
    )
    trainer.fit(module, loader(24))
    return module.found


def test_behind_a_dropped_window_every_rank_begins_with_rank_0s_buffers():
    first, second = run_ranks(drops_windows, 2)
    assert first == [0, 1, 2, 3, 4, 5]
    assert second == [0, 2, 2, 3, 5, 5]
