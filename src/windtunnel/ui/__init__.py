"""A page that simulates while its sliders are dragged, with the figures of ``windtunnel run``."""
