"""Zips with right checksums that are wrong all the same: edited, reassembled, of another byte order, or not a file."""

from __future__ import annotations

import os
import zipfile

import pytest
import torch

from fabricamp.checkpoint import copy_checkpoint, read_checkpoint, read_header, write_checkpoint
from fabricamp.checkpoint.plain import structure
from fabricamp.errors import CheckpointError
from tests.distributed.ranks import run_ranks


def state(size=100):
    weights = {"a": torch.full((size,), 1.0), "b": torch.full((size,), 2.0)}
    return {"state_dict": weights, "epoch": 3, "global_step": 40}


def repack(path, edit=dict, *, comment=True, compression=zipfile.ZIP_STORED):
    """Rewrites the zip with the members that ``edit`` returns; all checksums are right."""
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
        said = archive.comment
    edited = edit(dict(members))
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.comment = said if comment else b""
        for name, content in edited.items() if isinstance(edited, dict) else edited:
            archive.writestr(name, content)


def swapped(members):
    return {**members, "archive/data/0": members["archive/data/1"], "archive/data/1": members["archive/data/0"]}


def changed(members):
    return {**members, "archive/data/1": b"\x00" * len(members["archive/data/1"])}


@pytest.mark.parametrize("comment", [True, False])
@pytest.mark.parametrize("edit", [swapped, changed, dict])
def test_members_that_were_exchanged_with_right_checksums_are_noticed(tmp_path, edit, comment):
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, state())
    assert read_checkpoint(path)["state_dict"]["b"][0] == 2
    repack(path, edit, comment=comment)
    for read in (read_checkpoint, lambda path: read_header(str(path))):
        with pytest.raises(
            CheckpointError, match=r"a\.ckpt (is damaged.*not those that were written|was changed after it was written)"
        ):
            read(path)


def test_two_members_of_one_name_are_refused_in_any_file(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save(state(), path)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/data/1", torch.zeros(100).numpy().tobytes())
    with pytest.raises(CheckpointError, match="two members 'a/data/1'"):
        read_checkpoint(path)


def test_files_without_a_seal_load_as_before(tmp_path):
    content = state()
    torch.save({**content, "checksum": structure(content)}, tmp_path / "a.ckpt")  # a file of the first version
    torch.save(content, tmp_path / "b.ckpt")
    for name in ("a.ckpt", "b.ckpt"):
        repack(tmp_path / name)
        assert torch.equal(read_checkpoint(tmp_path / name)["state_dict"]["b"], content["state_dict"]["b"])


@pytest.mark.parametrize("number", [0, 1, 3, 2000])
def test_the_seal_of_few_and_many_members(tmp_path, number):
    import fsspec

    many = {"state_dict": {str(index): torch.full((index % 7,), float(index)) for index in range(number)}, "epoch": 1}
    for path in (str(tmp_path / "a.ckpt"), "memory://seals/a.ckpt"):
        write_checkpoint(path, many)
        copy_checkpoint(path, tmp_path / "copy.ckpt")
        with zipfile.ZipFile(tmp_path / "copy.ckpt") as archive:
            assert archive.comment.startswith(b"fabricamp:")
        for read in (read_checkpoint(tmp_path / "copy.ckpt"), torch.load(tmp_path / "copy.ckpt", mmap=True)):
            assert all(torch.equal(read["state_dict"][name], value) for name, value in many["state_dict"].items())
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("verify", [True, False])
def test_another_byte_order_is_refused(tmp_path, verify):
    """Runs in a separate process, because torch may crash it."""
    path = tmp_path / "a.ckpt"
    torch.save(state(), path)
    repack(path, lambda members: {**members, "a/byteorder": b"big"})
    with pytest.raises(AssertionError, match="CheckpointError: .*its byte order is 'big'"):
        run_ranks(lambda: read_checkpoint(path, "meta", verify=verify), 1, backend=None)


def test_values_nested_too_deeply_are_an_error(tmp_path):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="flatten"):
        write_checkpoint(tmp_path / "a.ckpt", {**state(), "deep": deep})
    content = {**state(), "checksum": "0" * 32}
    torch.save({**content, "deep": "DEEP"}, tmp_path / "a.ckpt")
    # pickle cannot write such nested lists either, so the opcodes are inserted by hand.
    opcodes = b"]" * 100_000 + b"a" * 99_999
    repack(
        tmp_path / "a.ckpt",
        lambda members: {**members, "a/data.pkl": members["a/data.pkl"].replace(b"X\x04\x00\x00\x00DEEP", opcodes)},
    )
    for read in (read_checkpoint, lambda path: read_header(str(path))):
        with pytest.raises(CheckpointError, match=r"a\.ckpt is damaged"):
            read(tmp_path / "a.ckpt")


def test_what_is_no_file_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.ckpt")
    (tmp_path / "zero.ckpt").symlink_to("/dev/zero")
    (tmp_path / "nothing.ckpt").symlink_to("gone.ckpt")
    (tmp_path / "loop.ckpt").symlink_to("loop.ckpt")
    for name, words in {
        "pipe": "is a pipe, a socket or a device",
        "zero": "is a pipe, a socket or a device",
        "nothing": r"is a link to gone\.ckpt, which is not there",
        "loop": "Too many levels of symbolic links",
    }.items():
        with pytest.raises(CheckpointError, match=rf"{name}\.ckpt.*{words}"):
            read_checkpoint(tmp_path / f"{name}.ckpt")
