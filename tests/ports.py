"""TCP ports of 127.0.0.1 for servers that tests and benches start later."""

import socket

_reservations = []


def reserved_port():
    """Returns a port that the kernel gives to no other socket while this process runs, because a socket is bound to it
    that never listens. Connections to it are refused until a server listens there; the server must set SO_REUSEADDR,
    as the stores of PyTorch and Cadre, MPI, Slurm and etcd do."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    _reservations.append(reservation)
    return reservation.getsockname()[1]
