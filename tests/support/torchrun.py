"""Real jobs of torchrun, whose ranks can be sent signals."""

import os
import subprocess
import sys
import time
from pathlib import Path


class Torchrun:
    """A running torchrun job: `ferryman train`, or another script, on `ranks` ranks."""

    def __init__(self, *arguments, ranks=2, restarts=0, script=("-m", "ferryman.cli.main", "train")):
        how = ["--nproc-per-node", ranks, "--max-restarts", restarts, "--standalone"]
        command = [sys.executable, "-m", "torch.distributed.run", *how, *script, *arguments]
        around = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=around
        )

    def after(self, steps, run):
        """Waits until the run has made this many steps, or has ended."""
        file = run / "metrics.jsonl"
        while self.process.poll() is None and not (file.exists() and file.read_text().count("\n") >= steps):
            time.sleep(0.01)

    def send(self, number, rank=None):
        """Sends a signal to a rank, or to torchrun itself."""
        os.kill(self.process.pid if rank is None else self._ranks()[rank], number)

    def end(self):
        """Waits for the end. Returns the exit code, stdout and stderr."""
        shown = self.process.communicate(timeout=500)
        return self.process.returncode, *shown

    def _ranks(self):
        found = {}
        for file in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for process in file.read_text().split():
                around = dict(
                    word.partition("=")[::2] for word in Path(f"/proc/{process}/environ").read_text().split("\0")
                )
                found[int(around["RANK"])] = int(process)
        return found
