"""Manual optimization with several optimizers: exchange, unscaling and step counts; right from the first step under ddp."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ConfigError, OptLevel, TrainingModule
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
