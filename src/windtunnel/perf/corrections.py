"""Corrections: what a batch's time depends on beyond the plain sum of measured kernels. Each can be switched off.

An ablation turns one off at a time and looks at what it was worth (``docs/batch-times.md`` names the source of each).
"""

from dataclasses import fields

from windtunnel.dataclass import dataclass


@dataclass(frozen=True)
class Corrections:
    """Switches; everything is on unless an ablation says otherwise."""

    kernel_choice: bool = True
    """Engines run the fastest kernel that they ship, also where the database measured it under another engine's name;
    off: the lane with most rows, and the engine's own."""
    host_bound_tables: bool = True
    """Entries that timed the host's launches are recognised and replaced; off: believed."""
    fused_quantization: bool = True
    """Casts to 8 bits ride on the kernel before them; off: each is a launch of its own."""
    fused_all_reduce: bool = True
    """Engines that can, add the residual and normalise inside the all-reduce; off: a launch for each norm."""
    shared_expert_overlap: bool = True
    """Small batches run shared experts beside the routed ones on a second stream; off: one after the other."""
    expert_imbalance: bool = True
    """Tokens choose experts by a power law; off: evenly."""
    cold_cache: bool = True
    """Weights and keys come from memory, not from the second-level cache that repeated measurement warms; off: as
    measured."""
    mixed_attention: bool = True
    """FlashAttention 2 computes decodes beside a prefill chunk in whole tiles of queries; off: as if alone."""
    uneven_contexts: bool = True
    """A call of FlashAttention 2 ends with the block of its longest request; off: work is shared evenly."""
    rank_synchronisation: bool = True
    """Data-parallel ranks agree on every step and exchange routing beside tokens; off: only the tokens."""
    micro_batch_overlap: bool = True
    """With ``enable_dbo`` one half of a step computes while the other's tokens are exchanged; off: it is not split."""
    graph_gaps: bool = True
    """A kernel starts a moment after the one before it has ended, in a replayed graph too; off: at once."""
    launch_gaps: bool = True
    """What no graph holds waits for the host to launch it; off: the host is never late."""
    host_overhead: bool = True
    """Scheduling, input preparation and output take host time in every step; off: none."""

    def without(self, name: str) -> "Corrections":
        """All of these but one."""
        return Corrections(**{field.name: getattr(self, field.name) and field.name != name for field in fields(self)})


ALL = Corrections()
