"""The GPT example: the same loss at every opt level with FusedAdam as in fp32, and the script as a user starts it."""

from __future__ import annotations

import io
import math
import os
import re
import runpy
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from examples.gpt import gpt
from fabricamp import ConfigError
from fabricamp.runs.reading import read_curves
from tests.distributed.ranks import run_ranks
from tests.examples.in_process import gpt_losses, import_for_logs

SCRIPT = Path(__file__).parents[2] / "examples" / "gpt" / "train.py"


LONG = [pytest.param(one, marks=pytest.mark.slow) for one in ("O1", "O2", "O3", "O4")]
"""Levels that the digits example covers in the short version, because half precision is slow on a CPU."""


@pytest.mark.parametrize("precision", ["O0", "O5", *LONG])
def test_learns_as_in_fp32_with_the_fused_optimizer(precision):
    reference, first = gpt_losses("O0", "torch")
    loss, _ = gpt_losses(precision, "fused")
    assert first == pytest.approx(math.log(256), abs=0.4)
    assert reference < 3.2
    # Dynamic scaling may skip one of the first steps, so one of the 50 updates is missing.
    assert loss == pytest.approx(reference, abs=0.001 if precision == "O0" else 0.05)


def test_the_loss_is_fp32_cross_entropy_whatever_the_weights_are():
    net = gpt.GPT(64, context=8, layers=1, width=16, heads=2)
    scores = []
    net.head.register_forward_hook(lambda module, args, output: scores.append(output))
    tokens = torch.randint(64, (3, 9))
    loss = net.bfloat16()(tokens[:, :-1], tokens[:, 1:])
    assert scores[0].dtype is torch.bfloat16
    expected = torch.nn.functional.cross_entropy(scores[0].float().flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected)


def test_no_byte_sees_those_behind_it():
    net = gpt.GPT(64, context=8, layers=2, width=16, heads=2)
    tokens = torch.randint(64, (1, 8))
    scores = []
    net.head.register_forward_hook(lambda module, args, output: scores.append(output))
    for last in (0, 1):
        tokens[0, 5] = last
        net(tokens, tokens)
    torch.testing.assert_close(scores[0][:, :5], scores[1][:, :5])
    assert not torch.equal(scores[0][:, 5:], scores[1][:, 5:])


def test_gpt2_small_has_162_million_parameters():
    with torch.device("meta"):
        net = gpt.GPT(50257, context=512, layers=12, width=768, heads=12)
    assert sum(parameter.numel() for parameter in net.parameters()) == 162_643_968


def test_train_and_test_text_are_different_modules():
    data = gpt.SourceText(context=64)
    data.setup("fit")
    train, test = ({bytes(window) for window in part.tensors[0].numpy()} for part in (data.train, data.test))
    assert len(train) > 10_000
    assert len(test) > 500
    assert len(train & test) < 0.01 * len(test)


def run(*arguments):
    """Runs the script in this process, on the CPU; returns its output."""
    sys.argv[:] = [str(SCRIPT), *map(str, arguments)]
    sys.path.insert(0, str(SCRIPT.parent))
    os.environ.update({"COLUMNS": "160", "CUDA_VISIBLE_DEVICES": ""})
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


def cell(output, label):
    """Returns the value beside ``label`` in the final table, which must have the label exactly once."""
    (value,) = re.findall(rf"(?:^|│) *{re.escape(label)} +(?:│ )?(.*?) *│?$", output, re.MULTILINE)
    return value


def loss_in(output):
    return float(cell(output, "test loss").removesuffix(" nats per byte"))


@pytest.mark.parametrize("precision", ["O0", pytest.param("O5", marks=pytest.mark.slow)])
def test_a_sharded_run_reports_once_and_goes_on_in_one_process(precision):
    import_for_logs()
    sizes = ("--layers", 2, "--width", 64, "--heads", 2, "--context", 64)
    options = ("--precision", precision, "--max-steps", 40, "--save-every", 20, *sizes)
    sharded, second = run_ranks(run, 2, "--devices", 2, "--strategy", "fsdp", *options, backend=None)
    assert second == ""
    assert loss_in(sharded) < 3.1
    assert float(cell(sharded, "tokens/s")) > 0
    last = Path(cell(sharded, "checkpoint"))
    assert list(last.glob("**/*.distcp")), "the ranks wrote no shards"
    assert list(Path(cell(sharded, "TensorBoard logs")).glob("events.*"))
    assert len(sharded.partition("What it writes by itself:\n\ndef ")[2].encode()) >= 200

    shutil.rmtree(last)
    (alone,) = run_ranks(run, 1, "--devices", 1, "--resume", "--picture", "losses.svg", *options, backend=None)
    assert Path(cell(alone, "checkpoint")).is_file()
    assert loss_in(alone) == pytest.approx(loss_in(sharded), abs=0.002 if precision == "O0" else 0.02)
    assert read_curves(Path(cell(alone, "TensorBoard logs")))["train_loss"].steps[0] > 20
    picture = Path("losses.svg").read_text()
    assert [name for name in ("version_0", "version_1") if name not in picture] == []


def test_an_unknown_optimizer_ends_before_training(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--optimizer", "fuzed", "--devices", "1"])
    monkeypatch.syspath_prepend(SCRIPT.parent)
    with pytest.raises(ConfigError, match="optimizer='fuzed' is not known; did you mean 'fused'"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
