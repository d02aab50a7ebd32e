"""A second, readable writing of the unified scheduler and prefill and decode pools: plain objects, step by step,
which tests compare the core with. Not shipped."""
