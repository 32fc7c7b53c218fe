"""Programs that edit weights in place between steps that run as a CUDA graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fabricamp import ConfigError, CudaGraph, OptLevel
from tests.small import quiet_trainer
from tests.trainer.test_edited_weights import Decays, EditsLate, batches, fused_adam

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


class EditsOnDevice(EditsLate):
    """Keeps nothing on the host, as a replay would not."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)


LEVELS = {"O2": OptLevel("O2", loss_scale=64.0), "O5": OptLevel("O5")}


@pytest.mark.parametrize("level", LEVELS)
def test_edits_through_data_are_found_between_two_flushes(level):
    trainer = quiet_trainer(
        max_epochs=1, accelerator="gpu", precision=LEVELS[level], cuda_graph=True, log_every_n_steps=10
    )
    with pytest.raises(ConfigError, match="'net.weight' differs from its rounded fp32 master"):
        trainer.fit(EditsOnDevice(".data", fused_adam), batches(60))
    assert trainer.global_step in (15, 25)  # the host may learn of a look at the next one


@pytest.mark.parametrize("level", [*LEVELS, "O1", "O4"])
def test_fp32_values_between_replays(level):
    def trained(where, graph):
        module = Decays(where, fused_adam)
        precision = LEVELS.get(level, level)
        trainer = quiet_trainer(max_epochs=1, accelerator="gpu", precision=precision, cuda_graph=graph)
        trainer.fit(module, batches(14))  # 2**14 is a number of fp16 too
        return list(module.net.parameters())

    expected = trained("param_groups", None)
    for one, other in zip(trained("values", CudaGraph(warmup=4)), expected, strict=True):
        assert torch.equal(one, other)
