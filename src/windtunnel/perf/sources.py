"""Sources: where the times of kernels come from, by the words of ``--perf``."""

from windtunnel.deployment import Pool
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.predictor import Predictor, predictor


def predictor_from(pool: Pool, source: str = "auto", corrections: Corrections = ALL) -> Predictor:
    """The predictor of a pool: ``profile:FOLDER``, or one of the predictor's CHOICES.

    Raises InputError for another name, for ``measured`` without data, and for a profile that does not fit.
    """
    if source.startswith("profile:"):
        from windtunnel.perf.profile.source import profile_predictor  # reads CSV files, which few runs have

        return profile_predictor(pool, source)
    return predictor(pool, source, corrections)
