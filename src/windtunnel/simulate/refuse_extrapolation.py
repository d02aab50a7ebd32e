"""Strict: refuse what the kernel data do not hold, instead of modelling it."""

from windtunnel.errors import InputError
from windtunnel.simulate.run import Run


def refuse_extrapolation(run: Run, beyond: float) -> None:
    """Raise InputError if the batch times of a run are beyond the kernel data.

    ``beyond`` is the share of its time beyond the ends of tables (``metrics.uncertainty``).

    They are where a pool's device or engine has no tables, where those of another engine version answered, and where a
    kernel of the run was asked beyond the ends of its table or took the efficiency of another shape. What no table of
    any device holds (norms, copies, chunks with context, host work) is modelled all the same, and no reason to refuse.
    """
    for pool, origins in zip(run.manifest["pools"], run.manifest["provenance"], strict=True):
        first = origins[0]
        if first["source"] != "kernel database":
            raise InputError(f"strict: kernel times of {pool['device']} would be modelled: {first['reason']}")
        if first["version_rule"] != "exact":
            raise InputError(
                f"strict: the kernel database has no {first['backend']} {first['wanted']} on {first['system']}: ask "
                f"for what it has, kernel_version={first['version']}"
            )
    if beyond > 0:
        raise InputError(
            f"strict: {beyond:.2%} of the batch time is beyond the kernel data: `windtunnel explain` names the "
            "operators; leave out strict, or choose another model, parallelism or batch limits"
        )
