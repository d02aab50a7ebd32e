"""How long a batch takes: operators of a model, the sources that time them, and tables of the answers.

Simulations look up ``batch_times``, of a pipeline ``stage_times``. ``tabulate`` fills them: it turns a pool into
operators and asks each at the knots of the tables. ``kernel`` and its ``kinds`` say what an operator costs at least and
how it was measured, ``database`` reads the measurements, ``between`` interpolates them, and ``predictor`` takes them or
the roofline. ``explain`` shows one batch operator by operator.
"""

CHOICES = ("auto", "measured", "modelled", "roofline")
"""auto: measured where possible, modelled elsewhere. measured: an error where the device has no measurements. modelled:
the roofline with the efficiencies of a similar device. roofline: the theoretical bound, perfect kernels and no host.
Besides these there is ``profile:FOLDER``, see ``sources``."""
