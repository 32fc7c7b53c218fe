"""Two ranks end at the same step for every kind of stop; frozen, unfrozen and optional parameters under ddp."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from fabricamp import Callback, DataModule, seed_everything
from fabricamp.errors import ConfigError, DistributedError
from fabricamp.strategies import DDP
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


def trainer_of_ranks(**options):
    return quiet_trainer(**{"strategy": "ddp", "devices": "auto", **options})


class StopOnRankOne(Callback):
    """Sets ``should_stop`` on one rank only, in a given hook."""

    def __init__(self, hook):
        setattr(self, hook, self.ask)

    def ask(self, trainer, module, *_):
        if trainer.global_rank == 1 and trainer.global_step >= 3:
            trainer.should_stop = True


class SlowOnRankZero(Classifier):
    def training_step(self, batch, batch_idx):
        time.sleep(0.02 * (1 - self.global_rank) + 0.002)
        return super().training_step(batch, batch_idx)


class Uninterested(Callback):
    """Records the hooks in their order."""

    def __init__(self):
        self.saved_at = []
        self.validating = 0

    def on_validation_start(self, trainer, module):
        self.validating += 1

    def on_validation_end(self, trainer, module):
        self.validating -= 1

    def on_train_end(self, trainer, module):
        self.saved_at.append(trainer.global_step)


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def stopping():
    """Returns (last step, weights) for each kind of stop."""
    ended = {}

    def run(name, module=None, **options):
        end = Uninterested()
        options["callbacks"] = [*options.pop("callbacks", []), end]
        trainer = trainer_of_ranks(**{"max_epochs": 1000, **options})
        module = module or Classifier()
        trainer.fit(module, loader(), loader(8))
        ended[name] = (
            trainer.global_step,
            trainer.current_epoch,
            trainer.state.stop_reason,
            end.saved_at,
            weights(module),
        )
        assert not end.validating, f"{name}: a validation was cut short"

    for hook in ("on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end"):
        run(hook, callbacks=[StopOnRankOne(hook)])
    run("accumulating", callbacks=[StopOnRankOne("on_train_batch_end")], accumulate_grad_batches=3)
    run("min_steps", callbacks=[StopOnRankOne("on_train_batch_end")], min_steps=60)
    run("max_time", SlowOnRankZero(), max_time={"seconds": 1}, val_check_interval=1)
    run("max_steps", max_steps=7)
    run("nobody", max_epochs=1)
    return ended


def test_one_rank_stops_all_at_the_same_step():
    first, second = run_ranks(stopping, 2)
    for name, (*position, values) in first.items():
        *other_position, other_values = second[name]
        assert position == other_position, name
        assert torch.equal(values, other_values), name
        step, _, reason, saved_at = position
        assert saved_at == [step]
        if name.startswith("on_"):
            assert reason == "should_stop was set"
            assert 3 <= step < 4000
    assert first["min_steps"][0] >= 60
    assert first["accumulating"][2] == "should_stop was set"
    assert first["max_time"][2] == "max_time"
    assert first["max_time"][0] < 400
    assert (first["max_steps"][0], first["nobody"][:2]) == (7, (4, 1))


class Thaws(Classifier):
    """Trains one layer in the first epoch, both in the second, the other one in the third; logs which ones had gradients."""

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch != 0)
        self.net[2].requires_grad_(self.current_epoch != 2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Notes(Callback):
    def __init__(self):
        self.weights = []

    def on_train_epoch_end(self, trainer, module):
        self.weights.append([module.net[index].weight.detach().float().clone() for index in (0, 2)])


class Unused(Classifier):
    """Has a head that takes part only in every second step."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.extra = torch.nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        return torch.nn.functional.cross_entropy(self.extra(scores) if batch_idx % 2 else scores, y)


def doubled(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def thawing(level, **options):
    notes, module = Notes(), Thaws()
    quiet_trainer(precision=level, max_epochs=3, callbacks=[notes], **options).fit(
        module, loader(32, 8 if not options else 4)
    )
    return notes.weights


def with_options():
    results, messages = {}, {}
    for level in ("O0", "O2", "O5"):
        results[level] = thawing(level, strategy="ddp", devices="auto")

    def fit(name, module, strategy, **options):
        trainer = trainer_of_ranks(strategy=strategy, max_epochs=2, **options)
        try:
            trainer.fit(module, loader(32, 4))
        except (ConfigError, DistributedError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
        results[name] = weights(module)

    for level in ("O0", "O2"):
        for accumulate in (1, 3):
            options = {"precision": level, "accumulate_grad_batches": accumulate}
            fit(f"unused/{level}/{accumulate}", Unused(), DDP(find_unused_parameters=True), **options)
    fit("static", Classifier(), DDP(static_graph=True))
    fit("static_accumulating", Classifier(), DDP(static_graph=True), accumulate_grad_batches=2)
    fit("views", Classifier(), DDP(gradient_as_bucket_view=True, bucket_cap_mb=0.0001))
    fit("hook", Classifier(), DDP(comm_hook=default_hooks.allreduce_hook))
    fit("sums", Classifier(), DDP(comm_hook=doubled))
    fit("plain", Classifier(), "ddp")
    fit("unused", Unused(), "ddp")
    return results, messages


def test_freezing_and_options_under_ddp():
    both = run_ranks(with_options, 2)
    alone = {level: thawing(level) for level in ("O0", "O2", "O5")}
    for results, messages in both:
        for level, epochs in alone.items():
            for expected, found in zip(epochs, results[level], strict=True):
                for one, other in zip(expected, found, strict=True):
                    assert (one - other).abs().max() < {"O0": 1e-6, "O2": 2e-3, "O5": 2e-2}[level]
        first, second, third = results["O0"]
        assert torch.equal(first[0], Classifier().net[0].weight)  # frozen
        assert not torch.equal(first[0], second[0])  # thawed
        assert torch.equal(second[1], third[1])  # frozen again
        assert torch.equal(results["static"], results["plain"])
        assert torch.equal(results["hook"], results["plain"])
        assert torch.allclose(results["views"], results["plain"], atol=1e-6)
        assert not torch.allclose(results["sums"], results["plain"], atol=1e-3)
        assert set(messages) == {"static_accumulating", "unused"}
        assert "ConfigError: strategy=DDP(static_graph=True)" in messages["static_accumulating"]
        assert "extra.weight, extra.bias" in messages["unused"]
        assert "find_unused_parameters=True" in messages["unused"]
    results = both[0][0]
    for level in ("O0", "O2"):
        for accumulate in (1, 3):
            module = Unused()
            quiet_trainer(precision=level, max_epochs=2, accumulate_grad_batches=accumulate).fit(module, loader(32, 8))
            apart = (weights(module) - results[f"unused/{level}/{accumulate}"]).abs().max()
            assert apart < {"O0": 1e-6, "O2": 5e-3}[level], (level, accumulate)
    for name, found in results.items():
        assert isinstance(found, list) or torch.equal(found, both[1][0][name]) or name == "unused", name


class Data(DataModule):
    """Counts the calls of ``prepare_data`` and ``setup``."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def train_dataloader(self):
        return loader(shuffle=True)

    def val_dataloader(self):
        return [loader(7), loader(5)]


class Dropped(Classifier):
    """Records random numbers, which differ between ranks, and samples, which come from one common order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0][:, 0])
        return super().training_step(batch, batch_idx)


def with_a_datamodule():
    rank = dist.get_rank()
    seed_everything(3, verbose=False)
    torch.manual_seed(rank)
    before = {
        "world": trainer_of_ranks().world_size,
        "rank": trainer_of_ranks().global_rank,
        "zero": trainer_of_ranks().is_global_zero,
    }
    datamodule, module = Data(), Dropped()
    trainer = trainer_of_ranks(max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, datamodule=datamodule)
    trainer.validate(module, datamodule=datamodule, verbose=False)
    folder = trainer.log_dir if rank == 1 else None  # on one rank only: no rank waits for another
    return before, datamodule.calls, torch.cat(module.seen), folder, weights(module)


def test_a_datamodule_and_what_is_known_before_fit():
    first, second = run_ranks(with_a_datamodule, 2)
    assert first[0] == {"world": 2, "rank": 0, "zero": True}
    assert second[0] == {"world": 2, "rank": 1, "zero": False}
    assert first[1] == ["prepare", "setup fit", "prepare", "setup validate"]
    assert second[1] == ["setup fit", "setup validate"]
    every = next(iter(loader(32, 32)))[0][:, 0].sort().values
    for epoch in (slice(0, 16), slice(16, 32)):
        assert torch.equal(torch.cat([first[2][epoch], second[2][epoch]]).sort().values, every)
    assert not torch.equal(first[2][:16], first[2][16:])
    assert second[3] is not None
    assert torch.equal(first[4], second[4])


def bad_modes():
    class Manual(Classifier):
        automatic_optimization = False

    with pytest.raises(ConfigError, match="static_graph"):
        trainer_of_ranks(strategy=DDP(static_graph=True), max_epochs=1).fit(Manual(), loader())
    return "refused"


def test_options_that_manual_optimization_refuses():
    assert run_ranks(bad_modes, 2) == ["refused"] * 2
