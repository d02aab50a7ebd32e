"""Models and shards that were not measured: estimators that go by FLOPs and bytes, on Vidur's profile and on the kernel
database exported as one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.estimators.points import Learner, Points, ape, points_of
from windtunnel.perf.estimators.terms import Roofline
from windtunnel.perf.estimators.trees import Boosting, Forest
from windtunnel.perf.kernel_times import MEASURED
from windtunnel.perf.predictor import predictor
from windtunnel.perf.profile.folder import Profile
from windtunnel.perf.profile.shapes import PROJECTIONS, shape_of

MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B")
SHARDS = (1, 2, 4, 8)
TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


NEIGHBOURS = 4
"""Points whose efficiency a point takes over."""


def by_efficiency(known: Points, asked: Points) -> Floats:
    """Seconds: as far from the best rates as the nearest known points, by FLOPs and bytes, are."""
    rates = [float((work / known.seconds).max()) or 1.0 for work in (known.flops, known.moved)]

    def bound(points: Points) -> Floats:
        return np.asarray(np.maximum(points.flops / rates[0], points.moved / rates[1]))

    def place(points: Points) -> Floats:
        return np.asarray(np.log(np.stack([np.maximum(points.flops, 1.0), np.maximum(points.moved, 1.0)], axis=1)))

    log_ratio = np.log(known.seconds / bound(known))
    distance = ((place(asked)[:, None] - place(known)[None]) ** 2).sum(axis=2)
    nearest = np.argpartition(distance, NEIGHBOURS - 1, axis=1)[:, :NEIGHBOURS]
    weight = 1.0 / (np.take_along_axis(distance, nearest, axis=1) + 1e-9)
    found = (log_ratio[nearest] * weight).sum(axis=1) / weight.sum(axis=1)
    return np.asarray(np.exp(found) * bound(asked))


def by_work(learner: Learner, known: Points, asked: Points) -> Floats:
    """Seconds by a learner that sees the logs of FLOPs and bytes in place of tokens, or of queries and keys."""

    def seen(points: Points) -> Points:
        return replace(points, a=np.log(points.flops + 1.0), b=np.log(points.moved + 1.0))

    return learner.fit(seen(known)).times(seen(asked))


FOR_OTHER_SHAPES: dict[str, Callable[[Points, Points], Floats]] = {
    "interpolation": by_efficiency,
    "forest": partial(by_work, Forest()),
    "boosting": partial(by_work, Boosting()),
    "roofline": partial(by_work, Roofline()),
}
"""Estimators that can learn from one shape, by FLOPs and bytes, what another takes."""


def joined(parts: list[Points]) -> Points:
    """Points of several shapes of one operator as one."""
    names = ("a", "b", "flops", "moved", "seconds")
    return Points(parts[0].phase, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class Row(NamedTuple):
    """Median errors of one operator by estimator."""

    operator: str
    left_out: str
    points: int
    errors: dict[str, float]


def _row(operator: str, left_out: str, known: Points, asked: Points) -> Row:
    found = {name: estimate(known, asked) for name, estimate in FOR_OTHER_SHAPES.items()}
    return Row(
        operator, left_out, len(asked), {name: float(np.median(ape(t, asked.seconds))) for name, t in found.items()}
    )


def held_out_shards(profile: Profile) -> Iterator[Row]:
    """Each degree of tensor parallelism from the others, by projection."""
    for operator in PROJECTIONS:
        degrees = [tp for name, tp in profile.points if name == operator]
        for left in (2, 8):
            known = joined([profile.points[operator, tp] for tp in degrees if tp != left])
            yield _row(operator, f"TP {left}", known, profile.points[operator, left])


def exported(model: str, tp: int, name: str = "h100") -> dict[str, Points]:
    """What the kernel database measured of a model's shard: projections by tokens, attention on its grid."""
    pool = Pool(load_model(model), device(name), Engine(tensor_parallel_size=tp))
    shape, source = shape_of(pool), predictor(pool, "measured")
    tokens = np.array(TOKENS, dtype=float)
    planes = dict.fromkeys(PROJECTIONS, ("tokens", tokens, 0.0 * tokens))
    decodes = np.meshgrid(2.0 ** np.arange(8), 2.0 ** np.arange(5, 14), indexing="ij")
    planes["attn_decode"] = ("decode", decodes[0].ravel(), decodes[1].ravel())
    lengths = np.array([64, 128, 256, 512, 1024, 2048, 4096, 8192], dtype=float)
    planes["attn_prefill"] = ("prefill", lengths, 0.0 * lengths)
    found = {}
    for operator, (phase, a, b) in planes.items():
        kernel = shape.kernel(operator, tp)
        times = source.times(kernel, a, b)
        measured = times.sources == MEASURED
        if measured.sum() >= 4:
            found[operator] = points_of(kernel, phase, a[measured], b[measured], times.seconds[measured])
    return found


def held_out_models() -> Iterator[Row]:
    """Each model from the two others, all shards."""
    tables = {(model, tp): exported(model, tp) for model in MODELS for tp in SHARDS}
    for operator in (*PROJECTIONS, "attn_decode", "attn_prefill"):
        for left in MODELS:
            known = [rows[operator] for (model, _), rows in tables.items() if model != left and operator in rows]
            asked = [rows[operator] for (model, _), rows in tables.items() if model == left and operator in rows]
            if known and asked:
                yield _row(operator, left.split("/")[1], joined(known), joined(asked))
