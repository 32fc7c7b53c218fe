"""docs/reference.md is rendered from the current docstrings, which describe every argument and public member."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

import fabricamp
from fabricamp import callbacks, loggers, strategies

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"


def script():
    spec = importlib.util.spec_from_file_location("render_reference", PAGE.with_name("render_reference.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = script()
PARTS = {callbacks: fabricamp.Callback, loggers: loggers.Logger, strategies: strategies.Strategy}
EXPORTED = {name: getattr(part, name) for part in PARTS for name in part.__all__}
OPTIONS = {
    name: one
    for name, one in EXPORTED.items()
    if inspect.isclass(one)
    and issubclass(one, tuple(PARTS.values()))
    and one not in (*PARTS.values(), strategies.ProcessGroupStrategy)
    and one.__name__ == name  # not RichModelSummary, which is ModelSummary
    and (
        "__init__" in vars(one) or REFERENCE.Doc(one).arguments
    )  # not AsyncCheckpoint: its docstring refers to the arguments of ModelCheckpoint
}
CALLS = {
    "Trainer": fabricamp.Trainer,
    "OptLevel": fabricamp.OptLevel,
    "TrainingModule.log": fabricamp.TrainingModule.log,
    **{name: getattr(fabricamp.Trainer, name) for name in ("fit", "validate", "test", "predict")},
    **OPTIONS,
}


def test_the_page_is_that_of_the_docstrings():
    assert PAGE.read_text() == REFERENCE.render(), "docstrings have changed: make docs"


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_explained_once_and_in_the_order_of_the_signature(name):
    """``help()`` shows the docstring, so it must not describe arguments that the signature lacks."""
    parameters = [one for one in inspect.signature(CALLS[name]).parameters.values() if one.name != "self"]
    taken = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    explained = [one for one in REFERENCE.Doc(CALLS[name]).arguments if not one.startswith("**")]
    assert explained == taken


def test_these_are_all_that_is_exported():
    assert {"EarlyStopping", "ModelCheckpoint", "ProgressBar", "CSVLogger", "DDP"} <= set(OPTIONS)
    page = PAGE.read_text()
    assert [name for name in OPTIONS if f"\n### {name}\n" not in page] == []


KINDS = (fabricamp.Trainer, fabricamp.TrainingModule, fabricamp.DataModule, fabricamp.Callback, loggers.Logger)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_face_has_a_line(kind):
    page = PAGE.read_text()
    own = [base for base in kind.__mro__ if base.__module__.startswith("fabricamp")]
    names = {name for base in own for name in vars(base) if not name.startswith("_")}
    kinds = (property, staticmethod, classmethod)
    faces = {name: inspect.getattr_static(kind, name) for name in names}
    faces = {name for name, one in faces.items() if inspect.isroutine(one) or isinstance(one, kinds)}
    lost = [name for name in faces if f"| `{name}" not in page and f"### {kind.__name__}.{name}\n" not in page]
    assert lost == []
