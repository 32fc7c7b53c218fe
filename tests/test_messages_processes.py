"""Messages of programs in interpreters of their own: each line once, by the program's means and in spawned processes."""

from __future__ import annotations

from tests.distributed.forked import start_forked
from tests.distributed.scripts import start
from tests.test_messages import ONCE, SAID, plain, ran, times


def test_basic_config_has_each_line_once_with_one_prefix(tmp_path):
    """Logging is configured after fabricamp is imported; the next test configures it before."""
    out, err = ran(tmp_path, before="import fabricamp.callbacks\nlogging.basicConfig()")
    assert out == "mine\n"
    assert times(plain(err)) == ONCE
    assert f"WARNING:fabricamp:{SAID[1]}\n" in err
    assert f"INFO:fabricamp:{SAID[0]}\n" in err


OWN_CLASS = """
    import logging
    class Own(logging.Logger):
        def makeRecord(self, *args, **options):
            record = super().makeRecord(*args, **options)
            record.request = "id7"
            return record
    logging.setLoggerClass(Own)
    logging.basicConfig(format="%(request)s %(levelname)s:%(name)s:%(message)s")
"""


def test_a_logger_class_of_the_program_makes_the_records(tmp_path):
    """Runs in a new interpreter, which makes the logger when it imports fabricamp; logging is configured before."""
    out, err = ran(tmp_path, before=OWN_CLASS, start=start)
    assert "Logging error" not in err
    assert out == "mine\n"
    assert times(plain(err.replace("id7 ", ""))) == ONCE
    assert f"id7 WARNING:fabricamp:{SAID[1]}\n" in err
    assert f"id7 INFO:fabricamp:{SAID[0]}\n" in err


def test_spawned_processes_keep_the_level(tmp_path):
    before = "if __name__ == '__main__':\n    logging.getLogger('fabricamp').setLevel(logging.ERROR)"
    options = "devices=2, strategy='delayed_ddp', start_method='spawn', max_epochs=1"
    assert ran(tmp_path, before=before, options=options, start=start_forked) == ("mine\n", "")
