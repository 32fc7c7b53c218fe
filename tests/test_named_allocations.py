"""No tensor of fabricamp depends on torch's default device or dtype: every factory call names both."""

import ast
from pathlib import Path

import pytest
import torch

import fabricamp
from tests.allocations import FACTORIES, NamedAllocations

NAMES = {one.__name__ for one in FACTORIES}
# Lightning's demos are like a user's program, and follow the user's defaults.
SOURCES = [path for path in sorted(Path(fabricamp.__file__).parent.rglob("*.py")) if path.parent.name != "demos"]


def unnamed(source):
    """Returns the lines of ``source`` with a ``torch.<factory>(...)`` without device or dtype.

    A layer's own parameters, made as ``nn.Parameter(torch.empty(...))``, follow the user's defaults as those of torch's layers do.
    """
    tree = ast.parse(source)
    parameters = {
        id(argument)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "nn.Parameter"
        for argument in call.args
    }
    return [
        f"{call.lineno}: {ast.unparse(call)}"
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and id(call) not in parameters
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "torch" and call.func.attr in NAMES
        if not {"device", "dtype"} <= {keyword.arg for keyword in call.keywords}
    ]


def test_every_call_that_makes_a_tensor_names_device_and_dtype():
    found = {str(path): unnamed(path.read_text()) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert len(SOURCES) > 200


@pytest.mark.parametrize("call", ["torch.zeros(3)", "torch.empty(2, device=x.device)", "torch.tensor(1.0, dtype=d)"])
def test_a_call_without_is_found(call):
    assert unnamed(f"def function(x, d):\n    return {call}\n") == [f"2: {call}"]


def test_the_mode_finds_what_runs():
    text = "import torch\ndef ours(**named): return torch.zeros(2, **named)\n"
    ours, theirs = {"__name__": "fabricamp.part"}, {"__name__": "part_of_a_user"}
    for names in (ours, theirs):
        exec(text, names)
    with NamedAllocations():
        theirs["ours"]()
        ours["ours"](device="cpu", dtype=torch.float32)
        with pytest.raises(AssertionError, match="fabricamp.part:2: torch.zeros names no dtype"):
            ours["ours"](device="cpu")
