"""Complex parameters at every level, against loops by hand in complex128: norms count absolute values, no dtype changes."""

from __future__ import annotations

import copy
import csv
import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, TrainingModule, optimizers
from fabricamp.callbacks import EMA, GradientMonitor, StochasticWeightAveraging
from fabricamp.errors import ConfigError, NonFiniteError
from fabricamp.gradients.norms import histogram_of
from fabricamp.loggers import CSVLogger
from fabricamp.precision import OptLevel
from fabricamp.strategies import FSDP
from tests.distributed.ranks import run_ranks
from tests.pairs import pairs
from tests.small import quiet_trainer

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5", "32-true", "bf16-mixed", "16-true", "bf16-true", "64-true"]
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
}


class Spectral(nn.Module):
    """|x @ W + b|, with complex parameters alone."""

    def __init__(self, features=4, outputs=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, outputs, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(outputs, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight + self.bias).abs()


class Net(TrainingModule):
    """A complex and a real layer."""

    def __init__(self, make=OPTIMIZERS["sgd"], conjugates=False):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.spectral = Spectral()
            self.last = nn.Linear(3, 1)
        self.make = make
        self.conjugates = conjugates

    def training_step(self, batch, batch_idx):
        (x,) = batch
        if self.conjugates:
            out = (x.to(self.spectral.weight.dtype) @ self.spectral.weight.conj() + self.spectral.bias).abs()
        else:
            out = self.spectral(x)
        return self.last(out.to(self.last.weight.dtype)).float().square().mean()

    def configure_optimizers(self):
        return self.make(self.parameters())


def batches(size=4, steps=6):
    x = torch.randn(size * steps, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=size)


def by_hand(clip=None, accumulate=1, **options):
    """The same run as a loop in complex128."""
    net = Net(**options).double()
    for parameter in net.spectral.parameters():
        parameter.data = parameter.data.to(torch.complex128)
    optimizer = net.configure_optimizers()
    for index, (x,) in enumerate(batches()):
        (net.training_step((x.double(),), index) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            if clip is not None:
                gradients = [parameter.grad for parameter in net.parameters()]
                norm = sum(gradient.abs().square().sum() for gradient in gradients).sqrt()
                for gradient in gradients:
                    gradient.mul_(min(1.0, float(clip / (norm + 1e-6))))
            optimizer.step()
            optimizer.zero_grad()
    return net


def level_of(name):
    return OptLevel(name, loss_scale=128.0) if name in ("O1", "O2") else name


def tolerance(name):
    # The real layer's values are half within the step; the complex layer's are not.
    return 1e-5 if name in ("O0", "32-true", "64-true") else 2e-2


def assert_near(mine, theirs, tolerance):
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.detach().to(other.dtype), other.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("level", "make", "clip", "accumulate", "policy"),
    pairs(LEVELS, sorted(OPTIMIZERS), [None, 0.5], [1, 2], [None, "skip"]),
)
def test_a_run_is_that_of_a_loop_by_hand(level, make, clip, accumulate, policy):
    net = Net(OPTIMIZERS[make])
    trainer = quiet_trainer(
        max_epochs=1,
        precision=level_of(level),
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
        nan_policy=policy,
    )
    trainer.fit(net, batches())
    assert net.spectral.weight.dtype == torch.complex64
    assert_near(net.parameters(), by_hand(clip, accumulate, make=OPTIMIZERS[make]).parameters(), tolerance(level))


@pytest.mark.parametrize("level", ["O1", "O2", "16-mixed"])
def test_a_dynamic_scale(level):
    """An overflow of the first scale skips the step; what follows equals the loop by hand without these steps."""
    net = Net(lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    trainer = quiet_trainer(max_epochs=1, precision=level, gradient_clip_val=0.5)
    trainer.fit(net, batches(steps=30))
    assert trainer.global_step == 30
    assert trainer.skipped_steps < 10
    assert_near(net.parameters(), Net().parameters(), 0.0)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_autograd_may_leave_a_conjugate_view(level, accumulate):
    options = {"make": functools.partial(torch.optim.SGD, lr=0.05), "conjugates": True}
    net = Net(**options)
    seen = []

    class Look(Callback):
        def on_after_backward(self, trainer, module):
            seen.append(module.spectral.weight.grad.is_conj())

    trainer = quiet_trainer(
        max_epochs=1,
        precision=level_of(level),
        accumulate_grad_batches=accumulate,
        nan_policy="skip",
        callbacks=[Look()],
    )
    trainer.fit(net, batches())
    assert all(seen)
    assert_near(net.parameters(), by_hand(accumulate=accumulate, **options).parameters(), 2e-2)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("part", [complex("inf"), complex(0, float("nan"))])
def test_a_bad_part_is_named(level, part):
    class Bad(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + (self.spectral.bias * (part if batch_idx == 2 else 1)).real.sum() * 0.001

    net = Bad()
    with pytest.raises(NonFiniteError, match=r"gradients of spectral\.bias were not finite at step 2"):
        quiet_trainer(max_epochs=1, precision=level_of(level), nan_policy="raise").fit(net, batches())


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4),
    kinds=st.lists(st.booleans(), min_size=4, max_size=4),
    scale=st.sampled_from([1.0, 128.0]),
    max_norm=st.sampled_from([0.01, 0.5, 1e6]),
)
def test_clipping_by_norm_at_any_shapes(shapes, kinds, scale, max_norm):
    """The step of SGD with a rate of 1 is the clipped gradient, here that of a sum of products with known factors."""
    generator = torch.Generator().manual_seed(sum(map(len, shapes)))
    factors = []
    for shape, is_complex in zip(shapes, kinds, strict=False):
        dtype = torch.complex64 if is_complex else torch.float32
        factors.append(torch.randn(shape, dtype=dtype, generator=generator))

    class Products(TrainingModule):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([torch.zeros_like(factor) for factor in factors])

        def training_step(self, batch, batch_idx):
            products = [
                weight.flatten() * factor.flatten() for weight, factor in zip(self.weights, factors, strict=True)
            ]
            return sum(one.real.sum() + one.imag.sum() if one.is_complex() else one.sum() for one in products)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    net = Products()
    reference = Products()
    reference.training_step((), 0).backward()
    gradients = [weight.grad.to(torch.complex128) for weight in reference.weights]
    norm = torch.stack([gradient.abs().square().sum() for gradient in gradients]).sum().sqrt()
    for level in ("O0", OptLevel("O1", loss_scale=scale)):
        for weight in net.weights:
            weight.data.zero_()
        trainer = quiet_trainer(max_steps=1, precision=level, gradient_clip_val=max_norm)
        trainer.fit(net, DataLoader(TensorDataset(torch.zeros(1, 1))))
        for weight, gradient in zip(net.weights, gradients, strict=True):
            expected = -gradient * min(1.0, float(max_norm / (norm + 1e-6)))
            torch.testing.assert_close(weight.detach().to(torch.complex128), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_clipping_by_value_is_refused_before_the_first_batch(level):
    words = r"by value, but parameter 0 of group 0 of SGD is complex .*gradient_clip_algorithm='norm'"
    trainer = quiet_trainer(max_epochs=1, precision=level, gradient_clip_val=0.5, gradient_clip_algorithm="value")
    with pytest.raises(ConfigError, match=words):
        trainer.fit(Net(), batches())
    with pytest.raises(ConfigError, match=words):
        quiet_trainer(max_epochs=1, precision=level).fit(Manual("value"), batches())


class Manual(Net):
    """Manual optimization, with clipping by ``algorithm``."""

    automatic_optimization = False

    def __init__(self, algorithm="norm", **options):
        super().__init__(**options)
        self.automatic_optimization = False
        self.algorithm = algorithm

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, 0.5, self.algorithm)
        optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_manual_optimization(level):
    net = Manual()
    quiet_trainer(max_epochs=1, precision=level_of(level)).fit(net, batches())
    assert_near(net.parameters(), by_hand(clip=0.5).parameters(), tolerance(level))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_hooks_see_and_edit_unscaled_gradients(level):
    class Halve(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            for parameter in module.spectral.parameters():
                parameter.grad.mul_(0.5)

    options = {"make": functools.partial(torch.optim.SGD, lr=0.05)}
    net = Net(**options)
    quiet_trainer(max_epochs=1, precision=level_of(level), callbacks=[Halve()]).fit(net, batches())
    reference = Net(**options)
    optimizer = torch.optim.SGD(
        [{"params": reference.spectral.parameters(), "lr": 0.025}, {"params": reference.last.parameters(), "lr": 0.05}]
    )
    for index, batch in enumerate(batches()):
        reference.training_step(batch, index).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_near(net.parameters(), reference.parameters(), tolerance(level))


@pytest.mark.parametrize(
    ("level", "conjugates"), [("O0", False), ("O1", False), ("O2", False), ("O2", True), ("O5", True), ("O1", True)]
)
def test_a_checkpoint_within_an_accumulation_resumes_to_the_same_bits(tmp_path, level, conjugates):
    make = OPTIMIZERS["sgd"]
    path = tmp_path / "within.ckpt"

    class Save(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(path)

    options = {"max_epochs": 1, "precision": level, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    if level == "O0":
        options["nan_policy"] = "skip"
    straight = Net(make, conjugates)
    quiet_trainer(callbacks=[Save()], **options).fit(straight, batches())
    resumed = Net(make, conjugates)
    quiet_trainer(**options).fit(resumed, batches(), ckpt_path=path)
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_averages_move_both_parts(level):
    class Look(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.seen.append(module.spectral.bias.detach().clone())

    look = Look()
    net = Net()
    quiet_trainer(max_steps=3, precision=level_of(level), callbacks=[look, EMA(decay=0.25)]).fit(net, batches())
    first, second, third = look.seen
    assert_near([net.spectral.bias], [0.25 * (0.25 * first + 0.75 * second) + 0.75 * third], 1e-6)


@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_the_mean_over_epochs_has_both_parts(level):
    net = Net(lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    callback = StochasticWeightAveraging(1e-12, swa_epoch_start=1, annealing_epochs=1)
    quiet_trainer(max_epochs=3, precision=level_of(level), callbacks=[callback]).fit(net, batches())
    assert_near(net.spectral.parameters(), Net().spectral.parameters(), 1e-6)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_the_monitor_logs_norms_of_absolute_values(tmp_path, level):
    logger = CSVLogger(tmp_path, name="", version="run")
    monitor = GradientMonitor(per_parameter=True)
    quiet_trainer(max_steps=1, precision=level_of(level), callbacks=[monitor], logger=logger, log_every_n_steps=1).fit(
        Net(), batches()
    )
    (row,) = csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines())
    (found,) = [float(value) for name, value in row.items() if name.endswith("spectral.weight")]
    reference = Net()
    reference.training_step(next(iter(batches())), 0).backward()
    assert found == pytest.approx(reference.spectral.weight.grad.abs().square().sum().sqrt().item(), rel=2e-2)


def test_a_histogram_is_of_real_and_imaginary_parts():
    value = torch.tensor([1 + 2j, -3 + 4j], dtype=torch.complex64)
    for gradient in (value, value.conj().resolve_conj().conj()):
        histogram = histogram_of(gradient)
        assert (histogram.counts.sum(), histogram.low, histogram.high) == (4, -3, 4)
        assert (histogram.total, histogram.squares) == (4, 1 + 4 + 9 + 16)


@pytest.mark.parametrize(
    "name",
    [name for name in sorted(dir(optimizers)) if name.startswith("Fused") and name != "FusedOptimizer"],
)
def test_fused_optimizers_refuse_them_by_name(name):
    net = Net(lambda parameters: getattr(optimizers, name)(parameters, lr=0.1))
    with pytest.raises(ConfigError, match="complex64"):
        quiet_trainer(max_steps=1).fit(net, batches())


# -- several ranks -----------------------------------------------------------------------------------------------------------------


def of_two_ranks():
    """Each strategy, with and without accumulation and half levels: the loop by hand on the batches of both ranks together."""
    for strategy in ("ddp", "delayed_ddp", FSDP([Spectral]), FSDP([nn.Linear])):
        for level, clip, accumulate in pairs(["O0", "O1", "O2", "O5"], [None, 0.1], [1, 2]):
            net = Net()
            sharded = isinstance(strategy, FSDP)
            trainer = quiet_trainer(
                devices=2,
                strategy=copy.deepcopy(strategy),
                max_epochs=1,
                precision=level_of(level),
                gradient_clip_val=clip,
                accumulate_grad_batches=accumulate,
            )
            trainer.fit(net, DataLoader(batches().dataset, batch_size=2))
            if not sharded or trainer.global_rank == 0:  # fsdp leaves the whole module on rank 0
                expected = by_hand(clip, accumulate)
                assert_near(net.parameters(), expected.parameters(), tolerance(level))
    for strategy in ("ddp", "delayed_ddp"):
        net = Net(conjugates=True)
        trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=1)
        trainer.fit(net, DataLoader(batches().dataset, batch_size=2))
        assert_near(net.parameters(), by_hand(conjugates=True).parameters(), 1e-5)
    own = Net()
    own.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"fsdp' gathers weight \(torch.complex64\) and .* together"):
        quiet_trainer(devices=2, strategy="fsdp", max_epochs=1).fit(own, batches())


def test_two_ranks():
    run_ranks(of_two_ranks, 2, backend=None)


class SaveWithin(Callback):
    """Saves within the first accumulation; keeps this rank's gradient then, and the one that a resumed run begins with."""

    def __init__(self, path=None):
        self.path = path
        self.gradient = None

    def on_train_start(self, trainer, module):
        if module.spectral.bias.grad is not None:
            self.gradient = module.spectral.bias.grad.clone()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.path is not None and batch_idx == 0:
            self.gradient = module.spectral.bias.grad.clone()
            trainer.save_checkpoint(self.path)


def gradient_within(path):
    save = SaveWithin(path)
    options = {"devices": 2, "strategy": "delayed_ddp", "max_epochs": 1, "accumulate_grad_batches": 2}
    quiet_trainer(callbacks=[save], **options).fit(Net(), batches(size=2, steps=8))
    return save.gradient


def test_fewer_ranks_resume_an_accumulation_with_the_mean_over_the_ranks(tmp_path):
    path = tmp_path / "within.ckpt"
    own = run_ranks(gradient_within, 2, path, backend=None)
    assert not torch.equal(own[0], own[1])
    resumed = SaveWithin()
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=[resumed])
    trainer.fit(Net(), batches(size=2, steps=8), ckpt_path=path)
    assert_near([resumed.gradient], [(own[0] + own[1]) / 2], 1e-6)
