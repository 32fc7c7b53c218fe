"""A checkpoint restores values that a level rounds or widens: fp64 weights, and fp32 values that are not trained."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fabricamp import TrainingModule
from tests.small import loader, quiet_trainer


class Net(TrainingModule):
    """Has a frozen and a trained layer, a table, and a weight with a gradient too small to change a half weight."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.trained = torch.nn.Linear(8, 3)
        self.unmoved = torch.nn.Parameter(torch.full((3,), 1 / 3))
        self.register_buffer("table", torch.rand(8))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x) + 1e-6 * self.unmoved.float(), y)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def forward(self, x):
        return self.trained(self.frozen(x) * self.table)

    def configure_optimizers(self):
        return torch.optim.SGD((one for one in self.parameters() if one.requires_grad), lr=0.05, momentum=0.9)


def fitted(precision, seed, steps, ckpt_path=None, save_as=None):
    torch.manual_seed(seed)
    module = Net()
    trainer = quiet_trainer(precision=precision, max_steps=steps)
    if save_as is not None:  # saves while the weights are still rounded
        module.on_train_end = lambda: trainer.save_checkpoint(save_as)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.parametrize("precision", ["64-true", "O3", "bf16-true", "O2", "O5"])
def test_a_resumed_run_has_every_bit_of_the_straight_one(precision, tmp_path):
    before, _ = fitted(precision, 1, 0)
    straight, _ = fitted(precision, 1, 6)
    fitted(precision, 1, 3, save_as=tmp_path / "cut.ckpt")
    resumed, _ = fitted(precision, 2, 6, tmp_path / "cut.ckpt")
    weights = straight.state_dict()
    assert {name for name, value in resumed.state_dict().items() if not torch.equal(value, weights[name])} == set()
    assert not torch.equal(weights["trained.weight"], before.state_dict()["trained.weight"])
    for name in ("frozen.weight", "table", *(["unmoved"] if precision in ("O3", "bf16-true") else [])):
        assert torch.equal(weights[name], before.state_dict()[name]), name


def test_a_run_in_fp64_keeps_what_fp32_could_not(tmp_path):
    module, trainer = fitted("64-true", 1, 3)
    assert {value.dtype for value in module.state_dict().values()} == {torch.float64}
    assert not torch.equal(module.trained.weight, module.trained.weight.float().double())
    trainer.save_checkpoint(tmp_path / "double.ckpt")
    other = Net()  # in fp32
    quiet_trainer(precision="64-true", limit_predict_batches=1).predict(
        other, loader(), ckpt_path=tmp_path / "double.ckpt"
    )
    assert torch.equal(other.trained.weight, module.trained.weight)
