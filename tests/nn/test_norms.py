"""Fused norms as modules, and ``fuse`` for a model's norms."""

from __future__ import annotations

import copy
import importlib
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fabricamp.nn
from fabricamp.errors import ConfigError
from fabricamp.nn import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm, fuse
from fabricamp.ops import dispatch
from fabricamp.ops.norm import kernels as norm_kernels
from fabricamp.ops.norm.normalization import rms_norm

H, S, B = torch.float16, torch.float32, torch.bfloat16
PAIRS = [(FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)]


def test_all_names_are_there():
    for name in fabricamp.nn.__all__:
        assert callable(getattr(importlib.import_module("fabricamp.nn"), name)), name
    assert set(dir(fabricamp.nn)) == set(fabricamp.nn.__all__)
    with pytest.raises(AttributeError, match="no attribute 'FusedGroupNorm'"):
        _ = fabricamp.nn.FusedGroupNorm


@pytest.mark.parametrize(("fused", "plain"), PAIRS)
@pytest.mark.parametrize("affine", [True, False])
def test_modules_equal_torchs(fused, plain, affine):
    mine, other = fused((3, 4), 1e-3, affine), plain((3, 4), 1e-3, affine)
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    if affine:
        nn.init.normal_(other.weight, generator=torch.Generator().manual_seed(1))
    mine.load_state_dict(other.state_dict())
    assert torch.equal(mine(x), other(x))
    assert list(mine.state_dict()) == list(other.state_dict())
    assert (mine.eps, mine.elementwise_affine, mine.normalized_shape) == (1e-3, affine, (3, 4))


def test_widths_of_numpy():
    x = torch.randn(2, 4)
    for made in (FusedLayerNorm(np.int64(4)), MixedFusedRMSNorm(np.int64(4)), fuse(nn.LayerNorm(np.int64(4)))):
        assert made(x).shape == (2, 4)
    assert torch.equal(rms_norm(x, np.int64(4)), rms_norm(x, 4))


@pytest.mark.parametrize("module", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_scripts_and_symbolic_traces(module):
    norm, x = module(8), torch.randn(3, 8)
    scripted, traced = torch.jit.script(norm), torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), norm))
    torch.testing.assert_close(scripted(x), norm(x))
    torch.testing.assert_close(traced(x), norm(traced.get_submodule("0")(x)))
    assert [one.name for one in traced.graph.nodes if one.op == "call_function"][-1] in {"layer_norm", "rms_norm"}
    if module.__name__.startswith("Mixed"):
        assert scripted(x.half()).dtype == torch.fx.symbolic_trace(norm)(x.half()).dtype == S


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_fused_encoder_with_padding():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8)).eval()
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(fuse(model)(x, src_key_padding_mask=padding), expected)


def test_arguments_of_torchs_modules():
    made = FusedLayerNorm(4, bias=False, device="cpu", dtype=H)
    assert made.bias is None
    assert made.weight.dtype == H
    assert FusedRMSNorm([4], memory_efficient=True, dtype=B).weight.dtype == B
    assert FusedRMSNorm(4, memory_efficient=True).memory_efficient


@pytest.mark.parametrize(
    ("module", "input_dtype", "parameter_dtype", "expected"),
    [
        (FusedLayerNorm, H, S, H),
        (FusedLayerNorm, S, H, S),
        (FusedRMSNorm, B, S, B),
        (MixedFusedLayerNorm, H, S, S),
        (MixedFusedLayerNorm, S, B, B),
        (MixedFusedRMSNorm, H, S, S),
        (MixedFusedRMSNorm, S, H, H),
    ],
)
def test_dtypes_of_outputs(module, input_dtype, parameter_dtype, expected):
    made = module(8).to(parameter_dtype)
    x = torch.randn(2, 8).to(input_dtype).requires_grad_()
    output = made(x)
    assert output.dtype == expected
    output.sum().backward()
    assert (x.grad.dtype, made.weight.grad.dtype) == (input_dtype, parameter_dtype)
    with torch.autocast("cpu", B):
        assert made(x).dtype == B


def test_mixed_modules_always_have_parameters():
    with pytest.warns(UserWarning, match="MixedFusedLayerNorm always has parameters"):
        MixedFusedLayerNorm(4, elementwise_affine=True)
    with pytest.raises(ConfigError, match="use FusedRMSNorm for a norm without any"):
        MixedFusedRMSNorm(4, elementwise_affine=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MixedFusedRMSNorm(4, 1e-3, memory_efficient=True, device="cpu").eps == 1e-3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.first = nn.LayerNorm(8, bias=False)
        self.second = nn.RMSNorm(8)
        self.same = self.first

    def forward(self, x):
        return self.second(self.same(self.linear(x)) + self.first(x))


class OwnNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + 1


def test_fuse_keeps_all_but_the_class():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), OwnNorm(8), nn.GroupNorm(2, 8)).to(torch.float64).eval()
    model[0].first.weight.requires_grad_(False)
    calls = []
    model[0].second.register_forward_hook(lambda *_: calls.append(1))
    before, state = list(model.modules()), copy.deepcopy(model.state_dict())
    x = torch.randn(4, 8, dtype=torch.float64)
    expected = model(x)
    assert fuse(model) is model
    assert all(one is other for one, other in zip(model.modules(), before, strict=True))
    assert [type(model[0].first), type(model[0].second)] == [FusedLayerNorm, FusedRMSNorm]
    assert [type(model[1]), type(model[2])] == [OwnNorm, nn.GroupNorm]
    assert model[0].same is model[0].first
    assert not model[0].first.weight.requires_grad
    assert not model[0].second.training
    assert torch.equal(model(x), expected)
    assert len(calls) == 2
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model[0].first)))
    assert type(again) is FusedLayerNorm
    assert torch.equal(again(x), model[0].first(x))


def test_fuse_takes_modules():
    with pytest.raises(ConfigError, match=r"fuse\(\) takes a module, not \[LayerNorm"):
        fuse([nn.LayerNorm(8)])
    with pytest.raises(ConfigError, match="not <class 'torch.nn.modules.normalization.LayerNorm'>"):
        fuse(nn.LayerNorm)


def test_fuse_leaves_what_has_a_forward_of_its_own():
    norm, patched = nn.LayerNorm(8), nn.LayerNorm(8)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Tanh())
    patched.forward = lambda x: 2 * x
    x = torch.randn(3, 8)
    expected = norm(x)
    model = fuse(nn.ModuleDict({"norm": norm, "patched": patched, "deep": nn.ModuleList([nn.LayerNorm(8)])}))
    assert torch.equal(model["norm"](x), expected)
    assert torch.equal(model["patched"](x), 2 * x)
    assert type(model["deep"][0]) is FusedLayerNorm


@pytest.mark.parametrize("plain", [nn.LayerNorm, nn.RMSNorm])
def test_fuse_of_a_bare_norm(plain):
    norm = plain(8)
    assert fuse(fuse(norm)) is norm
    assert isinstance(norm, (FusedLayerNorm, FusedRMSNorm))
    assert not norm.memory_efficient


def test_a_fused_model_trains_through_the_kernels(kernel_device):
    norm_kernels.forget()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 24), nn.RMSNorm(24, eps=1e-5)).to(
        kernel_device
    )
    model = fuse(copy.deepcopy(plain))
    x = torch.randn(6, 8, device=kernel_device)
    with dispatch.always("cupy"):
        outputs = [one(x).square() for one in (plain, model)]
    assert type(outputs[1].grad_fn.next_functions[0][0]).__name__ == "_NormaliseBackward"
    for output in outputs:
        output.mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_fused_model_compiles_whole():
    model = fuse(nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.RMSNorm(24)))
    x = torch.randn(6, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
