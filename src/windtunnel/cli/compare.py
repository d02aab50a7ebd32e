"""compare: schedulers or settings beside each other, under the same requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from windtunnel.cli.arguments import OUTPUT, PASTING, Json, Pasting, progress, show_json
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
PER_TABLE, HEAD = 2, 30
"""Variants side by side in the terminal, and letters in a line of their names."""
ACROSS = ("ttft.mean", "tpot.mean", "e2el.mean", "output_throughput", "goodput")
"""Measures that are set side by side for several loads."""
EXPLANATION = (
    "Means over the seeds, and {confidence} % confidence intervals of the differences; those in brackets may be none."
)


@dataclass(frozen=True, kw_only=True)
class Details:
    """What to say beyond what each variant does."""

    gap: Annotated[bool, Parameter(negative=())] = False
    """Say how far each is from what no scheduler could beat on its engine."""
    bands: Annotated[bool, Parameter(negative="--no-bands")] = True
    """Say between which values the differences lie on 90 % of measured servers: two more simulations of each
    variant."""


def compare(
    scenario: Annotated[Scenario, Parameter(name="*")] = Scenario(),  # noqa: B008 - frozen
    *,
    with_: Annotated[
        tuple[str, ...], Parameter(name="--with", consume_multiple=False, allow_leading_hyphen=True, group=VARIANTS)
    ] = (),
    variants: Annotated[Path | None, Parameter(group=VARIANTS)] = None,
    on: Annotated[tuple[str, ...], Parameter(consume_multiple=False, allow_leading_hyphen=True, group=VARIANTS)] = (),
    scenario_file: Annotated[Path | None, Parameter(name="--scenario", group=DEPLOYMENT)] = None,  # noqa: ARG001 - read while parsing
    pasting: Annotated[Pasting, Parameter(name="*", group=DEPLOYMENT)] = PASTING,  # noqa: ARG001 - read while parsing
    seeds: Annotated[int, Parameter(group=VARIANTS)] = SEEDS,
    exclude_warmup: Annotated[bool, Parameter(negative=(), group=GOALS)] = False,
    details: Annotated[Details, Parameter(name="*", group=OUTPUT)] = Details(),
    report: Annotated[Path | None, Parameter(alias="--html", group=OUTPUT)] = None,
    as_json: Json = False,
) -> int:
    """Compare schedulers or settings under the same requests.

    The other flags describe the baseline, as for windtunnel run; each variant is the baseline with other values for
    some of its words. All are simulated under the same seeds, and differences are taken seed by seed, so that what the
    draw of the requests does to all of them cancels out. Exit codes: as windtunnel run; 1 if any variant misses a goal.

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
    """
    from windtunnel.metrics import comparison_json
    from windtunnel.report.comparison import comparison_page
    from windtunnel.scenario.compare import compare as simulate_all

    if report is not None:
        require_writable("report", report)
    asked = named_variants(with_, variants)
    wanted: dict[str, Any] = {"seeds": seeds, "exclude_warmup": exclude_warmup, **vars(details)}
    with progress(f"simulating {1 + len(asked)} variants under {seeds} seeds"):
        found = [simulate_all(each, asked, **wanted) for each in loads(scenario, on)]
    documents = [comparison_json(each) for each in found]
    if as_json:
        show_json({"schema_version": 1, "loads": documents} if on else documents[0])
    else:
        show_comparisons(found, on)
    if report is not None:
        write_whole(report, [comparison_page(*found)])
    return DONE if all(each.meets_goals(scenario.goals.attainment) for each in found) else MISSED


def loads(scenario: Scenario, texts: tuple[str, ...]) -> list[Scenario]:
    """The scenario, and the same under the load of each text.

    Raises InputError for a word that is none of the load's.
    """
    found = [scenario]
    for text in texts:
        varied = vary(scenario, parse_words(text, "on"), f"on {text!r}: ")
        if replace(varied, load=scenario.load) != scenario:
            raise InputError(f"on {text!r}: only words of the load, e.g. trace=azure-code; give others as --with")
        if varied in found:
            raise InputError(f"on {text!r}: this load is compared already: leave it out")
        found.append(varied)
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


def show_comparisons(found: Sequence["Comparison"], on: tuple[str, ...]) -> None:
    """Every comparison, and where there are several loads what they say together."""
    for comparison in found:
        show_comparison(comparison)
    if on:
        show_loads(found, on)


def show_comparison(comparison: "Comparison") -> None:
    """What the baseline does, and what each variant does and does differently, two variants to a table."""
    from windtunnel.cli.terminal import remarks, show, table
    from windtunnel.report.comparison import SERVERS, open_ends

    seeds = f"{len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else f"seed {comparison.seeds[0]}"
    parts: list[Table | str] = [f"{comparison.title}; {seeds}"]
    for start in range(1, len(comparison.variants), PER_TABLE):
        shown = comparison.variants[start : start + PER_TABLE]
        heads = ["", comparison.baseline.name]
        for variant in shown:
            heads += [fill(variant.name, HEAD), "difference", *([SERVERS] if variant.ends else [])]
        parts.append(table(heads, (_row(comparison, shown, measure) for measure in comparison.measures)))
    parts.append(EXPLANATION.format(confidence=f"{100 * comparison.confidence:g}"))
    parts += open_ends(comparison)
    show(*parts, *remarks(comparison.warnings))


def show_loads(comparisons: "Sequence[Comparison]", others: Sequence[str]) -> None:
    """Each variant's differences under the scenario's load and the others, beside each other."""
    from windtunnel.cli.terminal import show, table
    from windtunnel.report.comparison import difference

    heads = ["difference from the baseline", "as above", *(fill(text, HEAD) for text in others)]
    shown = [measure for measure in comparisons[0].measures if measure.name in ACROSS]
    rows = [
        [
            f"{fill(variant.name, HEAD)}: {measure.title}",
            *(difference(each, each.variants[i], measure) for each in comparisons),
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
