"""Records the output of the programs under Lightning in tests/lightning/printed; needs a Python with Lightning.

python -m venv /tmp/lightning
/tmp/lightning/bin/pip install torch==2.13.0+cpu lightning==2.6.0 torchmetrics tensorboard hydra-core optuna wandb rich pytest
/tmp/lightning/bin/python tests/lightning/record.py              # all of them, or those that are named
/tmp/lightning/bin/python tests/lightning/record.py gan --into /tmp/elsewhere
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RES_OPTIONS": "attempts:0"}  # as the tests run them
sys.path.insert(0, str(Path(__file__).parent))
from run import HERE, NAMES, printed


def record(name: str, folder: Path) -> None:
    """Runs a program in a new folder and records its output, after a line with the versions and the command."""
    command = f"# lightning {version('lightning')}, torch {version('torch')}: python tests/lightning/record.py {name}"
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        text = printed(name, "lightning.pytorch")
    (folder / f"{name}.txt").write_text(f"{command}\n{text}")
    print(f"{name}: {len(text.splitlines())} lines", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Records what the programs print under Lightning.")
    parser.add_argument("names", nargs="*", help="programs; all of them where none is named")
    parser.add_argument("--into", type=Path, default=HERE / "printed")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    for program in arguments.names or NAMES:
        record(program, arguments.into.resolve())
