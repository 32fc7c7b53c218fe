"""``FusedAdam(state="bf16")`` in fits: every level and option, replicas with equal bits, shards, and exact resumes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import Compile, TrainingModule
from fabricamp.callbacks import EMA, ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint
from fabricamp.optimizers import FusedAdam
from fabricamp.rng import seed_everything
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer


class Net(TrainingModule):
    def __init__(self, state="bf16", masters="fp32", reverse=False):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
        self.state, self.masters, self.reverse = state, masters, reverse

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        own = list(self.parameters())
        own = own[::-1] if self.reverse else own
        groups = [{"params": own[:2], "weight_decay": 0.0}, {"params": own[2:]}]
        return FusedAdam(groups if not self.reverse else own, lr=0.01, state=self.state, masters=self.masters)


def fit(module, steps=20, ckpt_path=None, **options):
    trainer = quiet_trainer(**{"max_steps": steps, "max_epochs": -1, "limit_val_batches": 0, **options})
    trainer.fit(module, loader(48), ckpt_path=ckpt_path)
    return trainer


def weights(module):
    return [value.detach().float() for value in module.state_dict().values()]


def same(one, other):
    return all(map(torch.equal, one, other))


WAYS = {
    **{level: lambda level=level: {"precision": level} for level in ("O0", "O1", "O2", "O4", "O5")},
    "clip": lambda: {"gradient_clip_val": 0.1},
    "skip": lambda: {"precision": "O5", "nan_policy": "skip", "gradient_clip_val": 0.1},
    "accumulation": lambda: {"precision": "O5", "accumulate_grad_batches": 2},
    "ema": lambda: {"callbacks": [EMA(0.9)]},
    "compile": lambda: {"compile": Compile(backend="aot_eager")},
    "ddp": lambda: {"strategy": "ddp"},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_near_fp32_states_and_repeats_its_bits(way):
    start = weights(Net())
    modules = [Net("fp32"), Net(), Net()]
    for module in modules:
        trainer = fit(module, **WAYS[way]())
        states = [
            value for entry in trainer.optimizers[0].state.values() for name, value in entry.items() if name != "step"
        ]
        assert {value.dtype for value in states} == {torch.float32 if module.state == "fp32" else torch.bfloat16}
    exact, one, other = map(weights, modules)
    assert same(one, other)
    assert not same(one, exact)
    moved, apart = (
        sum((two - three).square().sum() for two, three in zip(*pair, strict=True)).sqrt()
        for pair in ((exact, start), (one, exact))
    )
    assert apart < 0.1 * moved


def test_compact_masters_and_states_go_together():
    modules = [Net(masters=masters) for masters in ("fp32", "remainder")]
    for module in modules:
        fit(module, precision="O5", gradient_clip_val=0.1)
    assert same(*map(weights, modules))


def test_the_seed_of_the_run_chooses_the_bits():
    found = []
    for seed in (1, 1, 2):
        seed_everything(seed)
        module = Net()
        fit(module)
        found.append(weights(module))
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


@pytest.mark.parametrize("precision", ["O0", "O5"])
def test_bits_do_not_depend_on_the_order_of_parameters(precision):
    modules = [Net(reverse=False), Net(reverse=True)]
    modules[0].configure_optimizers = lambda: FusedAdam(modules[0].parameters(), lr=0.01, state="bf16")
    for module in modules:
        fit(module, precision=precision)
    assert same(*map(weights, modules))


@pytest.mark.parametrize("precision", ["O0", "O5"])
def test_a_resumed_run_has_the_bits_of_a_straight_one(tmp_path, precision):
    fit(
        Net(),
        10,
        precision=precision,
        callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=10)],
        enable_checkpointing=True,
    )
    (file,) = tmp_path.iterdir()
    resumed, straight = Net(), Net()
    fit(resumed, precision=precision, ckpt_path=file)
    fit(straight, precision=precision)
    assert same(weights(resumed), weights(straight))
    entries = read_checkpoint(file)["optimizer_states"][0]["state"].values()
    assert {value.dtype for entry in entries for name, value in entry.items() if name != "step"} == {torch.bfloat16}


def test_a_run_goes_on_from_a_checkpoint_of_the_other_format(tmp_path, caplog):
    caplog.set_level("INFO", "fabricamp")
    for state in ("fp32", "bf16"):
        folder = tmp_path / state
        fit(Net(state), 10, callbacks=[ModelCheckpoint(folder, every_n_train_steps=10)], enable_checkpointing=True)
        (file,) = folder.iterdir()
        caplog.clear()
        fit(Net("bf16" if state == "fp32" else "fp32"), ckpt_path=file)
        assert sum("states of the checkpoint" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp", "fsdp"])
def test_replicas_and_shards_draw_alike(strategy):
    def train():
        module = Net()
        fit(module, devices=2, strategy=strategy, precision="O0")
        return weights(module)

    def alone():
        module = Net()
        fit(module, strategy="ddp", devices=2)
        return weights(module)

    one, other = run_ranks(train, 2)
    if strategy != "fsdp":
        assert same(one, other)
        return
    # The exchanges of ddp and of fsdp add two numbers up; shards have the bits of the whole parameter then.
    expected, _ = run_ranks(alone, 2)
    for mine, theirs in zip(one, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
