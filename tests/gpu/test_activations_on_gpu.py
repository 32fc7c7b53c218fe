"""``Trainer(activations=...)`` on a GPU: the bits of keeping everything, less memory, no waits, and CUDA graphs of all of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import Activations, Callback, Compile, CudaGraph, TrainingModule
from fabricamp.optimizers import FusedAdam
from tests.small import quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

WIDTH, ROWS, BLOCKS = 512, 2048, 6
KINDS = {
    "recompute": "recompute",
    "products": Activations(save="products"),
    "offload": "offload",
    "a quarter": Activations(offload=0.25),
    "inputs elsewhere": Activations(save="inputs", offload=1.0),
}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)


class Deep(TrainingModule):
    def __init__(self, dropout=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 8)

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float(), batch[1])

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=1e-3, eps=1e-4)


def batches(steps):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 64, generator=generator), torch.randint(0, 8, (ROWS,), generator=generator))
        for _ in range(steps)
    ]


class Watch(Callback):
    """Losses, ways of the steps, and the peak of memory above the begin of a step, of the later steps.

    ``strict``: torch raises at a wait of the host in the later steps.
    """

    def __init__(self, *, strict=False):
        self.strict, self.losses, self.ways, self.peak = strict, [], [], 0

    def holds_at(self, global_step):
        return float("inf")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx >= 8 and self.strict:
            torch.cuda.set_sync_debug_mode("error")
        if batch_idx == 2:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("default")
        self.losses.append(outputs["loss"])
        self.ways.append(trainer.state.runs_as)
        if batch_idx == 2:
            self.peak = torch.cuda.max_memory_allocated() - self.before


def fitted(activations="keep", *, steps=12, dropout=0.1, strict=False, **options):
    torch.manual_seed(3)
    torch.cuda.manual_seed(3)
    module = Deep(dropout)
    watch = Watch(strict=strict)
    given = {"accelerator": "gpu", "max_steps": steps, "callbacks": [watch], "activations": activations}
    accumulated = options.get("accumulate_grad_batches", 1)
    quiet_trainer(**{**given, **options}).fit(module, batches(steps * accumulated))
    weights = torch.cat([one.detach().flatten() for one in module.parameters()]).cpu()
    return weights, torch.stack(watch.losses).cpu(), watch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_has_the_bits_of_a_run_that_keeps_everything_and_waits_for_nothing(level, kind):
    expected, losses, kept = fitted(precision=level)
    weights, found, less = fitted(KINDS[kind], precision=level, strict=True)
    assert torch.equal(losses, found)
    assert torch.equal(weights, expected)
    most = {"a quarter": 0.95, "products": 0.9}.get(kind, 0.7)
    assert less.peak < most * kept.peak


@pytest.mark.parametrize("kind", KINDS)
def test_accumulates(kind):
    options = {"precision": "O5", "accumulate_grad_batches": 3, "steps": 3}
    expected, losses, _ = fitted(**options)
    weights, found, _ = fitted(KINDS[kind], **options)
    assert torch.equal(losses, found)
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_has_dropout_that_is_repeated_and_copies(kind, accumulated):
    options = {"precision": "O5", "steps": 9, "accumulate_grad_batches": accumulated}
    expected, losses, _ = fitted(KINDS[kind], **options)
    weights, found, watch = fitted(KINDS[kind], cuda_graph=CudaGraph(warmup=4), **options)
    assert "graph" in watch.ways[-1]
    assert torch.equal(losses, found)
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("kind", ["products", "inputs elsewhere"])
def test_compiled_blocks_and_their_graph(kind):
    """Of compiled code that keeps everything the distance is that of two compilations; a graph has the bits of its own code."""
    options = {"precision": "O5", "steps": 9, "dropout": 0.0, "compile": Compile("blocks")}
    torch.compiler.reset()
    kept, _, _ = fitted(**options)
    torch.compiler.reset()
    expected, losses, _ = fitted(KINDS[kind], **options)
    torch.testing.assert_close(expected, kept, rtol=0.02, atol=2e-3)
    torch.compiler.reset()
    weights, found, _ = fitted(KINDS[kind], cuda_graph=CudaGraph(warmup=4), **options)
    assert torch.equal(losses, found)
    assert torch.equal(weights, expected)


class Slow(Deep):
    """Keeps the GPU busy before its blocks, so that copies and launches lie far apart."""

    def training_step(self, batch, batch_idx):
        torch.cuda._sleep(50_000_000)
        loss = super().training_step(batch, batch_idx)
        torch.cuda._sleep(50_000_000)
        return loss


@pytest.mark.parametrize("kind", ["offload", "inputs elsewhere"])
def test_memory_that_is_used_again_at_once_does_not_reach_copies(kind):
    """Other tensors take the memory of what is let go of, while the GPU is far behind the host."""

    def spoil(*_):
        torch.full((ROWS, 4 * WIDTH), float("nan"), dtype=torch.float32, device="cuda")

    class Churning(Slow):
        def training_step(self, batch, batch_idx):
            handles = [block.register_forward_hook(spoil) for block in self.blocks]
            loss = super().training_step(batch, batch_idx)
            for handle in handles:
                handle.remove()
            return loss

    def trained(make, activations):
        torch.manual_seed(3)
        module = make()
        quiet_trainer(accelerator="gpu", max_steps=4, activations=activations).fit(module, batches(4))
        return torch.cat([one.detach().flatten() for one in module.parameters()]).cpu()

    assert torch.equal(trained(Churning, KINDS[kind]), trained(Deep, "keep"))


def test_batches_of_several_sizes_share_host_memory():
    def trained(activations):
        torch.manual_seed(3)
        module = Deep()
        sizes = [2048, 1024, 1536, 2048, 512, 1800]
        generator = torch.Generator().manual_seed(1)
        data = [
            (torch.randn(size, 64, generator=generator), torch.randint(0, 8, (size,), generator=generator))
            for size in sizes
        ]
        quiet_trainer(accelerator="gpu", max_epochs=2, activations=activations).fit(module, data)
        return torch.cat([one.detach().flatten() for one in module.parameters()]).cpu()

    assert torch.equal(trained("offload"), trained("keep"))
