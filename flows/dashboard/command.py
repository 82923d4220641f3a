"""Start the dashboard: replace this process with Streamlit, on loopback by default and without telemetry."""

import os
from importlib.util import find_spec
from pathlib import Path

from nautile.common.errors import ConfigError
from nautile.common.extras import how_to_install
from nautile.common.processes import listen, module_command

APP = Path(__file__).with_name("server.py")
_SETTINGS = {
    "server.headless": "true",  # open no browser
    # An installed package does not change, and a watcher would follow every file of the environment.
    "server.fileWatcherType": "none",
    "server.runOnSave": "false",
    "browser.gatherUsageStats": "false",
    "client.toolbarMode": "minimal",
    "client.showErrorDetails": "none",  # stack traces only in the log
    # Two themes and no `theme.base`: the browser's preference (prefers-color-scheme) chooses. Streamlit draws captions
    # with 60 % of the text colour and tints selections: these colours keep a contrast of 4.5.
    "theme.light.primaryColor": "#1f5fa8",
    "theme.light.textColor": "#000000",
    "theme.light.codeTextColor": "#000000",
    "theme.dark.primaryColor": "#1f5fa8",
    "theme.dark.textColor": "#ffffff",
    "theme.dark.backgroundColor": "#0e1117",  # that of the cards and of the heads of tables
    "theme.dark.secondaryBackgroundColor": "#1d232d",
    "theme.dark.codeTextColor": "#ffffff",
}


def arguments(host: str, port: int) -> list[str]:
    """Streamlit's command line. Raises `ConfigError` if it is not installed, or the address is not available."""
    if find_spec("streamlit") is None:
        raise ConfigError(f"the dashboard needs the package streamlit: {how_to_install('streamlit')}")
    # Streamlit would search for the next free port without a word.
    listen(host, port).close()
    settings = _SETTINGS | {"server.address": host, "server.port": str(port)}
    return [
        *module_command("streamlit", "run", str(APP)),
        *(part for name, value in settings.items() for part in (f"--{name}", value)),
    ]


def serve(command: list[str]) -> None:
    """Replace this process with the Streamlit server of `arguments`; does not return."""
    # The process that `nautile up` has recorded is then the server itself, and signals reach it.
    os.execv(command[0], command)
