"""`make demo`: a prefill and a decode worker, two questions, and a report on what happened to them.

Owns the output. The second question continues the conversation of the first, so that most of its prompt is in the
decode worker's prefix cache already: the decode worker computes only the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import aclosing, suppress
from dataclasses import dataclass

from rich.console import Console

from engine.cache_dir import PROGRESS
from engine.engine_args import EngineArgs
from protos.tandem_inference_pb2 import Timings
from protos.tandem_worker_pb2 import ClusterAudit
from router.policy import PolicyConfig
from rpc.entrypoint import stop_signals
from rpc.errors import TandemError
from tandem.answer import Answer, AnswerStream, StreamBroken
from tandem.client import AsyncClient
from tandem.cluster import Cluster, ClusterError
from tandem.cluster_args import ClusterArgs
from tandem.interrupts import INTERRUPTED
from tandem.stderr import tell
from tandem.supervision import ProcessEvent
from tandem.tables import audit_problems, audit_table, format_table, mode_text

QUESTION = "Explain in a few sentences why the sky is blue."
FOLLOW_UP = "Thank you! Now say the same in one short sentence."
MAX_TOKENS = 160
KEPT_LOG_LINES = 200
FAILED = 1


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    title: str
    answer: Answer


async def run_demo(*, prompt: str, transport: str, is_verbose: bool) -> int:
    """Run the demo. Returns the exit code: 0 if all went well and everything is stopped. `prompt`: the question; empty:
    our own."""
    demo = _Demo(prompt or QUESTION, transport, is_verbose)
    work = asyncio.create_task(demo.run())
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, work.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        demo.say("\nstopped")
        return INTERRUPTED
    except (ClusterError, TandemError, StreamBroken) as error:
        demo.explain_failure(error)
        return FAILED


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Nobody reads the output any more, as with `| head`. rich would end whichever task is printing."""
        with suppress(SystemExit):
            super().on_broken_pipe()


class _Demo:
    def __init__(self, question: str, transport: str, is_verbose: bool) -> None:
        # Small pools: a demo should not need the memory of a service.
        self._args = ClusterArgs(
            engine=EngineArgs(kv_cache_gib=0.25),
            policy=PolicyConfig(learn_costs=False),  # so that KV moves even for these short prompts
            listen="127.0.0.1:0",
            transport=transport,
            drain_grace_s=10,
        )
        self._question = question
        self._is_verbose = is_verbose
        self._console = _Console(highlight=False, soft_wrap=True)
        self._log: deque[str] = deque(maxlen=KEPT_LOG_LINES)
        self._started_at_s = time.monotonic()

    def say(self, line: str = "", *, style: str = "") -> None:
        self._console.print(line, style=style, markup=False)

    async def run(self) -> int:
        self.say("Tandem: a router, a prefill worker, a decode worker and Redis on this machine", style="bold")
        cluster = Cluster(self._args, on_line=self._on_line, on_event=self._on_event)
        with self._console.status("starting (some seconds; the first time, the model is fetched)"):
            await cluster.start()
        try:
            self.say(f"  ready    at {cluster.router_address} after {time.monotonic() - self._started_at_s:.1f} s\n")
            async with AsyncClient(cluster.router_address) as client:
                turns = await self._converse(client)
                audit = await client.audit()
        finally:
            problems = await cluster.stop()
        problems += audit_problems(audit)
        self._report(turns, audit)
        for problem in problems:
            self.say(f"Error: {problem}", style="red")
        if not problems:
            self.say("\nEverything is stopped. To keep it running: tandem up (from .venv/bin), see README.md")
        return FAILED if problems else 0

    async def _converse(self, client: AsyncClient) -> list[Turn]:
        messages = [{"role": "user", "content": self._question}]
        first = await self._ask(client, messages)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": FOLLOW_UP}]
        return [Turn("question", first), Turn("follow-up", await self._ask(client, messages))]

    async def _ask(self, client: AsyncClient, messages: list[dict[str, str]]) -> Answer:
        self.say(f"> {messages[-1]['content']}", style="bold cyan")
        whole = AnswerStream()
        async with aclosing(client.stream(messages, max_tokens=MAX_TOKENS, temperature=0)) as stream:
            async for message in stream:
                whole.accept(message)
                self._console.print(message.text, end="", markup=False)
        self.say("\n")
        return whole.answer()

    # -- the report ---------------------------------------------------------------------------------------------

    def _report(self, turns: list[Turn], audit: ClusterAudit) -> None:
        self.say("What happened", style="bold")
        columns = [dict(describe(turn.answer)) for turn in turns]
        names = list(dict.fromkeys(name for column in columns for name in column))
        self._print_columns([["", *(turn.title for turn in turns)]])
        self._print_columns([[name, *(column.get(name, "-") for column in columns)] for name in names])
        self.say("\nWho owns the KV blocks now", style="bold")
        for line in format_table(audit_table(audit)).splitlines():
            self.say(f"  {line}")

    def _print_columns(self, rows: list[list[str]]) -> None:
        for name, *values in rows:
            self.say(f"  {name:<26}" + "".join(f"{value:<34}" for value in values).rstrip())

    # -- the processes' output ----------------------------------------------------------------------------------

    def _on_line(self, name: str, line: str) -> None:
        text = f"{name:<10} | {line}"
        self._log.append(text)
        if self._is_verbose:
            tell(text)
        elif line.startswith(PROGRESS):  # progress of long work, or something that is missing on this machine
            self.say(f"  {name:<10} {line.removeprefix(PROGRESS)}")

    def _on_event(self, event: ProcessEvent) -> None:
        self.say(f"  {event.name:<10} {event.what}", style="red" if event.is_bad else "")

    def explain_failure(self, error: Exception) -> None:
        """Print the last lines of all processes, and then the error."""
        if not self._is_verbose:
            for line in self._log:
                tell(line)
        tell(f"Error: {error}")


def describe(answer: Answer) -> list[tuple[str, str]]:
    """What happened to a request, as (name, value) lines."""
    usage, timings = answer.usage, answer.timings
    num_computed = usage.prompt_tokens - usage.cached_tokens
    return [
        ("mode", mode_text(timings)),
        ("prompt", f"{usage.prompt_tokens} tokens"),
        ("  found in cache", f"{usage.cached_tokens} tokens"),
        ("  computed", f"{num_computed} tokens"),
        ("answer", f"{usage.completion_tokens} tokens, ended by {answer.finish_reason}"),
        *_transfer_lines(timings),
        ("time", f"{timings.total_ms:.1f} ms"),
        ("  queue", f"{timings.queue_ms:.1f} ms"),
        ("  prefill", f"{timings.prefill_ms:.1f} ms"),
        ("  transfer (exposed)", f"{timings.transfer_ms:.1f} ms"),
        ("  decode", f"{timings.decode_ms:.1f} ms"),
        ("first token (TTFT)", f"after {timings.time_to_first_token_ms:.1f} ms"),
        ("each later one (TPOT)", f"{timings.time_per_output_token_ms:.1f} ms"),
    ]


def _transfer_lines(timings: Timings) -> list[tuple[str, str]]:
    if not timings.HasField("kv_transfer"):
        return [("KV moved", "none")]
    moved = timings.kv_transfer
    return [
        ("KV moved", f"{moved.num_bytes:,} bytes over {moved.transport}"),
        ("  blocks pushed", f"{moved.num_blocks}"),
        ("  blocks there already", f"{moved.num_cached_blocks}"),
        ("  first push to commit", f"{moved.push_ms:.1f} ms"),
    ]
