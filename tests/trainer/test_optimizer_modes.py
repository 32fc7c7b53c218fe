"""Schedule-free optimizers, which train other weights than those to evaluate; and one whose momentum is in ``.grad``."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fabricamp import ConfigError
from fabricamp.callbacks import ModelCheckpoint
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer
from tests.trainer.test_optimizer_states import Net, batches, flat


class Averaging(torch.optim.Optimizer):
    """Schedule-free SGD as in the paper; ``seen``: whether its switches move version counters."""

    def __init__(self, params, seen=True):
        super().__init__(params, {"lr": 0.1, "train_mode": False, "done": 0, "seen": seen})

    def switched(self, train, weight):
        for group in self.param_groups:
            if group["train_mode"] is not train:
                group["train_mode"] = train
                for one in filter(self.state.get, group["params"]):
                    (one if group["seen"] else one.data).lerp_(self.state[one]["z"], weight)

    @torch.no_grad()
    def train(self):
        self.switched(True, 0.1)

    @torch.no_grad()
    def eval(self):
        self.switched(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "not in train mode"
            group["done"] += 1
            for one in group["params"]:
                z = self.state[one].setdefault("z", one.clone())
                x = one.lerp(z, 1 - 1 / 0.9)
                z.sub_(one.grad, alpha=group["lr"])
                one.copy_(x.lerp_(z, 1 / group["done"]).lerp_(z, 0.1))


def unseen(parameters):
    return Averaging(parameters, seen=False)


def schedule_free(parameters):
    return pytest.importorskip("schedulefree", reason="needs the package schedulefree").AdamWScheduleFree(
        parameters, lr=0.01, warmup_steps=3
    )


def schedule_free_unseen(parameters):
    return pytest.importorskip("pytorch_optimizer", reason="needs the package pytorch_optimizer").ScheduleFreeAdamW(
        parameters, lr=0.01
    )


MAKE = [Averaging, unseen, schedule_free, schedule_free_unseen]


class Evaluated(Net):
    """Keeps the weights with which each validation runs."""

    def on_fit_start(self):
        self.evaluated = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        # of two ranks that hold shards, the loss says which weights these are
        self.evaluated.append(loss.detach() if self.trainer.world_size > 1 else flat(self))
        return loss


def fit(make, epochs=3, level="O0", **options):
    module = Evaluated(make)
    run = {"val_dataloaders": batches()[:1], "ckpt_path": options.pop("ckpt_path", None)}
    quiet_trainer(max_epochs=epochs, precision=level, num_sanity_val_steps=0, **options).fit(module, batches(), **run)
    return module


@pytest.mark.parametrize("make", MAKE[:3])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_validations_and_the_end_have_the_weights_to_evaluate(level, make):
    module = fit(make, level=level)
    twin = Evaluated(make)
    updates = twin.configure_optimizers()
    averages = []
    for _ in range(3):
        updates.train()
        for batch in batches():
            updates.zero_grad()
            twin.training_step(batch, 0).backward()
            updates.step()
        updates.eval()
        averages.append(flat(twin))
    updates.train()
    between = (flat(twin) - averages[-1]).norm()
    near = {"O0": 1e-5, "O1": 0.3, "O2": 0.3, "O4": 0.6, "O5": 0.6}[level]  # 1.0 is where the trained weights are
    assert all((ours - hand).norm() < near * between for ours, hand in zip(module.evaluated, averages, strict=True))
    assert (flat(module) - averages[-1]).norm() < near * between


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("every", [7, 12, None], ids=["within an epoch", "its last step", "after a validation"])
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_resumed_run_goes_on_bit_for_bit(level, every, make, tmp_path):
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=every, save_top_k=-1)
    fit(make, 2, level, enable_checkpointing=True, callbacks=[checkpoint])
    first = min(Path(tmp_path).iterdir(), key=lambda path: torch.load(path, weights_only=True)["global_step"])
    assert torch.equal(flat(fit(make, 3, level)), flat(fit(make, 3, level, ckpt_path=first)))


def of_strategy(strategy):
    module = fit(Averaging, devices=2, strategy=strategy)
    return torch.stack(module.evaluated)


def test_two_ranks_evaluate_the_same_weights():
    results = [run_ranks(of_strategy, 2, strategy)[0] for strategy in ("ddp", "fsdp")]
    torch.testing.assert_close(*results)


# -- momentum in .grad -----------------------------------------------------------------------------------------------------------


class SCIONLight(torch.optim.SGD):
    """Has the name of pytorch_optimizer's."""


SCIONLight.__module__ = "pytorch_optimizer.optimizer.scion"


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


def light(parameters):
    return SCIONLight(parameters, lr=0.01)


def test_an_optimizer_with_its_momentum_in_gradients_is_refused():
    module = Net(light)
    with pytest.raises(
        ConfigError, match=r"SCIONLight keeps its momentum in \.grad.*take SCION.*automatic_optimization"
    ):
        quiet_trainer(max_steps=2).fit(module, batches())
    assert module.steps == 0


def test_by_hand_it_is_told_what_a_resume_lacks(caplog):
    caplog.set_level(logging.WARNING)
    quiet_trainer(max_steps=2).fit(ByHand(light), batches())
    assert "a resumed run begins without momentum" in caplog.text
