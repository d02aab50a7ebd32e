from collections.abc import Callable

import pytest

from windtunnel.deployment import SLO, PercentileLimit, parse_goodput, parse_slo
from windtunnel.errors import InputError, InputWarning


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
        ("ttft", "must be METRIC:TIME"),
        ("ttft:fast", "'fast' is no time"),
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
        ("ttft=0.3", "must be METRIC_pPERCENTILE=TIME"),
        ("ttft_p99=", "must be METRIC_pPERCENTILE=TIME"),
        ("ttft_p101=1", "must be > 0 and ≤ 100"),
        ("ttft_p0=1", "must be > 0 and ≤ 100"),
        ("ttft_p99=-1", "positive number of seconds"),
        ("tftt_p99=1", "did you mean 'ttft'"),
    ],
)
def test_bad_percentile_limits(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_slo([text])


def test_units_are_said_or_the_flags_own() -> None:
    assert parse_goodput(["ttft:0.3s", "tpot:50ms", "e2el:20000"]) == SLO(0.3, 0.05, 20.0)
    assert [limit.seconds for limit in parse_slo(["ttft_p99=300ms", "tpot_p90=0.05s", "itl_p50=0.1"])] == [
        0.3,
        0.05,
        0.1,
    ]


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_goodput, "ttft:0.3", "is 0.3 ms: if you mean 0.3 s, write 0.3s"),
        (parse_slo, "ttft_p99=300", "is 300 s: if you mean 300 ms, write 300ms"),
    ],
)
def test_a_doubtful_number_without_a_unit_is_warned_of(parse: Callable[..., object], text: str, says: str) -> None:
    with pytest.warns(InputWarning, match=says):
        parse([text])
