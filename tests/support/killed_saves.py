"""Kills processes while they train and save, at many points in time. Also a command, which prints what it saw.

    python tests/support/killed_saves.py DIRECTORY SEED '{"MODE": POINTS}'

This process has imported torch and has no threads, so that each of its children is there at once. A child loads what
the one before it has left, compares it with the record of what was at that step, and goes on: a step, a line in the
record, a save, a line in the record, until it is killed.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import nn

from ferryman.checkpoint import directory as directories
from ferryman.engine import Engine

KEEP = {"one": None, "series": 2, "without exchange": None, "series without exchange": 1}


def make_engine() -> Engine:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64)) for _ in range(3))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Engine(model, optimizer, device="cpu", precision="bf16", loss=lambda m, x: m(*x).float().square().mean())


def step(engine: Engine) -> None:
    engine.step((torch.ones(2, 64, dtype=torch.bfloat16) * (engine.steps % 7),))


def digest(engine: Engine) -> str:
    """A digest of the weights, the optimizer's state and the random generator."""
    contents = engine._contents()
    found = hashlib.sha1(torch.get_rng_state().numpy().tobytes())
    for unit in contents.units:
        found.update(contents.store.weights(unit).numpy().tobytes())
        for item in unit.trained:
            for values in contents.store.state(unit).tensors_of(item).values():
                found.update(values.numpy().tobytes())
    return found.hexdigest()


class Record:
    """A record in a file: a digest for each step, and which steps were saved. Each line is written atomically."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, *words: object) -> None:
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, (" ".join(map(str, words)) + "\n").encode())
        os.close(handle)

    def read(self) -> tuple[dict[int, str], int]:
        """Digests, and the last step whose save had returned."""
        digests: dict[int, str] = {}
        saved = -1
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            number, what = line.split()
            if what == "saved":
                saved = int(number)
            elif digests.setdefault(int(number), what) != what:
                raise AssertionError(f"step {number} was another one before: resuming was not exact")
        return digests, saved


def go_on(place: Path, mode: str) -> tuple[Engine, Record, int]:
    """Loads the last checkpoint, and checks it against the record."""
    if mode.endswith("without exchange"):
        directories._exchange = lambda *_: False
    torch.set_num_threads(1)
    engine, record = make_engine(), Record(place / "record")
    digests, saved = record.read()
    try:
        engine.load(place / "saved")
    except ValueError as error:
        if saved >= 0 or "no checkpoint" not in str(error):
            raise
        return engine, record, -1
    assert engine.steps >= saved, f"step {saved} had been saved, and {engine.steps} was loaded"
    assert digest(engine) == digests[engine.steps], f"step {engine.steps} is not what it was"
    return engine, record, engine.steps


def train(place: Path, mode: str, say: int) -> None:
    engine, record, loaded = go_on(place, mode)
    while True:
        step(engine)
        record.add(engine.steps, digest(engine))
        os.write(say, f"{loaded} ".encode())
        engine.save(place / "saved", keep=KEEP[mode])
        record.add(engine.steps, "saved")


def fork(child, *args) -> tuple[int, int]:
    """Starts a child process. Returns its id, and a pipe through which it reports."""
    listen, say = os.pipe()
    if pid := os.fork():
        os.close(say)
        return pid, listen
    try:
        child(*args, say)
        os._exit(0)
    except BaseException:
        os.write(say, traceback.format_exc().encode())
        os._exit(1)


def hear(listen: int) -> str:
    """All reports of the child."""
    with os.fdopen(listen) as pipe:
        return pipe.read()


def leftovers(place: Path) -> list[str]:
    return sorted(path.name for folder in (place, place / "saved") for path in folder.glob(".*"))


def campaign(place: Path, mode: str, points: int, seed: int) -> dict[str, int]:
    source = random.Random(seed)
    found = {"points": 0, "in a save": 0, "survived": 0, "steps": 0}
    window = 3 * unharmed(place, mode)[1]
    # Where saves become faster than the first one was, more points are needed until enough of them are in a save.
    while found["points"] < points or (found["in a save"] < points // 10 and found["points"] < 10 * points):
        pid, listen = fork(train, place, mode)
        early = source.random() < 0.05  # while it loads
        told = "" if early else os.read(listen, 1 << 16).decode()
        time.sleep(source.random() * window)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        told += hear(listen)
        assert "Traceback" not in told, told
        found["points"] += 1
        found["in a save"] += bool(leftovers(place))
        found["survived"] += bool(told) or early
    found["steps"] = int(unharmed(place, mode)[0])
    return found


def unharmed(place: Path, mode: str) -> tuple[float, float]:
    """Runs a child that is not killed. Returns the step that it loaded and the seconds that its save took."""
    pid, listen = fork(last, place, mode)
    os.waitpid(pid, 0)
    told = hear(listen)
    assert told.startswith("done"), told
    assert not leftovers(place), leftovers(place)
    _, loaded, seconds = told.split()
    return int(loaded), float(seconds)


def last(place: Path, mode: str, say: int) -> None:
    engine, record, loaded = go_on(place, mode)
    step(engine)
    record.add(engine.steps, digest(engine))
    start = time.monotonic()
    engine.save(place / "saved", keep=KEEP[mode])
    seconds = time.monotonic() - start
    if (keep := KEEP[mode]) is not None:
        assert len(directories.series(place / "saved")) <= keep
    os.write(say, f"done {loaded} {seconds}".encode())


def between(place: Path, mode: str, say: int) -> None:
    """Ends the process when the old checkpoint has been moved aside and the new one is not yet in its place."""
    engine, record, _ = go_on(place, mode)
    (next(iter(directories.series(place / "saved")), place / "saved") / "tokenizer.json").write_text("tokens")
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            os.write(say, b"between")
            os._exit(9)
        return real(path, target)

    Path.rename = rename  # type: ignore[method-assign, assignment]
    if KEEP[mode] is None:
        step(engine)  # in a series, the same step again
        record.add(engine.steps, digest(engine))
    engine.save(place / "saved", keep=KEEP[mode])


def saving(place: Path, number: int, say: int) -> None:
    """One of two processes that save to the same place at once, until each has saved twice and one was refused."""
    torch.set_num_threads(1)
    engine, refused, done = make_engine(), 0, 0
    for _ in range(number):
        step(engine)  # to different depths
    Record(place / "record").add(engine.steps, digest(engine))
    (place / f"ready {number}").touch()
    while len([*place.glob("ready *")]) < 2:
        time.sleep(0.001)
    while done < 2 or not (place / "refused").exists():
        try:
            engine.save(place / "saved")
            done += 1
        except ValueError as error:
            if "another process is saving" not in str(error):
                raise
            refused += 1
            (place / "refused").touch()
    os.write(say, json.dumps({"done": done, "refused": refused}).encode())


def together(place: Path) -> dict[str, int]:
    children = [fork(saving, place, number) for number in (1, 2)]
    told = [hear(listen) for _, listen in children]
    for pid, _ in children:
        os.waitpid(pid, 0)
    found = [json.loads(one) for one in told]
    unharmed(place, "one")
    return {key: sum(one[key] for one in found) for key in ("done", "refused")}


def die_between(place: Path, mode: str) -> dict[str, int]:
    unharmed(place, mode)
    pid, listen = fork(between, place, mode)
    os.waitpid(pid, 0)
    assert (told := hear(listen)) == "between", told
    left = len(leftovers(place))
    unharmed(place, mode)
    return {"left": left, "kept": int((place / "saved" / "tokenizer.json").exists())}


def main() -> None:
    place, seed, modes = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # the first one imports much
    for number, (mode, points) in enumerate(modes.items()):
        here = place / str(number)
        here.mkdir()
        if mode == "together":
            found = together(here)
        elif mode.startswith("between, "):
            found = die_between(here, mode.removeprefix("between, "))
        else:
            found = campaign(here, mode, points, seed)
        print(json.dumps({"mode": mode, **found}), flush=True)


if __name__ == "__main__":
    main()
