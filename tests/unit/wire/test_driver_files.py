"""What a driver prints is kept in pieces, and read by its place in the whole."""

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.wire import driver_files
from slackwater.wire.driver_files import DriverFiles, LogWriter


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=60), st.integers(1, 30))
def test_a_reader_gets_what_was_written_from_any_place_that_is_kept(
    tmp_path_factory: object, said: list[bytes], most: int
) -> None:
    files = DriverFiles(tmp_path_factory.mktemp("log"))  # type: ignore[attr-defined]  # pytest's, untyped by hypothesis
    before, driver_files.PIECE_BYTES = driver_files.PIECE_BYTES, 64
    try:
        for words in said:
            writer = LogWriter(files)  # a new keeper each time
            writer.write(words)
            writer.close()
    finally:
        driver_files.PIECE_BYTES = before
    whole = b"".join(said)
    kept = files.pieces()[0][0] if files.pieces() else 0
    assert len(files.pieces()) <= driver_files.PIECES_KEPT
    place, got = kept, b""
    while True:
        place, more = files.read_log(place, most)
        if not more:
            break
        got += more
    assert got == whole[kept:]
    assert files.read_log(-5, 5)[1] == (whole[-5:] if len(whole) - kept >= 5 else whole[kept:])


def test_a_lock_lives_as_long_as_the_process_that_inherited_it(tmp_path: Path) -> None:
    files = DriverFiles(tmp_path / "job")
    files.make()
    assert not files.lives()
    lock = files.take_lock()
    assert lock is not None and files.take_lock() is None
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    process = subprocess.Popen(waits, stdin=subprocess.PIPE, pass_fds=(lock,))
    os.close(lock)
    assert files.lives()
    process.kill()
    process.wait(60)
    assert process.stdin is not None
    process.stdin.close()
    assert not files.lives()
