"""Hypothesis draws the same cases in every quick run; whoever asks for more cases (WINDTUNNEL_EQUALITY_CASES) gets new
ones."""

import os

from hypothesis import settings

settings.register_profile("same_cases", derandomize=True, database=None)
if int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100")) <= 100:
    settings.load_profile("same_cases")
