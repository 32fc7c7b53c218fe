"""DistributedDataParallel and Reducer for scripts, over Gloo: loops as in users' scripts, compared with torch's class."""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
import pickle

import pytest
import torch
import torch._dynamo  # torch's wrapper imports it: here once, before the ranks are forked, instead of in each rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as OfTorch
from torch.utils.checkpoint import checkpoint

from fabricamp.apex.parallel import DistributedDataParallel, Reducer
from fabricamp.errors import ConfigError, DistributedError
from fabricamp.nn import SyncBatchNorm
from fabricamp.ops.peer_memory import timeout_of
from tests.distributed.ranks import run_ranks
from tests.strategies.test_ddp import Net, assert_equal, batch_of, gradients_of
from tests.strategies.test_delayed_ddp import assert_near, warnings_of_fabricamp

MODES = {
    "apex's own": {},
    "each": {"message_size": 1},
    "some": {"message_size": 20, "num_allreduce_streams": 2},
    "triggers": {"allreduce_trigger_params": ["norm.weight"]},
    "delayed": {"delay_allreduce": True},
}


def loss_of(output):
    return output.square().mean()


def equal_everywhere(tensors):
    mine = torch.cat([one.detach().flatten().double() for one in tensors])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, one) for one in everyone)


def mean_over_ranks(tensor):
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def both(options, module=None):
    """Returns the same module in our wrapper, built from different weights on each rank, and in torch's."""
    ours = DistributedDataParallel(copy.deepcopy(module) if module else Net(seed=dist.get_rank()), **options)
    theirs = OfTorch(copy.deepcopy(ours.module))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)]
    return ours, theirs, optimizers


def check_steps(options):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ours, theirs, optimizers = both(options)
    assert equal_everywhere(ours.parameters())
    for index in range(6):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=index < 3)
            loss_of(model(batch_of(rank, index))).backward()
        assert_near(gradients_of(ours), gradients_of(theirs), world_size)
        for optimizer in optimizers:
            optimizer.step()
        theirs.module.load_state_dict(ours.module.state_dict())
    assert equal_everywhere(ours.parameters())


def check_accumulation(options):
    """Runs local micro-batches, by either name, then one with an exchange."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ours, theirs, optimizers = both(options)
    for window in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(3):
            batch = batch_of(rank, 3 * window + micro)
            if micro == 0:
                ours.disable_allreduce()
            if micro == 2:
                ours.enable_allreduce()
            before = gradients_of(ours)
            loss_of(ours(batch)).backward()
            if micro == 1:
                assert not equal_everywhere(gradients_of(ours.module.last))
                alone = copy.deepcopy(ours.module)
                alone.zero_grad()
                loss_of(alone(batch)).backward()
                for one, was, own in zip(gradients_of(ours), before, gradients_of(alone), strict=True):
                    assert torch.allclose(one, was + own, atol=1e-6)
            if micro < 2:
                with theirs.no_sync():
                    loss_of(theirs(batch)).backward()
            else:
                loss_of(theirs(batch)).backward()
        assert_near(gradients_of(ours), gradients_of(theirs), world_size)
        with ours.no_sync():
            ours.zero_grad()
            loss_of(ours(batch_of(rank, window))).backward()
        assert not equal_everywhere([ours.module.last.bias.grad])
    assert ours._enabled


def check_two_backwards(options):
    """Checks a GAN's step (two forwards with a backward each, then one step), and two networks in one backward."""
    rank = dist.get_rank()
    maker, judge = nn.Linear(5, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    makers = [DistributedDataParallel(maker, **options), copy.deepcopy(maker)]
    judges = [DistributedDataParallel(judge, **options), copy.deepcopy(judge)]
    for ours, alone in (makers, judges):
        alone.load_state_dict(ours.module.state_dict())
    world = range(dist.get_world_size())
    for index in range(4):
        found = []
        for make, assess, ranks in zip(makers, judges, ([rank], world), strict=True):
            for network in (make, assess):
                network.zero_grad(set_to_none=index % 2 == 0)
            for other in ranks:
                share = 1 / len(ranks)
                for value in (make(batch_of(other, index)).detach(), batch_of(other, index)[:, :4]):
                    (loss_of(assess(value)) * share).backward()
            found.append(gradients_of(assess))
            for parameter in assess.parameters():
                parameter.requires_grad_(False)
            for other in ranks:
                (loss_of(assess(make(batch_of(other, index))) - 1) / len(ranks)).backward()
            found[-1] += gradients_of(make)
            for parameter in assess.parameters():
                parameter.requires_grad_(True)
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one, other, atol=1e-6)


def check_unused(options):
    """A gradient missing on one rank counts as zeros there; missing on all ranks it is None."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    net = DistributedDataParallel(Net(), **options)
    net.module.norm.eval()
    with warnings_of_fabricamp() as told:
        for index, skipping in enumerate([[], [0], [*range(world_size)], [], [0]]):
            net.zero_grad()
            net.module.skip = rank in skipping
            alone = copy.deepcopy(net.module)
            loss_of(net(batch_of(rank, index))).backward()
            loss_of(alone(batch_of(rank, index))).backward()
            for one, other in zip(net.parameters(), alone.parameters(), strict=True):
                mean = mean_over_ranks(torch.zeros_like(one) if other.grad is None else other.grad)
                if one.grad is None:
                    assert len(skipping) == world_size
                else:
                    assert torch.allclose(one.grad, mean, atol=1e-6)
                    assert not (len(skipping) == world_size and one is net.module.last.weight)
    assert len(told) == (
        1 if rank == 0 or (rank in range(world_size) and not options.get("delay_allreduce") and told) else 0
    )
    assert rank != 0 or "last.weight, last.bias" in told[0]


def check_changes(options):
    """Checks parameters that are frozen, added, cast and replaced between steps."""
    rank = dist.get_rank()
    net = DistributedDataParallel(Net(), **options)

    def step(index):
        net.zero_grad()
        alone = copy.deepcopy(net.module)
        loss_of(net(batch_of(rank, index))).backward()
        loss_of(alone(batch_of(rank, index))).backward()
        for one, other in zip(net.parameters(), alone.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(one.grad, mean_over_ranks(other.grad), rtol=1e-4, atol=1e-5)

    step(0)
    net.module.first.requires_grad_(False)
    step(1)
    step(2)
    net.module.first.requires_grad_(True)
    step(3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net.module.last = nn.Sequential(net.module.last, nn.Linear(3, 2))
    step(4)
    step(5)
    net.module.last.double()
    net.module.forward = lambda x: net.module.last(torch.tanh(net.module.first(x)).double())
    copy_of = copy.deepcopy
    net.module.forward = _Forward(net.module)
    assert copy_of(net.module.forward) is not net.module.forward
    step(6)


class _Forward:
    """A replacement for ``forward`` that a copy of the module copies too."""

    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module.last(torch.tanh(self.module.first(x)).double())


def check_dtypes():
    """Half gradients are exchanged in half or fp32, fp32 gradients in half; the result has the parameter's dtype."""
    rank = dist.get_rank()
    for dtype, options in (
        (torch.float16, {}),
        (torch.bfloat16, {"allreduce_always_fp32": True, "delay_allreduce": True}),
        (torch.float16, {"allreduce_always_fp32": True, "message_size": 1}),
        (torch.float32, {"allreduce_dtype": torch.float16}),
        (torch.float32, {"allreduce_dtype": torch.bfloat16, "delay_allreduce": True, "retain_allreduce_buffers": True}),
        (torch.float16, {"gradient_predivide_factor": 2.0}),
    ):
        net = DistributedDataParallel(Net().to(dtype), **options)
        for index in range(3):
            net.zero_grad()
            alone = copy.deepcopy(net.module)
            loss_of(net(batch_of(rank, index).to(dtype))).backward()
            loss_of(alone(batch_of(rank, index).to(dtype))).backward()
            for one, other in zip(net.parameters(), alone.parameters(), strict=True):
                assert one.grad.dtype is dtype
                mean = mean_over_ranks(other.grad.float()).to(dtype)
                torch.testing.assert_close(one.grad, mean, rtol=2e-2, atol=2e-3)


def check_sums_and_buffers():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    net = DistributedDataParallel(nn.Linear(3, 1), gradient_average=False, retain_allreduce_buffers=True)
    net(torch.full((1, 3), float(rank))).sum().backward()
    assert net.module.bias.grad.item() == world_size
    assert net.module.weight.grad[0, 0].item() == sum(range(world_size))
    (flat,) = net.allreduce_buffers
    assert flat.untyped_storage().data_ptr() == net.module.bias.grad.untyped_storage().data_ptr()
    assert DistributedDataParallel(nn.Linear(3, 1)).allreduce_buffers == []
    net = DistributedDataParallel(nn.BatchNorm1d(3), broadcast_buffers=True)
    net.module.running_mean.fill_(rank)
    net.eval()(torch.ones(2, 3))
    assert net.module.running_mean.eq(0).all()


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    scores: list


class Hidden:
    """An output in which no tensors are found."""

    def __init__(self, loss):
        self.loss = loss


def check_outputs():
    """Gradients are averaged after backward, whatever container the forward returns its loss in."""
    rank = dist.get_rank()
    for wrap, unwrap in (
        (lambda loss: {"loss": loss, "name": "x"}, lambda output: output["loss"]),
        (lambda loss: [(loss, 3)], lambda output: output[0][0]),
        (lambda loss: Output(loss, []), lambda output: output.loss),
        (Hidden, lambda output: output.loss),
    ):
        for options in MODES.values():

            class Wrapped(Net):
                def forward(self, x, wrap=wrap):
                    return wrap(loss_of(super().forward(x)))

            net = DistributedDataParallel(Wrapped(), **options)
            for index in range(3):
                net.zero_grad()
                unwrap(net(batch_of(rank, index))).backward()
                assert equal_everywhere(gradients_of(net))
            with torch.no_grad():
                net(batch_of(rank, 0))


class Checkpointed(nn.Module):
    """Two checkpointed segments use one layer, so re-entrant backwards give it two gradients."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = nn.Linear(5, 5), nn.Linear(5, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return self.last(x)


def check_checkpointing():
    rank = dist.get_rank()
    for use_reentrant in (False, True):
        for options in MODES.values():
            if "allreduce_trigger_params" in options:
                continue
            net = DistributedDataParallel(Checkpointed(use_reentrant), **options)
            for index in range(3):
                net.zero_grad()
                alone = copy.deepcopy(net.module)
                loss_of(alone(batch_of(rank, index))).backward()
                loss_of(net(batch_of(rank, index))).backward()
                for one, other in zip(net.parameters(), alone.parameters(), strict=True):
                    assert torch.allclose(one.grad, mean_over_ranks(other.grad), atol=1e-6)


def check_copies():
    """A copy or pickle of a wrapper in use has apex's names, and exchanges independently."""
    rank = dist.get_rank()
    for options in MODES.values():
        net = DistributedDataParallel(Net(), **options)
        loss_of(net(batch_of(rank, 0))).backward()
        assert list(net.state_dict())[:2] == ["module.first.weight", "module.first.bias"]
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        for other in (copy.deepcopy(net), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(net))):
            net.zero_grad()
            other.zero_grad()
            loss_of(other(batch_of(rank, 1))).backward()
            assert equal_everywhere(gradients_of(other))
            assert net.module.first.weight.grad is None


class Detour(nn.Module):
    """Ranks may take different branches, so their gradient messages interleave differently with the exchanges of statistics."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norms = nn.Linear(5, 8), nn.ModuleList([norm(8), norm(8)])
        self.between, self.way, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, detour):
        x = self.norms[1](self.between(self.norms[0](self.first(x)).relu()))
        return self.last(x + self.way(x) if detour else x)


def check_statistics_do_not_meet_messages():
    net = Detour(SyncBatchNorm)
    options = [{"message_size": 20}, {"delay_allreduce": True}]
    models = [DistributedDataParallel(copy.deepcopy(net), **one) for one in options]
    for index in range(5):
        for model in models:
            model.zero_grad()
            loss_of(model(batch_of(dist.get_rank(), index), (index + dist.get_rank()) % 2 == 0)).backward()
        assert_near(*[gradients_of(model) for model in models], dist.get_world_size())
    of_torch = DistributedDataParallel(Detour(nn.SyncBatchNorm))
    assert of_torch._lanes[0].group is not None


def check_networks_whose_messages_cross():
    """Two networks in one backward: ranks that use different parameters send their messages in different orders."""
    nets = [Net(seed=one) for one in range(3)]
    for net in nets:
        net.norm.eval()
    modes = [{"message_size": 10}, {"message_size": 10}, {"delay_allreduce": True}]
    wrapped = [DistributedDataParallel(copy.deepcopy(net), **one) for net, one in zip(nets, modes, strict=True)]
    for index in range(6):
        x = batch_of(dist.get_rank(), index)
        for models in (wrapped, nets):
            for place, model in enumerate(models):
                model.zero_grad()
                (model if model is nets[place] else model.module).skip = (index + dist.get_rank() + place) % 2 == 0
            sum(loss_of(model(x)) for model in models).backward()
        for ours, alone in zip(wrapped, nets, strict=True):
            for one, other in zip(ours.parameters(), alone.parameters(), strict=True):
                mean = mean_over_ranks(torch.zeros_like(one) if other.grad is None else other.grad)
                torch.testing.assert_close(one.grad, mean)
    groups = [lane.group for model in wrapped for lane in model._lanes]
    assert len(set(groups)) == 2
    assert {timeout_of(group, torch.device("cpu")).total_seconds() for group in groups} == {88}
    others = [DistributedDataParallel(Net()) for _ in range(9)]
    assert len({model._lanes[0].group for model in others}) == 8  # groups are reused, so their number does not grow


def check_a_copy_on_one_rank():
    """Often only rank 0 copies the model, to average weights, so a copy must not wait for other ranks."""
    model = DistributedDataParallel(Detour(SyncBatchNorm), message_size=20)
    if dist.get_rank() == 0:
        with torch.no_grad():
            copy.deepcopy(model).eval()(batch_of(0, 0), detour=True)
    loss_of(copy.deepcopy(model)(batch_of(dist.get_rank(), 0), detour=True)).backward()


def check_reducer():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    net = Net(seed=rank)
    reducer = Reducer(net)
    assert equal_everywhere(net.parameters())
    for index in range(3):
        net.zero_grad()
        net.skip = index == 1
        alone = copy.deepcopy(net)
        for model in (net, alone):
            loss_of(model(batch_of(rank, index))).backward()
        reducer.reduce()
        for one, other in zip(net.parameters(), alone.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.allclose(one.grad, mean_over_ranks(other.grad), atol=1e-6)
    values = [torch.full((3,), float(rank)), torch.full((2,), 1.0, dtype=torch.float16), torch.full((2,), 2j * rank)]
    Reducer(values).reduce()
    assert values[2].tolist() == [1j * (world_size - 1)] * 2
    assert values[0].tolist() == [(world_size - 1) / 2] * 3
    assert values[1].tolist() == pytest.approx([1.0] * 2, rel=1e-3)
    with pytest.raises(ConfigError, match="a list of tensors"):
        Reducer([3])


def check_arguments():
    with warnings_of_fabricamp() as told:
        logging.getLogger("fabricamp").setLevel(logging.INFO)
        for _ in range(2):
            DistributedDataParallel(
                Net(), device_ids=[0], output_device=0, find_unused_parameters=True, gradient_as_bucket_view=False
            )
    assert len(told) == (dist.get_rank() == 0)
    assert not told or "device_ids, find_unused_parameters" in told[0]
    for options, error, words in (
        ({"shared_param": True}, ConfigError, "shared_param"),
        ({"delay_allreduce": True, "num_allreduce_streams": 2}, ConfigError, "num_allreduce_streams"),
        ({"delay_allreduce": True, "allreduce_trigger_params": ["last.bias"]}, ConfigError, "allreduce_trigger_params"),
        ({"allreduce_trigger_params": ["lost.bias"]}, ConfigError, "did you mean 'last.bias'"),
        ({"message_size": [0]}, ConfigError, r"message_size=\[0\]"),
        ({"process_group": 1}, ConfigError, "all processes"),
        ({"devices": [0]}, TypeError, "no argument 'devices'"),
        ({"delay_alreduce": True}, TypeError, "did you mean 'delay_allreduce'"),
    ):
        with pytest.raises(error, match=words):
            DistributedDataParallel(Net(), **options)
    with pytest.raises(DistributedError, match=r"ranks 0 and 1 built different modules.*first.weight \(6, 5\)"):
        DistributedDataParallel(Net(width=6 + (dist.get_rank() == 1)))


def script_checks(world_size, modes):
    for options in map(MODES.get, modes):
        check_steps(options)
        check_accumulation(options)
        check_unused(options)
        if "allreduce_trigger_params" not in options:
            check_two_backwards(options)
            check_changes(options)
    check_dtypes()
    check_sums_and_buffers()
    check_statistics_do_not_meet_messages()
    check_networks_whose_messages_cross()
    check_reducer()
    if world_size == 2:  # what does not depend on the number of ranks
        check_outputs()
        check_checkpointing()
        check_copies()
        check_a_copy_on_one_rank()
        check_arguments()


@pytest.mark.parametrize(
    ("world_size", "modes"),
    [(2, list(MODES)), (3, ["some", "delayed"]), pytest.param(3, list(MODES), marks=pytest.mark.slow)],
)
def test_scripts(world_size, modes):
    run_ranks(script_checks, world_size, world_size, modes, timeout=88.0)


def one_process():
    net, alone = DistributedDataParallel(Net()), Net()
    for model in (net, alone):
        loss_of(model(batch_of(0, 0))).backward()
    assert_equal(gradients_of(net), gradients_of(alone))
    Reducer(net).reduce()
    assert_equal(gradients_of(net), gradients_of(alone))


def test_one_process_is_enough():
    run_ranks(one_process, 1)


def test_without_a_process_group():
    with pytest.raises(ConfigError, match="init_process_group"):
        DistributedDataParallel(Net())
