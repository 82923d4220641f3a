"""Start the dashboard: replace this process by Streamlit, on loopback by default and without telemetry."""

import os
import socket
import sys
from pathlib import Path

from common.errors import ConfigError

APP = Path(__file__).with_name("server.py")
_SETTINGS = {
    "server.headless": "true",  # open no browser
    "server.fileWatcherType": "none",
    "server.runOnSave": "false",
    "browser.gatherUsageStats": "false",
    "client.toolbarMode": "minimal",
    "client.showErrorDetails": "none",  # a stack trace belongs in the log
    "theme.base": "light",
    # Streamlit greys captions to 60 % of the text's colour and tints what is chosen: these keep a contrast of 4.5.
    "theme.textColor": "#000000",
    "theme.primaryColor": "#1f5fa8",
    "theme.codeTextColor": "#000000",
}


def arguments(host: str, port: int) -> list[str]:
    """Streamlit's command line. Raises `ConfigError` if it could not listen there."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"the dashboard cannot listen on {host}:{port} ({error}); choose another --port") from None
    settings = _SETTINGS | {"server.address": host, "server.port": str(port)}
    return [
        *(sys.executable, "-m", "streamlit", "run", str(APP)),
        *(part for name, value in settings.items() for part in (f"--{name}", value)),
    ]


def serve(host: str, port: int) -> None:
    """Become the Streamlit server; does not return."""
    command = arguments(host, port)
    os.execv(command[0], command)
