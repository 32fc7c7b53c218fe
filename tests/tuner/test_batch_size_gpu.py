"""Tuner.scale_batch_size on a GPU: torch's allocator is limited to a share of the memory, and raises beyond it."""

from __future__ import annotations

import pytest
import torch

from fabricamp import TrainingModule
from fabricamp.tuner import Tuner
from tests.small import data, quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


class Hungry(TrainingModule):
    """Each sample takes a twentieth of the process's share."""

    def __init__(self, unit, batch_size=1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(8, 3)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(data(64), self.hparams.batch_size)

    def training_step(self, batch, batch_idx):
        held = [torch.empty(self.hparams.unit, dtype=torch.uint8, device=self.device) for _ in batch[0]]
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        del held
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def unit():
    torch.cuda.empty_cache()
    share = 0.05 + torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(share)  # other processes may use the same GPU
    yield int(0.05 * torch.cuda.mem_get_info()[1]) // 20
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu_memory(gib=4)  # a twentieth of the card
@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_it_survives_a_lack_of_memory_and_gives_all_back(precision, unit):
    module, options = Hungry(unit), {"accelerator": "gpu", "devices": 1, "precision": precision}
    quiet_trainer(max_steps=1, **options).fit(Hungry(1))  # allocates cuBLAS's workspaces, which are never freed
    before = torch.cuda.memory_reserved()
    found = Tuner(quiet_trainer(max_steps=2, **options)).scale_batch_size(module, steps_per_trial=1)
    assert found == module.hparams.batch_size == 16
    assert torch.cuda.memory_reserved() - before < unit
    quiet_trainer(max_steps=2, **options).fit(module)
