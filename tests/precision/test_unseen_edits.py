"""The comparison of half weights with their masters: all of them at first, later shares in turn."""

from __future__ import annotations

import pytest
import torch

from fabricamp.precision import unseen_edits
from fabricamp.precision.unseen_edits import WHOLE_LOOKS, UnseenEdits

SIZES = [5, 300, 1, 0, 40, 40, 40, 7]


def weights():
    torch.manual_seed(0)
    masters = [torch.randn(size) for size in SIZES]
    return [master.bfloat16() for master in masters], masters


@pytest.mark.parametrize("edited", [index for index, size in enumerate(SIZES) if size])
def test_each_weight_is_compared_in_every_round(edited, monkeypatch):
    monkeypatch.setattr(unseen_edits, "_LEAST", 1)
    halves, masters = weights()
    edits = UnseenEdits()
    for _ in range(WHOLE_LOOKS + 3):
        edits.begin(halves, masters)
        assert edits.found() is None
    halves[edited].view(-1)[-1] += 8
    for _ in range(2):
        found = []
        for _ in range(unseen_edits._SHARES):
            edits.begin(halves, masters)
            found.append(edits.found())
        assert set(found) <= {None, edited}
        assert 0 < found.count(edited) < len(found)


def test_the_first_looks_compare_everything_and_a_small_net_always_is(monkeypatch):
    halves, masters = weights()
    edits = UnseenEdits()
    halves[7][0] += 8
    for _ in range(WHOLE_LOOKS + 3):
        edits.begin(halves, masters)
        assert edits.found() == 7
    monkeypatch.setattr(unseen_edits, "_LEAST", 1)
    edits = UnseenEdits()
    for _ in range(WHOLE_LOOKS):
        edits.begin(halves, masters)
        assert edits.found() == 7


def test_an_edit_that_was_taken_back_is_not_found_again(monkeypatch):
    monkeypatch.setattr(unseen_edits, "_LEAST", 1)
    halves, masters = weights()
    edits = UnseenEdits()
    halves[0][0] += 8
    edits.begin(halves, masters)
    assert edits.found() == 0
    halves[0].copy_(masters[0])
    for _ in range(WHOLE_LOOKS + unseen_edits._SHARES):
        edits.begin(halves, masters)
        assert edits.found() is None
