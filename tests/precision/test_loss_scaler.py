"""The scaler's rule against a model in plain Python, its lag, and its state."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fabricamp.precision import OptLevel
from fabricamp.precision.loss_scaler import LAG, LossScaler
from tests.trainer.test_resume import assert_equal


class Model:
    """The rule, on Python numbers."""

    def __init__(self, window, minimum, maximum, hysteresis):
        self.window, self.minimum, self.maximum, self.full = window, minimum, maximum, hysteresis
        self.scale, self.growth, self.left = min(2.0**16, maximum), 0, hysteresis
        self.applied = self.skipped = 0

    def close(self, finite):
        if finite:
            self.applied += 1
            self.left = self.full
            self.growth += 1
            if self.growth == self.window:
                self.scale, self.growth = min(self.scale * 2, self.maximum), 0
        else:
            self.skipped += 1
            self.growth = 0
            self.left = max(self.left - 1, 0)
            if self.left == 0:
                self.scale = max(self.scale / 2, self.minimum)
        return finite, self.scale, self.applied, self.skipped


rules = st.fixed_dictionaries(
    {
        "window": st.integers(1, 4),
        "minimum": st.sampled_from([2.0**-14, 1.0, 2.0**15]),
        "maximum": st.sampled_from([2.0**16, 2.0**17, 2.0**24]),
        "hysteresis": st.integers(1, 3),
    }
)


@settings(max_examples=60, deadline=None)
@given(rules, st.lists(st.booleans(), max_size=25))
def test_the_rule(rule, windows):
    scaler, model = LossScaler(**rule), Model(**rule)
    expected, told = [], []
    for index, finite in enumerate(windows):
        scaler.state.finite.mul_(finite)
        expected.append((finite, *((model.close(finite))[1:]), float(index)))
        told.append(scaler.end_step(torch.tensor(float(index))))
    told = [v for v in told if v is not None] + scaler.pending()
    assert [(v.applied, v.scale, v.applied_steps, v.skipped_steps, v.loss) for v in told] == expected
    assert scaler.state.growth.item() == model.growth
    assert scaler.state.hysteresis.item() == model.left


def test_the_floor_holds_and_nothing_divides_by_zero():
    scaler = LossScaler()
    for _ in range(100):
        scaler.state.finite.zero_()
        scaler.end_step(None)
    assert scaler.state.scale.item() == 2.0**-14
    assert scaler.known.skipped_steps == 100 - LAG


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_a_resumed_scaler_tells_the_same(at):
    finite = [True, False, True, True, False, False, True, True]

    def close(scaler, index):
        scaler.state.finite.mul_(finite[index])
        return scaler.end_step(torch.tensor(float(index)))

    straight = LossScaler(window=2)
    for index in range(at):
        close(straight, index)
    buffer = io.BytesIO()
    torch.save(straight.state_dict(), buffer)
    buffer.seek(0)
    resumed = LossScaler(window=2)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert repr(resumed.known) == repr(straight.known)
    for index in range(at, len(finite)):
        assert close(resumed, index) == close(straight, index)
        assert repr(resumed.known) == repr(straight.known)


def test_state_of_other_levels():
    module = torch.nn.Linear(2, 2)
    dynamic = OptLevel("O1")
    dynamic.convert_module(module)
    dynamic.verdicts.scaler.state.scale.fill_(4.0)
    state = dynamic.state_dict()
    assert state["level"] == "O1"
    other = OptLevel("O2", min_loss_scale=8.0)
    other.load_state_dict(state)  # before there is a scaler
    conversion = other.convert_module(module)
    assert other.verdicts.scaler.state.scale.item() == 8.0
    conversion.undo()
    for level in ("O4", "O0"):
        plain = OptLevel(level)
        plain.convert_module(module)
        plain.load_state_dict(state)
        assert plain.verdicts is None
    fresh = OptLevel("O1")
    fresh.convert_module(module)
    fresh.load_state_dict(plain.state_dict())
    fresh.load_state_dict({})
    assert fresh.verdicts.scale == 2.0**16


def test_fewer_scalers_than_saved_and_more():
    one, three = LossScaler(), LossScaler(num_losses=3)
    for index, state in enumerate(three.losses):
        state.scale.fill_(2.0**index)
    one.load_state_dict(three.state_dict())
    assert one.state.scale.item() == 1.0
    one.state.scale.fill_(64.0)
    three.load_state_dict(one.state_dict())
    assert [state.scale.item() for state in three.losses] == [64.0, 2.0, 4.0]


class Operations(TorchDispatchMode):
    """Counts what reaches torch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("losses", [1, 2])
def test_what_is_launched_and_what_only_the_host_does_are_two_halves(losses):
    scaler, whole = (LossScaler(num_losses=losses) for _ in range(2))
    loss = torch.ones(())
    for window in range(6):
        for one in (scaler, whole):
            one.state.finite.fill_(int(window != 3))
        with Operations() as launched:
            scaler.launch_end(loss)
        with Operations() as noted:
            verdict = scaler.note_end()
        assert launched.count > 0
        assert noted.count == 0
        assert verdict == whole.end_step(loss)
        assert (verdict is None) == (window < 2)
    assert [one.applied for one in scaler.pending()] == [True, True]
    assert scaler.known.skipped_steps == 1


@pytest.mark.parametrize("by_pickle", [False, True])
def test_a_saved_state_goes_on(by_pickle):
    options = {"minimum": 2.0**15, "sticky": True}
    straight = LossScaler(**options)
    for finite in (1, 0, 0):
        straight.state.finite.mul_(finite)
        straight.end_step(torch.tensor(0.5))
    saved = copy.deepcopy(straight.state_dict())
    assert saved["keep_skipping"]
    assert saved["step_state"]["first_step"].item() == 1
    if by_pickle:  # given to a precision that has no scaler yet, and pickled with it
        early = OptLevel("O2", min_loss_scale=2.0**15)
        early.take_nan_policy("stop")
        early.load_state_dict({"loss_scale": "dynamic", "scaler": saved})
        precision = pickle.loads(pickle.dumps(early))
        precision.convert_module(torch.nn.Linear(2, 2))
        resumed = precision._scaling.scaler
    else:
        resumed = LossScaler(**options)
        resumed.load_state_dict(saved)
    assert_equal(resumed.state_dict(), straight.state_dict())
    for finite in (0, 1, 1, 1):
        statuses = []
        for scaler in (straight, resumed):
            scaler.state.finite.mul_(finite)
            statuses.append(scaler.end_step(torch.tensor(0.25)))
        assert statuses[0] == statuses[1]
    assert resumed.overflow == straight.overflow
