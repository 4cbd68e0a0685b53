"""`tandem chaos`: runs a soak test with deliberate faults, and gives a verdict."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import click

from engine.engine_args import EngineArgs
from kv_transfer import TRANSPORTS
from router.policy import PolicyConfig
from rpc.entrypoint import build, options_of
from tandem.chaos.args import ENGINE, POLICY, SoakArgs
from tandem.cli.options import check_rebalance, examples, is_given, json_option
from tandem.stderr import tell
from worker_service.args import WorkerArgs


@click.command(
    short_help="Break a local cluster on purpose and check its answers.",
    epilog=examples(
        "tandem chaos",
        "tandem chaos --seconds 600 --seed 7 --decode 3",
        "tandem chaos --transport nixl",
        "tandem chaos --routers 2 --gateways 2",
        "tandem chaos --learn-costs",
        "tandem chaos --lora-modules sql=/models/sql-adapter",
        "tandem chaos --lora-dir /models/adapters",
        "tandem chaos --model ~/models/Qwen3-0.6B --tensor-parallel-size 2 --quantization int8",
    ),
)
@click.option("--seconds", type=float, default=60.0, show_default=True, help="How long to cause faults, in seconds.")
@click.option("--seed", type=int, default=1, show_default=True,
              help="Seed of the faults and requests: the same seed gives the same plan.")  # fmt: skip
@click.option("--deadline-s", type=float, default=SoakArgs.deadline_s, show_default=True,
              help="Seconds that a request may take: one that takes longer has hung. Give more on a machine that is "
                   "too slow for the load.")  # fmt: skip
@click.option("--prefill", "num_prefill", type=int, default=2, show_default=True, help="Number of prefill workers.")
@click.option("--decode", "num_decode", type=int, default=2, show_default=True, help="Number of decode workers.")
@click.option("--routers", "num_routers", type=int, default=1, show_default=True, help="Number of routers.")
@click.option("--gateways", "num_gateways", type=int, default=1, show_default=True, help="Number of HTTP gateways.")
@click.option("--transport", type=click.Choice(TRANSPORTS), default=WorkerArgs.transport, show_default=True,
              help="Transport for KV between workers. Only over grpc is KV damaged in transit.")  # fmt: skip
@click.option("--lora-dir", default="",
              help="Folder of two or more LoRA adapters, in PEFT's layout. Workers watch a folder of links to them, "
                   "which are exchanged for one another while requests ask for them.")  # fmt: skip
@click.option("--verbose", "is_verbose", is_flag=True, help="Show the log lines of all processes.")
@json_option
@options_of(EngineArgs, defaults=ENGINE, leave_out={"seed"})
@options_of(PolicyConfig, defaults=POLICY)
@click.pass_context
def chaos(context: click.Context, /, is_json: bool, is_verbose: bool, seed: int, **options: Any) -> None:
    """Start a cluster, put load on it, and meanwhile kill, stop, disconnect, corrupt and overload it.

    Requests are sent over gRPC and, through a gateway, over HTTP (completions and chats). With --lora-modules they
    select adapters; with --lora-dir they select others, which are replaced by one another meanwhile. Workers, routers,
    gateways and Redis are killed or told to shut down; networks fail in both directions or in one.

    Then check that every request ended exactly once, in one of the permitted ways; that every answer has the same
    tokens, text and, if requested, logprobs as in a run without faults; and that every KV block was freed. No stream
    may break off, except an HTTP stream whose gateway was killed; what was received of it must be the start of the
    right answer. A process that is told to shut down must finish its requests or hand them over, and exit with 0.

    Workers take the same settings as in `tandem up`: use those that you are going to run. With some settings, which
    say so (--batch-invariant on GPUs; 8-bit KV on CPUs), tokens that are almost equally likely depend on the batch;
    this command finds such differences. Routers choose as with `tandem up`, except that they do not learn costs: then
    more KV travels. With --learn-costs, as in `tandem up`, streams also move while they run.

    Exits with 0 if all checks pass. Otherwise prints what was found and where the log is, and exits with 1.
    """
    from rpc.errors import TandemError
    from tandem.answer import StreamBroken
    from tandem.chaos.soak import run_soak
    from tandem.cluster import ClusterError

    engine, policy = build(EngineArgs, options), build(PolicyConfig, options)
    check_rebalance(context, policy)
    own = {name: value for name, value in options.items() if name not in vars(engine) | vars(policy)}
    is_offloading_given = is_given(context, "kv_offloading_size")
    try:
        args = SoakArgs(engine=engine, policy=policy, seed=seed, is_offloading_given=is_offloading_given, **own)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with NamedTemporaryFile("w", prefix=f"tandem-chaos-{args.seed}-", suffix=".log", delete=False) as log:
        where = f"the log of all processes is in {log.name}"

        def say(line: str) -> None:
            on_line("chaos", line)
            if not is_verbose:
                tell(line)

        def on_line(name: str, line: str) -> None:
            print(f"{name:<10} | {line}", file=log)
            if is_verbose:
                tell(f"{name:<10} | {line}")

        try:
            report = asyncio.run(run_soak(args, say=say, on_line=on_line))
        except BaseException as error:  # Ctrl-C is one
            tell(where)
            if isinstance(error, ClusterError | TandemError | StreamBroken):
                raise click.ClickException(str(error)) from error
            raise
    if report.has_passed:
        Path(log.name).unlink()
    else:
        tell(where)
    click.echo(json.dumps(report.to_dict()) if is_json else describe(report.to_dict()))
    sys.exit(0 if report.has_passed else 1)


def describe(report: dict[str, Any]) -> str:
    """A report as text for people."""

    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{count} {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1]))

    def of_models(counts: dict[str, int]) -> str:
        named = {name or "the model itself": count for name, count in counts.items()}
        return f"; of {listed(named)}" if len(named) > 1 else ""

    lines = [
        f"faults    {sum(report['faults'].values())} in {report['seconds']:g} s (seed {report['seed']}): "
        f"{listed(report['faults'])}",
        f"requests  {sum(report['requests'].values())}: {listed(report['requests'])}",
        f"          {listed(report['ways'])}{of_models(report['models'])}",
        f"          {report['retried']} answers took more than one attempt, {report['resumed']} survived their router, "
        f"{report['moved']} moved to a worker with less to do",
        f"tokens    {report['tokens_checked']:,} compared with a run without faults; requests lost {report['lost']}, "
        f"with repeated tokens {report['repeated']}, with wrong ones {report['wrong']}",
        f"memory    {len(report['leaks'])} leaks; every block free or cached {report['rest_s']:.1f} s after the last "
        f"request; {report['num_loaded_tokens']:,} tokens came back from host memory",
        *(f"FOUND     {finding}" for finding in [*report["findings"], *report["leaks"]]),
        "passed" if report["passed"] else "FAILED",
    ]
    return "\n".join(lines)
