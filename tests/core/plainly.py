"""Files of small cases that run without the compiler: seconds, where their kernels take minutes to compile. The random
cases of the same schedulers run with it."""

PLAINLY = (
    "schedulers/test_sglang_order.py",
    "schedulers/test_sglang_overlap.py",
    "schedulers/test_sglang_radix.py",
    "schedulers/test_sglang_rules.py",
    "schedulers/test_vllm_v0_caching.py",
    "schedulers/test_vllm_v0_chunked.py",
    "test_theory_pipelines.py",
)
