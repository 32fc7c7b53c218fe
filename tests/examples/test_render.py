"""Rendering of results as tables: the page reads what each script writes, and any result file may be missing."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys

import pytest
import torch
import torch._dynamo  # torch's wrapper imports it: here once, before the ranks are forked, instead of in each rank

from benchmarks import compiled_start, cross_entropy, fsdp, norms, render, rounds, start, summary, syncbn, two_trees
from tests.distributed.ranks import run_ranks

ABOUT = {
    "device": "a card",
    "copy_gb_per_s": 4000,
    "command": "python it",
    "torch": "2",
    "python": "3",
    "date": "today",
}


def syncbn_quick(path):
    torch.cuda.is_available = lambda: False
    sys.argv[:] = ["benchmarks/syncbn.py", "--quick", "--out", str(path)]
    syncbn.main()


def test_synchronised_batch_norm_on_a_cpu_and_on_gpus(tmp_path):
    run_ranks(syncbn_quick, 2, tmp_path / "found.json", backend=None)
    found = json.loads((tmp_path / "found.json").read_text())
    page = render.syncbn(found)
    assert "None" not in page
    assert f"| ours over local | {found['ratios']['ours over local']:.2f} |" in page
    assert "| 4 x 16 x 8 x 8 | NHWC |" in page
    assert "| fabricamp, collective |" in page
    page = render.syncbn(on_gpus(found))
    assert "| torch over ours, NHWC | 4.00 |" in page
    assert "| 1 x 2 | NHWC | 1.000 | 1.500 | 6.000 | 1.50 | 4.00 | 0.500 / 0.750 / 3.000 | 100 / 150 |" in page
    assert "| 8 | fabricamp SyncBatchNorm, CUDA graph | 4.40 | 1.10 |" in page


def on_gpus(found):
    """Adds the results that only GPU runs have: torch's layer, GPU times, steps in a CUDA graph."""
    walls = {syncbn.LOCAL: 1.0, syncbn.OURS: 1.5, syncbn.OF_TORCH: 6.0}
    layers = [
        {"shape": [1, 2], "layout": layout, "run": run, "wall_ms": wall, "gpu_ms": wall / 2, "host_us": 100 * wall}
        for layout in ("NCHW", "NHWC")
        for run, wall in walls.items()
    ]
    for layer in layers:
        if layer["run"] == syncbn.OF_TORCH:
            layer["host_us"] = None  # it waits for the GPU
    times = {syncbn.LOCAL: 10.0, syncbn.OURS: 12.0, syncbn.LOCAL + syncbn.GRAPH: 4.0, syncbn.OURS + syncbn.GRAPH: 4.4}
    networks = [{"batch": batch, "run": run, "wall_ms": time} for batch in (64, 8) for run, time in times.items()]
    found = found | {"layers": layers, "networks": networks}
    return found | {"ratios": syncbn.ratios(found)}


@pytest.fixture
def _as_with_a_table(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(norms.dispatch, "chosen", lambda op, dtype, width, device: width >= 4096)


@pytest.mark.usefixtures("_as_with_a_table")
def test_norms(capsys):
    ours = {"forward": 0.1, "backward": 0.2, "both": 0.3}
    theirs = {"forward": 0.2, "backward": 0.4, "both": 0.6}
    medians = {"ours": ours, "torch": theirs, "compiled": {"forward": 0.2, "backward": 0.3, "both": 0.5}}
    rows = norms.show("layer_norm", torch.bfloat16, 16384, 4096, medians, 4000.0)
    slower = {"ours": ours, "torch": {"forward": 0.1, "backward": 0.2, "both": 0.27}}
    rows += norms.show("rms_norm", torch.float32, 1024, 65536, slower, 4000.0)
    rows += norms.show("cross_entropy", torch.bfloat16, 8192, 1024, slower, 4000.0)
    page = render.norms(ABOUT | {"rows": rows})
    assert "| norms of width 4096 or more: gain | 2 | 0.90x | RMSNorm 1024 x 65536 float32 |" in page
    assert "| shapes for which the kernel runs: gain | 2 | 0.90x | RMSNorm 1024 x 65536 float32 |" in page
    first = "0.1000 (67%) | 0.2000 (50%) | 0.3000 (56%)"
    assert (
        f"| 16384 x 4096 | bfloat16 | {first} | 0.2000 (34%) | 0.4000 (25%) | 0.6000 (28%) | 0.5000 (34%) | 2.00x |"
        in page
    )
    assert "| Cross-entropy, rows x width |" in page
    assert "| 0.2700 (5%) |  | 0.90x | torch |" in page
    part = render.norms(ABOUT | {"rows": rows[:3]})
    assert "RMSNorm" not in part
    assert "layer_norm" in capsys.readouterr().out


def test_cross_entropy():
    shape = "8192x50304 bfloat16"
    times = {
        "ours": cross_entropy.Result(0.2, 0.4, 0.6, 0.7, 2.0),
        "torch": cross_entropy.Result(0.5, 1.0, 1.5, 1.6, 4.0),
    }
    rows = [
        {"shape": shape, "rows": 8192, "classes": 50304, "row": name, **time._asdict(), "share_of_copy": 0.9}
        for name, time in times.items()
    ]
    page = render.cross_entropy(ABOUT | {"rows": rows})
    assert f"| {shape} | ours | 0.200 | 0.400 | 0.600 | 0.700 | 90% | 2.00 | 2.50x |" in page


def test_losses_without_stored_logits():
    shape = "8192x128256x4096 bfloat16"
    times = {
        "ours": cross_entropy.LinearResult(37.5, 0.03, 37.53, 1.39, 0.34, 2.1e-5, 3.5e-3),
        "stored, torch": cross_entropy.LinearResult(13.5, 24.8, 38.3, 6.3, 5.25, 1.4e-2, 1.9e-3),
    }
    rows = [{"shape": shape, "row": name, **time._asdict(), "ratio_to_stored": 1.1} for name, time in times.items()]
    result = ABOUT | {"rows": [*rows, {"shape": shape, "row": "Liger", "error": "ImportError"}]}
    page = render.linear_cross_entropy(result)
    assert f"| {shape} | ours | 37.50 | 0.03 | 37.53 | 1.10 | 1.39 | 0.34 | 2e-05 | 4e-03 |" in page
    assert "Not measured, because it failed in this run: Liger." in page
    ((_, ours, theirs, _),) = summary.rows_of({"linear_cross_entropy-card.json": result})
    assert (ours, theirs) == ("37.5 ms, 1.39 GB", "torch's on stored logits: 38.3 ms, 6.30 GB")
    assert summary.rows_of({"linear_cross_entropy-card.json": result | {"rows": rows[1:]}}) == []


def test_sharded_weights_with_compiled_blocks():
    def row(way, *times):
        return {
            "network": "1.4B",
            "way": way,
            "step_ms": times[1],
            "window_ms": times[1],
            "window_quartiles_ms": [times[0], times[2]],
            "update_ms": 1.0,
            "memory_gb": 2.0,
            "tokens_s_gpu": 3,
        }

    rows = [
        row("fabricamp blocks", 8.5, 8.8, 9.5),
        row("fabricamp fp8 blocks", 7.0, 7.5, 7.6),
        row("compiled", 10.0, 10.0, 10.0),
    ]
    found = fsdp.ratios([*rows, {"network": "1.4B", "way": "saved"}])
    assert [(one["way"], one["decided"]) for one in found] == [
        ("fabricamp blocks", "not decided"),
        ("fabricamp fp8 blocks", "met"),
    ]
    page = render.fsdp(ABOUT | {"rows": rows, "ratios": found})
    assert (
        "| 1.4B | fabricamp fp8 blocks | 7.50 (7.00 to 7.60) | 1.00 | 2.00 | 3 | 0.750 (0.700 to 0.760); aim 0.8, met |"
        in page
    )
    assert page.count("step, GPU ms") == 1
    assert "step over fused" not in page


def test_sharded_weights_as_graphs_have_no_time_of_their_update():
    row = {"network": "6.9B", "window_quartiles_ms": [2.0, 2.0], "memory_gb": 2.0, "tokens_s_gpu": 3, "tflops_gpu": 4.0}
    ways = {"fabricamp blocks graph": 219.51, "fabricamp fp8 blocks graph": 177.43, "compiled": 266.73}
    rows = [{**row, "way": way, "step_ms": ms, "window_ms": ms} for way, ms in ways.items()]
    result = ABOUT | {"rows": rows, "ratios": fsdp.ratios(rows), "device": "2 x a card"}
    page = render.fsdp(result)
    assert "| 6.9B | fabricamp blocks graph | 219.51 (2.00 to 2.00) |  | 2.00 | 3 |" in page
    ((what, ours, theirs, _),) = summary.rows_of({"fsdp-2xcard.json": result})
    assert "6.9 billion" in what
    assert ours == "bf16 219.5 ms, FP8 177.4 ms"
    assert theirs.endswith(": 266.7 ms")
    assert summary.rows_of({"fsdp-2xcard.json": result | {"rows": rows[1:]}}) == []


def test_compiled_steps_of_ranks():
    times = {"torch": [10.0, 10.0], "fabricamp": [8.0, 9.0]}
    row = {
        "batch": 8,
        "wall_ms": {"torch": 10.0, "fabricamp": 8.5},
        "wall_ms_of_rounds": times,
        "ratios": {"torch": rounds.ratio(times["fabricamp"], times["torch"], 0.9)},
    }
    page = render.compiled_ranks(ABOUT | {"rows": [row]})
    assert "| 8 | 2 | 10.00 | 8.50 | 0.850 (0.825 to 0.875), met |" in page
    assert "eager" not in page
    other = {
        "batch": 64,
        "wall_ms": {"torch, eager": 9.5, "fabricamp": 8.5},
        "wall_ms_of_rounds": times,
        "ratios": {"torch, eager": rounds.ratio(times["fabricamp"], [9.5, 9.5], 0.9)},
    }
    page = render.compiled_ranks(ABOUT | {"rows": [row, other]})
    assert "| fabricamp over torch | fabricamp over torch, eager |" in page
    assert "| 8 | 2 | 10.00 |  | 8.50 | 0.850 (0.825 to 0.875), met |  |" in page
    assert "| 64 | 2 |  | 9.50 | 8.50 |  | 0.895 (0.868 to 0.921), not decided |" in page


class Process:
    """A process of a tree, whose answers are given; an answer that is an error is raised."""

    def __init__(self, name, answers, asked):
        self.name, self.answers, self.asked = name, iter(answers), asked

    def ask(self, question):
        self.asked.append(f"{self.name}: {question}")

    def answer(self):
        found = next(self.answers)
        if isinstance(found, Exception):
            raise found
        return found


def windows_of(*figures):
    return [{"wall us": figure} for figure in figures]


def test_two_trees_are_measured_in_turn():
    asked = []
    processes = {
        "before": [
            Process("old 1", [{}, *windows_of(1.0, 3.0, 2.0, 2.0), {}], asked),
            Process("old 2", [{}, *windows_of(4.0, 4.0, 1.0, 1.0), {}], asked),
        ],
        "after": [
            Process("new 1", [{}, *windows_of(1.0, 1.0, 4.0, 2.0), {}], asked),
            Process("new 2", [{}, *windows_of(4.0, 4.0, 1.0, 3.0), {}], asked),
        ],
    }
    rounds = two_trees.measure(processes, "mlp eager", seconds=0, most=100)
    every = ["old 1", "old 2", "new 1", "new 2"]
    first = ["old 1: window", "new 1: window", "new 1: window", "old 1: window"]
    second = ["old 2: window", "new 2: window", "new 2: window", "old 2: window"]
    assert asked[:4] == [f"{name}: row mlp eager" for name in every]
    assert asked[4:-4] == [*first, *second, *first, *second]
    assert asked[-4:] == [f"{name}: end" for name in every]
    (row,) = two_trees.results_of("mlp eager", rounds)
    assert row["before"] == [1.75, 2.0, 2.5]  # of 2, 4, 2 and 1
    assert row["ratio"] == [0.875, 1.25, 1.625]  # of 1/2, 1, 3/2 and 2
    assert row["median_ratio_in"] == [0.5, 2.0]
    page = render.two_trees(
        {**ABOUT, "cores": 16, "pinned_to_cores": 4, "before": "one", "after": "two", "rows": [row]}
    )
    cells = ["mlp eager, wall us", "2 (2 to 2)", "2 (2 to 3)", "1.250 (0.875 to 1.625)", "0.500 to 2.000", "4"]
    assert f"| {' | '.join(cells)} |" in page


def test_a_figure_that_some_windows_lack_counts_in_the_others():
    full = {"GPU ms": 2.0, "wall us": 1.0}
    rounds = [{"before": full, "after": full}] * 4 + [{"before": full, "after": {"wall us": 1.0}}]
    assert [(row["unit"], row["rounds"]) for row in two_trees.results_of("mlp graph", rounds)] == [
        ("GPU ms", 4),
        ("wall us", 5),
    ]
    assert two_trees.results_of("mlp graph", rounds[1:])[0]["unit"] == "wall us"


def test_a_row_that_fails_does_not_end_the_others(tmp_path, monkeypatch):
    started = []

    class Tree(Process):
        def __init__(self, name, tree, *, quick):
            fails = [two_trees.RowError(f"{name}: no memory")] if not started else []
            super().__init__(name, [*fails, {}, *windows_of(*[1.0] * 8), {}], started)
            started.append(name)

        def close(self):
            started.append("closed")

    monkeypatch.setattr(two_trees, "Tree", Tree)
    monkeypatch.setattr(two_trees, "pin", int)
    words = ["two_trees.py", ".", ".", "--rows", "mlp graph,mlp eager", "--row-seconds", "0", "--out", "found.json"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.chdir(tmp_path)
    two_trees.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rows"][0] == {"row": "mlp graph", "failed": "before: no memory"}
    assert found["rows"][1]["ratio"] == [1.0, 1.0, 1.0]
    assert started.count("closed") == 8  # the processes of the row that failed, and those of the other one
    assert "| mlp graph | failed |" in render.two_trees(ABOUT | found)


def test_a_fit_waits_between_windows():
    questions = io.StringIO("window\nwindow\nend\nrow of another\n")
    answers = io.StringIO()
    threads = torch.get_num_threads()
    try:
        two_trees.overhead_row("overhead lean", two_trees.Windows(questions, answers), True)
    finally:
        torch.set_num_threads(threads)
    ready, *windows = map(json.loads, answers.getvalue().splitlines())
    assert ready == {}
    assert [list(one) for one in windows] == [["wall us", "CPU us"]] * 2
    assert questions.readline() == "row of another\n"


def test_starts_of_processes():
    way = (sys.executable, None, "import json")
    found = start.row("a way", [start.measured(*way), start.measured(*way)])
    assert found["modules"] > 20
    assert not found["compiler"]
    seconds = {"min": 1.25, "median": 2.0, "quartiles": [1.5, 3.0]}
    row = {"way": "a way", "wall_s": seconds, "processor_s": seconds, "modules": 1200, "compiler": True}
    ratio = rounds.ratio([1.0], [2.0], 0.6)
    page = render.start(ABOUT | {"load": [3.0], "lightning": "2.6.6", "over_lightning": ratio, "rows": [row]})
    assert "| a way | 1.2 | 2.0 (1.5 to 3.0) | 1.2 | 2.0 (1.5 to 3.0) | 1,200 | yes |" in page
    assert "Lightning 2.6.6, round by round: 0.500 (0.500 to 0.500), met at a target of 0.6." in page


def test_starts_of_a_compiled_network():
    eager = {"first_step_s": 0.5, "start_s": 4.0, "processor_s": 6.0}
    cold = {"first_step_s": 9.0, "start_s": 14.0, "processor_s": 46.0}
    rows = compiled_start.rows_of({("fabricamp", 2, "eager"): [eager, eager], ("fabricamp", 2, "cold"): [cold]})
    page = render.compiled_start(ABOUT | {"network": "GPT", "load": [3.0], "rows": rows})
    assert "| fabricamp | 2 | eager | 0.5 (0.5) | 4.0 (4.0) | 6.0 (6.0) |  |" in page
    assert "| fabricamp | 2 | cold | 9.0 (9.0) | 14.0 (14.0) | 46.0 (46.0) | 40.0 (40.0) |" in page


def test_the_page_has_what_there_is(tmp_path, monkeypatch):
    here = tmp_path / "benchmarks"
    (here / "results").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (here / "results" / "notes.md").write_text("## Notes\n")
    monkeypatch.setattr(render, "HERE", here)
    render.main()
    page, tables = (tmp_path / "docs" / name for name in ("performance.md", "measurements.md"))
    assert page.read_text().startswith("# Performance\n")
    assert page.read_text().endswith("## Notes\n")
    (here / "results" / "norms-card.json").write_text(json.dumps(ABOUT | {"rows": []}))
    render.main()
    assert "## Norms and cross-entropy on a card" in tables.read_text()
    assert "`python it`, device a card, torch 2, python 3, date today" in tables.read_text()
    assert "## Norms" not in page.read_text()


def test_the_pages_are_those_of_the_results(tmp_path, monkeypatch):
    here = tmp_path / "benchmarks"
    shutil.copytree(render.HERE / "results", here / "results", ignore=shutil.ignore_patterns("earlier.md"))
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(render, "HERE", here)
    render.main()
    for name in ("performance.md", "measurements.md"):
        page = (render.HERE.parent / "docs" / name).read_text()
        assert page == (tmp_path / "docs" / name).read_text(), "results have changed: make docs"
    earlier = (render.HERE / "results" / "earlier.md").read_text()
    assert earlier == (here / "results" / "earlier.md").read_text(), "results have changed: make docs"


def test_results_of_replaced_code_are_on_their_own_page(tmp_path, monkeypatch):
    here = tmp_path / "benchmarks"
    (here / "results" / "earlier").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for folder in ("results", "results/earlier"):
        (here / folder / "notes.md").write_text(f"## Notes of {folder}\n")
    (here / "results" / "earlier" / "norms-card.json").write_text(json.dumps(ABOUT | {"rows": []}))
    monkeypatch.setattr(render, "HERE", here)
    render.main()
    assert "Norms" not in (tmp_path / "docs" / "measurements.md").read_text()
    earlier = (here / "results" / "earlier.md").read_text()
    assert "## Norms and cross-entropy on a card" in earlier
    assert earlier.endswith("## Notes of results/earlier\n")


def test_the_page_opens_with_one_table_and_names_no_section_twice():
    text = (render.HERE.parent / "docs" / "performance.md").read_text()
    tables = (render.HERE.parent / "docs" / "measurements.md").read_text()
    titles = re.findall(r"^## (.*)", text, flags=re.MULTILINE)
    every = re.findall(r"^## (.*)", tables, flags=re.MULTILINE)
    assert len(every) == len(set(every))
    assert titles[-1] == "What falls short, and why"
    opening = text[: text.index("\n## ")]
    assert opening.index("| what") < 500
    assert "| what | fabricamp | compared with | on |" in opening
    for part in (
        "hand-written loop",
        "GPT-2-small",
        "SyncBatchNorm",
        "cross-entropy",
        "LayerNorm",
        "Adam",
        "all-reduce",
    ):
        assert part in opening, part
    assert len(text.splitlines()) < 200  # what a reader decides by
    assert not re.search(r"\bgoals?\b|\bours?\b", text + tables)
    assert not re.search(r"^## .*(Two revisions|earlier tree|before ranks)", tables, flags=re.MULTILINE)


@pytest.mark.parametrize("file", sorted((render.HERE / "results").rglob("*.json")), ids=lambda file: file.stem)
def test_each_result_has_its_renderer(file):
    page = render.RENDERERS[file.name.partition("-")[0]](json.loads(file.read_text()))
    assert page.startswith("## ")
    assert "None" not in page
