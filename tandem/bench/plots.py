"""Plots of a bench, as SVG texts: latency against rate, the goodput curve, gaps between tokens over time.

Without matplotlib, `draw` returns an empty list.
"""

from __future__ import annotations

import io
from itertools import cycle
from typing import Any, NamedTuple

from tandem.bench.report import Report, Run, rate_text
from tandem.bench.summary import GOOD_SHARE, Summary, gaps_over_time

COLOURS = ("#2a6fbb", "#d1662f", "#3a9a5c", "#8a5bb5", "#b8902b", "#555555")
SIZE = (9.0, 4.2)


class Plot(NamedTuple):
    name: str
    title: str
    svg: str


def draw(report: Report) -> list[Plot]:
    """The plots for which there are numbers."""
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ImportError:
        return []
    plots = []
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 10, "axes.spines.top": False,
                                "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}):  # fmt: skip
        for name, title, fill in (
            ("latency", "Latency against rate", _latency),
            ("goodput", "Goodput", _goodput),
            ("itl", "Gaps between tokens over time", _gaps),
        ):
            figure = pyplot.figure(figsize=SIZE, layout="constrained")
            try:
                if fill(figure, report):
                    plots.append(Plot(name, title, _svg_of(figure)))
            finally:
                pyplot.close(figure)
    return plots


def _svg_of(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def plain_numbers(axes: Any) -> None:
    """Label a logarithmic axis with plain numbers: 1000, not 10 to the third."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def is_finite(summary: Summary) -> bool:
    """Whether the run has a place on the axis of rates. A run that sends all at once has no rate: it is drawn
    separately, at the rate of its answers."""
    return summary.request_rate != float("inf")


def _latency(figure: Any, report: Report) -> bool:
    """Percentiles of each metric, side by side."""
    answered = [s for s in report.summaries if s.spreads]
    curve = sorted(filter(is_finite, answered), key=lambda s: s.request_rate)
    metrics = list(dict.fromkeys(metric for s in answered for metric in s.spreads))
    for position, metric in enumerate(metrics, 1):
        axes = figure.add_subplot(1, len(metrics), position)
        there = [s for s in curve if metric in s.spreads]
        at_once = [s for s in answered if not is_finite(s) and metric in s.spreads]
        for percent, colour in zip(report.args.percentiles, cycle(COLOURS), strict=False):
            heights = [s.spreads[metric].percentiles[percent] for s in there]
            axes.plot([s.request_rate for s in there], heights, marker="o", color=colour, label=f"p{percent:g}")
            heights = [s.spreads[metric].percentiles[percent] for s in at_once]
            axes.plot([s.request_throughput for s in at_once], heights, "x", color=colour)
        if metric in report.args.objectives:
            axes.axhline(report.args.objectives[metric], color="grey", linewidth=0.8, linestyle="--")
        axes.set_title(f"{metric.upper()}, ms")
        axes.set_xlabel("requests/s")
        axes.set_yscale("log")
        plain_numbers(axes)
        axes.legend(fontsize=8)
    if len(answered) > len(curve):
        figure.supxlabel("crosses: all at once, at the rate that was done", fontsize=8)
    return bool(metrics)


def _goodput(figure: Any, report: Report) -> bool:
    """Good answers per second, and all answers per second."""
    summaries = [s for s in report.summaries if s.request_goodput is not None and is_finite(s)]
    summaries.sort(key=lambda s: s.request_rate)
    if not summaries:
        return False
    rates = [s.request_rate for s in summaries]
    axes = figure.add_subplot()
    axes.plot([0, max(rates)], [0, max(rates)], color="grey", linewidth=0.8, linestyle=":", label="as offered")
    axes.plot(rates, [s.request_throughput for s in summaries], marker="o", color=COLOURS[0], label="answered")
    axes.plot(rates, [s.request_goodput for s in summaries], marker="o", color=COLOURS[2], label="good")
    axes.set_xlabel("requests/s offered")
    axes.set_ylabel("answers/s")
    axes.set_ylim(bottom=0)
    share = axes.twinx()
    share.plot(
        rates, [100 * (s.good_share or 0) for s in summaries], marker=".", color=COLOURS[1], label="good, of all"
    )
    share.axhline(100 * GOOD_SHARE, color=COLOURS[1], linewidth=0.6, linestyle="--")
    share.set_ylim(0, 103)
    share.set_ylabel("% of all requests")
    share.grid(visible=False)
    lines = [*axes.get_lines(), share.get_lines()[0]]
    axes.legend(lines, [line.get_label() for line in lines], fontsize=8)
    return True


def _gaps(figure: Any, report: Report) -> bool:
    axes = figure.add_subplot()
    drawn = [_gaps_of(axes, run, colour) for run, colour in zip(report.runs, cycle(COLOURS), strict=False)]
    if not any(drawn):
        return False
    axes.set_xlabel("seconds since the run's start")
    axes.set_ylabel("ms between tokens (line: p99, dots: p50)")
    axes.set_yscale("log")
    plain_numbers(axes)
    axes.legend(fontsize=8, title="requests/s")
    return True


def _gaps_of(axes: Any, run: Run, colour: str) -> bool:
    points = gaps_over_time(run.outcomes)
    if points:
        times = [at_s for at_s, _, _ in points]
        axes.plot(times, [p99 for _, _, p99 in points], color=colour, label=rate_text(run.summary.request_rate))
        axes.plot(times, [p50 for _, p50, _ in points], ".", color=colour, markersize=3)
    return bool(points)
