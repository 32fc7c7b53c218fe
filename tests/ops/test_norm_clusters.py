"""LayerNorm and RMSNorm where a cluster of thread blocks shares a row, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fabricamp.ops import layer_norm
from fabricamp.ops.norm import kernels as norm_kernels
from fabricamp.ops.norm import plans as norm_plans
from tests.cuda_on_cpu.compiler import one_order
from tests.ops.norm_checks import B, H, S, check, laid_out, near, norm_of, operands


@pytest.fixture
def cluster(request):
    """The number of blocks that share a row."""
    return getattr(request, "param", 2)


@pytest.fixture
def device(kernel_device, cluster, monkeypatch):
    """Returns the kernels' device; narrow rows use clusters too, and each cluster processes several rows."""
    if kernel_device.type == "cuda" and cluster not in norm_plans.cluster_sizes(kernel_device):
        pytest.skip("this GPU has no thread-block clusters")
    with laid_out(monkeypatch, (cluster,), _SHARED_FROM={2: 0, 4: 0}):
        yield kernel_device


def only(monkeypatch, sums, ahead):
    """Allows only one way to keep column sums in a block."""
    laid_out = norm_plans._residents

    def chosen(norm, layout, how, **more):
        found = laid_out(norm, layout, how, **more)
        return found if not how or (found.sums, found.ahead) == (sums, ahead) else found._replace(blocks=0, bytes=0)

    monkeypatch.setattr(norm_plans, "_residents", chosen)
    monkeypatch.setattr(norm_plans, "_SHARED_VECTOR", 1)
    monkeypatch.setattr(norm_plans, "_SHARED_LANES", (32, 512))
    monkeypatch.setattr(norm_plans, "_SHARED_ELEMENTS", 16)


@pytest.mark.parametrize(
    ("cluster", "kind", "slice_width", "dtypes", "sums", "ahead"),
    [
        (2, "layer", 520, (B, S), 1, True),  # in the last load some threads have nothing to load
        (8, "rms", 128, (S, S), 1, True),
        (4, "layer", 104, (H, H), 2, True),  # fewer loads than a warp has threads
        (2, "rms", 264, (B, B), 2, False),
    ],
    indirect=["cluster"],
)
def test_a_row_over_blocks(device, cluster, monkeypatch, kind, slice_width, dtypes, sums, ahead):
    only(monkeypatch, sums, ahead)
    norm = norm_of(kind, cluster * slice_width, dtypes, device)
    forward, backward = norm_kernels._forward(norm, True), norm_kernels._backward(norm, True, True)
    assert forward.cluster == backward.cluster == cluster
    assert 20 > backward.parts > 0  # some parts process several rows
    check(kind, *operands(device, 20, norm.width, dtypes))


@one_order
def test_the_gradient_of_the_input_alone(device, cluster):
    check("layer", *operands(device, 3, cluster * 264, (B, B), affine=False))


@one_order
def test_memory_efficient(device, cluster):
    check("layer", *operands(device, 5, cluster * 132, (S, S)), memory_efficient=True, factor=4)


@pytest.mark.parametrize("cluster", [8], indirect=True)
def test_slices_whose_means_differ(device, cluster):
    width = cluster * 264
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(1)) + torch.arange(float(width)) / 50
    near(layer_norm(x.to(device), width), F.layer_norm(x.double(), (width,)).to(device), S)


@pytest.mark.parametrize(
    ("dtype", "width", "expected"),
    [
        (B, 8192, (1, 4)),
        (B, 16384, (1, 8)),
        (B, 65536, (4, 8)),
        (S, 65536, (8, 8)),
        (B, 16392, (None, None)),
        (B, 40000, (4, 8)),
    ],
)
def test_how_many_blocks_share_a_row(monkeypatch, dtype, width, expected):
    monkeypatch.setattr(norm_plans, "cluster_sizes", lambda device: (1, 2, 4, 8))
    norm = norm_of("layer", width, (dtype, dtype), torch.device("cpu"))
    vector = 16 // dtype.itemsize
    found = norm_plans.forward_layout(norm, vector)
    sums = norm_plans.with_sums(norm, vector)
    assert (found and found[0].cluster, sums and sums.layout.cluster) == expected
