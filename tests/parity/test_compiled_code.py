"""Compile(cache=...): code that is kept and found again, refused where it is stale, left out where it is damaged.

torch's default backend writes no C++ for matrix products alone, so that none of this needs a C++ compiler, or its time.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Compile, ConfigError, Trainer, TrainingModule
from fabricamp.torch_private import cache_lookups
from tests.distributed.ranks import import_compiler, run_ranks

NAME = "Products-cpu.code"


@pytest.fixture(scope="module", autouse=True)
def _inductor():
    """Imports what each forked process would import."""
    import_compiler()
    importlib.import_module("torch._inductor.compile_fx")


class Products(TrainingModule):
    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Changed(Products):
    """Another source of the same name."""

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()


Changed.__name__ = "Products"


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        if record.name != "fabricamp" or record.getMessage().startswith("compile: "):
            self.found.append(record.getMessage())


def trained(torchs, kept, width=8, kind=Products, threads=1, part="modules", accelerator="cpu", **options):
    """Fits in this process, whose torch keeps its code in ``torchs``; returns weights, lookups that hit and missed, and lines."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(torchs)
    torch.compiler.reset()
    torch.set_num_threads(threads)
    lines = Lines()
    for name in ("fabricamp", "torch.compiler._cache"):  # torch's has a traceback for what it cannot read
        logging.getLogger(name).addHandler(lines)
    before = cache_lookups()
    module = kind(width)
    data = TensorDataset(torch.randn(16, width, generator=torch.Generator().manual_seed(1)))
    trainer = Trainer(
        max_steps=3,
        accelerator=accelerator,
        devices=int(os.environ["WORLD_SIZE"]),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=str(Path(torchs).parent),
        compile=Compile(part, cache=kept),
        **options,
    )
    trainer.fit(module, DataLoader(data, 4))
    weights = [one.detach() if one.is_meta else one.detach().cpu() for one in module.parameters()]
    return weights, tuple(cache_lookups() - before), lines.found


def without_kept(lines, code):
    """Returns ``lines`` without the last one, which says where the code is kept."""
    assert re.fullmatch(
        rf"compile: the compiled code is kept in {re.escape(str(code / NAME))} \(\d+\.\d MB\)", lines[-1]
    )
    return lines[:-1]


def in_a_process(*args, **options):
    """Returns what :func:`trained` returns in a process that has compiled nothing."""
    return run_ranks(partial(trained, *args, **options), 1, backend=None)[0]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Returns the folder of the kept code, and what the run that wrote it found."""
    folder = tmp_path_factory.mktemp("kept")
    return folder, in_a_process(folder / "torchs", folder / "code")


def copied(first, tmp_path):
    """Returns a folder with a copy of the kept code."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / NAME).write_bytes((first[0] / "code" / NAME).read_bytes())
    return tmp_path / "code"


def same(one, other):
    return all(map(torch.equal, one, other))


def test_code_is_kept_in_one_file_and_found_where_torchs_own_cache_is_empty(first, tmp_path):
    folder, (weights, lookups, lines) = first
    assert lookups == (0, 2)  # forward and backward
    assert without_kept(lines, folder / "code") == []
    assert [file.name for file in (folder / "code").iterdir()] == [NAME]
    code = copied(first, tmp_path)
    before = (code / NAME).stat().st_mtime_ns
    again, lookups, lines = in_a_process(tmp_path / "torchs", code)
    assert lookups == (2, 0)
    assert lines == []
    assert same(again, weights)
    assert (code / NAME).stat().st_mtime_ns == before  # it has all


def test_code_that_torch_had_is_kept_too(first, tmp_path):
    in_a_process(tmp_path / "torchs", False)
    _, lookups, lines = in_a_process(tmp_path / "torchs", tmp_path / "code")
    assert lookups == (2, 0)
    assert without_kept(lines, tmp_path / "code") == []
    weights, lookups, _ = in_a_process(tmp_path / "other", tmp_path / "code")
    assert lookups == (2, 0)
    assert same(weights, first[1][0])


def test_ranks_find_it_in_the_file_that_the_first_of_them_wrote(tmp_path):
    for torchs in ("torchs", "other"):
        one = partial(trained, tmp_path / torchs, tmp_path / "code", strategy="delayed_ddp")
        ranks = run_ranks(one, 2, backend=None)
    assert [found[1:] for found in ranks] == [((2, 0), [])] * 2
    assert [file.name for file in (tmp_path / "code").iterdir()] == [NAME]


def test_true_is_a_folder_in_the_trainers(tmp_path):
    in_a_process(tmp_path / "torchs", True)
    assert [file.name for file in (tmp_path / "compiled_code").iterdir()] == [NAME]


def test_without_a_folder_nothing_is_written_but_torchs_own(tmp_path):
    in_a_process(tmp_path / "torchs", False)
    assert [file.name for file in tmp_path.iterdir()] == ["torchs"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"threads": 2}, "threads 1, here 2"),
        ({"deterministic": True}, "deterministic False, here True"),
        ({"kind": Changed}, "the source of the module has changed"),
    ],
    ids=["threads", "deterministic", "code"],
)
def test_stale_code_is_refused_with_a_line_and_replaced(first, tmp_path, options, line):
    code = copied(first, tmp_path)
    before = (code / NAME).read_bytes()
    weights, lookups, lines = in_a_process(tmp_path / "torchs", code, **options)
    assert lookups == (0, 2)
    stale = f"compile: the code in {code / NAME} is stale: {line}; it is compiled anew, and replaced"
    assert without_kept(lines, code) == [stale]
    assert same(weights, first[1][0])
    assert (code / NAME).read_bytes() != before
    assert in_a_process(tmp_path / "other", code, **options)[1:] == ((2, 0), [])


def test_code_of_another_version_or_card_is_refused(first, tmp_path):
    code = copied(first, tmp_path)
    header, _, rest = (code / NAME).read_bytes().partition(b"\n")
    header = json.loads(header)
    header["facts"] |= {"torch": "2.0.0", "card": "another"}
    (code / NAME).write_bytes(json.dumps(header).encode() + b"\n" + rest)
    _, lookups, lines = in_a_process(tmp_path / "torchs", code)
    (line,) = without_kept(lines, code)
    assert lookups == (0, 2)
    assert f"torch 2.0.0, here {torch.__version__}, card another, here " in line


def test_shapes_that_torchs_key_holds_are_told(first, tmp_path):
    code = copied(first, tmp_path)
    _, lookups, lines = in_a_process(tmp_path / "torchs", code, width=16)
    (line,) = without_kept(lines, code)
    assert lookups == (0, 2)
    assert line.startswith(f"compile: 2 of 2 functions were not in {code / NAME}: torch's key also holds shapes")
    assert in_a_process(tmp_path / "other", code, width=16)[1:] == ((2, 0), [])


def other_code(content):
    """Returns content that torch would load, and run."""
    assert b"extern_kernels.mm(" in content
    return content.replace(b"extern_kernels.mm(", b"extern_kernels.mN(")


@pytest.mark.parametrize(
    "damaged",
    [
        other_code,
        lambda content: content[:-100],
        lambda content: content[:40],
        lambda content: b"",
        lambda content: os.urandom(1000),
        lambda content: b"[]\n",
        lambda content: b'{"format": 1}\n',
    ],
    ids=["other code", "cut", "cut in its first line", "empty", "random", "a list", "no facts"],
)
def test_a_damaged_file_costs_a_compilation(first, tmp_path, damaged):
    code = copied(first, tmp_path)
    (code / NAME).write_bytes(damaged((code / NAME).read_bytes()))
    weights, lookups, lines = in_a_process(tmp_path / "torchs", code)
    (line,) = without_kept(lines, code)
    assert lookups == (0, 2)
    assert line.startswith(f"compile: {code / NAME} cannot be read (")
    assert same(weights, first[1][0])
    assert in_a_process(tmp_path / "other", code)[1:] == ((2, 0), [])


def test_a_folder_that_cannot_be_written_ends_no_fit(first, tmp_path):
    (tmp_path / "code").write_text("a file")
    weights, _, lines = in_a_process(tmp_path / "torchs", tmp_path / "code")
    assert same(weights, first[1][0])
    assert lines[-1].startswith(f"compile: the compiled code cannot be kept in {tmp_path / 'code' / NAME}: ")


def damage(torchs, damaged):
    """Writes other bytes into each entry of torch's cache; returns how many there are."""
    files = [
        file for file in Path(torchs).rglob("*") if file.is_file() and {"fxgraph", "aotautograd"} & set(file.parts)
    ]
    for file in files:
        file.write_bytes(damaged(file.read_bytes()))
    return len(files)


def of_its_own(folder, **options):
    """A rank whose torch has a cache of its own."""
    return trained(folder / os.environ["RANK"] / "torchs", False, strategy="ddp", **options)


@pytest.mark.parametrize(
    "damaged",
    [lambda content: content[: len(content) // 2], lambda content: b"", lambda content: os.urandom(len(content))],
    ids=["cut", "empty", "random"],
)
def test_broken_entries_of_one_rank_cost_a_compilation(tmp_path, damaged):
    """Neither a hang nor other weights: each rank has a cache of its own, and that of the second is damaged."""
    own = partial(of_its_own, tmp_path)
    before = run_ranks(own, 2, backend=None)
    assert [lookups for _, lookups, _ in before] == [(0, 2), (0, 2)]
    assert damage(tmp_path / "1" / "torchs", damaged) > 0
    after = run_ranks(own, 2, backend=None)
    assert after[0][1] == (2, 0)
    assert after[1][1][1] > 0
    for (weights, *_), (others, *_) in zip(before, after, strict=True):
        assert same(weights, others)


@pytest.mark.parametrize("cache", [3, "", None, ["folder"]])
def test_what_is_no_folder_is_refused(cache):
    with pytest.raises(ConfigError, match=r"Compile\(cache=.*give a folder, True or False"):
        Compile(cache=cache)


def test_code_of_another_backend_cannot_be_kept():
    with pytest.raises(ConfigError, match=r"backend='aot_eager'\): torch keeps code of 'inductor' alone"):
        Compile(cache="folder", backend="aot_eager")
    assert Compile(cache=False, backend="aot_eager").cache is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("options", [{}, {"cuda_graph": True}], ids=["eager", "graph"])
def test_code_for_a_gpu_has_its_number(tmp_path, options):
    found = [
        in_a_process(tmp_path / torchs, tmp_path / "code", accelerator="gpu", **options) for torchs in ("one", "other")
    ]
    assert [file.name for file in (tmp_path / "code").iterdir()] == ["Products-cuda-0.code"]
    assert found[0][1][1] > 0
    assert found[1][1][1] == 0
    assert same(found[0][0], found[1][0])


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_each_gpu_has_a_file(tmp_path):
    for torchs in ("one", "other"):
        one = partial(trained, tmp_path / torchs, tmp_path / "code", accelerator="gpu", strategy="ddp")
        ranks = run_ranks(one, 2, backend=None)
    assert sorted(file.name for file in (tmp_path / "code").iterdir()) == [
        "Products-cuda-0.code",
        "Products-cuda-1.code",
    ]
    assert [missed for _, (_, missed), _ in ranks] == [0, 0]
    assert same(ranks[0][0], ranks[1][0])
