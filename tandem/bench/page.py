"""The report as one HTML page: plots embedded, no script, nothing fetched. Pure: a report in, HTML out."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import Any

from tandem.bench.plots import Plot
from tandem.bench.report import NO_PLOTS, Report, table
from tandem.bench.summary import GOOD_SHARE

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --dim: #667; --line: #d8dae0; --back: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e7ea; --dim: #9aa; --line: #3a3d44; --back: #16181c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
p.dim, td.dim { color: var(--dim) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left } td.text { text-align: left; white-space: normal }
img { max-width: 100%; background: #fff; border-radius: 6px }
.problem { border-left: 4px solid #c33; padding-left: .8rem }
"""

LEGEND = (
    "Times count from the moment a request was due, not from when this client came to send it. TTFT: until the first "
    "token. TPOT: mean time per further token of one answer. ITL: between one message and the next. E2EL: until the "
    "last token. Latencies are those of answered requests. Warm-up is left out."
)


def page(report: Report, plots: Sequence[Plot]) -> str:
    """A whole HTML document."""
    title = escape(report.args.label or f"tandem bench of {report.model}")
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="dim">{escape(report.model)} at {escape(report.target)} ({escape(report.args.backend)}), '
        f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(report.at_s))}</p>",
        f'<p class="problem">{escape(report.problem)}</p>' if report.problem else "",
        _goodput(report),
        f'<div class="scroll">{_table(report)}</div>',
        f'<p class="dim">{LEGEND}</p>',
        *(_figure(plot) for plot in plots),
        "" if plots else f'<p class="dim">{escape(NO_PLOTS)}</p>',
        _errors(report),
        "<h2>Workload</h2>",
        _facts(_workload(report)),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(part for part in parts if part) + "\n</body></html>\n"
    )


def _goodput(report: Report) -> str:
    rate = report.good_rate
    if rate is None:
        return ""
    wanted = ", ".join(f"{name.upper()} at most {bound:g} ms" for name, bound in report.args.objectives.items())
    return (
        f"<p><b>Goodput: {rate:.4g} requests/s</b>, the highest rate of those tried at which "
        f"{100 * GOOD_SHARE:g} % of all requests were good ({escape(wanted)}).</p>"
    )


def _table(report: Report) -> str:
    shown = table(report.runs)
    head = "".join(f"<th>{escape(header.removeprefix('>'))}</th>" for header in shown.headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in shown.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _figure(plot: Plot) -> str:
    """A plot as a separate image, so that ids in one drawing do not clash with those in another."""
    data = b64encode(plot.svg.encode()).decode()
    return f'<h2>{escape(plot.title)}</h2><img alt="{escape(plot.title)}" src="data:image/svg+xml;base64,{data}">'


def _errors(report: Report) -> str:
    rows = [
        (f"{run.summary.request_rate:g}", code, str(count), _example(run.outcomes, code))
        for run in report.runs
        for code, count in run.summary.errors.items()
    ]
    if not rows:
        return ""
    cells = "".join(
        f'<tr><td>{escape(rate)}</td><td class="text">{escape(code)}</td><td>{count}</td>'
        f'<td class="text dim">{escape(example)}</td></tr>'
        for rate, code, count, example in rows
    )
    head = "<th>requests/s</th><th>status</th><th>requests</th><th>the first of them</th>"
    return f'<h2>Refused and failed</h2><div class="scroll"><table><tr>{head}</tr>{cells}</table></div>'


def _example(outcomes: Sequence[Any], code: str) -> str:
    return next((outcome.message for outcome in outcomes if outcome.code == code), "")[:300]


def _workload(report: Report) -> dict[str, str]:
    """Facts about the workloads of all runs; values that differ are separated by commas."""
    names = dict.fromkeys(name for run in report.runs for name in run.about)
    facts = {}
    for name in names:
        values = dict.fromkeys(_text(run.about.get(name)) for run in report.runs)
        facts[name.replace("_", " ")] = ", ".join(values)
    args = report.args
    return facts | {
        "requests per rate": ", ".join(dict.fromkeys(str(run.summary.num_prompts) for run in report.runs)),
        "warm-up requests": str(args.num_warmups),
        "seed": str(args.seed),
        "end of sequence": "ignored" if args.ignore_eos else "ends an answer",
    }


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _facts(facts: dict[str, str]) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"<table>{rows}</table>"
