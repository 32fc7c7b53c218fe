"""The README's commands and code run unchanged, and the links of the README and of the pages have targets."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

from tests.distributed.forked import start_forked
from tests.distributed.scripts import PATHS, finish
from tests.examples.in_process import import_for_digits

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]


README = (ROOT / "README.md").read_text()

NOT_RUN = {
    "pip install .": "it would replace the package under test; test_wheel.py installs the wheel",
    "pip install cupy-cuda13x": "CuPy is for machines with a GPU",
    "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py": "two machines",
}
RUN = {
    "fabricamp doctor": "python",
    "make demo": "val_accuracy  last",
    "fabricamp fit examples/digits/config.yaml trainer.max_epochs=5 trainer.devices=2 module.lr=0.1": "epoch 5/5",
    "fabricamp test examples/digits/config.yaml ckpt_path=best": "test_accuracy",
    "fabricamp plot runs/digits/version_0 runs/digits/version_1": "+ version_1",
}
"""A part of each command's output."""
FORKED = ("doctor", "fit", "test", "plot")
"""Subcommands that run in a forked process, which saves three seconds each; of fit, the second process is a new interpreter."""


def commands():
    """Returns the indented lines of the page outside of Python blocks, in order."""
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def test_every_command_is_run_or_has_its_reason():
    assert sorted(commands()) == sorted([*NOT_RUN, *RUN])
    assert [one for one in commands() if one in RUN] == list(RUN)


def example():
    (code,) = re.findall(r"## Twenty lines\n\n```python\n(.*?)```", README, flags=re.DOTALL)
    return code


@pytest.fixture
def clone(tmp_path):
    """Returns a clone in which `make demo` finds everything installed, because pip would change the tests' own environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "examples"):
        source = ROOT / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy2(source, tmp_path)
    (tmp_path / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (tmp_path / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    for name in (".torch", ".demo", ".installed"):
        (tmp_path / ".venv" / name).touch()
    (tmp_path / "train.py").write_text(example())
    return tmp_path


def run(command, folder):
    script, *words = command.split()
    if words[0] in FORKED:
        code, out, err = finish(
            start_forked(folder, f".venv/bin/{script}", *words, CUDA_VISIBLE_DEVICES="", COLUMNS="120")
        )
        return subprocess.CompletedProcess(command, code, out, err)
    return run_in_a_shell(command, folder)


def run_in_a_shell(command, folder):
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PATHS,
        "COLUMNS": "120",
    }
    words = {"shell": True, "cwd": folder, "env": environment, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, **words)


@pytest.mark.skipif(
    not (Path(sys.prefix) / "pyvenv.cfg").exists(), reason="the tests run outside of a virtual environment"
)
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_commands_work_in_the_order_in_which_they_stand(clone):
    import_for_digits()
    for command, printed in RUN.items():
        done = run(command, clone)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert printed in done.stdout + done.stderr, command
        recipes = [line for line in done.stdout.splitlines() if line.startswith((".venv/bin/", "test -x", "python"))]
        assert command != "make demo" or recipes == []
        shown = re.search(r"^ *open them with +(\S+)", done.stdout, re.MULTILINE)
        assert command != "make demo" or shown[1] == ".venv/bin/tensorboard"
        accuracy = re.search(r"^ *test accuracy +([\d.]+)%", done.stdout, re.MULTILINE)
        assert command != "make demo" or float(accuracy[1]) >= 98
        if " fit " in command:  # in two processes, which run the command's script again
            assert len(list(clone.rglob("version_*/config.yaml"))) == done.stderr.count("epoch 5/5") == 1


def test_the_example_needs_nothing_but_what_the_package_brings(clone):
    """Hides the extras, because `pip install .` does not install them."""
    assert len([line for line in example().splitlines() if line]) <= 20
    extras = ["sklearn", "torchmetrics", "torchdata", "hypothesis", "cupy", "scipy"]
    hidden = f"import runpy, sys; sys.modules.update(dict.fromkeys({extras})); runpy.run_path('train.py', run_name='__main__')"
    done = run_in_a_shell(f'{sys.executable} -c "{hidden}"', clone)
    assert done.returncode == 0, done.stderr
    assert list(clone.rglob("*.ckpt"))
    last = float(re.findall(r"loss (\S+)", done.stderr)[-1])
    assert last < 0.1


def test_every_block_of_code_is_run():
    headings = [part.split("\n")[0] for part in README.split("\n## ")[1:] if "```python" in part]
    assert headings == ["Twenty lines"]


def test_the_demo_installs_only_what_it_runs():
    words = subprocess.run(
        ["make", "-n", "demo", "VENV=none"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert '-e ".[examples]"' in words
    assert "dev" not in words.replace("/dev/null", "")


def test_the_figures_are_those_of_the_measured_table():
    page = (ROOT / "docs" / "performance.md").read_text()
    rows = [line for line in README[: README.index("\n## ")].splitlines() if re.match(r"\| (?!---|what \|)", line)]
    assert len(rows) == 3
    rows += re.findall(r"^\| a head of .*", README, re.MULTILINE)
    assert len(rows) == 4
    assert [row for row in rows if row not in page] == []
    # Each names its machine and its day.
    assert [
        row for row in rows if not re.search(r"(NVIDIA|CPU cores).*, torch 2\.\d+\S*, \d{4}-\d\d-\d\d \|$", row)
    ] == []


def test_the_picture_of_a_step_shows_a_row_of_the_measured_table():
    from benchmarks import draw_step

    result = json.loads((draw_step.HERE / "results" / "fastest-h100.json").read_text())
    times = next(row["wall_ms"] for row in result["rows"] if row["network"] == "gpt2-16")
    page = (ROOT / "docs" / "performance.md").read_text()
    row = next(line for line in page.splitlines() if "of GPT-2-small with" in line and result["device"] in line)
    picture = (ROOT / "docs" / "step.svg").read_text()
    ours = min((way for way in draw_step.SHOWN if way.startswith("fabricamp")), key=times.get)
    for way in (ours, "by hand, compiled", "by hand, compiled, reduce-overhead"):
        assert f"{times[way]:.1f} ms" in row
        assert f">{times[way]:.1f}</text>" in picture
    assert times[ours] == min(times[way] for way in draw_step.SHOWN)
    for words in (result["device"], result["date"]):
        assert words in row
        assert words in picture
    assert row == next(line for line in README.splitlines() if line.startswith("| a whole bf16 step"))
    assert f"an NVIDIA H100, torch {result['torch']}, {result['date']}" in README


def test_marks_of_what_only_a_clone_has_are_not_shown():
    """Markdown takes a line that begins with a comment for HTML, and leaves its text as it is; setup.py reads the marks."""
    assert re.findall(r"^ *<!--.*-->.+$", README, re.MULTILINE) == []
    marks = re.findall(r"<!-- (/?clone) -->", README)
    assert marks == ["clone", "/clone"] * (len(marks) // 2)
    assert len(marks) >= 10


def test_pictures_name_their_machine_and_day():
    from benchmarks import draw_losses

    result = json.loads((draw_losses.HERE / "results" / "end_to_end-h200-curves.json").read_text())
    assert f"{result['device']}, torch {result['torch']}, {result['date']}" in README


def test_what_runs_unchanged_names_its_exceptions():
    (promise,) = re.findall(r"\*\*(Scripts for Lightning[^*]*)\*\*([^.]*)\.", README)
    assert "Fabric" in "".join(promise)


def test_what_is_needed_is_what_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch_needed,) = (one for one in project["dependencies"] if one.startswith("torch>"))
    assert f"torch {torch_needed.removeprefix('torch>=')} or newer" in README
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README


def test_the_picture_is_that_of_the_results():
    from benchmarks import draw_losses

    found = json.loads((draw_losses.HERE / "results" / "end_to_end-h200-curves.json").read_text())
    picture = (ROOT / "docs" / "losses.svg").read_text()
    assert picture == draw_losses.draw(found), "results have changed: make docs"
    assert len(ET.fromstring(picture).findall("{*}polyline")) == len(draw_losses.SHOWN)


def test_the_picture_of_a_step_is_that_of_the_results():
    from benchmarks import draw_step

    found = json.loads((draw_step.HERE / "results" / "fastest-h100.json").read_text())
    picture = (ROOT / "docs" / "step.svg").read_text()
    assert picture == draw_step.draw(found), "results have changed: make docs"
    assert len(ET.fromstring(picture).findall("{*}rect")) == 1 + len(draw_step.SHOWN)


@pytest.mark.parametrize(
    ("page", "heading", "printed"),
    [
        ("docs/kernels.md", "LayerNorm, RMSNorm, cross-entropy", "torch: "),
        ("docs/kernels.md", "Kernels: what runs", "torch: its tensors are on cpu"),
    ],
)
def test_the_examples_of_layers_run(page, heading, printed, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = (ROOT / page).read_text()
    (code, *_) = re.findall(r"```python\n(.*?)```", text[text.index(f"# {heading}") :], flags=re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith(printed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
    for file, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", page.read_text()):
        target = page.parent / file if file else page
        titles = re.findall(r"^#+ (.*)", target.read_text(), flags=re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_the_table_of_opt_levels_is_that_of_the_code():
    from fabricamp.precision.opt_levels import LEVELS

    rows = re.findall(
        r"^\| `(O\d)` \|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert [row[0] for row in rows] == list(LEVELS)
    for name, _, weights, _, masters, scale in rows:
        level = LEVELS[name]
        assert ("fp32" in masters) == level.master_weights
        assert ("dynamic" in scale) == level.dynamic
        assert ("BatchNorm fp32" in weights) == level.keep_batchnorm_fp32


def test_the_table_of_strategies_is_that_of_the_code():
    from fabricamp.strategies import STRATEGIES

    rows = re.findall(r'^\| `"(\w+)"` \|', README[README.index("## Several processes") :], re.MULTILINE)
    assert rows == ["single", "ddp", "delayed_ddp", "fsdp", "fault_tolerant"]
    assert set(rows) <= set(STRATEGIES.names())
