"""Makes a model with more layers that answers as before: each layer is followed by some that add nothing.

Such a model costs as much as a larger one, while the original guesses all of its tokens, and a part of the original, or
the original in 8 bits, some. It stands in for a family of models of several sizes where there is only one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

ENDS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""What a Llama layer adds to its input is the result of these products."""


def make_deeper(source: Path, times: int, target: Path) -> None:
    """Write a model with `times` as many layers to the folder `target`. `source`: the folder of a model with Llama's
    layers and a single file of weights."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers * times}))
    weights = {}
    for name, weight in load_file(source / "model.safetensors").items():
        before, is_of_layer, rest = name.partition("layers.")
        if not is_of_layer:
            weights[name] = weight
            continue
        layer, _, part = rest.partition(".")
        for i in range(times):
            adds_nothing = i > 0 and part in ENDS
            copy = torch.zeros_like(weight) if adds_nothing else weight.clone()
            weights[f"{before}layers.{int(layer) * times + i}.{part}"] = copy
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
