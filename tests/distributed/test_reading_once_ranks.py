"""Ranks of one host read a checkpoint once between them, each gets what it would read itself, and all raise what one finds."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from fabricamp.checkpoint import read_checkpoint, read_header, read_together, storage, write_checkpoint, write_together
from fabricamp.checkpoint.folder import write_whole
from fabricamp.checkpoint.packing import pack_objects
from fabricamp.checkpoint.shard_loading import sharded_weights
from fabricamp.errors import CheckpointError, CheckpointNotFoundError, CheckpointObjectsError
from fabricamp.strategies import DDP, Environment, Sharding, host_ranks
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")
ASIDE = 1_000_000
"""Bytes that a rank may read beside the tensors: directories, pickles, modules that are imported meanwhile."""


class Sharded(DDP, Sharding):
    shards = True


class Loss:
    def __init__(self, weight):
        self.weight = weight


def joined(kind=DDP, nodes=1):
    """Returns a strategy of this process, in ranks that torchrun has started on ``nodes`` hosts."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = size // nodes
    strategy = kind()
    strategy.setup_environment(
        Environment(
            rank=rank,
            local_rank=rank % here,
            world_size=size,
            local_world_size=here,
            node_rank=rank // here,
        ),
        CPU,
    )
    return strategy


def bytes_read():
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def reading(path, kind=DDP, nodes=1, **options):
    """Returns what this rank gets, or its error, and how many bytes it has read from files meanwhile."""
    strategy = joined(kind, nodes)
    read_together_options = {"weights_only": None, **options}
    before = bytes_read()
    try:
        found = read_together(str(path), strategy, **read_together_options)
    except CheckpointError as error:
        found = error
    return found, bytes_read() - before


def whole_state():
    generator = torch.Generator().manual_seed(1)
    shared = torch.randn(1000, generator=generator)
    weights = {f"small.{number}": torch.randn(number % 7, 3, generator=generator) for number in range(200)}
    weights["large"] = torch.randn(3000, 7000, generator=generator)  # 84 MB: three pieces
    weights["half"] = torch.randn(5, 5, generator=generator).bfloat16()
    weights["complex"] = torch.randn(3, generator=generator, dtype=torch.complex64)
    weights["slanted"] = torch.randn(4, 6, generator=generator).t()
    weights["whole"], weights["part"] = shared, shared[10:20]
    weights["empty"], weights["scalar"] = torch.empty(0, 3), torch.tensor(3, dtype=torch.int8)
    return {"state_dict": weights, "global_step": 7, "rng": [torch.arange(5)], "notes": {"a": [1, "b", (2.5, None)]}}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("once") / "whole.ckpt"
    write_checkpoint(path, whole_state())
    return path


def assert_same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert type(found) is type(expected)
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        assert found.shape == expected.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def compared(path, kind=DDP, nodes=1, **options):
    """Returns how many bytes this rank has read together with the others, once it has the values that it reads itself."""
    found, count = reading(path, kind, nodes, **options)
    assert not isinstance(found, Exception), found
    assert_same(found, read_checkpoint(path, weights_only=options.get("weights_only")))
    weights = found["state_dict"]
    assert weights["whole"].untyped_storage().data_ptr() == weights["part"].untyped_storage().data_ptr()
    assert len({tensor.untyped_storage().data_ptr() for tensor in (weights["large"], weights["half"])}) == 2
    return count


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_file_is_read_once_and_every_rank_has_its_bits(file, world_size):
    counts = run_ranks(compared, world_size, file)
    size = file.stat().st_size
    assert size <= counts[0] <= size + ASIDE
    assert all(count < ASIDE for count in counts[1:])


def test_each_host_reads_a_file_once(file):
    counts = run_ranks(compared, 4, file, DDP, 2)
    size = file.stat().st_size
    assert [round(count / size, 1) for count in counts] == [1, 0, 1, 0]


def test_by_itself_a_process_reads_a_file_once(file):
    before = bytes_read()
    read_checkpoint(file)
    assert bytes_read() - before <= file.stat().st_size + ASIDE


def test_a_header_is_read_without_the_tensors(file):
    before = bytes_read()
    read_header(str(file))
    assert bytes_read() - before <= ASIDE


def kept_alone(path):
    found, _ = reading(path)
    scalar = found["state_dict"]["scalar"]
    return scalar.untyped_storage().nbytes()


def test_a_small_tensor_that_is_kept_keeps_no_other_memory(file):
    assert run_ranks(kept_alone, 2, file) == [1, 1]


def mapped(path):
    found, count = reading(path, Sharded)
    assert_same(found, read_checkpoint(path))
    with Path("/proc/self/maps").open() as maps:
        assert any(str(path) in line for line in maps)  # no copy in the memory of this process
    return count


def test_strategies_that_shard_map_a_file_that_one_rank_has_verified(file):
    counts = run_ranks(mapped, 3, file)
    size = file.stat().st_size
    assert size <= counts[0] <= size + ASIDE
    assert all(count < ASIDE for count in counts[1:])


def errors_of(paths):
    return [[reading(path, kind)[0] for kind in (DDP, Sharded)] for path in paths]


def test_a_flipped_bit_is_the_same_error_on_all_ranks(file, tmp_path):
    """In the header of a member, in a large tensor's first and last piece, and in the directory."""
    damaged = []
    for place in (1e-5, 0.3, 0.98, 0.9999):
        content = bytearray(file.read_bytes())
        content[int(len(content) * place)] ^= 4
        damaged.append(tmp_path / f"{place}.ckpt")
        damaged[-1].write_bytes(content)
    found = run_ranks(errors_of, 3, damaged)
    for path, *of_ranks in zip(damaged, *found, strict=True):
        with pytest.raises(CheckpointError) as alone:
            read_checkpoint(path)
        for errors in of_ranks:
            assert [type(error) for error in errors] == [type(alone.value)] * 2
            assert [str(error) for error in errors] == [str(alone.value)] * 2


@pytest.mark.parametrize("kind", [DDP, Sharded])
def test_no_file_is_the_same_error_on_all_ranks(tmp_path, kind):
    path = tmp_path / "none.ckpt"
    found = [error for error, _ in run_ranks(reading, 2, path, kind)]
    assert [type(error) for error in found] == [CheckpointNotFoundError] * 2
    assert {str(error) for error in found} == {f"there is no checkpoint {path}"}


def disturbed(path, before, kind=DDP):
    """Reads a file that is removed just before or just after the first rank opens it."""
    real = storage.open_for_reading

    def opening(name):
        if before:
            path.unlink(missing_ok=True)
        opened = real(name)

        class Opened:
            def __enter__(self):
                file = opened.__enter__()
                path.unlink(missing_ok=True)
                return file

            def __exit__(self, *error):
                return opened.__exit__(*error)

        return Opened()

    storage.open_for_reading = opening
    found, _ = reading(path, kind)
    return found if isinstance(found, Exception) else found["global_step"]


def test_a_file_that_is_removed_meanwhile_is_read_by_all_or_by_none(file, tmp_path):
    for name in ("a.ckpt", "b.ckpt"):
        os.link(file, tmp_path / name)
    assert run_ranks(disturbed, 2, tmp_path / "a.ckpt", False) == [7, 7]
    found = run_ranks(disturbed, 2, tmp_path / "b.ckpt", True)
    assert [type(error) for error in found] == [CheckpointNotFoundError] * 2


def one_sees_another_file(path):
    return reading(path if os.environ["RANK"] == "0" else path.with_name("other.ckpt"))[0]


def test_ranks_that_are_given_other_files_read_their_own(tmp_path):
    write_checkpoint(tmp_path / "own.ckpt", {"state_dict": {}, "global_step": 1})
    write_checkpoint(tmp_path / "other.ckpt", {"state_dict": {}, "global_step": 2})
    steps = [state["global_step"] for state in run_ranks(one_sees_another_file, 3, tmp_path / "own.ckpt")]
    assert steps == [1, 2, 2]


def test_a_file_that_one_rank_does_not_find_is_an_error_on_all(tmp_path):
    write_checkpoint(tmp_path / "own.ckpt", {"state_dict": {}, "global_step": 1})
    found = run_ranks(one_sees_another_file, 2, tmp_path / "own.ckpt")
    assert [type(error) for error in found] == [CheckpointNotFoundError] * 2


def rebuilt(path, weights_only):
    found, _ = reading(path, weights_only=weights_only)
    if isinstance(found, Exception):
        return found
    loss = found["hyper_parameters"]["loss"]
    assert type(loss) is Loss
    return loss.weight


def test_objects_are_rebuilt_on_each_rank_that_allows_it(tmp_path):
    path = tmp_path / "objects.ckpt"
    state = {"state_dict": {"a": torch.ones(2)}, "hyper_parameters": {"loss": Loss(torch.arange(3.0))}}
    write_checkpoint(path, pack_objects(state))
    assert all(torch.equal(weight, torch.arange(3.0)) for weight in run_ranks(rebuilt, 2, path, False))
    assert [type(error) for error in run_ranks(rebuilt, 2, path, None)] == [CheckpointObjectsError] * 2


def test_a_file_of_plain_pickle_is_read_by_each_rank(tmp_path):
    path = tmp_path / "old.ckpt"
    torch.save({"state_dict": {"a": torch.arange(4.0)}}, path, _use_new_zipfile_serialization=False)
    for kind in (DDP, Sharded):
        for found, _ in run_ranks(reading, 2, path, kind):
            assert torch.equal(found["state_dict"]["a"], torch.arange(4.0))


def dying(path, told):
    if os.environ["RANK"] == "1":
        unpack = host_ranks._Message.unpack

        def then_dies(message, *args):
            unpack(message, *args)
            os._exit(0)

        host_ranks._Message.unpack = then_dies
    try:
        reading(path)
    except RuntimeError as error:
        told.write_text(str(error))
        os._exit(3)


def test_a_rank_that_dies_meanwhile_ends_the_others(file, tmp_path):
    told = tmp_path / "told"
    with pytest.raises(AssertionError, match="rank 0 failed with exit code 3"):
        run_ranks(dying, 2, file, told, timeout=60.0)
    assert "onnection" in told.read_text()


# -- folders -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("once") / "folder.ckpt"
    write_whole(path, whole_state())
    return path


def resharded(path):
    """Writes a folder, and returns how many bytes this rank reads of it for shards in another dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    strategy = joined(Sharded)
    whole = torch.arange(3_000_000.0).view(3000, 1000)

    def sharded(tensor, mesh, dim):
        return distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)

    mesh = init_device_mesh("cpu", (3,))
    state = {"state_dict": {"rows": sharded(whole, mesh, 0), "columns": sharded(whole, mesh, 1)}, "global_step": 3}
    write_together(str(path), state, strategy)
    before = bytes_read()
    own = {"rows": sharded(torch.zeros_like(whole), mesh, 1), "columns": sharded(torch.zeros_like(whole), mesh, 0)}
    found = sharded_weights(read_together(str(path), strategy), str(path), own)["state_dict"]
    count = bytes_read() - before
    for name, dim in (("rows", 1), ("columns", 0)):
        part = whole.chunk(3, dim)[strategy.rank]
        assert torch.equal(found[name].to_local(), part)
    return count


def test_shards_that_several_ranks_need_are_read_once(tmp_path):
    path = tmp_path / "sharded.ckpt"
    counts = run_ranks(resharded, 3, path)
    assert sum(counts) <= size_of(path) + 3 * ASIDE
    assert max(counts) <= size_of(path) / 3 + ASIDE


def size_of(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def folder_read(path):
    found, count = reading(path)
    assert_same(found, read_checkpoint(path))
    return count


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_folder_is_read_once_by_ranks_that_want_it_whole(folder, world_size):
    counts = run_ranks(folder_read, world_size, folder)
    assert sum(counts) <= size_of(folder) + ASIDE * world_size


def test_damage_in_a_folder_is_the_same_error_on_all_ranks(folder, tmp_path):
    for index, name in enumerate(["state.pt", ".metadata", "__0_0.distcp"]):
        damaged = tmp_path / f"{index}.ckpt"
        os.system(f"cp -r {folder} {damaged}")
        one = next(file for file in damaged.rglob("*") if file.name == name)
        content = bytearray(one.read_bytes())
        content[len(content) // 2] ^= 1
        one.write_bytes(content)
        found = [error for error, _ in run_ranks(reading, 2, damaged)]
        assert all(isinstance(error, CheckpointError) for error in found), name
        assert len({str(error) for error in found}) == 1
