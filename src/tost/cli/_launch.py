"""Run torchrun with messages instead of its tracebacks: ``python -m tost.cli._launch ARGUMENTS OF TORCHRUN``."""

from __future__ import annotations

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from tost.cli import _console


def main(arguments: list[str]) -> int:
    """Start the processes and wait for them; return the exit code of the first that failed.

    A process that fails prints its reason itself; one that was ended by a signal cannot.
    """
    logging.disable(logging.ERROR)
    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        _console.log(f"process {rank} was ended by {name}, and with it the others; the checkpoints before are intact")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
