"""SyncBatchNorm's kernels on one rank, against float64 and the reference."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.ops.batch_norm import kernels as batch_norm_geometry
from fabricamp.ops.batch_norm import kernels as batch_norm_kernels
from fabricamp.ops.batch_norm.exchange import BatchNormExchange
from fabricamp.ops.batch_norm.sync_batch_norm import sync_batch_norm_reference

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
NEAR = {FULL: 1e-5, HALF: 1e-3, BRAIN: 8e-3}


@pytest.fixture
def device(request, kernel_device, monkeypatch):
    """Returns the kernels' device, with small blocks for small tensors; in reverse order tiles have as many splits as possible."""
    if kernel_device.type == "cpu":
        monkeypatch.setattr(batch_norm_kernels, "THREADS", 64)
    if request.node.callspec.params["kernel_device"] == "reverse":
        monkeypatch.setattr(batch_norm_geometry.Geometry, "_microseconds", most_splits)
    return kernel_device


def most_splits(_, tiling, _blocks):
    """Replaces the estimate of a launch's time: the tiling with the most splits wins, and of these the widest."""
    return -tiling.splits


class Case(NamedTuple):
    """A kind of layer and input; ``rows``: channels are adjacent in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype = FULL
    rows: bool = False
    relu: bool = False
    residual: bool = False
    parameter: torch.dtype = FULL


# Several cases share a compiled kernel, because a compilation takes a second on the CPU.
CASES = [
    Case((5, 3)),  # one by one
    Case((300, 3)),  # several splits of one tile
    Case((7, 37, 3), rows=True),
    Case((2, 3, 5, 7), HALF, relu=True, residual=True),  # planes, one by one
    Case((3, 5, 1, 9), HALF, relu=True, residual=True),
    Case((6, 16, 4, 4), HALF),  # planes, eight at once
    Case((1, 1, 40, 60), HALF),  # one channel
    Case((2, 5, 32, 36), HALF),
    Case((6, 72, 4, 5), HALF, rows=True),  # a tile that is not full
    Case((9, 200, 3, 3), HALF, rows=True),
    Case((4, 40, 3, 2, 2), BRAIN, rows=True, relu=True, residual=True),
    Case((3, 20, 6), rows=True, relu=True),
    Case((33, 100), rows=True, relu=True),
    Case((2, 12, 8, 8), residual=True),
    Case((65, 6), BRAIN, rows=True, parameter=BRAIN),
]


def in_layout(x, rows):
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if rows else x.contiguous()


def tensors(case, device, offset=3.0):
    """Input, residual, incoming gradient, weight, bias."""
    generator = torch.Generator().manual_seed(len(case.shape) + case.shape[1])

    def drawn(shape, dtype):
        return torch.randn(shape, generator=generator).mul(2).add(offset).to(device, dtype)

    x, z, dy = (in_layout(drawn(case.shape, case.dtype), case.rows) for _ in range(3))
    weight, bias = (drawn(case.shape[1:2], case.parameter) for _ in range(2))
    return x, z if case.residual else None, dy - offset, weight, bias


def state(case, device):
    channels = case.shape[1]
    mean, variance = (torch.full((channels,), value, device=device, dtype=case.parameter) for value in (0.5, 2.0))
    return mean, variance, torch.zeros((), dtype=torch.int64, device=device)


def outcome(function, case, x, z, dy, weight, bias, running, **options):
    """Output, running values, and gradients of input, residual, weight, bias."""
    leaves = [None if one is None else one.clone().requires_grad_() for one in (x, z, weight, bias)]
    y = function(leaves[0], leaves[2], leaves[3], running, z=leaves[1], relu=case.relu, **options)
    y.backward(dy)
    return [y.detach(), *(running or ())[:2], *[one.grad for one in leaves if one is not None]]


def in_float64(case, x, z, dy, weight, bias, running, momentum=0.1):
    """Returns the same by torch in float64; the ReLU's mask is that of the rounded output, as in the kernels."""
    leaves = [None if one is None else one.double().clone().requires_grad_() for one in (x, z, weight, bias)]
    mean, variance = (one.double() for one in running[:2])
    y = F.batch_norm(leaves[0], mean, variance, leaves[2], leaves[3], True, momentum, 1e-5)
    if z is not None:
        y = y + leaves[1]
    if case.relu:
        y = y * (y.detach().to(case.dtype) > 0)
    y.backward(dy.double())
    return [y.detach(), mean, variance, *[one.grad for one in leaves if one is not None]]


def assert_close(found, expected, tolerance):
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        error = (one.double() - other).norm() / other.norm().clamp(min=1e-3)
        assert error <= tolerance, (index, float(error))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case.shape)) + str(case.dtype)[6:])
def test_equals_float64(device, case):
    given = tensors(case, device)
    expected = in_float64(case, *given, state(case, device))
    found = outcome(ops.sync_batch_norm, case, *given, state(case, device))
    assert found[0].stride() == given[0].stride()
    assert found[3].stride() == given[0].stride()
    assert_close(found, expected, NEAR[case.dtype])
    again = outcome(ops.sync_batch_norm, case, *given, state(case, device))
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    reference = outcome(sync_batch_norm_reference, case, *given, state(case, device))
    assert_close(reference, expected, NEAR[case.dtype])


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(3, 9), st.integers(1, 70), st.integers(1, 40), st.booleans())
def test_any_shape(device, samples, channels, inner, rows):
    """Odd numbers of adjacent channels; planes with any number of channels."""
    shape = (samples, 2 * channels + 1, inner + 1) if rows else (samples, channels, 4 * inner)
    case = Case(shape, rows=rows, residual=not rows)
    given_ = tensors(case, device)
    found = outcome(ops.sync_batch_norm, case, *given_, state(case, device))
    assert_close(found, in_float64(case, *given_, state(case, device)), 1e-4)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.integers(0, 300),
    st.integers(1, 3000),
    st.sampled_from([1, 2, 12, 49, 196, 3136]),
    st.sampled_from([FULL, HALF]),
    st.booleans(),
    st.sampled_from([(264, 512), (6, 64), (1, 512)]),
    st.booleans(),
)
def test_every_value_has_one_thread(samples, channels, inner, dtype, rows, blocks_threads, many):
    """Also checks that the memory between launches is large enough for all blocks."""
    x = in_layout(torch.empty(samples, channels, inner, dtype=dtype, device="meta"), rows)
    blocks, threads = blocks_threads
    with pytest.MonkeyPatch.context() as patch:
        if many:
            patch.setattr(batch_norm_geometry.Geometry, "_microseconds", most_splits)
        geometry = batch_norm_geometry.Geometry(x, blocks, threads, channel_last=False)
    assert geometry.positions * (geometry.vector if geometry.planes else 1) == samples * inner
    for tiling in (geometry.sums, geometry.spread):
        width = (1 if geometry.planes else geometry.vector) << tiling.column_bits
        assert width <= batch_norm_geometry.WIDEST
        assert geometry.threads == 1 << tiling.column_bits + tiling.lane_bits
        assert (tiling.tiles - 1) * width < channels <= tiling.tiles * width
        assert tiling.splits >= 1
        assert (tiling.splits - 1) * tiling.per_split < max(1, geometry.positions) <= tiling.splits * tiling.per_split
        assert tiling.splits == 1 or tiling.blocks <= blocks
        assert tiling.splits == 1 or tiling.blocks * width <= blocks * batch_norm_geometry.WIDEST


@pytest.mark.parametrize("blocks", [6, 80, 264, 296])
def test_few_blocks_wait_for_other_ranks(blocks):
    """For any number of channels, so few blocks wait that those of several layers together are fewer than run at once."""
    for channels in (1, 64, 65, 256, 1280, 2048, 5000, 100_000):
        bits = batch_norm_kernels.group_bits(channels, blocks)
        waiting = -(-channels // (1 << bits))
        assert 1 << bits >= batch_norm_geometry.WIDEST
        assert waiting <= max(1, blocks // 16)
        assert bits == 6 or -(-channels // (1 << bits - 1)) > max(1, blocks // 16)  # as many as are allowed to wait


@pytest.mark.parametrize("rows", [True, False])
def test_many_splits(device, monkeypatch, rows):
    """More splits than a thread loads at once."""
    monkeypatch.setattr(batch_norm_kernels, "_blocks", lambda _: 40)
    monkeypatch.setattr(batch_norm_geometry.Geometry, "_microseconds", most_splits)
    case = Case((300, 72, 5), HALF, rows=True) if rows else Case((39, 1, 40, 64), HALF)
    given_ = tensors(case, device)
    found = outcome(ops.sync_batch_norm, case, *given_, state(case, device))
    assert_close(found, in_float64(case, *given_, state(case, device)), NEAR[HALF])


@pytest.mark.parametrize("rows", [True, False])
def test_nothing_cancels_far_from_zero(device, rows):
    """A mean of 4000 standard deviations; a channel with an outlier as its first value; a channel without variance."""
    x = torch.randn(40, 36, 4, device=device) + 4000
    x[0, 1, 0] = -3e4
    x[:, 2] = 7.0
    case = Case(tuple(x.shape), rows=rows, relu=rows, residual=not rows)
    _, z, dy, weight, bias = tensors(case, device)
    x = in_layout(x, rows)
    expected = in_float64(case, x, z, dy, weight, bias, state(case, device))
    found = outcome(ops.sync_batch_norm, case, x, z, dy, weight, bias, state(case, device))
    torch.testing.assert_close(found[2].double(), expected[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-3, atol=2e-3)  # x itself has seven digits


def test_bad_values_stay_in_their_channel(device):
    case = Case((6, 16, 4, 4), HALF)
    x, _, dy, weight, bias = tensors(case, device)
    x[1, 3, 2, 2] = float("nan")
    x[2, 5, 0, 0] = float("inf")
    found = outcome(ops.sync_batch_norm, case, x, None, dy, weight, bias, state(case, device))
    good = [index for index in range(16) if index not in (3, 5)]
    assert found[0][:, [3, 5]].isnan().all()
    assert found[0][:, good].isfinite().all()
    assert found[3][:, good].isfinite().all()


def test_a_nan_passes_the_relu(device):
    x = torch.randn(3, 20, 6, device=device)
    x[0, 4, 1] = float("nan")
    y = ops.sync_batch_norm(in_layout(x, rows=True), relu=True)
    assert y[:, 4].isnan().all()
    assert y[:, 5].isfinite().all()


@pytest.mark.parametrize("change", ["strided", "misaligned", "expanded gradient", "other layouts"])
def test_what_the_kernels_cannot_read_is_copied(device, change):
    case = Case((6, 16, 4, 4), HALF)
    x, _, dy, weight, bias = tensors(case, device)
    expected = outcome(ops.sync_batch_norm, case, x, None, dy, weight, bias, state(case, device))
    if change == "strided":
        x = torch.stack([x, x], -1)[..., 0]
    elif change == "misaligned":
        x, dy = (torch.cat([one.new_zeros(1), one.flatten()])[1:].view(one.shape) for one in (x, dy))
        assert x.data_ptr() % 16
    elif change == "expanded gradient":
        dy = dy[:1, :1, :1, :1].expand(case.shape)
        expected = outcome(ops.sync_batch_norm, case, x, None, dy.contiguous(), weight, bias, state(case, device))
    else:
        dy = in_layout(dy, rows=True)
    leaf = x.detach().requires_grad_()
    y = ops.sync_batch_norm(leaf, weight, bias, state(case, device))
    y.backward(dy)
    assert torch.equal(y, expected[0])
    assert torch.equal(leaf.grad, expected[3])


def test_channels_may_lie_last(device):
    case = Case((3, 20, 6), rows=True, relu=True)
    x, _, dy, weight, bias = tensors(case, device)
    expected = outcome(ops.sync_batch_norm, case, x, None, dy, weight, bias, state(case, device))
    found = outcome(
        ops.sync_batch_norm,
        case,
        x.movedim(1, -1),
        None,
        dy.movedim(1, -1),
        weight,
        bias,
        state(case, device),
        channel_last=True,
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.movedim(-1, 1) if one.dim() == 3 else one, other)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("function", [ops.sync_batch_norm, sync_batch_norm_reference])
def test_only_what_is_needed(device, function, affine):
    """Without parameters, running values or the input's gradient; a gradient is the same whichever others are requested."""
    case = Case((2, 12, 8, 8), residual=True)
    x, z, dy, weight, bias = tensors(case, device)
    given = {"weight": weight, "bias": bias} if affine else {}
    leaves = {"x": x, "z": z, **given}
    alone = {}
    for name in leaves:
        own = {key: one.clone().requires_grad_(key == name) for key, one in leaves.items()}
        function(**own).backward(dy)
        alone[name] = own[name].grad
        assert all(one.grad is None for key, one in own.items() if key != name)
    together = {key: one.clone().requires_grad_() for key, one in leaves.items()}
    function(**together).backward(dy)
    for name, one in together.items():
        assert torch.equal(one.grad, alone[name])


def test_gradient_of_the_residual_alone_passes_the_relu(device):
    case = Case((4, 40, 3, 2, 2), BRAIN, rows=True, relu=True, residual=True)
    x, z, dy, weight, bias = tensors(case, device, offset=0.0)
    z.requires_grad_()
    y = ops.sync_batch_norm(x, weight, bias, z=z, relu=True)
    y.backward(dy)
    assert torch.equal(z.grad, dy.masked_fill(y <= 0, 0))


@pytest.mark.parametrize("momentum", [None, 0.0, 0.1, 1.0])
def test_running_values_as_torch_moves_them(device, momentum):
    case = Case((5, 3))
    running = state(case, device)
    theirs = torch.nn.BatchNorm1d(3, momentum=momentum, device=device)
    theirs.running_mean.fill_(0.5)
    theirs.running_var.fill_(2.0)
    for step in range(3):
        x = torch.randn(5, 3, device=device) + step
        ops.sync_batch_norm(x, running=running, momentum=momentum)
        theirs(x)
    torch.testing.assert_close(running[0], theirs.running_mean)
    torch.testing.assert_close(running[1], theirs.running_var)
    assert running[2].item() == 3


def test_float64_and_mixed_kinds_take_the_reference():
    """On any device; the arithmetic has the input's dtype."""
    x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: ops.sync_batch_norm(*given, relu=True), (x, weight))
    assert not batch_norm_kernels.serves(x)
    assert not batch_norm_kernels.serves(x.float(), weight.half(), weight.float())


def test_many_shapes_do_not_fill_the_memory(device):
    exchange = BatchNormExchange(3)
    for rows in range(2, 100):
        ops.sync_batch_norm(torch.randn(rows, 3, device=device), exchange=exchange)
    assert len(exchange.plans) <= 64
    assert len(exchange.memories) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": torch.zeros(3)}, "1 dimensions"),
        ({"x": torch.zeros(2, 4)}, "has 3 channels, but the input (2, 4) has 4"),
        ({"x": torch.zeros(2, 3, dtype=torch.int64)}, "floating-point"),
        ({"x": torch.zeros(2, 3), "z": torch.zeros(2, 3, 1)}, "residual z"),
        ({"x": torch.zeros(2, 3), "z": torch.zeros(2, 3).half()}, "residual z"),
        ({"x": torch.zeros(1, 3)}, "one value per channel"),
    ],
)
def test_what_cannot_work_is_refused(given, words):
    with pytest.raises(ConfigError) as error:
        ops.sync_batch_norm(**given, exchange=BatchNormExchange(3))
    assert words in str(error.value)


def test_second_derivatives_are_refused_by_name():
    x = torch.randn(4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(ops.sync_batch_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="SyncBatchNorm has no second derivative"):
        gradient.sum().backward()


@pytest.mark.gpu
@pytest.mark.gpu_memory(gib=20)  # three tensors of 4.3 GiB, and the comparison of a sample of 1 GiB
def test_large_and_long_on_a_gpu():
    """More than 2**31 values; many rows with a number of channels that vector loads do not divide."""
    for shape, rows in (((9, 64, 2000, 2000), True), ((40, 193, 300, 301), False)):
        x = torch.empty(shape, dtype=HALF, device="cuda")
        if rows:
            x = torch.empty((shape[0], *shape[2:], shape[1]), dtype=HALF, device="cuda").movedim(-1, 1)
        x.normal_(2.0, 3.0)
        running = torch.zeros(shape[1], device="cuda"), torch.ones(shape[1], device="cuda"), None
        y = ops.sync_batch_norm(x, running=running, momentum=1.0)
        for sample in (0, shape[0] - 1):
            expected = (x[sample].float() - running[0].view(-1, 1, 1)) / (running[1].view(-1, 1, 1) + 1e-5).sqrt()
            torch.testing.assert_close(y[sample].float(), expected, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(running[0], torch.full_like(running[0], 2.0), rtol=0, atol=0.01)
        torch.testing.assert_close(running[1], torch.full_like(running[1], 9.0), rtol=0.01, atol=0)


@pytest.mark.gpu
def test_nothing_waits_and_a_graph_replays():
    layer = (
        torch.zeros(64, device="cuda"),
        torch.ones(64, device="cuda"),
        torch.zeros((), dtype=torch.int64, device="cuda"),
    )
    exchange = BatchNormExchange(64)
    x = torch.randn(8, 64, 14, 14, device="cuda").half().to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.rand(64, device="cuda", requires_grad=True)

    def step():
        x.grad = weight.grad = None
        y = ops.sync_batch_norm(x, weight, None, layer, relu=True, momentum=None, exchange=exchange)
        y.float().square().sum().backward()
        return y

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        captured = step()
    gradient = x.grad
    before = int(layer[2])
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [captured.clone(), gradient.clone()]
    assert int(layer[2]) == before + 1
    expected = step()
    assert torch.equal(replayed[0], expected)
    assert torch.equal(replayed[1], x.grad)
