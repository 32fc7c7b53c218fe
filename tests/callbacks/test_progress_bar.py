"""The progress bar: the final screen in a terminal, the lines in a file, and its cost."""

import copy
import inspect
import math
import os
import pickle
import pty
import re
import textwrap
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fabricamp.callbacks import Callback, RichProgressBar, TQDMProgressBar, _renderers, progress_bar
from fabricamp.callbacks.progress_bar import ProgressBar, _train_total
from fabricamp.errors import ConfigError
from tests.distributed.forked import start_forked
from tests.small import Classifier, loader, quiet_trainer


def stand_in(**overrides):
    """Returns an object with the Trainer's attributes that the bar reads."""
    known = {
        "is_global_zero": True,
        "current_epoch": 0,
        "max_epochs": 3,
        "max_steps": -1,
        "num_training_batches": 4,
        "num_val_batches": [2],
        "num_test_batches": [2, 3],
        "num_predict_batches": [math.inf],
        "num_sanity_val_batches": [1],
        "accumulate_grad_batches": 1,
        "global_step": 0,
        "sanity_checking": False,
        "module": None,
        "progress_bar_metrics": {},
        "lr_scheduler_configs": [],
        "precision_plugin": SimpleNamespace(verdicts=None),
        "state": SimpleNamespace(batch_idx=0, runs_as=""),
    }
    return SimpleNamespace(**known | overrides)


class Clock:
    """A clock that only the test advances."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        for module in (progress_bar, _renderers):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)


class Pictures(_renderers.Renderer):
    """A live screen that records the labels of the bars that it draws."""

    is_live = True

    def __init__(self):
        super().__init__()
        self.labels = []

    def draw(self, tracks, metrics):
        self.labels.append(tracks[-1].label)

    def write(self, pairs):
        pass


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def taken(caplog):
    """Returns the lines logged since the last call."""
    lines = list(caplog.messages)
    caplog.clear()
    return lines


def run_epoch(bar, trainer, clock, seconds_a_batch, *, validate_at=()):
    """Calls the hooks in the order of the fit loop."""
    bar.on_train_epoch_start(trainer, None)
    first = trainer.state.batch_idx
    for index in range(first, 4):
        clock.now += seconds_a_batch
        bar.on_train_batch_end(trainer, None, None, None, index)
        trainer.global_step += 1
        trainer.state.batch_idx = index + 1
        if index + 1 in validate_at:
            bar.on_validation_start(trainer, None)
            for batch in range(2):
                clock.now += seconds_a_batch
                bar.on_validation_batch_end(trainer, None, None, None, batch)
            bar.on_validation_end(trainer, None)
    bar.on_train_epoch_end(trainer, None)
    trainer.current_epoch += 1
    trainer.state.batch_idx = 0


def test_plain_lines_every_ten_seconds_and_at_epoch_end(clock, caplog):
    bar, trainer = ProgressBar(), stand_in(progress_bar_metrics={"loss": 0.5, "seen": 12345.6, "tokens": 7})
    bar.setup(trainer, None, "fit")
    run_epoch(bar, trainer, clock, 6.0)
    run_epoch(bar, trainer, clock, 0.004)
    bar.on_train_end(trainer, None)
    assert taken(caplog) == [
        "epoch 1/3  2/4  step 1  loss 0.5000  seen 12346  tokens 7  6.0 s/it",
        "epoch 1/3  4/4  step 3  loss 0.5000  seen 12346  tokens 7  6.0 s/it",
        "epoch 1/3  step 4  loss 0.5000  seen 12346  tokens 7  24.0 s  6.0 s/it",
        "epoch 2/3  step 8  loss 0.5000  seen 12346  tokens 7  0.0 s  250 it/s",
    ]


def test_validation_leaves_a_line_amid_an_epoch_but_not_a_second_one_at_its_end(clock, caplog):
    bar, trainer = ProgressBar(), stand_in(progress_bar_metrics={"val": 0.25})
    bar.setup(trainer, None, "fit")
    run_epoch(bar, trainer, clock, 0.5, validate_at=(2, 4))
    # The speed counts only training: validation took two of the four seconds.
    assert taken(caplog) == [
        "epoch 1/3  2/4  step 2  val 0.2500  2.0 it/s",
        "epoch 1/3  step 4  val 0.2500  4.0 s  2.0 it/s",
    ]


def test_validation_line_of_a_loader_without_length_comes_when_it_is_known_not_to_be_the_end(clock, caplog):
    bar, trainer = ProgressBar(), stand_in(num_training_batches=math.inf, max_epochs=-1)
    bar.setup(trainer, None, "fit")
    run_epoch(bar, trainer, clock, 5.0, validate_at=(1,))
    assert taken(caplog)[:2] == ["validation  1/2  5.0 s/it", "epoch 1  1  step 1  5.0 s/it"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (16777217.0, "16777217"),
        (-1e9 - 1, "-1000000001"),
        (123456.0, "123456"),
        (1e7 + 0.5, "1.000e+07"),
        (2.0**60, "1.153e+18"),
    ],
)
def test_a_large_count_has_all_of_its_digits(clock, caplog, value, text):
    bar, trainer = ProgressBar(), stand_in(progress_bar_metrics={"tokens": value})
    bar.setup(trainer, None, "fit")
    run_epoch(bar, trainer, clock, 1.0)
    assert taken(caplog) == [f"epoch 1/3  step 4  tokens {text}  4.0 s  1.0 it/s"]


def test_learning_rate_and_loss_scale_stand_in_the_line_where_they_move(clock, caplog):
    scheduler = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 0.0125}, {"lr": 1.0}]))
    scaler = SimpleNamespace(dynamic=True, scale=65536.0)
    moving = stand_in(
        progress_bar_metrics={"loss": 0.5},
        lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler, interval="step")],
        precision_plugin=SimpleNamespace(verdicts=scaler),
    )
    bar = ProgressBar()
    bar.setup(moving, None, "fit")
    run_epoch(bar, moving, clock, 0.5)
    assert "  loss 0.5000  lr 0.01250  scale 65536  " in taken(caplog)[-1]
    scaler.dynamic, scheduler.optimizer.param_groups[0]["lr"] = False, torch.tensor(0.1)
    moving.progress_bar_metrics["lr"] = 3.0
    run_epoch(bar, moving, clock, 0.5)
    assert "  loss 0.5000  lr 3.000  2.0 s" in taken(caplog)[-1], "the user's own lr; a tensor is not read"


def test_an_epochs_line_has_the_rate_of_the_epoch_and_not_that_of_the_next(caplog):
    class Halved(Classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    quiet_trainer(max_epochs=3, enable_progress_bar=True).fit(Halved(), loader(16))
    lines = [line for line in taken(caplog) if line.startswith("epoch")]
    assert [line.partition("  lr ")[2].split()[0] for line in lines] == ["0.5000", "0.2500", "0.1250"]


def test_long_validation_shows_its_own_position(clock, caplog):
    bar, trainer = ProgressBar(), stand_in(progress_bar_metrics={"loss": 1.0})
    bar.setup(trainer, None, "fit")
    run_epoch(bar, trainer, clock, 11.0, validate_at=(1,))
    assert "validation  1/2  11.0 s/it" in taken(caplog)


def test_a_hundred_lines_are_free_then_one_a_second_and_the_last_one_stays(clock, caplog):
    bar, trainer = ProgressBar(), stand_in(max_epochs=1000)
    bar.setup(trainer, None, "fit")
    for _ in range(1000):
        run_epoch(bar, trainer, clock, 0.001)
    bar.on_train_end(trainer, None)
    lines = taken(caplog)
    assert [line.split()[1] for line in lines[:100]] == [f"{epoch}/1000" for epoch in range(1, 101)]
    assert 102 <= len(lines) <= 105  # 1000 epochs of 4 ms: the first 100 lines, then one per second for 3.6 s
    assert lines[-1].startswith("epoch 1000/1000  step 4000")


def test_resumed_epoch_goes_on_where_it_was_and_does_not_count_what_others_ran(clock, caplog):
    bar, trainer = ProgressBar(), stand_in(state=SimpleNamespace(batch_idx=2, runs_as=""))
    bar.setup(trainer, None, "fit")
    run_epoch(bar, trainer, clock, 10.0)
    assert taken(caplog)[0] == "epoch 1/3  3/4  step 0  10.0 s/it"


def test_epoch_that_was_cut_short_says_where(clock, caplog):
    bar, trainer = ProgressBar(), stand_in(num_training_batches=7)
    bar.setup(trainer, None, "fit")
    run_epoch(bar, trainer, clock, 1.0)
    assert taken(caplog) == ["epoch 1/3  4/7  step 4  4.0 s  1.0 it/s"]


def test_evaluation_of_its_own_shows_each_loader_and_leaves_a_line(clock, caplog):
    bar, trainer = ProgressBar(), stand_in(progress_bar_metrics={"test_acc": 0.975})
    bar.setup(trainer, None, "test")
    bar.on_test_start(trainer, None)
    for number, batches in enumerate((2, 3)):
        for index in range(batches):
            clock.now += 10.0
            bar.on_test_batch_end(trainer, None, None, None, index, number)
    bar.on_test_end(trainer, None)
    lines = taken(caplog)
    assert lines[0] == "test 1/2  1/2  10.0 s/it"
    assert lines[2].startswith("test 2/2  1/3")
    assert lines[-1] == "test  50.0 s", "its values follow in a table"


def test_sanity_check_and_predict(clock, caplog):
    bar, trainer = ProgressBar(), stand_in(sanity_checking=True)
    bar.setup(trainer, None, "fit")
    bar.on_validation_start(trainer, None)
    clock.now += 12.0
    bar.on_validation_batch_end(trainer, None, None, None, 0)
    bar.on_validation_end(trainer, None)
    assert taken(caplog) == ["sanity check  1/1  12.0 s/it"]
    bar.setup(trainer, None, "predict")
    bar.on_predict_start(trainer, None)
    clock.now += 12.0
    bar.on_predict_batch_end(trainer, None, None, None, 0)
    bar.on_predict_end(trainer, None)
    assert taken(caplog) == ["predict  1  12.0 s/it", "predict  12.0 s"]


def test_the_first_batch_does_not_wait_under_the_sanity_checks_bar(clock, monkeypatch):
    screen = Pictures()
    monkeypatch.setattr(progress_bar, "open_renderer", lambda interval: screen)
    bar, trainer = ProgressBar(), stand_in(sanity_checking=True)
    bar.setup(trainer, None, "fit")
    bar.on_validation_start(trainer, None)
    bar.on_validation_end(trainer, None)
    trainer.sanity_checking = False
    run_epoch(bar, trainer, clock, 0.001, validate_at=(4,))
    bar.on_train_epoch_start(trainer, None)
    assert list(dict.fromkeys(screen.labels)) == ["sanity check", "epoch 1/3"]


def test_below_a_line_is_the_bar_of_its_epoch_however_short_epochs_are(clock, monkeypatch):
    """Refreshes are seconds apart on a slow terminal; the bar of the first epoch stood below the lines of later ones."""

    class Screen(Pictures):
        def write(self, pairs):
            self.labels.append(f"line of {pairs[0][0]}")

    screen = Screen()
    monkeypatch.setattr(progress_bar, "open_renderer", lambda interval: screen)
    bar, trainer = ProgressBar(), stand_in()
    bar.setup(trainer, None, "fit")
    for _ in range(3):
        run_epoch(bar, trainer, clock, 0.001)
    lines = [at for at, label in enumerate(screen.labels) if label.startswith("line")]
    assert [screen.labels[at - 1 : at + 1] for at in lines] == [
        [f"epoch {epoch}/3", f"line of epoch {epoch}/3"] for epoch in (1, 2, 3)
    ]


def test_other_ranks_show_nothing(clock, caplog):
    bar, trainer = ProgressBar(), stand_in(is_global_zero=False)
    bar.setup(trainer, None, "fit")
    run_epoch(bar, trainer, clock, 60.0, validate_at=(2, 4))
    bar.on_train_end(trainer, None)
    assert taken(caplog) == []


def test_a_batch_between_two_pictures_touches_nothing():
    bar, trainer = ProgressBar(), stand_in()
    bar.setup(trainer, None, "fit")
    bar.on_train_epoch_start(trainer, None)
    nothing = object()  # reading any attribute, or a tensor, would raise
    bar.on_train_batch_end(nothing, nothing, nothing, nothing, nothing)
    bar.on_validation_batch_end(nothing, nothing, nothing, nothing, nothing)


@pytest.mark.parametrize("seconds_a_batch", [1.0, 11.0])
def test_a_reader_that_is_gone_does_not_end_the_training(clock, monkeypatch, seconds_a_batch):
    """Tests a terminal; tests/test_messages.py tests a pipe."""

    class Gone(Pictures):
        def draw(self, *_):
            raise OSError

        write = draw

    bar, trainer = ProgressBar(), stand_in()
    bar.setup(trainer, None, "fit")
    monkeypatch.setattr(progress_bar, "open_renderer", lambda interval: Gone())
    run_epoch(bar, trainer, clock, seconds_a_batch, validate_at=(2,))
    bar.on_train_end(trainer, None)


@given(
    batches=st.one_of(st.just(math.inf), st.integers(1, 50)),
    max_steps=st.one_of(st.just(-1), st.integers(1, 30)),
    window=st.integers(1, 5),
    data=st.data(),
)
def test_train_total_is_where_the_loop_will_stop(batches, max_steps, window, data):
    def stop():
        done = steps = 0
        while done < batches and (max_steps < 0 or steps < max_steps):
            done += 1
            steps += done % window == 0 or done == batches
        return done

    expected = None if math.isinf(batches) and max_steps < 0 else stop()
    done = data.draw(st.integers(0, 20 if expected is None else expected - 1))
    trainer = stand_in(
        num_training_batches=batches, max_steps=max_steps, accumulate_grad_batches=window, global_step=done // window
    )
    assert _train_total(trainer, done) == expected


@pytest.mark.parametrize("rate", [0, -1, 61, "fast", None, math.nan])
def test_refresh_rate_is_checked(rate):
    with pytest.raises(ConfigError, match="refresh_rate_hz"):
        ProgressBar(refresh_rate_hz=rate)


def test_it_can_be_copied_and_sent_to_another_process():
    bar = ProgressBar(refresh_rate_hz=2)
    assert pickle.loads(pickle.dumps(copy.deepcopy(bar)))._interval == 0.5


# -- a real terminal -----------------------------------------------------------------------------------------------------

SCRIPT = textwrap.dedent("""
    import logging, sys, warnings
    from types import SimpleNamespace
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from fabricamp.callbacks.progress_bar import ProgressBar
    from test_progress_bar_stand_in import stand_in
    trainer, bar = stand_in(progress_bar_metrics={"loss": 0.5}), ProgressBar()
    bar.setup(trainer, None, "fit")
    try:
        for epoch in range(2):
            trainer.current_epoch, trainer.state.batch_idx = epoch, 0
            bar.on_train_epoch_start(trainer, None)
            for index in range(4):
                bar._due = 0
                trainer.global_step += 1
                bar.on_train_batch_end(trainer, None, None, None, index)
                trainer.state.batch_idx = index + 1
                if index == 1:
                    print("printed [not markup]")
                    logging.getLogger("user").info("logged")
                    print("error", file=sys.stderr)
                if index == 2 and epoch == 1 and "crash" in sys.argv:
                    raise KeyboardInterrupt
            bar.on_train_epoch_end(trainer, None)
        bar.on_train_end(trainer, None)
    except KeyboardInterrupt as error:
        bar.on_exception(trainer, None, error)
    assert sys.stdout is sys.__stdout__ and logging.root.handlers[0].stream is sys.__stderr__
    print("after")
""")


class Terminal:
    """The few control sequences that rich uses, applied to lines of text that are ``width`` wide at most."""

    def __init__(self, width=100):
        self.lines, self.row, self.column, self.cursor_shown = [""], 0, 0, True
        self.width = width

    def feed(self, output):
        for text, code, argument, letter in re.findall(r"([^\x1b\r\n]+|\r|\n)|(\x1b\[)([?0-9;]*)([A-Za-z])", output):
            if code:
                self._control(argument, letter)
            elif text == "\r":
                self.column = 0
            elif text == "\n":
                self._go_down()
            else:
                assert self.cursor_shown, "a process killed here would leave the cursor hidden"
                for letter_of_text in text:
                    self._write(letter_of_text)
        return [line.rstrip() for line in self.lines if line.strip()]

    def _go_down(self):
        self.row += 1
        self.lines += [""] * (self.row + 1 - len(self.lines))

    def _write(self, letter):
        if self.column == self.width:  # a character after the last column begins a new line
            self._go_down()
            self.column = 0
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1

    def _control(self, argument, letter):
        if letter == "A":
            self.row -= int(argument or 1)
        elif letter == "K":
            assert argument == "2"
            self.lines[self.row] = ""
        elif letter in "hl":
            assert argument == "?25"
            self.cursor_shown = letter == "h"
        else:
            assert letter == "m", f"unknown control sequence {argument}{letter}"


def run_in_terminal(tmp_path, *arguments, script=SCRIPT, stderr=None, keys=b"", at=b"", **environment):
    """Runs the script with stdout (and stderr) on a real pseudo-terminal; returns the raw output.

    ``keys`` are typed as soon as the output contains ``at``; the file ``echoed`` is created when the output has their ``^C``.
    """
    (tmp_path / "test_progress_bar_stand_in.py").write_text(
        "import math\nfrom types import SimpleNamespace\n" + inspect.getsource(stand_in)
    )
    (tmp_path / "script.py").write_text(script)
    leader, follower = pty.openpty()
    streams = follower, follower if stderr is None else stderr.fileno()
    variables = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"} | environment
    with mock.patch.dict(os.environ):
        for name in ("NO_COLOR", "FORCE_COLOR"):
            os.environ.pop(name, None)
        process = start_forked(tmp_path, "script.py", *arguments, streams=streams, **variables)
    os.close(follower)
    output = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux raises it when the other end is closed
            break
        if not part:
            break
        output += part
        if keys and at in output:
            os.write(leader, keys)
            keys = b""
        if b"^C" in output:
            (tmp_path / "echoed").touch()
    os.close(leader)
    process.communicate(timeout=60)
    assert process.returncode == 0, output.decode()
    return output.decode()


def test_a_line_that_is_too_long_is_broken_between_two_values(tmp_path):
    metrics = "{'train_loss_step': 1.341, 'val_accuracy': 0.7222, 'train_loss_epoch': 1.886}"
    script = SCRIPT.replace('{"loss": 0.5}', metrics).replace("range(2)", "range(1)")
    lines = without_times(Terminal().feed(run_in_terminal(tmp_path, script=script, COLUMNS="80")))
    whole = "epoch 1/3  step 4  train_loss_step 1.341  val_accuracy 0.7222"
    assert lines[-3:-1] == [whole, "  train_loss_epoch 1.886"]


EPOCHS = [
    ["printed [not markup]", "logged", "error", "epoch 1/3  step 4  loss 0.5000"],
    ["printed [not markup]", "logged", "error", "epoch 2/3  step 8  loss 0.5000"],
]


def without_times(lines):
    return [re.sub(r"  [0-9.]+ s  [0-9.]+ (it/s|s/it)$", "", line) for line in lines]


def test_terminal_keeps_prints_logs_and_epoch_lines_and_nothing_of_the_bar(tmp_path):
    terminal = Terminal()
    output = run_in_terminal(tmp_path)
    assert "━" in output
    assert without_times(terminal.feed(output)) == [*EPOCHS[0], *EPOCHS[1], "after"]
    assert terminal.cursor_shown


def test_what_is_said_without_a_configuration_stands_above_the_bar_too(tmp_path):
    script = SCRIPT
    for part, instead in (
        ('logging.basicConfig(level=logging.INFO, format="%(message)s")', ""),
        ('logging.getLogger("user")', 'logging.getLogger("fabricamp")'),
        (" and logging.root.handlers[0].stream is sys.__stderr__", ""),
    ):
        assert part in script
        script = script.replace(part, instead)
    lines = Terminal().feed(run_in_terminal(tmp_path, script=script))
    assert without_times(lines) == [*EPOCHS[0], *EPOCHS[1], "after"]


def test_exception_leaves_the_bar_as_it_stood_and_a_clean_terminal(tmp_path):
    terminal = Terminal()
    *before, bar, after = without_times(terminal.feed(run_in_terminal(tmp_path, "crash")))
    assert before == [*EPOCHS[0], *EPOCHS[1][:-1]]
    assert re.fullmatch(r"epoch 2/3     ━+  3/4  [0-9.]+ (it/s|s/it)  \d:\d\d left  step 7  loss 0\.5000", bar)
    assert after == "after"
    assert terminal.cursor_shown


FAILING = textwrap.dedent("""
    import sys, torch
    from fabricamp import Callback, Trainer, TrainingModule

    class Line(TrainingModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
        def training_step(self, batch, batch_idx):
            return self.layer(batch).mean()
        def validation_step(self, batch, batch_idx):
            self.layer(batch)
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Failing(Callback):
        def __init__(self, place):
            self.place = place
        def on_train_start(self, trainer, module):
            if self.place == "start":
                raise ValueError("MY OWN ERROR")
        def on_save_checkpoint(self, trainer, module, checkpoint):
            if self.place == "save":
                raise ValueError("MY OWN ERROR")
            if self.place == "second interrupt":
                raise KeyboardInterrupt("MY OWN ERROR")

    data = torch.utils.data.DataLoader(torch.ones(2, 1))
    for place in ("start", "save", "second interrupt"):
        trainer = Trainer(max_epochs=1, logger=False, callbacks=[Failing(place)], default_root_dir=sys.argv[1])
        try:
            trainer.fit(Line(), data, data)
        except BaseException as error:
            print(f"{place}: {type(error).__name__}: {error}; hides {error.__context__}")
""")


def test_an_error_while_no_bar_is_open_is_the_last_word(tmp_path):
    output = run_in_terminal(tmp_path, str(tmp_path), script=FAILING)
    for place, kind in (("start", "ValueError"), ("save", "ValueError"), ("second interrupt", "KeyboardInterrupt")):
        assert f"{place}: {kind}: MY OWN ERROR; hides None" in output


INTERRUPTED = textwrap.dedent("""
    import fcntl, os, signal, termios, time
    from pathlib import Path
    from fabricamp.callbacks.progress_bar import ProgressBar
    from test_progress_bar_stand_in import stand_in
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)  # Ctrl-C at this terminal is for this process
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # rich prints once more what it was printing when it came
    trainer, bar = stand_in(progress_bar_metrics={"loss": 0.5}, max_epochs=30), ProgressBar()
    bar.setup(trainer, None, "fit")
    try:
        bar.on_train_epoch_start(trainer, None)
        for index in range(3):
            bar._due = 0
            bar.on_train_batch_end(trainer, None, None, None, index)
            trainer.state.batch_idx = index + 1
        print("three steps are made")
        os.write(1, b"\\x1b[0;0m")  # is not seen: the bar below the line is drawn
        signal.sigwait([signal.SIGINT])  # takes a signal from before, too; pause() would wait for another one
        trainer.global_step = 3  # since the last refresh
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        while not (Path(__file__).parent / "echoed").exists():  # Linux sends the signal before it echoes
            time.sleep(0.01)
        bar.on_exception(trainer, None, error)
    print("after")
""")


@pytest.mark.parametrize("keys", [b"\x03", b"typed ahead\x03"])
def test_what_the_terminal_echoes_leaves_no_second_copy_of_a_bar_as_wide_as_it(tmp_path, keys):
    options = {"script": INTERRUPTED, "keys": keys, "at": b"\x1b[0;0m", "COLUMNS": "90"}
    output = run_in_terminal(tmp_path, **options)
    assert "^C" in output
    printed, bar, after = Terminal(90).feed(output)
    assert (printed, after) == ("three steps are made", "after")
    assert re.fullmatch(r"epoch 1/30 .*  3/4 .* step 3  loss 0\.5000", bar)
    assert len(bar) == 89, "only a bar of the full width is at stake"


def test_stderr_that_leads_elsewhere_is_left_alone(tmp_path):
    with (tmp_path / "errors").open("w") as file:
        output = run_in_terminal(tmp_path, stderr=file)
    assert (tmp_path / "errors").read_text() == "logged\nerror\n" * 2
    assert "error" not in output


def test_dumb_terminal_gets_plain_lines(tmp_path):
    output = run_in_terminal(tmp_path, TERM="dumb")
    assert "\x1b" not in output
    assert "epoch 2/3  step 8  loss 0.5000" in output


def test_a_bar_by_lightning_s_name_shows_its_refresh_rate():
    assert (TQDMProgressBar(20).refresh_rate, RichProgressBar(5).refresh_rate) == (20, 5)
    assert quiet_trainer(enable_progress_bar=True).progress_bar_callback.refresh_rate == 1


class NamesItsBar(TQDMProgressBar):
    """Names its bar, as subclasses of Lightning's bar do."""

    def on_train_epoch_start(self, trainer, pl_module):
        super().on_train_epoch_start(trainer, pl_module)
        self.train_progress_bar.set_description(f"round {trainer.current_epoch}")
        self.train_progress_bar.set_postfix({"mood": "good"})
        noted.append((self.total_train_batches, self.total_val_batches, self.train_progress_bar.total))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if self.has_dataloader_changed(dataloader_idx):
            noted.append((dataloader_idx, self.total_val_batches_current_dataloader))


noted = []


def test_a_subclass_names_the_bar_of_training_and_reads_its_totals(caplog):
    noted.clear()
    bar = NamesItsBar()
    for read in (lambda: bar.trainer, lambda: bar.train_progress_bar):
        with pytest.raises(TypeError):
            read()
    trainer = quiet_trainer(
        max_epochs=2, callbacks=[bar], enable_progress_bar=True, check_val_every_n_epoch=2, num_sanity_val_steps=1
    )
    with caplog.at_level("INFO", "fabricamp"):
        trainer.fit(Classifier(), loader(12), [loader(8), loader(4)])
    assert bar.trainer is trainer
    assert noted == [(0, 1), (1, 1), (3, 0, 3), (3, 3, 3), (0, 2), (1, 1)]
    assert [line for line in caplog.messages if line.startswith("round 1") and "mood good" in line]


def test_a_bar_prints_above_itself_unless_it_is_disabled(capsys):
    class Prints(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.progress_bar_callback.print("first", "second", sep="-")
            trainer.progress_bar_callback.disable()
            trainer.progress_bar_callback.print("third")

    trainer = quiet_trainer(max_epochs=1, callbacks=[Prints()], enable_progress_bar=True)
    trainer.fit(Classifier(), loader())
    shown = capsys.readouterr().out
    assert "first-second\n" in shown
    assert "third" not in shown
    assert trainer.progress_bar_callback.is_disabled


def test_a_subclass_may_keep_properties_and_a_bar_of_its_own():
    class Own(ProgressBar):  # as scvi-tools' bar
        def __init__(self):
            super().__init__()
            self._refresh_rate = 1

        @property
        def is_enabled(self):
            return self._enabled and self.refresh_rate > 0

        @property
        def refresh_rate(self):
            return self._refresh_rate

    class Draws(TQDMProgressBar):
        def on_train_start(self, trainer, pl_module):
            self.train_progress_bar = "mine"

    assert Own().is_enabled
    bar = Draws()
    quiet_trainer(max_epochs=1, callbacks=[bar], enable_progress_bar=True).fit(Classifier(), loader())
    assert bar.train_progress_bar == "mine"


def test_a_pickled_bar_holds_neither_a_trainer_nor_a_subclass_s_bar():
    bar = TQDMProgressBar()
    bar.train_progress_bar = (one for one in "it does not pickle")
    quiet_trainer(max_epochs=1, callbacks=[bar], enable_progress_bar=True).fit(Classifier(), loader())
    copied = pickle.loads(pickle.dumps(bar))
    with pytest.raises(TypeError, match="setup"):
        copied.train_progress_bar  # noqa: B018 - reading it raises


@pytest.mark.parametrize("family", [ProgressBar, TQDMProgressBar])
def test_a_subclass_may_set_attributes_that_the_bar_has_too(family):
    class Mine(family):
        def __init__(self):
            super().__init__()
            self.trainer = None
            self.refresh_rate = 7
            self.total_train_batches = 3
            self.is_enabled = False

        def setup(self, trainer, pl_module, stage):
            super().setup(trainer, pl_module, stage)
            self.trainer = trainer

    bar = Mine()
    assert (bar.trainer, bar.refresh_rate, bar.total_train_batches, bar.is_disabled) == (None, 7, 3, True)
    trainer = quiet_trainer(max_epochs=1, callbacks=[bar], enable_progress_bar=True)
    trainer.fit(Classifier(), loader(8))
    assert bar.trainer is trainer
    bar.enable()
    assert bar.is_enabled


class ManyColumns(Classifier):
    """Shows values of a step, of steps and epoch, of an epoch alone, and of a validation; ``val`` sorts after ``train`` by name."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("z/loss", loss, on_epoch=True, prog_bar=True)
        self.log("z/size", 4.0, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("a/loss", 1.0, prog_bar=True)

    def on_train_epoch_end(self):
        self.log("z/hook", 2.0, prog_bar=True)


@pytest.mark.parametrize("every", [1, 3, 50])
@pytest.mark.parametrize("interval", [1.0, 0.5])
def test_columns_keep_their_places_training_before_validation(every, interval, caplog):
    def columns():
        lines = [line for line in caplog.messages if re.match(r"epoch \d+/\d+  step", line)]
        caplog.clear()
        return [re.findall(r"[az]/\w+", line) for line in lines]

    options = {"log_every_n_steps": every, "val_check_interval": interval, "enable_progress_bar": True}
    trainer = quiet_trainer(max_epochs=3, **options)
    trainer.fit(ManyColumns(), loader(32), loader(8))
    expected = ["z/loss_step", "z/loss_epoch", "z/size", "z/hook", "a/loss"]
    assert columns() == [expected] * 3
    trainer.save_checkpoint("saved.ckpt")
    quiet_trainer(max_epochs=4, **options).fit(ManyColumns(), loader(32), loader(8), ckpt_path="saved.ckpt")
    assert columns() == [expected]


def test_two_bars_are_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"callbacks holds 2 progress bars \(ProgressBar, TQDMProgressBar\); give one"
    ):
        quiet_trainer(callbacks=[ProgressBar(), TQDMProgressBar()])


def test_a_module_prints_by_the_bar_that_is_shown(capsys):
    class Prints(Classifier):
        def prepare_data(self):
            self.print("prepares")

        def on_train_start(self):
            self.print("begins", end="!")

    class Own(ProgressBar):
        def print(self, *args, **options):
            super().print("own:", *args, **options)

    for shown, lines in ((True, "own: prepares\nown: begins!"), (False, "prepares\nbegins!")):
        bar = Own()
        if not shown:
            bar.disable()
        quiet_trainer(max_steps=1, callbacks=bar).fit(Prints(), loader(8))
        assert capsys.readouterr().out == lines


def test_bars_of_other_ranks_are_disabled_as_are_those_of_subclasses_that_draw():
    class Draws(ProgressBar):
        shown = True

        def disable(self):
            self.shown = False

    for rank, shows in ((0, True), (1, False)):
        bar, own = TQDMProgressBar(), Draws()
        for one in (bar, own):
            one.setup(stand_in(is_global_zero=rank == 0), None, "fit")
        assert (bar.is_enabled, own.shown) == (shows, shows)
