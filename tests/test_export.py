"""`fabricamp export`: files from a real checkpoint of every opt level, read by the libraries of their formats."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fabricamp import TrainingModule
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.cli import main
from tests.small import data, quiet_trainer

TRAINED = {
    "O0": torch.float32,
    "O1": torch.float32,
    "O2": torch.float32,
    "O3": torch.float16,
    "O5": torch.float32,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}


class Net(TrainingModule):
    """Has linear layers, BatchNorm and a tied weight."""

    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU())
        self.head = torch.nn.Linear(width, 8)
        self.tied = torch.nn.Linear(width, 8)
        self.tied.weight = self.head.weight

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(precision="O0"):
    """Writes ``last.ckpt`` in a short fit; returns its weights in the level's dtype."""
    saving = ModelCheckpoint(".", filename="last")
    trainer = quiet_trainer(max_steps=2, precision=precision, callbacks=saving, enable_checkpointing=True)
    trainer.fit(Net(), torch.utils.data.DataLoader(data(), 4))
    weights = torch.load("last.ckpt", weights_only=True)["state_dict"]
    return {
        name: value.to(TRAINED[precision]) if value.is_floating_point() else value for name, value in weights.items()
    }


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("precision", TRAINED)
def test_weights_of_every_level_have_the_dtype_that_was_trained(precision, capsys):
    weights = trained(precision)
    assert main(["export", "last.ckpt", "--to", "weights.pt"]) == 0
    assert str(TRAINED[precision]).removeprefix("torch.") in capsys.readouterr().out
    loaded = torch.load("weights.pt", weights_only=True)
    assert same(loaded, weights)
    assert {value.dtype for value in loaded.values()} == {TRAINED[precision], torch.int64}
    Net().load_state_dict(loaded)


def test_another_dtype_is_for_floating_weights():
    weights = trained()
    assert main(["export", "last.ckpt", "--to", "weights.pt", "--dtype", "bf16"]) == 0
    loaded = torch.load("weights.pt", weights_only=True)
    assert torch.equal(loaded["head.weight"], weights["head.weight"].bfloat16())
    assert loaded["net.1.num_batches_tracked"].dtype is torch.int64


def test_safetensors_with_a_tied_weight():
    pytest.importorskip("safetensors", reason="needs the package safetensors")
    from safetensors.torch import load_file

    weights = trained("O2")
    assert main(["export", "last.ckpt", "--to", "weights.safetensors"]) == 0
    assert same(load_file("weights.safetensors"), weights)
    Path("any").touch()
    assert Path("weights.safetensors").stat().st_mode == Path("any").stat().st_mode


@pytest.mark.parametrize(("precision", "dtype"), [("O2", torch.float32), ("O3", torch.float16)])
def test_a_program_with_any_batch_gives_what_the_module_gives(precision, dtype):
    weights = trained(precision)
    assert main(["export", "last.ckpt", "--to", "net.pt2", "--module", f"{__name__}.Net", "--input", "4,8"]) == 0
    module = Net().to(dtype).eval()
    module.load_state_dict(weights, assign=True)
    x = torch.randn(7, 8, dtype=dtype)
    assert torch.equal(torch.export.load("net.pt2").module()(x), module(x))


def test_a_program_for_one_batch_size_says_so(capsys):
    trained()
    command = ["export", "last.ckpt", "--to", "net.pt2", "--module", f"{__name__}.Net", "--input"]
    assert main([*command, "1,8"]) == 0
    assert (
        "for batches of 1 alone; an example with 2 rows or more (--input 2,...) lets it vary" in capsys.readouterr().out
    )
    with pytest.raises(Exception, match="Guard failed"):
        torch.export.load("net.pt2").module()(torch.randn(4, 8))
    assert main([*command, "2,8"]) == 0
    assert "alone" not in capsys.readouterr().out


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")),
    reason="needs the package onnxscript",
)
def test_onnx_gives_what_the_module_gives():
    from onnx.reference import ReferenceEvaluator

    weights = trained("O2")
    assert main(["export", "last.ckpt", "--to", "net.onnx", "--module", f"{__name__}.Net", "--input", "4,8"]) == 0
    module = Net().eval()
    module.load_state_dict(weights)
    x = torch.randn(5, 8)
    graph = ReferenceEvaluator("net.onnx")
    (y,) = graph.run(None, {graph.input_names[0]: x.numpy()})
    assert torch.allclose(torch.from_numpy(y), module(x), atol=1e-5)


class Knows(Net):
    """Has an ``example_input_array``."""

    def __init__(self, width=8):
        super().__init__(width)
        self.example_input_array = torch.zeros(2, 8)


class Words(Net):
    """Takes numbers of words, and a mask."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 8)

    def forward(self, words, mask):
        return self.head(self.embedding(words).masked_fill(mask[..., None], 0).mean(1))

    def training_step(self, batch, batch_idx):
        words = (batch[0] > 0).long()
        return self(words, words < 0).square().mean()


def test_integers_and_flags_as_inputs(capsys):
    saving = ModelCheckpoint(".", filename="last")
    trainer = quiet_trainer(max_steps=2, callbacks=saving, enable_checkpointing=True)
    module = Words()
    trainer.fit(module, torch.utils.data.DataLoader(data(), 4))
    command = ["export", "last.ckpt", "--to", "net.pt2", "--module", f"{__name__}.Words"]
    assert main([*command, "--input", "4,5", "--input", "4,5:bool"]) == 2
    assert "; integers as 2,128:int64)" in capsys.readouterr().err
    assert main([*command, "--input", "4,5:int64", "--input", "4,5:bool"]) == 0
    words, mask = torch.tensor([[2, 1, 0, 1, 2]] * 3), torch.tensor([[True, False, False, True, False]] * 3)
    program = torch.export.load("net.pt2").module()
    torch.testing.assert_close(program(words, mask), module(words, mask))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["net.pt2", "--module", "mynet.Net"],
            2,
            "no module 'mynet', neither installed nor in the current folder",
        ),
        (["weights.bin"], 2, "'weights.bin' has no known format; end it in .pt, .safetensors, .pt2, .onnx"),
        (["w.pt", "--dtype", "half"], 2, "dtype='half' is not known (known: 'fp32'"),
        (["w.pt2"], 2, "give the module's class (--module)"),
        (["w.pt2", "--module", "Net"], 2, "--module='Net' is not a dotted name"),
        (["w.pt2", "--module", f"{__name__}.Nett"], 2, "has no 'Nett'; did you mean 'Net'?"),
        (["w.pt2", "--module", f"{__name__}.Net"], 2, "give their shapes (--input 2,3,224,224, integers"),
        (["w.pt2", "--module", f"{__name__}.Net", "--input", "4x8"], 2, "--input 4x8: write sizes with commas"),
        (["w.pt2", "--module", f"{__name__}.Net", "--input", "4,8:int46"], 2, "--input 4,8:int46: write sizes"),
        (["w.pt2", "--module", f"{__name__}.Net", "--input", "4,-8"], 2, "--input 4,-8: write sizes"),
        (
            ["w.pt2", "--module", f"{__name__}.Net", "--input", "4,9"],
            2,
            "Net.forward(x) does not take an input of 4,9 (float32): mat1 and mat2 shapes cannot be multiplied (4x9 and 8x",
        ),
        (
            ["w.pt2", "--module", f"{__name__}.Net", "--input", "4,8", "--input", "4"],
            2,
            "Net.forward(x) does not take an input of 4,8 (float32) and 4 (float32): ",
        ),
        (
            ["w.pt2", "--module", f"{__name__}.Knows", "--input", "9"],
            2,
            "give each input's sizes as the module takes them, such as its example_input_array: 2,8 (float32) (--input",
        ),
        (["nowhere/w.pt"], 1, "nowhere/w.pt cannot be written"),
    ],
)
def test_a_mistake_says_what_to_change(words, code, message, capsys):
    trained()
    before = sorted(Path.cwd().iterdir())
    assert main(["export", "last.ckpt", "--to", *words]) == code
    assert message in capsys.readouterr().err
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.parametrize(("suffix", "package"), [("safetensors", "safetensors"), ("onnx", "onnxscript")])
def test_a_package_that_is_missing_is_named(suffix, package, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["export", "last.ckpt", "--to", f"w.{suffix}"]) == 2
    assert "not installed: pip install" in (said := capsys.readouterr().err)
    assert package in said


def test_what_is_no_checkpoint(capsys):
    torch.save({"weights": {}}, "other.pt")
    assert main(["export", "other.pt", "--to", "w.pt"]) == 1
    assert "other.pt" in capsys.readouterr().err
