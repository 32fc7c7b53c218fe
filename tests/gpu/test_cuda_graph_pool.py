"""What outlives an eager step that ran in the graphs' memory keeps its values: no replay writes to it."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fabricamp import Callback, CudaGraph, TrainingModule
from fabricamp.optimizers import FusedAdam
from fabricamp.torch_private import segments_of_pool
from tests.inside import captured_steps, graph_update
from tests.small import quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GRAPH = CudaGraph(warmup=4)
FULL, SHORT = 64, 24
ROWS = [FULL] * 8 + [SHORT] + [FULL] * 6 + [SHORT] + [FULL] * 6
"""Short batches are eager steps between replays."""


class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(256, 512)
        self.second = torch.nn.Linear(512, 512)
        self.late = torch.nn.Linear(512, 512)
        """Has gradients in short batches if ``uses_late``."""
        self.uses_late = False

    def training_step(self, batch, batch_idx):
        hidden = torch.relu(self.first(batch))
        hidden = torch.relu(self.second(hidden))
        if self.uses_late and batch.shape[0] == SHORT:
            hidden = hidden + self.late(hidden)
        return {"loss": F.mse_loss(hidden[:, :256], batch), "scores": hidden}

    def validation_step(self, batch, batch_idx):
        return {"scores": self.second(torch.relu(self.first(batch)))}

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=1e-3)


class Kept:
    """Tensors, each with a copy of its values; no attribute of a callback or module changes with it."""

    def __init__(self):
        self.pairs = []

    def add(self, tensor):
        self.pairs.append((tensor, tensor.detach().clone()))

    def check(self, count):
        torch.cuda.synchronize()
        assert len(self.pairs) == count
        for number, (tensor, copy) in enumerate(self.pairs):
            assert torch.equal(tensor, copy), number


class Looks(Callback):
    """Keeps the number of replays, of whichever graph, and whether eager steps still use the graphs' memory at the end."""

    def __init__(self):
        self.replays = 0
        self.lends = True

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        update = graph_update(trainer)
        if update is not None:
            self.replays = max(self.replays, 0, *[one.replays for one in captured_steps(update).values()])
            self.lends = update.graphs.lends


def batches(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return DataLoader([torch.randn(one, 256, generator=generator) for one in rows], batch_size=None)


def fit(graph, module, *callbacks, validation=None, rows=ROWS, precision="O5", **options):
    looks = Looks()
    given = {"max_epochs": 1, "limit_val_batches": 0, **options}
    trainer = quiet_trainer(
        accelerator="gpu", devices=1, precision=precision, cuda_graph=graph, callbacks=[looks, *callbacks], **given
    )
    trainer.fit(module, batches(rows), validation)
    return looks


def same(one, other):
    for (name, left), right in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(left, right), name


def eager(module=Net, **options):
    module = module()
    fit(False, module, **options)
    return module


class KeepsOutputs(Callback):
    def __init__(self):
        self.kept = Kept()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.kept.add(outputs["loss"])
        self.kept.add(outputs["scores"])


def test_outputs_that_a_hook_keeps():
    keeps, module = KeepsOutputs(), Net()
    looks = fit(GRAPH, module, keeps)
    keeps.kept.check(2 * len(ROWS))
    same(module, eager())
    assert looks.lends
    assert looks.replays == ROWS.count(FULL) - 3


class KeepsGradients(Callback):
    def __init__(self):
        self.kept = Kept()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch.shape[0] == SHORT:
            self.kept.add(module.second.weight.grad)


def test_gradients_of_an_eager_step_that_a_hook_keeps():
    keeps, module = KeepsGradients(), Net()
    looks = fit(GRAPH, module, keeps, precision="O4")
    keeps.kept.check(2)
    same(module, eager(precision="O4"))
    assert not looks.lends
    assert looks.replays > 1  # captured again


class KeepsLosses(Callback):
    """Keeps the gradients of short batches: tensors that live in the lent memory."""

    def __init__(self):
        self.kept = Kept()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch.shape[0] == SHORT and batch_idx < 11:  # the next short batch is captured
            self.kept.add(module.second.weight.grad)


def test_a_second_shape_is_captured_while_a_tensor_of_an_eager_step_is_kept():
    rows = [FULL] * 8 + [SHORT] * 8 + [FULL] * 8
    keeps, module = KeepsLosses(), Net()
    looks = fit(GRAPH, module, keeps, rows=rows, precision="O4")
    keeps.kept.check(3)
    same(module, eager(rows=rows, precision="O4"))
    assert not looks.lends
    assert looks.replays > 1


class KeepsWithin(Net):
    """Keeps a tensor of each eager step in an object of its own, where no watch sees it."""

    def __init__(self, what="loss", rows=(FULL, SHORT)):
        super().__init__()
        self.kept = Kept()
        self.what = what
        self.rows = rows

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        if batch.shape[0] in self.rows and not torch.cuda.is_current_stream_capturing():
            self.kept.add(outputs[self.what])
        return outputs


@pytest.mark.parametrize("what", ["loss", "scores"])
def test_what_a_short_batch_keeps_with_its_graph(what):
    module = KeepsWithin(what, rows=(SHORT,))
    looks = fit(GRAPH, module)
    module.kept.check(2)
    same(module, eager())
    assert not looks.lends
    assert looks.replays > 1


def test_what_the_compared_step_keeps():
    """The comparison of the first replay runs an eager step once more."""
    module = KeepsWithin()
    looks = fit(GRAPH, module, rows=[FULL] * 16)
    assert len(module.kept.pairs) > 3
    module.kept.check(len(module.kept.pairs))
    same(module, eager(rows=[FULL] * 16))
    assert not looks.lends
    assert looks.replays > 1


class Last(Net):
    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        if batch.shape[0] == SHORT:
            self.last = outputs["loss"].detach()
        return outputs


class ReadsLast(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if hasattr(module, "last"):
            self.seen.append(module.last.clone())


def test_an_attribute_with_the_last_loss():
    rows = [FULL] * 8 + [SHORT] + [FULL] * 12
    seen = []
    for graph in (False, GRAPH):
        reads, module = ReadsLast(), Last()
        looks = fit(graph, module, reads, rows=rows)
        seen.append((torch.stack(reads.seen), module))
    assert torch.equal(seen[0][0], seen[1][0])
    same(seen[0][1], seen[1][1])
    assert looks.replays > 1


class Late(Net):
    def __init__(self):
        super().__init__()
        self.uses_late = True

    def configure_optimizers(self):
        return torch.optim.AdamW(
            self.parameters(), lr=1e-3, capturable=True
        )  # a fused one refuses new state beside a graph


def test_optimizer_state_that_a_short_batch_creates():
    modules, states = [], []
    for graph in (False, GRAPH):
        module = Late()
        fit(graph, module, KeepsState(states), precision="O4")
        modules.append(module)
    same(*modules)
    assert len(states[0]) == len(states[1]) > 0
    assert all(map(torch.equal, *states))


class KeepsState(Callback):
    def __init__(self, states):
        self.states = states

    def on_train_end(self, trainer, module):
        state = trainer.optimizers[0].state
        self.states.append(
            [value.clone() for each in state.values() for value in each.values() if torch.is_tensor(value)]
        )


class KeepsPredictions(Callback):
    def __init__(self):
        self.kept = Kept()

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.kept.add(outputs["scores"])


def test_outputs_of_validations_between_replays():
    options = {"validation": batches([FULL, SHORT]), "limit_val_batches": 1.0, "val_check_interval": 5}
    options["num_sanity_val_steps"] = 0
    keeps, module = KeepsPredictions(), Net()
    looks = fit(GRAPH, module, keeps, **options)
    keeps.kept.check(2 * (len(ROWS) // 5))
    same(module, eager(**options))
    assert looks.replays == ROWS.count(FULL) - 3


class Fails(KeepsWithin):
    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        if batch.shape[0] == SHORT:
            raise ValueError("a short batch")
        return outputs


def test_after_an_exception_memory_is_allocated_outside_and_kept_tensors_stay():
    module = Fails("scores", rows=(SHORT,))
    with pytest.raises(ValueError, match="a short batch"):
        fit(GRAPH, module)
    fresh = torch.ones(2**20, device="cuda")
    (segment,) = [
        one
        for one in torch.cuda.memory_snapshot()
        if one["address"] <= fresh.data_ptr() < one["address"] + one["total_size"]
    ]
    assert segment["segment_pool_id"] == (0, 0)
    fit(GRAPH, Net())
    gc.collect()
    torch.cuda.empty_cache()
    module.kept.check(1)


@pytest.mark.parametrize("steps", [1, 3])
def test_several_steps_a_launch_and_several_shapes_share_the_memory(steps):
    """The graphs of all shapes, and of several steps, are in one pool, and none of them disturbs the others' statistics."""
    graph = CudaGraph(warmup=4, steps=steps)
    rows = ([FULL] * 7 + [SHORT] + [48] * 4) * 8
    module = Net()

    class Pools(Callback):
        def on_train_end(self, trainer, module):
            update = graph_update(trainer)
            self.graphs = len(captured_steps(update))
            self.pools = {one["segment_pool_id"] for one in torch.cuda.memory_snapshot()} - before - {(0, 0)}

    gc.collect()
    torch.cuda.empty_cache()
    before = {one["segment_pool_id"] for one in torch.cuda.memory_snapshot()}
    pools = Pools()
    given = {"max_epochs": 1, "limit_val_batches": 0}
    trainer = quiet_trainer(accelerator="gpu", devices=1, precision="O5", cuda_graph=graph, callbacks=[pools], **given)
    trainer.fit(module, batches(rows))
    same(module, eager(rows=rows))
    assert pools.graphs == 3
    assert len(pools.pools) == 1


def test_the_workspaces_of_cublas_are_not_in_the_graphs_memory():
    """torch keeps them for good: between the tensors of a step they would split a large block that the step frees."""

    def allocated():
        """Returns the allocated bytes of the ordinary pool, and of all other pools."""
        found = {True: 0, False: 0}
        for segment in torch.cuda.memory_snapshot():
            found[segment["segment_pool_id"] == (0, 0)] += segment["allocated_size"]
        return found[True], found[False]

    class ClearsWorkspaces(Callback):
        def on_train_end(self, trainer, module):
            torch.cuda.synchronize()
            before = allocated()
            torch._C._cuda_clearCublasWorkspaces()
            after = allocated()
            self.freed = [one - other for one, other in zip(before, after, strict=True)]

    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # those of earlier tests, for the same stream
    clears = ClearsWorkspaces()
    looks = fit(GRAPH, Net(), clears)
    assert looks.replays > 1
    ordinary, graphs = clears.freed
    assert ordinary > 0
    assert graphs == 0


class Number(int):
    """As the number of a late pool, an object of its own."""


def test_a_look_at_a_pool_gives_up_no_reference_to_its_id():
    """From the 257th pool on, torch's own look freed the numbers of the id while they were in use, and later objects broke."""
    pool = torch.cuda.MemPool()
    name = (Number(pool.id[0]), Number(pool.id[1]))
    before = [sys.getrefcount(number) for number in name]
    with torch.cuda.use_mem_pool(pool):
        kept = torch.ones(1 << 20, device="cuda")
    looks = [segments_of_pool(name) for _ in range(5)]
    assert [sys.getrefcount(number) for number in name] == before
    of_all = torch.cuda.memory_snapshot(include_traces=False)
    assert looks == [[segment for segment in of_all if segment["segment_pool_id"] == pool.id]] * 5
    assert kept.data_ptr() == looks[0][0]["address"]


def test_a_look_at_each_of_many_pools():
    pools = [torch.cuda.MemPool() for _ in range(300)]
    ids = [pool.id for pool in pools]
    for _ in range(20):
        assert all(segments_of_pool(name) == [] for name in ids)
    assert [pool.id for pool in pools] == ids
