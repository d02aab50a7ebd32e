"""How many public launch lines windtunnel runs: ``python -m benchmarks.launch_lines CORPUS.jsonl [--missing]``.

A line of the corpus is facts of a published command: ``engine``, ``model``, ``device``, ``role``, ``flags`` (JSON and
YAML dotted) and ``env``. It is written as a command again and read by the reader of ``--from``. Counted are:

flags    every flag is simulated, changes nothing, or only chooses a kernel
strict   and no kernel is chosen either
whole    with its model and device as well, which form a pool that the engine would start; a line without a device is
         tried on an H100, a B200 and a GB200
"""

import argparse
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.deployment import Engine, Pool
from windtunnel.errors import InputError
from windtunnel.files import read_text
from windtunnel.hardware import device
from windtunnel.launch import Reading, read_line, read_source
from windtunnel.model import load_model

STARTS = {
    "vllm": "vllm serve {model}",
    "sglang": "python3 -m sglang.launch_server --model-path {model}",
    "trtllm": "trtllm-serve {model}",
    "atom": "python3 -m atom.entrypoints.openai_server --model {model}",
}
DEVICES = ("h100", "b200", "gb200")


class Outcome(NamedTuple):
    """What became of a line."""

    flags: bool
    strict: bool
    whole: bool
    missing: tuple[str, ...]
    """What stands in its way."""


def command(line: Mapping[str, Any]) -> str:
    """A line of the corpus as a command."""
    env = "".join(f"{name}={shlex.quote(str(value))} " for name, value in line["env"].items())
    words = [STARTS[line["engine"]].format(model=shlex.quote(str(line["model"] or "")))]
    for name, value in line["flags"].items():
        words.append(f"--{name}" if len(name) > 1 else f"-{name}")
        if isinstance(value, list) and all(isinstance(each, int | str) for each in value):
            words += [shlex.quote(json.dumps(value) if name.count(".") else " ".join(map(str, value)))]
        elif value is not True:
            words.append(shlex.quote(value if isinstance(value, str) else json.dumps(value)))
    return env + " ".join(words)


def outcome(line: Mapping[str, Any]) -> Outcome:
    """What the reader makes of a line."""
    try:
        reading = read_line(read_source(command(line))[0])
    except InputError as error:
        return Outcome(False, False, False, (str(error),))
    asked = [word for word in reading.not_simulated if word.value is not None and word.flag not in line["env"]]
    lacking = tuple(f"{word.flag}: {word.note}" for word in asked if not word.kernel)
    problem = _problem(reading, line["device"])
    return Outcome(not lacking, not asked, not lacking and not problem, (*lacking, *([problem] if problem else [])))


def _problem(reading: Reading, name: str | None) -> str:
    """Why the line forms no pool; empty where it does."""
    found = ""
    for each in [name] if name else DEVICES:
        try:
            Pool(load_model(reading.model, reading.overrides), device(each), Engine(**reading.settings))
        except InputError as error:
            found = str(error)
        else:
            return ""
    return found


def measured(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Outcome]]:
    """Every line that serves a language model, and what became of it."""
    for line in lines:
        if line["scope"] == "llm":
            yield line, outcome(line)


def main() -> None:
    """Print the shares, and with ``--missing`` every other line with what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--missing", action="store_true")
    given = parser.parse_args()
    try:
        found = list(measured(map(json.loads, read_text(given.corpus).splitlines())))
    except (InputError, ValueError) as error:
        parser.error(f"{given.corpus}: must be a file with a line of JSON for each launch line ({error})")
    for engine in ("all", "vllm", "sglang", "trtllm", "atom"):
        own = [each for line, each in found if engine in ("all", line["engine"])]
        if own:
            shares = (sum(getattr(each, kind) for each in own) / len(own) for kind in ("flags", "strict", "whole"))
            print(f"{engine:7} {len(own):5} lines: flags {{:6.1%}}, strict {{:6.1%}}, whole {{:6.1%}}".format(*shares))
    reasons = Counter(reason.partition(":")[0] for _, each in found for reason in each.missing)
    print("most often missing: " + ", ".join(f"{name} {count}" for name, count in reasons.most_common(12)))
    if given.missing:
        for line, each in found:
            if not each.whole:
                print(f"{line['id']} {line['source']} {line['file']}: {'; '.join(each.missing)}")


if __name__ == "__main__":
    main()
