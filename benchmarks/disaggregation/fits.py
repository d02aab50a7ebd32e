"""DistServe's laws fitted to steps that it never saw, and what the two regimes of decodes are worth (checklist 371-374,
430)."""

import numpy as np

from benchmarks.charts import lines
from benchmarks.page import Findings, table
from windtunnel import Engine, Pool, device, load_model
from windtunnel.files import cache_folder
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.perf.step_law import LARGE_FROM, StepLaw, fit
from windtunnel.perf.tabulate.grid import tabulate

SIZES = (1, 2, 4)
SEQS = 256
LONGEST = 2048
MODEL, GPU = "meta-llama/Llama-2-13b-hf", "a100"


def priced(tp: int) -> BatchTimes:
    """Steps from measured kernels."""
    engine = Engine(tensor_parallel_size=tp, max_model_len=LONGEST, max_num_seqs=SEQS, max_num_batched_tokens=8192)
    return tabulate(Pool(load_model(MODEL), device(GPU), engine), "auto", cache_folder()).times


Prompts = list[tuple[list[int], float]]
Decodes = list[tuple[int, int, float]]


def samples(times: BatchTimes, seed: int) -> tuple[Prompts, Decodes]:
    """Random steps of prompts, and of decodes."""
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(16, LONGEST, rng.integers(1, 5)).tolist() for _ in range(200)]
    batches = [(int(n), int(n * rng.integers(64, 1500))) for n in rng.integers(1, SEQS + 1, 300)]
    return (
        [(each, times.batch(0, 0, [(n, 0) for n in each])) for each in lengths if sum(each) <= 8192],
        [(n, cached, times.batch(n, cached, [])) for n, cached in batches],
    )


def errors(law: StepLaw, prompts: Prompts, decodes: Decodes) -> tuple[float, float, float]:
    """Median relative errors of the law: prompts, small batches of decodes, large ones."""
    told = law.tables(max_num_batched_tokens=8192, max_num_seqs=SEQS, max_model_len=LONGEST)
    of_prompts = [told.batch(0, 0, [(n, 0) for n in each]) / took - 1 for each, took in prompts]
    found: tuple[list[float], list[float]] = ([], [])
    for n, cached, took in decodes:
        found[n >= LARGE_FROM].append(told.batch(n, cached, []) / took - 1)
    return tuple(float(np.median(np.abs(each))) for each in (of_prompts, *found))  # type: ignore[return-value]


def findings() -> Findings:
    """Errors on steps left out of the fit, with one law for decodes and with two."""
    rows, series = [], {}
    worst = {"one": 0.0, "two": 0.0, "prompts": 0.0}
    for tp in SIZES:
        times = priced(tp)
        fitting, unseen = samples(times, 1), samples(times, 2)
        two = errors(fit(*fitting), *unseen)
        one = errors(fit(*fitting, large_from=SEQS + 1), *unseen)
        worst = {
            "one": max(worst["one"], *one[1:]),
            "two": max(worst["two"], *two[1:]),
            "prompts": max(worst["prompts"], two[0]),
        }
        rows.append((f"TP {tp}", *(f"{each:.1%}" for each in (two[0], *one[1:], *two[1:]))))
        series[f"TP {tp}"] = [(float(n), 1e3 * times.batch(n, n * 500, [])) for n in range(1, SEQS + 1, 5)]
    heads = ("", "prompts", "small, one law", "large, one law", "small, two laws", "large, two laws")
    facts = {"table": table(heads, rows), "large": LARGE_FROM, "model": MODEL.split("/")[1], **worst}
    chart = lines("Decodes with 500 tokens in the cache each", "requests", "ms", series)
    return Findings(facts, {"fits.svg": chart})
