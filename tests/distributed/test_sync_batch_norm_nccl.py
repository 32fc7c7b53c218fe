"""SyncBatchNorm on two GPUs: by peer memory and by NCCL, in a CUDA graph, and with a slow or dead rank."""

from __future__ import annotations

import copy
import datetime as dt
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fabricamp.errors import DistributedError
from fabricamp.nn import SyncBatchNorm, convert_syncbn_model
from fabricamp.ops import peer_memory
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sync_batch_norm_ranks import Net, check, models_in_turn

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


def joined_nccl():
    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=dt.timedelta(seconds=120))
    return device


def equality():
    device = joined_nccl()
    for exchange in ("peer", "collective"):
        for counts in ((3, 3), (1, 4), (5, 0), (0, 7)):
            check(SyncBatchNorm(20, exchange=exchange, device=device), counts, (20,), device=device)
            check(
                SyncBatchNorm(193, exchange=exchange, fuse_relu=True, device=device),
                counts,
                (193, 3, 3),
                residual=True,
                device=device,
            )
            for rows in (False, True):
                layer = SyncBatchNorm(72, exchange=exchange, device=device)
                check(layer, counts, (72, 28, 28), dtype=torch.float16, rows=rows, device=device)
        (route,) = layer.exchanges.values()
        assert route.startswith(exchange)


def test_equals_batchnorm_over_the_joined_batch():
    run_ranks(equality, 2, backend=None, start_method="spawn")


def beside_torch():
    """Trains small networks in torch's DDP for some steps: with both exchanges, and with torch's layers."""
    device = joined_nccl()
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    origin = nn.Sequential(
        nn.Conv2d(3, 24, 3, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 64, 3, bias=False),
        nn.BatchNorm2d(64),
    ).to(device, memory_format=torch.channels_last)
    models = {
        "torch": nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(origin)),
        "ours": convert_syncbn_model(copy.deepcopy(origin)),
    }
    os.environ["FABRICAMP_SYNCBN_EXCHANGE"] = "collective"
    models["collective"] = convert_syncbn_model(copy.deepcopy(origin))
    wrapped = {name: DistributedDataParallel(model, device_ids=[device.index]) for name, model in models.items()}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.05) for name, model in models.items()}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        x = torch.randn(4 + dist.get_rank(), 3, 12, 12, generator=generator).to(device)
        for name, model in wrapped.items():
            os.environ["FABRICAMP_SYNCBN_EXCHANGE"] = "" if name == "ours" else "collective"
            optimizers[name].zero_grad()
            model(x).square().mean().add(model.module[0].weight.square().sum()).backward()
            optimizers[name].step()
    assert next(iter(models["ours"][1].exchanges.values())).startswith("peer")
    assert next(iter(models["collective"][1].exchanges.values())).startswith("collective")
    expected = models["torch"].state_dict()
    for name in ("ours", "collective"):
        for key, value in models[name].state_dict().items():
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4, msg=f"{name} {key}")


def test_trains_as_torch_does():
    run_ranks(beside_torch, 2, backend=None, start_method="spawn")


def captured():
    device = joined_nccl()
    torch.manual_seed(0)
    layers = [SyncBatchNorm(64, device=device), SyncBatchNorm(64, fuse_relu=True, device=device)]
    twins = copy.deepcopy(layers)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(4, 64, 9, 9, generator=generator).to(device).half() for _ in range(4)]
    x = batches[0].clone().requires_grad_()

    def step(pair):
        x.grad = None
        y = pair[1](pair[0](x), x)
        y.float().square().sum().backward()
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layers)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        output = step(layers)
    gradient = x.grad
    for _ in range(3):
        step(twins)
    for batch in batches[1:]:
        with torch.no_grad():
            x.copy_(batch)
        graph.replay()
        replayed = output.clone(), gradient.clone()
        expected = step(twins)
        assert torch.equal(replayed[0], expected)
        assert torch.equal(replayed[1], x.grad)
    for one, other in zip(layers, twins, strict=True):
        # A capture runs no kernel, so only batches of the warm-up and of the replays count.
        assert torch.equal(one.running_var, other.running_var)
        assert int(one.num_batches_tracked) == 6
    peer_memory.check_peers()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step(twins)
    torch.cuda.set_sync_debug_mode("default")
    unmet = SyncBatchNorm(64, device=device)
    with (
        pytest.raises(ValueError, match="run one training step before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side, capture_error_mode="thread_local"),
    ):
        unmet(x)


def test_in_a_cuda_graph():
    run_ranks(captured, 2, backend=None, start_method="spawn")


def slow_and_gone():
    device = joined_nccl()
    rank = dist.get_rank()
    group = dist.new_group(timeout=dt.timedelta(seconds=30))
    layer = SyncBatchNorm(64, process_group=group, exchange="peer", device=device)
    x = torch.randn(6, 64, device=device)
    layer(x)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(2.0)  # a slow rank, but within the group's timeout
    layer(x)
    torch.cuda.synchronize()
    peer_memory.check_peers()
    if rank == 1:
        return None
    began = time.monotonic()
    layer(x)
    torch.cuda.synchronize()
    waited = time.monotonic() - began
    with pytest.raises(DistributedError, match="rank 0 waited 30 s in a kernel .* for rank 1"):
        layer(x)
    return waited


def test_a_rank_that_is_slow_and_one_that_is_gone():
    waited, _ = run_ranks(slow_and_gone, 2, backend=None, start_method="spawn")
    assert waited > 29


def models_on_gpus():
    return models_in_turn(joined_nccl(), 200)


def test_memory_of_models_that_are_gone_is_used_again():
    found = run_ranks(models_on_gpus, 2, backend=None, start_method="spawn")
    assert found == [[peer_memory._BLOCK_WORDS]] * 2


PATIENCE = 120.0


def waits_for_its_device(bucket, side, scratch_words=2**26):
    """Waits on the host for the device, as a late rank may do during a bucket's all-reduce; ends only when the bucket is done."""
    with torch.cuda.stream(side):
        bucket[0].item()
    scratch = torch.empty(scratch_words, device=bucket.device)
    del scratch
    torch.cuda.empty_cache()


def bucket_under_way():
    """One rank is early in a large layer; the other waits for a bucket's all-reduce, which needs free blocks on the first GPU."""
    device = joined_nccl()
    late = dist.get_rank() == 1
    group = dist.new_group(timeout=dt.timedelta(seconds=PATIENCE))  # only of the layers: it ends a hang
    side = torch.cuda.Stream()
    bucket = torch.ones(2**24, device=device)
    x = torch.randn(32, 256, 56, 56, device=device, dtype=torch.float16)
    dy = torch.randn_like(x)
    steps = []
    for options in ({}, {"fuse_relu": True}):
        for rows in (True, False):
            layer = SyncBatchNorm(256, process_group=group, exchange="peer", device=device, **options)
            form = torch.channels_last if rows else torch.contiguous_format
            leaf, gradient = (one.detach().contiguous(memory_format=form) for one in (x, dy))
            leaf.requires_grad_()
            steps += [(lambda layer=layer, leaf=leaf: layer(leaf)), (lambda y, dy=gradient: y.backward(dy))]
    y, seconds = None, []
    for number, step in enumerate(
        steps
    ):  # compiles, loads and allocates first, because these might wait for a waiting kernel
        y = step(y) if number % 2 else step()
    dist.all_reduce(bucket)
    for number, step in enumerate(steps):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.monotonic()
        with torch.cuda.stream(side):
            torch.cuda._sleep(int(3e8))  # 0.2 s: the early rank is in its layer before its bucket starts
            dist.all_reduce(bucket, async_op=True).wait()  # only this stream waits for it
        if late:
            time.sleep(0.5)
            waits_for_its_device(bucket, side)
        y = step(y) if number % 2 else step()
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
        peer_memory.check_peers()
    return seconds


def test_a_collective_starts_while_a_rank_waits_for_another():
    """If all blocks of a layer waited, both ranks would hang: the early rank's GPU would have no room for the all-reduce."""
    for seconds in run_ranks(bucket_under_way, 2, backend=None, start_method="spawn", timeout=300.0):
        assert len(seconds) == 8
        assert max(seconds) < PATIENCE / 2


def compiled_on_gpus():
    device = joined_nccl()
    torch.manual_seed(0)
    eager = Net().to(device)
    twin = copy.deepcopy(eager)
    step = torch.compile(twin, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    for model in (eager, step):
        model(x).square().sum().backward()
    for one, other in zip(eager.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_compiled_without_a_break():
    run_ranks(compiled_on_gpus, 2, backend=None, start_method="spawn")
