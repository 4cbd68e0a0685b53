"""Everything that only a GPU can show, in one run of minutes: kernels, the model, and how far both are from the device.

    python benchmarks/gpu.py                 on a machine with CUDA torch and Triton
    python benchmarks/gpu.py --quantization fp8 --kv-cache-dtype fp8        decode and prefill in 8 bits
    python benchmarks/gpu.py --tiny          the same script on any machine, over a toy: that it runs, and nothing else

    floors ──> tests of the kernels ──> the model against plain torch ──> kernels alone ──> decode, prefill of a model
    (copy, matrix products)             (pytest, float64)                                   of Llama-3.1-8B's shapes

Each number stands beside the limit that the same run measured. The last line is one JSON object, kept with a plot in
`benchmarks/results/` (a toy's is not kept). What is not measured: transfers between processes, whole servers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.engine import add_request, measure_decode, timed_step
from benchmarks.machine import machine
from benchmarks.report import save
from engine.config import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Llama-3.1-8B, but for the scaling of its rotary positions, which costs nothing."""
TOY = {**LLAMA_8B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
       "num_key_value_heads": 2, "vocab_size": 500, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip


@dataclass(frozen=True)
class Row:
    what: str
    value: float
    unit: str
    limit: float | None = None
    """What the device could do, in the same unit."""
    target: float | None = None
    """The share of the limit that we aim at."""

    @property
    def share(self) -> float | None:
        """Of the limit. Times are the better the shorter they are."""
        if self.limit is None or not self.value:
            return None
        return self.limit / self.value if self.unit == "ms" else self.value / self.limit


@dataclass(frozen=True)
class Sizes:
    """What is measured, on a GPU or over a toy."""

    config: dict[str, Any]
    copy_bytes: int
    matrix: int
    long_prompt: int
    batch: int
    kv_cache_gib: float

    def weight_bytes(self, itemsize: int = 2) -> int:
        """Layers' weights of `itemsize`, logits' in bfloat16; without the embeddings, of which a step reads a row."""
        c = self.config
        head_dim = c["hidden_size"] // c["num_attention_heads"]
        qkv = c["hidden_size"] * head_dim * (c["num_attention_heads"] + 2 * c["num_key_value_heads"])
        layer = qkv + c["hidden_size"] ** 2 + 3 * c["hidden_size"] * c["intermediate_size"]
        return itemsize * c["num_hidden_layers"] * layer + 2 * c["vocab_size"] * c["hidden_size"]

    def kv_bytes(self, num_tokens: int, itemsize: int = 2) -> int:
        c = self.config
        head_dim = c["hidden_size"] // c["num_attention_heads"]
        return 2 * itemsize * c["num_hidden_layers"] * c["num_key_value_heads"] * head_dim * num_tokens

    def prefill_flop(self, num_tokens: int) -> float:
        """Of one prompt: products of all tokens, logits of one, attention to those before."""
        c = self.config
        logits = 2 * c["vocab_size"] * c["hidden_size"]
        attention = 4 * c["num_hidden_layers"] * c["hidden_size"] * num_tokens**2 / 2
        return num_tokens * (self.weight_bytes() - logits) + logits + attention


FULL = Sizes(LLAMA_8B, copy_bytes=4 << 30, matrix=8192, long_prompt=8192, batch=64, kv_cache_gib=24.0)
TINY = Sizes(TOY, copy_bytes=1 << 22, matrix=256, long_prompt=64, batch=4, kv_cache_gib=0.01)


def seconds_of(work: Callable[[], object], device: str, num_runs: int = 10) -> float:
    """The shortest of some runs, after one that warms up."""
    work()
    times = []
    for _ in range(num_runs):
        synchronize(device)
        start_s = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start_s)
    return min(times)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# -- floors ---------------------------------------------------------------------------------------------------------


def measure_floors(sizes: Sizes, device: str) -> tuple[float, float]:
    """Bytes per second of a copy, read and written ones together; operations per second of bfloat16 products."""
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    copy_s = seconds_of(lambda: destination.copy_(source), device)
    a = torch.randn(sizes.matrix, sizes.matrix, device=device).bfloat16()
    product_s = seconds_of(lambda: a @ a, device)
    return 2 * sizes.copy_bytes / copy_s, 2 * sizes.matrix**3 / product_s


# -- correct? -------------------------------------------------------------------------------------------------------


def test_kernels() -> str:
    """The kernels' own tests, on this device. Returns pytest's summary; raises `ClickException` where they fail."""
    names = [str(path) for path in sorted((ROOT / "tests/unit").glob("test_triton_*.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-o", "addopts=", *names]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-400:]]
    if done.returncode != 0:
        raise click.ClickException("the kernels' tests fail:\n" + "\n".join(lines[-40:]))
    return lines[-1]


def compare_backends(folder: Path, device: str, *, backend: str) -> float:
    """How many of 8 answers of 32 tokens, in float32, are those of plain torch on this device: a share."""

    def answers(attention_backend: str) -> list[list[int]]:
        engine = open_engine(
            folder, device, dtype="float32", attention_backend=attention_backend, kv_cache_gib=0.05, max_model_len=512,
            max_num_seqs=8,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        for number in range(8):
            prompt = [(17 * number + 5 * i) % 490 + 5 for i in range(10 + 37 * number)]
            engine.add_request(str(number), prompt, params)
        tokens: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        return [tokens[str(number)] for number in range(8)]

    pairs = list(zip(answers(backend), answers("torch"), strict=True))
    return sum(ours == plain for ours, plain in pairs) / len(pairs)


# -- fast? ----------------------------------------------------------------------------------------------------------


def measure_decode_kernel(sizes: Sizes, copy_bps: float) -> Row:
    """Attention of a decoding batch alone, one layer: bytes of keys and values a second."""
    from engine.kernels.gpu.decode import DecodeConfig, paged_decode, partial_size

    heads, kv_heads, head_dim, context, block_size = 32, 8, 128, 4096, 16
    num_blocks = sizes.batch * context // block_size
    kv = torch.randn(num_blocks, 2, kv_heads, block_size, head_dim, device="cuda").bfloat16()
    q = torch.randn(sizes.batch, heads, head_dim, device="cuda").bfloat16()
    tables = torch.randperm(num_blocks, device="cuda").int().view(sizes.batch, -1)
    lens = torch.full((sizes.batch,), context, dtype=torch.int32, device="cuda")
    config = DecodeConfig.of(head_dim, 2)
    scratch = torch.empty(partial_size(sizes.batch, heads, head_dim, context, config), device="cuda")
    out = torch.empty_like(q)
    seconds = seconds_of(
        lambda: paged_decode(
            q, kv, tables, lens, out, scratch, max_context_len=context, window=0, soft_cap=0.0, config=config
        ),
        "cuda",
    )
    return Row(f"attention, {sizes.batch} x 4k", kv.numel() * 2 / seconds / 1e9, "GB/s", copy_bps / 1e9, 0.8)


def measure_digests(copy_bps: float) -> Row:
    """Of 1,024 tokens of a model of 32 layers, as a commit asks for them."""
    from engine.kernels.gpu.digest import block_digests

    pool = torch.randint(0, 255, (32, 256, 2, 8, 16, 256), dtype=torch.uint8, device="cuda")
    seconds = seconds_of(lambda: block_digests(pool, list(range(0, 256, 4))), "cuda")
    return Row("digests of 64 blocks, 32 layers", pool.numel() / 4 / seconds / 1e9, "GB/s", copy_bps / 1e9)


def measure_engine(
    folder: Path, sizes: Sizes, device: str, copy_bps: float, flops: float, *, quantization: str, kv_cache_dtype: str
) -> list[Row]:
    """Whole steps: what decoding reads, and what prompts compute, beside the floors (products in bfloat16)."""
    long = sizes.long_prompt
    weight_bytes = sizes.weight_bytes(2 if quantization == "none" else 1)
    kv_itemsize = 2 if kv_cache_dtype == "auto" else 1
    engine = open_engine(
        folder, device, dtype="bfloat16", kv_cache_gib=sizes.kv_cache_gib, max_model_len=2 * long,
        max_num_seqs=sizes.batch, max_num_batched_tokens=max(2 * long, sizes.batch), max_itl_ms=0,
        quantization=quantization, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    rows = []
    for batch, context, target in ((1, long // 8, 0.85), (sizes.batch, long // 4, 0.8)):
        measure_decode(engine, batch, context, num_steps=4)  # records the graphs
        median_ms = measure_decode(engine, batch, context, num_steps=40).median_ms
        limit_ms = 1e3 * (weight_bytes + batch * sizes.kv_bytes(context, kv_itemsize)) / copy_bps
        rows.append(Row(f"decode, {batch} x {context}", median_ms, "ms", limit_ms, target))
    for num_prompts, length, target in ((8, long, 0.6), (1, long // 4, 0.5)):
        seconds = min(prefill_seconds(engine, num_prompts, length, device) for _ in range(3))
        limit_ms = 1e3 * num_prompts * sizes.prefill_flop(length) / flops
        rows.append(Row(f"prefill, {num_prompts} x {length}", 1e3 * seconds, "ms", limit_ms, target))
    return rows


def prefill_seconds(engine: LLMEngine, num_prompts: int, length: int, device: str) -> float:
    for _ in range(num_prompts):
        add_request(engine, length, max_tokens=1)
    seconds = 0.0
    while engine.has_unfinished_requests():
        seconds += timed_step(engine)
        synchronize(device)
    return seconds


def open_engine(folder: Path, device: str, **settings: Any) -> LLMEngine:
    return LLMEngine(
        create_engine_config(
            EngineArgs(model=str(folder), load_format="dummy", device=device, enable_prefix_caching=False, **settings)
        )
    )


# -- all of it ------------------------------------------------------------------------------------------------------


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tiny", is_flag=True, help="A toy, on a CPU where there is no GPU: only to see the script run.")
@click.option("--quantization", default="none", help="Of the engine measured: none, int8 or fp8.")
@click.option("--kv-cache-dtype", default="auto", help="Of the engine measured: auto or fp8.")
def main(tiny: bool, quantization: str, kv_cache_dtype: str) -> None:
    """Check and measure all that a GPU can show."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not tiny:
        raise click.ClickException("torch sees no GPU here; --tiny runs the script over a toy on the CPU")
    device, sizes = ("cuda" if has_gpu else "cpu"), (TINY if tiny else FULL)
    start_s = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"{time.monotonic() - start_s:6.1f} s  {text}")

    copy_bps, flops = measure_floors(sizes, device)
    rows = [Row("copy", copy_bps / 1e9, "GB/s"), Row("products", flops / 1e12, "TFLOP/s")]
    say(f"floors: {copy_bps / 1e9:,.0f} GB/s copied, {flops / 1e12:,.1f} TFLOP/s")
    tests = test_kernels() if has_gpu else "not run: no GPU"
    say(f"kernels: {tests}")
    with tempfile.TemporaryDirectory() as name:
        toy, model = Path(name, "toy"), Path(name, "model")
        for folder, config in ((toy, TOY), (model, sizes.config)):
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
        same = compare_backends(toy, device, backend="auto")
        say(f"model: {same:.0%} of 8 greedy answers in float32 are plain torch's")
        if has_gpu:
            rows += [measure_decode_kernel(sizes, copy_bps), measure_digests(copy_bps)]
            say("kernels measured")
        rows += measure_engine(
            model, sizes, device, copy_bps, flops, quantization=quantization, kv_cache_dtype=kv_cache_dtype
        )
        say("engine measured")
    click.echo("\n" + "\n".join(line_of(row) for row in rows))
    summary = {
        "benchmark": "gpu",
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "kernel_tests": tests,
        "answers_as_plain_torch": same,
        "rows": [asdict(row) | {"share": row.share} for row in rows],
    }
    if tiny:
        click.echo(json.dumps(summary | machine()))
    else:
        save("gpu", summary | machine(), lambda figure: draw(figure, rows))


def line_of(row: Row) -> str:
    text = f"{row.what:<34}{row.value:>12,.2f} {row.unit:<8}"
    if row.share is None:
        return text
    target = f", aim {row.target:.0%}" if row.target else ""
    return f"{text} limit {row.limit:>10,.2f}  {row.share:>5.0%} of it{target}"


def draw(figure: Any, rows: list[Row]) -> None:
    """Shares of the limits, and what we aim at."""
    shown = [row for row in rows if row.share is not None]
    axes = figure.add_subplot()
    axes.barh([row.what for row in shown], [100 * (row.share or 0) for row in shown], color="#2a6fbb")
    aimed = [row for row in shown if row.target]
    axes.plot([100 * (row.target or 0) for row in aimed], [row.what for row in aimed], "|", color="black", ms=20)
    axes.set_xlabel("% of what the device could do; a mark: the aim")
    axes.set_xlim(0, 105)
    axes.invert_yaxis()


if __name__ == "__main__":
    main()
