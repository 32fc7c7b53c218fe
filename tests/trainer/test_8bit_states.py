"""States of eight bits in fits: levels and options, what stays fp32, graphs, exact resumes, shards; and compact Lion and SGD."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fabricamp import ConfigError, TrainingModule
from fabricamp.callbacks import EMA, ModelCheckpoint
from fabricamp.optimizers import LARC, FusedAdam, FusedLion, FusedSGD
from tests.cuda_on_cpu.fits import card
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer

__all__ = ["card"]

KINDS = {
    "adam": lambda own, **options: FusedAdam(own, lr=0.003, **options),
    "lion": lambda own, **options: FusedLion(own, lr=0.001, **options),
    "sgd": lambda own, **options: FusedSGD(own, lr=0.05, momentum=0.9, **options),
}


class Net(TrainingModule):
    """Two layers of 4,096 weights, and an embedding and a norm of as many."""

    def __init__(self, kind="adam", state="8bit", masters="fp32"):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
            self.words = nn.Embedding(512, 8)
            self.norm = nn.LayerNorm((8, 512))
        self.options = kind, {"state": state, "masters": masters}

    def training_step(self, batch, batch_idx):
        words = self.words(batch[1])
        hidden = self.net[1](self.net[0](batch[0]))
        return F.cross_entropy(
            self.net[2](hidden) + words + self.norm(hidden[:, None].expand(-1, 8, -1)).mean(-1), batch[1]
        )

    def configure_optimizers(self):
        kind, options = self.options
        return KINDS[kind](self.parameters(), **options)


def fit(module, steps=8, ckpt_path=None, **options):
    trainer = quiet_trainer(**{"max_steps": steps, "max_epochs": -1, "limit_val_batches": 0, **options})
    trainer.fit(module, loader(48), ckpt_path=ckpt_path)
    return trainer


def weights(module):
    return [value.detach().float() for value in module.state_dict().values()]


def same(one, other):
    return all(map(torch.equal, one, other))


WAYS = {
    "O1": ("lion", lambda: {"precision": "O1"}),
    "O2": ("sgd", lambda: {"precision": "O2"}),
    "O5": ("lion", lambda: {"precision": "O5", "gradient_clip_val": 0.1}),
    "remainder": ("adam", lambda: {"precision": "O5", "gradient_clip_val": 0.1}),
    "skip": ("sgd", lambda: {"precision": "O5", "nan_policy": "skip"}),
    "accumulation": ("adam", lambda: {"precision": "O4", "accumulate_grad_batches": 2}),
    "ema": ("sgd", lambda: {"callbacks": [EMA(0.9)]}),
    "ddp": ("lion", lambda: {"strategy": "ddp"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_near_fp32_states_and_repeats_its_bits(way):
    kind, options = WAYS[way]
    masters = "remainder" if way == "remainder" else "fp32"
    start = weights(Net())
    modules = [Net(kind, state, masters) for state in ("fp32", "8bit", "8bit")]
    for module in modules:
        trainer = fit(module, **options())
    coded = [
        next(value for name, value in entry.items() if name in ("exp_avg", "momentum_buffer")).dtype is torch.uint8
        for entry in trainer.optimizers[0].state.values()
    ]
    assert coded == [True, False, True, False, False, False, False]
    exact, one, other = map(weights, modules)
    assert same(one, other)
    assert not same(one, exact)
    moved, apart = (
        sum((two - three).square().sum() for two, three in zip(*pair, strict=True)).sqrt()
        for pair in ((exact, start), (one, exact))
    )
    assert apart < (0.25 if kind == "lion" else 0.1) * moved


@pytest.mark.parametrize(("kind", "state"), [("lion", "fp32"), ("sgd", "bf16"), ("sgd", "8bit")])
def test_remainders_have_the_values_of_masters(kind, state):
    """But for exact ties of bf16, one value in 65,536, in which copies of masters go to even."""
    modules = [Net(kind, state, masters) for masters in ("fp32", "remainder")]
    for module in modules:
        fit(module, precision="O5", gradient_clip_val=0.1)
    one, other = (torch.cat([value.flatten() for value in weights(module)]) for module in modules)
    torch.testing.assert_close(one, other, rtol=0.01, atol=1e-4)
    assert (one != other).float().mean() < 0.01


@pytest.mark.parametrize(
    ("kind", "state"), [("adam", "bf16"), ("adam", "8bit"), ("lion", "bf16"), ("lion", "8bit"), ("sgd", "8bit")]
)
def test_graphs_have_the_bits_of_eager_steps(card, kind, state):
    options = {"precision": "O5", "gradient_clip_val": 0.1}
    masters = "remainder" if kind == "adam" else "fp32"
    modules = [Net(kind, state, masters) for _ in range(2)]
    for module, graph in zip(modules, (None, True), strict=True):
        fit(module, 20, cuda_graph=graph, **options)
    assert card.replays > 4
    assert same(*map(weights, modules))


@pytest.mark.parametrize(("kind", "masters"), [("adam", "remainder"), ("lion", "fp32"), ("sgd", "remainder")])
def test_a_resumed_run_has_the_bits_of_a_straight_one(tmp_path, kind, masters):
    make = lambda: Net(kind, "8bit", masters)  # noqa: E731
    fit(
        make(),
        4,
        precision="O5",
        callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=4)],
        enable_checkpointing=True,
    )
    (file,) = tmp_path.iterdir()
    resumed, straight = make(), make()
    fit(resumed, precision="O5", ckpt_path=file)
    fit(straight, precision="O5")
    assert same(weights(resumed), weights(straight))


def test_a_run_goes_on_from_a_checkpoint_of_the_other_format(tmp_path, caplog):
    caplog.set_level("INFO", "fabricamp")
    for state in ("fp32", "8bit"):
        folder = tmp_path / state
        fit(Net(state=state), 4, callbacks=[ModelCheckpoint(folder, every_n_train_steps=4)], enable_checkpointing=True)
        (file,) = folder.iterdir()
        caplog.clear()
        fit(Net(state="8bit" if state == "fp32" else "fp32"), ckpt_path=file)
        assert sum("states of the checkpoint" in message for message in caplog.messages) == 1


def test_shards_resume_with_their_bits_and_on_one_rank(tmp_path, caplog):
    caplog.set_level("INFO", "fabricamp")

    def train():
        options = {"devices": 2, "strategy": "fsdp", "precision": "O4"}
        saves = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
        straight, resumed = Net(), Net()
        fit(straight, callbacks=[saves], enable_checkpointing=True, **options)
        (first, _) = sorted(tmp_path.iterdir())
        fit(resumed, ckpt_path=first, **options)
        return dist.get_rank() != 0 or same(weights(straight), weights(resumed))

    assert run_ranks(train, 2) == [True, True]
    one = Net()
    fit(one, 12, precision="O4", ckpt_path=max(tmp_path.iterdir()))


def test_what_reads_other_weights_is_refused():
    module = Net("sgd", "fp32", "remainder")
    with pytest.raises(ConfigError, match=r"FusedSGD\(masters='remainder'\) keeps the 16 bits"):
        fit(module, precision="O4")
    module = Net("sgd", "8bit")
    module.configure_optimizers = lambda: LARC(FusedSGD(module.parameters(), lr=0.01, momentum=0.9, state="8bit"))
    fit(module)
