"""Fine-tunes a whole causal language model with transformers' Trainer, on a device that could not hold it.

    python examples/finetune_trainer.py --model DIR --memory 8GiB     a model of yours, on this machine's accelerator
    python examples/finetune_trainer.py --tiny                        a random one, on a virtual accelerator
    torchrun --nproc-per-node 2 examples/finetune_trainer.py --output DIR ...       the same on two devices

The text is the Python standard library's sources. What differs from a script with `Trainer` is its class and `engine=`.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments

from ferryman.integrations.trainer import FerrymanTrainer

CONTEXT = 128


class Text(Dataset[dict[str, torch.Tensor]]):
    """Pieces of the standard library's source code, as tokens; without a tokenizer, as bytes."""

    def __init__(self, tokenizer: Any = None, files: int = 20) -> None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
        text = "\n".join(path.read_text(errors="ignore") for path in sources)
        ids = list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"]
        self.rows = torch.tensor(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


def tiny_model() -> LlamaForCausalLM:
    """A model of a million random weights, whose tokens are bytes."""
    import torch_virtual  # noqa: F401 - makes the device that it runs on

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **sizes))


def options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="DIR", help="a directory that from_pretrained loads")
    which.add_argument("--tiny", action="store_true", help="a random model on a virtual accelerator")
    parser.add_argument("--memory", help="a budget of device memory, as 8GiB")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default=None, help="where checkpoints and the model go")
    return parser.parse_args()


def main() -> None:
    chosen = options(__doc__)
    engine: dict[str, Any] = {} if chosen.memory is None else {"memory": chosen.memory}
    if chosen.tiny:
        model, tokenizer = tiny_model(), None
        engine = {"device": "virtual", "memory": "8MiB"}  # weights, gradients and moments take 16
    else:
        model = AutoModelForCausalLM.from_pretrained(chosen.model)
        tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    output = chosen.output or tempfile.mkdtemp(prefix="finetuned-")
    text = Text(tokenizer)
    trainer = FerrymanTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=output,
            max_steps=chosen.steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,  # one step of the engine: each block crosses once for all four
            learning_rate=1e-3 if chosen.tiny else 2e-5,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            bf16=not chosen.tiny,
            logging_steps=max(1, chosen.steps // 5),
            save_steps=max(1, chosen.steps // 2),
            save_total_limit=1,
            report_to=[],
            use_cpu=chosen.tiny,  # accelerate does not know the virtual accelerator, which the engine uses
        ),
        train_dataset=text,
        eval_dataset=torch.utils.data.Subset(text, range(8)),
        processing_class=tokenizer,
        engine=engine,
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(output)
    if trainer.is_world_process_zero():
        print(f"loss on what it has seen: {loss:.3f}")
        print(f"the model is in {output}: AutoModelForCausalLM.from_pretrained({output!r})")


if __name__ == "__main__":
    main()
