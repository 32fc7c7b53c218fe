"""The layouts of kernels: on an H200 those of the measured figures, and on every card within a multiprocessor's resources."""

from __future__ import annotations

import pytest
import torch

from fabricamp.ops.batch_norm.kernels import Geometry
from fabricamp.ops.norm import plans as norm_plans
from tests.ops.norm_checks import norm_of

B, H, S = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")

# Each shape of benchmarks/norms.py: Layout and blocks of forward; Layout and the rest of Residents or Ring of backward.
NORMS = {
    (128, B): ((8, 8, 2, 16, 1, 10), (8, 8, 2, 32, 1, 1, True, 2, 32768, 0)),
    (256, B): ((8, 16, 2, 8, 1, 10), (8, 16, 2, 16, 1, 1, True, 2, 32768, 0)),
    (512, B): ((8, 32, 2, 4, 1, 10), (8, 32, 2, 8, 1, 1, True, 2, 32768, 0)),
    (768, B): ((8, 64, 2, 2, 1, 10), (8, 96, 1, 2, 1, 1, True, 4, 24576, 0)),
    (1024, B): ((8, 64, 2, 2, 1, 10), (8, 64, 2, 4, 1, 1, True, 2, 32768, 0)),
    (2048, B): ((8, 128, 2, 1, 1, 10), (8, 128, 2, 2, 1, 1, True, 2, 32768, 0)),
    (4096, B): ((8, 256, 2, 1, 1, 5), (8, 128, 2, 1, 2, 4, 4, 32768)),
    (8192, B): ((8, 256, 4, 1, 1, 4), (8, 128, 2, 1, 4, 4, 4, 32768)),
    (16384, B): ((8, 256, 8, 1, 1, 2), (8, 128, 2, 1, 8, 4, 4, 32768)),
    (32768, B): ((8, 256, 8, 1, 2, 2), (8, 256, 2, 1, 8, 4, 2, 65536)),
    (65536, B): ((8, 256, 8, 1, 4, 2), (8, 512, 2, 1, 8, 4, 1, 131072)),
    (1024, H): ((8, 64, 2, 2, 1, 10), (8, 64, 2, 4, 1, 1, True, 2, 32768, 0)),
    (4096, H): ((8, 256, 2, 1, 1, 5), (8, 128, 2, 1, 2, 4, 4, 32768)),
    (16384, H): ((8, 256, 8, 1, 1, 2), (8, 128, 2, 1, 8, 4, 4, 32768)),
    (1024, S): ((4, 128, 2, 1, 1, 10), (4, 128, 2, 2, 1, 1, True, 2, 32768, 0)),
    (4096, S): ((4, 256, 4, 1, 1, 4), (4, 128, 8, 1, 1, 2, True, 2, 65536, 32768)),
    (16384, S): ((4, 256, 8, 1, 2, 2), (4, 128, 4, 1, 8, 3, 4, 49152)),
}

# Each shape of benchmarks/syncbn.py, fp16, NCHW and NHWC: threads, sums, spread.
BATCH_NORMS = {
    (64, 64, 112, 112): ((512, (64, 4, 25088, 0, 9), (64, 4, 25088, 0, 9)), (512, (1, 256, 3136, 3, 6), (1, 264, 3041, 3, 6))),
    (64, 256, 56, 56): ((512, (256, 1, 25088, 0, 9), (256, 1, 25088, 0, 9)), (512, (4, 64, 3136, 3, 6), (4, 66, 3041, 3, 6))),
    (64, 512, 28, 28): ((256, (512, 1, 6272, 0, 8), (512, 1, 6272, 0, 8)), (512, (8, 33, 1521, 3, 6), (8, 33, 1521, 3, 6))),
    (64, 2048, 7, 7): ((128, (2048, 1, 3136, 0, 7), (2048, 1, 3136, 0, 7)), (512, (128, 1, 3136, 1, 8), (32, 8, 392, 3, 6))),
    (2, 256, 64, 64): ((512, (256, 1, 1024, 0, 9), (256, 1, 1024, 0, 9)), (512, (4, 64, 128, 3, 6), (4, 66, 125, 3, 6))),
}  # fmt: skip


def flat(found):
    return (*found[0], *found[1:])


@pytest.fixture
def card(monkeypatch):
    """Returns a function that gives the CPU a card's multiprocessors, their shared memory and threads, and its cluster sizes."""

    def use(processors, shared_kib, threads, sizes):
        monkeypatch.setattr(norm_plans, "processors", lambda device: processors)
        monkeypatch.setattr(norm_plans, "_shared_memory", lambda device: shared_kib * 1024)
        monkeypatch.setattr(norm_plans, "_threads", lambda device: threads)
        monkeypatch.setattr(norm_plans, "cluster_sizes", lambda device: sizes)

    return use


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_of_the_benchmark_are_laid_out_on_an_h200_as_they_were_measured(card, kind):
    card(132, 228, 2048, (1, 2, 4, 8))
    for (width, dtype), (forward, backward) in NORMS.items():
        norm = norm_of(kind, width, (dtype, dtype), CPU)._replace(bias=kind == "layer")
        vector = norm_plans.vector_of(width, (dtype,), aligned=True)
        assert flat(norm_plans.forward_layout(norm, vector)) == forward
        found = norm_plans.backward(norm, aligned=True, sums=True)
        no_bias = isinstance(found, norm_plans.Residents) and kind == "rms"  # half of the sums in shared memory
        assert flat(found) == (*backward[:-1], backward[-1] // (2 if no_bias else 1))


def test_batch_norms_of_the_benchmark_are_shared_out_on_an_h200_as_they_were_measured():
    for shape, plans in BATCH_NORMS.items():
        for form, expected in zip((torch.contiguous_format, torch.channels_last), plans, strict=True):
            x = torch.empty(shape, dtype=H, device="meta").to(memory_format=form)
            found = Geometry(x, 2 * 132, 512, channel_last=False)
            assert (found.threads, tuple(found.sums), tuple(found.spread)) == expected


@pytest.mark.parametrize(
    ("shared_kib", "threads", "sizes"),
    [
        (64, 1024, (1,)),  # 7.5
        (164, 2048, (1,)),  # 8.0
        (100, 1536, (1,)),  # 8.6, 8.9
        (228, 2048, (1, 2, 4, 8)),  # 9.0, 10.0, 10.3
        (100, 1536, (1, 2, 4, 8)),  # 12.0, 12.1
    ],
)
def test_no_plan_counts_on_more_than_a_multiprocessor_holds(card, shared_kib, threads, sizes):
    card(40, shared_kib, threads, sizes)
    for width in (24, 128, 768, 1000, 1024, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536):
        for dtype in (B, S):
            norm = norm_of("layer", width, (dtype, dtype), CPU)
            for aligned in (True, False):
                vector = norm_plans.vector_of(width, (dtype,), aligned=aligned)
                if found := norm_plans.forward_layout(norm, vector):
                    assert 1 <= found[1] <= threads // found[0].threads
                for sums in (True, False):
                    if plan := norm_plans.backward(norm, aligned=aligned, sums=sums):
                        assert 1 <= plan.blocks <= threads // plan.layout.threads
                        assert plan.blocks * (plan.shared + 1024) <= shared_kib * 1024
