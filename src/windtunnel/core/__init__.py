"""The schedulers compiled: lazy decode clock and exact fast-forward. Equal to ``windtunnel.reference``, bit for bit."""
