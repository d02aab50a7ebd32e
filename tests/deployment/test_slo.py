import pytest

from windtunnel.deployment import SLO, PercentileLimit, parse_goodput, parse_slo
from windtunnel.errors import InputError


def test_goodput_limits_are_milliseconds_as_in_vllm() -> None:
    slo = parse_goodput(["ttft:300", "tpot:50.5"])
    assert slo == SLO(ttft=0.3, tpot=0.0505)
    assert slo.limits == {"ttft": 0.3, "tpot": 0.0505}
    assert slo
    assert not parse_goodput([])


def test_percentile_limits_are_seconds() -> None:
    assert parse_slo(["ttft_p99=0.3", "itl_p99.9=0.1"]) == (
        PercentileLimit("ttft", 99, 0.3),
        PercentileLimit("itl", 99.9, 0.1),
    )
    assert SLO(percentiles=parse_slo(["queue_p50=1"]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft", "must be METRIC:MILLISECONDS"),
        ("ttft:fast", "'fast' is not a number"),
        ("ttft:0", "positive number of seconds"),
        ("ttft:nan", "positive number of seconds"),
        ("ttfb:300", "did you mean 'ttft'"),
    ],
)
def test_bad_goodput_limits(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_goodput([text])


def test_a_goodput_metric_has_one_limit() -> None:
    with pytest.raises(InputError, match="ttft is given twice"):
        parse_goodput(["ttft:300", "ttft:200"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft=0.3", "must be METRIC_pPERCENTILE=SECONDS"),
        ("ttft_p99=", "must be METRIC_pPERCENTILE=SECONDS"),
        ("ttft_p101=1", "must be > 0 and ≤ 100"),
        ("ttft_p0=1", "must be > 0 and ≤ 100"),
        ("ttft_p99=-1", "positive number of seconds"),
        ("tftt_p99=1", "did you mean 'ttft'"),
    ],
)
def test_bad_percentile_limits(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_slo([text])
