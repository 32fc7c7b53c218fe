"""Manual optimization with several optimizers: exchange, unscaling and step counts; right from the first step under ddp."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

from fabricamp import ConfigError, OptLevel, TrainingModule
from fabricamp.optimizers import FusedSGD
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer


class TwoPlayers(TrainingModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 1)
        self.second = torch.nn.Linear(4, 1)
        self.automatic_optimization = False
        self.seen = []

    def training_step(self, batch, batch_idx):
        one, two = self.optimizers()
        for optimizer, player in ((one, self.first), (two, self.second)):
            with self.toggled_optimizer(optimizer):
                loss = (player(batch) ** 2).mean() + (self.first(batch) * self.second(batch)).mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.seen.append([parameter.grad.clone() for parameter in player.parameters()])

    def configure_optimizers(self):
        return [torch.optim.SGD(self.first.parameters(), lr=0.1), torch.optim.Adam(self.second.parameters(), lr=0.01)]


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, generator=generator) for _ in range(6)]


def joined(module):
    """Makes the same steps by hand on the full batch."""
    one = torch.optim.SGD(module.first.parameters(), lr=0.1)
    two = torch.optim.Adam(module.second.parameters(), lr=0.01)
    seen = []
    for batch in batches():
        for optimizer, player, other in ((one, module.first, module.second), (two, module.second, module.first)):
            other.requires_grad_(requires_grad=False)
            optimizer.zero_grad()
            ((player(batch) ** 2).mean() + (module.first(batch) * module.second(batch)).mean()).backward()
            optimizer.step()
            seen.append([parameter.grad.clone() for parameter in player.parameters()])
            other.requires_grad_(requires_grad=True)
    return seen


def test_two_optimizers_make_one_step_a_batch_and_equal_a_loop_by_hand():
    module, twin = TwoPlayers(), TwoPlayers()
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, batches())
    assert trainer.global_step == 6
    expected = joined(twin)
    for ours, theirs in zip(module.seen, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def on_a_rank():
    rank = torch.distributed.get_rank()
    module = TwoPlayers()
    quiet_trainer(max_epochs=1, strategy="ddp", devices="auto").fit(
        module, [batch[rank * 2 : rank * 2 + 2] for batch in batches()]
    )
    return module.seen


def test_gradients_under_ddp_are_those_of_the_joined_batch_from_the_first_step():
    expected = joined(TwoPlayers())
    for seen in run_ranks(on_a_rank, 2):
        for ours, theirs in zip(seen, expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"accumulate_grad_batches": 2}, "accumulate_grad_batches"), ({"gradient_clip_val": 1.0}, "gradient_clip_val")],
)
def test_what_only_automatic_optimization_can_do_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        quiet_trainer(max_epochs=1, **options).fit(TwoPlayers(), batches())


def test_several_optimizers_want_manual_optimization():
    module = TwoPlayers()
    module.automatic_optimization = True
    with pytest.raises(ConfigError, match="automatic_optimization = False"):
        quiet_trainer(max_epochs=1).fit(module, batches())


def test_manual_backward_outside_is_an_error():
    with pytest.raises(ConfigError, match="automatic_optimization=False"):
        TwoPlayers().manual_backward(torch.zeros((), requires_grad=True))


class PlainBackward(TwoPlayers):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.first(batch).mean().backward()
        for optimizer in self.optimizers():
            optimizer.step()


@pytest.mark.parametrize("precision", ["O1", "O2", OptLevel("O4", loss_scale=128.0)])
def test_gradients_without_the_loss_scale_are_refused_where_a_step_would_divide_by_it(precision):
    with pytest.raises(ConfigError, match=r"write self.manual_backward\(loss\) in place of loss.backward\(\)"):
        quiet_trainer(max_epochs=1, precision=precision).fit(PlainBackward(), batches())


def test_a_plain_backward_is_as_good_where_nothing_is_scaled():
    module = PlainBackward()
    before = module.first.weight.detach().clone()
    quiet_trainer(max_epochs=1, precision="O4").fit(module, batches())
    assert not torch.equal(module.first.weight, before)


class Anything:
    """A schedule without ``step``, which the module calls by itself."""

    def __init__(self, optimizer):
        self.optimizer, self.moves = optimizer, 0

    def state_dict(self):
        return {"moves": self.moves}

    def load_state_dict(self, state_dict):
        self.moves = state_dict["moves"]


class StepsItsSchedules(TwoPlayers):
    def configure_optimizers(self):
        one, two = super().configure_optimizers()
        return [one, two], [torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=0), Anything(two)]

    def on_train_epoch_end(self):
        plateau, anything = self.lr_schedulers()
        plateau.step(1.0)
        anything.moves += 1


def test_a_schedule_needs_neither_monitor_nor_step(tmp_path):
    module = StepsItsSchedules()
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(module, batches())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    again = StepsItsSchedules()
    quiet_trainer(max_epochs=3).fit(again, batches(), ckpt_path=tmp_path / "two.ckpt")
    assert again.lr_schedulers()[1].moves == 3


class Keeps(TrainingModule):
    """Optimizer a steps in every batch, b in every second one with the sum of two gradients; ``options`` say what differs."""

    def __init__(self, make=torch.optim.SGD, **options):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(4, 1)
        self.b = torch.nn.Linear(4, 1)
        self.automatic_optimization = False
        self.make = make
        self.options = options

    def training_step(self, batch, batch_idx):
        a, b = self.optimizers()
        clear = self.options.get("clear", "after each step of b")
        a.zero_grad()
        self.manual_backward(self.a(batch).float().square().mean())
        a.step()
        if clear == "set to zero, in place":
            for parameter in self.b.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        elif clear == "optimizer":
            b.zero_grad()
        elif clear == "module":
            self.b.zero_grad(set_to_none=False)
        loss = self.b(batch).float().square().mean() / 2
        options = {"create_graph": True} if self.options.get("create_graph") else {}
        self.manual_backward(loss, loss_id=self.options.get("loss_id", 0), **options)
        if batch_idx % 2:
            b.step()
            if clear == "after each step of b":
                b.zero_grad()

    def configure_optimizers(self):
        return [self.make(player.parameters(), lr=0.1) for player in (self.a, self.b)]


OTHER_SCALE = (
    r"not all have the loss scale of now .*those of 'b.weight'.*another step.*zero_grad.*loss_scale=128.*num_losses=2"
)


@pytest.mark.filterwarnings("ignore:Using backward")  # create_graph
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("precision", ["O2", OptLevel("O1", max_loss_scale=3.0**11)])
def test_a_sum_of_gradients_with_two_loss_scales_is_refused_at_its_step(precision, make, create_graph):
    module = Keeps(make, create_graph=create_graph)
    before = module.b.weight.detach().clone()
    trainer = quiet_trainer(max_epochs=1, precision=precision)
    with pytest.raises(ConfigError, match=OTHER_SCALE):
        trainer.fit(module, batches())
    assert trainer.global_step == 1  # in the second training_step, at the first step of b
    assert torch.equal(module.b.weight, before)


class KeepsLong(TrainingModule):
    """Optimizer a steps in every batch, b in every fifth one; batch 7 overflows in the loss of a ``spiked`` player."""

    def __init__(self, make, spiked=""):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(4, 1)
        self.b = torch.nn.Linear(4, 1)
        self.automatic_optimization = False
        self.make = make
        self.spiked = spiked

    def loss(self, player, batch, batch_idx):
        factor = float("inf") if batch_idx == 7 and player == self.spiked else 1e-3
        return getattr(self, player)(batch).float().square().mean() * factor

    def training_step(self, batch, batch_idx):
        a, b = self.optimizers()
        a.zero_grad()
        self.manual_backward(self.loss("a", batch, batch_idx))
        a.step()
        self.manual_backward(self.loss("b", batch, batch_idx))
        if batch_idx % 5 == 4:
            b.step()
            b.zero_grad()

    def configure_optimizers(self):
        return [self.make(player.parameters(), lr=10.0) for player in (self.a, self.b)]


def kept_long(precision, *options):
    module = KeepsLong(*options)
    data = torch.randn(40, 8, 4, generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(max_epochs=1, precision=precision)
    trainer.fit(module, list(data))
    return module, trainer


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
def test_kept_fp32_gradients_follow_a_scale_that_moves_by_powers_of_two(make):
    """The scale doubles after every third step, so each sum of b is of gradients with two or three scales."""

    def moving():
        return OptLevel("O1", scale_window=3, max_loss_scale=2.0**22)

    constant, _ = kept_long(OptLevel("O1", loss_scale=2.0**16), make)
    module, trainer = kept_long(moving(), make)
    assert trainer.skipped_steps == 0
    assert trainer.precision_plugin.verdicts.scale == 2.0**22
    assert all(map(torch.equal, module.parameters(), constant.parameters()))
    assert not torch.equal(module.b.weight, KeepsLong(make).b.weight)

    # An overflow of a lowers the scale at once, with the gradients that b keeps.
    module, trainer = kept_long(moving(), make, "a")
    assert trainer.skipped_steps == 1
    assert all(map(torch.equal, module.b.parameters(), constant.b.parameters()))

    # One in what b keeps skips its next step alone.
    module, trainer = kept_long(moving(), make, "b")
    assert trainer.skipped_steps == 1
    assert all(map(torch.equal, module.a.parameters(), constant.a.parameters()))
    assert all(parameter.isfinite().all() for parameter in module.b.parameters())
    assert not torch.equal(module.b.weight, KeepsLong(make).b.weight)


class Grows(KeepsLong):
    """Optimizer b gets a new group in batch 11, right before the backward whose gradients it keeps while the scale doubles."""

    def __init__(self, make):
        super().__init__(make)
        self.c = torch.nn.Linear(4, 1)

    def loss(self, player, batch, batch_idx):
        loss = super().loss(player, batch, batch_idx)
        if player == "a" or batch_idx < 11:
            return loss
        if batch_idx == 11:
            self.optimizers()[1].optimizer.add_param_group({"params": list(self.c.parameters())})
        return loss + self.c(batch).float().square().mean() * 1e-3


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
def test_kept_gradients_of_a_group_that_was_just_added_follow_the_scale(make):
    data = list(torch.randn(20, 8, 4, generator=torch.Generator().manual_seed(1)))
    constant, moving = Grows(make), Grows(make)
    quiet_trainer(max_epochs=1, precision=OptLevel("O1", loss_scale=2.0**16)).fit(constant, data)
    trainer = quiet_trainer(max_epochs=1, precision=OptLevel("O1", scale_window=3, max_loss_scale=2.0**22))
    trainer.fit(moving, data)
    assert trainer.skipped_steps == 0
    assert all(map(torch.equal, moving.parameters(), constant.parameters()))
    assert not torch.equal(moving.c.weight, Grows(make).c.weight)


class AddsToUnscaled(Keeps):
    """Adds to a gradient that the step of b has unscaled; b steps again after c, with no backward in between."""

    def __init__(self):
        super().__init__()
        self.c = torch.nn.Linear(1, 1)

    def configure_optimizers(self):
        return [*super().configure_optimizers(), self.make(self.c.parameters(), lr=0.1)]

    def training_step(self, batch, batch_idx):
        a, b, c = self.optimizers()
        if batch_idx < 2:
            a.zero_grad()
            self.manual_backward(self.a(batch).float().square().mean() + self.b(batch).float().square().mean())
            a.step()
        if batch_idx == 2:
            c.step()
        if batch_idx != 1:
            b.step()


def test_what_was_added_to_an_unscaled_gradient_is_refused_also_after_the_scale_has_moved():
    trainer = quiet_trainer(max_epochs=1, precision=OptLevel("O1", max_loss_scale=64.0))
    with pytest.raises(ConfigError, match=r"of now.*'b.weight'"):
        trainer.fit(AddsToUnscaled(), batches())
    assert trainer.global_step == 2  # in the third training_step


def by_hand(module, *, clears):
    """Makes the steps of :class:`Keeps` in fp32."""
    a, b = module.configure_optimizers()
    for batch_idx, batch in enumerate(batches()):
        a.zero_grad()
        module.a(batch).square().mean().backward()
        a.step()
        if clears:
            b.zero_grad()
        (module.b(batch).square().mean() / 2).backward()
        if batch_idx % 2:
            b.step()
            b.zero_grad()


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("O0", {}),
        ("O4", {}),
        ("O5", {}),
        (OptLevel("O1", loss_scale=64.0), {}),
        (OptLevel("O2", loss_scale=64.0), {}),
        (OptLevel("O1", min_loss_scale=64.0, max_loss_scale=64.0), {}),
        (OptLevel("O1", num_losses=2, max_loss_scale=64.0), {"loss_id": 1}),
        (OptLevel("O2", num_losses=2, max_loss_scale=64.0), {}),
        *[
            (OptLevel(level, max_loss_scale=64.0), {"clear": how})
            for level in ("O1", "O2")
            for how in ("set to zero, in place", "optimizer", "module")
        ],
    ],
)
def test_kept_gradients_of_one_scale_are_summed_as_in_a_loop_by_hand(precision, options, make):
    module = Keeps(make, **options)
    twin = Keeps(make)
    quiet_trainer(max_epochs=1, precision=copy.deepcopy(precision)).fit(module, batches())
    by_hand(twin, clears="clear" in options)
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.01)


class StepsBothLater(Keeps):
    """Both optimizers keep gradients over two batches and step in the second one: the scale does not move in between."""

    def training_step(self, batch, batch_idx):
        for optimizer, player in zip(self.optimizers(), (self.a, self.b), strict=True):
            self.manual_backward(player(batch).float().square().mean() / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()


class Untoggled(Keeps):
    """The loss of a reaches b too, whose gradients are dropped before its own backward; as in a GAN without toggling."""

    def training_step(self, batch, batch_idx):
        a, b = self.optimizers()
        a.zero_grad()
        self.manual_backward((self.a(batch).float() - self.b(batch).float()).square().mean())
        a.step()
        if batch_idx % 3 == 2:
            b.zero_grad(set_to_none=self.options["set_to_none"])
            self.manual_backward((self.a(batch).detach().float() - self.b(batch).float()).square().mean())
            b.step()


class ClearsWithin(Keeps):
    """Clears gradients in its own ``backward``."""

    def backward(self, loss):
        for parameter in self.b.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss.backward()

    def training_step(self, batch, batch_idx):
        a, b = self.optimizers()
        a.zero_grad()
        self.manual_backward(self.a(batch).float().square().mean() + self.b(batch).float().square().mean())
        a.step()
        b.step()


class ClearsAtOnce(Keeps):
    """Clears in place right after each step, and at the end of a training_step without one."""

    def training_step(self, batch, batch_idx):
        a, b = self.optimizers()
        self.manual_backward((self.a(batch).float() - self.b(batch).float()).square().mean())
        a.step()
        a.zero_grad(set_to_none=False)
        if batch_idx % 2:
            b.step()
        self.b.zero_grad(set_to_none=False)


@pytest.mark.parametrize("precision", ["O1", "O2"])
@pytest.mark.parametrize(
    "module",
    [StepsBothLater(), Untoggled(set_to_none=True), Untoggled(set_to_none=False), ClearsWithin(), ClearsAtOnce()],
)
def test_what_never_steps_with_two_scales_trains(module, precision):
    before = module.b.weight.detach().clone()
    trainer = quiet_trainer(max_epochs=2, precision=OptLevel(precision, max_loss_scale=64.0))
    trainer.fit(copy.deepcopy(module), batches())
    assert trainer.global_step >= 6
    assert not torch.equal(trainer.module.b.weight, before)


class StepsLate(Keeps):
    """Steps in the next training_step, at whose end the scale may have moved since backward."""

    def training_step(self, batch, batch_idx):
        _, b = self.optimizers()
        if batch_idx:
            b.step()
            b.zero_grad()
        self.manual_backward(self.b(batch).float().square().mean())


class StepsLater(Keeps):
    """Optimizer b steps one training_step after its backward, a in each."""

    def training_step(self, batch, batch_idx):
        a, b = self.optimizers()
        if batch_idx % 2:
            b.step()
            b.zero_grad()
        else:
            self.manual_backward(self.b(batch).float().square().mean())
        a.zero_grad()
        self.manual_backward(self.a(batch).float().square().mean())
        a.step()


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("kind", [StepsLate, StepsLater])
def test_half_gradients_whose_scale_may_have_moved_are_refused_at_their_step(kind, make):
    with pytest.raises(ConfigError, match=OTHER_SCALE):
        quiet_trainer(max_epochs=1, precision="O2").fit(kind(make), batches())
    module = kind(make)
    quiet_trainer(max_epochs=1, precision=OptLevel("O2", loss_scale=64.0)).fit(module, batches())
    assert not torch.equal(module.b.weight, kind(make).b.weight)


class Shares(Keeps):
    """Both optimizers update one parameter from one gradient."""

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.a(batch).float().square().mean())
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [self.make(self.a.parameters(), lr=0.1) for _ in range(2)]


def test_two_steps_with_one_gradient_take_the_scale_out_of_it_once():
    with pytest.raises(ConfigError, match=r"of now.*'a.weight'"):
        quiet_trainer(max_epochs=1, precision=OptLevel("O1", loss_scale=64.0)).fit(Shares(), batches())
    module = Shares(FusedSGD)  # leaves gradients as they are
    twin = Shares(FusedSGD)
    quiet_trainer(max_epochs=1, precision=OptLevel("O1", loss_scale=64.0)).fit(module, batches())
    one, two = twin.configure_optimizers()
    for batch in batches():
        one.zero_grad()
        twin.a(batch).square().mean().backward()
        one.step()
        two.step()
    torch.testing.assert_close(module.a.weight, twin.a.weight, rtol=0.02, atol=0.01)


class NeverClears(Keeps):
    def training_step(self, batch, batch_idx):
        a, _ = self.optimizers()
        self.manual_backward(self.a(batch).float().square().mean())
        a.step()


class LooksAtGradients(NeverClears):
    def on_before_optimizer_step(self, optimizer):
        assert self.a.weight.grad.abs().max() < 64


@pytest.mark.parametrize("module", [NeverClears(), LooksAtGradients(FusedSGD)])
def test_gradients_that_a_step_has_unscaled_are_not_added_to(module):
    with pytest.raises(ConfigError, match=r"of now.*'a.weight'.*; clear gradients after their step \(zero_grad\)$"):
        quiet_trainer(max_epochs=1, precision=OptLevel("O1", loss_scale=64.0)).fit(copy.deepcopy(module), batches())


def test_gradients_that_a_step_has_left_scaled_are_added_to():
    module = NeverClears(FusedSGD)
    quiet_trainer(max_epochs=1, precision=OptLevel("O1", loss_scale=64.0)).fit(module, batches())
    twin = NeverClears(FusedSGD)
    a, _ = twin.configure_optimizers()
    for batch in batches():
        twin.a(batch).square().mean().backward()
        a.step()
    torch.testing.assert_close(module.a.weight, twin.a.weight, rtol=0.02, atol=0.01)


def mixing_on_a_rank():
    with pytest.raises(ConfigError, match=OTHER_SCALE):
        quiet_trainer(max_epochs=1, precision="O2", strategy="ddp", devices="auto").fit(Keeps(), batches())
    module = KeepsLong(FusedSGD)
    moving = OptLevel("O1", scale_window=3, max_loss_scale=2.0**22)
    data = torch.randn(40, 8, 4, generator=torch.Generator().manual_seed(1))
    quiet_trainer(max_epochs=1, precision=moving, strategy="ddp", devices="auto").fit(module, list(data))
    return list(module.parameters())


def test_every_rank_refuses_or_rescales_a_sum_with_two_loss_scales():
    alone, _ = kept_long(OptLevel("O1", loss_scale=2.0**16), FusedSGD)
    for parameters in run_ranks(mixing_on_a_rank, 2):  # both ranks have the same batches
        assert all(map(torch.equal, parameters, alone.parameters()))


def test_half_gradients_kept_in_a_checkpoint_are_refused_in_the_resumed_run(tmp_path):
    class Saves(Keeps):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 0:
                self.trainer.save_checkpoint(tmp_path / "kept.ckpt")

    quiet_trainer(max_steps=1, max_epochs=-1, precision="O2").fit(Saves(), batches())
    resumed = quiet_trainer(max_steps=4, max_epochs=-1, precision="O2")
    with pytest.raises(ConfigError, match=OTHER_SCALE):
        resumed.fit(Keeps(), batches(), ckpt_path=tmp_path / "kept.ckpt")
    assert resumed.global_step == 1


@pytest.mark.parametrize("save_at", [3, 7, 13])
def test_fp32_gradients_kept_in_a_checkpoint_follow_the_scale_in_the_resumed_run(tmp_path, save_at):
    class Saves(KeepsLong):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == save_at:
                self.trainer.save_checkpoint(tmp_path / "kept.ckpt")

    def moving():
        return OptLevel("O1", scale_window=3, max_loss_scale=2.0**22)

    data = list(torch.randn(40, 8, 4, generator=torch.Generator().manual_seed(1)))
    straight, resumed = Saves(FusedSGD), KeepsLong(FusedSGD)
    quiet_trainer(max_epochs=1, precision=moving()).fit(straight, data)
    quiet_trainer(max_epochs=1, precision=moving()).fit(resumed, data, ckpt_path=tmp_path / "kept.ckpt")
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))


def test_memory_of_cleared_gradients_is_free_before_the_next_backward():
    class Looks(Keeps):
        def training_step(self, batch, batch_idx):
            a, b = self.optimizers()
            for optimizer in (a, b):
                optimizer.zero_grad()
            gone.append([reference() for reference in gradients])
            self.manual_backward((self.a(batch) + self.b(batch)).float().square().mean())
            gradients[:] = [weakref.ref(parameter.grad) for parameter in self.parameters()]
            for optimizer in (a, b):
                optimizer.step()

    gradients = []
    gone = []
    quiet_trainer(max_epochs=1, precision=OptLevel("O1", max_loss_scale=64.0)).fit(Looks(), batches())
    assert gone[1:] == [[None] * 4] * 5
