"""Finetuning callbacks train parts of a module from a later epoch on: parameter groups, frozen parameters, resumed runs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import Callback, TrainingModule
from fabricamp.callbacks import BackboneFinetuning, BaseFinetuning
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.optimizers import FusedAdam
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-3),
    "fused": lambda parameters: FusedAdam(parameters, lr=0.01),
}


class Net(TrainingModule):
    def __init__(self, optimizer="sgd"):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
            self.head = nn.Linear(8, 3)
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.head(self.backbone(x)), y)

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer]([one for one in self.parameters() if one.requires_grad])


class Stages(BaseFinetuning):
    """Trains the backbone's last layer from epoch 1 on, and the rest from epoch 2 on."""

    def __init__(self, train_bn=False):
        super().__init__()
        self.train_bn = train_bn
        self.called = []

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone, train_bn=self.train_bn)

    def finetune_function(self, pl_module, epoch, optimizer):
        self.called.append(epoch)
        if epoch in (1, 2):
            part = pl_module.backbone[3:] if epoch == 1 else pl_module.backbone[:3]
            self.unfreeze_and_add_param_group(part, optimizer, train_bn=self.train_bn)


def fit(callback, *, optimizer="sgd", ckpt_path=None, save_at=None, **options):
    torch.manual_seed(0)
    module = Net(optimizer)
    limit = {"max_epochs": 4} if save_at is None else {"max_steps": save_at}
    trainer = quiet_trainer(**limit, callbacks=[callback], **options)
    trainer.fit(module, loader(32, 4, shuffle=True), ckpt_path=ckpt_path)
    return trainer, module


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_a_loop_by_hand_gives_the_same_bits():
    torch.manual_seed(0)
    net, batches = Net(), loader(32, 4, shuffle=True)
    backbone = net.backbone
    backbone[1].track_running_stats = False
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9)
    backbone.requires_grad_(False)
    for epoch in range(4):
        if epoch == 1:
            backbone[3].requires_grad_(True)
            optimizer.add_param_group({"params": list(backbone[3].parameters()), "lr": 0.01})
        if epoch == 2:
            backbone.requires_grad_(True)
            backbone[1].track_running_stats = True
            optimizer.add_param_group({"params": list(backbone[0].parameters()), "lr": 0.01})
        for batch in batches:
            optimizer.zero_grad()
            net.training_step(batch, 0).backward()
            optimizer.step()
    callback = Stages()
    _, ours = fit(callback)
    assert same(net, ours)
    assert callback.called == [0, 1, 2, 3]


PRECISIONS, ACCUMULATIONS, STEPS = ("O0", "O1", "O2", "O3", "O4", "O5"), (1, 3), (3, 6, 8, 11)
PAIRS = [
    ("O0", "sgd", 3, 11),
    ("O2", "adam", 1, 19),
    ("O2", "fused", 3, 5),
    ("O5", "fused", 1, 11),
    ("O4", "adam", 3, 8),
]
ALL = [*itertools.product(PRECISIONS, OPTIMIZERS, ACCUMULATIONS, STEPS)]


def check_resume(tmp_path, precision, optimizer, accumulation, step):
    options = {"precision": precision, "optimizer": optimizer, "accumulate_grad_batches": accumulation}
    _, straight = fit(Stages(), **options)
    first, callback = Stages(), Stages()
    cut, _ = fit(first, save_at=step, **options)
    cut.save_checkpoint(tmp_path / "cut.ckpt")
    resumed, module = fit(callback, ckpt_path=tmp_path / "cut.ckpt", **options)
    assert same(straight, module)
    assert [len(group["params"]) for group in resumed.optimizers[0].param_groups] == [2, 2, 2]
    assert first.called + callback.called == [0, 1, 2, 3]  # once per epoch, also if the run was interrupted within it


@pytest.mark.parametrize(("precision", "optimizer", "accumulation", "step"), PAIRS)
def test_a_run_goes_on_bit_for_bit(tmp_path, precision, optimizer, accumulation, step):
    check_resume(tmp_path, precision, optimizer, accumulation, step)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "optimizer", "accumulation", "step"), ALL)
def test_a_run_goes_on_bit_for_bit_everywhere(tmp_path, precision, optimizer, accumulation, step):
    check_resume(tmp_path, precision, optimizer, accumulation, step)


def test_a_second_fit_goes_on_with_the_groups():
    callback, module = Stages(), Net()
    trainer = quiet_trainer(max_epochs=3, callbacks=[callback])
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, loader())
    assert len(trainer.optimizers[0].param_groups) == 3
    assert all(one.requires_grad for one in module.parameters())
    quiet_trainer(max_epochs=1, callbacks=[callback]).fit(other := Net(), loader())
    assert not any(one.requires_grad for one in other.backbone.parameters())


def ranks(strategy, precision, accumulation, folder):
    options = {"strategy": strategy, "devices": "auto", "precision": precision, "accumulate_grad_batches": accumulation}
    _, straight = fit(Stages(), **options)
    cut, _ = fit(Stages(), save_at=11 if accumulation == 1 else 5, **options)
    cut.save_checkpoint(f"{folder}/cut.ckpt")
    _, module = fit(Stages(), ckpt_path=f"{folder}/cut.ckpt", **options)
    return same(straight, module), [one.detach() for one in module.parameters()]


@pytest.mark.parametrize(("strategy", "precision", "accumulation"), [("ddp", "O2", 3), ("delayed_ddp", "O0", 1)])
def test_ranks_train_the_same_weights_and_go_on(tmp_path, strategy, precision, accumulation):
    (one, first), (two, second) = run_ranks(ranks, 2, strategy, precision, accumulation, str(tmp_path))
    assert one
    assert two
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_what_the_optimizer_has_already_is_not_added_again(precision, caplog):
    class Twice(Stages):
        def finetune_function(self, pl_module, epoch, optimizer):
            self.unfreeze_and_add_param_group(pl_module.backbone[3], optimizer)

    trainer, _ = fit(Twice(), precision=precision)
    groups = trainer.optimizers[0].param_groups
    assert [len(group["params"]) for group in groups] == [2, 2]
    assert "updates 2 of 2 parameters already" in caplog.text
    bias = nn.Parameter(torch.zeros(3))
    equal = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    assert BaseFinetuning.filter_on_optimizer(equal, [bias]) == [
        bias
    ]  # Lightning treats parameters with equal values as the same


def test_batch_norm_that_is_trained_all_along_is_no_mistake(caplog):
    trainer, _ = fit(Stages(train_bn=True))
    assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [4, 2, 2]
    assert "already" not in caplog.text


def test_what_is_frozen():
    net = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))})
    one, two = net["one"], net["two"]
    assert BaseFinetuning.flatten_modules(net) == [one, *two]
    assert BaseFinetuning.flatten_modules([one, [two, one]]) == [one, *two]
    BaseFinetuning.freeze(net)
    assert [layer.weight.requires_grad for layer in (one, *two)] == [False, True, False]
    BaseFinetuning.freeze(net, train_bn=False)
    assert not two[0].track_running_stats
    assert list(BaseFinetuning.filter_params(net)) == []
    assert len(list(BaseFinetuning.filter_params(net, requires_grad=False))) == 6
    assert len(list(BaseFinetuning.filter_params(net, train_bn=False, requires_grad=False))) == 4
    BaseFinetuning.make_trainable(net)
    assert two[0].track_running_stats
    assert len(list(BaseFinetuning.filter_params(net))) == 6


class Rates(BackboneFinetuning):
    def on_train_epoch_start(self, trainer, pl_module):
        super().on_train_epoch_start(trainer, pl_module)
        self.rates = [*getattr(self, "rates", []), [group["lr"] for group in trainer.optimizers[0].param_groups]]


def test_the_backbones_rate_grows_to_the_others(tmp_path):
    callback = Rates(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.2)
    fit(callback)
    assert callback.rates == [[0.1], [0.1, 0.1 * 0.2], [0.1, 0.1 * 0.4], [0.1, 0.1 * 0.8]]
    cut, _ = fit(Rates(1, backbone_initial_ratio_lr=0.2), save_at=19)
    cut.save_checkpoint(tmp_path / "cut.ckpt")
    resumed = Rates(1, backbone_initial_ratio_lr=0.2)
    fit(resumed, ckpt_path=tmp_path / "cut.ckpt")
    assert resumed.rates == callback.rates[2:]
    aligned = Rates(0, lambda epoch: 20.0, backbone_initial_lr=0.05)
    fit(aligned)
    assert [rates[1] for rates in aligned.rates] == [0.05, 0.1, 0.1, 0.1]


def test_what_cannot_work_is_refused(tmp_path):
    class Bare(TrainingModule):
        training_step = configure_optimizers = Net.configure_optimizers

    with pytest.raises(ConfigError, match="BackboneFinetuning trains Bare.backbone"):
        quiet_trainer(callbacks=[BackboneFinetuning()]).fit(Bare(), loader())
    with pytest.raises(ConfigError, match="unfreeze_backbone_at_epoch='x'.*give a whole number"):
        BackboneFinetuning("x")
    OPTIMIZERS["lbfgs"] = torch.optim.LBFGS
    with pytest.raises(ConfigError, match="Stages adds parameter groups, and LBFGS takes only one"):
        fit(Stages(), optimizer="lbfgs")
    cut, _ = fit(Stages(), save_at=3)
    cut.save_checkpoint(tmp_path / "cut.ckpt")
    with pytest.raises(CheckpointError, match="parameter groups of optimizer 0.*differ from those of the resumed run"):
        fit(Stages(train_bn=True), ckpt_path=tmp_path / "cut.ckpt")


# -- schedules, and groups that come later -------------------------------------------------------------------------------------


S = torch.optim.lr_scheduler
WARM_UP = {"start_factor": 0.1, "total_iters": 2}
WORKS = {
    "StepLR": lambda o: S.StepLR(o, 1, 0.5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [1, 2], 0.5),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 8),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 8),
    "CosineAnnealingLR that restarts": lambda o: S.CosineAnnealingLR(o, 2),
    "a warm-up that has ended": lambda o: S.LinearLR(o, 0.1, total_iters=1),
    "a constant that has ended": lambda o: S.ConstantLR(o, 0.5, 1),
    "a sequence in its last schedule": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=1), S.CosineAnnealingLR(o, 8)], [1]
    ),
    "a chain": lambda o: S.ChainedScheduler([S.ExponentialLR(o, 0.5), S.LinearLR(o, 0.1, total_iters=1)]),
}
REFUSED = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda epoch: 0.5**epoch),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda epoch: 0.5),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: S.LinearLR(o, **WARM_UP),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.1, total_steps=40),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 2),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.StepLR(o, 1), S.ExponentialLR(o, 0.9)], [3]),
    "SequentialLR of a LambdaLR": lambda o: S.SequentialLR(o, [S.StepLR(o, 1), S.LambdaLR(o, lambda epoch: 1.0)], [1]),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.StepLR(o, 1), S.LinearLR(o, **WARM_UP)]),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, min_lr=[1e-3]),
}


class Scheduled(Net):
    make = None
    interval = "epoch"

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.scheduler = type(self).make(optimizer)
        return [optimizer], [{"scheduler": self.scheduler, "interval": self.interval, "monitor": "loss"}]


class Adds(BaseFinetuning):
    """Adds the backbone at epoch 1 with a rate of its own, and notes the rates before each step of a schedule by epochs."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.7)
        self.rates.append([group["lr"] for group in optimizer.param_groups])


def scheduled(make, callback, **options):
    module = type("Made", (Scheduled,), {"make": staticmethod(make), "interval": options.pop("interval", "epoch")})()
    quiet_trainer(callbacks=[callback], **{"max_epochs": 4, **options}).fit(module, loader(16, 4))
    return module


@pytest.mark.parametrize("name", WORKS)
def test_a_group_that_comes_later_follows_the_schedule_from_its_own_rate(name):
    callback = Adds()
    scheduled(WORKS[name], callback)
    alone = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = WORKS[name](alone)
    factors = []
    for _ in range(4):
        factors.append(alone.param_groups[0]["lr"])
        alone.step()
        schedule.step()
    assert [rates[0] for rates in callback.rates] == pytest.approx(factors)
    later = [rates[1] for rates in callback.rates[1:]]
    assert later[0] == 0.7
    if "restarts" in name:
        assert later[1] == pytest.approx(0.0)
        assert later[2] == pytest.approx(0.7 * 0.5)  # the cosine's way back, towards the rate with which it began
    else:
        assert later == pytest.approx([0.7 * factor / factors[1] for factor in factors[1:]])


@pytest.mark.parametrize("name", REFUSED)
def test_a_schedule_that_has_no_rate_for_the_group_is_refused(name):
    begun = []

    class Begun(BackboneFinetuning):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            begun.append(batch_idx)

    kind = name.split()[0]
    with pytest.raises(
        ConfigError, match=rf"BackboneFinetuning adds a parameter group at epoch 1, and {kind} .*StepLR.*make_trainable"
    ):
        scheduled(REFUSED[name], Begun(1))
    assert begun == []
    if name != "ReduceLROnPlateau":
        scheduled(REFUSED[name], Begun(9))  # never in this run
    with pytest.raises(ConfigError, match=rf"SGD has 2 parameter groups since a hook has added one, and {kind} "):
        scheduled(REFUSED[name], Adds())
    assert len(set(begun)) <= 4


def test_every_schedule_of_torchs_is_tried():
    kinds = {kind for kind in vars(S).values() if isinstance(kind, type) and issubclass(kind, S.LRScheduler)}
    names = {kind.__name__ for kind in kinds if not kind.__name__.endswith("LRScheduler")}  # torch's base class
    made = {
        type(make(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))).__name__ for make in (WORKS | REFUSED).values()
    }
    assert names <= made


def test_a_group_that_comes_later_follows_a_plateau_from_its_own_rate():
    callback = Adds()
    scheduled(lambda o: S.ReduceLROnPlateau(o, mode="max", factor=0.5, patience=0, threshold=100.0), callback)
    assert [rates[0] for rates in callback.rates] == pytest.approx([0.1, 0.1, 0.05, 0.025])
    assert [rates[1] for rates in callback.rates[1:]] == pytest.approx([0.7, 0.35, 0.175])


class ByHand(Scheduled):
    """Under manual optimization; steps its schedule at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()

    def on_train_epoch_end(self):
        self.scheduler.step()


@pytest.mark.parametrize("name", ["LinearLR", "ConstantLR", "LambdaLR", "OneCycleLR", "CosineAnnealingWarmRestarts"])
def test_a_schedule_that_the_user_steps_is_refused_too(name):
    module = type("Made", (ByHand,), {"make": staticmethod(REFUSED[name])})()
    with pytest.raises(ConfigError, match=rf"SGD has 2 parameter groups since a hook has added one, and {name} "):
        quiet_trainer(max_epochs=4, callbacks=[Adds()]).fit(module, loader(16, 4))


def test_a_schedule_that_the_user_steps_takes_a_group_that_it_can():
    callback = Adds()
    module = type("Made", (ByHand,), {"make": staticmethod(WORKS["StepLR"])})()
    quiet_trainer(max_epochs=4, callbacks=[callback]).fit(module, loader(16, 4))
    assert callback.rates[1:] == [[0.05, 0.7], [0.025, 0.35], [0.0125, 0.175]]


class AddsWithin(Callback):
    """Adds the backbone to the optimizer within the second epoch."""

    def __init__(self):
        self.rates = []

    def setup(self, trainer, pl_module, stage):
        pl_module.backbone.requires_grad_(False)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        optimizer = trainer.optimizers[0]
        if trainer.global_step == 6:
            pl_module.backbone.requires_grad_(True)
            optimizer.add_param_group({"params": list(pl_module.backbone.parameters()), "lr": 0.7})
        self.rates.append([group["lr"] for group in optimizer.param_groups])


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("name", ["LinearLR", "ConstantLR", "LambdaLR", "OneCycleLR", "CosineAnnealingWarmRestarts"])
def test_a_group_that_comes_within_an_epoch_is_refused_at_the_next_step_of_the_schedule(name, interval):
    makes = {
        **REFUSED,
        "LinearLR": lambda o: S.LinearLR(o, 0.1, total_iters=20),
        "ConstantLR": lambda o: S.ConstantLR(o, 0.5, 20),
    }
    callback = AddsWithin()
    with pytest.raises(ConfigError, match=rf"SGD has 2 parameter groups since a hook has added one, and {name} "):
        scheduled(makes[name], callback, interval=interval)
    assert len(callback.rates) == {"step": 6, "epoch": 7}[interval]


def test_a_group_that_comes_within_an_epoch_follows_the_schedule():
    callback = AddsWithin()
    scheduled(lambda o: S.CosineAnnealingLR(o, 4), callback, interval="step")
    later = [rates[1] for rates in callback.rates if len(rates) == 2]
    factors = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(6, 10)]
    assert later[:4] == pytest.approx([0.7 * factor / factors[0] for factor in factors])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_warm_up_by_steps_that_ends_before_the_group_comes(accumulate):
    def warm_up(steps):
        return lambda optimizer: S.LinearLR(optimizer, 0.1, total_iters=steps)

    options = {"interval": "step", "accumulate_grad_batches": accumulate}
    scheduled(warm_up(8 // accumulate), BackboneFinetuning(2), **options)
    with pytest.raises(ConfigError, match="LinearLR would raise its learning rate above the given one"):
        scheduled(warm_up(8 // accumulate + 1), BackboneFinetuning(2), **options)


def test_a_schedule_that_its_author_has_extended_is_taken():
    class Extends(Adds):
        def finetune_function(self, pl_module, epoch, optimizer):
            super().finetune_function(pl_module, epoch, optimizer)
            if epoch == 1:
                pl_module.scheduler.base_lrs.append(0.7)
                pl_module.scheduler.lr_lambdas.append(lambda epoch: 1.0)

    callback = Extends()
    scheduled(REFUSED["LambdaLR"], callback)
    assert [rates[1:] for rates in callback.rates] == [[], [0.7], [0.7], [0.7]]


@pytest.mark.parametrize("precision", ["O0", "O2"])
@pytest.mark.parametrize("change", ["extended", "shortened", "replaced", "removed"])
def test_a_group_that_is_changed_in_place_is_refused_when_it_is(change, precision):
    class Changes(Adds):
        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch != 1:
                return
            group = optimizer.param_groups[0]
            if change == "extended":
                self.make_trainable(pl_module.backbone)
                group["params"].extend(pl_module.backbone.parameters())
            elif change == "shortened":
                del group["params"][-1]
            elif change == "replaced":
                optimizer.param_groups[0] = dict(group)
            else:
                optimizer.param_groups.clear()

    with pytest.raises(
        ConfigError, match=r"Changes.finetune_function has changed group 0 of SGD in place .*unfreeze_and_add_param"
    ):
        fit(Changes(), precision=precision)
