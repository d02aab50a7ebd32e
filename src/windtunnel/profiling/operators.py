"""Operators: a call for each operator of a shard, on tensors of its sizes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.profile.shapes import Shape

Call = Callable[[], Any]

COLD = 96 * 2**20
"""Bytes of weights that take turns, so that none is still in a cache: a model has more layers than one."""


def cold_copies(kernel: Gemm) -> int:
    """How many weights of a projection take turns."""
    return max(1, min(COLD // (2 * kernel.n * kernel.k), 16))


@dataclass
class Shard:
    """One of ``tp`` shards of a model on a torch device."""

    torch: Any
    shape: Shape
    tp: int
    device: str
    dtype: Any
    _weights: dict[tuple[int, int], Any] = field(default_factory=dict)

    def call(self, operator: str, a: int, b: int) -> Call:
        """The operator at (a, b), ready to run; see perf.estimators.Points."""
        made = getattr(self, f"_{operator}", None)
        return made(a, b) if made else self._product(operator, a)

    def _random(self, *sizes: int) -> Any:
        return self.torch.randn(*sizes, device=self.device, dtype=self.dtype)

    def _product(self, operator: str, a: int) -> Call:
        """A projection, its weights taking turns."""
        kernel = self.shape.kernel(operator, self.tp)
        assert isinstance(kernel, Gemm)
        weights, x = self._of(kernel.n, kernel.k), self._random(a, kernel.k)
        linear = self.torch.nn.functional.linear
        return lambda: linear(x, next(weights))

    def _of(self, n: int, k: int) -> Any:
        if (n, k) not in self._weights:
            self._weights.clear()
            self._weights[n, k] = cycle([self._random(n, k) for _ in range(cold_copies(Gemm(n, k)))])
        return self._weights[n, k]

    @property
    def _heads(self) -> tuple[int, int, int]:
        return self.shape.n_head // self.tp, -(-self.shape.n_kv_head // self.tp), self.shape.head_dim

    def _emb(self, a: int, _: int) -> Call:
        table = self._random(self.shape.vocab_size, self.shape.n_embd)
        tokens = self.torch.randint(0, self.shape.vocab_size, (a,), device=self.device)
        return lambda: self.torch.nn.functional.embedding(tokens, table)

    def _input_layernorm(self, a: int, _: int) -> Call:
        x, weight = self._random(a, self.shape.n_embd), self._random(self.shape.n_embd)
        return lambda: self.torch.nn.functional.rms_norm(x, (self.shape.n_embd,), weight)

    _post_attention_layernorm = _input_layernorm

    def _add(self, a: int, _: int) -> Call:
        x, y = self._random(a, self.shape.n_embd), self._random(a, self.shape.n_embd)
        return lambda: x.add_(y)

    def _attn_rope(self, a: int, _: int) -> Call:
        heads, kv_heads, size = self._heads
        x, cosine, sine = (self._random(a, n, size) for n in (heads + kv_heads, 1, 1))
        half = size // 2

        def rotate() -> Any:
            turned = self.torch.cat((-x[..., half:], x[..., :half]), dim=-1)
            return x * cosine + turned * sine

        return rotate

    def _mlp_act(self, a: int, _: int) -> Call:
        inner = self.shape.n_expanded_embd // self.tp
        x = self._random(a, 2 * inner if self.shape.use_gated_mlp else inner)
        silu = self.torch.nn.functional.silu
        if not self.shape.use_gated_mlp:
            return lambda: silu(x)
        return lambda: silu(x[:, :inner]) * x[:, inner:]

    def _attn_kv_cache_save(self, a: int, _: int) -> Call:
        _, kv_heads, size = self._heads
        cache, new = self._random(2, 4 * a + 64, kv_heads, size), self._random(2, a, kv_heads, size)
        slots = self.torch.randperm(4 * a + 64, device=self.device)[:a]
        return lambda: cache.index_copy_(1, slots, new)

    def _attn_decode(self, a: int, b: int) -> Call:
        heads, kv_heads, size = self._heads
        query, keys, values = self._random(a, heads, 1, size), *(self._random(a, kv_heads, b, size) for _ in "kv")
        return self._attention(query, keys, values, None)

    def _attn_decode_skewed(self, a: int, b: int) -> Call:
        """One request has half of all keys, the others share the rest: in two calls, as one would pad all to it."""
        longest = a * b // 2
        parts = self._attn_decode(1, longest), self._attn_decode(a - 1, max((a * b - longest) // (a - 1), 1))
        return lambda: [part() for part in parts]

    def _attn_prefill(self, a: int, b: int) -> Call:
        heads, kv_heads, size = self._heads
        query = self._random(1, heads, a, size)
        keys, values = (self._random(1, kv_heads, a + b, size) for _ in "kv")
        mask = self.torch.ones(a, a + b, dtype=self.torch.bool, device=self.device).tril(b) if b else None
        return self._attention(query, keys, values, mask, causal=b == 0)

    def _attention(self, query: Any, keys: Any, values: Any, mask: Any, causal: bool = False) -> Call:
        attend = self.torch.nn.functional.scaled_dot_product_attention
        grouped = query.shape[1] != keys.shape[1]
        return lambda: attend(query, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    def _sampling(self, a: int, _: int) -> Call:
        logits = self._random(a, self.shape.vocab_size)

        def sample() -> Any:
            shares = self.torch.softmax(logits.float(), dim=-1)
            return shares.div_(self.torch.empty_like(shares).exponential_()).argmax(dim=-1)

        return sample

    def bytes(self, operator: str, a: int, b: int) -> float:
        """Memory that a call takes, about: what it moves, twice, the table of the embedding, and a chunk's mask."""
        import numpy as np

        kernel = self.shape.kernel(operator, self.tp)
        moved = 2.0 * float(kernel.bytes_moved(np.array([float(a)]), np.array([float(b)]))[0])
        if operator == "emb":
            moved += 2.0 * self.shape.vocab_size * self.shape.n_embd
        return moved + (2.0 * (a + b) * a * (1 + 4 * self._heads[0]) if operator == "attn_prefill" else 0.0)
