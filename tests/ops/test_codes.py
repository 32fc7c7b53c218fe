"""States of eight bits: the codes beside fp64, and the kernels beside the reference."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ops
from fabricamp.ops import codes, remainders, rules, table
from fabricamp.ops.draws import Source, key_of
from tests.cuda_on_cpu.compiler import one_order, references

EXACT = ops.AdamRule(0.0, 0.0, 0.0)  # the averages are the gradient and its square
BOTH = pytest.mark.parametrize("squares", [False, True])


def made(values, *, squares):
    found, scales = torch.zeros_like(values, dtype=torch.uint8), torch.zeros(1, -(-values.numel() // 256))
    codes.encode_into(values, found, scales, squares=squares)
    return found, scales


def there_and_back(values, *, squares):
    return codes.decoded(*made(values, squares=squares), squares=squares)


def exact_values(*, squares):
    """The values of all codes at scale 1, in fp64: roots of squares, magnitudes of signed states."""
    values = [0.0] if not squares else []
    for level in range(8 if squares else 7):
        steps = 2**level
        places = range(steps) if squares or level else ()
        values += [(1 / 8 + 7 / 8 * place / steps) * 8.0 ** (level - (7 if squares else 6)) for place in places]
    values.append(1.0)
    return torch.tensor(values, dtype=torch.float64)


def lists(seed=0, wide=False):
    """Values of blocks that are whole, of parts of one, and of magnitudes that lie far apart."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(5 * 256 + 77, generator=generator)
    return values * 10 ** (8 * torch.rand(values.shape, generator=generator) - 8) if wide else values


@BOTH
def test_the_values_of_codes(squares):
    expected = exact_values(squares=squares)
    count = 256 if squares else 128
    assert len(expected) == count
    values = codes._values(squares, torch.device("cpu")).double()
    assert torch.equal(values[:count], expected.square() if squares else expected)
    assert torch.equal(values[count:], -expected if not squares else expected[:0])


@BOTH
@pytest.mark.parametrize("wide", [False, True])
def test_a_value_becomes_the_nearest(squares, wide):
    values = lists(wide=wide)
    values = values.square() if squares else values
    found, scales = made(values, squares=squares)
    share = codes._in_blocks(values).double() / scales[0, :, None]
    assert torch.equal(scales[0], codes._in_blocks(values).abs().amax(1))
    share = share.view(-1)[: len(values)].abs()
    share, grid = (share.sqrt(), exact_values(squares=True)) if squares else (share, exact_values(squares=False))
    mine = (grid[found.int() if squares else found.int() & 127] - share).abs()
    nearest = (grid - share[:, None]).abs().amin(1)
    # Below the last value but zero, the border is not half of it.
    assert ((mine - nearest) <= share * 1e-6 + (8.0**-6 / 8 if not squares else 0)).all()
    assert torch.equal(codes.decoded(found, scales, squares=squares).sign(), values.sign()) or not squares


@BOTH
def test_the_largest_of_a_block_is_exact_and_a_second_rounding_changes_nothing(squares):
    values = lists(1).abs() if squares else lists(1)
    once = there_and_back(values, squares=squares)
    for one, other in zip(values.split(256), once.split(256), strict=True):
        assert one[one.abs().argmax()] == other[one.abs().argmax()]
    assert torch.equal(there_and_back(once, squares=squares), once)


def test_no_square_becomes_zero_beside_a_large_one():
    values = torch.full((256,), 1e-20)
    values[0] = 1.0
    values[1] = 0.0
    back = there_and_back(values, squares=True)
    assert back[0] == 1.0
    assert (back[1:] > 0).all()
    assert (back[1:] < 4e-15).all()


@BOTH
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 2e-38, 1e-40, 0.0])
def test_scales_of_every_magnitude(squares, scale):
    values = torch.linspace(-1, 1, 256).abs() * scale if squares else torch.linspace(-1, 1, 256) * scale
    back = there_and_back(values, squares=squares)
    assert back.isfinite().all()
    kept = values.abs().max() >= torch.finfo(torch.float32).tiny
    assert torch.allclose(back, values if kept else torch.zeros(256), rtol=0, atol=0.02 * scale)


@BOTH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_block_with_what_is_not_finite_is_nan(squares, bad):
    values = torch.ones(512)
    values[3] = bad
    back = there_and_back(values, squares=squares)
    assert back[:256].isnan().all()
    assert (back[256:] == 1).all()


# -- kernels -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sizes():
    return [1, 255, 256, 257, 2 * 256 + 8, 3 * max(table.CHUNK_SIZE, 256) + 300]


class Case:
    """Rows of several sizes, one at an address without alignment, and one in fp32."""

    def __init__(self, device, sizes, kind="fp32", zero=True, wide=False):
        generator = torch.Generator().manual_seed(0)

        def random(size):
            value = torch.randn(size, generator=generator)
            return value * 10 ** (6 * torch.rand(size, generator=generator) - 6) if wide else value

        self.gradients = [random(size).to(device) for size in sizes]
        self.gradients += [random(700).to(device)[1:], random(300).to(device)]
        self.copies, self.parameters = None, []
        values = [torch.zeros_like(one) if zero else one.sin() for one in self.gradients]
        if kind == "remainder":
            self.gradients = [one.bfloat16() for one in self.gradients]
            self.parameters, self.copies = map(list, zip(*map(remainders.parted, values), strict=True))
        else:
            self.parameters = values
            self.copies = [one.half() for one in values] if kind == "copy" else None
        last = len(values) - 1
        kinds = [torch.float32 if number == last else torch.uint8 for number in range(last + 1)]
        self.states = [
            [torch.zeros_like(one, dtype=how) for one, how in zip(values, kinds, strict=True)] for _ in range(2)
        ]
        self.scales = [
            [
                None if number == last else torch.zeros(1, -(-len(one) // 256), device=device)
                for number, one in enumerate(values)
            ]
            for _ in range(2)
        ]
        self.steps = [torch.zeros((), device=device) for _ in values]

    def step(self, rule, **options):
        lists = (self.gradients, self.parameters, *self.states, self.steps)
        ops.adam(*lists, rule, copies=self.copies, scales=self.scales, **options)

    def written(self):
        columns = [self.parameters, *self.states, *self.scales, self.steps, self.copies or []]
        return [one.clone() for column in columns for one in column if one is not None]


def test_longer_chunks_change_nothing(kernel_device, sizes, monkeypatch):
    short, long = Case(kernel_device, sizes, zero=False), Case(kernel_device, sizes, zero=False)
    for _ in range(2):
        short.step(EXACT)
    monkeypatch.setattr(rules, "_LARGE", 0)
    for _ in range(2):
        long.step(EXACT)
    for one, other in zip(short.written(), long.written(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("wide", [False, True])
def test_the_kernel_encodes_as_the_reference(kernel_device, sizes, wide):
    mine, theirs = Case(kernel_device, sizes, wide=wide), Case(kernel_device, sizes, wide=wide)
    mine.step(EXACT)
    with references(kernel_device):
        theirs.step(EXACT)
    for one, other in zip(mine.states + mine.scales, theirs.states + theirs.scales, strict=True):
        for left, right in zip(one, other, strict=True):
            if left is None:
                continue
            if kernel_device.type == "cpu" or left.dtype is torch.float32:
                assert torch.equal(left, right)
            else:  # the root is approximate there
                assert ((left.int() - right.int()).abs() <= 1).all()
                assert (left != right).float().mean() < 1e-3


@one_order
@pytest.mark.parametrize("kind", ["fp32", "copy", "remainder"])
def test_the_kernel_updates_as_the_reference(kernel_device, sizes, kind):
    mine, theirs = (Case(kernel_device, sizes, kind, zero=False) for _ in range(2))
    rule, state = ops.AdamRule(0.01, weight_decay=0.1), ops.StepState.on(kernel_device)
    for step in range(4):
        state.found_inf.fill_(float(step == 2))
        before = mine.written()
        mine.step(rule, state=state, limit=2.0)
        if step == 2:
            assert all(map(torch.equal, before, mine.written()))
        with references(kernel_device):
            theirs.step(rule, state=state, limit=2.0)
    for one, other in zip(mine.states + mine.scales, theirs.states + theirs.scales, strict=True):
        for left, right in zip(one, other, strict=True):
            if left is not None and left.dtype is torch.uint8:
                assert (left != right).float().mean() < 0.01
            elif left is not None:
                torch.testing.assert_close(left, right)
    both = [remainders.wide_values(each.parameters, each.copies) for each in (mine, theirs)]
    for left, right in zip(*both, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)
    assert {step.item() for step in mine.steps} == {3.0}


@one_order
@pytest.mark.parametrize("state", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("kind", "bound"), [("adam", 0.05), ("lion", 0.1), ("sgd", 0.01)])
def test_states_follow_those_in_fp64(kernel_device, kind, bound, state):
    """A hundred steps of gradients of several magnitudes lead where fp64 states do, to some hundredths of the way."""
    update, rule = {
        "adam": (ops.adam, ops.AdamRule(0.01)),
        "lion": (ops.lion, ops.LionRule(0.01)),
        "sgd": (ops.sgd, ops.SgdRule(0.01, 0.9)),
    }[kind]
    generator = torch.Generator().manual_seed(0)
    scale = 10 ** (2 * torch.rand(4096, generator=generator) - 2)
    mine, exact = torch.zeros(4096, device=kernel_device), torch.zeros(4096, dtype=torch.float64)
    states = [[torch.zeros(4096, dtype=state, device=kernel_device)] for _ in rule.states]
    others = [[torch.zeros(4096, dtype=torch.float64)] for _ in rule.states]
    cells, other_cells = ([[torch.zeros((), device=one.device)] for _ in rule.cells] for one in (mine, exact))
    options = {"scales": [[torch.zeros(1, 16, device=kernel_device)] for _ in rule.states]}
    if state is torch.bfloat16:
        counts = None if "step" in rule.cells else [torch.zeros((), device=kernel_device)]
        options = {"sources": [Source(key_of("weight", 0))], "counts": counts}
    for _ in range(100):
        gradient = (torch.randn(4096, generator=generator) + 0.5) * scale
        update([gradient.to(kernel_device)], [mine], *states, *cells, rule, **options)
        rule.reference(ops.Rows([gradient.double()], [exact], others, other_cells), ops.Steering())
    far = (mine.cpu() - exact).norm() / exact.norm()
    assert 1e-6 < far < bound
