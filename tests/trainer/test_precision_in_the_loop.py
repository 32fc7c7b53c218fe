"""Every precision in the real loop: it trains, losses are full precision, overflows are skipped, counted and reported."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn import functional as F

from fabricamp import Callback, OptLevel
from tests.pairs import pairs
from tests.small import Classifier, loader, quiet_trainer

PRECISIONS = ["O0", "O1", "O2", "O3", "O4", "O5", "16-mixed", "bf16-true", "64-true"]
SCALED = ["O1", "O2", "16-mixed"]
CLIPS = {
    "none": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
    # The default eps is 0 in half precision.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, eps=1e-4),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, eps=1e-4, fused=True),
}


class Learns(Classifier):
    """Learns the class that is the largest of three features."""

    def __init__(self, optimizer="sgd"):
        super().__init__()
        self.optimizer = optimizer
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = F.cross_entropy(self.net(x), x[:, :3].argmax(1))
        assert loss.dtype == x.dtype  # fp32, except that a "true" precision runs the complete step in its dtype
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        logits = self.net(x)
        assert logits.dtype == x.dtype or torch.is_autocast_enabled("cpu")
        self.log("val_loss", F.cross_entropy(logits, x[:, :3].argmax(1)))

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


@pytest.mark.parametrize(("precision", "accumulate", "clip", "optimizer"), pairs(PRECISIONS, [1, 3], CLIPS, OPTIMIZERS))
def test_it_trains(precision, accumulate, clip, optimizer):
    module = Learns(optimizer)
    trainer = quiet_trainer(
        precision=precision, max_epochs=5, accumulate_grad_batches=accumulate, num_sanity_val_steps=0, **CLIPS[clip]
    )
    trainer.fit(module, loader(32), loader(8))
    assert trainer.global_step == 5 * -(-8 // accumulate)
    assert sum(module.losses[-8:]) < 0.9 * sum(module.losses[:8])
    given_back = torch.float64 if precision == "64-true" else torch.float32  # at least as wide as in training
    assert {parameter.dtype for parameter in module.parameters()} == {given_back}
    assert float(trainer.callback_metrics["val_loss"]) < 1.2


class Overflows(Callback):
    """Makes the gradients of some steps infinite."""

    def __init__(self, *windows):
        self.windows = windows

    def on_before_backward(self, trainer, module, loss):
        if trainer.global_step in self.windows:
            loss.register_hook(lambda gradient: gradient * float("inf"))


class Watches(Callback):
    """Records the learning rate of each step, and the weights after it."""

    def __init__(self):
        self.rates, self.weights = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        group = trainer.optimizers[0].param_groups[0]["params"]
        self.weights.append([parameter.detach().clone() for parameter in group])


class Halves(Classifier):
    def configure_optimizers(self):
        optimizer = OPTIMIZERS[getattr(self, "optimizer", "sgd")](self.parameters())
        optimizer.param_groups[0]["lr"] = 1.0
        scheduler = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def small_scale(precision):
    """Returns the level with a loss scale that does not overflow by itself."""
    return OptLevel("O2" if precision == "O2" else "O1", max_loss_scale=2.0**8)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_fused"])
@pytest.mark.parametrize("precision", SCALED)
@pytest.mark.parametrize("overflows", [(), (0,), (2, 3), (6, 7)])
def test_an_overflow_skips_its_step_and_the_schedule_lags_by_two(precision, overflows, optimizer):
    watcher = Watches()
    module = Halves()
    module.optimizer = optimizer
    trainer = quiet_trainer(precision=small_scale(precision), max_epochs=1, callbacks=[Overflows(*overflows), watcher])
    trainer.fit(module, loader(32))
    applied = [window not in overflows for window in range(8)]
    assert watcher.rates == [0.5 ** sum(applied[: max(window - 2, 0)]) for window in range(8)]
    moved = [True] + [
        any(not torch.equal(a, b) for a, b in zip(*pair, strict=True))
        for pair in zip(watcher.weights, watcher.weights[1:], strict=False)
    ]
    assert moved[1:] == applied[1:]
    assert (trainer.global_step, trainer.skipped_steps) == (8, len(overflows))


def test_a_level_without_scaling_follows_at_once():
    for precision in ("O0", "O4", "O5", "O3"):
        watcher = Watches()
        quiet_trainer(precision=precision, max_epochs=1, callbacks=watcher).fit(Halves(), loader(32))
        assert watcher.rates == [0.5**window for window in range(8)]


@pytest.mark.parametrize(
    ("overflows", "steps"),
    [
        ((), []),
        ((1,), ["1 step was"]),
        ((15,), ["1 step was"]),
        ((14, 15), ["2 steps were"]),
        ((6, 7), ["1 step was", "1 step was"]),
        ((1, 2, 3, 9, 14), ["1 step was", "2 steps were", "1 step was", "1 step was"]),
    ],
)
def test_the_first_overflow_is_told_at_once_and_others_with_the_flush(overflows, steps, caplog):
    trainer = quiet_trainer(
        precision=small_scale("O2"), max_epochs=2, log_every_n_steps=8, callbacks=[Overflows(*overflows)]
    )
    with caplog.at_level(logging.WARNING, "fabricamp"):
        trainer.fit(Classifier(), loader(32))
    told = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert [message.partition(" skipped")[0] for message in told] == steps
    assert trainer.skipped_steps == len(overflows)
    if told:
        assert f"{len(overflows)} in all" in told[-1]


@pytest.mark.parametrize("precision", ["O1", "O2"])
def test_the_scale_finds_its_way_from_too_large(precision):
    module = Learns()
    module.training_step = lambda batch, batch_idx: 1e4 * Learns.training_step(module, batch, batch_idx)
    trainer = quiet_trainer(precision=OptLevel(precision), max_epochs=2, gradient_clip_val=1.0)
    trainer.fit(module, loader(32))
    assert 0 < trainer.skipped_steps < 16
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    assert trainer.precision_plugin.verdicts.scale < 2.0**16


@pytest.mark.parametrize("precision", PRECISIONS)
def test_evaluation_and_prediction_work_without_a_fit(precision):
    trainer = quiet_trainer(precision=precision)
    module = Learns()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    (result,) = trainer.validate(module, loader(8), verbose=False)
    assert result["val_loss"] > 0
    assert len(trainer.predict(module, loader(8))) == 2
    after = module.state_dict()
    assert all(torch.allclose(value, after[name].to(value.dtype), atol=1e-2) for name, value in before.items())
    assert not module.net[0]._forward_hooks
