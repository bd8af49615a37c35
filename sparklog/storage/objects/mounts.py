"""The file systems of roots, and whether they serialize and sync appends from all processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

SUITED: Final = frozenset(
    ["ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "overlay", "apfs"]
)
"""File systems that serialize and sync appends; `overlay` keeps our files in its upper layer."""
_NETWORK: Final = ["nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "webdav", "9p", "virtiofs"]
_CLUSTER: Final = ["gfs2", "ocfs2", "lustre", "ceph", "glusterfs", "beegfs", "gpfs"]
_EXCHANGE: Final = ["vfat", "msdos", "exfat", "drvfs"]
UNSUITED: Final = frozenset([*_NETWORK, *_CLUSTER, *_EXCHANGE])
"""File systems where concurrent appends may overlap, or syncs may not reach the disk."""

_MOUNTS: Final = Path("/proc/self/mountinfo")


def is_unsuited(type_: str) -> bool:
    """Returns whether a file system is known not to serialize appends, or not to sync them."""
    return type_ in UNSUITED or type_ == "fuse" or type_.startswith("fuse.")


def file_system(root: str) -> str:
    """Returns the type of the file system of a folder that may not exist yet; empty if unknown."""
    folder = Path(root)
    while not folder.is_dir():
        folder = folder.parent
    path = str(folder.resolve())
    try:
        if sys.platform == "darwin":
            told = subprocess.run(
                ["/sbin/mount"], check=True, capture_output=True, text=True, timeout=10
            )
            return type_at(path, mounts_of_macos(told.stdout))
        return type_at(path, mounts_of_linux(_MOUNTS.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, subprocess.SubprocessError):
        return ""


def mounts_of_linux(text: str) -> list[tuple[str, str]]:
    """Returns (mount point, type) for each line of /proc/self/mountinfo, in order."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, types = before.split(" "), after.split(" ")
        if len(fields) > 4 and types[0]:
            point = re.sub(r"\\([0-7]{3})", lambda each: chr(int(each[1], 8)), fields[4])
            found.append((point, types[0]))
    return found


def mounts_of_macos(text: str) -> list[tuple[str, str]]:
    """Returns (mount point, type) for each line that mount(8) prints."""
    return re.findall(r"^.* on (/.*) \((\w+)[,)]", text, re.MULTILINE)


def type_at(path: str, mounts: list[tuple[str, str]]) -> str:
    """Returns the type of the longest mount point above `path`; later mounts hide earlier ones."""
    best, found = -1, ""
    for point, type_ in mounts:
        above = point.rstrip("/")
        if (path == above or path.startswith(above + "/")) and len(above) >= best:
            best, found = len(above), type_
    return found
