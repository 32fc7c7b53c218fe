"""The GPT example learns on a GPU, at every opt level with FusedAdam, what it learns in fp32 with torch's AdamW."""

from __future__ import annotations

import pytest
import torch

from tests.examples.in_process import gpt_losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_learns_as_in_fp32_with_the_fused_optimizer(precision):
    reference, _ = gpt_losses("O0", "torch", "gpu")
    loss, _ = gpt_losses(precision, "fused", "gpu")
    assert reference < 3.2
    # Dynamic scaling may skip one of the first steps, so one of the 50 updates is missing.
    assert loss == pytest.approx(reference, abs=0.01 if precision == "O0" else 0.05)
