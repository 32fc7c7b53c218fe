"""``FusedAdam(masters="remainder")`` in fits at O5: the weights of fp32 masters, whatever else is on, or refused before a batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fabricamp import Compile, ConfigError, TrainingModule
from fabricamp.callbacks import EMA, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from fabricamp.checkpoint import read_checkpoint
from fabricamp.optimizers import LARC, FusedAdam
from fabricamp.strategies import FSDP
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer


class Net(TrainingModule):
    def __init__(self, masters, wrap=lambda optimizer: optimizer):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.masters, self.wrap = masters, wrap
        self.batches = 0

    def training_step(self, batch, batch_idx):
        self.batches += 1
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        groups = [
            {"params": [self.net[3].bias, *self.net[1].parameters()], "weight_decay": 0.0},
            {"params": [self.net[0].weight, self.net[3].weight, self.net[0].bias]},
        ]
        optimizer = FusedAdam(groups, lr=0.01, weight_decay=0.1, masters=self.masters)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
        return [self.wrap(optimizer)], [{"scheduler": schedule, "interval": "step"}]


class Looks(Net):
    def on_before_optimizer_step(self, optimizer):
        assert {one.grad.dtype for one in self.net.parameters()} == {torch.float32}
        self.net[0].weight.grad.mul_(1.0001)


class Steps(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Manual(Net):
    def __init__(self, masters):
        super().__init__(masters)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class Edits(Net):
    def on_train_batch_start(self, batch, batch_idx):
        with self.trainer.precision_plugin.fp32_values(self) as values, torch.no_grad():
            values["net.0.weight"].clamp_(-0.2003, 0.2003)


class Reads(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 3:
            self.load_state_dict(Net("fp32").state_dict())


def fit(masters, kind=Net, steps=24, ckpt_path=None, **options):
    module = kind(masters)
    options = {"max_steps": steps, "max_epochs": -1, "precision": "O5", "limit_val_batches": 0, **options}
    trainer = quiet_trainer(**options)
    trainer.fit(module, loader(48), loader(8), ckpt_path=ckpt_path)
    return module, trainer


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


WAYS = {
    "clip": (Net, lambda: {"gradient_clip_val": 0.1}),
    "value": (Net, lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulation": (Net, lambda: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "skip": (Net, lambda: {"nan_policy": "skip"}),
    "hooks": (Looks, lambda: {"gradient_clip_val": 0.1}),
    "optimizer_step": (Steps, dict),
    "manual": (Manual, dict),
    "edits": (Edits, dict),
    "loading": (Reads, dict),
    "ema": (Net, lambda: {"callbacks": [EMA(0.9)], "limit_val_batches": 1.0}),
    "ema and skip": (Net, lambda: {"callbacks": [EMA(0.9)], "nan_policy": "skip", "limit_val_batches": 1.0}),
    "average": (Net, lambda: {"callbacks": [WeightAveraging()]}),
    "swa": (Net, lambda: {"callbacks": [StochasticWeightAveraging(0.01, 1)], "max_steps": -1, "max_epochs": 3}),
    "compile": (Net, lambda: {"compile": Compile(backend="aot_eager")}),
    "ddp": (Net, lambda: {"strategy": "ddp"}),
    "delayed_ddp": (Net, lambda: {"strategy": "delayed_ddp"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_fit_ends_with_the_weights_of_fp32_masters(way):
    kind, options = WAYS[way]
    one, other = (fit(masters, kind, **options())[0].state_dict() for masters in ("fp32", "remainder"))
    assert same(one, other)
    assert {value.dtype for value in other.values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp"])
def test_two_ranks_end_with_the_weights_of_fp32_masters(strategy):
    def train():
        options = {"devices": 2, "strategy": strategy, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
        return [fit(masters, **options)[0].state_dict() for masters in ("fp32", "remainder")]

    (one, other), (_, elsewhere) = run_ranks(train, 2)
    assert same(one, other)
    assert same(
        {name: value for name, value in other.items() if "running" not in name},
        {name: value for name, value in elsewhere.items() if "running" not in name},
    )


@pytest.mark.parametrize("first", ["fp32", "remainder"])
@pytest.mark.parametrize("then", ["fp32", "remainder"])
def test_a_run_goes_on_from_a_checkpoint_of_either(tmp_path, first, then):
    keep = {"enable_checkpointing": True, "gradient_clip_val": 0.1}
    fit(first, steps=10, callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=10)], **keep)
    (file,) = tmp_path.iterdir()
    resumed, _ = fit(then, ckpt_path=file, gradient_clip_val=0.1)
    straight, _ = fit("fp32", gradient_clip_val=0.1)
    assert same(resumed.state_dict(), straight.state_dict())


def test_checkpoints_of_both_hold_the_same(tmp_path):
    found = []
    for masters in ("fp32", "remainder"):
        callback = ModelCheckpoint(tmp_path / masters, every_n_train_steps=10)
        fit(masters, steps=10, callbacks=[callback], enable_checkpointing=True)
        (file,) = (tmp_path / masters).iterdir()
        found.append(read_checkpoint(file))
    assert same(*[one["state_dict"] for one in found])
    states = [one["optimizer_states"][0]["state"] for one in found]
    assert states[0].keys() == states[1].keys()
    for key, entry in states[0].items():
        assert same(entry, states[1][key])


def test_the_summary_counts_remainders_as_masters(caplog):
    caplog.set_level("INFO", "fabricamp")
    fit("remainder", steps=1, enable_model_summary=True)
    text = caplog.text
    halves = sum(
        one.numel()
        for one in (nn.Linear(8, 16).weight, nn.Linear(8, 16).bias, nn.Linear(16, 3).weight, nn.Linear(16, 3).bias)
    )
    assert f"{2 * halves} B masters" in text, text


REFUSED = {
    "O0": r"at precision 'O0' weights are fp32",
    "O1": r"at precision 'O1' weights are fp32",
    "O2": r"at precision 'O2' weights are fp16, which with 16 bits more are not every fp32 value",
    "O3": r"at precision 'O3' weights are fp16",
    "O4": r"at precision 'O4' weights are fp32",
    "bf16-true": r"bf16 weights have no masters",
    "64-true": r"weights are fp64",
}


@pytest.mark.parametrize("precision", REFUSED)
def test_where_there_is_no_copy_to_build_on_it_is_refused_before_the_first_batch(precision):
    module = Net("remainder")
    with pytest.raises(ConfigError, match=REFUSED[precision] + r".*precision='O5' without sharding.*help memory"):
        quiet_trainer(max_steps=1, precision=precision).fit(module, loader(8))
    assert module.batches == 0


@pytest.mark.parametrize("precision", ["O0", "O5"])
def test_shards_are_refused(precision):
    module = Net("remainder")
    try:
        with pytest.raises(ConfigError, match="strategy 'fsdp' shards fp32 weights, which need no masters"):
            quiet_trainer(max_steps=1, precision=precision, strategy=FSDP()).fit(module, loader(8))
    finally:
        dist.destroy_process_group() if dist.is_initialized() else None
    assert module.batches == 0


def test_a_wrapper_that_reads_weights_is_refused():
    module = Net("remainder", LARC)
    with pytest.raises(ConfigError, match="LARC around it reads no such weights"):
        quiet_trainer(max_steps=1, precision="O5").fit(module, loader(8))
    assert module.batches == 0


def test_an_edit_in_place_ends_the_run_with_its_name():
    class Clamps(Net):
        def on_train_batch_start(self, batch, batch_idx):
            with torch.no_grad():
                self.net[0].weight.clamp_(-0.2, 0.2)

    with pytest.raises(ConfigError, match=r"'net.0.weight' was edited in place"):
        fit("remainder", Clamps)
