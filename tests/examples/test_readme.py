"""The README's example runs as it stands, and what it and the other pages point to exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]


def test_the_example_runs():
    pytest.importorskip("sklearn")
    (code,) = re.findall(r"## Twenty lines\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 20
    Path("train.py").write_text(code)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert list(Path.cwd().rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("page", "heading", "printed"),
    [
        ("README.md", "Layers and losses", "torch: "),
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

    rows = re.findall(r'^\| `"(\w+)"` \|', (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows == ["single", "ddp", "delayed_ddp"]
    assert set(rows) <= set(STRATEGIES.names())
