"""Runs all checks and measurements that need a GPU, in minutes: are the results right, and how close are the speeds to
the device's limits?

    python benchmarks/gpu.py                              on a machine with CUDA torch and Triton
    python benchmarks/gpu.py --only kernels,model         some parts; floors are always measured
    python benchmarks/gpu.py --tiny                       the same script on any machine, with a toy: to test the script

    floors ─> kernels, model, answers ─> attention ─> flash ─> digests ─> steps, drafts ─> offload ─> push ─> servers
    ─> products ─> deepseek ─> gpt-oss ─> int4-experts ─> states ─> steps in 8 and 4 bits ─> batch_invariant ─> steps by
    FlashAttention (each a module of gpu_parts/); by name: cuBLASLt, vllm, other launch configurations

Each part runs in a separate process with its own time limit: if one fails, the table says so, and the others go on.
Every number is shown beside the limit that the same run measured, or beside its target. The results are one JSON
object, which is written to `benchmarks/results/` after each part, with a plot at the end; the last line names the file.
A toy's results are not kept, and its last line is the object itself. The exit code is 1 if a check or a part failed, or
the time budget ran out. docs/gpu.md says what to copy to a bare machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.flags import Positive, wrong_usage
from benchmarks.gpu_parts import (
    against_vllm,
    answers,
    attention,
    deepseek,
    digests,
    drafts,
    flash,
    floors,
    gpt_oss,
    int4_experts,
    invariant,
    kernels,
    model,
    offload,
    products,
    push,
    servers,
    states,
    steps,
)
from benchmarks.gpu_parts.rows import Row, table
from benchmarks.gpu_parts.runner import Part, PartResult, Setting, import_before, run_parts
from benchmarks.machine import compilers, machine
from benchmarks.report import RESULTS, keep, path_of, plot

PARTS = (
    Part(name="floors", about="what the device can do", measure=floors.measure, limit_s=60),
    Part(name="kernels", about="their tests against float64", measure=kernels.measure, limit_s=150, is_timed=False),
    Part(name="model", about="against transformers in float64", measure=model.measure, limit_s=150, is_timed=False),
    Part(name="answers", about="as on the CPU", measure=answers.measure, limit_s=120, is_timed=False),
    Part(name="attention", about="alone", measure=attention.measure, limit_s=60),
    Part(name="flash", about="the FlashAttention that is there, alone", measure=flash.measure, limit_s=90),
    Part(name="digests", about="of blocks, alone", measure=digests.measure, limit_s=40),
    Part(name="steps", about="of an engine", measure=steps.measure, limit_s=120),
    Part(name="steps-drafts", about="the same with guesses", measure=drafts.measure, limit_s=60),
    Part(name="steps-draft-model", about="with guesses by a smaller model", measure=drafts.measure_model, limit_s=90),
    Part(name="steps-eagle", about="with guesses by an EAGLE-3 head", measure=drafts.measure_head, limit_s=90),
    Part(name="offload", about="KV to the host's memory and back", measure=offload.measure, limit_s=90),
    Part(name="push-ipc", about="KV between two processes", measure=push.measure_ipc, limit_s=60),
    Part(name="push-nixl", about="KV between two processes", measure=push.measure_nixl, limit_s=60),
    Part(name="push-grpc", about="KV between two processes", measure=push.measure_grpc, limit_s=60),
    Part(name="servers", about="1P+1D on one card against one that does both", measure=servers.measure, limit_s=240),
    Part(name="products", about="of a decoding step, alone", measure=products.measure, limit_s=90),
    Part(name="deepseek", about="attention to latents and experts, alone", measure=deepseek.measure, limit_s=90),
    Part(name="gpt-oss", about="experts in MXFP4, alone", measure=gpt_oss.measure, limit_s=60),
    Part(name="int4-experts", about="experts in int4, alone", measure=int4_experts.measure, limit_s=60),
    Part(name="states", about="layers that keep a state, alone", measure=states.measure, limit_s=60),
    Part(name="steps-int8", about="the same engine with int8 weights", measure=steps.measure_int8, limit_s=90),
    Part(name="steps-int4", about="the same engine with int4 weights", measure=steps.measure_int4, limit_s=90),
    Part(name="steps-mixture", about="of an engine with experts in int4", measure=steps.measure_mixture, limit_s=90),
    Part(name="steps-fp8", about="the same engine with weights and KV in fp8", measure=steps.measure_fp8, limit_s=90),
    Part(name="invariant", about="batch_invariant: bits, products, attention", measure=invariant.measure, limit_s=120),
    Part(
        name="steps-invariant",
        about="the same engine with batch_invariant",
        measure=steps.measure_invariant,
        limit_s=90,
    ),
    Part(
        name="steps-flash",
        about="the same engine, prompts by FlashAttention",
        measure=steps.measure_flash,
        limit_s=90,
    ),
    Part(
        name="steps-cublaslt",
        about="the same engine with products by cuBLASLt",
        measure=steps.measure_cublaslt,
        limit_s=90,
        is_default=False,
    ),
    Part(name="vllm", about="beside Tandem", measure=against_vllm.measure, limit_s=400, is_default=False),
    *(
        Part(
            name=f"{of.__name__.rpartition('.')[2]}-variants",
            about="its launch configurations",
            measure=of.measure_variants,
            limit_s=120,
            is_default=False,
        )
        for of in (attention, products, invariant)
    ),
)
KNOWN = (floors.COPY, floors.PRODUCTS, floors.TO_HOST, floors.TO_DEVICE, push.IPC_PUSH, push.NIXL_PUSH)
"""Rows whose values later parts need."""


def known_of(rows: Sequence[Row]) -> Mapping[str, float]:
    return {row.what: row.value for row in rows if row.what in KNOWN and row.value is not None}


def chosen_parts(only: str) -> list[Part]:
    """The chosen parts in their usual order, with floors first, since the others are compared with them. Raises
    `click.UsageError`."""
    names = {name.strip() for name in only.split(",") if name.strip()}
    unknown = names - {part.name for part in PARTS}
    if unknown:
        known = ", ".join(part.name for part in PARTS)
        raise click.UsageError(f"--only: no part is called {', '.join(sorted(unknown))}; there are {known}")
    names = names or {part.name for part in PARTS if part.is_default}
    return [part for part in PARTS if part.name in names or part.name == "floors"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tiny", is_flag=True, help="Use a tiny model, also on a CPU, only to check that the script runs.")
@click.option(
    "--only",
    default="",
    help=f"Parts to run, comma-separated, of: {', '.join(part.name for part in PARTS)}. Default: all but "
    "steps-cublaslt, vllm and variants.",
)
@click.option("--budget-s", default=480.0, show_default=True, type=Positive(),
              help="Total time in seconds, which no part exceeds. A part begins only if a third of its own limit is "
              "left.")  # fmt: skip
@click.option("--results-dir", default=None, type=click.Path(file_okay=False, path_type=Path),
              help="Folder for results and logs. Default: benchmarks/results; with --tiny, none are kept.")  # fmt: skip
def main(tiny: bool, only: str, budget_s: float, results_dir: Path | None) -> None:
    """Run all checks and measurements that need a GPU."""
    parts = chosen_parts(only)
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not tiny:
        raise click.ClickException("torch sees no GPU here; --tiny runs the script over a toy on the CPU")
    with TemporaryDirectory() as name:
        results = (results_dir or (Path(name) if tiny else RESULTS)).resolve()
        with wrong_usage("--results-dir"):
            results.mkdir(parents=True, exist_ok=True)
        setting = Setting(device="cuda" if has_gpu else "cpu", is_tiny=tiny, results=results)
        found = run(parts, setting, budget_s, is_kept=not tiny or results_dir is not None)
    sys.exit(1 if any(result.is_bad for result in found) else 0)


def run(parts: list[Part], setting: Setting, budget_s: float, *, is_kept: bool) -> list[PartResult]:
    made_by = compilers()
    about = {"benchmark": "gpu", "is_tiny": setting.is_tiny} | machine() | made_by
    click.echo(", ".join(f"{name} {about[name]}" for name in ("commit", "torch", *made_by)))
    path = path_of("gpu", about["commit"], setting.results)
    found: list[PartResult] = []
    start_s = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"{time.monotonic() - start_s:6.1f} s  {text}")
        sys.stdout.flush()

    def on_result(result: PartResult) -> None:
        found.append(result)
        for line in table(result.rows):
            click.echo(f"          {line}")
        if is_kept:
            keep(path, summary_of(found, about))

    if setting.device == "cuda":
        import_before("torch", "triton")
    run_parts(parts, setting, budget_s=budget_s, say=say, on_result=on_result, known_of=known_of)
    click.echo("\n" + "\n".join(table_of(found)) + "\n")
    if setting.device == "cuda":  # not earlier, so that this process does not use the card during the parts
        about["gpu"] = torch.cuda.get_device_name()
    summary = summary_of(found, about | {"seconds": round(time.monotonic() - start_s, 1)})
    if is_kept:
        keep(path, summary)
        plot(path, "gpu", summary, lambda figure: draw(figure, [row for result in found for row in result.rows]))
        click.echo(f"kept in {path}")  # does not print it all again: the end of the output should show the table
    else:
        click.echo(json.dumps(summary))
    return found


def summary_of(found: Sequence[PartResult], about: Mapping[str, Any]) -> dict[str, Any]:
    return {**about, "parts": [result.to_dict() for result in found]}


def table_of(found: Sequence[PartResult]) -> list[str]:
    """All rows in one table, with the problem of each incomplete part."""
    width = max(len(result.name) for result in found)
    lines = iter(table([row for result in found for row in result.rows]))
    shown = []
    for result in found:
        shown += [f"{result.name:<{width}}  {next(lines)}" for _ in result.rows]
        if result.problem:
            shown.append(f"{result.name:<{width}}  {result.problem}")
    return shown


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Draw the shares of the limits, and the targets."""
    shown = [row for row in rows if row.share is not None and (not row.group or row.what == row.group)]
    axes = figure.add_subplot()
    axes.barh([row.what for row in shown], [100 * (row.share or 0) for row in shown], color="#2a6fbb")
    aimed = [row for row in shown if row.target]
    axes.plot([100 * (row.target or 0) for row in aimed], [row.what for row in aimed], "|", color="black", ms=20)
    axes.set_xlabel("% of what the device could do; a mark: the aim")
    axes.set_xlim(0, 105)
    axes.invert_yaxis()


if __name__ == "__main__":
    main()
