"""The short help of commands with many flags: the ones people use, with examples. --help-all prints every flag."""

from typing import Any

from cyclopts import App

ALL = "--help-all"
LOAD = ("trace", "request-rate", "num-prompts", "random-input-len", "random-output-len")
SERVER = ("model", "device", "tensor-parallel-size", "engine", "max-num-seqs", "max-num-batched-tokens")
SHORT = {
    "run": (*SERVER, "replicas", "from", *LOAD, "goodput", "report", "json", "verbose"),
    "compare": ("with", "on", "seeds", *SERVER[:2], *LOAD, "goodput", "report", "json"),
    "sweep": ("rates", *SERVER, *LOAD[:1], *LOAD[2:], "goodput", "report", "json"),
    "plan": (
        "model", "devices", "goodput", "target-request-rate", "max-gpus", "confidence", "time-limit", "pools", "from",
        *LOAD[:3], "report", "launch", "json",
    ),
    "optimum": ("model", "device", "objective", "seconds", *LOAD, "json"),
    "explain": (*SERVER[:4], "batch", "trace", *LOAD[3:], "from", "json"),
    "serve": (*SERVER, "replicas", "from", "host", "port", "speed", "api-key"),
    "ui": ("model", "device", "tensor-parallel-size", *LOAD[:2], "goodput", "host", "port", "open"),
    "watch": ("window", "every", *SERVER[:3], *LOAD[:2], "goodput", "json"),
    "validate": ("model", "device", "engine", "calibration", "steps", "csv", "json"),
    "proxy": ("host", "port", "tokenizer", "model", "device", "output"),
}  # fmt: skip
"""Flags of the short help, in their order, by command."""
EXAMPLES = {
    "run": (
        "windtunnel run Qwen/Qwen3-8B --device l40s --request-rate 4 --num-prompts 500 --goodput ttft:500 tpot:50",
        'windtunnel run --from "vllm serve Qwen/Qwen3-8B --max-num-seqs 128" --device h100 --num-prompts 500',
    ),
    "compare": ("windtunnel compare Qwen/Qwen3-8B --num-prompts 300 --with max_num_batched_tokens=512",),
    "sweep": (
        "windtunnel sweep Qwen/Qwen3-8B --isl 1000 --osl 100 --num-prompts 300 --rates 2 8 32 --goodput ttft:500",
    ),
    "plan": (
        "windtunnel plan Qwen/Qwen3-8B --devices l40s --tensor-parallel-size 1 --max-num-seqs 128 --num-prompts 300 "
        "--target-request-rate 10 --goodput ttft:500 tpot:50",
    ),
    "optimum": ("windtunnel optimum --model Qwen/Qwen3-8B --isl 200 --osl 20 --num-prompts 8 --seconds 5",),
    "explain": (
        "windtunnel explain Qwen/Qwen3-8B --device l40s --batch decode=32@1024,prefill=1x1024",
        "windtunnel explain Qwen/Qwen3-8B --isl 1000 --osl 100 --random-turns 4 --num-prompts 100",
    ),
    "serve": ("windtunnel serve Qwen/Qwen3-8B --device l40s --port 8000",),
}
"""Commands to copy; tests run them."""


def wants_short(words: list[str]) -> bool:
    """Whether a command line asks for the help of a command that has a short one."""
    return bool(words) and words[0] in SHORT and bool({"--help", "-h"}.intersection(words[1:]))


def print_short(app: App, command: str) -> None:
    """Print usage, description, the flags that people use and examples of a command on standard output."""
    from cyclopts.help import HelpPanel
    from cyclopts.help.formatters import DefaultFormatter

    entries: dict[str, Any] = {}

    def collect(console: Any, options: Any, panel: HelpPanel) -> None:
        del console, options  # printed afterwards, in our order
        for entry in panel.entries:
            for name in (entry.positional_label or "", *entry.positive_names):
                entries[name.removeprefix("--").lower().replace("_", "-")] = entry

    app[command].help_formatter = collect
    app.help_print([command])
    console = app.console
    panel = HelpPanel(format="parameter", title="Options used most", entries=[entries[name] for name in SHORT[command]])
    DefaultFormatter()(console, console.options, panel)
    more = [f"Example  {text}" for text in EXAMPLES.get(command, ())]
    number = len({id(entry) for entry in entries.values()})
    for text in (*more, f"All {number} options: windtunnel {command} --help-all"):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
