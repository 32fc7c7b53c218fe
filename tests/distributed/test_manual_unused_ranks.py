"""``find_unused_parameters=True`` with manual optimization, as most GANs for Lightning ask for: it changes nothing."""

from __future__ import annotations

import logging

import pytest
import torch

from fabricamp import DDP, TrainingModule
from fabricamp.strategies import DDPStrategy
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer

STRATEGIES = {
    "plain": lambda: "ddp",
    "name": lambda: "ddp_find_unused_parameters_true",
    "object": lambda: DDP(find_unused_parameters=True),
    "Lightning's": lambda: DDPStrategy(find_unused_parameters=True),
}


class Adversaries(TrainingModule):
    """Trains a generator and a discriminator in turn; no loss reaches a third layer."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.generator = torch.nn.Linear(8, 8)
        self.discriminator = torch.nn.Linear(8, 1)
        self.spare = torch.nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        self.toggle_optimizer(optimizer)
        made = self.discriminator(self.generator(batch[0]))
        loss = made.mean() if batch_idx % 2 else (self.discriminator(batch[0]) - made).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        own = [self.generator.parameters(), [*self.discriminator.parameters(), *self.spare.parameters()]]
        return [torch.optim.Adam(one, lr=0.01) for one in own]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("precision", ["O0", "O5"])
def test_it_gives_the_bits_of_a_run_without_it_and_says_so_once(precision):
    def ranks():
        logger, heard = logging.getLogger("fabricamp"), Lines()
        logger.addHandler(heard)
        logger.setLevel(logging.INFO)
        weights = {}
        for name, strategy in STRATEGIES.items():
            module = Adversaries()
            quiet_trainer(strategy=strategy(), devices="auto", max_epochs=1, precision=precision).fit(
                module, loader(32)
            )
            weights[name] = [one.tolist() for one in module.parameters()]
        return weights, [line for line in heard.lines if "find_unused_parameters" in line]

    (first, said), (second, silent) = run_ranks(ranks, 2, backend=None)
    assert first == second
    for weights in first.values():
        assert weights == first["plain"]
    assert first["plain"][0] != Adversaries().generator.weight.tolist(), "it has trained"
    assert len(said) == 1
    assert "changes nothing with automatic_optimization=False" in said[0]
    assert silent == []
