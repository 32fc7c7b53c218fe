"""docs/training.md: its code runs as it stands."""

import re
from pathlib import Path

import torch

from tests.small import quiet_trainer
from tests.weighted import batches

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def section(heading):
    """What the code under ``heading`` defines."""
    code = re.search(r"```python\n(.*?)```", PAGE[PAGE.index(f"## {heading}") :], flags=re.DOTALL)
    names = {}
    exec(code[1], names)
    return names


def test_a_loss_as_a_sum_with_its_weight():
    module = section("A loss as a sum with its weight")["Tagger"]()
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    assert trainer.global_step == 2
