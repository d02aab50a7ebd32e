"""study: the searches of a store, listed, shown, compared and exported."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, Json, show_json
from windtunnel.errors import InputError
from windtunnel.files import require_writable, whole_file

if TYPE_CHECKING:
    from windtunnel.plan.store import Store, Stored


def list_studies(store: Path, /, *, as_json: Json = False) -> None:
    """List the studies of a store.

    Parameters
    ----------
    store
        The file of `windtunnel plan --store`.
    as_json
        Print one JSON document instead of the table.
    """
    with opened(store) as file:
        rows = [_row(study) for study in file.studies()]
    _show(rows, as_json, f"{store}: no study")


def show(store: Path, study: str, /, *, as_json: Json = False) -> None:
    """Show what a study found.

    Parameters
    ----------
    store
        The file of `windtunnel plan --store`.
    study
        A name of `windtunnel study list`.
    as_json
        Print one JSON document instead of the table.
    """
    with opened(store) as file:
        found = file.study(study)
    if as_json:
        show_json({"name": found.name, "spec": found.spec, "answer": found.answer})
    else:
        _show(_ranking(found), False, f"{study}: nothing keeps the limits, or the search is not finished")


def compare(store: Path, first: str, second: str, /, *, as_json: Json = False) -> None:
    """Show the best of two studies side by side, and what differs in what they asked.

    Parameters
    ----------
    store
        The file of `windtunnel plan --store`.
    first
        A name of `windtunnel study list`.
    second
        Another one.
    as_json
        Print one JSON document instead of the table.
    """
    with opened(store) as file:
        studies = [file.study(first), file.study(second)]
    words: list[dict[str, str]] = []
    for study in studies:
        best = next(iter(_ranking(study)), {})
        words.append(
            {"objective": study.objective} | _flat(study.spec) | {f"best {key}": str(v) for key, v in best.items()}
        )
    names = list(dict.fromkeys([*words[0], *words[1]]))
    rows = [
        {"what": name, first: words[0].get(name, "–"), second: words[1].get(name, "–")}
        for name in names
        if words[0].get(name) != words[1].get(name)
    ]
    _show(rows, as_json, "they ask the same and found the same")


def export(store: Path, target: Annotated[Path, Parameter(group=OUTPUT)], /, *, study: str | None = None) -> None:
    """Write every simulation as a row of a Parquet file.

    Parameters
    ----------
    store
        The file of `windtunnel plan --store`.
    target
        The file to write: NAME.parquet.
    study
        Only those of the question that this study asks.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if target.suffix != ".parquet":
        raise InputError(f"target {str(target)!r}: must end in .parquet")
    require_writable("target", target)
    with opened(store) as file:
        rows = file.trials(file.study(study).question if study else None)
    if not rows:
        raise InputError(f"store {str(store)!r}: has no simulations to export")
    flat = [{key: value for key, value in row.items() if key != "outcome"} | _columns(row["outcome"]) for row in rows]
    with whole_file(target) as file_to_write:
        pq.write_table(pa.Table.from_pylist(flat), file_to_write, compression="zstd")


def opened(path: Path) -> "Store":
    """A store that is there. Raises InputError for one that is not."""
    from windtunnel.plan.store import Store

    if not path.is_file():
        raise InputError(f"store {str(path)!r}: there is no such file")
    if path.stat().st_size == 0:
        raise InputError(f"store {str(path)!r}: is empty: choose another file")
    return Store(path)


def _row(study: "Stored") -> dict[str, Any]:
    from windtunnel.plan.space import in_words

    answer = study.answer or {}
    best = (answer.get("ranking") or [{}])[0]
    return {
        "study": study.name,
        "begun": datetime.fromtimestamp(study.created, UTC).strftime("%Y-%m-%d %H:%M"),
        "objective": study.objective,
        "configurations": answer.get("points"),
        "best": in_words(best.get("settings", {})) if study.answer else "not finished",
        "value": best.get("value"),
    }


def _ranking(study: "Stored") -> list[dict[str, Any]]:
    from windtunnel.plan.space import in_words

    answer = study.answer or {}
    return [
        {
            "settings": in_words(row["settings"]),
            "replicas": row["replicas"],
            "GPUs": row["gpus"],
            "$/h": row["price_per_hour"],
            "requests/s": row.get("request_rate"),
            **({"lanes": row["lanes"]} if "lanes" in row else {}),
            answer["unit"]: row["value"],
        }
        for row in answer.get("ranking", ())
    ]


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix.rstrip("."): str(value)}
    found: dict[str, str] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{prefix}{key}.")
    return found


def _columns(outcome: dict[str, Any]) -> dict[str, Any]:
    """The numbers of an outcome, one column each; latencies as ttft_p99."""
    plain = {key: value for key, value in outcome.items() if not isinstance(value, dict | list) and key != "rate"}
    for name, statistics in outcome["latencies"].items():
        plain |= {f"{name}_{statistic}": value for statistic, value in statistics.items()}
    return plain


def _show(rows: list[dict[str, Any]], as_json: bool, nothing: str) -> None:
    from windtunnel.cli.terminal import show, show_rows

    if as_json:
        show_json(rows)
    elif rows:
        show_rows(rows)
    else:
        show(nothing)
