#!/usr/bin/env bash
# torch 2.13.0 on a CPU: some backward passes add bf16 gradients one by one in bf16, others in fp32.
#
# Behaviour: 5,000 gradients of 1 that meet in one value.  LayerNorm's bias, embedding rows, EmbeddingBag rows and rows taken by an index
# stop at 256: bf16 has no 257, so that each further addition rounds back (with 2 threads LayerNorm's stops at 512, as each thread
# has a sum of its own).  index_select, gather, scatter_add, and the biases of Linear, Conv1d, BatchNorm and GroupNorm give 4,992, which
# is 5,000 rounded once.  A frequent token or a long sequence so has a gradient that is up to 20 times too small, without a word.
# Take instead: fp32 on a CPU; or index_select in place of embedding and weight[index].
#
# Seen with torch 2.13.0+cpu, one thread, Python 3.11:
#   LayerNorm bias 256, embedding 256, EmbeddingBag 256, index 256, index_select 4992, gather 4992, Linear bias 4992, GroupNorm bias 4992
#
# Ends with 1 if that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/program.py" <<'PROGRAM'
import torch
from torch.nn import functional as F

torch.set_num_threads(1)
TIMES = 5000
rows = torch.zeros(TIMES, dtype=torch.long)
x = torch.randn(TIMES, 8, dtype=torch.bfloat16)


def of_table(take):
    table = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
    take(table).sum().backward()
    return int(table.grad[0, 0])


def of_bias(layer):
    layer.to(torch.bfloat16)(x).sum().backward()
    return int(layer.bias.grad[0])


found = {
    "LayerNorm bias": of_bias(torch.nn.LayerNorm(8)),
    "embedding": of_table(lambda table: F.embedding(rows, table)),
    "EmbeddingBag": of_table(lambda table: F.embedding_bag(rows[None], table, mode="sum")),
    "index": of_table(lambda table: table[rows]),
    "index_select": of_table(lambda table: table.index_select(0, rows)),
    "gather": of_table(lambda table: table.gather(0, rows[:, None].expand(-1, 8))),
    "Linear bias": of_bias(torch.nn.Linear(8, 8)),
    "GroupNorm bias": of_bias(torch.nn.GroupNorm(2, 8)),
}
print(", ".join(f"{name} {value}" for name, value in found.items()))
assert [*found.values()] == [256, 256, 256, 256, 4992, 4992, 4992, 4992]
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
