"""The example of fine-tuning: matrices beside a frozen transformer learn, and its own weights stay as they are."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune" / "train.py"


@pytest.fixture(autouse=True)
def _needs_transformers():
    """Imports the package here, as each worker collects this file and few run its tests."""
    pytest.importorskip("transformers", reason="needs the package transformers")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script in this process and folder; returns its losses before and after fine-tuning."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return [float(one) for one in re.findall(r"loss on the manual .*: ([\d.]+)", capsys.readouterr().out)]

    return run


def test_the_short_form_learns_with_the_rate_that_it_found(run):
    before, after = run("--quick")
    assert after < 0.985 * before
    assert list(Path("runs").rglob("*.ckpt"))
    assert list(Path("runs").rglob("events.*"))


def test_lora_begins_as_the_frozen_network_and_trains_alone():
    names = runpy.run_path(str(SCRIPT))
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    network = names["LlamaForCausalLM"](names["LlamaConfig"](**sizes, num_attention_heads=2))
    tokens = torch.arange(12).view(1, 12)
    before = network(input_ids=tokens).logits
    backbone = dict(network.named_parameters())
    names["add_lora"](network)
    assert torch.equal(network(input_ids=tokens).logits, before)

    trained = [name for name, one in network.named_parameters() if one.requires_grad]
    assert len(trained) == 2 * 7 * 2  # layers, their Linears, matrices of each
    assert all(name.endswith(("down.weight", "up.weight")) for name in trained)
    assert not any(one.requires_grad for one in backbone.values())


@pytest.mark.slow
def test_the_long_form_reaches_its_figure(run):
    before, after = run()
    assert before < 2.4
    assert after < 1.95


@pytest.mark.slow
def test_it_draws_its_picture(run):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    run("--quick", "--picture", "picture.png")
    assert 5_000 < Path("picture.png").stat().st_size < 60_000
