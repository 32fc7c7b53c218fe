"""What a plan's compiled blocks keep for backward, beside torch.compile's own partition of the same block with real tensors."""

from __future__ import annotations

import torch
from torch import nn

from fabricamp.engine.planning.compiled import CompiledBlocks
from fabricamp.engine.planning.tracing import FakeTensorMode, Recorder, as_on_a_gpu


def test_compiled_blocks_keep_what_torchs_partition_keeps():
    """Bytes between forward and backward of a block: of the plan's program, and of torch.compile with real tensors."""

    def block():
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh())

    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    real = block()
    x = torch.randn(128, 64, requires_grad=True)
    program = torch.compile(real, backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = program(x)
    own = {one.untyped_storage().data_ptr() for one in (*real.parameters(), x)}
    expected = sum(size for address, size in kept.items() if address not in own)
    expected += 0 if output.untyped_storage().data_ptr() in kept else output.untyped_storage().nbytes()
    torch.compiler.reset()
    with FakeTensorMode():
        traced = block()
        x = torch.randn(128, 64, requires_grad=True)
        recorder = Recorder([*traced.parameters(), x])
        blocks = CompiledBlocks(recorder)
        blocks.put_on([traced])
        with as_on_a_gpu(), recorder:
            output = traced(x)
            live = dict(recorder.events)
            del output
    assert not blocks.uncompiled
    assert sum(live.values()) == expected
