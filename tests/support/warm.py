"""Processes that start with torch imported, which otherwise takes seconds of every process that a test starts.

A server imports only torch, and forks for each program.  Imports, output, child processes and exit status are the
program's own.  With a GPU, programs are started directly.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from select import select
from typing import Any

PATHS = "PYTHONPATH"


def run(
    arguments: Sequence[str], env: Mapping[str, str], cwd: str | Path = ".", timeout: float = 3600
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments`: a script, `-c` and a program, or `-m` and a module, followed by its arguments."""
    import torch

    command = [sys.executable, *arguments]
    if torch.cuda.is_available():
        return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    server = _server(os.getpid())
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "err")]
        asked = dict(arguments=arguments, env=dict(env), cwd=str(Path(cwd).resolve()), said=list(map(str, said)))
        server.stdin.write(json.dumps(asked).encode() + b"\n")
        pid = int(server.stdout.readline())
        if not select([server.stdout], [], [], timeout)[0]:
            os.kill(pid, signal.SIGKILL)
            server.stdout.readline()
            raise subprocess.TimeoutExpired(command, timeout)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(command, status, *(path.read_text() for path in said))


@functools.cache
def _server(_: int) -> Any:
    """Start the server of the process with this number."""
    # unbuffered: select does not see a line that was read ahead
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def end() -> None:
        server.stdin.close()
        server.wait()
        server.stdout.close()

    atexit.register(end)
    return server


def _serve() -> dict[str, Any] | None:
    """Fork for each line of the input, and print the child's process number and then its status.

    Return what a line asks for in its child, and None at the end of the input.
    """
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return json.loads(line)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def _become(arguments: list[str], env: dict[str, str], cwd: str, said: list[str]) -> None:
    """Run the program that was asked for, as if Python had started with it."""
    for fd, path in enumerate((os.devnull, *said)):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, fd)
        os.close(file)
    mine = os.environ.get(PATHS, "").split(os.pathsep)
    rest = [path for path in sys.path[1:] if path not in mine]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    kind, *words = arguments
    script = kind not in ("-c", "-m")
    paths = [path for path in env.get(PATHS, "").split(os.pathsep) if path]
    sys.path[:] = [str(Path(kind).resolve().parent) if script else "" if kind == "-c" else cwd, *paths, *rest]
    if kind == "-m":
        sys.argv[:] = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = arguments if script else ["-c", *words[1:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if script:
        main.__file__ = kind
    text = Path(kind).read_text(encoding="utf-8") if script else words[0]
    exec(compile(text, kind if script else "<string>", "exec"), vars(main))


if __name__ == "__main__":
    import torch  # noqa: F401

    gc.freeze()
    server = sys.modules["__main__"]  # keeps this module, whose functions a child still needs
    asked = _serve()
    if asked is not None:
        _become(**asked)
