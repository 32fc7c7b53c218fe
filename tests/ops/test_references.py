"""The torch references against float64, for shapes and dtypes of all kinds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabricamp import ops

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HALVES = [torch.float16, torch.bfloat16]


def tensors(dtypes=FLOATS):
    one = st.tuples(
        st.sampled_from(dtypes), st.sampled_from([(0,), (1,), (3,), (5, 7), (), (2, 1, 3)]), st.integers(0, 99)
    )
    return st.lists(one, min_size=1, max_size=5).map(lambda specs: [make(*spec) for spec in specs])


def make(dtype, shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(mine, exact):
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(mine.dtype, 1e-6)
    torch.testing.assert_close(mine.double(), exact, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True)


@settings(max_examples=50, deadline=None)
@given(
    tensors(),
    st.sampled_from([None, *FLOATS]),
    st.sampled_from([1.0, 0.3, 2.0**-16]),
    st.sampled_from([None, 0.1]),
    st.booleans(),
)
def test_scale(sources, dtype, factor, limit, on_device):
    before = [s.clone() for s in sources]
    exact = [s.double() * torch.tensor(factor).double() for s in sources]
    exact = [e if limit is None else e.clamp(-limit, limit) for e in exact]
    destinations = sources if dtype is None else [torch.empty_like(s, dtype=dtype) for s in sources]
    ops.scale(sources, destinations, torch.tensor(factor) if on_device else factor, limit)
    for mine, value in zip(destinations, exact, strict=True):
        close(mine, value)
    assert dtype is None or all(map(torch.equal, before, sources))


def test_scale_computes_in_fp32():
    # 1e-7 is 0 in half, and 2**15 * 2**-20 would pass through it.
    source = torch.full((3,), 2.0**15, dtype=torch.float16)
    ops.scale([source], [source], torch.tensor(2.0**-20))
    assert source.eq(2.0**-5).all()
    wide = torch.empty(3)
    ops.scale([source], [wide], 2.0**-30)
    assert wide.eq(2.0**-35).all()


def test_scale_of_views_and_channels_last():
    base = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    view = torch.randn(9)[1::2]
    expected = [base * 2, view * 2]
    ops.scale([base, view], [base, view], 2.0)
    assert all(torch.equal(a, b) for a, b in zip((base, view), expected, strict=True))
    ops.scale([], [], 2.0)


@settings(max_examples=30, deadline=None)
@given(tensors(), st.sampled_from(FLOATS), st.floats(-2, 2), st.floats(-2, 2))
def test_axpby(x, dtype, alpha, beta):
    y = [torch.randn(t.shape).to(dtype) for t in x]
    exact = [alpha * a.double() + beta * b.double() for a, b in zip(x, y, strict=True)]
    out = [torch.empty(t.shape) for t in x]
    ops.axpby(alpha, x, beta, y, out)
    for mine, value in zip(out, exact, strict=True):
        torch.testing.assert_close(mine.double(), value, rtol=1e-5, atol=1e-5)
    ops.axpby(torch.tensor(1.0), x, torch.tensor(0.0), y, y)
    assert all(torch.equal(mine, value.to(dtype)) for mine, value in zip(y, x, strict=True))


@settings(max_examples=50, deadline=None)
@given(tensors())
def test_l2norm(values):
    total, each = ops.l2norm(values)
    exact = torch.stack([torch.linalg.vector_norm(value.double()) for value in values])
    assert total.dtype is each.dtype is torch.float32
    torch.testing.assert_close(each.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total.double(), torch.linalg.vector_norm(exact), rtol=1e-5, atol=1e-6)


def test_norms_of_nothing():
    assert ops.l2norm([])[0].item() == 0
    assert ops.gradient_statistics([], torch.tensor(1.0)).tolist() == [0.0]


@settings(max_examples=50, deadline=None)
@given(tensors(), st.sampled_from([1.0, 2.0**-16, 3.0]))
def test_gradient_statistics(gradients, inverse):
    exact = sum((g.double() * inverse).square().sum() for g in gradients)
    mine = ops.gradient_statistics(gradients, torch.tensor(0.5 / inverse), 2.0)
    torch.testing.assert_close(mine.double().sum(), exact, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("at", [(0, 0), (1, 33), (2, 64)])
def test_one_bad_value_makes_the_statistics_bad(dtype, bad, at):
    gradients = [torch.ones(65, dtype=dtype) for _ in range(3)]
    assert torch.isfinite(ops.gradient_statistics(gradients, torch.tensor(1.0))).all()
    gradients[at[0]][at[1]] = bad
    assert not torch.isfinite(ops.gradient_statistics(gradients, torch.tensor(1.0)).sum())


def test_large_half_gradients_do_not_overflow_the_statistics():
    gradients = [torch.full((1000,), 60000.0, dtype=torch.float16)]
    assert torch.isfinite(ops.gradient_statistics(gradients, torch.tensor(1.0))).all()


@settings(max_examples=30, deadline=None)
@given(tensors(HALVES), st.sampled_from([None, 0.5]))
def test_accumulate_in_fp32(gradients, multiplier):
    flat = torch.ones(sum(g.numel() for g in gradients))
    views = [
        piece.view(g.shape) for piece, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)
    ]
    expected = [1 + g.float() * (1.0 if multiplier is None else multiplier) for g in gradients]
    ops.accumulate(gradients, views, None if multiplier is None else torch.tensor(multiplier))
    assert all(torch.equal(view, value) for view, value in zip(views, expected, strict=True))


@pytest.mark.parametrize("dtype", HALVES)
def test_copy_cast_rounds(dtype):
    masters = [torch.randn(33), torch.randn(2, 3)]
    halves = [torch.empty_like(m, dtype=dtype) for m in masters]
    ops.copy_cast(masters, halves)
    assert all(torch.equal(half, master.to(dtype)) for half, master in zip(halves, masters, strict=True))
    ops.copy_cast([], [])


def finished(values, inverse=1.0, max_norm=None):
    state = ops.StepState.on("cpu")
    scale = torch.tensor(1 / inverse)
    statistics = ops.gradient_statistics([torch.tensor(values)], scale)
    ops.finish(state, statistics, scale=scale, max_norm=max_norm)
    return state


def test_finish():
    state = finished([3.0, 4.0], 0.5, max_norm=10.0)
    assert (state.norm.item(), state.multiplier.item(), state.found_inf.item(), state.finite.item()) == (
        2.5,
        0.5,
        0.0,
        1,
    )
    state = finished([3.0, 4.0], 0.5, max_norm=1.0)
    assert state.multiplier.item() == pytest.approx(0.5 / 2.5)
    state = finished([3.0, float("nan")], max_norm=1.0)
    assert (state.found_inf.item(), state.finite.item()) == (1.0, 0)


def test_finite_is_anded_over_a_window_and_found_inf_is_not():
    state = finished([float("inf")])
    ops.finish(state, torch.ones(1), scale=torch.tensor(1.0))
    assert (state.found_inf.item(), state.finite.item()) == (0.0, 0)


def test_step_state_is_one_struct():
    state = ops.StepState.on("cpu", scale=8.0, hysteresis=2)
    assert state.words.shape == (ops.StepState.WORDS,)
    declared = {name for name, kind in ops.StepState.__annotations__.items() if kind == "Tensor"}
    assert declared == set(vars(state)) - {"words"}
    # The first step of those skipped in a row is saved under the field's word, and is "first_window" in the kernels' struct.
    assert declared | {"first_step"} >= set(state.state_dict())
    state.skipped.fill_(7)
    assert state.words[ops.StepState.word("skipped")].item() == 7
    assert state.words.view(torch.float32)[ops.StepState.word("scale")].item() == 8.0
    other = ops.StepState.on("cpu")
    other.load_state_dict(state.state_dict())
    assert (other.scale.item(), other.skipped.item(), other.hysteresis.item(), other.finite.item()) == (8.0, 7, 2, 1)
