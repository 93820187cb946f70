"""Commands that only look something up load neither torch nor anything else that takes long."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = {"torch", "numpy", "rich", "matplotlib", "sklearn", "accelerate", "datasets", "tokenizers"}
COMMANDS = [
    *([], ["--help"], ["--version"], ["info", "-h"], ["bench"], ["bench", "ops", "--help"], ["no-such-command"]),
    *(["ls", "configs"], ["ls", "models", "--json"], ["ls", "data"]),
    *(["cat", "demo/digits"], ["cat", "demo/stdlib_bytes", "nonsense"], ["validate", "demo/listops"]),
    *(["cp", "demo/digits", "copy.yaml"], ["generate", ".", "--prompt", ""]),
    *([command, "--help"] for command in ("ls", "cat", "cp", "validate", "generate", "convert")),
    *(["data"], ["data", "prepare", "-h"], ["data", "ls"], ["data", "ls", "text"]),
]
# One process imports the program, and is forked for every command.
PROGRAM = """
import json, os, pathlib, sys
from tost.cli import main
for place, arguments in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        sys.argv = ["tost", *arguments]
        try:
            main()
        except SystemExit:
            pathlib.Path(f"{place}.json").write_text(json.dumps(list(sys.modules)))
        os._exit(0)
    os.wait()
"""


def test_looking_up_loads_nothing_heavy(tmp_path):
    program = [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS)]
    subprocess.run(program, cwd=tmp_path, capture_output=True, check=True, timeout=120)
    modules = [set(json.loads((tmp_path / f"{place}.json").read_text())) for place in range(len(COMMANDS))]
    loaded = {" ".join(command): HEAVY & found for command, found in zip(COMMANDS, modules, strict=True)}
    assert {command: heavy for command, heavy in loaded.items() if heavy} == {}
