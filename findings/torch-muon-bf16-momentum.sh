#!/usr/bin/env bash
# torch 2.13.0: torch.optim.Muon(nesterov=False) on bf16 weights forgets how large gradients were.
#
# Behaviour: Muon normalises its update before the Newton-Schulz steps, by a division in place of grad.bfloat16().  For a bf16 tensor this
# is no copy, and without nesterov it is the momentum buffer itself: after each step the buffer has norm 1.  After a gradient of norm 200,
# one of norm 2 then makes a tenth of the buffer, rightly a hundredth.  With fp32 weights, or nesterov=True, the buffer is right.
# Take instead: fp32 (master) weights, or nesterov=True.
#
# Seen with torch 2.13.0+cpu, Python 3.11; the norm of the momentum after a gradient of norm 200 and one of norm 2:
#   fp32 10.00 9.60, bf16 1.00 1.00
#
# Ends with 1 if that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/program.py" <<'PROGRAM'
import torch


def norms(dtype):
    weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype))
    optimizer = torch.optim.Muon([weight], lr=0.1, nesterov=False)
    seen = []
    for scale in (100, 1):
        weight.grad = (torch.eye(4) * scale).to(dtype)
        optimizer.step()
        seen.append(optimizer.state[weight]["momentum_buffer"].float().norm().item())
    return seen


right, bf16 = norms(torch.float32), norms(torch.bfloat16)
print("fp32 {:.2f} {:.2f}, bf16 {:.2f} {:.2f}".format(*right, *bf16))
assert abs(right[0] - 10) < 0.1
assert abs(right[1] - 9.6) < 0.1
assert all(abs(norm - 1) < 0.02 for norm in bf16)
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
