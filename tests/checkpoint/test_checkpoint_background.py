"""Background writes: the copy does not change after it was taken, the file equals a foreground one, failures are reported."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict

import pytest
import torch

from fabricamp.checkpoint import BackgroundWriter, HostCopy, read_checkpoint, write_checkpoint
from fabricamp.errors import CheckpointError


def content():
    """Returns views, shared memory, shared containers and odd layouts: everything that a pickle distinguishes."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    flat = torch.randn(40, generator=torch.Generator().manual_seed(0))
    shared = {"lr": 0.1, "betas": (0.9, 0.999)}
    marked = torch.ones(2)
    marked.note = "kept"
    return {
        "state_dict": module.state_dict(),
        "parameter": torch.nn.Parameter(torch.arange(3.0), requires_grad=False),
        "leaf": torch.zeros(2, requires_grad=True),
        "views": [flat[5:9], flat[::2], flat.view(5, 8).t(), flat],
        "halves": {dtype: torch.ones(3, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)},
        "odd": [torch.empty(0), torch.tensor(3), torch.eye(3).to_sparse(), torch.tensor([1 + 2j]).conj()],
        "marked": marked,
        "groups": [shared, shared, OrderedDict(a=1), Counter("aab"), {1, 2}, torch.Size([2]), torch.strided],
    }


def file_bytes(path, state):
    write_checkpoint(path, state)
    return path.read_bytes()


def test_a_copy_makes_the_same_file_bit_for_bit(tmp_path):
    state, copies = content(), HostCopy()
    del state["odd"][3]  # a conjugated view is saved as its values
    expected = file_bytes(tmp_path / "a.ckpt", state)
    for _ in range(2):  # the second copy reuses the memory of the first
        copied = copies.take(state)
        copies.wait()
        assert file_bytes(tmp_path / "b.ckpt", copied) == expected


def test_a_copy_stays_what_it_was_when_the_original_changes():
    state, copies = content(), HostCopy()
    before = state["views"][3].clone()
    copied = copies.take(state)
    state["views"][3].zero_()
    state["groups"][0]["lr"] = 0.2
    state["state_dict"]["0.weight"].zero_()
    assert torch.equal(copied["views"][3], before)
    assert torch.equal(copied["views"][0], before[5:9])
    assert copied["views"][0].data_ptr() == copied["views"][3][5:].data_ptr()
    assert copied["groups"][1] is copied["groups"][0]
    assert copied["groups"][1]["lr"] == 0.1
    assert copied["state_dict"]["0.weight"].abs().sum() > 0
    assert torch.equal(copied["odd"][3].resolve_conj(), torch.tensor([1 - 2j]))


def test_memory_is_reused_and_follows_what_grows():
    copies = HostCopy()
    first = copies.take({"a": torch.ones(100), "b": torch.zeros(5)})
    addresses = first["a"].data_ptr(), first["b"].data_ptr()
    again = copies.take({"a": torch.full((100,), 2.0), "b": torch.zeros(5)})
    assert (again["a"].data_ptr(), again["b"].data_ptr()) == addresses
    grown = copies.take({"a": torch.full((200,), 3.0), "b": torch.ones(5), "c": torch.ones(1)})
    assert grown["a"].sum() == 600
    assert grown["b"].sum() == 5


def test_what_a_checkpoint_cannot_hold_is_refused_where_it_is_handed_over():
    writer = BackgroundWriter()
    with pytest.raises(CheckpointError, match=r"checkpoint\['x'\] is a builtins.object"):
        writer.start({"x": object()}, lambda _: None)
    writer.wait()


def test_training_goes_on_while_a_slow_disk_takes_its_time(tmp_path):
    writer, disk, weights = BackgroundWriter(), threading.Event(), torch.ones(1000)

    def write(state):
        assert disk.wait(30)
        write_checkpoint(tmp_path / "a.ckpt", state)

    writer.start({"state_dict": {"weight": weights}}, write)
    weights.mul_(2)
    assert not writer.finished
    disk.set()
    writer.wait()
    assert read_checkpoint(tmp_path / "a.ckpt")["state_dict"]["weight"].sum() == 1000
    writer.wait()  # returns at once: nothing is in flight


@pytest.mark.parametrize(
    "error", [CheckpointError("cannot write checkpoint x: No space left"), MemoryError("too much")]
)
def test_what_goes_wrong_in_the_thread_is_told_once_by_wait(error):
    writer = BackgroundWriter()

    def write(_):
        raise error

    writer.start({"a": torch.ones(1)}, write)
    with pytest.raises(CheckpointError, match=str(error)):
        writer.wait()
    writer.wait()
    assert not writer.finished


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_pinned_and_of_its_moment(tmp_path):
    state = {"state_dict": {"a": torch.ones(1 << 24, device="cuda")}, "n": torch.zeros(3)}
    state["state_dict"]["view"] = state["state_dict"]["a"][3:7]
    expected = file_bytes(tmp_path / "a.ckpt", state)
    copies = HostCopy()
    for _ in range(2):
        torch.cuda._sleep(20_000_000)
        copied = copies.take(state)
        assert copied["state_dict"]["a"].is_pinned()
        state["state_dict"]["a"].mul_(0)
        copies.wait()
        assert file_bytes(tmp_path / "b.ckpt", copied) == expected
        state["state_dict"]["a"].fill_(1)
    assert read_checkpoint(tmp_path / "a.ckpt", map_location=None)["state_dict"]["a"].device.type == "cpu"
