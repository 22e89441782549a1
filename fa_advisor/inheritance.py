"""Handing one end of a pipe to a child process, on POSIX and on Windows.

The parent asks for the arguments of `subprocess.Popen` and a token that names the pipe on the
child's command line; the child turns the token back into a file descriptor.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def popen_arguments(*fds: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`subprocess.Popen` arguments that hand down `fds` and no others, and a token for each."""
    if sys.platform == "win32":
        import msvcrt
        import subprocess

        handles = [msvcrt.get_osfhandle(fd) for fd in fds]
        for handle in handles:
            os.set_handle_inheritable(handle, True)
        startupinfo = subprocess.STARTUPINFO(lpAttributeList={"handle_list": handles})
        flags = subprocess.CREATE_NEW_PROCESS_GROUP
        arguments = {"startupinfo": startupinfo, "creationflags": flags}
        return arguments, tuple(map(str, handles))
    return {"pass_fds": fds, "start_new_session": True}, tuple(map(str, fds))


def adopt(token: str, flags: int) -> int:
    """The file descriptor that `token` names; the child's own children won't inherit it."""
    if sys.platform == "win32":
        import msvcrt

        return msvcrt.open_osfhandle(int(token), flags)
    fd = int(token)
    os.set_inheritable(fd, False)
    return fd
