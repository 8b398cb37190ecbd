"""What is read from a checkpoint is checked before anything is changed, whoever wrote it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ferryman.checkpoint import directory, encoding, schema, tensor_file
from ferryman.checkpoint.manifest import is_whole
from ferryman.engine import Engine
from support.checkpoints import Run, assert_equal, everything, one_group
from support.crafted import change_file, change_manifest, copy_of
from support.models import CASES, build
from support.own_steps import OWN_STEPS

STATE = "ferryman/state.safetensors"


@pytest.fixture(scope="module")
def run():
    with Run(seed=5) as run:
        run.step(0, 1)
        yield run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "saved"
    with Run() as run:
        run.step(0, 2)
        run.engine.save(path)
    return path


@pytest.fixture
def crafted(tmp_path, saved):
    return copy_of(saved, tmp_path / "crafted")


def assert_refused(run, path, message):
    """Asserts that loading raises an error that says this, and that nothing in the engine has changed."""
    before, generator = everything(run.engine), torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        run.engine.load(path)
    assert_equal(everything(run.engine), before)
    assert torch.equal(torch.get_rng_state(), generator)
    run.engine._loaded.check()


def put(*keys, value):
    """An edit of the manifest: sets what is at this place."""

    def edit(manifest):
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value

    return edit


@pytest.mark.parametrize("step", [-1, 2**70, "7", None, 1.5, True, [], "NaN"])
def test_a_step_is_a_number_of_steps(run, crafted, step):
    change_manifest(crafted, put("step", value=step))
    assert_refused(run, crafted, r"checkpoint\.json is damaged: step must be an integer from 0 to \d+, but is ")
    assert not is_whole(crafted)


def test_json_has_no_nan(run, crafted):
    change_manifest(crafted, put("step", value=float("nan")))
    assert_refused(run, crafted, r"checkpoint\.json is damaged: numbers must be finite, but one is NaN")


def test_a_number_too_large_for_a_float_is_not_finite(run, crafted):
    """`1e999` is infinity for Python's reader."""
    change_manifest(crafted, put("loss_scale", value={"value": "LARGE", "good_steps": 0}))
    file = crafted / directory.MANIFEST
    file.write_text(file.read_text().replace('"LARGE"', "1e999"))
    assert_refused(run, crafted, r"checkpoint\.json is damaged")


@pytest.mark.parametrize(
    "name", ["../saved/model.safetensors", "/etc/passwd", "a/../../x", "", "./model", "a//b", "a\0"]
)
def test_files_are_inside_the_directory(run, crafted, name):
    def edit(manifest):
        manifest["files"][name] = {"bytes": 1, "crc32": 0}

    change_manifest(crafted, edit)
    assert_refused(
        run, crafted, "a key of files must be the name of a file inside the directory, without '..', but is "
    )
    change_manifest(crafted, lambda manifest: (manifest["files"].pop(name), manifest["weights"].append(name)))
    assert_refused(run, crafted, r"weights\[1\] must be the name of a file inside the directory")


def test_the_same_file_elsewhere_is_not_read(run, crafted, saved):
    """Even if its checksum is right."""

    def edit(manifest):
        outside = f"../{crafted.name}/model.safetensors"
        manifest["files"][outside] = manifest["files"].pop("model.safetensors")
        manifest["weights"] = [outside]

    change_manifest(crafted, edit)
    assert_refused(run, crafted, "must be the name of a file inside the directory")


def test_deep_json_is_refused(run, crafted):
    for depth in (schema.MAX_DEPTH + 1, 100_000):
        (crafted / directory.MANIFEST).write_text('{"crc32": 1, "content": ' + "[" * depth + "]" * depth + "}")
        assert_refused(run, crafted, r"checkpoint\.json is damaged: its JSON must be nested at most 400 levels deep")
        assert not is_whole(crafted)


def test_what_can_be_saved_can_be_loaded(tmp_path):
    """Deep state, too, up to a limit that saving knows."""

    class Deep:
        state = 1

        def state_dict(self):
            return {"value": self.state}

        def load_state_dict(self, state):
            self.state = state["value"]

    deep = Deep()
    with Run() as run:
        for _ in range(99):
            deep.state = {"inner": deep.state}
        run.engine.save(tmp_path / "saved", objects={"deep": deep})
        kept, deep.state = deep.state, None
        run.engine.load(tmp_path / "saved", objects={"deep": deep})
        assert deep.state == kept
        deep.state = {"inner": deep.state}
        with pytest.raises(
            ValueError, match=r"objects\.deep.* is nested more than 100 levels deep, or contains itself"
        ):
            run.engine.save(tmp_path / "saved", objects={"deep": deep})


def test_a_key_is_there_once(run, crafted):
    file = crafted / directory.MANIFEST
    file.write_text(file.read_text().replace('"step":', '"step": 1, "step":', 1))
    assert_refused(run, crafted, r"each key of an object must be unique, but 'step' occurs twice")


def test_what_is_not_known_is_not_ignored(run, crafted):
    change_manifest(crafted, put("momentum", value=1))
    assert_refused(run, crafted, "the keys of the document must be among .*, but is 'momentum'")
    change_manifest(crafted, lambda manifest: [manifest.pop("momentum"), manifest.pop("torch")])
    assert_refused(run, crafted, "torch must be present, but is missing")


def test_parameters_are_no_option(run, crafted):
    parameters = run.engine._optimizer_view.optimizers[0].param_groups[0]["params"]
    change_manifest(
        crafted, lambda manifest: manifest["optimizer"]["groups"][0]["options"]["dict"].append(["params", [1, 2]])
    )
    assert_refused(run, crafted, r"optimizer\.groups\[0\]\.options must be without 'params'")
    assert run.engine._optimizer_view.optimizers[0].param_groups[0]["params"] is parameters


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", "fast", r"options\.lr must be like the optimizer's 0\.001, but is 'fast'"),
        ("lr", None, r"options\.lr must be like"),
        ("betas", {"tuple": [0.9]}, r"options\.betas must be like"),
        ("foreach", "yes", r"options\.foreach must be like the optimizer's None, but is 'yes'"),
        ("maximize", 1, r"options\.maximize must be like the optimizer's False, but is 1"),
        ("amsgrad", True, r"the optimizer cannot use them: .*they need other state"),
        ("betas", {"tuple": [1, 0.9]}, r"the optimizer cannot use them: ZeroDivisionError"),
    ],
)
def test_options_are_of_their_kind(run, crafted, option, value, message):
    def edit(manifest):
        for pair in manifest["optimizer"]["groups"][0]["options"]["dict"]:
            if pair[0] == option:
                pair[1] = value

    change_manifest(crafted, edit)
    assert_refused(run, crafted, message)


@pytest.mark.parametrize("where", ["steps", "torch", "tensor", "random", "numpy"])
def test_the_parts_of_a_manifest_fit_together(run, crafted, where):
    def edit(manifest):
        if where == "steps":
            manifest["optimizer"]["steps"].popitem()
        elif where == "torch":
            manifest["optimizer"]["torch"]["nobody"] = {"dict": []}
        elif where == "tensor":
            manifest["objects"]["more"] = {"tensor": "nowhere"}
        for pair in manifest["random"]["dict"]:
            if where == "random" and pair[0] == "torch":
                pair[1] = 7
            if where == "numpy" and pair[0] == "numpy":  # numpy itself would read beyond its state
                (state,) = (value for key, value in pair[1]["dict"] if key == "state")
                next(inside for inside in state["dict"] if inside[0] == "pos")[1] = 100_000

    change_manifest(crafted, edit)
    message = {
        "steps": "optimizer.steps",
        "torch": "'nobody', which is not trained",
        "tensor": "'nowhere', which is in",
    }
    assert_refused(run, crafted, message.get(where, "random must be states of random generators"))


def _shorter(tensors, name):
    return {**tensors, name: tensors[name][:-1].clone()}


def _moved(tensors, name):
    rest = {key: value for key, value in tensors.items() if key != name}
    return {**rest, f"{name}@1": tensors[name][1:].clone()}


def _overlapping(tensors, name):
    return {**tensors, f"{name}@1": tensors[name][1:].clone()}


DAMAGE = {
    "shorter": (_shorter, r"elements in total, but "),
    "longer": (lambda t, name: {**t, name: torch.cat([t[name], t[name]])}, r"must cover its \d+ elements once"),
    "narrow": (lambda t, name: {**t, name: t[name].half()}, r"must be flat, in torch\.float32, but is torch\.float16"),
    "integers": (lambda t, name: {**t, name: t[name].int()}, r"must be flat, in torch\.float32, but is torch\.int32"),
    "not flat": (lambda t, name: {**t, name: t[name].view(1, -1)}, r"must be flat"),
    "moved": (_moved, r"must cover its \d+ elements once, and the next element is 0"),
    "overlapping": (_overlapping, r"must cover its \d+ elements once"),
    "nobody's": (lambda t, name: {**t, "nobody/exp_avg": t[name]}, r"'nobody/exp_avg' is not the name of a parameter"),
    "no number": (lambda t, name: {**t, f"{name}@-1": t[name]}, r"@-1' is not the name of a parameter"),
    "a master": (
        lambda t, name: {**t, name.replace("exp_avg", "master"): t[name]},
        r"master' must be absent, because .* is saved in torch\.float32",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_state_of_the_wrong_size_or_dtype_is_refused(run, crafted, how):
    """It was ignored, and the old values stayed."""
    edit, message = DAMAGE[how]
    tensors = tensors_of(crafted / STATE)
    name = next(name for name in tensors if name.endswith("/exp_avg"))
    change_file(crafted, STATE, edit(tensors, name))
    assert_refused(run, crafted, message)


def test_a_narrow_weight_has_its_master(tmp_path):
    with Run(options={"precision": "bf16"}) as run:
        run.step(0, 1)
        crafted = run.engine.save(tmp_path / "saved")
        tensors = tensors_of(crafted / STATE)
        name = next(name for name in tensors if name.endswith("/master"))
        change_file(crafted, STATE, {key: value for key, value in tensors.items() if key != name})
        assert_refused(run, crafted, f"has no '{name}', which")
        change_file(crafted, STATE, {**tensors, name: tensors[name].float()})
        assert_refused(run, crafted, r"must be flat, in torch\.int16, but is torch\.float32")
    with Engine(build(CASES["toy"]), device="cpu") as engine, pytest.raises(ValueError, match=r"in torch\.int16"):
        engine.load(crafted)  # without an optimizer, too


def test_weights_are_numbers(run, crafted):
    tensors = tensors_of(crafted / "model.safetensors")
    name = next(iter(tensors))
    change_file(crafted, "model.safetensors", {**tensors, name: tensors[name].to(torch.int64)})
    assert_refused(
        run, crafted, r"model\.safetensors: .* must be of a floating-point dtype, as in the model, but is torch\.int64"
    )


def test_a_tensor_is_in_one_file(run, crafted):
    shutil.copy(crafted / "model.safetensors", crafted / "more.safetensors")

    def edit(manifest):
        manifest["files"]["more.safetensors"] = manifest["files"]["model.safetensors"]
        manifest["weights"].append("more.safetensors")

    change_manifest(crafted, edit)
    assert_refused(run, crafted, r"more\.safetensors has .*, which is in .*model\.safetensors as well")
    change_manifest(crafted, put("weights", value=["model.safetensors"] * 2))
    assert_refused(run, crafted, "'model.safetensors' must be in files, and in one list of files once")


@pytest.mark.parametrize("what", ["missing", "shape", "no tensor"])
def test_state_of_torch_is_what_torch_keeps(tmp_path, what):
    with Run(optimizer=one_group("RMSprop")) as run:
        run.step(0, 1)
        crafted = run.engine.save(tmp_path / "saved")

        def edit(manifest):
            state = next(iter(manifest["optimizer"]["torch"].values()))["dict"]
            pair = next(pair for pair in state if pair[0] == "square_avg")
            if what == "missing":
                state.remove(pair)
            elif what == "shape":
                pair[1] = {"tensor": next(pair for pair in state if pair[0] == "step")[1]["tensor"]}
            else:
                pair[1] = 3

        change_manifest(crafted, edit)
        assert_refused(run, crafted, r"optimizer\.torch\['.*'\].* must (have|be)")


@pytest.mark.parametrize("key", ["row_var", "step"])
def test_the_state_of_own_steps_has_the_shapes_that_they_give_it(tmp_path, key):
    with Run(optimizer=OWN_STEPS["Adafactor"]) as run:
        run.step(0, 1)
        crafted = run.engine.save(tmp_path / "saved")

        def edit(manifest):
            state = manifest["optimizer"]["torch"]["blocks.1.up.weight"]["dict"]
            pair = next(pair for pair in state if pair[0] == key)
            pair[1] = {"tensor": next(pair for pair in state if pair[0] == "col_var")[1]["tensor"]}

        change_manifest(crafted, edit)
        shape = r"\(32, 1\)" if key == "row_var" else r"\(\)"
        assert_refused(
            run, crafted, rf"{key} must be a floating-point tensor of shape {shape}, but has shape \(1, 16\)"
        )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["optimizer.x", [0, 2]], r"permuted\[1\] must be each number from 0 to 1 once"),
        (["{name}", [1, 0]], "must have 2 dimensions, but has shape"),
        (["nowhere", [0]], "refers to the tensor 'nowhere', which is in none"),
        ("a name", "permuted must be a list of 2"),
    ],
)
def test_a_permuted_tensor(run, crafted, value, words):
    def edit(manifest):
        name = next(value["tensor"] for key, value in manifest["random"]["dict"] if key == "torch")
        permuted = [value[0].format(name=name), value[1]] if isinstance(value, list) else value
        manifest["objects"]["more"] = {"permuted": permuted}

    change_manifest(crafted, edit)
    assert_refused(run, crafted, words)


def test_the_state_of_an_object(run, crafted, saved):
    """Its own method may refuse it at last, and then the checkpoint and the object are named."""

    class Position:
        def load_state_dict(self, state):
            self.place = state["place"]

        def state_dict(self):
            return {"place": 1}

    change_manifest(crafted, put("objects", "data", value={"dict": [["somewhere", 1]]}))
    with pytest.raises(
        ValueError, match=r"checkpoint\.json: objects\.data: load_state_dict\(\) of Position cannot use"
    ):
        run.engine.load(crafted, objects={"data": Position()})
    run.engine.load(saved)


# Headers of safetensors files.


def tensors_of(path):
    return {name: tensor_file.read_tensor(path, entry) for name, entry in tensor_file.read_header(path).items()}


HEADERS = {
    "overlap": {"a": ("F32", [2], [0, 8]), "b": ("F32", [1], [4, 8])},
    "gap": {"a": ("F32", [1], [0, 4]), "b": ("F32", [1], [8, 12])},
    "beyond the file": {"a": ("F32", [3], [0, 12]), "b": ("F32", [1], [12, 16])},
    "negative": {"a": ("F32", [2], [-4, 4]), "b": ("F32", [1], [4, 8])},
    "backwards": {"a": ("F32", [2], [8, 0])},
    "huge": {"a": ("F32", [2**62, 2**62], [0, 8])},
    "huge and empty": {"a": ("F32", [0, 2**62, 2**62], [0, 0]), "b": ("F32", [2], [0, 8])},
    "negative shape": {"a": ("F32", [-1, -2], [0, 8])},
    "many dimensions": {"a": ("F32", [1] * 99 + [2], [0, 8])},
    "fraction": {"a": ("F32", [2.0], [0, 8])},
    "dtype": {"a": ("F31", [2], [0, 8])},
    "three offsets": {"a": ("F32", [2], [0, 8, 8])},
}


@pytest.mark.parametrize("how", HEADERS)
def test_headers_are_checked(tmp_path, how):
    keys = ("dtype", "shape", "data_offsets")
    text = json.dumps({name: dict(zip(keys, told, strict=True)) for name, told in HEADERS[how].items()})
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(8))
    with pytest.raises(ValueError, match=r"x\.safetensors is (damaged|truncated)"):
        tensor_file.read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "content",
    [
        (2**63).to_bytes(8, "little") + b"{}",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0\xff\xfe",
        b"\x10\0\0\0\0\0\0\0" + b'{"a":{},"a":{}} ',
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        b"\x02\0",
    ],
)
def test_what_is_no_header(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.safetensors is damaged"):
        tensor_file.read_header(tmp_path / "x.safetensors")


# Pretrained weights.


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 7, ""])
def test_an_index_names_files_of_its_directory(run, tmp_path, saved, name):
    shutil.copytree(saved, tmp_path / "inside")
    shutil.copy(saved / "model.safetensors", tmp_path)
    index = {"weight_map": dict.fromkeys(tensors_of(saved / "model.safetensors"), name)}
    (tmp_path / "inside" / "model.safetensors.index.json").write_text(json.dumps(index))
    before = everything(run.engine)
    with pytest.raises(ValueError, match=r"index\.json is damaged: weight_map\[.*\] must be the name of a file inside"):
        run.engine.load_weights(tmp_path / "inside")
    assert_equal(everything(run.engine), before)


# Links.


def test_a_lock_is_not_a_link(run, tmp_path):
    (tmp_path / "precious").write_text("text")
    for target in ("precious", "nowhere"):
        (tmp_path / ".saved.lock").symlink_to(tmp_path / target)
        with pytest.raises(ValueError, match=r"\.saved\.lock must be a file, for a lock, but is a symbolic link"):
            run.engine.save(tmp_path / "saved")
        assert not (tmp_path / "nowhere").exists()
        (tmp_path / ".saved.lock").unlink()
    run.engine.save(tmp_path / "saved")
    assert (tmp_path / "precious").read_text() == "text"


def test_a_temporary_directory_is_not_a_link(run, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("text")
    for target in ("precious", "nowhere"):
        (tmp_path / ".saved.partial").symlink_to(tmp_path / target)
        run.engine.save(tmp_path / "saved")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "saved"]
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["file"]


def test_a_series_has_numbers(run, tmp_path):
    """A copy with a name of the user's own is neither loaded nor removed with it."""
    path = run.engine.save(tmp_path, keep=1)
    shutil.copytree(path, tmp_path / "step-best")
    assert directory.series(tmp_path) == [path]
    run.engine.save(tmp_path, keep=1)
    assert (tmp_path / "step-best").is_dir()
    manifest = path / directory.MANIFEST
    for value in ("NaN", "1e999", "[" * 100_000, '"now"', "-1"):
        manifest.write_text('{"content": {"saved": ' + value + "}}")
        assert directory.last_saved(tmp_path) == manifest.stat().st_mtime


def test_references_are_all_tensors_of_a_value():
    tensors = {}
    value = encoding.encode({"a": [torch.ones(2), (torch.ones(1).numpy(), 1.5)], 2: float("nan")}, "x", tensors)
    assert {reference.name for reference in encoding.references(value)} == set(tensors)
    assert sorted(reference.kind for reference in encoding.references(value)) == ["array", "tensor"]
    schema.check(value, schema.encoded, Path("x"))
