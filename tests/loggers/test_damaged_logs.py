"""What is in a log folder already may be damaged or of another run: it costs rows, and never a run or its checkpoint."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import shutil
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabricamp import Callback
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
from fabricamp.loggers.event_file import read_events
from tests.small import Classifier, loader, quiet_trainer

KINDS = pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger])


def a_logger(kind, folder, flush=1):
    return kind(folder, None, "log", flush_logs_every_n_steps=flush)


def rows_in(path):
    """Returns step and loss of each row; raises for a line that is none."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            read = list(csv.DictReader(file, strict=True))
        assert not any(None in row or None in row.values() for row in read), "a row has other fields than the header"
    else:
        read = [json.loads(line) for line in path.read_text().splitlines()]
    return [(int(float(row["step"])), _number(row.get("loss"))) for row in read]


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError):  # damaged, or missing
        return value


# -- damaged files


def inserted(text, after=4):
    def damage(content):
        lines = content.splitlines(keepends=True)
        return b"".join([*lines[:after], text, *lines[after:]])

    return damage


def in_place_of_a_line(text, number=3):
    return lambda content: b"".join(
        text if at == number else line for at, line in enumerate(content.splitlines(keepends=True))
    )


ANY = {
    "blank lines": inserted(b"\n\n \n"),
    "not UTF-8": inserted(b"\xff\xfe\n"),
    "not UTF-8 in a row": in_place_of_a_line(b"2,\xff\n"),
    "NULs": inserted(b"\0" * 100 + b"\n"),
    "NULs at the end": lambda content: content + b"\0" * 512,
    "NULs in place of a row": in_place_of_a_line(b"\0" * 12 + b"\n"),
    "CRLF": lambda content: content.replace(b"\n", b"\r\n"),
    "CR": lambda content: content.replace(b"\n", b"\r"),
    "half a row": lambda content: content[:-3],
    "half a row in the middle": inserted(b"1\n"),
    "a quote": inserted(b'1,"0.5\n'),
    "nothing": lambda content: b"",
    "a line end": lambda content: b"\n",
    "text alone": lambda content: b"no log, and without a line end",
    "lines of text": lambda content: b"this is\nno log\n",
    "huge step": inserted(b"9" * 5000 + b",1.0\n"),
    "a step of 400 digits": inserted(b"9" * 400 + b",1.0\n"),
    "no step": inserted(b",1.0\n"),
    "step of text": inserted(b"x,1.0\n"),
    "step inf": inserted(b"inf,1.0\n"),
    "a long line": inserted(b"1," + b"5" * 200_000 + b"\n"),
    "a byte order mark": lambda content: b"\xef\xbb\xbf" + content,
    "without the first line": lambda content: content.split(b"\n", 1)[1],
    "twice": lambda content: content + content,
    "binary": lambda content: bytes(range(256)) * 4,
}
OF_CSV = {
    "a row with more fields": inserted(b"5,1,2,3,4,5,6,7\n"),
    "a row with fewer fields": inserted(b"5\n"),
    "a header with more fields": lambda content: content.replace(b"\n", b",x,y,z\n", 1),
    "a header again": inserted(b"step,loss\n"),
    "a header with a name twice": lambda content: content.replace(b"\n", b",step,loss\n", 1),
    "a header without a step": lambda content: content.replace(b"step", b"stop", 1),
    "an open quote in the header": lambda content: content.replace(b"step", b'step,"x', 1),
}
OF_JSON = {
    "null": inserted(b"null\n"),
    "an empty object": inserted(b"{}\n"),
    "step x": inserted(b'{"step": "x"}\n'),
    "step null": inserted(b'{"step": null}\n'),
    "step huge": inserted(b'{"step": 1e400}\n'),
    "step of digits": inserted(b'{"step": ' + b"9" * 5000 + b"}\n"),
    "a step of 400 digits as JSON": inserted(b'{"step": ' + b"9" * 400 + b"}\n"),
    "step in a list": inserted(b'{"step": [1]}\n'),
    "a list": inserted(b"[1, 2]\n"),
    "a number": inserted(b"5\n"),
    "deep": inserted(b"[" * 100_000 + b"\n"),
    "NaN": inserted(b'{"step": NaN}\n'),
    "two objects in a line": inserted(b'{"step": 1} {"step": 2}\n'),
}
DAMAGES = [
    *((CSVLogger, name, damage) for name, damage in {**ANY, **OF_CSV}.items()),
    *((JSONLinesLogger, name, damage) for name, damage in {**ANY, **OF_JSON}.items()),
]


KEEPS_ROWS = ("CRLF", "CR", "half a row", "NULs at the end", "a byte order mark", "twice", "a header with more fields")
SHORT = ("half a row in the middle", "a row with fewer fields")
"""A CSV cannot tell such a row from one without values, and the file no longer begins with the rows of the checkpoint."""
UNFINISHED = ("nothing", "text alone")
"""There is no end of a line: as if a run had been killed in its first write."""


def fit(folder, kind, steps):
    """Trains to ``steps``; returns the logger, and the warnings."""
    logger = a_logger(kind, folder)
    checkpoints = ModelCheckpoint(folder / "checkpoints", every="6 steps")
    trainer = quiet_trainer(
        max_steps=steps,
        max_epochs=-1,
        log_every_n_steps=1,
        logger=logger,
        callbacks=[checkpoints],
        enable_checkpointing=True,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Classifier(), loader(16), ckpt_path="auto")
    assert trainer.global_step == steps
    return logger, [str(one.message) for one in caught if one.category is RuntimeWarning]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a folder of each kind: six steps with a checkpoint, and two more in the log."""
    folders = {}
    for kind in (CSVLogger, JSONLinesLogger):
        folders[kind] = tmp_path_factory.mktemp(kind.__name__)
        logger, _ = fit(folders[kind], kind, 6)
        for step in (6, 7):
            logger.log_metrics({"loss": 99.0}, step)
        logger.close()
    return folders


@pytest.mark.parametrize(("kind", "name", "damage"), DAMAGES, ids=lambda value: getattr(value, "__name__", value))
def test_a_run_resumes_beside_a_damaged_log(trained, kind, name, damage, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained[kind], folder)
    file = a_logger(kind, folder).metrics_file
    before = damage(file.read_bytes())
    file.write_bytes(before)
    logger, told = fit(folder, kind, 9)
    rows = rows_in(logger.metrics_file)
    assert [step for step, _ in rows][-3:] == [6, 7, 8]
    assert all(0 <= loss < 99 for _, loss in rows[-3:])
    if logger.metrics_file != file:
        assert file.read_bytes() == before, "what is no log is left as it is"
    elif ("inserted" in damage.__qualname__ and not (kind is CSVLogger and name in SHORT)) or name in KEEPS_ROWS:
        # Those after the checkpoint are dropped as ever.
        assert [step for step, _ in rows if step != 1] == [0, *range(2, 9)]
    assert all(str(file) in text for text in told)
    assert told or name in KEEPS_ROWS or name in UNFINISHED or (kind is CSVLogger and name == "blank lines")


def begin(kind, folder, steps):
    """Logs ``steps`` rows, and returns the state after each one, as checkpoints hold it."""
    logger = a_logger(kind, folder)
    states = [logger.state_dict()]
    for step in range(steps):
        logger.log_metrics({"loss": step / 4} if step % 3 else {"loss": step / 4, f"of {step}": 1.0}, step)
        states.append(logger.state_dict())
    logger.close()
    return states


SPLICES = st.tuples(
    st.integers(0, 400), st.integers(0, 60), st.one_of(st.binary(max_size=30), st.text(max_size=9).map(str.encode))
)
"""Where bytes are taken out, how many, and what is put there."""


@KINDS
@given(splices=st.lists(SPLICES, max_size=4), at=st.integers(0, 8), columns=st.booleans())
def test_whatever_a_log_holds_a_logger_goes_on(tmp_path_factory, kind, splices, at, columns):
    folder = tmp_path_factory.mktemp("log")
    states = begin(kind, folder, 8)
    logger = a_logger(kind, folder)
    content = logger.metrics_file.read_bytes()
    for position, length, text in splices:
        content = content[:position] + text + content[position + length :]
    logger.metrics_file.write_bytes(content)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f".*{folder}.*", RuntimeWarning)
        logger.load_state_dict(states[at])
        for step in range(100, 104):
            logger.log_metrics({"loss": 0.5, "new": 1.0} if columns else {"loss": 0.5}, step)
            logger.state_dict()
            logger.save()
        logger.close()
    rows = rows_in(logger.metrics_file)
    assert rows[-4:] == [(step, 0.5) for step in range(100, 104)]
    if not splices:
        assert rows[:-4] == [(step, step / 4) for step in range(at)]
    assert not list(logger.folder.glob(".*")), "nothing half-written is left"


@given(splices=st.lists(SPLICES, min_size=1, max_size=3), at=st.integers(0, 4))
def test_whatever_an_event_file_holds_a_logger_goes_on(tmp_path_factory, splices, at):
    def log(state=None, steps=()):
        logger = TensorBoardLogger(folder, None, "log", max_queue=0)
        if state is not None:
            logger.load_state_dict(state)
        for step in steps:
            logger.log_metrics({"loss": step / 4}, step)
            states.append(logger.state_dict())
        logger.close()

    folder = tmp_path_factory.mktemp("log")
    states = []
    log(None, range(5))
    (file,) = (folder / "log").glob("*tfevents*")
    content = file.read_bytes()
    for position, length, text in splices:
        content = content[:position] + text + content[position + length :]
    file.write_bytes(content)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f".*{file}.*", RuntimeWarning)
        log(states[at], [9])
    newest = max((folder / "log").glob("*tfevents*"))
    assert [event.step for event in read_events(newest) if event.HasField("summary")][-1] == 9


# -- two runs in one folder


def log(logger, steps, **more):
    for step in steps:
        logger.log_metrics({"loss": step / 4, **more}, step)
        logger.save()


@KINDS
def test_of_two_runs_that_begin_together_the_later_one_goes_on_in_its_own_file(tmp_path, kind):
    first, second = a_logger(kind, tmp_path), a_logger(kind, tmp_path)
    assert first.state_dict()["digest"] == second.state_dict()["digest"] == 0, "both have looked: there is no file"
    log(first, [0])
    with pytest.warns(
        RuntimeWarning, match=r"another process has made this file: .*/metrics\.\w+; this run goes on in .*-1\."
    ):
        log(second, [0], other=1.0)
    for step in range(1, 6):
        log(first, [step], **{f"of {step}": 1.0})
        log(second, [step])
    for logger, name in ((first, "metrics"), (second, "metrics-1")):
        logger.close()
        assert logger.metrics_file.stem == name
        assert rows_in(logger.metrics_file) == [(step, step / 4) for step in range(6)]


@KINDS
def test_a_run_that_is_resumed_while_another_still_logs_goes_on_in_its_own_file(tmp_path, kind):
    first = a_logger(kind, tmp_path)
    log(first, range(4))
    state = first.state_dict()
    log(first, [4, 5])
    second = a_logger(kind, tmp_path)
    second.load_state_dict(state)
    before = first.metrics_file.read_bytes()
    log(first, [6])
    assert first.metrics_file.read_bytes().startswith(before), "nothing is dropped before the second run writes"
    with pytest.warns(RuntimeWarning, match=r"another process writes to this file: .*; this run goes on in .*-1\."):
        log(second, [4, 5])
    log(first, [7])
    log(second, [6])
    assert rows_in(first.metrics_file) == [(step, step / 4) for step in range(8)]
    assert rows_in(second.metrics_file) == [(step, step / 4) for step in (4, 5, 6)]

    # A checkpoint of the second run leads to its file again; the next free name is another run's.
    state = second.state_dict()
    log(second, [7, 8])
    first.close()
    second.close()
    resumed, third = a_logger(kind, tmp_path), a_logger(kind, tmp_path)
    resumed.load_state_dict(state)
    third.state_dict()
    log(resumed, [9])
    assert rows_in(resumed.metrics_file) == [(step, step / 4) for step in (4, 5, 6, 9)]
    log(a_logger(kind, tmp_path), [8])
    with pytest.warns(RuntimeWarning, match="goes on in .*-2"):
        log(third, [9])


@KINDS
def test_a_run_whose_file_another_one_cuts_says_what_it_lost_and_goes_on(tmp_path, kind):
    """The second run writes before the first one does again, so it cannot know of it."""
    first = a_logger(kind, tmp_path)
    log(first, range(4))
    state = first.state_dict()
    log(first, [4, 5])
    second = a_logger(kind, tmp_path)
    second.load_state_dict(state)
    log(second, [4])
    with pytest.warns(RuntimeWarning, match="what was written is gone"):
        log(first, [6, 7])
    with pytest.warns(RuntimeWarning, match="another process writes to this file"):
        log(second, [5])
    assert rows_in(first.metrics_file) == [(step, step / 4) for step in (0, 1, 2, 3, 4, 6, 7)]
    assert rows_in(second.metrics_file) == [(5, 5 / 4)]


class Together(Callback):
    """Lets no run train before both have looked at the log."""

    def __init__(self, barrier):
        self.barrier = barrier

    def on_train_start(self, trainer, module):
        trainer.logger._backlog.wait()
        self.barrier.wait(60)


def whole_fit(folder, kind, barrier, sender):
    logger = a_logger(kind, folder)
    trainer = quiet_trainer(
        max_steps=12, max_epochs=-1, log_every_n_steps=1, logger=logger, callbacks=[Together(barrier)]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Classifier(), loader(16))
    sender.send([str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)])


@KINDS
def test_a_job_that_is_started_twice_trains_twice(tmp_path, kind):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [context.Process(target=whole_fit, args=(tmp_path, kind, barrier, sender)) for _, sender in pipes]
    for process in processes:
        process.start()
    told = []
    for receiver, _ in pipes:
        assert receiver.poll(100)
        told += receiver.recv()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(told) == 1
    assert "another process has made this file" in told[0]
    files = list((tmp_path / "log").glob("metrics*"))
    assert {file.stem for file in files} == {"metrics", "metrics-1"}
    assert [[step for step, _ in rows_in(file)] for file in files] == [list(range(12))] * 2


# -- links


@pytest.mark.parametrize("hard", [False, True])
@KINDS
def test_a_log_that_is_a_link_leaves_the_other_file_alone(tmp_path, kind, hard):
    begin(kind, tmp_path / "other", 3)
    logger = a_logger(kind, tmp_path)
    other = tmp_path / "other" / "log" / kind.FILE
    before = other.read_bytes()
    logger.folder.mkdir()
    (os.link if hard else os.symlink)(other, logger.metrics_file)
    logger.load_state_dict(a_logger(kind, tmp_path / "other").state_dict())
    log(logger, [3, 4])
    assert other.read_bytes() == before
    assert not logger.metrics_file.is_symlink()
    assert rows_in(logger.metrics_file) == [(step, step / 4) for step in range(5)]


@pytest.mark.parametrize("content", ["precious", "precious\n", None])
@KINDS
def test_a_link_to_what_is_no_log_leads_to_no_change_there(tmp_path, kind, content):
    logger = a_logger(kind, tmp_path)
    other = tmp_path / "other"
    if content is not None:
        other.write_text(content)
    logger.folder.mkdir()
    logger.metrics_file.symlink_to(other)
    logger.metrics_file.with_name(f".{kind.FILE}.partial").symlink_to(tmp_path / "elsewhere")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f".*{logger.metrics_file}.*", RuntimeWarning)
        log(logger, [0])
        log(logger, [1], new=1.0)
    assert (other.read_text() if other.exists() else None) == content
    assert not (tmp_path / "elsewhere").exists()
    assert rows_in(logger.metrics_file) == [(0, 0.0), (1, 0.25)]


@KINDS
def test_a_link_that_takes_the_place_of_a_log_in_a_run_is_not_written_through(tmp_path, kind):
    logger = a_logger(kind, tmp_path)
    log(logger, [0])
    moved = tmp_path / "moved"
    logger.metrics_file.rename(moved)
    before = moved.read_bytes()
    logger.metrics_file.symlink_to(moved)
    with pytest.warns(RuntimeWarning, match=f"cannot write {logger.metrics_file}"):
        log(logger, [1])
    assert moved.read_bytes() == before
