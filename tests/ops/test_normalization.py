"""LayerNorm and RMSNorm by their kernels, against float64; under autograd, compilation, export and autocast."""

from __future__ import annotations

import functools
import gc
import math

import pytest
import torch
import torch.nn.functional as F

from fabricamp.errors import ConfigError
from fabricamp.ops import dispatch, layer_norm, rms_norm
from fabricamp.ops.norm import autograd as norm_autograd
from fabricamp.ops.norm import autograd as norm_references
from fabricamp.ops.norm import kernels as norm_kernels
from fabricamp.ops.norm import normalization
from fabricamp.ops.norm import plans as norm_plans
from tests.cuda_on_cpu.compiler import one_order, references
from tests.ops.norm_checks import NORMS, TOLERANCE, B, D, H, S, check, exact, near, norm_of, operands

"""For tests of code around the kernels: the order of threads matters only for barriers."""


@pytest.fixture
def device(kernel_device):
    """Returns the kernels' device; kernels run whatever the tables say."""
    norm_kernels.forget()
    with dispatch.always("cupy"):
        yield kernel_device
    norm_kernels.forget()


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("rows", "width", "dtypes"),
    [(37, 24, (S, S)), (37, 77, (H, H)), (7, 1032, (B, S))],
)
def test_against_float64(device, kind, rows, width, dtypes):
    check(kind, *operands(device, rows, width, dtypes))


@one_order
@pytest.mark.parametrize("dtypes", [(H, S, H), (S, H, H), (B, S, S)])
def test_input_parameters_and_output_may_differ_in_dtype(device, dtypes):
    made, gradients = check("layer", *operands(device, 6, 24, dtypes), dtype=dtypes[2])
    assert made.dtype == dtypes[2]
    assert [one.dtype for one in gradients] == [dtypes[0], dtypes[1], dtypes[1]]


@one_order
@pytest.mark.parametrize(("affine", "bias"), [(False, False), (True, False)])
@pytest.mark.parametrize("kind", NORMS)
def test_without_parameters(device, kind, affine, bias):
    check(kind, *operands(device, 6, 24, (S, S), affine=affine, bias=bias))


@one_order
def test_a_bias_without_a_weight(device):
    x, _, bias = operands(device, 6, 24, (S, S))
    check("layer", x, None, bias)


@one_order
@pytest.mark.parametrize(("affine", "dtypes"), [(True, (S, S)), (False, (B, B))])
@pytest.mark.parametrize("kind", NORMS)
def test_memory_efficient_keeps_the_output(device, kind, affine, dtypes):
    x, weight, bias = operands(device, 6, 24, dtypes, affine=affine)
    made, _ = check(kind, x, weight, bias, memory_efficient=True, factor=4)
    result = NORMS[kind](x, 24, weight, memory_efficient=True)
    assert result.grad_fn.saved_tensors[0].data_ptr() != x.data_ptr()
    assert made.dtype == x.dtype


@one_order
def test_memory_efficient_stays_finite_where_a_weight_is_zero(device):
    x, weight, bias = operands(device, 4, 24, (S, S))
    with torch.no_grad():
        weight[3] = 0.0
    made = layer_norm(x, 24, weight, bias, memory_efficient=True)
    assert all(torch.isfinite(one).all() for one in torch.autograd.grad(made.sum(), [x, weight, bias]))


def test_rows_beyond_registers(device, monkeypatch):
    """Tests the kernels for wide rows and the separate column sums: few threads per row make narrow rows count as wide."""
    monkeypatch.setattr(norm_plans, "_MOST_LANES", 64)
    monkeypatch.setattr(norm_plans, "_FORWARD_LANES", 32)
    monkeypatch.setattr(norm_plans, "with_sums", lambda norm, vector: None)
    monkeypatch.setattr(norm_plans, "without_sums", lambda norm, vector: None)
    monkeypatch.setattr(norm_plans, "processors", lambda device: 6)  # several parts of the rows
    check("layer", *operands(device, 20, 2056, (B, B)))
    check("rms", *operands(device, 3, 301, (S, S), affine=False))


@pytest.mark.parametrize(
    ("kind", "rows", "width", "dtypes", "ahead"),
    [
        ("layer", 40, 520, (B, S), True),  # in the last load some threads have nothing to load
        ("rms", 40, 512, (S, S), False),
        ("layer", 40, 514, (H, H), False),
    ],
)
def test_sums_in_shared_memory(device, monkeypatch, kind, rows, width, dtypes, ahead):
    laid_out = norm_plans._residents

    def in_shared_memory(norm, layout, sums, **how):
        found = laid_out(norm, layout, sums, **how)
        return found if found.sums == 2 and found.ahead is ahead else found._replace(blocks=0, bytes=0)

    monkeypatch.setattr(norm_plans, "_residents", in_shared_memory)
    monkeypatch.setattr(norm_plans, "processors", lambda device: 1)  # so that a block has several rows
    monkeypatch.setattr(norm_plans, "_SHARED_VECTOR", 1)
    monkeypatch.setattr(norm_plans, "_SHARED_LANES", (32, 512))
    monkeypatch.setattr(norm_plans, "_SHARED_ELEMENTS", 16)
    found = norm_plans.with_sums(norm_of(kind, width, dtypes, device), math.gcd(width, 16 // dtypes[0].itemsize))
    assert found.blocks < rows
    assert found.shared == 4 * found.layout.lanes * found.layout.items * found.layout.vector * (1 + (kind == "layer"))
    check(kind, *operands(device, rows, width, dtypes))


def test_sums_of_many_blocks(device, monkeypatch):
    monkeypatch.setattr(norm_plans, "processors", lambda device: 40)
    check("layer", *operands(device, 77, 1001, (S, S)))


@one_order
def test_rows_of_one_element(device):
    x = torch.tensor([[3.0], [-2.0]], device=device)
    assert layer_norm(x, 1).tolist() == [[0.0], [0.0]]
    torch.testing.assert_close(rms_norm(x, 1, eps=0.0).cpu(), torch.tensor([[1.0], [-1.0]]))
    torch.testing.assert_close(rms_norm(x, 1, eps=1).cpu(), torch.tensor([[3 / 10**0.5], [-2 / 5**0.5]]))


@one_order
def test_a_mean_far_from_zero_costs_no_digits(device):
    x = (torch.randn(5, 24, generator=torch.Generator().manual_seed(1)) + 3e4).to(device)
    torch.testing.assert_close(
        layer_norm(x, 24).double(), F.layer_norm(x.double(), (24,)), rtol=0, atol=2e-2
    )  # fp32 resolves 2e-3 there


@one_order
def test_gradients_of_a_mean_far_from_zero(device):
    x = (torch.randn(5, 24, generator=torch.Generator().manual_seed(1)) + 100).to(device).requires_grad_()
    upstream = torch.arange(24.0).expand(5, 24).to(device)
    (gradient,) = torch.autograd.grad(layer_norm(x, 24), x, upstream)
    near(gradient, exact("layer", x, None, None, 1e-5, upstream)[1][0], S, factor=50)  # fp32 resolves 8e-6 there


@one_order
@pytest.mark.parametrize("threads", [256, 32])
def test_warps_of_a_row_whose_means_differ(device, monkeypatch, threads):
    monkeypatch.setattr(norm_plans, "_FORWARD_LANES", threads)  # with 32 the row is too wide for registers
    monkeypatch.setattr(norm_plans, "_MOST_LANES", 64)
    x = torch.randn(3, 1100, generator=torch.Generator().manual_seed(1)) + torch.arange(1100.0) / 50
    near(layer_norm(x.to(device), 1100), F.layer_norm(x.double(), (1100,)).to(device), S)


@one_order
def test_any_strides_offsets_and_shapes(device):
    x, weight, bias = operands(device, 6, 24, (S, S))
    base = torch.randn(6, 26, generator=torch.Generator().manual_seed(2)).to(device)
    for view in (base[:, 1:25], base[:, :24], base[::2, 2:], base.t()[1:25].t()):
        mine = layer_norm(view, 24, weight, bias)
        assert mine.is_contiguous()
        near(mine, F.layer_norm(view.double(), (24,), weight.double(), bias.double()), S)
    misaligned = base.flatten()[1:49].view(2, 24)
    torch.testing.assert_close(
        layer_norm(misaligned, 24, weight, bias), layer_norm(misaligned.clone(), 24, weight, bias)
    )
    cube = x.detach().view(2, 3, 6, 4)
    many = layer_norm(cube, (6, 4), weight.view(6, 4), bias.view(6, 4))
    assert torch.equal(many.view(6, 24), layer_norm(x, 24, weight, bias))
    assert layer_norm(torch.empty(0, 24, device=device), 24, weight, bias).shape == (0, 24)


@one_order
def test_gradients_of_other_strides(device):
    x, weight, bias = operands(device, 6, 24, (S, S))
    upstream = torch.randn(24, 6, generator=torch.Generator().manual_seed(3)).to(device).t()
    made = layer_norm(x, 24, weight, bias)
    got = torch.autograd.grad(made, [x, weight, bias], upstream)
    for one, other in zip(got, exact("layer", x, weight, bias, 1e-5, upstream)[1], strict=True):
        near(one, other, S)


@one_order
def test_what_is_frozen_gets_no_gradient(device):
    x, weight, bias = operands(device, 6, 24, (S, S))
    made = layer_norm(x, 24, weight.detach(), bias.detach())
    upstream = torch.ones_like(made)
    (only,) = torch.autograd.grad(made, [x], upstream)
    near(only, exact("layer", x, weight, bias, 1e-5, upstream)[1][0], S, factor=50)
    layer_norm(x.detach(), 24, weight, bias.detach()).sum().backward()
    assert bias.grad is None
    assert weight.grad is not None


@one_order
@pytest.mark.parametrize("kind", NORMS)
def test_second_derivatives(device, kind):
    x, weight, bias = operands(device, 4, 24, (S, S))
    wide = [one.detach().double().requires_grad_() for one in (x, weight, bias)]

    def second(norm, x, weight, bias):
        parameters = (weight, bias) if kind == "layer" else (weight,)
        first = torch.autograd.grad(norm(x, 24, *parameters, eps=1e-5).sin().sum(), [x, weight], create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), [x, weight])

    for one, other in zip(second(NORMS[kind], x, weight, bias), second(NORMS[kind], *wide), strict=True):
        near(one, other, S, factor=20)


@one_order
def test_a_second_derivative_needs_the_input(device):
    x, weight, bias = operands(device, 4, 24, (S, S))
    made = layer_norm(x, 24, weight, bias, memory_efficient=True)
    with pytest.raises(ConfigError, match="memory_efficient=False"):
        torch.autograd.grad(made.sum(), x, create_graph=True)


@one_order
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_compiled_whole(device, kind, memory_efficient, monkeypatch):
    launches = []
    for way in ("forward", "backward"):
        spied = getattr(norm_kernels.Kernels, way)
        monkeypatch.setattr(
            norm_kernels.Kernels, way, lambda *a, _spied=spied, **k: (launches.append(1), _spied(*a, **k))[1]
        )
    x, weight, bias = operands(device, 4, 24, (S, S))
    parameters = (weight, bias) if kind == "layer" else (weight,)

    def run(x, *parameters):
        return NORMS[kind](x * 1, 24, *parameters, eps=1e-5, memory_efficient=memory_efficient) * 2

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    mine, expected = compiled(x, *parameters), run(x, *parameters)
    assert torch.equal(mine, expected)
    for one, other in zip(
        *(torch.autograd.grad(made.sin().sum(), [x, *parameters]) for made in (mine, expected)), strict=True
    ):
        assert torch.equal(one, other)
    assert len(launches) == 4  # forward and backward, eager and compiled


@one_order
def test_compiled_for_any_number_of_rows(device):
    compiled = torch.compile(lambda x: layer_norm(x, 24) + 1, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 5):
        x = torch.randn(rows, 24, device=device)
        assert torch.equal(compiled(x), layer_norm(x, 24) + 1)


@one_order
@pytest.mark.parametrize("efficient", [False, True])
def test_the_operators_are_what_they_say(device, efficient):
    x, weight, bias = operands(device, 4, 24, (S, S))
    torch.library.opcheck(norm_autograd._forward_op, (x, weight, bias, 24, 1e-5, S, True, efficient))
    torch.library.opcheck(norm_autograd._forward_op, (x.detach(), None, None, 24, 1e-5, H, False, efficient))


@one_order
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # the shapes of a trace are constants
def test_an_exported_program_needs_nothing_of_ours(device):
    class Model(torch.nn.Module):
        def forward(self, x):
            return layer_norm(x, 24)

    x = torch.randn(3, 24, device=device)
    program = torch.export.export(Model(), (x,))
    assert "fabricamp" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), layer_norm(x, 24))
    traced = torch.jit.trace(Model(), x)
    torch.testing.assert_close(traced(x + 1), layer_norm(x + 1, 24))


@one_order
def test_what_stands_for_a_tensor_is_torchs(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        made = layer_norm(torch.empty(3, 24, device=device), 24, dtype=H)
    assert (made.shape, made.dtype) == ((3, 24), H)
    x, weight, bias = operands(device, 4, 24, (S, S))
    each = torch.func.vmap(lambda row: layer_norm(row, 24, weight, bias))(x)
    torch.testing.assert_close(each, layer_norm(x, 24, weight, bias))
    of_input = torch.func.grad(lambda x: rms_norm(x, 24, weight, 1e-5).sum())(x.detach())
    torch.testing.assert_close(of_input, torch.autograd.grad(rms_norm(x, 24, weight, 1e-5).sum(), x)[0])


@one_order
def test_autocast_decides_the_output(device):
    x, weight, bias = operands(device, 4, 24, (S, S))
    with torch.autocast(device.type, B):
        made = layer_norm(x, 24, weight, bias)
        with references(device):
            other = layer_norm(x, 24, weight, bias)
    assert made.dtype == other.dtype == B
    near(made, exact("layer", x, weight, bias, 1e-5, made)[0], B)
    near(other, exact("layer", x, weight, bias, 1e-5, made)[0], B)
    assert all(one.dtype == S for one in torch.autograd.grad(made.sum(), [x, weight, bias]))


@one_order
def test_nothing_is_kept_without_gradients(device):
    x, weight, bias = operands(device, 4, 24, (S, S))

    def alive():
        gc.collect()
        return {id(one) for one in gc.get_objects() if issubclass(type(one), torch.Tensor)}

    with torch.no_grad():
        assert layer_norm(x, 24, weight, bias).grad_fn is None
        before = alive()
        for _ in range(5):
            rms_norm(layer_norm(x, 24, weight, bias), 24, weight)
        assert alive() <= before
    made = layer_norm(x, 24, weight, bias)
    made.sum().backward()
    del made
    assert alive() <= before


@one_order
def test_calls_of_a_kind_are_laid_out_once_and_ask_no_registry(device, monkeypatch):
    x, weight, bias = operands(device, 4, 24, (S, S))

    def step():
        return torch.autograd.grad(layer_norm(x, 24, weight, bias).sum(), [x, weight, bias])

    expected = step()

    def refuse(*_, **__):
        raise AssertionError("asked again")

    for module, name in ((normalization, "_norm"), (norm_kernels, "kernel"), (norm_autograd, "_forward_op")):
        monkeypatch.setattr(module, name, refuse)
    assert all(torch.equal(one, other) for one, other in zip(step(), expected, strict=True))
    with pytest.raises(AssertionError, match="asked again"):
        layer_norm(x[:, :12], 12)


@one_order
def test_a_choice_that_changes_is_followed(device):
    x = torch.randn(3, 24, device=device, requires_grad=True)

    def runs():
        return "kernel" if type(layer_norm(x, 24).grad_fn).__name__ == "_NormaliseBackward" else "torch"

    found = [runs()]
    with dispatch.always("torch"):
        found.append(runs())
        dispatch.forget()
    found.append(runs())
    with references(device):
        found.append(runs())
    assert [*found, runs()] == ["kernel", "torch", "kernel", "torch", "kernel"]


@one_order
def test_a_call_like_one_before_follows_all_that_it_depends_on(device, monkeypatch):
    monkeypatch.setattr(normalization, "_MOST_FUNCTIONS", 3)
    x, weight, bias = operands(device, 4, 24, (S, S))
    expected = layer_norm(x, 24, weight, bias)
    for shape in ([24], torch.Size([24]), (24,), [24]):
        assert torch.equal(layer_norm(x, shape, weight, bias), expected)
        assert len(norm_kernels.functions) <= 3
    least = torch.tensor(1e-5)
    assert torch.equal(layer_norm(x, 24, weight, bias, least), expected)
    assert torch.equal(layer_norm(x, 24, weight, bias, least.fill_(2)), layer_norm(x, 24, weight, bias, 2.0))
    for other in (x.view(2, 2, 24), x[:1], x[0], x.view(2, 2, 24)):
        near(
            layer_norm(other, 24, weight, bias), F.layer_norm(other.double(), (24,), weight.double(), bias.double()), S
        )
    with torch.inference_mode():
        made = layer_norm(x, 24, weight, bias)
    assert made.is_inference()
    assert torch.equal(made, expected)
    with torch.autocast(device.type, B):
        assert layer_norm(x, 24, weight, bias).dtype == B
    assert layer_norm(x, 24, weight, bias).dtype == S
    with pytest.raises(ConfigError, match="weight has shape"):
        layer_norm(x, 24, weight[:12], bias)


@one_order
def test_a_tensor_whose_memory_was_freed_is_refused(device):
    x, weight, bias = operands(device, 4, 24, (S, S))
    made = layer_norm(x, 24, weight, bias)
    weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed storage"):
        layer_norm(x, 24, weight, bias)
    with pytest.raises(ValueError, match="freed storage"):
        torch.autograd.grad(made.sum(), x)


@one_order
def test_float64_is_torchs(device):
    x = torch.randn(3, 24, dtype=D, device=device, requires_grad=True)
    assert torch.equal(layer_norm(x, 24), F.layer_norm(x, (24,)))
    assert torch.equal(rms_norm(x, 24), F.rms_norm(x, (24,)))


@one_order
@pytest.mark.parametrize("dtype", [S, B, H])
def test_the_smallest_eps_is_torchs(device, dtype):
    x = (torch.randn(3, 24, generator=torch.Generator().manual_seed(4)) * 1e-3).to(device, dtype)
    torch.testing.assert_close(rms_norm(x, 24), F.rms_norm(x, (24,)), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("reference", [norm_references.layer_norm_reference, norm_references.rms_norm_reference])
def test_references_in_float64(reference):
    x, weight, bias = operands("cpu", 5, 12, (D, D))
    if reference is norm_references.layer_norm_reference:
        assert torch.equal(reference(x, 12, weight, bias), F.layer_norm(x, (12,), weight, bias))
    else:
        torch.testing.assert_close(reference(x, 12, weight), F.rms_norm(x, (12,), weight))
    assert reference(x.float(), (12,), dtype=H).dtype == H


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.zeros(2, 3), 4), r"normalized_shape=\(4,\) are not the last dimensions .* \(2, 3\)"),
        ((torch.zeros(2, 3), ()), "normalized_shape="),
        ((torch.zeros(2, 3), 3, torch.ones(2)), r"weight has shape \(2,\)"),
        ((torch.zeros(2, 3), 3, None, torch.ones(3, 1)), r"bias has shape \(3, 1\)"),
        ((torch.ones(2, 3, dtype=torch.int64), 3), "floating-point inputs, not torch.int64"),
    ],
)
def test_inputs_that_do_not_fit(arguments, words):
    with pytest.raises(ConfigError, match=words):
        layer_norm(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtypes", [(S, S), (B, B), (H, S)])
@pytest.mark.parametrize("width", [3, 64, 129, 768, 1000, 1024, 4096, 5120, 8192, 16384, 16385, 32768, 40000, 65536])
def test_all_widths_on_a_gpu(kind, dtypes, width):
    with dispatch.always("cupy"):
        x, weight, bias = operands("cuda", 300, width, dtypes)
        for efficient in (False, True):
            check(kind, x, weight, bias, memory_efficient=efficient, factor=4 if efficient else 1)


@pytest.mark.gpu
@pytest.mark.gpu_memory(gib=18)  # four of 4 GiB
def test_more_elements_than_32_bits_count():
    rows, width = 2**19 + 3, 4096
    with dispatch.always("cupy"):
        x = torch.randn(rows, width, device="cuda", dtype=H)
        made = layer_norm(x.requires_grad_(), width)
        upstream = torch.randn_like(made)
        (gradient,) = torch.autograd.grad(made, x, upstream)
        last = x[-2:].detach().requires_grad_()
        output = layer_norm(last, width)
        assert torch.equal(made[-2:], output)
        assert torch.equal(gradient[-2:], torch.autograd.grad(output, last, upstream[-2:])[0])


@pytest.mark.gpu
def test_steps_under_a_cuda_graph():
    with dispatch.always("cupy"):
        x, weight, bias = operands("cuda", 64, 1024, (B, S))
        upstream = torch.randn(64, 1024, device="cuda").to(B)
        step = functools.partial(torch.autograd.grad, inputs=[x, weight, bias], grad_outputs=upstream)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            expected = step(layer_norm(x, 1024, weight, bias))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(layer_norm(x, 1024, weight, bias))
        for one in captured:
            one.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(captured, expected, strict=True))


@pytest.mark.gpu2
def test_on_a_device_that_is_not_current():
    with dispatch.always("cupy"), torch.cuda.device(0):
        check("layer", *operands("cuda:1", 64, 768, (H, S)))
