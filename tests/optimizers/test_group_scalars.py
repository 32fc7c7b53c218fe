"""The numbers that a step reads are uploaded after every change, whatever has changed, and are not computed again without one."""

import functools

import pytest
import torch

from fabricamp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad
from tests.cuda_on_cpu.compiler import one_order


def parameters(device):
    torch.manual_seed(1)
    made = [torch.nn.Parameter(torch.randn(5, device=device)) for _ in range(2)]
    for one in made:
        one.grad = torch.randn_like(one)
    return made


def on_device(optimizer):
    """Returns the scalars of the groups as the kernels read them."""
    return optimizer.tables[0].scalars.cpu().clone()


def expected(optimizer, count):
    return torch.tensor(optimizer.numbers(optimizer.param_groups), dtype=torch.float64).view(-1, count)


def check(optimizer):
    optimizer.step()
    found = on_device(optimizer)
    assert torch.equal(found, expected(optimizer, found.shape[1]))


def two_groups(device, **options):
    first, second = parameters(device)
    return FusedAdam([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1, **options)


CHANGES = {
    "lr": 0.3,
    "betas": (0.5, 0.6),
    "eps": 1e-3,
    "weight_decay": 0.2,
    "bias_correction": False,
    "maximize": True,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("number", [0, 1])
@one_order
def test_a_changed_number_of_a_group_is_uploaded(kernel_device, name, number):
    optimizer = two_groups(kernel_device)
    check(optimizer)
    check(optimizer)
    optimizer.param_groups[number][name] = CHANGES[name]
    check(optimizer)
    check(optimizer)


@one_order
def test_a_list_that_changes_in_place_is_uploaded(kernel_device):
    optimizer = two_groups(kernel_device, betas=[0.9, 0.99])
    check(optimizer)
    check(optimizer)
    optimizer.param_groups[0]["betas"][0] = 0.3
    optimizer.param_groups[1]["betas"][1] = 0.4
    check(optimizer)


@one_order
def test_a_tensor_that_changes_in_place_is_uploaded(kernel_device):
    lr = torch.tensor(0.1, device=kernel_device)
    optimizer = FusedAdam(parameters(kernel_device), lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    assert on_device(optimizer)[0, 0].item() == pytest.approx(0.1)
    lr.fill_(0.7)
    optimizer.step()
    assert on_device(optimizer)[0, 0].item() == pytest.approx(0.7)
    optimizer.param_groups[0]["lr"] = 0.2
    check(optimizer)


@pytest.mark.parametrize(("kind", "option"), [(FusedAdam, "adam_w_mode"), (FusedNovoGrad, "moment_mode")])
@one_order
def test_a_changed_option_of_the_optimizer_is_uploaded(kernel_device, kind, option):
    optimizer = kind(parameters(kernel_device), lr=0.1, weight_decay=0.1)
    check(optimizer)
    before = on_device(optimizer)
    setattr(optimizer, option, not getattr(optimizer, option))
    check(optimizer)
    assert not torch.equal(on_device(optimizer), before)


@one_order
def test_a_rule_of_another_class_is_asked_in_each_step(kernel_device):
    class Halving(FusedAdam):
        factor = 1.0

        def _rule(self, group):
            return super()._rule({**group, "lr": group["lr"] * self.factor})

    optimizer = Halving(parameters(kernel_device), lr=0.8)
    check(optimizer)
    check(optimizer)
    optimizer.factor = 0.5
    check(optimizer)
    assert on_device(optimizer)[0, 0].item() == 0.4


@one_order
def test_forgotten_scalars_are_uploaded_again(kernel_device):
    optimizer = two_groups(kernel_device)
    check(optimizer)
    optimizer.tables[0].scalars.zero_()
    optimizer.tables[0].forget_scalars()
    check(optimizer)


@one_order
def test_no_rule_is_made_without_a_change(kernel_device, monkeypatch):
    optimizer = two_groups(kernel_device)
    check(optimizer)
    made = []
    own = FusedAdam._rule
    monkeypatch.setattr(FusedAdam, "_rule", lambda self, group: made.append(group) or own(self, group))
    optimizer.step()
    assert made == []
    optimizer.param_groups[1]["lr"] = 0.7
    optimizer.step()
    assert len(made) == 2


@one_order
def test_a_rule_that_wraps_the_packages_and_a_rule_class_of_ones_own_are_asked_in_each_step(kernel_device):
    class Wrapped(FusedAdam):
        factor = 1.0

        @functools.wraps(FusedAdam._rule)
        def _rule(self, group):
            return super()._rule({**group, "lr": group["lr"] * self.factor})

    class OwnRule(FusedLAMB.rule):
        factor = 1.0

        def scalars(self):
            first, *others = super().scalars()
            return [first * OwnRule.factor, *others]

    class OwnLamb(FusedLAMB):
        rule = OwnRule

    for kind, owner in ((Wrapped, Wrapped), (OwnLamb, OwnRule)):
        optimizer = kind(parameters(kernel_device), lr=0.8)
        optimizer.step()
        before = on_device(optimizer)
        owner.factor = 0.5
        optimizer.step()
        assert on_device(optimizer)[0, 0] == before[0, 0] * 0.5


@pytest.mark.parametrize("options", [(), ("adam_w_mode",)])
@one_order
def test_a_subclass_names_as_few_options_as_it_has(kernel_device, options):
    kind = type("Other", (FusedAdam,), {"options": options})
    optimizer = kind(parameters(kernel_device), lr=0.1)
    check(optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    check(optimizer)
