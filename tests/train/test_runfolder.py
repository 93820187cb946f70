"""The run folder: one writer at a time, and errors in words where it cannot be written."""

import multiprocessing
import os
import resource
import signal

import pytest

from tost.errors import ConfigError, StorageError
from tost.train.runfolder import LOCK, RunFolder


def hold(path, ready):
    with RunFolder(path).locked(pytest.fail):
        ready.set()
        signal.pause()


@pytest.fixture
def holder(tmp_path):
    """A process that writes to the folder ``tmp_path / "run"``."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "run", ready))
    process.start()
    assert ready.wait(30)
    yield process
    process.kill()
    process.join()


def test_a_second_writer_is_told_who_the_first_is(tmp_path, holder):
    folder = RunFolder(tmp_path / "run")
    message = rf"is being written by process {holder.pid} on {os.uname().nodename} since .* UTC\. Wait .*SIGTERM.*--out"
    with pytest.raises(ConfigError, match=message), folder.locked(pytest.fail):
        pytest.fail("two writers")


def test_the_lock_of_a_killed_process_is_void(tmp_path, holder):
    holder.kill()
    holder.join()
    folder = RunFolder(tmp_path / "run")
    assert f"process {holder.pid}" in (folder.path / LOCK).read_text()
    with folder.locked(pytest.fail):
        assert f"process {os.getpid()}" in (folder.path / LOCK).read_text()
    assert (folder.path / LOCK).read_text() == ""


def test_only_an_empty_or_locked_folder_takes_a_new_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.locked(pytest.fail):
        folder.refuse_existing()
    folder.refuse_existing()
    (folder.path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        folder.refuse_existing()
    (folder.path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume auto.*--out"):
        folder.refuse_existing()


def test_a_file_system_without_locks_is_used_with_a_remark(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("tost.train.runfolder.fcntl.lockf", refuse)
    lines = []
    with RunFolder(tmp_path / "run").locked(lines.append):
        pass
    assert "cannot be locked" in lines[0]


def test_a_place_that_cannot_be_written_is_an_error_in_words(tmp_path):
    (tmp_path / "file").touch()
    folder = RunFolder(tmp_path / "file" / "run")
    with pytest.raises(StorageError, match=r"cannot write .*file/run: .*Not a directory"), folder.locked(pytest.fail):
        pytest.fail("written")
    for write in (lambda: folder.log("x"), lambda: folder.record({}), lambda: folder.write_summary({})):
        with pytest.raises(StorageError, match="cannot write"):
            write()


def test_a_file_that_cannot_grow_is_an_error_in_words(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*metrics\.jsonl: .*File too large"):
            RunFolder(tmp_path).record({"step": 1, "text": 200 * "x"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_records_that_no_run_has_written_are_dropped(tmp_path):
    lines = ['{"step": 1}', '{"step": 9}', '{"stp": 1}', "[1]", "3", '{"step": "x"}', '{"st']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    RunFolder(tmp_path).drop_after(5)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_foreign_config_is_not_overwritten(tmp_path):
    (tmp_path / "config.yaml").write_text("mine: true\n")
    with pytest.raises(ConfigError, match=r"config\.yaml that is not of a run"):
        RunFolder(tmp_path).find_start("auto", pytest.fail)
