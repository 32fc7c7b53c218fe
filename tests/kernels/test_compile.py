"""Every kernel compiles for every GPU that NVRTC knows, without one, and nothing spills into local memory."""

from __future__ import annotations

import re

import pytest
import torch

from fabricamp.ops import bridge
from tests.kernels.nvrtc import architectures, compile_for

F, H, B, D, R, U = torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.uint8
HALF_UPDATES = [(H, F, F, F, H), (B, F, F, F, B), (F, F, F, F, None), (D, D, D, D, None), (H, H, F, F, None)]
WITH_REMAINDERS = [(B, B, F, F, R), (F, B, F, F, R)]
IN_BF16 = [(B, B, B, B, R), (B, F, B, B, B), (F, F, B, B, None)]
IN_CODES = [(B, B, U, U, R), (B, F, U, U, B), (F, F, U, U, None)]
ONE_STATE = [(H, F, F, H), (B, F, F, B), (F, F, F, None), (D, D, D, None), (H, H, F, None)]
ONE_COMPACT = [(B, B, F, R), (B, B, B, R), (B, B, U, R), (F, F, U, None), (B, F, U, B)]
WITH_CODES = {"adam": [*IN_CODES, (B, B, F, F, R), (F, F, F, F, None)], "lion": ONE_COMPACT, "sgd": ONE_COMPACT}
"""Rows that a table has beside others: with all kinds of one kernel the compiler may keep fewer registers for each."""
KINDS = {
    "adagrad": ONE_STATE,
    "adam": [*HALF_UPDATES, *WITH_REMAINDERS, *IN_BF16],
    "copies": [],
    "cross_entropy": [],
    "differences": [(F, H), (F, B), (D, H)],
    "digests": [(torch.uint8,)],
    "ema": [(F, F), (H, F), (B, F), (D, D), (H, H), (B, F, R)],
    "finish": [],
    "flat_casts": [],
    "focal_loss": [],
    "lamb": HALF_UPDATES,
    "larc": [(F, F, None), (H, F, None), (B, B, None), (D, D, None), (F, F)],
    "lion": ONE_STATE,
    "norm_backward": [],
    "norm_backward_ring": [],
    "norm_columns": [],
    "norm_finish": [],
    "norm_forward": [],
    "norm_forward_wide": [],
    "norm_row_sums": [],
    "novograd": ONE_STATE,
    "peer_barrier": [],
    "rank_sums": [],
    "sgd": [*ONE_STATE, (F, F, None, None)],
    "statistics": [(F,), (H,), (B,), (D,)],
    "sums": [(H, F, F), (B, F, F), (F, F, F), (D, D, D), (H, B, H)],
    "sync_batch_norm": [],
    "tensors": [(F, H), (F, B), (H, F), (F, F), (D, D)],
}


def test_every_file_is_compiled_here():
    assert set(bridge.kernel_files()) == set(KINDS)


def compiles(file, architecture, kinds):
    log = compile_for(bridge.source(file, kinds), architecture)
    spills = [int(number) for number in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)]
    assert spills, log
    assert not any(spills), f"sm_{architecture}: {log}"


@pytest.mark.parametrize("file", KINDS)
def test_compiles_without_spills(file):
    """Compiles all rows for Hopper, and few for the oldest and the newest GPU, because rows differ little from each other."""
    known = architectures()
    for architecture, rows in ((known[0], 2), (90, None), (known[-1], 1)):
        compiles(file, architecture, KINDS[file][:rows])


@pytest.mark.parametrize("file", WITH_CODES)
def test_compact_states_compile_without_spills(file):
    known = architectures()
    for architecture, rows in ((known[0], 2), (90, None)):
        compiles(file, architecture, WITH_CODES[file][:rows])


@pytest.mark.slow
@pytest.mark.parametrize("file", KINDS)
def test_compiles_for_every_architecture_without_spills(file):
    for architecture in architectures():
        compiles(file, architecture, KINDS[file])
