"""Crash-safe JSONL."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.files import flip_byte
from torino.core.errors import BadFile
from torino.evaluation import read_answers
from torino.evaluation.records import AnswerLog, read_records

WRITER = """
import sys, time
from pathlib import Path
from torino.evaluation.records import AnswerLog
log = AnswerLog(Path(sys.argv[1]))
log.add([{"n": 1}])
print("ready", flush=True)
time.sleep(600)
"""


def test_lock_is_exclusive_and_released_when_a_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "answers" / "1of1.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        with pytest.raises(BadFile, match="Another process is writing"):
            AnswerLog(path)
        assert [row["n"] for row in read_records([path])] == [1]  # others can read
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    log = AnswerLog(path)
    log.add([{"n": 2}])
    log.close()
    assert [row["n"] for row in read_records([path])] == [1, 2]
    assert [file.name for file in path.parent.glob("*.jsonl")] == [path.name]


def test_incomplete_last_line_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": ' + b"2" * 100_000)
    assert [row["n"] for row in read_records([path])] == [1]
    log = AnswerLog(path)
    log.add([{"n": 3}, {"n": 4}])
    log.close()
    assert [row["n"] for row in read_records([path])] == [1, 3, 4]


def test_other_bad_lines_raise(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n\n{"n": 2}\n')
    with pytest.raises(BadFile, match=r"a\.jsonl, line 2 cannot be used: it is not valid JSON.*asked again"):
        list(read_records([path]))
    path.write_bytes(b"[1]\n")
    with pytest.raises(BadFile, match="line 1 cannot be used: it must be an object"):
        list(read_records([path]))
    with pytest.raises(BadFile, match="Cannot read"):
        list(read_records([tmp_path / "none.jsonl"]))


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = AnswerLog(path)
    log.add([{"index": "1", "prediction": "dog"}, {"index": "2", "prediction": "cat"}])
    log.close()
    flip_byte(path, path.read_bytes().index(b"cat"))
    with pytest.raises(BadFile, match=r"a\.jsonl, line 2 is damaged: .* checksum\. Remove that line; .* asked again"):
        list(read_records([path]))
    with pytest.raises(BadFile, match=r"line 2 is not an answer: it does not match its checksum"):
        read_answers(path)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    assert list(read_records([path])) == read_answers(path) == [{"index": "1", "prediction": "dog"}]


def test_a_file_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n')
    log = AnswerLog(path)
    log.add([{"n": 2}])
    log.close()
    assert list(read_records([path])) == [{"n": 1}, {"n": 2}]
    assert path.read_bytes().startswith(b'{"n": 1}\n{"n": 2, "crc32": "')


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadFile, match=r"Cannot write .*Choose a writable folder"):
        AnswerLog(tmp_path / "file" / "a.jsonl")


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "a.jsonl")
    log.add([{"n": 1}])
    end = (tmp_path / "a.jsonl").stat().st_size

    class Full(io.RawIOBase):
        def tell(self) -> int:
            return end

        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    log._file = Full()  # type: ignore[assignment]
    with pytest.raises(BadFile, match=r"No space left on device\. Earlier answers are kept"):
        log.add([{"n": 2}])
    log.add([{"n": 3}])
    log.close()
    assert [row["n"] for row in read_records([tmp_path / "a.jsonl"])] == [1, 3]


def test_two_logs_do_not_share_a_file(tmp_path: Path) -> None:
    first = AnswerLog(tmp_path / "a.jsonl")
    with pytest.raises(BadFile, match="Another process is writing"):
        AnswerLog(tmp_path / "a.jsonl")
    first.close()
    AnswerLog(tmp_path / "a.jsonl").close()
