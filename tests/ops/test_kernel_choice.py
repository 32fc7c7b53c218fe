"""The choice between kernel and torch by the size of a norm's input: eager steps count host time, captured steps do not."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.ops import dispatch, layer_norm, rms_norm
from fabricamp.ops.norm import kernels as norm_kernels
from tests.cuda_on_cpu.compiler import one_order


@pytest.fixture
def device(kernel_device, monkeypatch):
    """Returns the kernels' device; kernels run for inputs of at least three rows of 24."""
    monkeypatch.setattr(dispatch, "_WORTH_THE_HOST", 3 * 24)
    monkeypatch.setattr(dispatch, "settings", dispatch.ChoiceSettings())
    monkeypatch.setattr(dispatch, "bands_of", lambda *_: [(1, "cupy")])  # the tables have no widths so small
    monkeypatch.setattr(dispatch, "_card", functools.cache(lambda _: {}))
    dispatch.forget()
    norm_kernels.forget()
    yield kernel_device
    monkeypatch.undo()
    dispatch.forget()
    norm_kernels.forget()


@one_order
def test_a_small_input_is_torchs_where_the_host_is_weighed(device):
    small, large = (torch.randn(rows, 24, device=device, requires_grad=True) for rows in (2, 3))

    def found(x, norm=layer_norm, **how):
        return type(norm(x, 24, **how).grad_fn).__name__ == "_NormaliseBackward"

    for norm in (layer_norm, rms_norm):
        assert [found(small, norm), found(large, norm)] == [False, True]
    assert found(small, memory_efficient=True)  # torch's operation would keep the input
    assert found(small, dtype=torch.float16)  # torch would need several operations
    assert found(small, weight=torch.ones(24, device=device, dtype=torch.float16))
    recorded = [str(make_fx(lambda x: layer_norm(x, 24))(x).graph) for x in (small, large)]
    assert ["fabricamp" in one for one in recorded] == [False, True]
    ops.set_kernel_choice("graph")
    assert found(small)
    ops.set_kernel_choice("eager")
    assert not found(small)


@one_order
def test_a_compiled_step_weighs_as_an_eager_one(device, monkeypatch):
    launches = []
    spied = norm_kernels.Kernels.forward
    monkeypatch.setattr(norm_kernels.Kernels, "forward", lambda *a: (launches.append(1), spied(*a))[1])
    compiled = torch.compile(lambda x: layer_norm(x, 24) + 1, fullgraph=True, backend="aot_eager", dynamic=True)
    counts = []
    for rows, mode in ((2, "eager"), (3, "eager"), (2, "graph"), (2, "eager")):
        ops.set_kernel_choice(mode)
        launches.clear()
        compiled(torch.randn(rows, 24, device=device))
        counts.append(len(launches))
    assert counts == [0, 1, 1, 0]


def test_an_unknown_choice_is_refused():
    with pytest.raises(ConfigError, match=r"set_kernel_choice\('cuda'\) is not known \(known: 'eager', 'graph'\)"):
        ops.set_kernel_choice("cuda")
