"""`python -m engine.model_loader.observed FOLDER LOAD_FORMAT MODEL_IMPL NUM_RANKS`: prints, as JSON, what only
transformers' code tells of a model. A process of its own, for those that need no torch otherwise.

    num_recurrent_layers   layers that keep a state in place of keys and values
    why_not_split          why NUM_RANKS ranks cannot share the model; empty if they can
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine.model_loader.language_part import read_config
from engine.models import load_model_shape
from engine.tensor_parallel.shares import share_of


def main() -> int:
    folder, load_format, model_impl, num_ranks = sys.argv[1:]
    why_not_split = ""
    try:
        shape = load_model_shape(read_config(Path(folder), load_format), model_impl)
    except ValueError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    try:
        share_of(shape, int(num_ranks))
    except ValueError as error:
        why_not_split = str(error)
    found = {"num_recurrent_layers": len(shape.recurrent_layers), "why_not_split": why_not_split}
    print(json.dumps(found))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
