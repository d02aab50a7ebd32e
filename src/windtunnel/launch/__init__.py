"""Launch lines: what starts a real server, read as settings: a command, a script, a manifest, of three engines."""

from windtunnel.launch.reading import Reading, Word, read_flags, read_line
from windtunnel.launch.sources import read_source
from windtunnel.launch.table import table

__all__ = ["Reading", "Word", "read_flags", "read_line", "read_source", "table"]
