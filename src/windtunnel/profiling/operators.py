"""Operators: a call for each operator of a shard, on tensors of its sizes."""

from collections.abc import Callable
from dataclasses import field
from itertools import cycle
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.perf.kernel import STORED_BYTES
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.profile.shapes import BITS_8, Shape
from windtunnel.profiling.engine_kernels import vllm_experts

Call = Callable[[], Any]

COLD = 96 * 2**20
"""Bytes of weights that take turns, so that none is still in a cache: a model has more layers than one."""
DRAWS = 16
"""Layers that take turns at most, and choices of experts."""


def cold_copies(kernel: Gemm) -> int:
    """How many weights of a projection take turns."""
    return max(1, min(COLD // int(STORED_BYTES[kernel.dtype] * kernel.n * kernel.k), DRAWS))


def bytes_of_experts(shape: Shape, tp: int) -> float:
    """Of a layer's weights in 16 bits."""
    return 2.0 * (3 if shape.use_gated_mlp else 2) * shape.num_experts * shape.n_embd * shape.expert_inter / tp


def cold_layers(shape: Shape, tp: int) -> int:
    """How many layers of experts take turns."""
    return max(1, min(int(COLD / bytes_of_experts(shape, tp)), DRAWS))


@dataclass
class Shard:
    """One of ``tp`` shards of a model on a torch device."""

    torch: Any
    shape: Shape
    tp: int
    device: str
    dtype: Any
    _weights: dict[tuple[int, int, str], Any] = field(default_factory=dict)
    """Of one operator at a time, by size and kind."""

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
        weights, x = self._of(kernel.n, kernel.k, kernel.dtype), self._random(a, kernel.k)
        linear = self.torch.nn.functional.linear
        if kernel.dtype in BITS_8:
            multiply = self._fp8 if kernel.dtype == "fp8" else self._int8
            return lambda: multiply(x, next(weights))
        if self.packs:
            packed = self.torch.ops.mkldnn._linear_pointwise
            return lambda: packed(x, next(weights), None, "none", [], "")
        return lambda: linear(x, next(weights))

    @property
    def packs(self) -> bool:
        """Whether 16-bit weights are laid out once as oneDNN likes them, as vLLM does on CPUs (``create_onednn_mm`` of
        vllm/_custom_ops.py): a few tokens are then twice as fast. Torch has it for its compiler, without promise."""
        there = self.device == "cpu" and hasattr(self.torch.ops.mkldnn, "_reorder_linear_weight")
        return there and bool(self.torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def _kept(self, weight: Any, dtype: str) -> Any:
        """A projection's weights as they stay in memory."""
        if dtype in BITS_8:
            return weight.clamp(-3, 3).to({"fp8": self.torch.float8_e4m3fn, "int8": self.torch.int8}[dtype]).t()
        return self.torch.ops.mkldnn._reorder_linear_weight(weight) if self.packs else weight

    def _of(self, n: int, k: int, dtype: str) -> Any:
        if (n, k, dtype) not in self._weights:
            self._weights.clear()
            copies = range(cold_copies(Gemm(n, k, dtype, dtype in BITS_8)))
            self._weights[n, k, dtype] = cycle([self._kept(self._random(n, k), dtype) for _ in copies])
        return self._weights[n, k, dtype]

    def _fp8(self, x: Any, weight: Any) -> Any:
        """A product in 8 bits, with a scale that is looked for in the activations."""
        scale = x.abs().amax().float() / 448.0
        small = (x / scale).to(self.torch.float8_e4m3fn)
        one = self.torch.ones((), device=self.device)
        return self.torch._scaled_mm(small, weight, scale_a=scale, scale_b=one, out_dtype=self.dtype)

    def _int8(self, x: Any, weight: Any) -> Any:
        """The same with whole numbers, a scale for each row."""
        scale = x.abs().amax(dim=-1, keepdim=True).float() / 127.0
        small = (x / scale).round().to(self.torch.int8)
        return (self.torch._int_mm(small, weight) * scale).to(self.dtype)

    def _expert_choice(self, a: int, _: int) -> Call:
        logits = self._random(a, self.shape.num_experts)
        return lambda: self.torch.softmax(logits.float(), dim=-1).topk(self.shape.top_k, dim=-1)

    def _experts(self, a: int, _: int) -> Call:
        """Routed experts of tokens that choose at random: by vLLM's kernel where it is there, else sorted by expert, in
        two products of groups, weighed and summed. Layers and choices take turns, as a step reads each layer once."""
        torch, shape = self.torch, self.shape
        weights, x = self._of_experts(shape.expert_inter // self.tp), self._random(a, shape.n_embd)
        drawn = [torch.rand(a, shape.num_experts, device=self.device).topk(shape.top_k, dim=-1) for _ in range(DRAWS)]
        if vllm := vllm_experts(torch, self.device, shape, self.tp):
            out, shares = torch.empty_like(x), torch.rand(a, shape.top_k)
            choices = cycle([one.indices.to(torch.int32) for one in drawn])
            return lambda: vllm.compute(out, x, next(weights), shares, next(choices))
        chosen, shares = cycle([one.indices.flatten() for one in drawn]), self._random(a * shape.top_k, 1)
        return lambda: self._grouped(x, next(weights), shares, next(chosen))

    def _grouped(self, x: Any, weights: tuple[Any, Any], shares: Any, chosen: Any) -> Any:
        torch, shape, (up, down) = self.torch, self.shape, weights
        silu, inner = torch.nn.functional.silu, down.shape[1]
        order = chosen.argsort()
        ends = torch.bincount(chosen, minlength=shape.num_experts).cumsum(0).to(torch.int32)
        tokens = order // shape.top_k
        wide = torch._grouped_mm(x[tokens], up, offs=ends)
        inside = silu(wide[:, :inner]) * wide[:, inner:] if shape.use_gated_mlp else silu(wide)
        out = torch._grouped_mm(inside, down, offs=ends) * shares[order]
        return torch.zeros_like(x).index_add_(0, tokens, out)

    def _of_experts(self, inner: int) -> Any:
        """Layers of experts, in turn."""
        place = (self.shape.num_experts, inner, "experts")
        if place not in self._weights:
            self._weights.clear()
            vllm = vllm_experts(self.torch, self.device, self.shape, self.tp)
            wide = 2 * inner if self.shape.use_gated_mlp else inner
            count, hidden = self.shape.num_experts, self.shape.n_embd
            layers = []
            for _ in range(cold_layers(self.shape, self.tp)):
                up, down = self._random(count, wide, hidden), self._random(count, hidden, inner)
                layers.append(vllm.pack(up, down) if vllm else (up.transpose(1, 2), down.transpose(1, 2)))
            self._weights[place] = cycle(layers)
        return self._weights[place]

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
        return self._activation(a, self.shape.n_expanded_embd // self.tp)

    def _shared_act(self, a: int, _: int) -> Call:
        return self._activation(a, self.shape.shared_inter // self.tp)

    def _activation(self, a: int, inner: int) -> Call:
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
        if self.shape.kv_lora_rank:
            return self._latent_decode(a, b)
        heads, kv_heads, size = self._heads
        query, keys, values = self._random(a, heads, 1, size), *(self._random(a, kv_heads, b, size) for _ in "kv")
        return self._attention(query, keys, values, None)

    def _attn_decode_skewed(self, a: int, b: int) -> Call:
        """One request has half of all keys, the others share the rest: in two calls, as one would pad all to it."""
        longest = a * b // 2
        parts = self._attn_decode(1, longest), self._attn_decode(a - 1, max((a * b - longest) // (a - 1), 1))
        return lambda: [part() for part in parts]

    def _attn_prefill(self, a: int, b: int) -> Call:
        if self.shape.kv_lora_rank:
            return self._latent_prefill(a, b)
        heads, kv_heads, size = self._heads
        query = self._random(1, heads, a, size)
        keys, values = (self._random(1, kv_heads, a + b, size) for _ in "kv")
        mask = self.torch.ones(a, a + b, dtype=self.torch.bool, device=self.device).tril(b) if b else None
        return self._attention(query, keys, values, mask, causal=b == 0)

    def _latent_decode(self, a: int, b: int) -> Call:
        """Queries into latent space, attention of all heads to the one cache, values out of it, as vLLM decodes."""
        shape, heads, rank = self.shape, self.shape.n_head // self.tp, self.shape.kv_lora_rank
        into, out = self._random(heads, shape.nope, rank), self._random(heads, rank, shape.v_head_dim)
        query, cache = self._random(a, heads, shape.nope + shape.rope), self._random(a, 1, b, rank + shape.rope)
        attend, cat = self.torch.nn.functional.scaled_dot_product_attention, self.torch.cat

        def compute() -> Any:
            latent = query[..., : shape.nope].transpose(0, 1).bmm(into).transpose(0, 1)
            asked = cat((latent, query[..., shape.nope :]), dim=-1).unsqueeze(1)
            found = attend(asked, cache, cache[..., :rank])
            return found.squeeze(1).transpose(0, 1).bmm(out)

        return compute

    def _latent_prefill(self, a: int, b: int) -> Call:
        """Keys and values of all heads out of the latent ones, and attention to them."""
        shape, heads = self.shape, self.shape.n_head // self.tp
        width = shape.nope + shape.v_head_dim
        up, latent = self._random(heads * width, shape.kv_lora_rank), self._random(a + b, shape.kv_lora_rank)
        query, turned = self._random(1, heads, a, shape.nope + shape.rope), self._random(1, 1, a + b, shape.rope)
        mask = self.torch.ones(a, a + b, dtype=self.torch.bool, device=self.device).tril(b) if b else None
        linear, cat = self.torch.nn.functional.linear, self.torch.cat
        attend = self.torch.nn.functional.scaled_dot_product_attention

        def compute() -> Any:
            wide = linear(latent, up).view(1, a + b, heads, width).transpose(1, 2)
            keys = cat((wide[..., : shape.nope], turned.expand(1, heads, a + b, shape.rope)), dim=-1)
            return attend(query, keys, wide[..., shape.nope :], attn_mask=mask, is_causal=b == 0)

        return compute

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
        if operator == "experts":
            moved += cold_layers(self.shape, self.tp) * bytes_of_experts(self.shape, self.tp)
        return moved + (2.0 * (a + b) * a * (1 + 4 * self._heads[0]) if operator == "attn_prefill" else 0.0)
