"""The checkpoint file on real disks: full disks, damaged files, writers killed in the middle, and files of other libraries."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import re
import time
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fabricamp.checkpoint import (
    PARTIAL_SUFFIX,
    check_content,
    copy_checkpoint,
    link_checkpoint,
    plain,
    read_checkpoint,
    write_checkpoint,
)
from fabricamp.errors import CheckpointError


def state(fill: float = 1.0, size: int = 1000) -> dict:
    return {"state_dict": OrderedDict(weight=torch.full((size,), fill)), "epoch": 3, "global_step": 40}


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from([torch.float16, torch.Size([2, 3]), torch.device("cpu")]),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])) | st.integers(), inner)
    ),
    max_leaves=20,
)


@given(value=VALUES)
@settings(max_examples=60, deadline=None)
def test_what_is_accepted_comes_back_equal(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "any.ckpt"
    write_checkpoint(path, {"state_dict": {}, "value": value})
    assert repr(read_checkpoint(path)["value"]) == repr(value)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
def test_tensors_keep_dtype_bits_and_sharing(tmp_path, dtype):
    flat = (torch.arange(20) % 2).to(dtype)
    write_checkpoint(tmp_path / "a.ckpt", {"state_dict": {"flat": flat, "view": flat[5:9]}})
    back = read_checkpoint(tmp_path / "a.ckpt")["state_dict"]
    assert torch.equal(back["flat"], flat)
    assert back["flat"].dtype is dtype
    assert back["view"].data_ptr() == back["flat"][5:].data_ptr()


def test_plain_torch_loads_it(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", state())
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert loaded["epoch"] == 3
    assert torch.equal(loaded["state_dict"]["weight"], torch.ones(1000))


def test_the_module_s_own_state_dict_is_accepted(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    write_checkpoint(tmp_path / "a.ckpt", {"state_dict": module.state_dict()})
    assert read_checkpoint(tmp_path / "a.ckpt")["state_dict"]._metadata


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        ({"a": [1, {"b": Odd()}]}, "checkpoint['x']['a'][1]['b']", "Odd"),
        (np.float64(1.0), "checkpoint['x']", "numpy.float64"),
        ((1, Path("a")), "checkpoint['x'][1]", "Path"),
        ({Odd(): 1}, "its key", "Odd"),
        (lambda: 0, "checkpoint['x']", "function"),
        (frozenset({1}), "checkpoint['x']", "frozenset"),
        (torch.zeros(1, device="meta"), "checkpoint['x']", "meta device"),
        (OmegaConf.create({"a": 1}), "checkpoint['x']", "DictConfig"),
    ],
)
def test_what_could_not_be_loaded_is_refused_by_name_and_nothing_is_written(tmp_path, value, where, kind):
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path / "a.ckpt", {"state_dict": {}, "x": value})
    assert where in str(caught.value)
    assert kind in str(caught.value)
    assert names(tmp_path) == []


def test_an_attribute_on_a_tensor_is_looked_at(tmp_path):
    tensor = torch.zeros(1)
    tensor.note = Odd()
    with pytest.raises(CheckpointError, match=r"\.note"):
        check_content({"t": tensor})


def test_shared_and_circular_values_are_walked_once():
    shared: list = [0]
    for _ in range(60):
        shared = [shared, shared]
    shared[0].append(shared)
    check_content(shared)


def test_write_replaces_the_file_and_leaves_nothing_else(tmp_path):
    for fill in (1.0, 2.0):
        write_checkpoint(tmp_path / "deep" / "a.ckpt", state(fill))
    assert read_checkpoint(tmp_path / "deep" / "a.ckpt")["state_dict"]["weight"][0] == 2
    assert names(tmp_path / "deep") == ["a.ckpt"]
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "deep" / "a.ckpt").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_symbolic_link_is_replaced_and_not_followed(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", state(1.0))
    link_checkpoint(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
    write_checkpoint(tmp_path / "last.ckpt", state(2.0))
    assert read_checkpoint(tmp_path / "a.ckpt")["state_dict"]["weight"][0] == 1


def test_copy_and_link_outlive_a_new_original(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", state(1.0))
    for _ in range(2):  # the second time both names are already the same file
        copy_checkpoint(tmp_path / "a.ckpt", tmp_path / "copy.ckpt")
        link_checkpoint(tmp_path / "a.ckpt", tmp_path / "link.ckpt")
    write_checkpoint(tmp_path / "a.ckpt", state(2.0))
    assert read_checkpoint(tmp_path / "copy.ckpt")["state_dict"]["weight"][0] == 1
    assert read_checkpoint(tmp_path / "link.ckpt")["state_dict"]["weight"][0] == 2
    assert (tmp_path / "link.ckpt").readlink() == Path("a.ckpt")
    assert names(tmp_path) == ["a.ckpt", "copy.ckpt", "link.ckpt"]


def test_copy_where_the_file_system_has_no_second_names(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    write_checkpoint(tmp_path / "a.ckpt", state())
    link_checkpoint(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert read_checkpoint(tmp_path / "b.ckpt")["epoch"] == 3
    assert not (tmp_path / "b.ckpt").samefile(tmp_path / "a.ckpt")


def write_for_ever(folder, sending):
    sending.send("ready")
    for count in itertools.count(1):
        for name in ("a", "b"):
            write_checkpoint(
                folder / f"{name}.ckpt", {"state_dict": {"weight": torch.full((2_000_000,), float(count))}}
            )
            sending.send(count)


def test_kill_9_during_writes_leaves_files_that_load_or_are_ignored_by_name(tmp_path):
    pauses = random.Random(0)
    forks = multiprocessing.get_context("fork")
    for _ in range(4):
        receiving, sending = forks.Pipe(duplex=False)
        writer = forks.Process(target=write_for_ever, args=(tmp_path, sending))
        writer.start()
        sending.close()
        for _ in range(3):
            receiving.recv()
        time.sleep(pauses.uniform(0, 0.1))
        writer.kill()
        writer.join()
        receiving.close()
        for name in names(tmp_path):
            if name.endswith(PARTIAL_SUFFIX):
                continue
            weight = read_checkpoint(tmp_path / name)["state_dict"]["weight"]
            assert (weight == weight[0]).all()
    assert {"a.ckpt", "b.ckpt"} <= set(names(tmp_path))
    write_checkpoint(tmp_path / "a.ckpt", state())
    assert names(tmp_path) == ["a.ckpt", "b.ckpt"], "files of killed writers are removed by the next one"


def test_a_partial_file_whose_writer_lives_is_left_alone(tmp_path):
    from fabricamp.checkpoint.file import _partial_file

    with _partial_file(tmp_path) as (name, _):
        write_checkpoint(tmp_path / "a.ckpt", state())
        assert name.exists()
    assert names(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"junk that is no checkpoint", "its first bytes are not those of a checkpoint"),
        (b"", "its first bytes are not those of a checkpoint"),
        (b"seed: 1\n\ntrainer:\n  max_epochs: 20\n", "its first bytes are not those of a checkpoint"),
        (b"\x80\x02junk", ""),
    ],
)
def test_a_file_that_is_no_checkpoint_says_so_in_words(tmp_path, content, words):
    path = tmp_path / "junk.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"is damaged or not a checkpoint .*{words}.*use an older one") as error:
        read_checkpoint(path)
    reason = re.search(r"not a checkpoint \((.*)\);", str(error.value))[1]
    assert not reason.isdigit()


def test_without_verify_damage_inside_tensors_goes_unnoticed(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", state(1.0))
    content = bytearray((tmp_path / "a.ckpt").read_bytes())
    content[content.index(torch.ones(4).numpy().tobytes()) + 2] ^= 1
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        read_checkpoint(tmp_path / "a.ckpt")
    assert read_checkpoint(tmp_path / "a.ckpt", verify=False)["epoch"] == 3


def test_what_was_changed_after_it_was_written_is_refused_unless_that_was_meant(tmp_path):
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, state(1.0))
    content = torch.load(path, weights_only=True)
    torch.save({**content, "epoch": 4}, path)
    with pytest.raises(CheckpointError, match=r"was changed after it was written.*remove its key 'checksum'"):
        read_checkpoint(path)
    del content["checksum"]
    torch.save({**content, "epoch": 4}, path)
    assert read_checkpoint(path)["epoch"] == 4


def test_missing_files_and_folders_are_named(tmp_path):
    write_checkpoint(tmp_path / "epoch=3.ckpt", state())
    with pytest.raises(CheckpointError, match=r"did you mean 'epoch=3\.ckpt'"):
        read_checkpoint(tmp_path / "epoch=4.ckpt")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "none" / "a.ckpt")
    with pytest.raises(CheckpointError, match="is a folder"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00", b"PK\x03\x04 nothing", b"{'state_dict': 1}", b"\x80\x02}q\x00."])
def test_other_files_are_no_checkpoints(tmp_path, content):
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.ckpt"):
        read_checkpoint(tmp_path / "a.ckpt")


def test_weights_alone_are_told_apart(tmp_path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"'weight'.*load_state_dict"):
        read_checkpoint(tmp_path / "a.ckpt")
    torch.save([1], tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="holds a list"):
        read_checkpoint(tmp_path / "a.ckpt")


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_a_file_that_brings_code_is_refused_and_the_code_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "hyper_parameters": Bomb()}, "a.ckpt")
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        read_checkpoint("a.ckpt")
    torch.save({"state_dict": {}, "hyper_parameters": argparse.Namespace(lr=1)}, "a.ckpt")
    with pytest.raises(CheckpointError, match=r"argparse\.Namespace.*weights_only=False"):
        read_checkpoint("a.ckpt")
    assert names(tmp_path) == ["a.ckpt"]


def test_damage_is_an_error_or_changes_nothing(tmp_path):
    """Random bit flips and truncations never lead to another state (some bits of a zip are padding)."""
    good, damaged = tmp_path / "good.ckpt", tmp_path / "damaged.ckpt"
    value = {"state_dict": {"weight": torch.arange(500.0)}, "epoch": 7, "list": [1, 2.5, "text"]}
    write_checkpoint(good, value)
    content, draw, refused = good.read_bytes(), random.Random(1), 0
    for trial in range(300):
        broken = bytearray(content)
        if trial % 4 == 0:
            del broken[draw.randrange(len(broken)) :]
        else:
            broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
        damaged.write_bytes(broken)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own warnings about tar and legacy formats
            try:
                back = read_checkpoint(damaged)
            except CheckpointError:
                refused += 1
                continue
        assert torch.equal(back["state_dict"]["weight"], value["state_dict"]["weight"])
        assert (back["epoch"], back["list"]) == (7, [1, 2.5, "text"])
    assert refused > 200


def test_plain():
    config = OmegaConf.create({"lr": 0.1, "twice": "${lr}", "sizes": [1, 2]})
    given = {
        "config": config,
        "args": argparse.Namespace(inner=config.sizes),
        "ordered": OrderedDict(a=(1, OmegaConf.create([3]))),
        "path": Path("data/x"),
        "other": Odd,
    }
    assert plain(given) == {
        "config": {"lr": 0.1, "twice": 0.1, "sizes": [1, 2]},
        "args": {"inner": [1, 2]},
        "ordered": {"a": (1, [3])},
        "path": "data/x",
        "other": "tests.checkpoint.test_checkpoint_file.Odd",
    }
    assert type(plain(given)["config"]) is dict
