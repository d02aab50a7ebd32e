"""compare: schedulers or settings beside each other, under the same requests."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from windtunnel.cli.arguments import OUTPUT, Json, long, progress, show_json
from windtunnel.errors import InputError
from windtunnel.scenario import DEPLOYMENT, GOALS, Scenario, read_words
from windtunnel.scenario.output_files import check_file

if TYPE_CHECKING:
    from rich.table import Table

    from windtunnel.metrics import Comparison, Measure, Variant

DONE, MISSED = 0, 1
SEEDS = 5
VARIANTS = Group("Variants", sort_key=-1)
PER_TABLE, HEAD = 2, 30
"""Variants side by side in the terminal, and letters in a line of their names."""
EXPLANATION = (
    "Means over the seeds, and {confidence} % confidence intervals of the differences; those in brackets may be none."
)


def compare(
    scenario: Annotated[Scenario, Parameter(name="*")] = Scenario(),  # noqa: B008 - frozen
    *,
    with_: Annotated[
        tuple[str, ...], Parameter(name="--with", consume_multiple=False, allow_leading_hyphen=True, group=VARIANTS)
    ] = (),
    variants: Annotated[Path | None, Parameter(group=VARIANTS)] = None,
    scenario_file: Annotated[Path | None, Parameter(name="--scenario", group=DEPLOYMENT)] = None,  # noqa: ARG001 - read while parsing
    seeds: Annotated[int, Parameter(group=VARIANTS)] = SEEDS,
    exclude_warmup: Annotated[bool, Parameter(negative=(), group=GOALS)] = False,
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
        A variant, in these flags' words: "max_num_seqs=64" or "--max-num-seqs 64 --no-async-scheduling"; repeat it for
        more.
    variants
        YAML file of more variants: lines of `name: {max_num_seqs: 64}`.
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
    from windtunnel.scenario.compare import compare as simulate_all

    if report is not None:
        check_file("report", report)
    asked = named_variants(with_, variants)
    with progress(f"simulating {1 + len(asked)} variants under {seeds} seeds"):
        found = simulate_all(scenario, asked, seeds=seeds, exclude_warmup=exclude_warmup)
    if report is not None:
        from windtunnel.report import write_comparison

        write_comparison(report, found)
    if as_json:
        show_json(comparison_json(found))
    else:
        show_comparison(found)
    return DONE if found.meets_goals(scenario.goals.attainment) else MISSED


def named_variants(texts: tuple[str, ...], file: Path | None) -> dict[str, dict[str, Any]]:
    """The variants of ``--with``, named by their words, and those of a file. Raises InputError for a name twice."""
    found: dict[str, dict[str, Any]] = {}
    pairs = [(written(words), words) for words in map(parse_words, texts)]
    if file is not None:
        name = f"variants {str(file)!r}"
        for variant, words in read_words(file, name).items():
            if not isinstance(words, dict):
                raise InputError(f"{name}: {variant}: must be words and values, e.g. {{max_num_seqs: 64}}")
            pairs.append((variant, words))
    for variant, words in pairs:
        if variant in found:
            raise InputError(f"variant {variant!r}: given twice: leave one out")
        found[variant] = words
    return found


def written(words: dict[str, str]) -> str:
    """Words as the name of a variant."""
    return " ".join(f"{word}={shlex.quote(value) if ' ' in value else value}" for word, value in words.items())


def parse_words(text: str) -> dict[str, str]:
    """The words of a variant: ``word=value``, or flags as `windtunnel run` takes them. Raises InputError for others."""
    try:
        tokens = [long(token) for token in shlex.split(text)]
    except ValueError as error:
        raise InputError(f"with {text!r}: {str(error).lower()}") from error
    found: dict[str, list[str]] = {}
    flag = False
    for token in tokens:
        word, equals, value = token.partition("=")
        if word.startswith("--") or (equals and not flag):
            flag = not equals
            key = word.removeprefix("--").replace("-", "_")
            if key in found:
                raise InputError(f"with {text!r}: {key}: given twice: leave one out")
            found[key] = [value] if equals else []
        elif found:
            found[key].append(token)
        else:
            raise InputError(f"with {text!r}: {token!r}: must be word=value or --word value")
    if not found:
        raise InputError("with '': must be word=value or --word value, e.g. max_num_seqs=64")
    switches = {key.removeprefix("no_"): str(not key.startswith("no_")).lower() for key in found if not found[key]}
    return {key: " ".join(values) for key, values in found.items() if values} | switches


def show_comparison(comparison: "Comparison") -> None:
    """What the baseline does, and what each variant does and does differently, two variants to a table."""
    from windtunnel.cli.terminal import remarks, show, table

    seeds = f"{len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else f"seed {comparison.seeds[0]}"
    parts: list[Table | str] = [f"{comparison.title}; {seeds}"]
    for start in range(1, len(comparison.variants), PER_TABLE):
        shown = comparison.variants[start : start + PER_TABLE]
        heads = ["", comparison.baseline.name]
        for variant in shown:
            heads += [fill(variant.name, HEAD), "difference"]
        parts.append(table(heads, (_row(comparison, shown, measure) for measure in comparison.measures)))
    parts.append(EXPLANATION.format(confidence=f"{100 * comparison.confidence:g}"))
    show(*parts, *remarks(comparison.warnings))


def _row(comparison: "Comparison", variants: Sequence["Variant"], measure: "Measure") -> list[str]:
    from windtunnel.cli.terminal import number
    from windtunnel.report.comparison import difference

    def mean(variant: "Variant") -> str:
        return number(measure.scale * variant.intervals[measure.name].mean)

    cells = [f"{measure.title}, {measure.unit}" if measure.unit else measure.title, mean(comparison.baseline)]
    for variant in variants:
        cells += [mean(variant), difference(comparison, variant, measure)]
    return cells
