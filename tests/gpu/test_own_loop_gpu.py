"""A Loop on a GPU: the bits of the Trainer's steps, eager and as graphs, exact resumes, changed values, and no hidden wait."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fabricamp import ConfigError, CudaGraph
from tests.own_loop.same import by_loop, by_trainer, copied, difference, prepared, state_of
from tests.pairs import pairs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GPU = {"accelerator": "gpu", "devices": 1}
GRAPH = CudaGraph(warmup=4)


@pytest.mark.parametrize(
    ("precision", "optimizer", "accumulate", "graph"),
    pairs(["O0", "O1", "O2", "O3", "O4", "O5"], ["fused_adam", "fused_sgd", "adamw"], [1, 3], [None, GRAPH]),
)
def test_steps_have_the_trainers_bits(precision, optimizer, accumulate, graph):
    options = {"precision": precision, "accumulate_grad_batches": accumulate, "cuda_graph": graph}
    options |= {"epochs": 4, "gradient_clip_val": 0.5, **GPU}
    assert difference(by_trainer(optimizer, **options), by_loop(optimizer, **options)) == ""


def trained(folder, *, graph, save_at=None, restores=False):
    run, model, made, train = prepared(
        "fused_adam", precision="O5", cuda_graph=graph, default_root_dir=folder, gradient_clip_val=0.5, **GPU
    )
    with run:
        if restores:
            assert run.restore("last")
        while run.epoch < 5:
            for batch in train:
                run.step(lambda b: F.cross_entropy(model(b[0]).float(), b[1]), batch)
                if run.global_step == save_at:
                    run.save("last", asynchronous=True)
                    run.step(lambda b: F.cross_entropy(model(b[0]).float(), b[1]), batch)  # while the file is written
                    return None
        return copied(state_of(model, [made], run._trainer))


@pytest.mark.parametrize("graph", [None, GRAPH])
def test_a_file_that_is_written_beside_steps_resumes_to_the_bit(graph, tmp_path):
    whole = trained(tmp_path, graph=graph)
    trained(tmp_path, graph=graph, save_at=17)
    assert difference(whole, trained(tmp_path, graph=graph, restores=True)) == ""


@pytest.mark.parametrize("on", ["host", "device"])
def test_a_value_that_changes_is_no_constant(on):
    def losses(graph):
        run, model, _, train = prepared("fused_adam", cuda_graph=graph, dropout=0.0, **GPU)
        w = 1.0 if on == "host" else torch.ones((), device="cuda")
        found = []
        with run:
            for _ in range(6):
                for batch in train:
                    if run.global_step == 20:
                        w = 0.25 if on == "host" else w.fill_(0.25)
                    found.append(run.step(lambda b: w * F.cross_entropy(model(b[0]), b[1]), batch))
        return torch.stack(found).cpu()

    assert torch.equal(losses(None), losses(GRAPH))


def test_a_value_that_changes_in_each_step_is_refused():
    run, model, _, train = prepared("fused_adam", cuda_graph=GRAPH, dropout=0.0, **GPU)

    def loop():
        for _ in range(6):
            for batch in train:
                w = 1 / (1 + run.global_step)
                run.step(lambda b, w=w: w * F.cross_entropy(model(b[0]), b[1]), batch)

    with run, pytest.raises(ConfigError, match="w, which step's function reads"):
        loop()


@pytest.mark.parametrize("precision", ["O0", "O2", "O5"])
@pytest.mark.parametrize("graph", [None, GRAPH])
def test_no_step_waits_for_the_device(precision, graph):
    run, model, _, train = prepared("fused_adam", precision=precision, cuda_graph=graph, gradient_clip_val=0.5, **GPU)
    batch = run.to_device(next(iter(train)))
    with run:
        for number in range(60):
            if number == 20:  # captured, or warm
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                run.step(lambda b: F.cross_entropy(model(b[0]).float(), b[1]), batch)
            finally:
                if number == 59:
                    torch.cuda.set_sync_debug_mode("default")
