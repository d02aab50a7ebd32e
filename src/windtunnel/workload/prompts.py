"""Workloads whose prompts share text: common prefixes, and sessions whose every turn repeats the conversation so far,
answers included."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.workload.arrivals import Arrivals
from windtunnel.workload.columns import Workload
from windtunnel.workload.lengths import Fixed, Lengths, OneLength
from windtunnel.workload.rules import HashIds, Integers
from windtunnel.workload.synthetic import check_count, stream


def prefix_repetition(
    arrivals: Arrivals,
    lengths: Lengths,
    num_requests: int,
    seed: int = 0,
    *,
    num_prefixes: int = 10,
    prefix_tokens: int = 256,
    hash_block_size: int = 16,
    max_concurrency: int = 0,
) -> Workload:
    """Prompts of one of ``num_prefixes`` common prefixes and their own suffix: vLLM's `prefix_repetition`.

    ``lengths`` gives suffix and output tokens. Every prefix is used equally often (± 1), in random order.
    """
    check_count("num_requests", num_requests)
    check_count("num_prefixes", num_prefixes)
    check_count("prefix_tokens", prefix_tokens)
    check_count("hash_block_size", hash_block_size)
    suffix, output = lengths.sample(num_requests, stream(seed, "lengths"))
    prompt = suffix + prefix_tokens
    prefix = stream(seed, "prefixes").permutation(np.arange(num_requests) % num_prefixes)
    return Workload.from_columns(
        arrival=arrivals.times(num_requests, stream(seed, "arrivals")),
        prompt_tokens=prompt,
        output_tokens=output,
        hash_ids=_hashes(prompt // hash_block_size, prefix, prefix_tokens // hash_block_size, np.arange(num_requests)),
        hash_block_size=hash_block_size,
        max_concurrency=max_concurrency,
        name="prefix_repetition",
    )


def sessions(
    arrivals: Arrivals,
    lengths: Lengths,
    num_sessions: int,
    seed: int = 0,
    *,
    turns: int | OneLength = 4,
    think_time: float = 10.0,
    system_tokens: int = 0,
    max_concurrency: int = 0,
) -> Workload:
    """Conversations: each turn's prompt is the system prompt, all earlier turns and answers, and a new message.

    ``arrivals`` starts sessions, ``lengths`` gives a turn's new message and answer, ``turns`` their number;
    think times are exponential with the mean ``think_time`` in s (0: none). All sessions share the system prompt.
    """
    check_count("num_sessions", num_sessions)
    if not (math.isfinite(think_time) and think_time >= 0):
        raise InputError(f"think_time={think_time:g}: must be finite seconds ≥ 0")
    if system_tokens < 0:
        raise InputError(f"system_tokens={system_tokens}: must be ≥ 0")
    per_session = Fixed(turns) if isinstance(turns, int) else turns
    count = per_session.draw(num_sessions, stream(seed, "turns"))
    session = np.repeat(np.arange(num_sessions), count)
    first = np.cumsum(count) - count
    message, output = lengths.sample(len(session), stream(seed, "lengths"))
    before = np.cumsum(message + output) - message - output
    prompt = system_tokens + before - before[first][session] + message
    arrival = np.full(len(session), np.nan)
    arrival[first] = arrivals.times(num_sessions, stream(seed, "arrivals"))
    think = stream(seed, "think times").exponential(think_time, len(session))
    think[first] = 0.0
    rows = np.arange(len(session))
    others, shared = rows - 1, prompt - message
    others[first], shared[first] = (0, system_tokens) if system_tokens else (-1, 0)
    others[0], shared[0] = -1, 0
    return Workload.from_columns(
        arrival=arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        session=session,
        think_time=think,
        begins=(others, shared),
        max_concurrency=max_concurrency,
        name="sessions",
    )


def with_hit_rate(workload: Workload, rate: float) -> Workload:
    """These requests, of whose prompts nothing is known, where a prefix cache that forgets nothing finds this share of
    all prompt tokens.

    An assumption: all prompts begin with the same text, each for the same share of its length, and end on their own.
    The first finds nothing, and the longest so far adds to what is known, so that share is a little more than ``rate``.

    Raises InputError for a rate that is no share or that no such prompts can have, and where what prompts share is
    known.
    """
    if not 0 < rate < 1:
        raise InputError(f"prefix_hit_rate={rate:g}: must be a share, > 0 and < 1")
    prompts = workload.prompt_tokens
    wanted, low, high = rate * float(prompts.sum()), 0.0, 1.0
    for _ in range(40):
        share = 0.5 * (low + high)
        low, high = (share, high) if _known(_part(prompts, share))[1].sum() < wanted else (low, share)
    if _known(_part(prompts, 1.0))[1].sum() < wanted:
        raise InputError(f"prefix_hit_rate={rate:g}: is more than prompts of these lengths can share")
    return _beginning_alike(workload, _part(prompts, high), f"{100 * rate:g} % of prompt tokens assumed cached")


def with_shared_prefix(workload: Workload, tokens: int) -> Workload:
    """These requests, of whose prompts nothing is known, where all begin with the same text of this length, such as a
    system prompt. Raises InputError for less than a token, and where what prompts share is known."""
    if tokens < 1:
        raise InputError(f"shared_prefix={tokens}: must be ≥ 1")
    alike = np.minimum(workload.prompt_tokens, tokens)
    return _beginning_alike(workload, alike, f"{tokens:,} tokens of every prompt assumed shared")


def _part(prompts: Integers, share: float) -> Integers:
    return np.asarray(np.floor(share * prompts), np.int64)


def _known(alike: Integers) -> tuple[Integers, Integers]:
    """(The earlier row with the longest beginning, -1 for the first; how much of each beginning it has.)"""
    longest = np.maximum.accumulate(alike)
    holder = np.maximum.accumulate(np.where(alike > np.append(-1, longest[:-1]), np.arange(len(alike)), 0))
    other = np.append(-1, holder[:-1])
    return other, np.minimum(alike, np.append(0, longest[:-1]))


def _beginning_alike(workload: Workload, alike: Integers, assumed: str) -> Workload:
    if workload.texts is not None:
        raise InputError(f"{workload.name}: says what its prompts share: leave prefix_hit_rate and shared_prefix out")
    others, tokens = _known(alike)
    begins = np.where(tokens > 0, others, -1), tokens
    return replace(workload, begins=begins, name=f"{workload.name} ({assumed})")


def _hashes(blocks: Integers, prefix: Integers, prefix_blocks: int, owner: Integers) -> HashIds:
    """Ids of each request's full blocks: the first ``prefix_blocks`` belong to its prefix, the others to its owner.

    ``owner`` numbers from 0, not falling, those whose requests continue one text (the request itself, or its session).
    """
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(blocks)])
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], blocks)
    longest = np.zeros(int(owner[-1]) + 1, np.int64)
    np.maximum.at(longest, owner, blocks)
    start = (int(prefix.max()) + 1) * prefix_blocks + np.cumsum(longest) - longest
    common = np.repeat(prefix * prefix_blocks, blocks) + place
    own = np.repeat(start[owner], blocks) + place
    return offsets, np.where(place < prefix_blocks, common, own)


def with_images(workload: Workload, count: int, tokens: int) -> Workload:
    """Images before each prompt, as many and as long as given, no two alike.

    Raises InputError if prompts share text, since it is not known which images are part of it.
    """
    if workload.hash_ids is not None or workload.begins is not None:
        raise InputError(
            f"images_per_prompt={count}: not simulated where prompts share text, as in {workload.name}: leave one out"
        )
    return replace(workload, prompt_tokens=workload.prompt_tokens + count * tokens, images=(count, tokens))


def with_samples(workload: Workload, n: int) -> Workload:
    """Several sequences for each prompt (OpenAI's ``n``), each a row with the prompt, arrival and output length of its
    request.

    Raises InputError below 1, and for sessions and closed loops.
    """
    check_count(f"n={n}: number of sequences", n * len(workload))
    rows = np.repeat(np.arange(len(workload)), n)
    columns: dict[str, Any] = {name: column[rows] for name, column in workload.columns().items()}
    sample_of = n * rows
    others, tokens = workload.texts or (np.full(len(workload), -1), np.zeros(len(workload), np.int64))
    first = sample_of == np.arange(len(rows))
    begins = (
        np.where(first, np.where(others[rows] >= 0, n * others[rows], -1), sample_of),
        np.where(first, tokens[rows], columns["prompt_tokens"]),
    )
    return replace(
        workload, **columns, sample_of=sample_of, begins=begins, hash_ids=None, hash_block_size=0, after=None
    )
