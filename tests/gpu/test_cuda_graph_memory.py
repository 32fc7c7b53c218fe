"""Captures that would not fit into memory are refused before they begin, with the number of bytes, on a filled card."""

from __future__ import annotations

import collections
import gc

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fabricamp import Callback, ConfigError, CudaGraph, TrainingModule
from fabricamp.optimizers import FusedSGD
from tests.inside import captured_steps, graph_update, session
from tests.small import quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ROWS = 64


class Wide(TrainingModule):
    """Has few weights, and activations of 2 MiB per row."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2**19))

    def training_step(self, batch, batch_idx):
        hidden = batch * self.weight
        return (hidden * hidden).mean()

    def validation_step(self, batch, batch_idx):
        return {"scores": (batch * self.weight * 2 + 1).sum()}

    def configure_optimizers(self):
        return FusedSGD(self.parameters(), lr=0.1)


class Runs(Callback):
    """Records the number of replays after each batch."""

    def __init__(self):
        self.replays = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        update = graph_update(trainer)
        self.replays.append(0 if update is None else sum(one.replays for one in captured_steps(update).values()))


@pytest.fixture(scope="module")
def wide():
    """The bytes of memory that a step of 64 rows needs."""
    module = Wide().cuda()
    batch = torch.ones(ROWS, 1, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    module.training_step(batch, 0).backward()
    return torch.cuda.max_memory_allocated() - before


@pytest.fixture(scope="module")
def workspaces():
    """Has cuBLAS make its workspaces (a fifth of a step's memory) for all 32 streams of torch, so that no fit makes one."""
    for _ in range(32):
        with torch.cuda.stream(torch.cuda.Stream()):
            matrix = torch.ones(16, 16, device="cuda", requires_grad=True)
            F.linear(matrix, matrix, torch.ones(16, device="cuda")).sum().backward()


@pytest.fixture
def limited(wide, workspaces):
    """Returns a function that limits this process to memory for a number of steps beyond what it has reserved."""

    def limit(steps):
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + int(steps * wide)) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def fit(graph, rows, *callbacks, **options):
    runs, module = Runs(), Wide()
    given = {"limit_val_batches": 0, "max_epochs": 1, **options}
    trainer = quiet_trainer(accelerator="gpu", devices=1, callbacks=[runs, *callbacks], cuda_graph=graph, **given)
    batches = [torch.full((one, 1), 1.0 + 0.01 * number) for number, one in enumerate(rows)]
    trainer.fit(module, DataLoader(batches, batch_size=None), DataLoader(batches[:12], batch_size=None))
    return module.weight.detach().clone(), runs.replays


class OwnMemory(Callback):
    """Eager steps have memory of their own, as after one of them has left a tensor in the graphs'."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        graph_update(trainer).graphs.lends = False


AUTO = CudaGraph(warmup=4, required=False)
A_SMALLER_ONE = 1.97
"""Steps' memory for an eager step beside the graph of 48 rows, which takes 1.76, and not beside that of 64, which takes 2."""


def test_a_graph_beside_which_no_step_fits_is_left_out_by_auto(limited, caplog):
    """Eager steps that have memory of their own have to fit beside the graph."""
    rows = [ROWS] * 12
    wanted, _ = fit(False, rows, accumulate_grad_batches=2)
    limited(1.7)
    found, replays = fit(AUTO, rows, OwnMemory(), accumulate_grad_batches=2)
    assert torch.equal(found, wanted)
    assert replays == [0] * 12
    assert caplog.text.count("cuda_graph='auto' runs eagerly: a graph of the step would take") == 1
    assert "steps that run eagerly beside it" in caplog.text
    limited(2.5)
    found, replays = fit(AUTO, rows, OwnMemory(), accumulate_grad_batches=2)
    assert torch.equal(found, wanted)
    assert replays[-1] > 0


ROWS_OF_THREE_SHAPES = [ROWS, ROWS, ROWS, ROWS, ROWS, 48, ROWS, 32, ROWS, 48, ROWS, 32] * 3


@pytest.mark.parametrize("graph", [AUTO, CudaGraph(warmup=4)])
def test_a_run_with_short_batches_takes_the_memory_of_an_eager_run(graph, limited, caplog):
    """The graph, the comparison of its first replay, and eager steps of other shapes share the memory of one step."""
    limited(1.45)
    wanted, _ = fit(False, ROWS_OF_THREE_SHAPES)
    limited(1.45)
    found, replays = fit(graph, ROWS_OF_THREE_SHAPES)
    assert torch.equal(found, wanted)
    assert replays[-1] > len(ROWS_OF_THREE_SHAPES) // 2
    assert "is not compared" not in caplog.text
    assert "eagerly" not in caplog.text


@pytest.mark.parametrize("graph", [AUTO, CudaGraph(warmup=4)])
def test_an_accumulation_with_short_batches_takes_the_memory_of_two_steps(graph, limited, caplog):
    """The graphs of all roles share the memory of one step, and the eager micro-batches have that of another."""
    rows = ROWS_OF_THREE_SHAPES * 3
    limited(1.45)
    wanted, _ = fit(False, rows, accumulate_grad_batches=3)
    limited(2 * 1.45)
    found, replays = fit(graph, rows, accumulate_grad_batches=3)
    assert torch.equal(found, wanted)
    assert replays[-1] > len(rows) // 2
    assert "is not compared" not in caplog.text
    assert "eagerly" not in caplog.text


def test_another_shape_that_does_not_fit_stays_eager(limited, caplog):
    rows = [48, 48, ROWS, ROWS] * 8
    wanted, _ = fit(False, rows, accumulate_grad_batches=2)
    limited(A_SMALLER_ONE)
    found, replays = fit(AUTO, rows, OwnMemory(), accumulate_grad_batches=2)
    assert torch.equal(found, wanted)
    assert 0 < replays[-1] <= len(rows) // 2
    assert "runs steps of one shape eagerly" in caplog.text
    assert "or CudaGraph(shapes=1)" in caplog.text
    limited(
        A_SMALLER_ONE
    )  # each fit has the same memory: what is left of the one before waits for the garbage collector
    with pytest.raises(ConfigError, match=r"a graph of the step would take [\d,]+ bytes \(.* or CudaGraph\(shapes=1\)"):
        fit(CudaGraph(warmup=4), rows, OwnMemory(), accumulate_grad_batches=2)
    limited(A_SMALLER_ONE)
    found, replays = fit(CudaGraph(warmup=4, shapes=1), rows, OwnMemory(), accumulate_grad_batches=2)
    assert torch.equal(found, wanted)
    assert replays[-1] > 0


class Fills(Callback):
    """Allocates all free memory except ``left`` bytes, before the batch that would be captured."""

    def __init__(self, left):
        self.left, self.held = left, None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 3:
            torch.cuda.empty_cache()
            total = torch.cuda.mem_get_info()[1]
            allowed = int(total * torch.cuda.memory.get_per_process_memory_fraction())
            self.held = torch.empty(
                allowed - torch.cuda.memory_reserved() - self.left, dtype=torch.uint8, device="cuda"
            )

    def on_exception(self, trainer, module, exception):
        self.held = None


def test_a_capture_takes_the_memory_of_the_eager_steps_on_a_full_card(limited, wide):
    limited(4)
    _, replays = fit(CudaGraph(warmup=4), [ROWS] * 12, Fills(wide // 2))
    assert replays[-1] == 12 - 3


def test_an_evaluation_that_does_not_fit_runs_eagerly(limited, caplog):
    rows = [ROWS] * 12
    limited(3.5)
    found, replays = fit(AUTO, rows, limit_val_batches=1.0)
    assert replays[-1] == 12 - 3
    assert "runs validation_step eagerly: a graph of the step would take" not in caplog.text
    limited(2.3)
    again, replays = fit(AUTO, rows, limit_val_batches=1.0)
    assert replays[-1] == 12 - 3
    assert torch.equal(found, again)
    assert caplog.text.count("runs validation_step eagerly: a graph of the step would take") == 1


def pooled():
    """Returns the bytes that the pool of each graph has reserved."""
    sizes = collections.Counter()
    for one in torch.cuda.memory_snapshot():
        if one["segment_pool_id"] != (0, 0):
            sizes[one["segment_pool_id"]] += one["total_size"]
    return sizes


def test_what_a_step_takes_is_about_what_its_graph_reserves():
    """A far too high estimate would refuse graphs that fit."""

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 6:
                self.reserved = sum(pooled().values()) - sum(before.values())
                graphs = session(trainer).graphs
                (key,) = captured_steps(graphs.update)
                self.takes = graphs.memory_budget.eager_bytes(key)

    gc.collect()  # graphs of earlier tests have pools too
    before, look = pooled(), Look()
    fit(CudaGraph(warmup=4), [ROWS] * 8, look)
    # Gradients of one step lie in the memory of an activation of the next one, so the pool has one activation of four more.
    assert 0.75 < look.takes / look.reserved < 1.1
