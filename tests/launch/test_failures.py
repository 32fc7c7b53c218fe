"""find_cause: which of several failed ranks is named as the cause."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass

import pytest

from fabricamp.errors import CheckpointError, ConfigError, DistributedError
from fabricamp.launch import PEER_FAILURE_NOTE, detect, explained_without_traceback, record_failure
from fabricamp.launch.failures import OTHERS, as_error, find_cause


@dataclass
class Ended:
    exitcode: int


def write(folder, rank, time, message="ValueError: bad"):
    file = folder / "run" / str(rank) / "error.json"
    file.parent.mkdir(parents=True)
    file.write_text(
        json.dumps(
            {"message": {"message": message, "extraInfo": {"py_callstack": f"trace {rank}\n", "timestamp": "1"}}}
        )
    )
    os.utime(file, ns=(time, time))


@pytest.mark.parametrize(
    ("codes", "written", "rank", "code"),
    [
        ({0: 1, 1: 1}, {1: 100, 0: 200}, 1, 1),  # the first exception
        ({0: 1, 1: 1}, {1: 200, 0: 100}, 0, 1),
        ({0: 1, 2: -signal.SIGKILL}, {0: 100}, 2, -signal.SIGKILL),  # rank 2 was killed; rank 0 lost its peer
        ({0: 1, 1: 5}, {0: 100}, 1, 5),  # rank 1 called sys.exit and recorded no exception
        ({0: -signal.SIGTERM, 1: 1}, {1: 100}, 1, 1),  # rank 0 was ended by the agent
        ({0: -signal.SIGTERM, 1: -signal.SIGABRT}, {0: 100, 1: 200}, 0, 1),  # rank 1 was aborted while it ended
        ({0: 2, 1: -signal.SIGTERM}, {1: 100, 0: 200}, 1, 2),  # rank 1 was ended before it could exit
        ({1: 1}, {0: 100, 1: 200}, 1, 1),  # rank 0 caught its exception
        ({1: -signal.SIGTERM}, {}, 1, -signal.SIGTERM),
        ({0: 143, 1: 1}, {1: 200, 0: 100}, 1, 1),  # rank 0 was ended by force
        ({0: -signal.SIGTERM, 1: 143}, {0: 100}, 0, 1),
    ],
)
def test_cause(tmp_path, codes, written, rank, code):
    for one, time in written.items():
        write(tmp_path, one, time)
    cause = find_cause({one: Ended(ended) for one, ended in codes.items()}, tmp_path)
    assert (cause.rank, cause.exit_code) == (rank, code)
    assert (f"trace {rank}" in cause.report()) == (rank in written)


def test_nobody_failed(tmp_path):
    assert find_cause({}, tmp_path) is None


def test_what_another_rank_left_is_shown_where_the_cause_left_nothing(tmp_path):
    write(tmp_path, 0, 100)
    report = find_cause({0: Ended(143), 1: Ended(-signal.SIGKILL)}, tmp_path).report()
    assert "rank 1 was killed by SIGKILL" in report
    assert "what rank 0 left:\ntrace 0" in report


def test_a_rank_that_left_in_the_middle_with_exit_code_0_is_the_cause(tmp_path):
    write(tmp_path, 0, 100)
    (tmp_path / "run" / "0" / OTHERS).write_text(json.dumps({"before": [1], "killed": []}))
    for code in (1, 143):  # rank 0 ended by its exception, or by force
        cause = find_cause({0: Ended(code)}, tmp_path)
        assert (cause.rank, cause.shell_code()) == (1, 1)
        assert "rank 1 ended early with exit code 0" in cause.report()
        assert "what rank 0 left:\ntrace 0" in cause.report()
    assert find_cause({0: Ended(1), 1: Ended(-signal.SIGKILL)}, tmp_path).rank == 1
    write(tmp_path, 1, 50)  # rank 1 recorded an exception of its own
    assert find_cause({0: Ended(143), 1: Ended(1)}, tmp_path).exit_code == 1


def test_sys_exit_in_the_middle_of_a_run_is_the_cause_with_its_traceback(tmp_path):
    write(tmp_path, 1, 100, "SystemExit: 0")
    write(tmp_path, 0, 200)
    for codes in ({0: 1}, {0: 143, 1: -signal.SIGTERM}):
        report = find_cause({rank: Ended(code) for rank, code in codes.items()}, tmp_path).report()
        assert "rank 1 ended early with exit code 0" in report
        assert report.index("trace 1") < report.index("trace 0")


@pytest.mark.parametrize(("given", "code"), [("7", 7), ("-1", 255), ("no data here", 1)])
def test_sys_exit_keeps_its_code_where_its_rank_was_ended_before_it_could_exit(tmp_path, given, code):
    write(tmp_path, 1, 100, f"SystemExit: {given}")
    write(tmp_path, 0, 200)  # rank 0 lost its peer, and exited first
    cause = find_cause({0: Ended(2), 1: Ended(-signal.SIGTERM)}, tmp_path)
    assert (cause.rank, cause.exit_code) == (1, code)


def test_a_stopped_rank_that_another_one_killed_is_not_the_cause(tmp_path):
    write(tmp_path, 0, 100)
    (tmp_path / "run" / "0" / OTHERS).write_text(json.dumps({"before": [], "killed": [1]}))
    report = find_cause({0: Ended(1), 1: Ended(-signal.SIGKILL)}, tmp_path).report()
    assert "rank 0 ended with exit code 1; with it ended rank 1" in report
    assert "too much memory" not in report


@pytest.mark.parametrize(
    ("codes", "written", "on_request"),
    [
        ({0: 143, 1: 143}, [], True),  # all ranks saved after SIGTERM
        ({0: -signal.SIGTERM, 1: 143}, [], True),
        ({0: 143, 1: 1}, [], False),
        ({0: 143, 1: 143}, [1], False),  # a rank was ended by force
        ({0: 143, 1: -signal.SIGKILL}, [], False),
    ],
)
def test_an_end_on_request_is_no_failure(tmp_path, codes, written, on_request):
    for rank in written:
        write(tmp_path, rank, 100)
    assert find_cause({one: Ended(ended) for one, ended in codes.items()}, tmp_path).on_request is on_request


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, DistributedError, KeyError])
def test_errors_come_back_as_what_they_were(tmp_path, monkeypatch, kind):
    (tmp_path / "1").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    with pytest.raises(kind) as caught:
        raise kind("what: was wrong")
    record_failure(caught.value)
    error = as_error(find_cause({1: Ended(1)}, tmp_path))
    assert type(error) is (DistributedError if kind is KeyError else kind)
    assert "what: was wrong" in str(error)
    assert "rank 1 ended with exit code 1" in str(error)


def test_the_text_of_an_error_begins_with_what_happened(tmp_path):
    killed = as_error(find_cause({1: Ended(-signal.SIGKILL)}, tmp_path))
    assert str(killed).startswith("rank 1 was killed by SIGKILL")
    (tmp_path / "error").mkdir()
    write(tmp_path / "error", 1, 100)
    file = next(tmp_path.rglob("error.json"))
    file.write_text(file.read_text().replace("trace 1", "Traceback (most recent call last):"))
    raised = as_error(find_cause({1: Ended(1)}, tmp_path))
    assert str(raised).startswith("rank 1 ended with exit code 1\n\nTraceback")


def test_the_sentence_of_an_own_error_comes_before_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "1").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    with pytest.raises(DistributedError) as caught:
        raise DistributedError("what: was wrong")
    record_failure(caught.value)
    cause = find_cause({1: Ended(1)}, tmp_path)
    first, second, *rest = [line for line in cause.report().splitlines() if line]
    assert first == "rank 1 ended with exit code 1"
    assert second == "DistributedError: what: was wrong"
    assert "Traceback (most recent call last):" in rest
    assert cause.report().count("what: was wrong") == 2  # the message, and the script's line in the traceback
    assert str(as_error(cause)).splitlines()[0] == "what: was wrong"


def test_what_became_of_another_rank_comes_before_what_this_one_saw(tmp_path, monkeypatch):
    (tmp_path / "0").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    error = RuntimeError("Connection closed by peer")
    error.add_note(f"{PEER_FAILURE_NOTE}the process of rank 1 ended, last seen in fit at step 5")
    record_failure(error)
    report = find_cause({0: Ended(1)}, tmp_path).report()
    assert "\n\nthe process of rank 1 ended, last seen in fit at step 5; then this rank failed:\n" in report
    assert report.index("the process of rank 1") < report.index("Connection closed by peer")


def test_the_error_of_a_user_keeps_python_s_order(tmp_path, monkeypatch):
    (tmp_path / "0").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    with pytest.raises(ValueError, match="mine") as caught:
        raise ValueError("mine")
    record_failure(caught.value)
    report = find_cause({0: Ended(1)}, tmp_path).report()
    assert report.rstrip().endswith("ValueError: mine")
    assert report.index("Traceback") < report.index("ValueError: mine")


@pytest.mark.parametrize(("kind", "code"), [(ConfigError, 2), (CheckpointError, 1)])
def test_an_explained_error_has_its_exit_code_from_the_first_moment(tmp_path, monkeypatch, kind, code):
    """The rank was ended, by SIGTERM or by an abort, before it could exit."""
    (tmp_path / "1").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    with explained_without_traceback({ConfigError: 2, CheckpointError: 1}), pytest.raises(kind) as caught:
        raise kind("this cannot work")
    with explained_without_traceback({ConfigError: 2, CheckpointError: 1}):
        record_failure(caught.value)
    for ended in (-signal.SIGTERM, -signal.SIGABRT):
        cause = find_cause({1: Ended(ended)}, tmp_path)
        assert cause.shell_code() == code
        assert "this cannot work" in cause.report()
        assert "Traceback" not in cause.report()


def test_a_rank_of_another_starter_shows_the_sentence_first(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for name, value in {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert detect().world_size == 2
    with pytest.raises(DistributedError) as caught:
        raise DistributedError("what: was wrong")
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert capsys.readouterr().err.startswith("DistributedError: what: was wrong\n")


def test_what_is_recorded(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    record_failure(ValueError("in a plain process"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    for nothing_wrong in (KeyboardInterrupt(), SystemExit(0), SystemExit()):
        record_failure(nothing_wrong)
    assert not file.exists()
    error = ValueError("first")
    record_failure(error)
    before = file.stat().st_mtime_ns
    record_failure(error)  # a second record by an outer caller keeps the time of the first
    assert file.stat().st_mtime_ns == before
    record_failure(SystemExit(3))
    assert file.stat().st_mtime_ns > before
    assert "SystemExit: 3" in file.read_text()
