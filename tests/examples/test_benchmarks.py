"""Benchmarks measure the package as its users have it: none sets an attribute of it, and what a figure leaves out is an option."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import first_replay, fsdp
from fabricamp import CudaGraph
from tests.cuda_on_cpu.fits import card

__all__ = ["card"]

FILES = sorted((Path(__file__).parents[2] / "benchmarks").rglob("*.py"))
PATCHES = {"setattr", "delattr", "patch", "MonkeyPatch"}


def changes(text):
    """Yields the statements of ``text`` that set or delete attributes or items of what it imports from the package, or may."""
    tree = ast.parse(text)
    ours = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None)
            names = node.names if module is None else [one for one in node.names if module.split(".")[0] == "fabricamp"]
            ours |= {
                one.asname or one.name.split(".")[0]
                for one in names
                if (module or one.name).split(".")[0] == "fabricamp"
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if root(node) in ours:
                yield ast.unparse(node)
        elif isinstance(node, ast.Name | ast.Attribute) and getattr(node, "id", getattr(node, "attr", "")) in PATCHES:
            yield ast.unparse(node)


def root(node):
    """Returns the name with which an expression begins, such as ``a`` of ``a.b[0]().c``."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", None)


@pytest.mark.parametrize(
    "statement",
    [
        "Budget.has_free = lambda *_: False",
        "budget.Budget.has_free: object = None",
        "fabricamp.engine.Budget.has_free = None",
        "del Budget.has_free",
        "one, Budget.has_free = 1, 2",
        "Budget().table['x'] = 1",
        "for Budget.size in (1, 2): pass",
        "with open('x') as Budget.file: pass",
        "setattr(Budget, 'has_free', None)",
        "mock.patch.object(Budget, 'has_free')",
        "with pytest.MonkeyPatch.context() as patch: pass",
    ],
)
def test_a_change_of_the_package_is_found(statement):
    text = f"import fabricamp\nfrom fabricamp.engine import budget\nfrom fabricamp.budget import Budget\n{statement}"
    assert list(changes(text))


def test_a_change_of_something_else_is_none():
    text = (
        "import torch\nimport torch._dynamo\nfrom fabricamp import Trainer\nt = Trainer()\nt.x = 1\ntorch.y = Trainer.z"
    )
    assert not list(changes(text))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_benchmark_changes_the_package(file):
    assert not list(changes(file.read_text()))


def test_what_a_figure_leaves_out_is_named_beside_it(monkeypatch):
    """On a CPU no step is replayed: the options are the same."""
    given = []
    monkeypatch.setattr(
        fsdp, "CudaGraph", lambda **options: given.append(options) or CudaGraph(required=False, **options)
    )
    monkeypatch.setattr(fsdp, "Trainer", lambda **options: options)
    with pytest.raises(AttributeError):  # what stands in for a Trainer has no fit
        fsdp.by_trainer(fsdp.TINY, "O5", 3, "gpu", graph=True)
    assert given == [{"warmup": 3, "compare": False}]


def test_the_first_replay_is_measured_with_and_without_its_comparison(card):
    def run(way):
        return first_replay.measured(first_replay.TINY, "O5", way, accelerator="cpu", batches=8)

    rounds = [{way: run(way) for way in first_replay.WAYS} for _ in range(2)]
    assert card.replays == 4 * 5
    found = first_replay.summed(rounds)
    for way in first_replay.WAYS:
        row = found[way]
        assert 0 < row["least_s"] <= row["first_replay_s"] <= row["most_s"]
        assert min(row["eager_s"], row["replay_s"]) > 0
        assert set(row["gib"]) == {"before", "most", "after"}
        assert any("was compared with" in line for line in row["said"]) is (way == "compared")
    assert found["added_s"] == pytest.approx(
        found["compared"]["first_replay_s"] - found["compare=False"]["first_replay_s"], abs=1e-3
    )


def test_the_command_line_of_the_first_replay():
    options = first_replay.parsed(["--networks", "gpt-1.3b", "--levels", "O4", "--quick"])
    assert (options.networks, options.levels, options.rounds, options.quick) == (["gpt-1.3b"], ["O4"], 3, True)
    assert first_replay.parsed([]).networks == list(first_replay.NETWORKS)
