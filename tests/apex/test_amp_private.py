"""Private names of apex that scripts use, and NVIDIA's own recipes that use them."""

from __future__ import annotations

import sys

import pytest
import torch

from fabricamp.apex import amp
from fabricamp.apex._extensions import amp_C
from fabricamp.apex.amp.scaler import LossScaler
from fabricamp.apex.multi_tensor_apply import multi_tensor_applier
from fabricamp.apex.optimizers import FusedAdam
from tests.apex.amp_nets import loss_of, same, snapshot, spoil, start, train


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()


def test_modules_and_the_instance():
    import fabricamp.apex.amp._amp_state
    from fabricamp.apex.amp import _amp_state

    assert not hasattr(_amp_state, "opt_properties")
    start("O1")
    assert fabricamp.apex.amp._amp_state.loss_scalers is _amp_state.loss_scalers
    assert sys.modules["fabricamp.apex.amp._amp_state"]._amp_state is _amp_state
    for name in ("amp", "frontend", "handle", "opt", "scaler", "wrap", "utils", "lists", "compat", "rnn_compat"):
        assert hasattr(amp, name)
    for name in ("_initialize", "_process_optimizer"):
        assert f"fabricamp.apex.amp.{name}" in sys.modules
    assert (_amp_state.verbosity, _amp_state.min_loss_scale, _amp_state.max_loss_scale) == (0, None, 2.0**24)
    assert _amp_state.handle.is_active()
    assert _amp_state.opt_properties.patch_torch_functions is True
    with pytest.raises(AttributeError):
        _amp_state.opt_properties.loss_scal = 3


OPTIONS = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
}


@pytest.mark.parametrize("level", OPTIONS)
def test_the_state_that_scripts_read(level):
    mm = torch.mm
    start(level)
    state = amp._amp_state
    assert amp.frontend._amp_state is state
    options = state.opt_properties
    assert (options.enabled, options.opt_level) == (True, level)
    found = (options.cast_model_type, options.patch_torch_functions, options.keep_batchnorm_fp32)
    assert (*found, options.master_weights, options.loss_scale) == OPTIONS[level]
    (scaler,) = state.loss_scalers
    assert scaler.loss_scale() == scaler._loss_scale == (65536.0 if scaler.dynamic else 1.0)
    assert (scaler._unskipped, scaler._scale_seq_len, scaler._has_overflow) == (0, 2000, False)
    assert (scaler._overflow_buf.dtype, scaler._overflow_buf.tolist()) == (torch.int32, [0])
    assert (scaler._min_loss_scale, scaler._max_loss_scale) == (None, 2.0**24)
    assert scaler.update_scale() is False
    assert scaler._unskipped == 1
    scaler._scale_seq_len = 2
    assert scaler.update_scale() is False
    assert scaler.loss_scale() == (131072.0 if scaler.dynamic else 1.0)
    state.handle._clear_cache()
    assert state.handle.is_active() is (level == "O1")
    state.handle._deactivate()
    assert not state.handle.is_active()
    assert torch.mm is mm
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    assert (state.hard_override, state.allow_incoming_model_not_fp32, state.verbosity) == (False, False, 0)


def test_the_flag_of_an_optimizer_keeps_what_is_written():
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(2))])
    flag = optimizer._dummy_overflow_buf
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [[torch.tensor([float("inf")])], [torch.ones(1)]], 1.0)
    assert optimizer._dummy_overflow_buf.tolist() == [1]
    optimizer._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)
    assert optimizer._dummy_overflow_buf.tolist() == [0]


def test_the_stash_of_an_optimizer():
    model, optimizer = start("O2")
    stash = optimizer._amp_stash
    assert not stash.lazy_init_called
    optimizer._lazy_init_maybe_master_weights()
    assert stash.lazy_init_called
    optimizer._amp_lazy_init()
    halves = [model.first.weight, model.first.bias, model.last.weight, model.last.bias]
    assert [id(one) for one in stash.all_fp16_params] == [id(one) for one in halves]
    assert [one.dtype for one in stash.all_fp32_from_fp16_params] == [torch.float32] * 4
    assert [id(one) for one in stash.all_fp32_from_fp32_params] == [id(model.norm.weight), id(model.norm.bias)]
    assert [[id(one) for one in group] for group in stash.fp16_groups] == [[id(one) for one in halves]]
    assert [len(group) for group in stash.fp32_from_fp16_groups] == [4]
    assert [len(group) for group in stash.fp32_from_fp32_groups] == [2]
    amp.shutdown()
    model, optimizer = start("O1")
    assert len(optimizer._amp_stash.all_fp32_params) == 6
    assert not optimizer._amp_stash.all_fp16_params


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
def test_already_patched_says_that_the_next_step_is_left_out(level, name):
    """After an overflow apex replaced ``step`` once, and restored it in that step."""
    model, optimizer = start(level, name)
    stash = optimizer._amp_stash
    assert stash.already_patched is False
    train(model, optimizer, range(2))
    assert stash.already_patched is False
    for _ in range(2):
        optimizer.zero_grad()
        spoil(optimizer, loss_of(model, 2))
        assert stash.already_patched is True
        optimizer.step()
        assert stash.already_patched is False
    spoil(optimizer, loss_of(model, 3))
    optimizer.zero_grad()
    assert stash.already_patched is False


def test_the_four_methods_by_hand():
    model, optimizer = start("O2")
    scaler = amp._amp_state.loss_scalers[0]
    expected = torch.autograd.grad(loss_of(model, 0), model.last.bias)[0].float()
    optimizer._prepare_amp_backward()
    (loss_of(model, 0) * scaler.loss_scale()).backward()
    scaler.clear_overflow_state()
    optimizer._post_amp_backward(scaler)
    assert scaler.update_scale() is False
    masters = list(amp.master_params(optimizer))
    assert torch.allclose(masters[-1].grad, expected, atol=1e-3)
    masters[-1].data.fill_(0.5)
    optimizer._master_params_to_model_params()
    assert torch.equal(model.last.bias, torch.full((3,), 0.5, dtype=torch.float16))


def test_dle_397_masters_saved_and_restored_by_hand(tmp_path):
    """As NVIDIA's BERT resumes: private lazy init, the optimizer's state, then the list of masters."""
    model, optimizer = start("O2", "FusedLAMB", loss_scale=128.0)
    train(model, optimizer, range(4))
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "master params": list(amp.master_params(optimizer)),
    }
    torch.save(saved, tmp_path / "bert.pt")
    expected = train(model, optimizer, range(4, 8)), snapshot(model, optimizer)
    amp.shutdown()

    saved = torch.load(tmp_path / "bert.pt", weights_only=False)
    model, optimizer = start("O2", "FusedLAMB", seed=3, loss_scale=128.0)
    model.load_state_dict(saved["model"])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(saved["optimizer"])
    for param, saved_param in zip(amp.master_params(optimizer), saved["master params"], strict=True):
        param.data.copy_(saved_param.data)
    assert train(model, optimizer, range(4, 8)) == expected[0]
    assert same(snapshot(model, optimizer), expected[1])


def test_init_loss_scale_as_bert_sets_it():
    model, optimizer = start("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**20
    losses = []
    for index in range(8):
        losses += train(model, optimizer, [index])
    assert amp._amp_state.loss_scalers[0].loss_scale() < 2.0**20  # the scale decreased until it fitted
    assert losses[-1] != losses[0]


def test_external_unscale_calls():
    scaler = LossScaler("dynamic", init_scale=8.0)
    scaler.place(torch.device("cpu"))
    gradients, masters = [torch.full((2,), 16.0).half()], [torch.zeros(2)]
    scaler.unscale(gradients, masters, scaler.loss_scale())
    assert torch.equal(masters[0], torch.full((2,), 2.0))
    stashed = [torch.ones(2)]
    scaler.unscale_with_stashed(gradients, stashed, masters)
    assert torch.equal(masters[0], torch.full((2,), 3.0))
    scaler.unscale_with_stashed(gradients, stashed, masters, scale_override=(4.0, 2.0, 2.0))
    assert torch.equal(masters[0], torch.full((2,), 9.0))
    assert scaler.update_scale() is False
    assert scaler._unskipped == 1
    scaler.clear_overflow_state()
    scaler.unscale_python([torch.tensor([float("nan")])], [torch.zeros(1)], 1.0)
    assert int(scaler._overflow_buf) == 1
    assert scaler.update_scale() is True
    assert scaler.loss_scale() == 4.0


def test_options_of_the_scaler():
    scaler = LossScaler("dynamic", init_scale=2.0**30, scale_factor=4.0, scale_window=2, min_loss_scale=2.0)
    scaler.place(torch.device("cpu"))
    assert scaler.loss_scale() == 2.0**24
    scaler._max_loss_scale = 2.0**10
    assert (scaler.loss_scale(), scaler._max_loss_scale) == (2.0**10, 2.0**10)
    scaler._loss_scale = 16.0
    for _ in range(2):
        scaler.update_scale()
    assert scaler.loss_scale() == 64.0
    for expected in (16.0, 4.0, 2.0):
        scaler._overflow_buf.fill_(1)
        assert scaler.update_scale()
        assert scaler.loss_scale() == expected
    constant = LossScaler("64.0")
    assert not constant.dynamic
    constant._overflow_buf.fill_(1)
    assert constant.update_scale() is False
    assert constant.loss_scale() == 64.0
