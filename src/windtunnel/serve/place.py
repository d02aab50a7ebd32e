"""Where a server listens."""

import socket

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError


@dataclass(frozen=True)
class Place:
    """An address of this machine."""

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = 8000
    """Port to listen at; 0: any that is free."""

    def bind(self) -> socket.socket:
        """The open socket. Raises InputError for a place that cannot be had."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            found.close()
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"port={self.port}: cannot listen at {self.host} ({reason}): choose another") from error
        return found
