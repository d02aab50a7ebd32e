"""How long a batch takes: operators of a model, the sources that time them, and tables of the answers.

Simulations look up ``batch_times``, of a pipeline ``stage_times``. ``tabulate`` fills them: it turns a pool into
operators and asks each at the knots of the tables. ``kernel`` and its ``kinds`` say what an operator costs at least and
how it was measured, ``database`` reads the measurements, ``between`` interpolates them, and ``predictor`` takes them or
the roofline. ``explain`` shows one batch operator by operator.
"""

from pathlib import Path

from windtunnel.errors import InputError, nearest

CHOICES = ("auto", "measured", "modelled", "roofline")
"""auto: measured where possible, modelled elsewhere. measured: an error where the device has no measurements. modelled:
the roofline with the efficiencies of a similar device. roofline: the theoretical bound, perfect kernels and no host.
Besides these there is ``profile:FOLDER``, see ``sources``."""

OF_FOLDER = "profile:"
"""What stands before the folder of a profile."""


def require_source(perf: str) -> None:
    """Raise InputError, before anything is simulated, for a source of kernel times that there is not."""
    if perf.startswith(OF_FOLDER):
        folder = perf.removeprefix(OF_FOLDER)
        if not folder or not Path(folder).is_dir():
            raise InputError(f"profile {folder!r}: no such folder; write one with windtunnel profile")
    elif perf not in CHOICES:
        hint = nearest(perf, CHOICES)
        said = f"did you mean {hint!r}?" if hint else f"must be {', '.join(CHOICES)} or profile:FOLDER"
        raise InputError(f"perf={perf!r}: {said}")
