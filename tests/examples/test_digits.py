"""The digits example as a user starts it: every opt level, one process and two, as a script, under torchrun and from its config.

The short version has each opt level, optimizer and strategy once or twice; the long version has all combinations.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from fabricamp import ConfigError, cli
from tests.distributed.forked import start_forked
from tests.distributed.ranks import run_ranks
from tests.examples.in_process import digits_accuracy, import_for_digits

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "digits" / "train.py"
CONFIG = SCRIPT.with_name("config.yaml")


def main(*arguments):
    """Runs the script with these arguments in this process, which takes much less time than starting a process."""
    sys.argv[:] = [str(SCRIPT), *map(str, arguments)]
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")


SHORTER = ("--max-epochs", 10)
"""Half of the default's epochs, which are enough."""


def slow(*levels):
    """Marks levels as slow that another test of the short version covers."""
    return [pytest.param(level, marks=pytest.mark.slow) for level in levels]


def main_as_a_rank(*arguments):
    """Runs the script in a process with torchrun's environment variables; returns its output."""
    with redirect_stdout(io.StringIO()) as printed:
        main(*arguments)
    return printed.getvalue()


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    import_for_digits()
    # Scripts that later tests fork from this process may have a digits.py of their own.
    monkeypatch.setitem(sys.modules, "digits", None)
    monkeypatch.delitem(sys.modules, "digits")
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "160")


def run(*command):
    """Runs Python with ``command`` in the current folder, on the CPU and without a terminal; returns what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_CURRENT_TEST", None)
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def cell(output, label):
    """Returns the value beside ``label`` in the final table, which must have the label exactly once."""
    (value,) = re.findall(rf"(?:^|│) *{re.escape(label)} +(?:│ )?(.*?) *│?$", output, re.MULTILINE)
    return value


def expect_success(output):
    assert float(cell(output, "test accuracy").rstrip("%")) >= 98
    assert Path(cell(output, "best checkpoint")).is_file()
    logs = Path(cell(output, "TensorBoard logs"))
    assert list(logs.glob("events.*"))
    assert cell(output, "open them with").endswith(f"tensorboard --logdir {logs}")


@pytest.mark.parametrize("precision", ["O0", "O3", *slow("O1", "O2", "O4", "O5")])
def test_one_process_reaches_the_accuracy(precision, capfd):
    main("--precision", precision, "--strategy", "single", "--devices", 1, *SHORTER)
    expect_success(capfd.readouterr().out)


@pytest.mark.parametrize("precision", ["O0", *slow("O2", "O5")])
def test_two_ranks_reach_the_accuracy_and_report_once(precision):
    first, second = run_ranks(
        main_as_a_rank,
        2,
        *("--precision", precision, "--strategy", "ddp", "--devices", 2, *SHORTER),
        backend=None,
    )
    expect_success(first)
    assert second == ""


@pytest.mark.slow
def test_as_a_script_in_two_processes_it_reports_once():
    """The training and output of two ranks are tested above; test_readme.py starts the config in two processes."""
    expect_success(run(SCRIPT, "--precision", "O1", "--strategy", "ddp", "--devices", 2, *SHORTER).stdout)


def test_delayed_allreduce_reaches_the_accuracy():
    options = ("--strategy", "delayed_ddp", "--devices", 2, "--optimizer", "fused", "--max-epochs", 8)
    first, second = run_ranks(main_as_a_rank, 2, "--precision", "O2", *options, backend=None)
    expect_success(first)
    assert second == ""


@pytest.mark.parametrize("precision", ["O1", "O5", *slow("O0", "O3")])
def test_the_fused_optimizer_reaches_the_accuracy(precision):
    assert digits_accuracy(precision, "fused", epochs=8) >= 0.98


@pytest.mark.slow
def test_under_torchrun():
    """The ranks above have torchrun's variables; tests/distributed starts torchrun too."""
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    expect_success(run(*torchrun, SCRIPT, "--strategy", "ddp", "--precision", "O1", *SHORTER).stdout)


def test_two_runs_in_one_folder_keep_apart(capfd):
    outputs = []
    for _ in range(2):
        main("--devices", 1, "--max-epochs", 1)
        outputs.append(capfd.readouterr().out)
    first, second = (Path(cell(output, "best checkpoint")) for output in outputs)
    assert first != second
    assert first.is_file()
    assert second.is_file()


def test_the_config_trains_tests_and_predicts(caplog):
    assert cli.main(["fit", str(CONFIG), "trainer.devices=1", "trainer.precision=O4", "trainer.max_epochs=8"]) == 0
    checkpoint = Path("runs/digits/version_0/checkpoints/last.ckpt")
    # The copy beside the logs is complete: it works from another folder too.
    copy = Path("runs/digits/version_0/config.yaml")
    assert "precision: O4" in copy.read_text()
    rest = [str(copy), f"ckpt_path={checkpoint}"]
    assert cli.main(["test", *rest]) == 0
    assert float(cell(caplog.text, "test_accuracy")) >= 0.98
    assert cli.main(["predict", *rest]) == 0
    saved = torch.load("runs/digits/version_2/predictions.pt", weights_only=True)
    assert sum(len(batch) for batch in saved["predictions"]) == 360


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--precision", "O7"), r"precision='O7' is not known.*known: 'O0'"),
        (("--strategy", "dpp"), r"strategy='dpp' is not known; did you mean 'ddp'"),
        (("--strategy", "single", "--devices", 2), r"single"),
        (("--accelerator", "gpv"), r"accelerator='gpv'.*did you mean 'gpu'"),
        (("--devices", "two"), r"devices='two'"),
        (("--max-epochs", "-3"), r"max_epochs=-3"),
        (("--accelerator", "gpu"), r"accelerator='gpu'"),
        (("--optimizer", "fuzed", "--devices", 1), r"optimizer='fuzed' is not known; did you mean 'fused'"),
        (("--batch-size", 63, "--devices", 2), r"batch_size=63 cannot be shared by 2 processes"),
    ],
)
def test_wrong_arguments_end_before_training(arguments, message):
    with pytest.raises(ConfigError, match=message):
        main(*arguments)
    assert not list(Path.cwd().rglob("*.ckpt*"))


def test_a_wrong_argument_is_told_by_the_exit_code_too():
    process = start_forked(SCRIPT.parent, str(SCRIPT), "--precision", "O7")
    _, said = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "ConfigError: precision='O7' is not known" in said
