"""Studies: what earlier commands stored, as points that the page can lay out: stores of plan, sweeps and runs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.errors import InputError, unknown
from windtunnel.files import parse_json, read_text
from windtunnel.metrics import clean
from windtunnel.workload.builtin import builtin_names

if TYPE_CHECKING:
    from windtunnel.plan.store import Stored

STORE = b"SQLite format 3\0"
MOST_FILES, MOST_CANDIDATES = 200, 2000
LATENCIES = ("ttft", "tpot", "e2el")


def files_of(places: Sequence[Path]) -> list[Path]:
    """The stores, JSON documents and runs at these places, and in them where they are folders.

    Raises InputError for a place that is not there.
    """
    found: list[Path] = []
    for place in places:
        if not place.exists():
            raise InputError(f"studies {str(place)!r}: there is no such file or folder")
        if place.is_file() and not _is_known(place):
            kinds = "a store of plan --store, a document of sweep --json or plan --json, or a folder of run --output"
            raise InputError(f"studies {str(place)!r}: is no study: give {kinds}")
        inside = sorted(place.iterdir()) if place.is_dir() and not (place / "run.json").is_file() else [place]
        found += [path for path in inside if path in places or _is_known(path)]
    return found[:MOST_FILES]


def _is_known(path: Path) -> bool:
    if path.is_dir():
        return (path / "run.json").is_file()
    return path.suffix == ".json" or (path.is_file() and _begins(path) == STORE)


def _begins(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(STORE))


def listed(places: Sequence[Path]) -> list[dict[str, str]]:
    """Every study with a name and its kind: ``plan``, ``sweep`` or ``run``; what cannot be read says so."""
    found: list[dict[str, str]] = []
    for path in files_of(places):
        try:
            found += [{"study": name, "kind": kind} for name, kind in _names(path)]
        except InputError as error:
            found.append({"study": path.name, "kind": "unreadable", "error": str(error)})
    return found


def _names(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        yield path.name, "run"
    elif _begins(path) == STORE:
        from windtunnel.plan.store import Store

        with Store(path) as store:
            for study in store.studies():
                yield f"{path.name}: {study.name}", "plan"
    elif kind := _kind(path):
        yield path.name, kind


def _document(path: Path) -> dict[str, Any]:
    document = parse_json(read_text(path))
    if not isinstance(document, dict):
        raise InputError(f"{path.name}: is no document of windtunnel sweep --json or plan --json")
    return document


def _kind(path: Path) -> str:
    document = _document(path)
    return "sweep" if "knee" in document and "points" in document else "plan" if "ranking" in document else ""


def points(places: Sequence[Path], study: str) -> dict[str, Any]:
    """The points of a study: ``label``, ``words`` that make the page simulate it (null where they are not known),
    ``met``, and ``values`` by name; ``knee`` where the study has one.

    Raises InputError with the nearest name for a study that is not there, and for one that cannot be read.
    """
    for path in files_of(places):
        try:
            names = dict(_names(path))
        except InputError:
            continue
        if study in names:
            try:
                found: dict[str, Any] = clean({"study": study, "kind": names[study]} | _read(path, study, names[study]))
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"study {study!r}: cannot be read ({error})") from error
            return found
    raise unknown("study", study, [each["study"] for each in listed(places)])


def _read(path: Path, study: str, kind: str) -> dict[str, Any]:
    if kind == "run":
        return {"points": [_run(path)]}
    if kind == "sweep":
        document = _document(path)
        rows = [_summary(row, f"{row['request_rate']:g} requests/s", row["keeps_up"]) for row in document["points"]]
        return {"knee": document["knee"], "points": rows}
    if path.suffix == ".json":
        return {"points": _ranking(_document(path), {})}
    from windtunnel.plan.store import Store

    with Store(path) as store:
        stored = store.study(study.removeprefix(f"{path.name}: "))
        rows = _trials(stored, store.trials(stored.question))
    return {"points": rows or _ranking(stored.answer or {}, stored.spec)}


def _run(path: Path) -> dict[str, Any]:
    from windtunnel.metrics import summary, summary_json
    from windtunnel.simulate.run import Run

    run = Run.load(path)
    document = summary_json(summary(run))
    return _summary(document | {"request_rate": run.manifest["workload"]["request_rate"]}, path.name, True)


def _summary(document: Mapping[str, Any], label: str, met: bool) -> dict[str, Any]:
    """A point of a document of ``run --json``."""
    values = {name: document.get(name) for name in ("request_throughput", "output_throughput", "cost_usd")}
    latencies = {name: document[name] for name in LATENCIES}
    rates = {"request_rate": document.get("request_rate"), "attainment": document.get("attainment")}
    return {"label": label, "words": None, "met": met, "values": rates | values | _flat(latencies)}


def _flat(latencies: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{name}_{statistic}": value
        for name in LATENCIES
        for statistic, value in latencies.get(name, {}).items()
        if statistic in ("mean", "p50", "p90", "p99")
    }


def _ranking(answer: Mapping[str, Any], spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The best of a search."""
    found = []
    for row in answer.get("ranking", ()):
        settings = row["settings"] | {"replicas": row["replicas"]}
        values = {name: row[name] for name in ("request_rate", "gpus", "price_per_hour", "attainment")}
        found.append(_point(settings, spec, row["request_rate"], True, values | _flat(row["latencies"])))
    return found


def _trials(stored: "Stored", trials: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every simulation of a search that was not stopped early, with its settings found again from the space."""
    space = stored.spec.get("space", {})
    if "axes" not in space or not trials:
        return []
    known = _settings(space, str(stored.spec["question"]["perf"]), {row["pools"] for row in trials})
    found = []
    for row in trials:
        outcome = row["outcome"]
        if row["pools"] not in known or outcome["stopped"]:
            continue
        settings, gpus, price = known[row["pools"]]
        replicas = row["replicas"]
        values = {
            "request_rate": row["rate"],
            "gpus": gpus * replicas,
            "price_per_hour": price * replicas or None,
            "attainment": outcome["attainment"],
            "output_throughput": outcome["output_throughput"],
            **_flat(outcome["latencies"]),
        }
        met = bool(row["met"])
        found.append(_point(settings | {"replicas": replicas}, stored.spec, row["rate"], met, values))
    return found


def _settings(space: Mapping[str, Any], perf: str, wanted: set[str]) -> dict[str, tuple[dict[str, Any], int, float]]:
    """Key of the pools in the store → their settings, and the GPUs and the price per hour of one replica."""
    from windtunnel.plan.space import Space
    from windtunnel.plan.trial import deployment_key

    axes = {axis: tuple(values) for axis, values in space["axes"].items() if axis not in ("replicas", "router")}
    own = Path(space["devices_file"]) if space["devices_file"] else None
    searched = Space(space["model"], axes, devices_file=own, prices=space.get("prices"))
    found = {}
    for candidate in searched.enumerate().candidates[:MOST_CANDIDATES]:
        key = deployment_key(candidate.deployment, perf)
        if key in wanted:
            settings = {name: value for name, value in candidate.settings.items() if value is not None}
            found[key] = (settings, candidate.deployment.gpus, candidate.deployment.price_per_hour)
    return found


def _point(
    settings: Mapping[str, Any], spec: Mapping[str, Any], rate: float, met: bool, values: Mapping[str, Any]
) -> dict[str, Any]:
    from windtunnel.plan.space import in_words

    words = _words(settings, spec, rate) if spec else None
    return {"label": in_words(dict(settings)), "words": words, "met": met, "values": dict(values)}


def _words(settings: Mapping[str, Any], spec: Mapping[str, Any], rate: float) -> dict[str, Any] | None:
    """The words that make the page simulate this point; None where its load is not one of ours."""
    space, question = spec.get("space", {}), spec.get("question", {})
    load = question.get("workload", {})
    if "model" not in space or load.get("name") not in builtin_names():
        return None
    goals = [f"{name}:{1000 * seconds:g}" for name, seconds in (question.get("goodput") or {}).items()]
    count = {"num_prompts": load["requests"]} if "requests" in load else {}
    asked = {"trace": load["name"], "request_rate": rate, **count}
    return {"model": space["model"], **settings, **asked} | ({"goodput": " ".join(goals)} if goals else {})
