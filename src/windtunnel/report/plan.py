"""One page for a whole search: what to deploy, why, and what would win under other limits."""

from collections.abc import Sequence
from html import escape

from windtunnel.plan.advice import Advice, describe
from windtunnel.plan.answer.recommendation import Riskier, dollars, headline, riskier_sentence, sentence
from windtunnel.plan.bottleneck import Finding, bottlenecks
from windtunnel.plan.disaggregation.together import Verdict
from windtunnel.plan.objective import LeastForRate, purchase_of
from windtunnel.plan.outcome import TIGHTEST, Outcome
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.survey import Surveyed
from windtunnel.plan.trial import whole_run
from windtunnel.plan.what_if import WhatIf
from windtunnel.report.page import number, page, percent, plot, script, table, warnings
from windtunnel.report.plan_figures import label, labels_apart, pareto, slices
from windtunnel.report.serve_line import serve_line

ABOUT = {
    "exact": "simulated exactly",
    "beaten": "failed one simulation at the best's level",
    "bounded": "ruled out by a bound, without a simulation",
    "impossible": "miss the goal even for a single request",
    "refused": "cannot run",
}


def plan_page(
    answer: SearchResult,
    advice: Advice | None,
    surveyed: Sequence[Surveyed],
    what_ifs: WhatIf | None = None,
    verdict: Verdict | None = None,
    risky: Riskier | None = None,
    depends: Sequence[str] = (),
) -> str:
    """The page as text, plotly.js included. ``depends``: sentences about what the answer depends on.

    Raises:
        InputError: plotly is not installed.
    """
    load = answer.question.workload
    title = headline(answer)
    counted = f"{load.name}; {answer.enumeration.size:,} configurations, {answer.trials + answer.reused:,} simulations"
    sections = [
        f'<header><p class="brand">windtunnel plan</p><h1>{escape(title)}</h1>'
        f'<p class="sub">{counted} of {len(load):,} requests</p>{_verdict(answer, advice, risky, depends)}'
        f"{warnings(advice.notes if advice else [])}</header>",
        *_winner(advice, verdict),
        "<h2>Ranking</h2>",
        f'<div class="panel">{_ranking(answer)}</div>',
        "<h2>Cost against latency</h2>",
        plot("pareto", "", "tall", f"One replica at shares of the rate that its bound allows; {_surveyed(surveyed)}."),
        "<h2>Other limits</h2>",
        '<div class="panel"><div class="limits" id="limits"></div><table><thead><tr><th>configuration</th><th>GPUs</th>'
        "<th>$/h</th><th>requests/s</th><th>requests/s per $/h</th></tr></thead><tbody id='slice-rows'></tbody></table>"
        f'<p class="caption" id="slice-none"></p><p class="caption">Computed in the browser from {_surveyed(surveyed)},'
        " each at ten rates; between two rates limits are interpolated.</p></div>",
        plot("capacities", "Capacity of each configuration", "free", "One replica, under these limits."),
        plot("heat", "Tensor parallel size and batch", "tall", "The best of each pair on the winner's device."),
        "<h2>What limits each</h2>",
        f'<div class="panel">{_bottlenecks(answer)}</div>',
        *_what_if(what_ifs),
        "<h2>What was left out</h2>",
        f'<div class="panel">{_left_out(answer)}</div>',
        "<footer>windtunnel · simulated, not measured on the device</footer>",
    ]
    figures = {
        "pareto": pareto(answer, surveyed),
        **{name: {"data": [], "layout": {}} for name in ("capacities", "heat")},
    }
    return page(title, sections, figures, script("plan", slices(answer, surveyed)))


def _surveyed(surveyed: Sequence[Surveyed]) -> str:
    return f"the {len(surveyed)} configurations with the best promises"


def _verdict(answer: SearchResult, advice: Advice | None, risky: Riskier | None, depends: Sequence[str]) -> str:
    if advice is None:
        closest = answer.closest()
        text = "No configuration keeps the limits."
        if closest:
            text += f" The closest, {label(answer, closest[0].index)}, needs them {number(closest[1])} times as long."
        return f'<p class="verdict bad">{escape(text)}</p>'
    cheaper = riskier_sentence(risky, answer.question.confidence, purchase_of(answer.objective))
    more = "".join(f'<p class="sub">{escape(text)}</p>' for text in (cheaper, *depends) if text)
    return f'<p class="verdict good">{escape(sentence(answer, advice.entry))}</p>{more}'


def _winner(advice: Advice | None, verdict: Verdict | None) -> list[str]:
    if advice is None:
        return []
    rows = [("rate", f"{number(advice.rate)} {advice.band.unit} within the goal")]
    rows += advice.band.words()
    if advice.draws:
        rows.append(("capacity", advice.draws.words))
    held = advice.entry.held
    rows += [(margin.name, f"{describe(margin)}") for margin in held.margins] if held else []
    if advice.binding:
        rows.append(("breaks first", f"at the next higher load, {describe(advice.binding)}"))
    rows += [(f"limited by {found.name}", f"{found.evidence}; {found.advice}") for found in advice.findings]
    rows += [
        ("next cheaper", advice.cheaper),
        *([("router", advice.routing)] if advice.routing else []),
        *(verdict.facts if verdict else ()),
    ]
    handover = advice.run.manifest["deployment"].get("handover")
    lines = "".join(
        f'<div class="command"><pre id="serve-{place}">{escape(serve_line(pool, handover))}</pre>'
        f'<button type="button" data-copy="serve-{place}">Copy</button></div>'
        for place, pool in enumerate(advice.run.manifest["pools"])
    )
    return [
        "<h2>Deploy</h2>",
        f'<div class="panel"><h3>Start one replica of {advice.deployment.replicas}</h3>{lines}</div>',
        "<h2>Why</h2>",
        f'<div class="panel">{table((), rows, "list")}</div>',
    ]


def _ranking(answer: SearchResult) -> str:
    """The best, with what differs between them, and how much of each limit they use."""
    if not answer.ranking:
        return '<p class="caption">Nothing keeps the limits.</p>'
    held = answer.ranking[0].held
    names = [margin.name for margin in held.margins] if held else []
    target = isinstance(answer.objective, LeastForRate)
    columns = ["configuration", "replicas", "GPUs", "$/h", *([] if target else [answer.question.unit])]
    told, rows = answer.objective.unit in columns, []
    labels, common = labels_apart(answer, [entry.index for entry in answer.ranking])
    for entry, name in zip(answer.ranking, labels, strict=True):
        deployment, rate = answer.measured(entry)
        gpus, cost = answer.paid(entry)
        rows.append(
            (
                name,
                str(deployment.replicas),
                str(gpus) if isinstance(gpus, int) else number(gpus),
                dollars(cost),
                *([] if target else [number(rate)]),
                *([] if told else [number(answer.objective.value(entry.promise))]),
                *_uses(entry.held, names),
            )
        )
    own = [] if told else [answer.objective.unit]
    shared = f'<p class="caption">All of them: {escape(common)}.</p>' if common else ""
    return table([*columns, *own, *map(_head, names)], rows) + shared


def _head(name: str) -> str:
    """Of the share of a limit that is used: ``TTFT limit used``, ``TTFT p99 limit used`` of a percentile's."""
    metric, _, level = name.partition("_")
    metric = (
        "tightest" if name == TIGHTEST else f"{metric.upper()} {level}" if level else metric.partition(" ")[0].upper()
    )
    return f"{metric} limit used"


def _uses(held: Outcome | None, names: Sequence[str]) -> list[str]:
    uses = {margin.name: margin.stretch for margin in held.margins} if held else {}
    return [percent(uses[name]) if name in uses else "–" for name in names]


def _bottlenecks(answer: SearchResult) -> str:
    """What limits each candidate of the ranking, each simulated once more."""
    rows = []
    for entry in answer.ranking:
        deployment, rate = answer.measured(entry)
        for place, found in enumerate(bottlenecks(whole_run(answer.question, deployment, rate))):
            rows.append((label(answer, entry.index) if place == 0 else "", *_finding(found)))
    return table(["configuration", "limited by", "share", "evidence", "what to change"], rows, "words")


def _finding(found: Finding) -> tuple[str, str, str, str]:
    return found.name, percent(found.share), found.evidence, found.advice


def _what_if(what_ifs: WhatIf | None) -> list[str]:
    if what_ifs is None:
        return []
    names = list(what_ifs.answers)
    winners = [
        (name, label(answer, answer.best.index) if answer.best else "nothing keeps the limits")
        for name, answer in what_ifs.answers.items()
    ]
    rows = [(old, *(percent(what_ifs.regrets[old].get(new, 1.0)) for new in names)) for old in what_ifs.regrets]
    return [
        "<h2>If the load changes</h2>",
        '<div class="panel"><h3>The best under each load</h3>',
        table(["load", "configuration"], winners, "words"),
        '</div><div class="panel" style="margin-top:12px"><h3>What is lost by keeping the winner of a row under the '
        "load of a column</h3>",
        table(["winner of", *names], rows),
        "</div>",
    ]


def _left_out(answer: SearchResult) -> str:
    rows = [(f"{count:,}", f"cannot run: {reason}") for reason, count in answer.enumeration.pruned.most_common()]
    rows += [(f"{count:,}", ABOUT[status]) for status, count in sorted(answer.counts().items())]
    return table((), rows, "list")
