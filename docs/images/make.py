"""Makes report.png and report-dark.png: a short training on the virtual accelerator, its report, a picture of the top.

    python docs/images/make.py [directory]

Needs chromium. The link is throttled, so that what crosses it is long enough to be seen. With a directory, the trace
and the whole report are left there.
"""

import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch_virtual
from playwright.sync_api import sync_playwright
from transformers import GPT2Config, GPT2LMHeadModel, logging

import ferryman
from ferryman.observe.report import write_report
from ferryman.observe.trace import Trace

DEVICE, BATCH, CONTEXT, STEPS = "virtual", 8, 64, 20


def train(path: Path) -> None:
    logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 128, "n_layer": 12, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = torch.frombuffer(bytearray(b"\n".join(source.read_bytes() for source in sources)), dtype=torch.uint8)
    torch_virtual.set_link(DEVICE, h2d=45e6, d2h=45e6)
    trace = Trace()
    with ferryman.Engine(model, optimizer, device=DEVICE, memory="12MiB", max_grad_norm=1.0, trace=trace) as engine:
        for _ in range(STEPS):
            starts = torch.randint(0, len(data) - CONTEXT, (BATCH,)).tolist()
            ids = torch.stack([data[start : start + CONTEXT].long() for start in starts])
            engine.step({"input_ids": ids, "labels": ids})
    trace.save(path)


def picture(report: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme, name in (("light", "report.png"), ("dark", "report-dark.png")):
            page = browser.new_page(viewport={"width": 1240, "height": 900}, color_scheme=scheme)
            page.goto(report.as_uri())
            page.wait_for_timeout(300)  # two frames would do
            top, plots = page.locator("body").bounding_box(), page.locator("#legend").bounding_box()
            clip = {"x": 0, "y": 0, "width": top["width"], "height": plots["y"] + plots["height"] + 16}
            page.screenshot(path=Path(__file__).with_name(name), clip=clip, full_page=True)
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(sys.argv[1] if len(sys.argv) > 1 else temporary).resolve()
        train(directory / "trace.json")
        write_report(directory / "trace.json", directory / "report.html", overwrite=True)
        picture(directory / "report.html")
