"""SyncBatchNorm over several ranks equals BatchNorm over the joined batch, by every exchange; and the case of a missing rank."""

from __future__ import annotations

import copy
import datetime as dt
import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fabricamp.errors import ConfigError, DistributedError
from fabricamp.nn import SyncBatchNorm, create_syncbn_process_group
from fabricamp.ops import peer_memory
from fabricamp.ops.batch_norm import kernels as batch_norm_geometry
from fabricamp.ops.batch_norm.exchange import VARIABLE
from tests.cuda_on_cpu.compiler import waiting
from tests.cuda_on_cpu.shared_memory import use_kernels
from tests.distributed.ranks import import_compiler, run_ranks
from tests.small import Classifier, loader, quiet_trainer

HALF = torch.float16


def joined(counts, shape, dtype=torch.float32):
    """Returns input, residual and incoming gradient of the joined batch, equal on every rank, and the slice of this rank."""
    generator = torch.Generator().manual_seed(sum(counts) + shape[0])
    whole = (sum(counts), *shape)
    rank = dist.get_rank()
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    tensors = [torch.randn(whole, generator=generator).mul(2).add(1).to(dtype) for _ in range(3)]
    return tensors, own


def expected_of(layer, x, z, dy):
    """Returns the results of BatchNorm over the joined batch, in fp64."""
    layer = copy.deepcopy(layer).double()
    x, z = (None if one is None else one.double().requires_grad_() for one in (x, z))
    y = F.batch_norm(
        x, layer.running_mean, layer.running_var, layer.weight, layer.bias, True, layer.momentum, layer.eps
    )
    y = y if z is None else y + z
    if layer.fuse_relu:
        y = y * (y > 0)
    y.backward(dy.double())
    return y.detach(), x.grad, None if z is None else z.grad, layer


def near(found, expected, dtype=torch.float32):
    error = (found.double().cpu() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < {torch.float32: 1e-5, HALF: 1e-3}[dtype], float(error)


def check(layer, counts, shape, *, dtype=torch.float32, residual=False, rows=False, device="cpu"):
    """Checks that a step of ``layer`` on this rank's part of a batch equals BatchNorm's step on the full batch."""
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2, layer.num_features))
        layer.bias.copy_(torch.linspace(-1, 1, layer.num_features))
    (x, z, dy), own = joined(counts, shape, dtype)
    before = copy.deepcopy(layer).cpu()
    y, dx, dz, after = expected_of(before, x, z if residual else None, dy)

    def part(tensor):
        tensor = tensor[own].to(device)
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if rows else tensor.contiguous()

    leaf, extra = part(x).requires_grad_(), part(z).requires_grad_() if residual else None
    layer.zero_grad()
    found = layer(leaf, extra)
    found.backward(part(dy))
    if counts[dist.get_rank()]:
        near(found.detach(), y[own], dtype)
        near(leaf.grad, dx[own], dtype)
        if residual:
            near(extra.grad, dz[own], dtype)
    for name in ("weight", "bias"):
        gradient = getattr(layer, name).grad.clone()
        dist.all_reduce(gradient)
        near(gradient, getattr(after, name).grad, dtype)
    near(layer.running_mean, after.running_mean, dtype)
    near(layer.running_var, after.running_var, dtype)
    everyone = [torch.empty_like(layer.running_var) for _ in counts]
    dist.all_gather(everyone, layer.running_var)
    assert all(torch.equal(one, everyone[0]) for one in everyone)


def reference_checks(*all_counts):
    for counts in all_counts:
        check(SyncBatchNorm(5), counts, (5,))
        check(SyncBatchNorm(6, fuse_relu=True), counts, (6, 3, 5), residual=True)
        check(SyncBatchNorm(6, momentum=0.3), counts, (6, 2, 3, 2), dtype=HALF, rows=True)
    layer = SyncBatchNorm(5)
    check(layer, all_counts[0], (5,))
    check(layer, all_counts[-1], (5, 7))  # another shape, and running values after the first step
    assert layer.exchanges == {"cpu": "collective: there are no kernels for cpu"}


@pytest.mark.parametrize("counts", [[(3, 3), (1, 4), (5, 0)], [(2, 3, 1), (0, 4, 0)], [(1, 2, 1, 3)]], ids=str)
def test_equals_batchnorm_over_the_joined_batch(counts):
    run_ranks(reference_checks, len(counts[0]), *counts)


def kernel_checks(exchange, reverse, *all_counts):
    """Alternates between memory layouts in one layer, with different tilings of its channels."""
    use_kernels(reverse)
    if reverse:
        batch_norm_geometry.Geometry._microseconds = lambda _, tiling, _blocks: -tiling.splits  # most splits
    for counts in all_counts:
        for residual in (False, True):
            layer = SyncBatchNorm(20, fuse_relu=residual, exchange=exchange)
            check(layer, counts, (20, 8), rows=residual, residual=residual)
            check(layer, counts, (20, 343), rows=True, residual=residual)  # a large number of samples per channel
            check(layer, counts, (20, 8), rows=residual, residual=residual)
    assert layer.exchanges["cpu"].startswith("peer" if exchange == "peer" else "collective: asked for")


@pytest.mark.parametrize(
    ("exchange", "reverse", "counts"),
    [
        ("peer", False, [(3, 3), (1, 4), (5, 0)]),
        ("peer", True, [(2, 3, 1), (0, 4, 0)]),
        ("peer", False, [(2, 1, 0, 3, 1)]),  # more ranks than a kernel reads at once
        ("collective", False, [(3, 3), (1, 4), (5, 0)]),
    ],
)
def test_kernels_equal_batchnorm_over_the_joined_batch(exchange, reverse, counts):
    run_ranks(kernel_checks, len(counts[0]), exchange, reverse, *counts)


def many_rounds():
    """Several layers, accumulation, evaluations in between, inputs without gradients: no round may read another round's words."""
    use_kernels()
    rank = dist.get_rank()
    peer, other = (
        nn.Sequential(*[SyncBatchNorm(4, exchange=exchange) for _ in range(3)]) for exchange in ("peer", "collective")
    )
    generator = torch.Generator().manual_seed(rank)
    for round_ in range(12):
        x = torch.randn(2 + rank, 4, generator=generator) + round_
        if round_ % 4 == 3 and rank == 0:
            time.sleep(0.05)  # a slow rank
        for model in (peer, other):
            model.train()
            model(x).square().sum().backward()  # the first layer's input needs no gradient
            model(x[:1].clone().requires_grad_()).sum().backward()
            with torch.no_grad():
                model(x)
                if rank == 0:
                    model.eval()(x)
    for one, two in zip(peer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-4)
    for one, two in zip(peer.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    del peer
    copied = copy.deepcopy(other[0]).train()  # a copy is a separate layer
    copied(x)
    assert copied._exchange.key != other[0]._exchange.key


USES = {
    "twice": lambda layer, x: layer(x) + layer(x.flip(-1) * 1.5),
    "checkpointed": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "re-entrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "a forward between": lambda layer, x: layer(x) + layer(-x).detach(),
    "no gradient of the input": lambda layer, x: layer(x.detach()),
}
LAYERS = {
    "plain": {},
    "averaged": {"momentum": None},
    "without running values": {"track_running_stats": False},
    "without weights": {"affine": False},
    "frozen": {},
    "switched off": {},
}


def used(exchange, counts):
    """Compares every way to call a layer with BatchNorm on the joined batch."""
    if exchange != "reference":
        use_kernels()
    apart = []
    for (name, options), (use, call) in itertools.product(LAYERS.items(), USES.items()):
        if name == "without weights" and use == "no gradient of the input":
            continue
        layer = SyncBatchNorm(4, **options, exchange=None if exchange == "reference" else exchange)
        theirs = nn.BatchNorm1d(4, **options).double()
        for one in (layer, theirs):
            if name == "frozen":
                one.weight.requires_grad_(requires_grad=False)
            one.track_running_stats &= name != "switched off"
        for _ in range(2):
            (x, _, dy), own = joined(counts, (4, 5))
            leaf, whole = x[own].clone().requires_grad_(), x.double().requires_grad_()
            call(layer, leaf).backward(dy[own])
            call(theirs, whole).backward(dy.double())
        found, expected = [leaf.grad], [None if whole.grad is None else whole.grad[own]]
        for one, other in zip(layer.parameters(), theirs.parameters(), strict=True):
            if one.grad is not None:
                dist.all_reduce(one.grad)
            found.append(one.grad)
            expected.append(other.grad)
        found, expected = [*found, *layer.buffers()], [*expected, *theirs.buffers()]
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            if (one is None) != (other is None) or not (
                one is None or torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-4)
            ):
                apart.append((name, use, place))
    return apart


@pytest.mark.parametrize(
    ("exchange", "counts"), [("reference", (2, 3)), ("reference", (1, 0, 4)), ("collective", (3, 1)), ("peer", (1, 3))]
)
def test_however_a_step_uses_the_layer(exchange, counts):
    assert run_ranks(used, len(counts), exchange, counts) == [[]] * len(counts)


def test_many_rounds_by_peer_memory():
    run_ranks(many_rounds, 2)


def grouped():
    group = create_syncbn_process_group(2)
    rank = dist.get_rank()
    pair = rank // 2
    x = torch.randn(4, 3, 3, 5, generator=torch.Generator().manual_seed(1))
    layer = SyncBatchNorm(3, process_group=group)
    y = layer(x[rank])
    expected = nn.BatchNorm1d(3)(x[2 * pair : 2 * pair + 2].flatten(0, 1)).unflatten(0, (2, 3))[rank % 2]
    torch.testing.assert_close(y, expected)
    assert copy.deepcopy(layer).process_group is group
    waits = [peer_memory.timeout_of(one, torch.device("cpu")) for one in (group, dist.group.WORLD)]
    assert waits == [dt.timedelta(seconds=77)] * 2
    assert create_syncbn_process_group(0) is None
    with pytest.raises(ConfigError, match="group_size=3 does not divide the 4 ranks; it can be 1, 2, 4, or 0"):
        create_syncbn_process_group(3)
    alone = SyncBatchNorm(3, process_group=create_syncbn_process_group(1))
    torch.testing.assert_close(alone(x[rank]), nn.BatchNorm1d(3)(x[rank]))
    assert alone.exchanges == {"cpu": "alone: its group has one rank"}
    strangers = dist.new_group([0])
    if rank:
        with pytest.raises(ConfigError, match="is not in this SyncBatchNorm's process_group"):
            SyncBatchNorm(3, process_group=strangers or dist.GroupMember.NON_GROUP_MEMBER)(x[rank])


def test_process_groups():
    run_ranks(grouped, 4, timeout=77.0)


def overridden():
    os.environ[VARIABLE] = "peer"
    with pytest.raises(ConfigError, match="'peer' of a SyncBatchNorm cannot work here: there are no kernels for cpu"):
        SyncBatchNorm(3)(torch.randn(2, 3))
    layer = SyncBatchNorm(3, exchange="collective")
    layer(torch.randn(2, 3))
    assert layer.exchanges == {"cpu": "collective: asked for"}
    os.environ[VARIABLE] = "per"
    with pytest.raises(ConfigError, match="FABRICAMP_SYNCBN_EXCHANGE='per'.*did you mean 'peer'"):
        SyncBatchNorm(3)(torch.randn(2, 3))
    os.environ[VARIABLE] = ""


def test_the_exchange_can_be_chosen():
    with pytest.raises(ConfigError, match="exchange='nccl'"):
        SyncBatchNorm(3, exchange="nccl")
    run_ranks(overridden, 2)


def somebody_is_missing():
    use_kernels()
    group = dist.new_group(timeout=dt.timedelta(seconds=100))
    layer = SyncBatchNorm(256, process_group=group, exchange="peer")
    x = torch.randn(5, 256)
    layer(x)
    peer_memory.check_peers()
    if dist.get_rank() == 1:
        return None
    (plan,) = layer._exchange.plans.values()
    assert plan.forward_call.timeout == 100 * 10**9
    plan.forward_call.timeout = 10**9  # the ranks have synchronised once, so a second is enough
    before = layer.running_mean.clone()
    waiting.clear()
    began = time.monotonic()
    layer(x)  # waits, and returns
    waited = time.monotonic() - began
    blocks = dict(waiting)
    assert torch.equal(layer.running_mean, before)
    waiting.clear()
    with pytest.raises(DistributedError, match="rank 0 waited 100 s in a kernel .* for rank 1") as error:
        layer(x)
    with pytest.raises(DistributedError):
        peer_memory.check_peers()
    assert not waiting  # no kernel is launched after the error
    return waited, blocks, str(error.value)


def test_a_missing_rank_is_not_waited_for_for_ever():
    found = run_ranks(somebody_is_missing, 2)
    waited, blocks, words = found[0]
    assert waited > 0.9
    assert blocks == {"statistics": 2}
    assert "longer timeout" in words


def models_in_turn(device, number_of_models):
    """Creates many small models, each freed before the next but one is made; returns the sizes of the mapped memory blocks."""
    allocate, mapped = peer_memory.ALLOCATORS[device.type], []

    def counted(words, group, on):
        mapped.append(words)
        return allocate(words, group, on)

    peer_memory.ALLOCATORS[device.type] = counted
    rank, kept = dist.get_rank(), None
    generator = torch.Generator().manual_seed(1)
    for number in range(number_of_models):
        channels = 384 + 32 * (number % 7)
        layer = SyncBatchNorm(channels, exchange="peer", device=device)
        whole = torch.randn(4, channels, generator=generator)
        own = slice(2 * rank, 2 * rank + 2)
        x = whole[own].to(device).requires_grad_()
        theirs = whole.clone().requires_grad_()
        expected = F.batch_norm(theirs, None, None, training=True)
        expected.pow(3).sum().backward()
        for step in range(1 + number % 3):  # leaves the words of one or several exchanges in memory
            if number and rank == number % 2:
                time.sleep(0.01)  # an early rank must not read words of an earlier model
            x.grad = None
            y = layer(x)
            torch.testing.assert_close(y.detach().cpu(), expected[own].detach(), rtol=1e-4, atol=1e-4)
            if step:
                y.pow(3).sum().backward()
                torch.testing.assert_close(x.grad.cpu(), theirs.grad[own], rtol=1e-3, atol=1e-3)
        if rank == number % 2:
            kept = layer, y  # keeps the model alive on one rank only
    del kept
    peer_memory.check_peers()
    return mapped


def models_on_the_cpu():
    use_kernels()
    peer_memory._BLOCK_WORDS = 2**15
    return models_in_turn(torch.device("cpu"), 30)


def test_memory_of_models_that_are_gone_is_used_again():
    found = run_ranks(models_on_the_cpu, 2)
    assert found == [[2**15]] * 2  # one block; a model uses a sixth of it at most


def one_comes_alone(reverse):
    """Returns which kernels wait for a missing rank, and in how many of their blocks."""
    use_kernels(reverse)
    met = []
    for shape in ((40, 256), (3, 256, 8)):
        layer = SyncBatchNorm(256, process_group=dist.new_group(), exchange="peer")
        x = torch.randn(shape, requires_grad=True)
        met.append((layer, x, layer(x)))
    found = []
    for layer, x, y in met if dist.get_rank() == 0 else ():
        (plan,) = layer._exchange.plans.values()
        plan.forward_call.timeout = plan.backward_call.timeout = int(1e8)  # 0.1 s: the ranks have synchronised
        waiting.clear()
        alone = layer(x)
        y.sum().backward()
        assert alone.isnan().all()
        assert x.grad.isnan().all()
        found.append(dict(waiting))
    return found


@pytest.mark.parametrize("reverse", [False, True])
def test_few_blocks_wait_and_none_of_the_large_kernels(reverse):
    """A kernel that waited in every block would fill the GPU, and a collective that the late rank waits for could not start."""
    found, _ = run_ranks(one_comes_alone, 2, reverse)
    assert found == [{"statistics": 2, "reduce": 2}] * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), SyncBatchNorm(8), SyncBatchNorm(8, fuse_relu=True), nn.Linear(8, 3), nn.BatchNorm1d(3)
        )
        self.residual = SyncBatchNorm(3, momentum=None)

    def forward(self, x):
        y = self.layers(x)
        return self.residual(y, y)


def compiled():
    torch.manual_seed(0)
    eager = Net()
    twin = copy.deepcopy(eager)
    step = torch.compile(twin, backend="aot_eager", fullgraph=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        x = torch.randn(3 + dist.get_rank(), 6, generator=generator)
        outputs = []
        for model in (eager, step):
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            y.square().sum().backward()
            outputs.append((y.detach(), leaf.grad))
        torch.testing.assert_close(outputs[0], outputs[1])
    for one, other in zip(eager.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(eager.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_without_a_break():
    import_compiler()
    run_ranks(compiled, 2)


class Normalised(Classifier):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), SyncBatchNorm(16, fuse_relu=True), nn.Linear(16, 3, bias=False)
        )


def trained(strategy, precision, batch_size):
    module = Normalised()
    layers = list(module.net)
    seen = []
    module.on_train_start = lambda: seen.append([type(layer) for layer in module.net])
    quiet_trainer(strategy=strategy, devices="auto", precision=precision, max_epochs=2, sync_batchnorm=True).fit(
        module, loader(32, batch_size)
    )
    assert [one is other for one, other in zip(module.net, layers, strict=True)] == [True] * 4  # the original layers
    return seen, {name: value.clone() for name, value in module.state_dict().items()}


def trained_on_ranks():
    return [trained("ddp", precision, 4) for precision in ("O0", "O2")]


def test_a_trainer_synchronises_until_the_end_of_the_fit():
    """Two ranks with half batches equal one process with full batches; the user's own SyncBatchNorm layers stay unchanged."""
    ranks = run_ranks(trained_on_ranks, 2)
    for index, (precision, tolerance) in enumerate((("O0", 1e-5), ("O2", 2e-2))):
        (seen,), alone = trained("single", precision, 8)
        assert seen[1] is nn.BatchNorm1d
        for found in ranks:
            (seen,), weights = found[index]
            assert seen == [nn.Linear, SyncBatchNorm, SyncBatchNorm, nn.Linear]
            for name, value in weights.items():
                # The gradient of a bias before a BatchNorm is only rounding noise.
                if name != "net.0.bias":
                    torch.testing.assert_close(value, alone[name], rtol=tolerance, atol=tolerance, msg=name)
