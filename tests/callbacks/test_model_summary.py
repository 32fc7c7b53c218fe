"""The model summary counts every parameter once, and shows the memory that the opt level really takes."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fabricamp import OptLevel, TrainingModule
from fabricamp.callbacks.model_summary import ModelSummary, summarize
from fabricamp.errors import ConfigError
from fabricamp.precision.named import precision_from

HALF_LEVELS = ("O2", "O3", "O5")


class Net(nn.Module):
    """A module with nested and normalised layers, frozen weights, and its own buffer and parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()))
        self.head = nn.Linear(4, 10, bias=False)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))


def cells(summary):
    return {row.name: row.cells()[1:] for row in summary.rows}


def test_rows_and_totals():
    summary = summarize(Net())
    assert cells(summary) == {
        "(own)": ("Net", "3", "0", "17 B"),
        "embed": ("Embedding", "40", "40", "160 B"),
        "body": ("Sequential", "28", "28", "152 B"),  # 20 + 8 weights, 8 running values, one int64 counter
        "head": ("Linear", "40", "40", "160 B"),
    }
    assert (summary.total.params, summary.total.trainable, summary.frozen) == (111, 108, 3)


@pytest.mark.parametrize(
    ("depth", "names"),
    [
        (0, []),
        (1, ["(own)", "embed", "body", "head"]),
        (2, ["(own)", "embed", "body", "body.0", "body.1", "head"]),
        (-1, ["(own)", "embed", "body", "body.0", "body.1", "body.1.0", "body.1.1", "head"]),
    ],
)
def test_depth(depth, names):
    assert [row.name for row in summarize(Net(), depth).rows] == names


@pytest.mark.parametrize("depth", [-2, 1.5, "all", True, None])
def test_wrong_depth(depth):
    with pytest.raises(ConfigError, match="max_depth"):
        ModelSummary(depth)


def test_wrong_level_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'bf16-mixed'"):
        summarize(Net(), opt_level="bf16-mixd")


def test_tied_parameters_count_once():
    net = Net()
    net.head.weight = net.embed.weight
    summary = summarize(net)
    assert summary.total.params == 71
    assert summary.memory["weights"] == 4 * 71
    assert summary.tied == ["head.weight = embed.weight"]
    assert "Tied, counted once: head.weight = embed.weight" in str(summary)


def test_many_tied_parameters_are_summed_up():
    block = nn.Linear(2, 2)
    summary = summarize(nn.ModuleList([block] * 4))
    assert len(summary.rows) == 4
    assert summary.total.params == 6
    assert "and 3 more" in str(summary)


def test_lazy_parameters_are_named_as_unknown():
    summary = summarize(nn.Sequential(nn.Linear(2, 3), nn.LazyBatchNorm1d(), nn.LazyLinear(4)), 1, "O2")
    assert cells(summary)["2"][1:] == ("0 + ?", "0 + ?", "0 B + ?")
    assert summary.total.params == 9
    assert "6 lazy parameters or buffers" in str(summary)


def test_module_without_parameters():
    assert "0 parameters: 0 trainable, 0 frozen" in str(summarize(nn.ReLU()))


def test_module_with_one_parameter():
    assert summarize(nn.Linear(1, 1, bias=False)).notes()[0] == "1 parameter: 1 trainable, 0 frozen"


@pytest.mark.parametrize(
    ("level", "memory"),
    [
        ("O0", {"weights": 444, "buffers": 45, "gradients": 432, "masters": 0}),
        ("O1", {"weights": 444, "buffers": 45, "gradients": 432, "masters": 0}),
        # BatchNorm's 8 weights and its running values stay fp32, with no masters.
        ("O2", {"weights": 2 * 103 + 4 * 8, "buffers": 45, "gradients": 2 * 100 + 4 * 8, "masters": 400}),
        ("O5", {"weights": 2 * 103 + 4 * 8, "buffers": 45, "gradients": 2 * 100 + 4 * 8, "masters": 400}),
        ("O3", {"weights": 222, "buffers": 13 + 16, "gradients": 216, "masters": 0}),
        ("bf16-true", {"weights": 222, "buffers": 13 + 16, "gradients": 216, "masters": 0}),
        ("64-true", {"weights": 888, "buffers": 13 + 64, "gradients": 864, "masters": 0}),
    ],
)
def test_memory_of_each_level(level, memory):
    assert summarize(Net(), opt_level=level).memory == memory


def test_unknown_sizes_are_not_shown_as_zero_masters():
    assert "masters" not in str(summarize(Net(), opt_level="O0"))
    assert "400 B masters" in str(summarize(Net(), opt_level="O2"))


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=2, max_size=5), level=st.sampled_from(HALF_LEVELS), data=st.data())
def test_prediction_equals_what_is_there_after_conversion(sizes, level, data):
    layers = [nn.Linear(before, after) for before, after in pairwise(sizes)]
    for layer in layers:
        layer.requires_grad_(data.draw(st.booleans()))
    module = nn.Sequential(*layers)
    before = summarize(module, opt_level=level)
    module.to(torch.bfloat16 if level == "O5" else torch.float16)
    assert summarize(module, opt_level=level).memory == before.memory
    assert before.memory["weights"] == sum(p.numel() * p.element_size() for p in module.parameters())


def trainer_for(module, *, rank_zero=True, masters=(), sums=(), name="O2"):
    updated = torch.optim.SGD([*(p for p in module.parameters() if p.requires_grad), *masters], lr=0.1)
    precision = SimpleNamespace(name=name, gradients=lambda optimizer: SimpleNamespace(tensors=list(sums)))
    return SimpleNamespace(is_global_zero=rank_zero, optimizers=[updated], precision_plugin=precision)


def test_callback_counts_what_is_there(caplog):
    module = nn.Linear(4, 4).half()
    masters = [parameter.detach().float() for parameter in module.parameters()]
    ModelSummary().on_fit_start(trainer_for(module, masters=masters, sums=[torch.zeros(20)]), module)
    parts = "40 B weights + 40 B gradients + 80 B masters + 80 B gradient sums"
    left_out = "activations; Trainer.plan(module, loader) tells them"
    assert f"Memory at O2: {parts} = 240 B without {left_out}" in caplog.messages
    assert "\x1b" not in caplog.text


def test_callback_is_silent_on_other_ranks(caplog):
    ModelSummary().on_fit_start(trainer_for(nn.Linear(2, 2), rank_zero=False), nn.Linear(2, 2))
    assert caplog.messages == []


def test_plain_text_is_aligned():
    lines = str(summarize(Net(), -1)).splitlines()
    assert lines[0].split() == ["Name", "Type", "Params", "Trainable", "Size"]
    assert len({line.index("B", 30) for line in lines[1:9]}) == 1


def test_terminal_gets_a_table(monkeypatch, tmp_path):
    import sys

    import rich
    from rich.console import Console

    with (tmp_path / "screen").open("w", encoding="utf-8") as file:
        monkeypatch.setattr(rich, "_console", Console(file=file, force_terminal=True, width=80))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        net = Net()
        net.add_module("[bold]", nn.ReLU())
        summarize(net).show()
    text = (tmp_path / "screen").read_text(encoding="utf-8")
    assert "───" in text
    assert "[bold]" in text, "names are not markup"
    assert "111 parameters: 108 trainable, 3 frozen" in text


class WithLossAndTie(TrainingModule):
    """Has tensors that precision does not convert: a loss with its own buffer, BatchNorm, and a weight shared with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
        self.net[2].weight = self.net[1].weight
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(3))


@pytest.mark.parametrize(
    "precision",
    ["O0", "O1", "O2", "O3", "64-true", OptLevel("O2", keep_batchnorm_fp32=False), OptLevel("O5")],
    ids=lambda one: getattr(one, "name", one),  # no address: xdist's workers must collect equal ids
)
def test_the_prediction_is_what_the_level_converts(precision):
    module, precision = WithLossAndTie(), precision_from(precision)
    predicted = summarize(module, opt_level=precision)
    precision.convert_module(module)
    assert predicted.memory["weights"] == sum(p.nbytes for p in module.parameters())
    assert predicted.memory["buffers"] == sum(b.nbytes for b in module.buffers())
    half = sum(p.numel() for p in module.parameters() if p.dtype in (torch.float16, torch.bfloat16))
    assert predicted.memory["masters"] == (4 * half if predicted.opt_level in ("O2", "O5") else 0)
