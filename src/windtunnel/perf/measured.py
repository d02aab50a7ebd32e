"""Measured kernels: one question in front of the tables of the kernel database."""

from dataclasses import dataclass, field, replace

from windtunnel.hardware import Device
from windtunnel.perf.answer import Answer
from windtunnel.perf.attention_table import AttentionTable
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.block_sparse_table import BlockSparseTable
from windtunnel.perf.causes import ALL, Causes
from windtunnel.perf.compressed_table import CompressedTable
from windtunnel.perf.convolution_table import ConvolutionTable
from windtunnel.perf.database import Database
from windtunnel.perf.exchange_table import ExchangeTable
from windtunnel.perf.expert_table import ExpertTable
from windtunnel.perf.gemm_table import GemmTable
from windtunnel.perf.hyper_connection_table import HyperConnectionTable
from windtunnel.perf.kernels import (
    Attention,
    BlockSparseAttention,
    Collective,
    CompressedAttention,
    Convolution,
    Elementwise,
    Exchange,
    Experts,
    Gemm,
    HyperConnection,
    Kernel,
    LatentAttention,
    Quantize,
    Recurrence,
    Scan,
    SparseAttention,
)
from windtunnel.perf.kimi_delta_table import KimiDeltaTable
from windtunnel.perf.latent_table import LatentTable
from windtunnel.perf.link_table import LinkTable
from windtunnel.perf.recurrence_table import RecurrenceTable
from windtunnel.perf.sparse_table import SparseTable
from windtunnel.perf.wide_expert_table import WideExpertTable


@dataclass(eq=False)
class Measured:
    """What one database knows about one device. Each table is read when a kernel first needs it."""

    database: Database
    device: Device
    causes: Causes = ALL
    gemms: GemmTable = field(init=False)
    attention: AttentionTable = field(init=False)
    latent: LatentTable = field(init=False)
    experts: ExpertTable = field(init=False)
    wide_experts: WideExpertTable = field(init=False)
    links: LinkTable = field(init=False)
    exchanges: ExchangeTable = field(init=False)
    recurrences: RecurrenceTable = field(init=False)
    convolutions: ConvolutionTable = field(init=False)
    kimi_delta: KimiDeltaTable = field(init=False)
    sparse: SparseTable = field(init=False)
    block_sparse: BlockSparseTable = field(init=False)
    compressed: CompressedTable = field(init=False)
    hyper_connections: HyperConnectionTable = field(init=False)

    def __post_init__(self) -> None:
        self.gemms = GemmTable(self.database, self.device, self.causes)
        self.attention = AttentionTable(self.database, self.device, self.causes)
        self.latent = LatentTable(self.database, self.device, self.gemms, self.causes)
        self.experts = ExpertTable(self.database, self.device, self.causes)
        self.wide_experts = WideExpertTable(self.database, self.device, self.causes)
        self.links = LinkTable(self.database, self.device, self.causes)
        self.exchanges = ExchangeTable(self.database, self.device, self.causes)
        self.recurrences = RecurrenceTable(self.database, self.device)
        self.convolutions = ConvolutionTable(self.database)
        self.kimi_delta = KimiDeltaTable(self.database, self.device, self.causes)
        self.sparse = SparseTable(self.database, self.device)
        self.block_sparse = BlockSparseTable(self.database, self.device, self.causes)
        self.compressed = CompressedTable(self.database, self.device)
        self.hyper_connections = HyperConnectionTable(self.database, self.device)

    def times(self, kernel: Kernel, a: Floats, b: Floats) -> Answer | None:  # noqa: PLR0911, PLR0912 - one per kind
        """Seconds at each point (a > 0), or None where the database has nothing to say about this kind of kernel."""
        match kernel:
            case Gemm():
                return self.gemms.times(kernel, a)
            case Quantize():
                return self.gemms.quantize(kernel, a)
            case Attention():
                return self.attention.times(kernel, a, b)
            case LatentAttention():
                return self.latent.times(kernel, a, b)
            case SparseAttention():
                return self.sparse.times(kernel, a, b)
            case BlockSparseAttention():
                return self.block_sparse.times(kernel, a, b)
            case CompressedAttention():
                return self.compressed.times(kernel, a, b)
            case HyperConnection():
                return self.hyper_connections.times(kernel, a)
            case Recurrence():
                return (self.kimi_delta if kernel.by_channel else self.recurrences).times(kernel, a)
            case Convolution():
                return self.convolutions.times(kernel, a)
            case Experts(layout=""):
                return self.experts.times(kernel, a)
            case Experts():
                found = self.wide_experts.times(kernel, a)
                return self.experts.times(replace(kernel, layout=""), a) if found is None else found
            case Collective():
                return self.links.times(kernel, a)
            case Exchange():
                return self.exchanges.times(kernel, a)
            case Elementwise() | Scan():
                return None
