"""Steps in parts: several optimizers, backward and update by themselves, with the bits of the Trainer's manual optimization."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ConfigError, Loop, TrainingModule
from fabricamp.optimizers import FusedAdam
from tests.distributed.ranks import run_ranks
from tests.own_loop.same import copied, difference
from tests.small import loader, quiet_trainer


def nets():
    torch.manual_seed(2)
    return torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)


def optimizers(first, second):
    return torch.optim.SGD(first.parameters(), 0.1, momentum=0.9), FusedAdam(second.parameters(), 0.01)


def losses(first, second, batch):
    hidden = first(batch[0])
    return second(hidden.detach()).square().mean(), (second(hidden) - 1).square().mean()


class Pair(TrainingModule):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.first, self.second = nets()

    def configure_optimizers(self):
        return list(optimizers(self.first, self.second))

    def training_step(self, batch, batch_idx):
        one, two = self.optimizers()
        for optimizer, number in ((two, 0), (one, 1)):
            optimizer.zero_grad()
            self.manual_backward(losses(self.first, self.second, batch)[number])
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()


def by_trainer(**options):
    module = Pair()
    found = []
    trainer = quiet_trainer(max_epochs=1, **options)
    module.on_train_epoch_end = lambda: found.append(state_of(module.first, module.second, trainer.optimizers, trainer))
    trainer.fit(module, loader())
    return found[-1]


def by_loop(**options):
    run = Loop(**{"accelerator": "cpu", "devices": 1, **options})
    first, second = nets()
    first, second, one, two = run.prepare(first, second, *optimizers(first, second), clip=0.5)
    train = run.prepare_data(loader())

    def both(batch):
        for optimizer, number in ((two, 0), (one, 1)):
            optimizer.zero_grad()
            run.backward(losses(first, second, batch)[number])
            run.update(optimizer)

    with run:
        for batch in train:
            run.step(both, batch)
        return state_of(first, second, (one, two), run._trainer)


def state_of(first, second, both, trainer):
    return copied(
        {
            "weights": [first.state_dict(), second.state_dict()],
            "states": [one.state_dict()["state"] for one in both],
            "amp": trainer.precision_plugin.state_dict(),
            "steps": trainer.global_step,
        }
    )


LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_that_updates_by_itself_is_a_manual_training_step(level):
    assert difference(by_trainer(precision=level), by_loop(precision=level)) == ""


def on_two_ranks():
    options = [{"strategy": one, "precision": level} for one in ("ddp", "delayed_ddp") for level in ("O0", "O2", "O4")]
    return [difference(by_trainer(devices="auto", **one), by_loop(devices="auto", **one)) for one in options]


def test_parts_on_two_ranks():
    for problems in run_ranks(on_two_ranks, 2):
        assert not any(problems)


def one_net(**options):
    torch.manual_seed(2)
    run = Loop(accelerator="cpu", devices=1, **options)
    model = torch.nn.Linear(8, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    return run, model, optimizer


def batches():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, 8, generator=generator)


@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_forward_backward_update_is_a_step(level):
    by_step, model, _ = one_net(precision=level)
    for batch in batches():
        by_step.step(lambda x: model(x).square().mean(), batch)
    in_parts, other, optimizer = one_net(precision=level)
    for batch in batches():
        in_parts.backward(in_parts.forward(lambda x: other(x).square().mean(), batch))
        in_parts.update(optimizer)
    assert by_step.global_step == in_parts.global_step == 8
    assert difference(copied(model.state_dict()), copied(other.state_dict())) == ""
    by_step.close()
    in_parts.close()
    assert model.weight.dtype == torch.float32


def test_one_forward_may_have_two_backwards():
    run, model, optimizer = one_net(precision="O1")
    scores = run.forward(model, batches()[0])
    run.backward(scores.square().mean(), retain_graph=True)
    run.backward(scores.mean())
    run.update(optimizer)
    whole, other, _ = one_net(precision="O1")
    whole.step(lambda x: (scores := other(x)).square().mean() + scores.mean(), batches()[0])
    torch.testing.assert_close(model.weight, other.weight)


def test_accumulated_parts_are_the_mean():
    whole, model, _ = one_net()
    whole.step(lambda x: model(x).square().mean(), batches().flatten(0, 1))
    run, other, optimizer = one_net()
    with run.accumulate(8):
        for batch in batches():
            run.backward(run.forward(lambda x: other(x).square().mean(), batch))
    run.update(optimizer)
    torch.testing.assert_close(model.weight, other.weight)
    assert run.global_step == 1
    assert other.weight.grad is None or not other.weight.grad.any()


def test_a_named_optimizer_makes_the_step_of_its_loss():
    run = Loop(accelerator="cpu", devices=1, precision="O2")
    first, second = nets()
    first, second, one, two = run.prepare(first, second, *optimizers(first, second))
    with run:
        for batch in loader():
            before = copied([first.state_dict(), second.state_dict()])
            loss = run.step(lambda b: losses(first, second, b)[0], batch, two)
            assert not loss.requires_grad
            assert difference(before[0], copied(first.state_dict())) == ""
            run.step(lambda b: losses(first, second, b)[1], batch, one)
        assert difference(before[0], copied(first.state_dict())) != ""
        assert run.global_step == 16


def test_steps_in_parts_are_refused_where_they_would_be_wrong():
    run, model, _ = one_net(precision="O1")
    with pytest.raises(ConfigError, match=r"not computed at precision 'O1'.*run\.forward"):
        run.backward(model(batches()[0]).sum())
    run, model, _ = one_net()
    run.step(lambda x: model(x).sum(), batches()[0])
    with pytest.raises(ConfigError, match="this Loop makes whole steps"):
        run.backward(model(batches()[0]).sum())
    with torch.no_grad():  # a validation
        assert run.forward(model, batches()[0]).shape == (4, 1)
    run, model, _ = one_net()
    with run.accumulate(2), pytest.raises(ConfigError, match="accumulate_grad_batches"):
        run.step(lambda x: model(x).sum(), batches()[0])
    with pytest.raises(ConfigError, match="that prepare was not given"):
        run.update(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))
    run = Loop(accelerator="cpu", devices=1)
    run.prepare(*(both := nets()), *optimizers(*both))
    with pytest.raises(ConfigError, match=r"no optimizer stepped, of the 2.*step\(fn, batch, optimizer\)"):
        run.step(lambda b: losses(*both, b)[0], next(iter(loader())))
