"""Disks that refuse a write: full, read-only, without permission, or only when data is flushed; the old file stays."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import subprocess
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from fabricamp.checkpoint import read_checkpoint, write_checkpoint
from fabricamp.errors import CheckpointError


def state(fill: float = 1.0, size: int = 1000) -> dict:
    return {"state_dict": OrderedDict(weight=torch.full((size,), fill)), "epoch": 3, "global_step": 40}


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_full_disk_is_an_error_with_the_reason_and_the_old_file_stays(tmp_path):
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, state(1.0))
    write_checkpoint(tmp_path / "big.ckpt", state(2.0, size=100_000))
    size = (tmp_path / "big.ckpt").stat().st_size
    (tmp_path / "big.ckpt").unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (0, 600, 5_000, size // 2, size - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            with pytest.raises(CheckpointError, match=r"a\.ckpt: File too large; an earlier one there is unchanged"):
                write_checkpoint(path, state(2.0, size=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == ["a.ckpt"]
    assert read_checkpoint(path)["state_dict"]["weight"][0] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs takes root")
def test_no_space_left_on_a_real_file_system(tmp_path):
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False, capture_output=True
    )
    if mount.returncode:
        pytest.skip("this container cannot mount")
    try:
        write_checkpoint(tmp_path / "a.ckpt", state(1.0))
        with pytest.raises(CheckpointError, match="No space left on device"):
            write_checkpoint(tmp_path / "b.ckpt", state(2.0, size=1_000_000))
        assert names(tmp_path) == ["a.ckpt"]
        write_checkpoint(tmp_path / "a.ckpt", state(3.0))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"File exists|Not a directory"):
        write_checkpoint(tmp_path / "file" / "a.ckpt", state())
    (tmp_path / "b.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        write_checkpoint(tmp_path / "b.ckpt", state())


def test_what_the_disk_changed_never_takes_the_place_of_a_good_file(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "a.ckpt", state(1.0))
    save = torch.save

    def save_damaged(value, file):
        written = io.BytesIO()
        save(value, written)
        content = bytearray(written.getvalue())
        content[2000] ^= 0xFF
        file.write(content)

    monkeypatch.setattr(torch, "save", save_damaged)
    with pytest.raises(CheckpointError, match=r"Bad CRC-32|checksum"):
        write_checkpoint(tmp_path / "a.ckpt", state(2.0))
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / "a.ckpt")["state_dict"]["weight"][0] == 1
    assert names(tmp_path) == ["a.ckpt"]


def test_ctrl_c_during_a_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    def interrupt(value, file):
        file.write(b"half")
        raise KeyboardInterrupt

    write_checkpoint(tmp_path / "a.ckpt", state(1.0))
    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "a.ckpt", state(2.0))
    assert names(tmp_path) == ["a.ckpt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="giving up root takes root")
def test_a_folder_without_permission_is_an_error(tmp_path):
    """Root may write anywhere, so a child process writes as another user."""
    write_checkpoint(tmp_path / "a.ckpt", state(1.0))
    tmp_path.chmod(0o555)
    (tmp_path / "a.ckpt").chmod(0o444)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # enters the folder first, because the folders above it may be closed to the other user
        os.chdir(tmp_path)
        os.setuid(65534)
        try:
            write_checkpoint("a.ckpt", state(2.0))
        except CheckpointError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as said:
        assert "a.ckpt: Permission denied; an earlier one there is unchanged" in said.read()
    tmp_path.chmod(0o755)
    assert names(tmp_path) == ["a.ckpt"]
    assert read_checkpoint(tmp_path / "a.ckpt")["state_dict"]["weight"][0] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_read_only_file_system_is_an_error(tmp_path):
    options = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(options, check=False, capture_output=True).returncode:
        pytest.skip("this container cannot mount")
    try:
        write_checkpoint(tmp_path / "a.ckpt", state(1.0))
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            write_checkpoint(tmp_path / "a.ckpt", state(2.0))
        assert read_checkpoint(tmp_path / "a.ckpt")["state_dict"]["weight"][0] == 1
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_whatever_the_disk_says_late_is_an_error_with_its_reason(tmp_path, monkeypatch, call, number):
    """Quotas and network disks refuse when data is flushed, not when it is written."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "a.ckpt"
    write_checkpoint(path, state(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), refuse)
        with pytest.raises(CheckpointError, match=rf"a\.ckpt: {os.strerror(number)}"):
            write_checkpoint(path, state(2.0))
    assert names(tmp_path) == ["a.ckpt"]
    assert read_checkpoint(path)["state_dict"]["weight"][0] == 1
