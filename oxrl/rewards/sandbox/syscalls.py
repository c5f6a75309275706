"""The system calls that a sandboxed program may make, as a seccomp filter; all others are refused.

No listed call starts a process or thread, executes a file, opens a socket, signals another process, or inspects one.
Refused calls fail with EPERM, which the program may handle.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_LOAD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


class _Argument(NamedTuple):
    """Argument `number` must have one of the `allowed` values in the bits of `mask`."""

    number: int
    allowed: tuple[int, ...]
    mask: int = 0xFFFFFFFF


class _Call(NamedTuple):
    """Numbers on x86_64 and aarch64, and what its arguments must be."""

    x86_64: int | None
    aarch64: int | None
    arguments: tuple[_Argument, ...] = ()


def _open_flags(index: int) -> tuple[_Argument]:
    """Truncation (0x200) only with the access modes 1 and 2, which write.

    Landlock checks the right to write only for these: with the mode 0 or 3 a file would be emptied on kernels before
    6.2, where truncation itself is not checked.
    """
    return (_Argument(index, (0, 1, 2, 3, 0x201, 0x202), 0x203),)


_MEMORY = {
    "mmap": _Call(9, 222),
    "mprotect": _Call(10, 226),
    "munmap": _Call(11, 215),
    "brk": _Call(12, 214),
    "mremap": _Call(25, 216),
    "madvise": _Call(28, 233),
}
# Not listed, because Landlock does not check them by path (truncation: before kernel 6.2): truncate, utimensat, chmod,
# chown and extended attributes.
_FILES = {
    "read": _Call(0, 63),
    "write": _Call(1, 64),
    "open": _Call(2, None, _open_flags(1)),
    "close": _Call(3, 57),
    "stat": _Call(4, None),
    "fstat": _Call(5, 80),
    "lstat": _Call(6, None),
    "lseek": _Call(8, 62),
    "pread64": _Call(17, 67),
    "pwrite64": _Call(18, 68),
    "readv": _Call(19, 65),
    "writev": _Call(20, 66),
    "access": _Call(21, None),
    "pipe": _Call(22, None),
    "dup": _Call(32, 23),
    "dup2": _Call(33, None),
    "fsync": _Call(74, 82),
    "fdatasync": _Call(75, 83),
    "ftruncate": _Call(77, 46),
    "getdents": _Call(78, None),
    "getcwd": _Call(79, 17),
    "chdir": _Call(80, 49),
    "fchdir": _Call(81, 50),
    "rename": _Call(82, None),
    "mkdir": _Call(83, None),
    "rmdir": _Call(84, None),
    "creat": _Call(85, None),
    "unlink": _Call(87, None),
    "readlink": _Call(89, None),
    "umask": _Call(95, 166),
    "getdents64": _Call(217, 61),
    "openat": _Call(257, 56, _open_flags(2)),
    "mkdirat": _Call(258, 34),
    "newfstatat": _Call(262, 79),
    "unlinkat": _Call(263, 35),
    "renameat": _Call(264, 38),
    "readlinkat": _Call(267, 78),
    "faccessat": _Call(269, 48),
    "fallocate": _Call(285, 47),
    "dup3": _Call(292, 24),
    "pipe2": _Call(293, 59),
    "preadv": _Call(295, 69),
    "pwritev": _Call(296, 70),
    "renameat2": _Call(316, 276),
    "copy_file_range": _Call(326, 285),
    "statx": _Call(332, 291),
    "close_range": _Call(436, 436),
    "faccessat2": _Call(439, 439),
    # F_SETOWN and F_SETSIG, and FIOSETOWN below, could send any signal to any process
    "fcntl": _Call(72, 25, (_Argument(1, (0, 1, 2, 3, 4, 5, 6, 7, 1030)),)),  # duplicates, flags, record locks
    # is it a terminal, its size, flags
    "ioctl": _Call(16, 29, (_Argument(1, (0x5401, 0x5413, 0x5421, 0x5450, 0x5451)),)),
}
# asyncio wakes itself through a pair of connected stream sockets of the family "unix", which reach nothing else. No
# flags: out-of-band data on them has been a way out of other sandboxes.
_SOCKET_PAIR = {
    "socketpair": _Call(53, 199, (_Argument(0, (1,)), _Argument(1, (1,), ~0x80800 & 0xFFFFFFFF))),
    "sendto": _Call(44, 206, (_Argument(3, (0,)),)),
    "recvfrom": _Call(45, 207, (_Argument(3, (0,)),)),
}
_WAIT = {
    "poll": _Call(7, None),
    "select": _Call(23, None),
    "sched_yield": _Call(24, 124),
    "pause": _Call(34, None),
    "nanosleep": _Call(35, 101),
    "futex": _Call(202, 98),
    "restart_syscall": _Call(219, 128),
    "clock_nanosleep": _Call(230, 115),
    "epoll_wait": _Call(232, None),
    "epoll_ctl": _Call(233, 21),
    "pselect6": _Call(270, 72),
    "ppoll": _Call(271, 73),
    "epoll_pwait": _Call(281, 22),
    "eventfd2": _Call(290, 19),
    "epoll_create1": _Call(291, 20),
}
_SELF = {
    "rt_sigaction": _Call(13, 134),
    "rt_sigprocmask": _Call(14, 135),
    "rt_sigreturn": _Call(15, 139),
    "getitimer": _Call(36, 102),
    "alarm": _Call(37, None),
    "setitimer": _Call(38, 103),
    "getpid": _Call(39, 172),
    "exit": _Call(60, 93),
    "uname": _Call(63, 160),
    "gettimeofday": _Call(96, 169),
    "getrlimit": _Call(97, 163),
    "getrusage": _Call(98, 165),
    "sysinfo": _Call(99, 179),
    "times": _Call(100, 153),
    "getuid": _Call(102, 174),
    "getgid": _Call(104, 176),
    "geteuid": _Call(107, 175),
    "getegid": _Call(108, 177),
    "getppid": _Call(110, 173),
    "sigaltstack": _Call(131, 132),
    "gettid": _Call(186, 178),
    "time": _Call(201, None),
    "sched_getaffinity": _Call(204, 123),
    "clock_gettime": _Call(228, 113),
    "clock_getres": _Call(229, 114),
    "exit_group": _Call(231, 94),
    "set_robust_list": _Call(273, 99),
    "prlimit64": _Call(
        302, 261, (_Argument(0, (0,)),)
    ),  # for the process itself; lowered limits cannot be raised again
    "getcpu": _Call(309, 168),
    "getrandom": _Call(318, 278),
    "membarrier": _Call(324, 283),
    "rseq": _Call(334, 293),
}
ALLOWED = {**_MEMORY, **_FILES, **_SOCKET_PAIR, **_WAIT, **_SELF}
_CLONE3 = 435  # fails with ENOSYS, so that libc falls back to `clone`, which fails with EPERM
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = tuple(_ARCHITECTURES)


def seccomp_filter(machine: str) -> bytes:
    """The BPF program for one of `MACHINES`; calls of any other architecture kill the process."""
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_IF_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    for call in ALLOWED.values():
        number = call.x86_64 if machine == "x86_64" else call.aarch64
        if number is not None:
            program += _rule(number, call)
    program += [
        _instruction(_JUMP_IF_EQUAL, _CLONE3, 0, 1),
        _instruction(_RETURN, _REFUSE | _ENOSYS),
        _instruction(_RETURN, _REFUSE | _EPERM),
    ]
    return b"".join(program)


def _rule(number: int, call: _Call) -> list[bytes]:
    checks: list[bytes] = []
    for argument in call.arguments:
        count = len(argument.allowed)
        # The filter loads 32 bits: the lower half of the argument, on both of these little-endian machines.
        checks += [
            _instruction(_LOAD, _FIRST_ARGUMENT + 8 * argument.number),
            _instruction(_AND, argument.mask),
            *[_instruction(_JUMP_IF_EQUAL, value, count - i, 0) for i, value in enumerate(argument.allowed)],
            _instruction(_RETURN, _REFUSE | _EPERM),
        ]
    return [_instruction(_JUMP_IF_EQUAL, number, 0, len(checks) + 1), *checks, _instruction(_RETURN, _ALLOW)]


def _instruction(code: int, value: int, if_equal: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_equal, otherwise, value)
