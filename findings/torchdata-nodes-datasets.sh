#!/usr/bin/env bash
# torchdata 0.11.0 with datasets 5.2.0: nodes over a stream begin every later epoch at the resume point too.
#
# Behaviour: Loader(Batcher(IterableWrapper(stream), 4)) of torchdata.nodes, resumed after 3 of 12 batches.  The rest of that epoch is
# right.  Each epoch after it has 9 batches again in place of 12: IterableDataset.load_state_dict of datasets keeps the loaded state
# for every pass of the same epoch number, and IterableWrapper calls no set_epoch.  Neither library does so alone: the stream in torch's
# DataLoader with set_epoch, and nodes over other streams, are right.
# Take instead: call stream.set_epoch(epoch) before each epoch, or stream.load_state_dict(None) after the resumed one.
#
# Seen with torchdata 0.11.0, datasets 5.2.0, torch 2.13.0, Python 3.11:
#   batches in the resumed epoch and the two after it: 9 9 9
#
# Ends with 1 if that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 torchdata==0.11.0 datasets==5.2.0
cat > "$folder/program.py" <<'PROGRAM'
import datasets
from torchdata.nodes import Batcher, IterableWrapper, Loader

datasets.logging.set_verbosity_error()


def loader():
    stream = datasets.Dataset.from_dict({"x": list(range(48))}).to_iterable_dataset(num_shards=4)
    return Loader(Batcher(IterableWrapper(stream), 4))


first = loader()
batches = iter(first)
for _ in range(3):
    next(batches)
state = first.state_dict()

second = loader()
second.load_state_dict(state)
lengths = [len(list(second)) for _ in range(3)]
print("batches in the resumed epoch and the two after it:", *lengths)
assert lengths == [9, 9, 9], lengths
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
