"""On PYTHONPATH, this makes every Python process of a run log its network connections in $NAUTILE_SOCKETS.

A line each: `start PROGRAM`, or `connect`, `sendto` or `lookup` with the address. Seen by the interpreter's audit hook
before the call; sockets that C code opens by itself are not.
"""

import os
import sys

_KINDS = {"socket.connect": "connect", "socket.sendto": "sendto", "socket.sendmsg": "sendto"}
_KINDS |= {"socket.getaddrinfo": "lookup", "socket.gethostbyname": "lookup"}

if os.environ.get("NAUTILE_SOCKETS"):
    _file = os.open(os.environ["NAUTILE_SOCKETS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _write(kind: str, what: object) -> None:
        os.write(_file, f"{kind} {what!r} in {os.getpid()}\n".encode())

    def _on_event(event: str, arguments: tuple) -> None:
        if event in _KINDS:
            _write(_KINDS[event], arguments[0] if _KINDS[event] == "lookup" else arguments[1])

    _write("start", " ".join(sys.orig_argv))
    sys.addaudithook(_on_event)
