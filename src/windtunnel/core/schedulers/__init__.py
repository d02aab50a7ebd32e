"""The schedulers, one or two files each: what is an engine's own, on the parts that all share."""
