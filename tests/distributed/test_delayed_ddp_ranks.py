"""The Trainer under delayed_ddp on two ranks: every option, level and kind of update, compared with ddp and one process."""

from __future__ import annotations

import contextlib
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from fabricamp import Callback, ConfigError, TrainingModule
from fabricamp.ops import bridge, table
from fabricamp.optimizers import LARC, FusedAdam, FusedLAMB, FusedSGD
from fabricamp.precision import OptLevel
from fabricamp.strategies import DDP, DelayedDDP
from tests.cuda_on_cpu.compiler import compiler
from tests.distributed.ranks import run_ranks
from tests.distributed.test_trainer_stops import Unused, thawing
from tests.small import Classifier, loader, quiet_trainer

OPTIONS = {
    "delayed": {},
    "overlapped": {"message_size": 40},
    "streams": {"message_size": 1, "num_allreduce_streams": 2},
    "retained": {"retain_allreduce_buffers": True},
    "predivided": {"gradient_predivide_factor": 2.0},
    "always_fp32": {"allreduce_always_fp32": True},
    "bf16": {"allreduce_dtype": torch.bfloat16},
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "fused": lambda parameters: FusedAdam(parameters, lr=0.01, eps=1e-3),
    "lamb": lambda parameters: FusedLAMB(parameters, lr=0.01, eps=1e-3),
    "larc": lambda parameters: LARC(FusedSGD(parameters, lr=0.1, momentum=0.9)),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}
# The allowed distance of two runs, relative to the distance from the initial weights.
TOLERANCE = {"O0": 1e-5, "O1": 0.005, "O2": 0.005, "O3": 0.05, "O4": 0.02, "O5": 0.02}


class Net(TrainingModule):
    def __init__(self, optimizer):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
        )
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        net, make = self.net, OPTIMIZERS[self.optimizer]
        if self.optimizer == "lbfgs":
            return make(net.parameters())
        # Deliberately not in the order of registration.
        return make(
            [{"params": [*net[3].parameters(), net[0].weight]}, {"params": [net[0].bias, *net[1].parameters()]}]
        )


def flat(module):
    return torch.cat([value.flatten().double() for value in module.state_dict().values()])


def trainer_of_ranks(**options):
    return quiet_trainer(**{"strategy": "delayed_ddp", "devices": "auto", **options})


def fitted(strategy, level, optimizer, accumulate=1, clip=None, **options):
    torch.manual_seed(3)
    module = Net(optimizer)
    before = flat(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_of_ranks(
            strategy=strategy,
            precision=level,
            max_epochs=2,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=clip,
            **options,
        ).fit(module, loader(32, 4))
    return before, flat(module)


def distance(before, one, other):
    return float((one - other).norm() / (other - before).norm())


PRODUCT = list(itertools.product(["O0", "O2"], ["sgd", "fused"], [(1, None), (3, 0.5)], OPTIONS))
# Adam and a clipped norm hide gradients that are too large, so every option runs with SGD without clipping at both levels.
FEWER = [
    one
    for one in PRODUCT
    if one[1:3] == ("sgd", (1, None)) or one[:3] == ("O2", "fused", (3, 0.5)) or one[3] in ("delayed", "overlapped")
]
MORE = [
    *itertools.product(["O1", "O3", "O4", "O5"], ["fused"], [(1, 0.5)], ["delayed", "overlapped"]),
    *itertools.product(["O0", "O2"], ["lamb", "larc"], [(1, None)], ["delayed"]),
    *itertools.product(["O0", "O4"], ["lbfgs"], [(1, None)], ["delayed", "overlapped"]),
]


def every_case(cases):
    """Returns the cases that differ from ddp by more than rounding, or between the ranks."""
    of_ddp, far = {}, {}
    for level, optimizer, (accumulate, clip), options in cases:
        key = level, optimizer, accumulate, clip
        if key not in of_ddp:
            of_ddp[key] = fitted("ddp", *key)
        before, wanted = of_ddp[key]
        _, found = fitted(DelayedDDP(**OPTIONS[options]), *key)
        everyone = [torch.empty_like(found) for _ in range(2)]
        dist.all_gather(everyone, found)
        parameters = slice(0, 8 * 16 + 16 * 3)  # then come running statistics, from each rank's own last batch
        apart = distance(before, found, wanted) if dist.get_rank() == 0 else 0.0
        tolerance = max(TOLERANCE[level], 0.05 if options == "bf16" else 0)
        if apart > tolerance or not torch.equal(everyone[0][parameters], everyone[1][parameters]):
            far[(*key, options)] = apart
    return far


@pytest.mark.parametrize(
    "cases", [[*FEWER, *MORE], pytest.param(PRODUCT, marks=pytest.mark.slow)], ids=["fewer", "all"]
)
def test_every_option_trains_what_ddp_trains(cases):
    assert run_ranks(every_case, 2, cases, timeout=200.0) == [{}, {}]


# -- kernels -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def kernels():
    """Runs the kernels' sources on the CPU."""
    bridge.kernel.cache_clear()
    before, table.THREADS, table.CHUNK_SIZE = (table.THREADS, table.CHUNK_SIZE), 64, 64
    bridge.COMPILERS["cpu"] = compiler(False)
    table._tables.clear()
    try:
        yield
    finally:
        del bridge.COMPILERS["cpu"]
        table.THREADS, table.CHUNK_SIZE = before
        bridge.kernel.cache_clear()
        table._tables.clear()


class UnusedFused(Unused):
    """Has a head that one rank uses only in every second step, and one that no rank uses."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            self.never = torch.nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx + self.global_rank)

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)


def with_kernels():
    problems = []
    for level, options, clip in (("O0", {}, None), ("O0", {"message_size": 40}, 0.5), ("O2", {}, 0.5)):
        found = []
        for environment in (contextlib.nullcontext(), kernels()):
            with environment:
                module = UnusedFused()
                before = flat(module)
                trainer_of_ranks(
                    strategy=DelayedDDP(**options), precision=level, max_epochs=1, gradient_clip_val=clip
                ).fit(module, loader(24, 4))
                found.append(flat(module))
                assert torch.equal(module.never.weight, UnusedFused().never.weight)
        if distance(before, *found) > (1e-4 if level == "O0" else 2e-2):
            problems.append((level, options, distance(before, *found)))
    return problems


def test_kernels_train_what_the_references_train_where_ranks_use_different_parameters():
    assert run_ranks(with_kernels, 2) == [[], []]


# -- parameters without gradients --------------------------------------------------------------------------------------


def sometimes():
    results = {}
    for level, accumulate in itertools.product(["O0", "O2"], [1, 3]):
        found = []
        for strategy in (DDP(find_unused_parameters=True), DelayedDDP(), DelayedDDP(message_size=30)):
            module = Unused()
            trainer_of_ranks(strategy=strategy, precision=level, max_epochs=2, accumulate_grad_batches=accumulate).fit(
                module, loader(32, 4)
            )
            found.append(flat(module))
        of_ddp, delayed, overlapped = found
        results[level, accumulate, False] = of_ddp, delayed
        results[level, accumulate, True] = of_ddp, overlapped
    for options in ({}, {"message_size": 30}):
        for level in ("O0", "O2", "O5"):
            results[level, bool(options)] = thawing(level, strategy=DelayedDDP(**options), devices="auto")
    return results


def test_unused_and_thawed_parameters():
    first, second = run_ranks(sometimes, 2)
    alone = {level: thawing(level) for level in ("O0", "O2", "O5")}
    for key, found in first.items():
        if len(key) == 3:
            of_ddp, delayed = found
            assert (of_ddp - delayed).abs().max() < {"O0": 1e-6, "O2": 2e-3}[key[0]], key
            assert torch.equal(delayed, second[key][1]), key
            continue
        for expected, epoch in zip(alone[key[0]], found, strict=True):
            for one, other in zip(expected, epoch, strict=True):
                assert (one - other).abs().max() < {"O0": 1e-6, "O2": 2e-3, "O5": 2e-2}[key[0]], key


class Elsewhere(Classifier):
    """In every other step rank 1's loss reaches only a parameter that no optimizer has."""

    def __init__(self):
        super().__init__()
        self.other = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return self.other.float() * 1.0 if self.global_rank == 1 and batch_idx // 2 % 2 == 0 else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def elsewhere():
    found = []
    for wraps, level in itertools.product([True, False], ["O0", "O2", "O5"]):
        module = Elsewhere()
        strategy = DDP(find_unused_parameters=True) if wraps else DelayedDDP()
        precision = OptLevel(level, loss_scale=2.0) if level == "O2" else level
        trainer_of_ranks(strategy=strategy, precision=precision, max_epochs=1, accumulate_grad_batches=2).fit(
            module, loader(64, 4)
        )
        found.append((level, flat(module.net)))
    return found


def test_a_rank_that_adds_nothing_to_a_window():
    """The sums that it received from the other rank must not be in its next step."""
    for found in run_ranks(elsewhere, 2):
        before, full = flat(Classifier().net), found[0][1]
        assert [level for level, one in found if distance(before, one, full) > TOLERANCE[level]] == []


# -- hooks and optimizers ----------------------------------------------------------------------------------------------


class Sees(Callback):
    """Keeps the gradients that ``on_before_optimizer_step`` sees."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"]]
        self.seen.append(torch.cat([one.flatten().double() for one in gradients]))


def seen_by_hooks():
    found = {}
    for level in ("O0", "O2"):
        delayed = (DelayedDDP(), DelayedDDP(message_size=40), DelayedDDP(retain_allreduce_buffers=True))
        for strategy in (DDP(), *delayed):
            hook = Sees()
            torch.manual_seed(0)
            module = Net("fused")
            trainer_of_ranks(strategy=strategy, precision=level, max_epochs=1, callbacks=[hook]).fit(
                module, loader(16, 4)
            )
            found.setdefault(level, []).append(torch.stack(hook.seen))
    return found


def test_hooks_before_the_step_see_averaged_unscaled_gradients():
    for found in run_ranks(seen_by_hooks, 2):
        for level, (of_ddp, *others) in found.items():
            for delayed in others:
                torch.testing.assert_close(delayed, of_ddp, rtol=1e-4 if level == "O0" else 2e-2, atol=1e-3)


class Players(TrainingModule):
    """Steps two optimizers by hand; the first network does not require gradients in the second optimizer's turn."""

    automatic_optimization = False

    def __init__(self, fused):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        self.make = FusedAdam if fused else torch.optim.Adam

    def training_step(self, batch, batch_idx):
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            with self.toggled_optimizer(optimizer):
                loss = sign * (self.second(torch.tanh(self.first(batch[0]))).float() ** 2).mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                if batch_idx % 2:
                    self.clip_gradients(optimizer, 0.1)
                optimizer.step()

    def configure_optimizers(self):
        return [self.make(one.parameters(), lr=0.01, eps=1e-3) for one in (self.first, self.second)]


def by_hand():
    apart = {}
    for level, fused in (("O0", False), ("O1", True), ("O2", False), ("O2", True), ("O5", True)):
        found = []
        for strategy in ("ddp", DelayedDDP()):
            module = Players(fused)
            before = flat(module)
            precision = OptLevel(level, loss_scale=128.0) if level in ("O1", "O2") else level
            trainer_of_ranks(strategy=strategy, precision=precision, max_epochs=2).fit(module, loader(32, 4))
            found.append(flat(module))
        apart[level, fused] = distance(before, *found) / TOLERANCE[level]
    with pytest.raises(ConfigError, match="automatic_optimization=False"):
        trainer_of_ranks(strategy=DelayedDDP(message_size=1), max_epochs=1).fit(Players(fused=False), loader())
    return apart


def test_manual_optimization():
    for apart in run_ranks(by_hand, 2):
        assert {key: value for key, value in apart.items() if value > 1} == {}


def evaluated():
    module = Classifier()
    trainer = trainer_of_ranks(max_epochs=1)
    trainer.fit(module, loader(32, 4), loader(8))
    within = trainer.callback_metrics["val_loss"].item()
    results = [trainer.validate(module, loader(8), verbose=False)[0]["val_loss"] for _ in range(2)]
    return within, results, trainer.test(module, loader(8), verbose=False), len(trainer.predict(module, loader(8)))


def test_evaluation():
    first, second = run_ranks(evaluated, 2)
    assert first[:3] == second[:3]
    assert first[1] == [pytest.approx(first[0])] * 2


def test_started_by_the_trainer():
    module, twin = Classifier(), Classifier()
    for one, options in ((module, {"devices": 2, "strategy": "delayed_ddp"}), (twin, {})):
        quiet_trainer(max_epochs=2, **options).fit(one, loader(32, 4 if options else 8))
    torch.testing.assert_close(flat(module), flat(twin), rtol=1e-5, atol=1e-6)


# -- many steps --------------------------------------------------------------------------------------------------------


class Masters(Callback):
    """Checks at every step that masters and their half copies have equal bits on all ranks."""

    def __init__(self):
        self.steps, self.different = 0, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        own = [one.detach().flatten() for group in trainer.optimizers[0].param_groups for one in group["params"]]
        own += [one.detach().flatten().float() for one in module.parameters()]
        mine = torch.cat(own)
        everyone = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(everyone, mine)
        self.steps += 1
        if not torch.equal(*everyone):
            self.different.append(trainer.global_step)


def many_steps(steps, options):
    notes = {}
    for optimizer in ("fused", "sgd"):
        callback = Masters()
        trainer = trainer_of_ranks(
            strategy=DelayedDDP(**options), precision="O2", max_steps=steps, max_epochs=-1, callbacks=[callback]
        )
        trainer.fit(Net(optimizer), loader(64, 4, shuffle=True))
        notes[optimizer] = callback.steps, callback.different
    return notes


@pytest.mark.parametrize(
    "options", [{}, {"message_size": 1, "num_allreduce_streams": 3}], ids=["delayed", "overlapped"]
)
@pytest.mark.parametrize("steps", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_masters_are_equal_at_every_step(steps, options):
    expected = {"fused": (steps, []), "sgd": (steps, [])}
    assert run_ranks(many_steps, 2, steps, options, timeout=200.0) == [expected, expected]
