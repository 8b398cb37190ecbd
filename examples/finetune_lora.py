"""Fine-tunes adapters (LoRA) in a custom loop: the base model is streamed through the device, and stays frozen.

    python examples/finetune_lora.py --model DIR --memory 4GiB     a model of yours, on this machine's accelerator
    python examples/finetune_lora.py --tiny                        a random one, on a virtual accelerator

The text is the Python standard library's sources. Only adapters have gradients and optimizer state; the weights below
cross over, block by block, and come back to nobody.
"""

import itertools
import tempfile
from typing import Any

import torch
from finetune_trainer import Text, options, tiny_model
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import ferryman


def main() -> None:
    chosen = options(__doc__)
    settings: dict[str, Any] = {"memory": chosen.memory, "precision": "bf16"}
    if chosen.tiny:
        base, tokenizer = tiny_model(), None
        settings = {"memory": "6MiB", "device": "virtual"}  # for weights, all activations and adapters
    else:
        base = AutoModelForCausalLM.from_pretrained(chosen.model)
        tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    model = get_peft_model(base, LoraConfig(r=8, task_type="CAUSAL_LM", target_modules="all-linear"))
    model.print_trainable_parameters()

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2 if chosen.tiny else 1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.steps)
    loader = DataLoader(Text(tokenizer), batch_size=8, shuffle=True)
    with ferryman.Engine(model, optimizer, max_grad_norm=1.0, **settings) as engine:
        for step, batch in enumerate(itertools.islice(itertools.cycle(loader), chosen.steps)):
            loss = engine.step(batch)  # cut into as few micro-batches as the budget allows
            scheduler.step()
            if step % max(1, chosen.steps // 5) == 0:
                print(f"step {step:4}   loss {loss.item():.3f}   gradient norm {engine.grad_norm:.3f}", flush=True)
        print({purpose: f"{nbytes / 2**20:.2f} MiB" for purpose, nbytes in engine.host_account.items()})

    output = chosen.output or tempfile.mkdtemp(prefix="adapters-")
    model.save_pretrained(output)
    print(f"the adapters are in {output}: PeftModel.from_pretrained(model, {output!r})")


if __name__ == "__main__":
    main()
