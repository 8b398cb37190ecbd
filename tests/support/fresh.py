"""Runs scripts in processes of their own without the seconds that imports take: each is forked from a process that has
only imported torch, with what the first optimizer imports, and ferryman. It ends like any other, with the shutdown of
the interpreter."""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

# `serve` returns in a child alone, so that the script is run, and ends, as a main program. What was imported is frozen:
# without that, the collections at the end of a child look at all of it, for a second.
_SERVER = """
import gc, json, os, socket, sys
import torch, torch._dynamo, ferryman.engine

def serve(server):
    while True:
        request, files, _, _ = socket.recv_fds(server, 1 << 20, 2)
        if not request:
            os._exit(0)
        child = os.fork()
        if child == 0:
            server.close()
            return json.loads(request), files
        for file in files:
            os.close(file)
        server.sendall(b"%d\\n" % child)
        server.sendall(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def prepare(request, files):
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.argv = ["-c", *request["arguments"]]
    return compile(request["code"], "<script>", "exec")

gc.freeze()
exec(prepare(*serve(socket.socket(fileno=int(sys.argv[1])))), {"__name__": "__main__"})
"""


class _Server:
    def __init__(self):
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _SERVER, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._answers = self._socket.makefile()

    def run(self, request, output, errors, timeout):
        socket.send_fds(self._socket, [json.dumps(request).encode()], [output.fileno(), errors.fileno()])
        child = int(self._answers.readline())
        self._socket.settimeout(timeout)
        try:
            return int(self._answers.readline())
        except TimeoutError:
            os.kill(child, signal.SIGKILL)
            self.close()
            _server.cache_clear()
            raise
        finally:
            self._socket.settimeout(None)

    def close(self):
        self._answers.close()
        self._socket.close()
        self._process.wait()


@functools.cache
def _server():
    server = _Server()
    atexit.register(server.close)
    return server


def run_fresh(code, *arguments, environment=None, directory=None, output=None, timeout=250):
    """Runs a script as `python -c` would, and returns a `subprocess.CompletedProcess` with its text.

    `environment`: variables besides those of this process. They count for what is read after the imports. `output`: a
    file that takes the place of the standard output."""
    request = {
        "code": code,
        "arguments": [str(argument) for argument in arguments],
        "environment": {**os.environ, **(environment or {})},
        "directory": str(directory or Path.cwd()),
    }
    with _Pipe() as own, _Pipe() as errors:
        status = _server().run(request, output or own, errors, timeout)
    return subprocess.CompletedProcess(code, status, own.text, errors.text)


class _Pipe:
    """A pipe whose text is read by a thread; not a file, which a script may limit in its size."""

    def __enter__(self):
        self._end, self._writing = os.pipe()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def fileno(self):
        return self._writing

    def _read(self):
        with os.fdopen(self._end) as file:
            self.text = file.read()

    def __exit__(self, *error):
        os.close(self._writing)
        self._reader.join()


def run_file_fresh(path, *arguments, **options):
    """Runs a script that is a file; otherwise as `run_fresh` does."""
    code = f"import runpy, sys\nsys.argv[0] = {str(path)!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    return run_fresh(code, *arguments, **options)
