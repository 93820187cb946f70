"""Several real processes: the same steps as one, exact resumption, sharding, shared sequences."""

import json
import os
import platform
import signal
import subprocess
import sys

import pytest

from tests.train.runs import TINY, assert_same_run, command, records, run, two_ranks
from tost.data.prepare import prepare
from tost.train.checkpoint.files import load_tensors
from tost.train.runfolder import RunFolder

NO_DROPOUT = ("model.dropout=0.0", "train.ema_decay=0.9", "train.accumulate=2", "train.clip_norm=1.0")


def losses(out):
    return [record["loss"] for record in records(out) if record["kind"] == "step"]


def finished(done):
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_processes_take_the_steps_of_one(tmp_path):
    run(tmp_path / "1", *NO_DROPOUT, "train.steps=50")
    finished(command(tmp_path / "2", *NO_DROPOUT, "train.steps=50", "--nproc", "2"))
    assert len(losses(tmp_path / "2")) == 50
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in "12"]
    assert summaries[0]["final"]["accuracy"] == summaries[1]["final"]["accuracy"]


def test_batch_norms_of_sequences_see_the_batch_of_all_processes(tmp_path):
    layout = ("model.block=mixer", "model.norm_kind=batch", "model.gradient_checkpointing=true")
    run(tmp_path / "1", *NO_DROPOUT, *layout)
    finished(two_ranks(tmp_path / "2", *NO_DROPOUT, *layout))
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


def interrupt(out, *options, after):
    """Start a run, press Ctrl-C after a step, and return the exit code and what it said."""
    line = [sys.executable, "-m", "tost.cli", "train", "demo/digits", *TINY, *options, "--out", str(out)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        for text in process.stderr:
            if text.startswith("step ") and int(text[5:].partition("/")[0]) >= after:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    return process.returncode, rest


def interrupt_and_resume(out, *options):
    code, rest = interrupt(out, *options, after=50)
    assert code == 130, rest[-3000:]
    assert "Traceback" not in rest
    assert "SIGTERM" not in rest
    assert json.loads((out / "summary.json").read_text())["status"] == "interrupted"
    finished(command(out, *options, "--resume", "auto"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_resume_exactly(tmp_path, strategy):
    options = (
        "train.steps=100",
        f"parallel.strategy={strategy}",
        "train.ema_decay=0.9",
        "train.accumulate=2",
        "data.workers=1",
        "--nproc",
        "2",
    )
    finished(command(tmp_path / "whole", *options))
    interrupt_and_resume(tmp_path / "cut", *options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["demo/digits", "demo/stdlib_bytes"])
@pytest.mark.parametrize("option", ["parallel.strategy=fsdp", "parallel.context=2"])
def test_sharding_and_shared_sequences_take_the_same_steps(tmp_path, config, option):
    short = ("model.max_length=32", "data.options.length=32") if config == "demo/stdlib_bytes" else ()
    finished(command(tmp_path / "1", *NO_DROPOUT, *short, config=config))
    finished(command(tmp_path / "2", *NO_DROPOUT, *short, option, "--nproc", "2", config=config))
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


def test_texts_in_pieces_take_the_same_steps_shared_or_not(tmp_path):
    short = (*NO_DROPOUT, "data.options.length=32", "model.max_length=32", "train.steps=6")
    run(tmp_path / "whole", *short, config="demo/stdlib_bytes")
    run(tmp_path / "pieces", *short, "train.chunk=12", config="demo/stdlib_bytes")
    finished(two_ranks(tmp_path / "shared", *short, "train.chunk=12", "parallel.context=2", config="demo/stdlib_bytes"))
    assert len(losses(tmp_path / "shared")) > 1
    for name in ("pieces", "shared"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.slow
def test_packed_texts_take_the_same_steps_whole_shared_or_in_pieces(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": "a b" * n}) + "\n" for n in range(1, 40)))
    prepare("text", {"source": str(tmp_path / "text.jsonl")}, tmp_path / "data")
    short = (*NO_DROPOUT, "data.name=tokens", f"data.path={tmp_path / 'data'}", "data.options.separate_documents=true")
    short = (*short, "data.options.length=32", "model.max_length=32", "train.steps=6")
    run(tmp_path / "whole", *short, config="demo/stdlib_bytes")
    run(tmp_path / "pieces", *short, "train.chunk=12", config="demo/stdlib_bytes")
    finished(two_ranks(tmp_path / "shared", *short, "parallel.context=2", config="demo/stdlib_bytes"))
    finished(two_ranks(tmp_path / "both", *short, "train.chunk=12", "parallel.context=2", config="demo/stdlib_bytes"))
    assert len(losses(tmp_path / "both")) > 1
    for name in ("pieces", "shared", "both"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    finished(command(tmp_path / "1", *NO_DROPOUT))
    finished(command(tmp_path / "2", *NO_DROPOUT, "train.steps=12", "--nproc", "2"))
    done = command(
        tmp_path / "3",
        *NO_DROPOUT,
        "parallel.strategy=fsdp",
        "--nproc",
        "2",
        "--resume",
        str(tmp_path / "1" / "checkpoints" / "step-00000008"),
    )
    finished(done)
    weights = [load_tensors(tmp_path / name / "checkpoints" / "last" / "model.safetensors") for name in "13"]
    for name, tensor in weights[0].items():
        assert tensor.allclose(weights[1][name], rtol=1e-4, atol=1e-6), name


def test_ctrl_c_saves_and_exits_with_130(tmp_path):
    code, rest = interrupt(tmp_path / "run", "train.steps=5000", after=3)
    assert code == 130
    assert "interrupted at step" in rest
    assert "Traceback" not in rest
    assert (tmp_path / "run" / "checkpoints" / "last" / "manifest.json").exists()


@pytest.mark.slow
def test_class_token_and_shared_sequences_train_together(tmp_path):
    """A parameter that only the first rank of a shared sequence uses must not stall the others."""
    finished(command(tmp_path / "1", *NO_DROPOUT, "model.pooling=cls"))
    finished(command(tmp_path / "2", *NO_DROPOUT, "model.pooling=cls", "parallel.context=2", "--nproc", "2"))
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


@pytest.mark.slow
def test_two_processes_that_are_refused_say_so_once_each(tmp_path):
    """The first finds the folder locked; the second learns of it, and none leaves a traceback."""
    out = tmp_path / "run"
    with RunFolder(out).locked(pytest.fail):
        done = command(out, "--nproc", "2")
    assert done.returncode in (1, 2)
    assert f"is being written by process {os.getpid()} on {platform.node()}" in done.stderr
    assert "another process of the run has failed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_two_processes_end_when_nothing_is_left_to_do(tmp_path):
    """Their group was taken down by its last user, which could wait forever for a thread that waited for it."""
    finished(command(tmp_path, "--nproc", "2"))
    for _ in range(8):
        finished(command(tmp_path, "--nproc", "2", "--resume", "auto"))
