"""How throughput grows with the batch, of prompts and of decodes (checklist 324, 363, 368)."""

from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.charts import lines
from benchmarks.disaggregation.machine import BLOCK, Side, fitted
from benchmarks.page import Findings, table
from windtunnel import Deployment, generate, simulate, summary
from windtunnel.perf.batch_times import StageTimes
from windtunnel.perf.step_law import Terms
from windtunnel.workload import AllAtOnce, Both, Fixed, RangeRatio

PROMPTS = (64, 128, 256, 512, 1024)
BATCHES = (1, 2, 4, 8, 16, 32)
DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 512
SHARE = 0.8
"""Of the throughput of the largest batch."""


CROWD = 96
"""Requests in flight for each stage: as many as one GPU's memory holds with their outputs."""


@cache
def decoding(tp: int, stages: int) -> tuple[float, float]:
    """(seconds of a token, tokens/s) of decodes alone: DistServe's law in so many stages of equal layers, prompts free.

    A stage takes its share of the law's time, and the activations on their way none. The memory is that of DistServe's
    layout with as many GPUs.
    """
    law = fitted()[tp].law.in_simdistserve()
    side = Side(tp, max_num_seqs=CROWD * stages, max_num_batched_tokens=CROWD * CONTEXT // 2)
    engine = replace(
        side.pool().engine,
        pipeline_parallel_size=stages,
        num_gpu_blocks_override=fitted()[tp * stages].kv_tokens // BLOCK + 1,
    )
    pool = replace(side.pool(), engine=engine)
    limits = {name: pool.engine.resolved(name) for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")}
    tables = replace(law, prefill=Terms(0.0, 0.0, 0.0)).tabulated(**limits)
    if stages > 1:
        part = tables.times.scaled(1 / stages)
        nothing = np.zeros((stages - 1, limits["max_num_batched_tokens"] + 1))
        tables = replace(tables, pipeline=StageTimes((part,) * stages, nothing))
    lengths = Both(Fixed(CONTEXT // 2), RangeRatio(CONTEXT // 2, 0.5))
    load = replace(generate(AllAtOnce(), lengths, 10 * CROWD * stages, seed=1), max_concurrency=CROWD * stages)
    found = summary(simulate(Deployment((pool,)), load, tables=[tables]))
    return found.latencies["tpot"].mean, found.output_throughput


def findings() -> Findings:
    """Tokens per second by the size of the batch."""
    times = Side(1, max_num_batched_tokens=32_768).tables().times
    prompts = {n: {count: count * n / times.batch(0, 0, [(n, 0)] * count) for count in BATCHES} for n in PROMPTS}
    decodes = {
        tp: {count: count / Side(tp).tables().times.batch(count, count * CONTEXT, []) for count in DECODES}
        for tp in sorted(fitted())
    }
    rows = [
        (f"{n} tokens", *speeds.values(), min(c for c in BATCHES if speeds[c] >= SHARE * speeds[BATCHES[-1]]))
        for n, speeds in prompts.items()
    ]
    latency = {tp: 1e3 * Side(tp).tables().times.batch(16, 16 * CONTEXT, []) for tp in decodes}
    layouts = {"one GPU": (1, 1), "TP 2": (2, 1), "TP 4": (4, 1), "PP 2": (1, 2), "PP 4": (1, 4)}
    alone = decoding(1, 1)[1]
    scaling = [
        (name, 1e3 * seconds, speed, f"{speed / alone:.2f}×")
        for name, (seconds, speed) in ((name, decoding(*layout)) for name, layout in layouts.items())
    ]
    facts = {
        "crowd": CROWD,
        "scaling": table(("decodes alone", "ms a token", "tokens/s", "of one GPU's"), scaling),
        "pp4": decoding(1, 4)[1] / alone,
        "tp4_speed": decoding(4, 1)[1] / alone,
        "table": table(("prompts of", *(f"{count} together" for count in BATCHES), "batch for 80 %"), rows),
        "short": prompts[64][32] / prompts[64][1],
        "long": prompts[1024][32] / prompts[1024][1],
        "decodes": decodes[1][256] / decodes[1][1],
        "tp2": latency[1] / latency[2],
        "tp4": latency[2] / latency[4],
        "per_gpu": max(decodes[4].values()) / 4 / max(decodes[1].values()),
    }
    of_prompts = {f"prompts of {n}": [(float(c), v) for c, v in speeds.items()] for n, speeds in prompts.items()}
    of_decodes = {f"TP {tp}": [(float(c), v) for c, v in speeds.items()] for tp, speeds in decodes.items()}
    return Findings(
        facts,
        {
            "saturation-prompts.svg": lines("Prompts", "prompts in a step", "tokens/s", of_prompts, log_x=True),
            "saturation-decodes.svg": lines("Decodes", "requests in a step", "tokens/s", of_decodes, log_x=True),
        },
    )
