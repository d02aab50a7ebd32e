"""Host memory for the real tree of SGLang (HiCache) without a device: what its controller moves is moved at once.

The tree, its nodes and the rules of what is copied, given up and brought back are the engine's. Copies and loads are
acknowledged before anything else happens, where the engine keeps a node from eviction until they are.
"""

import importlib
from types import SimpleNamespace
from typing import Any


class HostPool:
    """Indices of a number of tokens."""

    def __init__(self, tokens: int) -> None:
        torch = importlib.import_module("torch")
        self.torch, self.left = torch, torch.arange(tokens)
        self.anchor_entry = SimpleNamespace(
            host_pool=SimpleNamespace(shared_allocation_domain=None), host_evict_fn=None
        )

    def available_size(self) -> int:
        """Tokens."""
        return len(self.left)

    def alloc(self, count: int) -> Any:
        """So many indices, None where there are fewer."""
        if count > len(self.left):
            return None
        found, self.left = self.left[:count], self.left[count:]
        return found

    def free(self, indices: Any, pool: Any = None) -> None:  # noqa: ARG002 - as the engine calls it
        """Take indices back."""
        self.left = self.torch.cat((self.left, indices))


class Controller:
    """In place of the engine's cache controller."""

    def __init__(self, pool: HostPool, allocator: Any, policy: str) -> None:
        self.mem_pool_host, self.allocator, self.write_policy = pool, allocator, policy
        self.ack_write_queue: list[Any] = []
        self.ack_load_queue: list[Any] = []
        self.enable_storage = False
        self.pp_prefetch_command_group = None

    def write(self, device_indices: Any, **_: Any) -> Any:
        """Where the copy is."""
        return self.mem_pool_host.alloc(len(device_indices))

    def load(self, host_indices: Any, **_: Any) -> Any:
        """Where the tokens are on the device."""
        return self.allocator.alloc(len(host_indices))

    def start_writing(self) -> None:
        """All is written."""

    def start_loading(self) -> int:
        """All is there."""
        return -1


def add_host_memory(s: Any, tokens: int, policy: str) -> None:
    """Put so many tokens of host memory behind a scheduler's tree."""
    tree = s.tree_cache
    pool = HostPool(tokens)
    tree.cache_controller = Controller(pool, s.token_to_kv_pool_allocator, policy)
    tree.host_pool_group, tree.host_memory_mode = pool, "cache"
    tree.load_back_threshold = 10
    for component in tree.components.values():
        component._full_kv_pool_host = pool
    tree.tree_core.set_hicache_enabled()
    tree.write_through_threshold = 1 if policy == "write_through" else 2
    tree.is_write_back = policy == "write_back"
    copy, load = tree._execute_and_commit_kv_backup, tree.load_back

    def copied(*arguments: Any, **named: Any) -> int:
        written: int = copy(*arguments, **named)
        for node in list(tree.ongoing_write_through):
            tree._finish_write_through_ack(node)
        return written

    def loaded(*arguments: Any, **named: Any) -> bool:
        found: bool = load(*arguments, **named)
        for key in list(tree.ongoing_load_back):
            node, lock, host_lock = tree.ongoing_load_back.pop(key)
            tree.dec_lock_ref(node, lock)
            tree.dec_host_lock_ref(node, host_lock)
            tree.tree_core.finish_load_back(node)
        return found

    tree._execute_and_commit_kv_backup, tree.load_back = copied, loaded
    tree.check_hicache_events = lambda: None
    s.enable_hierarchical_cache = True
    s.policy.enable_hierarchical_cache = True
