"""Confines this process for good: no network, no new processes, few files. Linux on x86-64 and 64-bit ARM.

Three mechanisms of the kernel that need no privileges, and also work in containers:

- Landlock lets the process reach only files that are listed, and processes that it started.
- A seccomp filter refuses system calls: sockets that reach others, new processes, signals, debugging,
  mounts, modes and times of files, their observation, files in memory, and what is rarely used and often has
  a hole, such as io_uring and bpf.
- Resource limits bound memory, the size of files and how many are open, as pipes hold memory too.

The filter refuses calls by number. A new system call for sockets would not be known to it, but needs a new
kind of file descriptor, which Landlock does not grant either.

This module needs the standard library only: `remote/` sends its source to machines without hflow.

Numbers: `asm/unistd_64.h`, `asm-generic/unistd.h`, `linux/landlock.h`, `linux/seccomp.h`, `linux/audit.h`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
MAX_OPEN_FILES = 1024
_libc = ctypes.CDLL(None, use_errno=True)


def confine(memory_mb: int, scratch: str, readable: Iterable[str], processes: bool, landlock: bool) -> None:
    """Confine this process and those that it starts.

    Args:
        memory_mb: address space in MiB beyond what the process has now.
        scratch: the directory that it may write to.
        readable: further files and directories that it may read.
        processes: whether it may start processes.
        landlock: whether files are protected.

    Raises:
        OSError: when the kernel refuses.
    """
    _limit_resources(memory_mb)
    _drop_capabilities()
    if landlock:
        _restrict_files(scratch, [*_system_paths(), *readable])
    _refuse_calls(processes, scoped=landlock and _landlock_version() >= _SCOPED)


def missing_filter() -> str | None:
    """Return the reason why there is no filter for this machine; None if there is one."""
    if platform.machine() in _ARCHITECTURES and sys.platform == "linux":
        return None
    return (
        f"a sandbox needs Linux on {' or '.join(_ARCHITECTURES)}, and this is {sys.platform} on "
        f"{platform.machine()}"
    )


def missing_protection() -> str | None:
    """Return the reason why the kernel cannot protect files; None if it can."""
    if _landlock_version() < 1:
        return "this kernel has no Landlock, which protects files (Linux 5.13 or newer, and in its lsm= list)"
    return None


# Resources and capabilities


def _limit_resources(memory_mb: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = {
        resource.RLIMIT_AS: used + memory_mb * MIB,
        resource.RLIMIT_FSIZE: memory_mb * MIB,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_CAPABILITY_VERSION_3 = 0x20080522


def _drop_capabilities() -> None:
    """Give up the privileges of root, also for programs that are started later."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, struct.pack("=6I", 0, 0, 0, 0, 0, 0)), "capset")


# Landlock

_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14  # truncate
_FILE_RIGHTS_BY_VERSION = (0, 2**13 - 1, 2**14 - 1, 2**15 - 1, 2**15 - 1, 2**16 - 1)
"""Landlock's version -> all rights on files that it knows."""
_SCOPED = 6
"""The version (Linux 6.12) since which Landlock keeps signals within what the process has started."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def _landlock_version() -> int:
    """Return the version of Landlock's interface; less than 1 if there is none."""
    return int(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def _restrict_files(scratch: str, readable: Iterable[str]) -> None:
    version = _landlock_version()
    handled = _FILE_RIGHTS_BY_VERSION[min(version, len(_FILE_RIGHTS_BY_VERSION) - 1)]
    network = 0b11 if version >= 4 else 0  # bind and connect
    scoped = 0b11 if version >= _SCOPED else 0  # abstract sockets and signals
    num_fields = 3 if version >= _SCOPED else 2 if version >= 4 else 1
    attributes = struct.pack("=3Q", handled, network, scoped)[: 8 * num_fields]
    rules = _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check(rules, "landlock_create_ruleset")
    rights = dict.fromkeys(readable, _READ) | dict.fromkeys(_DEVICES, _READ_FILE | _WRITE_FILE)
    for path, allowed in {**rights, scratch: handled}.items():
        _allow_path(rules, path, allowed & handled)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow_path(rules: int, path: str, rights: int) -> None:
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, file)
        _check(_libc.syscall(_LANDLOCK_ADD_RULE, rules, 1, rule, 0), "landlock_add_rule")
    finally:
        os.close(file)


def _system_paths() -> list[str]:
    """Return the paths that programs need to run: Python, installed packages and system libraries."""
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [
        *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin"),
        *("/etc/alternatives", "/etc/fonts", "/etc/ssl/certs"),
        *("/etc/group", "/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd"),
        *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"),
        *(sys.prefix, sys.base_prefix, sys.exec_prefix, *packages),
    ]


# seccomp


@dataclass(frozen=True)
class _Architecture:
    """A processor's name in the kernel's audit records, and its numbers of system calls."""

    audit: int
    refused: tuple[int, ...]
    kill: tuple[int, ...]
    """`kill`, `tkill`, `tgkill`, `rt_sigqueueinfo` and `rt_tgsigqueueinfo`."""
    start: tuple[int, ...]
    """`fork`, `vfork`, `execve` and `execveat`."""
    clone: int
    prlimit: int
    socketpair: int
    open: tuple[tuple[int, int], ...]
    """`open` and `openat`, each with the place of its flags among the arguments."""
    commands: tuple[tuple[int, tuple[int, ...]], ...]
    """`fcntl` and `ioctl`, each with commands that name a process which a file then signals, or tell it what
    others do with files."""


_COMMON = (
    *(424, 438),  # pidfd_send_signal, pidfd_getfd
    *(425, 426, 427),  # io_uring
    *(428, 429, 430, 431, 432, 433, 442),  # mount interface of new kernels
    *(452, 463, 466),  # fchmodat2, setxattrat, removexattrat
    *(467, 468, 469),  # open_tree_attr, file_getattr, file_setattr
    *(440, 448, 447),  # process_madvise, process_mrelease, memfd_secret
)
"""Numbers that all architectures share."""
_OF_FCNTL = (8, 15, 1024, 1026)  # F_SETOWN, F_SETOWN_EX, F_SETLEASE, F_NOTIFY
_OF_IOCTL = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP
_X86_64 = _Architecture(
    0xC000003E,
    (
        *_COMMON,
        *(41, 29, 30, 31, 64, 68, 240),  # socket, System V memory, semaphores and queues, mq_open
        *(101, 310, 311, 312),  # ptrace, process_vm_readv, process_vm_writev, kcmp
        *(76, 90, 91, 268, 92, 93, 94, 260),  # truncate, chmod and chown in all forms
        *(188, 189, 190, 197, 198, 199),  # setxattr and removexattr
        *(165, 166, 161, 155, 272, 308, 133, 259),  # mount, chroot, unshare, setns, mknod
        *(321, 298, 250, 248, 249, 323, 304, 303),  # bpf, perf_event_open, keys, userfaultfd, file handles
        *(246, 320, 175, 313, 176, 169, 167, 168, 172, 173),  # kexec, modules, reboot, swap, ioperm, iopl
        *(141, 142, 144, 203, 251, 314),  # priorities and processors of other processes
        *(256, 279),  # migrate_pages, move_pages
        *(132, 235, 261, 280),  # times of files: utime, utimes, futimesat, utimensat
        *(253, 254, 294, 300, 301),  # inotify and fanotify
        319,  # memfd_create: its memory is in no limit
    ),
    kill=(62, 200, 234, 129, 297),
    start=(57, 58, 59, 322),
    clone=56,
    prlimit=302,
    socketpair=53,
    open=((2, 1), (257, 2)),
    commands=((72, _OF_FCNTL), (16, _OF_IOCTL)),
)
_ARM_64 = _Architecture(
    0xC00000B7,
    (
        *_COMMON,
        *(198, 194, 195, 196, 190, 186, 180),
        *(117, 270, 271, 272),
        *(45, 52, 53, 54, 55),
        *(5, 6, 7, 14, 15, 16),
        *(40, 39, 51, 41, 97, 268, 33),
        *(280, 241, 219, 217, 218, 282, 265, 264),
        *(104, 294, 105, 273, 106, 142, 224, 225),
        *(140, 118, 119, 122, 30, 274),
        *(238, 239),
        88,
        *(26, 27, 262, 263),
        279,
    ),
    kill=(129, 130, 131, 138, 240),
    start=(221, 281),
    clone=220,
    prlimit=261,
    socketpair=199,
    open=((56, 2),),
    commands=((25, _OF_FCNTL), (29, _OF_IOCTL)),
)
_ARCHITECTURES: Mapping[str, _Architecture] = {"x86_64": _X86_64, "aarch64": _ARM_64}
_CLONE3, _OPENAT2 = 435, 437
_CLONE_THREAD = 0x10000
_X32_BIT = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
"""Offsets in `struct seccomp_data`; of the arguments, the lower halves, 8 bytes from one to the next."""
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def _refuse_calls(processes: bool, scoped: bool) -> None:
    """Install the filter. Programs in it are lists of (code, jump if true, jump if false, value).

    `scoped`: Landlock refuses signals to processes that this one has not started.
    """
    machine = _ARCHITECTURES[platform.machine()]
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_BIT),
        refuse,
        # The flags of clone3 and openat2 cannot be seen. Without them, the C library uses clone and openat.
        (_EQUAL, 1, 0, _CLONE3),
        (_EQUAL, 0, 1, _OPENAT2),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        # Connected streams only: a datagram can be sent to any socket of a file.
        (_EQUAL, 0, 7, machine.socketpair),
        (_LOAD, 0, 0, _ARGUMENT_0),
        (_EQUAL, 0, 4, socket.AF_UNIX),
        (_LOAD, 0, 0, _ARGUMENT_1),
        (_AND, 0, 0, 0xF),
        (_EQUAL, 0, 1, socket.SOCK_STREAM),
        allow,
        refuse,
        # Limits of this process only.
        (_EQUAL, 0, 4, machine.prlimit),
        (_LOAD, 0, 0, _ARGUMENT_0),
        (_EQUAL, 0, 1, 0),
        allow,
        refuse,
    ]
    if not processes:
        program += [
            (_EQUAL, 0, 4, machine.clone),
            (_LOAD, 0, 0, _ARGUMENT_0),
            (_HAS_BITS, 0, 1, _CLONE_THREAD),
            allow,
            refuse,
        ]
    if not (processes and scoped):
        for number in machine.kill:  # only itself, as `abort` does
            program += [
                (_EQUAL, 0, 4, number),
                (_LOAD, 0, 0, _ARGUMENT_0),
                (_EQUAL, 0, 1, os.getpid()),
                allow,
                refuse,
            ]
    for number, place in machine.open:  # a file that is not opened to write is emptied all the same
        program += [
            (_EQUAL, 0, 6, number),
            (_LOAD, 0, 0, _ARGUMENT_0 + 8 * place),
            (_AND, 0, 0, os.O_TRUNC | os.O_ACCMODE),
            (_EQUAL, 1, 0, os.O_TRUNC | os.O_RDONLY),
            (_EQUAL, 0, 1, os.O_TRUNC | os.O_ACCMODE),
            refuse,
            allow,
        ]
    for number, commands in machine.commands:
        program += [
            (_EQUAL, 0, len(commands) + 3, number),
            (_LOAD, 0, 0, _ARGUMENT_1),
            *((_EQUAL, len(commands) - i, 0, command) for i, command in enumerate(commands)),
            allow,
            refuse,
        ]
    for number in (*machine.refused, *(() if processes else machine.start)):
        program += [(_EQUAL, 0, 1, number), refuse]
    program.append(allow)
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")


def _check(result: int, call: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
