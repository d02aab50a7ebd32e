"""Prefill and decode pools: a request leaves a lane when its prompt is computed, and joins another one with its KV."""
