"""A loss without stored logits in fits: every level, reduction and way to call it trains as stored logits do."""

from __future__ import annotations

import pytest
import torch

from fabricamp import Compile, seed_everything
from tests.small import quiet_trainer
from tests.unstored_logits import FAR, LEVELS, Words, assert_near, batches, fitted, small_chunks


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    small_chunks(monkeypatch.setattr)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("level", LEVELS)
def test_trains_as_stored_logits_do(level, reduction):
    expected = fitted("stored", level, reduction=reduction)
    for way in ("head", "function"):
        assert_near(fitted(way, level, reduction=reduction), expected, FAR[level])


@pytest.mark.parametrize("level", LEVELS)
def test_accumulates_with_a_tied_embedding(level):
    options = {"tied": True, "accumulate_grad_batches": 2, "batch_size": 4}
    expected = fitted("stored", level, **options)
    for way in ("head", "function"):
        assert_near(fitted(way, level, **options), expected, FAR[level])


@pytest.mark.parametrize(
    ("level", "compiled"),
    [
        ("O1", "step"),
        ("O5", "modules"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("O0", "step"), ("O4", "step"), ("O2", "modules"))),
    ],
)
def test_compiled(level, compiled):
    torch._dynamo.reset()
    options = Compile(compiled, backend="aot_eager")
    for way in ("head", "function"):
        assert_near(fitted(way, level, compile=options), fitted("stored", level), FAR[level])


def test_a_loss_scale_reaches_the_chunks():
    """At O2 the gradients are made in fp16 with the scale in them: none is lost that stored logits keep."""
    seen = {}

    class Looking(Words):
        def on_after_backward(self):
            seen[self.way] = self.head.weight.grad.clone()

    for way in ("stored", "head"):
        seed_everything(3, verbose=False)
        quiet_trainer(precision="O2", max_steps=1).fit(Looking(way), batches(8))
    assert seen["head"].dtype == torch.float16
    assert (seen["head"] == 0).sum() <= (seen["stored"] == 0).sum()
    torch.testing.assert_close(seen["head"], seen["stored"], rtol=2e-2, atol=seen["stored"].abs().max().item() * 1e-3)
