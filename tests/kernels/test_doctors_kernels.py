"""The doctor compiles every kernel for every GPU: its rows on simulated GPUs, and a compiler for what it hands over."""

from __future__ import annotations

import pytest
import torch

from fabricamp.commands.doctor import check_kernels, show
from fabricamp.ops import bridge
from tests.kernels.nvrtc import compile_for


@pytest.fixture
def compiled(monkeypatch):
    """Simulates two GPUs; returns the sources of the kernels compiled for them."""
    texts = []

    def compile_it(text, function, device):
        assert f"{function}(" in text
        texts.append(text)
        return lambda *_: None

    monkeypatch.setattr(bridge, "_cupy_obstacle", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # A torch for CUDA would look for these GPUs.
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setitem(bridge.COMPILERS, "cuda", compile_it)
    bridge.kernel.cache_clear()
    yield texts
    bridge.kernel.cache_clear()


def test_every_kernel_is_compiled_for_every_gpu(compiled):
    names = [one.name for one in check_kernels() if one.name.startswith("kernel ")]
    files = [f"{file}.cu" for file in bridge.kernel_files()]
    assert names == [f"kernel {file}" for file in files] * 2
    assert all(one.status == "ok" for one in check_kernels())
    assert len(compiled) == 2 * len(files)
    for text in set(compiled):
        compile_for(text, 90)
    for file in files:  # a file without rows would compile to nothing
        text = bridge.kernel_texts()[file].read_text()
        assert ("  KINDS\n" in text) == ("#ifndef KINDS" in text), file


def test_a_kernel_that_does_not_compile_has_a_row_and_a_cure(compiled, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "240")
    real = bridge.COMPILERS["cuda"]

    def fail_for_adam(text, function, device):
        if function == "adam":
            raise RuntimeError("kernel adam does not compile for cuda:0: no cuda_fp16.h\nmore of it")
        return real(text, function, device)

    monkeypatch.setitem(bridge.COMPILERS, "cuda", fail_for_adam)
    checks = [one for one in check_kernels() if one.name.startswith("kernel ")]
    broken = [one for one in checks if one.status == "broken"]
    assert [one.name for one in broken] == ["kernel adam.cu"] * 2
    assert broken[0].found.endswith("no cuda_fp16.h")
    assert "--force-reinstall" in broken[0].cure
    show(checks)
    assert "2 broken" in capfd.readouterr().out
