"""The head that computes its loss: its options, the parameters that it takes over, and one line in a model of transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.errors import ConfigError
from fabricamp.nn import FusedLinearCrossEntropy
from tests.ops.losses import truth

RULE = {"label_smoothing": 0.2, "ignore_index": 3, "reduction": "none", "z_loss": 0.1, "softcap": 2.0}


def sample():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 6, 8, generator=generator)
    target = torch.randint(0, 30, (2, 6), generator=generator)
    target[0, 0] = 3
    return hidden, target


@pytest.mark.parametrize("bias", [False, True])
def test_every_argument_arrives(bias):
    hidden, target = sample()
    head = FusedLinearCrossEntropy(8, 30, bias, **RULE, accumulate="fp32")
    exact = copy.deepcopy(head).double()
    losses, expected = head(hidden, target), truth(exact(hidden.double()), target, **RULE)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    losses.sum().backward()
    expected.sum().backward()
    for one, other in zip(head.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights_move_with_the_head_and_are_in_no_checkpoint(reduction):
    hidden, target = sample()
    weights = torch.rand(30)
    layer = nn.Linear(8, 30)
    head = FusedLinearCrossEntropy.of(layer, class_weight=weights, reduction=reduction, ignore_index=3)
    assert list(head.state_dict()) == list(layer.state_dict())
    rule = {"class_weight": weights, "reduction": reduction, "ignore_index": 3}
    torch.testing.assert_close(head(hidden, target), truth(layer(hidden), target, **rule).float(), rtol=1e-5, atol=1e-5)
    assert "class_weight=given" in repr(head)
    # Its buffers follow a conversion, as the weight's do.
    copied = copy.deepcopy(head).double()
    assert copied.class_weight.dtype == torch.float64
    torch.testing.assert_close(copied(hidden.double(), target), truth(copied(hidden.double()), target, **rule))
    with pytest.raises(ConfigError, match=r"give a floating tensor of shape \(30,\)"):
        FusedLinearCrossEntropy(8, 30, class_weight=torch.rand(29))


def test_it_is_a_linear_layer_without_targets():
    hidden, _ = sample()
    head = FusedLinearCrossEntropy(8, 30)
    assert torch.equal(head(hidden), F.linear(hidden, head.weight, head.bias))
    plain = nn.Linear(8, 30)
    assert head.state_dict().keys() == plain.state_dict().keys()
    head.load_state_dict(plain.state_dict())
    assert torch.equal(head(hidden), plain(hidden))


def test_it_is_checked_where_it_is_made_and_says_what_it_is():
    for wrong, words in (
        ({"reduction": "average"}, "'average' is not known"),
        ({"accumulate": "half"}, "accumulate='half'"),
    ):
        with pytest.raises(ConfigError, match=words):
            FusedLinearCrossEntropy(8, 30, **wrong)
        with pytest.raises(ConfigError, match=words):
            FusedLinearCrossEntropy.of(nn.Linear(8, 30), **wrong)
    text = repr(FusedLinearCrossEntropy(8, 30, **RULE))
    assert "in_features=8, out_features=30, bias=True" in text
    assert "accumulate='weight'" in text
    assert all(f"{name}={value!r}" in text for name, value in RULE.items())


@pytest.mark.parametrize("bias", [False, True])
def test_it_takes_the_parameters_of_a_layer(bias):
    hidden, target = sample()
    layer = nn.Linear(8, 30, bias).eval()
    layer.weight.requires_grad_(False)
    head = FusedLinearCrossEntropy.of(layer, **RULE)
    assert head.weight is layer.weight
    assert head.bias is layer.bias
    assert list(head.state_dict()) == list(layer.state_dict())
    assert not head.training
    assert (head.in_features, head.out_features) == (8, 30)
    torch.testing.assert_close(head(hidden, target), truth(layer(hidden), target, **RULE).float(), rtol=1e-5, atol=1e-5)


def test_a_layer_of_another_class_is_refused_by_name():
    class Adapted(nn.Linear):
        pass

    for layer in (Adapted(8, 30), nn.Bilinear(2, 4, 30)):
        with pytest.raises(
            ConfigError, match=rf"takes an nn.Linear, and this is a {type(layer).__name__}.*own forward"
        ):
            FusedLinearCrossEntropy.of(layer)


@pytest.mark.parametrize("tied", [False, True])
def test_one_line_in_a_model_of_transformers(tied):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=tied
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(100, (4, 12))
    labels = tokens.masked_fill(torch.rand(4, 12) < 0.3, -100)
    expected = model(input_ids=tokens, labels=labels).loss
    expected.backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    names = list(model.state_dict())
    model.lm_head = FusedLinearCrossEntropy.of(model.lm_head)
    assert list(model.state_dict()) == names
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
    hidden = model.model(tokens).last_hidden_state
    loss = model.lm_head(hidden, F.pad(labels[:, 1:], (0, 1), value=-100))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad, gradients[name], rtol=1e-4, atol=1e-6)
    assert model.generate(tokens[:1, :3], max_new_tokens=2, do_sample=False).shape == (1, 5)


def test_a_tied_weight_has_one_gradient_in_the_memory_of_the_heads():
    """Autograd adds the embedding's gradient to the head's in place: no third tensor of the size."""
    embedding = nn.Embedding(30, 8)
    head = nn.Linear(8, 30, bias=False)
    head.weight = embedding.weight
    head = FusedLinearCrossEntropy.of(head)
    tokens = torch.randint(30, (5, 7))
    loss = head(embedding(tokens).tanh(), tokens.roll(1))
    address = loss.grad_fn.made.weight.data_ptr()
    loss.backward()
    assert embedding.weight.grad.data_ptr() == address
