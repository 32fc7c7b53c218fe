"""The capabilities of strategies, and strategies of earlier versions, which had their members in ``Strategy``."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from fabricamp.checkpoint.form import form_of
from fabricamp.errors import ConfigError
from fabricamp.strategies import DDP, FSDP, FaultTolerant, Membership, Sharding, Strategy
from fabricamp.strategies.capabilities import FIXED, UNSHARDED
from tests.small import quiet_trainer


def elastic():
    return FaultTolerant(groups=2, group=0, lighthouse="http://localhost:29510")


def test_a_capability_is_the_strategy_itself_or_does_nothing():
    sharded, joined, plain = FSDP(), elastic(), DDP()
    assert sharded.sharding is sharded
    assert sharded.membership is FIXED
    assert joined.membership is joined
    assert joined.sharding is UNSHARDED
    assert (plain.sharding, plain.membership) == (UNSHARDED, FIXED)
    assert not isinstance(plain, Sharding | Membership)
    assert form_of(sharded).all_ranks_write
    assert not form_of(joined).all_ranks_write


def test_processes_that_come_and_go_step_together():
    assert elastic().lockstep
    assert not Strategy().lockstep


class Earlier(Strategy):
    """As for version 0.1: it overrides members that were those of Strategy."""

    checkpoint_form = "folder"
    owns_master_weights = True

    def __init__(self):
        super().__init__()
        self.settled = []

    def settle_module(self, module):
        self.settled.append(module)
        super().settle_module(module)

    def shard_module(self, module, plan):
        return super().shard_module(module, plan) or "sharded by hand"


class Mixin:
    def begin_step(self):
        self.begun = True
        super().begin_step()


class EarlierByMixin(Mixin, Strategy):
    heals = True


class Child(Earlier):
    checkpoint_form = "file"


def test_what_a_strategy_of_an_earlier_version_overrides_is_called():
    strategy, module = Earlier(), torch.nn.Linear(1, 1)
    assert strategy.sharding is strategy
    assert strategy.membership is FIXED
    assert (strategy.sharding.shards, strategy.sharding.owns_master_weights) == (True, True)
    strategy.sharding.settle_module(module)
    assert strategy.settled == [module]
    assert strategy.sharding.shard_module(module, None) == "sharded by hand"
    assert strategy.sharding.whole_gradients() == {}
    assert form_of(strategy).all_ranks_write
    assert not form_of(Child()).all_ranks_write
    joined = EarlierByMixin()
    joined.membership.begin_step()
    assert joined.begun
    assert joined.lockstep
    for one in (strategy, joined):
        assert type(copy.deepcopy(one)) is type(pickle.loads(pickle.dumps(one))) is type(one)


def test_an_unknown_form_is_refused_where_the_class_is_made():
    with pytest.raises(
        ConfigError, match=r"Tape\.checkpoint_form='tape' has to be 'file' or 'folder'; or write shards = True"
    ):

        class Tape(Strategy):
            checkpoint_form = "tape"


def test_an_earlier_member_asked_of_any_strategy_is_the_capabilitys():
    module = torch.nn.Linear(1, 1)
    assert (FSDP().checkpoint_form, DDP().checkpoint_form) == ("folder", "file")
    assert (FSDP().owns_master_weights, DDP().owns_master_weights) == (True, False)
    assert (elastic().heals, DDP().heals) == (True, False)
    assert DDP().settle_module(module) is None
    assert DDP().whole_gradients() == {}
    with pytest.raises(AttributeError, match="'DDP' object has no attribute 'settle_modules'"):
        DDP().settle_modules  # noqa: B018
    assert not hasattr(DDP(), "__len__")


@pytest.mark.parametrize("name", ["checkpoint_form", "owns_master_weights", "unshard_module", "heals", "end_steps"])
def test_a_member_that_is_set_on_the_object_is_refused_by_name(name):
    strategy = DDP()
    setattr(strategy, name, "folder")
    with pytest.raises(ConfigError, match=f"DDP sets {name} on the object"):
        quiet_trainer(strategy=strategy)


def test_the_error_of_a_property_is_the_one_that_is_seen():
    class Own(Strategy):
        @property
        def thing(self):
            return self._missing

    with pytest.raises(AttributeError, match="_missing"):
        _ = Own().thing
    with pytest.raises(AttributeError, match="'Own' object has no attribute 'other'"):
        _ = Own().other
