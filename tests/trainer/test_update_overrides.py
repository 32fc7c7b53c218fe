"""Overrides of the update's hooks in Lightning's documented forms, and optimizers that run the forward themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from fabricamp import Callback, ConfigError
from fabricamp.optimizers import FusedAdam
from fabricamp.precision.named import TruePrecision
from tests.small import Classifier, loader, quiet_trainer

LEVELS = ["O0", "O1", "O2"]


def fitted(module, *, precision="O0", epochs=1, samples=16, **options):
    trainer = quiet_trainer(max_epochs=epochs, precision=precision, **options)
    trainer.fit(module, loader(samples))
    return trainer


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("precision", LEVELS)
def test_warm_up_by_optimizer_step(precision):
    class WarmUp(Classifier):
        losses, rates = (), ()

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if self.trainer.global_step < 4:
                for group in optimizer.param_groups:
                    group["lr"] = self.lr * (self.trainer.global_step + 1) / 4
            self.losses += (float(optimizer_closure().detach()),)
            self.rates += (optimizer.param_groups[0]["lr"],)
            optimizer.step(closure=optimizer_closure)

    class ByScheduler(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 4, 1))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module, twin = WarmUp(), ByScheduler()
    fitted(module, precision=precision, samples=24)
    assert module.rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert len(module.losses) == 6
    assert all(0.1 < loss < 3 for loss in module.losses)
    if precision == "O0":  # with loss scaling the schedule has a fixed lag
        fitted(twin, samples=24)
        assert same(module, twin)


@pytest.mark.parametrize("precision", LEVELS)
@pytest.mark.parametrize("form", ["super", "super_by_name", "no_closure"])
def test_optimizer_step_may_pass_the_call_on(precision, form):
    class Passes(Classifier):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            if form == "super":
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            elif form == "super_by_name":
                super().optimizer_step(
                    epoch=epoch, batch_idx=batch_idx, optimizer=optimizer, optimizer_closure=optimizer_closure
                )
            else:
                optimizer.step()

    module, plain = Passes(), Classifier()
    fitted(module, precision=precision, gradient_clip_val=0.5)
    fitted(plain, precision=precision, gradient_clip_val=0.5)
    assert same(module, plain)


@pytest.mark.parametrize("precision", LEVELS)
def test_optimizer_step_may_leave_an_update_out(precision):
    class EverySecond(Classifier):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if batch_idx % 2 == 0:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    class ByHand(Classifier):
        def training_step(self, batch, batch_idx):
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    module, twin = EverySecond(), ByHand()
    assert fitted(module, precision=precision).global_step == 4
    assert fitted(twin, precision=precision).global_step == 4
    assert same(module, twin)


@pytest.mark.parametrize("precision", LEVELS)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_configure_gradient_clipping(precision, algorithm):
    class Clips(Classifier):
        given, norms = None, ()

        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            self.given = gradient_clip_val, gradient_clip_algorithm
            self.clip_gradients(
                optimizer, gradient_clip_val=gradient_clip_val / 2, gradient_clip_algorithm=gradient_clip_algorithm
            )
            gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
            self.norms += (float(torch.nn.utils.get_total_norm(gradients)),)

    module, plain = Clips(), Classifier()
    fitted(module, precision=precision, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)
    fitted(plain, precision=precision, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)
    assert module.given == (0.1, algorithm)
    if algorithm == "norm":
        assert max(module.norms) <= 0.0501
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", LEVELS)
def test_backward_and_optimizer_zero_grad(precision):
    calls = []

    class Own(Classifier):
        def backward(self, loss, *args, **kwargs):
            calls.append("backward")
            loss.backward(*args, **kwargs)

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            calls.append(("zero", epoch, batch_idx))
            optimizer.zero_grad(set_to_none=False)

    module, plain = Own(), Classifier()
    fitted(module, precision=precision, epochs=2, accumulate_grad_batches=3)
    fitted(plain, precision=precision, epochs=2, accumulate_grad_batches=3)
    window = [("zero", 0, 0), *["backward"] * 3, ("zero", 0, 3), "backward"]
    assert calls == [*window, *[call if isinstance(call, str) else ("zero", 1, call[2]) for call in window]]
    assert same(module, plain)


class Everything(Callback):
    """Implements every hook of a step, and keeps the gradients."""

    def __init__(self):
        self.gradients = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        pass

    def on_before_zero_grad(self, trainer, module, optimizer):
        pass

    def on_before_backward(self, trainer, module, loss):
        whole_step = isinstance(trainer.precision_plugin, TruePrecision)
        assert loss.dtype == (next(module.parameters()).dtype if whole_step else torch.float32)

    def on_after_backward(self, trainer, module):
        pass

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.gradients.append([parameter.grad.clone() for parameter in module.parameters()])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        assert not outputs["loss"].requires_grad


@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O3", "O4", "O5", "16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}])
def test_hooks_see_unscaled_gradients_and_change_nothing(precision, options):
    module, plain = Classifier(), Classifier()
    watcher = Everything()
    fitted(module, precision=precision, callbacks=watcher, **options)
    fitted(plain, precision=precision, **options)
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    reference = Everything()
    fitted(Classifier(), callbacks=reference, **options)
    for seen, expected in zip(watcher.gradients[0], reference.gradients[0], strict=True):
        torch.testing.assert_close(seen.float(), expected, rtol=0.1, atol=0.01)


# -- optimizers that run the forward themselves ------------------------------------------------------------------------


class Newton(Classifier):
    """Uses LBFGS; logs the loss of each forward in the order of the calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        x, y = batch
        self.log("calls", float(self.calls), on_step=False, on_epoch=True)
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


def newton_by_hand(module, clip=None):
    optimizer = module.configure_optimizers()
    firsts, calls = [], 0
    for x, y in loader(16):
        firsts.append(calls + 1)

        def closure():
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = F.cross_entropy(module.net(x), y)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            return loss

        optimizer.step(closure)
    return firsts


@pytest.mark.parametrize("precision", ["O0", "O4"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_lbfgs_logs_the_first_call_of_each_step(precision, clip):
    module, twin = Newton(), Newton()
    trainer = fitted(module, precision=precision, gradient_clip_val=clip)
    assert trainer.global_step == 4
    assert module.calls > 8
    if precision == "O0":
        firsts = newton_by_hand(twin, clip)
        assert same(module, twin)
        assert float(trainer.callback_metrics["calls"]) == sum(firsts) / len(firsts)


def test_lbfgs_calls_hooks_and_overrides():
    calls = []

    class Own(Newton):
        def on_before_optimizer_step(self, optimizer):
            calls.append("before")

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            calls.append("clip")
            self.clip_gradients(optimizer, 0.1)

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            calls.append("step")
            optimizer.step(closure=optimizer_closure)

    module, twin = Own(), Newton()
    fitted(module)
    newton_by_hand(twin, 0.1)
    assert same(module, twin)
    assert calls[:3] == ["step", "before", "clip"]
    assert calls.count("step") == 4
    assert calls.count("clip") == calls.count("before") == module.calls


def test_lbfgs_needs_a_loss():
    class Nothing(Newton):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if batch_idx < 0 else None

    with pytest.raises(ConfigError, match="LBFGS"):
        fitted(Nothing())


def test_lbfgs_under_manual_optimization():
    class Manual(Newton):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = Newton.training_step(self, batch, batch_idx)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

    module, twin = Manual(), Newton()
    trainer = fitted(module)
    firsts = newton_by_hand(twin)
    assert same(module, twin)
    assert trainer.global_step == 4
    assert float(trainer.callback_metrics["calls"]) == sum(firsts) / len(firsts)


@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clip_gradients_under_manual_optimization_limits_unscaled_gradients(precision, algorithm):
    class Manual(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)
            optimizer.step()

    module, automatic = Manual(), Classifier()
    fitted(module, precision=precision)
    fitted(automatic, precision=precision, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)
    for a, b in zip(module.parameters(), automatic.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", ["O0", "O1", "O2"])
def test_manual_accumulation(precision):
    class Manual(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx) / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

    module, automatic = Manual(), Classifier()
    assert fitted(module, precision=precision).global_step == 2
    fitted(automatic, precision=precision, accumulate_grad_batches=2)
    for a, b in zip(module.parameters(), automatic.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_deepcopy_of_a_module_in_training_trains_by_itself():
    class Copies(Classifier):
        copied = None

        def on_train_epoch_end(self):
            Copies.copied = copy.deepcopy(self)

    fitted(Copies(), precision="O2")
    with pytest.raises(ConfigError, match="not attached"):
        Copies.copied.trainer  # noqa: B018
    assert fitted(Copies.copied, precision="O2").global_step == 4


class Looks(Classifier):
    """Keeps, for each micro-batch, whether gradients are there in its forward, and after it."""

    def __init__(self):
        super().__init__()
        self.within, self.after = [], []

    def has_gradients(self):
        return [parameter.grad is not None for parameter in self.parameters()] == [True] * 4

    def training_step(self, batch, batch_idx):
        self.within.append(self.has_gradients())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_):
        self.after.append(self.has_gradients())

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=self.lr)


class BeforeZeroGrad(Callback):
    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        assert trainer.global_step == 0 or pl_module.has_gradients()


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("O0", {}),
        ("O4", {}),
        ("O0", {"accumulate_grad_batches": 2}),
        ("O0", {"callbacks": BeforeZeroGrad()}),
    ],
    ids=["plain", "autocast", "accumulation", "hook"],
)
def test_training_step_sees_the_gradients_of_the_last_step(precision, options):
    """They are cleared between forward and backward, as in Lightning, whether a hook looks or not."""
    module = Looks()
    fitted(module, precision=precision, **options)
    assert module.within == [False, True, True, True]
    assert module.after == [True] * 4
