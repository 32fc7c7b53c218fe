"""``FusedAdam(masters="remainder")`` at O5 on a GPU: graphs, groups of steps and compiled networks have the bits of eager steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, CudaGraph, TrainingModule
from fabricamp.callbacks import EMA
from fabricamp.optimizers import FusedAdam
from tests.inside import captured_steps, graph_update
from tests.small import quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


class Watch(Callback):
    replays = 0

    def on_train_end(self, trainer, pl_module):
        update = graph_update(trainer)
        self.replays = 0 if update is None else sum(step.replays for step in captured_steps(update).values())


class Net(TrainingModule):
    def __init__(self, masters="remainder"):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        self.masters = masters

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self):
        optimizer = FusedAdam(self.parameters(), lr=0.01, weight_decay=0.1, masters=self.masters)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trained(masters="remainder", callbacks=(), **options):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(320, 8, generator=generator), torch.randint(0, 4, (320,), generator=generator))
    module = Net(masters)
    watch = Watch()
    options = {"accelerator": "gpu", "precision": "O5", "max_epochs": 1, "gradient_clip_val": 0.1, **options}
    quiet_trainer(callbacks=[watch, *callbacks], **options).fit(module, DataLoader(data, batch_size=8))
    return module, watch


def same(one, other):
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"nan_policy": "skip"}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_graph_has_the_bits_of_eager_steps(options):
    eager, _ = trained(**options)
    graph, watch = trained(cuda_graph=True, **options)
    assert watch.replays > 10
    assert same(eager, graph)


def test_a_group_of_steps_has_them_too():
    eager, _ = trained()
    graph, _ = trained(cuda_graph=CudaGraph(steps=4))
    assert same(eager, graph)


def test_averages_follow_the_fp32_values():
    found = [trained(masters, callbacks=[EMA(0.9)])[0] for masters in ("fp32", "remainder")]
    for one, other in zip(*[module.parameters() for module in found], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
