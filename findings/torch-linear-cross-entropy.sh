#!/usr/bin/env bash
# torch 2.13.0: the chunked torch.nn.functional.linear_cross_entropy (options=LinearCrossEntropyOptions()), on a CPU.
#
# Behaviour 1: with bf16 input and weight, the loss of the chunks is added in bf16.  For 2,048 rows and 32,000 classes it is 8.9375 where
# fp32 gives 10.4550; without options (one product) bf16 gives 10.4375.  acc_policy="accurate" concerns the gradients: it does not help.
# Behaviour 2: with targets that are all ignore_index, reduction="mean", in fp32 too, the gradients are nan, and the next step of the
# optimizer makes the weights nan.  cross_entropy, and linear_cross_entropy without options, give a nan loss and gradients of 0.
# Take instead: options=None, or fp32 input and weight; and reduction="sum" divided by the number of targets that count, at least 1.
#
# Seen with torch 2.13.0+cpu, Python 3.11:
#   fp32 10.4550, bf16 in one product 10.4375, bf16 in chunks 8.9375
#   all ignored, in one product: nan in gradients False; in chunks: True; in chunks by sum and count: False
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

OPTIONS = torch.nn.LinearCrossEntropyOptions()

torch.manual_seed(0)
inputs = torch.randn(2048, 64).bfloat16()
weight = (torch.randn(32000, 64) * 0.05).bfloat16()
targets = torch.randint(32000, (2048,))
right = F.cross_entropy(inputs.float() @ weight.float().T, targets).item()
whole = F.linear_cross_entropy(inputs, weight, targets).item()
chunked = F.linear_cross_entropy(inputs, weight, targets, options=OPTIONS).item()
print(f"fp32 {right:.4f}, bf16 in one product {whole:.4f}, bf16 in chunks {chunked:.4f}")


def nan_in_gradients(options, **reduction):
    inputs = torch.randn(64, 32, requires_grad=True)
    weight = torch.randn(512, 32, requires_grad=True)
    targets = torch.full((64,), -100)
    loss = F.linear_cross_entropy(inputs, weight, targets, options=options, **reduction)
    (loss / 1).backward()
    return bool(weight.grad.isnan().any())


found = (nan_in_gradients(None), nan_in_gradients(OPTIONS), nan_in_gradients(OPTIONS, reduction="sum"))
print("all ignored, in one product: nan in gradients %s; in chunks: %s; in chunks by sum and count: %s" % found)
assert abs(right - 10.45) < 0.1
assert abs(whole - right) < 0.1
assert abs(chunked - right) > 1
assert found == (False, True, False)
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
