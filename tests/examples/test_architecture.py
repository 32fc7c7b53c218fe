"""docs/architecture.md: its recipes run unchanged, and every file that it names exists."""

import json
import re
from pathlib import Path

import pytest
import torch

from fabricamp.precision import PRECISIONS
from fabricamp.strategies import STRATEGIES
from tests.small import Classifier, loader, quiet_trainer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def recipe(heading):
    """Returns the names that the code under ``heading`` defines."""
    (code, *_) = re.findall(r"```python\n(.*?)```", PAGE[PAGE.index(f"### {heading}") :], flags=re.DOTALL)
    names = {}
    exec(code, names)
    return names


def fit(module, **options):
    trainer = quiet_trainer(max_epochs=2, log_every_n_steps=2, **options)
    trainer.fit(module, loader(16))
    return trainer


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Removes the registered names of a recipe after its test."""
    for one in (STRATEGIES, PRECISIONS):
        monkeypatch.setattr(one, "_builders", dict(one._builders))


def test_a_strategy():
    recipe("A strategy")
    module = Classifier()
    assert fit(module, strategy="local_sgd").strategy.every == 8
    plain = Classifier()
    fit(plain)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)  # with one process the average is the value itself


def test_a_precision():
    seen = []
    recipe("A precision")

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0])
            return super().training_step(batch, batch_idx)

    fit(Looks(), precision="bf16-inputs")
    assert all(one.dtype == torch.float32 and torch.equal(one, one.bfloat16().float()) for one in seen)


@pytest.mark.parametrize("shows", [False, True])
def test_a_precision_with_a_step_of_its_own(shows):
    recipe("A precision")

    class Signed(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

        if shows:

            def on_before_optimizer_step(self, optimizer):
                assert any(parameter.grad.abs().max() not in (0, 1) for parameter in self.parameters())

    torch.manual_seed(0)
    module = Signed()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    steps = fit(module, precision="signs").global_step
    for one, other in zip(before, module.parameters(), strict=True):
        halves = (other.detach() - one) / 0.5
        torch.testing.assert_close(halves, halves.round(), atol=1e-5, rtol=0)
        assert halves.abs().max() <= steps


def test_a_logger(tmp_path):
    logger = recipe("A logger")["JsonLines"](tmp_path / "log")
    fit(Classifier(), logger=logger)
    logger.file.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 3, 5, 7]


def test_every_file_that_is_named_is_there():
    named = {one for one in re.findall(r"`([\w/]+/[\w/.]*)`", PAGE) if "yours" not in one}
    missing = [one for one in named if not any((root / one).exists() for root in (ROOT, ROOT / "fabricamp"))]
    assert not missing
    assert len(named) > 30


@pytest.mark.parametrize(
    "room", ["engine", "engine/checks", "engine/graph", "engine/report", "engine/saved", "callbacks"]
)
def test_every_module_of_a_room_is_named(room):
    modules = [f"`{room}/{one.name}`" for one in (ROOT / "fabricamp" / room).glob("*.py") if one.name != "__init__.py"]
    assert [one for one in modules if one not in PAGE] == []
    assert len(modules) > 2


def test_the_folder_of_each_room_s_tests_is_named():
    folders = [one.name for one in (ROOT / "tests").iterdir() if any(one.glob("test_*.py"))]
    tests_of_rooms = PAGE.split("### Where the tests of a room are")[1].split("## ")[0]
    assert [
        one for one in folders if f"tests/{one}/`" not in tests_of_rooms and f"`{one}/`" not in tests_of_rooms
    ] == []


def test_the_picture_has_every_part_and_the_glossary_is_short():
    picture = PAGE.split("```")[1]
    parts = [one.name for one in (ROOT / "fabricamp").iterdir() if one.is_dir() and (one / "__init__.py").exists()]
    assert [one for one in parts if f"{one}/" not in picture] == []
    assert len(re.findall(r"^\| (?!word|-)", PAGE[PAGE.index("## Glossary") :], flags=re.MULTILINE)) <= 25
