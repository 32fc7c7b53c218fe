"""A loss as (sum, weight) on a GPU: the numbers of the joined batch, without a wait, and the same bits as a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback, ConfigError, CudaGraph, OptLevel
from fabricamp.optimizers import FusedAdam
from tests.inside import captured_steps, graph_update
from tests.small import quiet_trainer
from tests.weighted import ACCUMULATE, LEVELS, TOLERANCE, Tokens, apart, batches, by_hand, flat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def fitted(level, accumulate, optimizer, data, *, module=None, **options):
    module = module or Tokens(optimizer)
    before = flat(module)
    trainer = quiet_trainer(
        accelerator="gpu",
        precision=OptLevel(level, max_loss_scale=256.0) if level in ("O1", "O2") else level,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.3,
        **{"max_epochs": 2, **options},
    )
    trainer.fit(module, DataLoader(data, batch_size=None, pin_memory=True))
    return before, flat(module).cpu(), trainer


@pytest.mark.parametrize("optimizer", ["adamw", "fused_adam", "fused_sgd"])
@pytest.mark.parametrize("accumulate", ACCUMULATE)
@pytest.mark.parametrize("level", LEVELS)
def test_a_window_is_the_joined_batch(level, accumulate, optimizer):
    if (level, optimizer) == ("O3", "adamw"):
        pytest.skip("torch's Adam keeps its squares in half there, where they are 0")
    before, after, _ = fitted(level, accumulate, optimizer, batches())
    wanted = by_hand((level, accumulate, ("norm", 0.3), optimizer), [batches()])
    assert apart(before.cpu(), after, wanted) < TOLERANCE[level]


@pytest.mark.parametrize("level", LEVELS)
def test_a_window_without_weight_has_zero_gradients(level):
    class Nothing(Tokens):
        def training_step(self, batch, batch_idx):
            total, weight = self.summed(batch)
            return total, weight * 0

        def configure_optimizers(self):
            return FusedAdam(self.parameters(), lr=0.1)

    before, after, trainer = fitted(level, 1, "fused_adam", batches(), module=Nothing())
    assert torch.equal(before, after)
    assert trainer.skipped_steps == 0


class ErrorOnWait(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == 30:  # after the captures of a run with PL_TRAINER_CUDA_GRAPH=auto
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == 70:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer, pl_module, exception):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("numbers", [False, True])
def test_the_host_waits_for_nothing(level, numbers):
    class Waits(Tokens):
        def training_step(self, batch, batch_idx):
            total, weight = self.summed(batch)
            return total, 64 if numbers else weight

        def configure_optimizers(self):
            return FusedAdam(self.parameters(), lr=0.01)

    data = batches(count=80)
    _, _, trainer = fitted(level, 2, "", data, module=Waits(), max_epochs=1, callbacks=[ErrorOnWait()])
    assert trainer.global_step == 40


class Replays(Callback):
    """Records the number of replays of a fit's last graphs, and the loss and weight in each batch's hook."""

    def __init__(self):
        self.count, self.seen = 0, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        update = graph_update(trainer)
        self.count = 0 if update is None else sum(one.replays for one in captured_steps(update).values())
        self.seen.append(torch.stack([outputs["loss"].double(), torch.as_tensor(outputs["weight"]).double().cuda()]))


class Sparse(Tokens):
    """Some accumulation steps have weight 0; the other weights vary between small and large."""

    def training_step(self, batch, batch_idx):
        total, weight = self.summed(batch)
        some = (batch[1] >= 0).sum() != 9
        return {"loss": (total * some, weight * some), "sum": total}

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.01, eps=1e-3)


def graph_and_eager(level, accumulate, optimizer, module=Tokens, rank=0, **options):
    """Fits eagerly and as a graph; returns weights, values in hooks and the number of replays."""
    found = []
    for graph in (False, CudaGraph(warmup=4)):
        watch = Replays()
        given = {"cuda_graph": graph, "callbacks": [watch], **options}
        _, after, trainer = fitted(
            level, accumulate, optimizer, batches(rank, count=20), module=module(optimizer), **given
        )
        found.append((after, torch.stack(watch.seen), watch.count, trainer.skipped_steps))
    return found


@pytest.mark.parametrize("accumulate", ACCUMULATE)
@pytest.mark.parametrize("level", LEVELS)
def test_a_graph_leaves_the_bits_of_eager_steps(level, accumulate):
    optimizer = {"O0": "fused_sgd", "O4": "fused_sgd"}.get(level, "fused_adam")
    (eager, values, _, skipped), (graph, others, replays, left_out) = graph_and_eager(level, accumulate, optimizer)
    assert torch.equal(eager, graph)
    assert torch.equal(values, others)
    assert skipped == left_out
    assert replays > 20


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_graph_over_windows_without_weight(level):
    (eager, values, *_), (graph, others, replays, _) = graph_and_eager(level, 1, "", Sparse)
    assert torch.equal(eager, graph)
    assert torch.equal(values.nan_to_num(), others.nan_to_num())
    assert values.isnan().any()
    assert replays > 20


class Numbers(Tokens):
    """The weight is a number on the host; with ``counts`` each batch has another weight."""

    def __init__(self, optimizer, *, counts=False):
        super().__init__(optimizer)
        self.counts = counts

    def training_step(self, batch, batch_idx):
        total, _ = self.summed(batch)
        return total, float(self.trainer.fit_loop.total_batch_idx % 3 + 1) if self.counts else batch[1].numel()


def test_a_graph_with_weights_that_are_numbers(caplog):
    (eager, *_), (graph, _, replays, _) = graph_and_eager("O1", 3, "fused_adam", Numbers)
    assert torch.equal(eager, graph)
    assert replays > 20
    with pytest.raises(
        ConfigError, match=r"cuda_graph: training_step returns \(sum, weight\) with a number that differs"
    ):
        fitted("O1", 1, "fused_adam", batches(), module=Numbers("fused_adam", counts=True), cuda_graph=True)
    for graph in (False, "auto"):
        module = Numbers("fused_adam", counts=True)
        _, after, _ = fitted("O1", 1, "fused_adam", batches(), module=module, cuda_graph=graph)
        eager = after if not graph else eager
    assert torch.equal(after, eager)
    assert caplog.text.count("runs eagerly: training_step returns (sum, weight) with a number") == 1


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_graph_goes_on_within_a_weighted_window(level, tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.fit_loop.total_batch_idx == 21:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    given = {"cuda_graph": CudaGraph(warmup=3), "max_epochs": 2}
    _, whole, _ = fitted(level, 4, "fused_adam", batches(count=16), callbacks=[Save()], **given)
    module = Tokens("fused_adam")
    trainer = quiet_trainer(
        accelerator="gpu", precision=OptLevel(level, max_loss_scale=256.0) if level == "O2" else level,
        accumulate_grad_batches=4, gradient_clip_val=0.3, **given,
    )  # fmt: skip
    loader = DataLoader(batches(count=16), batch_size=None, pin_memory=True)
    trainer.fit(module, loader, ckpt_path=tmp_path / "middle.ckpt")
    assert torch.equal(whole, flat(module).cpu())
