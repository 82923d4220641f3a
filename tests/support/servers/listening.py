"""The addresses on which a process and its children listen."""

import psutil


def listening(pid: int) -> set[str]:
    """The addresses on which process `pid` or a descendant accepts connections."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or (connection.type.name == "SOCK_DGRAM" and not connection.raddr)
    }
