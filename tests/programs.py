"""Runs random training programs, and compares the engine with plain PyTorch.

python tests/programs.py cpu 500              # a table of the outcomes of 500 programs
python tests/programs.py virtual --seed 17 -v # one program: its features, its outcome, and the traceback
"""

import argparse
import contextlib
import faulthandler
import os
import sys
import time
import warnings

import torch

from support.devices import choose, whole
from support.programs.program import HANGS, Outcome, Program, make_program, run_engine, show_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help="cpu, virtual, or another accelerator")
    parser.add_argument("count", type=int, nargs="?", default=60)
    parser.add_argument("--seed", type=int, help="only this program")
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--only", default="", help="only programs with a feature whose name contains this")
    parser.add_argument("--patience", type=float, default=HANGS, help="seconds after which a program is said to hang")
    parser.add_argument("-v", "--verbose", action="store_true", help="every outcome; tracebacks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    choose([given.device])
    from support.devices import torch_virtual  # which depends on that choice

    seeds = range(given.first, given.first + given.count) if given.seed is None else [given.seed]
    outcomes: dict[Program, Outcome] = {}
    start = time.monotonic()
    for seed in seeds:
        program = make_program(seed)
        if given.only and not any(given.only in name for name in program.features):
            continue
        with torch_virtual.strict() if given.device == "virtual" else contextlib.nullcontext():
            outcomes[program] = outcome = run_engine(program, whole(given.device), patience=given.patience)
        if given.verbose:
            print(f"{program}\n  {outcome.kind} {outcome.detail}", flush=True)
            if given.seed is not None:
                draft = program.draw()
                print(f"  {draft.sizes}\n  {draft.micro_batches} micro-batches, {draft.optimizer}, {draft.options}, "
                      f"on an accelerator {draft.device_options}\n{outcome.trace}")  # fmt: skip
                if outcome.kind == "HANGS":
                    faulthandler.dump_traceback()
    if given.seed is None or not given.verbose:
        print(show_table(outcomes, time.monotonic() - start))
    sys.stdout.flush()
    os._exit(not all(outcome.is_good for outcome in outcomes.values()))  # threads that hang would keep it here


if __name__ == "__main__":
    main()
