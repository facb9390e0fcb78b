"""The address at which a server listens. Needs none of the packages of serving."""

from __future__ import annotations

import ipaddress
import socket

from autotune.errors import UserError
from autotune.serve.settings import ServeSettings


def is_local(name: str) -> bool:
    """Whether a name or address means this machine itself."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def listen(settings: ServeSettings) -> tuple[socket.socket, str]:
    """A socket that accepts connections, and its URL.

    Raises:
        UserError: no such address, one that is taken, or one that other machines reach without a key.
    """
    host, port = settings.host, settings.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if settings.api_key is None and not is_local(str(address[0])):
            message = "other machines can reach this address, which needs a key; set AUTOTUNE_API_KEY, or leave it out"
            raise UserError(f"--host {host}: {message}")
        listener = socket.create_server(address[:2], family=family)
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be one
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{host}:{port}: no server can listen ({reason}); choose another --port or --host") from None
    return listener, f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
