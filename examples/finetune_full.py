"""Fine-tunes all weights of a pretrained causal language model of transformers, which need not fit on the device.

    python examples/finetune_full.py models/llama notes.txt --memory 8GiB --output tuned
    python examples/finetune_full.py --tiny        # a random tiny model, on this file's text

The model is built without memory (on meta); its weights come from safetensors files unit by unit, so that the host
never holds them twice. They are computed with in bf16, and updated in float32.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import ferryman
from ferryman.data.tokens import TokenFile, Tokens
from ferryman.data.windows import Windows


def tokens_of(text: Path, tokenizer: Any, vocabulary: int) -> Tokens:
    """The text as tokens of the model's tokenizer; the tiny model has none, and its tokens are bytes."""
    if tokenizer is not None:
        ids = tokenizer(text.read_text(), return_tensors="np")["input_ids"][0]
    else:
        ids = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).numpy()
    return Tokens([TokenFile(text, ids)], vocabulary)


def finetune(directory: Path, text: Path, output: Path, options: argparse.Namespace) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    tokenizer = AutoTokenizer.from_pretrained(directory) if (directory / "tokenizer.json").exists() else None
    windows = Windows(tokens_of(text, tokenizer, model.config.vocab_size), options.sequence)
    with ferryman.Engine(
        model, optimizer, device=options.device, memory=options.memory, precision="bf16", max_grad_norm=1.0
    ) as engine:
        engine.load_weights(directory)
        for step in range(options.steps):
            loss = engine.step(windows.batch(options.batch))  # cut into as few micro-batches as the memory allows
            print(f"step {step + 1}: loss {loss.item():.3f}")
        beside = {} if tokenizer is None else {"tokenizer": tokenizer}
        print("saved:", engine.save(output, objects=beside))  # transformers loads it: from_pretrained(output)


def make_tiny(directory: Path) -> None:
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, pad_token_id=0
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="a pretrained directory, with safetensors files")
    parser.add_argument("text", type=Path, nargs="?", help="a text file")
    parser.add_argument("--output", type=Path, help="by default tuned; with --tiny, a new temporary folder")
    parser.add_argument("--device", help="by default the accelerator there is")
    parser.add_argument("--memory", help="how much of the device's memory may be used, such as 8GiB")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--tiny", action="store_true", help="three steps of a random tiny model")
    options = parser.parse_args()
    if options.device == "virtual":
        import torch_virtual  # noqa: F401 - an accelerator for machines without one
    if options.tiny:
        with tempfile.TemporaryDirectory() as folder:
            make_tiny(Path(folder) / "model")
            options.steps, options.sequence, options.lr = 3, 32, 1e-3
            output = options.output or Path(tempfile.mkdtemp(prefix="tuned-"))
            finetune(Path(folder) / "model", Path(__file__), output, options)
    elif options.model is None or options.text is None:
        parser.error("a model and a text are required, or --tiny")
    else:
        finetune(options.model, options.text, options.output or Path("tuned"), options)


if __name__ == "__main__":
    main()
