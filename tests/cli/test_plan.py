"""`ferryman plan`: what it prints, what it refuses, and that it allocates nothing of a large model."""

import json
import re
import resource
import subprocess
import sys

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

from ferryman.cli import defaults
from ferryman.cli.main import app, main
from ferryman.cli.model_argument import parse_model
from ferryman.cli.train_options import TrainOptions
from ferryman.model.unit_discovery import find_units
from ferryman.runtime.sizes import parse_rate, show_rate
from support.slow import slow

MACHINE = (
    *("--device", "cpu", "--device-memory", "16GiB", "--host-memory", "512GiB", "--link", "12GB/s"),
    *("--device-flops", "150TFLOPS", "--host-updates", "900Mparam/s"),
)

# The blocks of gpt:base and gpt:large, but fewer; the whole models in `make test-all`.
base = pytest.mark.parametrize("model", ["gpt:layers=6,width=768,heads=12,context=1024", *slow("gpt:base")])
deep = pytest.mark.parametrize("model", ["gpt:layers=12,width=1024,heads=16,context=1024", *slow("gpt:large")])


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def document(*arguments):
    result = run(*arguments, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return json.loads(result.stdout)


def test_a_described_machine_is_planned_for():
    found = document("gpt:tiny", *MACHINE, "--batch", "4")
    assert found["fits"]
    assert found["machine"]["known"] == dict.fromkeys(found["machine"]["known"], "given")
    assert found["step"]["seconds"] > 0
    assert found["step"]["forward"]["bound"] in ("compute", "link in", "link out", "update")
    assert sum(found["device"].values()) < 16 << 30
    tokens = 4 * found["training"]["length"]
    assert found["step"]["tokens_per_second"] == pytest.approx(tokens / found["step"]["seconds"])
    assert found["assumptions"]


def test_what_does_not_fit_has_exit_code_1_and_a_budget_that_does():
    """Also one that an engine would refuse before it has seen a batch: a dry run knows what a sample takes."""
    for budget in ("100KiB", "900KiB"):
        result = run("gpt:tiny", *MACHINE, "--device-memory", budget)
        assert result.exit_code == 1
        text = " ".join(result.stdout.split())
        assert text.startswith("does not fit")
        assert "train with" not in text
        enough = re.search(r"([\d.]+\wiB) would be enough", text)[1]
        assert document("gpt:tiny", *MACHINE, "--device-memory", enough)["fits"]


@base
def test_blocks_stay_whole_where_a_sample_fits_beside_them(model):
    options = (*MACHINE, "--precision", "bf16", "--batch", "2")
    units = [document(model, *options, "--device-memory", size)["plan"]["units"] for size in ("128MiB", "256MiB")]
    assert units[0] > 2 * units[1] == 2 * len([*found_units(model)])


def found_units(name):
    return find_units(parse_model(name).on_meta())[0]


def test_the_engines_options_change_the_plan():
    told = ("--units", "transformer.h.*", "--units", "*.wte", "--resident", "*ln_f*", "--slots", "3", "--deferred")
    options = ("gpt:tiny", *MACHINE, "--device-memory", "8MiB", "--subgroup", "65536", *told)
    found = document(*options)["plan"]
    assert (found["weight_slots"], found["deferred"], found["held"]) == (3, True, False)
    assert found["units"] == len(find_units(parse_model("gpt:tiny").on_meta(), units=["transformer.h.*", "*.wte"])[0])
    train = run(*options).stdout.splitlines()[-1]
    assert train.endswith(
        "--memory 8MiB --deferred --units 'transformer.h.*' --units '*.wte' --resident '*ln_f*' --slots 3 "
        "--subgroup 65536"
    )
    assert document("gpt:tiny", *MACHINE)["plan"]["held"]
    assert not document("gpt:tiny", *MACHINE, "--relayed")["plan"]["held"]
    assert run("gpt:tiny", *MACHINE, "--relayed").stdout.splitlines()[-1].endswith("--relayed")


@base
def test_micro_batches_that_are_too_large_are_refused_with_a_number_that_fits(model):
    options = (model, *MACHINE, "--device-memory", "600MiB", "--batch", "64")
    found = document(*options, "--micro-batches", "1")
    assert not found["fits"]
    assert "micro-batches of 64 samples" in found["problems"][0]
    count = document(*options)["plan"]["micro_batches"]
    assert f"use micro_batches={count}," in found["problems"][0]
    assert document(*options, "--micro-batches", str(count))["fits"]


@base
def test_what_the_host_cannot_hold_does_not_fit(model):
    found = document(model, *MACHINE, "--host-memory", "256MiB")
    assert not found["fits"]
    assert "narrower precision" in found["problems"][0]


@deep
def test_more_device_memory_needs_fewer_fetches(model):
    small, large = (document(model, *MACHINE, "--device-memory", size) for size in ("600MiB", "1200MiB"))
    assert small["plan"]["weight_slots"] < large["plan"]["weight_slots"] or large["plan"]["held"]


@base
def test_following_its_advice_makes_compute_the_bound(model):
    slow = ("--device-memory", "400MiB", "--device-flops", "10TFLOPS", "--link", "4GB/s", "--stash", "host")
    options = (model, *MACHINE, *slow)
    found = document(*options, "--batch", "1")
    even = found["step"]["break_even_micro_batches"]
    assert even > 1
    assert any(f"--batch {even}" in advice for advice in found["advice"])
    mended = document(*options, "--batch", str(even), "--micro-batches", str(even))
    assert {mended["step"][sweep]["bound"] for sweep in ("forward", "backward")} == {"compute"}


@base
def test_without_the_devices_speed_compute_is_left_out_and_that_is_said(model):
    found = document(model, *[word for word in MACHINE if "flops" not in word.lower()], "--device-memory", "300MiB")
    assert found["step"]["forward"]["compute"] == 0
    assert any("--device-flops" in said for said in found["assumptions"])
    assert found["step"]["operations_needed"] > 0


def test_this_machine_is_measured(soon):
    found = document("gpt:tiny", "--device", "cpu", "--precision", "fp32")
    assert found["machine"]["device_memory"] is None  # the CPU itself
    assert found["machine"]["operations"] > 0
    assert found["machine"]["known"]["host updates"] == "measured here"
    assert found["step"]["forward"]["link in"] == 0


def test_a_device_that_is_here_is_measured(accelerator, soon):
    found = document("gpt:tiny", "--device", str(accelerator), "--device-memory", "8MiB", "--precision", "fp32")
    assert found["machine"]["link_in"] > 0
    assert found["machine"]["known"]["link in"] == "measured here"


SEVERAL = ("--devices", "4", "--nodes", "2", "--network", "25GB/s", "--loopback", "20GB/s")


@base
def test_several_devices_share_a_batch_and_what_the_host_keeps(model):
    options = (model, *MACHINE, "--device-memory", "200MiB", "--precision", "bf16", "--batch", "16")
    one, found = document(*options), document(*options, *SEVERAL)
    assert (found["machine"]["devices"], found["machine"]["nodes"], found["plan"]["samples"]) == (4, 2, 2)
    assert found["host"]["optimizer state"] == pytest.approx(one["host"]["optimizer state"] / 2, rel=0.01)
    assert one["host"]["weights"] < found["host"]["weights"] < 1.1 * one["host"]["weights"]
    assert found["step"]["operations"] == pytest.approx(one["step"]["operations"], rel=0.01)
    assert one["step"]["one_device"] is None
    against = found["step"]["one_device"]
    assert against["seconds"] == pytest.approx(one["step"]["seconds"])
    assert against["speedup"] == pytest.approx(one["step"]["seconds"] / found["step"]["seconds"])
    assert against["efficiency"] == pytest.approx(against["speedup"] / 8)
    assert found["step"]["tokens_per_second"] > one["step"]["tokens_per_second"]
    assert any("loopback" in said for said in found["assumptions"])
    slow = document(*options, *SEVERAL, "--loopback", "10MB/s")["step"]["backward"]
    assert slow["bound"] == "exchange"
    assert slow["exchange"] == pytest.approx(2000 * found["step"]["backward"]["exchange"])
    slow = document(*options, *SEVERAL, "--network", "10MB/s")
    assert slow["step"]["backward"]["bound"] == "network"
    assert any("exchange of gradients between ranks" in said for said in slow["advice"])


def test_several_devices_in_words(soon):
    """Of a described machine whose loopback is that of this one."""
    lines = run("gpt:tiny", *MACHINE, "--devices", "2", "--micro-batches", "3").stdout
    words = " ".join(lines.split())
    assert "note: Updates are deferred because there are several ranks" in words
    assert "8 samples of 128 tokens on 2 devices, at most 5 per device, in 2 micro-batches" in words
    assert "on each device" in words
    assert "times as fast as one device" in words
    assert "exchange" in words
    assert "network" not in words
    assert re.search(r"loopback [\d.]+ \w?B/s \(measured here\)", words)
    assert lines.splitlines()[-1].startswith(
        "train with: torchrun --standalone --nproc-per-node 2 --no-python ferryman"
    )


SMALL = "gpt:layers=2,width=64,heads=2,context=64"


def test_micro_batches_that_do_not_divide_a_batch_cost_what_their_samples_do():
    slow = ("--device-flops", "1GFLOPS", "--loopback", "2GB/s", "--batch", "16", "--stash", "host")
    options = (SMALL, *MACHINE, *slow, "--relayed", "--updates", "host", "--recompute", "always")
    options += ("--device-memory", "3500KiB")
    one, two = document(*options), document(*options, "--devices", "2", "--micro-batches", "16")
    assert 16 % one["plan"]["micro_batches"]
    assert one["step"]["forward"]["bound"] == one["step"]["backward"]["bound"] == "compute"
    assert one["step"]["operations"] == pytest.approx(two["step"]["operations"])
    assert two["step"]["one_device"]["efficiency"] == pytest.approx(1)


def test_deferred_updates_of_several_devices_are_explained():
    options = (SMALL, *MACHINE, "--devices", "2", "--loopback", "2GB/s")
    found = document(*options)
    assert found["plan"]["deferred"]
    assert "several ranks" in found["notes"][0]
    for unlike in (("--updates", "host"), ("--max-grad-norm", "1")):
        assert not document(*options, *unlike)["notes"]


def test_rates_between_ranks_are_harmless_for_one():
    options = (SMALL, *MACHINE)
    plain, found = document(*options), document(*options, "--loopback", "2GB/s", "--network", "10GB/s")
    assert [note.split(",")[0] for note in found.pop("notes")] == [
        "--loopback 2GB/s has no effect with one device per node",
        "--network 10GB/s has no effect with one node",
    ]
    assert plain.pop("notes") == []
    assert found == plain
    words = " ".join(run(*options, "--loopback", "2GB/s", "--network", "10Gbit/s", "--nodes", "2").stdout.split())
    assert "8 samples of 64 tokens on 2 nodes with 1 device each, 4 per device, in 1 micro-batch;" in words
    assert "network 1.25 GB/s (given)" in words


def test_bf16_is_not_advised_to_who_has_it():
    options = (SMALL, *MACHINE, "--devices", "2", "--loopback", "1MB/s", "--precision")
    said = {precision: " ".join(document(*options, precision)["advice"]) for precision in ("bf16", "fp32")}
    assert all("exchange of gradients between ranks" in advice for advice in said.values())
    assert ["bf16" in advice for advice in said.values()] == [False, True]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("gpt:smal",), "did you mean 'gpt:small'"),
        (("gpt:small", *MACHINE, "--link", "fast"), "--link='fast' is not a rate"),
        (("gpt:small", *MACHINE, "--link", "0GB/s"), "more than 0"),
        (("gpt:small", *MACHINE, "--link", "-3GB/s"), "is not a rate"),
        (("gpt:small", *MACHINE, "--device-flops", "150GB/s"), "--device-flops='150GB/s' is not a rate of operations"),
        (("gpt:small", *MACHINE, "--device-memory", "much"), "--device-memory='much' is not an amount of memory"),
        (("gpt:small", "--device", "cpu", "--device-memory", "1GiB"), "--link is needed"),
        (("gpt:small", "--device", "cpu", "--link", "1GB/s"), "--device-memory is needed"),
        (("gpt:small", *MACHINE, "--batch", "0"), "--batch 0"),
        (("gpt:small", *MACHINE, "--micro-batches", "9"), "micro_batches=9"),
        (("gpt:small", *MACHINE, "--batch", "4", "--micro-batches", "3"), "choose micro_batches=2"),
        (("gpt:small", *MACHINE, "--sequence", "9999"), "longer than the context of 'gpt:small': 512 tokens"),
        (("gpt:small", *MACHINE, "--optimizer", "adamm"), "did you mean 'adam"),
        (("gpt:small", *MACHINE, "--precision", "fp8"), "precision='fp8'"),
        (("gpt:small", *MACHINE, "--updates", "stride"), "did you mean 'stride:K'"),
        (("gpt:small", *MACHINE, "--max-grad-norm", "-1"), "max_grad_norm=-1.0"),
        (("gpt:small", *MACHINE, "--stash", "disk"), "stash='disk'"),
        (("gpt:small", *MACHINE, "--held", "--slots", "3"), "slots=3 has no meaning"),
        (("gpt:small", *MACHINE, "--subgroup", "3"), "subgroup=3"),
        (("gpt:tiny", *MACHINE, "--devices", "0"), "--devices 0: a node has at least one"),
        (("gpt:tiny", *MACHINE, "--nodes", "-1"), "--nodes -1: a job has at least one"),
        (("gpt:tiny", *MACHINE, "--nodes", "2"), "--network is needed with --nodes 2"),
        (("gpt:tiny", *MACHINE, "--network", "slow"), "--network='slow' is not a rate"),
        (("gpt:tiny", *MACHINE, "--nodes", "2", "--network", "fast"), "--network='fast' is not a rate"),
        (("gpt:tiny", *MACHINE, *SEVERAL, "--network", "10Gb/s"), "--network='10Gb/s' may be bits or bytes per second"),
        (("gpt:tiny", *MACHINE, *SEVERAL, "--micro-batches", "0"), "--micro-batches 0"),
        (("gpt:tiny", *MACHINE, *SEVERAL, "--batch", "17", "--micro-batches", "16"), "micro_batches=2: a batch of 1"),
        (("gpt:tiny", *MACHINE, "--devices", "9"), "--batch 8: the samples of a step are distributed over 9 devices"),
        (("gpt:tiny", *MACHINE, "--units", "transformer.g.*"), "no module of the model matches 'transformer.g.*'"),
    ],
)
def test_bad_input_is_refused(options, said):
    result = run(*options)
    assert isinstance(result.exception, ValueError)  # which `main` prints, with the exit code 2
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("text", "of", "rate"),
    [
        ("12GB/s", "bytes", 12e9), ("12 GB/s", "bytes", 12e9), ("12gb/s", "bytes", 12e9),
        ("1.5GiB/s", "bytes", 1.5 * 2**30), ("12GBps", "bytes", 12e9),
        ("100Gbit/s", "bytes", 12.5e9), ("800 Mbits/s", "bytes", 1e8),
        ("800B/s", "bytes", 800), ("150TFLOPS", "operations", 150e12), ("150 TFLOP/s", "operations", 150e12),
        ("2PFLOPS", "operations", 2e15), ("900Mparam/s", "parameters", 9e8), ("1Gparams/s", "parameters", 1e9),
    ],
)  # fmt: skip
def test_rates_are_read_as_people_write_them(text, of, rate):
    assert parse_rate(text, "--x", of) == pytest.approx(rate)
    shown = show_rate(rate, of)
    assert parse_rate(shown, "--x", of) == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("text", ["10Gb/s", "10Gbps", "10 Mb/s", "10gbps", "8b/s"])
def test_what_may_be_bits_or_bytes_is_refused(text):
    with pytest.raises(
        ValueError, match=r"--x=.* may be bits or bytes .* bytes like '12GB/s' and bits like '100Gbit/s'"
    ):
        parse_rate(text, "--x", "bytes")


@pytest.mark.parametrize("text", ["12", "GB/s", "12GB", "1e3GB/s", "12GiFLOPS", "12iB/s", "12bit", ""])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match=r"--x=.* is not a rate of bytes per second; write it like '12GB/s'"):
        parse_rate(text, "--x", "bytes")


def large(billions):
    sizes = {
        50: {"hidden_size": 8192, "intermediate_size": 22016, "num_hidden_layers": 64, "num_attention_heads": 64},
        500: {"hidden_size": 20480, "intermediate_size": 54272, "num_hidden_layers": 120, "num_attention_heads": 160},
    }[billions]
    return hf.LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=4096)


LARGE = (*MACHINE, "--device-memory", "48GiB", "--host-memory", "1TiB", "--link", "24GB/s", "--sequence", "2048")


def test_a_large_model_is_planned_without_being_allocated(tmp_path):
    large(50).save_pretrained(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = document(str(tmp_path), *LARGE)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**30, "of 200 GiB"
    assert found["model"]["parameters"] > 45e9
    assert found["fits"]
    assert found["plan"]["units"] == 66, "64 blocks, the embedding and the head"
    assert found["step"]["seconds"] > 0


@pytest.mark.slow
def test_half_a_trillion_parameters_are_planned_in_little_memory(tmp_path):
    """In a process of its own, whose memory in all is a fraction of the model's."""
    large(500).save_pretrained(tmp_path)
    code = (
        "import resource, sys; from ferryman.cli.main import main\n"
        "try: main()\n"
        "finally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "plan", str(tmp_path), *LARGE, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["model"]["parameters"] > 450e9
    assert not found["fits"]
    assert found["step"]["seconds"] > 0
    assert int(done.stderr.split()[-1]) * 1024 < 1.5 * 2**30


def test_bad_input_ends_the_command_with_2_and_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ferryman", "plan", "gpt:smal"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("ferryman: 'gpt:smal'")
    assert len(said.splitlines()) == 1


def test_it_ends_with_the_command_that_it_describes():
    lines = run("gpt:tiny", *MACHINE, "--precision", "bf16", "--batch", "4").stdout.splitlines()
    assert lines[0].startswith("fits")
    told = lines[-1]
    assert told == (
        "train with: ferryman train gpt:tiny --data DATA --output RUN --batch 4 --memory 16GiB --precision bf16"
    )


def test_what_is_not_given_is_as_train_has_it(tmp_path):
    hf.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=4096
    ).save_pretrained(tmp_path)
    found = document(str(tmp_path), *MACHINE)["training"]
    assert found["length"] == defaults.window(TrainOptions.sequence, parse_model(str(tmp_path))) == 1024
    assert (found["precision"], found["samples"]) == (TrainOptions.precision, TrainOptions.batch) == (None, 8)


def test_nothing_is_left_in_torch():
    document("gpt:tiny", *MACHINE)
    assert torch.empty(0).device.type == "cpu"
