"""A loss as (sum, weight) on a GPU: the numbers of the joined batch, without a wait; as a graph it is refused, or runs eagerly."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback, ConfigError, OptLevel
from fabricamp.optimizers import FusedAdam
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
        if trainer.fit_loop.total_batch_idx == 8:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == 30:
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

    data = batches(count=40)
    _, _, trainer = fitted(level, 2, "", data, module=Waits(), max_epochs=1, callbacks=[ErrorOnWait()])
    assert trainer.global_step == 20


def test_a_graph_is_refused_or_left_out(caplog):
    _, after, _ = fitted("O2", 1, "fused_adam", batches(), cuda_graph="auto")
    assert caplog.text.count("cuda_graph='auto' runs eagerly: training_step returns (sum, weight)") == 1
    assert torch.equal(after, fitted("O2", 1, "fused_adam", batches())[1])
    with pytest.raises(ConfigError, match=r"cuda_graph: training_step returns \(sum, weight\)"):
        fitted("O2", 1, "fused_adam", batches(), cuda_graph=True)
