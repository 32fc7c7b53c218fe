"""A process that is forked while another thread is logging can log too."""

from __future__ import annotations

import logging
import os
import threading
import time

from torch.utils.data import DataLoader, Dataset

from fabricamp.launch import hold_logging_at_fork


class Logs(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        logging.getLogger("fabricamp").warning("sample %d", index)
        return index


def test_a_worker_logs_where_a_thread_was_logging_as_it_was_forked():
    hold_logging_at_fork()
    reading, writing = os.pipe()
    handler = logging.StreamHandler(os.fdopen(writing, "w"))
    logger = logging.getLogger("fabricamp")
    logger.addHandler(handler)
    # More than fits into a pipe: the thread holds the stream's lock until the pipe is read.
    talking = threading.Thread(target=logger.warning, args=("x" * (1 << 20),))

    def listen():
        while os.read(reading, 1 << 16):
            time.sleep(0.01)  # so the fork happens in the middle of the line

    listening = threading.Thread(target=listen)
    try:
        talking.start()
        os.set_blocking(reading, True)
        assert os.read(reading, 1) == b"x"  # the thread has begun to write
        listening.start()
        assert list(DataLoader(Logs(), num_workers=1, batch_size=None, timeout=60)) == [0, 1]
    finally:
        logger.removeHandler(handler)
        talking.join()
        handler.stream.close()
        listening.join()
        os.close(reading)
