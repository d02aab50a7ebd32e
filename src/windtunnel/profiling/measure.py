"""Measure: all operators of a model's shards, point by point, through the journal."""

from collections.abc import Callable, Sequence
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.perf.profile.shapes import ATTENTION, HEAD, SKEWED, Shape
from windtunnel.profiling.clock import Clock, Reading
from windtunnel.profiling.collectives import ALONE, Hosts, collective
from windtunnel.profiling.journal import Journal
from windtunnel.profiling.machine import Machine
from windtunnel.profiling.operators import Shard
from windtunnel.profiling.sizes import Extent, adaptive, decode_sizes, octaves, prefill_sizes

Say = Callable[[str], None]
AGAIN = "again:"
"""Before the name of an operator: points that were measured a second time, at the end."""
CHECKED = 4
"""Points of each operator that are measured again."""


@dataclass
class Session:
    """One run of the measurement."""

    machine: Machine
    shape: Shape
    shards: tuple[int, ...]
    extent: Extent
    journal: Journal
    clock: Clock
    say: Say
    hosts: Hosts = ALONE
    calls: int = 0
    """Collectives so far."""

    def all(self) -> None:
        """Measure what the journal lacks."""
        for tp in self.shards:
            shard = Shard(self.machine.torch, self.shape, tp, self.machine.kind, self.machine.torch.bfloat16)
            with self.machine.torch.inference_mode():
                self._along_tokens(shard)
                self._over_planes(shard)
            if self.hosts.nnodes == 1:
                self._collectives_of(tp)
        self.with_other_hosts()
        self._again()

    def with_other_hosts(self) -> None:
        """Measure what several hosts measure together, or else what two processes send each other."""
        for tp in self.shards if self.hosts.nnodes > 1 else ():
            self._collectives_of(tp)
        if self.shards[-1] > 1:
            self._collectives("send_recv", max(2, self.hosts.nnodes))

    def _collectives_of(self, tp: int) -> None:
        if tp > 1:
            self._collectives("all_reduce", tp)

    def _along_tokens(self, shard: Shard) -> None:
        last = dict.fromkeys(
            (*self.shape.token_operators, *self.shape.cache_operators), self.extent.max_num_batched_tokens
        )
        last |= dict.fromkeys(HEAD, self.extent.max_num_seqs)
        for operator, largest in last.items():
            found = adaptive(
                lambda a, operator=operator: self._seconds(shard, operator, a, 0),  # type: ignore[misc]
                largest,
                self.extent.tolerance,
                self.extent.sizes,
            )
            self.say(f"TP {shard.tp}  {operator}  {len(found)} sizes")

    def _over_planes(self, shard: Shard) -> None:
        extent = self.extent
        skewed = [(a, b) for a, b in decode_sizes(extent.max_num_seqs, extent.max_model_len) if a > 1]
        planes = {
            SKEWED: skewed,
            "attn_decode": decode_sizes(extent.max_num_seqs, extent.max_model_len),
            "attn_prefill": prefill_sizes(extent.max_num_batched_tokens, extent.max_model_len),
        }
        for operator, points in planes.items():
            for a, b in points:
                self._seconds(shard, operator, a, b)
            self.say(f"TP {shard.tp}  {operator}  {len(points)} points")

    def _seconds(self, shard: Shard, operator: str, a: int, b: int) -> float | None:
        key = (operator, shard.tp, a, b)
        if key not in self.journal.readings and key not in self.journal.skipped:
            self.journal.add(key, self._read(shard, operator, a, b))
        known = self.journal.readings.get(key)
        return known.median if known else None

    def _read(self, shard: Shard, operator: str, a: int, b: int) -> Reading | str:
        """The time of a point, or why it has none."""
        wanted, free = shard.bytes(operator, a, b), self.machine.free_bytes()
        if wanted > 0.8 * free:
            return f"needs {wanted / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free"
        try:
            return self.clock.time(shard.call(operator, a, b))
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_about_memory(error):
                raise
            return "out of memory"

    def _collectives(self, name: str, tp: int) -> None:
        """Measure what is missing; with other hosts, which do not know what is there, all."""
        if why := self._lacks_gpus(tp):
            self.say(f"TP {tp}  {name}  {why}")
            return
        sizes, known = octaves(self.extent.max_num_batched_tokens), 2 if name == "send_recv" else tp
        missing = [a for a in sizes if (name, known, a, 0) not in self.journal.readings]
        if missing or self.hosts.nnodes > 1:
            elements = {a * self.shape.n_embd: a for a in (missing if self.hosts.nnodes == 1 else sizes)}
            counts, hosts = list(elements), self.hosts
            repeats, kind = self.clock.repeats, self.machine.kind
            found = collective(self.machine.torch, name, tp, counts, kind, repeats, hosts, self.calls)
            for count, seconds in found.items():
                self.journal.add((name, known, elements[count], 0), seconds)
        self.calls += 1
        self.say(f"TP {known}  {name}  {len(sizes)} sizes")

    def _lacks_gpus(self, tp: int) -> str:
        """Why a collective of this many processes cannot be measured here; empty if it can."""
        there, wanted = self.machine.gpus, max(2, tp) // self.hosts.nnodes
        return f"not measured: {wanted} GPUs must take part on this host, it has {there}" if 0 < there < wanted else ""

    def _again(self) -> None:
        """Some points of every operator once more, to see how far a second run will be from this one."""
        for operator in (*self.shape.token_operators, *ATTENTION, *HEAD):
            for key, _ in spread_out(sorted(self.journal.of(operator)), CHECKED):
                name, tp, a, b = key
                shard = Shard(self.machine.torch, self.shape, tp, self.machine.kind, self.machine.torch.bfloat16)
                again = (AGAIN + name, tp, a, b)
                if again not in self.journal.readings:
                    with self.machine.torch.inference_mode():
                        self.journal.add(again, self._read(shard, name, a, b))
        self.say("some points again")


def is_about_memory(error: RuntimeError) -> bool:
    """Whether torch had no memory."""
    text = str(error).lower()
    return "out of memory" in text or "not enough memory" in text or "can't allocate" in text


def spread_out(items: Sequence[Any], count: int) -> Sequence[Any]:
    """So many of the items, evenly."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
