"""Checkpoints of format 2, whose keys had other names."""

from __future__ import annotations

import copy

import pytest
import torch

from fabricamp.checkpoint import read_checkpoint
from fabricamp.checkpoint.formats import upgraded
from fabricamp.metrics.saving import load_rows, save_rows
from fabricamp.metrics.slots import Published
from tests.earlier_versions.runs import SCENES, files_of
from tests.trainer.test_resume import assert_equal

FILES = [file for scene in SCENES for file in files_of(scene, 2)]


RENAMED = {
    "loops.fit.stop": "loops.fit.stop_reason",
    "loops.fit.closed": "loops.fit.epoch_ended",
    "loops.fit.ended": "loops.fit.metrics_at_end",
    "loops.fit.ended.*.given": "loops.fit.metrics_at_end.*.user_entries",
    "loops.fit.ended_logs": "loops.fit.loggers_at_end",
    "loops.fit.objects.*.*.updates": "loops.fit.torchmetrics.*.*.update_count",
    "loops.fit.objects.*.*.states": "loops.fit.torchmetrics.*.*.states",
    "loops.fit.window.gradients": "loops.fit.accumulation.gradients",
    "loops.fit.window.held": "loops.fit.accumulation.params_with_grad",
    "loops.fit.metrics.*.given": "loops.fit.metrics.*.user_entries",
    "loops.fit.metrics.*.table.cells.*.number": "loops.fit.metrics.*.table.slots.*.host_value",
    "loops.fit.metrics.*.table.cells.*.sent": "loops.fit.metrics.*.table.slots.*.flushed_weight",
    "loops.fit.metrics.*.table.cells.*.object": "loops.fit.metrics.*.table.slots.*.metric_attribute",
    "loops.fit.metrics.*.table.cells.*.weight": "loops.fit.metrics.*.table.slots.*.weight",
    "loops.fit.metrics.*.table.cells.*.published": "loops.fit.metrics.*.table.slots.*.published",
    "amp.scaler.window.scale": "amp.scaler.step_state.scale",
    "amp.scaler.window.first_window": "amp.scaler.step_state.first_step",
    "amp.scaler.scalers.*.first_window": "amp.scaler.scalers.*.first_step",
    "amp.scaler.windows": "amp.scaler.steps",
    "amp.scaler.known": "amp.scaler.last_status",
    "amp.scaler.at_floor": "amp.scaler.steps_at_min_scale",
    "amp.scaler.sticky": "amp.scaler.keep_skipping",
    "data.position.*.last": "data.position.*.is_over",
    "data.position.*.again": "data.position.*.earlier_pass",
    "data.position.*.begun.rng": "data.position.*.at_pass_start.rng",
    "data.position.*.begun.generators": "data.position.*.at_pass_start.generators",
    "data.position.*.begun.again": "data.position.*.at_pass_start.earlier_pass",
    "data.position.*.drawn": "data.position.*.rng_states",
    "data.position.*.drawn_ahead": "data.position.*.rng_states_ahead",
    "data.position.*.orders.*.apart": "data.position.*.orders.*.separate",
    "data.position.*.places.*.batches": "data.position.*.positions.*.batches",
    "data.position.*.places.*.rounds": "data.position.*.positions.*.rounds",
    "data.position.*.places.*.state": "data.position.*.positions.*.state",
    "data.position.*.places.*.drawn": "data.position.*.positions.*.rng_states",
    "data.position.*.places.*.groups": "data.position.*.positions.*.batches_of_all_ranks",
    "data.position.*.ended.drawn": "data.position.*.at_limit.rng_states",
    "data.position.*.ended.places.*.batches": "data.position.*.at_limit.positions.*.batches",
    "data.position.*.ended.places.*.groups": "data.position.*.at_limit.positions.*.batches_of_all_ranks",
}
"""Where format 2 has a value, and where a file has it since; ``*`` is any key or index."""


def values_at(value, path):
    """All values at ``path``, in the order of the file."""
    if not path:
        return [value]
    key, *rest = path
    if key == "*":
        inner = value.values() if isinstance(value, dict) else list(value or ())
    else:
        inner = [value[key]] if isinstance(value, dict) and key in value else []
    return [one for part in inner for one in values_at(part, rest)]


@pytest.mark.parametrize("old", RENAMED)
def test_a_value_is_found_under_its_new_key(old):
    found = []
    for file in FILES:
        written, state = torch.load(file, weights_only=False), read_checkpoint(file, weights_only=False)
        assert (written["format"], state["format"]) == (2, 3)
        values = values_at(written, old.split("."))
        current = values_at(state, RENAMED[old].split("."))
        if not any(isinstance(value, dict | list) for value in values):  # in these, keys may have changed as well
            assert_equal(current, values)
        assert len(current) == len(values)
        assert old == RENAMED[old] or not values_at(state, old.split("."))
        found += values
    assert found, "no file has this key: it is not tested"


def test_a_flush_on_its_way_from_a_gpu_is_found_under_its_new_keys():
    """Files that were written on a CPU have none: there it arrives at once."""
    published = Published("loss", "loss", True, "mean", False, True, False)
    row = {"published": [published._asdict()], "numbers": [1.0], "weights": [-1], "device": [0.5]}
    metrics = {"pending": [{"step": 4, "rows": [row]}]}
    state = {"fabricamp_version": "0.2.0", "format": 2, "loops": {"fit": {"metrics": [metrics]}}}
    (flush,) = upgraded(state, "gpu.ckpt")["loops"]["fit"]["metrics"][0]["pending"]
    (values,) = load_rows(flush.pop("ranks"))
    assert flush == {"step": 4}
    assert values == ([published], [1.0], [-1], [0.5])
    assert load_rows(save_rows([values])) == [values]


def test_a_limit_within_a_loader_that_is_read_past_is_found_under_its_new_keys():
    states = [{"rng": 1, "generators": []}]
    at_limit = {"places": [{"batches": 2, "drawn": states}], "drawn": states[0]}
    state = {"fabricamp_version": "0.2.0", "format": 2, "data": {"position": [{"batches": 0, "ended": at_limit}]}}
    assert upgraded(state, "own.ckpt")["data"]["position"] == [
        {"batches": 0, "at_limit": {"positions": [{"batches": 2, "rng_states": states}], "rng_states": states[0]}}
    ]


def test_values_of_users_and_plug_ins_keep_their_keys():
    own = {"stop": 1, "window": 2, "places": [{"drawn": 3, "groups": 4}], "cells": 5, "known": 6, "held": 7, "again": 8}
    state = {
        "fabricamp_version": "0.2.0",
        "format": 2,
        "amp": {"scaler": dict(own), "own": dict(own)},
        "callbacks": {"Own": dict(own)},
        "loggers": [{"logger": "Own", "state": dict(own)}],
        "data": {"datamodule": dict(own), "position": [{"places": [{"batches": 1, "state": dict(own)}]}]},
        "loops": {"fit": {"objects": [{"metric": {"updates": 1, "states": dict(own)}}], "window": None}},
        **own,
    }
    found = upgraded(state, "own.ckpt")
    assert {key: found[key] for key in own} == own
    assert found["amp"] == {"scaler": own, "own": own}
    assert found["callbacks"] == {"Own": own}
    assert found["loggers"] == [{"logger": "Own", "state": own}]
    assert found["data"] == {"datamodule": own, "position": [{"positions": [{"batches": 1, "state": own}]}]}
    assert found["loops"]["fit"] == {
        "torchmetrics": [{"metric": {"update_count": 1, "states": own}}],
        "accumulation": None,
    }


@pytest.mark.parametrize(
    "amp",
    [
        None,
        [1],
        "own",
        *({"scaler": own} for own in (None, [1], {}, {"scale": 4.0, "window": 3}, {"windows": 1, "known": 2})),
    ],
)
def test_a_precision_of_another_layout_stays_as_it_is(amp):
    state = {"fabricamp_version": "0.2.0", "format": 2, "amp": copy.deepcopy(amp), "data": {"position": [{}, None]}}
    assert upgraded(state, "own.ckpt")["amp"] == amp
