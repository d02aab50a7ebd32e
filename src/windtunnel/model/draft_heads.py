"""Draft heads: small models that draft for a large one (EAGLE-3, arXiv 2503.01840).

An EAGLE-3 head is one decoder layer in 16 bits. It takes an embedding and a hidden state side by side, twice the
model's width; the first hidden state is a projection of three of the model's. Its own output head knows the most
frequent tokens alone; the embedding is the model's (llama_eagle3.py in vllm/model_executor/models).
"""

from dataclasses import replace
from typing import NamedTuple

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.model.layers import MLA, MLP, Attention, Layer
from windtunnel.model.mixer import Mixer
from windtunnel.model.quantization import DTYPE_BYTES
from windtunnel.model.spec import Model, padded

KIND = "eagle3"
"""What the name of such a head has in it."""
OWN_LATENT = "-mla"
"""Of the name of one that attends as its model does, in latent space."""
VOCABULARY = 32_000
"""Tokens of its output head (``draft_vocab_size`` of nearly all that are published)."""
FUSED = 3
"""Hidden states of the model that are projected to the first one."""
WIDTH = 2
"""Its layer's input over the hidden size."""


class Published(NamedTuple):
    """Sizes of a published head."""

    name: str
    """In the head's name, in lower case."""
    heads: int
    kv_heads: int
    intermediate: int
    """0: that of the model's own dense layers."""


PUBLISHED = (
    Published("minimax-m3-eagle3-gqa", 64, 4, 0),
    Published("minimax-m3-eagle3", 64, 64, 0),
    Published("kimi-k2", 64, 64, 18432),
    Published("deepseek", 56, 8, 40960),
    Published("qwen3-235b", 64, 4, 24576),
)
"""Heads of 128 numbers (configs of sgl-project/SpecForge; NVIDIA/TensorRT-LLM #17406 for MiniMax-M3)."""
HEAD_DIM = 128
USUAL_WIDTH = 4
"""Intermediate size over the hidden size where neither is published, nor has the model dense layers (SpecForge
#494)."""


@dataclass(frozen=True)
class DraftHead:
    """A head, as large as its name says or as its model is."""

    layer: Layer
    hidden_size: int
    vocab_size: int

    def weight_bytes(self, tensor_parallel_size: int) -> int:
        """Bytes on one GPU: the projection of hidden states whole, everything else divided."""
        tp, hidden = tensor_parallel_size, self.hidden_size
        attention = self.layer.attention
        assert attention is not None and isinstance(self.layer.mlp, MLP)
        parts = attention.parameters(WIDTH * hidden, tp)
        out = attention.parameters(hidden, tp)["out"]
        numbers = FUSED * hidden**2 + parts["qkv"] + out + self.layer.mlp.parameters(hidden, tp)
        return DTYPE_BYTES["bfloat16"] * (numbers + padded(self.vocab_size, tp) * hidden)

    def as_model(self, model: Model) -> Model:
        """One layer and an output head, without an embedding, in 16 bits."""
        return Model(
            name=f"draft of {model.name}",
            architecture="LlamaForCausalLMEagle3",
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            layers=((1, self.layer),),
            max_position_embeddings=model.max_position_embeddings,
            embeds=False,
        )


def draft_head(model: Model, name: str) -> DraftHead:
    """The head of this name for a model. Raises InputError for a draft that is no EAGLE-3 head."""
    plain = name.rstrip("/").rsplit("/", 1)[-1].lower()
    if KIND not in plain.replace("-", "").replace("_", ""):
        raise InputError(
            f"speculative_model={name!r}: only EAGLE-3 heads are simulated, whose names say so; leave it out, and the "
            "model's own prediction layer stands for it"
        )
    known = next((each for each in PUBLISHED if each.name in plain), None)
    dense = max((layer.mlp.intermediate_size for _, layer in model.layers if isinstance(layer.mlp, MLP)), default=0)
    width = (known.intermediate if known else 0) or dense or USUAL_WIDTH * model.hidden_size
    layer = Layer(_attention(model, plain, known), MLP(width))
    return DraftHead(layer, model.hidden_size, min(VOCABULARY, model.vocab_size))


def _attention(model: Model, name: str, known: Published | None) -> Mixer:
    """As published, or as the model's own."""
    mixers = [layer.attention for _, layer in reversed(model.layers)]
    latent = next((mixer for mixer in mixers if isinstance(mixer, MLA)), None)
    if latent is not None and (OWN_LATENT in name or known is None):
        return replace(latent, index_heads=0, index_head_dim=0, index_top_k=0)
    if known is not None:
        return Attention(known.heads, known.kv_heads, HEAD_DIM)
    own = next((mixer for mixer in mixers if isinstance(mixer, Attention)), None)
    if own is None:
        raise InputError(f"speculative_model={name!r}: is not known for {model.name}: leave it out")
    return Attention(own.num_heads, own.num_kv_heads, own.head_dim)
