"""Trains a small EAGLE-3 head, which drafts for a model, on text that the model itself makes. Needs no data and no hub.

    python benchmarks/train_eagle_head.py --output /tmp/head
    python benchmarks/train_eagle_head.py --output /tmp/head --texts /tmp/texts.jsonl --num-tokens 250000 --minutes 25
    python benchmarks/speculation.py --speculative-config \
        '{"method": "eagle3", "model": "/tmp/head", "num_speculative_tokens": 3}'

The model makes up questions and answers them; it also answers tasks about its own answers and about modules of Python's
library. The head reads the residual stream of three of the model's layers and learns the model's next-token
distribution three tokens ahead, each time from its own previous output ("training-time test"; Li et al., EAGLE-3,
2025). It is kept in the checkpoint format of published EAGLE-3 heads. OMP_NUM_THREADS limits the threads.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

if __name__ == "__main__":
    # Run as a file, this folder comes first on the path, and in it `engine.py` would pass for the package `engine`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.eagle_head import NUM_STEPS, EagleHead, SoftCrossEntropy, draft_vocabulary, head_config, rate_at
from benchmarks.flags import COUNT, Positive, wrong_usage
from benchmarks.made_texts import Text, kept_texts, make_texts
from engine.model_loader import resolve_model
from tandem import LLM

BATCH_TOKENS = 1024
STEP_WEIGHT = 0.8
PEAK_RATE = 1e-3
LINE_S = 10.0
"""Seconds between lines of progress."""
MOST_HELD_OUT = 64


@dataclass(frozen=True)
class Reading:
    """What the model made of a text of T tokens."""

    token_ids: Tensor
    """[T]."""
    features: Tensor
    """[T, 3 D] in bfloat16: the residual stream at three depths."""
    last: Tensor
    """[T, D] in bfloat16: the input of the language model head."""
    best: Tensor
    """[T]: the likeliest next token; -1 within the prompt."""


# -- what the model makes of them ---------------------------------------------------------------------------------


def batches(lengths: Sequence[int], most_tokens: int, rng: random.Random) -> list[list[int]]:
    """All indices of `lengths` in batches of similar lengths, in random order. A batch has at most `most_tokens`
    tokens, padding included, or is a single text."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i] + 32 * rng.random())
    found: list[list[int]] = []
    for i in order:
        together = [*found[-1], i] if found else [i]
        if found and len(together) * max(lengths[j] for j in together) <= most_tokens:
            found[-1] = together
        else:
            found.append([i])
    rng.shuffle(found)
    return found


@torch.inference_mode()
def read_all(model: Any, texts: list[Text]) -> list[Reading]:
    num_layers = model.config.num_hidden_layers
    head = model.get_output_embeddings().weight
    readings: list[Any] = [None] * len(texts)
    said_s = start_s = time.perf_counter()
    num_read = 0
    for batch in batches([len(text.token_ids) for text in texts], 4096, random.Random(0)):
        ids = [torch.tensor(texts[i].token_ids) for i in batch]
        # With padding behind the texts, causal attention needs no mask.
        states = model.base_model(pad_sequence(ids, batch_first=True), output_hidden_states=True).hidden_states
        features = torch.cat([states[depth] for depth in (2, num_layers // 2, num_layers - 3)], dim=-1)
        for row, (i, token_ids) in enumerate(zip(batch, ids, strict=True)):
            num, num_prompt = len(token_ids), texts[i].num_prompt_tokens
            last = states[-1][row, :num].clone()
            best = torch.full((num,), -1)
            first = max(num_prompt, NUM_STEPS)  # a chain begins so many places earlier at most
            best[first:] = (last[first:] @ head.T).float().argmax(-1)
            readings[i] = Reading(token_ids, features[row, :num].clone(), last, best)
        num_read += len(batch)
        if time.perf_counter() - said_s > LINE_S:
            said_s = time.perf_counter()
            print(f"{said_s - start_s:8.0f} s: the model has read {num_read} of {len(texts)} texts", flush=True)
    return readings


# -- training -----------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """A head, and what its training needs of the target model."""

    head: EagleHead
    embeddings: Tensor
    target_ids: Tensor
    """By draft id."""
    target_rows: Tensor
    """The rows of the target's language model head for these."""

    def logits(self, batch: list[Reading]) -> tuple[list[Tensor], Tensor, int]:
        """For the answers' places where the target's likeliest token can be drafted, the head's logits, by step, and
        the target's; and the number of all places."""
        ids, best = (pad_sequence([getattr(r, n) for r in batch], True, -1) for n in ("token_ids", "best"))
        features, last = (pad_sequence([getattr(r, n) for r in batch], True) for n in ("features", "last"))
        num_places = int((best >= 0).sum())
        row, at = torch.isin(best, self.target_ids).nonzero(as_tuple=True)
        with torch.autocast("cpu", torch.bfloat16):
            outs = self.head(self.embeddings[ids[:, 1:].clamp(min=0)], features[:, :-1])
            # A pair ends with a token whose successor the target predicts there, one place further at each step.
            found = [self.head.logits(out[row, at - 1 - step]) for step, out in enumerate(outs)]
        return found, last[row, at] @ self.target_rows.T, num_places

    def loss(self, batch: list[Reading]) -> Tensor:
        found, expected, _ = self.logits(batch)
        shares = expected.float().softmax(-1)
        losses = [STEP_WEIGHT**step * SoftCrossEntropy.apply(logits, shares) for step, logits in enumerate(found)]
        return torch.stack(losses).sum()

    @torch.no_grad()
    def accuracy(self, readings: list[Reading]) -> list[float]:
        """By step, the share of the answers' tokens for which the head finds the same likeliest as the target."""
        right, num = torch.zeros(NUM_STEPS), 0
        for batch in batches([len(r.token_ids) for r in readings], BATCH_TOKENS, random.Random(0)):
            found, expected, num_places = self.logits([readings[i] for i in batch])
            best = expected.float().argmax(-1)
            right += torch.stack([(logits.float().argmax(-1) == best).sum() for logits in found])
            num += num_places
        return (right / max(1, num)).tolist()

    def train(self, readings: list[Reading], held_out: list[Reading], minutes: float, rng: random.Random) -> None:
        """Leaves the head with the weights that were best on the first held-out texts."""
        optimizer = torch.optim.AdamW(self.head.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        best, best_weights = -1.0, self.head.state_dict()
        num_tokens = sum(len(r.token_ids) for r in readings)
        print(f"{'seconds':>8}{'epochs':>8}{'rate':>10}{'loss':>8}   held out, right at step", *range(NUM_STEPS))
        start_s = said_s = time.perf_counter()
        losses: list[float] = []
        num_seen = 0
        queue: list[list[int]] = []
        while (elapsed_s := time.perf_counter() - start_s) < minutes * 60:
            queue = queue or batches([len(r.token_ids) for r in readings], BATCH_TOKENS, rng)
            batch = [readings[i] for i in queue.pop()]
            rate = PEAK_RATE * rate_at(elapsed_s / (minutes * 60))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = self.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            num_seen += sum(len(r.token_ids) for r in batch)
            is_last = time.perf_counter() - start_s >= minutes * 60
            if is_last or time.perf_counter() - said_s > LINE_S:
                right = self.accuracy(held_out[: MOST_HELD_OUT // 4])
                if sum(right) > best:
                    best = sum(right)
                    best_weights = {name: weight.clone() for name, weight in self.head.state_dict().items()}
                print(
                    f"{elapsed_s:8.0f}{num_seen / num_tokens:8.2f}{rate:10.1e}{sum(losses) / len(losses):8.3f}"
                    f"{'':3}{'  '.join(f'{share:6.1%}' for share in right)}",
                    flush=True,
                )
                losses, said_s = [], time.perf_counter()
        self.head.load_state_dict(best_weights)


def _texts(model: str, path: Path | None, num_tokens: int, rng: random.Random) -> list[Text]:
    """Those in the file `path`, if it exists; otherwise new ones, written there as they are made."""
    if path is not None and path.exists():
        with wrong_usage("--texts"):
            return kept_texts(path)
    with wrong_usage("--model"):
        llm = LLM(model=model, max_model_len=2048, kv_cache_gib=1.0, num_threads=torch.get_num_threads())
    path = path or Path(os.devnull)
    with wrong_usage("--texts"):
        path.touch()
    made = []
    with path.open("w") as file:
        for text in make_texts(llm, num_tokens, rng):
            file.write(json.dumps(vars(text)) + "\n")
            made.append(text)
    return made


def scales_of(readings: list[Reading]) -> Tensor:
    """What brings each feature to a mean square of 1. Without the first tokens, whose features may be huge."""
    squares = torch.stack([r.features[1:].float().square().mean(0) for r in readings])
    return squares.mean(0).clamp(min=1e-12).rsqrt()


def save_head(folder: Path, config: dict[str, Any], trained: Trained) -> None:
    ids = trained.target_ids
    tensors = {name: weight.bfloat16().contiguous() for name, weight in trained.head.weights().items()}
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def save_check(path: Path, folder: Path, config: dict[str, Any], embeddings: Tensor, reading: Reading) -> None:
    """Write the first 200 tokens of a text, their features, and in float32 the logits of the head in `folder`."""
    head = EagleHead(config)
    weights = load_file(folder / "model.safetensors")
    head.load_state_dict({name: weights[name].float() for name in head.state_dict()})
    ids, features = reading.token_ids[:200], reading.features[:200].contiguous()
    out = head(embeddings[ids[None, 1:]].float(), features[None, :-1].float())[0]
    save_file({"token_ids": ids, "features": features, "logits": head.logits(out)[0].contiguous()}, path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default="smollm2-135m-instruct", show_default=True, help="The model that the head drafts for.")
@click.option(
    "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to write the head to."
)
@click.option(
    "--texts",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the made texts. If it exists, they are read from it and none are made: so a second head, or a "
    "longer training, needs no new texts.",
)
@click.option("--num-tokens", default=200_000, type=COUNT, show_default=True, help="Tokens of all answers to make.")
@click.option(
    "--minutes", default=20.0, type=Positive(), show_default=True, help="How long to train, once texts exist."
)
@click.option(
    "--draft-vocab-size",
    default=8192,
    type=COUNT,
    show_default=True,
    help="How many tokens the head can draft: the most frequent of the answers, or all if they have fewer.",
)
@click.option(
    "--check-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write a held-out text with its features and the head's logits, to compare an implementation with.",
)
@click.option("--seed", default=0, type=click.IntRange(0), show_default=True)
def main(
    model: str,
    output: Path,
    texts: Path | None,
    num_tokens: int,
    minutes: float,
    draft_vocab_size: int,
    check_file: Path | None,
    seed: int,
) -> None:
    """Train a small EAGLE-3 head on text that the model itself makes, and write it to a folder.

    Three stages, each with its lines of progress: the model makes texts, reads them, and the head is trained. The last
    lines show for held-out texts how often the head's likeliest token is the model's, one, two and three tokens ahead.
    """
    with wrong_usage("--model"):
        folder = resolve_model(model)
        config = head_config(AutoConfig.from_pretrained(folder))
    with wrong_usage("--output"):
        output.mkdir(parents=True, exist_ok=True)
    if check_file is not None:
        with wrong_usage("--check-file"):
            check_file.touch()
    rng = random.Random(seed)
    torch.manual_seed(seed)
    made = _texts(model, texts, num_tokens, rng)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    readings = read_all(target, made)
    first_held_out = len(made) - min(MOST_HELD_OUT, len(made) // 8)
    readings, held_out = readings[:first_held_out], readings[first_held_out:]

    answers = Counter(id_ for text in made for id_ in text.token_ids[text.num_prompt_tokens :])
    target_ids = torch.tensor(draft_vocabulary(answers, draft_vocab_size))
    config |= {"draft_vocab_size": len(target_ids)}
    head = EagleHead(config)
    head.begin_like(target, target_ids, scales_of(readings))
    rows = target.get_output_embeddings().weight.detach()[target_ids]
    trained = Trained(head, target.get_input_embeddings().weight.detach(), target_ids, rows)
    del target
    trained.train(readings, held_out, minutes, rng)
    save_head(output, config, trained)
    if check_file is not None:
        save_check(check_file, output, config, trained.embeddings, held_out[0])
    shares = ", ".join(f"{share:.1%}" for share in trained.accuracy(held_out))
    print(f"{output}: {len(target_ids)} draft tokens; right in held-out texts at steps 0 to {NUM_STEPS - 1}: {shares}")


if __name__ == "__main__":
    main()
