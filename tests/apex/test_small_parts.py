import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fabricamp.apex
from fabricamp import ops
from fabricamp.apex import RNN, amp
from fabricamp.apex._autocast_utils import _cast_if_autocast_enabled
from fabricamp.apex._extensions import mlp_cuda
from fabricamp.apex.contrib.clip_grad import clip_grad_norm_
from fabricamp.apex.contrib.sparsity import ASP, create_mask
from fabricamp.apex.fused_dense import FusedDense, FusedDenseGeluDense
from fabricamp.apex.mlp import MLP
from fabricamp.apex.mlp.mlp import MlpFunction
from fabricamp.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from fabricamp.errors import ConfigError
from tests.apex.amp_nets import ALL_OPTIMIZERS

# -- mlp, fused_dense -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("activation", "layer"), [("none", nn.Identity), ("relu", nn.ReLU), ("sigmoid", nn.Sigmoid)])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_is_linear_layers_with_an_activation_behind_each(activation, layer, bias):
    torch.manual_seed(0)
    mlp, twin = MLP([3, 5, 4, 2], bias=bias, activation=activation), nn.Sequential()
    for number in range(3):
        linear = nn.Linear(*[(3, 5), (5, 4), (4, 2)][number], bias=bias)
        linear.weight.data.copy_(mlp.weights[number])
        if bias:
            linear.bias.data.copy_(mlp.biases[number])
        twin.extend([linear, layer()])
    x = torch.randn(7, 3, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, expected = mlp(x), twin(y)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(mlp.weight_0.grad, twin[0].weight.grad)
    names = [f"weight_{n}" for n in range(3)] + ([f"bias_{n}" for n in range(3)] if bias else [])
    assert sorted(mlp.state_dict()) == sorted(names)


def test_mlp_survives_copies_and_casts():
    mlp = MLP([3, 4])
    twin = copy.deepcopy(mlp).double()
    twin.weight_0.data.zero_()
    assert twin.weights[0] is twin.weight_0
    assert twin(torch.ones(2, 3).double()).dtype == torch.float64
    assert mlp.weight_0.any()
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(torch.ones(2, 3)).dtype == torch.bfloat16


def test_mlp_names_the_activations_that_it_has():
    with pytest.raises(ConfigError, match="did you mean 'relu'"):
        MLP([2, 2], activation="rleu")


@pytest.mark.parametrize("activation", [3, -1, "relu"])
def test_mlp_function_knows_three_activations(activation):
    with pytest.raises(ConfigError, match=r"is no code .*0 \(none\), 1 \(relu\), 2 \(sigmoid\)"):
        MlpFunction.apply(0, activation, torch.ones(2, 3), torch.ones(4, 3))


@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("bias", [1, 0])
def test_mlp_cuda_pass_by_pass(activation, bias):
    torch.manual_seed(0)
    inputs = [
        torch.randn(6, 3),
        torch.randn(5, 3),
        torch.randn(2, 5),
        *([torch.randn(5), torch.randn(2)] if bias else []),
    ]
    outputs = mlp_cuda.forward(bias, activation, inputs)
    leaves = [one.clone().requires_grad_() for one in inputs]
    expected = MlpFunction.apply(bias, activation, *leaves)
    assert torch.equal(outputs[0], expected)
    above = torch.randn(6, 2)
    expected.backward(above)
    for one, leaf in zip(mlp_cuda.backward(bias, activation, above, outputs, inputs), leaves, strict=True):
        torch.testing.assert_close(one, leaf.grad)


def test_fused_dense():
    torch.manual_seed(0)
    x, dense = torch.randn(5, 3), FusedDense(3, 4, bias=False)
    assert dense.bias is None
    assert torch.equal(dense(x), x @ dense.weight.T)
    both = FusedDenseGeluDense(3, 6, 2)
    middle = F.gelu(F.linear(x, both.weight1, both.bias1), approximate="tanh")
    assert torch.equal(both(x), F.linear(middle, both.weight2, both.bias2))
    assert list(both.state_dict()) == ["weight1", "bias1", "weight2", "bias2"]
    with pytest.raises(ConfigError, match="bias=False"):
        FusedDenseGeluDense(3, 6, 2, bias=False)


# -- RNN ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RNN.LSTM, RNN.GRU, RNN.ReLU, RNN.Tanh, RNN.mLSTM])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_networks(kind, bidirectional, batch_first):
    net = kind(3, 4, 2, batch_first=batch_first, dropout=0.5, bidirectional=bidirectional)
    x = torch.randn(5, 2, 3)
    output, state = net(x.transpose(0, 1) if batch_first else x)
    directions = 2 if bidirectional else 1
    assert output.shape == ((2, 5) if batch_first else (5, 2)) + (4 * directions,)
    hidden = state[0] if isinstance(state, tuple) else state
    assert hidden.shape == (2 * directions, 2, 4)
    output.sum().backward()
    assert all(one.grad is not None for one in net.parameters())


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_output_size_projects_where_it_can():
    assert RNN.LSTM(3, 4, 1, output_size=2)(torch.zeros(5, 1, 3))[0].shape == (5, 1, 2)
    output, (hidden, cell) = RNN.mLSTM(3, 4, 2, output_size=2)(torch.zeros(5, 1, 3))
    assert (output.shape, hidden.shape, cell.shape) == ((5, 1, 2), (2, 1, 2), (2, 1, 4))
    for kind in (RNN.GRU, RNN.ReLU, RNN.Tanh):
        with pytest.raises(ConfigError, match="output_size=2"):
            kind(3, 4, 1, output_size=2)
        kind(3, 4, 1, output_size=4)


def test_mlstm_is_its_formula_and_goes_on_from_a_state():
    torch.manual_seed(0)
    net, x = RNN.mLSTM(3, 4, 1), torch.randn(6, 2, 3)
    cell = net.cells[0]
    hidden, content = torch.zeros(2, 4), torch.zeros(2, 4)
    for step in x:
        product = (step @ cell.w_mih.T) * (hidden @ cell.w_mhh.T)
        gates = step @ cell.w_ih.T + cell.b_ih + product @ cell.w_hh.T + cell.b_hh
        i, f, g, o = gates.chunk(4, dim=1)
        content = f.sigmoid() * content + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * content.tanh()
    output, (last, _) = net(x)
    torch.testing.assert_close(output[-1], hidden)
    torch.testing.assert_close(last[0], hidden)
    first, state = net(x[:2])
    torch.testing.assert_close(torch.cat([first, net(x[2:], state)[0]]), output)


# -- names at the top -----------------------------------------------------------------------------------------------------------


def test_multi_tensor_apply_hands_its_chunk_size_on():
    assert multi_tensor_applier(lambda *given: given, 1, [], 2) == (2048 * 32, 1, [], 2)
    assert MultiTensorApply.available
    assert MultiTensorApply(4).check_avail() is None


def test_deprecated_warning():
    with pytest.warns(fabricamp.apex.DeprecatedFeatureWarning, match="old"):
        fabricamp.apex.deprecated_warning("old")


def test_check_of_cudnn(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8500)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fabricamp.apex.check_cudnn_version_and_warn("--fmha", 8400)
    with pytest.warns(UserWarning, match="--fmha needs cuDNN 9000; found: cuDNN 8500"):
        assert not fabricamp.apex.check_cudnn_version_and_warn("--fmha", 9000)


def test_casts_follow_autocast():
    given = torch.ones(1), [torch.ones(1), "text"], {"a": torch.ones(1)}, torch.ones(1).double(), torch.ones(1).int()
    assert _cast_if_autocast_enabled(*given)[0] is given[0]
    with torch.autocast("cpu", torch.bfloat16):
        one, many, named, double, integer = _cast_if_autocast_enabled(*given)
    assert one.dtype == many[0].dtype == named["a"].dtype == torch.bfloat16
    assert (double.dtype, integer.dtype, many[1]) == (torch.float64, torch.int32, "text")


def test_clip_grad_norm():
    assert clip_grad_norm_ is ops.clip_grad_norm_


# -- sparsity -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 16), (16,), (4, 8, 3), (4, 8, 3, 3), (8, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masks_keep_the_two_largest_of_four_input_channels(shape, dtype):
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    mask = create_mask(weight)
    assert mask.dtype == dtype
    rows, kept = (
        one.movedim(min(1, len(shape) - 1), -1).reshape(-1, shape[min(1, len(shape) - 1)]) for one in (weight, mask)
    )
    for row, keep in zip(rows, kept, strict=True):
        for start in range(0, len(row), 4):
            four, which = row[start : start + 4].abs(), keep[start : start + 4]
            assert which.sum() == 2
            assert four[which == 1].min() >= four[which == 0].max() if (which == 0).any() else True


def test_patterns_that_there_are_not():
    with pytest.raises(ConfigError, match="m4n2_1d"):
        create_mask(torch.ones(4, 4), "m4n2_2d_best")


@pytest.fixture
def asp():
    yield ASP
    ASP.reset()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(32, 16), nn.Linear(16, 3))


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 16, 4, 4)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, fabricamp.apex.optimizers.FusedAdam])
def test_pruned_models_stay_so(asp, kind):
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    train(model, optimizer)
    asp.prune_trained_model(model, optimizer)
    assert asp.is_sparsity_enabled()
    zeros = [(model[place].weight == 0).clone() for place in (0, 2)]
    assert [int(one.sum()) * 2 for one in zeros] == [model[0].weight.numel(), model[2].weight.numel()]
    assert not (model[3].weight == 0).any()  # 3 outputs are no multiple of 8
    train(model, optimizer)
    for place, was in zip((0, 2), zeros, strict=True):
        assert torch.equal(model[place].weight == 0, was)
    assert "2.__weight_mma_mask" in model.state_dict()


def test_pruned_weights_come_back(asp):
    model = net()
    before = model[2].weight.detach().clone()
    asp.init_model_for_pruning(model, verbosity=0, disallowed_layer_names=["0"], allow_recompute_mask=True)
    assert not asp.is_sparsity_enabled()
    asp.compute_sparse_masks()
    assert asp.is_sparsity_enabled()
    asp.restore_pruned_weights()
    assert torch.equal(model[2].weight, before)
    assert not asp.is_sparsity_enabled()


@pytest.mark.parametrize("prunes_first", [True, False])
@pytest.mark.parametrize("name", ["SGD", "Adam", "FusedAdam"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_models_stay_pruned_under_amp(asp, level, name, prunes_first):
    """At O2 the masters are masked too, because they are rounded into the weights after every step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    optimizer = ALL_OPTIMIZERS[name](model.parameters())
    ways = [
        lambda: asp.prune_trained_model(model, optimizer),
        lambda: amp.initialize(model, optimizer, opt_level=level, verbosity=0),
    ]
    for way in ways if prunes_first else reversed(ways):
        way()
    try:
        for _ in range(3):
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.randn(4, 32)).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            assert not torch.equal(model[0].weight, before)
            for one in (
                model[0].weight,
                model[2].weight,
                *(one for one in amp.master_params(optimizer) if one.dim() == 2),
            ):
                assert int((one == 0).sum()) == one.numel() // 2
        state = model.state_dict()
        assert int((state["0.weight"] == 0).sum()) == 32 * 16 // 2
    finally:
        amp.shutdown()


def test_pruned_weights_come_back_at_o2(asp):
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    dense = model[0].weight.detach().clone()
    optimizer = ALL_OPTIMIZERS["SGD"](model.parameters())
    asp.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True)
    asp.init_optimizer_for_pruning(optimizer)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    try:
        asp.compute_sparse_masks()
        asp.restore_pruned_weights()
        (master,) = (one for one in amp.master_params(optimizer) if one.dim() == 2)
        assert torch.allclose(master, dense, atol=1e-3)
        assert torch.equal(model[0].weight, master.half())
    finally:
        amp.shutdown()


def test_asp_says_what_comes_first(asp):
    with pytest.raises(ConfigError, match="init_model_for_pruning"):
        asp.compute_sparse_masks()
    asp.init_model_for_pruning(net(), verbosity=0, allowed_layer_names=["2"])
    assert asp.already_init_asp_model()
    with pytest.raises(ConfigError, match="allow_recompute_mask=True"):
        asp.restore_pruned_weights()
    with pytest.raises(ConfigError, match="one model"):
        asp.init_model_for_pruning(net())


def test_calls_in_one_autocast_region_cast_by_themselves():
    """As in apex: the gradients of several calls are added in fp32, and not in half by a shared cast."""
    from fabricamp.apex.mlp import MLP

    torch.manual_seed(0)
    mlp, own = MLP([64, 64, 32]), MLP([64, 64, 32])
    own.load_state_dict(mlp.state_dict())
    inputs = [torch.randn(16, 64) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        sum(mlp(x).float().square().sum() for x in inputs).backward()
    expected = 0.0
    for x in inputs:
        with torch.autocast("cpu", torch.bfloat16):
            (gradient,) = torch.autograd.grad(own(x).float().square().sum(), own.weight_0)
        expected = expected + gradient
    torch.testing.assert_close(mlp.weight_0.grad, expected, rtol=1e-6, atol=1e-6)
