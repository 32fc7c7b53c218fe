"""docs/step.md shows the lines that a step executes today."""

import importlib.util
import platform
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def step_page():
    """The script that renders the page."""
    specification = importlib.util.spec_from_file_location("render_step", DOCS / "render_step.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def on_page(step_page, name):
    """Returns a section of the page as it is; skips the test for one that another version has rendered."""
    text = step_page.sections((DOCS / "step.md").read_text())[name]
    here = f"(Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]})"
    if here not in text:
        pytest.skip("docs/step.md is of another Python or torch")
    return text


def test_full_precision(step_page):
    lines = step_page.of_full_precision()
    assert step_page.section("Full precision", lines) == on_page(step_page, "Full precision"), "make docs"
    assert len({line.code.co_filename for line in lines}) == 3


def test_o2_with_delayed_ddp(step_page):
    assert step_page.of_ranks() == on_page(step_page, "O2 with delayed_ddp"), "make docs"


@pytest.mark.gpu
def test_a_replay(step_page):
    page = on_page(step_page, "A replay")
    assert step_page.section("A replay", step_page.of_replay()) == page, "python docs/render_step.py, on a GPU"
