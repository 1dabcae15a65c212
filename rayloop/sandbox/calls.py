"""System calls by name: (number on x86_64, number on aarch64), from the kernel's asm/unistd_64.h and asm-generic/unistd.h."""

from __future__ import annotations

from collections.abc import Mapping

Number = tuple[int | None, int | None]

# fmt: off
ALWAYS: Mapping[str, Number] = {  # for computing, drawing and reading
    # its own memory
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233),
    "msync": (26, 227), "membarrier": (324, 283),
    # its own threads, signals and clocks
    "futex": (202, 98), "rseq": (334, 293), "set_robust_list": (273, 99), "set_tid_address": (218, 96), "sched_yield": (24, 124),
    "getcpu": (309, 168), "gettid": (186, 178), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "restart_syscall": (219, 128), "pause": (34, None),
    "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "getrusage": (98, 165), "exit": (60, 93), "exit_group": (231, 94), "arch_prctl": (158, None),
    # who and where it is
    "getpid": (39, 172), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
    "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "getpgrp": (111, None),
    "uname": (63, 160), "sysinfo": (99, 179), "getcwd": (79, 17), "umask": (95, 166),
    "getrlimit": (97, 163), "getrandom": (318, 278),
    # files, as far as Landlock and the mounts leave them
    "open": (2, None), "openat": (257, 56), "openat2": (437, 437), "close": (3, 57), "close_range": (436, 436), "read": (0, 63),
    "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68), "preadv": (295, 69),
    "pwritev": (296, 70), "lseek": (8, 62), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24), "fstat": (5, 80), "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None),
    "readlinkat": (267, 78), "getdents": (78, None), "getdents64": (217, 61),
    # waiting, and pipes of its own
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "eventfd": (284, None), "eventfd2": (290, 19), "pipe": (22, None), "pipe2": (293, 59),
    "recvfrom": (45, 207), "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205),
}
WRITING: Mapping[str, Number] = {  # where it has a folder of its own
    "chdir": (80, 49), "fchdir": (81, 50), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "creat": (85, None),
    "ftruncate": (77, 46), "fallocate": (285, 47), "fsync": (74, 82), "fdatasync": (75, 83),
    "sendfile": (40, 71), "copy_file_range": (326, 285), "statfs": (137, 43),
}
CONDITIONAL: Mapping[str, Number] = {  # what their arguments must be: rayloop/sandbox/seccomp.py
    "clone": (56, 220), "clone3": (435, 435), "tgkill": (234, 131), "kill": (62, 129), "prctl": (157, 167), "prlimit64": (302, 261),
    "ioctl": (16, 29), "fcntl": (72, 25), "socketpair": (53, 199), "sendto": (44, 206),
    "getpgid": (121, 155), "getsid": (124, 156), "sched_getaffinity": (204, 123), "getsockopt": (55, 209),
}
SOCKET: Number = (41, 198)
OF_ADMINISTRATORS: Mapping[str, Number] = {  # no program of a desktop needs them
    # large parts of the kernel that programs of a desktop do not use
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "userfaultfd": (323, 282),
    "bpf": (321, 280), "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "personality": (135, 92), "modify_ldt": (154, None), "vhangup": (153, 58), "quotactl": (179, 60), "syslog": (103, 116),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # other processes' memory and descriptors
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # the machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "ioperm": (173, None), "iopl": (172, None),
}
# fmt: on
