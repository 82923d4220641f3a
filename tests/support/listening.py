"""Where a process and its children listen."""

import psutil


def listening(pid: int) -> set[str]:
    """The addresses on which process `pid` or a descendant takes connections."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {
        one.laddr.ip
        for process in family
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN or (one.type.name == "SOCK_DGRAM" and not one.raddr)
    }
