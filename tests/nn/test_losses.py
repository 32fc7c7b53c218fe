"""The loss module passes its options to the kernels and to torch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.errors import ConfigError
from fabricamp.nn.losses import SoftmaxCrossEntropyLoss
from fabricamp.ops import dispatch
from tests.ops.losses import sample, truth

RULE = {"label_smoothing": 0.2, "ignore_index": 3, "reduction": "none", "z_loss": 0.1, "softcap": 5.0}


def test_it_is_torchs_loss_by_default(kernel_device):
    logits, target = sample(kernel_device, 8, 30)
    leaf, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    with dispatch.always("cupy"):
        loss = SoftmaxCrossEntropyLoss()(leaf, target)
    expected = nn.CrossEntropyLoss()(other, target)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_every_argument_arrives(kernel_device):
    logits, target = sample(kernel_device, 2, 4, 30, ignored=0)
    target[0, 0] = 3
    given = logits.clone().requires_grad_() * 1
    with dispatch.always("cupy"):
        losses = SoftmaxCrossEntropyLoss(**RULE, in_place=True)(given, target)
        losses.sum().backward()
    torch.testing.assert_close(losses.double(), truth(logits, target, **RULE), rtol=1e-5, atol=1e-5)
    assert given._version == 1


def test_the_functional_form_by_torch_agrees():
    logits, target = sample("cpu", 8, 30)
    torch.testing.assert_close(SoftmaxCrossEntropyLoss()(logits, target), F.cross_entropy(logits, target))


def test_it_is_checked_where_it_is_made_and_says_what_it_is():
    with pytest.raises(ConfigError, match="reduction='average' is not known.*'mean', 'sum', 'none'"):
        SoftmaxCrossEntropyLoss(reduction="average")
    text = repr(SoftmaxCrossEntropyLoss(**RULE))
    assert all(f"{name}={value!r}" in text for name, value in RULE.items())
    assert not SoftmaxCrossEntropyLoss().state_dict()


def test_it_can_be_copied():
    logits, target = sample("cpu", 8, 30)
    loss = SoftmaxCrossEntropyLoss(**RULE)
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(twin(logits, target.clamp(0)), loss(logits, target.clamp(0)))
