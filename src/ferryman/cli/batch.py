"""A batch: whether it makes sense, for the data there is and for the host's memory."""

from __future__ import annotations

import torch

from ferryman.cli.corpus import Corpus
from ferryman.cli.model import Description
from ferryman.cli.train_options import TrainOptions
from ferryman.distributed.ranks import Ranks
from ferryman.runtime import host_memory as memory
from ferryman.runtime.sizes import show_bytes

_ID = 8  # bytes of a token's number


def check_batch(options: TrainOptions, model: Description, corpus: Corpus, device: torch.device, ranks: Ranks) -> None:
    """Refuses what no host could do, before anything is drawn. The default is good for any data."""
    windows = corpus.training.count
    if options.batch > max(windows, TrainOptions.batch):
        raise ValueError(
            f"--batch {options.batch}: the data has {windows} windows of {corpus.sequence} tokens to train on, and one "
            f"step would see them several times. Give --batch {windows} or less, more --data, or a shorter --sequence"
        )
    here = _least(options, model, corpus.sequence, device) * len(ranks.node)
    needed, free = here // ranks.size, memory.available()
    if free is not None and needed > free:
        raise ValueError(
            f"--batch {options.batch}: its {options.batch * corpus.sequence:,} tokens take at least "
            f"{show_bytes(needed)} of the host's memory, and {show_bytes(free)} are free. Give a smaller --batch or a "
            "shorter --sequence" + (", or cut the batch with --micro-batches" if device.type == "cpu" else "")
        )


def _least(options: TrainOptions, model: Description, sequence: int, device: torch.device) -> int:
    """Bytes of the host that a step takes for its batch, counting only what is certain: the tokens as they are drawn
    and as a batch; what each layer hands on, where that waits on the host; and on the CPU what is predicted for a
    micro-batch, with its gradient."""
    tokens, config = options.batch * sequence, model.config
    needed = 2 * _ID * tokens
    if device.type == "cpu" or options.stash == "host":
        width = 2 if options.precision in ("bf16", "fp16") else 4
        needed += tokens * config.hidden_size * config.num_hidden_layers * width
    if device.type == "cpu":
        samples = -(-options.batch // (options.micro_batches or 1))
        needed += 2 * 4 * samples * sequence * config.vocab_size
    return int(needed)
