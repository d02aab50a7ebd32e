"""Terms: how everything that is compared is simulated."""

from dataclasses import dataclass, replace

from windtunnel.deployment import Deployment, Pool
from windtunnel.overheads import ENGINE_CLOCK, ClientPath, Overheads
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.run import Run
from windtunnel.simulate import simulate
from windtunnel.strict import refuse_extrapolation
from windtunnel.workload.columns import Workload


@dataclass(frozen=True)
class Terms:
    """The same for every run and row."""

    perf: str = "auto"
    """Where kernel times come from, as of ``simulate``."""
    overheads: Overheads = ENGINE_CLOCK
    """Of a calibration."""
    strict: bool = False
    """Refuse what is beyond the kernel data."""
    corrections: Corrections = ALL
    client_path: bool = True
    """A client's clock includes its path; off in an ablation."""

    def run(self, pool: Pool, workload: Workload, client_clock: bool, stream_interval: int = 1) -> Run:
        """Simulate on the clock of the engine or of the client, with the usual path where none was calibrated.

        ``stream_interval``: tokens of a streamed event; so many times fewer keep server and client busy.
        Raises InputError for what cannot be simulated, or is beyond the data.
        """
        usual = ClientPath(per_sequence=ClientPath.per_sequence / stream_interval)
        seen = (self.overheads.client or usual) if client_clock and self.client_path else None
        overheads = replace(self.overheads, client=seen)
        run = simulate(Deployment((pool,)), workload, perf=self.perf, overheads=overheads, corrections=self.corrections)
        if self.strict:
            refuse_extrapolation(run)
        return run


PLAIN = Terms()
"""Everything as a run has it."""
