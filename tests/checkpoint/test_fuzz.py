"""Hundreds of edits of a good checkpoint, each with checksums that match: it loads, or nothing has been changed."""

import copy
import json
import random

import pytest
import torch

from ferryman.checkpoint import directory
from support.checkpoints import Run, everything, one_group
from support.crafted import change_bytes, change_manifest, copy_of

DEEP = "<deep>"  # replaced by nested lists in the text, since Python cannot write them
VALUES = (
    float("nan"), float("inf"), -1, 0, 1, 2**70, 1.5, 1e308, "", "x", "../x", "/etc/passwd", "a\0b", None, True, False,
    [], {}, [[]], [1, "x"], {"x": 1}, {"tensor": "x"}, {"tuple": 1}, {"dict": [[[], 1]]}, {"float": "1"}, DEEP,
)  # fmt: skip
ACTS = ("replace", "replace", "replace", "replace", "remove", "add", "swap", "twice")


@pytest.fixture(scope="module", params=["AdamW", "RMSprop"])
def case(request, tmp_path_factory):
    """A checkpoint, an engine in another state, and what loading the checkpoint makes of it."""
    path = tmp_path_factory.mktemp("fuzz") / "saved"

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2)

    optimizer = one_group(request.param)
    with Run(optimizer=optimizer, scheduler=schedule) as run:
        run.step(0, 2)
        run.engine.save(path, objects=run.objects)
    with Run(optimizer=optimizer, scheduler=schedule, seed=5) as run:
        run.step(0, 1)
        before = run.engine.save(path.with_name("before"), objects=run.objects)
        run.engine.load(path, objects=run.objects)
        yield run, path, before, state(run)


def state(run):
    """All that a checkpoint may change."""
    found = everything(run.engine)
    for number, group in enumerate(run.engine._optimizer_view.groups.values()):
        found[f"members {number}"] = [id(parameter) for parameter in group["params"]]
    return {**found, "torch": torch.get_rng_state(), "python": random.getstate()}


def differences(one, other):
    def same(a, b):
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a.reshape(-1), b.reshape(-1))
        return a == b

    assert one.keys() == other.keys()
    return {key for key in one if not same(one[key], other[key])}


def places(value, where=()):
    """All places in a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*where, key)
        yield from places(one, (*where, key))


def mutate(document, source):
    """Changes one value of a document; returns its place."""
    everywhere = list(places(document))
    # Long lists, such as the state of a generator, would be most of the places.
    few = [place for place in everywhere if not isinstance(place[-1], int) or place[-1] < 3]
    where = source.choice(few)
    inside = document
    for key in where[:-1]:
        inside = inside[key]
    match source.choice(ACTS):
        case "replace":
            inside[where[-1]] = copy.deepcopy(source.choice(VALUES))
        case "remove":
            del inside[where[-1]]
        case "add":
            value = copy.deepcopy(source.choice(VALUES))
            inside.append(value) if isinstance(inside, list) else inside.update({source.choice(("x", "../x")): value})
        case "swap":
            keys = list(inside) if isinstance(inside, dict) else range(len(inside))
            other = source.choice(list(keys))
            inside[where[-1]], inside[other] = inside[other], inside[where[-1]]
            where = where[:-1]
        case "twice":
            value = copy.deepcopy(inside[where[-1]])
            inside.append(value) if isinstance(inside, list) else inside.update({f"{where[-1]}2": value})
            where = where[:-1]
    return where or ("",)


def text_of(document):
    return json.dumps(document).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000)


def craft(path, source):
    """Edits one file of the checkpoint. Returns the place of the edit."""
    file = source.choice(["", "", "", "model", "ferryman/state", "ferryman/rest"])
    if not file:
        found = []
        change_manifest(path, lambda manifest: found.append(mutate(manifest, source)))
        manifest = path / directory.MANIFEST
        manifest.write_text(text_of(json.loads(manifest.read_text())))
        return found[0]
    name = f"{file}.safetensors"
    content = (path / name).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    where = mutate(header, source)
    text = text_of(header).encode()
    size = source.choice([len(text)] * 8 + [0, 2**63, len(text) - 1])
    change_bytes(path, name, size.to_bytes(8, "little") + text + content[8 + length :])
    return (name, *where)


def concerns(where, key):
    """Whether an edit at this place may show in this part of the engine's state."""
    texts = [str(one) for one in where]
    match texts[0]:
        case "step":
            return key == "steps"
        case "loss_scale":
            return key == "scale"
        case "random" | "ferryman/rest.safetensors" | "others":
            return True  # objects, generators and torch's own state have tensors there
        case "objects":
            return False
        case "optimizer":
            return key.startswith("group ") or ": " in key
        case _:
            return texts[0].endswith(".safetensors")  # other names for the same bytes: two tensors of one shape


def restore(run, before, start):
    for number, group in enumerate(run.engine._optimizer_view.groups.values()):
        for key in group.keys() - start[f"group {number}"].keys() - {"params"}:
            del group[key]  # an option that was added; loading leaves what a checkpoint does not have
    run.engine.load(before, objects=run.objects)


def message_of(run, crafted):
    """Loads a checkpoint; returns what the error says, if there is one."""
    try:
        run.engine.load(crafted, objects=run.objects)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return None


def is_found_late(where, told):
    """Whether the error can only be known while loading: an object's own check, or another checksum of a large file.
    The engine then refuses to step."""
    return (where[0] == "objects" and "load_state_dict() of" in told) or (
        where[0] == "files" and "its checksum does not match" in told
    )


def check(case, tmp_path, seeds):
    run, saved, before, loaded = case
    outcomes = {"loads": 0, "refused": 0}
    run.engine.load(before, objects=run.objects)
    start = state(run)
    for seed in seeds:
        crafted = copy_of(saved, tmp_path / "crafted")
        where = craft(crafted, random.Random(seed))
        told = message_of(run, crafted)
        if told is not None:
            outcomes["refused"] += 1
            assert str(crafted) in told, (seed, where, told)
            if is_found_late(where, told):
                restore(run, before, start)
            assert not differences(state(run), start), (seed, where)
            run.engine._loaded.check()
        else:
            outcomes["loads"] += 1
            assert all(concerns(where, key) for key in differences(state(run), loaded)), (seed, where)
            restore(run, before, start)
    return outcomes


def test_a_crafted_checkpoint_loads_or_changes_nothing(case, tmp_path):
    outcomes = check(case, tmp_path, range(200))
    assert outcomes["refused"] > 100, outcomes
    assert outcomes["loads"] > 5, outcomes


@pytest.mark.slow
def test_many_crafted_checkpoints(case, tmp_path):
    check(case, tmp_path, range(200, 5000))
