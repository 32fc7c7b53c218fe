"""Compiled steps of two ranks over NCCL, also captured: the bits of compiled eager steps."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import torch.distributed as dist

from fabricamp import Compile, CudaGraph
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
