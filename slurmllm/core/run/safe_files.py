"""Files in folders that other users can write to: opened without a trap, and read within limits.

A shared file system and the disks of the nodes hold what other users put there: links to somebody
else's files, pipes that block whoever opens them, files without end, folders that have the name of
ours. Trusted is what belongs to the user of this process, or to the group that the cluster profile
names; what runs code (compiled graphs, environments) is used only if it is trusted. All checks are
made on the open descriptor, because a path can be replaced between a check and its use.

Every refusal is an OSError with the reason as `strerror`, so that callers need no other handling
than for a disk that refuses.
"""

from __future__ import annotations

import errno
import getpass
import glob
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

# Bytes of a record or a YAML file; the largest, a checkpoint's manifest of 8,192 workers, has 4 MB.
LARGEST_RECORD = 1 << 26
LONGEST_LINE = 1 << 20  # of a record in a file of lines; a step's metrics have 500 bytes
LFS_POINTER = b"version https://git-lfs"
LFS_REASON = "a Git LFS pointer, not the file; fetch it with `git lfs pull`"
_MAX_LINKS = 40  # on a path, as in the kernel
# Without O_NONBLOCK, opening a pipe waits for its other end; for regular files it has no effect.
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# O_DIRECTORY: without it, an automounter's folder is not mounted.
_FOLDER = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY


def open_regular(path: Path, *, follow: bool = True) -> BufferedReader:
    """Open a regular file to read it, without waiting for the writer of a pipe.

    Another user's link may lead to files of that user and to those of root that everybody may read:
    what is read of any other file could end up where that user can read it.

    Args:
        follow: Whether `path` itself may be a symbolic link.
    """
    target = path
    owners = list[int]()  # of links
    while True:
        try:
            descriptor = os.open(target, os.O_RDONLY | _SAFE)
            break
        except OSError as error:
            error.filename = str(path)
            if error.errno != errno.ELOOP or not follow or len(owners) == _MAX_LINKS:
                raise
        with suppress(NotADirectoryError):  # replaced by a file since
            link, owner = _read_link(target)
            target = target.parent / link
            owners.append(owner)
    info = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        is_public = info.st_uid == 0 and info.st_mode & stat.S_IROTH
        for owner in owners:
            if owner != info.st_uid and _is_foreign(owner) and not is_public:
                reason = f"a link of {user_name(owner)} to a file of {user_name(info.st_uid)}"
                raise PermissionError(errno.EPERM, reason, str(path))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_limited(
    path: Path, limit: int = LARGEST_RECORD, *, trusted: bool = False, group: str | None = None
) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; OSError if it is larger.

    Args:
        trusted: Whether only this user, root and the members of `group` may have written it.
    """
    with open_trusted(path, group) if trusted else open_regular(path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", str(path))
    if content.startswith(LFS_POINTER):
        raise OSError(errno.ENODATA, LFS_REASON, str(path))
    return content


def read_lines(stream: BinaryIO, longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """Yield the lines of a file; OSError if one has more than `longest` bytes."""
    while line := stream.readline(longest + 1):
        _require_length(len(line), longest)
        yield line


def read_pieces(stream: BinaryIO, size: int, longest: int) -> Iterator[bytes]:
    """Yield pieces of whole lines, each of about `size` bytes (at most `longest`).

    Raises OSError if a line has more than `longest` bytes.
    """
    while piece := stream.read(size):
        begin = piece.rfind(b"\n") + 1  # of the line that the piece ends in, or of the next
        piece += stream.readline(longest + 1)
        _require_length(len(piece) - begin, longest)
        yield piece


def _require_length(length: int, longest: int) -> None:
    if length > longest:
        raise OSError(errno.EFBIG, f"a line of more than {longest:,} bytes")


def os_error_text(error: Exception) -> str:
    """Return why a file cannot be read or written, and whose it is if permission is denied."""
    if not isinstance(error, OSError):
        return str(error)
    reason = error.strerror or str(error)
    if error.errno != errno.EACCES or error.filename is None:
        return reason
    path = Path(os.fsdecode(error.filename)).absolute()
    for entry in (path, *path.parents):  # in a closed folder not even the owner is known
        with suppress(OSError):
            return f"{reason}; {entry} belongs to {user_name(entry.lstat().st_uid)}"
    return reason


def open_trusted(path: Path, group: str | None = None) -> BufferedReader:
    """Open a regular file, no link, that only trusted users can have written; OSError else.

    Args:
        group: Name of the group whose members are trusted too; None: nobody else.
    """
    stream = open_regular(path, follow=False)
    if error := untrusted_error(os.fstat(stream.fileno()), group):
        stream.close()
        raise PermissionError(errno.EPERM, error, str(path))
    return stream


def untrusted_error(info: os.stat_result, group: str | None = None) -> str | None:
    """Return why other users may have written a file or folder; None if it is trusted.

    It must belong to this user, to root, or to a member of a group that the caller trusts; and
    nobody else may write. The file's own group proves nothing: in a setgid folder it is the
    folder's.
    """
    if not _is_trusted(info.st_uid, group):
        allowed = "you" if group is None else f"you or the group {group}"
        return f"it belongs to {user_name(info.st_uid)}, not to {allowed}"
    if writers := _other_writers(info, group):
        return f"{writers} may write to it"
    return None


def _is_trusted(uid: int, group: str | None) -> bool:
    """Return whether a user is this one, root, or a member of a group that the caller trusts."""
    if uid in (0, os.geteuid()):
        return True
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return False
    return group_id(group) in os.getgrouplist(user.pw_name, user.pw_gid)


def _other_writers(info: os.stat_result, group: str | None) -> str:
    """Return who else may write to a file or folder, such as `every user`; empty if nobody may."""
    if info.st_mode & stat.S_IWOTH:
        return "every user"
    if not info.st_mode & stat.S_IWGRP or info.st_gid == group_id(group):
        return ""
    try:
        owner = grp.getgrgid(info.st_gid)
        user = pwd.getpwuid(os.geteuid())
    except KeyError:
        return f"the group {info.st_gid}"
    # This user's own group without other members, as Debian and Red Hat make it.
    is_private = user.pw_gid == info.st_gid and owner.gr_name == user.pw_name and not owner.gr_mem
    return "" if is_private else f"the group {owner.gr_name}"


def open_folder(path: Path) -> int:
    """Return a descriptor of a folder, which is made if it is missing.

    On the way a link is followed only if it is this user's or root's: whoever may write to a shared
    folder could else have files written into any other folder.

    Raises:
        OSError: Another user's link, or the file system refuses.
    """
    names = [*reversed(path.absolute().parts)]
    num_links = 0
    folder = os.open("/", _FOLDER)
    try:
        while names:
            name = names.pop()
            try:
                with suppress(FileNotFoundError):
                    folder = _enter(folder, name)
                    continue
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
                folder = _enter(folder, name)
            except NotADirectoryError:
                target, owner = _read_link(name, folder)
                num_links += 1
                if num_links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, "too many links") from None
                if _is_foreign(owner):
                    raise PermissionError(
                        errno.EPERM,
                        f"{name} is a link of {user_name(owner)}; remove it, or name the folder "
                        "that it leads to",
                    ) from None
                names += reversed(target.parts)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        error.filename = str(path)  # of the call it is a single name
        raise
    finally:
        os.close(folder)


def _enter(folder: int, name: str) -> int:
    """Return a descriptor of a folder in another one, whose descriptor is closed."""
    inside = os.open(name, _FOLDER, dir_fd=folder)
    os.close(folder)
    return inside


def _read_link(name: str | Path, folder: int | None = None) -> tuple[Path, int]:
    """Return the target of a link and its owner; NotADirectoryError if it is none."""
    link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        info = os.fstat(link)
        if not stat.S_ISLNK(info.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{name} is not a folder", str(name))
        return Path(os.readlink("", dir_fd=link)), info.st_uid
    finally:
        os.close(link)


def write_whole(path: Path, content: bytes, mode: int = 0o644, *, durable: bool = True) -> None:
    """Write a file under a name that nobody can guess, and rename it.

    Args:
        durable: Whether it must survive a crash of the machine: with fsync of file and folder.
    """
    # In the same folder: rename is atomic only within a file system.
    temporary = f".{path.name}.{os.urandom(4).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
    with _parent_folder(path) as folder:
        descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fchmod(descriptor, mode)
                if durable:
                    os.fsync(descriptor)
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        if durable:
            os.fsync(folder)


@contextmanager
def _parent_folder(path: Path) -> Iterator[int]:
    """Open the folder of a file; errors of the block name the file's path, not its name alone."""
    folder = open_folder(path.parent)
    try:
        yield folder
    except OSError as error:
        error.filename = str(path)
        del error.filename2  # with None the message would end in `-> None`
        raise
    finally:
        os.close(folder)


def write_error(folder: Path) -> str | None:
    """Return why nothing can be written into a folder, by a file without a name; None if it can."""
    import tempfile  # here and below: a command that does not need them starts sooner

    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(bytes(4096))
            os.fsync(probe.fileno())  # NFS reports a full disk no sooner
    except OSError as error:
        return f"cannot write {folder}: {error.strerror or error}"
    return None


def make_own_folder(path: Path, group: str | None = None) -> None:
    """Make a folder that only trusted users may write to; OSError if it is another one."""
    folder = open_folder(path)
    try:
        if error := untrusted_error(os.fstat(folder), group):
            raise PermissionError(errno.EPERM, error, str(path))
    finally:
        os.close(folder)


def read_tail(path: Path, size: int) -> list[str]:
    """Return the lines in the last bytes of a file; raises OSError."""
    with open_regular(path) as stream:
        stream.seek(max(0, stream.seek(0, 2) - size))
        return stream.read().decode("utf-8", errors="replace").splitlines()


def open_append(path: Path) -> int:
    """Return a descriptor that appends to a file; neither it nor its folder is another's link."""
    return _open_in_folder(path, os.O_WRONLY | os.O_APPEND)


def open_update(path: Path) -> int:
    """Return a descriptor to change this user's own file in place, made if it is missing."""
    return _check_own(_open_in_folder(path, os.O_RDWR), path)


def open_lock(path: Path) -> BinaryIO:
    """Open this user's own lock file, made if it is missing; never through a link."""
    return os.fdopen(_check_own(os.open(path, os.O_RDWR | os.O_CREAT | _SAFE, 0o600), path), "r+b")


def _open_in_folder(path: Path, flags: int) -> int:
    with _parent_folder(path) as folder:
        return os.open(path.name, flags | os.O_CREAT | _SAFE, 0o644, dir_fd=folder)


def _check_own(descriptor: int, path: Path) -> int:
    info = os.fstat(descriptor)
    if stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and info.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    if not info.st_nlink:
        raise FileNotFoundError(errno.ENOENT, "removed while it was opened", str(path))
    raise PermissionError(
        errno.EPERM,
        f"not a file of its own, or not yours: it belongs to {user_name(info.st_uid)}",
        str(path),
    )


def make_private_folder(path: Path) -> Path:
    """Return this user's own folder: `path`, or one next to it where somebody else took the name.

    The folder has mode 0700. Whoever uses it later calls `check_private_folder` again. The name of
    the second one cannot be guessed; it is found and used again.
    """
    import tempfile

    try:
        path.mkdir(mode=0o700)
        return path
    except FileExistsError:
        # mkdtemp adds eight characters.
        second_names = sorted(path.parent.glob(f"{glob.escape(path.name)}-????????"))
    for candidate in (path, *second_names):
        with suppress(OSError):
            check_private_folder(candidate)
            return candidate
    return Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))


def check_private_folder(path: Path) -> None:
    """Refuse a folder that is a link, is not this user's, or that others may enter."""
    info = path.lstat()
    if info.st_uid != os.geteuid() or info.st_mode & ~0o7700 != stat.S_IFDIR:
        raise PermissionError(
            errno.EPERM,
            f"not a folder for you alone: {stat.filemode(info.st_mode)}, it belongs to "
            f"{user_name(info.st_uid)}",
            str(path),
        )


def replaceable_error(folder: Path, group: str | None = None) -> str | None:
    """Return why users outside a trusted group may replace a folder, one above it, or a file in it.

    None if they may not.
    """
    path = folder.resolve()
    for entry in (path, *path.parents):
        info = entry.stat()
        # A sticky bit does not stop the owner.
        if _is_foreign(info.st_uid) and not _is_trusted(info.st_uid, group):
            return f"{entry} belongs to {user_name(info.st_uid)}, who may replace what is in it"
        # With a sticky bit, as /tmp has it, only owners rename and remove.
        writers = _other_writers(info, group)
        if writers and not info.st_mode & stat.S_ISVTX:
            return (
                f"{writers} may replace what is in {entry}, which has mode "
                f"{stat.S_IMODE(info.st_mode):o} and no sticky bit (`chmod +t {entry}`)"
            )
    return None


def _is_foreign(uid: int) -> bool:
    """Return whether an owner is neither this user nor root, of this container or outside it."""
    if uid in (0, os.geteuid()):
        return False
    # A container shows an owner of outside, such as root, as the overflow id.
    overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    mapped_ids = int(Path("/proc/self/uid_map").read_text().split()[2])
    return uid != overflow or mapped_ids == 2**32 - 1


def user_name(uid: int) -> str:
    """`mallory (uid 1001)`, or `uid 1001` if this machine does not know it."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def login_name() -> str:
    """Return the user's name, or the user id if neither environment nor passwd has a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an OSError from Python 3.13 on
        return str(os.geteuid())


def group_id(name: str | None) -> int | None:
    """Return the id of a group; None if this machine does not know it: nobody is in it."""
    try:
        return None if name is None else grp.getgrnam(name).gr_gid
    except KeyError:
        return None
