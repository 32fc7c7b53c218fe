"""The folder form of a checkpoint: round trips, replacement of an earlier one, damage, and foreign code in its files."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fabricamp.checkpoint import (
    copy_checkpoint,
    folder,
    link_checkpoint,
    read_checkpoint,
    read_header,
    storage,
    write_together,
)
from fabricamp.checkpoint.folder import read_without_shards, write_folder
from fabricamp.checkpoint.shard_loading import sharded_weights
from fabricamp.commands.export import export
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.strategies import Sharding, Strategy
from fabricamp.strategies.host_ranks import HostRanks


class Sharded(Strategy, Sharding):
    shards = True


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def state(mesh):
    def sharded(*shape):
        return distribute_tensor(torch.arange(float(torch.Size(shape).numel())).view(shape), mesh, [Shard(0)])

    weights = torch.nn.Linear(2, 3).state_dict()  # has torch's _metadata with versions
    weights.update(weight=sharded(3, 2), bias=sharded(3))
    states = [{"state": {0: {"exp_avg": sharded(3, 2) + 1, "step": torch.tensor(3.0)}}, "param_groups": []}]
    return {"state_dict": weights, "optimizer_states": states, "global_step": 5, "rng": [torch.arange(3)]}


def written(path, state):
    write_together(str(path), state, Sharded())
    return path


def check(found, step=5):
    assert found["global_step"] == step
    assert type(found["state_dict"]["weight"]) is torch.Tensor
    assert torch.equal(found["state_dict"]["weight"], torch.arange(6.0).view(3, 2))
    assert found["state_dict"]._metadata[""] == {"version": 1}
    assert torch.equal(found["optimizer_states"][0]["state"][0]["exp_avg"], torch.arange(1.0, 7.0).view(3, 2))
    assert "shards" not in found


def test_a_folder_comes_back_whole(state, tmp_path):
    path = written(tmp_path / "a.ckpt", state)
    check(read_checkpoint(path))
    header = read_header(str(path))
    assert header["state_dict"]["weight"].is_meta
    assert header["state_dict"]["weight"].shape == (3, 2)
    assert [one.name for one in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_folder_becomes_one_file_and_weights_for_others(state, tmp_path):
    path = written(tmp_path / "a.ckpt", state)
    assert export(path, tmp_path / "whole.ckpt") == f"{tmp_path}/whole.ckpt: the checkpoint of step 5 as one file"
    assert (tmp_path / "whole.ckpt").is_file()
    check(read_checkpoint(tmp_path / "whole.ckpt"))
    export(path, tmp_path / "weights.pt", dtype="bf16")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert weights["weight"].dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"whole.ckpt with dtype='fp16': a whole checkpoint keeps what was trained"):
        export(path, tmp_path / "whole.ckpt", dtype="fp16")


def test_one_file_becomes_a_folder(state, tmp_path):
    export(written(tmp_path / "a.ckpt", state), tmp_path / "whole.ckpt")
    assert export(tmp_path / "whole.ckpt", f"{tmp_path}/parts/").endswith("parts: the checkpoint of step 5 as a folder")
    check(read_checkpoint(tmp_path / "parts"))
    rest = read_without_shards(str(tmp_path / "parts"), HostRanks(), weights_only=None)
    assert rest["state_dict"]["weight"].is_meta
    assert rest["optimizer_states"][0]["state"][0]["exp_avg"].is_meta
    assert rest["optimizer_states"][0]["state"][0]["step"] == 3
    with pytest.raises(ConfigError, match=r"parts with dtype='fp16': a whole checkpoint keeps what was trained"):
        export(tmp_path / "whole.ckpt", f"{tmp_path}/parts/", dtype="fp16")
    with pytest.raises(CheckpointError, match="is a folder already, and no checkpoint"):
        export(tmp_path / "whole.ckpt", f"{tmp_path}/")


def test_of_a_folder_that_was_a_file_buffers_are_read_whole(state, tmp_path):
    state["state_dict"]["running_mean"] = torch.arange(4.0)
    export(written(tmp_path / "a.ckpt", state), tmp_path / "whole.ckpt")
    export(tmp_path / "whole.ckpt", f"{tmp_path}/parts/")
    own = {**state["state_dict"], "running_mean": torch.zeros(4)}
    path = str(tmp_path / "parts")
    found = sharded_weights(read_without_shards(path, HostRanks(), weights_only=None), path, own)["state_dict"]
    assert torch.equal(found["running_mean"], torch.arange(4.0))
    assert torch.equal(found["weight"].full_tensor(), state["state_dict"]["weight"].full_tensor())


def test_a_second_name_is_of_the_same_files_and_outlives_the_first(state, tmp_path):
    path, second, link = written(tmp_path / "a.ckpt", state), tmp_path / "b.ckpt", tmp_path / "last.ckpt"
    assert not storage.has_other_names(str(path))
    copy_checkpoint(path, second)
    copy_checkpoint(path, second)
    link_checkpoint(second, link)
    assert storage.same_file(str(path), str(second))
    assert storage.has_other_names(str(path))
    assert link.is_symlink()
    inodes = [sorted(one.stat().st_ino for one in each.rglob("*") if one.is_file()) for each in (path, second)]
    assert inodes[0] == inodes[1]
    storage.remove(str(path))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["b.ckpt", "last.ckpt"]
    check(read_checkpoint(link))
    storage.remove(str(link))
    check(read_checkpoint(second))


def test_what_stands_there_is_replaced_within_its_folder(state, tmp_path):
    path = written(tmp_path / "a.ckpt", state)
    killed = path / "shards-0123456789abcdef"  # left by a killed writer
    killed.mkdir()
    copy_checkpoint(written(tmp_path / "b.ckpt", {**state, "global_step": 6}), path)
    check(read_checkpoint(path), 6)
    written(path, {**state, "global_step": 7})
    check(read_checkpoint(path), 7)
    assert len(list(path.iterdir())) == 2
    check(read_checkpoint(tmp_path / "b.ckpt"), 6)


def test_a_write_that_fails_leaves_what_stands_there(state, tmp_path):
    path = written(tmp_path / "a.ckpt", state)
    with pytest.raises(CheckpointError, match=r"\['wrong'\] is a builtins.object"):
        written(path, {**state, "wrong": object()})
    with pytest.raises(CheckpointError, match="lost/weight is a tensor on the meta device"):
        written(path, {**state, "lost": {"weight": torch.empty(2, device="meta")}})
    (tmp_path / "file.ckpt").touch()
    with pytest.raises(CheckpointError, match=r"file.ckpt is a file, and a sharded checkpoint is a folder"):
        written(tmp_path / "file.ckpt", state)
    with pytest.raises(CheckpointError, match="a folder of this machine"):
        write_folder("memory://a.ckpt", state, Sharded())
    check(read_checkpoint(path))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.ckpt", "file.ckpt"]
    assert len(list(path.iterdir())) == 2


def test_abandoned_folders_are_removed_and_those_of_a_living_writer_are_not(state, tmp_path):
    abandoned, living = tmp_path / ".aa.ckpt.partial", tmp_path / ".bb.ckpt.partial"
    for one in (abandoned, living):
        (one / "shards-0").mkdir(parents=True)
    handle = os.open(living, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    written(tmp_path / "a.ckpt", state)
    os.close(handle)
    assert sorted(one.name for one in tmp_path.iterdir()) == [living.name, "a.ckpt"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (folder, "write_shards"),
        (folder, "files_of"),
        (folder, "write_checkpoint"),
        (folder, "sync"),
        (filesystem.FileSystem, "rename"),
    ],
)
@pytest.mark.parametrize("stood", [False, True])
def test_a_folder_that_is_removed_while_it_is_written_is_made_again(state, tmp_path, monkeypatch, owner, name, stood):
    target_folder = tmp_path / "files"
    if stood:
        written(target_folder / "a.ckpt", {**state, "global_step": 1})
    real, calls = getattr(owner, name), []

    def removing(*args, **options):
        calls.append(name)
        if len(calls) == 1:
            shutil.rmtree(target_folder)
        return real(*args, **options)

    monkeypatch.setattr(owner, name, removing)
    check(read_checkpoint(written(target_folder / "a.ckpt", state)))
    assert len(calls) > 1
    assert [one.name for one in target_folder.iterdir()] == ["a.ckpt"]


def test_a_folder_that_is_removed_each_time_is_an_error(state, tmp_path, monkeypatch):
    real = folder.write_shards

    def removing(*args, **options):
        real(*args, **options)
        shutil.rmtree(tmp_path / "files")

    monkeypatch.setattr(folder, "write_shards", removing)
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        written(tmp_path / "files" / "a.ckpt", state)


def damaged_in(shards, name):
    file = next(shards.glob(name))
    content = bytearray(file.read_bytes())
    content[content.index(b"\x00\x00\x80?") if name != ".metadata" else 100] ^= 1  # flips a bit of a 1.0
    file.write_bytes(content)


def shortened(shards, name):
    file = next(shards.glob(name))
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "name", "words"),
    [
        (damaged_in, "__0_0.distcp", "__0_0.distcp is damaged"),
        (shortened, "__0_0.distcp", "is missing, or not as long"),
        (lambda shards, name: (shards / name).unlink(), "__0_0.distcp", "is missing, or not as long"),
        (damaged_in, ".metadata", "not the one that was written"),
        (lambda shards, name: (shards / name).unlink(), ".metadata", "the list of its tensors is missing"),
    ],
)
def test_damage_is_told(damage, name, words, state, tmp_path):
    path = written(tmp_path / "a.ckpt", state)
    damage(next(path.glob("shards-*")), name)
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(path)


def rewritten(path, **shards):
    """Rewrites ``state.pt`` with other ``shards``, as an attacker would."""
    state = torch.load(path / storage.STATE, weights_only=True)
    state.pop("checksum", None)
    state["shards"] |= shards
    torch.save(state, path / storage.STATE)


def with_metadata(path, content):
    import hashlib

    (next(path.glob("shards-*")) / ".metadata").write_bytes(content)
    rewritten(path, digest=hashlib.blake2b(content, digest_size=16).hexdigest())


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/shards-of-somebody-else",)


def test_nothing_that_a_folder_brings_is_run_or_followed(state, tmp_path):
    path = written(tmp_path / "a.ckpt", state)
    good = (next(path.glob("shards-*")) / ".metadata").read_bytes()
    with_metadata(path, pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="it names posix.mkdir, which is not part"):
        read_checkpoint(path)
    with_metadata(path, good.replace(b"__0_0.distcp", b"../x.distcp0"))
    with pytest.raises(CheckpointError, match=r"leads to '\.\./x"):
        read_checkpoint(path)
    for shards in ({"folder": "../b"}, {"files": {"../x": 1}}):
        rewritten(path, **shards)
        with pytest.raises(CheckpointError, match="does not say"):
            read_checkpoint(path)


def test_a_folder_that_is_no_checkpoint_is_told(tmp_path):
    with pytest.raises(CheckpointError, match=r"is a folder without state\.pt"):
        read_checkpoint(tmp_path)


def test_a_tensor_file_of_another_checkpoint_is_refused_by_name(state, tmp_path):
    paths = [tmp_path / name for name in ("a.ckpt", "b.ckpt")]
    for number, path in enumerate(paths):
        written(path, {**state, "state_dict": {name: value + number for name, value in state["state_dict"].items()}})
    other, own = (next(path.glob("shards-*/__0_0.distcp")) for path in paths)
    assert other.stat().st_size == own.stat().st_size
    whole = own.read_bytes()
    own.write_bytes(other.read_bytes())
    with pytest.raises(
        CheckpointError, match=r"__0_0.distcp is not the file that was written here, but one of another"
    ):
        read_checkpoint(paths[1])
    own.write_bytes(whole)
    assert read_checkpoint(paths[1])["state_dict"]["weight"][0, 0] == 1


def test_a_folder_that_does_not_say_what_its_files_hold_is_read(state, tmp_path):
    path = written(tmp_path / "a.ckpt", state)
    written_state = torch.load(path / storage.STATE, weights_only=True)
    del written_state["shards"]["contents"], written_state["checksum"]  # as version 0.2.0 wrote it
    torch.save(written_state, path / storage.STATE)
    check(read_checkpoint(path))


@pytest.mark.parametrize(
    "shards",
    [{"contents": 5}, {"contents": {}}, {"files": {"__0_0.distcp": "x", 5: None}}, {"digest": []}, {"renamed": 3}],
)
def test_a_list_of_files_of_another_layout_is_damage(shards, state, tmp_path):
    path = written(tmp_path / "a.ckpt", state)
    rewritten(path, **shards)
    with pytest.raises(CheckpointError, match=r"a\.ckpt"):
        read_checkpoint(path)


def flips(content):
    """Returns positions and bits: of every directory of a zip, whose fields ask for passwords or other formats, and of all else."""
    entries = [at for at in range(len(content) - 3) if content[at : at + 4] == b"PK\x01\x02"]
    directories = [(at + offset, bit) for at in entries[:2] for offset in range(48) for bit in (0, 3, 6, 7)]
    return [*directories, *((at, at % 8) for at in range(0, len(content), 61))]


@pytest.mark.parametrize("name", ["shards-*/__0_0.distcp", "shards-*/.metadata", storage.STATE])
def test_a_flipped_bit_is_damage_or_changes_nothing(name, state, tmp_path):
    path = written(tmp_path / "a.ckpt", state)
    file = next(path.glob(name))
    content = file.read_bytes()
    refused = 0
    for position, bit in flips(content):
        file.write_bytes(content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :])
        try:
            found = read_checkpoint(path)
        except CheckpointError:
            refused += 1
        else:
            check(found)
    assert refused > len(flips(content)) / 4
