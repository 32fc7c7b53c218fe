"""Renders docs/questions.toml as the index by question, docs/questions.md: ``python docs/render_questions.py``."""

from __future__ import annotations

import tomllib
from pathlib import Path

HERE = Path(__file__).parent
HEAD = """# What people ask

Questions that users of Lightning and apex ask in public, each with its short answer and a link to the whole one. Where each was
asked is in [questions.toml](questions.toml), from which `python docs/render_questions.py` makes this page.
"""


def render() -> str:
    questions = tomllib.loads((HERE / "questions.toml").read_text())["question"]
    parts = [HEAD.strip()]
    for part in dict.fromkeys(question["part"] for question in questions):
        rows = [
            f"| [{question['asks']}]({question['at']}) | {question['answer']} |"
            for question in questions
            if question["part"] == part
        ]
        parts += [f"## {part}", "\n".join(["| question | in short |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (HERE / "questions.md").write_text(render())
