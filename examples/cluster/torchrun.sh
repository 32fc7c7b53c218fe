#!/usr/bin/env bash
# Trains examples/imagenet under torchrun.  Run the same command on each machine, in the clone:
#     HOST=first-machine NODES=2 GPUS=4 examples/cluster/torchrun.sh /data/imagenet
# On one machine HOST and NODES are not needed.  Without a folder of images the script trains on synthetic ones:
#     GPUS=2 examples/cluster/torchrun.sh --accelerator=cpu --quick
set -euo pipefail

host=${HOST:-localhost}              # the machine where the ranks meet: any one of them, the same name on all
nodes=${NODES:-1}
gpus=${GPUS:-1}                      # processes on this machine, one for each GPU
folder=${FOLDER:-runs/torchrun}      # the same on all machines; give a new run another one, because --resume continues the old one
arguments=("$@")
if [[ $# -gt 0 && $1 != --* ]]; then
    arguments=(--data="$1" --workers=7 --epochs=90 --batch-size=64 "${@:2}")
fi

# torchrun passes rank and world size in variables, and the Trainer finds them there.
# --max-restarts: if a rank fails, all are started again, and --resume lets them go on from the newest checkpoint.
exec "${PYTHON:-.venv/bin/python}" -m torch.distributed.run \
    --nnodes="$nodes" \
    --nproc-per-node="$gpus" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$host:${PORT:-29500}" \
    --max-restarts=3 \
    examples/imagenet/train.py \
    --num-nodes="$nodes" \
    --devices="$gpus" \
    --strategy=delayed_ddp \
    --sync-batchnorm \
    --folder="$folder" \
    --resume \
    "${arguments[@]}"
