"""A scheduler in Python for ``benchmarks.features``: first come, first served, asked in every step."""

from collections.abc import Sequence
from typing import Any

from windtunnel import Decision


class InTurn:
    """Prompts in chunks, running requests first."""

    def schedule(self, now: float, waiting: Sequence[Any], running: Sequence[Any], limits: Any) -> Decision:  # noqa: ARG002
        """Tokens of each request in the next step."""
        tokens, left = {}, limits.max_num_batched_tokens
        blocks = limits.num_blocks - sum(request.num_blocks for request in running)
        for request in running:
            wanted = min(request.num_tokens - request.num_computed_tokens, left)
            need = limits.blocks(request.num_computed_tokens + wanted) - request.num_blocks
            if wanted > 0 and need <= blocks:
                tokens[request], left, blocks = wanted, left - wanted, blocks - need
        for request in waiting[: limits.max_num_seqs - len(running)]:
            wanted = min(request.num_tokens - request.num_computed_tokens, left)
            need = limits.blocks(request.num_tokens + request.max_tokens)
            if wanted <= 0 or need > blocks:
                break
            tokens[request], left, blocks = wanted, left - wanted, blocks - need
        return Decision(tokens)
