"""compare: schedulers or settings side by side, under the same requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from windtunnel.cli.arguments import OUTPUT, PASTING, SCREEN, Json, Pasting, Printed, Verbose, progress, show_json
from windtunnel.errors import InputError
from windtunnel.files import require_writable, write_whole
from windtunnel.scenario import DEPLOYMENT, GOALS, Scenario, parse_words, read_words, vary
from windtunnel.scenario.words import written

if TYPE_CHECKING:
    from rich.table import Table

    from windtunnel.metrics import Comparison, Measure, Variant

DONE, MISSED = 0, 1
SEEDS = 5
VARIANTS = Group("Variants", sort_key=-1)
WITH = Parameter(name="--with", consume_multiple=False, allow_leading_hyphen=True, group=VARIANTS)
HEAD = 30
"""Letters in a line of a variant's name."""
TELLING = 0.005
"""Relative change below which two values are the same to a reader."""
SHOWN = ("ttft.mean", "tpot.mean", "e2el.mean", "output_throughput", "goodput", "cost_per_million_output_tokens")
"""Measures of the table that everybody sees."""
JUDGED = ("ttft.mean", "tpot.mean", "e2el.mean", "output_throughput", "goodput")
"""Measures that the sentence of a variant names."""
MORE_IS_BETTER = ("request_throughput", "output_throughput", "goodput")
ACROSS = ("ttft.mean", "tpot.mean", "e2el.mean", "output_throughput", "goodput")
"""Measures that are set side by side for several loads."""
EXPLANATION = "Means; ≈: no difference across random draws ({confidence} % confidence). -v: all measures and ranges."


@dataclass(frozen=True, kw_only=True)
class Details:
    """What to say beyond what each variant does."""

    gap: Annotated[bool, Parameter(negative=())] = False
    """Say how far each is from the best that any scheduler could do on its engine."""
    bands: Annotated[bool, Parameter(negative="--no-bands")] = True
    """Say what the differences would be on 9 of 10 real servers: two more simulations of each variant."""


def compare(
    scenario: Annotated[Scenario, Parameter(name="*")] = Scenario(),  # noqa: B008 - frozen
    *,
    with_: Annotated[tuple[str, ...], WITH] = (),
    variants: Annotated[Path | None, Parameter(group=VARIANTS)] = None,
    on: Annotated[tuple[str, ...], Parameter(consume_multiple=False, allow_leading_hyphen=True, group=VARIANTS)] = (),
    scenario_file: Annotated[Path | None, Parameter(name="--scenario", group=DEPLOYMENT)] = None,  # noqa: ARG001 - read while parsing
    pasting: Annotated[Pasting, Parameter(name="*", group=DEPLOYMENT)] = PASTING,
    seeds: Annotated[int, Parameter(group=VARIANTS)] = SEEDS,
    exclude_warmup: Annotated[bool, Parameter(negative=(), group=GOALS)] = False,
    details: Annotated[Details, Parameter(name="*", group=OUTPUT)] = Details(),
    report: Annotated[Path | None, Parameter(alias="--html", group=OUTPUT)] = None,
    as_json: Json = False,
    screen: Printed = SCREEN,  # noqa: ARG001 - read while parsing
    verbose: Verbose = False,
) -> int:
    """Compare schedulers or settings under the same requests.

    The other flags describe the baseline, as for windtunnel run; each variant is the baseline with other words, or a
    further --from LINE. Differences are taken draw by draw, under the same requests. Exit codes: as windtunnel run.

    Parameters
    ----------
    with_
        A variant in these flags' words: "max_num_seqs=64" or "--max-num-seqs 64 --no-async-scheduling"; repeatable.
    variants
        YAML file of more variants: lines of `name: {max_num_seqs: 64}`.
    on
        Another load to compare all under, in these flags' words: "trace=azure-code time_scale=0.5"; repeatable.
    scenario_file
        YAML file with these flags' words as keys, underscores for dashes; flags go before it.
    seeds
        How many, from --seed on; intervals are 95 % confidence intervals over them.
    exclude_warmup
        Measure from a tenth of the arrivals' time to the last arrival: neither filling nor draining counts.
    report
        HTML page with tables, paired differences and time lines side by side, in one file that needs no network.
    as_json
        Print every number of every run, and the intervals, as one JSON document instead of the tables.
    verbose
        Show every measure of each variant, and its range on real servers.
    """
    from windtunnel.metrics import comparison_json
    from windtunnel.report.comparison import comparison_page
    from windtunnel.scenario.compare import compare as simulate_all

    if report is not None:
        require_writable("report", report, ours=True)
    asked = of_lines(pasting.lines) | named_variants(with_, variants)
    wanted: dict[str, Any] = {"seeds": seeds, "exclude_warmup": exclude_warmup, **vars(details)}
    with progress(f"simulating {1 + len(asked)} variants under {seeds} seeds"):
        found = [simulate_all(each, asked, **wanted) for each in loads(scenario, on)]
    documents = [comparison_json(each) for each in found]
    if as_json:
        show_json({"schema_version": 1, "loads": documents} if on else documents[0])
    else:
        show_comparisons(found, on, verbose)
    if report is not None:
        write_whole(report, [comparison_page(*found)])
    return DONE if all(each.meets_goals(scenario.goals.attainment) for each in found) else MISSED


def loads(scenario: Scenario, texts: tuple[str, ...]) -> list[Scenario]:
    """The scenario, and the same under the load of each text.

    Raises InputError for a word that is none of the load's.
    """
    found = [scenario]
    for text in texts:
        words = parse_words(text, "on")
        base = replace(scenario, load=scenario.load.giving_way(words))
        varied = vary(base, words, f"on {text!r}: ")
        if replace(varied, load=scenario.load) != scenario:
            raise InputError(f"on {text!r}: only words of the load, e.g. trace=azure-code; give others as --with")
        if varied in found:
            raise InputError(f"on {text!r}: this load is compared already: leave it out")
        found.append(varied)
    return found


def of_lines(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The variants that further launch lines are, named by what they change. Raises InputError for one that changes
    nothing."""
    from windtunnel.scenario.pasted import alternatives, changed_words

    found: dict[str, dict[str, Any]] = {}
    lines = alternatives(texts)
    for number, other in enumerate(lines[1:], 2):
        words = changed_words(lines[0], other)
        if not words:
            raise InputError(f"from: line {number} says what the first one says: leave it out")
        found[written({key: "default" if value is None else value for key, value in words.items()})] = words
    return found


def named_variants(texts: tuple[str, ...], file: Path | None) -> dict[str, dict[str, Any]]:
    """The variants of ``--with``, named by their words, and those of a file. Raises InputError for a name twice."""
    found: dict[str, dict[str, Any]] = {}
    pairs: list[tuple[str, dict[str, Any]]] = []
    for text in texts:
        words = parse_words(text, "with")
        if not words:
            raise InputError("with '': must be word=value or --word value, e.g. max_num_seqs=64")
        pairs.append((written(words), words))
    if file is not None:
        name = f"variants {str(file)!r}"
        for variant, given in read_words(file, name).items():
            if not isinstance(given, dict):
                raise InputError(f"{name}: {variant}: must be words and values, e.g. {{max_num_seqs: 64}}")
            pairs.append((variant, given))
    for variant, given in pairs:
        if variant in found:
            raise InputError(f"variant {variant!r}: given twice: leave one out")
        found[variant] = given
    return found


def show_comparisons(found: Sequence["Comparison"], on: tuple[str, ...], verbose: bool = False) -> None:
    """Every comparison, and where there are several loads what they say together."""
    for comparison in found:
        show_comparison(comparison, verbose)
    if on:
        show_loads(found, on)


def show_comparison(comparison: "Comparison", verbose: bool = False) -> None:
    """A sentence for each variant, and a row of values with the change from the baseline; with ``verbose`` a table of
    every measure for each variant, with the range on real servers."""
    from windtunnel.cli.terminal import remarks, show, table, wrapped
    from windtunnel.report.comparison import open_ends

    seeds = f"{len(comparison.seeds)} random draws" if len(comparison.seeds) > 1 else f"seed {comparison.seeds[0]}"
    parts: list[Table | str] = [wrapped(f"{comparison.title}; {seeds}")]
    parts += [wrapped(verdict(comparison, variant)) for variant in comparison.variants[1:]]
    measures = [measure for measure in comparison.measures if measure.name in SHOWN]
    heads = ["variant", *(f"{measure.title}, {measure.unit}" for measure in measures)]
    parts.append(
        table(
            [_broken(head) for head in heads],
            (_variant_row(comparison, each, measures) for each in comparison.variants),
        )
    )
    if len(comparison.seeds) > 1:
        parts.append(EXPLANATION.format(confidence=f"{100 * comparison.confidence:g}"))
    told = remarks(comparison.warnings)
    if verbose:
        parts += [_details(comparison, variant) for variant in comparison.variants[1:]]
        parts += [wrapped(text) for text in open_ends(comparison)]
    show(*parts, *(remark for remark in told if verbose or remark.style != "dim"))


def verdict(comparison: "Comparison", variant: "Variant") -> str:
    """What a variant does better and worse than the baseline, beyond the draws, and on a real server."""
    from windtunnel.report.comparison import changed

    better, worse, ranges = list[str](), list[str](), False
    for measure in comparison.measures:
        if measure.name not in JUDGED or not variant.differences[measure.name].differs:
            continue
        mean = comparison.relative(variant, measure.name).mean
        if not isfinite(mean) or abs(mean) < TELLING:
            continue
        good = (mean < 0) == (measure.name not in MORE_IS_BETTER)
        text = f"{measure.title.replace(', mean', '')} {changed(mean)}"
        if (pair := comparison.span(variant, measure.name)) is not None and pair[0] != pair[1]:
            low, high = (changed(one - 1) for one in pair)
            text, ranges = f"{text} ({low} to {high})", True
        (better if good else worse).append(text)
    if not better and not worse:
        return f"{variant.name}: no difference beyond random draws."
    said = [f"{name}: {', '.join(texts)}" for name, texts in (("better", better), ("worse", worse)) if texts]
    return f"{variant.name}: {'; '.join(said)}.{' In parentheses: on a real server.' if ranges else ''}"


def _broken(head: str) -> str:
    """A head on two lines: the name, then the unit."""
    name, comma, unit = head.rpartition(", ")
    return f"{name}\n{unit}" if comma else head


def _variant_row(comparison: "Comparison", variant: "Variant", measures: Sequence["Measure"]) -> list[str]:
    from windtunnel.cli.terminal import number

    cells = [fill(variant.name, HEAD, break_long_words=False)]
    for measure in measures:
        value = number(measure.scale * variant.intervals[measure.name].mean)
        if variant is comparison.baseline:
            cells.append(value)
            continue
        cells.append(f"{value} {_share(comparison, variant, measure):>6}")
    return cells


def _share(comparison: "Comparison", variant: "Variant", measure: "Measure") -> str:
    """By how much a variant's mean differs from the baseline's; ``≈`` where random draws may be all of it."""
    from windtunnel.report.comparison import changed

    share = comparison.relative(variant, measure.name).mean
    return changed(share) if variant.differences[measure.name].differs and isfinite(share) else "≈"


def _details(comparison: "Comparison", variant: "Variant") -> "Table":
    """Every measure of one variant next to the baseline's."""
    from windtunnel.cli.terminal import table
    from windtunnel.report.comparison import SERVERS

    heads = ["", comparison.baseline.name, fill(variant.name, HEAD, break_long_words=False), "difference"]
    heads += [SERVERS] if variant.ends else []
    return table(heads, (_row(comparison, [variant], measure) for measure in comparison.measures))


def show_loads(comparisons: "Sequence[Comparison]", others: Sequence[str]) -> None:
    """Each variant's differences under the scenario's load and the others, side by side."""
    from windtunnel.cli.terminal import show, table

    heads = ["change from the baseline", "first load", *(fill(text, HEAD, break_long_words=False) for text in others)]
    shown = [measure for measure in comparisons[0].measures if measure.name in ACROSS]
    rows = [
        [
            f"{fill(variant.name, HEAD, break_long_words=False)}: {measure.title}",
            *(_share(each, each.variants[i], measure) for each in comparisons),
        ]
        for i, variant in enumerate(comparisons[0].variants)
        if i
        for measure in shown
    ]
    show(table(heads, rows))


def _row(comparison: "Comparison", variants: Sequence["Variant"], measure: "Measure") -> list[str]:
    from windtunnel.cli.terminal import number
    from windtunnel.report.comparison import difference, on_servers

    def mean(variant: "Variant") -> str:
        return number(measure.scale * variant.intervals[measure.name].mean)

    cells = [f"{measure.title}, {measure.unit}" if measure.unit else measure.title, mean(comparison.baseline)]
    for variant in variants:
        cells += [mean(variant), difference(comparison, variant, measure)]
        cells += [on_servers(comparison, variant, measure)] if variant.ends else []
    return cells
