"""Tables of flags: each word stands in one place, and the commands that are written use no other."""

import pytest

from windtunnel.launch.table import ENGINES, environment, table


@pytest.mark.parametrize("engine", ENGINES)
def test_a_flag_stands_in_one_place(engine: str) -> None:
    known = table(engine)
    for flag in known.used:
        assert flag not in known.ignored and flag not in known.also, flag
    assert not set(known.ignored) & set(known.lacking)
    assert all(known.name(flag) == flag for flag in known.used)
    assert all(
        other in {*known.used, *known.ignored, *known.lacking} or "." not in other for other in known.also.values()
    )


def test_spellings() -> None:
    vllm = table("vllm")
    for spelled in ("--tensor_parallel_size", "-tp", "--tensor-parallel", "tensor-parallel-size"):
        assert vllm.name(spelled) == "tensor-parallel-size"
    assert vllm.name("-cc.cudagraph_mode") == "compilation-config.cudagraph-mode"
    assert vllm.negated("no-enable-prefix-caching") == "enable-prefix-caching"
    assert vllm.negated("no-such-thing") is None
    assert table("sglang").name("--tp") == "tp-size"


def test_what_is_off_or_usual_changes_nothing() -> None:
    vllm = table("vllm")
    assert vllm.meaning("enable-lora", False).state == "ignored"
    assert vllm.meaning("offload-group-size", 4).state == "not_simulated"
    assert vllm.meaning("moe-backend", "auto").state == "ignored"
    assert vllm.meaning("moe-backend", "triton").state == "used"
    assert vllm.meaning("attention-config.use-trtllm-attention", True).kernel
    assert vllm.meaning("attention-backend", "FLASHINFER").state == "used"
    assert vllm.meaning("decode-context-parallel-size", 1).state == "ignored"
    assert vllm.meaning("prefill-context-parallel-size", 2).state == "used"
    assert vllm.meaning("frobnicate", 1).note == "not known to windtunnel"


def test_variables() -> None:
    prefixes, known = environment()
    assert "SGLANG_SIMULATE_ACC_LEN".startswith(prefixes)
    assert known.meaning("SGLANG_SIMULATE_ACC_LEN", "2").state == "used"
    assert known.meaning("VLLM_RPC_TIMEOUT", "2").state == "ignored"
    assert known.meaning("VLLM_ANY_KERNEL", "1").kernel
