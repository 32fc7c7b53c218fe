#!/usr/bin/env bash
# torch 2.13.0: torch.optim.swa_utils.AveragedModel of bf16 weights stops moving.
#
# Behaviour: the average has the dtype of the model.  An exponential average with a decay of 0.999 moves by a thousandth of the difference,
# and bf16 has 256 steps from 1 to 2: each update rounds back to the value before.  After weights of 1 and then 10,000 updates with
# weights of 2, the average is 1.  The plain mean (the default) of 500 times 1 and 500 times 2 is 1 as well, for 1.5.
# Take instead: AveragedModel(copy.deepcopy(model).float(), avg_fn=get_ema_avg_fn(0.999)), or the mean, which then are 1.9999 and 1.5
# (multi_avg_fn refuses the two dtypes).
#
# Seen with torch 2.13.0+cpu, Python 3.11:
#   exponential average 1.0 for 2.0, mean 1.0 for 1.5
#
# Ends with 1 if that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/program.py" <<'PROGRAM'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

model = torch.nn.Linear(1, 1, bias=False).bfloat16()


def update(average, value, times):
    model.weight.data.fill_(value)
    for _ in range(times):
        average.update_parameters(model)


exponential = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
mean = AveragedModel(model)
update(exponential, 1, 1)
update(exponential, 2, 10_000)
update(mean, 1, 500)
update(mean, 2, 500)
print(f"exponential average {exponential.module.weight.item()} for 2.0, mean {mean.module.weight.item()} for 1.5")
assert exponential.module.weight.item() == 1
assert mean.module.weight.item() == 1
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
