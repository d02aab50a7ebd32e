"""State space layers (Mamba-2): a state of fixed size per request instead of a cache."""

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_not_negative, require_positive
from windtunnel.model.mixer import Mixer


@dataclass(frozen=True)
class StateSpace(Mixer):
    """Mamba-2 (state space duality, arXiv 2405.21060): projection in, causal convolution, scan, gated norm, projection
    out. A head's state is ``head_dim`` × ``state_dim`` numbers."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    """Groups of heads that share what is written into the state and how it is read (B and C)."""
    conv_kernel: int
    """Tokens that the causal convolution in front of the scan sees."""
    chunk_size: int
    """Tokens of a prompt that are multiplied together; the state passes from chunk to chunk."""
    state_bytes_per_element: int = 0
    """Of the kept state (``mamba_ssm_cache_dtype``); 0: the model's dtype."""
    conv_bias: bool = True
    bias: bool = False
    """Both projections have one."""

    def __post_init__(self) -> None:
        require_positive(
            "state space layer",
            mamba_num_heads=self.num_heads,
            mamba_head_dim=self.head_dim,
            ssm_state_size=self.state_dim,
            n_groups=self.num_groups,
            conv_kernel=self.conv_kernel,
            chunk_size=self.chunk_size,
        )
        require_not_negative("state space layer", state_bytes_per_element=self.state_bytes_per_element)
        if self.num_heads % self.num_groups:
            raise InputError(f"mamba_num_heads={self.num_heads}: must be a multiple of n_groups={self.num_groups}")

    @property
    def groups(self) -> tuple[str, int, bool]:
        """Those of its heads; GPUs may share them."""
        return "groups of state space heads", self.num_groups, True

    def groups_per_gpu(self, tensor_parallel_size: int) -> int:
        """Groups of one GPU; they are replicated when there are more GPUs than groups."""
        return max(1, self.num_groups // tensor_parallel_size)

    def inner(self, tensor_parallel_size: int = 1) -> int:
        """Width of the heads of one GPU together."""
        return self.num_heads // tensor_parallel_size * self.head_dim

    def channels(self, tensor_parallel_size: int = 1) -> int:
        """Channels of one GPU's convolution: the heads' inputs, B and C."""
        shared = self.groups_per_gpu(tensor_parallel_size) * self.state_dim
        return self.inner(tensor_parallel_size) + 2 * shared

    def projected(self, tensor_parallel_size: int = 1) -> int:
        """Columns of one GPU's projection in: the channels, a gate as wide as the heads, a time step for each head."""
        tp = tensor_parallel_size
        return self.channels(tp) + self.inner(tp) + self.num_heads // tp

    def state_bytes(self, element_bytes: int, tensor_parallel_size: int = 1) -> int:
        """Bytes of one request's state on one GPU: the scan's, and the convolution's last tokens; ``element_bytes`` is
        that of the model's dtype."""
        tp = tensor_parallel_size
        scanned = self.inner(tp) * self.state_dim * (self.state_bytes_per_element or element_bytes)
        return scanned + self.channels(tp) * (self.conv_kernel - 1) * element_bytes

    def scratch_elements(self, element_bytes: int, tensor_parallel_size: int) -> float:
        """The projection, the convolution's channels, the scan's result with its gated norm, and the states of all
        chunks before and after they are passed on, in 32 bits (ssd_combined.py in
        vllm/model_executor/layers/mamba/ops)."""
        tp = tensor_parallel_size
        states = 2 * self.inner(tp) * self.state_dim * 4 / element_bytes / self.chunk_size
        return self.projected(tp) + self.channels(tp) + 2 * self.inner(tp) + states

    def parameters(self, hidden_size: int, tensor_parallel_size: int = 1) -> dict[str, int]:
        """Parameters that one GPU holds, by part; ``qkv`` is the projection in with the convolution, ``norm`` the gated
        norm with three numbers for each head (decay, step, skip)."""
        tp = tensor_parallel_size
        columns = self.projected(tp)
        convolution = self.channels(tp) * (self.conv_kernel + self.conv_bias)
        return {
            "qkv": hidden_size * columns + columns * self.bias + convolution,
            "out": self.inner(tp) * hidden_size + hidden_size * self.bias,
            "norm": self.inner(tp) + 3 * self.num_heads // tp,
        }
