"""The comparison of a replay on a GPU: with two copies of the state, one, and slices of the update; its memory and its time."""

from __future__ import annotations

import gc
import logging
import time

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fabricamp import Callback, ConfigError, CudaGraph, TrainingModule
from fabricamp.engine.graph.comparison import ReplayCheck
from fabricamp.optimizers import FusedAdam, FusedSGD
from tests.gpu.test_cuda_graph import Net, captured, fit, images, same
from tests.inside import captured_steps
from tests.small import quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SHARES = {"two copies": 2.5, "one copy": 1.5, "slices": 0.6}
"""The free memory in copies of the state."""


class Even(Net):
    """Has weights of about the same size, so that an update has slices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        convolutions = [torch.nn.Conv2d(8, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3), torch.nn.Flatten()]
        linear = [torch.nn.Dropout(0.2), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)]
        self.net = torch.nn.Sequential(*self.net[:3], *convolutions, *linear)


class Otherwise(Even):
    """Computes something else while it is captured."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1.5 if torch.cuda.is_current_stream_capturing() else loss


def leave(monkeypatch, share):
    """Lets a comparison find as much free memory; returns the plans that it makes."""
    plans = []
    plan = ReplayCheck._plan

    def planned(self, step, state, free):
        plans.append(plan(self, step, state, int(share * state.bytes)))
        return plans[-1]

    monkeypatch.setattr(ReplayCheck, "_plan", planned)
    return plans


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize(("accumulate", "check_every"), [(1, 0), (1, 4), (3, 4)])
def test_the_bits_are_those_of_an_eager_run(share, precision, accumulate, check_every, monkeypatch, caplog):
    plans = leave(monkeypatch, SHARES[share] + (0.2 if accumulate > 1 and share == "slices" else 0))
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    graph = CudaGraph(warmup=4, check_every=check_every)
    same(
        *(
            fit(one, precision, Even(), images(30, spikes=precision in ("O1", "O2")), **options)
            for one in (False, graph)
        )
    )
    assert "is not compared" not in caplog.text
    copies = {"two copies": 2, "one copy": 1, "slices": 1}[share]
    assert {plan.copies for plan in plans} <= {copies, 1}
    assert any(plan.slices for plan in plans) is (share == "slices")


@pytest.mark.parametrize("share", SHARES)
def test_several_steps_a_launch(share, monkeypatch):
    plans = leave(monkeypatch, SHARES[share])
    runs = []
    for graph in (False, CudaGraph(warmup=4, steps=5, check_every=2)):
        module = Wide(64)
        train(module, graph, batches=60)
        runs.append(module.state_dict())
    assert all(map(torch.equal, runs[0].values(), runs[1].values()))
    assert len(plans) > 2


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_wrong_replay_leaves_the_run_as_it_was(share, accumulate, monkeypatch):
    leave(monkeypatch, SHARES[share] + (0.2 if accumulate > 1 and share == "slices" else 0))
    options = {"max_epochs": 1, "accumulate_grad_batches": accumulate}
    with pytest.raises(ConfigError, match="a replay differs bitwise from an eager step, first in"):
        fit(CudaGraph(warmup=4), "O0", Otherwise(), **options)
    runs = [fit(graph, "O0", Otherwise(), **options) for graph in (False, "auto")]
    assert "differs bitwise" in captured(runs[1][0]).why_eager
    same(*runs)


def test_without_the_comparison_the_replay_stays_as_it_is(caplog):
    caplog.set_level(logging.INFO, logger="fabricamp")
    same(*(fit(graph, "O5") for graph in (False, CudaGraph(warmup=4, compare=False))))
    fit(CudaGraph(warmup=4, compare=False), "O0", Otherwise(), max_epochs=1)
    assert "compared" not in caplog.text


# -- memory and time ---------------------------------------------------------------------------------------------------------------


class Wide(TrainingModule):
    """Has much state, and short steps."""

    def __init__(self, width, optimizer=FusedAdam):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=1e-3)


def train(module, graph, *callbacks, batches=12, precision="O5"):
    width = module.layers[0].in_features
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(8, width, generator=generator) for _ in range(batches)]
    given = {"max_epochs": 1, "limit_val_batches": 0, "enable_model_summary": True, "log_every_n_steps": 10}
    trainer = quiet_trainer(
        accelerator="gpu", devices=1, precision=precision, cuda_graph=graph, callbacks=[*callbacks], **given
    )
    trainer.fit(module, DataLoader(rows, batch_size=None))
    return trainer


class Memory(Callback):
    """Reads the memory after each batch, and times it."""

    def __init__(self):
        self.used, self.pools, self.peaks, self.seconds = [], [], [], []

    def holds_at(self, global_step):
        return global_step + 1

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        torch.cuda.synchronize()
        self.begun = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.begun)
        self.used.append(torch.cuda.memory_reserved())  # of this process alone: others may use the device too
        self.pools.append(len({one["segment_pool_id"] for one in torch.cuda.memory_snapshot()}))
        self.peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))


@pytest.mark.parametrize("share", SHARES)
def test_the_memory_of_copies_is_given_back_and_in_no_later_peak(share, monkeypatch, caplog):
    """The state takes 14 bytes for each of 34 million parameters at O5."""
    caplog.set_level(logging.INFO, logger="fabricamp")
    gc.collect()
    torch.cuda.empty_cache()
    found = {}
    for compare in (True, False):
        with monkeypatch.context() as patch:
            leave(patch, SHARES[share])
            memory = Memory()
            train(Wide(2048), CudaGraph(warmup=4, compare=compare), memory)
            found[compare] = memory
        gc.collect()
        torch.cuda.empty_cache()
    compared, without = found[True], found[False]
    state = 14 * 8 * 2048 * 2049
    # Less than a tenth of a copy, in tensors of the comparison's own and in what torch's allocator rounds up.
    assert compared.used[4] - without.used[4] < state / 10
    assert compared.pools[-1] == without.pools[-1]
    assert (
        max(peak - other for (peak, _), (other, _) in zip(compared.peaks[4:], without.peaks[4:], strict=True))
        < state / 10
    )
    assert (
        max(peak - other for (_, peak), (_, other) in zip(compared.peaks[4:], without.peaks[4:], strict=True))
        < state / 10
    )
    (line,) = (record.message for record in caplog.records if "was compared with" in record.message)
    gib = float(line.partition(" GiB for copies")[0].rpartition(" ")[2])
    assert 0.3 * state < gib * 2**30 < 2.2 * state


@pytest.mark.parametrize("share", ["two copies", "one copy"])
def test_a_comparison_takes_less_than_a_second_beside_its_steps(share, monkeypatch):
    """7 GiB of state: three copies on the host took 24 s."""
    leave(monkeypatch, SHARES[share])
    train(Wide(512), CudaGraph(warmup=4))  # compiles the kernels
    seconds = []
    for compare in (True, False):
        memory = Memory()
        train(Wide(8192), CudaGraph(warmup=4, compare=compare), memory)
        seconds.append(memory.seconds[3] - memory.seconds[4])
        gc.collect()
        torch.cuda.empty_cache()
    compared, without = seconds
    assert compared - without < 1


# -- kernels that are not deterministic --------------------------------------------------------------------------------------------


class Scattered(TrainingModule):
    """Sums by atomics, in another order each time; the weight moves by the sum that is logged."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def training_step(self, batch, batch_idx):
        sums = torch.zeros(4, device=batch.device).index_add_(
            0, torch.arange(len(batch), device=batch.device) % 4, batch
        )
        self.log("drawn", sums[0])
        return {"loss": (self.weight * sums).sum(), "sums": sums}

    def configure_optimizers(self):
        return FusedSGD([self.weight], lr=1.0)


@pytest.mark.parametrize("share", ["two copies", "one copy"])
def test_weights_belong_to_the_loss_that_is_logged(share, monkeypatch):
    class Moved(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.before = module.weight.detach().clone()

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            expected = self.before - outputs["sums"]
            assert torch.equal(module.weight.detach(), expected)
            assert trainer.callback_metrics["drawn"] == outputs["sums"][0].double()
            assert not captured(trainer).why_eager
            self.replays = sum(one.replays for one in captured_steps(captured(trainer)).values())

    leave(monkeypatch, SHARES[share])
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2**20, generator=generator) for _ in range(12)]
    moved = Moved()
    given = {"max_epochs": 1, "limit_val_batches": 0, "cuda_graph": CudaGraph(warmup=4), "callbacks": [moved]}
    for _ in range(5):  # two sums of a million numbers may be equal
        trainer = quiet_trainer(accelerator="gpu", devices=1, **given)
        trainer.fit(Scattered(), DataLoader(rows, batch_size=None))
        assert moved.replays == 9


def test_flash_attention_is_no_difference(monkeypatch):
    """Its backward sums by atomics."""

    class Attends(TrainingModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.qkv = torch.nn.Linear(64, 192)

        def training_step(self, batch, batch_idx):
            heads = self.qkv(batch).view(4, 512, 3, 2, 32).permute(2, 0, 3, 1, 4)
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(*heads, is_causal=True).float().square().mean()

        def configure_optimizers(self):
            return FusedAdam(self.parameters(), lr=1e-3)

    rows = [torch.randn(4, 512, 64) for _ in range(12)]
    for share in SHARES.values():
        with monkeypatch.context() as patch:
            leave(patch, share)
            trainer = quiet_trainer(
                accelerator="gpu",
                devices=1,
                precision="O4",
                max_epochs=1,
                limit_val_batches=0,
                cuda_graph=CudaGraph(warmup=4),
            )
            trainer.fit(Attends(), DataLoader(rows, batch_size=None))
            assert not captured(trainer).why_eager
