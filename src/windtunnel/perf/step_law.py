"""Step times as polynomials of the batch, fitted to samples, as DistServe has them (arXiv 2401.09670, appendix A)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import CONTEXT_STEP, BatchTimes
from windtunnel.perf.tabulate.tables import Tabulated

LARGE_FROM = 95
"""Requests from which on DistServe fits decodes apart: the matrix multiplications no longer wait for memory alone."""


class Terms(NamedTuple):
    """Coefficients in seconds."""

    constant: float
    """Of any step."""
    per_token: float
    """Of a prompt's token; of decodes, of a token in the cache."""
    other: float
    """Of the square of a prompt's length; of decodes, of a request."""


@dataclass(frozen=True)
class StepLaw:
    """How long steps of one replica take.

    Prompts of n tokens each take ``a + b·Σn + c·Σn²``, and N decodes with S tokens in the cache together
    ``a + b·S + c·N`` seconds. A chunk at context x counts (x + n)² − x², so that chunks add up to their prompt. A step
    with both, which DistServe does not have, takes the prompts' law with one token more for each decode, and what the
    decodes read from the cache.
    """

    prefill: Terms
    decode: Terms
    decode_large: Terms | None = None
    """Of batches of at least ``large_from`` decodes; None: the same as of small ones."""
    large_from: int = LARGE_FROM

    def tables(self, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> BatchTimes:
        """The law as tables, exact at every size. Raises InputError where it gives a negative time."""
        contexts = np.array([0, -(-(max_model_len + 1) // CONTEXT_STEP) * CONTEXT_STEP])
        most = min(max_num_batched_tokens, max_model_len)
        chunks = np.unique(np.append(np.arange(most + 1), max_num_batched_tokens)).astype(float)
        tokens = np.arange(max_num_batched_tokens + 1, dtype=float)
        batch = np.arange(max_num_seqs + 1)
        constant, per_token, per_request = self._decodes(max(max_num_seqs, max_num_batched_tokens))
        none = np.zeros(max_num_seqs + 1)
        prompt = self.prefill
        return BatchTimes(
            decode_tokens=constant[: len(tokens)] + per_request[: len(tokens)] * tokens,
            mixed_tokens=prompt.constant + prompt.per_token * tokens,
            sequences=none,
            host_overlapped=none,
            host_serial=none,
            context_knots=contexts,
            decode_attention=(per_token[: len(batch)] * batch)[:, None] * contexts,
            chunk_knots=chunks.astype(np.int64),
            prefill_attention=prompt.other * chunks[:, None] * (2.0 * contexts + chunks[:, None]),
            prefill_base=0.0,
            expert_tokens=np.zeros(1),
            padded=np.arange(len(tokens)),
            graph_tokens=0,
        )

    def tabulated(self, **limits: int) -> Tabulated:
        """The tables as ``simulate(tables=…)`` takes them, all of them modelled; ``limits`` as of ``tables``."""
        times = self.tables(**limits)
        none = times.scaled(0.0)
        sources = {"measured": none, "interpolated": none, "modelled": times}
        return Tabulated(times, sources, {}, ({"operator": "step law", "source": "modelled"},))

    def _decodes(self, most: int) -> tuple[NDArray[np.float64], ...]:
        """Each term by the number of decodes, 0 to ``most``."""
        large = np.arange(most + 1) >= self.large_from
        pairs = zip(self.decode, self.decode_large or self.decode, strict=True)
        return tuple(np.where(large, of_large, of_small) for of_small, of_large in pairs)

    def in_simdistserve(self) -> "StepLaw":
        """What ``simdistserve`` adds, DistServe's simulator (simdistserve/estimators/time_estimator.py).

        Every step takes 2 ms and 0.1 µs for each of its tokens more, one with prompts another millisecond; the token
        that a decode computes counts as one in the cache.
        """
        millisecond, token = 1e-3, 1e-7

        def decodes(law: Terms) -> Terms:
            return Terms(law.constant + 2 * millisecond, law.per_token + token, law.other + law.per_token)

        prompt = self.prefill
        return replace(
            self,
            prefill=Terms(prompt.constant + 3 * millisecond, prompt.per_token + token, prompt.other),
            decode=decodes(self.decode),
            decode_large=decodes(self.decode_large) if self.decode_large else None,
        )


Prefill = tuple[Sequence[int], float]
"""(Lengths of the prompts in a step, its seconds)."""
Decode = tuple[int, int, float]
"""(Requests in a step, their tokens in the cache, its seconds)."""


def fit(prefills: Iterable[Prefill], decodes: Iterable[Decode], large_from: int = LARGE_FROM) -> StepLaw:
    """The law with the least squared errors; decodes from ``large_from`` requests on have terms of their own.

    Raises:
        InputError: samples that do not determine three terms.
    """
    lengths = [(np.asarray(prompts, dtype=float), seconds) for prompts, seconds in prefills]
    prompts = [(prompt.sum(), (prompt**2).sum(), seconds) for prompt, seconds in lengths]
    batches = [(cached, requests, seconds) for requests, cached, seconds in decodes]
    small = [sample for sample in batches if sample[1] < large_from]
    large = [sample for sample in batches if sample[1] >= large_from]
    return StepLaw(
        prefill=_least_squares(prompts, "prefills"),
        decode=_least_squares(small or large, "decodes"),
        decode_large=_least_squares(large, f"decodes of {large_from} requests and more") if small and large else None,
        large_from=large_from,
    )


def _least_squares(samples: Sequence[tuple[float, float, float]], of: str) -> Terms:
    columns = np.array([(1.0, first, second) for first, second, _ in samples]).reshape(-1, 3)
    scale = np.abs(columns).max(axis=0, initial=1.0)
    terms, _, rank, _ = np.linalg.lstsq(columns / scale, np.array([seconds for *_, seconds in samples]), rcond=None)
    if rank < 3:
        raise InputError(f"{len(samples)} {of}: do not determine three terms; vary the batch and the lengths")
    return Terms(*(terms / scale).tolist())
