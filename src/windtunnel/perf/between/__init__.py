"""Between measured points: how times are interpolated over one axis or two."""
