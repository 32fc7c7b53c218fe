"""Programs that edit weights in place between updates: at O2 and O5 the masters take the elements that were changed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fabricamp import Callback, ConfigError, OptLevel, TrainingModule
from fabricamp.callbacks import EMAWeightAveraging
from fabricamp.optimizers import FusedAdam, FusedSGD
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer

LIMIT = 0.0625  # the same number in all dtypes
LEVELS = {"O2": (OptLevel("O2", loss_scale=64.0), torch.float16), "O5": (OptLevel("O5"), torch.bfloat16)}


def batches(count=8):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 8, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.03)


def fused_sgd(parameters):
    return FusedSGD(parameters, lr=0.1, momentum=0.9)


def fused_adam(parameters):
    return FusedAdam(parameters, lr=0.03)


def clip(tensors):
    with torch.no_grad():
        for tensor in tensors:
            tensor.clamp_(-LIMIT, LIMIT)


def owned(optimizer):
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


class Critic(TrainingModule):
    """Clips its weights ``where`` the option says; remembers the largest weight that a forward saw after the first."""

    def __init__(self, where, make=sgd):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(8, 2)
        self.where = where
        self.make = make
        self.largest = 0.0
        self.automatic_optimization = not where.startswith("manual")

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.where == "manual, before forward":
            clip(self.net.parameters())
        if batch_idx:
            self.largest = max(self.largest, *(float(one.detach().abs().max()) for one in self.net.parameters()))
        loss = F.mse_loss(self.net(x), y)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.where == "manual, after step":
            clip(self.net.parameters())
        elif self.where == "manual, param_groups":
            clip(owned(optimizer))
        return None

    def on_train_batch_start(self, batch, batch_idx):
        if self.where == "on_train_batch_start":
            clip(self.net.parameters())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.where == "on_train_batch_end":
            clip(self.net.parameters())
        elif self.where == "param_groups":
            clip(owned(self.trainer.optimizers[0]))
        elif self.where == "load_state_dict":
            self.net.load_state_dict({key: one.clamp(-LIMIT, LIMIT) for key, one in self.net.state_dict().items()})
        elif self.where == ".data":
            for parameter in self.net.parameters():
                parameter.data.clamp_(-LIMIT, LIMIT)
        elif self.where == ".data, refreshed":
            for parameter in self.net.parameters():
                parameter.data.clamp_(-LIMIT, LIMIT)
            self.trainer.precision_plugin.refresh_masters()

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        if self.where == "step_post_hook":
            optimizer.register_step_post_hook(lambda one, *_: clip(owned(one)))
        return optimizer


@torch.no_grad()
def take(halves, masters):
    for half, master in zip(halves, masters, strict=True):
        changed = master.to(half.dtype) != half
        master.copy_(torch.where(changed, half.float(), master))


def by_hand(where, dtype, make):
    """Returns the masters of the loop by hand: half weights, fp32 masters, and a clip of the one or the other in each step."""
    before = where in ("on_train_batch_start", "manual, before forward")
    of_masters = where in ("param_groups", "step_post_hook", "manual, param_groups")
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 2)
    masters = [torch.nn.Parameter(one.detach().clone()) for one in net.parameters()]
    net.to(dtype)
    optimizer = make(masters)
    for x, y in batches():
        if before:
            clip(net.parameters())
            take(net.parameters(), masters)
        F.mse_loss(net(x.to(dtype)).float(), y).backward()
        with torch.no_grad():
            for half, master in zip(net.parameters(), masters, strict=True):
                master.grad = half.grad.float()
                half.grad = None
        optimizer.step()
        with torch.no_grad():
            if of_masters:
                clip(masters)
            for half, master in zip(net.parameters(), masters, strict=True):
                half.copy_(master)
                if where == "load_state_dict":
                    master.copy_(half.clamp(-LIMIT, LIMIT))
                    half.copy_(master)
            if not (before or of_masters):
                clip(net.parameters())
                take(net.parameters(), masters)
    return masters


WHERE = [
    "on_train_batch_end",
    "on_train_batch_start",
    "param_groups",
    "load_state_dict",
    ".data, refreshed",
    "step_post_hook",
    "manual, after step",
    "manual, before forward",
    "manual, param_groups",
]


@pytest.mark.parametrize("make", [sgd, adam, fused_sgd, fused_adam])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", WHERE)
def test_clipped_weights_equal_those_of_the_loop_by_hand(where, level, make):
    precision, dtype = LEVELS[level]
    if level == "O2":
        precision = OptLevel("O2", loss_scale=1.0)  # the gradients of the loop by hand
    module = Critic(where, make)
    quiet_trainer(max_epochs=1, precision=precision).fit(module, batches())
    assert module.largest <= LIMIT
    for ours, theirs in zip(module.net.parameters(), by_hand(where, dtype, make), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("make", [sgd, fused_adam])
@pytest.mark.parametrize("level", LEVELS)
def test_edits_through_data_are_refused_with_parameter_and_cure(level, make):
    trainer = quiet_trainer(max_epochs=1, precision=LEVELS[level][0])
    with pytest.raises(ConfigError, match=r"'net.weight' differs from its rounded fp32 master.*refresh_masters\(\)"):
        trainer.fit(Critic(".data", make), batches())
    assert trainer.global_step == 1


class EditsLate(Critic):
    """Edits through ``.data`` from its 8th step on."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx >= 7:
            super().on_train_batch_end(outputs, batch, batch_idx)


@pytest.mark.parametrize("level", LEVELS)
def test_edits_through_data_that_begin_late_are_found_between_two_flushes(level):
    trainer = quiet_trainer(max_epochs=1, precision=LEVELS[level][0], log_every_n_steps=10)
    with pytest.raises(ConfigError, match="'net.weight' differs from its rounded fp32 master"):
        trainer.fit(EditsLate(".data"), batches(40))
    assert trainer.global_step == 15
    trainer = quiet_trainer(max_epochs=1, precision=LEVELS[level][0], log_every_n_steps=0)
    trainer.fit(EditsLate(".data"), batches(40))


class Decays(TrainingModule):
    """Shrinks its weights by less than half a unit in the last place of a half weight, where the option says."""

    def __init__(self, where, make):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(8, 2)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.where = where
        self.make = make

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.where == "param_groups":
            for value in owned(self.trainer.optimizers[0]):
                value.mul_(1 - 2**-14)
            return
        with self.trainer.precision_plugin.fp32_values(self) as values:
            assert list(values) == ["frozen", "net.weight", "net.bias"]
            for name in ("net.weight", "net.bias"):
                (values[name].data if self.where == "values, .data" else values[name]).mul_(1 - 2**-14)
            values["frozen"].mul_(2)
        assert self.frozen.tolist() == 3 * [2.0 ** (batch_idx + 1)]

    def configure_optimizers(self):
        return self.make(self.net.parameters())


@pytest.mark.parametrize("make", [sgd, fused_adam])
@pytest.mark.parametrize("where", ["values", "values, .data"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5", "32-true", "bf16-mixed"])
def test_fp32_values_take_edits_that_half_weights_round_away(level, where, make):
    def trained(where):
        module = Decays(where, make)
        precision = LEVELS[level][0] if level in LEVELS else OptLevel("O1", loss_scale=64.0) if level == "O1" else level
        quiet_trainer(max_epochs=1, precision=precision).fit(module, batches())
        return module.net

    ours, expected, without = trained(where), trained("param_groups"), Critic("nowhere", make)
    quiet_trainer(max_epochs=1, precision=level if level not in LEVELS else LEVELS[level][0]).fit(without, batches())
    for one, other, plain in zip(*(net.parameters() for net in (ours, expected, without.net)), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, plain)


@pytest.mark.parametrize("level", ["O3", "16-true", "bf16-true", "64-true"])
def test_fp32_values_are_the_weights_where_there_are_no_masters(level):
    module = Decays("values", sgd)
    quiet_trainer(max_epochs=1, precision=level).fit(module, batches())
    assert torch.equal(module.frozen.float(), torch.full((3,), 256.0))


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4", "bf16-true"])
def test_edits_through_data_are_right_without_masters(level):
    module = Critic(".data")
    precision = OptLevel("O1", loss_scale=64.0) if level == "O1" else level
    quiet_trainer(max_epochs=1, precision=precision).fit(module, batches())
    assert module.largest <= LIMIT


class EditsOnce(TrainingModule):
    """Sets one element of a hundred to a given value, after ``at`` steps."""

    def __init__(self, at, make):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(10, 10, bias=False)
        self.at, self.make = at, make

    def training_step(self, batch, batch_idx):
        # A linear loss: its gradients do not depend on the weights.
        return self.net(batch[0]).sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == self.at:
            with torch.no_grad():
                self.net.weight[3, 4] = 0.5

    def configure_optimizers(self):
        return self.make(self.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [sgd, fused_sgd])
@pytest.mark.parametrize("level", LEVELS)
def test_elements_that_an_edit_leaves_keep_their_masters_bit_for_bit(level, make, accumulate):
    data = [(torch.full((2, 10), 0.001 * (number + 1)),) for number in range(6)]
    weights = []
    for at in (2, None):  # with 2 micro-batches a step: in the middle of an accumulation
        module = EditsOnce(at, make)
        quiet_trainer(max_epochs=1, precision=LEVELS[level][0], accumulate_grad_batches=accumulate).fit(module, data)
        weights.append(module.net.weight.detach())
    same = weights[0] == weights[1]
    assert not same[3, 4]
    assert same.sum() == 99


class Swaps(Critic):
    """Keeps other weights in the module during a validation, and puts the old ones back after it."""

    def validation_step(self, batch, batch_idx):
        assert all(bool((parameter == 1).all()) for parameter in self.net.parameters())

    def on_validation_start(self):
        self.kept = [parameter.detach().clone() for parameter in self.net.parameters()]
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.fill_(1)

    def on_validation_end(self):
        with torch.no_grad():
            for parameter, kept in zip(self.net.parameters(), self.kept, strict=True):
                parameter.copy_(kept)


@pytest.mark.parametrize("level", LEVELS)
def test_weights_that_are_swapped_for_a_validation_keep_their_masters(level):
    weights = []
    for kind in (Swaps, Critic):
        module = kind("nowhere")
        validation = batches(1) if kind is Swaps else None
        options = {"val_check_interval": 2} if kind is Swaps else {}
        quiet_trainer(max_epochs=1, precision=LEVELS[level][0], **options).fit(module, batches(), validation)
        weights.append(list(module.net.parameters()))
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_holds_an_edit_that_no_step_has_taken_yet(level, tmp_path):
    class Saves(Critic):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx != 3:
                return
            self.trainer.save_checkpoint(tmp_path / "before.ckpt")
            with torch.no_grad():
                self.net.weight[1, 2] = 0.5
            self.trainer.save_checkpoint(tmp_path / "after.ckpt")

    module = Saves("nowhere")
    quiet_trainer(max_epochs=1, precision=LEVELS[level][0]).fit(module, batches())
    before, after = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]["net.weight"]
        for name in ("before", "after")
    )
    assert after.dtype is torch.float32
    assert after[1, 2] == 0.5
    assert (before != after).sum() == 1
    resumed = Critic("nowhere")
    trainer = quiet_trainer(max_epochs=1, precision=LEVELS[level][0])
    trainer.fit(resumed, batches(), ckpt_path=tmp_path / "after.ckpt")
    assert all(map(torch.equal, module.net.parameters(), resumed.net.parameters()))


@pytest.mark.parametrize("make", [sgd, fused_sgd])
def test_a_skipped_step_keeps_an_edit(make):
    class Overflows(Critic):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 else loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 0:
                with torch.no_grad():
                    self.net.weight.fill_(0.25)
            elif batch_idx == 1:
                seen.append(self.net.weight.detach().clone())
                seen.append(owned(self.trainer.optimizers[0])[0].detach().clone())

    seen = []
    quiet_trainer(max_epochs=1, precision=OptLevel("O2", max_loss_scale=64.0)).fit(
        Overflows("nowhere", make), batches()
    )
    assert all(bool((one == 0.25).all()) for one in seen)


class ClipsAsCallback(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        clip(pl_module.net.parameters())


class ShowsAverage(Critic):
    def validation_step(self, batch, batch_idx):
        self.largest = max(self.largest, *(float(one.detach().abs().max()) for one in self.net.parameters()))


@pytest.mark.parametrize("level", LEVELS)
def test_averages_see_what_another_callback_has_edited(level):
    module = ShowsAverage("nowhere")
    callbacks = [ClipsAsCallback(), EMAWeightAveraging(decay=0.0)]  # the average is the newest weights
    trainer = quiet_trainer(max_epochs=2, precision=LEVELS[level][0], callbacks=callbacks, num_sanity_val_steps=0)
    trainer.fit(module, batches(), batches(1))
    assert 0 < module.largest <= LIMIT


def clipping_on_a_rank():
    module = Critic("on_train_batch_end")
    quiet_trainer(max_epochs=1, precision="O5", strategy="ddp", devices="auto").fit(module, batches())
    return module.largest, [parameter.detach() for parameter in module.net.parameters()]


def test_edits_under_ddp_hold_on_every_rank():
    (largest, first), (other, second) = run_ranks(clipping_on_a_rank, 2)
    assert max(largest, other) <= LIMIT
    assert all(map(torch.equal, first, second))
