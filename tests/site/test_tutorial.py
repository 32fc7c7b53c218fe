"""docs/tutorial.md: its files and commands, in its order: fit, interrupt, resume, plot and predict."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish
from tests.examples.in_process import import_for_digits

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
COMMANDS = [
    "python first.py",
    "python train.py",
    "python train.py",
    "fabricamp plot runs/digits/version_0",
    "fabricamp plot runs/digits/version_0 --out curves.svg",
    "fabricamp runs runs",
    "python predict.py",
]
CONSOLE_SCRIPT = Path(sys.prefix) / "bin" / "fabricamp"


def files():
    """The files that the page has its reader save, by their names."""
    found = re.findall(r"[Ss]ave as `(\w+\.py)`[^\n]*:\n\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(found) == PAGE.count("```python")
    return dict(found)


def without_numbers(line):
    """Returns ``line`` without what the machine decides: a loss, a time."""
    return re.sub(r"[\d.]+ it/s|\d+\.\d+", "#", line)


def run(folder, command):
    program, *words = command.split()
    script = CONSOLE_SCRIPT if program == "fabricamp" else words.pop(0)
    return finish(start_forked(folder, script, *words, CUDA_VISIBLE_DEVICES="", COLUMNS="100"))


def interrupt(folder, command):
    """Starts the command, and presses Ctrl-C once the first epoch has left its checkpoint."""
    process = start_forked(folder, command.removeprefix("python "), CUDA_VISIBLE_DEVICES="")
    deadline = time.monotonic() + 60
    while not list(folder.glob("runs/digits/checkpoints/epoch=0-*.ckpt")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, _, said = finish(process)
    return code, said


@pytest.fixture
def folder(tmp_path):
    for name, code in files().items():
        (tmp_path / name).write_text(code)
    return tmp_path


def test_the_commands_are_those_of_the_page():
    lines = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.splitlines()]
    assert lines == COMMANDS


@pytest.mark.skipif(not CONSOLE_SCRIPT.exists(), reason="fabricamp is not installed here, only importable")
def test_the_files_and_commands_in_the_order_of_the_page(folder):
    import_for_digits()
    first, interrupted, resumed, plot, picture, runs, predict = COMMANDS

    code, _, said = run(folder, first)
    assert code == 0, said
    # The lines of the page, whose seed and table of the model are left out.
    shown = re.findall(r"```text\n(CPU, .*?)```", PAGE, flags=re.DOTALL)[0]
    left_out = ("Seed", "Name", "net ", "9,610 parameters", "Memory")
    assert [without_numbers(line) for line in said.splitlines() if not line.startswith(left_out)] == [
        without_numbers(line) for line in shown.splitlines()
    ]
    assert "Ended at step 141: max_epochs=3 reached" in said

    code, said = interrupt(folder, interrupted)
    assert code == 130, said
    (step,) = re.findall(r"Interrupted at step (\d+); ", said)

    code, _, said = run(folder, resumed)
    assert code == 0, said
    assert re.search(
        rf"Resumed from runs/digits/checkpoints/last.ckpt: epoch \d+/200, step {step}$", said, re.MULTILINE
    )
    assert "val_loss has not improved" in said

    code, _, said = run(folder, resumed)
    assert code == 0, said
    assert "Nothing left to train" in said

    code, drawn, said = run(folder, plot)
    assert code == 0, said
    assert "val_loss" in drawn
    code, _, said = run(folder, picture)
    assert code == 0, said
    assert (folder / "curves.svg").stat().st_size > 1000
    code, listed, said = run(folder, runs)
    assert code == 0, said
    assert "version_0" in listed

    code, printed, said = run(folder, predict)
    assert code == 0, said
    predicted, true = (line.split("[")[1].rstrip("]").split(", ") for line in printed.splitlines())
    assert sum(a == b for a, b in zip(predicted, true, strict=True)) >= 8
