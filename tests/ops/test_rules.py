"""Each rule matches its kernel file: operation, scalars and columns."""

from __future__ import annotations

import re

import pytest

from fabricamp import ops
from fabricamp.ops import bridge

RULES = [kind for kind in ops.Rule.__subclasses__() if kind.__module__.startswith("fabricamp.ops")]


def test_every_optimizer_has_a_rule_here():
    assert {kind.kernel for kind in RULES} == {"adagrad", "adam", "lamb", "larc", "lion", "novograd", "sgd"}


@pytest.mark.parametrize("kind", RULES)
def test_a_rule_fits_its_kernel(kind):
    text = bridge.kernel_texts()[f"{kind.kernel}.cu"].read_text()
    assert kind.kernel in ops.backend("cpu")
    (names,) = re.findall(r"enum Scalar {(.*?)}", text)
    assert len(names.split(",")) == len(kind(0.1).scalars())
    (rows,) = re.findall(r"#define KINDS (.*)", text)
    columns = {len(row.split(",")) - 1 for row in re.findall(r"KIND\((.*?)\)", rows)}
    assert columns == {2 + len(kind.states) + 1}  # gradient and parameter, state, half copy
