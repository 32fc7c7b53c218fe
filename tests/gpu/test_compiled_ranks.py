"""Compiled steps of two ranks over NCCL: captured, with the bits of eager launches; and with weights gathered in FP8."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import torch.distributed as dist

from fabricamp import Compile, CudaGraph, Float8
from fabricamp.strategies import FSDP
from tests.distributed.ranks import run_ranks
from tests.gpu.test_compiled_graph import Deep, Runs
from tests.small import loader, quiet_trainer

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="torch's default backend needs a C compiler"),
]


def fitted(strategy, part, precision, graph):
    torch.compiler.reset()
    module = Deep()
    runs = Runs()
    torch.manual_seed(3)
    trainer = quiet_trainer(
        accelerator="gpu",
        devices="auto",
        strategy=strategy,
        precision=precision,
        max_epochs=3,
        accumulate_grad_batches=2,
        compile=Compile(part),
        cuda_graph=graph,
        callbacks=[runs],
    )
    trainer.fit(module, loader(256, 4))
    return [one.tolist() for one in module.parameters() if not one.is_meta], runs.ways


def of_ranks():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    found = {}
    for strategy in ("ddp", "delayed_ddp"):
        for part, precision in (("step", "O4"), ("modules", "O5"), ("blocks", "O2")):
            eager, _ = fitted(strategy, part, precision, graph=False)
            captured, ways = fitted(strategy, part, precision, CudaGraph(warmup=4))
            found[strategy, part] = eager == captured and "graph" in ways
    one, _ = fitted("fsdp", "blocks", "O5", graph=False)
    other, _ = fitted("fsdp", "blocks", "O5", graph=False)
    found["fsdp", "blocks"] = one == other
    return found


def test_two_ranks():
    parts = ("step", "modules", "blocks")
    works = {(strategy, part): True for strategy in ("ddp", "delayed_ddp") for part in parts}
    assert (
        run_ranks(of_ranks, 2, timeout=800, backend=None, start_method="spawn")
        == [{**works, ("fsdp", "blocks"): True}] * 2
    )


def words_of_ranks():
    """Returns the losses of FP8 products with weights gathered in bf16 and in FP8."""
    from tests.trainer.test_float8_in_the_loop import TAKEN, Block, Words, batches

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    found = []
    for all_gather in (False, True):
        torch.compiler.reset()
        module = Words()
        trainer = quiet_trainer(
            accelerator="gpu",
            devices="auto",
            strategy=FSDP([Block]),
            precision=Float8("tensorwise", include=["blocks"], all_gather=all_gather),
            max_epochs=2,
            gradient_clip_val=1.0,
            compile="blocks",
        )
        trainer.fit(module, batches())
        assert module.kinds == TAKEN
        found.append(module.losses)
    return found


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="this GPU has no FP8 products"
)
def test_weights_gathered_in_fp8_give_the_losses_of_bf16_gathers():
    pytest.importorskip("torchao", reason="needs the package torchao")
    for in_bf16, in_fp8 in run_ranks(words_of_ranks, 2, timeout=300, backend=None, start_method="spawn"):
        assert in_fp8[-1] < 0.95 * in_fp8[0]
        torch.testing.assert_close(torch.tensor(in_fp8), torch.tensor(in_bf16), rtol=2e-3, atol=0)
