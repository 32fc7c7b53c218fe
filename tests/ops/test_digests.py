"""Digests of tensors see each bit, its place and its tensor, and are the same by kernel and by torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fabricamp.ops.digests import digests
from fabricamp.torch_private import sleep_on_gpu
from tests.cuda_on_cpu.compiler import one_order, references
from tests.ops.lists import sizes, tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


def lists_of(device):
    """Lists of all layouts; of all dtypes in sizes around a chunk; of tensors at each alignment."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 2, (9000,), generator=generator, dtype=torch.uint8).to(device)
    kinds = [
        noise[: 8 * size].view(torch.uint8)[: size * kind.itemsize].view(kind) for size in sizes() for kind in DTYPES
    ]
    floats = torch.randn(3000, generator=generator).to(device)
    halves = floats.bfloat16()
    shifted = [floats[start : start + 700] for start in range(5)] + [halves[start:2000] for start in range(9)]
    whole = [noise[start : start + size] for start in range(17) for size in (600, 513, 7, 0)]
    conjugates = [
        torch.view_as_complex(floats.view(-1, 2)).conj(),
        torch.view_as_complex(floats.view(-1, 2)).conj().imag,
    ]
    return [tensors(device), kinds, shifted, whole, conjugates, [floats.expand(2, -1), floats.view(30, 100).t()]]


def test_the_bits_are_those_of_the_reference(kernel_device):
    for given_tensors in lists_of(kernel_device):
        found = digests(given_tensors)
        with references(kernel_device):
            expected = digests(given_tensors)
        assert found.shape == (len(given_tensors), 2)
        assert torch.equal(found, expected)
        for one, row in zip(given_tensors, found.tolist(), strict=True):
            assert (row != [0, 0]) == bool(one.numel())


def test_the_two_sums_are_those_of_plain_numbers():
    def mixed(bits, place, row):
        key = (place * 0x9E3779B97F4A7C15 + row * 0xD1B54A32D192ED03) % 2**64
        word = bits ^ key ^ (key >> 32)
        for _ in range(2):
            word = (word ^ (word >> 32)) * 0xD6E8FEB86659FD93 % 2**64
        return word ^ (word >> 32)

    values = torch.arange(1, 12, dtype=torch.int16)
    data = values.numpy().tobytes() + b"\0\0"
    sums = [0, 0]
    for place in range(3):
        word = mixed(int.from_bytes(data[8 * place : 8 * place + 8], "little"), place, 1)
        turned = (word << 32 | word >> 32) % 2**64
        sums = [(sums[0] + word) % 2**64, (sums[1] + turned * (2 * turned + 1)) % 2**64]
    found = digests([torch.zeros(0), values])
    assert [number % 2**64 for number in found[1].tolist()] == sums


def differs(one, other):
    """Returns, for each tensor, whether its digest differs."""
    return (digests(one) != digests(other)).any(1).tolist()


@one_order
def test_permuted_rows_differ(kernel_device):
    rows = torch.randn(6, 40).to(kernel_device)
    assert differs([rows], [rows[[1, 0, 2, 3, 4, 5]].contiguous()]) == [True]
    assert differs([rows], [rows.flip(0).contiguous()]) == [True]
    assert differs([rows], [rows.t().contiguous()]) == [True]
    same = torch.ones(6, 40, device=kernel_device)
    assert differs([same], [same[[1, 0, 2, 3, 4, 5]]]) == [False]


@one_order
def test_swapped_tensors_differ(kernel_device):
    one, other = torch.randn(2, 50).to(kernel_device)
    assert differs([one, other], [other, one]) == [True, True]
    assert differs([one, one], [one, one]) == [False, False]
    first, second = digests([one, one]).tolist()
    assert first != second


@one_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_sign_of_zero_differs(kernel_device, dtype):
    zeros = torch.zeros(100, dtype=dtype, device=kernel_device)
    other = zeros.clone()
    other[99] = -0.0
    assert torch.equal(zeros, other)
    assert differs([zeros, zeros], [zeros, other]) == [False, True]


@one_order
def test_payloads_of_nan_differ(kernel_device):
    bits = torch.full((100,), 0x7FC00000, dtype=torch.int32).to(kernel_device)
    other = bits.clone()
    other[50] = 0x7FC00001
    assert other.view(torch.float32).isnan().all()
    assert differs([bits.view(torch.float32)], [other.view(torch.float32)]) == [True]
    assert differs([bits.view(torch.float32)], [bits.clone().view(torch.float32)]) == [False]


def of(data, kind=torch.uint8):
    return torch.tensor(list(data), dtype=torch.uint8).view(kind)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_each_flip_of_bits_is_seen(data, choose):
    places = choose.draw(st.sets(st.integers(0, 8 * len(data) - 1), min_size=1, max_size=4))
    flipped = bytearray(data)
    for place in places:
        flipped[place // 8] ^= 1 << place % 8
    assert differs([of(data)], [of(flipped)]) == [True]


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), min_size=2, max_size=40), st.data())
def test_each_swap_of_words_is_seen(words, choose):
    one, other = choose.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    swapped = list(words)
    swapped[one], swapped[other] = words[other], words[one]
    before, after = (of(b"".join(word.to_bytes(8, "little") for word in each)) for each in (words, swapped))
    assert differs([before], [after]) == [words[one] != words[other]]


@given(st.lists(st.binary(min_size=1, max_size=24), min_size=2, max_size=6), st.data())
def test_each_swap_of_tensors_is_seen(rows, choose):
    order = choose.draw(st.permutations(range(len(rows))))
    given_rows = [of(row) for row in rows]
    moved = [given_rows[number] for number in order]
    changed = [rows[number] != row for number, row in zip(order, rows, strict=True)]
    # Zeros at the end of the last word are not told: a tensor's size is known.
    padded = [rows[number].rstrip(b"\0") != row.rstrip(b"\0") for number, row in zip(order, rows, strict=True)]
    assert differs(given_rows, moved) in (changed, padded)


@one_order
def test_what_is_compared_is_not_written(kernel_device):
    rows = tensors(kernel_device)
    before, versions = [one.clone() for one in rows], [one._version for one in rows]
    digests(rows)
    assert all(map(torch.equal, rows, before))
    assert [one._version for one in rows] == versions


def test_no_tensors_have_no_digests():
    assert digests([]).shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_reads_a_gibibyte_at_the_speed_of_memory():
    values = torch.empty(2**28, dtype=torch.float32, device="cuda").normal_()
    small = [torch.empty(1000 + number, dtype=torch.bfloat16, device="cuda") for number in range(2000)]
    for rows in ([values], [values, *small]):
        digests(rows)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sleep_on_gpu(10**8)  # the host writes down where the tensors are meanwhile
        begin.record()
        digests(rows)
        end.record()
        end.synchronize()
        assert begin.elapsed_time(end) < 4  # ms; a copy reads and writes as much in 0.6 ms on an H200
    with references(torch.device("cuda")):
        assert torch.equal(digests([values[: 2**20 + 3]]), digests([values[: 2**20 + 3].cpu()]).cuda())
