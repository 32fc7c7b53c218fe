"""A step that gives a function fp32 values together with half weights: the error names them and both cures, which work."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import Compile, OptLevel, TrainingModule
from fabricamp.errors import ConfigError, DistributedError
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer

HALF_LEVELS = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


class Tied(TrainingModule):
    """``heads`` are ways to use a weight that another layer owns; ``way`` is the one that the step takes."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.net = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.heads = nn.ModuleList([self.head])

    def forward(self, x):
        return F.linear(self.net(x), self.head.weight)

    def linear(self, x, y):
        return F.linear(
            self.net(x),
            self.head.weight,
            self.head.bias,
        )

    def product(self, x, y):
        weight = self.head.weight
        return self.net(x) @ weight.t()

    def listed(self, x, y):
        return F.linear(self.net(x), self.heads[0].weight)

    def normed(self, x, y):
        return self.head(F.layer_norm(self.net(x), (8,), self.norm.weight, self.norm.bias))

    def called_forward(self, x, y):
        return self.forward(x)

    def called(self, x, y):
        return self(x)

    def loss_of_weight(self, x, y):
        return F.linear_cross_entropy(self.net(x), self.head.weight, y)

    def other_shapes(self, x, y):
        return F.linear(self.net(x), torch.ones(3, 9))

    def other_dtypes(self, x, y):
        return F.linear(self.net(x), torch.ones(3, 8, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = getattr(self, self.way)(x, y)
        return out if out.dim() == 0 else F.cross_entropy(out, y)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(way, precision, **options):
    trainer = quiet_trainer(max_steps=2, precision=precision, **options)
    trainer.fit(Tied(way), loader(16))


SAID = {
    "linear": "`F.linear( self.net(x), self.head.weight, self.head.bias, )` mixes fp32 values with the DTYPE weights head.weight, "
    "head.bias: ",
    "product": "`self.net(x) @ weight.t()` mixes fp32 values with the DTYPE weights head.weight: ",
    "listed": "`F.linear(self.net(x), self.heads[0].weight)` mixes fp32 values with DTYPE values: ",
    "normed": "`F.layer_norm(self.net(x), (8,), self.norm.weight, self.norm.bias)` mixes fp32 values with the DTYPE weights "
    "norm.weight, norm.bias: ",
    "called_forward": "`F.linear(self.net(x), self.head.weight)` mixes fp32 values with the DTYPE weights head.weight: ",
}
if hasattr(F, "linear_cross_entropy"):
    SAID["loss_of_weight"] = (
        "`F.linear_cross_entropy(self.net(x), self.head.weight, y)` mixes fp32 values with the DTYPE weights head.weight: "
    )


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("way", SAID)
def test_the_error_names_code_weights_and_cures(way, level):
    dtype = str(HALF_LEVELS[level])
    with pytest.raises(ConfigError) as caught:
        fit(way, level)
    message = str(caught.value)
    assert message.startswith(f"precision {level!r}: {SAID[way].replace('DTYPE', dtype)}")
    assert "self(batch)" in message
    assert message.endswith(f"OptLevel({level!r}, cast_model_outputs={dtype})")
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("way", SAID)
@pytest.mark.parametrize("precision", ["O0", "O1", "O4", "bf16-true", "16-true"])
def test_other_levels_run(way, precision):
    fit(way, precision)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_both_cures_run(level):
    fit("called", level)
    for way in SAID:
        fit(way, OptLevel(level, cast_model_outputs=HALF_LEVELS[level]))


def test_evaluations_tell_it_too():
    with pytest.raises(ConfigError, match=re.escape("`F.linear(self.net(x), self.head.weight)` mixes")):
        quiet_trainer(precision="O5").validate(Tied("called_forward"), loader(16))


def test_between_compiled_modules():
    with pytest.raises(ConfigError, match=r"weights head\.weight, head\.bias"):
        fit("linear", "O5", compile=Compile("modules", backend="eager"))


def of_two_ranks():
    with pytest.raises((ConfigError, DistributedError), match=r"weights head\.weight, head\.bias") as caught:
        fit("linear", "O5", strategy=os.environ["STRATEGY"], devices="auto")
    return type(caught.value).__name__


@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp"])
def test_on_two_ranks(strategy, monkeypatch):
    monkeypatch.setenv("STRATEGY", strategy)
    assert run_ranks(of_two_ranks, 2, backend=None) == ["ConfigError"] * 2


@pytest.mark.parametrize("way", ["other_shapes", "other_dtypes"])
@pytest.mark.parametrize("level", [*HALF_LEVELS, "O0", "O4"])
def test_other_errors_stay_torchs(way, level):
    with pytest.raises(RuntimeError) as caught:
        fit(way, level)
    assert type(caught.value) is RuntimeError


class Constant(TrainingModule):
    """Its forward mixes dtypes, which no boundary causes."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)

    def forward(self, x):
        return F.linear(torch.ones(x.shape), self.net.weight)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_an_error_within_a_forward_stays_torchs():
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        quiet_trainer(max_steps=1, precision="O5").fit(Constant(), loader(16))
    assert type(caught.value) is RuntimeError


def test_without_the_source_of_the_step_the_error_is_told():
    scope = {"F": F, "Tied": Tied}
    exec("class Typed(Tied):\n    def typed(self, x, y): return F.linear(self.net(x), self.head.weight)", scope)
    with pytest.raises(ConfigError, match="the step mixes fp32 values with torch.bfloat16 values"):
        quiet_trainer(max_steps=1, precision="O5").fit(scope["Typed"]("typed"), loader(16))
