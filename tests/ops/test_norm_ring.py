"""The gradients of LayerNorm and RMSNorm over wide rows, by the kernel with a ring in shared memory, against float64."""

from __future__ import annotations

import pytest
import torch

from fabricamp.ops import dispatch
from fabricamp.ops.norm import kernels as norm_kernels
from fabricamp.ops.norm import plans as norm_plans
from tests.cuda_on_cpu.compiler import one_order
from tests.ops.norm_checks import B, H, S, check, laid_out, norm_of, operands

SIZES = (1, 2, 4, 8)  # of the clusters of compute capability 9.0
SHARED_MEMORY = 228 * 1024  # of a multiprocessor there


@pytest.fixture
def large(monkeypatch):
    """Makes the plans those of a large GPU."""
    monkeypatch.setattr(norm_plans, "cluster_sizes", lambda device: SIZES)
    monkeypatch.setattr(norm_plans, "_shared_memory", lambda device: SHARED_MEMORY)


@pytest.fixture
def device(kernel_device, monkeypatch):
    """Returns the kernels' device; narrow rows use the ring too, and each cluster processes several rows."""
    if kernel_device.type == "cuda" and len(norm_plans.cluster_sizes(kernel_device)) == 1:
        pytest.skip("this GPU has no thread-block clusters")
    with laid_out(monkeypatch, SIZES, _RING_FROM={2: 0, 4: 0}):
        yield kernel_device


def through_the_ring(monkeypatch, norm, cluster):
    """Makes ``cluster`` blocks share each row; returns the number of clusters and the number of rows in flight in each."""
    monkeypatch.setattr(norm_plans, "_RING_SLICE", norm.width // cluster)
    found, launch = norm_plans.backward(norm, aligned=True, sums=True), norm_kernels._backward(norm, True, True)
    assert isinstance(found, norm_plans.Ring)
    assert found.layout.cluster == launch.cluster == cluster
    return launch.parts, found.stages


@pytest.mark.parametrize(
    ("kind", "cluster", "slice_width", "dtypes", "rows"),
    [
        ("layer", 2, 520, (B, S), 21),  # in the last load some threads have nothing to load
        ("rms", 8, 128, (S, S), 9),
        ("layer", 1, 1056, (H, H), 23),
    ],
)
def test_many_rows(device, monkeypatch, kind, cluster, slice_width, dtypes, rows):
    parts, stages = through_the_ring(monkeypatch, norm_of(kind, cluster * slice_width, dtypes, device), cluster)
    assert rows > parts * stages
    assert rows % parts or parts == 1
    check(kind, *operands(device, rows, cluster * slice_width, dtypes))


@one_order
@pytest.mark.parametrize("rows", [1, 3, 10])
def test_fewer_rows_than_clusters_and_than_stages(device, monkeypatch, rows):
    width = 2 * 520
    parts, stages = through_the_ring(monkeypatch, norm_of("layer", width, (B, S), device), 2)
    assert 3 < parts < 10 < parts * stages
    check("layer", *operands(device, rows, width, (B, S)))


@pytest.mark.parametrize(
    ("kind", "cluster", "slice_width", "dtypes"), [("layer", 4, 136, (S, S)), ("rms", 1, 1024, (B, B))]
)
def test_memory_efficient(device, monkeypatch, kind, cluster, slice_width, dtypes):
    norm = norm_of(kind, cluster * slice_width, dtypes, device)._replace(efficient=True)
    through_the_ring(monkeypatch, norm, cluster)
    check(kind, *operands(device, 9, norm.width, dtypes), memory_efficient=True, factor=4)


@one_order
@pytest.mark.parametrize("efficient", [False, True])
@pytest.mark.parametrize("dtypes", [(H, S, S), (S, B, B)])
def test_input_parameters_and_output_may_differ_in_dtype(device, monkeypatch, dtypes, efficient):
    norm = norm_of("layer", 2 * 264, dtypes, device)._replace(output=dtypes[2], efficient=efficient)
    through_the_ring(monkeypatch, norm, 2)
    check(
        "layer",
        *operands(device, 9, norm.width, dtypes),
        dtype=dtypes[2],
        memory_efficient=efficient,
        factor=4 if efficient else 1,
    )


@one_order
@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True)])
@pytest.mark.parametrize("efficient", [False, True])
def test_a_weight_or_a_bias_alone(device, monkeypatch, weight, bias, efficient):
    norm = norm_of("layer", 2 * 264, (S, S), device)._replace(weight=weight, bias=bias, efficient=efficient)
    through_the_ring(monkeypatch, norm, 2)
    x, *parameters = operands(device, 9, norm.width, (S, S))
    parameters = [one if wanted else None for one, wanted in zip(parameters, (weight, bias), strict=True)]
    check("layer", x, *parameters, memory_efficient=efficient, factor=4 if efficient else 1)


@one_order
def test_rows_between_the_multiples_of_16_bytes_go_another_way(device, monkeypatch):
    norm = norm_of("layer", 528, (S, S), device)
    through_the_ring(monkeypatch, norm, 1)
    x, weight, bias = operands(device, 5, norm.width, (S, S))
    apart = torch.empty(x.numel() + 1, device=device)[1:].view_as(x).copy_(x.detach()).requires_grad_()
    assert not isinstance(norm_plans.backward(norm, aligned=False, sums=True), norm_plans.Ring)
    check("layer", apart, weight, bias)


@pytest.mark.parametrize(
    ("dtype", "width", "expected"),
    [  # blocks of a row, threads of a block, stages, blocks of a multiprocessor
        (B, 4096, (2, 128, 4, 4)),
        (H, 5120, (4, 96, 4, 5)),
        (B, 8192, (4, 128, 4, 4)),
        (B, 16384, (8, 128, 4, 4)),
        (B, 32768, (8, 256, 4, 2)),
        (B, 65536, (8, 512, 4, 1)),
        (S, 8192, (4, 128, 3, 4)),
        (S, 65536, (8, 512, 3, 1)),
        (B, 4104, (1, 288, 4, 1)),  # 513 * 16 bytes cannot be divided among blocks
        (B, 4088, None),
        (S, 4096, None),
        (B, 4100, None),  # rows of 8200 bytes
        (B, 8 * 1537 * 8, None),  # 8 blocks have too few threads
        (B, 12296, None),  # one block has too few threads
    ],
)
def test_the_layout_on_a_large_gpu(large, dtype, width, expected):
    norm = norm_of("layer", width, (dtype, dtype), torch.device("cpu"))
    found = norm_plans.ring(norm)
    assert (found and (found.layout.cluster, found.layout.threads, found.stages, found.blocks)) == expected
    if found:
        assert found.shared == found.stages * width // found.layout.cluster * 2 * dtype.itemsize
        assert found.layout.elements >= width // found.layout.cluster


def test_no_ring_without_clusters_or_memory_or_sums(large, monkeypatch):
    norm = norm_of("layer", 65536, (S, S), torch.device("cpu"))
    assert norm_plans.ring(norm) is not None
    assert not isinstance(norm_plans.backward(norm, aligned=True, sums=False), norm_plans.Ring)
    assert not isinstance(norm_plans.backward(norm, aligned=False, sums=True), norm_plans.Ring)
    monkeypatch.setattr(norm_plans, "_shared_memory", lambda device: 100 * 1024)  # compute capability 12.0
    assert norm_plans.ring(norm) is None
    assert norm_plans.ring(norm._replace(width=32768)).blocks == 1
    monkeypatch.setattr(norm_plans, "cluster_sizes", lambda device: (1,))
    assert norm_plans.ring(norm._replace(width=8192)) is None


def test_no_more_clusters_than_blocks_were_planned(large, monkeypatch):
    norm = norm_of("layer", 12288, (B, B), torch.device("cpu"))
    monkeypatch.setattr(norm_kernels, "kernel", lambda *_: None)
    monkeypatch.setattr(norm_plans, "processors", lambda device: 132)
    parts = {}
    for resident in (40, 100, None):
        monkeypatch.setattr(norm_plans, "resident_clusters", lambda *_, resident=resident: resident)
        norm_kernels.forget()
        parts[resident] = norm_kernels._backward(norm, True, True).parts
    norm_kernels.forget()
    assert parts == {40: 40, 100: 132 * 5 // 8, None: 132 * 5 // 8}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(
    ("width", "dtype"), [(4096, B), (5120, H), (12288, B), (16384, S), (32768, H), (65536, B), (65536, S)]
)
def test_as_a_gpu_lays_it_out(kind, width, dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    norm = norm_of(kind, width, (dtype, dtype), device)._replace(bias=kind == "layer")
    if norm_plans.ring(norm) is None:
        pytest.skip("this GPU has no ring for such rows")
    with dispatch.always("cupy"):
        check(kind, *operands(device, 2**22 // width * 5 + 3, width, (dtype, dtype)))
