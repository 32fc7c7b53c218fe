"""An update cut before ``optimizer.step``, as for a graph that cannot hold the step, has the bits of an update in one piece."""

from __future__ import annotations

import pytest
import torch

from fabricamp import OptLevel
from fabricamp.engine import session
from fabricamp.engine.update import Update
from fabricamp.ops.tensors import same_bits
from fabricamp.optimizers import LARC
from tests.small import Classifier, loader, quiet_trainer


class SplitUpdate(Update):
    """Does what a replay does: the gradients are put into ``.grad`` anew before the optimizer steps."""

    splits = 0

    def launch_update(self, loss, batch_idx=0):
        handed = self.optimizer_step.prepare(loss)
        for parameter, _ in handed:
            parameter.grad = None
        for parameter, gradient in handed:
            parameter.grad = gradient
        self.optimizer_step.finish_prepared()
        SplitUpdate.splits += 1


OPTIMIZERS = {
    "AdamW": lambda own: torch.optim.AdamW(own, lr=0.01, eps=1e-4),
    "AdamW fused": lambda own: torch.optim.AdamW(own, lr=0.01, eps=1e-4, fused=True),
    "SGD": lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9),
    "RMSprop": lambda own: torch.optim.RMSprop(own, lr=0.01, momentum=0.9, eps=1e-4),
    "NAdam": lambda own: torch.optim.NAdam(own, lr=0.01, eps=1e-4),
    "Adagrad": lambda own: torch.optim.Adagrad(own, lr=0.01, eps=1e-4),
    "LARC": lambda own: LARC(torch.optim.SGD(own, lr=0.05, momentum=0.9)),
}


class Net(Classifier):
    def __init__(self, name, spike):
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(16))  # has no masters
        self.name = name
        self.spike = spike

    def training_step(self, batch, batch_idx):
        x, y = batch
        if batch_idx == 5 and self.spike:
            x = x * float("inf")
        return super().training_step((x, y), batch_idx)

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.name](self.parameters())
        cycles = "betas" in optimizer.defaults or self.name in ("SGD", "LARC")
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40, cycle_momentum=cycles)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trained(name, level, **options):
    skips = level in ("O1", "O2") or options.get("nan_policy") == "skip"
    module = Net(name, spike=skips)
    precision = OptLevel(level, scale_window=3) if level in ("O1", "O2") else level
    trainer = quiet_trainer(precision=precision, max_epochs=1, **options)
    trainer.fit(module, loader(64))
    gradients = [parameter.grad for parameter in module.parameters()]
    assert (trainer.skipped_steps > 0) == skips
    return list(module.parameters()), gradients, trainer.optimizers[0]


def same(one, other):
    if one is None or other is None:
        return one is other
    return same_bits(one, other)


OPTIONS = {
    "plain": {},
    "accumulated": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    "checked": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "nan_policy": "skip"},
}
CASES = [
    *((name, level, "plain") for name in OPTIMIZERS for level in ("O0", "O2")),
    *(("AdamW fused", level, options) for level in ("O0", "O1", "O2", "O5") for options in ("accumulated", "checked")),
    *(("SGD", level, options) for level in ("O0", "O2", "O3") for options in ("accumulated", "checked")),
]


@pytest.mark.parametrize(("name", "level", "options"), CASES)
def test_bits_of_an_update_in_two_parts(name, level, options, monkeypatch):
    options = OPTIONS[options]
    whole = trained(name, level, **options)
    monkeypatch.setattr(session, "Update", SplitUpdate)
    monkeypatch.setattr(SplitUpdate, "splits", 0)
    split = trained(name, level, **options)
    assert SplitUpdate.splits == (8 if "accumulate_grad_batches" in options else 16)
    for one, other in zip([*whole[0], *whole[1]], [*split[0], *split[1]], strict=True):
        assert same(one, other)
    for one, other in zip(whole[2].state.values(), split[2].state.values(), strict=True):
        assert one.keys() == other.keys()
        assert all(same(value, other[key]) for key, value in one.items() if isinstance(value, torch.Tensor))
    assert [group["lr"] for group in whole[2].param_groups] == [group["lr"] for group in split[2].param_groups]
