"""The state of a run: the values of its parts have names on the state itself, and a stop is forgotten as a whole."""

from __future__ import annotations

import copy
import pickle

import pytest

from fabricamp.state import RunState, Scope

NAMES = {
    "scope": Scope.EVAL_STEP,
    "batch": [1, 2],
    "dataloader_idx": 2,
    "num_dataloaders": 3,
    "ahead": True,
    "capturing": True,
    "agreed": True,
    "stop_reason": "enough",
    "stop_explanation": "why",
    "interruption": "SIGTERM",
    "should_stop": True,
    "committed": 4,
    "hold_at": 5,
}


@pytest.mark.parametrize("carried", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_values_of_parts_are_written_and_read_by_their_name(carried):
    state = RunState()
    before = {name: getattr(RunState(), name) for name in NAMES}
    for name, value in NAMES.items():
        setattr(state, name, value)
    found = carried(state)
    assert {name: getattr(found, name) for name in NAMES} == NAMES
    assert (found.user_call.scope, found.stop_request.reason, found.agenda.hold_at) == (Scope.EVAL_STEP, "enough", 5)
    assert {name: getattr(RunState(), name) for name in NAMES} == before  # nothing is shared


def test_a_forgotten_stop_leaves_nothing():
    state = RunState()
    state.stop("non-finite gradients", "where")
    state.interrupt("SIGTERM")
    state.stop_error = ValueError("it")
    assert state.cut
    state.forget_stop()
    assert (state.should_stop, state.agreed, state.cut, state.interrupted) == (False, False, False, False)
    assert (state.stop_reason, state.stop_explanation, state.stop_error) == ("", "", None)


def test_the_next_fit_goes_on_counting_and_runs_no_user_code():
    state = RunState()
    state.epoch = 2
    state.global_step = 7
    state.user_call.scope = Scope.TRAIN_STEP
    state.stop("max_steps")
    following = state.of_next_fit()
    assert (following.epoch, following.global_step) == (2, 7)
    assert (following.scope, following.should_stop) == (Scope.NOWHERE, False)
