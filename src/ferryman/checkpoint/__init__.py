"""Checkpoints: directories with a model's weights, which transformers can load, and everything needed to resume.

    config.json, model.safetensors      as `save_pretrained` writes them; several files with an index if they are large
    ferryman/state.safetensors          the optimizer's state, and the lower 16 bits of bf16 weights
    ferryman/rest.safetensors           tensors of the user's objects and of random number generators
    ferryman/checkpoint.json            the manifest: steps, parameter groups, and size and checksum of every file

Nothing is pickled. Tensors move directly between the store's memory and files (`tensor_file.py`). A directory replaces
the previous one atomically (`directory.py`), and the manifest is written last.
"""
