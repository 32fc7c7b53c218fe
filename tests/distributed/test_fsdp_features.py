"""Features under strategy="fsdp": weight averages, SyncBatchNorm, monitors, frozen parameters, reports of non-finite gradients."""

from __future__ import annotations

import contextlib
import io
import warnings

import pytest
import torch

from fabricamp import Callback, seed_everything
from fabricamp.callbacks import EMA, GradientMonitor, LearningRateMonitor, StochasticWeightAveraging
from fabricamp.errors import NonFiniteError
from fabricamp.loggers import Logger
from fabricamp.ops.shards import is_shard
from fabricamp.strategies import FSDP, fsdp
from fabricamp.strategies.fsdp import fits
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded import Block, Net, SaveAt, flat
from tests.shared import once, shared_folder
from tests.small import loader, quiet_trainer

WINDOWS = [("O0", "FusedAdam"), ("O1", "FusedLAMB")]
CHANGED = [(*WINDOWS[0], True), (*WINDOWS[1], False)]
"""Runs that go on in the other mode: one from whole gradients, one from exchanged ones."""


class Normed(Net):
    """Adds BatchNorm before the head, and a schedule."""

    def build(self):
        super().build()
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) + self.scale * self.mirror(x)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Frozen(Net):
    """Freezes a block, and one parameter of another unit."""

    def build(self):
        super().build()
        self.blocks[1].requires_grad_(False)
        self.first.bias.requires_grad_(False)


class Changing(Net):
    """Leaves parameters gathered before they are updated, and changes them where a validation has left them so."""

    def on_after_backward(self):
        with torch.no_grad():
            self(torch.ones(1, 8))

    def on_validation_end(self):
        with torch.no_grad():
            self.head.weight.mul_(0.9)
            self.first.weight.mul_(1.1)
            self.blocks[1].up.weight.mul_(0.9)


class Headed(Changing):
    """Has a head behind the blocks; its layers are only called, so they may be units."""

    def build(self):
        super().build()
        self.last = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.last(super().forward(x))

    def on_after_backward(self):
        with torch.no_grad():
            self.trainer.precision_plugin.forward(self, torch.ones(1, 8))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("gathered", float(not is_shard(self.last.weight)), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_gathered", float(not is_shard(self.last.weight)))

    def on_validation_end(self):
        super().on_validation_end()
        with torch.no_grad():
            self.last.weight.mul_(0.7)


class Freed(Net):
    """Records in each forward of a training step whether the last step's gradients are still there."""

    def forward(self, x):
        if self.training:
            self.seen = [*getattr(self, "seen", []), self.blocks[2].up.weight.grad is not None]
            self.log("kept", float(any(self.seen)), on_step=False, on_epoch=True, reduce_fx="max")
        return super().forward(x)


class Looking(Freed):
    def training_step(self, batch, batch_idx):
        self.looked = self.blocks[2].up.weight.grad
        return super().training_step(batch, batch_idx)


class Poisoned(Net):
    """Makes one parameter's gradient non-finite on rank 1 in the third batch; rank 0 has the parameter's shard."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.scale.sum() * (float("inf") if batch_idx == 2 and self.global_rank == 1 else 0.0)


class Memory(Logger):
    def __init__(self):
        self.values = {}

    def log_metrics(self, metrics, step):
        for name, value in metrics.items():
            self.values[name, step] = value


def ended(kind, optimizer, strategy, batch_size, *callbacks, ckpt_path=None, **options):
    """Returns the weights, the logged values and the validation's values of rank 0 after a fit."""
    seed_everything(5, verbose=False)
    module, memory = kind(optimizer), Memory()
    defaults = {"max_epochs": 2, "accumulate_grad_batches": 3, "val_check_interval": 2, "logger": memory}
    trainer = quiet_trainer(strategy=strategy, devices="auto", callbacks=[*callbacks], **{**defaults, **options})
    trainer.fit(module, loader(32, batch_size), loader(16, batch_size), ckpt_path=ckpt_path)
    assert type(module) is kind
    assert not any(isinstance(one, torch.nn.SyncBatchNorm) for one in module.modules())
    return None if trainer.global_rank else (flat(module), memory.values, dict(trainer.callback_metrics))


def averaged(strategy, batch_size, path=None):
    """Returns results by optimizer and level, with averaged shards that are validated within accumulations."""
    found = {}
    for optimizer, level in (("FusedAdam", "O0"), ("adamw", "O0"), ("FusedAdam", "O1")):
        save = () if path is None else (SaveAt(path / f"{optimizer}-{level}.ckpt", 5),)
        found[optimizer, level] = ended(Net, optimizer, strategy, batch_size, EMA(0.8), *save, precision=level)
    return found


def swa(strategy, batch_size, *callbacks, **options):
    average = StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=1)
    defaults = {"max_epochs": 4, "sync_batchnorm": strategy != "single", "val_check_interval": 1.0}
    return ended(Normed, "sgd", strategy, batch_size, average, *callbacks, **defaults, **options)


def monitored(strategy, batch_size):
    monitors = LearningRateMonitor(), GradientMonitor(per_parameter=True)
    options = {"sync_batchnorm": strategy != "single", "log_every_n_steps": 1, "val_check_interval": 1.0}
    return ended(Normed, "FusedAdam", strategy, batch_size, *monitors, **options)


def in_half(strategy, batch_size, *, together):
    """Trains BatchNorm under autocast, with statistics over all ranks (``together``) or per rank."""
    options = {"precision": "O4", "max_epochs": 1, "sync_batchnorm": together, "val_check_interval": 1.0}
    return ended(Normed, "FusedAdam", strategy, batch_size, **options)


def frozen(strategy, batch_size):
    return {
        (level, optimizer): ended(Frozen, optimizer, strategy, batch_size, precision=level, val_check_interval=1.0)
        for level, optimizer in (("O0", "FusedLAMB"), ("O3", "FusedAdam"), ("O5", "adamw"))
    }


def changing(strategy, batch_size):
    found = {}
    for reshard in (True, False):
        chosen = strategy if strategy == "single" else FSDP(reshard_after_forward=reshard)
        found[reshard] = ended(Changing, "FusedAdam", chosen, batch_size, accumulate_grad_batches=3)
    return found


NAMED = {"in the rest": [Block], "named": [Block, "first", "last"]}


def named(folder):
    """Returns results with layers in the rest and as units of their own, also resumed from each other's folders."""
    found, options = {}, {"precision": "O5", "gradient_clip_val": 0.5}
    for way, units in NAMED.items():
        save = SaveAt(folder / f"{way}.ckpt", 5)
        found[way] = ended(Headed, "FusedAdam", FSDP(units), 4, save, **options)
    for way, other in zip(NAMED, reversed(NAMED), strict=True):
        path = folder / f"{other}.ckpt"
        found["resumed", way] = ended(Headed, "FusedAdam", FSDP(NAMED[way]), 4, ckpt_path=path, **options)
    return found


def blamed():
    found = {}
    for level, optimizer in (("O0", "FusedAdam"), ("O0", "adamw"), ("O4", "FusedLAMB"), ("O5", "sgd")):
        with pytest.raises(NonFiniteError) as error:
            ended(Poisoned, optimizer, "fsdp", 4, precision=level, nan_policy="raise", accumulate_grad_batches=1)
        found[level, optimizer] = str(error.value)
    return found


class Watching(Callback):
    """Records after which micro-batches of the first accumulation there are sharded gradients."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if len(self.seen) < 3:
            self.seen.append(pl_module.blocks[0].up.weight.grad is not None)


def accumulated(folder):
    """Returns weights with full gradients kept or not, uninterrupted, and resumed within an accumulation in both modes."""
    found, chosen = {}, fsdp.fits
    for level, optimizer in WINDOWS:
        for whole in (True, False):
            fsdp.fits = lambda *_, whole=whole: whole
            options = {"precision": level, "gradient_clip_val": 0.5, "partial_window": "drop" if whole else "step"}
            path, watching = folder / f"{level}-{optimizer}-{whole}.ckpt", Watching()
            cell = level, optimizer, whole
            found[cell] = ended(Net, optimizer, "fsdp", 4, watching, SaveAt(path, 6), **options)
            found["seen", cell] = watching.seen
            found["resumed", cell] = ended(Net, optimizer, "fsdp", 4, ckpt_path=path, **options)
            if cell not in CHANGED:
                continue
            fsdp.fits = lambda *_, whole=whole: not whole
            found["other", cell] = ended(Net, optimizer, "fsdp", 4, ckpt_path=path, **options)
    fsdp.fits = chosen
    return found


def told(share):
    said, chosen = io.StringIO(), fsdp.fits
    fsdp.fits = lambda trained, sharing, memory: chosen(trained, sharing, int(memory * share))
    with contextlib.redirect_stderr(said):
        ended(Net, "sgd", "fsdp", 4, enable_model_summary=True, max_steps=1)
    fsdp.fits = chosen
    return said.getvalue()


def on_two_ranks(folder):
    gathered = FSDP(reshard_after_forward=False)
    found = {"averaged": averaged(gathered, 4, folder), "frozen": frozen("fsdp", 4), "monitored": monitored("fsdp", 4)}
    found["resumed"] = {
        cell: ended(Net, cell[0], gathered, 4, EMA(0.8), precision=cell[1], ckpt_path=folder / f"{'-'.join(cell)}.ckpt")
        for cell in found["averaged"]
    }
    found["swa"] = swa(gathered, 4, SaveAt(folder / "swa.ckpt", 13))
    found["swa resumed"] = swa(gathered, 4, ckpt_path=folder / "swa.ckpt")
    found["in half"] = {together: in_half("fsdp", 4, together=together) for together in (True, False)}
    found["changing"] = changing("fsdp", 4)
    found["named"] = named(folder)
    once_a_batch = {"accumulate_grad_batches": 1, "max_epochs": 1}
    found["kept"] = {kind.__name__: ended(kind, "FusedAdam", "fsdp", 4, **once_a_batch) for kind in (Freed, Looking)}
    found["blamed"] = blamed()
    found["accumulated"] = accumulated(folder)
    found["told"] = told(1.0), told(1e-9)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shared_folder(tmp_path_factory, "features")


@pytest.fixture(scope="module")
def ranks(folder):
    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run_ranks(on_two_ranks, 2, folder, timeout=400.0)

    return once(folder, run)


def test_averages_are_those_of_whole_weights_and_go_on(ranks, folder):
    alone = averaged("single", 8)
    for cell, (weights, _, metrics) in ranks[0]["averaged"].items():
        limit = 1e-6 if cell[1] == "O0" else 5e-3
        assert (weights - alone[cell][0]).abs().max() < limit, cell
        assert float(metrics["val_loss"]) == pytest.approx(float(alone[cell][2]["val_loss"]), abs=limit)
        assert torch.equal(weights, ranks[0]["resumed"][cell][0]), cell
    without, _, _ = ended(Net, "FusedAdam", "single", 8)
    assert (without - alone["FusedAdam", "O0"][0]).abs().max() > 1e-3
    # One process resumes average and weights from the folder.
    path = folder / "FusedAdam-O0.ckpt"
    gone_on, _, _ = ended(Net, "FusedAdam", "single", 8, EMA(0.8), ckpt_path=path)
    assert (gone_on - alone["FusedAdam", "O0"][0]).abs().max() < 1e-6


def test_a_mean_of_epochs_and_batch_norm_over_the_ranks_are_those_of_the_joined_batch(ranks):
    weights, _, _ = swa("single", 8)
    assert (ranks[0]["swa"][0] - weights).abs().max() < 1e-5
    assert torch.equal(ranks[0]["swa"][0], ranks[0]["swa resumed"][0])


def test_batch_norm_within_autocast_is_not_gathered_in_half(ranks):
    weights, apart = (ranks[0]["in half"][together][0] for together in (True, False))
    alone, _, _ = in_half("single", 8, together=False)
    assert (weights - alone).abs().max() < 2e-2
    assert 0 < (weights - apart).abs().max() < 0.5


def test_monitors_log_what_one_process_logs(ranks):
    weights, logged, _ = monitored("single", 8)
    assert (ranks[0]["monitored"][0] - weights).abs().max() < 1e-5
    mine = {
        key: value for key, value in ranks[0]["monitored"][1].items() if "grad" in key[0] or key[0].startswith("lr")
    }
    assert len(mine) > 2 * 20
    assert any(name.startswith("lr") for name, _ in mine)
    assert mine == {key: pytest.approx(logged[key], rel=1e-3, abs=1e-6) for key in mine}


def test_frozen_parameters_stay_what_they_are(ranks):
    alone = frozen("single", 8)
    before = Frozen("sgd")
    names = [name for name, one in before.named_parameters() if not one.requires_grad]
    assert len(names) == 7
    for cell, (weights, _, _) in ranks[0]["frozen"].items():
        limit = 1e-6 if cell[0] == "O0" else 2e-2
        assert (weights - alone[cell][0]).abs().max() < limit, cell
    seed_everything(5, verbose=False)
    kept = dict(Frozen("sgd").named_parameters())
    place = 0
    for name, value in Frozen("sgd").state_dict().items():
        own = ranks[0]["frozen"]["O3", "FusedAdam"][0][place : place + value.numel()]
        place += value.numel()
        assert name not in names or torch.equal(own, kept[name].detach().double().flatten()), name


def test_a_step_computes_with_the_weights_of_now(ranks):
    alone = changing("single", 8)
    for reshard, (weights, logged, _) in ranks[0]["changing"].items():
        assert (weights - alone[reshard][0]).abs().max() < 1e-6, reshard
        assert logged.keys() == alone[reshard][1].keys()


def test_named_layers_train_to_the_bits_that_they_have_in_the_rest(ranks):
    found = ranks[0]["named"]
    plain = found["in the rest"]
    seed_everything(5, verbose=False)
    assert (plain[0] - flat(Headed("FusedAdam"))).abs().max() > 0.02
    for weights, _, metrics in found.values():
        assert torch.equal(weights, plain[0])
        assert metrics["val_loss"] == plain[2]["val_loss"]
    # Backward begins with the head, so a training step does not free it; an evaluation does.
    assert float(found["named"][2]["gathered"]) == 1.0
    assert float(found["named"][2]["val_gathered"]) == 0.0


def test_gradients_are_freed_before_the_forward_of_a_step_that_does_not_look_at_them(ranks):
    freed, looking = ranks[0]["kept"].values()
    assert float(freed[2]["kept"]) == 0.0
    assert float(looking[2]["kept"]) == 1.0
    assert torch.equal(freed[0], looking[0])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("window", WINDOWS, ids="-".join)
def test_windows_are_those_of_one_process_exchanged_once_or_behind_each_micro_batch(ranks, window, whole):
    found, cell = ranks[0]["accumulated"], (*window, whole)
    level, optimizer = window
    weights, limit = found[cell][0], 1e-6 if level == "O0" else 1e-2
    options = {"precision": level, "gradient_clip_val": 0.5, "partial_window": "drop" if whole else "step"}
    alone, _, _ = ended(Net, optimizer, "single", 8, **options)
    assert (weights - alone).abs().max() < limit
    assert found["seen", cell] == ([False, False, True] if whole else [True] * 3)
    assert torch.equal(weights, found["resumed", cell][0])
    if cell in CHANGED:
        assert (weights - found["other", cell][0]).abs().max() < limit


def test_a_folder_within_a_window_of_whole_gradients_goes_on_in_one_process(ranks, folder):
    path, options = folder / "O0-FusedAdam-True.ckpt", {"gradient_clip_val": 0.5, "partial_window": "drop"}
    weights = ranks[0]["accumulated"]["O0", "FusedAdam", True][0]
    alone, _, _ = ended(Net, "FusedAdam", "single", 8, ckpt_path=path, **options)
    assert (weights - alone).abs().max() < 1e-6


def test_where_gradients_are_exchanged_is_told_and_follows_the_memory(ranks):
    ample, scarce = ranks[0]["told"]
    assert "; full gradients are accumulated, 14.4 kB, and exchanged at the end of a step" in ample
    assert "; gradients are exchanged after each micro-batch: full gradients would take 14.4 kB" in scarce
    assert fits(4 * 1_400_000_000, 2, 141 * 10**9)
    assert not fits(4 * 6_900_000_000, 2, 141 * 10**9)
    assert fits(4 * 6_900_000_000, 64, 141 * 10**9)


def test_an_overflow_is_traced_to_its_parameter_on_every_rank(ranks):
    for one in ranks:
        for cell, words in one["blamed"].items():
            assert "the gradients of scale were not finite at step 2" in words, cell
