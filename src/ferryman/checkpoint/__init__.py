"""Checkpoints: directories with a model's weights, which transformers can load, and all that training needs to go on.

    config.json, model.safetensors      as `save_pretrained` would write them; several files with an index when large
    ferryman/state-*.safetensors        the optimizer's state, and what weights lack in float32
    ferryman/rest.safetensors           tensors of the user's objects and of random number generators
    ferryman/checkpoint.json            the rest: steps, groups, schedules; and the size and checksum of every file

Nothing is pickled. Tensors go straight between the store's memory and files (`tensor_file.py`), a directory takes the
place of the one before in one moment (`directory.py`), and the manifest is written last.
"""
