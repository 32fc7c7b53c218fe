"""Embedding bags under an optimizer that wraps another, with torchmetrics in the step: the bits of a loop by hand.

The Trainer and a Loop, eager and as emulated graphs.
"""

from __future__ import annotations

import pytest
import torch
import torchmetrics

from fabricamp import CudaGraph, Loop, TrainingModule
from tests.cuda_on_cpu.fits import card
from tests.small import quiet_trainer

__all__ = ["card"]

STEPS = 24


class Lookahead(torch.optim.Optimizer):
    """Every third step moves the weights half of the way back to where they were: an optimizer around another."""

    def __init__(self, inner, **options):
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], options)
        self.param_groups = inner.param_groups
        self.count = 0

    def step(self, closure=None):
        """Makes the inner step, and every third time the slow one."""
        result = self.inner.step(closure)
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "slow" not in state:
                    state["slow"] = parameter.detach().clone()
                elif self.count % 3 == 0:
                    state["slow"].lerp_(parameter.detach(), 0.5)
                    parameter.data.copy_(state["slow"])
        return result


OPTIMIZERS = {
    "lookahead": lambda parameters: Lookahead(torch.optim.RAdam(parameters, lr=0.01)),
    "bag": lambda parameters: Lookahead(torch.optim.RAdam(parameters, lr=0.01)),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "sparse": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


class WeightedSum(torch.nn.Embedding):
    """A bag by functions that an emulated capture can hold; torch's EmbeddingBag looks at its indices on a CPU."""

    def forward(self, features, per_sample_weights):
        """Returns the weighted sums."""
        return (super().forward(features) * per_sample_weights.unsqueeze(-1)).sum(1)


def net(kind):
    torch.manual_seed(4)
    table = (64, 8)
    bag = {
        "sparse": lambda: torch.nn.EmbeddingBag(*table, mode="sum", padding_idx=0, sparse=True),
        "bag": lambda: torch.nn.EmbeddingBag(*table, mode="sum", padding_idx=0),
    }.get(kind, lambda: WeightedSum(*table))()
    return torch.nn.ModuleDict({"bag": bag, "head": torch.nn.Linear(8, 1)})


def loss_of(model, batch):
    features, weights, target = batch
    hidden = model["bag"](features, per_sample_weights=weights).clamp(0.0, 1.0)
    return (model["head"](hidden).sigmoid() - target).abs().pow(2.5).mean()


def batches():
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        features = torch.randint(64, (6, 5), generator=generator)
        yield features, torch.rand(6, 5, generator=generator), torch.rand(6, 1, generator=generator)


class Given:
    def __len__(self):
        return STEPS

    def __iter__(self):
        return batches()


class Module(TrainingModule):
    def __init__(self, kind, *, metric=False):
        super().__init__()
        self.model = net(kind)
        self.kind = kind
        self.mean = torchmetrics.MeanMetric() if metric else None  # whose checks an emulated capture cannot read

    def training_step(self, batch, batch_idx):
        loss = loss_of(self.model, batch)
        if self.mean is not None:
            self.mean(loss)
            self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return OPTIMIZERS[self.kind](self.parameters())


def by_hand(kind):
    model = net(kind)
    optimizer = OPTIMIZERS[kind](model.parameters())
    losses = []
    for batch in batches():
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, torch.stack(losses)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_eager_steps_have_the_bits_of_a_loop_by_hand(kind):
    model, losses = by_hand(kind)
    module = Module(kind, metric=True)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, Given())
    assert float(trainer.callback_metrics["mean"]) == pytest.approx(float(losses.mean()), rel=1e-6)
    assert all(map(torch.equal, model.parameters(), module.model.parameters()))
    looped, found = by_loop(kind)
    assert torch.equal(losses, found)
    assert all(map(torch.equal, model.parameters(), looped.parameters()))


def by_loop(kind, **options):
    model = net(kind)
    with Loop(accelerator="cpu", devices=1, **options) as run:
        run.prepare(model, OPTIMIZERS[kind](model.parameters()))
        losses = [run.step(lambda b: loss_of(model, b), batch) for batch in run.prepare_data(Given())]
    return model, torch.stack(losses)


def test_replays_have_them_too(card):
    model, losses = by_hand("adam")
    module = Module("adam")
    quiet_trainer(max_epochs=1, cuda_graph=CudaGraph(warmup=4)).fit(module, Given())
    assert card.replays > 10
    assert all(map(torch.equal, model.parameters(), module.model.parameters()))
    looped, found = by_loop("adam", cuda_graph=CudaGraph(warmup=4))
    assert torch.equal(losses, found)
    assert all(map(torch.equal, model.parameters(), looped.parameters()))


@pytest.mark.parametrize("kind", ["lookahead"])
def test_what_no_graph_can_hold_runs_eagerly_with_auto(kind, card):
    model, losses = by_hand(kind)
    module = Module(kind)
    quiet_trainer(max_epochs=1, cuda_graph="auto").fit(module, Given())
    assert all(map(torch.equal, model.parameters(), module.model.parameters()))
    looped, found = by_loop(kind, cuda_graph="auto")
    assert torch.equal(losses, found)
    assert all(map(torch.equal, model.parameters(), looped.parameters()))
