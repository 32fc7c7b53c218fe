"""Explains errors that Python or torch raised in a step: a note is added to the error, once training has failed by it."""

from __future__ import annotations

import inspect
import itertools
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from fabricamp.errors import advice
from fabricamp.module import TrainingModule

_UNKNOWN_OPTION = re.compile(r"TrainingModule\.log\(\) got an unexpected keyword argument '(\w+)'")
_DTYPES_DIFFER = re.compile(r"same dtype|expected scalar type|Input type .* type .* should be the same")
_PAST_THE_END = re.compile(r"Tried to step \d+ times\. The specified number of total steps is (\d+)")
_FETCHES = str(Path("torch", "multiprocessing", "reductions.py"))
_CONVERTED = ("O2", "O3", "O5")
_TRUE_NAMES = {torch.float64: "64-true", torch.float16: "16-true", torch.bfloat16: "bf16-true"}


def explain(error: BaseException, module: nn.Module, precision: str) -> None:
    """Adds notes on what to change to ``error``, if its text does not say; ``precision`` is a name such as "32-true" or "O2"."""
    found = (
        _unknown_option(error),
        _dtypes_that_differ(error, module, precision),
        _schedule_at_its_end(error),
        _batch_of_a_dead_worker(error),
    )
    for words in itertools.chain(*found):
        error.add_note(f"fabricamp: {words}")


def _unknown_option(error: BaseException) -> Iterator[str]:
    found = _UNKNOWN_OPTION.search(str(error)) if isinstance(error, TypeError) else None
    if found is not None:
        known = list(inspect.signature(TrainingModule.log).parameters)[1:]
        yield f"self.log has no argument {found[1]!r}{advice('self.log', found[1], known)}"


def _dtypes_that_differ(error: BaseException, module: nn.Module, precision: str) -> Iterator[str]:
    words = str(error)
    differ = isinstance(error, RuntimeError) and _DTYPES_DIFFER.search(words) is not None
    if not differ or precision not in ("32-true", *_CONVERTED):
        return
    name = type(module).__name__
    other = next((one.dtype for one in module.parameters() if one.dtype in _TRUE_NAMES), None)
    if other is not None and precision in _CONVERTED:
        yield (
            f"{name} is {other} at precision={precision!r}, and its modules, or copies of them, cast what a step (training_step "
            "and its like) calls them with, nothing else; in other hooks write trainer.precision_plugin.forward(net, x) for net(x)"
        )
    elif other is not None:
        yield (
            f"{name} has {other} parameters, and precision='32-true' converts neither them nor the batch; give "
            f"Trainer(precision={_TRUE_NAMES[other]!r}), which does, or build it in float32"
        )
    elif precision == "32-true" and "double" in words.lower():
        yield (
            f"{name}'s parameters are float32, and it was given float64, which is numpy's default; convert that with .float(), "
            "or give Trainer(precision='64-true')"
        )


def _schedule_at_its_end(error: BaseException) -> Iterator[str]:
    found = _PAST_THE_END.search(str(error)) if isinstance(error, ValueError) else None
    if found is not None:
        yield (
            f"a OneCycleLR of {found[1]} steps was to make one more; build it with "
            f"total_steps=self.trainer.estimated_stepping_batches, or train with max_steps={found[1]}"
        )


def _batch_of_a_dead_worker(error: BaseException) -> Iterator[str]:
    """Explains a failed connection to a worker: the tensors of a batch are fetched from the worker that made it."""
    if not isinstance(error, OSError | EOFError):
        return
    if any(frame.f_code.co_filename.endswith(_FETCHES) for frame, _ in traceback.walk_tb(error.__traceback__)):
        yield (
            "a DataLoader worker exited unexpectedly before its batch was taken; where it was killed, it may have run out of "
            "memory; num_workers=0 shows an error of its own"
        )
