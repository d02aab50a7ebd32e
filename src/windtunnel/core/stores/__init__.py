"""KV stores behind the lanes' own blocks: which chunks of KV each has, and the requests that wait for some."""
