"""A loss as (sum, weight): an accumulation is divided once, by the total weight of its micro-batches."""

from __future__ import annotations

import pytest
import torch

from fabricamp import Callback, ConfigError
from fabricamp.tuner import Tuner
from tests.small import quiet_trainer
from tests.weighted import PAIRS, TOLERANCE, Tokens, apart, batches, by_hand, fitted

SUMS = ("O2", 3, ("norm", 0.3), "sgd")


@pytest.mark.parametrize("combination", PAIRS, ids=str)
def test_a_window_is_the_joined_batch(combination):
    before, after = fitted(combination, "single", batches())
    assert apart(before, after, by_hand(combination, [batches()])) < TOLERANCE[combination[0]]


def test_the_mean_of_means_is_another_number():
    class Means(Tokens):
        def training_step(self, batch, batch_idx):
            total, weight = self.summed(batch)
            return total / weight

    combination = ("O0", 3, None, "sgd")
    before, after = fitted(combination, "single", batches(), module=Means())
    assert apart(before, after, by_hand(combination, [batches()])) > 0.3


@pytest.mark.parametrize("optimizer", ["sgd", "fused_sgd"])
def test_64_bits_are_kept(optimizer):
    combination = ("64-true", 3, ("norm", 0.3), optimizer)
    before, after = fitted(combination, "single", batches())
    assert apart(before, after, by_hand(combination, [batches()])) < (1e-12 if optimizer == "sgd" else 1e-6)


@pytest.mark.parametrize("form", ["numbers", "one-element tensors", "beside other values"])
def test_forms_of_a_pair(form):
    class Forms(Tokens):
        def training_step(self, batch, batch_idx):
            total, weight = self.summed(batch)
            if form == "numbers":
                return total, int(weight)
            return {"loss": (total, weight), "x": total * 2} if form == "beside other values" else (total, weight[None])

    class Seen(Callback):
        outputs = ()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.outputs = (*self.outputs, outputs)

    combination, seen = ("O0", 3, None, "sgd"), Seen()
    before, after = fitted(combination, "single", batches(), module=Forms(), callbacks=[seen])
    assert apart(before, after, by_hand(combination, [batches()])) < 1e-5
    assert [float(one["weight"]) for one in seen.outputs[:4]] == [3, 64, 9, 30]
    assert not any(one["loss"].requires_grad or one["loss"].shape for one in seen.outputs)
    assert 0.5 < float(seen.outputs[0]["loss"]) < 2
    assert ("x" in seen.outputs[0]) == (form == "beside other values")


def test_hooks_see_divided_gradients():
    class Looks(Tokens):
        norms = ()

        def on_before_optimizer_step(self, optimizer):
            norm = torch.nn.utils.get_total_norm([one.grad for one in self.parameters()])
            self.norms = (*self.norms, float(norm))

    module = Looks()
    fitted(("O2", 4, None, "sgd"), "single", batches(), module=module)
    other = Tokens().double()
    total, weight = other.summed((torch.cat([x for x, _ in batches()]).double(), torch.cat([y for _, y in batches()])))
    (total / weight).backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in other.parameters()])
    assert module.norms[0] == pytest.approx(float(norm), rel=0.01)


@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
@pytest.mark.parametrize("optimizer", ["sgd", "fused_sgd"])
def test_a_window_without_weight_has_zero_gradients(level, optimizer):
    class Nothing(Tokens):
        def training_step(self, batch, batch_idx):
            total, weight = self.summed(batch)
            return total, weight * 0

    combination = (level, 1, ("norm", 0.3), optimizer)
    before, after = fitted(combination, "single", batches(), module=Nothing(optimizer))
    assert torch.equal(before, after)
    full = batches()
    empty = [(x, torch.full_like(y, -100)) for x, y in full]
    before, after = fitted(("O0", 2, None, optimizer), "single", [full[0], empty[0], *empty[1:]])
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)


def test_a_run_that_goes_on_within_a_window_has_the_bits_of_the_straight_one(tmp_path):
    class Saves(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.fit_loop.total_batch_idx == 4:  # within the first accumulation of the second epoch
                trainer.save_checkpoint(tmp_path / "open.ckpt")

    for combination in (SUMS, ("O0", 3, None, "fused_adam"), ("O1", 1, None, "adamw")):
        _, straight = fitted(combination, "single", batches(), callbacks=[Saves()])
        module = Tokens(combination[3])
        _, resumed = fitted(combination, "single", batches(), module=module, ckpt_path=tmp_path / "open.ckpt")
        assert torch.equal(straight, resumed), combination


def test_the_learning_rate_finder_takes_the_means():
    trainer = quiet_trainer(max_epochs=1)
    module = Tokens()
    module.lr = 0.1
    found = Tuner(trainer).lr_find(module, torch.utils.data.DataLoader(batches(), batch_size=None), num_training=20)
    assert all(0.2 < loss < 3 for loss in found.results["loss"][:5])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda loss: (loss, loss), r"whose weight is a tensor of shape \(\) on cpu with a graph"),
        (lambda loss: (loss, torch.ones(3)), r"whose weight is a tensor of shape \(3,\)"),
        (lambda loss: (loss, -1), "whose weight is -1; give a number from 0"),
        (lambda loss: (loss, float("nan")), "whose weight is nan"),
        (lambda loss: (loss, "3"), "whose weight is a str"),
        (lambda loss: (loss, 1, 2), r"training_step returned tuple; return the loss as a tensor or as \(sum, weight\)"),
        (lambda loss: (loss.detach(), 1), "the loss has no graph"),
        (lambda loss: (loss[None].repeat(2), 1), "has to return a scalar"),
    ],
)
def test_what_is_no_pair_is_refused(returned, words):
    class Wrong(Tokens):
        def training_step(self, batch, batch_idx):
            return returned(self.summed(batch)[0])

    with pytest.raises(ConfigError, match=words):
        fitted(("O0", 1, None, "sgd"), "single", batches(), module=Wrong())


@pytest.mark.parametrize("weighted", [0, 1])
def test_losses_with_and_without_a_weight_do_not_mix(weighted):
    class Mixed(Tokens):
        def training_step(self, batch, batch_idx):
            total, weight = self.summed(batch)
            return (total, weight) if batch_idx % 2 == weighted else total

    with pytest.raises(ConfigError, match="for some batches and a loss without a weight for others"):
        fitted(("O0", 3, None, "sgd"), "single", batches(), module=Mixed())


def test_a_negative_weight_on_the_device_is_not_a_number():
    class Negative(Tokens):
        def training_step(self, batch, batch_idx):
            total, weight = self.summed(batch)
            return total, -weight

    with pytest.raises(Exception, match="not finite"):
        fitted(("O0", 1, None, "sgd"), "single", batches(), module=Negative(), nan_policy="raise")


def test_an_optimizer_that_runs_backward_itself_refuses_weights():
    class Closure(Tokens):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigError, match=r"LBFGS runs backward itself; return the mean"):
        fitted(("O0", 1, None, "sgd"), "single", batches(), module=Closure())
