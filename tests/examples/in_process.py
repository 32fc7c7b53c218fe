"""Trains the examples in the test's own process, because starting a process takes longer than the training.

``import_for_digits`` and ``import_for_logs`` import what each process that a test forks would otherwise import again.
"""

from __future__ import annotations

import importlib
from functools import cache

import pytest
import torch

from fabricamp import Trainer, seed_everything
from tests.small import QUIET

GPT_SIZES = {"context": 64, "layers": 2, "width": 48, "heads": 2}


def import_for_logs():
    """Imports the writer of TensorBoard's files."""
    importlib.import_module("fabricamp.loggers.event_file")


def import_for_digits():
    """Imports what the digits example imports when its data are read and its logs written; skips without scikit-learn."""
    for module in ("sklearn.datasets", "sklearn.model_selection"):
        pytest.importorskip(module, reason="needs the package sklearn")
    import_for_logs()


def digits_accuracy(precision, optimizer, *, epochs, accelerator="cpu"):
    """Returns the test accuracy of the digits example."""
    from examples.digits.digits import DigitsClassifier, DigitsData

    # Other seeds end between 98.3 and 100 %; with this seed one or two images, which rounding may change, do not matter.
    seed_everything(1)
    trainer = Trainer(**{**QUIET, "accelerator": accelerator, "precision": precision, "max_epochs": epochs})
    module, data = DigitsClassifier(optimizer=optimizer), DigitsData()
    trainer.fit(module, datamodule=data)
    (result,) = trainer.test(module, datamodule=data, verbose=False)
    return result["test_accuracy"]


@cache
def gpt_losses(precision, optimizer, accelerator="cpu"):
    """Returns losses of a small variant of the GPT example (nats per byte) on the test text: after 50 steps, and at the start."""
    from examples.gpt.gpt import BYTES, GPT, LanguageModel, SourceText

    seed_everything(0)
    limits = {"max_steps": 50, "limit_test_batches": 8, "gradient_clip_val": 1.0}
    trainer = Trainer(**{**QUIET, "accelerator": accelerator, "precision": precision, **limits})
    batch_size = 4 if accelerator == "cpu" else 16  # half precision is slow on a CPU
    module, data = LanguageModel(optimizer, 6e-3, **GPT_SIZES), SourceText(batch_size, context=64)
    data.setup("fit")
    windows = data.train.tensors[0][:64].long()
    with torch.no_grad():
        first = GPT(BYTES, **GPT_SIZES)(windows[:, :-1], windows[:, 1:]).item()
    trainer.fit(module, datamodule=data)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    (result,) = trainer.test(module, datamodule=data, verbose=False)
    return result["test_loss"], first
