"""docs/training.md: its code runs unchanged, and does what the page says, at every opt level."""

import copy
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from fabricamp import OptLevel
from fabricamp.callbacks import LearningRateMonitor
from fabricamp.loggers import JSONLinesLogger
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer
from tests.weighted import batches, flat

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
# Limits of the distance between a run's weights and those of a float64 run, relative to the distance trained.
TOLERANCE = {"O0": 1e-5, "O1": 0.02, "O2": 0.02, "O3": 0.05, "O4": 0.1, "O5": 0.1}


def section(heading):
    """Returns the names that the code under ``heading`` defines."""
    code = re.search(r"```python\n(.*?)```", PAGE[PAGE.index(f"## {heading}") :], flags=re.DOTALL)
    names = {}
    exec(code[1], names)
    return names


def fitted(module, data, level, **options):
    """Fits ``module`` at a loss scale that does not overflow, because the hand-written loop skips no steps."""
    before = flat(module)
    precision = OptLevel(level, max_loss_scale=256.0) if level in ("O1", "O2") else level
    trainer = quiet_trainer(**{"max_epochs": 2, "precision": precision, "use_distributed_sampler": False, **options})
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return before, flat(module)


def apart(before, after, wanted):
    return float((after - wanted).norm() / (wanted - before).norm())


def test_a_loss_as_a_sum_with_its_weight():
    module = section("A loss as a sum with its weight")["Tagger"]()
    fitted(module, batches(), "O0", accumulate_grad_batches=2)
    assert module.trainer.global_step == 4


# -- a gradient penalty ----------------------------------------------------------------------------------------------------------


def critic():
    torch.manual_seed(0)
    return section("A gradient penalty")["Critic"]()


def pairs(rank=0):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 8, 8, generator=generator).unbind() for _ in range(4)]


def penalised_by_hand(of_ranks, window):
    """Trains two epochs in float64; the loss of an accumulation step is the mean over its micro-batches."""
    module = critic().double()
    optimizer = module.configure_optimizers()
    steps = [list(itertools.chain(*one)) for one in zip(*of_ranks, strict=True)]
    steps = [[[one[2 * rank], one[2 * rank + 1]] for rank in range(len(of_ranks))] for one in steps]
    for _ in range(2):
        for first in range(0, len(steps), window):
            micro = [pair for step in steps[first : first + window] for pair in step]
            optimizer.zero_grad()
            for real, fake in micro:
                (module.training_step((real.double(), fake.double()), 0) / len(micro)).backward()
            optimizer.step()
    return flat(module)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_penalty(level, window):
    before, after = fitted(critic(), pairs(), level, accumulate_grad_batches=window)
    assert apart(before, after, penalised_by_hand([pairs()], window)) < TOLERANCE[level]


def test_a_gradient_penalty_on_two_ranks():
    cases = [("ddp", "O0", 1), ("ddp", "O2", 2), ("delayed_ddp", "O0", 2), ("delayed_ddp", "O1", 1)]

    def on_two_ranks():
        own = pairs(dist.get_rank())
        return [
            fitted(critic(), own, level, strategy=strategy, devices="auto", accumulate_grad_batches=window)
            for strategy, level, window in cases
        ]

    first, second = run_ranks(on_two_ranks, 2)
    for (_, level, window), (before, after), (_, other) in zip(cases, first, second, strict=True):
        assert torch.equal(after, other)
        assert apart(before, after, penalised_by_hand([pairs(0), pairs(1)], window)) < TOLERANCE[level]


# -- learning rates by layer -----------------------------------------------------------------------------------------------------


def fine_tuned():
    torch.manual_seed(0)
    return section("Learning rates by layer")["FineTuned"]()


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_learning_rates_by_layer(level, tmp_path):
    data, module, twin = list(loader(24)), fine_tuned(), fine_tuned().double()
    rates = [0.01, 0.005, 0.0025, 0.00125]
    parts = [twin.head, *reversed(twin.layers)]
    groups = [{"params": part.parameters(), "lr": rate} for part, rate in zip(parts, rates, strict=True)]
    optimizer = torch.optim.Adam(groups, eps=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            twin.training_step((x.double(), y), 0).backward()
            optimizer.step()
            schedule.step()
    logger = JSONLinesLogger(tmp_path)
    options = {"logger": logger, "callbacks": [LearningRateMonitor("step")], "log_every_n_steps": 1}
    if level == "O2":  # under a dynamic scale schedules follow the applied steps two steps later
        options["precision"] = OptLevel("O2", loss_scale=128.0)
    before, after = fitted(module, data, level, **options)
    assert apart(before, after, flat(twin)) < TOLERANCE[level]
    shown = [group["lr"] for group in module.trainer.optimizers[0].param_groups]
    assert shown == pytest.approx(rates)
    text = "".join(path.read_text() for path in Path(tmp_path).rglob("*.jsonl"))
    assert all(name in text for name in ("/head", "/layer -1", "/layer -3"))


# -- one loss scale per loss -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_lowers_the_scale_of_its_loss_alone(level):
    names = section("One loss scale per loss")
    assert names["precision"].level.num_losses == 2

    class Overflows(names["Pair"]):
        def on_before_backward(self, loss):
            if self.trainer.global_step == 2 and float(loss.detach()) < 0.1:  # the small loss, with loss_id=1
                loss.register_hook(lambda gradient: gradient * float("inf"))

    torch.manual_seed(0)
    module = Overflows()
    precision = OptLevel(level, num_losses=2, max_loss_scale=256.0)
    trainer = quiet_trainer(max_epochs=1, precision=precision)
    trainer.fit(module, loader(24))
    scales = [float(one.scale) for one in precision.verdicts.scaler.losses]
    assert scales == [256.0, 128.0]
    assert trainer.skipped_steps == 1
    twin = copy.deepcopy(module).double()
    assert all(torch.isfinite(one).all() for one in twin.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_two_losses_are_the_sum_of_both(level):
    make = section("One loss scale per loss")["Pair"]
    torch.manual_seed(0)
    module = make()
    twin = copy.deepcopy(module).double()
    before, optimizer = flat(module), twin.configure_optimizers()
    data = list(loader(24))
    for x, y in data:
        optimizer.zero_grad()
        logits = twin.net(x.double())
        (F.cross_entropy(logits, y) + 1e-4 * logits.square().mean()).backward()
        optimizer.step()
    scaled = {"num_losses": 2, "max_loss_scale": 256.0} if level in ("O1", "O2") else {}
    trainer = quiet_trainer(max_epochs=1, precision=OptLevel(level, **scaled))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    assert apart(before, flat(module), flat(twin)) < TOLERANCE[level]
