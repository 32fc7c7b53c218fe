"""Gradients are cleared before the forward of a step, whose activations take their memory; after it where somebody looks."""

import pytest
from torch import nn

from fabricamp import TrainingModule
from fabricamp.optimizers import FusedAdam
from tests.small import loader, quiet_trainer


class Layer(nn.Linear):
    """Notes in each forward how many of its parameters have a gradient."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = []

    def forward(self, x):
        self.seen.append(sum(parameter.grad is not None for parameter in self.parameters()))
        return super().forward(x)


class Net(TrainingModule):
    """Its own code names no gradient."""

    def __init__(self):
        super().__init__()
        self.layer = Layer(8, 3)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.01)


class Looking(Net):
    def norms(self):
        return [parameter.grad for parameter in self.parameters()]

    def training_step(self, batch, batch_idx):
        self.norms()
        return super().training_step(batch, batch_idx)


class Hooked(Net):
    def on_before_zero_grad(self, optimizer):
        pass


class Overridden(Net):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.layer.seen.append("cleared")
        optimizer.zero_grad()


def seen(make, **options):
    module = make()
    quiet_trainer(max_epochs=1, **options).fit(module, loader(16, 4))
    return module.layer.seen


@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O4", "O5"])
def test_a_forward_begins_without_gradients(precision):
    assert seen(Net, precision=precision) == [0, 0, 0, 0]


def test_gradients_of_an_accumulation_stay():
    assert seen(Net, accumulate_grad_batches=2) == [0, 2, 0, 2]


def test_hooks_around_clearing_and_steps_that_look_find_the_gradients_of_the_last_step():
    assert seen(Hooked) == [0, 2, 2, 2]
    assert seen(Looking) == [0, 2, 2, 2]
    assert seen(Overridden) == [0, "cleared", 2, "cleared", 2, "cleared", 2, "cleared"]
