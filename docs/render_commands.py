"""Renders the help of the commands as docs/commands.md: ``python docs/render_commands.py``."""

from __future__ import annotations

import os
from pathlib import Path

from fabricamp import cli

HEAD = """# Commands

`python docs/render_commands.py` makes this page from what `fabricamp COMMAND --help` shows. For the run commands it also shows the
Trainer's arguments, and after a YAML file those of every class in the file.
"""
MORE = {
    "fit": "The file: [configuration.md](configuration.md). Resuming: [resume.md](how-to/resume.md).",
    "validate": "Without `ckpt_path` the module has its first weights, and a line says so.",
    "test": "As `validate`, with `test_step`.",
    "predict": "`torch.load(FILE)['predictions']` is a list of batches. In a script: [predictions.md](how-to/predictions.md).",
    "bench": "What to do then: [slow-data.md](how-to/slow-data.md), [speed.md](how-to/speed.md).",
    "plan": "In Python: `Trainer.plan`; what to take then: [memory.md](how-to/memory.md#before-the-first-step).",
    "plot": "In Python: `fabricamp.runs.plot` ([API](api/tools.md)).",
    "runs": "From `run.json`, which each fit writes beside its logs ([configuration.md](configuration.md#runs-on-disk)).",
    "verify": "What it does, and what makes runs differ: [reliability.md](reliability.md#faults), at its end.",
    "export": "In Python, and each format: [export.md](how-to/export.md).",
    "config": "What it takes, and what it refuses: [configuration.md](configuration.md#from-lightningcli).",
    "doctor": "Its exit code is 1 if something is broken.",
    "help": "Messages name these pages. On a terminal a page is shown in the pager (`PAGER`), elsewhere as Markdown.",
}


def render() -> str:
    os.environ["COLUMNS"] = "88"
    _, commands = cli._parsers()
    parts = [HEAD.strip()]
    for name, command in commands.items():
        parts += [f"## fabricamp {name}", f"```text\n{command.format_help().strip()}\n```", MORE[name]]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("commands.md").write_text(render())
