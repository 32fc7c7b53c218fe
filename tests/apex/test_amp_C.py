import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabricamp.apex._extensions import amp_C, apex_C
from fabricamp.apex._extensions.amp_C import TensorListError
from fabricamp.apex.multi_tensor_apply import multi_tensor_applier
from tests.apex.tensor_lists import BF16, DOUBLE, FULL, HALF, close, copies, device, flag, same, tensors

__all__ = ["device", "flag"]


# -- scale, axpby, norms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [HALF, BF16, FULL])
@pytest.mark.parametrize("destination", [HALF, BF16, FULL])
def test_scale_casts_and_multiplies(device, flag, source, destination):
    x, out = tensors(1, source), tensors(2, destination)
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [x, out], 0.25)
    same(out, [(one.float() * 0.25).to(destination) for one in x])
    assert flag.item() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_scale_flags_what_is_not_finite(device, flag, bad, place, dtype):
    x = tensors(1, dtype)
    x[place].view(-1)[-1] = bad
    amp_C.multi_tensor_scale(65536, flag, [x, tensors(2)], torch.tensor(0.5))
    assert flag.item() == 1


def test_scale_of_large_finite_values_sets_no_flag(flag):
    x = [torch.full((4,), 3e38), torch.full((2,), 1e300, dtype=DOUBLE)]
    amp_C.multi_tensor_scale(65536, flag, [x, copies([x])[0]], 0.5)
    assert flag.item() == 0


def test_a_flag_that_is_set_stays_and_scale_runs(device, flag):
    flag.fill_(1)
    x, out = tensors(1), tensors(2)
    amp_C.multi_tensor_scale(65536, flag, [x, out], 2.0)
    assert flag.item() == 1
    same(out, [one * 2 for one in x])


def test_scale_takes_channels_last_and_empty_tensors(device, flag):
    x = [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.empty(0)]
    out = [torch.zeros(2, 3, 4, 5), torch.empty(0)]
    amp_C.multi_tensor_scale(65536, flag, [x, out], 2.0)
    assert torch.equal(out[0], x[0] * 2)


@pytest.mark.parametrize(("argument", "flagged"), [(-1, (1, 1)), (0, (1, 0)), (1, (0, 1))])
def test_axpby_checks_the_argument_that_it_is_told_to(device, argument, flagged):
    for which in (0, 1):
        flag, lists = torch.zeros(1, dtype=torch.int32), [tensors(1), tensors(2), tensors(3)]
        lists[which][1].view(-1)[2] = math.nan
        amp_C.multi_tensor_axpby(65536, flag, lists, 2.0, 3.0, argument)
        assert flag.item() == flagged[which]


def test_axpby_adds_half_to_full_in_place(device, flag):
    x, y = tensors(1, HALF), tensors(2)
    expected = [one.float() * 0.5 + other * 2.0 for one, other in zip(x, y, strict=True)]
    amp_C.multi_tensor_axpby(65536, flag, [x, y, y], 0.5, 2.0, 0)
    close(y, expected)
    assert flag.item() == 0


def norms(lists, factor=1.0):
    each = torch.stack([one.double().norm() * factor for one in lists])
    return each.norm().reshape(1), each


@pytest.mark.parametrize("dtype", [HALF, BF16, FULL])
def test_l2norm(device, flag, dtype):
    x = tensors(1, dtype)
    total, each = amp_C.multi_tensor_l2norm(65536, flag, [x], True)
    close([total, each], norms(x))
    assert total.shape == (1,)
    assert total.dtype == each.dtype == FULL
    assert amp_C.multi_tensor_l2norm(65536, flag, [x])[1].numel() == 0
    assert flag.item() == 0
    x[2].fill_(math.inf)
    amp_C.multi_tensor_l2norm(65536, flag, [x])
    assert flag.item() == 1


def test_l2norm_mp_is_zero_behind_a_flag(device, flag):
    x = tensors(1)
    close([amp_C.multi_tensor_l2norm_mp(65536, flag, [x], True)[0]], norms(x)[:1])
    flag.fill_(1)
    total, each = amp_C.multi_tensor_l2norm_mp(65536, flag, [x], True)
    assert total.item() == 0
    assert not each.any()


def test_l2norm_scale_measures_before_it_scales(device, flag):
    x, out = tensors(1, HALF), tensors(2)
    total, each = amp_C.multi_tensor_l2norm_scale(65536, flag, [x, out], 0.5, True)
    close([total, each], norms(x))
    same(out, [one.float() * 0.5 for one in x])


def test_unscale_l2norm_changes_nothing(device, flag):
    x = tensors(1)
    before = copies([x])[0]
    total, each = amp_C.multi_tensor_unscale_l2norm(65536, flag, [x], torch.tensor([0.5]), True)
    close([total, each], norms(x, 0.5))
    same(x, before)


# -- the scale ------------------------------------------------------------------------------------------------------------------


def rounded(value):
    """Returns ``value`` in fp32 as from a kernel built with fast math: rounded once, and 0 if it is subnormal."""
    single = torch.tensor(value, dtype=DOUBLE).float().item()
    return single if abs(single) >= torch.finfo(FULL).smallest_normal else 0.0


def hysteresis_by_hand(before, found, growth_factor, backoff_factor, interval, hysteresis):
    """Returns (scale, growth tracker, hysteresis tracker) by the rule, in Python's doubles."""
    scale, growth, left = before
    if found:
        left -= 1
        if left > 0:
            return scale, 0, left
        return rounded(rounded(scale) * backoff_factor), 0, left
    if growth + 1 < interval:
        return scale, growth + 1, hysteresis
    grown = rounded(rounded(scale) * growth_factor)
    return (grown if math.isfinite(grown) else scale), 0, hysteresis


def trackers(scale, growth, left, shape=(1,)):
    return (
        torch.full(shape, scale, dtype=FULL),
        torch.full(shape, growth, dtype=torch.int32),
        torch.full(shape, left, dtype=torch.int32),
    )


def run_hysteresis(state, finds, *rule, shape=(1,)):
    """Calls the function for each of ``finds``; compares it with the rule after each call."""
    expected = tuple(tensor.item() for tensor in state)
    for call, found in enumerate(finds):
        returned = amp_C.update_scale_hysteresis(*state, torch.full(shape, float(found)), *rule)
        expected = hysteresis_by_hand(expected, found, *rule)
        assert returned is state[0]
        assert tuple(tensor.item() for tensor in state) == expected, (call, rule)


@settings(deadline=None, max_examples=200)
@given(
    finds=st.lists(st.booleans(), max_size=40),
    scale=st.floats(2.0**-126, torch.finfo(FULL).max, width=32),
    growth_factor=st.floats(1.0, 10.0),
    backoff_factor=st.floats(2.0**-70, 1.0),
    interval=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    shape=st.sampled_from([(), (1,)]),
)
def test_scale_with_hysteresis(finds, scale, growth_factor, backoff_factor, interval, hysteresis, shape):
    state = trackers(scale, 0, hysteresis, shape)
    run_hysteresis(state, finds, growth_factor, backoff_factor, interval, hysteresis, shape=shape)


@pytest.mark.parametrize("backoff_factor", [0.5, 0.25])
def test_scale_backs_off_to_zero_and_stays_there(backoff_factor):
    """Repeated overflows take the scale through every power of two, and it is never subnormal."""
    rule = 2.0, backoff_factor, 5, 3
    state = trackers(1024.0, 0, 3)
    run_hysteresis(state, [True] * 100, *rule)
    for _ in range(60):
        run_hysteresis([tensor.clone() for tensor in state], [False] * 10, *rule)
        run_hysteresis(state, [True], *rule)


def test_tensors_of_the_scale_may_differ_in_shape():
    scale, growth, left = torch.tensor(16.0), torch.zeros(1, dtype=torch.int32), torch.tensor(1, dtype=torch.int32)
    amp_C.update_scale_hysteresis(scale, growth, left, torch.ones(1), 2.0, 0.5, 3, 2)
    assert (scale.item(), growth.item(), left.item()) == (8.0, 0, 0)


@pytest.mark.parametrize(
    ("found", "expected"), [(math.nan, (8.0, 0, 3)), (-1.0, (8.0, 0, 4)), (math.inf, (16.0, 0, 2))]
)
def test_what_is_found_may_be_any_number(found, expected):
    """Only a positive number uses up hysteresis; only a number that is not positive restores it."""
    state = trackers(16.0, 1, 3)
    amp_C.update_scale_hysteresis(*state, torch.tensor([found]), 2.0, 0.5, 3, 4)
    assert tuple(tensor.item() for tensor in state) == expected


def test_scale_never_grows_to_inf():
    scale, growth, left = torch.tensor([3e38]), torch.full((1,), 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    amp_C.update_scale_hysteresis(scale, growth, left, torch.zeros(1), 2.0, 0.5, 3, 2)
    assert scale.item() == pytest.approx(3e38)
    assert growth.item() == 0


# -- checks ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[torch.ones(2)]], "takes 2 lists of tensors, and got 1"),
        ([[], []], "empty list"),
        ([[torch.ones(2)], [torch.ones(2)] * 2], r"different lengths \(1, 2\)"),
        ([[torch.ones(2)], [torch.ones(3)]], "has 3 elements, the one of the first list has 2"),
        ([[torch.ones(2)], [torch.ones(2, device="meta")]], "not on the same device"),
        ([[torch.ones(2)], [torch.ones(4)[::2]]], "neither contiguous nor channels last"),
        ([[torch.ones(2)], [torch.ones(2, dtype=torch.int64)]], "int64; it has to be fp32"),
    ],
)
def test_lists_that_do_not_match_are_refused(flag, lists, message):
    with pytest.raises(TensorListError, match=message) as raised:
        amp_C.multi_tensor_scale(65536, flag, lists, 1.0)
    assert isinstance(raised.value, RuntimeError)


def test_flag_has_to_be_one_number():
    with pytest.raises(TensorListError, match="give one int32"):
        amp_C.multi_tensor_scale(65536, torch.zeros(2, dtype=torch.int32), [[torch.ones(2)]] * 2, 1.0)


def test_flatten_and_back():
    x = [torch.randn(2, 3), torch.randn(4), torch.randn(2, 2, 2).transpose(0, 2)]
    flat = apex_C.flatten(x)
    assert flat.shape == (18,)
    same(apex_C.unflatten(flat, x), x)
    apex_C.unflatten(flat, x)[1].zero_()
    assert not flat[6:10].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, BF16, FULL])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scale_flags_what_is_not_finite_on_a_gpu(dtype, bad):
    lists = [[one.cuda() for one in tensors(seed, dtype)] for seed in (1, 2)]
    flag_of_gpu = torch.zeros(1, dtype=torch.int32, device="cuda")
    amp_C.multi_tensor_scale(65536, flag_of_gpu, lists, 0.5)
    assert flag_of_gpu.item() == 0
    same([one.cpu() for one in lists[1]], [(one.cpu().float() * 0.5).to(dtype) for one in lists[0]])
    lists[0][3].view(-1)[5] = bad
    amp_C.multi_tensor_scale(65536, flag_of_gpu, lists, 0.5)
    assert flag_of_gpu.item() == 1
