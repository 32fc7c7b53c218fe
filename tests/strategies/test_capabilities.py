"""The capabilities of strategies: who has one is asked, and a member without one is refused."""

from __future__ import annotations

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


class Joined:
    """A member of a capability, from a class that is no strategy."""

    def begin_step(self):
        self.begun = True
        super().begin_step()


def test_what_a_strategy_with_the_capability_overrides_is_called():
    class Folders(Strategy, Sharding):
        shards = True

        def settle_module(self, module):
            self.settled = module
            super().settle_module(module)

    class ByMixin(Joined, Strategy, Membership):
        heals = True

    strategy, module = Folders(), torch.nn.Linear(1, 1)
    assert strategy.sharding is strategy
    assert strategy.membership is FIXED
    strategy.sharding.settle_module(module)
    assert strategy.settled is module
    assert form_of(strategy).all_ranks_write
    joined = ByMixin()
    joined.membership.begin_step()
    assert joined.begun
    assert joined.lockstep
    quiet_trainer(strategy=joined)


MEMBERS = {
    "Sharding": ["shards", "owns_master_weights", "shard_module", "settle_module", "whole_gradients"],
    "Membership": ["heals", "join", "begin_step", "end_steps"],
}
EVERY = [(capability, name) for capability, names in MEMBERS.items() for name in names]


@pytest.mark.parametrize("base", [Strategy, DDP])
@pytest.mark.parametrize(("capability", "name"), EVERY)
def test_a_class_with_a_member_and_without_the_capability_is_refused_where_it_is_made(capability, name, base):
    with pytest.raises(
        ConfigError,
        match=rf"Own has {name}, and nothing asks for that without fabricamp\.strategies\.{capability} among the bases; "
        rf"add it, as in class Own\({base.__name__}, {capability}\)",
    ):
        type("Own", (base,), {name: True})


def test_a_mixin_s_member_and_that_of_the_other_capability_are_refused():
    with pytest.raises(ConfigError, match=r"Own has begin_step, .* class Own\(Joined, Strategy, Membership\)"):

        class Own(Joined, Strategy):
            pass

    with pytest.raises(ConfigError, match=r"Elastic has heals, join, .* class Elastic\(FSDP, Membership\)"):

        class Elastic(FSDP):
            heals = True

            def join(self, state):
                return None


def test_a_subclass_of_a_strategy_with_the_capability_needs_no_more():
    class Own(FSDP):
        owns_master_weights = False

    assert Own().sharding.owns_master_weights is False


def test_a_member_that_a_class_gets_later_is_refused_by_the_trainer():
    class Own(DDP):
        pass

    Own.heals = True
    with pytest.raises(ConfigError, match="Own has heals, and nothing asks for that"):
        quiet_trainer(strategy=Own())


@pytest.mark.parametrize("base", [Strategy, DDP, FSDP])
def test_a_name_for_the_form_is_refused_where_the_class_is_made(base):
    with pytest.raises(ConfigError, match=r"Tape\.checkpoint_form is read by nothing; .* write shards = True, with"):

        class Tape(base):
            checkpoint_form = "folder"


def test_other_strategies_have_no_member_of_a_capability():
    members = [name for one in (Sharding, Membership) for name in vars(one) if not name.startswith("_")]
    assert [name for name in members if hasattr(DDP(), name)] == []


@pytest.mark.parametrize("name", ["checkpoint_form", "owns_master_weights", "unshard_module", "heals", "end_steps"])
def test_a_member_that_is_set_on_the_object_is_refused_by_name(name):
    strategy = DDP()
    with pytest.raises(ConfigError, match=f"DDP sets {name} on the object"):
        setattr(strategy, name, "folder")
    assert not hasattr(strategy, name)


@pytest.mark.parametrize(("name", "capability"), [("checkpoint_form", "Sharding"), ("heals", "Membership")])
def test_the_same_for_a_strategy_with_the_other_capability(name, capability):
    with pytest.raises(
        ConfigError, match=f"FSDP sets {name} on the object, .* fabricamp.strategies.{capability} among"
    ):
        setattr(FSDP(), name, True)


def test_a_member_that_a_constructor_sets_is_refused_when_the_strategy_is_made():
    class Own(Strategy):
        def __init__(self):
            super().__init__()
            self.heals = True

    with pytest.raises(ConfigError, match="Own sets heals on the object"):
        Own()


def test_a_strategy_may_set_members_of_its_own_capability_on_the_object():
    strategy = FSDP()
    strategy.owns_master_weights = False
    assert strategy.sharding.owns_master_weights is False
