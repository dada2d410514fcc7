"""A program that is started in a process namespace: two processes speak on one pipe, however close
together.
"""

import os

import pytest

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import launch


def test_why_the_second_process_failed_is_heard_though_it_was_said_before_anybody_listened() -> (
    None
):
    heard, said = os.pipe()
    os.write(said, launch._SECOND.pack(launch._SECOND_MARK, 77))
    os.write(said, b"no such program")
    os.close(said)
    assert launch._read_second_pid(heard) == 77
    assert launch.read_status(heard) == b"no such program"
    os.close(heard)


def test_a_first_process_that_fails_says_all_of_why() -> None:
    heard, said = os.pipe()
    os.write(said, b"no namespace can be entered")
    os.close(said)
    with pytest.raises(UnavailableError, match=r"^no namespace can be entered$"):
        launch._read_second_pid(heard)
    os.close(heard)
