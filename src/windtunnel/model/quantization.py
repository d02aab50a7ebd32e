"""Which parts of a model are stored in fewer bits, and how many bytes a weight then takes."""

from dataclasses import dataclass, replace

from windtunnel.errors import InputError, unknown

PARTS = ("qkv", "out", "mlp", "experts", "shared_experts", "lm_head")
"""The parts of a model that quantisation may cover; router, embedding and norms always keep the model's dtype."""

LINEARS = frozenset(PARTS) - {"lm_head"}
EXPERTS = frozenset({"experts"})

METHODS: dict[str, tuple[float, int]] = {
    "fp8": (1.0, 0),
    "fp8_block": (1.0, 128 * 128),
    "nvfp4": (0.5, 16),
    "mxfp4": (0.5, 32),
    "mxfp8": (1.0, 32),
    "int4": (0.5, 128),
    "int8": (1.0, 0),
}
"""Method -> (bytes per weight without scales, weights that share a scale; 0: a whole channel or tensor does)."""

SCALE_BYTES = {"fp8_block": 4, "nvfp4": 1, "mxfp4": 1, "mxfp8": 1, "int4": 2}
"""fp32 per 128×128 block (DeepSeek-V3), e4m3 per 16 (NVFP4), e8m0 per 32 (OCP MX, 4 and 8 bits), 16 bits per group
(GPTQ, AWQ)."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

KV_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class Quantization:
    """Quantised weights: ``method`` on ``parts``."""

    method: str
    """``fp8`` (scale per tensor or channel), ``fp8_block`` (per 128×128), ``nvfp4``, ``mxfp4``, ``mxfp8``, ``int4``,
    ``int8``."""
    parts: frozenset[str] = LINEARS
    """Of ``PARTS``."""
    group_size: int = 0
    """Weights that share a scale; 0: the method's own, see ``METHODS``."""
    kv_cache_dtype: str | None = None
    """The KV cache's dtype where the checkpoint fixes one."""
    weight_only: bool = False
    """Activations stay in 16 bits (W4A16, W8A16)."""
    static_activations: bool = False
    """The checkpoint holds the scales of activations: they are cast without looking for their largest value."""
    beside: "Quantization | None" = None
    """How other parts are stored, in a checkpoint of mixed precision."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("quantization method", self.method, METHODS)
        for part in self.parts:
            if part not in PARTS:
                raise unknown("part of a model", part, PARTS)
        if self.group_size < 0:
            raise InputError(f"group_size={self.group_size}: must be ≥ 0")
        if self.kv_cache_dtype is not None:
            kv_bytes(self.kv_cache_dtype)

    def of(self, part: str) -> "Quantization | None":
        """How a part is stored; None: in the model's dtype."""
        if part in self.parts:
            return self
        return self.beside.of(part) if self.beside else None

    @property
    def formats(self) -> tuple["Quantization", ...]:
        """All of them, each without the others."""
        return (replace(self, beside=None), *(self.beside.formats if self.beside else ()))

    @property
    def methods(self) -> str:
        """The methods of all of them, for people."""
        return " + ".join(dict.fromkeys(each.method for each in self.formats))

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one weight with its share of the scale."""
        size, group = METHODS[self.method]
        group = self.group_size or group
        return size + (SCALE_BYTES[self.method] / group if self.method in SCALE_BYTES else 0.0)


def kv_bytes(dtype: str) -> int:
    """Bytes of one number in a KV cache of this dtype. Raises InputError for an unknown one."""
    if dtype not in KV_DTYPE_BYTES:
        raise unknown("kv_cache_dtype", dtype, ["auto", *KV_DTYPE_BYTES])
    return KV_DTYPE_BYTES[dtype]
