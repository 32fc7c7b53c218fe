"""Optimizers that call their closure again, or not at its beginning: as the loop by hand, or refused by name; others at no cost."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, TrainingModule
from fabricamp.errors import ConfigError
from fabricamp.optimizers import LARC, FusedSGD
from fabricamp.optimizers.closures import takes_closure
from fabricamp.precision import OptimizerStep, OptLevel, Precision
from tests.distributed.ranks import run_ranks
from tests.pairs import pairs
from tests.small import quiet_trainer


class SAM(torch.optim.SGD):
    """Sharpness-aware: the gradient at the weights moved along the first gradient.  Leaves grad mode to the closure."""

    def __init__(self, params, lr=0.1, rho=0.5):
        super().__init__(params, lr=lr)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("SAM needs a closure")
        loss = closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        moves = [parameter.grad * (self.rho / norm) for parameter in parameters]
        torch._foreach_add_(parameters, moves)
        closure()
        torch._foreach_sub_(parameters, moves)
        super().step()
        return loss


class LineSearch(torch.optim.SGD):
    """Halves its rate until the loss falls; without a closure it is SGD.  Calls the closure up to ten times."""

    def step(self, closure=None):
        if closure is None:
            return super().step()
        first = closure().item()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = [parameter.grad.clone() for parameter in parameters]
        slope = sum(float(gradient.square().sum()) for gradient in gradients)
        rate = 8.0
        while rate > 0.02:
            with torch.no_grad():
                torch._foreach_sub_(parameters, [rate * gradient for gradient in gradients])
            if closure().item() <= first - 0.1 * rate * slope:
                break
            with torch.no_grad():
                torch._foreach_add_(parameters, [rate * gradient for gradient in gradients])
            rate /= 2
        return first


class Averaged(torch.optim.SGD):
    """Moves the weights before its only call of the closure, as schedule-free optimizers with a closure do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                start = self.state[parameter].setdefault("start", parameter.clone())
                parameter.lerp_(start, 0.3)
        loss = torch.enable_grad()(closure)()
        super().step()
        return loss


class Noisy(torch.optim.SGD):
    """Changes the gradients before it calls its closure: ``how`` in place, or by other tensors."""

    def __init__(self, params, how):
        super().__init__(params, lr=0.1)
        self.how = how

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:  # in a loop by hand, before the first backward
                    continue
                if self.how == "in place":
                    parameter.grad.mul_(100.0)
                else:
                    parameter.grad = None if self.how == "none" else parameter.grad * 100
        loss = torch.enable_grad()(closure)()
        super().step()
        return loss


class Net(TrainingModule):
    def __init__(self, make, dropout=0.0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.make = make
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        x, y = batch
        loss = F.mse_loss(self.net(x).float(), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return self.make(self.parameters())


class Passing(Net):
    """Overrides ``optimizer_step``, as Lightning's pages show it."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class Manual(Net):
    """Gives the closure itself."""

    def __init__(self, make, clip=None):
        super().__init__(make)
        self.automatic_optimization = False
        self.clip = clip

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        @torch.enable_grad()
        def closure():
            optimizer.zero_grad()
            loss = super(Manual, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            if self.clip is not None:
                self.clip_gradients(optimizer, self.clip)
            return loss

        optimizer.step(closure)


def batches(size=4, steps=6):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size * steps, 4, generator=generator)
    return DataLoader(TensorDataset(x, torch.randn(size * steps, 1, generator=generator)), batch_size=size)


def by_hand(make, clip=None, autocast=False, dropout=0.0):
    """The optimizer's own documented loop."""
    net = Net(make, dropout)
    net.log = lambda *_, **__: None
    optimizer = net.configure_optimizers()
    torch.manual_seed(7)
    for batch in batches():

        @torch.enable_grad()
        def closure(batch=batch):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = net.training_step(batch, 0)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            return loss

        optimizer.step(closure)
    return net


def equal(one, other):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one.parameters(), other.parameters(), strict=True))


AGAIN = {
    "SAM": SAM,
    "line search": functools.partial(LineSearch, lr=0.1),
    "moves first": functools.partial(Averaged, lr=0.1),
    "gradients in place": functools.partial(Noisy, how="in place"),
    "gradients replaced": functools.partial(Noisy, how="replaced"),
    "gradients none": functools.partial(Noisy, how="none"),
}


@pytest.mark.parametrize(
    ("name", "module", "level", "clip"),
    pairs(sorted(AGAIN), [Net, Passing, Manual], ["O0", "O4", "32-true"], [None, 0.5]),
)
def test_a_run_is_the_optimizers_own_loop(name, module, level, clip):
    net = module(AGAIN[name])
    options = {} if module is Manual else {"gradient_clip_val": clip}
    if module is Manual:
        net.clip = clip
    quiet_trainer(max_epochs=1, precision=level, **options).fit(net, batches())
    reference = by_hand(AGAIN[name], clip, autocast=level == "O4")
    assert equal(net, reference)
    # The first forward of a step is in vain if the optimizer writes before it calls.
    assert net.calls == reference.calls + (0 if name in ("SAM", "line search") else 6)


@pytest.mark.parametrize("module", [Net, Manual])
def test_autocast_keeps_no_half_weights_from_an_earlier_call(module):
    make = functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=4)
    net = module(make)
    quiet_trainer(max_epochs=1, precision="O4").fit(net, batches())
    assert equal(net, by_hand(make, autocast=True))


def test_further_calls_are_forwards_of_their_own():
    """Dropout draws anew in each, from the same stream as in the loop by hand; self.log counts the first one of each step."""

    class Look(Callback):
        def on_fit_start(self, trainer, module):
            torch.manual_seed(7)

    net = Net(SAM, dropout=0.5)
    trainer = quiet_trainer(max_epochs=1, callbacks=[Look()])
    firsts = []
    step = SAM.step

    def noting(optimizer, closure=None):
        firsts.append(step(optimizer, closure).item())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SAM, "step", noting)
        trainer.fit(net, batches())
    assert equal(net, by_hand(SAM, dropout=0.5))
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(sum(firsts) / len(firsts))


def test_hooks_run_around_each_call():
    events = []

    class Look(Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            events.append("zero_grad")

        def on_before_backward(self, trainer, module, loss):
            events.append("backward")

        def on_after_backward(self, trainer, module):
            events.append("after")

        def on_before_optimizer_step(self, trainer, module, optimizer):
            events.append("before step")
            for parameter in module.parameters():
                parameter.grad.mul_(2)

    net = Net(SAM)
    quiet_trainer(max_steps=1, callbacks=[Look()]).fit(net, batches())
    assert events == ["zero_grad", "backward", "after", "before step"] * 2
    reference = Net(SAM)
    optimizer = reference.configure_optimizers()
    reference.log = lambda *_, **__: None

    @torch.enable_grad()
    def closure():
        optimizer.zero_grad()
        loss = reference.training_step(next(iter(batches())), 0)
        (2 * loss).backward()
        return loss

    optimizer.step(closure)
    assert equal(net, reference)


def test_an_own_way_of_clipping_clips_each_call():
    class Clipping(Net):
        seen = 0

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.seen += 1
            self.clip_gradients(optimizer, 0.5, "norm")

    net = Clipping(SAM)
    quiet_trainer(max_epochs=1).fit(net, batches())
    assert net.seen == 12
    assert equal(net, by_hand(SAM, 0.5))


# -- optimizers that call it once, at their beginning ------------------------------------------------------------------------------

ONCE = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
)


def own_class(name):
    """A class of the user that passes its closure on to torch's."""

    def step(self, closure=None):
        self.got = closure
        return kind.step(self, closure)

    kind = getattr(torch.optim, name)
    return type(f"My{name}", (kind,), {"step": step})


@pytest.mark.parametrize("name", ONCE)
def test_the_first_call_is_free(name):
    """The bits of torch's class, and as many forwards, at each level; torch's own class gets no closure."""
    for level in ("O0", "O2" if name in ("SGD", "AdamW") else "O4"):
        precision = OptLevel(level, loss_scale=128.0) if level == "O2" else level
        runs = []
        for kind in (getattr(torch.optim, name), own_class(name)):
            net = Net(lambda parameters, kind=kind: kind(parameters, lr=0.01))
            trainer = quiet_trainer(max_epochs=1, precision=precision, gradient_clip_val=0.5)
            trainer.fit(net, batches())
            runs.append((net, trainer))
        (theirs, _), (mine, trainer) = runs
        assert equal(mine, theirs)
        assert mine.calls == theirs.calls == 6
        assert trainer.optimizers[0].got is not None


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"nan_policy": "skip"}])
def test_a_first_call_is_free_wherever_another_is_refused(level, options):
    runs = []
    for kind in (torch.optim.SGD, own_class("SGD")):
        net = Net(lambda parameters, kind=kind: kind(parameters, lr=0.1, momentum=0.9))
        trainer = quiet_trainer(max_epochs=2, precision=level, **options)
        trainer.fit(net, batches())
        runs.append(net)
    assert equal(*runs)
    assert runs[0].calls == runs[1].calls == 12


def test_an_optimizer_that_demands_a_closure_may_call_it_within_no_grad():
    class Demands(SAM):
        def step(self, closure):
            return super().step(closure)

    net = Net(Demands)
    quiet_trainer(max_epochs=1).fit(net, batches())
    assert equal(net, by_hand(SAM))


def test_who_gets_a_closure():
    weight = [nn.Parameter(torch.zeros(2, 2))]

    class WithoutClosure(torch.optim.SGD):
        def step(self):
            super().step()

    class Wrapper(torch.optim.SGD):
        def step(self, *args, **options):
            return super().step(*args, **options)

    class Mixed(torch.optim.SGD):
        pass

    taking = [SAM(weight), own_class("Adam")(weight), Wrapper(weight, lr=0.1)]
    assert list(map(takes_closure, taking)) == [True] * 3
    others = [
        torch.optim.AdamW(weight),
        torch.optim.Muon(weight),
        Mixed(weight, lr=0.1),
        FusedSGD(weight, lr=0.1),
        WithoutClosure(weight, lr=0.1),
    ]
    assert list(map(takes_closure, others)) == [False] * 5
    quiet_trainer(max_steps=1).fit(Net(lambda parameters: WithoutClosure(parameters, lr=0.1)), batches())


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_larc_hands_its_closure_on(level):
    """An optimizer within LARC gets the loss and its rewritten gradients, and no other pass."""

    def trained(kind):
        net = Net(lambda parameters: LARC(kind(parameters, lr=0.1)))
        quiet_trainer(max_epochs=1, precision=level).fit(net, batches())
        return net

    assert equal(trained(own_class("SGD")), trained(torch.optim.SGD))
    for kind in (SAM, LineSearch):
        with pytest.raises(ConfigError, match=f"{kind.__name__}.step calls its closure after .* without LARC"):
            trained(kind)
        net = Net(lambda parameters, kind=kind: LARC(kind(parameters, lr=0.1)))
        optimizer = net.configure_optimizers()

        def closure(net=net):
            loss = net.training_step(next(iter(batches())), 0)
            loss.backward()
            return loss

        with pytest.raises(ConfigError, match="without LARC"):
            optimizer.step(closure)


# -- refusals ----------------------------------------------------------------------------------------------------------------------


class OwnStep(OptimizerStep):
    def run(self, loss):
        (self.call or self.optimizer.step)()


class OfOwnSteps(Precision):
    name = "own"

    def step_of(self, optimizer, strategy, clip):
        return OwnStep(self, optimizer, strategy, clip)


REFUSED = [
    ({"precision": "O1"}, "precision 'O1' does not offer.*use 'O0' or 'O4'"),
    ({"precision": OptLevel("O1", loss_scale=128.0)}, "precision 'O1' does not offer"),
    ({"precision": "O2"}, "precision 'O2' does not offer"),
    ({"precision": "O5"}, "precision 'O5' does not offer"),
    ({"precision": OfOwnSteps()}, r"a precision with a step of its own \(OfOwnSteps\) does not offer"),
    ({"nan_policy": "skip"}, "nan_policy='skip' does not offer.*leave nan_policy out"),
    ({"accumulate_grad_batches": 2}, "accumulate_grad_batches > 1 does not offer.*give 1"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
@pytest.mark.parametrize("module", [Net, Passing])
@pytest.mark.parametrize("name", ["SAM", "line search", "moves first"])
def test_a_second_pass_is_refused_by_name(options, words, module, name):
    if options.get("precision") == "O2":
        options = {"precision": OptLevel("O2", max_loss_scale=128.0)}  # no step is skipped
    if options.get("precision") == "O1":
        options = {"precision": OptLevel("O1", max_loss_scale=128.0)}
    kind = {"SAM": "SAM", "line search": "LineSearch", "moves first": "Averaged"}[name]
    with pytest.raises(ConfigError, match=rf"{kind}\.step calls its closure a second time, .*{words}"):
        quiet_trainer(max_epochs=1, **options).fit(module(AGAIN[name]), batches())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_write_that_no_version_counter_sees_is_no_way_to_an_old_loss(level):
    class ThroughData(torch.optim.SGD):
        def step(self, closure=None):
            loss = closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(0.1)
            closure()
            return loss

    make = functools.partial(ThroughData, lr=0.1)
    with pytest.raises(ConfigError, match=r"ThroughData\.step calls its closure a second time"):
        quiet_trainer(max_epochs=1, precision=OptLevel(level, loss_scale=64.0)).fit(Net(make), batches())


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_manual_optimization_is_refused_where_it_cannot_be_right(level):
    precision = level if level == "O5" else OptLevel(level, max_loss_scale=128.0)
    with pytest.raises(ConfigError, match=rf"SAM\.step calls its closure a second time.*{level}"):
        quiet_trainer(max_epochs=1, precision=precision).fit(Manual(SAM), batches())


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_own_optimizer_step_may_ask_for_the_loss_before_it_steps(level):
    """Before torch's optimizers call it, only the module's lines ran: without a write the loss is still that of the weights."""

    class Asking(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            assert float(optimizer_closure().detach()) == float(optimizer_closure().detach())
            optimizer.step(closure=optimizer_closure)

    class Writing(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            with torch.no_grad():
                self.net[0].weight.mul_(0.5)
            optimizer.step(closure=optimizer_closure)

    precision = level if level == "O0" else OptLevel(level, loss_scale=128.0)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    asking = Asking(sgd)
    plain = Net(sgd)
    for net in (asking, plain):
        quiet_trainer(max_epochs=1, precision=precision).fit(net, batches())
    assert equal(asking, plain)
    writing = Writing(sgd)
    trainer = quiet_trainer(max_epochs=1, precision=precision)
    if level != "O0":
        with pytest.raises(ConfigError, match=rf"SGD\.step calls its closure .* after it has changed weights.*{level}"):
            trainer.fit(writing, batches())
        return
    trainer.fit(writing, batches())
    reference = Net(sgd)
    optimizer = reference.configure_optimizers()
    for x, y in batches():
        with torch.no_grad():
            reference.net[0].weight.mul_(0.5)
        optimizer.zero_grad()
        F.mse_loss(reference.net(x), y).backward()
        optimizer.step()
    assert equal(writing, reference)


def test_what_a_second_pass_cannot_have():
    class Sums(Net):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.mse_loss(self.net(x), y, reduction="sum"), len(x)

    class Once(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if self.calls == 1 else None

    with pytest.raises(ConfigError, match=r"\(sum, weight\), but SAM runs backward again"):
        quiet_trainer(max_epochs=1).fit(Sums(SAM), batches())
    with pytest.raises(ConfigError, match=r"training_step returned None, but SAM needs the loss"):
        quiet_trainer(max_epochs=1).fit(Once(SAM), batches())

    class Keeping(torch.optim.SGD):
        def step(self, closure=None):
            self.kept = closure
            return super().step(closure)

    trainer = quiet_trainer(max_steps=1)
    trainer.fit(Net(lambda parameters: Keeping(parameters, lr=0.1)), batches())
    with pytest.raises(ConfigError, match=r"closure of Keeping\.step was called after the step"):
        trainer.optimizers[0].kept()


# -- several ranks -----------------------------------------------------------------------------------------------------------------


def of_two_ranks():
    """Each call's gradients are the mean over the ranks: the loop by hand on the batches of both together."""
    for strategy, name, module in pairs(
        ["ddp", "delayed_ddp"], ["SAM", "line search", "moves first"], [Net, Passing, Manual]
    ):
        net = module(AGAIN[name])
        trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=1)
        if (
            name == "line search"
        ):  # each rank has a loss of its own, and would choose a rate of its own: the same data for both
            data = [batch for batch in batches() for _ in range(2)]
            trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=1, use_distributed_sampler=False)
            trainer.fit(net, data[::2])
        else:
            trainer.fit(net, DataLoader(batches().dataset, batch_size=2))
        for mine, theirs in zip(net.parameters(), by_hand(AGAIN[name]).parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    trainer = quiet_trainer(devices=2, strategy="fsdp", max_epochs=1)
    with pytest.raises(ConfigError, match=r"SAM\.step calls its closure a second time.*strategy='fsdp' does not offer"):
        trainer.fit(Net(SAM), batches())
    once = Net(lambda parameters: own_class("SGD")(parameters, lr=0.1))
    quiet_trainer(devices=2, strategy="fsdp", max_epochs=1).fit(once, batches())
    assert once.calls == 3


def test_two_ranks():
    run_ranks(of_two_ranks, 2, backend=None)
