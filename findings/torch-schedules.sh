#!/usr/bin/env bash
# torch 2.13.0: rates that learning-rate schedules set beside what they are for.
#
# Behaviour 1: OneCycleLR(total_steps=5), stepped after each of 5 steps of the optimizer as torch's documentation shows, goes on beyond its
# last rate in the fifth call: to 0.0188 after 4e-7, or below zero with anneal_strategy="linear".  What is saved, logged or trained
# after it has that rate; the sixth call raises.
# Behaviour 2: a group that the optimizer gets before the end of LinearLR or ConstantLR is raised above the rate that it was given: the
# schedule multiplies by what undoes its first factor, which the new group never had.
# Take instead: no call after the last step; a group from the beginning, or a schedule that has ended.
#
# Seen with torch 2.13.0+cpu, Python 3.11:
#   cosine: 4.0e-07 in the last step, 1.9e-02 after it; linear: 4.0e-07 in the last step, -2.9e-02 after it
#   for a group of 0.7: LinearLR 1.50, ConstantLR 1.40
#
# Ends with 1 if that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/program.py" <<'PROGRAM'
import torch
from torch.optim import lr_scheduler


def made(lr):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)


def end_of_cycle(strategy):
    optimizer = made(0.1)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5, anneal_strategy=strategy)
    for _ in range(5):
        optimizer.step()
        last = optimizer.param_groups[0]["lr"]
        schedule.step()
    return last, optimizer.param_groups[0]["lr"]


def rate_of_later_group(kind, *options):
    optimizer = made(0.1)
    schedule = kind(optimizer, *options)
    for step in range(8):
        if step == 1:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.7})
        optimizer.step()
        schedule.step()
    return optimizer.param_groups[1]["lr"]


cosine, linear = end_of_cycle("cos"), end_of_cycle("linear")
print(
    f"cosine: {cosine[0]:.1e} in the last step, {cosine[1]:.1e} after it; "
    f"linear: {linear[0]:.1e} in the last step, {linear[1]:.1e} after it"
)
grown = rate_of_later_group(lr_scheduler.LinearLR, 1 / 3, 1.0, 5), rate_of_later_group(lr_scheduler.ConstantLR, 0.5, 4)
print("for a group of 0.7: LinearLR {:.2f}, ConstantLR {:.2f}".format(*grown))
assert abs(cosine[0] - 4e-7) < 1e-9
assert abs(cosine[1] - 0.0188) < 1e-4
assert linear[1] < 0
assert abs(grown[0] - 1.5) < 1e-6
assert abs(grown[1] - 1.4) < 1e-6
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
