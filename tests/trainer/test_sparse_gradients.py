"""Sparse gradients at every level, against loops by hand in fp64: clipping, and sums of micro-batches that stay sparse."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, TrainingModule
from fabricamp.errors import ConfigError
from fabricamp.gradients.memory import GradientMemory
from fabricamp.optimizers import FusedAdam
from fabricamp.precision import OptLevel
from fabricamp.precision.base import Clip
from fabricamp.precision.torch_updates import clip_gradients
from tests.distributed.ranks import run_ranks
from tests.pairs import pairs
from tests.small import quiet_trainer

LEVELS = [
    "O0",
    "O1",
    "O2",
    "O4",
    "O5",
    "bf16-mixed",
    "64-true",
]  # at O3 autograd cannot add sparse fp16 gradients on a CPU
ROWS = 20
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.05),
    "sparse adam": functools.partial(torch.optim.SparseAdam, lr=0.05),
}


class Net(TrainingModule):
    """A sparse embedding, and for optimizers that take dense gradients a trained layer behind it."""

    def __init__(self, kind="sgd", sparse=True):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table = nn.Embedding(ROWS, 4, sparse=sparse)
            self.last = nn.Linear(4, 1)
        self.kind = kind
        if kind == "sparse adam":
            self.last.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        (index,) = batch
        return self.last(self.table(index)).float().square().mean()

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return OPTIMIZERS[self.kind](trained) if self.kind in OPTIMIZERS else self.kind(trained)


def batches(size=4, steps=8):
    index = torch.randint(0, ROWS, (size * steps, 3), generator=torch.Generator().manual_seed(1))
    index[:, 1] = index[:, 0]  # each batch has rows twice
    return DataLoader(TensorDataset(index), batch_size=size)


def by_hand(kind, clip=None, algorithm="norm", accumulate=1):
    """The same run as a loop in fp64."""
    net = Net(kind).double()
    optimizer = net.configure_optimizers()
    for index, batch in enumerate(batches()):
        (net.training_step(batch, index) / accumulate).backward()
        if (index + 1) % accumulate:
            continue
        net.table.weight.grad = net.table.weight.grad.coalesce()
        gradients = [net.table.weight.grad.values()]
        gradients += [parameter.grad for parameter in net.last.parameters() if parameter.grad is not None]
        if clip is not None and algorithm == "value":
            for gradient in gradients:
                gradient.clamp_(-clip, clip)
        elif clip is not None:
            norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
            for gradient in gradients:
                gradient.mul_(min(1.0, float(clip / (norm + 1e-6))))
        optimizer.step()
        optimizer.zero_grad()
    return net


def level_of(name):
    return OptLevel(name, loss_scale=128.0) if name in ("O1", "O2") else name


def tolerance(name):
    return {"O0": 1e-5, "64-true": 1e-9}.get(name, 3e-2)


def assert_near(mine, theirs, tolerance):
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.detach().double(), other.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("level", "kind", "clip", "algorithm", "accumulate", "policy"),
    pairs(LEVELS, sorted(OPTIMIZERS), [0.01, 0.1, None], ["norm", "value"], [1, 2], [None, "skip"]),
)
def test_a_run_is_that_of_a_loop_by_hand(level, kind, clip, algorithm, accumulate, policy):
    net = Net(kind)
    trainer = quiet_trainer(
        max_epochs=1,
        precision=level_of(level),
        gradient_clip_val=clip,
        gradient_clip_algorithm=algorithm,
        accumulate_grad_batches=accumulate,
        nan_policy=policy,
    )
    trainer.fit(net, batches())
    assert_near(net.parameters(), by_hand(kind, clip, algorithm, accumulate).parameters(), tolerance(level))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dense=st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), max_size=3),
    rows=st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=3),
    limit=st.sampled_from([0.01, 0.5, 1e6]),
    algorithm=st.sampled_from(["norm", "value"]),
)
def test_sparse_gradients_are_clipped_as_dense_ones(dense, rows, limit, algorithm):
    """Rows that came several times count as one row with their sum."""
    generator = torch.Generator().manual_seed(len(rows))
    mixed = [nn.Parameter(torch.zeros(shape)) for shape in dense] + [nn.Parameter(torch.zeros(5, 2)) for _ in rows]
    reference = [nn.Parameter(torch.zeros_like(parameter)) for parameter in mixed]
    for parameter in mixed[: len(dense)]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for parameter, index in zip(mixed[len(dense) :], rows, strict=True):
        values = torch.randn(len(index), 2, generator=generator)
        parameter.grad = torch.sparse_coo_tensor([index], values, parameter.shape)
    for one, other in zip(mixed, reference, strict=True):
        other.grad = one.grad.to_dense().clone()
    if algorithm == "norm":
        torch.nn.utils.clip_grad_norm_(reference, limit)
    else:
        torch.nn.utils.clip_grad_value_(reference, limit)
    clip_gradients(torch.optim.SGD(mixed), Clip(limit, algorithm))
    for one, other in zip(mixed, reference, strict=True):
        torch.testing.assert_close(one.grad.to_dense(), other.grad, rtol=1e-5, atol=1e-7)
    assert all(parameter.grad.is_sparse for parameter in mixed[len(dense) :])


def test_dense_gradients_are_clipped_by_torchs_function_to_its_bits():
    mine = Net(sparse=False)
    theirs = Net(sparse=False)
    for net in (mine, theirs):
        net.training_step(next(iter(batches())), 0).backward()
    mine.last.bias.grad = None
    theirs.last.bias.grad = None
    clip_gradients(mine.configure_optimizers(), Clip(0.01))
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_a_checkpoint_within_an_accumulation_resumes_to_the_same_bits(tmp_path, level, kind):
    path = tmp_path / "within.ckpt"

    class Save(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 5:
                trainer.save_checkpoint(path)

    options = {"max_epochs": 1, "precision": level_of(level), "accumulate_grad_batches": 4, "gradient_clip_val": 0.1}
    straight = Net(kind)
    quiet_trainer(callbacks=[Save()], **options).fit(straight, batches())
    resumed = Net(kind)
    quiet_trainer(**options).fit(resumed, batches(), ckpt_path=path)
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_only_what_torchs_optimizer_refuses_is_refused(level):
    """Adam takes no sparse gradients, with and without accumulation; fused optimizers take their dense sums."""
    adam = functools.partial(torch.optim.Adam, lr=0.1)
    for accumulate in (1, 2):
        trainer = quiet_trainer(max_steps=1, precision=level_of(level), accumulate_grad_batches=accumulate)
        with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
            trainer.fit(Net(adam), batches())
    fused = functools.partial(FusedAdam, lr=0.1)
    with pytest.raises(ConfigError, match="FusedAdam got a sparse gradient"):
        quiet_trainer(max_steps=1, precision=level).fit(Net(fused), batches())
    if level == "O2":
        sparse = Net(fused)
        dense = Net(fused, sparse=False)
        for net in (sparse, dense):
            quiet_trainer(max_epochs=1, precision=level_of(level), accumulate_grad_batches=2).fit(net, batches())
        assert_near(sparse.parameters(), [one.detach().double() for one in dense.parameters()], 1e-5)


def test_a_sum_is_sparse_until_a_dense_gradient_comes():
    weight = nn.Parameter(torch.zeros(5, 2, dtype=torch.float16))
    other = nn.Parameter(torch.zeros(3))
    memory = GradientMemory([weight, other], sums=True, keeps_sparse=True)
    values = torch.tensor([[2048.0, 2048.0], [1.0, 1.0], [2048.0, 2048.0]], dtype=torch.float16)
    for _ in range(3):
        weight.grad = torch.sparse_coo_tensor([[1, 1, 4]], values, weight.shape)
        memory.add()
    total = memory.local().tensors[0]
    assert total.is_sparse
    assert total.dtype == torch.float32
    assert total.coalesce().values().tolist() == [[3.0 * 2049] * 2, [3.0 * 2048] * 2]
    memory.hold([other, weight])
    assert memory.local().tensors[0] is None
    assert torch.equal(memory.local().tensors[1].to_dense(), total.to_dense())
    weight.grad = torch.ones(5, 2, dtype=torch.float16)
    memory.add()
    assert torch.equal(memory.local().tensors[1], total.to_dense() + 1)
    weight.grad = torch.sparse_coo_tensor([[0]], values[:1], weight.shape)
    memory.add()
    assert memory.local().tensors[1][0].tolist() == [2049.0, 2049.0]  # a row of ones before
    memory.clear()
    assert memory.local().tensors == [None, None]


def test_each_addend_is_multiplied_before_it_is_added():
    weight = nn.Parameter(torch.zeros(5, 2))
    memory = GradientMemory([weight], sums=True, keeps_sparse=True)
    for factor in (0.5, 4.0):
        weight.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), weight.shape)
        (values,) = memory.add(torch.tensor(factor))
        assert values.tolist() == [[2.0, 2.0]]
    assert memory.local().tensors[0].to_dense()[1].tolist() == [9.0, 9.0]


def test_sparse_sums_are_dense_in_an_exchange_and_where_dense_ones_are_asked_for():
    def added(**options):
        weight = nn.Parameter(torch.zeros(5, 2))
        memory = GradientMemory([weight], sums=True, **options)
        weight.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), weight.shape)
        memory.add()
        return memory

    saved = added(keeps_sparse=True)
    assert saved.fits(saved.tensors, saved.sparse)
    assert not saved.fits(saved.tensors, {1: saved.sparse[0]})
    for options in ({"keeps_sparse": True}, {}):
        memory = GradientMemory([nn.Parameter(torch.zeros(5, 2))], sums=True, **options)
        memory.take(saved.tensors, saved.sparse)
        assert memory.local().tensors[0].is_sparse == bool(options)
        assert memory.local().tensors[0].to_dense()[1].tolist() == [2.0, 2.0]
    assert not added().local().tensors[0].is_sparse


def of_two_ranks():
    for level, kind, clip, accumulate in pairs(["O0", "O1", "O5"], ["sgd", "sparse adam"], [None, 0.1], [1, 2]):
        net = Net(kind)
        trainer = quiet_trainer(
            devices=2,
            strategy="ddp",
            max_epochs=1,
            precision=level_of(level),
            gradient_clip_val=clip,
            accumulate_grad_batches=accumulate,
        )
        loader = DataLoader(batches().dataset, batch_size=2)
        if (level, kind, accumulate) == ("O5", "sparse adam", 2):
            with pytest.raises(ConfigError, match="SparseAdam updates from sparse gradients only"):
                trainer.fit(net, loader)
            continue
        trainer.fit(net, loader)
        assert_near(net.parameters(), by_hand(kind, clip, accumulate=accumulate).parameters(), tolerance(level))


def test_two_ranks():
    run_ranks(of_two_ranks, 2, backend=None)
