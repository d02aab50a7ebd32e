"""Selective scans (Mamba-1): a state of fixed size for each channel of a request instead of a cache."""

from windtunnel.dataclass import dataclass
from windtunnel.errors import require_not_negative, require_positive
from windtunnel.model.mixer import Mixer


@dataclass(frozen=True)
class SelectiveScan(Mixer):
    """Mamba-1 (arXiv 2312.00752): projection in, causal convolution, projection to time steps, B and C, scan,
    projection out. Each of ``inner`` channels has a state of ``state_dim`` numbers."""

    inner: int
    state_dim: int
    step_rank: int
    """Width of the projection from which the channels' time steps come (``mamba_dt_rank``)."""
    conv_kernel: int
    """Tokens that the causal convolution in front of the scan sees."""
    normalised: bool = False
    """Time steps, B and C are normalised (Jamba)."""
    state_bytes_per_element: int = 0
    """Of the kept state (``mamba_ssm_cache_dtype``); 0: the model's dtype."""
    conv_bias: bool = True
    bias: bool = False
    """The projections in and out have one."""

    def __post_init__(self) -> None:
        require_positive(
            "selective scan",
            mamba_expand=self.inner,
            mamba_d_state=self.state_dim,
            mamba_dt_rank=self.step_rank,
            mamba_d_conv=self.conv_kernel,
        )
        require_not_negative("selective scan", state_bytes_per_element=self.state_bytes_per_element)

    @property
    def num_heads(self) -> int:  # type: ignore[override]  # counted, not kept
        """Channels, which are divided over GPUs."""
        return self.inner

    @property
    def controls(self) -> int:
        """What a token says about the scan: its time step in ``step_rank`` numbers, B and C; on every GPU alike."""
        return self.step_rank + 2 * self.state_dim

    def state_bytes(self, element_bytes: int, tensor_parallel_size: int = 1) -> int:
        """Bytes of one request's state on one GPU: the scan's, and the convolution's last tokens; ``element_bytes`` is
        that of the model's dtype."""
        channels = self.inner // tensor_parallel_size
        scanned = self.state_dim * (self.state_bytes_per_element or element_bytes)
        return channels * (scanned + (self.conv_kernel - 1) * element_bytes)

    def scratch_elements(self, element_bytes: int, tensor_parallel_size: int) -> float:  # noqa: ARG002
        """Both halves of the projection in, the convolution's channels, their time steps and the scan's result."""
        return 5 * self.inner / tensor_parallel_size + self.controls

    def parameters(self, hidden_size: int, tensor_parallel_size: int = 1) -> dict[str, int]:
        """Parameters that one GPU holds, by part; ``qkv`` is the projection in with the convolution, and those to time
        steps, B and C; ``norm`` the decays and the skip of each channel, and the norms of what a token says."""
        channels = self.inner // tensor_parallel_size
        convolution = channels * (self.conv_kernel + self.conv_bias)
        steps = channels * (self.controls + self.step_rank + 1)
        return {
            "qkv": hidden_size * 2 * channels + 2 * channels * self.bias + convolution + steps,
            "out": channels * hidden_size + hidden_size * self.bias,
            "norm": channels * (self.state_dim + 1) + self.controls * self.normalised,
        }
