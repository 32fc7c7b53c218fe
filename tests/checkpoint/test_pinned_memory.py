"""Host memory for checkpoints, touched and pinned in pieces by a thread; here ``pin`` notes what CUDA would pin."""

from __future__ import annotations

import threading

import pytest
import torch

from fabricamp.checkpoint import HostCopy, pinned_memory
from fabricamp.checkpoint.pinned_memory import PinnedMemory, copy_in_pieces, pieces

SMALL = 1 << 16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pinned_memory, "PIECE", SMALL)


class Pins:
    """Notes what is pinned, each time ``go`` is set, until it refuses."""

    def __init__(self, refuses_at=None):
        self.go = threading.Event()
        self.go.set()
        self.pinned = []
        self.refuses_at = refuses_at
        self.unpinned = []

    def __call__(self, address, size):
        assert self.go.wait(30)
        if len(self.pinned) == self.refuses_at:
            return "too much"
        self.pinned.append((address, size))
        return ""


def test_pieces_end_at_multiples_and_cover_everything():
    assert list(pieces(SMALL - 5, 2 * SMALL)) == [(0, 5), (5, SMALL + 5), (SMALL + 5, 2 * SMALL)]
    assert list(pieces(SMALL, SMALL)) == [(0, SMALL)]
    assert list(pieces(3, 0)) == []


def test_tensors_larger_than_a_piece_are_at_one_place():
    pins = Pins()
    memory = PinnedMemory(5 * SMALL, pins, print)
    first, second = memory.take(3 * SMALL + 1), memory.take(SMALL)
    assert first.nbytes() == 3 * SMALL + 1
    assert second.data_ptr() == first.data_ptr() + 3 * SMALL + 64
    assert memory.take(SMALL) is None
    assert all(size <= SMALL for _, size in pins.pinned)
    ends = [address + size for address, size in pins.pinned]
    assert ends[:-1] == [address for address, _ in pins.pinned[1:]]
    assert all(end % SMALL == 0 for end in ends[:-1])
    source = torch.arange(3 * SMALL + 1).to(torch.uint8)
    copy_in_pieces(first, source.untyped_storage())
    assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(first), source)


def test_an_early_save_waits_and_says_so(caplog):
    pins = Pins()
    pins.go.clear()
    memory = PinnedMemory(2 * SMALL, pins, print)
    timer = threading.Timer(0.2, pins.go.set)
    timer.start()
    with caplog.at_level("INFO", logger="fabricamp"):
        assert memory.take(2 * SMALL) is not None
    timer.join()
    assert "waits until its host memory is pinned: 0.0 of 0.0 GiB are" in caplog.text


def test_what_cannot_be_pinned_is_not_handed_out(caplog):
    memory = PinnedMemory(4 * SMALL, Pins(refuses_at=2), print)
    assert memory.take(4 * SMALL) is None
    assert memory.take(100) is not None
    assert "cannot be pinned (too much)" in caplog.text


def test_a_copy_of_a_state_takes_it_and_the_next_copy_reuses_it():
    copies = HostCopy()
    pins = Pins()
    copies.prepare(1 << 20, pins, pins.unpinned.append)
    state = {"a": torch.randn(100, 100), "b": [torch.randn(7), torch.arange(70_000)]}
    found = [copies.take(state) for _ in range(2)]
    copies.wait()
    for name in ("a", "b"):
        one, other = (found[0][name], found[1][name]) if name == "a" else (found[0]["b"][1], found[1]["b"][1])
        assert one.data_ptr() == other.data_ptr()
    assert torch.equal(found[1]["a"], state["a"])
    assert torch.equal(found[1]["b"][1], state["b"][1])
    assert found[1]["b"][0].data_ptr() - found[1]["a"].data_ptr() < 1 << 20
    copies.release()
    assert pins.unpinned == [address for address, _ in pins.pinned]
